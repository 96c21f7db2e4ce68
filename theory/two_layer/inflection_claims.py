"""Overtrained, after Proposition 4.3: the inflection point as a function of the spectrum's decay.

The simulator trains whole matrices by an adaptive integrator and draws noise (`matrices`).
"""

from collections.abc import Callable
from math import sqrt

import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, generator
from theory.two_layer import best_time, inflection_domains, matrices, modes, perturbation
from theory.two_layer.layers import ideal, identity_start
from theory.two_layer.tasks import PRE, claim, deterministic, rotations, task

D, SCALE, GAMMA = 4, 2.0, 0.35
LEVEL = 2 * D * GAMMA**2
SOURCE = "after Prop 4.3 (Section 4.2), in the spectrum's decay"
FLAT, STEEP, STRONG = (0.8, 0.8, 0.8, 0.8), (1.2, 0.95, 0.4, 0.297), 0.335
WIDE, DENSE, SLOW = 64, 0.6, 0.4  # width, c and decay of a dense spectrum


def _spectrum(decay: float, d: int = D) -> np.ndarray:
    return SCALE * np.arange(1, d + 1.0) ** -decay


def _index(key: Array, sigma: np.ndarray, gamma: float) -> int:
    """Finds the smallest r >= 0 after which the loss rises, by noise on ideal networks."""
    target = np.asarray(task(tuple(sigma)))
    run = matrices.pre_train(np.eye(D), np.eye(D), target, 0.0)
    after = matrices.add_noise(generator(key), run, gamma, 4_000)
    stages = [tuple(np.asarray(w) for w in ideal(target, n)) for n in range(D + 1)]
    losses = [after((w1, w2), slice(None)).mean() for w1, w2 in stages]
    found = modes.inflection(np.array(losses), first=0)
    return D if found is None else found


