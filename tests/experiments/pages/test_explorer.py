"""The explorer: estimators compared with the closed forms, and the page in a browser."""

import contextlib
import html.parser
import io
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import browse, chromium

from experiments.lab.store import direct
from experiments.pages.explorer import formulas, panels, simulated
from experiments.pages.explorer.panels import PANELS
from sail_jax.cli import main as cli
from theory import deep_linear as dl
from theory.claims import all_claims

pytest.importorskip("bokeh")

GRID = simulated.TINY
# Each step of a function that is not compiled as a whole is compiled by itself, which takes longer.
WHOLE = {panel.name: jax.jit(panel.function) for panel in PANELS}


class Parts(html.parser.HTMLParser):
    """Collects what a page loads, and the JSON inside it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.json, self.inside, self.ids = [], "", False, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.inside = tag == "script" and attrs.get("type") == "application/json"
        self.loads += [v for k, v in attrs.items() if k in ("src", "href", "srcset", "data")]
        self.ids += [attrs["id"]] if "id" in attrs else []

    def handle_data(self, data):
        self.json += data if self.inside else ""


def sizes(grid):
    course = len(grid.depth) + len(grid.time) - 1
    return {name: len(v) for name, v in grid._asdict().items() if isinstance(v, tuple)} | {
        "course": course
    }


def fakes(grid):
    """Random means and errors."""
    numbers, size = np.random.default_rng(0), sizes(grid)
    return {
        kind + way: numbers.random([size[axis] for axis in axes.split()])
        for way, axes in simulated.AXES.items()
        for kind in ("", "error of ", "gain of ", "error of gain of ")
    }


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A page around random estimates, and these."""
    out, patch = tmp_path_factory.mktemp("explorer") / "page.html", pytest.MonkeyPatch()
    out.write_text('<meta name="generator" content="sail-jax explore">')  # may be replaced
    with patch.context() as m:
        m.setattr(simulated, "compute", lambda grid, key, stage: fakes(grid))
        assert cli.main(["explore", "--quick", "--out", str(out)]) == 0
    assert [*out.parent.iterdir()] == [out]
    return out.read_text(), fakes(GRID)


@pytest.mark.slow
def test_a_page_stands_alone_and_is_read_in_order(quick):
    text, estimates = quick
    assert len(text.encode()) < 6e6
    parts = Parts(text)
    assert parts.loads == []
    assert "default-src 'none'" in text[:4000]
    assert "unsafe-eval" not in text[:4000]
    held = json.loads(parts.json)["estimates"]
    assert held.keys() == estimates.keys()
    for name, values in estimates.items():
        np.testing.assert_allclose(held[name], values.ravel(), rtol=1e-3)
    order = [parts.ids.index(name) for name in ("map", "n", "theta", "nearest", "details", "noise")]
    assert order == sorted(order)


