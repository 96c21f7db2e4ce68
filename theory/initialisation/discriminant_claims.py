"""SAIL, Appendix E (Lemma 2): what the total variation of two tasks says of their discriminants."""

from functools import partial
from math import log, sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax.distances import total_variation_gaussian
from theory.claims import Claim, Estimate, Simulate, beside, generator, measured
from theory.initialisation.discriminant import (
    lda_constant,
    lda_distance,
    lda_parameters,
    lda_total_variation,
    symmetric,
)
from theory.initialisation.settings import MEANS, PAPER, TARGET

SPREAD = np.array([[1.5, 0.4, 0.0], [0.4, 0.8, -0.2], [0.0, -0.2, 0.5]])
PRIOR, SCALE = 0.3, 1.5
PAIR = np.stack([MEANS[0], -MEANS[0]])  # classes of a model, and of the target
GOAL = np.stack([TARGET, -TARGET])
ALONG = np.eye(3)[0]


def _by_events(means: np.ndarray, others: np.ndarray) -> Simulate:
    """P - Q of the event that P is the more likely, on points (x, y) of either: an estimate of the
    total variation, unbiased since the event is the true one."""

    def simulate(key: Array, quick: bool) -> Estimate:
        n = 20_000 if quick else 200_000
        rng = generator(key)
        y = rng.integers(0, 2, (2, n))  # class 0 is y = 1
        centres = np.stack([means[y[0]], others[y[1]]])
        x = centres + rng.normal(size=centres.shape)
        far = [np.sum((x - m[y]) ** 2, -1) for m in (means, others)]
        said = far[0] < far[1]
        return Estimate.mean(said[0].astype(float) - said[1])

    return simulate


def _theta_distance(covariance: np.ndarray | float, mean: np.ndarray = MEANS[0]) -> float:
    (theta, _), (target, _) = (lda_parameters(symmetric(m), covariance) for m in (mean, TARGET))
    return float(jnp.linalg.norm(theta - target))


def _constants_ratio(*gaps: np.ndarray) -> float:
    """Distance of parameters over Delta: of means a gap from the target's over that of another."""
    first, second = (
        _theta_distance(SPREAD, TARGET + gap) / sqrt(gap @ np.linalg.solve(SPREAD, gap))
        for gap in gaps
    )
    return first / second


def _log_odds() -> float:
    """The log odds of the classes at the target's mean, from both densities' exponents."""
    first, second = (TARGET - mean for mean in MEANS)
    apart = second @ np.linalg.inv(SPREAD) @ second - first @ np.linalg.inv(SPREAD) @ first
    return float(apart / 2 + log(PRIOR) - log(1 - PRIOR))


def _affine() -> float:
    theta, b = lda_parameters(MEANS, SPREAD, PRIOR)
    return float(theta @ TARGET + b)


def _variation(covariance: np.ndarray | float = 1.0) -> float:
    return float(lda_total_variation(PAIR, GOAL, covariance))


def _lemma_2() -> list[Claim]:
    lemma, proof = "Lemma 2 (p. 29)", "Lemma 2 (p. 29), proof"
    tasks, gaps = "LDA, classes ±m and ±m*, d=3", MEANS - TARGET
    one, correlated = f"{tasks}, covariance I", f"{tasks}, correlated features"
    gap, constant = float(np.linalg.norm(gaps[0])), partial(lda_constant, gaps[0], SPREAD)
    ends = np.linalg.eigh(SPREAD)[1].T[[0, -1]]
    return [
        *beside(
            f"{PAPER}/E-lda",
            "Appendix E (p. 28)",
            f"d=3, correlated features, P(1)={PRIOR}, x = {TARGET.tolist()}",
            measured(_log_odds),
            exact=(
                "log odds = θᵀx + b, θ = Σ⁻¹(μ₁ - μ₋₁), b = -½(μ₁ + μ₋₁)ᵀθ + ln(P(1)/P(-1))",
                _affine,
            ),
        ),
        *beside(
            f"{PAPER}/L2-TV",
            proof,
            f"{one}; μ = 2m",
            _by_events(PAIR, GOAL),
            printed=(
                "D_TV(D_i, D*) = ½|μ_i - μ*|_{Σ⁻¹}",
                lambda: gap,
                "more than 1; half the Mahalanobis length is Pinsker's bound",
            ),
            corrected=(
                "D_TV(D_i, D*) = 2Φ(Δ/2) - 1, Δ = |m_i - m*|_{Σ⁻¹}, averaged over classes",
                _variation,
            ),
        ),
        *beside(
            f"{PAPER}/L2-unit",
            proof,
            "classes ±m, m* = m + e₁",
            _by_events(PAIR, PAIR + np.stack([ALONG, -ALONG])),
            ours=(
                "D_TV of Gaussians one standard deviation apart is .38292, not .5",
                lambda: float(total_variation_gaussian(ALONG)),
            ),
        ),
        *beside(
            f"{PAPER}/L2",
            lemma,
            f"{correlated}; D_TV true",
            measured(partial(_theta_distance, SPREAD), 1e-10),
            printed=(
                "|θ_i - θ*| = C D_TV(D_i, D*)",
                lambda: float(constant()) * _variation(SPREAD),
            ),
            corrected=(
                "|θ_i - θ*| = C 2Φ⁻¹((1 + D_TV)/2), the printed C",
                lambda: float(lda_distance(_variation(SPREAD), constant())),
            ),
        ),
        *beside(
            f"{PAPER}/L2-isotropic",
            f"{lemma}, corrected",
            f"{tasks}, s={SCALE}",
            measured(partial(_theta_distance, SCALE**2), 1e-10),
            ours=(
                "Σ = s²I: |θ_i - θ*| = (4/s) Φ⁻¹((1 + D_TV)/2)",
                lambda: float(lda_distance(_variation(SCALE**2), 2 / SCALE)),
            ),
        ),
        *beside(
            f"{PAPER}/L2-constant",
            "Theorem 3's proof, step 3 (Appendix E, p. 30), by Lemma 2",
            f"{correlated}: C of one model over C of another",
            measured(partial(_constants_ratio, *gaps)),
            printed=(
                "one constant C serves all pairs of tasks",
                lambda: 1.0,
                "the lemma itself has a C for each difference of means",
            ),
            corrected=(
                "C = 2√(gᵀΣ⁻²g / gᵀΣ⁻¹g) for means g apart",
                lambda: float(constant() / lda_constant(gaps[1], SPREAD)),
            ),
        ),
        *beside(
            f"{PAPER}/L2-constant-range",
            f"{lemma}, quantified",
            f"{correlated}: C along the ends of the spectrum",
            measured(partial(_constants_ratio, *ends)),
            ours=(
                "C is between 2/√λ_max and 2/√λ_min, attained: a ratio of up to √(λ_max/λ_min)",
                lambda: sqrt(np.linalg.cond(SPREAD)),
                "constant iff Σ = s²I",
            ),
        ),
        *beside(
            f"{PAPER}/L2-shift",
            lemma,
            "both classes moved by e₁",
            _by_events(PAIR, PAIR + ALONG),
            printed=(
                "equal θ, equal laws: D_TV = |θ_i - θ*| / C = 0",
                lambda: 0.0,
                "θ sees the difference of class means alone",
            ),
            corrected=(
                "D_TV(D_i, D*) is that of the classes, averaged",
                lambda: float(lda_total_variation(PAIR, PAIR + ALONG)),
            ),
        ),
    ]


CLAIMS = tuple(_lemma_2())
