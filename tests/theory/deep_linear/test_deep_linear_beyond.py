"""Whole distributions of risks, and risks under any covariance, against simulation."""

import functools
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless, soak
from scipy import stats

from theory import deep_linear as dl
from theory.deep_linear import advice, covariance, distributions, subspace

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null


pytestmark = pytest.mark.usefixtures("float64")


CASES = [(1, 3, 0.5), (26, 20, 1.0), (10, 20, 1.0), (19, 20, 0.2), (20, 20, 0.3), (10, 20, 0.0)]


def have_law(risks: np.ndarray, law: distributions.RiskLaw) -> bool:
    """One-sample Kolmogorov-Smirnov, level 1e-3. The cdf is interpolated between 100 quantiles of
    the risks: an error of the order of 1e-4, where 4000 risks resolve 0.03."""
    nodes = np.quantile(risks, np.linspace(0, 1, 101))
    values = np.asarray(law.cdf(nodes))
    return stats.kstest(risks, lambda r: np.interp(r, nodes, values)).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "sigma"), CASES)
def test_scratch_law_against_simulated_data(n, d, sigma):
    """Null: the law of the risk of least squares on real data is exact, and `sample` draws it."""
    law = distributions.scratch_law(n=n, d=d, sigma=sigma)
    rng = np.random.default_rng(2)
    x, noise = rng.normal(size=(4000, n, d)), rng.normal(size=(4000, n, 1))
    error = np.linalg.pinv(x) @ (x[:, :, :1] + sigma * noise) - np.eye(d, 1)  # beta_t = e_1
    assert have_law((error**2).sum((1, 2)), law)
    assert have_law(np.asarray(law.sample(jax.random.key(3), 4000)), law)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 1, 8, 40])
def test_linear_transfer_law_against_simulated_data(n):
    rng = np.random.default_rng(5)
    source, across, noise = rng.normal(size=(3, 4000, n))
    y = np.cos(0.8) * source + np.sin(0.8) * across + 0.4 * noise
    scale = (source * y).sum(1) / (source**2).sum(1)
    risks = (scale - np.cos(0.8)) ** 2 + np.sin(0.8) ** 2
    assert have_law(risks, distributions.linear_transfer_law(n=n, theta=0.8, sigma=0.4))


@pytest.mark.slow
def test_moments_and_quantiles_of_the_law():
    n, d, sigma = (np.array(column) for column in zip(*CASES, strict=True))
    law = distributions.scratch_law(n=n, d=d, sigma=sigma)
    expected = dl.scratch_risk(n=n, d=d, sigma=sigma, allow_infinite=True)
    np.testing.assert_allclose(law.mean(), expected, rtol=1e-12)
    p = np.array([[0.01], [0.5], [0.99]])
    np.testing.assert_allclose(law.cdf(law.quantile(p)), np.tile(p, len(CASES)), atol=1e-10)
    for (n, d, sigma), found in zip(CASES, np.asarray(law.variance()), strict=True):
        if sigma == 0 or abs(n - d) >= 4:
            # independent: second moments of scipy's Beta and F
            noise = stats.f(min(n, d), abs(n - d) + 1).var() * (min(n, d) / (abs(n - d) + 1)) ** 2
            beta = stats.beta((d - n) / 2, n / 2).var() if n < d else 0.0
            variance = beta + (sigma**4 * noise if sigma else 0.0)
            assert found == pytest.approx(variance, rel=1e-10)
        else:
            assert np.isinf(found)


@pytest.mark.slow
def test_laws_broadcast_and_run_in_float32():
    with jax.enable_x64(False):
        law = distributions.scratch_law(n=np.array([5, 20, 40]), d=20, sigma=0.5)
        single = law.quantile(0.9)
    double = distributions.scratch_law(n=np.array([5, 20, 40]), d=20, sigma=0.5).quantile(0.9)
    # cdf errors of a few eps over a density of order one
    np.testing.assert_allclose(single, double, rtol=1e-4)


# --- any covariance -----------------------------------------------------------------------------


