"""features-are-fate (arXiv 2410.08194), Section 3, as printed and corrected.

Means are over independent Gaussian data sets (`regressions`). Networks are trained by gradient
descent (`networks`). Some claims on fine-tuning average its estimator over data, and their domains
state this. Their simulator uses the estimator's c in closed form, but no formula for the mean.
`flow_claims` trains networks instead.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import acos, cos, pi, sin, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, Simulate, compiled
from theory.deep_linear import networks, risk_domains, risks
from theory.deep_linear.regressions import (
    AVERAGED,
    Fit,
    Limit,
    Setting,
    claim,
    fine_tuned,
    least_squares,
    limit_risk,
    mean_risk,
    one_sample,
    transferred,
)

LABELS = 16  # of the same inputs, where the noise of labels is most of the error

# --- trained networks -----------------------------------------------------------------------------

ONE = Setting(24, 40, pi / 4, 0.8)  # the data set on which networks are trained


# As one program it compiles faster than operation by operation.
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
    """Returns training for a fixed time, for any rate."""
    return lambda weights, x, y, rate: train(weights, x, y, rate, round(time / rate))


# --- Theorems 3.6 and 3.7, eq. (13) ---------------------------------------------------------------


for _name, _limit, _finite in (
    (
        "under",
        (Limit(0.5, 40, 0.0, 1.0), "load < 1: E R → ((1-load)² + load σ²)/(1-load)", 2_500),
        (Setting(10, 20, 0.0, 1.0), "n ≤ d-2: E R = 1 - n/d + σ²n/(d-n-1)"),
    ),
    (
        "over",
        (Limit(1.5, 30, 0.0, 1.0), "load > 1: E R → σ²/(load-1)", 5_000),
        (Setting(26, 20, 0.0, 1.0), "n ≥ d+2: E R = σ²d/(n-d-1)"),
    ),
):

    @claim(f"T3.6-{_name}/limit", each=(_limit,))
    def _(at, law, draws):
        """{law}

        Source: Thm 3.6, eq. (10), p. 6
        Domain: {at}
        """
        predicted = risks.scratch_limit(load=at.load, sigma=at.sigma)
        return predicted, limit_risk(least_squares, at, draws, labels=LABELS)

    @claim(f"T3.6-{_name}/ours", each=(_finite,))
    def _(at, law):
        """{law}

        Source: Thm 3.6, eq. (10), p. 6, at finite n and d
        Domain: {at}
        """
        predicted = compiled(risks.scratch_risk, n=at.n, d=at.d, sigma=at.sigma)
        return predicted, mean_risk(least_squares, at, 20_000)


@claim("T3.6-descent/printed", "<=", attack=risk_domains.DESCENT_PRINTED)
def _printed_descent(at=Setting(1, 40, 0.0, 1.5)):
    """For load < 1 the risk first decreases. Its slope in load, from no sample to one, is < 0

    It is right for σ < 1 only.

    Source: after Thm 3.6, p. 6
    Domain: {at}
    """

    def slope(key: Array, quick: bool) -> Estimate:
        """d (E R - 1) with one sample; E R = 1 without."""
        risk = mean_risk(least_squares, at, 40_000)(key, quick)
        return Estimate(at.d * (risk.value - 1), stderr=at.d * (risk.stderr or 0.0))

    return 0.0, slope


@_printed_descent.beside("corrected", "=", effect=0.15)
def _(at):
    """For load < 1 the slope in load, from no sample to one, is σ²d/(d-2) - 1. It is < 0 iff σ² < 1
    - 2/d

    The test detects .15, a tenth of the slope.
    """
    return at.sigma**2 * at.d / (at.d - 2) - 1


@claim("T3.7/exact")
def _(at=Setting(8, 20, pi / 4, 0.5)):
    """E R_lt = sin²θ + (σ²+sin²θ)/(n-2), which is finite for n > 2

    Source: Thm 3.7, eq. (12), p. 7
    Domain: {at}
    """
    predicted = compiled(risks.linear_transfer_risk, n=at.n, theta=at.theta, sigma=at.sigma)
    return predicted, mean_risk(transferred(), at, 40_000)


@claim("T3.7/limit")
def _(one=ONE, alpha=1e-3):
    """As α → 0, the last layer of a pretrained network refits b β_s with b = β_sᵀXᵀy/|Xβ_s|². The
    risk is compared

    The tolerance is rate² + α. Features of strength α² would take a time of 1/α² to learn.

    Source: Thm 3.7, eqs. (105)-(109), p. 22
    Domain: {one}, L=2, α={alpha}, tuned for time 40
    """
    tuned = tuned_for(networks.linear_transfer, 40)
    return one_risk(transferred()), network_risk(2, alpha, tuned)


@claim("eq13/ours")
def _(at=Setting(10, 20, 3 * pi / 8, 0.2)):
    """T_lt = E R_sc - E R_lt, both at finite n and d

    Source: eq. (13), p. 8, at finite n and d
    Domain: {at}
    """
    predicted = compiled(partial(risks.transferability, "linear"), **at._asdict())
    return predicted, mean_risk(transferred(), at, 20_000, least_squares)


EQ13 = "eq. (13) and after, p. 8"


def _transfer(at: Limit) -> float:
    """T_lt by eq. (13)."""
    return float(
        risks.transferability_limit("linear", load=at.load, theta=at.theta, sigma=at.sigma)
    )


def _on_data(at: Limit, draws: int = 2_000, labels: int = 1) -> Simulate:
    """T_lt on data."""
    return limit_risk(transferred(), at, draws, least_squares, labels)


def _edges(cos2: float, sigma: float) -> tuple[float, float]:
    """load± = ½[(1+cos²θ-σ²) ± √((1+cos²θ-σ²)² - 4cos²θ)]."""
    middle = (1 + cos2 - sigma**2) / 2
    half = sqrt(middle**2 - cos2)
    return middle - half, middle + half


LOWER, UPPER = _edges(1 / 6, 0.5)
STEEP = acos(sqrt(1 / 6))


@claim("eq13-under/limit", effect=0.05)
def _(at=Limit(0.5, 40, 3 * pi / 8, 0.2)):
    """load < 1: T_lt → ((1-load)² + load σ²)/(1-load) - sin²θ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return _transfer(at), _on_data(at)


