"""Overtrained, Proposition 4.3, Theorem 4.4, Appendices A.2 and D, as printed and corrected.

Simulators average over random noise at networks trained by Runge-Kutta gradient flow, and compute
Hessians by autodiff. γ is the standard deviation of the noise on the weights.
"""

import math
from collections.abc import Callable
from math import exp, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, Simulate
from theory.two_layer import modes, networks, perturbation, riccati, sharpness
from theory.two_layer import sensitivity_domains as domains
from theory.two_layer.layers import Layers, ideal, identity_start, loss
from theory.two_layer.tasks import (
    PRE,
    SIZES,
    SUBSTEPS,
    D,
    at,
    claim,
    deterministic,
    mode_path,
    normals,
    task,
    trained,
)

GAMMA = 0.35  # of the noise, unless said otherwise
ANYTIME, LATE, QUADRATIC = 0.3, 0.2, 0.3
TIMES = [0.5, 1.0, 1.5, 2.0]
SUFFICIENT = sqrt(1.02 * PRE[-1] / D)
SECOND = f"{SIZES}, ideal start, n=2, noise γ={GAMMA}"
SMALL, LOUD = (0.103, 0.102, 0.101, 0.1), 20.0  # singular values and noise for Lemma A.6
EDGE = f"d={D}, σ={SMALL}, noise γ={LOUD:g}, W at the edge of the ball"


def _noisy(key: Array, layers: Layers, gamma: float, quick: bool, target: Array) -> np.ndarray:
    """Computes the loss of one network under draws of noise on its weights."""
    first, second = (w + gamma * z for w, z in zip(layers, normals(key, quick), strict=True))
    return np.sum((first @ second - np.asarray(target)) ** 2, (-2, -1))


def _rises(key: Array, quick: bool, n: int, gamma: float) -> np.ndarray:
    """Computes the noisy loss with n ideal modes minus the loss with n - 1, by common draws."""
    target = task()
    more, fewer = (_noisy(key, ideal(target, m), gamma, quick, target) for m in (n, n - 1))
    return more - fewer


def _increment(n: int, gamma: float) -> Simulate:
    return lambda key, quick: Estimate.mean(_rises(key, quick, n, gamma))


