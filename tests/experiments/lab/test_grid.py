"""Grids of runs: every point is computed once, and the result does not depend on how."""

import contextlib
import json
import shlex
import time
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from experiments.commands.run import swept
from experiments.lab import grid, grid_dataset, grid_plots, registry, store
from experiments.lab.callbacks import CallbackError
from experiments.lab.config import Natural, NotNegative, Seed, config
from sail_jax import disk
from sail_jax.cli import main as cli


@config
class Budget:
    steps: Natural = 2


@config
class Config:
    """A study of two draws."""

    seed: Seed = 0
    """Seed of the draws."""
    sigma: NotNegative = 0.5
    """Size of the noise. It is not negative."""
    kind: str = "plain"
    fast: bool = False
    mode: Literal["a", "b"] = "a"
    limit: int | None = None
    sizes: tuple[int, ...] = (2, 3)
    folder: str | None = None
    budget: Budget = Budget()

    def __post_init__(self):
        if self.sigma > self.budget.steps:
            raise ValueError("sigma must be at most budget.steps")


class Fake(SimpleNamespace):
    """A study that keeps the configs at which it ran, and stops before `stop` more."""

    name, question = "fake", "How large?"
    presets = {"default": Config(), "tiny": Config()}  # noqa: RUF012

    def run(self, config, stage=store.direct):
        if len(self.ran) == self.stop:
            raise KeyboardInterrupt
        self.ran.append((config.seed, config.sigma))
        drawn = stage("draws", lambda: {"x": self.draws(config)})["x"]
        return xr.Dataset(
            {"loss": ("size", drawn, {"units": "nats"}), "same": 1.0, "word": config.kind},
            {"size": [2, 3]},
            {"sigma": config.sigma, "steps": config.budget.steps},
        )

    def draws(self, config):
        return np.random.default_rng(config.seed).normal(size=2) * config.sigma


@pytest.fixture
def study(monkeypatch):
    fake = Fake(ran=[], stop=None)
    monkeypatch.setattr(registry, "load", lambda name: fake)
    return fake


AXES = {"seed": range(2), "sigma": [0.25, 1.0]}
PLACES = [(seed, sigma) for seed in range(2) for sigma in (0.25, 1.0)]


def bytes_of(path):
    return (path / "result.nc").read_bytes()


def computed(path, axes=AXES, **options):
    resume, on = options.pop("resume", False), options.pop("on", None)
    return grid.compute(grid.planned("fake", axes, **options), path, resume=resume, on=on)


@pytest.mark.slow
def test_every_combination_is_a_run_and_the_result_has_them_in_order(study, tmp_path):
    result = computed(tmp_path / "g")
    assert study.ran == PLACES
    data = result.dataset
    assert data["loss"].dims == ("seed", "sigma", "size")
    for seed, sigma in PLACES:
        config = Config(seed=seed, sigma=sigma)
        np.testing.assert_array_equal(data["loss"].sel(seed=seed, sigma=sigma), study.draws(config))
        run = store.reopen(tmp_path / f"g/points/seed={seed},sigma={sigma}")
        assert run.record["config"] == store.config_record(config)
    assert data["loss"].attrs == {"units": "nats"}
    assert data["size"].dims == ("size",)
    assert data["sigma"].attrs["long_name"] == "Size of the noise"
    assert data.attrs["steps"] == 2
    assert result.record["axes"] == {"seed": [0, 1], "sigma": [0.25, 1.0]}
    assert "sigma" not in result.record["config"]
    assert result.record["devices"] == [store.reopen(run.path).record["device"]]
    with Unchanged(tmp_path / "g"):
        assert grid.reopen(tmp_path / "g").dataset.identical(data)


def test_reading_the_results_of_many_points_is_shown(study, tmp_path, monkeypatch):
    seen = []
    meter = contextlib.nullcontext(lambda *step: seen.append(step))
    monkeypatch.setattr(grid, "Meter", lambda **options: meter)
    computed(tmp_path / "g")
    read = [(k, 4, f"seed={seed},sigma={sigma}: reading") for k, (seed, sigma) in enumerate(PLACES)]
    assert seen[-4:] == read


