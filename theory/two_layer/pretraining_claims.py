"""Overtrained, Theorems 4.1 and A.1: pre-training, as printed, and as true.

The simulator is Runge-Kutta gradient flow of the network by autodiff (`networks`).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate
from theory.two_layer import riccati
from theory.two_layer.layers import Layers, ideal, identity_start, loss, theta
from theory.two_layer.tasks import (
    PAPER,
    PRE,
    SIZES,
    SUBSTEPS,
    D,
    Simulate,
    at,
    mode_path,
    normals,
    rotations,
    task,
    trained,
)


def _plateau_rate(of: str) -> Simulate:
    """Rate at which the distance to the rank-2 plateau falls with tau, from tau = 8 and 12."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del key, quick
        target = task()
        limit = ideal(target, 2)
        gaps = []
        for tau in (8.0, 12.0):
            time = tau / (PRE[1] + PRE[2])
            path = trained(identity_start(D, tau), target, [time / 4, time / 2, 3 * time / 4, time])
            end = at(path, -1)
            gap = end.w1 - limit.w1 if of == "W_1" else theta(end) - theta(limit)
            gaps.append(np.linalg.norm(np.asarray(gap)))
        return Estimate(float(np.log(gaps[0] / gaps[1])) / 4, tolerance=0.02)

    return simulate


def _start(key: Array) -> Layers:
    """A random start with W_1^T W_1 - W_2 W_2^T = 0.3 I."""
    a, b, c = np.linalg.qr(np.asarray(normals(key, True))[0, :3])[0]
    s = np.array([0.5, 0.4, 0.2, 0.0])
    return Layers(jnp.asarray((a * np.sqrt(s**2 + 0.3)) @ c.T), jnp.asarray((c * s) @ b.T))


def _flow_gap(key: Array, quick: bool) -> Estimate:
    """Largest entry of the difference of theta between Runge-Kutta and Riccati, for three legs:
    pre-training, fine-tuning with an anchor, fine-tuning without."""
    del quick
    times, gap = [0.5, 1.0, 1.5, 2.0], 0.0
    numeric = exact = _start(key)
    targets = np.asarray(normals(key, True))[1, :3] / 2
    for target, anchor in zip(targets, (0.0, 0.5, 0.0), strict=True):
        integrated = trained(numeric, jnp.asarray(target), times, anchor)
        path = riccati.flow(exact, target, times, anchor=anchor, steps=SUBSTEPS)
        gap = max(gap, float(np.abs(theta(integrated) - theta(path)).max()))
        numeric, exact = at(integrated, -1), at(path, -1)
    return Estimate(gap, tolerance=1e-8)


def _sigmoid_gap(key: Array, quick: bool) -> Estimate:
    del key, quick
    times = [1.0, 2.0, 4.0, 8.0]
    u, v = rotations(symmetric=True)
    path = trained(identity_start(D, 2.0), task(symmetric=True), times)
    simulated = np.einsum("oi,top,pi->ti", u, theta(path), v)
    return Estimate(float(np.abs(simulated - mode_path(times)).max()), tolerance=1e-8)


def _saddle(key: Array, quick: bool) -> Estimate:
    """Loss at twice t_d = tau/sigma_d, when Theorem A.1 has everything learned, for det A < 0."""
    del key, quick
    u, v = rotations()
    target = jnp.asarray((u * PRE) @ (v * [-1, 1, 1, 1]).T)
    time = 2 * 4 / PRE[-1]
    path = trained(identity_start(D, 4.0), target, [time / 4, time / 2, 3 * time / 4, time])
    return Estimate(float(loss(at(path, -1), target)), tolerance=1e-6)


def _pretraining() -> list[Claim]:
    rate = float(2 * (PRE[1] - PRE[2]) / (PRE[1] + PRE[2]))
    plateau = f"{SIZES}, U ≠ V, i=2, τ=8 and 12"
    saddle = f"{SIZES}, det A < 0, τ=4, t = 2τ/σ_d"
    return [
        Claim(
            f"{PAPER}/A.1-plateau/printed",
            "|W_1(t_i) - U(Σ^i)^½|_F ≤ e^(-Cτ): rate of decay in τ",
            f"{PAPER} Thm A.1",
            plateau,
            lambda: rate,
            _plateau_rate("W_1"),
            note="W_1 tends to U(Σ^i)^½ R with a rotation R that depends on A",
        ),
        Claim(
            f"{PAPER}/A.1-plateau/corrected",
            "|θ(t_i) - UΣ^iVᵀ|_F ~ e^(-Cτ), t_i = τ/(σ_i+σ_{i+1}), C = 2(σ_i-σ_{i+1}) t_i/τ",
            f"{PAPER} Thms 4.1 and A.1, corrected",
            plateau,
            lambda: rate,
            _plateau_rate("theta"),
            note="the product, not the layers; tolerance: next order in e^(-Cτ)",
        ),
        Claim(
            f"{PAPER}/A.1-flow/ours",
            "θ(t) of the square-root Riccati flow: largest error over three chained tasks",
            f"{PAPER} eqs. (5), (6), (9), solved",
            "d=4, W_1ᵀW_1 - W_2W_2ᵀ = 0.3 I, random targets, λ = 0, 1/2, 0",
            lambda: 0.0,
            _flow_gap,
            note="tolerance: Runge-Kutta",
        ),
        Claim(
            f"{PAPER}/A.1-sigmoid/ours",
            "U = V: θ_i(t) = σ_i/(1 + (σ_i e^(2τ) - 1) e^(-4σ_i t)): largest error",
            f"{PAPER} eqs. (5), (6), solved",
            f"{SIZES}, τ=2",
            lambda: 0.0,
            _sigmoid_gap,
            note="tolerance: Runge-Kutta",
        ),
        Claim(
            f"{PAPER}/A.1-saddle/printed",
            "every mode is learned by t_d: loss",
            f"{PAPER} Thm A.1",
            saddle,
            lambda: 0.0,
            _saddle,
            note="det θ keeps the sign it starts with",
        ),
        Claim(
            f"{PAPER}/A.1-saddle/corrected",
            "the flow stops at a saddle with loss σ_d²",
            f"{PAPER} Thm A.1, corrected",
            saddle,
            lambda: PRE[-1] ** 2,
            _saddle,
        ),
    ]


CLAIMS: tuple[Claim, ...] = tuple(_pretraining())
