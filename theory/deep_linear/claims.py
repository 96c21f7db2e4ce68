"""features-are-fate (arXiv 2410.08194), Section 3: as printed, and as true.

Simulators know the estimators (`estimators`) or train the network (`networks`); they never use the
closed forms that they check. (The claims on the interval and angle of eq. 13 are about its sign:
their other side is a scan of (13) itself, which `eq13/ours` and `eq13-lower` check on data.)

Means are over independent Gaussian data sets; each is far enough from n = d for the variance to be
finite (|n - d| >= 4; n > 4 in linear transfer), as the z-scores need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import acos, cos, pi, sin, sqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array

from theory import problems
from theory.claims import Claim, Estimate, Simulate
from theory.deep_linear import estimators, networks, risks

PAPER = "features-are-fate"
Estimator = Callable[[problems.Sample], Array]


def _fitted(sample: problems.Sample) -> Array:
    return estimators.scratch_fit(sample.x, sample.y)


@dataclass(frozen=True)  # equal instances hash alike, so that claims share compilations
class _Transferred:
    ridge: float = 0.0

    def __call__(self, sample: problems.Sample) -> Array:
        return estimators.linear_transfer_fit(sample.x, sample.y, sample.beta_s, self.ridge)


@dataclass(frozen=True)
class _FineTuned:
    depth: int

    def __call__(self, sample: problems.Sample) -> Array:
        return estimators.fine_tune_limit(sample.x, sample.y, sample.beta_s, self.depth)


# Eq. (142), X^+ y + (I - P) beta_s, is what a network of depth 1 does.
_AS_PRINTED = _FineTuned(1)


@partial(jax.jit, static_argnames=("estimate", "baseline", "n", "d", "draws"))
def _risks(key: Array, estimate, baseline, n: int, d: int, theta, sigma, draws: int) -> Array:
    def value(key: Array) -> Array:
        sample = problems.draw(key, n, d, theta, sigma)
        risk = problems.risk(estimate(sample), sample.beta_t)
        return risk if baseline is None else problems.risk(baseline(sample), sample.beta_t) - risk

    # 50 divides every number of draws below: a rest would be compiled once more.
    return jax.lax.map(value, jax.random.split(key, draws), batch_size=50)


def mean_risk(
    estimate: Estimator,
    n: int,
    d: int,
    theta: float,
    sigma: float,
    draws: int,
    baseline: Estimator | None = None,
) -> Simulate:
    """Builds the simulator of a mean risk E R, or of a paired difference E[R_baseline - R].

    Args:
      estimate: Fits a data set.
      n: Number of samples.
      d: Dimension.
      theta: Angle between the tasks in radians.
      sigma: Standard deviation of the label noise.
      draws: Number of independent data sets, a multiple of 500; a tenth of them where quick.
      baseline: Fits the same data sets; None for the risk itself.

    Returns:
      The simulator.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        count = draws // 10 if quick else draws
        values = _risks(key, estimate, baseline, n, d, theta, sigma, count)
        return Estimate.mean(values)

    return simulate


