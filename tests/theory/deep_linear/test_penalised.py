"""Penalties towards 0 or the source, at their best; and advice that has them as candidates.

The estimators here are minimisers of their objectives, found by least squares on rows that stand
for the penalty. No closed form of an estimator or of a risk enters a simulation.
"""

from itertools import combinations
from math import pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow, soak, soak_unless
from scipy import linalg, optimize

from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import (
    advice,
    covariance,
    penalised,
    penalised_claims,
    training_time,
    wishart,
)
from theory.deep_linear.certainty import Known

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null


pytestmark = pytest.mark.usefixtures("float64")


def minimiser(x, y, penalties=0.0, start=0.0):
    """The least-squares solution nearest to `start`, with a penalty on each coefficient.

    LAPACK's gelsy factorises by QR, which takes a third of the time of NumPy's singular values.
    """
    n, d = x.shape
    rows = np.diag(np.sqrt(n * np.broadcast_to(penalties, (d,))))
    rows = rows[np.any(rows > 0, axis=1)]
    residual = np.concatenate([y - x @ np.broadcast_to(start, (d,)), np.zeros(len(rows))])
    rows = np.concatenate([x, rows])
    return start + linalg.lstsq(rows, residual, lapack_driver="gelsy", check_finite=False)[0]


def test_the_ledger_solves_the_penalised_problems():
    """Its simulator finds the risks of minimisers, and the penalty with the smallest mean risk."""
    n, s, offset, sigma, draws = (
        4,
        np.array([1.0, 0.5, 0.5, 0.2, 0.1]),
        np.arange(1.0, 6.0),
        0.3,
        30,
    )
    found = penalised_claims.ridges(np.random.default_rng(3), s, offset, n, sigma, draws)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((draws, n, s.size)) * np.sqrt(s)
    y = x @ offset + sigma * rng.standard_normal((draws, n))

    def mean(penalty):
        fits = np.array([minimiser(*one, penalty) for one in zip(x, y, strict=True)])
        return np.sum(s * (fits - offset) ** 2, -1)

    np.testing.assert_allclose(found.risk(0.2), mean(0.2), rtol=1e-10)
    penalty, risk = found.best()
    least = optimize.minimize_scalar(lambda t: mean(np.exp(t)).mean(), bounds=(-9, 3))
    assert np.log(penalty.value) == pytest.approx(least.x, abs=1e-4)
    assert risk.value == pytest.approx(least.fun, rel=1e-8)


@pytest.mark.slow
def test_the_error_of_the_best_penalty_is_what_repetition_finds():
    """Over 200 repetitions z has variance 1 (chi-square, 4 s.d.): the error is that of a root."""
    rng, scores = np.random.default_rng(0), []
    for _ in range(200):
        found = penalised_claims.ridges(rng, np.ones(8), np.eye(8)[0], 6, 0.5, 2_000)
        penalty, _ = found.best()
        scores.append((penalty.value - 0.25 * 8 / 6) / penalty.stderr)
    assert abs(np.mean(np.square(scores)) - 1) < 4 * sqrt(2 / 200)


# --- the closed forms -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 49, 50, 51, 400])
def test_isotropic_risk_is_the_minimum_over_penalties(n):
    """Against `covariance.scratch_risk`, which solves for kappa; errors of rounding only."""
    d, distance, sigma = 50, 1.3, 0.4
    white, offset = np.ones(d), distance * np.eye(d)[0]
    penalty = float(penalised.best_penalty(n=n, d=d, distance=distance, sigma=sigma))
    ridges = penalty * np.array([0.5, 0.9, 1.0, 1.1, 2.0])
    values = np.asarray(covariance.scratch_risk(white, offset, n=n, sigma=sigma, ridge=ridges))
    assert float(penalised.best_risk(n=n, d=d, distance=distance, sigma=sigma)) == pytest.approx(
        values[2], rel=1e-12
    )
    assert values.argmin() == 2


