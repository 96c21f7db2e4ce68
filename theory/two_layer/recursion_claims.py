"""Overtrained, eqs. (9) to (18) and Lemmas A.7 to A.11, A.23 and A.28 on fine-tuning by modes.

Simulators are gradient descent of the network by autodiff, with infinite batches.
"""

from math import ceil, log, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.two_layer import fine_tuning, networks
from theory.two_layer import recursion_domains as domains
from theory.two_layer.layers import Layers, ideal, identity_start, theta
from theory.two_layer.tasks import (
    BOTH,
    EVERY,
    GAMMA,
    PRE,
    RATE,
    TARGET,
    D,
    at,
    claim,
    deterministic,
    diagonal,
    fixed,
    rotations,
    task,
    trained,
    tuned,
)

MODE = 1  # the second, where one stands for all
HALF = 0.5  # lambda where it is not 0 or 1
AT_ONE = f"{BOTH}, λ=1, η={RATE}, {EVERY} steps"
AT_HALF = f"σ_0²={PRE[MODE]}, σ²={TARGET[MODE]}, λ={HALF}"
BATCH = 6
CORNER = f"d={D}, a batch of {BATCH}; the first entry"


def _gradient(layer: int) -> float:
    """Computes the corner of dL/dW of a batch, by autodiff."""
    layers, x = ideal(task(), D), jnp.asarray(fixed(0, BATCH, D))
    slope = jax.jit(jax.grad(networks.batch_objective))
    gradient = slope(layers, x, task(TARGET), 0.0, np.zeros((D, D)))
    return float(gradient[layer - 1][0, 0])


def _formula(layer: int, printed: bool = False) -> float:
    """Computes the corner of eqs. (10) and (11), with Sigma_k before theta - A as printed, or
    after.
    """
    x = fixed(0, BATCH, D)
    w1, w2 = (np.asarray(w) for w in ideal(task(), D))
    sigma_k, error = x.T @ x / BATCH, w1 @ w2 - np.asarray(task(TARGET))
    inner = sigma_k @ error if printed else error @ sigma_k
    return float(2 * (inner @ w2.T if layer == 1 else w1.T @ inner)[0, 0])


def _anchored(anchored_to: Array | None = None) -> float:
    """Computes the root of the second mode after `EVERY` steps from two ideal modes, anchored to
    the ideal start or to another map.
    """
    end = theta(at(tuned(2, anchor=1.0, anchored_to=anchored_to), 0))
    return sqrt(float(diagonal(end)[MODE]))


def _iterates(printed: bool = False) -> np.ndarray:
    """Computes f^(k)(sigma_0) of eq. (18) after `EVERY` steps, lambda = 1, with or without the
    missing x.
    """
    x = start = np.sqrt(PRE)
    square = np.array(TARGET)
    for _ in range(EVERY):
        pull = (start**2 - x**2) * (1 if printed else x)
        x = x + 2 * RATE * x * (square - x**2) + 2 * RATE * pull
    return x


def _layer_mode(anchor: float, k: int) -> float:
    """Computes the root of the second mode along the path of gradient descent."""
    return sqrt(float(diagonal(theta(at(tuned(D, anchor=anchor), k)))[MODE]))


def _limit(anchor: float, swapped: bool = False) -> float:
    """Computes (sigma_ft + lambda sigma_pre) / (1 + lambda) of the second mode, or with swapped
    weights.
    """
    pre, ft = PRE[MODE], TARGET[MODE]
    return ((pre + anchor * ft) if swapped else (ft + anchor * pre)) / (1 + anchor)


def _contracted(rate: float) -> float:
    return (1 - rate) ** EVERY * abs(sqrt(PRE[MODE]) - sqrt(_limit(1.0)))


@claim("eq10/exact")
def _():
    """∂L/∂W_1 = 2 (θ - A) Σ_k W_2ᵀ

    Source: eqs. (10), (11) (Appendix A.1)
    Domain: {CORNER}
    """
    return _formula(1), deterministic(lambda: _gradient(1))


@claim("eq11/printed")
def _printed_gradient():
    """∂L/∂W_2 = 2 W_1ᵀ Σ_k (θ - A)

    Σ_k is on the wrong side.

    Source: eqs. (10), (11) (Appendix A.1)
    Domain: {CORNER}
    """
    return _formula(2, printed=True), deterministic(lambda: _gradient(2))


