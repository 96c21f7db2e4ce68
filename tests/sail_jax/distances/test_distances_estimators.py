"""Estimators of distances against closed forms, brute force and their own laws."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import diagonal
from scipy import integrate, stats
from scipy.optimize import linprog
from scipy.spatial.distance import cdist, jensenshannon

from sail_jax import distances as D  # noqa: N812

KEY = jax.random.key(0)


def points(m=12, n=9, dim=3, seed=0, shift=0.7, scale=1.5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, dim)), shift + scale * rng.normal(size=(n, dim))


def z_of_mean(values, expected):
    return (np.mean(values) - expected) / (np.std(values, ddof=1) / math.sqrt(len(values)))


# Gaussians


@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.5, 2.0, 5.0])
def test_gaussian_total_variation_is_its_integral(gap):
    p, q = stats.norm(0, 1.3).pdf, stats.norm(gap, 1.3).pdf
    integral, error = integrate.quad(
        lambda t: abs(p(t) - q(t)) / 2, -12, 17, points=[gap / 2], limit=200
    )
    with jax.enable_x64(True):
        found = float(D.total_variation_gaussian(np.array([gap]), 1.3**2))
    assert abs(found - integral) < max(error, 1e-9)
    assert found <= gap / 1.3 / 2  # Pinsker


@pytest.mark.slow
def test_gaussian_total_variation_with_a_covariance_by_monte_carlo():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(3, 3))
    S, gap, n = root @ root.T + np.eye(3), np.array([1.0, -0.5, 2.0]), 200_000
    p, q = stats.multivariate_normal(np.zeros(3), S), stats.multivariate_normal(gap, S)
    x = p.rvs(n, random_state=rng)
    loss = np.maximum(0, 1 - np.exp(q.logpdf(x) - p.logpdf(x)))  # E_p (1 - q/p)_+ is the distance
    assert abs(z_of_mean(loss, float(D.total_variation_gaussian(gap, S)))) < 4


def test_gaussian_separation_inverts_total_variation():
    with jax.enable_x64(True):
        lengths = np.array([0.0, 1e-8, 0.1, 1.0, 3.0, 6.0])
        tv = D.total_variation_gaussian(lengths[:, None])
        back = np.asarray(D.gaussian_separation(tv))
        # rounding of tv, times the slope of the inverse, 1 / density(length / 2)
        slope = 1 / stats.norm.pdf(lengths / 2)
        assert (abs(back - lengths) <= 16 * np.finfo(float).eps * (slope + lengths)).all()


@pytest.mark.slow
def test_gradient_of_gaussian_total_variation():
    at = lambda g: D.total_variation_gaussian(jnp.array([g, 0.0]))  # noqa: E731
    assert float(jax.grad(at)(1.0)) == pytest.approx(stats.norm.pdf(0.5), rel=1e-5)
    assert np.isfinite(jax.grad(at)(0.0))


# Kernels


def brute(gram, m):
    """The unbiased statistic from the full matrix."""
    xx, yy, xy = gram[:m, :m], gram[m:, m:], gram[:m, m:]
    off = lambda k: (k.sum() - np.trace(k)) / (len(k) * (len(k) - 1))  # noqa: E731
    return off(xx) + off(yy) - 2 * xy.mean()


def jackknife(gram, m):
    total = len(gram)
    without = np.array(
        [brute(np.delete(np.delete(gram, i, 0), i, 1), m - (i < m)) for i in range(total)]
    )
    parts = without[:m], without[m:]
    return math.sqrt(sum((len(t) - 1) / len(t) * ((t - t.mean()) ** 2).sum() for t in parts))


def cauchy(x, y):
    return 1 / (1 + jnp.sum((x - y) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "gram"),
    [
        (lambda x, y: D.mmd(x, y, bandwidth=1.5), lambda d: np.exp(-(d**2) / 4.5)),
        (lambda x, y: D.mmd(x, y, kernel=cauchy), lambda d: 1 / (1 + d**2)),
        (D.energy, lambda d: -d),
    ],
    ids=["gaussian", "kernel", "energy"],
)
def test_u_statistics_and_their_jackknife_by_brute_force(found, gram):
    x, y = points()
    z = np.concatenate([x, y])
    with jax.enable_x64(True):
        value, stderr = found(x, y)
    assert float(value) == pytest.approx(brute(gram(cdist(z, z)), len(x)), abs=1e-13)
    assert float(stderr) == pytest.approx(jackknife(gram(cdist(z, z)), len(x)), abs=1e-13)


def test_linear_time_mmd_by_brute_force():
    x, y = points(11, 11)
    k = lambda a, b: math.exp(-((a - b) ** 2).sum() / 2)  # noqa: E731
    h = [
        k(x[i], x[i + 1]) + k(y[i], y[i + 1]) - k(x[i], y[i + 1]) - k(x[i + 1], y[i])
        for i in range(0, 10, 2)
    ]
    with jax.enable_x64(True):
        value, stderr = D.mmd(x, y, bandwidth=1.0, estimator="linear")
    assert float(value) == pytest.approx(np.mean(h), abs=1e-14)
    assert float(stderr) == pytest.approx(np.std(h, ddof=1) / math.sqrt(5), abs=1e-14)


@pytest.mark.slow
def test_fourier_features_are_unbiased_for_the_quadratic_statistic():
    x, y = points(30, 20)
    keys = jax.random.split(jax.random.key(3), 200)
    draw = lambda key: D.mmd(x, y, bandwidth=1.5, estimator="features", features=64, key=key)  # noqa: E731
    values = np.asarray(jax.vmap(draw)(keys).value, float)
    # null: the mean over frequencies is the statistic of the kernel itself
    assert abs(z_of_mean(values, float(D.mmd(x, y, bandwidth=1.5).value))) < 4


def gaussian_mmd2(dim, gap, s, t, h):
    """Squared MMD of N(0, s^2 I) and N(gap, t^2 I), |gap| given: Gaussian integrals."""
    mean = lambda v, g: (h**2 / (h**2 + v)) ** (dim / 2) * math.exp(-(g**2) / (2 * (h**2 + v)))  # noqa: E731
    return mean(2 * s**2, 0) + mean(2 * t**2, 0) - 2 * mean(s**2 + t**2, gap)


def gaussian_energy(gap, s, t):
    """Twice E|X - Y| - ..., of N(0, s^2) and N(gap, t^2): folded normal means."""
    v = math.sqrt(s**2 + t**2)
    across = v * math.sqrt(2 / math.pi) * math.exp(-(gap**2) / (2 * v**2))
    across += gap * (1 - 2 * stats.norm.cdf(-gap / v))
    return 2 * across - 2 * (s + t) / math.sqrt(math.pi)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "estimator"),
    diagonal(["equal", "different"], ["quadratic", "linear", "features", "energy"]),
)
def test_hilbert_distances_are_unbiased_with_an_honest_error(law, estimator):
    runs, n, (gap, t) = 600, 24, (0.0, 1.0) if law == "equal" else (1.5, 1.6)
    dim = 1 if estimator == "energy" else 2
    a, b, c = jax.random.split(jax.random.key(4), 3)
    x = jax.random.normal(a, (runs, n, dim))
    y = t * jax.random.normal(b, (runs, n, dim)) + jnp.eye(dim)[0] * gap
    if estimator == "energy":
        found, expected = jax.vmap(D.energy)(x, y), gaussian_energy(gap, 1.0, t)
    else:
        run = lambda x, y, key: D.mmd(  # noqa: E731
            x, y, bandwidth=1.2, estimator=estimator, features=32, key=key
        )
        found = jax.vmap(run)(x, y, jax.random.split(c, runs))
        expected = gaussian_mmd2(dim, gap, 1.0, t, 1.2)
    # null: the mean over independent samples is the distance of the laws, 0 for equal ones
    assert abs(z_of_mean(np.asarray(found.value, float), expected)) < 4
    values = np.asarray(found.value, float)
    ratio = np.mean(np.asarray(found.stderr) ** 2) / np.var(values, ddof=1)
    # what is known of a variance from 600 values of this kurtosis
    slack = 4 * math.sqrt((stats.kurtosis(values, fisher=False) - 1) / runs)
    # the jackknife, of samples one smaller, overstates: at most twice, for equal laws
    most = 1 if estimator == "linear" else 2 * (n / (n - 2)) ** 2
    assert 1 - slack < ratio < most * (1 + slack)


@pytest.mark.slow
def test_the_median_distance():
    x, y = points(7, 8)
    z = np.concatenate([x, y])
    upper = cdist(z, z)[np.triu_indices(15, 1)]
    assert float(D.median_distance(x, y)) == pytest.approx(np.median(upper), rel=1e-6)
    assert np.array_equal(D.mmd(x, y).value, D.mmd(x, y, bandwidth=D.median_distance(x, y)).value)
    with pytest.raises(ValueError, match=r"median distance is 0.0; give a bandwidth"):
        D.mmd(np.zeros((9, 2)), np.zeros((9, 2)))


# Transport


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
def test_wasserstein_is_the_value_of_its_linear_programme(p):
    rng = np.random.default_rng(5)
    x, y, u, v = rng.normal(size=7), rng.normal(size=5) + 1, rng.random(7), rng.random(5)
    u[2] = v[4] = 0
    cost = abs(x[:, None] - y) ** p
    rows = np.kron(np.eye(7), np.ones(5)), np.kron(np.ones(7), np.eye(5))
    marginals = np.concatenate([u / u.sum(), v / v.sum()])
    best = linprog(cost.ravel(), A_eq=np.vstack(rows), b_eq=marginals, method="highs").fun
    found = D.wasserstein(x, y, p=p, x_weights=u, y_weights=v).value
    assert found**p == pytest.approx(best, abs=1e-7)  # HiGHS: feasibility 1e-7
    whole = D.wasserstein(x, y, p=p, x_weights=[2, 1, 1, 0, 1, 1, 1]).value
    repeated = np.concatenate([np.repeat(x, [2, 1, 1, 0, 1, 1, 1])])
    assert whole == pytest.approx(D.wasserstein(repeated, y, p=p).value, rel=1e-12)


def test_wasserstein_of_equal_samples_is_the_matching():
    x, y = points(20, 20, 1)
    assert D.wasserstein(x[:, 0], y[:, 0]).value == pytest.approx(
        D.wasserstein1(x, y), rel=1e-13, abs=0
    )
    reference = stats.wasserstein_distance(x[:, 0], y[:7, 0])
    assert D.wasserstein(x[:, 0], y[:7, 0]).value == pytest.approx(reference, rel=1e-13, abs=0)


@pytest.mark.parametrize(("m", "n"), [(200, 200), (300, 170)])
@pytest.mark.parametrize(("p", "expected"), [(1, None), (2, math.sqrt(2.0**2 + 0.5**2))])
def test_the_error_of_wasserstein_is_its_spread(p, expected, m, n):
    rng, runs = np.random.default_rng(6), 300
    found = [
        D.wasserstein(rng.normal(size=m), 2 + 1.5 * rng.normal(size=n), p=p) for _ in range(runs)
    ]
    values, errors = np.array(found).T
    # null: stderr^2 is the variance, known to sqrt(2 / runs) for the normal limit
    assert abs(np.mean(errors**2) / np.var(values, ddof=1) - 1) < 4 * math.sqrt(2 / runs)
    if expected is not None:  # consistent: the upward bias is of order 1/n here, a tenth of stderr
        assert abs(np.mean(values) - expected) < 0.3 * np.mean(errors)


def test_the_error_of_wasserstein_to_a_point_is_that_of_a_mean():
    x, y = np.array([0.0, 1.0, 5.0]), np.full(2, 9.0)
    found = D.wasserstein(x, y)
    assert found.value == pytest.approx(9 - x.mean())
    assert found.stderr == pytest.approx(x.std(ddof=1) / math.sqrt(3))


@pytest.mark.slow
def test_sliced_wasserstein_of_a_shift():
    x, _ = points(10, dim=4)
    gap = np.array([1.0, 2.0, 0.0, -1.0])
    value, stderr = D.sliced_wasserstein(KEY, x, x + gap, p=2, projections=2000)
    # null: E (u.gap)^2 = |gap|^2 / dim
    assert abs(float(value) - math.sqrt(gap @ gap / 4)) < 4 * float(stderr)


@pytest.mark.slow
@pytest.mark.parametrize("p", [2.5, 1])
def test_sliced_wasserstein_is_exact_on_a_line(p):
    x, y = points(12, 9, 1)
    with jax.enable_x64(True):
        value, stderr = D.sliced_wasserstein(KEY, x, y, p=p, projections=8)
    assert float(value) == pytest.approx(D.wasserstein(x[:, 0], y[:, 0], p=p).value, rel=1e-12)
    assert float(stderr) < 1e-12
    x, y = points(12, 9, 3)
    found = D.sliced_wasserstein(KEY, x, y, p=p, projections=8).value
    u = jax.random.normal(KEY, (8, 3))
    u /= jnp.linalg.norm(u, axis=1, keepdims=True)
    each = [D.wasserstein(x @ w, y @ w, p=p).value ** p for w in np.asarray(u, float)]
    assert float(found) == pytest.approx(np.mean(each) ** (1 / p), rel=1e-5)


# Total variation


@pytest.mark.slow
def test_histogram_total_variation():
    rng, n, runs = np.random.default_rng(7), 4000, 200
    edges = np.linspace(-2.9, 4.1, 14)
    cells = [np.diff(np.r_[0, stats.norm.cdf(edges, mean), 1]) for mean in (0, 1)]
    expected = abs(cells[0] - cells[1]).sum() / 2
    found = np.array(
        [
            D.total_variation_histogram(
                rng.normal(size=(n, 1)), 1 + rng.normal(size=(n, 1)), bins=[edges]
            )
            for _ in range(runs)
        ]
    )
    assert expected < float(D.total_variation_gaussian([1.0])) - 1e-4  # cells merge points
    # the upward bias: in every cell a normal of this mean and variance, folded at 0
    gap = cells[0] - cells[1]
    spread = np.sqrt(sum(c * (1 - c) for c in cells) / n)
    folded = spread * math.sqrt(2 / math.pi) * np.exp(-((gap / spread) ** 2) / 2)
    folded += gap * (1 - 2 * stats.norm.cdf(-gap / spread))
    assert folded.sum() / 2 > expected
    assert abs(z_of_mean(found[:, 0], folded.sum() / 2)) < 4
    ratio = np.mean(found[:, 1] ** 2) / np.var(found[:, 0], ddof=1)
    assert abs(ratio - 1) < 4 * math.sqrt(2 / runs)
    same = D.total_variation_histogram(rng.normal(size=(50, 1)), rng.normal(size=(50, 1)))
    assert same.value > 0  # biased upwards at equality
    grid = D.total_variation_histogram(*points(40, 30, 2), bins=4).value
    assert 0 < grid <= 1


@pytest.mark.slow
def test_classifier_total_variation_is_a_lower_bound_that_the_best_classifier_attains():
    rng, n = np.random.default_rng(8), 4000
    x, y = rng.normal(size=(n, 3)), rng.normal(size=(n, 3))
    null = D.total_variation_classifier(x, y)
    assert abs(null.value) < 4 * null.stderr
    gap = np.array([1.0, 0.5, 0.0])
    true = float(D.total_variation_gaussian(gap))
    found = D.total_variation_classifier(x, y + gap)
    # null: the logistic model contains the best classifier, and its regret is of order dim / n
    assert abs(found.value - true) < 4 * found.stderr
    assert found.stderr == pytest.approx(
        math.sqrt(2 * (1 - true) / 2 * (1 + true) / 2 / n), rel=0.05
    )
    # a poor classifier: the first coordinate alone; P(x_1 < 1/2) - P(y_1 < 1/2) = 2 Phi(1/2) - 1
    poor = D.total_variation_classifier(x, y + gap, fit=lambda z, is_x: lambda new: new[:, 0] < 0.5)
    assert abs(poor.value - float(D.total_variation_gaussian([1.0]))) < 4 * poor.stderr
    # scales alone differ: linear separation finds nothing, products of coordinates do
    assert D.total_variation_classifier(x, 2 * y).value > 0.2


def test_a_classifier_is_judged_on_points_it_has_not_seen():
    x, y = points(20, 20, shift=0.0, scale=1.0)

    def memory(z, is_x):
        seen = {tuple(row) for row in z[is_x]}
        return lambda new: np.array([tuple(row) in seen for row in new])

    assert D.total_variation_classifier(x, y, fit=memory).value == 0


# Tokens


def streams(seed=0, sequences=40, tilt=0.4):
    rng = np.random.default_rng(seed)
    p = np.array([0.4, 0.3, 0.2, 0.1])
    q = (1 - tilt) * p + tilt * p[::-1]
    return (
        [rng.choice(4, size=rng.integers(1, 9), p=law) for _ in range(sequences)] for law in (p, q)
    )


def count(stream, n):
    return Counter(tuple(map(int, s[i : i + n])) for s in stream for i in range(len(s) - n + 1))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_distances_of_ngrams_by_counting(n):
    x, y = streams()
    a, b = count(x, n), count(y, n)
    grams = sorted(a | b)
    p, q = (np.array([c[g] for g in grams]) / c.total() for c in (a, b))
    assert D.total_variation_tokens(x, y, n=n).value == pytest.approx(abs(p - q).sum() / 2)
    assert D.jensen_shannon_tokens(x, y, n=n).value == pytest.approx(jensenshannon(p, q) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [D.total_variation_tokens, D.jensen_shannon_tokens])
@pytest.mark.parametrize("repeat", [1, 5])
def test_the_error_of_token_distances_is_over_sequences(distance, repeat):
    runs = 300
    found = []
    for seed in range(runs):
        x, y = streams(seed, 60, 1.0)
        found.append(distance(*([np.repeat(s, repeat) for s in z] for z in (x, y))))
    values, errors = np.array(found).T
    # null: stderr^2 is the variance (sqrt(2/runs)), also if every token is written `repeat` times;
    # 10% for what linearising leaves out with 270 independent tokens
    assert abs(np.mean(errors**2) / np.var(values, ddof=1) - 1) < 4 * math.sqrt(2 / runs) + 0.1


def test_wide_ngrams_of_large_tokens_do_not_overflow():
    big = np.array([[2**62, -(2**62), 5, 2**62, -(2**62), 5, 7]])
    short = big[:, :4]
    # One 4-gram of four is in both streams.
    pair = [np.concatenate([z, z]) for z in (big, short)]
    assert D.total_variation_tokens(*pair, n=4).value == 0.75
    assert D.total_variation_tokens(pair[0], pair[0], n=3).value == 0


# Laws

ALL = {
    "mmd": lambda x, y: D.mmd(x, y).value,
    "features": lambda x, y: D.mmd(x, y, estimator="features", key=KEY).value,
    "energy": lambda x, y: D.energy(x, y).value,
    "sliced": lambda x, y: D.sliced_wasserstein(KEY, x, y).value,
    "wasserstein": lambda x, y: D.wasserstein(x[:, 0], y[:, 0]).value,
    "histogram": lambda x, y: D.total_variation_histogram(x[:, :1], y[:, :1], bins=5).value,
}
DEGREE = {"energy": 1, "sliced": 1, "wasserstein": 1, "mmd": 0, "features": 0, "histogram": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_laws_of_distances(name):
    x, y = points()
    rng = np.random.default_rng(9)
    with jax.enable_x64(True):
        value = float(ALL[name](x, y))
        same = pytest.approx(value, rel=1e-10)
        assert float(ALL[name](rng.permutation(x), rng.permutation(y))) == same
        assert float(ALL[name](y, x)) == same
        assert float(ALL[name](x + 4.0, y + 4.0)) == same
        assert float(ALL[name](4 * x, 4 * y)) == pytest.approx(4 ** DEGREE[name] * value, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliced", "mmd", "energy", "linear", "features"])
def test_gradients_and_compilation(name):
    one = {
        "linear": lambda x, y: D.mmd(x, y, estimator="linear", bandwidth=1.5).value,
        "mmd": lambda x, y: D.mmd(x, y, bandwidth=1.5).value,
        "features": lambda x, y: (
            D.mmd(x, y, estimator="features", bandwidth=1.5, key=KEY, features=16).value
        ),
    }.get(name, ALL.get(name))
    x, y = points(8, 8)
    with jax.enable_x64(True):
        x, y = jnp.asarray(x), jnp.asarray(y)
        gradients, compiled = jax.jit(jax.grad(one)), jax.jit(one)
        along = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))
        gradient = gradients(x, y)
        step = 1e-5  # central differences: error step^2 + eps / step
        difference = (compiled(x + step * along, y) - compiled(x - step * along, y)) / (2 * step)
        assert float(jnp.sum(gradient * along)) == pytest.approx(float(difference), abs=1e-8)
        assert float(compiled(x, y)) == pytest.approx(float(one(x, y)), rel=1e-12)
        assert np.isfinite(gradients(x, x)).all()  # points that coincide


BAD = [np.zeros((5, 2)), np.ones((6, 2))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: D.mmd(x[:2], y), "x must have at least 3 points; got 2"),
        (lambda x, y: D.energy(x, y[:, :1]), "y must have points of the dimension of x, 2; got 1"),
        (lambda x, y: D.energy(x[0], y), r"x must be a sample \[n, dim\]"),
        (lambda x, y: D.energy(x * np.nan, y), "x must be finite"),
        (lambda x, y: D.mmd(x, y, estimator="linear"), "y must have as many points as x"),
        (lambda x, y: D.mmd(x, y, estimator="linaer"), "got 'linaer' .nearest: 'linear'"),
        (lambda x, y: D.mmd(x, y, bandwidth=-1.0), 'bandwidth must be "median" or a number > 0'),
        (lambda x, y: D.mmd(x, y, estimator="features"), "expected a key and features >= 2"),
        (
            lambda x, y: D.mmd(x + np.arange(5)[:, None], y, kernel=lambda a, b: -jnp.sum(a * b)),
            "kernel must be symmetric and positive semi-definite",
        ),
        (
            lambda x, y: D.sliced_wasserstein(KEY, x, y, projections=1),
            "projections: expected an integer >= 2",
        ),
        (lambda x, y: D.sliced_wasserstein(KEY, x, y, p=0.5), "p must be a finite number >= 1"),
        (lambda x, y: D.wasserstein(x, y), r"x must be a sample of numbers \[n\]"),
        (
            lambda x, y: D.wasserstein(x[:, 0], y[:, 0], y_weights=-np.ones(6)),
            "y_weights: expected 6 finite numbers >= 0",
        ),
        (lambda x, y: D.total_variation_histogram(x, y, bins=[[0.0]]), "edges for each of 2 axes"),
        (lambda x, y: D.total_variation_classifier(x, y), "x must have at least 10 points; got 5"),
        (
            lambda x, y: D.total_variation_classifier(
                x, y, folds=2, fit=lambda z, l: lambda new: new[:, 0]
            ),
            "fit: expected a classifier with one bool",
        ),
        (lambda x, y: D.total_variation_gaussian(x[0], -1.0), "covariance must be a positive"),
        (
            lambda x, y: D.total_variation_gaussian(x[0], np.array([[1.0, 2.0], [2.0, 1.0]])),
            "covariance must be positive definite; its least eigenvalue is -1",
        ),
        (
            lambda x, y: D.total_variation_gaussian(x[0], np.array([[1.0, 2.0], [0.0, 1.0]])),
            "covariance must be symmetric",
        ),
        (lambda x, y: D.gaussian_separation(1.5), r"total_variation must lie in \[0, 1\]"),
        (
            lambda x, y: D.total_variation_tokens([[1]], [[1, 2]], n=2),
            "x must have sequences of at least 2 tokens",
        ),
        (lambda x, y: D.total_variation_tokens([[1]], [[1]], n=0), "n: expected an integer >= 1"),
        (
            lambda x, y: D.total_variation_tokens([[1, 2]], [[1], [2]]),
            "x must have at least 2 sequences",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(*BAD)


def test_bad_types():
    with pytest.raises(TypeError, match=r"x\[0\] must be a sequence of integers; got float64"):
        D.total_variation_tokens([[0.5]], [[1]])
    with pytest.raises(TypeError, match="x must be real numbers; got complex"):
        D.energy(BAD[0] * 1j, BAD[1])
    with pytest.raises(TypeError, match="x is traced"):
        jax.jit(D.total_variation_histogram)(*BAD)