@pytest.mark.parametrize(("n", "sigma"), [(40, 0.5), (60, 0.3), (80, 1.0)])
def test_the_first_order_of_the_isotropic_risk_is_known(n, sigma):
    """Against the exact mean; what is left is of order 1/d^2."""
    d, distance = 60, 1.3
    penalty = penalised.best_penalty(n=n, d=d, distance=distance, sigma=sigma)
    exact = float(wishart.ridge_risk(n=n, d=d, distance=distance, sigma=sigma, penalty=penalty))
    low, high = (sqrt(n) - sqrt(d)) ** 2, (sqrt(n) + sqrt(d)) ** 2
    c = d * sigma**2 / distance**2
    first = sigma**2 / 4 * (1 / sqrt(low + c) - 1 / sqrt(high + c)) ** 2
    found = exact - float(penalised.best_risk(n=n, d=d, distance=distance, sigma=sigma))
    assert found == pytest.approx(first, rel=0.1, abs=1 / d**2)


def test_ends_of_the_isotropic_risk():
    assert float(penalised.best_risk(n=30, d=50, distance=1.0, sigma=0.0)) == float(
        dl.scratch_risk(n=30, d=50, sigma=0.0)
    )
    assert float(penalised.best_risk(n=70, d=50, distance=1.0, sigma=0.0)) == 0.0
    assert float(penalised.best_risk(n=50, d=50, distance=1.0, sigma=0.0)) == 0.0
    assert float(penalised.best_risk(n=30, d=50, distance=0.0, sigma=0.5)) == 0.0
    assert np.isinf(penalised.best_penalty(n=30, d=50, distance=0.0, sigma=0.5))
    assert float(penalised.best_risk(n=30, d=50, distance=1.0, sigma=1e9)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="distance must be finite and >= 0; got -1"):
        penalised.best_risk(n=30, d=50, distance=-1.0, sigma=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "sigma"), [(20, 0.3), (60, 1.0), (200, 0.1), (60, 0.0)])
def test_risk_of_any_covariance_is_the_minimum_over_penalties(n, sigma):
    """Against SciPy's search over the penalty itself, started at the best of a grid."""
    s = covariance.power_law(60, 1.2)
    offset = np.random.default_rng(n).normal(size=60) / sqrt(60)
    penalty, risk = penalised.best_risk_of(s, offset, n=n, sigma=sigma)

    def at(log):
        return float(covariance.scratch_risk(s, offset, n=n, sigma=sigma, ridge=np.exp(log)))

    grid = np.linspace(-20, 10, 61)
    near = grid[
        np.argmin(
            np.asarray(covariance.scratch_risk(s, offset, n=n, sigma=sigma, ridge=np.exp(grid)))
        )
    ]
    found = optimize.minimize_scalar(at, bounds=(near - 1, near + 1), method="bounded")
    none = float(covariance.scratch_risk(s, offset, n=n, sigma=sigma))
    assert float(risk) == pytest.approx(min(float(found.fun), none), rel=1e-7)
    again = covariance.scratch_risk(s, offset, n=n, sigma=sigma, ridge=penalty)
    assert float(risk) == pytest.approx(float(again), rel=1e-7)


@pytest.mark.slow
def test_a_start_at_the_target_learns_nothing():
    penalty, risk = penalised.best_risk_of(np.array([2.0, 1.0]), np.zeros(2), n=5, sigma=0.3)
    assert np.isinf(penalty)
    assert float(risk) == 0.0


# --- against minimisers ---------------------------------------------------------------------------


