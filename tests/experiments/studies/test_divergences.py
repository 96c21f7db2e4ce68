"""Distances between the laws of two linear tasks: closed forms compared with independent
evaluations, and bounds with each other and with matched samples."""

from math import pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import distances
from theory import problems
from theory.deep_linear import divergence_claims, divergences

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null


pytestmark = pytest.mark.usefixtures("float64")


E1, E2 = np.eye(4)[:2]
CASES = {
    "1 rad": (E1, np.cos(1) * E1 + np.sin(1) * E2, 0.2),
    "opposite": (E1, -E1, 0.2),
    "noiseless": (E1, E2, 0.0),
    "close": (E1, E1 + 1e-3 * E2, 0.2),
    "norms": (0.3 * E1, np.array([1.0, -2.0, 0.5, 0.1]), 1.0),
    "same feature": (E1, -30 * E1, 0.5),
    "from zero": (0 * E1, 2 * E2, 0.3),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def covariance(beta, sigma):
    """Computes the covariance of (x, y)."""
    top = np.c_[np.eye(len(beta)), beta]
    return np.r_[top, np.r_[beta, beta @ beta + sigma**2][None]]


def gaussian_kl(s, t):
    """Computes the divergence of centred Gaussians from their covariances."""
    ratio = np.linalg.solve(t, s)
    return (np.trace(ratio) - len(s) - np.linalg.slogdet(ratio)[1]) / 2


@pytest.mark.slow
@EACH
def test_kl_and_bures_against_the_full_covariances(case):
    beta_s, beta_t, sigma = case
    s, t = (covariance(b, sigma) for b in (beta_s, beta_t))
    if sigma > 0:
        expected = gaussian_kl(s, t)  # an error of eps times its terms, up to |t| |s| / sigma^2
        found = float(divergences.kl(beta_s, beta_t, sigma))
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)
    values, vectors = np.linalg.eigh(s)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    product = np.linalg.eigvalsh(root @ t @ root)
    squared = np.trace(s) + np.trace(t) - 2 * np.sqrt(np.maximum(product, 0)).sum()
    # the textbook form cancels, and its inner roots have errors sqrt(eps) where s or t is singular
    slack = 10 * np.sqrt(np.finfo(float).eps) * np.trace(t)
    found = float(divergences.wasserstein2(beta_s, beta_t, sigma))
    assert found**2 == pytest.approx(squared, abs=slack)


@EACH
def test_total_variation_against_simulation(case):
    """Null: E of P(|noise| < |delta.x| / 2 sigma) over x is the arctan."""
    beta_s, beta_t, sigma = case
    shift = np.linalg.norm(beta_s - beta_t) * np.random.default_rng(0).normal(size=100_000)
    found = float(divergences.total_variation(beta_s, beta_t, sigma))
    if sigma == 0:
        assert found == 1
        return
    values = np.asarray(jax.scipy.special.erf(np.abs(shift) / (2 * sqrt(2) * sigma)))
    assert abs(values.mean() - found) < Z_MAX * values.std() / sqrt(values.size)


@pytest.mark.slow
@EACH
def test_bounds_are_ordered_and_consistent(case):
    w1, dudley = divergences.wasserstein1_bounds(*case), divergences.dudley_bounds(*case)
    tv, cosine = divergences.total_variation(*case), divergences.cosine_gap(*case)
    rounding = 1 + 1e-12
    for bounds in (w1, dudley):
        assert 0 < bounds.lower <= bounds.upper * rounding
    assert w1.upper <= divergences.wasserstein2(*case) * rounding
    assert w1.upper <= sqrt(2 / pi) * np.linalg.norm(case[0] - case[1]) * rounding
    assert cosine <= dudley.upper
    assert dudley.upper <= min(2 * tv, w1.upper) * rounding
    assert dudley.upper < 2


@pytest.mark.slow
def test_the_bounds_are_tight_on_the_papers_tasks():
    theta = np.linspace(0.05, pi, 9)
    source, target = divergence_claims._at(theta, 4)
    w1 = divergences.wasserstein1_bounds(source, target, 0.2)
    dudley = divergences.dudley_bounds(source, target, 0.2)
    assert (np.asarray(w1.upper / w1.lower) < 1.12).all()
    assert (np.asarray(dudley.upper / dudley.lower) < 1.4).all()
    for bound in (*w1, *dudley):
        assert (np.diff(bound) > 0).all()


