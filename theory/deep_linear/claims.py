"""features-are-fate (arXiv 2410.08194), Section 3: as printed, and as true.

Means are over independent Gaussian data sets (`regressions`); networks are trained by gradient
descent (`networks`). Rows of fine-tuning that average its estimator over data say so: their
simulator has the estimator's c, in closed form, and no formula of the mean. `flow_claims` has
networks in its place.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import acos, cos, pi, sin, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate, Simulate, compiled
from theory.deep_linear import networks, risk_domains, risks
from theory.deep_linear.regressions import (
    AVERAGED,
    Fit,
    Limit,
    Setting,
    fine_tuned,
    least_squares,
    limit_risk,
    mean_risk,
    one_sample,
    row,
    transferred,
)

NOISY = Setting(1, 40, 0.0, 1.5)
LABELS = 16  # of the same inputs, where the noise of labels is most of the error
DIFFERENCE = "seen: .05, a difference of risks of order 1"

# --- trained networks -----------------------------------------------------------------------------

ONE = Setting(24, 40, pi / 4, 0.8)  # the data set on which networks are trained


# Compiled whole: operation by operation it takes longer to compile.
small_weights = jax.jit(networks.small_weights, static_argnums=(1, 2))


def one_risk(fit: Fit) -> float:
    """Computes the risk of a fit to the data set of `ONE`."""
    x, y = one_sample(ONE)
    return float(np.sum((fit(x[None], y[None, :, None]) - ONE.target()) ** 2))


def network_risk(depth: int, alpha: float, tune: Callable[..., networks.Trained]) -> Simulate:
    """Builds the simulator of the risk of a network that was pretrained, then tuned on `ONE`.

    Gradient descent at two rates is extrapolated to gradient flow, 2 beta(rate/2) - beta(rate).

    Args:
      depth: Number of layers.
      alpha: Size of the initial weights.
      tune: Maps weights, inputs, labels and rate to the tuned network.

    Returns:
      The simulator; its tolerance is rate^2 + alpha.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick  # one trajectory either way
        source, *data = map(jnp.asarray, (np.eye(ONE.d)[0], *one_sample(ONE)))
        weights = small_weights(key, ONE.d, depth, alpha)

        def beta(rate: float) -> np.ndarray:
            pretrained = networks.pretrain(weights, source, rate, round(500 / rate))
            tuned = tune(pretrained.weights, *data, rate).weights
            return reduce(np.matmul, map(np.asarray, tuned))

        rate = 0.04
        flow = 2 * beta(rate / 2) - beta(rate)
        risk = float(np.sum((flow - ONE.target()) ** 2))
        return Estimate(risk, tolerance=rate**2 + alpha)

    return simulate


def tuned_for(
    train: Callable[..., networks.Trained], time: float
) -> Callable[..., networks.Trained]:
    """Returns training for a time, whatever the rate."""
    return lambda weights, x, y, rate: train(weights, x, y, rate, round(time / rate))


# --- Theorems 3.6 and 3.7, eq. (13) ---------------------------------------------------------------


def _scratch_claims() -> list[Claim]:
    source = "Thm 3.6, eq. (10), p. 6"
    claims = []
    for name, law, sizes, draws, finite, at in (
        (
            "under",
            "γ < 1: E R → ((1-γ)² + γσ²)/(1-γ)",
            Limit(0.5, 40, 0.0, 1.0),
            2_500,
            "n ≤ d-2: E R = 1 - n/d + σ²n/(d-n-1)",
            Setting(10, 20, 0.0, 1.0),
        ),
        (
            "over",
            "γ > 1: E R → σ²/(γ-1)",
            Limit(1.5, 30, 0.0, 1.0),
            5_000,
            "n ≥ d+2: E R = σ²d/(n-d-1)",
            Setting(26, 20, 0.0, 1.0),
        ),
    ):
        claims += [
            row(
                f"T3.6-{name}/limit",
                law,
                source,
                sizes,
                partial(risks.scratch_limit, sizes.load, sizes.sigma),
                limit_risk(least_squares, sizes, draws, labels=LABELS),
            ),
            row(
                f"T3.6-{name}/ours",
                finite,
                f"{source}, at finite n and d",
                at,
                partial(compiled, risks.scratch_risk, at.n, at.d, at.sigma),
                mean_risk(least_squares, at, 20_000),
            ),
        ]
    return claims


