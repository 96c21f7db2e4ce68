"""Overtrained, eqs. (9) to (18) and Lemmas A.7 to A.11, A.23 and A.28: fine-tuning mode by mode.

Simulators are gradient descent of the network by autodiff, with infinite batches.
"""

from collections.abc import Callable
from math import ceil, log, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate
from theory.two_layer import fine_tuning, networks
from theory.two_layer.layers import Layers, ideal, identity_start, theta
from theory.two_layer.tasks import (
    EVERY,
    PAPER,
    PRE,
    RATE,
    ROUNDING,
    TARGET,
    D,
    Simulate,
    at,
    deterministic,
    diagonal,
    normals,
    rotations,
    task,
    trained,
    tuned,
)

STEEP = (5.0, 4.0, 2.5, 1.5)


def _gradient_gap(layer: int, printed: bool = False) -> Simulate:
    """|dL/dW of a batch - formula|: eqs. (10), and (11) with Sigma_k before or behind theta - A."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        x = normals(key, True)[0, :6, 0]
        layers, target = ideal(task(), D), task(TARGET)
        zero = jnp.zeros((D, D))
        gradient = jax.grad(networks.batch_objective)(layers, x, target, 0.0, zero)[layer - 1]
        w1, w2, batch = (np.asarray(w) for w in (*layers, x))
        sigma_k, error = batch.T @ batch / 6, w1 @ w2 - np.asarray(target)
        inner = sigma_k @ error if printed else error @ sigma_k
        formula = inner @ w2.T if layer == 1 else w1.T @ inner
        gap = np.linalg.norm(np.asarray(gradient) - 2 * formula)
        return Estimate(float(gap), tolerance=ROUNDING)

    return simulate


def _anchor_gap(ideal_anchor: bool) -> float:
    """|modes after 20 steps - f|, anchored to the ideal or to the real start (tau = 6)."""
    times = 6.0 / (PRE[1] + PRE[2]) * np.arange(1, 5) / 4
    real = trained(identity_start(D, 6.0), task(), list(times))
    anchored_to = None if ideal_anchor else theta(at(real, -1))
    end = theta(at(tuned(2, anchor=1.0, anchored_to=anchored_to), 0))
    layer_modes = np.sqrt(diagonal(end)[:2])
    return float(np.abs(layer_modes - _iterates(EVERY, 1.0)[:2]).max())


def _iterates(steps: int, anchor: float, printed: bool = False) -> np.ndarray:
    """f^(steps)(sigma_0) of eq. (18), with or without the missing x."""
    x = start = np.sqrt(PRE)
    sigma = np.sqrt(TARGET)
    for _ in range(steps):
        if printed:
            x = x + 2 * RATE * (x * (sigma**2 - x**2) + anchor * (start**2 - x**2))
        else:
            x = np.asarray(fine_tuning.step(x, RATE, anchor, sigma, start))
    return x


def _layer_mode(anchor: float, k: int) -> float:
    """sqrt(y_2) along the path of gradient descent."""
    return sqrt(float(diagonal(theta(at(tuned(D, anchor=anchor), k)))[1]))


def _recursion_gap() -> float:
    """Largest error of U^T theta V after 20 steps, from three modes: the fourth stays 0."""
    u, v = rotations()
    rotated = u.T @ np.asarray(theta(at(tuned(3, anchor=1.0), 0))) @ v
    exact = np.diag([*_iterates(EVERY, 1.0)[:3] ** 2, 0.0])
    return float(np.abs(rotated - exact).max())


def _flow_gap() -> float:
    """Largest error of the modes in time, by Runge-Kutta."""
    times = [0.1, 0.2, 0.4, 0.8]
    path = trained(ideal(task(), D), task(TARGET), times, 0.5)
    law = fine_tuning.mode(jnp.array(times)[:, None], jnp.array(PRE), jnp.array(TARGET), 0.5)
    return float(np.abs(diagonal(theta(path)) - law).max())


def _norm_ratio() -> float:
    """max |W|_op^2 / Gamma over both layers and the path, lambda = 1."""
    path = tuned(D, STEEP, 1.0)
    top = [np.linalg.norm(np.asarray(w), 2, axis=(1, 2)).max() for w in path]
    return max(top) ** 2 / max(*PRE, *STEEP)


def _g(x: float, anchor: float) -> float:
    """g of Lemma A.28 for mode 2: half the gradient with respect to the layer-mode, by autodiff."""
    layers = Layers(jnp.full((1, 1), x), jnp.full((1, 1), x))
    ft, pre = jnp.full((1, 1), TARGET[1]), jnp.full((1, 1), PRE[1])
    return float(jax.grad(networks.objective)(layers, ft, anchor, pre).w1[0, 0]) / 2


def _contraction(rate: Callable[[float, float], float]) -> float:
    """max over modes and times of |x_k - x*| / (rate^k |x_0 - x*|), lambda = 1."""
    path = np.sqrt(diagonal(theta(tuned(D, anchor=1.0))))[:5]
    worst = 0.0
    for i, (pre, ft) in enumerate(zip(PRE, TARGET, strict=True)):
        limit = sqrt((ft + pre) / 2)
        steps = EVERY * np.arange(1, 6)
        bound = rate(pre, ft) ** steps * abs(sqrt(pre) - limit)
        worst = max(worst, float((np.abs(path[:, i] - limit) / bound).max()))
    return worst


def _recursion() -> list[Claim]:
    at_1 = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ=1, η={RATE}"
    x, anchor = 1.3, 0.5
    root = sqrt((TARGET[1] + anchor * PRE[1]) / (1 + anchor))
    swapped = sqrt((PRE[1] + anchor * TARGET[1]) / (1 + anchor))
    at_half = f"σ_0²={PRE[1]}, σ²={TARGET[1]}, λ=1/2"
    return [
        Claim(
            f"{PAPER}/eq10/exact",
            "∂L/∂W_1 = 2 (θ - A) Σ_k W_2ᵀ: distance from the gradient",
            f"{PAPER} eq. (10)",
            f"d={D}, a batch of 6",
            lambda: 0.0,
            _gradient_gap(1),
        ),
        Claim(
            f"{PAPER}/eq11/printed",
            "∂L/∂W_2 = 2 W_1ᵀ Σ_k (θ - A): distance from the gradient",
            f"{PAPER} eq. (11)",
            f"d={D}, a batch of 6",
            lambda: 0.0,
            _gradient_gap(2, printed=True),
            note="Σ_k stands on the wrong side",
        ),
        Claim(
            f"{PAPER}/eq11/corrected",
            "∂L/∂W_2 = 2 W_1ᵀ (θ - A) Σ_k: distance from the gradient",
            f"{PAPER} eq. (11), corrected",
            f"d={D}, a batch of 6",
            lambda: 0.0,
            _gradient_gap(2),
        ),
        Claim(
            f"{PAPER}/eq16/printed",
            "anchored to the real θⁿ(0), the ideal modes follow f of Lemma A.7: error",
            f"{PAPER} eqs. (16), (17)",
            f"{at_1}, n=2, τ=6, 20 steps",
            lambda: 0.0,
            deterministic(lambda: _anchor_gap(False)),
            note="the lemma needs the ideal anchor",
        ),
        Claim(
            f"{PAPER}/eq16/corrected",
            "anchored to the ideal θ̄ⁿ(0), the ideal modes follow f of Lemma A.7: error",
            f"{PAPER} eqs. (16), (17), corrected",
            f"{at_1}, n=2, 20 steps",
            lambda: 0.0,
            deterministic(lambda: _anchor_gap(True)),
        ),
        Claim(
            f"{PAPER}/eq18/printed",
            "f = x + 2ηx(σ²-x²) + 2ηλ(σ_0²-x²): mode 2 after 20 steps",
            f"{PAPER} eq. (18)",
            at_1,
            lambda: float(_iterates(EVERY, 1.0, printed=True)[1]),
            deterministic(lambda: _layer_mode(1.0, 0)),
            note="an x is missing; Section A.6 restores it",
        ),
        Claim(
            f"{PAPER}/eq18/corrected",
            "f = x + 2ηx(σ²-x²) + 2ηλx(σ_0²-x²): mode 2 after 20 steps",
            f"{PAPER} eq. (18) and Section A.6, corrected",
            at_1,
            lambda: float(_iterates(EVERY, 1.0)[1]),
            deterministic(lambda: _layer_mode(1.0, 0)),
        ),
        Claim(
            f"{PAPER}/A.7/exact",
            "learned modes follow f each by itself, unlearned ones stay 0: largest error of UᵀθV",
            f"{PAPER} Lemma A.7",
            f"{at_1}, n=3, 20 steps",
            lambda: 0.0,
            deterministic(_recursion_gap),
        ),
        Claim(
            f"{PAPER}/A.7-flow/ours",
            "y(T) = s/(1 + (s/y(0) - 1) e^(-4(1+λ)sT)), s = (σ_ft+λy(0))/(1+λ): largest error",
            f"{PAPER} Lemma A.7, in continuous time",
            f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ=1/2",
            lambda: 0.0,
            deterministic(_flow_gap),
            note="tolerance: Runge-Kutta",
        ),
        Claim(
            f"{PAPER}/A.9/exact",
            "4η(λ+2)Γ < 1 keeps |W|² ≤ Γ: largest ratio",
            f"{PAPER} Assumption A.8, Lemma A.9",
            f"d={D}, σ_pre={PRE}, σ_ft={STEEP}, λ=1, η={RATE}",
            lambda: 1.0,
            deterministic(_norm_ratio),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/A.28-limit/printed",
            "x → σ* = √((σ_0² + λσ²)/(1+λ))",
            f"{PAPER} Lemma A.28",
            at_half,
            lambda: swapped,
            deterministic(lambda: _layer_mode(0.5, -1)),
            note="the weights are swapped",
        ),
        Claim(
            f"{PAPER}/A.28-limit/corrected",
            "x → σ* = √((σ² + λσ_0²)/(1+λ))",
            f"{PAPER} Lemma A.28, corrected",
            at_half,
            lambda: root,
            deterministic(lambda: _layer_mode(0.5, -1)),
        ),
        Claim(
            f"{PAPER}/A.28-factor/printed",
            "g(x) = x(x-σ*)(x+(λ+1)σ*)",
            f"{PAPER} proof of Lemma A.28",
            f"{at_half}, x={x}, with the true σ*",
            lambda: x * (x - root) * (x + (anchor + 1) * root),
            deterministic(lambda: _g(x, anchor)),
        ),
        Claim(
            f"{PAPER}/A.28-factor/corrected",
            "g(x) = (1+λ)x(x-σ*)(x+σ*)",
            f"{PAPER} proof of Lemma A.28, corrected",
            f"{at_half}, x={x}",
            lambda: (1 + anchor) * x * (x - root) * (x + root),
            deterministic(lambda: _g(x, anchor)),
        ),
        Claim(
            f"{PAPER}/A.28-rate/corrected",
            "|x_k - σ*| ≤ (1 - 2η min{σ²,σ_0²})^k |x_0 - σ*|: largest ratio",
            f"{PAPER} Lemma A.28",
            f"{at_1}, with the true σ*, four modes, k ≤ 100",
            lambda: 1.0,
            deterministic(lambda: _contraction(lambda pre, ft: 1 - 2 * RATE * min(pre, ft))),
            relation="<=",
            note="holds, and is loose",
        ),
        Claim(
            f"{PAPER}/A.28-rate/ours",
            "|x_k - σ*| ≤ (1 - 4η(1+λ) min{σ²,σ_0²})^k |x_0 - σ*|: largest ratio",
            f"{PAPER} Lemma A.28, sharpened",
            f"{at_1}, four modes, k ≤ 100",
            lambda: 1.0,
            deterministic(lambda: _contraction(lambda pre, ft: 1 - 8 * RATE * min(pre, ft))),
            relation="<=",
        ),
    ]


# --- convergence (A.10, A.11, A.21, A.23) ---------------------------------------------------------


def _limit(printed: bool, anchor: float = 0.5) -> float:
    """Limit of mode 2 in Lemma A.11, as printed, or of Lemma A.23."""
    pre, ft = PRE[1], TARGET[1]
    return ((pre + anchor * ft) if printed else (ft + anchor * pre)) / (1 + anchor)


PRECISION = 0.01
FAST = 0.035  # 4 eta (lambda + 2) Gamma = 0.9


def _error_after(steps: float, rate: float) -> float:
    """max_i |(U^T theta V)_ii - sigma_ft,i| after at least that many steps, lambda = 0."""
    path = diagonal(theta(tuned(D, rate=rate)))
    return float(np.abs(path[ceil(steps / EVERY) - 1] - TARGET).max())


def _enough(rate: float) -> float:
    """log(100 Gamma/epsilon) / (rate min{sigma_pre, sigma_ft})."""
    return log(100 * max(*PRE, *TARGET) / PRECISION) / (rate * min(*PRE, *TARGET))


def _limit_distance() -> float:
    """max_n |U^T theta^n V - limit|_F / (min_{i<=n} |sigma_pre - sigma_ft|^2 / (500 Gamma)) with
    lambda = 1/2 = lambda_0, so that the bound carries another 1/(1+lambda_0)^2."""
    u, v = rotations()
    limit, worst = (np.array(TARGET) + 0.5 * np.array(PRE)) / 1.5, 0.0
    for n in range(1, D + 1):
        end = u.T @ np.asarray(theta(at(tuned(n, anchor=0.5), -1))) @ v
        gap = np.linalg.norm(end - np.diag(limit * (np.arange(D) < n)))
        least = min((ft - pre) ** 2 for pre, ft in zip(PRE[:n], TARGET[:n], strict=True))
        worst = max(worst, float(gap) / (least / (500 * 1.5**2 * max(*PRE, *TARGET))))
    return worst


def _convergence() -> list[Claim]:
    at_half = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ=1/2"
    at_zero = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ=0, ε={PRECISION}"
    return [
        Claim(
            f"{PAPER}/A.11/printed",
            "(UᵀθV)_ii → (σ_pre + λσ_ft)/(1+λ)",
            f"{PAPER} Lemma A.11",
            f"{at_half}, mode 2",
            lambda: _limit(True),
            deterministic(lambda: _layer_mode(0.5, -1) ** 2),
            note="the weights are swapped; Lemma A.23 has them right",
        ),
        Claim(
            f"{PAPER}/A.11/corrected",
            "(UᵀθV)_ii → (σ_ft + λσ_pre)/(1+λ)",
            f"{PAPER} Lemmas A.11 and A.23, corrected",
            f"{at_half}, mode 2",
            lambda: _limit(False),
            deterministic(lambda: _layer_mode(0.5, -1) ** 2),
        ),
        Claim(
            f"{PAPER}/A.10/corrected",
            "K ≥ log(100Γ/ε)/(η min{σ_pre,σ_ft}) steps leave an error ≤ ε",
            f"{PAPER} Assumption A.10, Lemma A.11",
            f"{at_zero}, η={FAST}",
            lambda: PRECISION,
            deterministic(lambda: _error_after(_enough(FAST), FAST)),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/A.21-steps/printed",
            "K ≥ log(100Γ/ε)/min{σ_pre,σ_ft} steps leave an error ≤ ε",
            f"{PAPER} Assumption A.21, item 3",
            f"{at_zero}, η={RATE}",
            lambda: PRECISION,
            deterministic(lambda: _error_after(_enough(1.0), RATE)),
            relation="<=",
            note="1/η is missing",
        ),
        Claim(
            f"{PAPER}/A.21-steps/corrected",
            "K ≥ log(100Γ/ε)/(4η(1+λ) min{σ_pre,σ_ft}) steps leave an error ≤ ε: a quarter will do",
            f"{PAPER} Assumptions A.10 and A.21, corrected by the rate of Lemma A.28",
            f"{at_zero}, η={FAST}",
            lambda: PRECISION,
            deterministic(lambda: _error_after(_enough(4 * FAST), FAST)),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/A.23/exact",
            "|UᵀθⁿV - (Σ_ft+λΣ_pre)/(1+λ)|_F ≤ min|σ_pre-σ_ft|²/(500(1+λ_0)²Γ): largest ratio",
            f"{PAPER} Lemma A.23",
            f"{at_half}, n = 1, ..., d, ideal start, infinite batch",
            lambda: 1.0,
            deterministic(_limit_distance),
            relation="<=",
            note="the batch size that the lemma asks for grows like (1+32ηΓ)^(2K)",
        ),
    ]


CLAIMS: tuple[Claim, ...] = (*_recursion(), *_convergence())
