"""Distances of samples against linear programmes, brute force and their own certificates."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance

from sail_jax import distances

METRICS = {1: "cityblock", 2: "euclidean", math.inf: "chebyshev"}


def samples(n=12, dim=3, scale=2.0, shift=0.5, seed=0):
    x, y = np.random.default_rng(seed).normal(size=(2, n, dim))
    return x, scale * y + shift


def dudley_programme(x, y, metric):
    """The supremum as it is defined, over the values of h at all points, L and M, L + M <= 1."""
    points, n = np.concatenate([x, y]), len(x)
    distance = cdist(points, points, metric)
    rows, total = [], 2 * n
    for i, j in itertools.permutations(range(total), 2):
        row = np.zeros(total + 2)
        row[[i, j, total]] = 1, -1, -distance[i, j]
        rows.append(row)
    for i, sign in itertools.product(range(total), (1, -1)):
        row = np.zeros(total + 2)
        row[[i, total + 1]] = sign, -1
        rows.append(row)
    rows.append(np.r_[np.zeros(total), 1, 1])
    gain = np.r_[np.ones(n), -np.ones(n), 0, 0] / n
    limits = np.r_[np.zeros(len(rows) - 1), 1]
    box = [(None, None)] * total + [(0, 1)] * 2
    return -linprog(-gain, np.array(rows), limits, bounds=box, method="highs").fun


@pytest.mark.parametrize("norm", METRICS)
@pytest.mark.parametrize(("scale", "shift"), [(0.1, 0.0), (1.0, 0.01), (5.0, 0.0), (1.0, 100.0)])
def test_dudley_is_the_value_of_its_linear_programme(norm, scale, shift):
    x, y = samples(12, 2, scale, shift)
    found = distances.dudley(x, y, norm=norm).value
    # HiGHS: feasibility 1e-7
    assert found == pytest.approx(dudley_programme(x, y, METRICS[norm]), abs=1e-7)


@pytest.mark.parametrize("norm", METRICS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_dudley_witness_proves_its_value(norm, scale):
    x, y = samples(60, 3, scale)
    found = distances.dudley(x, y, norm=norm)
    points, h = np.concatenate([x, y]), np.concatenate([found.h_x, found.h_y])
    slack = 1e-12  # sums of 60 numbers of order one
    assert np.abs(h).max() <= 1 - found.lipschitz + slack
    steep = found.lipschitz * cdist(points, points, METRICS[norm])
    assert (np.abs(h[:, None] - h) <= steep + slack).all()
    assert found.h_x.mean() - found.h_y.mean() == pytest.approx(found.value, abs=slack)


def test_dudley_of_two_points_is_2_d_over_2_plus_d():
    for gap in (1e-3, 1.0, 30.0, 1e9):
        found = distances.dudley([[0.0, 0.0]], [[gap, 0.0]])
        assert found.value == pytest.approx(2 * gap / (2 + gap), rel=1e-12)
        assert found.value < 2


@pytest.mark.parametrize("norm", METRICS)
def test_wasserstein_is_the_best_of_all_matchings(norm):
    x, y = samples(6)
    cost = cdist(x, y, METRICS[norm])
    best = min(cost[range(6), p].mean() for p in itertools.permutations(range(6)))
    assert distances.wasserstein1(x, y, norm=norm) == pytest.approx(best, rel=1e-14, abs=0)


def test_wasserstein_in_one_dimension():
    x, y = samples(200, 1)
    found = distances.wasserstein1(x, y)
    assert found == pytest.approx(wasserstein_distance(x[:, 0], y[:, 0]), rel=1e-12)
    flat = [np.pad(v, ((0, 0), (0, 1))) for v in (x, y)]  # the general path
    assert found == pytest.approx(distances.wasserstein1(*flat), rel=1e-12)


BOTH = {"W1": distances.wasserstein1, "Dudley": lambda x, y: distances.dudley(x, y).value}


@pytest.mark.parametrize("distance", BOTH.values(), ids=BOTH)
def test_both_are_metrics_on_samples(distance):
    x, y = samples(40)
    z = samples(40, seed=1)[0]
    assert distance(x, x[::-1]) == pytest.approx(0, abs=1e-14)
    assert distance(x, y) == pytest.approx(distance(y, x), rel=1e-12)
    assert distance(x, z) <= distance(x, y) + distance(y, z)
    turned = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))[0]
    moved = distance(x @ turned + 3, y @ turned + 3)
    assert moved == pytest.approx(distance(x, y), rel=1e-12)


def test_dudley_of_equal_samples_is_zero():
    found = distances.dudley(np.ones((3, 2)), np.ones((3, 2)))
    assert found.value == 0
    np.testing.assert_array_equal(np.r_[found.h_x, found.h_y], 0)


def test_dudley_lies_below_what_wasserstein_allows():
    for scale in (0.5, 1.0, 10.0):
        x, y = samples(50, 3, scale)
        w1 = distances.wasserstein1(x, y)
        # min(L W, 2 (1 - L)) at its best L
        assert distances.dudley(x, y).value <= 2 * w1 / (2 + w1) + 1e-12


@pytest.mark.parametrize("distance", [distances.wasserstein1, distances.dudley])
@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (np.ones(3), np.ones((3, 1)), ValueError, r"x must be a sample \[n, dim\].*got \(3,\)"),
        (np.ones((3, 1)), np.ones((0, 1)), ValueError, r"y must be a sample .*got \(0, 1\)"),
        (np.ones((3, 2)), np.ones((4, 2)), ValueError, r"y must have the shape of x, \(3, 2\)"),
        (np.ones((3, 2)), np.full((3, 2), np.nan), ValueError, "y must be finite"),
        (np.ones((3, 2)) * 1j, np.ones((3, 2)), TypeError, "x must be real numbers; got complex"),
        (np.ones((3, 2)), np.array([["a", "b"]] * 3), TypeError, "y must be real numbers"),
        (np.ones((9000, 1)), np.ones((9000, 1)), ValueError, "x must have at most 8192 points"),
    ],
)
def test_bad_samples_are_named(distance, x, y, error, message):
    with pytest.raises(error, match=message):
        distance(x, y)


def test_bad_norm_and_tracers_are_named():
    x, y = samples()
    with pytest.raises(ValueError, match="norm must be 1, 2 or inf; got 3"):
        distances.wasserstein1(x, y, norm=3)
    with pytest.raises(TypeError, match=r"x is traced: .* outside jax.jit"):
        jax.jit(distances.wasserstein1)(x, y)
