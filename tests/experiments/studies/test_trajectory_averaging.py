"""Averages compared with decay: predictions of fitted quadratics, measurements, and verdicts on
hand-made losses.
"""

import jax
import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.trajectory_averaging import findings, prediction, run, training
from sail_jax.trajectory import weights
from theory.merging.averaging_domains import followed

study = registry.load("trajectory_averaging")
TINY = study.presets["tiny"]


@pytest.fixture(scope="module")
def ran():
    return tiny_run("trajectory_averaging").dataset


def _loss(pace, distance, window, spacing, shape, decayed, before):
    """Half the mean square of an end point that is followed step by step, in units of the
    stationary variance: of the average, or of the decayed run."""
    scale = pace / (2 - pace)  # of `followed`, which has unit noise and a unit start
    count = window // spacing + 1
    ends = followed(pace, spacing, weights(shape, count), scale)
    mean, variance = ends[1] if decayed else ends[0]
    return (distance * (1 - pace) ** before * mean) ** 2 + variance / scale


@pytest.mark.slow
def test_quadratics_off_the_grid_are_predicted_from_their_averages():
    """Two directions, each between two curvatures of the grid: losses above the level to 0.5 %."""
    config = varied(
        study.presets["default"], steps=120, windows=(50, 100), shapes=("uniform", "cosine")
    )
    directions, level, longest = ((0.004, 4.0), (0.05, 2.0)), 1.5, 100

    def loss(*way, before):
        return level + sum(_loss(pace, far, *way, before) for pace, far in directions)

    curve = [loss(0, 1, "uniform", False, before=at) for at in range(0, longest + 1, 10)]
    averaged = [
        [loss(w, 10, shape, False, before=longest - w) for w in config.windows]
        for shape in config.shapes
    ]
    decayed = [
        [loss(w, 1, {"linear": "uniform"}.get(d, d), True, before=longest - w)
         for w in config.windows]
        for d in config.decays
    ]  # fmt: skip
    found = prediction.predict(prediction.design(config), np.array(curve), np.array(averaged))
    for name, expected in (("decayed", decayed), ("averaged", averaged)):
        np.testing.assert_allclose(found[name] - level, np.array(expected) - level, rtol=5e-3)


@pytest.fixture(scope="module")
def data():
    return run.load(TINY, "images")[0]


@pytest.mark.slow
def test_checkpoints_are_averaged_and_a_decay_of_ones_changes_nothing(data, monkeypatch):
    """All weight on the last checkpoint, or a rate that does not fall, gives the constant run."""
    monkeypatch.setattr(training, "weights", lambda shape, n: np.eye(n)[-1])
    monkeypatch.setattr(training, "decay_of", np.ones_like)
    found = training.measure(TINY, "images", data, 0)
    last = found["curve"][-1]
    for way in ("averaged", "decayed"):
        np.testing.assert_allclose(found[way], np.broadcast_to(last, found[way].shape), rtol=1e-4)


@pytest.mark.slow
def test_runs_are_repeatable_and_the_seed_matters(ran, data):
    again = training.measure(TINY, "images", data, 0)
    np.testing.assert_array_equal(again["decayed"], ran["decayed"].values[0, 0])
    other = training.measure(TINY, "images", data, 1)
    assert not np.allclose(again["decayed"], other["decayed"])


@pytest.mark.slow
def test_decay_and_averages_lower_the_loss_of_noisy_runs(ran):
    """The halves are disjoint, and predictions of averages are close to the fit."""
    assert not np.allclose(ran["curve"].sel(half="fit"), ran["curve"].sel(half="test"))
    fitted = ran["averaged"].sel(half="fit")
    assert abs(ran["predicted_averaged"] - fitted).max() < 0.5 * fitted.std()
    assert (ran["level"] >= 0).all()


def _hand_made(ran, average, decay, predicted):
    """Makes losses that rise by 1 per window, with a spread over seeds."""
    made = ran.copy(deep=True)
    spread = 0.01 * np.arange(ran.sizes["seed"])
    window = np.arange(ran.sizes["window"])
    for name, base in (
        ("averaged", average),
        ("decayed", decay),
        ("predicted_decayed", predicted),
    ):
        shape = made[name].transpose("task", ..., "seed", "window").shape
        tops = np.broadcast_to(base + spread[:, None] + window * (name == "averaged"), shape)
        dims = made[name].transpose("task", ..., "seed", "window").dims
        made[name] = (dims, tops.copy())
    made["curve"] = made["curve"] * 0 + 10.0 + 0.02 * made["seed"]
    made["offset"] = made["offset"] * 0
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("average", "decay", "wins"), [(3.0, 2.0, "holds"), (2.0, 3.0, "fails")])
def test_verdicts_of_hand_made_losses(ran, average, decay, wins):
    made = _hand_made(ran, average, decay, predicted=decay + 0.1)
    best, better, *_, longer, predicted = findings.findings(made)
    assert best.verdict == "holds"
    assert better.verdict in (wins, "undecided")
    assert np.sign(better.effect) == (1 if wins == "holds" else -1)
    assert longer.effect > 0
    assert predicted.effect > 0


@pytest.mark.slow
def test_boundaries_meet_theory():
    """For many checkpoints, the line is that of all iterates, to 10 %; for few, decay is
    better earlier."""
    lines = run._boundaries()
    short = run.TIMES < 1
    np.testing.assert_allclose(lines[-1, short], lines[0, short], rtol=0.1)
    assert (np.diff(lines[1:], axis=0) >= 0).all()
    assert (lines[1] == 0).any()
    assert jax.config.read("jax_enable_x64") is False