def test_what_cannot_be_written_is_refused_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulated, "compute", lambda *_: pytest.fail("computed"))
    other = tmp_path / "other.html"
    other.write_text("mine")
    for out, why in (
        (other, "is not an explorer"),
        (tmp_path / "no" / "page", "is not a directory"),
    ):
        assert cli.main(["explore", "--out", str(out)]) == 2
        assert why in capsys.readouterr().err
    assert other.read_text() == "mine"
    assert cli.main(["explore", "--seed", "-1"]) == 2
    assert "--seed: expected an integer from 0" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "bokeh", None)
    for name in [m for m in sys.modules if m.startswith("bokeh.") or m.endswith("explorer.view")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("experiments.pages.explorer.view", raising=False)
    assert cli.main(["explore", "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'sail-jax[explore]'" in said


@pytest.mark.parametrize(("ci", "ends"), [("true", pytest.fail), ("", pytest.skip)])
def test_without_a_browser_ci_fails(ci, ends, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends.Exception, match="no Chromium"):
        chromium()


@pytest.mark.slow
def test_rows_are_in_the_ledger():
    rows = (*formulas.TRANSFER_ROWS, *formulas.PRETRAINING_ROWS)
    rows += tuple(row for panel in PANELS for row in panel.rows)
    assert {row[-1] for row in rows} <= {claim.id for claim in all_claims()}
    assert {row[0] for row in formulas.TRANSFER_ROWS} <= {*formulas.WAYS}
    assert all(row[0] in panel.lines for panel in PANELS for row in panel.rows)


def theory(n, theta, **setting):
    """Computes `transfer` in double precision, with the page's names of settings and angles in
    degrees.
    """
    with jax.enable_x64(True):
        found = formulas.transfer(n, theta=np.radians(theta), **setting)
        return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.soak
def test_estimators_agree_with_the_closed_forms():
    grid = GRID._replace(d=100, draws=50, n=(20, 180))
    found, size = simulated.compute(grid, jax.random.key(1), direct), sizes(grid)
    n, angles = np.array(grid.n), np.array(grid.theta)[:, None]
    checked = 0
    for way, axes in simulated.AXES.items():
        names = axes.split()[:-2]  # for all inputs but theta and n
        for place in np.ndindex(*(size[axis] for axis in names)):
            at = dict(zip(names, place, strict=True))
            source, sigma = grid.source[at["source"]], grid.sigma[at["sigma"]]
            ridge = grid.ridge[at.get("ridge", 0)]
            course = at.get("course", 0 if "ridge" in at else len(grid.depth) + at.get("time", 0))
            early = course - len(grid.depth)
            time = grid.time[early] if early >= 0 else None
            depth = grid.depth[course] if early < 0 else 1
            expected = theory(
                n, angles, d=grid.d, sigma=sigma, depth=depth, source=source, ridge=ridge, time=time
            )
            for name in (way, f"gain of {way}") if way != "scratch" else (way,):
                apart = abs(found[name][place] - expected[name])
                # the limits hold up to O(1) terms in d
                assert np.all(apart <= 4.5 * found[f"error of {name}"][place] + 3 / grid.d), name
                assert apart.mean() < 0.05
                checked += 1
    assert checked == 8 + 2 * (8 + 8 + 12)


@pytest.mark.slow
def test_risks_are_those_of_fits_in_numpy():
    n, d, sigma, draws = 9, 5, 0.3, 4000
    rng = np.random.default_rng(0)
    x = rng.normal(size=(draws, n, d))
    target = np.eye(d)[0] * math.cos(1.0) + np.eye(d)[1] * math.sin(1.0)
    y = x @ target + sigma * rng.normal(size=(draws, n))
    scale = (x[..., 0] * y).sum(-1) / ((x[..., 0] ** 2).sum(-1) + n * 0.2)
    fits = {
        "scratch": np.einsum("kdn,kn->kd", np.linalg.pinv(x), y),
        "ridge transfer": scale[:, None] * np.eye(d)[0],
    }
    found = theory(n, math.degrees(1.0), d=d, sigma=sigma, ridge=0.2)
    for way, beta in fits.items():
        risk = ((beta - target) ** 2).sum(-1)
        assert abs(risk.mean() - found[way]) < 4 * risk.std() / math.sqrt(draws), way


@pytest.mark.slow
def test_training_that_is_stopped_late_ends_and_early_has_not_begun():
    at = {"d": 200, "sigma": 0.3, "depth": 1, "source": 2.0}
    late, early = (theory(60, 40, time=time, **at) for time in (1e6, 1e-9))
    with jax.enable_x64(True):
        seen = dl.source_limit(load=2.0, theta=math.radians(40), sigma=0.3)
        apart2 = float(1 + seen.size**2 - 2 * seen.size * jnp.cos(seen.theta))
        ends = {
            "scratch": dl.scratch_limit(load=0.3, sigma=0.3),
            "fine-tuning": dl.fine_tuning_risk(
                load=0.3, theta=seen.theta, sigma=0.3, depth=1, size=seen.size
            ),
            "linear transfer": dl.linear_transfer_risk(n=60, theta=seen.theta, sigma=0.3),
        }
    for way, end in ends.items():
        assert late[way] == pytest.approx(float(end), rel=1e-6), way
        start = apart2 if way == "fine-tuning" else 1.0
        assert early[way] == pytest.approx(start, rel=1e-6), way
    single = formulas.transfer(60, theta=math.radians(40), time=1e6, **at)  # without 64 bits
    for way, value in single.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, late[way], rtol=1e-5)


@pytest.mark.slow
def test_where_means_are_infinite_and_what_is_refused():
    at = theory(np.array([1, 199, 200, 201]), 50, d=200, sigma=0.5)
    assert np.isinf(at["scratch"]).tolist() == [False, True, True, True]
    assert at["gain of linear transfer"].tolist()[:3] == [-math.inf, math.inf, math.inf]
    assert np.isfinite(at["gain of fine-tuning"]).all()
    assert np.isfinite(at["L2-SP"]).all()
    assert not any(np.isnan(v).any() for v in at.values())
    assert np.isnan(theory(1, 50, d=2, sigma=0.5)["gain of linear transfer"])
    # an infinite source time is the limit of long ones
    n = np.array([50, 350])
    for depth, time in ((1, None), (2, None), (math.inf, None), (1, 3.0)):
        at = {"d": 200, "sigma": 0.3, "depth": depth, "time": time}
        endless, long = (theory(n, 40, source=source, **at) for source in (1.0, 1 + 1e-13))
        for name, value in endless.items():
            limit = np.where(abs(long[name]) > 1e4, np.copysign(np.inf, long[name]), long[name])
            np.testing.assert_allclose(value, limit, rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="depth must be 1 where time is given; got 2"):
        theory(5, 50, d=9, sigma=0.5, depth=2, time=1.0)


PRETRAINING = {
    "gamma": 0.2, "decay": 1.0, "tau": 4.0, "ratio": 3.0, "anchor": 0.5, "duration": 0.2,
}  # fmt: skip


@pytest.mark.slow
def test_losses_of_pretraining_are_those_of_the_flow():
    with jax.enable_x64(True):
        found = {k: np.asarray(v) for k, v in formulas.pretraining(**PRETRAINING).items()}
    sigma = 2 / np.arange(1.0, 13)
    time = found["time"][:, None]
    assert time[0, 0] == pytest.approx(0.25 * 4 / 2)
    y0 = math.exp(-8)
    y = sigma / (1 + (sigma / y0 - 1) * np.exp(-4 * sigma * time))
    noise = 2 * 12 * 0.2**2 * y.sum(-1) + 12**3 * 0.2**4
    np.testing.assert_allclose(found["perturbed"], ((y - sigma) ** 2).sum(-1) + noise, rtol=1e-9)

    # the equation of a mode with an anchor, by steps of the midpoint rule
    def flow(z):
        return 4 * z * (3 * sigma - z + 0.5 * (y - z))

    after, step = y, 0.2 / 1000
    for _ in range(1000):
        after = after + step * flow(after + step / 2 * flow(after))
    np.testing.assert_allclose(found["old task"], ((after - sigma) ** 2).sum(-1), rtol=1e-4)
    for name in ("perturbed", "old task"):
        least = found[name].argmin()
        assert 0 < least < found[name].size - 1
        assert found[f"turn of {name}"] == pytest.approx(found["time"][least])
        assert found[f"least {name}"] == found[name].min()
    # 2 d gamma^2 = 0.96 is below the first two of 2, 1, 0.67, ...
    assert found["learned"] == 2
    with jax.enable_x64(True):
        calm = formulas.pretraining(**PRETRAINING | {"gamma": 0.0})
        assert jnp.isnan(calm["turn of perturbed"])
        assert calm["learned"] == 12


SCRIPT = """
const sleep = (ms) => new Promise((done) => setTimeout(done, ms))
const settled = async () => {
  await sleep(50)
  while (waiting) await sleep(20)
  await sleep(250)  // then the address is written
}
while (drawn.n === undefined) await sleep(50)
const numbers = (root) => Array.from(
  document.querySelectorAll(`${root} data`), (e) => e.getAttribute("value"))
const report = () => ({
  state: {...state}, hash: location.hash, text: document.body.innerText,
  numbers: numbers("#details"),
  estimates: document.querySelectorAll("#details td small").length, losses: numbers("#losses"),
  python: [$("transfer-python").textContent, $("pretraining-python").textContent],
  panels: Object.fromEntries(data.panels.map(({name}) => [name, {lines: find(`${name} curves`).data,
    numbers: numbers(`#${name}-numbers`), python: $(`${name}-python`).textContent}])),
  notes: $("transfer-notes").textContent, legend: $("legend").textContent,
  image: Array.from(find("cells").data.image[0], String), shape: find("cells").data.image[0].shape,
  place: ["x", "y", "dw", "dh"].map((name) => find("cells").data[name][0]),
  zeros: find("zeros").data, printed: find("printed").data, marks: find("estimated").data,
  curve: Array.from(find("tuning curves").data["old task"]), turn: find("noise turn").data.x,
})
const results = []
await settled()
for (const hash of HASHES) {
  const changed = new Promise((done) => addEventListener("hashchange", done, {once: true}))
  location.hash = hash
  await Promise.race([changed, sleep(5000)])
  await settled()
  results.push(report())
}
const use = async (element, changes, kind = "input") => {
  Object.assign(element, changes)
  element.dispatchEvent(new Event(kind, {bubbles: true}))
  await sleep(50)
}
const box = (key, kind) => document.querySelector(`[data-key=${key}] [type=${kind}]`)
await use($("n"), {value: "30"})
await use(box("theta", "range"), {value: "100.5"})
await use(box("source", "checkbox"), {checked: false}, "change")
await use(box("source", "range"), {value: "200"})
await use($("depth"), {value: "∞"}, "change")
await use($("sigma"), {value: "1e99"})
await use($("gamma"), {value: ""})
await settled()
results.push(report())
$("nearest").click()
await settled()
results.push(report())
const all = (root, kind) => [...root.querySelectorAll(kind),
  ...[...root.querySelectorAll("*")].flatMap((e) => e.shadowRoot ? all(e.shadowRoot, kind) : [])]
const [area] = all($("map"), ".bk-events"), rect = area.getBoundingClientRect()
const tap = {bubbles: true, composed: true, pointerId: 1, isPrimary: true,
  clientX: rect.left + 0.97 * rect.width, clientY: rect.top + 0.3 * rect.height}
for (const kind of ["pointerdown", "pointerup"]) area.dispatchEvent(new PointerEvent(kind, tap))
await settled()
results.push(report())
return results
"""
START = {"n": 75, "theta": 180, "sigma": 0, "d": 200, "source": None, "ridge": None, "time": None,
         "depth": 2, "view": "fine-tuning", "gamma": 0.2}  # fmt: skip
RUBBISH = (
    "n=NaN&theta=720&sigma=-5&d=1e999&source=&ridge=zzz&time=[]&depth=0&view=%3Cimg%3E&gamma=&junk",
    "n=0&theta=-1e308&sigma=1e308&d=1&depth=inf&view=%E0%A4%A&constructor=1&__proto__=2&=&tau=0x5",
    "n=1&theta=0&sigma=0&d=2&depth=inf&view=linear%20transfer",
    "n=200&theta=90&sigma=0.5&d=200&view=fine-tuning&depth=3&source=inf",
    "n=9&theta=50&sigma=0.5&d=20&depth=2&source=1&view=fine-tuning",
    "n=9&theta=50&sigma=0.5&d=20&depth=1&source=1&time=3&view=fine-tuning",
    "n=9&theta=50&sigma=0.5&d=20&depth=inf&source=1&time=inf&view=all",
    "n=1&theta=90&sigma=1&d=2&source=inf&view=linear%20transfer",
    "n=1&theta=180&sigma=1&d=2&view=all&gamma=0&ratio=0.5&anchor=4&decay=0&duration=0",
)
CLEAN = "source=inf&ridge=best&time=inf"


def settings(count):
    """Random states of the controls, as fragments of an address."""
    rng = np.random.default_rng(7)
    views = ("fine-tuning", "linear transfer", "ridge transfer", "ridge from scratch", "L2-SP")
    for k in range(count):
        d = int(rng.integers(2, 400))
        depth = rng.choice(["1", "2", "3", "7", "inf"])
        source, ridge, time = (f"{10 ** rng.uniform(-1, high):.6g}" for high in (1, 1, 3))
        state = {
            "n": rng.integers(1, 2 * d + 1), "theta": f"{rng.uniform(0, 180):.6g}",
            "sigma": f"{rng.uniform(0, 2):.6g}", "d": d, "depth": depth,
            "source": ("inf", source)[k % 2], "ridge": ("best", ridge)[k // 2 % 2],
            "time": ("inf", time)[k // 3 % 2], "view": views[k % len(views)],
            "gamma": f"{rng.uniform(0, 0.5):.6g}", "decay": f"{rng.uniform(0, 2):.6g}",
            "tau": f"{rng.uniform(2, 12):.6g}", "ratio": f"{rng.uniform(0.5, 6):.6g}",
            "anchor": f"{rng.uniform(0, 4):.6g}", "duration": f"{rng.uniform(0, 3):.6g}",
        }  # fmt: skip
        for panel in PANELS:
            for c in panel.controls:
                value = round(rng.uniform(c.low, c.high), 0 if c.step == 1 else 3)
                state[f"{panel.name}.{c.key}"] = f"{value:.6g}"
        yield "&".join(f"{key}={value}" for key, value in state.items()).replace(" ", "%20")


def setting(state):
    """The arguments of `transfer` beyond n and theta."""
    at = {key: state[key] for key in ("d", "sigma", "ridge", "time")}
    at["depth"] = state["depth"] or math.inf  # JSON has no infinity
    at["source"] = state["source"] or math.inf
    return at | {"time": state["time"] if at["depth"] == 1 else None}


POINTS = 24  # of the lines of a map, and of its cells


def shows_what_python_computes(shown, rng):
    state = shown["state"]
    at, name = setting(state), f"gain of {state['view']}"
    rows, columns = shown["shape"]
    x, y, dw, dh = shown["place"]
    step, turn = dw / columns * state["d"], dh / rows
    i, j = rng.integers(rows, size=POINTS), rng.integers(columns, size=POINTS)
    cells = np.round(x * state["d"] + (j + 0.5) * step), y + (i + 0.5) * turn
    # On a line, and on both sides of it by as much as the points of the map are apart.
    load, angle = (
        np.concatenate([[], *shown["zeros"][axis]]).astype(float) for axis in ("xs", "ys")
    )
    some = rng.integers(load.size, size=POINTS) if load.size else np.zeros(0, int)
    line = (load[some] * state["d"], angle[some]) if load.size else cells
    beside = [
        (np.maximum(line[0], 1 + dn) + side * dn, np.clip(line[1], da, 180 - da) + side * da)
        for dn, da in ((0, turn), (step, 0))
        for side in (-1, 0, 1)
    ]
    # All at once: every other shape would be compiled anew.
    n, theta = (np.stack(v) for v in zip(cells, line, *beside, strict=True))
    n, theta = np.append(n, state["n"]), np.append(theta, state["theta"])
    found = theory(n, theta, **at)
    own = {key: value[-1] for key, value in found.items()}
    found = {key: value[:-1].reshape(-1, POINTS) for key, value in found.items()}
    exact = {"rtol": 1e-9, "atol": 1e-12}
    order = [k for way in formulas.WAYS for k in (way, f"gain of {way}") if k in own]
    if not shown["estimates"]:
        values = [*map(number, shown["numbers"])]
        np.testing.assert_allclose(values, [own[k] for k in order], **exact)
    image = np.array([*map(number, shown["image"])]).reshape(rows, columns)[i, j]
    if state["view"] in formulas.WAYS:
        np.testing.assert_allclose(image, np.clip(found[name][0], -9, 9), **exact)
        # Gains are 0 on the lines, but for the curvature between two points.
        there, sides = found[name][1], found[name][2:].reshape(2, 3, -1)
        with np.errstate(invalid="ignore"):
            curved = abs(sides[:, 0] - 2 * sides[:, 1] + sides[:, 2]).max(0)
        smooth = np.isfinite(there) & np.isfinite(curved) & (load.size > 0)
        assert np.all(abs(there[smooth]) <= 0.5 * curved[smooth] + 1e-9)
        return load.size > 0 and smooth.sum()
    ways = formulas.WAYS[: None if state["view"] == "all" else 4]
    risks = np.nan_to_num(np.stack([found[way][0] for way in ways]), nan=np.inf, posinf=np.inf)
    np.testing.assert_array_equal(image, (risks <= 1.01 * risks.min(0) + 1e-6).argmax(0))
    return 0


def draws_the_lines_that_python_computes(shown):
    """In all panels, and at the values of the slider."""
    for panel in PANELS:
        found = shown["panels"][panel.name]
        given = {c.key: shown["state"][f"{panel.name}.{c.key}"] for c in panel.controls}
        angles = {key: math.radians(v) for key, v in given.items() if key.endswith("theta")}
        with jax.enable_x64(True):
            own = WHOLE[panel.name](**{key: float(v) for key, v in (given | angles).items()})
        for name in (panel.x, *panel.lines):
            lines, own_line = found["lines"][name], own[name]
            np.testing.assert_allclose(lines, own_line, rtol=1e-9, atol=1e-12, err_msg=name)
        values = [*map(number, found["numbers"])]
        np.testing.assert_allclose(values, [own[name] for name in panel.numbers], rtol=1e-9)


def prints_what_it_shows(shown):
    """The copied Python code prints the numbers shown on the page."""
    numbers = [*map(number, shown["numbers"])]
    # the page shows each gain next to its risk, and the snippet all gains at the end
    order = [numbers[0], *numbers[1::2], *numbers[2::2]]
    assert printed(shown["python"][0]) == pytest.approx(order, abs=5.1e-5, nan_ok=True)
    for panel in shown["panels"].values():
        values = [*map(number, panel["numbers"])]
        with pytest.MonkeyPatch.context() as patch:
            for name, function in WHOLE.items():
                patch.setattr(panels, name, function)
            assert printed(panel["python"]) == pytest.approx(values, abs=5.1e-5, nan_ok=True)
    losses = [v for v in printed(shown["python"][1])[:4] if not math.isnan(v)]
    assert losses == pytest.approx([*map(float, shown["losses"])], abs=5.1e-5)


def number(text):
    return float(text.replace("Infinity", "inf"))


def printed(code):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    return [float(line.partition(": ")[2]) for line in said.getvalue().splitlines()]


@pytest.mark.soak
def test_the_page_shows_what_python_computes(quick, tmp_path):
    text, estimates = quick
    random, rng = [*settings(12)], np.random.default_rng(0)
    others = ("all", "paper", *(way.replace(" ", "%20") for way in formulas.WAYS[6:]))
    maps = [f"{random[0].partition('&view=')[0]}&{CLEAN}&view={view}" for view in others]
    lines = [
        f"n=30&theta=45&sigma=0.1&d=200&depth=3&{CLEAN}&view=fine-tuning",
        f"n=30&theta=45&sigma=0.5&d=100&{CLEAN}&view=linear%20transfer",
    ]
    on = "n=10&theta=60&sigma=0.5&d=40&depth=2&source=2&ridge=0.1&time=inf&view=fine-tuning"
    hashes = [*RUBBISH, *random, *maps, *lines, on]
    script = SCRIPT.replace("HASHES", json.dumps(hashes))
    results, said = browse(text, tmp_path, script)
    wrong = [line for line in said if re.search("error|refused|warn|uncaught", line, re.I)]
    assert wrong == []
    for shown in results:
        assert not re.search("NaN|undefined|null", shown["text"])
    assert sum(shows_what_python_computes(shown, rng) for shown in results) > 100
    for shown in results[len(RUBBISH) :: 8]:
        draws_the_lines_that_python_computes(shown)
    for shown in results[1:15:3]:
        prints_what_it_shows(shown)
    rubbish, rest = results[: len(RUBBISH)], results[len(RUBBISH) :]
    # meaningless values are ignored, and values out of range are clipped
    assert rubbish[0]["state"].items() >= START.items()
    nearest = {"n": 1, "theta": 0, "sigma": 2, "d": 2, "depth": None}
    assert rubbish[1]["state"].items() >= nearest.items()
    assert rubbish[1]["state"]["tau"] == 5
    assert "sigma=2&d=2&source=inf" in rubbish[1]["hash"]
    assert "mean risk of training from scratch without a penalty is infinite" in rubbish[3]["text"]
    assert "∞" in rubbish[3]["text"]
    assert "both means are infinite" not in rubbish[3]["legend"]
    undefined = next(s for s in results if s["hash"].startswith("#n=1&theta=90&sigma=1&d=2"))
    assert "both means are infinite" in undefined["legend"]
    assert "–" in undefined["text"]
    assert "infinite" not in rubbish[2]["text"].partition("Copy")[0]  # no noise
    assert "Up to n = 2" in rubbish[-1]["text"]
    assert "never hurts" in rubbish[-1]["text"]
    # a link shows the sender's view
    for fragment, shown in zip(random, rest, strict=False):
        assert {*fragment.split("&")} <= {*shown["hash"].removeprefix("#").split("&")}
    *_, fine, linear, simulated_at, used, near, tapped = results
    # next to the boundaries in closed form
    load, angle = np.array(fine["zeros"]["xs"][0]), np.array(fine["zeros"]["ys"][0])
    below = (load < 1) & (angle > 10)
    with jax.enable_x64(True):
        exact = np.degrees(dl.fine_tuning_boundary(load=load[below], sigma=0.1, depth=3))
        sin2 = dl.linear_transfer_sin2(n=np.arange(10, 90.0), d=100, sigma=0.5)
    assert len(fine["zeros"]["xs"]) == 1
    assert load.min() == pytest.approx(1 / 200)
    assert angle.min() == 0  # the curve ends at the edge
    np.testing.assert_allclose(angle[below], exact, atol=0.1)
    assert fine["printed"] == {"xs": [[0, 1]], "ys": [[60, 60]]}
    assert "cos θ = c/2" in fine["legend"]
    assert "as printed: 60°" in fine["legend"]
    load, angle = (np.concatenate(linear["zeros"][axis]) for axis in ("xs", "ys"))
    whole = (abs(load * 100 - np.round(load * 100)) < 1e-9) & (load < 0.9) & (load >= 0.1)
    expected = np.degrees(np.arcsin(np.sqrt(sin2[np.round(100 * load[whole]).astype(int) - 10])))
    assert whole.sum() > 40
    np.testing.assert_allclose(np.minimum(angle, 180 - angle)[whole], expected, atol=0.2)
    assert linear["printed"] == {"xs": [], "ys": []}
    # simulated numbers are only shown where they were simulated
    for shown in (simulated_at, near):
        assert shown["estimates"] == 7
        assert "averaged over 4 data sets" in shown["legend"]
        assert len(shown["marks"]["x"]) == len(GRID.n) * len(GRID.theta)
    for shown in (*results[:-4], used):
        assert shown["estimates"] == 0
        assert "data sets" not in shown["text"]
        assert shown["marks"]["x"] == []
    gain = estimates["gain of fine-tuning"][1, 1, 1]  # source 2, depth 2, sigma 0.5
    np.testing.assert_allclose(simulated_at["marks"]["value"], gain.T.ravel(), rtol=1e-3)
    mean, error = (estimates[f"{kind}fine-tuning"][1, 1, 1, 1, 0] for kind in ("", "error of "))
    assert f"{float(f'{mean:.4g}'):.4f} ± {float(f'{error:.4g}'):.4f}" in simulated_at["text"]
    # controls
    state = used["state"]
    assert (state["n"], state["theta"], state["source"], state["depth"]) == (30, 100.5, 10, None)
    assert (state["sigma"], state["gamma"]) == (2, simulated_at["state"]["gamma"])
    nearest = {"d": 40, "n": 10, "theta": 90, "sigma": 0.5, "source": 2, "ridge": 0.1, "depth": 2}
    assert near["state"].items() >= nearest.items()
    assert tapped["state"]["n"] > 70
    assert "eq17-L2" in simulated_at["notes"]
    assert "eq17-L2" not in tapped["notes"]