def problem(d=120, exponent=0.8):
    spectrum = covariance.power_law(d, exponent)
    first, second = jax.random.split(jax.random.key(0))
    beta_s = jax.random.normal(first, (d,))
    beta_s = 1.3 * beta_s / jnp.linalg.norm(beta_s)
    return spectrum, beta_s, 0.8 * beta_s + 0.6 * jax.random.normal(second, (d,)) / np.sqrt(d)


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 70, *soak(200)])
def test_equivalents_against_monte_carlo(n):
    """Null: mean risks equal the equivalents. Their bias is O(1/n) of the risk, up to 2 % here:
    z is allowed 4 beyond that."""
    spectrum, beta_s, beta_t = problem()
    sigma, ridge, draws = 0.5, 0.3, 400
    d = spectrum.size

    @jax.jit
    def risks(key):
        key_x, key_noise = jax.random.split(key)
        x = jax.random.normal(key_x, (n, d)) * jnp.sqrt(spectrum)
        y = x @ beta_t + sigma * jax.random.normal(key_noise, (n,))
        fits = [
            dl.scratch_fit(x, y),
            dl.fine_tuning_limit(x, y, beta_s, 2),
            dl.fine_tuning_limit(x, y, beta_s, 4),
            jnp.linalg.solve(x.T @ x / n + ridge * jnp.eye(d), x.T @ y / n),
            dl.linear_transfer_fit(x, y, beta_s),
        ]
        return jnp.stack([(spectrum * (fit - beta_t) ** 2).sum() for fit in fits])

    simulated = np.asarray(jax.lax.map(risks, jax.random.split(jax.random.key(9), draws)))
    expected = np.array(
        [
            covariance.scratch_risk(spectrum, beta_t, n=n, sigma=sigma),
            covariance.fine_tuning_risk(spectrum, beta_s, beta_t, n=n, sigma=sigma, depth=2),
            covariance.fine_tuning_risk(spectrum, beta_s, beta_t, n=n, sigma=sigma, depth=4),
            covariance.scratch_risk(spectrum, beta_t, n=n, sigma=sigma, ridge=ridge),
            covariance.linear_transfer_risk(spectrum, beta_s, beta_t, n=n, sigma=sigma),
        ]
    )
    stderr = simulated.std(0, ddof=1) / np.sqrt(draws)
    bias = np.array([0.02, 0.02, 0.02, 0.02, 0.0]) * expected  # the last one is exact
    assert (np.abs(simulated.mean(0) - expected) < Z_MAX * stderr + bias).all()


@pytest.mark.slow
def test_white_spectrum_gives_the_isotropic_limits():
    d, theta, sigma = 1000, 0.7, 0.5
    beta_s, beta_t = jnp.eye(d)[0], jnp.zeros(d).at[0].set(np.cos(theta)).at[1].set(np.sin(theta))
    white = jnp.ones(d)
    n = np.array([200.0, 700.0, 1500.0])
    np.testing.assert_allclose(
        covariance.scratch_risk(white, beta_t, n=n, sigma=sigma),
        dl.scratch_limit(load=n / d, sigma=sigma),
        rtol=1e-9,
    )
    np.testing.assert_allclose(
        covariance.fine_tuning_risk(white, beta_s, beta_t, n=n, sigma=sigma, depth=3),
        dl.fine_tuning_risk(load=n / d, theta=theta, sigma=sigma, depth=3),
        rtol=1e-9,
    )
    np.testing.assert_allclose(
        covariance.linear_transfer_risk(white, beta_s, beta_t, n=n, sigma=sigma),
        dl.linear_transfer_risk(n=n, theta=theta, sigma=sigma),
        rtol=1e-12,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 2.0])
def test_effective_ridge_solves_its_equation(ridge):
    spectrum = covariance.power_law(50, 1.5)
    n = np.array([3.0, 20.0, 49.0, 80.0])
    kappa = np.asarray(covariance.effective_ridge(spectrum, n, ridge))
    df1 = (spectrum / (spectrum + kappa[:, None])).sum(1)
    if ridge == 0:
        assert kappa[-1] == 0
        np.testing.assert_allclose(df1[:-1], n[:-1], rtol=1e-12)
    else:
        np.testing.assert_allclose(kappa * (1 - df1 / n), ridge, rtol=1e-10)


