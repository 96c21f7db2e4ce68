"""Deep linear networks: closed forms, exact laws, simulated grids and trained networks agree."""

from functools import partial
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import flow, networks, risks

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null that both sides have one mean


pytestmark = pytest.mark.usefixtures("float64")


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def z_score(values, expected) -> float:
    values = np.asarray(values)
    return (values.mean() - expected) / (values.std(ddof=1) / np.sqrt(values.size))


# --- closed forms against independent references ------------------------------------------------


@pytest.mark.parametrize("depth", [1, 1.5, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("p", "q"), [(1e-6, 0.9), (0.3, 0.2), (50.0, 0.5), (1e-3, 0.0), (0.0, 0.4)]
)
def test_null_scale_solves_its_equation(p, q, depth):
    a = 1 - 1 / depth
    c = float(dl.null_scale(p, q, depth))
    # the fixed point c = N^a with N^2 = p + q c^2, to rounding
    assert c == pytest.approx((p + q * c**2) ** (a / 2), rel=1e-12)
    if p > 0:
        root = optimize.brentq(lambda u: u - p - q * u**a, 1e-30, 1e6, xtol=1e-300, rtol=1e-15)
        assert c == pytest.approx(root ** (a / 2), rel=1e-9)


def test_null_scale_depth_two_is_quadratic_and_infinite_depth_matches_directions():
    p, q = 0.7, 0.3
    assert float(dl.null_scale(p, q, 2)) ** 2 == pytest.approx((q + np.sqrt(q**2 + 4 * p)) / 2)
    assert float(dl.null_scale(p, q, np.inf)) ** 2 == pytest.approx(p / (1 - q))


@pytest.mark.slow
def test_null_scale_gradient_is_that_of_the_implicit_function():
    # central differences: error O(h^2) + eps / h
    at = np.array([0.6, 0.3, 2.5])
    slopes = jax.grad(dl.null_scale, (0, 1, 2))(*at)
    for slope, step in zip(slopes, 1e-5 * np.eye(3), strict=True):
        rise = dl.null_scale(*(at + step)) - dl.null_scale(*(at - step))
        assert float(slope) == pytest.approx(float(rise) / 2e-5, rel=1e-7)


def trapezoid_over_chi2(n, function):
    """E f(u), u ~ chi^2_n, by the trapezoidal rule in log u: spectrally accurate."""
    low = np.log(1e-30) if n < 20 else np.log(n) - 60 / np.sqrt(n)
    x = np.linspace(low, np.log(n) + (8 if n < 20 else 40 / np.sqrt(n)), 200_001)
    u = np.exp(x)
    return np.sum(stats.chi2.pdf(u, n) * u * function(u)) * (x[1] - x[0])


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [1e-7, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 50, 5000])
def test_ridge_risk_against_quadrature_over_the_density(ridge, n):
    theta, sigma = 0.7, 0.4
    k, missed = n * ridge, np.sin(theta) ** 2
    expected = (
        missed
        + np.cos(theta) ** 2 * trapezoid_over_chi2(n, lambda u: (k / (u + k)) ** 2)
        + (sigma**2 + missed) * trapezoid_over_chi2(n, lambda u: u / (u + k) ** 2)
    )
    found = float(dl.linear_transfer_risk(n=n, theta=theta, sigma=sigma, ridge=ridge))
    assert found == pytest.approx(expected, rel=1e-9)  # scipy's density is good to 1e-10
    with jax.enable_x64(False):
        single = float(dl.linear_transfer_risk(n=n, theta=theta, sigma=sigma, ridge=ridge))
    assert single == pytest.approx(expected, rel=2e-6)  # 20 eps


def test_ridge_limits():
    at = {"n": 10, "theta": 0.7, "sigma": 0.4}
    plain = float(dl.linear_transfer_risk(**at))
    assert float(dl.linear_transfer_risk(**at, ridge=1e-12)) == pytest.approx(plain, rel=1e-9)
    assert float(dl.linear_transfer_risk(**at, ridge=1e12)) == pytest.approx(1.0, rel=1e-9)
    limit = float(dl.linear_transfer_limit(theta=0.7, ridge=0.3))
    # approach at rate 1/n
    gaps = [
        float(dl.linear_transfer_risk(n=n, theta=0.7, sigma=0.4, ridge=0.3)) - limit
        for n in (1e4, 1e5)
    ]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize(
    ("n", "theta", "sigma"), [(3, 0.3, 0.2), *slow((10, 1.2, 0.2), (100, 0.8, 1.0))]
)
def test_optimal_ridge_is_the_minimum(n, theta, sigma):
    found = optimize.minimize_scalar(
        lambda log: float(
            dl.linear_transfer_risk(n=n, theta=theta, sigma=sigma, ridge=np.exp(log))
        ),
        bounds=(-12, 6),
        method="bounded",
        options={"xatol": 1e-9},
    )
    # a minimum is located to sqrt(eps)
    assert np.exp(found.x) == pytest.approx(
        float(dl.optimal_ridge(n=n, theta=theta, sigma=sigma)), rel=1e-5
    )


