"""Cross-task linearity (arXiv 2402.03660), Theorem 1: as printed, and as true."""

from math import log2
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from theory.claims import Claim, Estimate
from theory.linearity import bounds, networks
from theory.linearity.tasks import (
    HALVES,
    ORDER,
    PAIR,
    PAPER,
    ROUNDING,
    SLOPE,
    TANH,
    curvature,
    first_two,
    gap,
    integral_gap,
    measured,
    pretrained,
    second_order_gap,
    shrunk,
    supremum_bound,
    tanh_experts,
    tanh_loss,
    tanh_network,
)


def _cube(theta: Array) -> Array:
    return theta[0] ** 3


def _saddle(theta: Array) -> Array:
    return (theta[0] ** 2 - 3 * theta[1] ** 2) / 2


def _hinge(theta: Array) -> Array:
    return jax.nn.relu(theta[0])


def _ends(p: int, axis: int = 0) -> Array:
    """The origin and a unit vector."""
    return jnp.zeros((2, p)).at[1, axis].set(1.0)


def _main(f: networks.Model, p: int, axis: int, norm: Any) -> float:
    return float(bounds.main_term(norm, _ends(p, axis), HALVES))


READOUT = (1.0, -0.7, 0.4)


def _ridge(theta: Array, x: Array) -> Array:
    """Three tanh units with a fixed readout: |D^3 f| <= 2 max|c| |x|^3, as |tanh'''| <= 2."""
    return jnp.array(READOUT) @ jnp.tanh(theta.reshape(3, -1) @ x)


def _bound_ratio(key: Array, quick: bool) -> Estimate:
    """Largest gap / (main term + remainder) over draws of models, theta_0, alpha and x."""
    n = 200 if quick else 2000
    keys = jax.random.split(key, 4)
    draws = (
        jax.random.normal(keys[0], (n, 2, 6)),
        0.3 * jax.random.normal(keys[1], (n, 6)),
        jax.random.uniform(keys[2], (n,)),
        jax.random.normal(keys[3], (n, 2)),
    )

    def ratio(thetas: Array, origin: Array, alpha: Array, x: Array) -> Array:
        a = jnp.stack([alpha, 1 - alpha])
        main = bounds.main_term(curvature(_ridge, origin, x), thetas, a)
        rest = bounds.remainder(2 * jnp.linalg.norm(x) ** 3, thetas, a, origin)
        return jnp.abs(gap(_ridge, thetas, a, x)) / (main + rest)

    return Estimate(float(jax.jit(jax.vmap(ratio))(*draws).max()), tolerance=ROUNDING)


def _theorem_order() -> float:
    """Of gap - second order at theta_PT, alpha = .3, as experts shrink towards theta_PT."""

    def left(step: float) -> float:
        thetas, a = shrunk(PAIR)(step)
        start = pretrained(tanh_network, TANH)
        return abs(
            float(gap(tanh_loss, thetas, a) - second_order_gap(tanh_loss, thetas, a, at=start))
        )

    return log2(left(0.02) / left(0.01))


def _kink_order() -> float:
    def left(step: float) -> float:
        return float(gap(_hinge, step * jnp.array([[1.0], [-1.0]]), HALVES))

    return log2(abs(left(0.02) / left(0.01)))


def _theorem() -> list[Claim]:
    source, tanh = f"{PAPER} Thm 1, Sec. 5", f"loss of tanh {TANH}, two experts, α={PAIR[0]}"
    loss_gap = measured(lambda: abs(float(gap(tanh_loss, first_two(tanh_experts()), PAIR))))
    cube = "f = t³, θ₀=0, models 0 and 1, α=½"
    saddle = "f = (t₁² - 3t₂²)/2, models 0 and e₂, α=½"
    proof = "f = (t₁² - t₂²)/2: ‖∇²f‖ = λ_min = λ_max = 1; θ - θ₀ = e₂"
    form = measured(
        lambda: 0.5 * jnp.array([0.0, 1.0]) @ jnp.diag(jnp.array([1.0, -1.0])) @ jnp.array([0.0, 1])
    )
    return [
        Claim(
            f"{PAPER}/T1/limit",
            "δ = ½α(1-α)|D²f(θ₀)[Δ,Δ]| + third order in the distances from θ₀",
            source,
            f"{tanh}, θ₀ the checkpoint",
            lambda: 3.0,
            measured(_theorem_order, SLOPE),
            note=ORDER,
        ),
        Claim(
            f"{PAPER}/T1/ours",
            "δ ≤ ½α(1-α)‖∇²f(θ₀)‖|Δ|² + (M/6)(|θ_α-θ₀|³ + Σ aᵢ|θᵢ-θ₀|³), M ≥ sup|D³f|",
            source,
            "three tanh units, random models, θ₀, α and x: largest ratio",
            lambda: 1.0,
            _bound_ratio,
            relation="<=",
            note="the remainder ℰ with its constant",
        ),
        Claim(
            f"{PAPER}/T1-supremum-cube/ours",
            "δ ≤ ½α(1-α)|Δ|² sup ‖∇²f‖ on the segment, where ∇²f(θ₀) = 0",
            source,
            cube,
            lambda: float(supremum_bound(_cube, _ends(1), HALVES)),
            measured(lambda: abs(gap(_cube, _ends(1), HALVES))),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/T1-supremum/ours",
            "δ ≤ ½α(1-α)|Δ|² sup ‖∇²f‖ on the segment",
            source,
            tanh,
            lambda: float(supremum_bound(tanh_loss, first_two(tanh_experts()), PAIR)),
            loss_gap,
            relation="<=",
        ),
        Claim(
            f"{PAPER}/T1-integral/ours",
            "gap = -Σ aᵢ ∫ (1-t) D²f(θ̄+t dᵢ)[dᵢ,dᵢ] dt",
            source,
            tanh,
            lambda: abs(float(integral_gap(tanh_loss, first_two(tanh_experts()), PAIR))),
            loss_gap,
            note="16 nodes",
        ),
        Claim(
            f"{PAPER}/T1-eigenvalue/reading",
            "λ_max is the spectral norm: here δ equals the main term",
            source,
            saddle,
            lambda: _main(_saddle, 2, 1, curvature(_saddle, jnp.zeros(2))),
            measured(lambda: abs(gap(_saddle, _ends(2, 1), HALVES))),
        ),
        Claim(
            f"{PAPER}/T1-proof/printed",
            "½(θ-θ₀)ᵀ∇²f(θ-θ₀) ≥ ½λ_min|θ-θ₀|² with λ_min ≤ ‖∇²f‖",
            f"{PAPER} App. A.3",
            proof,
            lambda: 0.5,
            form,
            relation=">=",
            note="a norm bounds from one side; the step is not used",
        ),
        Claim(
            f"{PAPER}/T1-proof/corrected",
            "½(θ-θ₀)ᵀ∇²f(θ-θ₀) ≥ -½λ_max|θ-θ₀|²",
            f"{PAPER} App. A.3",
            proof,
            lambda: -0.5,
            form,
            relation=">=",
        ),
        Claim(
            f"{PAPER}/T1-kink/ours",
            "across a ReLU's kink the gap is of first order in the distance",
            source,
            "f = relu(t), models ±s, α=½",
            lambda: 1.0,
            measured(_kink_order),
            note="no derivative, no theorem: the networks of Section 4.1 are outside it",
        ),
    ]


CLAIMS = tuple(_theorem())