@_printed_gradient.beside("corrected")
def _():
    """∂L/∂W_2 = 2 W_1ᵀ (θ - A) Σ_k"""
    return _formula(2)


@claim("eq16/printed")
def _(tau=6.0):
    """Anchored to the real θⁿ(0), the ideal modes follow f

    Lemma A.7 needs the ideal anchor.

    Source: eqs. (16), (17) and Lemma A.7 (Appendix A.3)
    Domain: {AT_ONE}, n=2, τ={tau:g}, mode 2
    """
    times = tau / (PRE[1] + PRE[2]) * np.arange(1, 5) / 4
    real = theta(at(trained(identity_start(D, tau), task(), list(times)), -1))
    return _iterates()[MODE], deterministic(lambda: _anchored(real))


@claim("eq16/corrected")
def _():
    """Anchored to the ideal θ̄ⁿ(0), the ideal modes follow f

    Source: eqs. (16), (17) and Lemma A.7 (Appendix A.3)
    Domain: {AT_ONE}, n=2, mode 2
    """
    return _iterates()[MODE], deterministic(_anchored)


@claim("eq18/printed")
def _printed_map():
    """The layers' modes iterate f = x + 2ηx(σ²-x²) + 2ηλ(σ_0²-x²)

    An x is missing. Appendix A.6 restores it.

    Source: eq. (18) (Appendix A.3.1)
    Domain: {AT_ONE}, mode 2
    """
    return _iterates(printed=True)[MODE], deterministic(lambda: _layer_mode(1.0, 0))


@_printed_map.beside("corrected")
def _():
    """The layers' modes iterate f = x + 2ηx(σ²-x²) + 2ηλx(σ_0²-x²)"""
    return _iterates()[MODE]


@claim("A.7/exact")
def _():
    """UᵀθⁿV is diagonal with (f^(k))² for i ≤ n and 0 for i > n. Σ_ij |UᵀθⁿV|_ij is compared

    Source: Lemma A.7 (Appendix A.3.1)
    Domain: {AT_ONE}, n=3
    """
    u, v = rotations()
    return (_iterates()[:3] ** 2).sum(), deterministic(
        lambda: np.abs(u.T @ np.asarray(theta(at(tuned(3, anchor=1.0), 0))) @ v).sum()
    )


@claim("A.7-flow/ours")
def _():
    """y(T) = s/(1 + (s/y(0) - 1) e^(-4(1+λ)sT)) with s = (σ_ft+λy(0))/(1+λ)

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: Lemma A.7, in continuous time
    Domain: {BOTH}, λ={HALF}, T=.2, mode 2
    """
    times = [0.1, 0.2, 0.4, 0.8]
    predicted = fine_tuning.mode(times[1], PRE[MODE], TARGET[MODE], HALF)
    return predicted, deterministic(
        lambda: diagonal(theta(trained(ideal(task(), D), task(TARGET), times, HALF)))[1, MODE]
    )


@claim("A.9/exact", "<=", attack=domains.NORMS, overlooks="tightened")
def _(steep=(5.0, 4.0, 2.5, 1.5)):
    """For 4η(λ+2)Γ < 1, |Ŵ|_op ≤ √Γ

    Source: Assumption A.8 and Lemma A.9 (Appendix A.3.1)
    Domain: d={D}, σ_pre={PRE}, σ_ft={steep}, λ=1, η={RATE}; the largest norm of the path
    """

    def largest() -> float:
        path = tuned(D, steep, 1.0)
        return max(np.linalg.norm(np.asarray(w), 2, axis=(1, 2)).max() for w in path)

    return sqrt(max(*PRE, *steep)), deterministic(largest)


@claim("A.28-limit/printed")
def _printed_limit():
    """f^(k)(σ_0) → σ* = √((σ_0² + λσ²)/(1+λ)), small η

    The weights are swapped.

    Source: Lemma A.28 (Appendix A.6)
    Domain: {AT_HALF}
    """
    return sqrt(_limit(HALF, swapped=True)), deterministic(lambda: _layer_mode(HALF, -1))