def _best(sigma: np.ndarray, gamma: float, tau: float, draws: int, points: int = 240) -> Callable:
    """Finds the best time of a network in any basis, with trained matrices and noise."""

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, d = generator(key), sigma.size
        basis = (
            rotations(symmetric=True)[0]
            if d == D
            else np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]
        )
        start = np.exp(-tau) * np.eye(d)
        run = matrices.pre_train(start, start, (basis * sigma) @ basis.T, tau / sigma[-1])
        count = max(draws // 4, 32) if quick else draws
        after = matrices.add_noise(rng, run, gamma, count)
        return matrices.least(run, after, points, few=min(400, draws // 8))

    return simulate


@claim("D4.2-power-{decay}/ours", effect=1.0, each=((0.6,), (1.0,), (2.0,)))
def _(decay):
    """For σ_i = s i^-α, r = ⌈(s/(2dγ²))^(1/α)⌉ - 1 falls with α (noise γ)

    The test detects a change of one index.

    Source: {SOURCE}
    Domain: d={D}, σ_i={SCALE:g} i^-{decay}, noise γ={GAMMA}
    """
    predicted = best_time.power_law_index(D, scale=SCALE, decay=decay, gamma=GAMMA)
    return predicted, lambda key, quick: Estimate(
        _index(key, _spectrum(decay), GAMMA), tolerance=0.25
    )


@claim("D4.2-smaller-any/ours", "<=", attack=inflection_domains.SMALLER, overlooks="tightened")
def _(decay=0.6, quicker=1.0):
    """If σ'_i ≤ σ_i for all i, then r' ≤ r, as for a quicker decay from the same σ_1

    Source: {SOURCE}
    Domain: d={D}, σ_i={SCALE:g} i^-{decay} and σ'_i={SCALE:g} i^-{quicker}, noise γ={GAMMA}
    """
    predicted = best_time.power_law_index(D, scale=SCALE, decay=decay, gamma=GAMMA)
    return predicted, lambda key, quick: Estimate(
        _index(key, _spectrum(quicker), GAMMA), tolerance=0.25
    )


@claim("D4.2-equal-norm/ours", effect=1.0)
def _():
    """At equal |A|_F a quicker decay can raise r. The rise is compared

    The leading modes grow as the others fall. The test detects a change of one index.

    Source: {SOURCE}
    Domain: d={D}, σ={FLAT} and {STEEP}, |A|_F²=2.56, noise γ={STRONG}
    """
    after, before = (
        perturbation.inflection_index(sigma, D, STRONG, first=0) for sigma in (STEEP, FLAT)
    )

    def moved(key: Array, quick: bool) -> Estimate:
        found = [_index(key, np.array(sigma), STRONG) for sigma in (STEEP, FLAT)]
        return Estimate(found[0] - found[1], tolerance=0.25)

    return (after or 0) - (before or 0), moved


TAU, SHARP, BLUNT = 6.0, 1.0, 0.7  # start, and two decays with r = 2


@claim("D4.2-time/ours")
def _(decay=BLUNT):
    """The best time t* solves Σ_i y_i (σ_i - y_i) (y_i - σ_i + dγ²) = 0, at finite τ and noise γ

    Source: {SOURCE}
    Domain: d={D}, U = V, σ_i={SCALE:g} i^-{decay:g}, τ={TAU:g}, noise γ={GAMMA}
    """
    sigma = _spectrum(decay)
    return best_time.best_time(sigma, D, GAMMA, TAU), _best(sigma, GAMMA, TAU, 8_000)


@claim("D4.2-time/limit")
def _(decay=0.8, tau=12.0):
    """As τ → ∞ with distinct σ, t* → log((σ_r e^(2τ) - 1)(σ_r/(dγ²) - 1))/(4σ_r), with r modes
    above 2dγ²

    Source: {SOURCE}
    Domain: d={D}, U = V, σ_i={SCALE:g} i^-{decay:g}, τ={tau:g}, noise γ={GAMMA}
    """
    sigma = _spectrum(decay)
    r = best_time.power_law_index(D, scale=SCALE, decay=decay, gamma=GAMMA)
    turns = perturbation.turning_times(sigma, GAMMA, np.exp(-2 * tau))
    return turns[r - 1], _best(sigma, GAMMA, tau, 8_000)


@claim("D4.2-later/ours")
def _():
    """Features that decay more quickly can move t* to a later time. The shift is compared

    The printed sentence holds for the number of modes. While r stays, σ_r falls and t* ~ τ/(2σ_r)
    grows.

    Source: {SOURCE}
    Domain: d={D}, U = V, σ_i={SCALE:g} i^-α, α={BLUNT} and {SHARP:g}, τ={TAU:g}, noise γ={GAMMA}
    """
    late, early = (_spectrum(decay) for decay in (SHARP, BLUNT))
    predicted = best_time.best_time(late, D, GAMMA, TAU) - best_time.best_time(early, D, GAMMA, TAU)

    def moved(key: Array, quick: bool) -> Estimate:
        after, before = (_best(s, GAMMA, TAU, 24_000)(key, quick) for s in (late, early))
        error = np.hypot(after.stderr or np.nan, before.stderr or np.nan)
        return Estimate(after.value - before.value, stderr=float(error))

    return predicted, moved


@claim("D4.2-dense/limit")
def _():
    """With many modes learned at once, t* → log(2dγ²e^(2τ) - 1)/(8dγ²) for any decay

    Source: {SOURCE}
    Domain: d={WIDE}, U = V, σ_i={SCALE:g} i^-{SLOW}, τ={TAU:g}, 2dγ²={DENSE}
    """
    gamma = sqrt(DENSE / (2 * WIDE))
    return best_time.noise_time(WIDE, gamma, TAU), _best(_spectrum(SLOW, WIDE), gamma, TAU, 48, 120)


# --- U != V ---------------------------------------------------------------------------------------


def _turned(gamma: float, tau: float, draws: int) -> Callable:
    """Computes the best time of a network that starts as e^{-tau} I on the target with U != V."""

    def simulate(key: Array, quick: bool) -> Estimate:
        start = np.exp(-tau) * np.eye(D)
        run = matrices.pre_train(start, start, np.asarray(task()), LAST * tau)
        count = draws // 4 if quick else draws
        after = matrices.add_noise(generator(key), run, gamma, count)
        return matrices.least(run, after, 240, few=count // 8)

    return simulate


LAST, QUIET, EARLY = 1.2, 0.25, 2.0  # last time by tau; noise; a start that is not small
TURNED = f"d={D}, U ≠ V, σ={PRE}"


@claim("D4.2-turned/ours")
def _():
    """For U ≠ V at finite τ the Riccati flow and the mean loss under noise give the best time

    Source: {SOURCE}
    Domain: {TURNED}, start e^(-τ)I, τ={EARLY:g}, noise γ={QUIET}
    """
    start, target = identity_start(D, EARLY), task()
    found = best_time.best_time_of(start, target, QUIET, LAST * EARLY)
    return found, _turned(QUIET, EARLY, 8_000)


@claim("D4.2-turned/limit")
def _(tau=8.0):
    """For U ≠ V and τ → ∞ the best time is as for U = V with τ_i = τ - log(p_i)/2 for mode i. p_i
    is the squared part of (u_i + v_i)/2 outside of the span of larger modes

    Source: {SOURCE}
    Domain: {TURNED}, start e^(-τ)I, τ={tau:g}, noise γ={QUIET}
    """
    taus = best_time.mode_taus(task(), tau)
    return best_time.best_time(PRE, D, QUIET, taus), _turned(QUIET, tau, 8_000)


@claim("A.1-late-{mode}/limit", each=((1,), (3,)))
def _(mode, tau=8.0):
    """For U ≠ V and τ → ∞ mode {mode} is half learned at log(σe^(2τ)/p - 1)/(4σ), later by
    log(1/p)/(4σ). Its share at this time is compared

    The tolerance covers the next order in e^-τ.

    Source: Theorem A.1 (Appendix A.1), times for U ≠ V
    Domain: {TURNED}, start e^(-τ)I, τ={tau:g}
    """
    sigma, late = PRE[mode - 1], best_time.mode_taus(task(), tau)[mode - 1]
    time = float(np.log(sigma * np.exp(2 * late) - 1) / (4 * sigma))

    def share() -> float:
        start = np.exp(-tau) * np.eye(D)
        w1, w2 = matrices.pre_train(start, start, np.asarray(task()), time).at(time)
        u, v = rotations()
        return float(u[:, mode - 1] @ w1 @ w2 @ v[:, mode - 1]) / sigma

    return 0.5, deterministic(share, 2e-3)
