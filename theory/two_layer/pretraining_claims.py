"""Overtrained, Theorems 4.1 and A.1: pre-training, as printed, and as true.

The simulator is Runge-Kutta gradient flow of the network by autodiff (`networks`).
"""

import jax.numpy as jnp
import numpy as np

from theory.claims import Claim, beside
from theory.two_layer import riccati
from theory.two_layer.layers import Layers, ideal, identity_start, loss, theta
from theory.two_layer.tasks import (
    PAPER,
    PRE,
    SIZES,
    SUBSTEPS,
    D,
    at,
    deterministic,
    fixed,
    mode_path,
    rotations,
    task,
    trained,
)

LEGS = ((0, 0.0), (1, 0.5), (2, 0.0))  # seed of the target, anchor
TIMES = [0.5, 1.0, 1.5, 2.0]
IMBALANCE = 0.3
EARLY, LATE = 8.0, 12.0  # tau
TAU = 4.0
RANK_TAUS = 5.0, 7.0


def _quarters(time: float) -> list[float]:
    return [time / 4, time / 2, 3 * time / 4, time]


def _rank_rate() -> float:
    """Rate at which theta(t_R) nears a target of rank R = 2 < d, with tau."""
    target, gaps = task((*PRE[:2], 0.0, 0.0)), []
    for tau in RANK_TAUS:
        end = at(trained(identity_start(D, tau), target, _quarters(tau / PRE[1])), -1)
        gaps.append(np.linalg.norm(np.asarray(theta(end)) - np.asarray(target)))
    return float(np.log(gaps[0] / gaps[1])) / (RANK_TAUS[1] - RANK_TAUS[0])


def _plateau_rate(of: str) -> float:
    """Rate at which the distance to the rank-2 plateau falls with tau."""
    target, gaps = task(), []
    limit = ideal(target, 2)
    for tau in (EARLY, LATE):
        start = identity_start(D, tau)
        end = at(trained(start, target, _quarters(tau / (PRE[1] + PRE[2]))), -1)
        gap = end.w1 - limit.w1 if of == "W_1" else theta(end) - theta(limit)
        gaps.append(np.linalg.norm(np.asarray(gap)))
    return float(np.log(gaps[0] / gaps[1])) / (LATE - EARLY)


def _unbalanced() -> Layers:
    """A start with W_1^T W_1 - W_2 W_2^T = `IMBALANCE` I."""
    a, b, c = np.linalg.qr(fixed(3, 3, D, D))[0]
    s = np.array([0.5, 0.4, 0.2, 0.0])
    return Layers(jnp.asarray((a * np.sqrt(s**2 + IMBALANCE)) @ c.T), jnp.asarray((c * s) @ b.T))


def _last_entry(exact: bool) -> float:
    """theta_11 after three chained tasks, by the Riccati flow or by Runge-Kutta."""
    layers = _unbalanced()
    for seed, anchor in LEGS:
        target = fixed(seed, D, D) / 2
        path = (
            riccati.flow(layers, target, TIMES, anchor=anchor, steps=SUBSTEPS)
            if exact
            else trained(layers, jnp.asarray(target), TIMES, anchor)
        )
        layers = at(path, -1)
    return float(theta(layers)[0, 0])


def _symmetric_mode() -> float:
    """theta_2 at the time 1, from tau = 2."""
    path = trained(identity_start(D, 2.0), task(symmetric=True), [0.5, 1.0, 1.5, 2.0])
    u, v = rotations(symmetric=True)
    return float(u[:, 1] @ np.asarray(theta(path))[1] @ v[:, 1])


def _saddle() -> float:
    """Loss at twice t_d = tau/sigma_d, when Theorem A.1 has everything learned, for det A < 0."""
    u, v = rotations()
    target = jnp.asarray((u * PRE) @ (v * [-1, 1, 1, 1]).T)
    return float(
        loss(at(trained(identity_start(D, TAU), target, _quarters(2 * TAU / PRE[-1])), -1), target)
    )


