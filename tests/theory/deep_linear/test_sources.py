"""Moments of fits, the best weights of several, and ranks: identities, ends and refusals.

What they predict is simulated in `sources_claims` and `ranks_claims`.
"""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from sail_jax.proximal import affine_weights, gram_from_distances
from theory import deep_linear as dl
from theory.deep_linear import covariance, ranks, several, sources, sources_claims, subspace

D = 6
RNG = np.random.default_rng(5)
TASKS = RNG.normal(size=(4, D)) / sqrt(D)
INPUTS = (lambda a: a @ a.T / D + 0.1 * np.eye(D))(RNG.normal(size=(D, D)))


pytestmark = pytest.mark.usefixtures("float64")


def fits():
    below = sources.wishart_fit(TASKS[0], n=3, sigma=0.4)
    above = sources.wishart_fit(TASKS[1], n=12, sigma=0.8, inputs=INPUTS)
    return [below, above, sources.ridge_fit(INPUTS, TASKS[2], n=5, sigma=0.3, ridge=0.1)]


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        return fits()


def mean(metric, moments):
    return float(np.trace(np.asarray(metric) @ np.asarray(moments)))


def risk_of(made, beta_t, metric=None):
    """The mean of (beta_t - b_0)^T Q (beta_t - b_0), as a function of weights in NumPy."""
    Q = np.eye(D) if metric is None else np.asarray(metric)
    means = np.array([fit.mean for fit in made])
    spread = np.array([mean(Q, fit.covariance) for fit in made])

    def risk(weights):
        off = beta_t - weights @ means
        return float(off @ Q @ off + weights**2 @ spread)

    return risk


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 12])
def test_least_squares_on_isotropic_inputs_has_the_known_risk(n):
    beta = TASKS[0] / np.linalg.norm(TASKS[0])
    left = sources.start_moments([sources.wishart_fit(beta, n=n, sigma=0.4)], [1.0], beta)
    assert mean(np.eye(D), left) == pytest.approx(
        float(dl.scratch_risk(n=n, d=D, sigma=0.4)), rel=1e-12
    )


@pytest.mark.slow
def test_one_sample_keeps_a_uniform_direction():
    """b = u u.beta with u uniform on the sphere, whose fourth moments are known."""
    beta = TASKS[0]
    fit = sources.wishart_fit(beta, n=1, sigma=0.0)
    second = np.asarray(fit.covariance) + np.outer(fit.mean, fit.mean)
    expected = (beta @ beta * np.eye(D) + 2 * np.outer(beta, beta)) / (D * (D + 2))
    np.testing.assert_allclose(second, expected, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "ridge"), [(3, 0.0), (9, 0.0), (3, 0.2), (9, 0.2)])
def test_ridge_regression_has_the_known_risk_and_size(n, ridge):
    """Against the risk of `covariance`, which does not have the moments apart, and the fit's
    size."""
    fit = sources.ridge_fit(INPUTS, TASKS[0], n=n, sigma=0.4, ridge=ridge)
    s, beta = covariance.diagonalise(INPUTS, TASKS[0])
    left = sources.start_moments([fit], [1.0], TASKS[0])
    expected = float(covariance.scratch_risk(s, beta, n=n, sigma=0.4, ridge=ridge))
    assert mean(INPUTS, left) == pytest.approx(expected, rel=1e-10)
    if n < D and not ridge:
        size = mean(np.eye(D), fit.covariance) + float(fit.mean @ fit.mean)
        of = covariance.equivalent(s, n)
        assert size == pytest.approx(float(of.fit_size(beta**2, 0.4)), rel=1e-10)


@pytest.mark.slow
def test_the_best_weights_minimise_and_their_risk_is_the_minimum(made):
    beta_t = TASKS[3]
    for metric in (None, INPUTS, sources.tuned_metric(INPUTS, 3)):
        risk, found = risk_of(made, beta_t, metric), sources.best_weights(made, beta_t, metric)
        least = optimize.minimize(risk, np.zeros(3), tol=1e-10)
        np.testing.assert_allclose(found.weights, least.x, atol=1e-5)
        assert float(found.risk) == pytest.approx(risk(np.asarray(found.weights)), rel=1e-12)


@pytest.mark.slow
def test_fine_tuning_adds_noise_to_a_mean_that_the_start_decides(made):
    left = sources.start_moments(made, [0.5, 0.2, 0.1], TASKS[3])
    noise = sources.tuned_risk(INPUTS, np.zeros((D, D)), n=3, sigma=0.4)
    start = mean(sources.tuned_metric(INPUTS, 3), left)
    whole = sources.tuned_risk(INPUTS, left, n=3, sigma=0.4)
    assert float(whole) == pytest.approx(start + float(noise), rel=1e-10)


def _proximal(made, beta_t):
    H = gram_from_distances(
        *map(np.asarray, sources.expected_distances(made, beta_t)), squared=True
    )
    return affine_weights(H).weights


