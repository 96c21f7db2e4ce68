"""Cross-task linearity (arXiv 2402.03660), Theorem 1, as printed and corrected."""

from collections.abc import Callable
from functools import cache
from math import log2

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import measured
from theory.linearity import bounds, domains
from theory.linearity.tasks import (
    HALVES,
    ORDER,
    PAIR,
    SLOPE,
    TANH,
    claim,
    curvature,
    first_two,
    gap,
    integral_gap,
    pretrained,
    second_order_gap,
    shrunk,
    supremum_bound,
    tanh_experts,
    tanh_loss,
    tanh_network,
)

# --- small functions ------------------------------------------------------------------------------


def _delta(
    f: Callable[[np.ndarray], float], first: np.ndarray, second: np.ndarray, a: float = 0.5
) -> float:
    """Computes |f(a first + (1 - a) second) - a f(first) - (1 - a) f(second)|."""
    return abs(f(a * first + (1 - a) * second) - a * f(first) - (1 - a) * f(second))


def _ends(p: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the origin and the last unit vector."""
    return np.zeros(p), np.eye(p)[-1]


READOUT = (1.0, -0.7, 0.4)


def _ridge(theta: Array, x: Array) -> Array:
    """Computes three tanh units with a fixed readout, with |D^3 f| <= 2 max|c| |x|^3."""
    return jnp.array(READOUT) @ jnp.tanh(theta.reshape(3, -1) @ x)


@cache
def _worst_case() -> tuple[float, np.ndarray, float, np.ndarray]:
    """Finds the largest delta relative to its bound in 2000 draws of models, theta_0, alpha and x,
    and returns the bound, the models, alpha and x.
    """
    n, rng = 2000, np.random.default_rng(4)
    draws = (
        rng.normal(size=(n, 2, 6)),
        0.3 * rng.normal(size=(n, 6)),
        rng.uniform(size=n),
        rng.normal(size=(n, 2)),
    )

    def bound(thetas: Array, origin: Array, alpha: Array, x: Array) -> tuple[Array, Array]:
        a = jnp.stack([alpha, 1 - alpha])
        main = bounds.main_term(curvature(_ridge, origin, x), thetas, a)
        # |tanh'''| <= 2 and |c_i| <= 1, so |D^3 f[u, u, u]| <= 2 |x|^3 for unit vectors u.
        rest = bounds.remainder(2 * jnp.linalg.norm(x) ** 3, thetas, a, origin)
        return main + rest, jnp.abs(gap(_ridge, thetas, a, x)) / (main + rest)

    found, ratios = jax.jit(jax.vmap(bound))(*draws)
    worst = int(np.argmax(ratios))
    models, _, alpha, x = (v[worst] for v in draws)
    return float(np.asarray(found)[worst]), models, float(alpha), x


# --- the loss of trained networks -----------------------------------------------------------------


def _loss_gap() -> float:
    return abs(float(gap(tanh_loss, first_two(tanh_experts()), PAIR)))


THEOREM = "Theorem 1, Sec. 5, and its proof, App. A.3"
TRAINED = f"loss of tanh {TANH}, two experts, α={PAIR[0]}"


@claim("T1/limit")
def _(power=3.0, note=ORDER):
    """δ = ½α(1-α)|D²f(θ₀)[Δ,Δ]| + O(max of the cubed distances from θ₀)

    {note}

    Source: {THEOREM}
    Domain: {TRAINED}, θ₀ the checkpoint
    """
    del note

    def left(step: float) -> float:
        """Measures the error of the second-order gap as experts shrink to theta_PT."""
        thetas, a = shrunk(PAIR)(step)
        start = pretrained(tanh_network, TANH)
        second = second_order_gap(tanh_loss, thetas, a, at=start)
        return abs(float(gap(tanh_loss, thetas, a) - second))

    return power, measured(lambda: log2(left(0.02) / left(0.01)), SLOPE)


@claim("T1/ours", "<=", attack=domains.TAYLOR, overlooks="tightened")
def _():
    """δ ≤ ½α(1-α)‖∇²f(θ₀)‖|Δ|² + (M/6)(|θ_α-θ₀|³ + Σ aᵢ|θᵢ-θ₀|³), M ≥ sup|D³f|

    Source: {THEOREM}: ℰ with its constant
    Domain: three tanh units; of 2000 random models, θ₀, α and x those nearest to the bound
    """
    bound, (first, second), alpha, x = _worst_case()

    def units(theta: np.ndarray) -> float:
        return float(np.array(READOUT) @ np.tanh(theta.reshape(3, -1) @ x))

    return bound, measured(lambda: _delta(units, first, second, alpha))


@claim("T1-supremum-cube/ours", "<=", attack=domains.SUPREMUM_CUBE, overlooks="tightened")
def _():
    """δ ≤ ½ Σ aᵢ|dᵢ|² sup ‖∇²f‖ from θ̄ to θᵢ, where ∇²f(θ₀) = 0

    Source: {THEOREM}
    Domain: f = t³, θ₀=0, models 0 and 1, α=½
    """
    bound = supremum_bound(lambda t: t[0] ** 3, jnp.stack(_ends(1)), HALVES)
    return bound, measured(lambda: _delta(lambda t: t[0] ** 3, *_ends(1)))


@claim("T1-supremum/ours", "<=", attack=domains.SUPREMUM, overlooks="tightened")
def _():
    """δ ≤ ½ Σ aᵢ|dᵢ|² sup ‖∇²f‖ from θ̄ to θᵢ

    Source: {THEOREM}
    Domain: {TRAINED}
    """
    return supremum_bound(tanh_loss, first_two(tanh_experts()), PAIR), measured(_loss_gap)


@claim("T1-integral/ours")
def _():
    """gap = -Σ aᵢ ∫ (1-t) D²f(θ̄+t dᵢ)[dᵢ,dᵢ] dt

    It has 16 nodes.

    Source: {THEOREM}
    Domain: {TRAINED}
    """
    return abs(integral_gap(tanh_loss, first_two(tanh_experts()), PAIR)), measured(_loss_gap)


@claim("T1-eigenvalue/reading")
def _():
    """If λ_max (the largest eigenvalue of ∇²f(θ₀) in App. B.2) is largest in absolute value, δ =
    ½α(1-α)λ_max|Δ|² is attained

    Source: {THEOREM}, and App. B.2
    Domain: f = (t₁² - 3t₂²)/2, models 0 and e₂, α=½
    """

    def saddle(theta):
        return (theta[0] ** 2 - 3 * theta[1] ** 2) / 2

    bound = bounds.main_term(curvature(saddle, jnp.zeros(2)), jnp.stack(_ends(2)), HALVES)
    return bound, measured(lambda: _delta(saddle, *_ends(2)))


@claim("T1-proof/printed", ">=", attack=domains.FORM_PRINTED)
def _printed_form():
    """½(θ-θ₀)ᵀ∇²f(θ-θ₀) ≥ ½λ_min|θ-θ₀|² with λ_min ≤ ‖∇²f(θ₀)‖ ≤ λ_max

    A norm bounds only from one side. The step is not used.

    Source: App. A.3, second display
    Domain: f = (t₁² - t₂²)/2: ‖∇²f‖ = λ_min = λ_max = 1; θ - θ₀ = e₂
    """
    offset, hessian = np.array([0.0, 1.0]), np.diag([1.0, -1.0])
    return 0.5, measured(lambda: offset @ hessian @ offset / 2)


@_printed_form.beside("corrected", attack=domains.FORM)
def _():
    """½(θ-θ₀)ᵀ∇²f(θ-θ₀) ≥ -½λ_max|θ-θ₀|²

    A norm bounds only from one side. The step is not used.
    """
    return -0.5


@claim("T1-kink/ours")
def _(step=0.02):
    """Across a ReLU's kink the gap is of first order in the distance, δ = s/2

    The theorem needs derivatives, so the networks of Section 4.1 are outside of it.

    Source: {THEOREM}, without derivatives
    Domain: f = relu(t), models ±s, α=½, s={step}
    """
    ends = np.array([step]), np.array([-step])
    return step / 2, measured(lambda: _delta(lambda t: max(t[0], 0.0), *ends))