@claim("eq13-over/limit", effect=0.05)
def _(at=Limit(2.5, 20, pi / 4, 0.5)):
    """load > 1: T_lt → σ²/(load-1) - sin²θ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return _transfer(at), _on_data(at)


@claim("eq13-interval/reading", effect=0.05)
def _(at=Limit(0.4, 60, STEEP, 0.5)):
    """T_lt → ((1-load)² + load σ²)/(1-load) - sin²θ < 0 between load₋ and load₊, which are printed
    in the other order

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return _transfer(at), _on_data(at)


@claim("eq13-lower/limit", effect=0.05)
def _(at=Limit(LOWER, 60, STEEP, 0.5)):
    """T_lt → 0 at load = load₋

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return 0.0, _on_data(at)


@claim("eq13-upper/limit", effect=0.05)
def _(at=Limit(UPPER, 30, STEEP, 0.5)):
    """T_lt → 0 at load = load₊

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return 0.0, _on_data(at, 4_000, LABELS)


@claim("eq13-angle/limit", effect=0.05)
def _(at=Limit(0.5, 40, acos(0.5), 0.5)):
    """T_lt < 0 at some load if θ > arccos(1-σ), σ < 1. T_lt → 0 at θ = arccos(1-σ), load = 1-σ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return 0.0, _on_data(at, 4_000)


@claim("eq13-angle/ours", effect=0.05)
def _(at=Limit(0.5, 40, 0.6 * pi, 0.5)):
    """For σ < 1 the least T_lt over load < 1 is cos²θ - (1-σ)². It is < 0 iff |cos θ| < 1-σ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return cos(at.theta) ** 2 - (1 - at.sigma) ** 2, _on_data(at, 4_000)


@claim("eq13-over-edge/limit", effect=0.05)
def _(at=Limit(1 + 0.5**2 / sin(pi / 4) ** 2, 20, pi / 4, 0.5)):
    """For load > 1, T_lt → 0 at load = 1 + σ²/sin²θ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return 0.0, _on_data(at, 4_000, LABELS)


@claim("eq13-noiseless/limit", effect=0.05)
def _(at=Limit(cos(pi / 4) ** 2, 40, pi / 4, 0.0)):
    """For σ = 0, T_lt < 0 for cos²θ < load < 1. T_lt → 0 at load = cos²θ

    The test detects a difference of 0.05. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return 0.0, _on_data(at)


@claim("eq13-anomalous/reading", effect=0.1)
def _(at=Limit(0.8, 40, pi / 2, 0.5)):
    """T_lt → ((1-load)² + load σ²)/(1-load) - sin²θ > 0 near load = 1 even at θ = π/2

    The test detects a difference of 0.1. The risks are of order 1.

    Source: {EQ13}
    Domain: {at}
    """
    return _transfer(at), _on_data(at, 4_000, LABELS)


