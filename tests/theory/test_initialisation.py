"""SAIL's theory: closed forms compared with models, tasks and samples, laws, and errors.

Unless said otherwise the tolerance is 1e-12: hundreds of operations on numbers of order one in
float64. Monte Carlo: |z| < 4 against the null that the closed form is the mean.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from sail_jax import proximal
from theory import initialisation as sail

SLOW = pytest.mark.slow
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


pytestmark = pytest.mark.usefixtures("float64")


def z_score(draws, mean):
    draws = np.asarray(draws, float)
    return abs(draws.mean() - mean) / (draws.std(ddof=1) / np.sqrt(draws.size))


# --- how near a start is --------------------------------------------------------------------------

CASES = [(1, 0.0, 1), (2, 3.0, 1), (5, 0.5, 2), (12, 40.0, 12)]


@pytest.mark.parametrize(("dim", "length", "rank"), CASES)
@pytest.mark.parametrize("ratio", [0.03, 0.7, 5.0])
def test_tail_is_a_noncentral_f_distribution(dim, length, rank, ratio):
    law = stats.ncf(dim, rank, length) if length else stats.f(dim, rank)
    np.testing.assert_allclose(
        sail.tail(ratio, dim, length, rank=rank), law.cdf(ratio * rank / dim), rtol=1e-9
    )


@pytest.mark.parametrize(("dim", "length", "rank"), CASES)
def test_tail_and_mean_of_models(dim, length, rank):
    rng = np.random.default_rng(dim)
    X = (rng.normal(size=(20_000, rank)) ** 2).sum(1)
    Y = ((rng.normal(size=(20_000, dim)) - np.sqrt(length / dim)) ** 2).sum(1)
    ratio = (dim + length) / (2 * rank)  # so that neither event is rare
    assert z_score(ratio * X >= Y, float(sail.tail(ratio, dim, length, rank=rank))) < 4
    assert z_score(Y, float(sail.mean_distance(dim, length))) < 4


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "length"), [(3, 0.0), (4, 2.0), (9, 20.0), (40, 7.0)])
def test_mean_inverse_distance(dim, length):
    """Against quadrature over the density of SciPy, 1e-8; the far tail is left out."""
    law = stats.ncx2(dim, length) if length else stats.chi2(dim)
    top = law.mean() + 40 * law.std()
    expected = integrate.quad(lambda y: law.pdf(y) / y, 0, top, limit=200)[0]
    np.testing.assert_allclose(sail.mean_inverse_distance(dim, length), expected, rtol=1e-7)
    assert sail.mean_inverse_distance(dim, length) <= 1 / (dim - 2) + 1e-12
    assert sail.mean_inverse_distance(dim, length) >= 1 / sail.mean_distance(dim, length)  # Jensen


def test_mean_inverse_distance_is_infinite_below_three_dimensions():
    assert np.isinf(sail.mean_inverse_distance(2))
    assert np.isinf(sail.tail_bound(0.1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "length", "rank"),
    [(5, 2.0, 3), pytest.param(3, 0.0, 1, marks=SLOW), pytest.param(20, 100.0, 20, marks=SLOW)],
)
def test_markov_bounds_the_tail(dim, length, rank):
    ratio = np.geomspace(1e-4, 10, 30)
    mean = rank * ratio  # E X / alpha
    found = sail.tail(ratio, dim, length, rank=rank)
    assert (found <= sail.tail_bound(mean, dim, length) + 1e-12).all()
    assert (np.diff(found) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "length"), [(1, 0.0), (6, 10.0), (50, 500.0)])
def test_distance_cdf(dim, length):
    law = stats.ncx2(dim, length) if length else stats.chi2(dim)
    y = (dim + length) * np.array([0.0, 0.3, 1.0, 2.0])
    np.testing.assert_allclose(sail.distance_cdf(y, dim, length), law.cdf(y), atol=1e-10)


# --- what descent keeps ---------------------------------------------------------------------------

CURVATURE = np.array([2.0, 0.9, 0.3])


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_excess_of_descent(rate, steps):
    start = jnp.array([1.0, -2.0, 0.7])
    error = sail.descend(CURVATURE, start, rate, steps)
    found = sail.excess(CURVATURE, start, rate, steps)
    close(found, np.sum(CURVATURE * error**2) / 2)
    first = sail.excess(CURVATURE, start, rate, 0)
    assert found <= sail.contraction(0.3, rate, 2 * steps) * first + 1e-12
    assert first <= sail.excess_bound(2.0, np.linalg.norm(start))


def test_slowest_mode_decides():
    """rho tends to the ratio of the slowest modes; the rest is 1e-13 of it after 60 steps."""
    near, far = np.array([0.0, 0.0, 0.2]), np.array([3.0, 3.0, 0.1])
    assert sail.excess_ratio(CURVATURE, near, far, 0.5, 0) < 1e-2
    late = sail.excess_ratio(CURVATURE, near, far, 0.5, 200)
    np.testing.assert_allclose(late, 4.0, rtol=1e-10)


# --- discriminants --------------------------------------------------------------------------------

SPREAD = np.array([[1.5, 0.4], [0.4, 0.8]])
MEANS = np.array([[0.9, 0.1], [-0.3, 0.6]])


@pytest.mark.parametrize("prior", [0.5, 0.2])
@pytest.mark.parametrize("covariance", [SPREAD, 2.0])
def test_discriminant_is_the_log_odds(covariance, prior):
    theta, b = sail.lda_parameters(MEANS, covariance, prior)
    full = np.eye(2) * covariance if np.ndim(covariance) == 0 else covariance
    one, two = (stats.multivariate_normal(m, full) for m in MEANS)
    x = np.random.default_rng(0).normal(size=(7, 2))
    expected = one.logpdf(x) - two.logpdf(x) + np.log(prior / (1 - prior))
    close(x @ theta + b, expected)


@pytest.mark.parametrize("prior", [0.5, 0.2])
def test_total_variation_of_tasks(prior):
    """Quadrature of half of |p - q| over one feature and both classes, 1e-8."""
    others = MEANS + np.array([[0.5, 0.0], [-1.0, 0.0]])
    found = sail.lda_total_variation(MEANS[:, :1], others[:, :1], 1.3, prior)
    expected = sum(
        p
        * integrate.quad(
            lambda x, m=m, o=o: (
                abs(stats.norm.pdf(x, m, 1.3**0.5) - stats.norm.pdf(x, o, 1.3**0.5)) / 2
            ),
            -10,
            10,
            points=[(m + o) / 2],
        )[0]
        for p, m, o in zip((prior, 1 - prior), MEANS[:, 0], others[:, 0], strict=True)
    )
    np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.slow
def test_lemma_2_over_directions():
    """|theta_i - theta*| = C 2 Phi^-1((1 + TV) / 2) with C between its bounds, attained at the
    eigenvectors; 1e-9 for the inverse normal."""
    values, vectors = np.linalg.eigh(SPREAD)
    gaps = np.concatenate([vectors.T, np.random.default_rng(1).normal(size=(20, 2))])
    means, origin = sail.symmetric(gaps), jnp.zeros((len(gaps), 2, 2))
    C = sail.lda_constant(gaps, SPREAD)
    distance = jnp.linalg.norm(sail.lda_parameters(means, SPREAD)[0], axis=-1)
    tv = sail.lda_total_variation(means, origin, SPREAD)
    np.testing.assert_allclose(sail.lda_distance(tv, C), distance, rtol=1e-9)
    close(C[:2], 2 / np.sqrt(values))
    close(C, np.clip(C, C[1], C[0]))
    close(sail.lda_constant(gaps, 0.49), 2 / 0.7)


def test_weights_from_total_variation_of_tasks():
    """Through Lemma 2 as true, eq. 11 has the weights of the parameters; TV^2 misses by `tv_bias`
    of half the distances, C being 2."""
    models = [np.array([2.0, 0.3]), np.array([-0.5, 1.0])]
    target = np.array([0.4, 1.5])
    thetas = [sail.lda_parameters(sail.symmetric(m))[0] for m in (*models, target)]
    best = proximal.from_parameters(thetas[:2], thetas[2], constraint="affine").weights[0]
    pairs = ((models[0], target), (models[1], target), (models[0], models[1]))
    tv = [float(sail.lda_total_variation(*map(sail.symmetric, pair))) for pair in pairs]
    distances = [float(sail.lda_distance(t, 2.0)) for t in tv]
    np.testing.assert_allclose(proximal.pair_weight(*distances), best, atol=1e-10)
    bias = proximal.tv_bias(*(d / 2 for d in distances))
    np.testing.assert_allclose(proximal.pair_weight(*tv) - best, bias, atol=1e-10)
    assert abs(bias) > 0.01


# --- transfer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
def test_threshold_complexity_by_all_signs(n):
    """Tests two labels, every sign and every threshold."""
    signs = np.array(list(itertools.product([-1, 1], repeat=n)))
    above = np.arange(n) >= np.arange(n + 1)[:, None]
    for y in (np.arange(n) % 2, np.arange(n) % 3 == 0):
        losses = above != (y > 0)
        close(sail.threshold_complexity(n), (signs @ losses.T).max(1).mean() / n)


def test_threshold_complexity_of_many_points():
    n = 10**6
    np.testing.assert_allclose(sail.threshold_complexity(n), np.sqrt(2 / np.pi / n), rtol=1e-2)


def samples(seed, means, draws, n):
    """x and y of n points, in the order of x."""
    rng = np.random.default_rng(seed)
    side = rng.integers(0, 2, (draws, n))
    x = rng.normal(size=side.shape) + means[side]
    order = np.argsort(x, 1)
    return np.take_along_axis(x, order, 1), 1 - 2.0 * np.take_along_axis(side, order, 1)


@pytest.mark.slow
def test_risks_of_thresholds():
    means = np.array([0.5, -0.7])
    x, y = samples(0, means, 1, 20_000)
    x, y = x[0], y[0]
    for t in (-1.0, 0.2):
        assert z_score((x > t) != (y > 0), sail.threshold_risk(t, means)) < 4
    found = sail.empirical_risks(y[:50])
    cuts = [-np.inf, *x[:50]]
    close(found, [np.mean((x[:50] > t) != (y[:50] > 0)) for t in cuts])


@pytest.mark.slow
def test_worst_gap_is_a_supremum():
    """The maximum over a grid of thresholds is no larger, and differs by at most its spacing."""
    means = np.array([0.5, -0.7])
    x, y = (z[0] for z in samples(3, means, 1, 25))
    t = np.linspace(-6, 6, 20_001)
    empirical = sail.empirical_risks(y)[np.searchsorted(x, t, "right")]
    grid = float(np.max(sail.threshold_risk(t, means) - empirical))
    assert 0 <= float(sail.worst_gap(x, y, means)) - grid < 12 / 20_000


@pytest.mark.slow
@pytest.mark.parametrize("moved", [0.0, 0.4])
def test_transfer_bound_covers(moved):
    """No more than a share delta of 400 samples violate it, and |z| < 4 for the mean's bound."""
    means, n, delta = np.array([0.5, -0.5]), 20, 0.2
    tv = float(sail.lda_total_variation(means[:, None], means[:, None] + moved))
    target = jnp.asarray(means + moved)

    gap = jax.jit(jax.vmap(sail.worst_gap, in_axes=(0, 0, None)))
    gaps = np.asarray(gap(*samples(4, means, 400, n), target))
    complexity = sail.threshold_complexity(n)
    assert (gaps > sail.transfer_bound(0.0, tv, complexity, n, delta)).mean() <= delta
    excess = gaps.mean() - tv - 2 * complexity
    assert excess < 4 * gaps.std() / np.sqrt(gaps.size)
    close(
        sail.transfer_bound(0.1, 0.0, 0.3, n, delta, C=2.0),
        sail.rademacher_bound(0.1, 0.3, n, delta, C=2.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(4, 9), pytest.param(1, 1, marks=SLOW)])
