"""Overtrained, eqs. (9) to (18) and Lemmas A.7 to A.11, A.23 and A.28: fine-tuning mode by mode.

Simulators are gradient descent of the network by autodiff, with infinite batches.
"""

from functools import partial
from math import ceil, log, sqrt

import jax
import jax.numpy as jnp
import numpy as np

from theory.claims import Claim, beside
from theory.two_layer import fine_tuning, networks
from theory.two_layer import recursion_domains as domains
from theory.two_layer.layers import Layers, ideal, identity_start, theta
from theory.two_layer.tasks import (
    BOTH,
    EVERY,
    GAMMA,
    PAPER,
    PRE,
    RATE,
    TARGET,
    D,
    at,
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
STEEP = (5.0, 4.0, 2.5, 1.5)
POINT = 1.3  # where the factors of g are compared
FINITE = 6.0  # tau of a real start
BATCH = 6


def _gradient(layer: int) -> float:
    """The corner of dL/dW of a batch, by autodiff."""
    layers, x = ideal(task(), D), jnp.asarray(fixed(0, BATCH, D))
    slope = jax.jit(jax.grad(networks.batch_objective))
    gradient = slope(layers, x, task(TARGET), 0.0, np.zeros((D, D)))
    return float(gradient[layer - 1][0, 0])


def _formula(layer: int, printed: bool = False) -> float:
    """The corner of eqs. (10) and (11), with Sigma_k before theta - A as printed, or behind."""
    x = fixed(0, BATCH, D)
    w1, w2 = (np.asarray(w) for w in ideal(task(), D))
    sigma_k, error = x.T @ x / BATCH, w1 @ w2 - np.asarray(task(TARGET))
    inner = sigma_k @ error if printed else error @ sigma_k
    return float(2 * (inner @ w2.T if layer == 1 else w1.T @ inner)[0, 0])


def _anchored(real: bool) -> float:
    """Root of the second mode after `EVERY` steps from two ideal modes, anchored to the ideal or to
    the real start."""
    anchored_to = None
    if real:
        times = FINITE / (PRE[1] + PRE[2]) * np.arange(1, 5) / 4
        anchored_to = theta(at(trained(identity_start(D, FINITE), task(), list(times)), -1))
    end = theta(at(tuned(2, anchor=1.0, anchored_to=anchored_to), 0))
    return sqrt(float(diagonal(end)[MODE]))


def _iterates(printed: bool = False) -> np.ndarray:
    """f^(k)(sigma_0) of eq. (18) after `EVERY` steps, lambda = 1, with or without the missing x."""
    x = start = np.sqrt(PRE)
    square = np.array(TARGET)
    for _ in range(EVERY):
        pull = (start**2 - x**2) * (1 if printed else x)
        x = x + 2 * RATE * x * (square - x**2) + 2 * RATE * pull
    return x


def _layer_mode(anchor: float, k: int) -> float:
    """Root of the second mode along the path of gradient descent."""
    return sqrt(float(diagonal(theta(at(tuned(D, anchor=anchor), k)))[MODE]))


def _total() -> float:
    """Sum of |U^T theta V|_ij after `EVERY` steps, from three modes."""
    u, v = rotations()
    return float(np.abs(u.T @ np.asarray(theta(at(tuned(3, anchor=1.0), 0))) @ v).sum())


def _in_time() -> float:
    """The second mode at the time 0.2, by Runge-Kutta."""
    path = trained(ideal(task(), D), task(TARGET), [0.1, 0.2, 0.4, 0.8], HALF)
    return float(diagonal(theta(path))[1, MODE])


def _largest_norm() -> float:
    """max |W|_op over both layers and the path, lambda = 1."""
    path = tuned(D, STEEP, 1.0)
    return max(np.linalg.norm(np.asarray(w), 2, axis=(1, 2)).max() for w in path)


def _g() -> float:
    """g of Lemma A.28: half the gradient with respect to the layer-mode, by autodiff."""
    layers = Layers(jnp.asarray([[POINT]]), jnp.asarray([[POINT]]))
    slope = jax.jit(jax.grad(networks.objective))
    found = slope(layers, np.array([[TARGET[MODE]]]), HALF, np.array([[PRE[MODE]]]))
    return float(found.w1[0, 0]) / 2


def _limit(anchor: float, swapped: bool = False) -> float:
    """(sigma_ft + lambda sigma_pre) / (1 + lambda) of the second mode, or with swapped weights."""
    pre, ft = PRE[MODE], TARGET[MODE]
    return ((pre + anchor * ft) if swapped else (ft + anchor * pre)) / (1 + anchor)


def _contracted(rate: float) -> float:
    return (1 - rate) ** EVERY * abs(sqrt(PRE[MODE]) - sqrt(_limit(1.0)))


def _recursion() -> list[Claim]:
    at_one = f"{BOTH}, λ=1, η={RATE}, {EVERY} steps"
    at_half = f"σ_0²={PRE[MODE]}, σ²={TARGET[MODE]}, λ={HALF}"
    root, least = sqrt(_limit(HALF)), min(PRE[MODE], TARGET[MODE])
    corner = f"d={D}, a batch of {BATCH}; the first entry"
    steps, rate = "eqs. (10), (11) (Appendix A.1)", "Lemma A.28 (Appendix A.6)"
    contracted = deterministic(lambda: abs(_layer_mode(1.0, 0) - sqrt(_limit(1.0))))
    anchored = "eqs. (16), (17) and Lemma A.7 (Appendix A.3)"
    return [
        *beside(
            f"{PAPER}/eq10",
            steps,
            corner,
            deterministic(partial(_gradient, 1)),
            exact=("∂L/∂W_1 = 2 (θ - A) Σ_k W_2ᵀ", partial(_formula, 1)),
        ),
        *beside(
            f"{PAPER}/eq11",
            steps,
            corner,
            deterministic(partial(_gradient, 2)),
            printed=(
                "∂L/∂W_2 = 2 W_1ᵀ Σ_k (θ - A)",
                partial(_formula, 2, printed=True),
                "Σ_k stands on the wrong side",
            ),
            corrected=("∂L/∂W_2 = 2 W_1ᵀ (θ - A) Σ_k", partial(_formula, 2)),
        ),
        *beside(
            f"{PAPER}/eq16",
            anchored,
            f"{at_one}, n=2, τ={FINITE:g}, mode 2",
            deterministic(lambda: _anchored(real=True)),
            printed=(
                "anchored to the real θⁿ(0), the ideal modes follow f",
                lambda: _iterates()[MODE],
                "Lemma A.7 needs the ideal anchor",
            ),
        ),
        *beside(
            f"{PAPER}/eq16",
            anchored,
            f"{at_one}, n=2, mode 2",
            deterministic(lambda: _anchored(real=False)),
            corrected=(
                "anchored to the ideal θ̄ⁿ(0), the ideal modes follow f",
                lambda: _iterates()[MODE],
            ),
        ),
        *beside(
            f"{PAPER}/eq18",
            "eq. (18) (Appendix A.3.1)",
            f"{at_one}, mode 2",
            deterministic(lambda: _layer_mode(1.0, 0)),
            printed=(
                "the layers' modes iterate f = x + 2ηx(σ²-x²) + 2ηλ(σ_0²-x²)",
                lambda: _iterates(printed=True)[MODE],
                "an x is missing; Appendix A.6 restores it",
            ),
            corrected=(
                "the layers' modes iterate f = x + 2ηx(σ²-x²) + 2ηλx(σ_0²-x²)",
                lambda: _iterates()[MODE],
            ),
        ),
        *beside(
            f"{PAPER}/A.7",
            "Lemma A.7 (Appendix A.3.1)",
            f"{at_one}, n=3",
            deterministic(_total),
            exact=(
                "UᵀθⁿV is diagonal with (f^(k))² for i ≤ n, 0 for i > n: Σ_ij |UᵀθⁿV|_ij",
                lambda: (_iterates()[:3] ** 2).sum(),
            ),
        ),
        *beside(
            f"{PAPER}/A.7-flow",
            "Lemma A.7, in continuous time",
            f"{BOTH}, λ={HALF}, T=.2, mode 2",
            deterministic(_in_time),
            ours=(
                "y(T) = s/(1 + (s/y(0) - 1) e^(-4(1+λ)sT)), s = (σ_ft+λy(0))/(1+λ)",
                lambda: float(fine_tuning.mode(0.2, PRE[MODE], TARGET[MODE], HALF)),
                "tolerance: Runge-Kutta",
            ),
        ),
        *beside(
            f"{PAPER}/A.9",
            "Assumption A.8 and Lemma A.9 (Appendix A.3.1)",
            f"d={D}, σ_pre={PRE}, σ_ft={STEEP}, λ=1, η={RATE}; the largest norm of the path",
            deterministic(_largest_norm),
            relation="<=",
            attack={"exact": domains.NORMS},
            exact=("4η(λ+2)Γ < 1: |Ŵ|_op ≤ √Γ", lambda: sqrt(max(*PRE, *STEEP))),
        ),
        *beside(
            f"{PAPER}/A.28-limit",
            rate,
            at_half,
            deterministic(lambda: _layer_mode(HALF, -1)),
            printed=(
                "f^(k)(σ_0) → σ* = √((σ_0² + λσ²)/(1+λ)), small η",
                lambda: sqrt(_limit(HALF, swapped=True)),
                "the weights are swapped",
            ),
            corrected=("f^(k)(σ_0) → σ* = √((σ² + λσ_0²)/(1+λ)), small η", lambda: root),
        ),
        *beside(
            f"{PAPER}/A.28-factor",
            "proof of Lemma A.28 (Appendix A.6)",
            f"{at_half}, x={POINT}, with the true σ*",
            deterministic(_g),
            printed=(
                "g(x) = x(x-σ*)(x+(λ+1)σ*)",
                lambda: POINT * (POINT - root) * (POINT + (HALF + 1) * root),
            ),
            corrected=(
                "g(x) = (1+λ)x(x-σ*)(x+σ*)",
                lambda: (1 + HALF) * POINT * (POINT - root) * (POINT + root),
            ),
        ),
        *beside(
            f"{PAPER}/A.28-rate",
            rate,
            f"{at_one}, mode 2",
            contracted,
            relation="<=",
            attack={"corrected": domains.contraction(False), "ours": domains.contraction(True)},
            corrected=(
                "|f^(k)(σ_0) - σ*| ≤ (1 - 2η min{σ²,σ_0²})^k |σ_0 - σ*|, with the true σ*",
                lambda: _contracted(2 * RATE * least),
                "the printed rate; the search finds it not sharp, half the true one at most",
            ),
            ours=(
                "|f^(k)(σ_0) - σ*| ≤ (1 - 4η(1+λ) min{σ²,σ_0²})^k |σ_0 - σ*|",
                lambda: _contracted(8 * RATE * least),
            ),
        ),
    ]


# --- convergence (A.10, A.11, A.21, A.23) ---------------------------------------------------------

LEARNED = 3  # modes
PRECISION = 1e-6  # below what Assumption A.21 allows
BOUND = 0.2  # lambda_0, with which 4 eta (lambda_0 + 2) Gamma = 0.99
FAST = 0.035


def _precision(learned: int, anchor: float) -> float:
    """min_{i<=n} |sigma_pre - sigma_ft|^2 / (500 (lambda_0 + 1)^2 Gamma), of Lemma A.23."""
    gaps = (np.array(TARGET) - PRE)[:learned] ** 2
    return float(gaps.min() / (500 * (1 + anchor) ** 2 * GAMMA))


def _distance(learned: int, anchor: float, rate: float = RATE, steps: float | None = None) -> float:
    """|U^T theta^n V - (Sigma_ft + lambda Sigma_pre)/(1 + lambda)|_F after all steps, or after at
    least so many."""
    u, v = rotations()
    k = -1 if steps is None else ceil(steps / EVERY) - 1
    end = u.T @ np.asarray(theta(at(tuned(learned, anchor=anchor, rate=rate), k))) @ v
    limit = (np.array(TARGET) + anchor * np.array(PRE)) / (1 + anchor) * (np.arange(D) < learned)
    return float(np.linalg.norm(end - np.diag(limit)))


def _enough(rate: float) -> float:
    """log(100 Gamma/epsilon) / (rate min{sigma_pre, sigma_ft}) of the learned modes."""
    return log(100 * GAMMA / PRECISION) / (rate * min(PRE[LEARNED - 1], TARGET[LEARNED - 1]))


def _convergence() -> list[Claim]:
    at_half = f"{BOTH}, λ={HALF}"
    free = f"{BOTH}, n={LEARNED}, λ=0, λ_0={BOUND}, ε={PRECISION:g}"
    steps = "Assumption A.21, item 3, and Lemma A.23 (Appendix A.3.4)"
    near = partial(_precision, LEARNED, BOUND)
    return [
        *beside(
            f"{PAPER}/A.11",
            "Lemma A.11 (Appendix A.3.1)",
            f"{at_half}, mode 2",
            deterministic(lambda: _layer_mode(HALF, -1) ** 2),
            printed=(
                "4η(λ+2)Γ < 1, large K: |(Uᵀθ̂ⁿ(K)V)_ii - (σ_pre + λσ_ft)/(1+λ)| ≤ ε, i ≤ n",
                lambda: _limit(HALF, swapped=True),
                "the weights are swapped; Lemma A.23 has them right",
            ),
            corrected=(
                "4η(λ+2)Γ < 1, large K: |(Uᵀθ̂ⁿ(K)V)_ii - (σ_ft + λσ_pre)/(1+λ)| ≤ ε, i ≤ n",
                lambda: _limit(HALF),
            ),
        ),
        *beside(
            f"{PAPER}/A.10",
            "Assumption A.10 and Lemma A.11 (Appendix A.3.1)",
            f"{free}, η={FAST}",
            deterministic(lambda: _distance(LEARNED, 0.0, FAST, _enough(FAST))),
            relation="<=",
            attack={"corrected": domains.PRECISE},
            corrected=(
                "K ≥ log(100Γ/ε)/(η min{σ_pre,σ_ft}) steps leave an error ≤ ε, with the true limit",
                lambda: PRECISION,
                "the search finds it not sharp: a quarter of the steps is enough, see A.21-steps",
            ),
        ),
        *beside(
            f"{PAPER}/A.21-steps",
            steps,
            f"{free}, η={RATE}, infinite batch",
            deterministic(lambda: _distance(LEARNED, 0.0, RATE, _enough(1.0))),
            relation="<=",
            attack={"printed": domains.STEPS_PRINTED},
            printed=(
                "K ≥ log(100Γ/ε)/min{σ_pre,σ_ft}: error ≤ min|σ_pre-σ_ft|²/(500(λ_0+1)²Γ)",
                near,
                "1/η is missing",
            ),
        ),
        *beside(
            f"{PAPER}/A.21-steps",
            steps,
            f"{free}, η={FAST}, infinite batch",
            deterministic(lambda: _distance(LEARNED, 0.0, FAST, _enough(4 * FAST))),
            relation="<=",
            attack={"corrected": domains.STEPS},
            corrected=(
                "K ≥ log(100Γ/ε)/(4η(1+λ) min{σ_pre,σ_ft}): the same bound",
                near,
                "the search finds it not sharp: the error is 1/280 of the bound at most",
            ),
        ),
        *beside(
            f"{PAPER}/A.23",
            "Lemma A.23 (Appendix A.3.4)",
            f"{at_half}, λ_0=.6, n=d, ideal start, infinite batch",
            deterministic(lambda: _distance(D, HALF)),
            relation="<=",
            attack={"exact": domains.CONVERGED},
            exact=(
                "|UᵀθⁿV - (Σ_ft+λΣ_pre)/(1+λ)|_F ≤ min|σ_pre-σ_ft|²/(500(λ_0+1)²Γ)",
                lambda: _precision(D, 0.6),
                "the batch size that the lemma asks for grows like (1+32ηΓ)^(2K)",
            ),
        ),
    ]


CLAIMS: tuple[Claim, ...] = (*_recursion(), *_convergence())