def extrapolated(
    estimate: Estimator,
    gamma: float,
    d: int,
    theta: float,
    sigma: float,
    draws: int,
    baseline: Estimator | None = None,
) -> Simulate:
    """Builds the simulator of the limit n, d -> inf of `mean_risk`, from two sizes.

    2 R(2d) - R(d) cancels the term of order 1/d. What is left is O(1/d^2), below the standard error
    at the sizes used.

    Args:
      estimate: Fits a data set.
      gamma: Load n / d.
      d: The smaller dimension.
      theta: Angle between the tasks in radians.
      sigma: Standard deviation of the label noise.
      draws: Number of data sets at the larger size, a multiple of 1,000; half of them at the
        smaller.
      baseline: As in `mean_risk`.

    Returns:
      The simulator.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        means = [
            mean_risk(
                estimate, round(gamma * size), size, theta, sigma, int(draws * share), baseline
            )(jax.random.fold_in(key, size), quick)
            for size, share in ((d, 0.5), (2 * d, 1.0))
        ]
        value = 2 * means[1].value - means[0].value
        stderr = sqrt(4 * (means[1].stderr or 0) ** 2 + (means[0].stderr or 0) ** 2)
        return Estimate(value, stderr=stderr)

    return simulate


def network_gap(limit: Estimator, depth: int, alpha: float) -> Simulate:
    """Builds the simulator of the distance of a trained network from a limit.

    The network is pretrained and fine-tuned by gradient descent at d = 40, n = 24, theta = pi/4 and
    sigma = 0.8, until the gradient vanishes. Two step sizes are extrapolated to gradient flow,
    2 beta(rate/2) - beta(rate). What is left is O(rate^2) + O(alpha^2), at most 2e-4 at rate = 0.04
    and the alphas used; the tolerance is rate^2/4.

    Args:
      limit: The predictor to which the network should tend.
      depth: Number of layers.
      alpha: Size of the initial weights.

    Returns:
      The simulator; it raises a RuntimeError where descent has not converged.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick  # one trajectory either way
        key_weights, key_data = jax.random.split(key)
        sample = problems.draw(key_data, 24, 40, pi / 4, 0.8)
        weights = networks.small_weights(key_weights, 40, depth, alpha)

        def beta(rate: float) -> Array:
            pretrained = networks.pretrain(weights, sample.beta_s, rate, round(500 / rate))
            trained = networks.fine_tune(
                pretrained.weights, sample.x, sample.y, rate, round(800 / rate)
            )
            if float(jnp.maximum(pretrained.gradient, trained.gradient)) > 1e-8:
                raise RuntimeError("gradient descent did not converge; train for more steps")
            return networks.predictor(trained.weights)

        rate = 0.04
        gap = jnp.linalg.norm(2 * beta(rate / 2) - beta(rate) - limit(sample))
        return Estimate(float(gap), tolerance=rate**2 / 4)

    return simulate


def _printed_scratch(gamma: float, sigma: float) -> float:
    return float(risks.scratch_limit(gamma, sigma))


def _scratch_claims() -> list[Claim]:
    source, statement = f"{PAPER} Thm 3.6, eq. (10), p. 6", "E R_sc"
    below = mean_risk(_fitted, 10, 20, 0.0, 1.0, 40_000)
    above = mean_risk(_fitted, 26, 20, 0.0, 1.0, 20_000)
    return [
        Claim(
            f"{PAPER}/T3.6-under/limit",
            f"{statement} → 1-γ + γσ²/(1-γ)",
            source,
            "γ=1/2, σ=1, d=40 and 80 extrapolated",
            lambda: _printed_scratch(0.5, 1.0),
            extrapolated(_fitted, 0.5, 40, 0.0, 1.0, 4_000),
            note="seen: 10 %, as extrapolation in size triples the error",
            effect=0.15,
        ),
        Claim(
            f"{PAPER}/T3.6-under/ours",
            f"{statement} = 1 - n/d + σ²n/(d-n-1), n ≤ d-2",
            f"{source}, sharpened",
            "n=10, d=20, σ=1",
            lambda: float(risks.scratch_risk(10, 20, 1.0)),
            below,
        ),
        Claim(
            f"{PAPER}/T3.6-over/limit",
            f"{statement} → σ²/(γ-1)",
            source,
            "γ=3/2, σ=1, d=30 and 60 extrapolated",
            lambda: _printed_scratch(1.5, 1.0),
            extrapolated(_fitted, 1.5, 30, 0.0, 1.0, 4_000),
            note="seen: 12 %, as extrapolation in size triples the error",
            effect=0.25,
        ),
        Claim(
            f"{PAPER}/T3.6-over/ours",
            f"{statement} = σ²d/(n-d-1), n ≥ d+2",
            f"{source}, sharpened",
            "n=26, d=20, σ=1",
            lambda: float(risks.scratch_risk(26, 20, 1.0)),
            above,
        ),
    ]


