"""Extensions of the paper: training time, finite source data, sampled laws, rank k, advice."""

from math import pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import soak_unless
from scipy import integrate, stats

from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import (
    advice,
    covariance,
    distributions,
    pretraining,
    risks,
    subspace,
    training_time,
)

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null


pytestmark = pytest.mark.usefixtures("float64")


def _same_law(a, b) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test; null: one law."""
    return stats.ks_2samp(np.asarray(a), np.asarray(b)).pvalue  # pyright: ignore


# --- training time --------------------------------------------------------------------------------

TIMES = np.array([0.0, 1e-3, 0.5, 3.0, 30.0, 1e4])


def test_contour_is_the_exponential():
    """24 nodes: errors of the order 1e-14, so 1e-12 leaves two digits for cancellation."""
    z, w = training_time._contour()
    for x in (0.0, 0.1, 1.0, 30.0, 1e4):
        assert abs((w / (z + x)).sum() - np.exp(-x)) < 1e-12
        phi = -np.expm1(-x) / x if x else 1.0
        assert abs((w / (z * (z + x))).sum() - phi) < 1e-11


def marchenko_pastur_risk(ratio, sigma, t):
    """Isotropic flow risk at d/n = ratio, |offset| = 1, by quadrature of the known density."""
    low, high = (1 - sqrt(ratio)) ** 2, (1 + sqrt(ratio)) ** 2

    def integrand(angle):
        l = (low + high) / 2 - (high - low) / 2 * np.cos(angle)
        density = ((high - low) / 2 * np.sin(angle)) ** 2 / (2 * pi * ratio * l)
        noise = sigma**2 * ratio * (1 - np.exp(-t * l)) ** 2 / l
        return density * (np.exp(-2 * t * l) + noise)

    return integrate.quad(integrand, 0, pi, epsabs=1e-12)[0] + max(1 - 1 / ratio, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(120, 100), (300, 100), (100, 300)])
def test_flow_risk_of_white_inputs_is_that_of_the_marchenko_pastur_law(n, d):
    offset = np.eye(d)[0]
    found = training_time.flow_risk(np.ones(d), offset, n=n, sigma=0.5, times=TIMES[2:])
    expected = [marchenko_pastur_risk(d / n, 0.5, t) for t in TIMES[2:]]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("n", [60, 200])
def test_flow_risk_against_trained_models(n):
    """Null: mean risks equal the equivalents up to their bias O(1/n), allowed 1 %; z beyond it."""
    d, sigma, draws = 100, 0.5, 300
    s = covariance.power_law(d, 0.8)
    offset = jax.random.normal(jax.random.key(1), (d,)) / sqrt(d)

    def one(key):
        key_x, key_noise = jax.random.split(key)
        x = jax.random.normal(key_x, (n, d)) * jnp.sqrt(s)
        y = x @ offset + sigma * jax.random.normal(key_noise, (n,))
        u, size, vt = jnp.linalg.svd(x, full_matrices=False)
        grown = -jnp.expm1(-TIMES[:, None] * size**2 / n) / size
        return (s * ((grown * (u.T @ y)) @ vt - offset) ** 2).sum(-1)

    found = np.asarray(jax.lax.map(one, jax.random.split(jax.random.key(2), draws), batch_size=50))
    expected = np.asarray(training_time.flow_risk(s, offset, n=n, sigma=sigma, times=TIMES))
    assert float(expected[0]) == pytest.approx(float((s * offset**2).sum()), rel=1e-9)
    slack = Z_MAX * found.std(0, ddof=1) / sqrt(draws) + 0.01 * expected
    assert (np.abs(found.mean(0) - expected) < slack).all()
    limit = covariance.scratch_risk(s, offset, n=n, sigma=sigma)
    late = training_time.flow_risk(s, offset, n=n, sigma=sigma, times=np.array([1e6]))
    np.testing.assert_allclose(late[0], limit, rtol=1e-9)


@pytest.mark.slow
def test_flow_risk_broadcasts_and_has_derivatives():
    s = covariance.power_law(20, 1.0)
    offset = np.ones(20)
    found = training_time.flow_risk(
        s, offset, n=np.array([[10.0], [40.0]]), sigma=np.array([0.1, 1]), times=TIMES
    )
    assert found.shape == (2, 2, TIMES.size)
    assert np.isfinite(found).all()
    alone = training_time.flow_risk(s, offset, n=40.0, sigma=0.1, times=TIMES)
    np.testing.assert_allclose(found[1, 0], alone, rtol=1e-12)
    value = lambda v: training_time.flow_risk(s, v, n=10.0, sigma=0.3, times=np.array([2.0]))[0]  # noqa: E731
    step = 1e-5 * np.eye(20)[3]
    slope = (value(offset + step) - value(offset - step)) / 2e-5  # error O(step^2)
    assert float(jax.grad(value)(jnp.asarray(offset))[3]) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.slow
def test_linear_transfer_in_time_is_exact():
    """Quadrature over chi^2_n, at every n; t -> inf gives Thm 3.7."""
    theta, sigma = 0.7, 0.4
    for n in (1, 2, 3, 8):
        for t in (0.0, 0.3, 4.0):

            def integrand(u, n=n, t=t):
                left = np.exp(-t * u / n)
                noise = (sigma**2 + np.sin(theta) ** 2) * (1 - left) ** 2 / u
                return stats.chi2.pdf(u, n) * (np.cos(theta) ** 2 * left**2 + noise)

            expected = np.sin(theta) ** 2 + integrate.quad(integrand, 0, np.inf, epsabs=1e-11)[0]
            found = training_time.linear_transfer_flow_risk(n=n, theta=theta, sigma=sigma, times=t)
            assert float(found) == pytest.approx(expected, abs=1e-8)
    late = training_time.linear_transfer_flow_risk(n=8, theta=theta, sigma=sigma, times=1e9)
    assert float(late) == pytest.approx(
        float(dl.linear_transfer_risk(n=8, theta=theta, sigma=sigma)), rel=1e-9
    )


# --- finite source data ---------------------------------------------------------------------------


@pytest.mark.soak
def test_finite_source_law_against_two_stage_fits():
    """Both stages simulated with real X. Null: same means (z) and same law (two-sample KS)."""
    n_s, n, d, theta, sigma_s, sigma, draws = 25, 18, 40, 0.7, 0.3, 0.4, 3000

    def one(key):
        first, second = jax.random.split(key)
        source = problems.draw(first, n_s, d, 0.0, sigma_s)
        learned = dl.scratch_fit(source.x, source.y)
        target = problems.draw(second, n, d, theta, sigma)
        fits = [dl.fine_tuning_limit(target.x, target.y, learned, L) for L in (1, 2, 3)]
        fits.append(dl.linear_transfer_fit(target.x, target.y, learned))
        return jnp.stack([problems.risk(fit, target.beta_t) for fit in fits])

    simulated = jax.lax.map(one, jax.random.split(jax.random.key(0), draws), batch_size=100)
    keys = jax.random.split(jax.random.key(1), 3)
    source = pretraining.source_law(keys[0], n=n_s, d=d, theta=theta, sigma=sigma_s, draws=20_000)
    overlaps = dl.overlaps_law(keys[1], n=n, d=d, draws=20_000)
    law = [overlaps.fine_tune(source.theta, sigma, L, source.size) for L in (1, 2, 3)]
    law.append(
        distributions.linear_transfer_law(n=n, theta=source.theta, sigma=sigma).sample(keys[2], 1)[
            0
        ]
    )
    for ours, theirs in zip(law, np.asarray(simulated).T, strict=True):
        assert _same_law(ours, theirs) > 1e-3
        stderr = sqrt(float(ours.var()) / ours.size + theirs.var() / draws)
        assert abs(float(ours.mean()) - theirs.mean()) < Z_MAX * stderr


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.4, 3.0])
def test_finite_source_limit(load):
    """Null: means at d = 3000 equal the limits; their bias is O(1/d)."""
    d, theta, sigma, draws = 3000, 0.7, 0.5, 4000
    found = pretraining.source_law(
        jax.random.key(3), n=int(load * d), d=d, theta=theta, sigma=sigma, draws=draws
    )
    limit = pretraining.source_limit(load=load, theta=theta, sigma=sigma)
    for ours, theirs in zip(found, limit, strict=True):
        stderr = float(ours.std()) / sqrt(draws)
        assert abs(float(ours.mean() - theirs)) < Z_MAX * stderr + 2 / d


def test_more_and_more_source_data_become_the_paper_s_source():
    source = pretraining.source_limit(load=jnp.inf, theta=0.7, sigma=0.5)
    assert (float(source.size), float(source.theta)) == (1.0, pytest.approx(0.7))
    at_one = pretraining.source_limit(load=1.0, theta=0.7, sigma=0.5)
    assert np.isinf(at_one.size)
    assert float(at_one.theta) == pytest.approx(pi / 2)
    risk = risks.fine_tuning_risk(
        load=0.5, theta=source.theta, sigma=0.2, depth=2, size=source.size
    )
    assert float(risk) == pytest.approx(
        float(risks.fine_tuning_risk(load=0.5, theta=0.7, sigma=0.2, depth=2))
    )


# --- the law of fine-tuning -----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d", "sigma"), [(10, 20, 1.0), (19, 20, 0.2), (26, 20, 0.5)])
@pytest.mark.slow
def test_fine_tuning_law_against_simulated_data(n, d, sigma):
    """Two-sample Kolmogorov-Smirnov against real X; null: one law."""
    law = distributions.fine_tuning_law(
        jax.random.key(0), n=n, d=d, theta=0.6, sigma=sigma, depth=3, draws=20_000
    )
    keys = jax.random.split(jax.random.key(2), 4000)
    risks = np.asarray(dl.simulate_overlaps(keys, [n], d).fine_tune(0.6, sigma, 3))[:, 0]
    assert _same_law(law.draws, risks) > 1e-3
    assert np.isinf(law.mean()) == (abs(n - d) <= 1)
    assert np.isinf(law.variance()) == (abs(n - d) <= 3)
    assert float(law.cdf(law.quantile(0.3))) == pytest.approx(0.3, abs=1e-3)
    assert law.band(0.99) == pytest.approx(sqrt(np.log(200) / 40_000))


@pytest.mark.slow
def test_fine_tuning_law_from_n_equal_d_on_is_that_of_scratch_training():
    law = distributions.fine_tuning_law(
        jax.random.key(0), n=30, d=20, theta=0.6, sigma=0.5, depth=2, draws=20_000
    )
    # The cdf is interpolated: an error of the order of 1e-5, where 20,000 draws resolve 0.014.
    nodes = np.quantile(law.draws, np.linspace(0, 1, 201))
    exact = np.asarray(distributions.scratch_law(n=30, d=20, sigma=0.5).cdf(nodes))
    assert stats.kstest(np.asarray(law.draws), lambda r: np.interp(r, nodes, exact)).pvalue > 1e-3


# --- rank k ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rank_two():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 5)
        d, n, m = 12, 7, 2
        source = jnp.linalg.qr(jax.random.normal(keys[0], (d, m)))[0] * jnp.array([1.0, 0.6])
        target = source + 0.5 * jax.random.normal(keys[1], (d, m)) / sqrt(d)
        x = jax.random.normal(keys[2], (n, d))
        y = x @ target + 0.3 * jax.random.normal(keys[3], (n, m))

        def train(alpha, rate):
            return subspace.simulate_fine_tuning(keys[4], x, y, source, alpha=alpha, rate=rate)

        return x, y, source, [train(1e-2, 0.02), train(1e-3, 0.02), train(1e-3, 0.01)]


@pytest.mark.slow
def test_rank_k_fine_tuning_fits_and_keeps_to_the_source_where_data_are_blind(rank_two):
    x, y, _, runs = rank_two
    for run in runs:
        assert float(run.gradient) < 1e-9
        np.testing.assert_allclose(x @ run.predictor, y, atol=1e-8)
    coarse, fine, finer = runs
    # outside = O(alpha^2): a tenth of alpha, a hundredth of it; drift = O(rate).
    assert float(coarse.outside / fine.outside) == pytest.approx(100, rel=0.2)
    assert float(fine.drift / finer.drift) == pytest.approx(2, rel=0.1)


@pytest.mark.slow
def test_rank_k_fine_tuning_of_rank_one_is_the_closed_form():
    sample = problems.draw(jax.random.key(4), 6, 10, 0.7, 0.4)
    found = [
        subspace.simulate_fine_tuning(
            jax.random.key(5), sample.x, sample.y[:, None], sample.beta_s[:, None], rate=rate
        ).predictor[:, 0]
        for rate in (0.02, 0.01)
    ]
    expected = dl.fine_tuning_limit(sample.x, sample.y, sample.beta_s, 2)
    # extrapolated: what is left is O(rate^2)
    np.testing.assert_allclose(2 * found[1] - found[0], expected, atol=1e-4)


# --- covariance matrices --------------------------------------------------------------------------


def test_diagonalise_keeps_the_problem():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(7, 5))
    matrix, a, b = root @ root.T, rng.normal(size=7), rng.normal(size=7)
    s, u, v = covariance.diagonalise(matrix, a, b)
    assert (np.diff(s) <= 0).all()
    assert (np.asarray(s) >= 0).all()
    assert float((s * u * v).sum()) == pytest.approx(float(a @ matrix @ b))
    assert float(u @ v) == pytest.approx(float(a @ b))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((2, 3)), "covariance must be a square matrix; got shape"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "covariance must be symmetric"),
        (np.diag([1.0, -0.1]), "covariance must be positive semidefinite"),
        (np.zeros((2, 2)), "covariance must be positive semidefinite and not 0"),
        (np.full((2, 2), np.nan), "covariance must be finite"),
    ],
)
def test_what_is_not_a_covariance_is_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        covariance.diagonalise(matrix)


# --- precision ------------------------------------------------------------------------------------


def _in_single_precision():
    """Results for float32 callers: loads, and their distances from n = d."""
    s = covariance.power_law(200, 0.8)
    a, b = np.random.default_rng(0).normal(size=(2, 200)) / sqrt(200)
    n = np.array([20.0, 100.0, 190.0, 198.0, 210.0, 400.0])
    gap = np.abs(1 - n / 200)
    yield covariance.effective_ridge(s, n[:4]), gap[:4]
    yield covariance.scratch_risk(s, b, n=n, sigma=0.3), gap
    yield covariance.fine_tuning_risk(s, a, b, n=n, sigma=0.3, depth=3), gap
    yield covariance.linear_transfer_risk(s, a, b, n=n, sigma=0.3), np.ones(6)
    yield training_time.flow_risk(s, b, n=100, sigma=0.3, times=TIMES[1:5]), np.ones(4)
    yield training_time.linear_transfer_flow_risk(n=n, theta=0.7, sigma=0.3, times=10.0), np.ones(6)
    yield risks.fine_tuning_risk(load=n[:4] / 200, theta=0.7, sigma=0.3, depth=np.inf), gap[:4]
    yield jnp.stack(pretraining.source_limit(load=n / 200, theta=0.7, sigma=0.3)), gap


@pytest.mark.slow
def test_float32_loses_no_more_than_the_distance_to_n_equal_d_explains():
    """Error model: 20 eps over |1 - n/d|, by which the quantities themselves are conditioned."""
    double = list(_in_single_precision())
    with jax.enable_x64(False):
        single = list(_in_single_precision())
    for (found, _), (expected, gap) in zip(single, double, strict=True):
        error = np.abs(np.asarray(found, np.float64) / np.asarray(expected) - 1)
        assert (error < 20 * np.finfo(np.float32).eps / gap).all()


# --- advice ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "theta", "sigma"),
    [(150, 0.8, 1.0), soak_unless(False, 40, 0.3, 0.2), soak_unless(False, 40, 1.3, 0.2)],
)
def test_three_ways_of_asking_agree(n, theta, sigma):
    d = 100
    beta_s, beta_t = problems.tasks(d, theta)
    plain = advice.advise(n=n, d=d, theta=theta, sigma=sigma)
    scaled = advice.advise_tasks(3 * beta_s, 3 * beta_t, n=n, sigma=3 * sigma)
    white = advice.advise_tasks(beta_s, beta_t, n=n, sigma=sigma, inputs=np.eye(d))
    assert plain.method == scaled.method == white.method
    for name, risk in plain.risks.items():
        assert scaled.risks[name] == pytest.approx(9 * risk, rel=1e-9)
        assert white.risks[name] == pytest.approx(risk, rel=1.5 / abs(n - d))  # equivalents


@pytest.mark.slow
def test_advice_from_features_names_the_better_method():
    """Against least squares on real data: the predicted risks are means over data sets."""
    rng = np.random.default_rng(0)
    d, k, m, n, sigma, draws = 30, 3, 2, 12, 0.3, 2000
    features = rng.normal(size=(d, k))
    target = features @ rng.normal(size=(k, m)) / sqrt(d) + 0.1 * rng.normal(size=(d, m))
    found = advice.advise_features(features, target, n=n, sigma=sigma)
    x = rng.normal(size=(draws, n, d))
    y = x @ target + sigma * rng.normal(size=(draws, n, m))
    basis = np.linalg.qr(features)[0]
    for name, inputs in (("scratch", np.eye(d)), ("linear transfer", basis)):
        fit = inputs @ np.linalg.pinv(x @ inputs) @ y
        risk = ((fit - target) ** 2).sum((1, 2))
        z = (risk.mean() - found.risks[name]) / (risk.std() / sqrt(draws))
        assert abs(z) < Z_MAX
    assert found.method == min(found.risks, key=lambda name: found.risks[name])
    assert found.risks["ridge transfer"] <= found.risks["linear transfer"] * 1.02


@pytest.mark.slow
def test_advice_from_a_sample_estimates_without_bias():
    """Null: the moments behind the estimates are unbiased, also at n < d."""
    n, d, theta, sigma, draws = 60, 100, 0.6, 0.5, 50
    found = []
    for key in jax.random.split(jax.random.key(0), draws):
        sample = problems.draw(key, n, d, theta, sigma)
        got = advice.advise_sample(2 * sample.x, 3 * sample.y, sample.beta_s)
        assert got.anisotropy == pytest.approx(1, abs=0.2)
        inner = got.size * np.cos(got.theta) / 1.5  # |beta_t| = 3/2 in these units
        found.append((inner, (got.size / 1.5) ** 2))
    found = np.array(found)
    z = (found.mean(0) - [np.cos(theta), 1.0]) / (found.std(0) / sqrt(draws))
    assert (np.abs(z) < Z_MAX).all()


@pytest.mark.slow
def test_advice_from_a_large_sample_is_the_advice():
    sample = problems.draw(jax.random.key(0), 1000, 2000, 0.9, 0.2)
    found = advice.advise_sample(sample.x, sample.y, sample.beta_s)
    truth = advice.advise(n=1000, d=2000, theta=0.9, sigma=0.2)
    assert found.advice.method == truth.method == "fixed direction"
    assert found.advice.simplest == truth.simplest == "scaled L2-SP"
    for name, stderr in found.stderr.items():
        gap = found.advice.risks[name] - found.advice.risk
        expected = truth.risks[name] - truth.risk
        assert abs(gap - expected) < Z_MAX * max(stderr, 1e-12)
        assert (name in found.undecided) == (name != found.advice.method and gap <= 2 * stderr)


@pytest.mark.slow
def test_advice_from_a_small_sample_says_that_it_is_not_sure():
    sample = problems.draw(jax.random.key(0), 40, 100, 0.9, 0.5)
    found = advice.advise_sample(sample.x, sample.y, sample.beta_s)
    assert "fine-tuning" in {found.advice.method, *found.undecided}
    assert found.undecided


BAD = {
    "features must have linearly independent": lambda: advice.advise_features(
        np.ones((9, 2)), np.ones((9, 1)), n=5, sigma=0.1
    ),
    "be matrices": lambda: advice.advise_features(np.eye(9, 2), np.ones((8, 1)), n=5, sigma=0.1),
    "y must depend linearly on x": lambda: advice.advise_sample(
        np.ones((50, 3)), np.zeros(50), np.ones(3)
    ),
    "blocks must be": lambda: advice.advise_sample(np.ones((5, 3)), np.ones(5), np.ones(3)),
    "\\|beta_s\\| must be positive": lambda: advice.advise_tasks(
        np.zeros(3), np.ones(3), n=9, sigma=0.1
    ),
    "times must be a non-empty vector": lambda: training_time.flow_risk(
        np.ones(3), np.ones(3), n=5, sigma=0.1, times=np.array(1.0)
    ),
    "times must be finite and >= 0": lambda: training_time.flow_risk(
        np.ones(3), np.ones(3), n=5, sigma=0.1, times=np.array([-1.0])
    ),
    "offset must have shape": lambda: training_time.flow_risk(
        np.ones(3), np.ones(4), n=5, sigma=0.1, times=TIMES
    ),
    "load must be a load": lambda: pretraining.source_limit(load=0.0, theta=0.3, sigma=0.1),
    "size must be a finite norm": lambda: risks.fine_tuning_risk(
        load=0.5, theta=0.3, sigma=0.1, depth=2, size=0.0
    ),
    "x \\[n, d\\], y \\[n, m\\] and source": lambda: subspace.simulate_fine_tuning(
        jax.random.key(0), jnp.ones((3, 4)), jnp.ones((3, 2)), jnp.ones((5, 2))
    ),
    "confidence must be": lambda: distributions.SampledLaw(jnp.ones(10), jnp.ones(())).band(1.0),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
