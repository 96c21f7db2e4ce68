"""Overtrained, Proposition 4.3, Theorem 4.4, Appendices A.2 and D: as printed, and as true.

Simulators are noise drawn and averaged, at networks trained by Runge-Kutta gradient flow, and
Hessians by autodiff.
"""

import math
from collections.abc import Callable
from math import exp, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate
from theory.two_layer import modes, networks, perturbation, riccati, sharpness
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


def _noisy(key: Array, layers: Layers, gamma: float, quick: bool, target: Array) -> Array:
    return networks.perturbed_losses(layers, target, gamma, Layers(*normals(key, quick)))


def _increment(n: int, gamma: float) -> Simulate:
    """Paired mean of the noisy loss with n ideal modes less that with n - 1."""

    def simulate(key: Array, quick: bool) -> Estimate:
        target = task()
        more, fewer = (_noisy(key, ideal(target, m), gamma, quick, target) for m in (n, n - 1))
        return Estimate.mean(more - fewer)

    return simulate


def _noise_inflection(gamma: float) -> Simulate:
    """Definition 4.2 on mean losses with common noise; every increment is > 10 s.e. from 0."""

    def simulate(key: Array, quick: bool) -> Estimate:
        target = task()
        losses = [_noisy(key, ideal(target, n), gamma, quick, target) for n in range(D + 1)]
        inflection = modes.inflection(np.mean(losses, axis=1))
        return Estimate(math.nan if inflection is None else inflection, tolerance=0.25)

    return simulate


def _anytime(key: Array, quick: bool) -> Estimate:
    """Mean noisy loss in the middle of pre-training from tau = 3."""
    target = task()
    path = trained(identity_start(D, 3.0), target, [0.5, 1.0, 1.5, 2.0])
    return Estimate.mean(_noisy(key, at(path, -1), 0.3, quick, target))


def _anytime_exact() -> float:
    path = riccati.flow(identity_start(D, 3.0), task(), [0.5, 1.0, 1.5, 2.0], steps=SUBSTEPS)
    return float(perturbation.perturbed_loss(*at(path, -1), task(), 0.3))


def _late_rise(gamma: float) -> Simulate:
    """Paired rise of the noisy loss from the turning time of the last mode (found on the path) to
    the end of training."""

    def simulate(key: Array, quick: bool) -> Estimate:
        u, v = rotations(symmetric=True)
        target = task(symmetric=True)
        level, start = PRE[-1] - D * gamma**2, exp(-12.0)
        time = float(modes.crossing_time(level, start, PRE[-1]))
        path = trained(identity_start(D, 6.0), target, [time / 2, time, 2 * time, 4 * time])
        reached = float(u[:, -1] @ theta(at(path, 1)) @ v[:, -1])
        if abs(reached - level) > 1e-6:
            raise RuntimeError(f"the last mode is at {reached}, not at {level}")
        late, turn = (_noisy(key, at(path, k), gamma, quick, target) for k in (3, 1))
        return Estimate.mean(late - turn)

    return simulate