def test_empirical_total_variation(n, m):
    """Estimated by sampling; at least the distance of the laws, and positive for equal laws."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.3, 0.2, 0.4])
    rng = np.random.default_rng(n)
    one, two = rng.multinomial(n, p, 20_000) / n, rng.multinomial(m, q, 20_000) / m
    found = float(sail.empirical_total_variation(p, q, n, m))
    assert z_score(np.abs(one - two).sum(1) / 2, found) < 4
    assert found >= np.abs(p - q).sum() / 2 - 1e-12
    assert sail.empirical_total_variation(p, p, n, m) > 0
    fine = np.full(10_000, 1e-4)
    np.testing.assert_allclose(sail.empirical_total_variation(fine, fine, 1, 1), 1 - 1e-4)


# --- boundaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sail.tail(-0.1, 3), "ratio must be >= 0; got -0.1"),
        (lambda: sail.tail(0.1, 0), "dim must be a number of parameters >= 1; got 0"),
        (lambda: sail.tail(0.1, 3, rank=0), "rank must be"),
        (lambda: sail.tail(0.1, 3, 1e4), r"squared_length must be in \[0, 600\]; got 10000"),
        (lambda: sail.tail_bound(np.nan, 3), "ratio must be >= 0; got nan"),
        (lambda: sail.distance_cdf(-1.0, 3), "y must be >= 0"),
        (lambda: sail.excess(np.array([1.0, 0.0]), np.ones(2), 0.1, 1), "strong convexity"),
        (lambda: sail.excess(np.ones(2), np.ones(2), 0.0, 1), "rate must be > 0"),
        (lambda: sail.contraction(1.0, 2.0, 1), "rate must be at most 1 / mu"),
        (lambda: sail.excess_bound(-1.0, 1.0), "L must be a curvature > 0"),
        (lambda: sail.lda_parameters(np.ones(2)), r"means must be \[... 2 d\].*\(2,\)"),
        (lambda: sail.lda_parameters(np.ones((2, 3)), prior=1.0), "a probability in"),
        (lambda: sail.lda_parameters(np.ones((2, 3)), np.eye(2)), r"or \[d d\], d = 3"),
        (lambda: sail.lda_parameters(np.ones((2, 2)), -np.eye(2)), "positive definite"),
        (lambda: sail.lda_parameters(np.ones((2, 2)), 0.0), "a variance > 0"),
        (lambda: sail.lda_distance(1.2, 2.0), r"must lie in \[0, 1\]"),
        (lambda: sail.lda_distance(0.2, 0.0), "constant must be > 0"),
        (lambda: sail.rademacher_bound(0.1, 0.1, 10, 0.0), "delta must be a probability"),
        (lambda: sail.rademacher_bound(0.1, -0.1, 10, 0.1), "complexity must be >= 0"),
        (lambda: sail.rademacher_bound(0.1, 0.1, 0, 0.1), "n must be a number of points"),
        (lambda: sail.transfer_bound(0.1, 1.5, 0.1, 10, 0.1), "total_variation must be"),
        (lambda: sail.threshold_complexity(0), "n must be a number of points"),
        (lambda: sail.empirical_total_variation([0.5, 0.4], [0.5, 0.5], 1, 1), "sum of p must"),
        (lambda: sail.empirical_total_variation([1.0], [0.5, 0.5], 1, 1), "same cells"),
        (lambda: sail.empirical_total_variation([1.5, -0.5], [0.5, 0.5], 1, 1), "p must be prob"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_gradients_flow_and_float32_holds():
    """Traced values are not checked; 16 eps of numbers of order one."""
    slope = jax.grad(lambda u: sail.tail(u, 3, 1.0))(0.3)
    step = 1e-5
    found = (sail.tail(0.3 + step, 3, 1.0) - sail.tail(0.3 - step, 3, 1.0)) / (2 * step)
    np.testing.assert_allclose(slope, found, rtol=1e-6)
    expected = sail.lda_parameters(MEANS, SPREAD)[0]
    with jax.enable_x64(False):
        theta, _ = jax.jit(sail.lda_parameters)(jnp.asarray(MEANS), jnp.asarray(SPREAD))
        assert theta.dtype == jnp.float32
    np.testing.assert_allclose(theta, expected, atol=16 * float(np.finfo(np.float32).eps))