def candidates(x, y, source, settings):
    """The predictor of each candidate on one data set. The source is the first axis."""
    feature, ridge = (x @ source)[:, None], settings["ridge transfer"]["penalty"]
    fits = {
        "scratch": minimiser(x, y),
        "linear transfer": minimiser(feature, y) * source,
        "ridge transfer": (minimiser(feature, y, ridge) if ridge < 1e9 else 0.0) * source,
        "fine-tuning": minimiser(x, y, start=source),  # of one layer: the nearest solution
        "free direction": minimiser(x, y, settings["free direction"]["penalty"] * (source == 0)),
    }
    for name in ("ridge from scratch", "L2-SP", "scaled L2-SP"):
        at = settings[name]
        fits[name] = minimiser(x, y, at["penalty"], at["scale"] * source)
    at, start = settings["fixed direction"], settings["fixed direction"]["scale"] * source
    across = np.where(source == 0, 1.0, 0.0)  # other inputs do not count
    fits["fixed direction"] = start + minimiser(x * across, y - x @ start, at["penalty"])
    return fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "theta", "sigma", "simplest"),
    [
        (50, 0.6, 0.5, "scaled L2-SP"),
        (98, pi / 2, 0.2, "fixed direction"),
        soak_unless(False, 90, pi / 2, 0.2, "fixed direction"),
        soak_unless(False, 150, 0.9, 1.0, "scaled L2-SP"),
        (40, 0.1, 0.2, "L2-SP"),
        soak_unless(False, 30, 2.5, 0.4, "scaled L2-SP"),
    ],
)
def test_risks_are_those_of_minimisers_on_the_same_data_sets(n, theta, sigma, simplest):
    """All candidates on the same 400 data sets, d = 100.

    Null: every candidate's mean risk, and every difference of two, is the closed form's, the exact
    one where there is a penalty. The effect that is seen with certainty is Z_MAX standard errors;
    it is below a tenth of the advised risk. Where n is within 3 of d, the risks without a penalty
    have no variance and are left out.
    """
    d, draws = 100, 400
    theory = dl.transfer_risks(n=n, d=d, theta=theta, sigma=sigma, depth=1)
    advised = advice.advise(n=n, d=d, theta=theta, sigma=sigma, depth=1)
    best = advised.method
    assert (best, advised.simplest) == ("fixed direction", simplest)
    expected = {name: float(value) for name, value in theory.items()}
    exact = {name for name, known in advised.known.items() if known.how == "exact"}
    assert exact >= expected.keys() - {"fine-tuning"}
    expected |= {name: advised.risks[name] for name in exact}
    if abs(n - d) <= 3:
        del expected["scratch"], expected["fine-tuning"]
    found = {name: np.empty(draws) for name in expected}
    keys = jax.random.split(jax.random.key(n), draws)
    samples = jax.vmap(lambda key: problems.draw(key, n, d, theta, sigma))(keys)
    inputs, labels, sources, targets = map(np.asarray, samples)
    source, target = sources[0], targets[0]  # of all data sets
    for i, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        fits = candidates(x, y, source, advised.settings)
        for name, values in found.items():
            values[i] = ((fits[name] - target) ** 2).sum()

    def seen(name, values, mean):
        """Fails if the mean differs; returns the least difference that would surely show."""
        error = values.std(ddof=1) / sqrt(draws)
        gap, rounding = values.mean() - mean, 1e-12
        print(f"{name}: z = {gap / (error + rounding):+.2f}, seen from {Z_MAX * error:.4f}")
        assert abs(gap) <= Z_MAX * error + rounding
        return Z_MAX * error

    effects = {name: seen(name, values, expected[name]) for name, values in found.items()}
    assert effects[best] < 0.1 * expected[best]
    for one, other in combinations(found, 2):
        gap = expected[one] - expected[other]
        seen(f"{one} - {other}", found[one] - found[other], gap)
    for other in found.keys() - {best}:
        ahead = found[other] - found[best]
        assert ahead.mean() >= -Z_MAX * ahead.std(ddof=1) / sqrt(draws)


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 150])
def test_risks_of_any_covariance_are_those_of_minimisers(n):
    """Null: means equal the equivalents up to their bias O(1/n), allowed 1 %; z beyond it.

    A penalty twice or half as large has no smaller mean risk on the same data sets.
    """
    d, sigma, draws = 100, 0.4, 400
    rng = np.random.default_rng(0)
    s = np.asarray(covariance.power_law(d, 0.8))
    beta_s, beta_t = (v / np.linalg.norm(v) for v in rng.normal(size=(2, d)))
    beta_t = beta_s + 0.8 * beta_t
    data = []
    for _ in range(draws):
        x = rng.normal(size=(n, d)) * np.sqrt(s)
        data.append((x, x @ beta_t + sigma * rng.normal(size=n)))
    for start in (np.zeros(d), beta_s):
        penalty, risk = (
            float(v) for v in penalised.best_risk_of(s, beta_t - start, n=n, sigma=sigma)
        )
        means = []
        for factor in (1.0, 0.5, 2.0):
            fits = np.array([minimiser(x, y, factor * penalty, start) for x, y in data])
            means.append((s * (fits - beta_t) ** 2).sum(-1))
        error = means[0].std(ddof=1) / sqrt(draws)
        assert abs(means[0].mean() - risk) < Z_MAX * error + 0.01 * risk
        for other in means[1:]:
            ahead = other - means[0]
            assert ahead.mean() > Z_MAX * ahead.std(ddof=1) / sqrt(draws)


