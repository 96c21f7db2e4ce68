"""features-are-fate, Lemma 3.3 to Theorem 3.5 and Appendix B: how pretraining sparsifies features.

Simulations are gradient descent at two step sizes, extrapolated to gradient flow where an equality
is claimed. Initialisation: `networks.small_weights`, for which eq. (22) holds with lambda = 1.
"""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array

from theory import problems
from theory.claims import Claim, Estimate, Simulate
from theory.deep_linear import estimators, networks

PAPER = "features-are-fate"
D = 20
RATE = 0.02


def _features(weights: networks.Weights) -> Array:
    """Phi = W_1 ... W_{L-1}."""
    return reduce(jnp.matmul, weights[:-1])


def conserved(weights: networks.Weights) -> list[Array]:
    """Computes what gradient flow conserves, D_l = W_l^T W_l - W_{l+1} W_{l+1}^T (eq. 35).

    Args:
      weights: Weight matrices, first layer first.

    Returns:
      One matrix for each pair of neighbouring layers.
    """
    columns = [*weights[:-1], weights[-1][:, None]]
    return [a.T @ a - b @ b.T for a, b in pairwise(columns)]


def _pretrained(key: Array, depth: int, alpha: float, rate: float = RATE) -> networks.Weights:
    beta_s, _ = problems.tasks(D, 0.0)
    weights = networks.small_weights(key, D, depth, alpha)
    return networks.pretrain(weights, beta_s, rate, round(400 / rate)).weights


def _rank_one_error(key: Array, depth: int, alpha: float) -> float:
    """|Phi - beta_s v^T|_F at the nearest v, v = Phi^T beta_s (|beta_s| = 1)."""
    beta_s, _ = problems.tasks(D, 0.0)
    phi = _features(_pretrained(key, depth, alpha))
    return float(jnp.linalg.norm(phi - jnp.outer(beta_s, beta_s @ phi)))


def _order(depth: int, alpha: float) -> Simulate:
    """log2 of the fall of the rank-one error as alpha halves: its order in alpha."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        coarse, fine = (_rank_one_error(key, depth, a) for a in (alpha, alpha / 2))
        return Estimate(float(jnp.log2(coarse / fine)), tolerance=0.02)

    return simulate


def _remainder(key: Array, quick: bool) -> Estimate:
    """Largest |W_l - sigma u v^T|_F^2 / (alpha^2 (|Wbar_l|_F^2 - |Wbar_L|_F^2)) over layers."""
    del quick
    depth, alpha = 3, 0.05
    initial = networks.small_weights(key, D, depth, alpha)
    trained = _pretrained(key, depth, alpha)
    last = jnp.sum(initial[-1] ** 2)
    ratios = []
    for start, weight in zip(initial[:-1], trained[:-1], strict=True):
        tail = jnp.linalg.svd(weight, compute_uv=False)[1:]
        ratios.append(jnp.sum(tail**2) / (jnp.sum(start**2) - last))
    return Estimate(float(max(ratios)), tolerance=1e-6)


def _misalignment(key: Array, quick: bool) -> Estimate:
    """1 - (u_{l+1} . v_l)^2 for neighbouring layers, top singular vectors."""
    del quick
    weights = _pretrained(key, 3, 0.01)
    right = jnp.linalg.svd(weights[0])[2][0]
    left = jnp.linalg.svd(weights[1])[0][:, 0]
    return Estimate(1 - float(right @ left) ** 2, tolerance=0.01**2)


def _drift(key: Array, quick: bool) -> Estimate:
    """Largest entry of D_l(T) - D_l(0), extrapolated to zero step size."""
    del quick
    start = conserved(networks.small_weights(key, D, 3, 0.1))
    coarse, fine = (conserved(_pretrained(key, 3, 0.1, rate)) for rate in (RATE, RATE / 2))
    gaps = [jnp.abs(2 * f - c - s).max() for c, f, s in zip(coarse, fine, start, strict=True)]
    return Estimate(float(max(gaps)), tolerance=RATE**2)


def _worst_ratio(
    loss: Callable[[networks.Weights], Array],
    train: Callable[[networks.Weights, int], networks.Weights],
    weights: networks.Weights,
    exponent: float,
    rate: float,
) -> float:
    """max over times of L(t) / (L(0) e^{-exponent t}) along gradient descent."""
    start, worst, steps = loss(weights), 0.0, 25
    for k in range(1, 41):
        weights = train(weights, steps)
        bound = start * jnp.exp(-exponent * k * steps * rate)
        worst = max(worst, float(loss(weights) / bound))
    return worst


def _source_rate(key: Array, quick: bool) -> Estimate:
    """eq. (48) with lambda = 1, L = 2, alpha = 0.3."""
    del quick
    beta_s, _ = problems.tasks(D, 0.0)
    alpha, depth = 0.3, 2
    ratio = _worst_ratio(
        lambda w: problems.risk(networks.predictor(w), beta_s),
        lambda w, steps: networks.pretrain(w, beta_s, RATE, steps).weights,
        networks.small_weights(key, D, depth, alpha),
        2 * alpha ** (2 * (depth - 1)),
        RATE,
    )
    return Estimate(ratio, tolerance=0.01)


def _target_rate(normalised: bool) -> Simulate:
    """eqs. (87), (88), L = 2, lambda = alpha = 1: the part of the error that data can see."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        key_weights, key_data = jax.random.split(key)
        n, rate = 5, 0.002
        sample = problems.draw(key_data, n, D, 1.0, 0.5)
        fit = estimators.scratch_fit(sample.x, sample.y)
        smallest = jnp.linalg.eigvalsh(sample.x @ sample.x.T)[0]
        ratio = _worst_ratio(
            lambda w: jnp.mean((sample.x @ (networks.predictor(w) - fit)) ** 2),
            lambda w, steps: networks.fine_tune(w, sample.x, sample.y, rate, steps).weights,
            networks.small_weights(key_weights, D, 2, 1.0),
            float(2 * smallest / (n if normalised else 1)),
            rate,
        )
        return Estimate(ratio, tolerance=0.01)

    return simulate