class Unchanged:
    """A block in which no file of a folder changes."""

    def __init__(self, path):
        self._path = path

    def __enter__(self):
        self._before = {file: file.read_bytes() for file in self._path.rglob("*") if file.is_file()}

    def __exit__(self, *_):
        assert self._before == {
            file: file.read_bytes() for file in self._path.rglob("*") if file.is_file()
        }


@pytest.mark.slow
def test_a_sweep_has_a_line_for_each_finished_point(study, tmp_path):
    def rows():
        return [json.loads(line) for line in (tmp_path / "g/metrics.jsonl").open()]

    def row(step, seed, sigma):
        mean = pytest.approx(study.draws(Config(seed=seed, sigma=sigma)).mean())
        return {"step": step, "seed": seed, "sigma": sigma, "loss": mean, "same": 1.0}

    def heard(step, scalars):
        told.append(scalars)
        if step == 1:
            raise ValueError("no network")

    points, told = grid.planned("fake", AXES), []
    with pytest.raises(CallbackError, match=r"heard failed at step 1 \(ValueError: no network"):
        grid.compute(points, tmp_path / "g", callback=heard)
    expected = [row(step, *place) for step, place in enumerate(PLACES)]
    assert rows() == expected[:2]
    # The process died after the second point was stored and before its line was written.
    file = tmp_path / "g/metrics.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    grid.compute(points, tmp_path / "g", resume=True, callback=lambda step, row: told.append(row))
    assert rows() == expected
    assert [scalars["seed"] for scalars in told] == [0, 0, 0, 1, 1]
    assert study.ran == PLACES


@pytest.mark.slow
def test_an_interrupted_grid_continues_with_the_missing_points(study, tmp_path):
    whole = computed(tmp_path / "whole")
    study.ran.clear()
    for study.stop in (1, 3):  # before the second and the fourth
        with pytest.raises(KeyboardInterrupt):
            computed(tmp_path / "g", resume=True)
        with pytest.raises(disk.RefusedError, match="unfinished sweep: finish it with --resume"):
            grid.reopen(tmp_path / "g")
    study.stop = None
    resumed = computed(tmp_path / "g", resume=True)
    assert study.ran == PLACES  # each once
    assert bytes_of(resumed.path) == bytes_of(whole.path)
    computed(tmp_path / "g", resume=True)
    assert study.ran == PLACES


@pytest.mark.slow
def test_values_are_added_and_taken_away(study, tmp_path):
    computed(tmp_path / "g", {"seed": [1, 0], "sigma": [1.0]})
    study.ran.clear()
    more = computed(tmp_path / "g", resume=True)
    assert study.ran == [place for place in PLACES if place not in [(0, 1.0), (1, 1.0)]]
    study.ran.clear()
    assert bytes_of(more.path) == bytes_of(computed(tmp_path / "whole").path)
    study.ran.clear()
    fewer = computed(tmp_path / "g", {"sigma": [1.0], "seed": [1]}, resume=True)
    assert study.ran == []
    assert fewer.dataset["loss"].dims == ("sigma", "seed", "size")


@pytest.mark.parametrize(
    ("axes", "more", "says"),
    [
        ({"sed": [1]}, {}, r"no field is called 'sed' \(nearest: 'seed'"),
        ({"budget": [1]}, {}, "no field is called 'budget'"),
        ({"budget.step": [1]}, {}, r"'budget.step' \(nearest: 'budget.steps'"),
        ({}, {}, "axes must have at least one field"),
        ({"seed": range(3, 0)}, {}, "seed: no values to sweep"),
        ({"sigma": [1, 1.0]}, {}, "sigma: a value occurs twice"),
        ({"sigma": [0.5, -1.0]}, {}, r"sigma must be at least 0; got -1.0 \(at sigma=-1.0\)"),
        ({"seed": ["1"]}, {}, "seed must be a whole number; got '1' .str."),
        ({"sigma": [1, 5], "budget.steps": [5, 3]}, {}, r"\(at sigma=5, budget.steps=3\)"),
        ({"seed": [1]}, {"seed": 2}, "seed is swept, so it must not be set, too"),
        ({"budget.steps": [1]}, {"budget": {"steps": 2}}, "budget.steps is swept"),
        ({"sizes": [(1,), (2,)]}, {}, r"sizes cannot be swept: .* got \(1,\)"),
        ({"folder": ["a", None]}, {}, "folder cannot be swept: .* got None"),
        ({"seed": range(200), "budget.steps": range(1, 99)}, {}, "10,000 points, got 19,600"),
        ({"seed": [1]}, {"preset": "tinny"}, "tinny"),
    ],
)
def test_what_is_no_grid_is_refused(axes, more, says, study):
    with pytest.raises(ValueError, match=says):
        grid.planned("fake", axes, **more)