def _inflection(
    sigma: tuple[float, ...] = PRE, gamma: float = GAMMA
) -> Callable[[Array, bool], Estimate]:
    """Applies Definition 4.2 to mean losses with common noise. Every increment is > 4 s.e. from 0,
    even in quick checks.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        target = task(sigma)
        mean = [_noisy(key, ideal(target, n), gamma, True, target).mean() for n in range(D + 1)]
        found = next((r for r in range(1, D) if mean[r] < mean[r + 1]), math.nan)
        return Estimate(found, tolerance=0.25)

    return simulate


def _index(sigma: tuple[float, ...] = PRE, gamma: float = GAMMA) -> float:
    return float(perturbation.inflection_index(sigma, D, gamma) or math.nan)


def _real_gap(radius: float) -> float:
    """Computes |L~(W) - L~(W_ideal)| at distance `radius` per layer, outwards. Mean losses are
    exact, since E L(W + gamma Z) = L + gamma^2 tr(H)/2 + constant for a loss of degree two in each
    layer.
    """
    target = task(SMALL)
    start, means = ideal(target, D), []
    real = Layers(*(w * (1 + radius / np.linalg.norm(w)) for w in start))
    for layers in (real, start):
        trace = np.trace(np.asarray(networks.hessian(layers, target)))
        means.append(float(loss(layers, target)) + LOUD**2 / 2 * trace)
    return abs(means[0] - means[1])


def _rise(n: int) -> float:
    return (2 * D * GAMMA**2 - PRE[n - 1]) * PRE[n - 1]


@claim("P4.3/exact", ">=", attack=domains.INCREMENT)
def _():
    """L̃(n) - L̃(n-1) ≥ (2dγ² - σ_n) σ_n, n > 1

    Source: Prop 4.3, eq. (2) (Section 4.2), and Lemma A.4, eq. (14) (Appendix A.2)
    Domain: {SECOND}
    """
    return _rise(2), _increment(2, GAMMA)


@claim("P4.3-equality/exact")
def _():
    """L̃(n) - L̃(n-1) = 2dγ²σ_n - σ_n²

    Source: proof of Lemma A.4, after Lemma A.5 (Appendix A.2)
    Domain: {SECOND}
    """
    return _rise(2), _increment(2, GAMMA)


@claim("A.4-first/ours")
def _():
    """L̃(1) - L̃(0) = (2dγ² - σ_1) σ_1, so the lemma holds for n = 1 too

    Source: Lemma A.4 (Appendix A.2), extended
    Domain: {SIZES}, ideal start, noise γ={GAMMA}
    """
    return _rise(1), _increment(1, GAMMA)


LAST = TIMES[-1]


@claim("P4.3-anytime/ours")
def _():
    """L̃(t) = L(t) + dγ²(|W_1|² + |W_2|²) + d³γ⁴ at every time

    Source: Prop 4.3 (Section 4.2), extended
    Domain: {SIZES}, U ≠ V, τ=3, t={LAST:g}, noise γ={ANYTIME}
    """
    start = identity_start(D, 3.0)
    exact = riccati.flow(start, task(), TIMES, steps=SUBSTEPS)

    def simulate(key: Array, quick: bool) -> Estimate:
        layers = at(trained(start, task(), TIMES), -1)
        return Estimate.mean(_noisy(key, layers, ANYTIME, quick, task()))

    return perturbation.perturbed_loss(*at(exact, -1), task(), ANYTIME), simulate


@claim("D4.2/printed", effect=1.0)
def _printed_inflection():
    """The inflection point is the smallest n with 2dγ² > σ_n

    This is off by one, as L̃(n-1) < L̃(n) makes n - 1 the inflection point.

    Source: after Prop 4.3 (Section 4.2), by Definition 4.2
    Domain: {SIZES}, noise γ={GAMMA}
    """
    return next(n for n in range(1, D + 1) if PRE[n - 1] < 2 * D * GAMMA**2), _inflection()


@_printed_inflection.beside("corrected")
def _():
    """The inflection point is the smallest n with 2dγ² > σ_n, minus 1

    The test detects a change of one index.
    """
    return next(n for n in range(1, D + 1) if PRE[n - 1] < 2 * D * GAMMA**2) - 1


@claim("D4.2-first/exact", effect=1.0)
def _(strong=0.6):
    """The inflection point is at least 1, even where the first mode already hurts

    The test detects a change of one index.

    Source: Definition 4.2 (Section 4.1): t_1, ..., t_d
    Domain: {SIZES}, noise γ={strong}: 2dγ² > σ_1
    """
    return _index(gamma=strong), _inflection(gamma=strong)


@claim(
    "D4.2-{name}/exact",
    effect=1.0,
    each=(
        ("smaller", "smaller", (1.1, 0.825, 0.33, 0.165)),  # .55 `PRE`
        # As steep as the cube of `PRE`.
        ("decay", "more quickly decaying", (2.0, 0.84, 0.054, 0.007)),
    ),
)
def _(name, which, sigma):
    """{which} features have a smaller inflection point. Its change is compared

    The test detects a change of one index.

    Source: after Prop 4.3 (Section 4.2)
    Domain: {SIZES} and {sigma}, noise γ={GAMMA}
    """
    del name, which

    def moves(key: Array, quick: bool) -> Estimate:
        after, before = (_inflection(s)(key, quick).value for s in (sigma, PRE))
        return Estimate(after - before, tolerance=0.25)

    return _index(sigma) - _index(), moves


@claim("T4.4/exact", ">=", attack=domains.HARMFUL)
def _():
    """For γ² > σ_d/d, L̃(n) ≥ L̃(n-1) at the end of training

    It is sufficient. Half of it is enough.

    Source: Theorem 4.4 (Section 4.2) and Theorem A.3 (Appendix A.2)
    Domain: {SIZES}, ideal start, n=d, γ² = 1.02 σ_d/d
    """
    plateaus = jax.jit(perturbation.plateau_losses)(np.array(PRE), SUFFICIENT)

    def simulate(key: Array, quick: bool) -> Estimate:
        return Estimate.mean(_noisy(key, ideal(task(), D), SUFFICIENT, quick, task()))

    return plateaus[D - 1], simulate


@claim("T4.4-sharp/ours")
def _():
    """The sharp threshold, where L̃(d) = L̃(d-1), is γ² = σ_d/(2d)

    Source: Theorems 4.4 and A.3, sharpened
    Domain: {SIZES}, ideal start
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes the threshold. Learning the last mode changes the loss by -sigma_d^2 without
        noise. The change is linear in gamma^2 and 0 at the threshold.
        """
        slope = (_rises(key, quick, D, GAMMA) + PRE[-1] ** 2) / GAMMA**2
        mean, free = Estimate.mean(slope), PRE[-1] ** 2
        return Estimate(free / mean.value, stderr=(mean.stderr or 0.0) * free / mean.value**2)

    return PRE[-1] / (2 * D), simulate


@claim("T4.4-continuous/ours")
def _():
    """Each mode's share falls until y = σ - dγ², then rises by (dγ²)²

    Source: Theorem 4.4, in continuous time
    Domain: {SIZES}, U = V, τ=6, last mode, noise γ={LATE}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes the paired increase of the noisy loss from the turning time of the last mode
        (found on the path) to the end of training.
        """
        target = task(symmetric=True)
        level = PRE[-1] - D * LATE**2
        time = float(modes.crossing_time(level, exp(-12.0), PRE[-1]))
        path = trained(identity_start(D, 6.0), target, [time / 2, time, 2 * time, 4 * time])
        late, turn = (_noisy(key, at(path, k), LATE, quick, target) for k in (3, 1))
        return Estimate.mean(late - turn)

    return (D * LATE**2) ** 2, simulate


@claim("A.5/exact")
def _product(gamma=0.7):
    """E|αM|_F² = dγ²|M|_F²

    Source: Lemma A.5 and its proof (Appendix A.2)
    Domain: {SIZES}, M = A, noise γ={gamma}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        alpha = gamma * normals(key, quick)[0]
        return Estimate.mean(np.sum((alpha @ np.asarray(task())) ** 2, axis=(1, 2)))

    return D * (gamma**2 * sum(s**2 for s in PRE)), simulate