@pytest.mark.parametrize(
    ("theta", "sigma"), [(0.3, 0.0), (1.2, 0.2), (2.6, 0.1), (0.2, 0.5), (1.0, 1.5)]
)
def test_linear_boundary_are_the_sign_changes(theta, sigma):
    lower, upper, over = (float(v) for v in dl.linear_transfer_boundary(theta=theta, sigma=sigma))
    gamma = (np.arange(4000) + 0.5) / 2000
    hurts = np.asarray(dl.transferability_limit("linear", load=gamma, theta=theta, sigma=sigma)) < 0
    inside = ((gamma > lower) & (gamma < upper)) | (gamma > over)
    # grid cells that straddle a root may differ
    assert np.sum(hurts != inside) <= 3
    assert lower <= upper


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "sigma"), [(5, 100, 0.5), (50, 100, 0.0), (16, 100, 1.2), (150, 100, 0.2)]
)
def test_linear_transfer_sin2_is_the_sign_change(n, d, sigma):
    """Against a root of the transferability itself."""
    found = float(np.arcsin(np.sqrt(dl.linear_transfer_sin2(n=n, d=d, sigma=sigma))))
    with jax.enable_x64(True):
        gain = lambda theta: float(dl.transferability("linear", n=n, d=d, theta=theta, sigma=sigma))  # noqa: E731
        assert found == pytest.approx(optimize.brentq(gain, 0.0, np.pi / 2), rel=1e-6)
        assert gain(np.pi - found - 1e-3) < 0 < gain(np.pi - found + 1e-3)


@pytest.mark.slow
def test_linear_transfer_sin2_ends_where_nothing_changes_sign():
    """At d = 100, sigma = 1.2 some samples hurt below what the limit n, d -> inf has; n = d has an
    infinite risk from scratch, n = 2 one of linear transfer."""
    np.testing.assert_array_equal(dl.linear_transfer_sin2(n=[1, 2, 3], d=100, sigma=1.2), 0)
    np.testing.assert_array_equal(dl.linear_transfer_sin2(n=[30, 99, 100], d=100, sigma=1.2), 1)
    hurts = dl.transferability("linear", n=np.arange(3, 19), d=100, theta=np.pi / 2, sigma=1.2)
    assert (np.asarray(hurts) < 0).all()
    lower = dl.linear_transfer_boundary(theta=np.pi / 2, sigma=1.2)
    assert float(lower.lower) == float(lower.upper)


def test_without_a_region_its_two_ends_are_equal():
    """Compiled with much else, as a study does, they must not be rounded apart: a line between them
    would be drawn where nothing changes sign."""
    theta, sigma = np.linspace(0, np.pi / 2, 600)[:, None], np.array([0.0, 0.2, 0.7])

    @jax.jit
    def together(theta, sigma):
        ends = dl.linear_transfer_boundary(theta=theta, sigma=sigma)
        return (
            ends.lower,
            ends.upper,
            dl.fine_tuning_boundary(load=0.5 + 0 * theta, sigma=sigma, depth=2.0),
        )

    with jax.enable_x64(True):
        lower, upper, _ = map(np.asarray, together(theta, sigma))
    region = np.cos(theta) < 1 - sigma - 1e-9
    np.testing.assert_array_equal(lower[~region & (theta > 0)], upper[~region & (theta > 0)])
    assert (lower < upper)[region & (theta > 1e-3)].all()