@pytest.mark.slow
def test_points_have_values_of_groups_of_numpy_and_of_text(study, tmp_path):
    axes = {"budget.steps": np.arange(1, 3), "kind": ["a/../b", "x" * 300], "sigma": np.ones(1)}
    points = grid.planned("fake", axes).points
    assert {(p.budget.steps, p.kind, p.sigma) for p in points.values()} == {
        (steps, kind, 1.0) for steps in (1, 2) for kind in ("a/../b", "x" * 300)
    }
    assert all("/" not in name and len(name) <= 200 for name in points)
    together = grid.planned(
        "fake", {"budget.steps": [4, 5]}, sigma=3.5
    )  # beyond the preset's steps
    assert [p.sigma for p in together.points.values()] == [3.5, 3.5]
    data = computed(tmp_path / "g", axes).dataset
    assert data["kind"].values.tolist() == axes["kind"]
    assert data["word"].sel({"kind": "a/../b", "budget.steps": 2}).item() == "a/../b"


def test_another_grid_in_the_folder_is_refused(study, tmp_path):
    path = tmp_path / "g"
    computed(path)
    with Unchanged(path):
        for axes, options, says in (
            (AXES, {}, "holds this sweep already, finished; add --resume"),
            (AXES, {"budget": {"steps": 3}}, r"another sweep \(config.budget.steps was 2, now 3\)"),
            ({"seed": [0]}, {}, r"\(the axes was \[\"seed\", \"sigma\"\], now \[\"seed\"\]\)"),
        ):
            for resume in (True, False) if "--resume" not in says else (False,):
                with pytest.raises(disk.RefusedError, match=says):
                    computed(path, axes, resume=resume, **options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(disk.RefusedError, match="is not empty and holds no sweep"):
        computed(tmp_path / "other", resume=True)
    with pytest.raises(disk.RefusedError, match="holds no sweep"):
        grid.reopen(tmp_path / "other")
    lock = disk.lock(path)
    with pytest.raises(disk.RefusedError, match="in use by another process"):
        computed(path, resume=True)
    store.release(lock)


@pytest.mark.slow
def test_the_run_of_another_point_is_not_taken(study, tmp_path):
    path = computed(tmp_path / "g").path
    points = path / "points"
    (points / "seed=0,sigma=0.25").rename(points / "moved")
    (points / "seed=0,sigma=1.0").rename(points / "seed=0,sigma=0.25")
    (path / "sweep.json").unlink()
    with pytest.raises(disk.RefusedError, match="not empty"):
        computed(path, resume=True)
    computed(tmp_path / "other", {"seed": [0], "sigma": [1.0]})
    (tmp_path / "other/points").rename(tmp_path / "gone")
    points.rename(tmp_path / "other/points")
    with pytest.raises(disk.RefusedError, match=r"another run \(config.sigma was 1.0, now 0.25\)"):
        computed(tmp_path / "other", resume=True)


def test_a_grid_that_fails_at_once_leaves_nothing(study, tmp_path, monkeypatch):
    def fail(self, config):
        raise ZeroDivisionError

    monkeypatch.setattr(Fake, "draws", fail)
    with pytest.raises(ZeroDivisionError) as error:
        computed(tmp_path / "deep/g")
    assert "points/seed=0,sigma=0.25" in error.value.__notes__[0]
    assert not (tmp_path / "deep").exists()
    monkeypatch.undo()
    monkeypatch.setattr(registry, "load", lambda _: study)
    monkeypatch.setattr(Fake, "draws", lambda self, c: [1.0, 2.0] if c.seed == 0 else fail(self, c))
    with pytest.raises(ZeroDivisionError):
        computed(tmp_path / "g")
    assert len([*(tmp_path / "g/points").iterdir()]) == 2


def test_a_point_waits_for_another_process_that_computes_it(study, tmp_path, monkeypatch):
    (tmp_path / "p").mkdir()
    lock = disk.lock(tmp_path / "p")
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        store.release(lock)

    monkeypatch.setattr(time, "sleep", sleep)
    with grid._open(grid._Point(tmp_path / "p", "fake", "tiny", Config())) as run:
        assert not run.finished
    assert waits == [1]


@pytest.mark.slow
def test_damage_is_noticed(study, tmp_path):
    path = computed(tmp_path / "g").path
    whole = bytes_of(path)
    (path / "result.nc").write_bytes(whole[:-1])
    with pytest.raises(disk.StoreError, match=r"result\.nc is damaged"):
        grid.reopen(path)
    record = (path / "sweep.json").read_bytes()
    (path / "sweep.json").write_bytes(record.replace(b'"fake"', b'"fame"'))
    with pytest.raises(disk.StoreError, match=r"sweep\.json is damaged"):
        grid.reopen(path)


def of_points(*points, axes=("a",)):
    count = {axis: range(len(points)) if axis == "a" else range(1) for axis in axes}
    return grid_dataset.combined(count, points, dict.fromkeys(axes, ""))


def test_what_differs_in_shape_is_left_out_by_name():
    data = of_points(
        xr.Dataset({"x": ("n", [1.0, 2.0]), "y": 3.0, "only": 1.0, "t": 1.0}),
        xr.Dataset({"x": ("n", [1.0]), "y": 4.0, "t": "text"}),
    )
    assert [*data.data_vars] == ["y"]
    assert data.attrs["left_out"] == "x, only, t"
    assert "Left out, since their dimensions differ between points: x, only, t." in (
        grid_plots.summary(data)
    )
    with pytest.raises(disk.StoreError, match="no variable has the same dimensions"):
        of_points(xr.Dataset({"x": ("n", [1.0, 2.0])}), xr.Dataset({"x": ("n", [1.0])}))


def test_positions_that_differ_become_a_variable():
    def point(scale):
        ns = scale * np.arange(3)
        return xr.Dataset(
            {"x": ("n", ns**2)},
            {"n": ("n", ns, {"units": "1"}), "m": ("k", [1, 2]), "theta": scale},
        )

    data = of_points(point(1), point(2))
    assert data["n_values"].values.tolist() == [[0, 1, 2], [0, 2, 4]]
    assert data["n_values"].attrs == {"units": "1"}
    assert "n" not in data.variables
    assert [*data.data_vars] == ["x"]
    assert data["theta"].dims == ("a",)
    assert data["m"].dims == ("k",)
    assert data["x"].values.tolist() == [[0, 1, 4], [0, 4, 16]]


def test_a_dimension_of_the_study_with_the_name_of_an_axis_is_renamed():
    point = xr.Dataset({"x": ("seed", [1.0, 2.0]), "a": 5.0}, {"seed": [0, 1]}, {"all": 1, "k": 2})
    other = point.assign_attrs(k=3)
    data = of_points(point, other, axes=("a", "seed"))
    assert data["x"].dims == ("a", "seed", "own_seed")
    assert data["own_a"].values.tolist() == [[5.0], [5.0]]
    assert "k" not in data.attrs
    assert data.attrs["all"] == 1


def lines(ax):
    return [(line.get_label(), *map(list, line.get_data())) for line in ax.get_lines()]


def test_the_figure_has_means_over_seeds_with_their_interval():
    values = np.random.default_rng(0).normal(size=(5, 3, 2, 4))
    data = xr.Dataset(
        {
            "loss": (("seed", "n", "kind", "own"), values, {"units": "nats"}),
            "same": ("n", [0.3, 0.1 + 0.2, 0.3]),
        },
        {"seed": range(5), "n": ("n", [10, 1, 100], {"long_name": "Samples"}), "kind": ["a", "b"]},
        {"axes": "seed, n, kind"},
    )
    figure = grid_plots.plot(data)["sweep"]
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("n: Samples", "loss [nats] (mean over own)")
    assert ax.get_xscale() == "log"
    means = values.mean(-1)
    order = [1, 0, 2]
    for k, (label, x, y) in enumerate(lines(ax)):
        assert label == f"kind = {'ab'[k]}"
        assert x == [1, 10, 100]
        np.testing.assert_allclose(y, means.mean(0)[order, k])
        of_one = means[:, :, k]
        half = stats.t.ppf(0.975, 4) * of_one.std(0, ddof=1) / 5**0.5
        (path,) = ax.collections[k].get_paths()
        top = [path.vertices[path.vertices[:, 0] == at, 1].max() for at in x]
        np.testing.assert_allclose(top, (of_one.mean(0) + half)[order])
    assert grid_plots.summary(data).splitlines()[1] == "Drawn: loss (mean over own)."


def test_the_figure_of_text_of_seeds_alone_and_of_nothing():
    kinds = xr.Dataset(
        {"x": (("kind", "seed"), [[1.0, 2.0], [3.0, 5.0]])},
        {"kind": ["p", "$q"], "seed": [0, 1]},
        {"axes": "kind"},  # these seeds are the study's own
    )
    (ax,) = grid_plots.plot(kinds)["sweep"].axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["p", r"\$q"]
    assert lines(ax)[0][1:] == ([0, 1], [1.5, 4.0])
    seeds = xr.Dataset({"x": ("seed", [3.0, 1.0])}, {"seed": [5, 2]}, {"axes": "seed"})
    (ax,) = grid_plots.plot(seeds)["sweep"].axes
    assert lines(ax)[0][1:] == ([2, 5], [1.0, 3.0])
    assert grid_plots.plot(seeds.assign(x=("seed", [1.0, 1.0]))) == {}
    assert "so there is no figure" in grid_plots.summary(seeds.assign(x=("seed", [1.0, 1.0])))


@pytest.mark.parametrize("axes", ["", "b", "ab, b", 3, None])
def test_a_result_with_other_axes_than_its_dimensions_is_refused(axes, tmp_path):
    data = xr.Dataset({"x": ("ab", [1.0, 2.0])}, attrs={} if axes is None else {"axes": axes})
    for show in (grid_plots.plot, grid_plots.summary):
        with (
            pytest.raises(disk.StoreError, match="cannot show its result"),
            store.showing(tmp_path),
        ):
            show(data)


def test_many_lines_have_colours_in_order_and_few_labels():
    data = xr.Dataset(
        {"x": (("n", "m"), np.arange(80.0).reshape(2, 40))},
        {"n": [0, 1], "m": range(40)},
        {"axes": "n, m"},
    )
    figure = grid_plots.plot(data)["sweep"]
    assert len({line.get_color() if isinstance(line.get_color(), str) else tuple(line.get_color())
                for line in figure.axes[0].get_lines()}) == 40  # fmt: skip
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == 12
    assert (labels[0], labels[-1]) == ("m = 0", "m = 39")


@pytest.fixture
def call(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(line):
        code = cli.main(shlex.split(line))
        return code, *capsys.readouterr()

    return run


def test_values_have_the_types_of_their_fields():
    words = [
        "seed=2,0:2,9:5:-2",
        "fast=true,false",
        "mode=b,a",
        "limit=3",
        "kind=x:y",
        "sigma=1,.5",
    ]
    assert swept([*words, "budget.steps=1"], Config()) == {
        "seed": [2, 0, 1, 9, 7],
        "fast": [True, False],
        "mode": ["b", "a"],
        "limit": [3],
        "kind": ["x:y"],
        "sigma": [1.0, 0.5],
        "budget.steps": [1],
    }


@pytest.mark.slow
def test_from_python_a_grid_is_drawn_and_described(study, tmp_path):
    result = grid.run_grid("fake", {"seed": [4, 2]}, out=str(tmp_path / "g"), sigma=0.25, sizes=[1])
    assert study.ran == [(4, 0.25), (2, 0.25)]
    assert (result.record["config"]["sigma"], result.record["config"]["sizes"]) == (0.25, [1])
    assert (tmp_path / "g/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert repr(result).splitlines()[1:] == [
        "2 points: seed = 4, 2.", "Drawn: loss (mean over size)."
    ]  # fmt: skip


@pytest.mark.slow
def test_the_command_makes_continues_and_shows_a_grid(call, study, tmp_path):
    code, out, err = call("run fake --sweep seed=0:2 --sweep sigma=.25,1 --out g")
    assert code == 0, err
    assert study.ran == PLACES
    assert "4 points: seed (2) x sigma (2)" in err
    assert out.splitlines()[0] == "4 points: seed = 0, 1; sigma = 0.25, 1."
    assert out.splitlines()[-2:] == ["g/result.nc", "g/sweep.png"]
    picture = (tmp_path / "g/sweep.png").read_bytes()
    (tmp_path / "g/sweep.png").unlink()
    assert call("plot g")[:2] == (0, out)
    assert (tmp_path / "g/sweep.png").read_bytes() == picture
    code, _, err = call("run fake --sweep seed=0:3:2,1:2 --sweep sigma=.25,1 --out g --resume")
    assert (code, study.ran[4:]) == (0, [(2, 0.25), (2, 1.0)])
    assert "4 of 6 points were finished before" in err
    assert call("report .")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h2>fake over seed, sigma (g)</h2>" in page
    assert "6 points: seed = 0, 2, 1; sigma = 0.25, 1." in page
    assert page.count("<h2>") == 1
    study.stop = len(study.ran) + 1
    code, _, err = call("run fake --sweep seed=7:9")
    assert code == 130
    assert "continue with: sail-jax run fake --sweep seed=7:9 --resume" in err
    assert call("report results")[0] == 2
    study.stop = None
    assert call("run fake --sweep seed=7:9 --resume")[0] == 0
    assert (tmp_path / "results/fake_sweep/result.nc").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--sweep sed=1", "--sweep: no field is called 'sed' (nearest: 'seed'"),
        ("--sweep seed", "--sweep: expected FIELD=VALUES, such as seed=0:10; got 'seed'"),
        ("--sweep seed=", "expected FIELD=VALUES"),
        ("--sweep seed=1 --sweep seed=2", "seed occurs twice"),
        ("--sweep seed=1,x", "--sweep: seed: invalid int value: 'x'"),
        ("--sweep seed=3:0", "seed: no values to sweep"),
        ("--sweep seed=1:x", "seed: expected START:STOP or START:STOP:STEP; got '1:x'"),
        ("--sweep seed=0:3:0", "expected START:STOP"),
        (f"--sweep seed=0:{10**40}", "at most 10,000 points"),
        ("--sweep sigma=0:3", "sigma: invalid float value: '0:3'"),
        ("--sweep sigma=-1", "sigma must be at least 0; got -1.0 (at sigma=-1.0)"),
        ("--sweep sizes=1,2", "sizes is not a single number, truth value or text"),
        ("--sweep seed=1 --seed 2", "seed is swept, so it must not be set, too"),
        ("--sweep seed=1 --processes auto", "--processes is for a single run"),
        ("--sweep fast=yes", "--sweep: fast: expected one of true, false; got 'yes'"),
        ("--sweep mode=c", "--sweep: mode: expected one of a, b; got 'c'"),
        ("--sweep limit=3,None", "limit cannot be swept: "),
        ("--sweep seed=1 --on here", "--on: expected local:N"),
        ("--on local:2", "--on is for --sweep"),
    ],
)
def test_bad_usage_of_sweeps_begins_nothing(line, says, call, tmp_path):
    code, out, err = call(f"run fake {line} --out g")
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "g").exists()


@pytest.mark.slow
def test_workers_make_the_same_bytes(tmp_path):
    axes = {"seed": range(2), "sigma": [0.1, 0.5]}
    points = grid.planned("ridge_transfer", axes, preset="tiny")
    here, there = (
        grid.compute(points, tmp_path / name, on=on)
        for name, on in (("here", None), ("there", "local:2"))
    )
    assert bytes_of(here.path) == bytes_of(there.path)
    grid.compute(points, tmp_path / "there", resume=True, on="local:2")