def _linear_transfer_claims() -> list[Claim]:
    n, d, theta, sigma = 8, 20, pi / 4, 0.5
    at = f"n={n}, d={d}, θ=π/4, σ={sigma}"

    def last_layer_gap(key: Array, quick: bool) -> Estimate:
        """Time 40 fits beta_s; the other features, of strength alpha^2, would need 1/alpha^2."""
        del quick
        alpha, (key_weights, key_data) = 1e-3, jax.random.split(key)
        sample = problems.draw(key_data, 24, 40, pi / 4, 0.8)
        weights = networks.small_weights(key_weights, 40, 2, alpha)
        pretrained = networks.pretrain(weights, sample.beta_s, 0.05, 10_000)
        trained = networks.linear_transfer(pretrained.weights, sample.x, sample.y, 0.02, 2_000)
        gap = jnp.linalg.norm(networks.predictor(trained.weights) - _Transferred()(sample))
        return Estimate(float(gap), tolerance=alpha)

    return [
        Claim(
            f"{PAPER}/T3.7/exact",
            "E R_lt = sin²θ + (σ²+sin²θ)/(n-2), n > 2",
            f"{PAPER} Thm 3.7, eq. (12), p. 7",
            at,
            lambda: float(risks.linear_transfer_risk(n, theta, sigma)),
            mean_risk(_Transferred(), n, d, theta, sigma, 40_000),
        ),
        Claim(
            f"{PAPER}/T3.7/limit",
            "training the last layer of a pretrained network refits the scale of β_s alone",
            f"{PAPER} Thms 3.4 and 3.7, p. 6",
            "d=40, n=24, L=2, α=0.001, gradient descent",
            lambda: 0.0,
            last_layer_gap,
            note="tolerance α",
        ),
        Claim(
            f"{PAPER}/eq13/ours",
            "T_lt = E R_sc - E R_lt, with both at finite n, d",
            f"{PAPER} eq. (13), p. 8, corrected",
            "n=10, d=20, θ=3π/8, σ=0.2",
            lambda: float(risks.transferability("linear", 10, 20, 3 * pi / 8, 0.2)),
            mean_risk(_Transferred(), 10, 20, 3 * pi / 8, 0.2, 20_000, _fitted),
        ),
    ]


def _boundary_claims() -> list[Claim]:
    theta, sigma = 3 * pi / 8, 0.2
    edge = risks.linear_transfer_boundary

    def negative_length(key: Array, quick: bool) -> Estimate:
        """Length of {γ < 1: T < 0} by counting on a scan: error at most two steps."""
        del key, quick
        steps = 20_000
        gamma = (jnp.arange(steps) + 0.5) / steps
        hurts = risks.transferability_limit("linear", gamma, theta, sigma) < 0
        return Estimate(float(hurts.mean()), tolerance=2 / steps)

    noise, obtuse = 0.5, 0.6 * pi

    def least(theta: float) -> Simulate:
        """T_lt where (13) is least in γ < 1."""
        return extrapolated(_Transferred(), 1 - noise, 40, theta, noise, 3_000, _fitted)

    return [
        Claim(
            f"{PAPER}/eq13-interval/reading",
            "linear transfer hurts for γ ∈ (γ₋, γ₊): length of the interval",
            f"{PAPER} after eq. (13), p. 8, corrected",
            "θ=3π/8, σ=0.2, scan of γ < 1; the roots are printed in the other order",
            lambda: float(edge(theta, sigma).upper - edge(theta, sigma).lower),
            negative_length,
        ),
        Claim(
            f"{PAPER}/eq13-lower/limit",
            "T_lt → 0 at γ = γ₋",
            f"{PAPER} after eq. (13), p. 8",
            "γ=γ₋(θ, σ)=1/4, σ=0.5, d=80 and 160 extrapolated",
            lambda: 0.0,
            extrapolated(_Transferred(), 0.25, 80, _edge_angle(0.25, 0.5), 0.5, 1_000, _fitted),
        ),
        Claim(
            f"{PAPER}/eq13-angle/limit",
            "σ < 1: from θ = arccos(1-σ) to π/2 some γ < 1 hurts; at θ = arccos(1-σ) min T → 0",
            f"{PAPER} after eq. (13), p. 8",
            "σ=0.5, θ=arccos(1-σ)=π/3, γ=1-σ, d=40 and 80 extrapolated",
            lambda: 0.0,
            least(acos(1 - noise)),
        ),
        Claim(
            f"{PAPER}/eq13-angle/ours",
            "σ < 1: T_lt → cos²θ - (1-σ)² at the worst γ < 1: it hurts iff |cos θ| < 1-σ",
            f"{PAPER} after eq. (13), for angles beyond π/2 too",
            "σ=0.5, θ=0.6π, γ=1-σ, d=40 and 80 extrapolated",
            lambda: cos(obtuse) ** 2 - (1 - noise) ** 2,
            least(obtuse),
            note="seen: .05, a difference of risks of order 1",
            effect=0.05,
        ),
    ]