def _first_sample(key: Array, quick: bool) -> Estimate:
    """Slope of the risk in γ at its start: d (E R - 1) with one sample; E R = 1 without."""
    risk = mean_risk(least_squares, NOISY, 40_000)(key, quick)
    return Estimate(NOISY.d * (risk.value - 1), stderr=NOISY.d * (risk.stderr or 0.0))


def _descent_claims() -> list[Claim]:
    said = partial(row, source="after Thm 3.6, p. 6", domain=NOISY, simulate=_first_sample)
    slope = NOISY.sigma**2 * NOISY.d / (NOISY.d - 2) - 1
    return [
        said(
            "T3.6-descent/printed",
            "γ < 1: the risk first decreases: its slope in γ, from no sample to one, is < 0",
            predict=0.0,
            relation="<=",
            note="right for σ < 1 only",
            attack=risk_domains.DESCENT_PRINTED,
        ),
        said(
            "T3.6-descent/corrected",
            "γ < 1: the slope in γ, from no sample to one, is σ²d/(d-2) - 1: < 0 iff σ² < 1 - 2/d",
            predict=slope,
            note="seen: .15, a tenth of the slope",
            effect=0.15,
        ),
    ]


def _linear_transfer_claims() -> list[Claim]:
    at, both = Setting(8, 20, pi / 4, 0.5), Setting(10, 20, 3 * pi / 8, 0.2)
    alpha = 1e-3
    return [
        row(
            "T3.7/exact",
            "E R_lt = sin²θ + (σ²+sin²θ)/(n-2); finite for n > 2",
            "Thm 3.7, eq. (12), p. 7",
            at,
            partial(compiled, risks.linear_transfer_risk, at.n, at.theta, at.sigma),
            mean_risk(transferred(), at, 40_000),
        ),
        row(
            "T3.7/limit",
            "α → 0: the last layer of a pretrained network refits b β_s, b = β_sᵀXᵀy/|Xβ_s|²: risk",
            "Thm 3.7, eqs. (105)-(109), p. 22",
            f"{ONE}, L=2, α={alpha}, tuned for time 40",
            lambda: one_risk(transferred()),
            network_risk(2, alpha, tuned_for(networks.linear_transfer, 40)),
            note="tolerance rate² + α; features of strength α² would learn in a time of 1/α²",
        ),
        row(
            "eq13/ours",
            "T_lt = E R_sc - E R_lt, with both at finite n, d",
            "eq. (13), p. 8, at finite n and d",
            both,
            partial(compiled, partial(risks.transferability, "linear"), *both),
            mean_risk(transferred(), both, 20_000, least_squares),
        ),
    ]


def _diagram_claim(
    name: str,
    statement: str,
    at: Limit,
    predict: float | Callable[[], float] | None = None,
    effect: float = 0.05,
    draws: int = 2_000,
    labels: int = 1,
) -> Claim:
    """T_lt on data, beside eq. (13) unless there is another prediction."""
    printed = partial(risks.transferability_limit, "linear", at.load, at.theta, at.sigma)
    return row(
        f"eq13-{name}",
        statement,
        "eq. (13) and after, p. 8",
        at,
        printed if predict is None else predict,
        limit_risk(transferred(), at, draws, least_squares, labels),
        note=f"seen: {effect:g}, a difference of risks of order 1",
        effect=effect,
    )