@pytest.mark.slow
def test_boundaries_have_derivatives_where_there_is_no_region_too():
    """Against central differences, whose error at h = 1e-5 is about h^2 = 1e-10."""

    def ends(theta, sigma, gamma):
        return jnp.stack([
            *dl.linear_transfer_boundary(theta=theta, sigma=sigma),
            dl.fine_tuning_boundary(load=gamma, sigma=sigma),
        ])  # fmt: skip

    # A region below n = d, none, and fine-tuning that hurts at every angle.
    for point in ((1.2, 0.2, 0.5), (0.4, 0.5, 0.5), (1.2, 0.9, 0.999)):
        with jax.enable_x64(True):
            point = jnp.array(point)
            slopes = jax.jacobian(lambda x: ends(*x))(point)
            steps = 1e-5 * jnp.eye(3)
            want = jnp.stack([(ends(*(point + h)) - ends(*(point - h))) / 2e-5 for h in steps], 1)
        np.testing.assert_allclose(slopes, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("depth", [2, 3, np.inf])
@pytest.mark.parametrize(("gamma", "sigma"), [(0.3, 0.0), (0.5, 1.0), (0.9, 0.2)])
def test_fine_tuning_boundary_is_the_sign_change(gamma, sigma, depth):
    edge = float(dl.fine_tuning_boundary(load=gamma, sigma=sigma, depth=depth))
    gain = [
        float(
            dl.transferability_limit(
                "fine_tuning", load=gamma, theta=edge + step, sigma=sigma, depth=depth
            )
        )
        for step in (-1e-6, 1e-6)
    ]
    assert gain[0] > 0 > gain[1]


@pytest.mark.slow
def test_boundary_angles_of_the_noisy_case():
    """Degrees from an independent solution of the depth-two quadratic at sigma = 0.2."""
    found = np.degrees(
        dl.fine_tuning_boundary(load=np.array([0.1, 0.5, 0.9, 0.95, 0.99]), sigma=0.2, depth=2)
    )
    np.testing.assert_allclose(found, [59.9, 59.6, 57.2, 54.7, 41.7], atol=0.06)
    assert (
        float(dl.fine_tuning_boundary(load=0.999, sigma=0.2, depth=2)) == 0.0
    )  # hurts at every angle


@pytest.mark.slow
def test_exact_tends_to_limit_and_broadcasts():
    gamma, theta = np.array([0.3, 0.7, 1.6])[:, None], np.array([0.2, 1.0])
    d = 1e7
    finite = dl.transferability("linear", n=gamma * d, d=d, theta=theta, sigma=0.5)
    np.testing.assert_allclose(
        finite, dl.transferability_limit("linear", load=gamma, theta=theta, sigma=0.5), atol=1e-6
    )
    ft = dl.transferability("fine_tuning", n=30, d=60, theta=theta, sigma=0.5, depth=3)
    difference = dl.scratch_limit(load=0.5, sigma=0.5) - dl.fine_tuning_risk(
        load=0.5, theta=theta, sigma=0.5, depth=3
    )
    np.testing.assert_allclose(ft, difference, rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 1.5])
def test_nothing_is_left_of_the_source_from_n_equals_d_on(gamma):
    assert (
        float(dl.transferability_limit("fine_tuning", load=gamma, theta=0.3, sigma=0.4, depth=2))
        == 0.0
    )


# --- estimators: defining equations ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 12, 20])
def test_estimators_satisfy_their_definitions(n):
    s = problems.draw(jax.random.key(0), n, 12, 0.8, 0.3)
    beta_s = 1.7 * s.beta_s
    for depth in (1, 2, 5):
        beta = dl.fine_tuning_limit(s.x, s.y, beta_s, depth)
        # stationary: X^T (y - X beta) = 0, and the unseen part is a multiple of the source's
        np.testing.assert_allclose(s.x.T @ (s.y - s.x @ beta), 0, atol=1e-12)
        unseen = np.eye(12) - np.linalg.pinv(s.x) @ s.x
        c = np.linalg.norm(beta) / 1.7 if n < 12 else 1.0
        np.testing.assert_allclose(
            unseen @ beta, c ** (1 - 1 / depth) * unseen @ beta_s, atol=1e-10
        )
    np.testing.assert_allclose(dl.scratch_fit(s.x, s.y), np.linalg.pinv(s.x) @ s.y, atol=1e-10)


@pytest.mark.slow
def test_rank_deficient_designs_count_what_they_see():
    s = problems.draw(jax.random.key(1), 6, 8, 0.8, 0.3)
    twice = jnp.concatenate([s.x, s.x]), jnp.concatenate([s.y, s.y])
    np.testing.assert_allclose(
        dl.fine_tuning_limit(*twice, s.beta_s, 3),
        dl.fine_tuning_limit(s.x, s.y, s.beta_s, 3),
        atol=1e-10,
    )


