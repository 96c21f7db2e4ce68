"""The explorer: its tables beside the closed forms, and its page in a browser."""

import base64
import gzip
import html
import html.parser
import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.lab.store import direct
from experiments.pages.explorer import pretraining, transfer
from experiments.pages.explorer.tables import Table, table
from sail_jax.cli import main as cli
from theory import deep_linear as dl
from theory.claims import all_claims
from theory.two_layer import fine_tuning, modes, perturbation

pytest.importorskip("bokeh")

TRANSFER, PRETRAINING = transfer.TINY, pretraining.TINY
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Parts(html.parser.HTMLParser):
    """What a page loads, and the JSON inside of it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.json, self.inside = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.inside = tag == "script" and attrs.get("type") == "application/json"
        self.loads += [v for k, v in attrs.items() if k in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.json += data if self.inside else ""


def embedded(value, found):
    """Collects the tables of a page and their names: [name, {axes, values}] at any depth."""
    if isinstance(value, dict):
        for name, inner in value.get("entries", ()):
            entries = (
                dict(inner["entries"]) if isinstance(inner, dict) and "entries" in inner else {}
            )
            if entries.keys() == {"axes", "values"}:
                array = entries["values"]
                data = base64.b64decode(array["array"]["data"])
                data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
                numbers = np.frombuffer(data, array["dtype"]).reshape(array["shape"])
                found.append((name, Table(tuple(entries["axes"]), numbers)))
        for inner in value.values():
            embedded(inner, found)
    elif isinstance(value, list):
        for inner in value:
            embedded(inner, found)
    return found


SIZES = {
    "source": 2, "time": 2, "sigma": 2, "ridge": 2, "course": 3, "depth": 2, "theta": 11,
    "load": 10, "point": 5,
}  # fmt: skip
CURVES = {
    "decay": 1, "tau": 1, "gamma": 2, "ratio": 1, "anchor": 2, "duration": 1, "time": 12, "turn": 2,
}  # fmt: skip


def fakes(axes, sizes):
    """Tables of random numbers by name."""
    numbers = np.random.default_rng(0)
    return {
        name: table(of, numbers.random([sizes[axis] for axis in of.split()]))
        for name, of in axes.items()
    }


def test_a_page_stands_alone_and_holds_the_tables(tmp_path, capsys, monkeypatch):
    first = fakes(transfer.AXES, SIZES)
    coarse = fakes(transfer.SIMULATED, SIZES | {"theta": 3, "load": 2})
    for kind in ("simulated ", "error of ", "error of gain, "):
        first |= {kind + way: coarse[way] for way in transfer.WAYS}
    second = fakes(pretraining.AXES, CURVES)
    monkeypatch.setattr(transfer, "compute", lambda grid, key, stage: first)
    monkeypatch.setattr(pretraining, "compute", lambda grid, stage: second)
    out = tmp_path / "page.html"
    out.write_text('<meta name="generator" content="sail-jax explore">')  # may be replaced
    assert cli.main(["explore", "--quick", "--out", str(out)]) == 0
    assert f"Look at {out}" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [out]
    text = out.read_text()
    assert len(text.encode()) < 6e6
    parts = Parts(text)
    assert parts.loads == []
    assert "default-src 'none'" in text[:4000]
    found = embedded(json.loads(parts.json), [])
    assert len(found) == 3 * 4 - 1 + 4 + 4 + len(transfer.PENALISED) + len(second)
    for name, shown in [*first.items(), *second.items()]:
        inside = [values for _, values in found if values.axes == shown.axes]
        assert any(np.array_equal(values.values, shown.values) for values in inside), name


@pytest.mark.slow
def test_tables_are_the_closed_forms():
    grid = TRANSFER
    with jax.enable_x64(True):
        found = transfer.closed_forms(grid)
        n, theta = grid.samples(), grid.theta()[:, None]
        sigma, far = grid.sigmas[1], grid.sources[1]
        source = dl.source_limit(far, theta, sigma)
        plain = dl.transfer_risks(n, grid.d, theta, sigma, depth=2)
        late = {"scratch": (-1, 1), "linear transfer": (0, -1, 1), "ridge transfer": (0, 0, 1)}
        for way, at in {**late, "fine-tuning": (0, 1, 1)}.items():
            expected = plain[way][0] if way == "scratch" else plain[way]
            np.testing.assert_allclose(found[way][at], expected, rtol=1e-12)
        tuned = dl.transfer_risks(n, grid.d, source.theta, sigma, depth=2, size=source.size)
        own = tuned["ridge from scratch"][0]
        np.testing.assert_allclose(found["ridge from scratch"][1], own, rtol=1e-12)
        np.testing.assert_allclose(found["L2-SP"][1, 1], tuned["L2-SP"], rtol=1e-12)
        ridge = dl.linear_transfer_risk(n, source.theta, sigma, grid.ridges[0])
        np.testing.assert_allclose(found["ridge transfer"][1, 1, 1], ridge, rtol=1e-12)
        np.testing.assert_allclose(found["fine-tuning"][1, 1, 1], tuned["fine-tuning"], rtol=1e-12)
        # stopped, at depth 1: the course after all depths
        offset = np.zeros(grid.d)
        offset[:2] = np.cos(theta[4, 0]) - 1, np.sin(theta[4, 0])
        flow = dl.flow_risk(np.ones(grid.d), offset, n, sigma, [grid.times[0]])[:, 0]
        np.testing.assert_allclose(found["fine-tuning"][0, 2, 1, 4], flow, rtol=1e-9)
    assert {row[-1] for row in (*transfer.ROWS, *pretraining.ROWS)} <= {c.id for c in all_claims()}


def losses(grid, time, gamma):
    """Perturbed and fine-tuned losses of the second tab at its first decay and tau."""
    sigma, time = grid.spectrum(grid.decays[0]), np.asarray(time, float)[:, None]
    with jax.enable_x64(True):
        y = modes.mode(time, np.exp(-2 * grid.taus[0]), sigma)
        after = fine_tuning.mode(grid.durations[0], y, grid.ratios[0] * sigma, grid.anchors[1])
        perturbed = perturbation.perturbed_mode_loss(y, sigma, gamma)
        return np.asarray(perturbed), np.sum((np.asarray(after) - sigma) ** 2, -1)


@pytest.mark.slow
def test_curves_are_the_closed_forms_and_turn_where_they_are_least():
    grid = PRETRAINING
    found = pretraining.compute(grid, direct)
    time = found["time"].at(decay=0, tau=0)
    noisy, tuned = losses(grid, time, grid.gammas[1])
    np.testing.assert_allclose(found["perturbed"].at(decay=0, tau=0, gamma=1), noisy, rtol=1e-5)
    old = found["tuned old task"].at(decay=0, tau=0, ratio=0, anchor=1, duration=0)
    np.testing.assert_allclose(old, tuned, rtol=1e-5)
    turn, least = found["turn of perturbed"].at(decay=0, tau=0, gamma=1)
    assert least <= noisy.min()
    assert time[noisy.argmin() - 1] < turn < time[noisy.argmin() + 1]
    assert np.isnan(found["turn of perturbed"].at(decay=0, tau=0, gamma=0)).all()  # no noise
    assert np.isnan(found["inflection"].at(decay=0, gamma=0))


def test_what_cannot_be_written_is_refused_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transfer, "compute", lambda *_: pytest.fail("computed"))
    other = tmp_path / "other.html"
    other.write_text("mine")
    for out, why in ((other, "is no explorer"), (tmp_path / "no" / "page", "is not a directory")):
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


@pytest.mark.slow
def test_simulated_data_sets_agree_with_the_closed_forms():
    grid = TRANSFER._replace(d=100, draws=150)
    found = transfer.compute(grid, jax.random.key(1), direct)
    loads, angles = grid.simulated()
    for way in transfer.WAYS:
        theory = found[way].values[..., loads]
        theory = theory[None, :, :, None] if way == "scratch" else theory[..., angles, :]
        apart = found[f"simulated {way}"].values - theory
        # closed forms of fine-tuning, sources and times are limits: right up to a few in d
        assert np.all(abs(apart) <= 4.5 * found[f"error of {way}"].values + 3 / grid.d)
        assert abs(apart).mean() < 0.01


SCRIPT = """
<script>
const settings = SETTINGS
const read = async (doc) => {
  const model = (name) => doc.get_model_by_name(name), results = []
  for (const setting of settings) {
    for (const [name, value] of Object.entries(setting)) {
      const control = model(name)
      control[name === "mode" ? "active" : "value"] = value
    }
    await new Promise((done) => setTimeout(done, 100))  // callbacks run after their events
    results.push({
      fine: Array.from(model("fine").data.image[0]),
      coarse: Array.from(model("coarse").data.image[0]),
      details: model("details").text, told: model("details of pre-training").text,
      time: model("perturbed").data.time, noisy: model("perturbed").data.noisy,
      old: model("tuned").data.old, turn: model("turn of perturbed").data.x,
    })
  }
  // a tap on the map, and a key on the first slider
  const all = (root, selector) => [...root.querySelectorAll(selector),
    ...[...root.querySelectorAll("*")].flatMap(
      (e) => e.shadowRoot ? all(e.shadowRoot, selector) : [])]
  const map = all(document, ".bk-events")[0], box = map.getBoundingClientRect()
  for (const kind of ["pointerdown", "pointerup"]) map.dispatchEvent(new PointerEvent(kind, {
    bubbles: true, composed: true, pointerId: 1, isPrimary: true,
    clientX: box.left + 0.97 * box.width, clientY: box.top + 0.5 * box.height}))
  const key = {key: "ArrowLeft", bubbles: true}
  all(document, ".noUi-handle")[0].dispatchEvent(new KeyboardEvent("keydown", key))
  await new Promise((done) => setTimeout(done, 500))
  const [load, sigma] = [model("load").value, model("sigma").value]
  results.push({load, sigma, details: model("details").text})
  const pre = document.createElement("pre")
  pre.id = "results"
  pre.textContent = JSON.stringify(results)
  document.body.append(pre)
}
const wait = () => {
  const doc = (window.Bokeh && Bokeh.documents[0]) || null
  if (doc && doc.is_idle) setTimeout(() => read(doc), 200)
  else setTimeout(wait, 50)
}
wait()
</script>
"""


def browse(page, settings):
    """The page in a browser at several settings of its controls, and what its console says."""
    head, _, tail = page.read_text().rpartition("</body>")
    copy = page.with_name("copy.html")
    copy.write_text(head + SCRIPT.replace("SETTINGS", json.dumps(settings)) + "</body>" + tail)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=20000", "--dump-dom",
        copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    results = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.S)
    assert results, said
    return json.loads(html.unescape(results[1])), said


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_sliders_show_what_python_computes(tmp_path):
    page = tmp_path / "page.html"
    assert cli.main(["explore", "--quick", "--seed", "3", "--out", str(page)]) == 0
    start = {"sigma": "0.5", "depth": "2", "anchor": "1", "gamma": "0.3"}
    results, said = browse(
        page,
        [
            start | {"layer": "which way wins"},
            {"layer": "fine-tuning"},
            {"load": 1.5, "theta": 27.0, "gamma": "0"},
            {"source": "2", "time": "3"},
            {"depth": "1", "layer": "scratch"},
            {"layer": "ridge transfer", "mode": 1, "ridge": "0.1", "time": "∞"},
        ],
    )
    wrong = [line for line in said if re.search("error|refused|warn|uncaught", line, re.I)]
    assert wrong == []
    grid, sigma = TRANSFER, 0.5
    n, theta = grid.samples(), grid.theta()[:, None]
    wins, tuned, moved, far, stopped, simulated, touched = results
    with jax.enable_x64(True):
        risks = dl.transfer_risks(n, grid.d, theta, sigma, depth=2)
        table = np.stack([risks[way] for way in transfer.WAYS])
        best = (table <= 1.01 * table.min(0) + 1e-6).argmax(0)
        gain = dl.transferability("fine_tune", n, grid.d, theta, sigma, depth=2)
    noisy, old = losses(PRETRAINING, wins["time"], 0.3)
    np.testing.assert_array_equal(np.reshape(wins["fine"], best.shape), best)
    np.testing.assert_allclose(np.reshape(tuned["fine"], gain.shape), gain, atol=1e-6)
    np.testing.assert_allclose(wins["noisy"], noisy, rtol=1e-4)
    np.testing.assert_allclose(wins["old"], old, rtol=1e-4)
    assert wins["turn"]
    assert f"t = {wins['turn'][0]:.3g}" in wins["told"]
    # at the point that was moved to
    assert "n/d = 1.500 (n = 60, d = 40), θ = 27°" in moved["details"]
    for risk in table[:, 3, 7]:
        assert f"<td>{risk:.3f}<br>" in moved["details"]
    assert f"from scratch leaves {risks['ridge from scratch'][0, 7]:.3f}" in moved["details"]
    assert f"(L2-SP) leaves {risks['L2-SP'][3, 7]:.3f}" in moved["details"]
    assert "features-are-fate/T3.9-over/exact" in moved["details"]
    assert "eq17-L2" in wins["details"]
    assert "eq17-L2" not in moved["details"]
    assert moved["turn"] == []
    assert "never hurts" in moved["told"]
    # no closed form in time but for depth 1
    assert "Training time is not used" in far["details"]
    assert "finite-source-fine-tune" in far["details"]
    assert "Training time is not used" not in stopped["details"]
    assert "covariance-time" in stopped["details"]
    assert "Ridge transfer is left out" in stopped["details"]
    assert "NaN" not in stopped["details"]
    with jax.enable_x64(True):
        tables = transfer.compute(grid, jax.random.key(3), direct)
    at = {"source": 1, "time": 1, "ridge": 1, "sigma": 1}
    gain = tables["simulated scratch"].at(**at) - tables["simulated ridge transfer"].at(**at)
    np.testing.assert_allclose(np.reshape(simulated["coarse"], gain.shape), gain, atol=1e-6)
    # touched, and moved by a key
    assert touched["load"] > 1.8
    assert "n/d = 1.900" in touched["details"]
    assert touched["sigma"] == "0"