@_printed_limit.beside("corrected")
def _():
    """f^(k)(σ_0) → σ* = √((σ² + λσ_0²)/(1+λ)), small η"""
    return sqrt(_limit(HALF))


@claim("A.28-factor/printed")
def _printed_factor(x=1.3):
    """g(x) = x(x-σ*)(x+(λ+1)σ*)

    Source: proof of Lemma A.28 (Appendix A.6)
    Domain: {AT_HALF}, x={x}, with the true σ*
    """

    def half_gradient() -> float:
        """Differentiates with respect to the layer-mode, by autodiff."""
        layers = Layers(jnp.asarray([[x]]), jnp.asarray([[x]]))
        slope = jax.jit(jax.grad(networks.objective))
        found = slope(layers, np.array([[TARGET[MODE]]]), HALF, np.array([[PRE[MODE]]]))
        return float(found.w1[0, 0]) / 2

    root = sqrt(_limit(HALF))
    return x * (x - root) * (x + (HALF + 1) * root), deterministic(half_gradient)


@_printed_factor.beside("corrected")
def _(x):
    """g(x) = (1+λ)x(x-σ*)(x+σ*)"""
    root = sqrt(_limit(HALF))
    return (1 + HALF) * x * (x - root) * (x + root)


@claim("A.28-rate/corrected", "<=", attack=domains.contraction(False), overlooks="tightened")
def _rate():
    """|f^(k)(σ_0) - σ*| ≤ (1 - 2η min{{σ²,σ_0²}})^k |σ_0 - σ*|, with the true σ*

    This is the printed rate. The search finds that it is not sharp, at most half of the true one.

    Source: Lemma A.28 (Appendix A.6)
    Domain: {AT_ONE}, mode 2
    """
    left = _contracted(2 * RATE * min(PRE[MODE], TARGET[MODE]))
    return left, deterministic(lambda: abs(_layer_mode(1.0, 0) - sqrt(_limit(1.0))))


@_rate.beside("ours", attack=domains.contraction(True), overlooks="tightened")
def _():
    """|f^(k)(σ_0) - σ*| ≤ (1 - 4η(1+λ) min{{σ²,σ_0²}})^k |σ_0 - σ*|"""
    return _contracted(8 * RATE * min(PRE[MODE], TARGET[MODE]))


# --- convergence (A.10, A.11, A.21, A.23) ---------------------------------------------------------

LEARNED = 3  # modes
PRECISION = 1e-6  # below what Assumption A.21 allows
BOUND = 0.2  # lambda_0, with which 4 eta (lambda_0 + 2) Gamma = 0.99
FAST = 0.035
FREE = f"{BOTH}, n={LEARNED}, λ=0, λ_0={BOUND}, ε={PRECISION:g}"


def _precision(learned: int, anchor: float) -> float:
    """Computes min_{i<=n} |sigma_pre - sigma_ft|^2 / (500 (lambda_0 + 1)^2 Gamma) of Lemma A.23."""
    gaps = (np.array(TARGET) - PRE)[:learned] ** 2
    return float(gaps.min() / (500 * (1 + anchor) ** 2 * GAMMA))


def _distance(learned: int, anchor: float, rate: float = RATE, steps: float | None = None) -> float:
    """Computes |U^T theta^n V - (Sigma_ft + lambda Sigma_pre)/(1 + lambda)|_F after all steps, or
    after at least a given number.
    """
    u, v = rotations()
    k = -1 if steps is None else ceil(steps / EVERY) - 1
    end = u.T @ np.asarray(theta(at(tuned(learned, anchor=anchor, rate=rate), k))) @ v
    limit = (np.array(TARGET) + anchor * np.array(PRE)) / (1 + anchor) * (np.arange(D) < learned)
    return float(np.linalg.norm(end - np.diag(limit)))


def _enough(rate: float) -> float:
    """Computes log(100 Gamma/epsilon) / (rate min{sigma_pre, sigma_ft}) of the learned modes."""
    return log(100 * GAMMA / PRECISION) / (rate * min(PRE[LEARNED - 1], TARGET[LEARNED - 1]))