@pytest.mark.slow
def test_network_reaches_the_estimator_at_first_order_in_the_step_size():
    """Gradient descent, L = 2 and 3, from pretraining on: distance to the corrected formula is
    O(rate) (halves with the step), and the printed one (depth 1) stays away."""
    s = problems.draw(jax.random.key(4), 12, 20, pi / 4, 0.8)
    for depth, alpha in ((2, 1e-3), (3, 1e-2)):
        weights = networks.small_weights(jax.random.key(7), 20, depth, alpha)
        target = dl.fine_tuning_limit(s.x, s.y, s.beta_s, depth)
        gaps, betas = [], []
        for rate in (0.02, 0.01):
            pre = networks.pretrain(weights, s.beta_s, rate, round(400 / rate))
            np.testing.assert_allclose(networks.predictor(pre.weights), s.beta_s, atol=1e-10)
            ft = networks.fine_tune(pre.weights, s.x, s.y, rate, round(800 / rate))
            assert float(ft.gradient) < 1e-9
            betas.append(networks.predictor(ft.weights))
            gaps.append(float(jnp.linalg.norm(betas[-1] - target)))
        assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.2)
        assert float(jnp.linalg.norm(2 * betas[1] - betas[0] - target)) < 1e-4  # O(rate^2)
        printed = dl.fine_tuning_limit(s.x, s.y, s.beta_s, 1)
        assert float(jnp.linalg.norm(betas[1] - printed)) > 20 * gaps[1]


@pytest.mark.slow
def test_scratch_network_reaches_the_minimum_norm_solution():
    s = problems.draw(jax.random.key(4), 12, 20, pi / 4, 0.8)
    for alpha in (1e-2, 1e-3):
        weights = networks.small_weights(jax.random.key(7), 20, 2, alpha)
        trained = networks.fine_tune(weights, s.x, s.y, 0.02, 40_000)
        gap = jnp.linalg.norm(networks.predictor(trained.weights) - dl.scratch_fit(s.x, s.y))
        assert float(gap) < alpha  # Thm 3.5: O(alpha)


# --- the grid against estimators on the same data ----------------------------------------------


@pytest.mark.slow
def test_nested_factorisation_matches_estimators_on_the_same_rows():
    depths = np.array([1, 2, 4])
    d, ns, theta, sigma = 10, (3, 7, 10, 11, 19), 0.9, 0.5
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(19, d)), rng.normal(size=19)
    tasks = np.linalg.qr(rng.normal(size=(d, 2)))[0]
    beta_s, beta_t = tasks[:, 0], tasks @ np.array([np.cos(theta), np.sin(theta)])
    found = jax.jit(dl.nested_overlaps, static_argnums=3)(x, noise, tasks, ns)

    @jax.jit
    def fits(x, y):
        tuned = [dl.fine_tuning_limit(x, y, beta_s, depth) for depth in depths]
        return dl.scratch_fit(x, y), jnp.stack(tuned), dl.linear_transfer_fit(x, y, beta_s, 0.1)

    for i, n in enumerate(ns):
        at = dl.Overlaps(*(np.asarray(field)[i] for field in found))
        y = x[:n] @ beta_t + sigma * noise[:n]
        values = (
            at.scratch(theta, sigma),
            at.fine_tune(theta, sigma, depths),
            at.linear_transfer(theta, sigma, 0.1),
        )
        for value, fit in zip(values, fits(x[:n], y), strict=True):
            risk = np.sum((np.asarray(fit) - beta_t) ** 2, -1)
            # a relative error of eps cond(X)^2, at most 1e-10 here
            np.testing.assert_allclose(value, risk, rtol=1e-8)


@pytest.mark.slow
def test_simulation_does_not_depend_on_the_order_of_n_and_is_reproducible():
    keys = jax.random.split(jax.random.key(3), 3)
    first = dl.simulate_overlaps(keys, [8, 30, 15], 20)
    again = dl.simulate_overlaps(keys[1:], [30, 15, 8], 20)
    np.testing.assert_array_equal(first.gram[1:, 0], again.gram[:, 2])
    np.testing.assert_array_equal(first.source[1:, 1], again.source[:, 0])
    assert first.gram.dtype == jnp.float64


@pytest.mark.slow
def test_grid_means_match_closed_forms():
    ns, d = [5, 20, 50, 80], 40
    grid = dl.simulate_overlaps(jax.random.split(jax.random.key(11), 2000), ns, d)
    scratch, moved = grid.scratch(0.6, 0.5), grid.linear_transfer(0.6, 0.5)
    for i, n in enumerate(ns):
        assert abs(z_score(scratch[:, i], float(dl.scratch_risk(n=n, d=d, sigma=0.5)))) < Z_MAX
        assert (
            abs(z_score(moved[:, i], float(dl.linear_transfer_risk(n=n, theta=0.6, sigma=0.5))))
            < Z_MAX
        )


