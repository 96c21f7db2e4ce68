"""Exact means of Wishart matrices, and what follows from them for a learner who regularises."""

import jax.numpy as jnp
import numpy as np
import pytest

from theory import deep_linear as dl
from theory.deep_linear import penalised, regularised, risks, wishart

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 5), (6, 4), (7, 7), (40, 41), (90, 60)])
def test_moments_of_the_density_are_those_of_wishart_matrices(n, d):
    """E tr W = nd, E tr W^2 = nd(n + d + 1) and E tr W^-1 = m / (|n - d| - 1), for any n and d."""
    x, weights = map(np.asarray, wishart.spectrum(n, d))
    found = [(weights * x**power).sum() for power in (0, 1, 2)]
    np.testing.assert_allclose(found, [min(n, d), n * d, n * d * (n + d + 1)], rtol=1e-12)
    if abs(n - d) > 1:
        inverse = min(n, d) / (abs(n - d) - 1)
        np.testing.assert_allclose((weights / x).sum(), inverse, rtol=1e-9)


def test_ends_of_the_exact_risk():
    ends = wishart.ridge_risk(n=5, d=8, distance=1.0, sigma=0.5, penalty=jnp.array([0.0, jnp.inf]))
    np.testing.assert_allclose(ends, [dl.scratch_risk(n=5, d=8, sigma=0.5), 1.0], rtol=1e-12)
    assert np.isinf(wishart.ridge_risk(n=8, d=8, distance=1.0, sigma=0.5, penalty=0.0))
    assert float(wishart.ridge_risk(n=8, d=8, distance=1.0, sigma=0.0, penalty=0.0)) == 0.0
    with pytest.raises(ValueError, match=r"n must be a whole number >= 1; got 2.5"):
        wishart.ridge_risk(n=2.5, d=8, distance=1.0, sigma=0.5, penalty=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(sqrt\(n\) \+ sqrt\(d\)\)\^2 must be at most 1000"):
        wishart.ridge_risk(n=900, d=8, distance=1.0, sigma=0.5, penalty=0.1)


def test_a_fit_with_its_best_ridge_is_a_posterior_mean():
    """The overlap equals the size, and the boundary is 60 degrees, at any n, d and sigma only
    there."""
    for n, d, sigma in ((4, 9, 0.3), (9, 9, 1.0), (30, 9, 2.0)):
        best = float(penalised.best_penalty(n=n, d=d, distance=1.0, sigma=sigma))
        own, other = (
            wishart.learned(n=n, d=d, sigma=sigma, penalty=best * factor) for factor in (1.0, 2.0)
        )
        assert float(own.size2) == pytest.approx(float(own.overlap), rel=1e-12)
        assert float(regularised.l2sp_boundary(own)) == pytest.approx(np.pi / 3, rel=1e-12)
        assert abs(float(regularised.l2sp_boundary(other)) - np.pi / 3) > 0.05


@pytest.mark.slow
def test_a_free_direction_with_an_infinite_penalty_is_linear_transfer():
    theta, n, sigma = jnp.array([0.3, 1.2]), 9, 0.4
    rest = wishart.ridge_risk(n=n - 1, d=5, distance=jnp.sin(theta), sigma=sigma, penalty=jnp.inf)
    np.testing.assert_allclose(
        risks.refitted_risk(n=n, rest=rest, sigma=sigma),
        dl.linear_transfer_risk(n=n, theta=theta, sigma=sigma),
        rtol=1e-12,
    )


def test_on_each_line_both_sides_are_equal():
    """By the risks themselves, in the limit of which the line is one."""
    theta, sigma, d = 0.9, 0.4, 10**7
    n = float(regularised.linear_transfer_load(theta=theta, sigma=sigma)) * d
    assert float(penalised.best_risk(n=n, d=d, distance=1.0, sigma=sigma)) == pytest.approx(
        np.sin(theta) ** 2
    )
    for n in (30, 60, 90):
        free = regularised.direction_risk(
            n=n,
            d=60,
            theta=np.arcsin(np.sqrt(float(regularised.direction_sin2(n=n, d=60, sigma=sigma)))),
            sigma=sigma,
        )
        assert float(free) == pytest.approx(
            float(penalised.best_risk(n=n, d=60, distance=1.0, sigma=sigma))
        )


@pytest.mark.slow
def test_what_is_left_across_a_direction_is_the_regression_on_it():
    """Its quadratic form is the least |x.b - z a|^2 over a, computed with the whole covariance."""
    s, w, target = np.array([2.0, 1.0, 0.3, 0.1]), np.array([1.0, -1.0, 2.0, 0.5]), np.arange(4.0)
    left, beta = map(np.asarray, regularised.across(s, w, target))  # type: ignore[arg-type]
    b = target - (target @ w) / (w @ w) * w
    least = b @ (s * b) - (w @ (s * b)) ** 2 / (w @ (s * w))
    assert float(np.sum(left * beta**2)) == pytest.approx(least, rel=1e-12)
    assert left.sum() == pytest.approx(s.sum() - np.sum((s * w) ** 2) / (w @ (s * w)), rel=1e-12)


@pytest.mark.slow
def test_an_isotropic_source_has_the_limit_of_the_exact_distance():
    d, n, sigma, theta = 200, 100, 0.4, 0.7
    source, target = np.eye(d)[0], np.cos(theta) * np.eye(d)[0] + np.sin(theta) * np.eye(d)[1]
    offset = regularised.offset_from_source(
        jnp.ones(d), jnp.asarray(source), jnp.asarray(target), n=n, sigma=sigma, ridge=0.3
    )
    exact = regularised.distance2(theta, wishart.learned(n=n, d=d, sigma=sigma, penalty=0.3))
    assert float(jnp.sum(offset**2)) == pytest.approx(float(exact), rel=3e-3)