def _noisy_target_claims() -> list[Claim]:
    """σ > 1, at the largest angle, where transfer is worth least."""
    wide, few = Limit(0.3, 40, pi / 2, 1.2), Setting(8, 100, pi / 2, 1.2)
    said = "γ < 1, σ > 1 (SNR < 1): pretraining is always beneficial"
    return [
        row(
            "eq13-snr/limit",
            f"{said}: T_lt > 0, here at θ = π/2",
            "after eq. (13), p. 8",
            wide,
            0.0,
            limit_risk(transferred(), wide, 2_000, least_squares, LABELS),
            relation=">=",
            note="the paragraph is on γ < 1: beyond γ = 1 + σ²/sin²θ transfer is negative",
            attack=risk_domains.SNR,
        ),
        row(
            "eq13-snr/printed",
            f"{said}: T_lt > 0 at every n and d",
            "after eq. (13), p. 8, at finite n and d",
            few,
            0.0,
            mean_risk(transferred(), few, 4_000, least_squares),
            relation=">=",
            note="right in the limit: the refit of few samples costs (σ²+sin²θ)/(n-2)",
            attack=risk_domains.SNR_PRINTED,
        ),
    ]


def _diagram_claims() -> list[Claim]:
    below, above = "((1-γ)² + γσ²)/(1-γ) - sin²θ", "σ²/(γ-1) - sin²θ"
    # γ± = ½[(1+cos²θ-σ²) ± √((1+cos²θ-σ²)² - 4cos²θ)]
    cos2, sigma = 1 / 6, 0.5
    theta, middle = acos(sqrt(cos2)), (1 + cos2 - sigma**2) / 2
    half = sqrt(middle**2 - cos2)
    acute, obtuse, noise = pi / 4, 0.6 * pi, 0.5
    edge = 1 + noise**2 / sin(acute) ** 2
    return [
        _diagram_claim("under/limit", f"γ < 1: T_lt → {below}", Limit(0.5, 40, 3 * pi / 8, 0.2)),
        _diagram_claim("over/limit", f"γ > 1: T_lt → {above}", Limit(2.5, 20, acute, noise)),
        _diagram_claim(
            "interval/reading",
            f"T_lt → {below} < 0 between γ₋ and γ₊, printed in the other order",
            Limit(0.4, 60, theta, sigma),
        ),
        _diagram_claim(
            "lower/limit", "T_lt → 0 at γ = γ₋", Limit(middle - half, 60, theta, sigma), 0.0
        ),
        _diagram_claim(
            "upper/limit",
            "T_lt → 0 at γ = γ₊",
            Limit(middle + half, 30, theta, sigma),
            0.0,
            draws=4_000,
            labels=LABELS,
        ),
        _diagram_claim(
            "angle/limit",
            "T_lt < 0 somewhere if θ > arccos(1-σ), σ < 1; T_lt → 0 at θ = arccos(1-σ), γ = 1-σ",
            Limit(1 - noise, 40, acos(1 - noise), noise),
            0.0,
            draws=4_000,
        ),
        _diagram_claim(
            "angle/ours",
            "σ < 1: the least T_lt over γ < 1 is cos²θ - (1-σ)², < 0 iff |cos θ| < 1-σ",
            Limit(1 - noise, 40, obtuse, noise),
            cos(obtuse) ** 2 - (1 - noise) ** 2,
            draws=4_000,
        ),
        _diagram_claim(
            "over-edge/limit",
            "γ > 1: T_lt → 0 at γ - 1 = σ²/sin²θ",
            Limit(edge, 20, acute, noise),
            0.0,
            draws=4_000,
            labels=LABELS,
        ),
        _diagram_claim(
            "noiseless/limit",
            "σ = 0: T_lt < 0 for cos²θ < γ < 1; T_lt → 0 at γ = cos²θ",
            Limit(cos(acute) ** 2, 40, acute, 0.0),
            0.0,
        ),
        _diagram_claim(
            "anomalous/reading",
            f"T_lt → {below} > 0 near γ = 1 even at θ = π/2",
            Limit(0.8, 40, pi / 2, noise),
            effect=0.1,
            draws=4_000,
            labels=LABELS,
        ),
    ]