def _edge_angle(gamma: float, sigma: float) -> float:
    """theta at which gamma is a boundary: cos^2 = gamma - gamma sigma^2 / (1 - gamma)."""
    return acos(sqrt(gamma - gamma * sigma**2 / (1 - gamma)))


def _ridge_claims() -> list[Claim]:
    n, d, theta, sigma, ridge = 10, 12, pi / 4, 0.5, 0.05
    best_at = (10, 12, 3 * pi / 8, 0.2)
    n_best, _, theta_best, sigma_best = best_at
    best = (sigma_best**2 + sin(theta_best) ** 2) / (n_best * cos(theta_best) ** 2)

    def gain() -> float:
        n, _, theta, sigma = best_at
        at = partial(risks.linear_transfer_risk, n, theta, sigma)
        return float(at() - at(best))

    paired = mean_risk(_Transferred(best), *best_at, 20_000, _Transferred())
    finite = mean_risk(_Transferred(ridge), n, d, theta, sigma, 40_000)
    return [
        Claim(
            f"{PAPER}/T3.8/limit",
            "E R_lt with ridge → 1 - cos²θ (1+2λ)/(1+λ)²",
            f"{PAPER} Thm 3.8, eq. (15), p. 8",
            f"θ=π/4, σ={sigma}, λ={ridge}, n=100 and 200 extrapolated",
            lambda: float(risks.linear_transfer_limit(theta, ridge)),
            extrapolated(_Transferred(ridge), 50.0, 2, theta, sigma, 20_000),
        ),
        Claim(
            f"{PAPER}/T3.8/exact",
            "E R_lt = sin²θ + cos²θ E[k²/(u+k)²] + (σ²+sin²θ) E[u/(u+k)²], u ~ χ²_n, k = nλ",
            f"{PAPER} Thm 3.8, eq. (128), p. 23",
            f"n={n}, θ=π/4, σ={sigma}, λ={ridge}",
            lambda: float(risks.linear_transfer_risk(n, theta, sigma, ridge)),
            finite,
        ),
        Claim(
            f"{PAPER}/T3.8-monotone/limit",
            "ridge never lowers the risk of linear transfer: E[R(0) - R(λ)] → -cos²θ λ²/(1+λ)²",
            f"{PAPER} after Thm 3.8, pp. 9, 25",
            "θ=3π/8, σ=0.2, λ=1/2, n=100 and 200 extrapolated",
            lambda: -((cos(3 * pi / 8) / 3) ** 2),
            extrapolated(_Transferred(0.5), 50.0, 2, 3 * pi / 8, 0.2, 20_000, _Transferred()),
            note="seen: .002, a difference of risks of order 1",
            effect=0.002,
        ),
        Claim(
            f"{PAPER}/T3.8-monotone/ours",
            "at finite n some ridge helps: E[R(0) - R(λ*)] > 0 at λ* = (σ²+sin²θ)/(n cos²θ)",
            f"{PAPER} Thm 3.8, p. 8, sharpened",
            f"n=10, θ=3π/8, σ=0.2, λ*={best:.3f}",
            gain,
            paired,
            note="seen: .01, a difference of risks of order 1",
            effect=0.01,
        ),
    ]


