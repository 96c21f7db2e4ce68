"""Overtrained, Proposition 4.3, Theorem 4.4, Appendices A.2 and D: as printed, and as true.

Simulators are noise drawn and averaged, at networks trained by Runge-Kutta gradient flow, and
Hessians by autodiff.
"""

import math
from collections.abc import Callable
from functools import partial
from math import exp, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate, beside
from theory.two_layer import modes, networks, perturbation, riccati, sharpness
from theory.two_layer import sensitivity_domains as domains
from theory.two_layer.layers import Layers, ideal, identity_start, loss
from theory.two_layer.tasks import (
    PAPER,
    PRE,
    SIZES,
    SUBSTEPS,
    D,
    Simulate,
    at,
    deterministic,
    mode_path,
    normals,
    task,
    trained,
)

GAMMA = 0.35  # of the noise, unless said otherwise
ANYTIME, LATE, PRODUCT, QUADRATIC, NETWORK = 0.3, 0.2, 0.7, 0.3, 0.5
TIMES = [0.5, 1.0, 1.5, 2.0]
STRONG = 0.6  # noise with which every mode raises the loss
SMALLER = (1.1, 0.825, 0.33, 0.165)  # .55 `PRE`
DECAYING = (2.0, 0.84, 0.054, 0.007)  # as steep as the cube of `PRE`
SMALL, LOUD = (0.103, 0.102, 0.101, 0.1), 20.0  # singular values and noise for Lemma A.6


def _plateaus(sigma: np.ndarray, gamma: float) -> np.ndarray:
    return np.asarray(jax.jit(perturbation.plateau_losses)(sigma, gamma))


def _noisy(key: Array, layers: Layers, gamma: float, quick: bool, target: Array) -> np.ndarray:
    """The loss of one network under draws of noise on its weights."""
    first, second = (w + gamma * z for w, z in zip(layers, normals(key, quick), strict=True))
    return np.sum((first @ second - np.asarray(target)) ** 2, (-2, -1))


def _rises(key: Array, quick: bool, n: int, gamma: float) -> np.ndarray:
    """The noisy loss with n ideal modes less that with n - 1, by common draws."""
    target = task()
    more, fewer = (_noisy(key, ideal(target, m), gamma, quick, target) for m in (n, n - 1))
    return more - fewer


def _increment(n: int, gamma: float) -> Simulate:
    return lambda key, quick: Estimate.mean(_rises(key, quick, n, gamma))


def _plateau(n: int, gamma: float) -> Simulate:
    """Mean noisy loss with n ideal modes."""
    return lambda key, quick: Estimate.mean(_noisy(key, ideal(task(), n), gamma, quick, task()))


def _threshold(key: Array, quick: bool) -> Estimate:
    """The gamma^2 at which learning the last mode neither raises nor lowers the noisy loss, which
    it changes by -sigma_d^2 without noise: linear in gamma^2."""
    rises = _rises(key, quick, D, GAMMA)
    slope, free = (rises + PRE[-1] ** 2) / GAMMA**2, PRE[-1] ** 2
    mean = Estimate.mean(slope)
    return Estimate(free / mean.value, stderr=(mean.stderr or 0.0) * free / mean.value**2)