@pytest.mark.slow
def test_what_a_sum_of_one_costs(made):
    """R_affine = R + (1 - e.a)^2 / e.G^-1 e, with G from the risks of single and of two sources."""
    beta_t, ones = TASKS[3], np.ones(3)
    best, gamma = sources.best_weights(made, beta_t), _proximal(made, beta_t)
    risk = risk_of(made, beta_t)
    unit, none = np.eye(3), risk(np.zeros(3))
    G = [[risk(u + v) - risk(u) - risk(v) + none for v in unit] for u in unit]
    costs = (1 - float(best.weights.sum())) ** 2 / (ones @ np.linalg.solve(np.array(G) / 2, ones))
    assert risk(gamma) == pytest.approx(float(best.risk) + costs, rel=1e-10)


@pytest.mark.parametrize("alike", [True, False])
def test_the_best_weights_are_along_sails_where_all_overlaps_are_alike(alike):
    tasks = np.eye(3, D, 1) + np.eye(D)[0]
    tasks[2] *= 1.0 if alike else 0.3
    beta_t = np.eye(D)[0]
    made = [
        sources.wishart_fit(b, n=12, sigma=s) for b, s in zip(tasks, (0.2, 0.5, 0.9), strict=True)
    ]
    best, gamma = np.asarray(sources.best_weights(made, beta_t).weights), _proximal(made, beta_t)
    off = np.abs(best / best.sum() - gamma).max()
    assert off < 1e-12 if alike else off > 0.01


def test_the_ledger_searches_the_minimum():
    rng = np.random.default_rng(0)
    missed = several.Missed(rng.normal(size=(40, 5)), rng.normal(size=(40, 2, 5)))
    found, risk = missed.best()
    least = optimize.minimize(lambda w: missed.risks(w).mean(), np.zeros(2), tol=1e-12)
    np.testing.assert_allclose([w.value for w in found], least.x, atol=1e-6)
    assert risk.value == pytest.approx(least.fun)
    affine = missed.best(affine=True)
    along = optimize.minimize_scalar(lambda w: missed.risks([w, 1 - w]).mean())
    assert affine[0][0].value == pytest.approx(along.x, abs=1e-6)


def test_the_error_of_searched_weights_is_what_repetition_finds():
    """Over 200 repetitions z has variance 1 (chi-square, 4 s.d.)."""
    rng, scores = np.random.default_rng(1), []
    for _ in range(200):
        parts = rng.normal(size=(200, 2, 3))
        rest = np.array([0.3, -0.2]) @ parts + rng.normal(size=(200, 3))
        found, _ = several.Missed(rest, parts).best()
        scores.append((found[0].value - 0.3) / found[0].stderr)
    assert abs(np.mean(np.square(scores)) - 1) < 4 * sqrt(2 / 200)


def test_the_ledger_fine_tunes_to_the_interpolation_nearest_the_start():
    problem, d = sources_claims.PAIR, 16
    _, missed = problem.draw(np.random.default_rng(0), d, 2)
    rng = np.random.default_rng(0)
    starts = [s.fit(rng, b, 2) for s, b in zip(problem.sources, problem.tasks(d), strict=True)]
    root = problem.inputs.root(d)
    x = rng.standard_normal((2, 8, d)) @ root
    y = x @ problem.target(d) + problem.sigma * rng.standard_normal((2, 8))
    for i, risk in enumerate(missed.risks([0.7, 0.2])):
        end = 0.7 * starts[0][i] + 0.2 * starts[1][i]
        for _ in range(20_000):  # gradient descent
            end = end - 0.05 * x[i].T @ (x[i] @ end - y[i])
        assert np.sum((root @ (end - problem.target(d))) ** 2) == pytest.approx(risk, rel=1e-10)


# --- ranks ----------------------------------------------------------------------------------------


def test_all_directions_are_training_from_the_start():
    for n in (3, 30):
        found = ranks.random_rank_risk(n=n, d=12, distance=1.0, sigma=0.4, rank=12)
        assert float(found) == float(dl.scratch_risk(n=n, d=12, sigma=0.4))
    assert float(ranks.random_rank_risk(n=5, d=12, distance=1.5, sigma=0.4, rank=0)) == 1.5**2


@pytest.mark.slow
@pytest.mark.parametrize(("n", "sigma"), [(5, 0.3), (5, 3.0), (12, 0.3), (30, 0.3), (30, 3.0)])
def test_a_random_subspace_is_best_at_one_of_its_ends(n, sigma):
    all_ranks = np.arange(13)
    risks = np.asarray(
        ranks.random_rank_risk(
            n=n, d=12, distance=1.0, sigma=sigma, rank=all_ranks, allow_infinite=True
        )
    )
    found = ranks.best_random_rank(n=n, d=12, distance=1.0, sigma=sigma)
    assert int(found.rank) == risks.argmin()
    assert float(found.risk) == risks.min()