@_product.beside("printed")
def _(gamma):
    """E tr(αMMᵀαᵀ) = E tr(ααᵀ) |M|_F² (in the proof)

    It is d times too large.
    """
    return D**2 * (gamma**2 * sum(s**2 for s in PRE))


@claim("A.6/printed", "<=", attack=domains.real_starts(False))
def _():
    """If |W_i - W̄_i| ≤ min{{σ_1/2, 1/4, σ_d²/(16dσ_1(2σ_1+γ²))}}, then |L̃(real) - L̃(ideal)| ≤
    σ_d²/2

    The proof uses |W|_F ≤ σ_1, but |W|_F² = Σσ_i.

    Source: Assumption A.2 and Lemma A.6 (Appendix A.2)
    Domain: {EDGE}
    """
    first, last = SMALL[0], SMALL[-1]
    radius = min(first / 2, 0.25, last**2 / (16 * D * first * (2 * first + LOUD**2)))
    return last**2 / 2, deterministic(lambda: _real_gap(radius))


@claim("A.6/corrected", "<=", attack=domains.real_starts(True), overlooks="tightened")
def _():
    """It holds within min{{√S, T/(3√S), σ_d²/(√S(18T + 12dγ²))}}, with S = Σσ_i and T² = Σσ_i²

    The search finds that it is not sharp but 1.5 times too large.

    Source: Assumption A.2 and Lemma A.6 (Appendix A.2), corrected
    Domain: {EDGE}
    """
    size, norm = sqrt(sum(SMALL)), math.hypot(*SMALL)
    bound = SMALL[-1] ** 2 / (size * (18 * norm + 12 * D * LOUD**2))
    radius = min(size, norm / (3 * size), bound)
    return SMALL[-1] ** 2 / 2, deterministic(lambda: _real_gap(radius))