@pytest.mark.slow
@EACH
def test_bounds_against_matched_samples(case):
    """Mean distances of samples are at least those of the laws, hence at least the lower bounds;
    coupled, W_1 is on average at most W_2. Null: these."""
    beta_s, beta_t, sigma = case
    found, moved = [], []
    for key in jax.random.split(jax.random.key(0), 10):
        xy = divergences.coupled_samples(key, 150, beta_s, beta_t, sigma)
        x, y = (np.asarray(v) for v in xy)
        found.append((distances.wasserstein1(x, y), distances.dudley(x, y).value))
        moved.append(((x - y) ** 2).sum(1).mean())
    mean, error = np.mean(found, 0), np.std(found, 0, ddof=1) / sqrt(10)
    w1, dudley = divergences.wasserstein1_bounds(*case), divergences.dudley_bounds(*case)
    assert mean[0] > w1.lower - Z_MAX * error[0]
    assert mean[1] > dudley.lower - Z_MAX * error[1]
    w2 = float(divergences.wasserstein2(*case))
    assert mean[0] < w2 + Z_MAX * error[0]
    assert abs(np.mean(moved) - w2**2) < Z_MAX * np.std(moved, ddof=1) / sqrt(10)


@pytest.mark.slow
@EACH
def test_coupled_samples_have_the_laws_of_the_tasks(case):
    """Null: second moments of (u, v, y). u lies along beta_s - beta_t, v across it."""
    beta_s, beta_t, sigma = case
    n = 40_000
    pair = divergences.coupled_samples(jax.random.key(1), n, beta_s, beta_t, sigma)
    u = (beta_s - beta_t) / np.linalg.norm(beta_s - beta_t)
    for points, beta in zip(pair, (beta_s, beta_t), strict=True):
        across = np.linalg.norm(beta - (beta @ u) * u)
        expected = covariance(np.array([beta @ u, across]), sigma)
        products = np.asarray(points)[:, :, None] * np.asarray(points)[:, None, :]
        error = products.std(0) / sqrt(n)
        assert (np.abs(products.mean(0) - expected) < Z_MAX * error + 1e-12).all()


@pytest.mark.slow
def test_unused_dimensions_change_nothing():
    """W_1 in all of (x, y) and in (u, v, y) agree on the same points when the rest is shared."""
    beta_s, beta_t, sigma = CASES["1 rad"]
    x, y = map(
        np.asarray, divergences.coupled_samples(jax.random.key(2), 80, beta_s, beta_t, sigma)
    )
    reduced = distances.wasserstein1(x, y)
    rest = np.broadcast_to(np.random.default_rng(0).normal(size=7), (80, 7))
    assert distances.wasserstein1(np.c_[x, rest], np.c_[y, rest]) == pytest.approx(reduced)
    wide = [np.pad(b, (0, 6)) for b in (beta_s, beta_t)]
    for narrow, broad in zip(
        divergences.dudley_bounds(beta_s, beta_t, sigma),
        divergences.dudley_bounds(*wide, sigma),
        strict=True,
    ):
        assert float(narrow) == pytest.approx(float(broad), rel=1e-12)


def test_where_the_bounds_meet():
    opposite = divergences.wasserstein1_bounds(E1, -E1, 0.0)
    np.testing.assert_allclose(opposite, 2 * sqrt(2 / pi), rtol=1e-12)
    far = divergences.wasserstein1_bounds(E1, -1e4 * E1, 0.2)
    np.testing.assert_allclose(
        far, sqrt(2 / pi) * (np.hypot(1e4, 0.2) - np.hypot(1, 0.2)), rtol=1e-3
    )
    # Thm 2.2: as the tasks grow apart Dudley approaches 2, and never reaches it
    lower, upper = divergences.dudley_bounds(E1, -1e6 * E1, 0.2)
    assert 1.99 < lower <= upper < 2
    for distance in (divergences.wasserstein1_bounds, divergences.dudley_bounds):
        np.testing.assert_array_equal(distance(E1, E1, 0.2), 0)


def test_the_printed_bound_28_exceeds_every_value_of_dudley():
    assert float(divergences.cosine_gap(E1, -E1, 0.2)) == 0
    assert np.exp(-(0.2**2) / 2) * (1 + 1) / 2 > divergences.dudley_bounds(E1, -E1, 0.2).upper
    expected = np.exp(-0.02) * (np.exp(-0.5) - np.exp(-2.0)) / 2
    assert float(divergences.cosine_gap(E1, 2 * E2, 0.2)) == pytest.approx(
        expected, rel=1e-14, abs=0
    )


