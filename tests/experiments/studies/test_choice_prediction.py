"""`choice_prediction`: forecasts on data whose numbers are known, scores by hand, and the tasks."""

import jax
import numpy as np
import pytest
from scipy.stats import norm

from experiments.data.files import Pool
from experiments.data.tokens import Tokens
from experiments.studies.choice_prediction import config, forecasts, networks, run, scores
from theory import merging
from theory.merging.gaussian import GaussianTasks


def test_chances_are_those_of_normal_risks():
    """A difference with the standard error of the jackknife; equal risks share the probability."""
    rng, gap = np.random.default_rng(0), 1.0
    others = gap + rng.standard_normal(6)
    risks = np.zeros((7, 3))
    risks[:, 1], risks[:, 2] = np.append(gap, others), np.inf
    error = np.sqrt(5 / 6 * np.sum((others - others.mean()) ** 2))
    found = forecasts.chances(risks, rng, 40_000)
    expected = norm.cdf(gap / error)
    assert abs(found[0] - expected) < 4 * np.sqrt(expected * (1 - expected) / 40_000)
    assert found[2] == 0
    assert found.sum() == pytest.approx(1)
    assert forecasts.chances(np.ones((3, 2)), rng, 100).tolist() == [0.5, 0.5]


def _linear_problem():
    """Isotropic inputs of 4 dimensions, a target of size 2, and a source at 45 degrees."""
    rng, n = np.random.default_rng(1), 200
    x = rng.standard_normal((n, 4))
    y = x @ [2.0, 0.0, 0.0, 0.0] + 0.5 * rng.standard_normal(n)
    return x @ x.T, y, x @ [3.0, 3.0, 0.0, 0.0]


def test_numbers_are_found_in_a_linear_problem():
    """Within 5 standard errors. Relative errors of a sample of n are about 1 / sqrt(2 n)."""
    gram, y, source = _linear_problem()
    n = len(y)
    assert 3.5 < forecasts.effective_dimension(gram) < 4
    found = forecasts._moments(gram, y, source, np.arange(n), 4)
    np.testing.assert_allclose(found, [np.pi / 4, 0.5, 2.0, 18**0.5 / 2], rtol=5 / (2 * n) ** 0.5)


@pytest.mark.slow
def test_a_far_source_is_not_used_alone_if_samples_are_many():
    risks, found = forecasts.by_numbers(*_linear_problem())
    assert (found["n"], found["d"]) == (200, 4)
    assert risks.shape == (1 + forecasts.BLOCKS, len(networks.CHOICES))
    assert (risks[:, 1] > 2 * risks.min(1)).all()


def test_left_out_errors_are_those_of_refits():
    rng, n = np.random.default_rng(2), 6
    x, y = rng.standard_normal((n, 3)), rng.standard_normal(n)
    found = forecasts._left_out(x @ x.T, y, lambda s: s / (s + forecasts.RIDGES[:, None]))
    errors = np.empty((len(forecasts.RIDGES), n))
    for i in range(n):
        kept = np.arange(n) != i
        for k, ridge in enumerate(forecasts.RIDGES * np.sum(x[kept] ** 2)):
            fit = np.linalg.solve(x[kept].T @ x[kept] + ridge * np.eye(3), x[kept].T @ y[kept])
            errors[k, i] = (x[i] @ fit - y[i]) ** 2
    # Directions outside the span of the features have eigenvalues of 1e-9 in the Gram matrix.
    np.testing.assert_allclose(found, errors[errors.mean(1).argmin()], rtol=1e-4)


