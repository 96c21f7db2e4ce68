"""The moments of merged Gaussian task vectors, by sums over grids and at the borders."""

import math
from dataclasses import replace

import numpy as np
import pytest

from theory.merging import (
    GaussianTasks,
    best_merge,
    dense_moments,
    merge_moments,
    trim_threshold,
)
from theory.merging.gaussian import METHODS, MergeMoments

PAIR = GaussianTasks(2, shared=0.6, heterogeneity=0.8, noise=0.5)
SPARSE = GaussianTasks(3, 0.6, 0.8, 0.5, support=0.2, elsewhere=0.3)


def merged_by_definition(method: str, x: np.ndarray, y: np.ndarray, cut: float) -> np.ndarray:
    """The merge of two task vectors, entry by entry."""
    x, y = (np.where(abs(t) > cut, t, 0.0) for t in (x, y))
    if method == "trim":
        return (x + y) / 2
    sign = np.sign(x + y)
    agree = [t * sign > 0 for t in (x, y)]
    return (x * agree[0] + y * agree[1]) / np.maximum(agree[0] + 1 * agree[1], 1)


@pytest.mark.parametrize("method", ["trim", "ties"])
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_moments_are_sums_over_a_grid(method, density):
    """Two tasks: over both entries, with E[c | entries] by the normal equations. The tolerance is
    that of a sum over a function with jumps, the step of 0.02 times their share of the grid."""
    cut = trim_threshold(PAIR, density)
    at = (np.arange(701) - 350) * 0.02
    x, y = np.meshgrid(at, at)
    variance, shared = PAIR.spread**2, PAIR.shared**2
    inverse = np.linalg.inv([[variance, shared], [shared, variance]])
    weight = np.exp(-(inverse[0, 0] * (x**2 + y**2) + 2 * inverse[0, 1] * x * y) / 2)
    weight /= weight.sum()
    m = merged_by_definition(method, x, y, cut)
    known = inverse @ [shared + PAIR.heterogeneity**2, shared]
    found = merge_moments(PAIR, method, density)
    assert found.square == pytest.approx(np.sum(weight * m**2), rel=4e-3)
    optimum = known[0] * x + known[1] * y
    assert found.product == pytest.approx(np.sum(weight * m * optimum), rel=4e-3)


@pytest.mark.parametrize("tasks", [replace(PAIR, tasks=1), replace(SPARSE, tasks=1)])
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_ties_of_one_task_is_trimming(tasks, density):
    """On the lattice only the cell around 0 is inexact, and it is trimmed."""
    trimmed, elected = (merge_moments(tasks, method, density) for method in ("trim", "ties"))
    assert elected == pytest.approx(trimmed, rel=1e-9)


@pytest.mark.slow
def test_equal_task_vectors_are_a_limit():
    """Nearly equal task vectors differ near the threshold alone."""
    alike = GaussianTasks(3, 1.0, 0.0, 0.0)
    for method in ("trim", "ties"):
        limit = merge_moments(alike, method, 0.2)
        near = merge_moments(replace(alike, heterogeneity=0.04), method, 0.2, cells=2)
        assert near == pytest.approx(limit, rel=0.04)


def test_the_base_loses_what_it_lacks():
    """Sums over all ways in which three tasks can use an entry."""
    p, h = SPARSE.support, SPARSE.elsewhere
    mean = 0.0
    for n in range(1, 4):
        gain = (n * SPARSE.shared) ** 2 + n * SPARSE.heterogeneity**2
        mean += math.comb(3, n) * p**n * (1 - p) ** (3 - n) * gain / (n + h * (3 - n)) / 3
    assert pytest.approx(mean) == SPARSE.start
    assert replace(SPARSE, support=1 - 1e-12).start == pytest.approx(
        replace(SPARSE, support=1.0).start
    )


@pytest.mark.parametrize(
    "tasks", [PAIR, GaussianTasks(5, 0.2, 1.0, 2.0), GaussianTasks(4, 1, 0.1, 1)]
)
def test_nothing_beats_the_average_where_all_tasks_use_all_entries(tasks):
    average = best_merge(tasks, "average").excess
    noise = tasks.noise**2 / tasks.tasks
    assert average == pytest.approx(tasks.start * noise / (tasks.start + noise) / 2)
    for method in METHODS:
        for density in (0.05, 0.3, 0.8, 1.0):
            least = merge_moments(tasks, method, density, cells=4).least
            assert least >= average * (1 - 1e-9 - 1e-3 * (method == "ties"))  # the lattice


def test_what_jax_can_trace_is_what_the_mean_is_of():
    """Compares the moments for arrays with truncated normal moments, in single precision."""
    tasks = GaussianTasks(5, 0.2, 1.0, 2.0)
    found = np.array(dense_moments(5, 0.2, 1.0, 2.0, np.array([1.0, 0.3])))
    kept = merge_moments(tasks, "average"), merge_moments(tasks, "dare", 0.3)
    np.testing.assert_allclose(found[0], [m.square for m in kept], rtol=1e-6)
    for moments in ([m.product for m in kept], [m.start for m in kept]):
        np.testing.assert_allclose(found[1], moments, rtol=1e-6)


def test_the_best_density_is_better_than_its_neighbours():
    found = best_merge(SPARSE, "ties", cells=4)
    assert 0.02 < found.density < 1
    for density in (0.8 * found.density, min(1.25 * found.density, 1.0)):
        assert merge_moments(SPARSE, "ties", density, cells=4).least > found.excess


def test_the_scale_is_the_vertex():
    moments = MergeMoments(2.0, 3.0, 7.0)
    assert moments.excess(moments.scale) == moments.least == pytest.approx((7 - 4.5) / 2)
    assert MergeMoments(0.0, 0.0, 1.0).scale == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GaussianTasks(0, 1, 1, 1), "tasks must be a whole number"),
        (lambda: GaussianTasks(2, -1, 1, 1), "shared must be 0, or from"),
        (lambda: GaussianTasks(2, 1, 1, 1, support=0.0), "support must be in"),
        (lambda: GaussianTasks(2, 1, 1, 1, elsewhere=2.0), "elsewhere must be in"),
        (lambda: merge_moments(PAIR, "mean"), "method"),  # pyright: ignore
        (lambda: merge_moments(PAIR, "trim", 0.0), "density must be in"),
        (lambda: merge_moments(GaussianTasks(2, 1.0, 1e-3, 0.0), "ties", 0.2), "for ties"),
        (lambda: merge_moments(GaussianTasks(2000, 1, 1, 1), "ties", 0.2), "must be fewer"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