def _inflection(
    sigma: tuple[float, ...] = PRE, gamma: float = GAMMA
) -> Callable[[Array, bool], Estimate]:
    """Definition 4.2 on mean losses with common noise; every increment is > 4 s.e. from 0, with the
    draws of a quick check, too."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        target = task(sigma)
        mean = [_noisy(key, ideal(target, n), gamma, True, target).mean() for n in range(D + 1)]
        found = next((r for r in range(1, D) if mean[r] < mean[r + 1]), math.nan)
        return Estimate(found, tolerance=0.25)

    return simulate


def _moves(sigma: tuple[float, ...]) -> Simulate:
    """The inflection point of a spectrum less that of `PRE`."""
    return lambda key, quick: Estimate(
        _inflection(sigma)(key, quick).value - _inflection()(key, quick).value, tolerance=0.25
    )


def _index(sigma: tuple[float, ...] = PRE, gamma: float = GAMMA) -> float:
    return float(perturbation.inflection_index(sigma, D, gamma) or math.nan)


def _anytime(key: Array, quick: bool) -> Estimate:
    """Mean noisy loss in the middle of pre-training from tau = 3."""
    path = trained(identity_start(D, 3.0), task(), TIMES)
    return Estimate.mean(_noisy(key, at(path, -1), ANYTIME, quick, task()))


def _exact_path() -> Layers:
    return riccati.flow(identity_start(D, 3.0), task(), TIMES, steps=SUBSTEPS)


def _late_rise(key: Array, quick: bool) -> Estimate:
    """Paired rise of the noisy loss from the turning time of the last mode (found on the path) to
    the end of training."""
    target = task(symmetric=True)
    level = PRE[-1] - D * LATE**2
    time = float(modes.crossing_time(level, exp(-12.0), PRE[-1]))
    path = trained(identity_start(D, 6.0), target, [time / 2, time, 2 * time, 4 * time])
    late, turn = (_noisy(key, at(path, k), LATE, quick, target) for k in (3, 1))
    return Estimate.mean(late - turn)


def _real_gap(radius: Callable[[], float]) -> float:
    """|L~(W) - L~(W_ideal)| at distance `radius` per layer, outwards. Mean losses are exact here:
    for a loss of degree two in each layer, E L(W + gamma Z) = L + gamma^2 tr(H)/2 + constant."""
    target = task(SMALL)
    start, means = ideal(target, D), []
    real = Layers(*(w * (1 + radius() / np.linalg.norm(w)) for w in start))
    for layers in (real, start):
        trace = np.trace(np.asarray(networks.hessian(layers, target)))
        means.append(float(loss(layers, target)) + LOUD**2 / 2 * trace)
    return abs(means[0] - means[1])


def _printed_radius() -> float:
    first, last = SMALL[0], SMALL[-1]
    return min(first / 2, 0.25, last**2 / (16 * D * first * (2 * first + LOUD**2)))


def _corrected_radius() -> float:
    size, norm = sqrt(sum(SMALL)), math.hypot(*SMALL)
    bound = SMALL[-1] ** 2 / (size * (18 * norm + 12 * D * LOUD**2))
    return min(size, norm / (3 * size), bound)


def _product_norm(key: Array, quick: bool) -> Estimate:
    """E|alpha M|_F^2, M = A."""
    alpha = PRODUCT * normals(key, quick)[0]
    return Estimate.mean(np.sum((alpha @ np.asarray(task())) ** 2, axis=(1, 2)))


def _rise(n: int) -> float:
    return (2 * D * GAMMA**2 - PRE[n - 1]) * PRE[n - 1]


def _perturbation() -> list[Claim]:
    sufficient = sqrt(1.02 * PRE[-1] / D)
    smallest = next(n for n in range(1, D + 1) if PRE[n - 1] < 2 * D * GAMMA**2)
    square = PRODUCT**2 * sum(s**2 for s in PRE)
    second = f"{SIZES}, ideal start, n=2, γ={GAMMA}"
    small = f"d={D}, σ={SMALL}, γ={LOUD:g}, W at the edge of the ball"
    return [
        *beside(
            f"{PAPER}/P4.3",
            "Prop 4.3, eq. (2) (Section 4.2), and Lemma A.4, eq. (14) (Appendix A.2)",
            second,
            _increment(2, GAMMA),
            relation=">=",
            attack={"exact": domains.INCREMENT},
            exact=("L̃(n) - L̃(n-1) ≥ (2dγ² - σ_n) σ_n, n > 1", partial(_rise, 2)),
        ),
        *beside(
            f"{PAPER}/P4.3-equality",
            "proof of Lemma A.4, after Lemma A.5 (Appendix A.2)",
            second,
            _increment(2, GAMMA),
            exact=("L̃(n) - L̃(n-1) = 2dγ²σ_n - σ_n²", partial(_rise, 2)),
        ),
        *beside(
            f"{PAPER}/A.4-first",
            "Lemma A.4 (Appendix A.2), extended",
            f"{SIZES}, ideal start, γ={GAMMA}",
            _increment(1, GAMMA),
            ours=(
                "L̃(1) - L̃(0) = (2dγ² - σ_1) σ_1: the lemma holds for n = 1 too",
                partial(_rise, 1),
            ),
        ),
        *beside(
            f"{PAPER}/P4.3-anytime",
            "Prop 4.3 (Section 4.2), extended",
            f"{SIZES}, U ≠ V, τ=3, t={TIMES[-1]:g}, γ={ANYTIME}",
            _anytime,
            ours=(
                "L̃(t) = L(t) + dγ²(|W_1|² + |W_2|²) + d³γ⁴ at every time",
                lambda: float(perturbation.perturbed_loss(*at(_exact_path(), -1), task(), ANYTIME)),
            ),
        ),
        *beside(
            f"{PAPER}/D4.2",
            "after Prop 4.3 (Section 4.2), by Definition 4.2",
            f"{SIZES}, γ={GAMMA}",
            _inflection(),
            effect=1.0,
            printed=(
                "the inflection point is the smallest n with 2dγ² > σ_n",
                lambda: float(smallest),
                "off by one: L̃(n-1) < L̃(n) makes n - 1 the inflection point",
            ),
            corrected=(
                "the inflection point is the smallest n with 2dγ² > σ_n, less 1",
                lambda: float(smallest - 1),
                "seen: 1, an index",
            ),
        ),
        *beside(
            f"{PAPER}/D4.2-first",
            "Definition 4.2 (Section 4.1): t_1, ..., t_d",
            f"{SIZES}, γ={STRONG}: 2dγ² > σ_1",
            _inflection(gamma=STRONG),
            effect=1.0,
            exact=(
                "the inflection point is at least 1, also where the first mode hurts already",
                lambda: _index(gamma=STRONG),
                "seen: 1, an index",
            ),
        ),
        *(
            claim
            for name, which, sigma in (
                ("smaller", "smaller", SMALLER),
                ("decay", "more quickly decaying", DECAYING),
            )
            for claim in beside(
                f"{PAPER}/D4.2-{name}",
                "after Prop 4.3 (Section 4.2)",
                f"{SIZES} and {sigma}, γ={GAMMA}",
                _moves(sigma),
                effect=1.0,
                exact=(
                    f"{which} features have a smaller inflection point: its change",
                    lambda sigma=sigma: _index(sigma) - _index(),
                    "seen: 1, an index",
                ),
            )
        ),
        *beside(
            f"{PAPER}/T4.4",
            "Theorem 4.4 (Section 4.2) and Theorem A.3 (Appendix A.2)",
            f"{SIZES}, ideal start, n=d, γ² = 1.02 σ_d/d",
            _plateau(D, sufficient),
            relation=">=",
            attack={"exact": domains.HARMFUL},
            exact=(
                "γ² > σ_d/d: L̃(n) ≥ L̃(n-1) at the end of training",
                lambda: float(_plateaus(np.array(PRE), sufficient)[D - 1]),
                "sufficient; half of it is enough",
            ),
        ),
        *beside(
            f"{PAPER}/T4.4-sharp",
            "Theorems 4.4 and A.3, sharpened",
            f"{SIZES}, ideal start",
            _threshold,
            ours=(
                "the sharp threshold, where L̃(d) = L̃(d-1), is γ² = σ_d/(2d)",
                lambda: PRE[-1] / (2 * D),
            ),
        ),
        *beside(
            f"{PAPER}/T4.4-continuous",
            "Theorem 4.4, in continuous time",
            f"{SIZES}, U = V, τ=6, last mode, γ={LATE}",
            _late_rise,
            ours=(
                "each mode's share falls until y = σ - dγ², then rises by (dγ²)²",
                lambda: (D * LATE**2) ** 2,
            ),
        ),
        *beside(
            f"{PAPER}/A.5",
            "Lemma A.5 and its proof (Appendix A.2)",
            f"{SIZES}, M = A, γ={PRODUCT}",
            _product_norm,
            exact=("E|αM|_F² = dγ²|M|_F²", lambda: D * square),
            printed=(
                "E tr(αMMᵀαᵀ) = E tr(ααᵀ) |M|_F², in the proof",
                lambda: D**2 * square,
                "d times too large",
            ),
        ),
        *beside(
            f"{PAPER}/A.6",
            "Assumption A.2 and Lemma A.6 (Appendix A.2)",
            small,
            deterministic(lambda: _real_gap(_printed_radius)),
            relation="<=",
            attack={"printed": domains.real_starts(False)},
            printed=(
                (
                    "|W_i - W̄_i| ≤ min{σ_1/2, 1/4, σ_d²/(16dσ_1(2σ_1+γ²))}: |L̃(real) - L̃(ideal)| ≤"
                    " σ_d²/2"
                ),
                lambda: SMALL[-1] ** 2 / 2,
                "the proof takes |W|_F ≤ σ_1 where |W|_F² = Σσ_i",
            ),
        ),
        *beside(
            f"{PAPER}/A.6",
            "Assumption A.2 and Lemma A.6 (Appendix A.2), corrected",
            small,
            deterministic(lambda: _real_gap(_corrected_radius)),
            relation="<=",
            attack={"corrected": domains.real_starts(True)},
            corrected=(
                "the same within min{√S, T/(3√S), σ_d²/(√S(18T + 12dγ²))}, S = Σσ_i, T² = Σσ_i²",
                lambda: SMALL[-1] ** 2 / 2,
                "the search finds it not sharp, 1.5 times too large",
            ),
        ),
    ]


# --- sharpness ------------------------------------------------------------------------------------


def _random_hessian() -> np.ndarray:
    half = np.asarray(task())
    return half + half.T + 3 * np.eye(D)


def _quadratic(key: Array, quick: bool) -> Estimate:
    """E[L(x + lambda e) - L(x)] for a quadratic."""
    H, x = _random_hessian(), np.full(D, 0.2)
    moved = x + QUADRATIC * normals(key, quick)[0, :, 0]
    return Estimate.mean(np.einsum("ni,ij,nj->n", moved, H, moved) / 2 - x @ H @ x / 2)


def _half_trace(sign: int) -> float:
    return float(sign * QUADRATIC**2 / 2 * np.trace(_random_hessian()))


def _beyond_quadratic(key: Array, quick: bool) -> Estimate:
    """E L(W + gamma Z) - L(W) - gamma^2 tr(H)/2 with H by autodiff, three modes."""
    target = task()
    layers = ideal(target, 3)
    trace = np.trace(np.asarray(networks.hessian(layers, target)))
    predicted = float(loss(layers, target)) + NETWORK**2 / 2 * trace
    return Estimate.mean(np.asarray(_noisy(key, layers, NETWORK, quick, target)) - predicted)


def _hessian_at(time: float) -> np.ndarray:
    """The Hessian at a network that was trained for some time, by autodiff."""
    target = task(symmetric=True)
    path = trained(identity_start(D, 2.0), target, [time / 4, time / 2, 3 * time / 4, time])
    return np.asarray(networks.hessian(at(path, -1), target))


def _sharpness() -> list[Claim]:
    return [
        *beside(
            f"{PAPER}/D.1",
            "Proposition D.1 (Appendix D)",
            f"d={D}, λ={QUADRATIC}",
            _quadratic,
            exact=("quadratic loss: E[L(θ+λε) - L(θ)] = ½ λ² tr(H)", partial(_half_trace, 1)),
            printed=(
                "E[L(θ) - L(θ+λε)] = ½ λ² tr(H): eqs. (19), (20), in the proof",
                partial(_half_trace, -1),
                "the sign of the left side is reversed",
            ),
        ),
        *beside(
            f"{PAPER}/D.1-network",
            "Appendix D, quantified",
            f"{SIZES}, three modes learned, γ={NETWORK}",
            _beyond_quadratic,
            ours=(
                "for the network the quadratic prediction is too low by d³γ⁴, wherever it is",
                lambda: D**3 * NETWORK**4,
            ),
        ),
        *beside(
            f"{PAPER}/D.1-sharpness",
            "Appendix D, solved",
            f"{SIZES}, U = V, τ=2, t=1",
            deterministic(lambda: np.linalg.eigvalsh(_hessian_at(1.0))[-1], 1e-8),
            ours=(
                "the top Hessian eigenvalue along training, from the modes",
                lambda: float(
                    jax.jit(sharpness.mode_sharpness)(mode_path([1.0])[0], jnp.array(PRE))
                ),
                "tolerance: Runge-Kutta",
            ),
        ),
        *beside(
            f"{PAPER}/D.1-sharpening",
            "Appendix D, progressive sharpening",
            f"{SIZES}, U = V, τ=2, from t=.5 to 1",
            deterministic(lambda: np.trace(_hessian_at(1.0)), 1e-8),
            relation=">=",
            attack={"ours": domains.SHARPENING},
            ours=(
                "U = V, σ_d ≥ e^(-2τ): tr(H) = 2d(|W_1|² + |W_2|²) grows throughout training",
                lambda: 4 * D * float(mode_path([0.5])[0].sum()),
                "for U ≠ V it may fall, at first where tr A < d e^(-2τ), and later, too",
            ),
        ),
    ]


CLAIMS: tuple[Claim, ...] = (*_perturbation(), *_sharpness())
