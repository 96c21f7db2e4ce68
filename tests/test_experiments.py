"""Every registered experiment keeps the protocol: run, stored, read back, drawn."""

import dataclasses
import functools
import importlib
import math
import re

import jax
import numpy as np
import pytest
import xarray as xr

from experiments.lab import registry, store
from experiments.lab.findings import VERDICTS
from experiments.pages.gallery import preset_of
from sail_jax.drawing import style

TIMES = ["seconds"]  # measured anew in each run


@functools.cache
def _direct(name) -> xr.Dataset:
    study = registry.load(name)
    return study.run(study.presets["tiny"], store.direct)


@pytest.fixture(scope="module", params=registry.studies())
def kept(request, tmp_path_factory):
    """The experiment, its folder after an interruption and a resume, and the stored dataset."""
    name, study = request.param, registry.load(request.param)
    path, config = tmp_path_factory.mktemp(request.param), study.presets["tiny"]
    stages = []

    def stopping(stage):
        def stopped(stage_name, compute, **options):
            stages.append(stage_name)
            if len(stages) == 2:
                raise KeyboardInterrupt
            return stage(stage_name, compute, **options)

        return stopped

    run = store.Run.open(path, name, config)
    with run, pytest.raises(KeyboardInterrupt):
        store.complete(run, study, config, stopping)
    with store.Run.open(path, name, config, resume=True) as run:
        dataset, figures = store.complete(run, study, config)
    return name, study, path, dataset, figures


def test_presets_are_documented_frozen_configs():
    for name in registry.studies():
        study = registry.load(name)
        assert re.fullmatch(r"[A-Z].*\?", study.question)
        assert {"default", "tiny"} <= study.presets.keys()
        for config in study.presets.values():
            assert isinstance(config, study.config)
            assert isinstance(config.seed, int)
            assert store.config_record(config)
            with pytest.raises(dataclasses.FrozenInstanceError):
                config.seed = 1


def test_presets_are_told_apart_by_what_they_say():
    """Equal to another is at most the default, under the name of what it is: pages call it the
    default."""
    for name in registry.studies():
        study = registry.load(name)
        presets = dict(study.presets)
        default = presets["default"]
        assert sum(preset == default for preset in presets.values()) <= 2, name
        for preset, config in presets.items():
            record = store.config_record(config) | {"seed": 7}
            told = "default" if config == default else preset
            assert preset_of(study, record) == told, (name, preset)


def test_resumed_and_stored_is_the_direct_result_bit_for_bit(kept):
    name, _, _, dataset, _ = kept
    fresh, stored = (ds.drop_vars(TIMES, errors="ignore") for ds in (_direct(name), dataset))
    assert set(fresh.variables) == set(stored.variables)
    assert fresh.sizes == stored.sizes
    for variable in fresh.variables:
        a, b = fresh[variable], stored[variable]
        assert a.dims == b.dims
        assert a.attrs == b.attrs
        if a.dtype.kind in "biuf":
            assert a.dtype == b.dtype, variable
            assert a.values.tobytes() == b.values.tobytes(), variable
        else:
            np.testing.assert_array_equal(a.values.astype(str), b.values.astype(str))


def test_the_answer_is_computed_from_the_dataset(kept):
    name, study, _, dataset, _ = kept
    answer = study.summary(dataset)
    assert answer == study.summary(_direct(name))
    assert answer.endswith(".")
    assert re.search(r"\d", answer)
    assert not re.search(r"\b(nan|inf|None)\b", answer)


def test_findings_are_computed_from_the_dataset(kept):
    name, study, _, dataset, _ = kept
    found = study.findings(dataset)
    assert repr(found) == repr(study.findings(_direct(name)))
    assert len({one.claim for one in found}) == len(found)
    for one in found:
        assert all(part.strip() for part in one[:5])
        assert one.verdict in VERDICTS
        assert not re.search(r"\b(inf|None)\b", " ".join(one[:5]))


def test_figures_only_draw(kept, monkeypatch):
    _, study, path, dataset, figures = kept
    before = dataset.copy(deep=True)
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("plot compiled something"))
    again = study.plot(dataset)
    assert dataset.identical(before)
    assert again.keys() == figures.keys()
    assert again
    for name, figure in again.items():
        assert style.png(figure) == (path / f"{name}.png").read_bytes()
        assert style.describe(figure)


def test_figures_are_labelled_and_their_text_stays_inside(kept):
    for figure in kept[4].values():
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        for ax in figure.axes:
            assert ax.get_xlabel() or ax.get_ylabel() or ax.get_title() or ax.get_title("left")
            for text in (ax.xaxis.label, ax.yaxis.label, ax.title):
                if text.get_text():
                    box = text.get_window_extent()
                    # one pixel for rounding
                    assert min(box.x0, box.y0) > -1
                    assert box.x1 < width + 1
                    assert box.y1 < height + 1


def test_the_style_touches_nothing_global(kept):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    kept[1].plot(kept[3])
    assert dict(mpl.rcParams) == before
    pyplot = importlib.import_module("matplotlib._pylab_helpers")
    assert pyplot.Gcf.figs == {}


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"'transfer_fase' \(nearest: 'transfer_phase'"):
        registry.load("transfer_fase")
    known = r"known: cross_task_linearity, .*ledger, .*transfer_phase\)$"
    with pytest.raises(ValueError, match=known):
        registry.load("os.path")


def test_verdicts_in_words():
    from experiments.studies.ledger.findings import wording

    assert wording(True, True) == "holds"
    assert wording(False, False) == "fails as printed (expected)"
    for unexpected in (wording(True, False), wording(False, True)):
        assert unexpected.split()[0].rstrip(",").isupper()


def test_the_ledger_draws_infinite_scores_and_bounds():

    scores = np.array([0.5, -math.inf, 1e9, -300.0])
    n = len(scores)
    dataset = xr.Dataset(
        {
            "score": ("claim", scores),
            "score_name": ("claim", ["z"] * n),
            "relation": ("claim", ["=", "=", ">=", "<="]),
            "expected": ("claim", np.array([True, False, True, True])),
        },
        {"claim": [f"c{i}" for i in range(n)]},
    )
    (figure,) = registry.load("ledger").plot(dataset).values()
    (ax,) = figure.axes
    low, high = ax.get_xlim()
    drawn = [float(line.get_xdata()[0]) for line in ax.lines]
    assert len(drawn) == n
    assert all(low < x < high for x in drawn)
    assert [line.get_marker() for line in ax.lines] == ["o", "o", ">", "<"]