@pytest.mark.slow
def test_directions_in_an_order_miss_what_comes_after():
    """For isotropic inputs and ranks below n, compares with the law for given features."""
    offset, n, sigma = np.array([0.9, 0.5, 0.4, 0.1, 0.1, 0.0]), 7, 0.3
    found = np.asarray(ranks.rank_risks(np.ones(6), offset, n=n, sigma=sigma))
    for k in range(1, 6):
        of = subspace.overlap(np.eye(6)[:, :k], offset[:, None])
        assert found[k] == pytest.approx(
            float(subspace.linear_transfer_risk(n=n, of=of, sigma=sigma))
        )
    assert np.isinf(found[6])
    assert int(ranks.best_rank(np.ones(6), offset, n=n, sigma=sigma).rank) == found.argmin()


@pytest.mark.slow
def test_the_example_of_the_module_has_its_numbers():
    offset = 1 / np.arange(1.0, 101.0)
    offset /= np.linalg.norm(offset)
    found = ranks.best_rank(np.ones(100), offset, n=50, sigma=0.5)
    assert (int(found.rank), round(float(found.risk), 3)) == (8, 0.127)
    for k, square, threshold in ((5, 0.017, 0.0081), (8, 0.0075, 0.0077)):
        missed = np.sum(offset[k:] ** 2)
        assert offset[k] ** 2 == pytest.approx(square, rel=0.01)
        assert float(ranks.rank_threshold(missed=missed, n=50, sigma=0.5, rank=k)) == pytest.approx(
            threshold, rel=0.01
        )
    assert float(dl.scratch_risk(n=50, d=100, sigma=0.5)) == pytest.approx(0.76, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_a_direction_pays_above_its_threshold(share):
    n, sigma, rest = 12, 0.4, 0.1
    square = share * float(ranks.rank_threshold(missed=rest, n=n, sigma=sigma, rank=3))
    found = ranks.rank_risks(np.ones(4), np.sqrt([0.5, 0.2, square, rest]), n=n, sigma=sigma)
    assert bool(found[3] < found[2]) is (share > 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sources.wishart_fit(np.ones(5), n=5, sigma=0.1),
            "n must be at most d-2 or at least d",
        ),
        (
            lambda: sources.wishart_fit(np.ones(5), n=3, sigma=0.1, inputs=np.eye(5)),
            "n must be at least d",
        ),
        (
            lambda: sources.wishart_fit(np.ones(5), n=9, sigma=0.1, inputs=np.eye(4)),
            r"inputs must have shape",
        ),
        (lambda: sources.wishart_fit(np.ones((5, 1)), n=9, sigma=0.1), "beta_s must be a vector"),
        (lambda: sources.best_weights([], np.ones(D)), "fits must have at least one"),
        (lambda: sources.best_weights(fits(), np.ones(D + 1)), r"fits\[0\] must have shapes"),
        (lambda: sources.best_weights(fits(), np.ones(D), np.eye(2)), "metric must have shape"),
        (
            lambda: sources.best_weights(fits(), np.ones(D), sources.tuned_metric(INPUTS, D)),
            "fits must have weights that are unique",
        ),
        (lambda: sources.start_moments(fits(), [1.0], np.ones(D)), "weights must be one per"),
        (lambda: sources.tuned_risk(INPUTS, np.eye(2), n=3, sigma=0.1), "moments must have shape"),
        (
            lambda: ranks.random_rank_risk(n=5, d=12, distance=1.0, sigma=0.1, rank=13),
            "rank must be a number",
        ),
        (
            lambda: ranks.random_rank_risk(n=5, d=12, distance=-1.0, sigma=0.1, rank=3),
            "distance must be finite",
        ),
        (
            lambda: ranks.random_rank_risk(n=5, d=12, distance=1.0, sigma=0.1, rank=5),
            "the mean is infinite",
        ),
        (
            lambda: ranks.rank_threshold(missed=0.1, n=4, sigma=0.1, rank=2),
            "n must be a number of samples > rank",
        ),
        (
            lambda: ranks.rank_risks(np.ones(3), np.ones(2), n=5, sigma=0.1),
            "offset must have shape",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_isotropic_inputs_miss_alike_in_all_directions():
    metric = np.asarray(sources.tuned_metric(np.eye(20), 5))
    np.testing.assert_allclose(metric, 0.75 * np.eye(20), atol=1e-12)


def test_the_two_ends_of_the_metric_after_fine_tuning():
    """Without samples it is Sigma, in the limit; with as many as directions it is 0."""
    few = np.asarray(sources.tuned_metric(INPUTS, 1e-6))
    np.testing.assert_allclose(few, INPUTS, atol=1e-4)
    assert not np.asarray(sources.tuned_metric(jnp.asarray(INPUTS), D)).any()
