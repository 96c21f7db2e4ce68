"""SAIL, Appendix E (Lemma 2): what the total variation of two tasks says of their discriminants."""

from math import sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import expit

from sail_jax.distances import total_variation_gaussian
from theory.claims import Claim, Estimate, Simulate
from theory.initialisation.discriminant import (
    lda_constant,
    lda_distance,
    lda_parameters,
    lda_total_variation,
    symmetric,
)
from theory.initialisation.settings import MEANS, PAPER, TARGET, generator, measured

SPREAD = np.array([[1.5, 0.4, 0.0], [0.4, 0.8, -0.2], [0.0, -0.2, 0.5]])


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


def _shifted() -> tuple[np.ndarray, np.ndarray]:
    """Both classes moved by one: the same discriminating direction."""
    means = np.stack([MEANS[0], -MEANS[0]])
    return means, means + np.array([1.0, 0.0, 0.0])


def _theta_distance(covariance: np.ndarray | float, mean: np.ndarray = MEANS[0]) -> float:
    (theta, _), (target, _) = (lda_parameters(symmetric(m), covariance) for m in (mean, TARGET))
    return float(jnp.linalg.norm(theta - target))


def _constant_ratio() -> float:
    """C along the second model's gap from the target over C along the first's."""
    first, second = (lda_constant(m - TARGET, SPREAD) for m in MEANS)
    return float(second / first)


def _attained_ratio() -> float:
    """Distance of parameters over Delta: of means apart along the least eigenvector over that along
    the largest."""
    _, vectors = np.linalg.eigh(SPREAD)
    ratios = []
    for v in (vectors[:, 0], vectors[:, -1]):
        gap = _theta_distance(SPREAD, TARGET + v)
        ratios.append(gap / np.sqrt(v @ np.linalg.solve(SPREAD, v)))
    return float(ratios[0] / ratios[1])


def _log_odds(key: Array, quick: bool) -> Estimate:
    """E[y] over the points, weighed by a bump: class 1 as often as the discriminant says."""
    theta, b = lda_parameters(MEANS, SPREAD, 0.3)
    rng, n = generator(key), 20_000 if quick else 200_000
    y = (rng.uniform(size=n) > 0.3).astype(int)
    x = rng.normal(size=(n, 3)) @ np.linalg.cholesky(SPREAD).T + MEANS[y]
    bump = np.exp(-0.5 * np.sum((x - TARGET) ** 2, -1))
    return Estimate.mean(bump * ((y == 0) - expit(x @ np.asarray(theta) + float(b))))


def _lemma_2() -> list[Claim]:
    source, tasks = f"{PAPER} Lemma 2 (p. 29)", "LDA, classes ±m and ±m*, d=3"
    gap = np.linalg.norm(MEANS[0] - TARGET)
    means, target = (np.stack([m, -m]) for m in (MEANS[0], TARGET))

    def variation() -> float:
        return float(lda_total_variation(means, target))

    def correlated() -> float:
        return float(lda_total_variation(means, target, SPREAD))

    return [
        Claim(
            f"{PAPER}/E-lda/exact",
            "log odds = θᵀx + b, θ = Σ⁻¹(μ₁ - μ₋₁), b = -½(μ₁ + μ₋₁)ᵀθ + ln(P(1)/P(-1))",
            f"{PAPER} Appendix E (p. 28)",
            "E[bump(x) (1[y=1] - sigmoid(θᵀx + b))], d=3, P(1)=.3",
            lambda: 0.0,
            _log_odds,
        ),
        Claim(
            f"{PAPER}/L2-TV/printed",
            "D_TV(D_i, D*) = ½|μ_i - μ*|_{Σ⁻¹}",
            f"{source}, proof",
            f"{tasks}, covariance I; μ = 2m",
            lambda: float(gap),
            _by_events(means, target),
            note=f"{gap:.2f} here, more than 1; half the Mahalanobis length is Pinsker's bound",
        ),
        Claim(
            f"{PAPER}/L2-TV/corrected",
            "D_TV(D_i, D*) = 2Φ(Δ/2) - 1, Δ = |m_i - m*|_{Σ⁻¹}, averaged over classes",
            f"{source}, proof",
            f"{tasks}, covariance I",
            variation,
            _by_events(means, target),
        ),
        Claim(
            f"{PAPER}/L2-unit/ours",
            "D_TV of Gaussians one standard deviation apart is .38292, not .5",
            f"{source}, proof",
            "classes ±m, m* = m + e₁",
            lambda: float(total_variation_gaussian(np.eye(3)[0])),
            _by_events(means, np.stack([means[0] + np.eye(3)[0], means[1] - np.eye(3)[0]])),
        ),
        Claim(
            f"{PAPER}/L2/printed",
            "|θ_i - θ*| = C D_TV(D_i, D*)",
            source,
            f"{tasks}, correlated features; D_TV true",
            lambda: float(lda_constant(MEANS[0] - TARGET, SPREAD)) * correlated(),
            measured(lambda: _theta_distance(SPREAD)),
        ),
        Claim(
            f"{PAPER}/L2/corrected",
            "|θ_i - θ*| = C 2Φ⁻¹((1 + D_TV)/2), the printed C",
            source,
            f"{tasks}, correlated features",
            lambda: float(lda_distance(correlated(), lda_constant(MEANS[0] - TARGET, SPREAD))),
            measured(lambda: _theta_distance(SPREAD), 1e-10),
        ),
        Claim(
            f"{PAPER}/L2-isotropic/ours",
            "Σ = s²I: |θ_i - θ*| = (4/s) Φ⁻¹((1 + D_TV)/2)",
            source,
            f"{tasks}, s=1.5",
            lambda: float(lda_distance(lda_total_variation(means, target, 1.5**2), 2 / 1.5)),
            measured(lambda: _theta_distance(1.5**2), 1e-10),
        ),
        Claim(
            f"{PAPER}/L2-constant/printed",
            "C is a constant",
            source,
            f"{tasks}, correlated features: C of one model over C of another",
            lambda: 1.0,
            measured(_constant_ratio),
        ),
        Claim(
            f"{PAPER}/L2-constant/corrected",
            "C is between 2/√λ_max and 2/√λ_min, attained: a ratio of up to √(λ_max/λ_min)",
            source,
            f"{tasks}, correlated features: C along the ends of the spectrum, from parameters",
            lambda: sqrt(np.linalg.cond(SPREAD)),
            measured(_attained_ratio),
            note="constant iff Σ = s²I",
        ),
        Claim(
            f"{PAPER}/L2-shift/printed",
            "equal θ, equal laws: D_TV = |θ_i - θ*| / C = 0",
            source,
            "both classes moved by e₁",
            lambda: 0.0,
            _by_events(*_shifted()),
            note="θ sees the difference of class means alone",
        ),
        Claim(
            f"{PAPER}/L2-shift/corrected",
            "D_TV(D_i, D*) is that of the classes, averaged",
            source,
            "both classes moved by e₁",
            lambda: float(lda_total_variation(*_shifted())),
            _by_events(*_shifted()),
        ),
    ]


CLAIMS = tuple(_lemma_2())