def _real_gap(radius: Callable[[tuple[float, ...], float], float]) -> Simulate:
    """|L~(W) - L~(W_ideal)| at distance `radius` per layer, outwards. Mean losses are exact here:
    for a loss of degree two in each layer, E L(W + gamma Z) = L + gamma^2 tr(H)/2 + constant."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del key, quick
        gamma, sigma = 20.0, (0.103, 0.102, 0.101, 0.1)
        target = task(sigma)
        start = ideal(target, D)
        epsilon = radius(sigma, gamma)
        real = Layers(*(w * (1 + epsilon / np.linalg.norm(w)) for w in start))
        means = [
            float(loss(layers, target))
            + gamma**2 / 2 * np.trace(np.asarray(networks.hessian(layers, target)))
            for layers in (real, start)
        ]
        return Estimate(abs(means[0] - means[1]), tolerance=1e-9)

    return simulate


def _printed_radius(sigma: tuple[float, ...], gamma: float) -> float:
    first, last = sigma[0], sigma[-1]
    return min(first / 2, 0.25, last**2 / (16 * D * first * (2 * first + gamma**2)))


def _corrected_radius(sigma: tuple[float, ...], gamma: float) -> float:
    size, norm = sqrt(sum(sigma)), math.hypot(*sigma)
    bound = sigma[-1] ** 2 / (size * (18 * norm + 12 * D * gamma**2))
    return min(size, norm / (3 * size), bound)


def _product_norm(key: Array, quick: bool) -> Estimate:
    """E|alpha M|_F^2 with gamma = 0.7, M = A."""
    alpha = 0.7 * np.asarray(normals(key, quick))[0]
    return Estimate.mean(np.sum((alpha @ np.asarray(task())) ** 2, axis=(1, 2)))


def _plateau_increment(n: int, gamma: float) -> float:
    return (2 * D * gamma**2 - PRE[n - 1]) * PRE[n - 1]


def _perturbation() -> list[Claim]:
    gamma = 0.35
    sharp, sufficient = sqrt(PRE[-1] / (2 * D)), sqrt(1.02 * PRE[-1] / D)
    smallest = next(n for n in range(1, D + 1) if 2 * D * gamma**2 > PRE[n - 1])
    square = float(sum(s**2 for s in PRE))
    small = "d=4, σ=(.103,.102,.101,.1), γ=20, W at the edge of the ball"
    return [
        Claim(
            f"{PAPER}/P4.3/exact",
            "L̃(n) - L̃(n-1) ≥ (2dγ² - σ_n) σ_n",
            f"{PAPER} Prop 4.3, eq. (2), and Lemma A.4, eq. (14)",
            f"{SIZES}, ideal start, n=2, γ={gamma}",
            lambda: _plateau_increment(2, gamma),
            _increment(2, gamma),
            relation=">=",
            note="true, and an equality",
        ),
        Claim(
            f"{PAPER}/P4.3-equality/exact",
            "L̃(n) - L̃(n-1) = (2dγ² - σ_n) σ_n",
            f"{PAPER} Prop 4.3, eq. (2), and Lemma A.4, eq. (14), sharpened",
            f"{SIZES}, ideal start, n=2, γ={gamma}",
            lambda: _plateau_increment(2, gamma),
            _increment(2, gamma),
        ),
        Claim(
            f"{PAPER}/A.4-first/ours",
            "L̃(1) - L̃(0) = (2dγ² - σ_1) σ_1: the lemma holds for n = 1 too",
            f"{PAPER} Lemma A.4, extended",
            f"{SIZES}, ideal start, γ={gamma}",
            lambda: _plateau_increment(1, gamma),
            _increment(1, gamma),
        ),
        Claim(
            f"{PAPER}/P4.3-anytime/ours",
            "L̃(t) = L(t) + dγ²(|W_1|² + |W_2|²) + d³γ⁴ at every time",
            f"{PAPER} Prop 4.3, extended",
            f"{SIZES}, U ≠ V, τ=3, t=2, γ=0.3",
            _anytime_exact,
            _anytime,
        ),
        Claim(
            f"{PAPER}/D4.2/printed",
            "the inflection point of Definition 4.2 is the smallest n with 2dγ² > σ_n",
            f"{PAPER} after Prop 4.3",
            f"{SIZES}, γ={gamma}",
            lambda: float(smallest),
            _noise_inflection(gamma),
            note="off by one: L̃(n-1) < L̃(n) makes n - 1 the inflection point",
        ),
        Claim(
            f"{PAPER}/D4.2/corrected",
            "the inflection point of Definition 4.2 is the smallest n with 2dγ² > σ_n, less 1",
            f"{PAPER} Def 4.2",
            f"{SIZES}, γ={gamma}",
            lambda: float(smallest - 1),
            _noise_inflection(gamma),
            note="seen: 1, an index",
            effect=1.0,
        ),
        Claim(
            f"{PAPER}/T4.4/exact",
            "γ² > σ_d/d: the loss under noise rises at the end, L̃(d) - L̃(d-1) ≥ 0",
            f"{PAPER} Thms 4.4 and A.3",
            f"{SIZES}, ideal start, γ² = 1.02 σ_d/d",
            lambda: 0.0,
            _increment(D, sufficient),
            relation=">=",
            note="sufficient; half of it is enough",
        ),
        Claim(
            f"{PAPER}/T4.4-sharp/ours",
            "the sharp threshold is γ² = σ_d/(2d), where L̃(d) = L̃(d-1)",
            f"{PAPER} Thms 4.4 and A.3, sharpened",
            f"{SIZES}, ideal start",
            lambda: 0.0,
            _increment(D, sharp),
        ),
        Claim(
            f"{PAPER}/T4.4-continuous/ours",
            "in continuous time each mode's share falls until y = σ - dγ², then rises by (dγ²)²",
            f"{PAPER} Thm 4.4, in continuous time",
            f"{SIZES}, U = V, τ=6, last mode, γ=0.2",
            lambda: (D * 0.2**2) ** 2,
            _late_rise(0.2),
        ),
        Claim(
            f"{PAPER}/A.5/exact",
            "E|αM|_F² = dγ²|M|_F²",
            f"{PAPER} Lemma A.5",
            f"{SIZES}, M = A, γ=0.7",
            lambda: D * 0.49 * square,
            _product_norm,
        ),
        Claim(
            f"{PAPER}/A.5/printed",
            "E|αM|_F² = E tr(ααᵀ) |M|_F²",
            f"{PAPER} proof of Lemma A.5",
            f"{SIZES}, M = A, γ=0.7",
            lambda: D**2 * 0.49 * square,
            _product_norm,
            note="d times too large",
        ),
        Claim(
            f"{PAPER}/A.6/printed",
            "|L̃(real) - L̃(ideal)| ≤ σ_d²/2 within the distance that Assumption A.2 allows",
            f"{PAPER} Lemma A.6",
            small,
            lambda: 0.1**2 / 2,
            _real_gap(_printed_radius),
            relation="<=",
            note="the proof takes |W|_F ≤ σ_1 where |W|_F² = Σσ_i",
        ),
        Claim(
            f"{PAPER}/A.6/corrected",
            "the same within min{√S, T/(3√S), σ_d²/(√S(18T + 12dγ²))}, S = Σσ_i, T² = Σσ_i²",
            f"{PAPER} Assumption A.2 and Lemma A.6, corrected",
            small,
            lambda: 0.1**2 / 2,
            _real_gap(_corrected_radius),
            relation="<=",
        ),
    ]


# --- sharpness ------------------------------------------------------------------------------------


def _quadratic(sign: int) -> Simulate:
    """E[L(x + lambda e) - L(x)], or its negative, for a random quadratic, lambda = 0.3."""

    def simulate(key: Array, quick: bool) -> Estimate:
        H = _random_hessian()
        x = np.full(D, 0.2)
        moved = x + 0.3 * np.asarray(normals(key, quick))[0, :, 0]
        value = np.einsum("ni,ij,nj->n", moved, H, moved) / 2 - x @ H @ x / 2
        return Estimate.mean(sign * value)

    return simulate


def _random_hessian() -> np.ndarray:
    half = np.asarray(task())
    return half + half.T + 3 * np.eye(D)


def _quadratic_exact() -> float:
    return float(0.3**2 / 2 * np.trace(_random_hessian()))


def _beyond_quadratic(key: Array, quick: bool) -> Estimate:
    """E L(W + gamma Z) - L(W) - gamma^2 tr(H)/2 with H by autodiff, gamma = 0.5, three modes."""
    target, gamma = task(), 0.5
    layers = ideal(target, 3)
    trace = np.trace(np.asarray(networks.hessian(layers, target)))
    predicted = float(loss(layers, target)) + gamma**2 / 2 * trace
    return Estimate.mean(np.asarray(_noisy(key, layers, gamma, quick, target)) - predicted)


def _sharpness_gap(key: Array, quick: bool) -> Estimate:
    """Largest error of the top Hessian eigenvalue along training, relative to 4 sigma_1."""
    del key, quick
    times, target = [1.0, 2.0, 4.0, 8.0], task(symmetric=True)
    path = trained(identity_start(D, 2.0), target, times)
    law = jax.jit(sharpness.mode_sharpness)(mode_path(times), jnp.array(PRE))
    tops = [np.linalg.eigvalsh(networks.hessian(at(path, k), target))[-1] for k in range(4)]
    return Estimate(float(np.abs(tops - np.asarray(law)).max()) / (4 * PRE[0]), tolerance=1e-8)


def _sharpening(key: Array, quick: bool) -> Estimate:
    """Smallest growth of tr(H) between times, from a small start."""
    del key, quick
    path = trained(identity_start(D, 3.0), task(), [0.5, 1.0, 2.0, 4.0])
    traces = [np.trace(np.asarray(networks.hessian(at(path, k), task()))) for k in range(4)]
    return Estimate(float(np.diff(traces).min()), tolerance=1e-9)


def _sharpness() -> list[Claim]:
    return [
        Claim(
            f"{PAPER}/D.1/exact",
            "E[L(θ+λε) - L(θ)] = λ² tr(H)/2 for a quadratic loss",
            f"{PAPER} Prop D.1",
            f"d={D}, λ=0.3",
            _quadratic_exact,
            _quadratic(1),
        ),
        Claim(
            f"{PAPER}/D.1/printed",
            "E[L(θ) - L(θ+λε)] = λ² tr(H)/2",
            f"{PAPER} eqs. (19), (20)",
            f"d={D}, λ=0.3",
            _quadratic_exact,
            _quadratic(-1),
            note="the sign of the left side is reversed",
        ),
        Claim(
            f"{PAPER}/D.1-network/ours",
            "for the network the quadratic prediction is too low by d³γ⁴, wherever it is",
            f"{PAPER} Appendix D, quantified",
            f"{SIZES}, three modes learned, γ=0.5",
            lambda: D**3 * 0.5**4,
            _beyond_quadratic,
        ),
        Claim(
            f"{PAPER}/D.1-sharpness/ours",
            "top Hessian eigenvalue along training: largest error, relative to 4σ_1",
            f"{PAPER} Appendix D, solved",
            f"{SIZES}, U = V, τ=2, t = 1, 2, 4, 8",
            lambda: 0.0,
            _sharpness_gap,
            note="tolerance: Runge-Kutta",
        ),
        Claim(
            f"{PAPER}/D.1-sharpening/ours",
            "tr(H) = 2d(|W_1|² + |W_2|²) grows throughout training: smallest growth",
            f"{PAPER} Appendix D, progressive sharpening",
            f"{SIZES}, U ≠ V, τ=3",
            lambda: 0.0,
            _sharpening,
            relation=">=",
        ),
    ]


CLAIMS: tuple[Claim, ...] = (*_perturbation(), *_sharpness())