@pytest.mark.slow
def test_l2sp_around_features_is_the_minimiser_with_two_penalties():
    """Null as above, bias allowed 2 %: 40 samples, so noisy that both penalties matter."""
    d, k, m, n, sigma, draws = 80, 5, 2, 40, 1.2, 800
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    target = basis[:, :k] @ rng.normal(size=(k, m)) / sqrt(k)
    target += 0.5 * basis[:, k:] @ rng.normal(size=(d - k, m)) / sqrt(d)
    found = advice.advise_features(basis[:, :k] @ rng.normal(size=(k, k)), target, n=n, sigma=sigma)
    assert found.method == "L2-SP"
    inside = np.linalg.norm(basis[:, :k].T @ target) ** 2 / (k * m)
    outside = np.linalg.norm(basis[:, k:].T @ target) ** 2 / ((d - k) * m)
    penalties = sigma**2 / n / np.repeat([inside, outside], [k, d - k])
    risks = {"L2-SP": np.empty(draws), "ridge from scratch": np.empty(draws)}
    own = sigma**2 / n * d * m / np.linalg.norm(target) ** 2
    for i in range(draws):
        x = rng.normal(size=(n, d))
        y = x @ target + sigma * rng.normal(size=(n, m))
        for name, penalty in (("L2-SP", penalties), ("ridge from scratch", own)):
            fit = np.stack([minimiser(x @ basis, column, penalty) for column in y.T], -1)
            risks[name][i] = ((basis @ fit - target) ** 2).sum()
    for name, values in risks.items():
        error = values.std(ddof=1) / sqrt(draws)
        assert abs(values.mean() - found.risks[name]) < Z_MAX * error + 0.02 * found.risks[name]


# --- advice ---------------------------------------------------------------------------------------


def test_advice_does_not_recommend_an_orthogonal_source():
    found = advice.advise(n=98, d=100, theta=pi / 2, sigma=0.2)
    assert (found.method, found.settings[found.method]["scale"]) == ("fixed direction", 0)
    assert found.risks["ridge from scratch"] == pytest.approx(0.192, abs=5e-4)  # in the limit .190
    paper = advice.advise(n=98, d=100, theta=pi / 2, sigma=0.2, against="unregularised")
    assert (paper.method, paper.risk) == ("ridge transfer", 1.0)
    assert list(paper.risks) == ["scratch", "linear transfer", "ridge transfer", "fine-tuning"]
    assert paper.risks == {name: found.risks[name] for name in paper.risks}


@pytest.mark.slow
def test_no_penalty_is_never_better_than_the_best():
    """Tests loads, angles and noise, including n = d."""
    n = np.array([1, 10, 49, 50, 51, 52, 400])
    theta, sigma = np.linspace(0, pi, 7)[:, None], np.array([0.0, 1e-3, 0.3, 2.0])[:, None, None]
    risks = dl.transfer_risks(n=n, d=50, theta=theta, sigma=sigma, depth=1)
    assert (risks["ridge from scratch"] <= risks["scratch"] * (1 + 1e-12)).all()
    assert (risks["L2-SP"] <= risks["fine-tuning"] * (1 + 1e-12) + 1e-12).all()
    assert (risks["scaled L2-SP"] <= risks["ridge from scratch"] * (1 + 1e-12)).all()
    for name, risk in risks.items():
        assert (risks["fixed direction"] <= risk * (1 + 1e-12) + 1e-12).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, *soak(5, 60)])
