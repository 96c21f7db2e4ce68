"""SAIL, Appendix E (Lemma 2), on total variation of tasks and distances of discriminants."""

from math import log, sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax.distances import total_variation_gaussian
from theory.claims import Estimate, Simulate, generator, measured
from theory.initialisation.discriminant import (
    lda_constant,
    lda_distance,
    lda_parameters,
    lda_total_variation,
    symmetric,
)
from theory.initialisation.settings import MEANS, TARGET, claim

SPREAD = np.array([[1.5, 0.4, 0.0], [0.4, 0.8, -0.2], [0.0, -0.2, 0.5]])
PAIR = np.stack([MEANS[0], -MEANS[0]])  # classes of a model, and of the target
GOAL = np.stack([TARGET, -TARGET])
ALONG = np.eye(3)[0]
GAPS = MEANS - TARGET
LDA = "LDA, classes ±m and ±m*, d=3"
CORRELATED = f"{LDA}, correlated features"


def _by_events(means: np.ndarray, others: np.ndarray) -> Simulate:
    """Estimates the total variation by P - Q of the event that P is more likely, on points (x, y)
    of either. It is unbiased, because the event is exact.
    """

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
    """Divides the distance of parameters by Delta for means at a gap from the target's, relative to
    another gap.
    """
    first, second = (
        _theta_distance(SPREAD, TARGET + gap) / sqrt(gap @ np.linalg.solve(SPREAD, gap))
        for gap in gaps
    )
    return first / second


def _variation(covariance: np.ndarray | float = 1.0) -> float:
    return float(lda_total_variation(PAIR, GOAL, covariance))


POINT = TARGET.tolist()


@claim("E-lda/exact")
def _(prior=0.3):
    """log odds = θᵀx + b, θ = Σ⁻¹(μ₁ - μ₋₁), b = -½(μ₁ + μ₋₁)ᵀθ + ln(P(1)/P(-1))

    Source: Appendix E (p. 28)
    Domain: d=3, correlated features, P(1)={prior}, x = {POINT}
    """
    theta, b = lda_parameters(MEANS, SPREAD, prior)
    first, second = (TARGET - mean for mean in MEANS)
    # By the exponents of both densities.
    apart = second @ np.linalg.inv(SPREAD) @ second - first @ np.linalg.inv(SPREAD) @ first
    odds = float(apart / 2 + log(prior) - log(1 - prior))
    return theta @ TARGET + b, measured(lambda: odds)


@claim("L2-TV/printed")
def _printed_variation():
    """D_TV(D_i, D*) = ½|μ_i - μ*|_{{Σ⁻¹}}

    The value exceeds 1. Half of the Mahalanobis length is Pinsker's bound.

    Source: Lemma 2 (p. 29), proof
    Domain: {LDA}, covariance I; μ = 2m
    """
    return np.linalg.norm(GAPS[0]), _by_events(PAIR, GOAL)


@_printed_variation.beside("corrected")
def _():
    """D_TV(D_i, D*) = 2Φ(Δ/2) - 1, Δ = |m_i - m*|_{{Σ⁻¹}}, averaged over classes"""
    return _variation()


@claim("L2-unit/ours")
def _():
    """D_TV of Gaussians one standard deviation apart is .38292, not .5

    Source: Lemma 2 (p. 29), proof
    Domain: classes ±m, m* = m + e₁
    """
    return total_variation_gaussian(ALONG), _by_events(PAIR, PAIR + np.stack([ALONG, -ALONG]))


@claim("L2/printed")
def _printed_lemma():
    """|θ_i - θ*| = C D_TV(D_i, D*)

    Source: Lemma 2 (p. 29)
    Domain: {CORRELATED}; D_TV true
    """
    predicted = float(lda_constant(GAPS[0], SPREAD)) * _variation(SPREAD)
    return predicted, measured(lambda: _theta_distance(SPREAD), 1e-10)


@_printed_lemma.beside("corrected")
def _():
    """|θ_i - θ*| = C 2Φ⁻¹((1 + D_TV)/2), the printed C"""
    return lda_distance(_variation(SPREAD), lda_constant(GAPS[0], SPREAD))


@claim("L2-isotropic/ours")
def _():
    """For Σ = s²I, |θ_i - θ*| = (4/s) Φ⁻¹((1 + D_TV)/2)

    Source: Lemma 2 (p. 29), corrected
    Domain: {LDA}, s=1.5
    """
    predicted = lda_distance(_variation(1.5**2), 2 / 1.5)
    return predicted, measured(lambda: _theta_distance(1.5**2), 1e-10)


@claim("L2-constant/printed")
def _printed_constant():
    """One constant C serves all pairs of tasks

    The lemma itself has a C for each difference of means.

    Source: Theorem 3's proof, step 3 (Appendix E, p. 30), by Lemma 2
    Domain: {CORRELATED}: C of one model over C of another
    """
    return 1.0, measured(lambda: _constants_ratio(*GAPS))


@_printed_constant.beside("corrected")
def _():
    """C = 2√(gᵀΣ⁻²g / gᵀΣ⁻¹g) for means g apart"""
    return lda_constant(GAPS[0], SPREAD) / lda_constant(GAPS[1], SPREAD)


@claim("L2-constant-range/ours")
def _():
    """C is between 2/√λ_max and 2/√λ_min, with an attained ratio of √(λ_max/λ_min)

    C is constant iff Σ = s²I.

    Source: Lemma 2 (p. 29), quantified
    Domain: {CORRELATED}: C along the ends of the spectrum
    """
    ends = np.linalg.eigh(SPREAD)[1].T[[0, -1]]
    return sqrt(np.linalg.cond(SPREAD)), measured(lambda: _constants_ratio(*ends))


@claim("L2-shift/printed")
def _printed_shift():
    """Equal θ mean equal laws, as D_TV = |θ_i - θ*| / C = 0

    θ depends only on the difference of class means.

    Source: Lemma 2 (p. 29)
    Domain: both classes moved by e₁
    """
    return 0.0, _by_events(PAIR, PAIR + ALONG)


@_printed_shift.beside("corrected")
def _():
    """D_TV(D_i, D*) is the average of the classes' distances"""
    return lda_total_variation(PAIR, PAIR + ALONG)
