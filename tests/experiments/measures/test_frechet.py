"""The Fréchet distance against closed forms, SciPy's matrix square root, and its own laws."""

import numpy as np
import pytest
from scipy import linalg

from experiments.measures import frechet

EPS = float(np.finfo(np.float64).eps)
D = 6


def covariance(rng, d=D, rank=None):
    A = rng.normal(size=(rank or d, d))
    return A.T @ A


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_commuting_covariances(rng):
    """For A and B with common axes: the sum of (sqrt a_i - sqrt b_i)^2, and of the means."""
    Q = linalg.qr(rng.normal(size=(D, D)))[0]
    a, b, shift = rng.uniform(0.1, 4, D), rng.uniform(0.1, 4, D), rng.normal(size=D)
    found = frechet.distance(
        frechet.normal(shift, Q.T @ np.diag(a) @ Q), frechet.normal(0 * shift, Q.T @ np.diag(b) @ Q)
    )
    want = np.sum(shift**2) + np.sum((np.sqrt(a) - np.sqrt(b)) ** 2)
    # a sum of D terms below 5, each with a few roundings
    assert found == pytest.approx(want, abs=100 * D * EPS)


def test_the_matrix_square_root_of_scipy(rng):
    A, B, shift = covariance(rng), covariance(rng), rng.normal(size=D)
    found = frechet.distance(frechet.normal(shift, A), frechet.normal(0 * shift, B))
    root = np.real(linalg.sqrtm(A @ B))
    want = np.sum(shift**2) + np.trace(A + B - 2 * root)
    # sqrtm of a product that is not symmetric loses with its condition number, below 1e4 here
    assert found == pytest.approx(want, rel=1e4 * EPS * D)


def test_samples_have_the_moments_of_numpy(rng):
    x, y = rng.normal(size=(50, D)), rng.normal(size=(40, D)) @ covariance(rng) + 1
    fitted = frechet.fit(x)
    np.testing.assert_allclose(fitted.root.T @ fitted.root, np.cov(x.T), atol=100 * EPS)
    by_moments = frechet.distance(*(frechet.normal(z.mean(0), np.cov(z.T)) for z in (x, y)))
    assert frechet.between(x, y) == pytest.approx(by_moments, rel=1e3 * EPS)


@pytest.mark.parametrize("n", [4, 30])
def test_equal_distributions_are_at_distance_zero(rng, n):
    """Also for a singular covariance: the error is eps times the trace, not its square root."""
    x = 10 * rng.normal(size=(n, D))
    assert frechet.between(x, x[::-1]) < 100 * EPS * np.trace(np.cov(x.T))


def test_disjoint_supports_add_their_variances(rng):
    """Covariances of rank below d that share no direction: nothing is subtracted."""
    x, y = np.zeros((2, 20, D))
    x[:, :2], y[:, 2:] = rng.normal(size=(20, 2)), rng.normal(size=(20, D - 2))
    want = np.sum((x.mean(0) - y.mean(0)) ** 2) + x.var(0, ddof=1).sum() + y.var(0, ddof=1).sum()
    assert frechet.between(x, y) == pytest.approx(want, rel=100 * EPS)


def test_it_is_symmetric_and_turns_with_the_features(rng):
    x, y = rng.normal(size=(20, D)), rng.normal(size=(30, D)) + 1
    Q = linalg.qr(rng.normal(size=(D, D)))[0]
    there = frechet.between(x, y)
    assert frechet.between(y, x) == pytest.approx(there, rel=100 * EPS)
    assert frechet.between(x @ Q, y @ Q) == pytest.approx(there, rel=100 * EPS)
    assert frechet.between(3 * x, 3 * y) == pytest.approx(9 * there, rel=100 * EPS)


def test_the_bias_of_finite_samples_falls_as_one_over_n(rng):
    """Two samples of one distribution: four times the points, a quarter of the distance."""
    mean = [
        np.mean([frechet.between(*rng.normal(size=(2, n, D))) for _ in range(100)])
        for n in (200, 800)
    ]
    # each mean of 100 varies by about 4 %: their ratio by 6 %, of which 4 are allowed
    assert mean[0] / mean[1] == pytest.approx(4, rel=0.24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: frechet.fit(np.zeros((1, 3))), r"n of at least 2; got shape \[1, 3\]"),
        (lambda: frechet.fit(np.zeros(3)), r"got shape \[3\]"),
        (lambda: frechet.fit([[0.0], [np.nan]]), r"sample\[1\] is not finite"),
        (lambda: frechet.normal(np.zeros(2), np.eye(3)), r"shapes \[2\] and \[3, 3\]"),
        (lambda: frechet.between(np.eye(3), np.eye(2)), "dimensions must be equal; got 3 and 2"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