# --- Theorem 3.8 ----------------------------------------------------------------------------------


def _ridge_claims() -> list[Claim]:
    ridge, at, many = 0.05, Setting(10, 12, pi / 4, 0.5), Limit(50.0, 2, pi / 4, 0.5)
    large, steep = 0.5, Limit(50.0, 2, 3 * pi / 8, 0.2)
    small = Setting(10, 12, 3 * pi / 8, 0.2)
    best = (small.sigma**2 + sin(small.theta) ** 2) / (small.n * cos(small.theta) ** 2)

    def gain() -> Array:
        of = partial(risks.linear_transfer_risk, small.n, small.theta, small.sigma)
        return of() - of(best)

    return [
        row(
            "T3.8/limit",
            "E R_lt with ridge → 1 - cos²θ (1+2λ)/(1+λ)²",
            "Thm 3.8, eq. (15), p. 8",
            f"{many}, λ={ridge}",
            partial(risks.linear_transfer_limit, many.theta, ridge),
            limit_risk(transferred(ridge), many, 20_000),
        ),
        row(
            "T3.8/exact",
            "E R_lt = 1 + cos²θ I₁(n+2, λ) + (sin²θ+σ²) I₁(n, λ) - 2cos²θ I₂(n, λ), "
            "I₁(m, λ) = E[u^((m-n+2)/2)/(u+nλ)²], I₂(m, λ) = E[u^((m-n+2)/2)/(u+nλ)], u ~ χ²_n",
            "Thm 3.8, eqs. (128)-(130), pp. 23-24",
            f"{at}, λ={ridge}",
            partial(compiled, risks.linear_transfer_risk, at.n, at.theta, at.sigma, ridge),
            mean_risk(transferred(ridge), at, 40_000),
        ),
        row(
            "T3.8-monotone/limit",
            "ridge never lowers the risk: E[R(0) - R(λ)] → -cos²θ λ²/(1+λ)², so λ* = 0",
            "after Thm 3.8, p. 9, and eq. (141), p. 25",
            f"{steep}, λ={large}",
            -((cos(steep.theta) * large / (1 + large)) ** 2),
            limit_risk(transferred(large), steep, 20_000, transferred()),
            note="seen: .002, a difference of risks of order 1",
            effect=0.002,
        ),
        row(
            "T3.8-monotone/ours",
            "at finite n some ridge helps: E[R(0) - R(λ*)] > 0 at λ* = (σ²+sin²θ)/(n cos²θ)",
            "Thm 3.8, eq. (128), p. 23, minimised",
            f"{small}, λ*={best:.3f}",
            gain,
            mean_risk(transferred(best), small, 40_000, transferred()),
            note="seen: .01, a difference of risks of order 1",
            effect=0.01,
        ),
    ]


# --- Theorem 3.9 ----------------------------------------------------------------------------------