def _source_recovery(key: Array, quick: bool) -> Estimate:
    del quick
    beta_s, _ = problems.tasks(D, 0.0)
    gap = jnp.linalg.norm(networks.predictor(_pretrained(key, 3, 0.01)) - beta_s)
    return Estimate(float(gap), tolerance=1e-12)


def _scratch_order(key: Array, quick: bool) -> Estimate:
    """log2 of the fall of |beta - X^+ y| as alpha halves, for training from scratch, L = 2."""
    del quick
    key_weights, key_data = jax.random.split(key)
    sample = problems.draw(key_data, 12, D, 0.8, 0.5)
    gaps = []
    for alpha in (2e-2, 1e-2):
        weights = networks.small_weights(key_weights, D, 2, alpha)
        trained = networks.fine_tune(weights, sample.x, sample.y, RATE, 40_000)
        fit = estimators.scratch_fit(sample.x, sample.y)
        gaps.append(jnp.linalg.norm(networks.predictor(trained.weights) - fit))
    return Estimate(float(jnp.log2(gaps[0] / gaps[1])), tolerance=0.1)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        f"{PAPER}/L3.3/exact",
        "gradient flow on the source task ends at β_s",
        f"{PAPER} Lemma 3.3, p. 5",
        f"d={D}, L=3, α=0.01, gradient descent",
        lambda: 0.0,
        _source_recovery,
        note="tolerance: float64 rounding",
    ),
    Claim(
        f"{PAPER}/eq35/exact",
        "D_l = W_lᵀW_l - W_{l+1}W_{l+1}ᵀ is conserved: largest drift",
        f"{PAPER} eq. (35), p. 16",
        f"d={D}, L=3, α=0.1, step size extrapolated to 0",
        lambda: 0.0,
        _drift,
        note="tolerance: rate²",
    ),
    Claim(
        f"{PAPER}/eq48/reading",
        "L(t) ≤ L(0) exp(-2(α²λ)^(L-1) t): largest ratio over time",
        f"{PAPER} eq. (48), p. 17",
        f"d={D}, L=2, α=0.3, 40 times",
        lambda: 1.0,
        _source_rate,
        relation="<=",
        note="holds, and is loose: the late rate does not depend on α",
    ),
    Claim(
        f"{PAPER}/LB.1-order/printed",
        "Φ = β_s vᵀ + O(α²): order of the rank-one error in α",
        f"{PAPER} Lemma B.1, eq. (50), p. 17",
        f"d={D}, L=2, α=0.02 and 0.01",
        lambda: 2.0,
        _order(2, 0.02),
        note="eq. (60) bounds the square of the remainder by O(α²)",
    ),
    Claim(
        f"{PAPER}/LB.1-order/corrected",
        "Φ = β_s vᵀ + O(α): order of the rank-one error in α",
        f"{PAPER} Thm 3.4 and Lemma B.1, eq. (50), p. 17, corrected",
        f"d={D}, L=2, α=0.02 and 0.01",
        lambda: 1.0,
        _order(2, 0.02),
    ),
    Claim(
        f"{PAPER}/LB.1-remainder/ours",
        "|W_l - σuvᵀ|²_F ≤ α²(|W̄_l|²_F - |W̄_L|²_F): largest ratio",
        f"{PAPER} eq. (60), p. 18, sharpened",
        f"d={D}, L=3, α=0.05",
        lambda: 1.0,
        _remainder,
        relation="<=",
    ),
    Claim(
        f"{PAPER}/LB.1-alignment/limit",
        "neighbouring layers share their top singular vectors: 1 - (u·v)²",
        f"{PAPER} Lemma B.1, eq. (51), p. 17",
        f"d={D}, L=3, α=0.01",
        lambda: 0.0,
        _misalignment,
        note="tolerance α²",
    ),
    Claim(
        f"{PAPER}/T3.5-order/ours",
        "training from scratch ends at X⁺y + O(α): order of the distance in α",
        f"{PAPER} Thm 3.5, p. 6",
        f"d={D}, n=12, L=2, α=0.02 and 0.01, gradient descent",
        lambda: 1.0,
        _scratch_order,
        note="seen: .25, which tells order 1 from 1/2 and 2; tolerance for the next order",
        effect=0.25,
    ),
    Claim(
        f"{PAPER}/eq87/printed",
        "L_∥(t) ≤ L_∥(0) exp(-2(α²λ)^(L-1) λ_min(XXᵀ) t): largest ratio over time",
        f"{PAPER} eqs. (87), (88), p. 20",
        f"d={D}, n=5, L=2, α=1, 40 times",
        lambda: 1.0,
        _target_rate(False),
        relation="<=",
        note="the 1/n of the loss is missing in the exponent",
    ),
    Claim(
        f"{PAPER}/eq87/corrected",
        "L_∥(t) ≤ L_∥(0) exp(-2(α²λ)^(L-1) λ_min(XXᵀ) t/n): largest ratio over time",
        f"{PAPER} eqs. (87), (88), p. 20, corrected",
        f"d={D}, n=5, L=2, α=1, 40 times",
        lambda: 1.0,
        _target_rate(True),
        relation="<=",
    ),
)
