"""Merged experts against pooled training: laws at random points, and how they meet."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from sail_jax import methods
from theory import merging
from theory.deep_linear import sources
from theory.merging import RegressionTasks, experts


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def inputs(rng, d):
    """A covariance whose eigenvectors are random."""
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return turn * np.exp(0.7 * rng.standard_normal(d)) @ turn.T


def score(found, predicted):
    return (found.mean() - float(predicted)) / (found.std(ddof=1) / len(found) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("points", [2, 24])
def test_exact_laws_are_means_over_data_sets(points):
    """At random dimensions, curvatures, teachers, sizes and weights. z, so 4 is rarely exceeded."""
    rng, scores = np.random.default_rng(points), []
    for i in range(points):
        d, count = int(rng.integers(1, 6)), int(rng.integers(2, 5))
        teachers, sigma = rng.standard_normal((count, d)), rng.uniform(0.3, 1.5, count)
        curvatures = [inputs(rng, d) for _ in range(count)]
        tasks = RegressionTasks(curvatures, teachers, rng.integers(d + 5, d + 14, count), sigma)
        drawn = merging.fit_experts(jax.random.key(i), tasks, 3_000)
        fits = merging.expert_fits(tasks)
        for weights in (rng.uniform(-0.2, 1, (count, 1, 1)) * np.eye(d),
                        merging.curvature_weights(tasks)):  # fmt: skip
            models = np.einsum("tij,ntj->ni", weights, drawn.experts)
            found = merging.mean_risks(tasks, models) - merging.least_risk(tasks)
            scores.append(score(found, merging.merge_excess(tasks, fits, weights)))
        few = rng.integers(1, 9, count)
        few[0] += max(0, d + 5 - few.sum())
        tasks = RegressionTasks(curvatures[:1] * count, teachers, few, sigma)
        drawn = merging.fit_experts(jax.random.key(i), tasks, 3_000, ridge=1.0)
        found = merging.mean_risks(tasks, drawn.pooled) - merging.least_risk(tasks)
        scores.append(score(found, merging.pooled_least_squares(tasks)))
    assert max(map(abs, scores)) < 4


@pytest.mark.slow
def test_limits_are_means_over_data_sets_up_to_their_error():
    """Eight problems of 48 dimensions. The equivalents differ from the means by up to 1 %."""
    rng, size = np.random.default_rng(3), 6
    for i in range(8):
        count = int(rng.integers(2, 4))
        curvatures = [np.kron(inputs(rng, 8), np.eye(size)) for _ in range(count)]
        teachers = np.repeat(rng.standard_normal((count, 8)), size, 1) / 7
        tasks = RegressionTasks(
            curvatures, teachers, rng.integers(30, 120, count), rng.uniform(0.3, 1, count)
        )
        ridge = float(rng.uniform(0.05, 0.5))
        drawn = merging.fit_experts(jax.random.key(i), tasks, 500, ridge=ridge, pooled_ridge=ridge)
        average = merging.merge_excess(
            tasks, merging.expert_fits(tasks, ridge), np.full(count, 1 / count)
        )
        for models, law in (
            (drawn.experts.mean(1), average),
            (drawn.pooled, merging.pooled_excess(tasks, ridge)),
        ):
            found = merging.mean_risks(tasks, models) - merging.least_risk(tasks)
            error = 4 * found.std() / len(found) ** 0.5
            assert found.mean() == pytest.approx(float(law), abs=error + 0.01 * float(law))


def alike(n, count=3, d=6, sigma=0.7):
    rng = np.random.default_rng(count)
    return RegressionTasks([inputs(rng, d)] * count, rng.standard_normal((count, d)), n, sigma)


@pytest.mark.parametrize(("n", "kappa"), [(9, 0.0), (9, 0.4), (4, 1.5)])
def test_the_comparison_at_one_ridge_is_of_the_general_laws(n, kappa):
    tasks, count = alike(n), 3
    s, basis = np.linalg.eigh(tasks.curvature)
    parts, df1 = tasks.teachers @ basis, np.sum(s / (s + kappa))
    found = merging.compared(
        s, parts.mean(0) ** 2, parts.var(0, ddof=1), n=n, tasks=count, sigma=0.7, kappa=kappa
    )
    fits = merging.expert_fits(tasks, kappa * (1 - df1 / n))

    def scaled(scale):
        return float(merging.merge_excess(tasks, fits, np.full(count, scale / count)))

    least: Any = optimize.minimize_scalar(scaled)
    pooled = float(merging.pooled_excess(tasks, kappa * (1 - df1 / (n * count))))
    assert float(found.average) == pytest.approx(scaled(1.0))
    assert float(found.scaled) == pytest.approx(least.fun)
    assert float(found.scale) == pytest.approx(least.x, rel=1e-6)
    assert float(found.pooled) == pytest.approx(pooled)
    assert float(found.model) == pytest.approx(pooled + tasks.floor)
    assert found.average - found.pooled == pytest.approx(found.share * (found.expert - found.model))


def test_curvatures_that_are_rotated_compare_as_one_curvature():
    rng, n, d, sigma = np.random.default_rng(4), 9, 4, 0.7
    one, swap = inputs(rng, d), np.linalg.qr(rng.standard_normal((d, 2)))[0]
    swap = np.eye(d) - 2 * swap @ swap.T
    tasks = RegressionTasks([one, swap @ one @ swap], rng.standard_normal((2, d)), n, sigma)
    expert = sigma**2 * d / (n - d)
    pooled = float(merging.pooled_excess(tasks))
    share = d / (2 * n)
    assert share * (expert + sigma**2) - pooled == pytest.approx(
        share * (expert - pooled - tasks.floor)
    )


@pytest.mark.slow
def test_no_penalty_has_an_effective_ridge_below_that_of_least_norm():
    one, kappa = np.ones(2), np.array([0.9, 1.0])
    found = merging.compared(one, one, 0 * one, n=1, tasks=2, sigma=1.0, kappa=kappa)
    assert np.isinf(found.expert).tolist() == np.isinf(found.average).tolist() == [True, False]
    assert np.isfinite(found.pooled).all()


@pytest.mark.parametrize(("n", "d", "count"), [(4, 1, 2), (9, 6, 3), (40, 6, 5)])
def test_the_boundary_is_where_the_exact_risks_meet(n, d, count):
    unit = alike(n, count, d)
    spread = unit.floor * count / (count - 1)
    bound = float(merging.spread_boundary(n=n, d=d, tasks=count, sigma=0.7))
    gains = []
    for times in (0.9, 1.0, 1.1):
        teachers = unit.teachers * (times * bound / spread) ** 0.5
        tasks = RegressionTasks(unit.curvatures, teachers, n, 0.7)
        fits = merging.expert_fits(tasks)
        average = merging.merge_excess(tasks, fits, np.full(count, 1 / count))
        gains.append(float(merging.pooled_least_squares(tasks) - average))
    assert gains[0] < 0 < gains[2]
    assert gains[1] == pytest.approx(0, abs=1e-12)


def test_pooled_least_squares_tends_to_the_limit_as_1_over_d():
    errors = []
    for d in (12, 48):
        tasks = alike(2 * d, d=d)
        exact, limit = merging.pooled_least_squares(tasks), merging.pooled_excess(tasks)
        errors.append(abs(float(limit / exact) - 1))
    assert errors[1] < errors[0] / 3 < 0.1


def test_regmean_needs_the_penalty_in_its_gram_matrices():
    rng, ridge = np.random.default_rng(0), 2.0
    data = [(rng.standard_normal((n, 4)), rng.standard_normal((n, 1))) for n in (2, 3, 6)]
    plain = [x.T @ x for x, _ in data]
    whole = [g + ridge * np.eye(4) for g in plain]
    models = [{"w": np.linalg.solve(g, x.T @ y)} for g, (x, y) in zip(whole, data, strict=True)]
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    pooled = np.linalg.solve(x.T @ x + 3 * ridge * np.eye(4), x.T @ y)

    def apart(grams):
        merge = methods.regmean(grams=[{"w": g} for g in grams], off_diagonal=1.0, damping=1e-13)
        return np.abs(np.asarray(merge(models)["w"]) - pooled).max()

    assert apart(whole) < 1e-10
    assert apart(plain) > 0.1


@pytest.mark.slow
def test_the_best_numbers_as_weights_are_those_of_several_sources():
    rng = np.random.default_rng(2)
    tasks = RegressionTasks(
        [inputs(rng, 4) for _ in range(3)], rng.standard_normal((3, 4)), [7, 9, 20], 0.5
    )
    fits = merging.expert_fits(tasks)
    found = sources.best_weights(fits, jnp.asarray(tasks.best), jnp.asarray(tasks.curvature))
    least = optimize.minimize(
        lambda w: float(merging.merge_excess(tasks, fits, w)), np.full(3, 1 / 3), tol=1e-10
    )
    assert least.fun == pytest.approx(float(found.risk))
    np.testing.assert_allclose(found.weights, least.x, atol=1e-4)


def test_isotropic_experts_are_the_dense_bed():
    """Each of d entries has the noise sigma^2 / (n - d - 1), and half of the loss."""
    n, d, count, sigma = 20, 5, 4, 0.6
    tasks = RegressionTasks([np.eye(d)] * count, np.ones((count, d)), n, sigma)
    bed = merging.GaussianTasks(count, 1.0, 0.0, noise=sigma / (n - d - 1) ** 0.5)
    found = merging.merge_excess(tasks, merging.expert_fits(tasks), np.full(count, 1 / count))
    excess = merging.merge_moments(bed, "average").excess(1.0)
    assert float(found) == pytest.approx(2 * d * excess)


@pytest.mark.slow
@pytest.mark.parametrize("points", [20, 1_000])
def test_the_solver_finds_the_root_near_interpolation(points):
    rng = np.random.default_rng(0)
    for _ in range(points):
        d, count = int(rng.integers(1, 8)), int(rng.integers(1, 5))
        ridge, n = float(rng.choice([0, 1e-8, 1e-3, 1, 1e3])), rng.integers(1, 8, count)
        n[0] += (ridge == 0) * max(0, d + 1 - n.sum())
        curvatures = [inputs(rng, d) ** 2 + 1e-3 * np.eye(d) for _ in range(count)]
        tasks = RegressionTasks(
            [c @ c for c in curvatures], rng.standard_normal((count, d)), n, 0.5
        )
        mu, (right, *_) = experts._solved(tasks, n.sum() * ridge * np.eye(d))
        np.testing.assert_allclose(right, mu, rtol=1e-9)
        assert np.all(mu >= 1)


ONE = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RegressionTasks([ONE], [1.0, 0.0], 4, 0.1), "teachers must be"),
        (lambda: RegressionTasks([ONE], ONE, 4, 0.1), "curvatures must have shape"),
        (lambda: RegressionTasks([ONE] * 2, ONE, [4], 0.1), "samples must have shape"),
        (lambda: RegressionTasks([ONE] * 2, ONE, 4.5, 0.1), "samples must be whole"),
        (lambda: RegressionTasks([ONE] * 2, ONE, 4, -0.1), "sigma must be"),
        (lambda: RegressionTasks([ONE, [[1.0, 2.0], [2.0, 1.0]]], ONE, 4, 0.1), r"curvatures\[1\]"),
        (lambda: merging.expert_fits(alike(7)), "samples must be >= d"),
        (lambda: merging.pooled_excess(alike(2)), "ridge must be > 0"),
        (lambda: merging.pooled_excess(alike(9), -1.0), "ridge must be"),
        (lambda: merging.pooled_least_squares(alike(2)), "N must be at least"),
        (lambda: merging.merge_excess(alike(9), [], np.ones(3)), "weights must be"),
        (lambda: merging.spread_boundary(n=4, d=3, tasks=2, sigma=1.0), r"n must .* got 4$"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_different_curvatures_have_no_exact_pooled_law():
    rng = np.random.default_rng(1)
    tasks = RegressionTasks([inputs(rng, 2) for _ in range(2)], np.ones((2, 2)), 9, 0.5)
    with pytest.raises(ValueError, match="curvatures must be equal"):
        merging.pooled_least_squares(tasks)