def _fine_tuning_claims() -> list[Claim]:
    claims = []
    for depth, alpha in ((2, 1e-3), (3, 1e-2)):
        at = f"d=40, n=24, θ=π/4, σ=0.8, L={depth}, α={alpha}, gradient descent"
        claims += [
            Claim(
                f"{PAPER}/T3.9-estimator-L{depth}/printed",
                "β_ft = X⁺y + (I-P) β_s: distance of the trained network from it",
                f"{PAPER} eq. (142), p. 25",
                at,
                lambda: 0.0,
                network_gap(_AS_PRINTED, depth, alpha),
                note="the later layers rescale the frozen component",
            ),
            Claim(
                f"{PAPER}/T3.9-estimator-L{depth}/corrected",
                "β_ft = X⁺y + c (I-P) β_s, c = N^(1-1/L), N² = |X⁺y|² + c²|(I-P)β_s|²",
                f"{PAPER} eq. (142), p. 25, corrected",
                at,
                lambda: 0.0,
                network_gap(_FineTuned(depth), depth, alpha),
                note="step size extrapolated to 0; tolerance 4e-4",
            ),
        ]
    gamma, theta, sigma = 0.5, pi / 4, 1.0
    sizes = "d=40 and 80 extrapolated"
    for depth in (2, 3):
        at = f"γ=1/2, θ=π/4, σ=1, L={depth}, {sizes}"
        simulated = _fine_tuning_gain(depth, theta, sigma)
        claims += [
            Claim(
                f"{PAPER}/eq17-L{depth}/printed",
                "T_ft = E R_sc - E R_ft = (1-γ)(2cos θ - 1)",
                f"{PAPER} Thm 3.9, eqs. (16), (17), p. 9",
                at,
                lambda: (1 - gamma) * (2 * cos(theta) - 1),
                simulated,
                note="right for σ = 0 only",
            ),
            Claim(
                f"{PAPER}/eq17-L{depth}/corrected",
                "T_ft → (1-γ) c (2cos θ - c)",
                f"{PAPER} Thm 3.9, eqs. (16), (17), p. 9, corrected",
                at,
                partial(_gain, gamma, theta, sigma, depth),
                simulated,
                note="seen: .05, a difference of risks of order 1",
                effect=0.05,
            ),
        ]
    # cos θ = c/2, where for two layers c⁴ = (1-γ) c² + γ + γσ²/(1-γ)
    fitted, unseen = gamma + gamma * sigma**2 / (1 - gamma), 1 - gamma
    edge = acos(sqrt((unseen + sqrt(unseen**2 + 4 * fitted)) / 2) / 2)
    claims += [
        Claim(
            f"{PAPER}/eq17-noiseless/limit",
            "T_ft → (1-γ)(2cos θ - 1) when σ = 0",
            f"{PAPER} Thm 3.9, eqs. (16), (17), p. 9",
            f"γ=1/2, θ=π/4, σ=0, L=2, {sizes}",
            lambda: (1 - gamma) * (2 * cos(theta) - 1),
            _fine_tuning_gain(2, theta, 0.0),
            note="seen: .05, a difference of risks of order 1",
            effect=0.05,
        ),
        Claim(
            f"{PAPER}/eq17-boundary/printed",
            "fine-tuning neither helps nor hurts at θ = π/3: T_ft = 0",
            f"{PAPER} after eq. (17), p. 10",
            f"γ=1/2, σ=1, L=2, {sizes}",
            lambda: 0.0,
            _fine_tuning_gain(2, pi / 3, sigma),
            note="the sign of T_ft depends on γ, σ and L",
        ),
        Claim(
            f"{PAPER}/eq17-boundary/corrected",
            "fine-tuning neither helps nor hurts at cos θ = c/2: T_ft → 0",
            f"{PAPER} after eq. (17), p. 10, corrected",
            f"γ=1/2, σ=1, L=2, θ={edge * 180 / pi:.1f}°, {sizes}",
            lambda: 0.0,
            _fine_tuning_gain(2, edge, sigma),
        ),
        Claim(
            f"{PAPER}/T3.9-over/exact",
            "from n = d on fine-tuning forgets the source: E R_ft = E R_sc",
            f"{PAPER} Thm 3.9, p. 9, γ ≥ 1",
            "n=26, d=20, θ=π/2, σ=1, L=3",
            lambda: float(risks.scratch_risk(26, 20, 1.0)),
            mean_risk(_FineTuned(3), 26, 20, pi / 2, 1.0, 20_000),
        ),
    ]
    return claims


def _gain(gamma: float, theta: float, sigma: float, depth: int) -> float:
    return float(risks.transferability_limit("fine_tune", gamma, theta, sigma, depth=depth))


def _fine_tuning_gain(depth: int, theta: float, sigma: float) -> Simulate:
    """Paired E[R_sc - R_ft] at gamma = 1/2: the noise that both share cancels draw by draw."""
    return extrapolated(_FineTuned(depth), 0.5, 40, theta, sigma, 5_000, _fitted)


CLAIMS: tuple[Claim, ...] = (
    *_scratch_claims(),
    *_linear_transfer_claims(),
    *_boundary_claims(),
    *_ridge_claims(),
    *_fine_tuning_claims(),
)