def test_the_measured_error_of_a_limit_covers_the_mean(n):
    """Over 400 other data sets than those that measured it, for inputs of three variances."""
    d, sigma, draws, rng = 20, 0.7, 400, np.random.default_rng(1)
    s = np.repeat([2.0, 1.0, 0.2], [4, 8, 8])
    source = rng.normal(size=d)
    target = 0.5 * rng.normal(size=d) - source
    found = advice.advise_tasks(source, target, n=n, sigma=sigma, inputs=np.diag(s))
    assert found.settings["scaled L2-SP"]["scale"] < 0
    risks = {name: [] for name in ("ridge from scratch", "L2-SP", "scaled L2-SP")}
    for _ in range(draws):
        x = rng.normal(size=(n, d)) * np.sqrt(s)
        y = x @ target + sigma * rng.normal(size=n)
        for name, values in risks.items():
            at = found.settings[name]
            fit = minimiser(x, y, at["penalty"], at["scale"] * source)
            values.append(s @ (fit - target) ** 2)
    for name, values in risks.items():
        error = Z_MAX * np.std(values) / sqrt(draws)
        assert abs(np.mean(values) - found.risks[name]) <= found.known[name].error + error


def test_methods_within_the_error_are_undecided_and_texts_are_refused():
    same = advice.advise(n=40, d=60, theta=0.0, sigma=0.3)
    assert (same.risk, same.undecided) == (0.0, ("scaled L2-SP", "fixed direction"))
    with pytest.raises(TypeError, match=r"d must be a real number; got '60' \(str\)"):
        advice.advise(n=30, d="60", theta=0.4, sigma=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"beta_s must be an array; got \['1'\] \(list\)"):
        advice.advise_tasks(["1"], [1.0], n=3, sigma=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"theta must be a real number; got ndarray of shape"):
        advice.advise(n=30, d=60, theta=np.ones(2), sigma=0.1)  # pyright: ignore[reportArgumentType]
    unknown = {"covariance": np.eye(1), "n": 3, "sigma": 0.1}
    with pytest.raises(TypeError, match=r"advise_tasks has no argument 'covariance' .*, inputs, "):
        advice.advise_tasks([1.0], [1.0], **unknown)
    with pytest.raises(TypeError, match=r"scratch_risk has no argument .dim. .known: n, d, "):
        dl.scratch_risk(n=3, dim=4, sigma=0.1)
    with pytest.raises(ValueError, match=r"best_risk: .* broadcast; got n \[2\], sigma \[3\]$"):
        penalised.best_risk(n=[3, 4], d=9, distance=1.0, sigma=[0.1, 0.2, 0.3])


@pytest.fixture
def stopped(float64):
    """Eigenvalues, a source and a target, with the best risk, multiple and time."""
    s, source = np.array([1.0, 0.3, 0.1]), np.array([1.0, -0.5, 0.8])
    target = np.array([0.5, 0.2, 0.7])
    return s, source, target, *advice._stopped(*map(jnp.asarray, (s, source, target)), 20, 0.5)


def test_training_that_stops_has_its_best_multiple_of_the_source(stopped):
    """Other multiples, and other times, have more risk in the same law."""
    s, source, target, risk, at = stopped

    def other(scale, time):
        offset = target - scale * at["scale"] * source
        times = [time * at["time"]]
        return float(training_time.flow_risk(s, offset, n=20, sigma=0.5, times=times)[0])

    assert other(1, 1) == pytest.approx(float(risk), rel=1e-6)
    for scale, time in ((0.9, 1), (1.1, 1), (1, 0.8), (1, 1.25)):
        assert other(scale, time) > risk


@pytest.mark.parametrize("size", [1e-9, *slow(1e9)])
def test_the_size_of_a_source_changes_nothing_but_its_multiple(size, stopped):
    s, source, target, risk, at = stopped
    again, of = advice._stopped(*map(jnp.asarray, (s, size * source, target)), 20, 0.5)
    assert float(again) == pytest.approx(float(risk), rel=1e-5)
    assert size * of["scale"] == pytest.approx(at["scale"], rel=1e-5)