# --- exact laws ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(3, 4), (1, 4), (10, 24), (2, 9), (12, 12), (30, 10)])
def test_sampled_law_equals_simulated_law(n, d):
    """Two-sample Kolmogorov-Smirnov; null: one law. p > 1e-3 with the fixed seeds below, for
    scratch, fine-tuning (two depths) and linear transfer: 24 tests, level 2 % together."""
    law = dl.overlaps_law(jax.random.key(5), n=n, d=d, draws=4000)
    sim = dl.simulate_overlaps(jax.random.split(jax.random.key(6), 4000), [n], d)
    theta, sigma = 0.8, 0.6
    for of_law, of_sim in (
        (law.scratch(theta, sigma), sim.scratch(theta, sigma)),
        (law.fine_tune(theta, sigma, 2), sim.fine_tune(theta, sigma, 2)),
        (law.fine_tune(theta, sigma, 5), sim.fine_tune(theta, sigma, 5)),
        (law.linear_transfer(theta, sigma), sim.linear_transfer(theta, sigma)),
    ):
        assert stats.ks_2samp(of_law, np.asarray(of_sim)[:, 0]).pvalue > 1e-3


@pytest.mark.slow
def test_fine_tuning_risk_is_the_limit_of_the_exact_law():
    """Null: the mean at d = 4000 equals the limit; its bias O(1/d) is below the standard error."""
    for depth in (1, 2, 3):
        law = dl.overlaps_law(jax.random.key(depth), n=2000, d=4000, draws=4000)
        expected = float(dl.fine_tuning_risk(load=0.5, theta=pi / 4, sigma=1.0, depth=depth))
        assert abs(z_score(law.fine_tune(pi / 4, 1.0, depth), expected)) < Z_MAX


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dl.linear_transfer_risk(n=2, theta=0.1, sigma=0.1),
            "n must be a number of samples > 2",
        ),
        (
            lambda: dl.linear_transfer_risk(n=0, theta=0.1, sigma=0.1, ridge=1.0),
            "n must be a number of samples > 2",
        ),
        (
            lambda: dl.linear_transfer_risk(n=5, theta=0.1, sigma=0.1, ridge=-1.0),
            "ridge must be finite and >= 0; got -1",
        ),
        (lambda: dl.scratch_risk(n=5, d=10, sigma=-0.1), r"sigma must be .* >= 0; got -0.1"),
        (lambda: dl.scratch_risk(n=5, d=10, sigma=np.nan), "sigma must be .* got nan"),
        (
            lambda: dl.scratch_risk(n=10, d=10, sigma=0.1),
            r"n must be at most d-2 .* mean is infinite",
        ),
        (lambda: dl.scratch_risk(n=[3, 11], d=10, sigma=0.1), r"n must be at most d-2 .* got 11"),
        (
            lambda: dl.fine_tuning_risk(load=1.0, theta=0.1, sigma=0.2),
            "load must be other than 1 where sigma > 0",
        ),
        (
            lambda: dl.fine_tuning_risk(load=0.5, theta=3.5, sigma=0.2),
            r"theta must be an angle in \[0, pi\].*3.5",
        ),
        (
            lambda: dl.fine_tuning_risk(load=0.5, theta=0.1, sigma=0.2, depth=0),
            "depth must be a number of layers >= 1",
        ),
        (
            lambda: dl.fine_tuning_risk(load=-0.5, theta=0.1, sigma=0.2),
            "load must be a finite load",
        ),
        (lambda: dl.fine_tuning_boundary(load=1.2, sigma=0.2), r"load must be a load in \[0, 1\)"),
        (
            lambda: dl.transferability("lineer", n=5, d=10, theta=0.1, sigma=0.1),
            "mode: expected one of 'linear', 'fine_tuning'",
        ),
        (lambda: dl.simulate_overlaps(jax.random.key(0)[None], [], 5), "ns must be a non-empty"),
        (lambda: dl.simulate_overlaps(jax.random.key(0)[None], [3.5], 5), "ns must be a non-empty"),
        (lambda: dl.simulate_overlaps(jax.random.key(0)[None], [3], 1), "d must be at least 2"),
        (lambda: dl.simulate_overlaps(jax.random.key(0), [3], 5), "keys must be an array"),
        (lambda: dl.overlaps_law(jax.random.key(0), n=0, d=5, draws=1), "n >= 1"),
        (
            lambda: dl.fine_tuning_limit(jnp.ones((3, 4)), jnp.ones(2), jnp.ones(4)),
            "y must have shape",
        ),
        (
            lambda: dl.fine_tuning_limit(jnp.ones((3, 4)), jnp.ones(3), jnp.ones(3)),
            "beta_s must have",
        ),
        (lambda: dl.fine_tuning_limit(jnp.ones((3, 4)), jnp.ones(3), jnp.zeros(4)), "beta_s"),
        (lambda: problems.tasks(1, 0.3), "d must be at least 2"),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_infinite_means_are_inf_when_asked_for_and_finite_without_noise():
    n = np.array([8, 9, 10, 11, 12])
    found = np.asarray(dl.scratch_risk(n=n, d=10, sigma=0.5, allow_infinite=True))
    assert np.isinf(found).tolist() == [False, True, True, True, False]
    np.testing.assert_allclose(dl.scratch_risk(n=n, d=10, sigma=0.0), np.maximum(1 - n / 10, 0))
    assert np.isinf(dl.linear_transfer_risk(n=2, theta=0.1, sigma=0.1, allow_infinite=True))
    assert float(dl.transferability_limit("fine_tuning", load=1.0, theta=0.2, sigma=0.5)) == 0.0