@pytest.mark.slow
def test_effective_ridge_differentiates():
    spectrum = covariance.power_law(50, 1.0)
    for argument, at in ((1, (20.0, 0.1)), (2, (20.0, 0.1))):

        def kappa(n, ridge):
            return covariance.effective_ridge(spectrum, n, ridge)

        h = [1e-5 * (k == argument - 1) for k in range(2)]
        up, down = (kappa(at[0] + s * h[0], at[1] + s * h[1]) for s in (1, -1))
        slope = jax.grad(kappa, argument - 1)(*at)
        assert float(slope) == pytest.approx(float((up - down) / 2e-5), rel=1e-6)
    white = jnp.ones(40)  # kappa = (d - n)/n exactly
    assert float(jax.grad(lambda n: covariance.effective_ridge(white, n))(10.0)) == pytest.approx(
        -40 / 100
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, b: covariance.effective_ridge(-s, 5), "eigenvalues must be finite and >= 0"),
        (lambda s, b: covariance.effective_ridge(0 * s, 5), "eigenvalues must not all be 0"),
        (lambda s, b: covariance.effective_ridge(s[None], 5), "eigenvalues must be a vector"),
        (lambda s, b: covariance.effective_ridge(s, 0), "n must be a finite number"),
        (lambda s, b: covariance.scratch_risk(s, b[1:], n=5, sigma=0.1), "beta_t must have shape"),
        (
            lambda s, b: covariance.scratch_risk(s, b * np.nan, n=5, sigma=0.1),
            "beta_t must be finite",
        ),
        (
            lambda s, b: covariance.fine_tuning_risk(s, 0 * b, b, n=5, sigma=0.1),
            r"\|beta_s\| must be posit",
        ),
        (lambda s, b: covariance.power_law(0, 1.0), "d must be at least 1"),
        (
            lambda s, b: distributions.scratch_law(n=0, d=5, sigma=0.1),
            "n must be a finite count >= 1",
        ),
        (
            lambda s, b: distributions.scratch_law(n=3, d=5, sigma=0.1).quantile(1.0),
            "probability must be",
        ),
        (
            lambda s, b: distributions.linear_transfer_law(n=3, theta=2 * pi, sigma=0.1),
            "theta must be",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    spectrum, beta_s, _ = problem(10)
    with pytest.raises(ValueError, match=message):
        call(spectrum, beta_s)


# --- sources of rank k --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "m"),
    [(9, 3, 5), *(slow_unless(False, *c) for c in ((3, 8, 2), (14, 8, 2), (6, 1, 1)))],
)
def test_subspace_transfer_against_least_squares_on_features(n, k, m):
    """Null: the mean risk of least squares on the features is the closed form."""
    d, sigma, draws = 20, 0.3, 4000
    rng = np.random.default_rng(4)
    U = np.linalg.qr(rng.normal(size=(d, k)))[0]
    B = U @ rng.normal(size=(k, m)) / 3 + rng.normal(size=(d, m)) / d
    x = rng.normal(size=(draws, n, d))
    y = x @ B + sigma * rng.normal(size=(draws, n, m))
    risks = ((U @ (np.linalg.pinv(x @ U) @ y) - B) ** 2).sum((1, 2))
    expected = float(subspace.linear_transfer_risk(n=n, of=subspace.overlap(U, B), sigma=sigma))
    assert abs(risks.mean() - expected) < Z_MAX * risks.std(ddof=1) / np.sqrt(draws)


@pytest.mark.slow
def test_rank_one_is_theorem_3_7_and_the_peak_is_at_k():
    theta = jnp.array([0.7])
    of = subspace.overlap_from_angles(theta, 1, 1)
    np.testing.assert_allclose(
        subspace.linear_transfer_risk(n=9, of=of, sigma=0.4),
        dl.linear_transfer_risk(n=9, theta=0.7, sigma=0.4),
        rtol=1e-12,
    )
    n = np.arange(1, 60)
    wide = subspace.overlap_from_angles(jnp.full(4, 0.3), 30, 4)
    risk = np.asarray(subspace.linear_transfer_risk(n=n, of=wide, sigma=0.2, allow_infinite=True))
    assert np.isinf(risk[28:31]).all()
    assert np.isfinite(np.delete(risk, [28, 29, 30])).all()
    assert risk[27] > risk[10]
    assert risk[31] > risk[50]