@claim("eq13-snr/limit", ">=", attack=risk_domains.SNR, overlooks="tightened")
def _(at=Limit(0.3, 40, pi / 2, 1.2)):
    """For load < 1 and σ > 1 (SNR < 1) pretraining always helps: T_lt > 0, here at θ = π/2

    The paragraph is on load < 1. Above load = 1 + σ²/sin²θ transfer hurts.

    Source: after eq. (13), p. 8
    Domain: {at}
    """
    # Transfer helps least at the largest angle.
    return 0.0, _on_data(at, labels=LABELS)


@claim("eq13-snr/printed", ">=", attack=risk_domains.SNR_PRINTED)
def _(at=Setting(8, 100, pi / 2, 1.2)):
    """For load < 1 and σ > 1 (SNR < 1) pretraining always helps: T_lt > 0 at every n and d

    It is right in the limit. At finite n the refit costs (σ²+sin²θ)/(n-2).

    Source: after eq. (13), p. 8, at finite n and d
    Domain: {at}
    """
    return 0.0, mean_risk(transferred(), at, 4_000, least_squares)


# --- Theorem 3.8 ----------------------------------------------------------------------------------


@claim("T3.8/limit")
def _(at=Limit(50.0, 2, pi / 4, 0.5), ridge=0.05):
    """E R_lt with ridge → 1 - cos²θ (1+2λ)/(1+λ)²

    Source: Thm 3.8, eq. (15), p. 8
    Domain: {at}, λ={ridge}
    """
    predicted = risks.linear_transfer_limit(theta=at.theta, ridge=ridge)
    return predicted, limit_risk(transferred(ridge), at, 20_000)


@claim("T3.8/exact")
def _(at=Setting(10, 12, pi / 4, 0.5), ridge=0.05):
    """E R_lt = 1 + cos²θ I₁(n+2, λ) + (sin²θ+σ²) I₁(n, λ) - 2cos²θ I₂(n, λ), I₁(m, λ) =
    E[u^((m-n+2)/2)/(u+nλ)²], I₂(m, λ) = E[u^((m-n+2)/2)/(u+nλ)], u ~ χ²_n

    Source: Thm 3.8, eqs. (128)-(130), pp. 23-24
    Domain: {at}, λ={ridge}
    """
    predicted = compiled(
        risks.linear_transfer_risk, n=at.n, theta=at.theta, sigma=at.sigma, ridge=ridge
    )
    return predicted, mean_risk(transferred(ridge), at, 40_000)


@claim("T3.8-monotone/limit", effect=0.002)
def _(at=Limit(50.0, 2, 3 * pi / 8, 0.2), ridge=0.5):
    """Ridge never lowers the risk, as E[R(0) - R(λ)] → -cos²θ λ²/(1+λ)². So λ* = 0

    The test detects a difference of .002. The risks are of order 1.

    Source: after Thm 3.8, p. 9, and eq. (141), p. 25
    Domain: {at}, λ={ridge}
    """
    gain = -((cos(at.theta) * ridge / (1 + ridge)) ** 2)
    return gain, limit_risk(transferred(ridge), at, 20_000, transferred())


SMALL = Setting(10, 12, 3 * pi / 8, 0.2)
BEST = (SMALL.sigma**2 + sin(SMALL.theta) ** 2) / (SMALL.n * cos(SMALL.theta) ** 2)


@claim("T3.8-monotone/ours", effect=0.01)
def _(at=SMALL, best=BEST):
    """At finite n some ridge helps, as E[R(0) - R(λ*)] > 0 at λ* = (σ²+sin²θ)/(n cos²θ)

    The test detects a difference of .01. The risks are of order 1.

    Source: Thm 3.8, eq. (128), p. 23, minimised
    Domain: {at}, λ*={best:.3f}
    """
    of = partial(risks.linear_transfer_risk, n=at.n, theta=at.theta, sigma=at.sigma)
    return of() - of(ridge=best), mean_risk(transferred(best), at, 40_000, transferred())


# --- Theorem 3.9 ----------------------------------------------------------------------------------