def test_advice_is_shown_whatever_is_known_of_its_risks():
    known = {"scratch": Known("limit", None), "L2-SP": Known("exact"), "ridge": Known("limit", 0.1)}
    risks = {"scratch": 2.0, "L2-SP": 1.0, "ridge": 3.0, "other": 4.0}
    shown = advice.Advice("L2-SP", 1.0, "scratch", 1.0, risks, known)._repr_html_()
    cells = ["<td>exact</td>", "<td>limit</td>", "<td>limit, ± 0.1</td>", "<td>estimated</td>"]
    assert [shown.index(cell) for cell in cells] == sorted(shown.index(cell) for cell in cells)


@pytest.mark.soak
def test_every_way_of_asking_has_the_same_candidates():
    d, n, theta, sigma = 30, 29, 1.4, 0.3
    beta_s, beta_t = problems.tasks(d, theta)
    plain = advice.advise(n=n, d=d, theta=theta, sigma=sigma)
    for inputs in (None, np.eye(d)):
        found = advice.advise_tasks(2 * beta_s, 2 * beta_t, n=n, sigma=2 * sigma, inputs=inputs)
        if inputs is not None:  # where every direction is equal, stopping is a worse penalty
            stopped, known = found.risks["early stopping"], found.known["early stopping"]
            assert stopped >= found.risks["fixed direction"] - known.error
        assert list(found.risks) == [*plain.risks, *["early stopping"] * (inputs is not None)]
        for name in plain.risks:
            known = found.known[name]
            if np.isfinite(plain.risks[name]):
                gap = abs(found.risks[name] - 4 * plain.risks[name])
                assert gap <= known.error + 1e-7 * found.risks[name]
    features = advice.advise_features(beta_s[:, None], beta_t[:, None], n=n, sigma=sigma)
    assert features.risks.keys() == plain.risks.keys() - {"fine-tuning"}
    for name in features.risks.keys() - {"L2-SP"}:  # which has two penalties there
        assert features.risks[name] == pytest.approx(plain.risks[name], rel=1e-9)
        assert features.known[name] == plain.known[name]
    assert features.risks["L2-SP"] <= plain.risks["ridge from scratch"]
    blind = advice.advise_features(beta_s[:, None], 0 * beta_t[:, None], n=n, sigma=sigma)
    assert blind.risks["ridge from scratch"] == blind.risks["L2-SP"] == 0.0
    sample = problems.draw(jax.random.key(0), 60, d, theta, sigma)
    assert list(advice.advise_sample(*sample[:3]).stderr) == list(plain.risks)


@pytest.mark.parametrize(
    "call",
    [
        lambda **given: advice.advise(n=9, d=5, theta=0.3, sigma=0.1, **given),
        lambda **given: advice.advise_tasks(np.ones(3), np.ones(3), n=9, sigma=0.1, **given),
        lambda **given: advice.advise_features(
            np.eye(9, 2), np.ones((9, 1)), n=5, sigma=0.1, **given
        ),
        lambda **given: advice.advise_sample(
            jnp.eye(40, 3), jnp.eye(40)[0], np.ones(3), blocks=4, **given
        ),
    ],
)
def test_unknown_baselines_are_refused(call):
    message = "against: expected one of 'regularised', 'unregularised'; got 'ridge'"
    with pytest.raises(ValueError, match=message):
        call(against="ridge")


@pytest.mark.slow
def test_the_band_at_n_equal_d_is_of_the_baseline_s_making():
    """An orthogonal source helps against scratch training near n = d, never against ridge."""
    n, d, sigma = np.r_[10:98, 103:190], 100, 0.2
    risks = dl.transfer_risks(n=n, d=d, theta=pi / 2, sigma=sigma)
    helps = np.asarray(risks["ridge transfer"] < risks["scratch"])
    assert helps[(n >= 97) & (n <= 103)].all()
    assert not helps[(n <= 90) | (n >= 110)].any()
    assert (risks["ridge transfer"] > risks["ridge from scratch"]).all()