@pytest.mark.slow
def test_principal_angles_are_accurate_at_both_ends():
    for angles in ([1e-9, 0.3], [1e-7, np.pi / 2 - 1e-9], [0.0, np.pi / 2]):
        a = np.array(angles)
        U = np.eye(6)[:, :2]
        V = np.zeros((6, 2))
        V[[0, 1], [0, 1]], V[[2, 3], [0, 1]] = np.cos(a), np.sin(a)
        np.testing.assert_allclose(subspace.principal_angles(U, V), a, rtol=1e-6, atol=1e-15)
        of = subspace.overlap(U, V)
        from_angles = subspace.overlap_from_angles(a, 2, 2)
        np.testing.assert_allclose(of.missed, from_angles.missed, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: subspace.overlap(np.ones((4, 2)), np.ones((4, 1))), "orthonormal columns"),
        (lambda: subspace.overlap(np.eye(4)[:, :2], np.ones((3, 1))), "with one d >= k"),
        (lambda: subspace.overlap(np.eye(4), np.full((4, 1), np.nan)), "target must be finite"),
        (lambda: subspace.overlap_from_angles(np.ones(3), 2, 2), r"min\(k, m\) angles"),
        (lambda: subspace.overlap_from_angles(np.array([2.0]), 1, 1), r"angles must be in"),
    ],
)
def test_bad_subspaces_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- advice -------------------------------------------------------------------------------------


@functools.cache
def overlaps(n, d):
    """Computes the overlaps of 500 data sets, shared by all settings."""
    return dl.simulate_overlaps(jax.random.split(jax.random.key(6), 500), [n], d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "theta", "sigma", "best"),
    [
        (100, 0.1, 0.5, "ridge transfer"),  # one coefficient, hardly any bias
        (100, 0.8, 0.2, "fine-tuning"),
        (20, 1.5, 0.2, "scratch"),
        pytest.param(400, 1.2, 0.2, "scratch", marks=pytest.mark.soak),
    ],
)
def test_advice_names_the_method_that_wins_in_simulation(n, theta, sigma, best):
    """Paired over 500 data sets. Null: the advised method has the smallest mean risk."""
    d = 200
    advised = advice.advise(n=n, d=d, theta=theta, sigma=sigma, against="unregularised")
    assert advised.method == best
    at = overlaps(n, d)
    simulated = {
        "scratch": at.scratch(theta, sigma),
        "linear transfer": at.linear_transfer(theta, sigma),
        "ridge transfer": at.linear_transfer(
            theta, sigma, dl.optimal_ridge(n=n, theta=theta, sigma=sigma)
        ),
        "fine-tuning": at.fine_tune(theta, sigma, 2),
    }
    for other in simulated.keys() - {best}:
        ahead = np.asarray(simulated[other] - simulated[best])[:, 0]
        assert ahead.mean() >= -Z_MAX * ahead.std(ddof=1) / np.sqrt(ahead.size)
    mean = float(simulated[best].mean())
    assert advised.risk == pytest.approx(mean, rel=0.05)  # O(1/d) and the error of 500 draws


@pytest.mark.slow
def test_advice_at_the_edges():
    assert advice.advise(n=250, d=500, theta=pi / 2, sigma=0.2).risks["ridge transfer"] == 1.0
    assert advice.advise(n=10, d=500, theta=0.0, sigma=0.0).risk == 0.0
    assert np.isinf(advice.advise(n=500, d=500, theta=0.5, sigma=0.2).risks["scratch"])
    assert float(advice.angle([1.0, 0.0], [1.0, 1e-6])) == pytest.approx(1e-6, rel=1e-6)
    assert float(advice.angle([1.0, 0.0], [-2.0, 0.0])) == pytest.approx(pi)
    with pytest.raises(ValueError, match=r"\|beta_s\| must be positive"):
        advice.angle([0.0, 0.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="must have one shape"):
        advice.angle([1.0, 0.0], [1.0, 0.0, 0.0])