for _depth, _alpha in ((2, 1e-3), (3, 1e-2)):

    @claim("T3.9-estimator-L{depth}/printed", each=((_depth, _alpha),))
    def _printed_limit(depth, alpha, one=ONE):
        """As α → 0 and t → ∞, β_ft = X⁺y + (I-P) β_s. The risk of a trained network is compared

        The later layers rescale what W_1 keeps. The tolerance is rate² + α.

        Source: Thm 3.9, eq. (142), p. 25
        Domain: {one}, L={depth}, α={alpha}, gradient descent
        """
        tuned = tuned_for(networks.fine_tune, 800)
        return one_risk(fine_tuned(1)), network_risk(depth, alpha, tuned)

    @_printed_limit.beside("corrected")
    def _(depth):
        """As α → 0 and t → ∞, β_ft = X⁺y + c (I-P) β_s with c = N^(1-1/L), N² = |X⁺y|² +
        c²|(I-P)β_s|². The risk of a trained network is compared

        The later layers rescale what W_1 keeps. The tolerance is rate² + α.
        """
        return one_risk(fine_tuned(depth))


NOISY = Limit(0.5, 40, pi / 4, 1.0)


def _gain(at: Limit, depth: int, draws: int = 4_000) -> Simulate:
    """Simulates the paired mean E[R_sc - R_ft]. The noise that both share cancels draw by draw."""
    return limit_risk(fine_tuned(depth), at, draws, least_squares)


def _printed_gain(at: Limit) -> float:
    return (1 - at.load) * (2 * cos(at.theta) - 1)


for _depth in (2, 3):

    @claim("eq17-L{depth}/printed", each=((_depth,),))
    def _printed_tuning(depth, at=NOISY, averaged=AVERAGED):
        """For load ≤ 1, T_ft = (load-1)(1 - 2cos θ)

        It is right for σ = 0 only.

        Source: Thm 3.9, eqs. (16), (17), p. 9
        Domain: {at}, L={depth}, {averaged}
        """
        return _printed_gain(at), _gain(at, depth)

    @_printed_tuning.beside("corrected", effect=0.05)
    def _(depth, at):
        """For load < 1, T_ft → (1-load) c (2cos θ - c) with c = N^(1-1/L), N² = load + load
        σ²/(1-load) + (1-load) c²

        The test detects a difference of .05. The risks are of order 1.

        Source: Thm 3.9, eqs. (16), (17), p. 9, corrected
        """
        return risks.transferability_limit(
            "fine_tuning", load=at.load, theta=at.theta, sigma=at.sigma, depth=depth
        )


@claim("eq17-noiseless/limit", effect=0.025)
def _(at=NOISY._replace(sigma=0.0), averaged=AVERAGED):
    """For σ = 0 and load ≤ 1, T_ft → (load-1)(1 - 2cos θ)

    The test detects a difference of .025. The risks are of order 1.

    Source: Thm 3.9, eqs. (16), (17), p. 9
    Domain: {at}, L=2, {averaged}
    """
    return _printed_gain(at), _gain(at, 2, 6_000)


@claim("eq17-boundary/printed")
def _(at=NOISY._replace(theta=pi / 3), averaged=AVERAGED):
    """T_ft > 0 for θ < π/3, T_ft < 0 for θ > π/3, so T_ft = 0 at θ = π/3

    The sign of T_ft depends on load, σ and L.

    Source: after eq. (17), p. 10
    Domain: {at}, L=2, {averaged}
    """
    return 0.0, _gain(at, 2, 2_000)


def _edge(at: Limit) -> Limit:
    """Returns the limit at cos θ = c/2, where c⁴ = (1-load) c² + load + load σ²/(1-load)."""
    unseen = 1 - at.load
    fitted = at.load + at.load * at.sigma**2 / unseen
    return at._replace(theta=acos(sqrt((unseen + sqrt(unseen**2 + 4 * fitted)) / 2) / 2))


@claim("eq17-boundary/corrected")
def _(at=_edge(NOISY), averaged=AVERAGED):
    """T_ft → 0 at cos θ = c/2

    Source: after eq. (17), p. 10, corrected
    Domain: {at}, L=2, {averaged}
    """
    return 0.0, _gain(at, 2)


@claim("T3.9-over/exact")
def _(at=Setting(26, 20, pi / 2, 1.0), averaged=AVERAGED):
    """For load > 1, E R_ft = E R_sc, here σ²d/(n-d-1)

    Source: Thm 3.9, eq. (16), p. 9
    Domain: {at}, L=3, {averaged}
    """
    predicted = risks.scratch_risk(n=at.n, d=at.d, sigma=at.sigma)
    return predicted, mean_risk(fine_tuned(3), at, 20_000)