def _fine_tuning_claims() -> list[Claim]:
    claims = []
    for depth, alpha in ((2, 1e-3), (3, 1e-2)):
        trained = network_risk(depth, alpha, tuned_for(networks.fine_tune, 800))
        claims += [
            row(
                f"T3.9-estimator-L{depth}/{status}",
                f"α → 0, t → ∞: β_ft = {limit}: risk of a trained network",
                "Thm 3.9, eq. (142), p. 25",
                f"{ONE}, L={depth}, α={alpha}, gradient descent",
                lambda fit=fit: one_risk(fit),
                trained,
                note="the later layers rescale what W_1 keeps; tolerance rate² + α",
            )
            for status, limit, fit in (
                ("printed", "X⁺y + (I-P) β_s", fine_tuned(1)),
                (
                    "corrected",
                    "X⁺y + c (I-P) β_s, c = N^(1-1/L), N² = |X⁺y|² + c²|(I-P)β_s|²",
                    fine_tuned(depth),
                ),
            )
        ]

    def gain(at: Limit, depth: int, draws: int = 4_000) -> Simulate:
        """Paired E[R_sc - R_ft]: the noise that both share cancels draw by draw."""
        return limit_risk(fine_tuned(depth), at, draws, least_squares)

    def printed(at: Limit) -> float:
        return (1 - at.load) * (2 * cos(at.theta) - 1)

    noisy = Limit(0.5, 40, pi / 4, 1.0)
    for depth in (2, 3):
        simulated = gain(noisy, depth)
        claims += [
            row(
                f"eq17-L{depth}/printed",
                "γ ≤ 1: T_ft = (γ-1)(1 - 2cos θ)",
                "Thm 3.9, eqs. (16), (17), p. 9",
                f"{noisy}, L={depth}, {AVERAGED}",
                printed(noisy),
                simulated,
                note="right for σ = 0 only",
            ),
            row(
                f"eq17-L{depth}/corrected",
                "γ < 1: T_ft → (1-γ) c (2cos θ - c), c = N^(1-1/L), N² = γ + γσ²/(1-γ) + (1-γ) c²",
                "Thm 3.9, eqs. (16), (17), p. 9, corrected",
                f"{noisy}, L={depth}, {AVERAGED}",
                partial(
                    risks.transferability_limit,
                    "fine_tune",
                    noisy.load,
                    noisy.theta,
                    noisy.sigma,
                    depth=depth,
                ),
                simulated,
                note=DIFFERENCE,
                effect=0.05,
            ),
        ]
    quiet, third = noisy._replace(sigma=0.0), noisy._replace(theta=pi / 3)
    # cos θ = c/2, where for two layers c⁴ = (1-γ) c² + γ + γσ²/(1-γ)
    load, unseen = noisy.load, 1 - noisy.load
    fitted = load + load * noisy.sigma**2 / unseen
    edge = noisy._replace(theta=acos(sqrt((unseen + sqrt(unseen**2 + 4 * fitted)) / 2) / 2))
    over = Setting(26, 20, pi / 2, 1.0)
    after = "after eq. (17), p. 10"
    return [
        *claims,
        row(
            "eq17-noiseless/limit",
            "σ = 0, γ ≤ 1: T_ft → (γ-1)(1 - 2cos θ)",
            "Thm 3.9, eqs. (16), (17), p. 9",
            f"{quiet}, L=2, {AVERAGED}",
            printed(quiet),
            gain(quiet, 2, draws=6_000),
            note="seen: .025, a difference of risks of order 1",
            effect=0.025,
        ),
        row(
            "eq17-boundary/printed",
            "T_ft > 0 for θ < π/3, T_ft < 0 for θ > π/3, so T_ft = 0 at θ = π/3",
            after,
            f"{third}, L=2, {AVERAGED}",
            0.0,
            gain(third, 2, draws=2_000),
            note="the sign of T_ft depends on γ, σ and L",
        ),
        row(
            "eq17-boundary/corrected",
            "T_ft → 0 at cos θ = c/2",
            f"{after}, corrected",
            f"{edge}, L=2, {AVERAGED}",
            0.0,
            gain(edge, 2),
        ),
        row(
            "T3.9-over/exact",
            "γ > 1: E R_ft = E R_sc, here σ²d/(n-d-1)",
            "Thm 3.9, eq. (16), p. 9",
            f"{over}, L=3, {AVERAGED}",
            partial(risks.scratch_risk, over.n, over.d, over.sigma),
            mean_risk(fine_tuned(3), over, 20_000),
        ),
    ]


CLAIMS: tuple[Claim, ...] = (
    *_scratch_claims(),
    *_descent_claims(),
    *_linear_transfer_claims(),
    *_diagram_claims(),
    *_noisy_target_claims(),
    *_ridge_claims(),
    *_fine_tuning_claims(),
)
