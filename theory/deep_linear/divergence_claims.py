"""features-are-fate (arXiv 2410.08194), Section 2.1, Theorem 2.2 and Figure 5: data set distances.

Simulations draw (x, y) from the two laws and average log-densities, witnesses and matchings of the
points. Distances between samples are biased upwards. Their means therefore bound the distances
between laws from above.
"""

from collections.abc import Callable
from functools import partial
from math import cos, exp, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax import distances
from theory.claims import Estimate, Simulate, generator, once
from theory.deep_linear import divergence_domains, divergences, misprint_domains, risks
from theory.deep_linear.grid import simulate_overlaps
from theory.deep_linear.overlaps import Overlaps
from theory.deep_linear.regressions import claim

D, SIGMA, GAMMA = 5, 0.2, 0.5


def _scaled(f: float, g: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns tasks f x_1 and g x_1, which have the same feature."""
    return f * np.eye(D)[0], g * np.eye(D)[0]


def _at(theta: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes `problems.tasks` for many angles, in float64 even at import."""
    source = np.broadcast_to(np.eye(d)[0], (*theta.shape, d))
    return source, np.cos(theta)[..., None] * np.eye(d)[0] + np.sin(theta)[..., None] * np.eye(d)[1]


def _labels(
    rng: np.random.Generator, quick: bool, beta: np.ndarray, sigma: float
) -> tuple[np.ndarray, np.ndarray]:
    n = 40_000 if quick else 200_000
    x = rng.standard_normal((n, D))
    return x, x @ beta + sigma * rng.standard_normal(n)


def _log_ratio(beta_s: np.ndarray, beta_t: np.ndarray, sigma: float) -> Simulate:
    """Averages log p_s/p_t under the source, from the densities of y given x."""

    def simulate(key: Array, quick: bool) -> Estimate:
        x, y = _labels(generator(key), quick, beta_s, sigma)
        return Estimate.mean(((y - x @ beta_t) ** 2 - (y - x @ beta_s) ** 2) / (2 * sigma**2))

    return simulate


def _excess(beta_s: np.ndarray, beta_t: np.ndarray, sigma: float) -> Simulate:
    """Averages 2 (1 - p_t/p_s)_+ under the source, the integral metric of |h|_inf <= 1. It is twice
    the total variation.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        x, y = _labels(generator(key), quick, beta_s, sigma)
        log_ratio = ((y - x @ beta_s) ** 2 - (y - x @ beta_t) ** 2) / (2 * sigma**2)
        return Estimate.mean(-2 * np.expm1(np.minimum(log_ratio, 0.0)))

    return simulate


def _witness(
    h: Callable[[np.ndarray], np.ndarray], beta_s: np.ndarray, beta_t: np.ndarray, sigma: float
) -> Simulate:
    """Averages h(y) under the source and subtracts its mean under the target."""

    def simulate(key: Array, quick: bool) -> Estimate:
        rng = generator(key)
        ends = [_labels(rng, quick, beta, sigma)[1] for beta in (beta_s, beta_t)]
        return Estimate.mean(h(ends[0]) - h(ends[1]))

    return simulate


def _matched(
    distance: Callable[[np.ndarray, np.ndarray], float],
    beta_s: np.ndarray,
    beta_t: np.ndarray,
    sigma: float = SIGMA,
    n: int = 200,
) -> Simulate:
    """Averages the distance between independent draws of n points of either law, in (u, v, y)."""

    def simulate(key: Array, quick: bool) -> Estimate:
        per_draw = []
        for subkey in jax.random.split(key, 8 if quick else 40):
            xy = divergences.coupled_samples(subkey, n, beta_s, beta_t, sigma)
            per_draw.append(distance(*(np.asarray(v) for v in xy)))
        return Estimate.mean(per_draw)

    return simulate


def _dudley(x: np.ndarray, y: np.ndarray) -> float:
    return distances.dudley(x, y).value


# Figure 5: T against distance, over angles.
MEASURED = "a measurement: simulated data sets give one correlation for the whole figure"
ANGLES, FIG5_D = 13, 100
DATA_SETS = "features-are-fate/Fig5"  # the draws of all its claims


def _angles(end: float) -> np.ndarray:
    return np.linspace(0, end, ANGLES)


@partial(jax.jit, static_argnums=2)
def _gains(at: Overlaps, theta: Array, mode: risks.Mode) -> Array:
    if mode == "linear":
        return at.scratch(theta, SIGMA) - at.linear_transfer(theta, SIGMA)
    return at.scratch(theta, SIGMA) - at.fine_tune(theta, SIGMA, 2)


@once
def _data_sets(key: Array, quick: bool) -> Overlaps:
    keys = jax.random.split(key, 50 if quick else 400)
    return simulate_overlaps(keys, [round(GAMMA * FIG5_D)], FIG5_D)


def _correlation(mode: risks.Mode, end: float, distance: Callable[[Array], np.ndarray]) -> Simulate:
    """Correlates a distance with the mean T of simulated data sets, over angles in [0, end]. The
    jackknife over data sets also removes the bias O(1/draws).
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        at = _data_sets(key, quick)
        draws, theta = at.source.shape[0], jnp.asarray(_angles(end))
        gains = np.asarray(_gains(at, theta, mode))  # [draws, angles]
        axis = distance(jax.random.fold_in(key, 1))
        without = (gains.sum(0) - gains) / (draws - 1)
        left_out = np.array([np.corrcoef(axis, curve)[0, 1] for curve in without])
        correlation = np.corrcoef(axis, gains.mean(0))[0, 1]
        value = draws * correlation - (draws - 1) * left_out.mean()
        return Estimate(float(value), stderr=sqrt(draws - 1) * float(left_out.std()))

    return simulate


def _kl_axis(end: float) -> Callable[[Array], np.ndarray]:
    return lambda key: np.asarray(divergences.kl(*_at(_angles(end), FIG5_D), SIGMA))


def _w1_axis(end: float) -> Callable[[Array], np.ndarray]:
    """Estimates W_1 of the laws, with one matching per angle."""

    def axis(key: Array) -> np.ndarray:
        pairs = zip(*_at(_angles(end), FIG5_D), strict=True)
        samples = [divergences.coupled_samples(key, 200, s, t, SIGMA) for s, t in pairs]
        return np.array([distances.wasserstein1(*(np.asarray(v) for v in xy)) for xy in samples])

    return axis


def _predicted_correlation(mode: risks.Mode, end: float) -> float:
    theta, n = _angles(end), round(GAMMA * FIG5_D)
    gain = jax.jit(lambda t: risks.transferability(mode, n=n, d=FIG5_D, theta=t, sigma=SIGMA))(
        theta
    )
    return float(np.corrcoef(np.asarray(gain), (1 - np.cos(theta)) / SIGMA**2)[0, 1])


# --- Theorem 2.2 for the Dudley metric, and for the larger classes of Section 2.1 -----------------

DELTA = 3.0
# |g| of the proof for |f| = 1, at which the printed bound (28) is delta
PROOF_G = sqrt(abs(2 * DELTA * exp(SIGMA**2 / 2) - 1))
OF_PROOF = f"|f|=1, σ={SIGMA}, δ={DELTA:g}, g={PROOF_G:.2f}f of the proof"


@claim("T2.2-Dudley/printed", ">=", attack=misprint_domains.DUDLEY)
def _printed_dudley():
    """For any f and any δ > 0 some g, here the proof's, has γ_β(p_f, p_g) ≥ δ

    |h|_∞ ≤ 1 bounds the metric γ_β by 2 for all laws.

    Source: Thm 2.2, p. 4, and App. B.1, p. 16
    Domain: {OF_PROOF}; samples of 200
    """
    return DELTA, _matched(_dudley, *_scaled(1.0, PROOF_G))


@_printed_dudley.beside("corrected", "<=", attack=divergence_domains.DUDLEY, overlooks="tightened")
def _():
    """γ_β(p_f, p_g) ≤ max_L E min(L|f-g|, 2(1-L)) < 2

    Source: Thm 2.2, p. 4, and App. B.1, p. 16, corrected
    """
    return divergences.dudley_bounds(*_scaled(1.0, PROOF_G), SIGMA).upper


@claim("T2.2-Dudley-reach/ours", ">=", attack=divergence_domains.DUDLEY_REACH)
def _(d=D, far=1e6, sigma=SIGMA):
    """Every δ < 2 is reached. A witness at |g| = 10⁶ finds δ = 1.97

    Source: Thm 2.2, p. 4, and App. B.1, p. 16, for δ < 2
    Domain: d={d}, |f|=1, |g|={far:g}, σ={sigma}, h = M - min(L|y|, 2M), L = 2e-4
    """

    def bump(y: np.ndarray) -> np.ndarray:
        """Computes M - min(L |y|, 2 M) with M = 1 - L. Its Lipschitz constant and its size add up
        to 1.
        """
        L = 2e-4
        return (1 - L) - np.minimum(L * np.abs(y), 2 * (1 - L))

    return 1.97, _witness(bump, *_scaled(1.0, far), sigma)


@claim("T2.2-eq28/printed", ">=", attack=misprint_domains.COSINES)
def _(d=D, f=0.5, g=3.0, sigma=SIGMA):
    """(27) ≥ (28), that is |E cos f - E cos g| e^(-σ²/2)/2 ≥ (e^(-σ²/2)/2)(|f|² + |g|²)

    The lower bound of cos a - cos b is -(a² + b²), not a² + b².

    Source: eqs. (27), (28), p. 16
    Domain: d={d}, f={f}x₁, g={g}x₁, σ={sigma}; h = cos(y)/2
    """
    bound = exp(-(sigma**2) / 2) / 2 * (f**2 + g**2)
    return bound, _witness(lambda y: np.cos(y) / 2, *_scaled(f, g), sigma)


@claim("T2.2-eq28/corrected")
def _(d=D, f=0.5, g=3.0, sigma=SIGMA):
    """(27) is (e^(-σ²/2)/2)|e^(-|f|²/2) - e^(-|g|²/2)| for linear f and g

    Source: eq. (27), p. 16
    Domain: d={d}, f={f}x₁, g={g}x₁, σ={sigma}; h = cos(y)/2
    """
    tasks = _scaled(f, g)
    return divergences.cosine_gap(*tasks, sigma), _witness(lambda y: np.cos(y) / 2, *tasks, sigma)


@claim("T2.2-TV/printed", ">=", attack=misprint_domains.VARIATION)
def _printed_variation():
    """The theorem holds for any larger class, such as |h|_∞ ≤ 1, with γ ≥ δ

    That metric is twice the total variation, which is at most 2.

    Source: Section 2.1, after Thm 2.2, p. 5
    Domain: d={D}, {OF_PROOF}
    """
    return DELTA, _excess(*_scaled(1.0, PROOF_G), SIGMA)


@_printed_variation.beside("corrected", "=")
def _():
    """Over |h|_∞ ≤ 1 the metric is γ = (4/π) arctan(|f-g|/2σ) < 2 for linear f and g

    Source: Section 2.1, after Thm 2.2, p. 5, corrected
    """
    return 2 * divergences.total_variation(*_scaled(1.0, PROOF_G), SIGMA)


@claim("T2.2-W1/exact", ">=", attack=divergence_domains.W1_REACH, overlooks="tightened")
def _():
    """For any δ some g has W₁(p_f, p_g) ≥ δ. h = |y| finds δ = 50 at g = -100f

    Source: Section 2.1, after Thm 2.2, p. 5
    Domain: d={D}, |f|=1, σ={SIGMA}
    """
    return 50.0, _witness(lambda y: -np.abs(y), *_scaled(1.0, -100.0), SIGMA)


MIXED = (*_at(np.array(1.0), D), SIGMA)
SIZES = f"d={D}, θ=1, σ={SIGMA}"


@claim("T2.2-W1-upper/ours", "<=", attack=divergence_domains.UPPER)
def _():
    """W₁ ≤ E|Mz|, the mean displacement of a coupling, and ≤ √(2/π)|f-g|

    Source: Section 2.1, p. 5, for linear f and g
    Domain: {SIZES}; samples of 200
    """
    matched = _matched(distances.wasserstein1, *MIXED)
    return divergences.wasserstein1_bounds(*MIXED).upper, matched


@claim("T2.2-W1-lower/ours", ">=", attack=divergence_domains.LOWER, overlooks="tightened")
def _():
    """W₁ ≥ √(2/π) times the best gain of spread of two projections

    Source: Section 2.1, p. 5, for linear f and g
    Domain: {SIZES}; samples of 200
    """
    matched = _matched(distances.wasserstein1, *MIXED)
    return divergences.wasserstein1_bounds(*MIXED).lower, matched


# --- Theorem 2.2 for the Kullback-Leibler divergence ----------------------------------------------


@claim("T2.2-KL/printed")
def _():
    """D_KL(p_f‖p_g) = E_f [g² - f² - 2yg + 2yf] = |f-g|²

    The factor 1/(2σ²) is missing in (32) and present in (33).

    Source: eq. (32), p. 16
    Domain: {SIZES}
    """
    return 2 * (1 - cos(1.0)), _log_ratio(*MIXED)


@claim("T2.2-KL/exact")
def _():
    """D_KL(p_f‖p_g) = |f-g|²/(2σ²)

    Source: eqs. (33), (34), p. 16
    Domain: {SIZES}
    """
    return divergences.kl(*MIXED), _log_ratio(*MIXED)


@claim("T2.2-KL-choice/printed", ">=", attack=misprint_domains.CHOICE)
def _printed_choice(d=D, f=0.1, alpha=10.1):
    """g = -αf with α > σ√δ/|f| has D_KL ≥ δ

    Source: after eq. (34), p. 16
    Domain: d={d}, |f|={f}, σ=δ=1, α={alpha}
    """
    return 1.0, _log_ratio(*_scaled(f, -alpha * f), 1.0)


@_printed_choice.beside("corrected", "=")
def _(f, alpha):
    """g = -αf has D_KL = (1+α)²|f|²/(2σ²), which is δ at α = σ√(2δ)/|f| - 1

    Source: after eq. (34), p. 16, corrected
    """
    return ((1 + alpha) * f) ** 2 / 2


# --- Figure 5 -------------------------------------------------------------------------------------

PLOTTED = f"d={FIG5_D}, γ={GAMMA}, σ={SIGMA}, {ANGLES} angles in [0, {{}}]"
HALF, WHOLE = (PLOTTED.format(end) for end in ("π/2", "π"))


@claim("Fig5-KL/ours", draws=DATA_SETS)
def _():
    """D_KL orders T of linear transfer on the angles of Figs. 1 and 3. Their correlation is
    compared

    Source: Section 3.3, p. 8, and Fig. 5a, p. 28
    Domain: {HALF}
    """
    found = _correlation("linear", pi / 2, _kl_axis(pi / 2))
    return _predicted_correlation("linear", pi / 2), found


@claim("Fig5-KL-whole/reading", draws=DATA_SETS)
def _():
    """D_KL is not negatively correlated with T of linear transfer

    The axis of Fig. 5a passes π/2. T(θ) = T(π-θ), since linear transfer does not depend on the
    source's sign.

    Source: Section 3.3, p. 8, and Fig. 5a, p. 28
    Domain: {WHOLE}
    """
    return 0.0, _correlation("linear", pi, _kl_axis(pi))


@claim("Fig5-KL-tuned/ours", draws=DATA_SETS)
def _():
    """D_KL and T of fine-tuning are correlated in the limit d → ∞

    Both are affine in cos θ. The tolerance is 1/d.

    Source: Thm 3.9, p. 9, corrected, and eq. (34), p. 16
    Domain: {WHOLE}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        estimate = _correlation("fine_tuning", pi, _kl_axis(pi))(key, quick)
        return Estimate(estimate.value, tolerance=1 / FIG5_D)

    return -1.0, simulate


@claim("Fig5-W1/printed", ">=", draws=DATA_SETS)
def _printed_sign():
    """W₁ is not negatively correlated with T of linear transfer. The sign of the correlation is
    compared

    W₁ is matched in the three dimensions that matter, since samples resolve it there.

    Source: Section 3.3, p. 8, and Fig. 5b, p. 28
    Domain: {WHOLE}
    """
    return 0.0, _correlation("linear", pi, _w1_axis(pi))


@_printed_sign.beside("corrected", "<=", attack=MEASURED, overlooks="tightened")
def _():
    """W₁ is negatively correlated with T of linear transfer. The sign of the correlation is
    compared

    W₁ is matched in the three dimensions that matter, since samples resolve it there.
    """
    return 0.0


@claim("Fig5-W1-axis/printed", ">=", attack=divergence_domains.PLOTTED)
def _():
    """W₁(p_s, p_t) is from 526 to 529, as on the axis of Fig. 5b

    The paper estimates it from finite samples; see Fig5-W1-floor.

    Source: Fig. 5b, p. 28
    Domain: θ=π, σ={SIGMA}; samples of 200
    """
    return 526.0, _matched(distances.wasserstein1, *_scaled(1.0, -1.0))


@claim("Fig5-W1-axis/corrected", "<=", attack=divergence_domains.REACHED, overlooks="tightened")
def _():
    """W₁(p_s, p_t) ≤ 2√(2/π), at every angle

    Source: Fig. 5b, p. 28, corrected
    Domain: θ=π, σ={SIGMA}; samples of 200
    """
    return 2 * sqrt(2 / pi), _matched(distances.wasserstein1, *_scaled(1.0, -1.0))


@claim("Fig5-W1-floor/ours")
def _(d=500, points=250, sigma=SIGMA):
    """Two samples of one law with {points} points have the Manhattan distance of the axis, 526 to
    529

    The axis shows the error of the estimate. The tolerance is half of its width.

    Source: Fig. 5b, p. 28
    Domain: d={d}, n={points}, θ=0, σ={sigma}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        drawn = jax.random.normal(key, (2, 2 if quick else 10, points, d + 1))
        label = drawn[..., :1] + sigma * drawn[..., -1:]
        pairs = zip(*np.concatenate([drawn[..., :-1], label], axis=-1), strict=True)
        per_pair = [distances.wasserstein1(x, y, norm=1) for x, y in pairs]
        return Estimate(float(np.mean(per_pair)), tolerance=1.5)

    return 527.5, simulate