@pytest.mark.slow
def test_the_joint_mean_of_the_dudley_witness():
    """Null: its quadrature is E sgn(AB) min(|A|, |B|, clip); and A = B is the one-sided formula."""
    normal = np.random.default_rng(3).normal(size=(200_000, 2))
    for spread, covariance_, clip in ((1.3, 0.9, 0.7), (0.2, 0.15, 0.5), (5.0, -4.9, 0.1)):
        a = normal[:, 0]
        b = covariance_ * a + sqrt(spread**2 - covariance_**2) * normal[:, 1]
        values = np.sign(a * b) * np.minimum(np.minimum(np.abs(a), np.abs(b)), clip)
        arguments = (jnp.array(v) for v in (spread, covariance_, clip))
        found = float(divergences._clipped_joint_mean(*arguments))
        assert abs(values.mean() - found) < Z_MAX * values.std() / sqrt(len(values))
    one, clip = jnp.array(1.0), jnp.array(0.8)
    np.testing.assert_allclose(
        divergences._clipped_joint_mean(one, one, clip),
        divergences._clipped_mean(one, clip),
        rtol=1e-6,  # sixteen nodes, where the integrand ends in a root
    )


FUNCTIONS = {
    "kl": divergences.kl,
    "total_variation": divergences.total_variation,
    "wasserstein2": divergences.wasserstein2,
    "wasserstein1_bounds": divergences.wasserstein1_bounds,
    "cosine_gap": divergences.cosine_gap,
    "dudley_bounds": divergences.dudley_bounds,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_broadcasting_jit_vmap_and_float32(name):
    distance = FUNCTIONS[name]
    targets = np.stack([E1, E2, -E1, E1 + 1e-3 * E2])
    sigmas = np.array([0.2, 0.5, 1.0, 0.2])
    whole = np.stack(jax.tree.leaves(distance(E1, targets, sigmas)))
    one_by_one = jax.jit(jax.vmap(distance, (None, 0, 0)))(E1, targets, sigmas)
    np.testing.assert_allclose(np.stack(jax.tree.leaves(one_by_one)), whole, rtol=1e-10, atol=1e-14)
    symmetric = np.stack(jax.tree.leaves(distance(targets, E1, sigmas)))
    np.testing.assert_allclose(symmetric, whole, rtol=1e-10, atol=1e-14)
    with jax.enable_x64(False):
        single = [np.asarray(v) for v in jax.tree.leaves(distance(E1, targets, sigmas))]
    assert all(v.dtype == np.float32 for v in single)
    # the gap 1e-3 of unit vectors carries a relative error eps / 1e-3; Dudley's lower bound and
    # W_2 add a few eps of terms of order one
    np.testing.assert_allclose(np.stack(single), whole, rtol=5e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: divergences.kl(E1, E2, 0.0), "sigma must be positive .*allow_infinite"),
        (lambda: divergences.kl(E1, E2, -1.0), "sigma must be a finite standard deviation >= 0"),
        (lambda: divergences.total_variation(E1, E2[:3], 0.1), "must be vectors .* of one d"),
        (lambda: divergences.wasserstein2(1.0, 2.0, 0.1), "must be vectors"),
        (lambda: divergences.dudley_bounds(E1, E2 * np.nan, 0.1), "beta_t must be finite"),
        (lambda: divergences.wasserstein1_bounds(E1 / 0.0, E2, 0.1), "beta_s must be finite"),
        (
            lambda: divergences.coupled_samples(jax.random.key(0), 0, E1, E2, 0.1),
            "n must be at least 1",
        ),
        (
            lambda: divergences.coupled_samples(jax.random.key(0), 3, E1, np.eye(4), 0.1),
            r"one pair of tasks, .*got leading axes \(4,\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kl_without_noise():
    found = divergences.kl(E1, np.stack([E1, E2]), 0.0, allow_infinite=True)
    np.testing.assert_array_equal(found, [0, np.inf])


def test_angles_of_the_claims_are_those_of_the_problems():
    angles = np.linspace(0, pi, 4)
    expected = [problems.tasks(6, angle) for angle in angles]
    source, target = divergence_claims._at(angles, 6)
    np.testing.assert_allclose(source, [s for s, _ in expected], atol=1e-15)
    np.testing.assert_allclose(target, [t for _, t in expected], atol=1e-15)