@pytest.mark.slow
def test_closed_forms_trace_vectorise_and_differentiate():
    compiled = jax.jit(lambda n: dl.scratch_risk(n=n, d=10, sigma=0.5))
    assert float(compiled(5)) == pytest.approx(float(dl.scratch_risk(n=5, d=10, sigma=0.5)))
    assert np.isinf(compiled(10))  # a traced value cannot be refused
    risk = partial(risks.fine_tuning_risk, theta=0.4, sigma=0.3)
    slopes = jax.vmap(jax.grad(lambda load: risk(load=load)))(jnp.array([0.2, 0.8]))
    assert np.isfinite(slopes).all()


# --- finite time --------------------------------------------------------------------------------


@pytest.mark.slow
def test_flow_of_a_linear_model_is_an_exponential():
    s = problems.draw(jax.random.key(8), 7, 10, 0.8, 0.5)
    values, vectors = np.linalg.eigh(s.x.T @ s.x / 7)
    times = np.array([0.0, 0.3, 2.0, 50.0])
    found = flow.fine_tuning_flow(s.x, s.y, s.beta_s, times, 1)
    offset = vectors.T @ (s.beta_s - dl.fine_tuning_limit(s.x, s.y, s.beta_s, 1))
    expected = (
        dl.fine_tuning_limit(s.x, s.y, s.beta_s, 1)
        + (np.exp(-values * times[:, None]) * offset) @ vectors.T
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)  # Runge-Kutta at STEP^4 / 120


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_flow_follows_the_network_and_ends_at_the_limit(depth):
    """Gradient descent at two step sizes, extrapolated to flow: O(rate^2) + O(alpha)."""
    s = problems.draw(jax.random.key(9), 8, 12, 0.8, 0.5)
    alpha, times = 1e-3 if depth == 2 else 1e-2, (1.0, 5.0)
    path = flow.fine_tuning_flow(s.x, s.y, s.beta_s, [*times, 3e4], depth)
    weights = networks.small_weights(jax.random.key(7), 12, depth, alpha)
    for i, t in enumerate(times):
        betas = []
        for rate in (0.01, 0.005):
            pre = networks.pretrain(weights, s.beta_s, rate, round(400 / rate))
            ft = networks.fine_tune(pre.weights, s.x, s.y, rate, round(t / rate))
            betas.append(networks.predictor(ft.weights))
        np.testing.assert_allclose(path[i], 2 * betas[1] - betas[0], atol=1e-3)
    np.testing.assert_allclose(path[-1], dl.fine_tuning_limit(s.x, s.y, s.beta_s, depth), atol=1e-5)


@pytest.mark.parametrize(
    ("times", "message"),
    [([], "times must be a non-empty"), ([2.0, 1.0], "times must be asc"), ([-1.0], "times must")],
)
def test_bad_times_are_named(times, message):
    with pytest.raises(ValueError, match=message):
        flow.fine_tuning_flow(jnp.ones((3, 4)), jnp.ones(3), jnp.ones(4), times)