# --- sharpness ------------------------------------------------------------------------------------


def _random_hessian() -> np.ndarray:
    half = np.asarray(task())
    return half + half.T + 3 * np.eye(D)


def _hessian_at(time: float) -> np.ndarray:
    """Computes the Hessian at a network that was trained for some time, by autodiff."""
    target = task(symmetric=True)
    path = trained(identity_start(D, 2.0), target, [time / 4, time / 2, 3 * time / 4, time])
    return np.asarray(networks.hessian(at(path, -1), target))


@claim("D.1/exact")
def _quadratic_rise():
    """For a quadratic loss E[L(θ+λε) - L(θ)] = ½ λ² tr(H)

    Source: Proposition D.1 (Appendix D)
    Domain: d={D}, λ={QUADRATIC}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        H, x = _random_hessian(), np.full(D, 0.2)
        moved = x + QUADRATIC * normals(key, quick)[0, :, 0]
        return Estimate.mean(np.einsum("ni,ij,nj->n", moved, H, moved) / 2 - x @ H @ x / 2)

    return QUADRATIC**2 / 2 * np.trace(_random_hessian()), simulate


@_quadratic_rise.beside("printed")
def _():
    """E[L(θ) - L(θ+λε)] = ½ λ² tr(H) (eqs. (19), (20), in the proof)

    The sign of the left side is reversed.
    """
    return -(QUADRATIC**2) / 2 * np.trace(_random_hessian())


@claim("D.1-network/ours")
def _(gamma=0.5):
    """For the network the quadratic prediction is too low by d³γ⁴, everywhere

    Source: Appendix D, quantified
    Domain: {SIZES}, three modes learned, noise γ={gamma}
    """
    target = task()
    layers = ideal(target, 3)
    trace = np.trace(np.asarray(networks.hessian(layers, target)))
    quadratic = float(loss(layers, target)) + gamma**2 / 2 * trace

    def simulate(key: Array, quick: bool) -> Estimate:
        return Estimate.mean(_noisy(key, layers, gamma, quick, target) - quadratic)

    return D**3 * gamma**4, simulate


@claim("D.1-sharpness/ours")
def _():
    """The modes give the top Hessian eigenvalue along training

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: Appendix D, solved
    Domain: {SIZES}, U = V, τ=2, t=1
    """
    predicted = jax.jit(sharpness.mode_sharpness)(mode_path([1.0])[0], jnp.array(PRE))
    return predicted, deterministic(lambda: np.linalg.eigvalsh(_hessian_at(1.0))[-1], 1e-8)


@claim("D.1-sharpening/ours", ">=", attack=domains.SHARPENING, overlooks="tightened")
def _():
    """For U = V and σ_d ≥ e^(-2τ), tr(H) = 2d(|W_1|² + |W_2|²) grows throughout training

    For U ≠ V it may fall, at first where tr A < d e^(-2τ), and later, too.

    Source: Appendix D, progressive sharpening
    Domain: {SIZES}, U = V, τ=2, from t=.5 to 1
    """
    before = 4 * D * float(mode_path([0.5])[0].sum())
    return before, deterministic(lambda: np.trace(_hessian_at(1.0)), 1e-8)