@pytest.mark.parametrize("support", [1.0, 0.2])
def test_the_spread_of_drawn_task_vectors_is_found(support):
    """Moments of 10^5 entries, whose relative errors are some per cent on the sparse bed."""
    tasks = GaussianTasks(4, 0.6, 0.8, 0.3, support, 1.0)
    drawn = merging.draw_tasks(jax.random.key(0), tasks, 100_000)
    rng = np.random.default_rng(0)
    halves = drawn.optima + 0.3 * 2**0.5 * rng.standard_normal((2, *drawn.optima.shape))
    found = forecasts._fit(drawn.vectors, halves)
    for name in ("shared", "heterogeneity", "noise", "support"):
        assert getattr(found, name) == pytest.approx(getattr(tasks, name), rel=0.08), name
    # Scales of entries that are common to all tasks are not sparsity.
    scales = np.exp(rng.standard_normal(100_000) / 3)
    scaled = forecasts._fit(scales * drawn.vectors, scales * halves)
    assert scaled.support == pytest.approx(support, rel=0.1)
    predicted = np.array(forecasts._excesses(found))
    expected = np.array(forecasts._excesses(tasks))
    assert predicted.argmin() == expected.argmin()


def test_scores_by_hand():
    """Three settings, won by 0, 0 and 1. The majority of the others is 0, or a tie, which 0 has."""
    loss = np.array([[1.0, 2.0], [1.0, 3.0], [2.0, 1.0]])[:, None]
    chance = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])[:, None]
    family = np.zeros(3, int)
    case = scores.Case(["a", "b"], loss, chance, "b", family)
    # Settings of another family do not count.
    twice, again = (np.concatenate([x, x]) for x in (loss, chance))
    both = scores.Case(["a", "b"], twice, again, "b", np.repeat([0, 1], 3))
    np.testing.assert_array_equal(both.hits()["majority"], np.tile(case.hits()["majority"], 2))
    hits = {"theory": [1, 0, 1], "majority": [1, 1, 0], "always": [0, 0, 1]}
    assert {k: x.tolist() for k, x in case.hits().items()} == hits
    regrets = {"theory": [0, 2, 0], "majority": [0, 0, 1], "always": [1, 2, 0]}
    assert {k: x.tolist() for k, x in case.regrets().items()} == regrets
    briers = case.briers()
    np.testing.assert_allclose(briers["theory"], [0.02, 1.28, 0.18])
    np.testing.assert_allclose(briers["frequencies"], [0.5, 0.5, 2.0])
    predicted, observed = case.calibration(np.ones(3))
    # By bin: .1; .2 and .3, of which .2 wins; .7, which wins; .8 and .9, of which .9 wins.
    np.testing.assert_allclose(predicted, [np.nan, 0.1, 0.25, np.nan, 0.7, 0.85])
    np.testing.assert_allclose(observed, [np.nan, 0, 0.5, np.nan, 1, 0.5])


def test_settings_have_each_level_equally_often():
    made = run.settings(config.DEFAULT, "images", np.random.default_rng(0), 31)
    levels = vars(config.DEFAULT.levels).items()
    factors = {name: x for name, x in levels if not name.startswith("text_")}
    for name, levels in factors.items():
        counts = [np.sum(made[name] == level) for level in levels]
        assert sum(counts) == 31
        assert max(counts) - min(counts) <= 1


def test_tasks_of_images_and_texts():
    """Ten groups of tokens, about equally frequent. A shift keeps the class."""
    rng = np.random.default_rng(0)
    line = rng.integers(0, 40, 5000)
    family, data = networks.of_text(Tokens(line, line, 40), 0)
    assert np.bincount(data.classes).min() > 0.8 * len(data.classes) / networks.CLASSES
    np.testing.assert_array_equal(data.inputs[0][:, :-1], data.inputs[1][:, 1:])
    images = np.zeros((12, 3, 3, 1), np.float32)
    images[:, 0] = 1
    family, data = networks.of_images(Pool(images, np.arange(12)))
    assert data.classes.max() == 9
    assert not np.array_equal(*data.inputs)
    shape = jax.eval_shape(
        lambda x: networks.output(family, networks._start(family, x, jax.random.key(0)), x),
        data.inputs[0],
    ).shape
    assert shape == (12,)