@claim("A.11/printed")
def _printed_weights():
    """For 4η(λ+2)Γ < 1 and large K, |(Uᵀθ̂ⁿ(K)V)_ii - (σ_pre + λσ_ft)/(1+λ)| ≤ ε for i ≤ n

    The weights are swapped. Lemma A.23 has them right.

    Source: Lemma A.11 (Appendix A.3.1)
    Domain: {BOTH}, λ={HALF}, mode 2
    """
    return _limit(HALF, swapped=True), deterministic(lambda: _layer_mode(HALF, -1) ** 2)


@_printed_weights.beside("corrected")
def _():
    """For 4η(λ+2)Γ < 1 and large K, |(Uᵀθ̂ⁿ(K)V)_ii - (σ_ft + λσ_pre)/(1+λ)| ≤ ε for i ≤ n"""
    return _limit(HALF)


@claim(
    "A.10/corrected", "<=", attack=domains.PRECISE, overlooks="tightened", sharper="A.10-least/ours"
)
def _():
    """K ≥ log(100Γ/ε)/(η min{{σ_pre,σ_ft}}) steps leave an error ≤ ε, with the true limit

    The search finds that it is not sharp. Less than a quarter of the steps is enough.

    Source: Assumption A.10 and Lemma A.11 (Appendix A.3.1)
    Domain: {FREE}, η={FAST}
    """
    return PRECISION, deterministic(lambda: _distance(LEARNED, 0.0, FAST, _enough(FAST)))


@claim("A.10-least/ours", "<=", attack=domains.LEAST, overlooks="tightened")
def _():
    """K ≥ log(|Σ_pre-Σ_ft|_F/((1+λ)ε))/(4η(1+λ) min{{σ_pre,σ_ft}}) steps leave an error ≤ ε, in the
    Frobenius norm

    Each mode's error falls by a factor of at most 1 - 4η(1+λ) min{{σ_pre,σ_ft}} in a step.

    Source: Assumption A.10 and Lemma A.11 (Appendix A.3.1), sharpened
    Domain: {FREE}, η={FAST}
    """
    first = np.linalg.norm((np.array(PRE) - TARGET)[:LEARNED])
    steps = log(first / PRECISION) / (4 * FAST * min(PRE[LEARNED - 1], TARGET[LEARNED - 1]))
    return PRECISION, deterministic(lambda: _distance(LEARNED, 0.0, FAST, steps))


@claim("A.21-steps/printed", "<=", attack=domains.STEPS_PRINTED)
def _():
    """For K ≥ log(100Γ/ε)/min{{σ_pre,σ_ft}}, the error is ≤ min|σ_pre-σ_ft|²/(500(λ_0+1)²Γ)

    1/η is missing.

    Source: Assumption A.21, item 3, and Lemma A.23 (Appendix A.3.4)
    Domain: {FREE}, η={RATE}, infinite batch
    """
    left = deterministic(lambda: _distance(LEARNED, 0.0, RATE, _enough(1.0)))
    return _precision(LEARNED, BOUND), left


@claim(
    "A.21-steps/corrected",
    "<=",
    attack=domains.STEPS,
    overlooks="tightened",
    sharper="A.10-least/ours",
)
def _():
    """For K ≥ log(100Γ/ε)/(4η(1+λ) min{{σ_pre,σ_ft}}) the same bound holds

    The search finds that it is not sharp. The error is at most 1/280 of the bound.

    Source: Assumption A.21, item 3, and Lemma A.23 (Appendix A.3.4)
    Domain: {FREE}, η={FAST}, infinite batch
    """
    left = deterministic(lambda: _distance(LEARNED, 0.0, FAST, _enough(4 * FAST)))
    return _precision(LEARNED, BOUND), left


@claim(
    "A.23/exact", "<=", attack=domains.CONVERGED, overlooks="tightened", sharper="A.10-least/ours"
)
def _():
    """|UᵀθⁿV - (Σ_ft+λΣ_pre)/(1+λ)|_F ≤ min|σ_pre-σ_ft|²/(500(λ_0+1)²Γ)

    The lemma's batch size grows like (1+32ηΓ)^(2K).

    Source: Lemma A.23 (Appendix A.3.4)
    Domain: {BOTH}, λ={HALF}, λ_0=.6, n=d, ideal start, infinite batch
    """
    return _precision(D, 0.6), deterministic(lambda: _distance(D, HALF))