def _claims() -> list[Claim]:
    rate = 2 * (PRE[1] - PRE[2]) / (PRE[1] + PRE[2])
    plateau = f"{SIZES}, U ≠ V, i=2, τ={EARLY:g} and {LATE:g}"
    anchors = ", ".join(f"{anchor:g}" for _, anchor in LEGS)
    stem, source = f"{PAPER}/A.1-plateau", "Theorem A.1 (Appendix A.1)"
    return [
        *beside(
            stem,
            source,
            plateau,
            deterministic(lambda: _plateau_rate("W_1"), 0.02),
            printed=(
                "W_i(0)=e^(-τ)I: |W_1(t_i) - U(Σ^i)^½|_F ≤ e^(-Cτ) for some C > 0: decay in τ",
                lambda: rate,
                "W_1 tends to U(Σ^i)^½ R with a rotation R; predicted: the product's C",
            ),
        ),
        *beside(
            stem,
            "Theorem 4.1 (Section 4.1) and Theorem A.1 (Appendix A.1)",
            plateau,
            deterministic(lambda: _plateau_rate("theta"), 0.02),
            corrected=(
                "|θ(t_i) - UΣ^iVᵀ|_F ~ e^(-Cτ), t_i = τ/(σ_i+σ_{i+1}), C = 2(σ_i-σ_{i+1}) t_i/τ",
                lambda: rate,
                "the product, not the layers; tolerance: next order in e^(-Cτ)",
            ),
        ),
        *beside(
            f"{PAPER}/A.1-rank",
            "Theorem A.1 (Appendix A.1), R < d",
            f"d={D}, σ={(*PRE[:2], 0, 0)}, U ≠ V, τ={RANK_TAUS[0]:g} and {RANK_TAUS[1]:g}",
            deterministic(_rank_rate, 0.02),
            corrected=(
                "A of rank R < d: |θ(t_R) - A|_F ~ e^(-Cτ), t_R = τ/σ_R, C = 2",
                lambda: 2.0,
                "the product, not the layers; tolerance: next order in e^(-τ)",
            ),
        ),
        *beside(
            f"{PAPER}/A.1-flow",
            "eqs. (5), (6), (9) (Appendix A.1), solved",
            f"d={D}, W_1ᵀW_1 - W_2W_2ᵀ = {IMBALANCE} I, three targets one after the other,"
            f" λ = {anchors}",
            deterministic(lambda: _last_entry(False), 1e-8),
            ours=(
                "θ_11 at the end, by the square-root Riccati flow",
                lambda: _last_entry(True),
                "tolerance: Runge-Kutta",
            ),
        ),
        *beside(
            f"{PAPER}/A.1-sigmoid",
            "eqs. (5), (6) (Appendix A.1), solved",
            f"{SIZES}, τ=2, i=2, t=1",
            deterministic(_symmetric_mode, 1e-8),
            ours=(
                "U = V: θ_i(t) = σ_i/(1 + (σ_i e^(2τ) - 1) e^(-4σ_i t))",
                lambda: float(mode_path([1.0])[0, 1]),
                "tolerance: Runge-Kutta",
            ),
        ),
        *beside(
            f"{PAPER}/A.1-saddle",
            source,
            f"{SIZES}, det A < 0, τ={TAU:g}, t = 2τ/σ_d",
            deterministic(_saddle, 1e-6),
            printed=(
                "W_i(0)=e^(-τ)I, A of rank d: θ(t_d) → A with τ: loss",
                lambda: 0.0,
                "det θ keeps the sign it starts with, at every time and for every τ",
            ),
            corrected=("the flow stops at a saddle with loss σ_d²", lambda: PRE[-1] ** 2),
        ),
    ]


CLAIMS: tuple[Claim, ...] = tuple(_claims())
