"""Every registered experiment follows the protocol: it is run, stored, read back and drawn."""

import dataclasses
import importlib
import inspect
import math
import re

import jax
import numpy as np
import pictures
import pytest
import xarray as xr
from cells import slow, slow_unless, soak, soak_unless
from tiny_runs import QUICK, STUDIES, tiny_run

from experiments.lab import registry, store
from experiments.lab.findings import VERDICTS
from experiments.pages.gallery import preset_of
from sail_jax.drawing import style

TIMES = ["seconds"]  # measured anew in each run
DRAWN = ("ledger", "ridge_transfer")  # in a second: others take up to ten


@pytest.fixture(scope="module", params=STUDIES)
def ran(request):
    """The experiment, and its tiny run."""
    return request.param, registry.load(request.param), tiny_run(request.param)


def of_one(quick, others=QUICK):
    """Parametrises `ran` over one quick experiment and several slow ones; all others are soak."""
    others = [name for name in others if name != quick]
    rest = [name for name in registry.studies() if name not in (quick, *others)]
    return pytest.mark.parametrize("ran", [quick, *slow(*others), *soak(*rest)], indirect=True)


def _interrupted_and_resumed(path, name, instead=None):
    """The dataset as stored; `instead` gives the arrays of a stage by its name, where they are not
    to be computed."""
    study, stages = registry.load(name), []
    config = study.presets["tiny"]

    def watched(stage):
        def stopped(stage_name, compute, **options):
            stages.append(stage_name)
            if len(stages) == 2:
                raise KeyboardInterrupt
            given = compute if instead is None else lambda *_: instead[stage_name]
            return stage(stage_name, given, **options)

        return stopped

    run = store.Run.open(path, name, config)
    with run, pytest.raises(KeyboardInterrupt):
        study.run(config, watched(run.stage))
    with store.Run.open(path, name, config, resume=True) as run:
        run.finish(study.run(config, watched(run.stage)))
        return store.load_result(path, run.record)


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
            assert preset_of(study, record) == (told, []), (name, preset)


def _same_bit_for_bit(found, expected):
    found, expected = (ds.drop_vars(TIMES, errors="ignore") for ds in (found, expected))
    assert set(found.variables) == set(expected.variables)
    assert found.sizes == expected.sizes
    for variable in expected.variables:
        a, b = expected[variable], found[variable]
        assert a.dims == b.dims
        assert a.attrs == b.attrs
        if a.dtype.kind in "biuf":
            assert a.dtype == b.dtype, variable
            assert a.values.tobytes() == b.values.tobytes(), variable
        else:
            np.testing.assert_array_equal(a.values.astype(str), b.values.astype(str))


OF_THEORY = (
    "merge_choice", "overtraining_linear", "regularised_transfer", "ridge_transfer",
    "several_sources", "transfer_factors", "transfer_phase", "transfer_scales",
)  # fmt: skip


@pytest.mark.parametrize("study", OF_THEORY)
def test_points_next_to_a_line_of_theory_say_which_draws_they_share(study):
    """All on one side of the line may mean that the law is wrong, or that they share data."""
    text = inspect.getsource(importlib.import_module(f"experiments.studies.{study}.plots"))
    found = [text[at.start() - 100 : at.end() + 100] for at in re.finditer(r"± (1 )?s\.e\.", text)]
    assert found
    assert not [label for label in found if not re.search("shared|share data|own data", label)]


# What is stored, and how, is determined by the lab and not by a study.
@pytest.mark.slow
@of_one("ridge_transfer")
def test_what_is_stored_of_the_stages_gives_the_result_bit_for_bit(ran, tmp_path):
    """A study has no other state than its stages."""
    name, study, (dataset, stages) = ran
    stored = _interrupted_and_resumed(tmp_path, name, stages)
    _same_bit_for_bit(stored, dataset)
    for key, value in dataset.attrs.items():
        np.testing.assert_array_equal(stored.attrs[key], value)
    assert study.summary(stored) == study.summary(dataset)
    assert repr(study.findings(stored)) == repr(study.findings(dataset))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        slow_unless(name == "ledger", name) if name in QUICK else soak_unless(False, name)
        for name in registry.studies()
    ],
)
def test_computed_again_the_result_is_the_same_bit_for_bit(name, tmp_path):
    _same_bit_for_bit(_interrupted_and_resumed(tmp_path, name), tiny_run(name).dataset)


@pytest.mark.parametrize(
    "name",
    ["ledger", *slow("ridge_transfer"), *soak(*(n for n in registry.studies() if n not in DRAWN))],
)
def test_drawn_again_the_figures_are_the_same_byte_for_byte(name):
    study, dataset = registry.load(name), tiny_run(name).dataset
    figures, again = study.plot(dataset), study.plot(dataset)
    assert figures.keys() == again.keys()
    for figure_name in figures:
        assert style.png(figures[figure_name]) == style.png(again[figure_name])


@pytest.mark.slow
def test_the_answer_is_computed_from_the_dataset(ran):
    _, study, (dataset, _) = ran
    answer = study.summary(dataset)
    assert answer.endswith(".")
    assert re.search(r"\d", answer)
    assert not re.search(r"\b(nan|inf|None)\b", answer)


@pytest.mark.slow
def test_findings_are_computed_from_the_dataset(ran):
    _, study, (dataset, _) = ran
    findings = study.findings(dataset)
    assert len({finding.claim for finding in findings}) == len(findings)
    for finding in findings:
        assert all(part.strip() for part in finding[:5])
        assert finding.verdict in VERDICTS
        assert not re.search(r"\b(inf|None)\b", " ".join(finding[:5]))


@pytest.mark.slow
@of_one("ridge_transfer", registry.studies())
def test_figures_only_draw_are_labelled_and_can_be_read(ran, monkeypatch):
    import matplotlib as mpl

    _, study, (dataset, _) = ran
    before, settings = dataset.copy(deep=True), dict(mpl.rcParams)
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("plot compiled something"))
    figures = study.plot(dataset)
    assert dataset.identical(before)
    assert figures
    for figure in figures.values():
        assert style.describe(figure)
        assert not pictures.flaws(figure)
        for ax in figure.axes:
            assert ax.get_xlabel() or ax.get_ylabel() or ax.get_title() or ax.get_title("left")
    assert dict(mpl.rcParams) == settings
    pyplot = importlib.import_module("matplotlib._pylab_helpers")
    assert pyplot.Gcf.figs == {}


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"'transfer_fase' \(nearest: 'transfer_phase'"):
        registry.load("transfer_fase")
    known = r"known: choice_prediction, .*ledger, .*, \.\.\.\)$"
    with pytest.raises(ValueError, match=known):
        registry.load("os.path")


def test_verdicts_in_words():
    from experiments.studies.ledger.findings import wording

    assert wording(True, True) == "holds"
    assert wording(False, False) == "fails, as expected"
    for unexpected in (wording(True, False), wording(False, True)):
        assert unexpected.split()[0].rstrip(",").isupper()


@pytest.mark.slow
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
