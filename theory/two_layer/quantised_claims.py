"""Overtrained, Section 4.2, with rounding to b bits in place of Gaussian noise.

The simulator trains whole matrices, rotates their hidden units at random and rounds (`matrices`).
"""

from collections.abc import Callable
from math import log, sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, generator
from theory.two_layer import best_time, matrices, perturbation, quantised
from theory.two_layer.tasks import claim

D, TAU = 16, 6.0
SIGMA = np.concatenate([[2.0, 1.0], 0.25 / np.arange(1, D - 1.0)])
SPAN = 2 * sqrt(SIGMA[0])
MIDWAY, LATE = 2.0, 30.0
SOURCE = "Prop 4.3 (Section 4.2), with rounding"
SETTING = f"d={D}, σ=(2, 1, 1/4, 1/8, 1/12, ...), τ={TAU:g}, range 2√σ_1"


def _run(mirrored: bool = False, end: float = 6.0) -> matrices.Run:
    """Returns an aligned start, with the singular vectors of a target with or without U = V."""
    u, v = matrices.rotations(np.random.default_rng(2), 2, D)
    v = u if mirrored else v
    start = np.exp(-TAU)
    return matrices.pre_train(start * u, start * v.T, (u * SIGMA) @ v.T, end)


def _rise(
    time: float, bits: float, dither: bool, mirrored: bool = False
) -> Callable[[Array, bool], Estimate]:
    """Computes the increase of the loss of a trained network by rounding."""

    def simulate(key: Array, quick: bool) -> Estimate:
        run = _run(mirrored, time)
        pair = run.at(time)
        draws, how = 500 if quick else 4_000, {"dither": dither, "mirrored": mirrored}
        after = matrices.round_off(generator(key), run, bits, SPAN, draws, **how)
        return Estimate.mean(
            after(pair, slice(None)) - np.sum((pair[0] @ pair[1] - run.target) ** 2)
        )

    return simulate


def _predicted(time: float, bits: float) -> float:
    """Computes the increase by noise, from the modes."""
    gamma = quantised.rounding_noise(bits, SPAN)
    y = SIGMA / (1 + (SIGMA * np.exp(2 * TAU) - 1) * np.exp(-4 * SIGMA * time))
    noisy, calm = (perturbation.perturbed_mode_loss(y, SIGMA, g) for g in (gamma, 0.0))
    return float(noisy - calm)


@claim("P4.3-dither-{bits}/ours", each=((3,), (5,)))
def _(bits):
    """With a random shift of each weight's grid, rounding raises the loss exactly as noise of
    variance step²/12 does, at every time

    Source: {SOURCE}
    Domain: {SETTING}, U ≠ V, t={MIDWAY:g}, {bits} bits
    """
    return _predicted(MIDWAY, bits), _rise(MIDWAY, bits, dither=True)


@claim("P4.3-nearest-{bits}/limit", each=((4,), (6,)))
def _(bits):
    """Rounding to nearest does the same at the end of training, as entries spread over many steps

    Midway, with few modes learned, it raises the loss by a third more at 4 bits.

    Source: {SOURCE}
    Domain: {SETTING}, U ≠ V, t={LATE:g}, {bits} bits
    """
    return _predicted(LATE, bits), _rise(LATE, bits, dither=False)


@claim(
    "P4.3-mirrored-dither/ours", without={"2dγ² tr(θ-A)": lambda: _mirrored(MIDWAY, 3, shift=False)}
)
def _(time=MIDWAY, bits=3):
    """For W_2 = W_1ᵀ rounding raises the loss by 2(d+1)γ²|W|² + 2dγ² tr(θ-A) + γ⁴(2d³-d²/5) with γ²
    = step²/12

    Both layers have the same errors. Their square moves the map by dγ² I.

    Source: {SOURCE}
    Domain: {SETTING}, U = V, t={time:g}, {bits} bits, one grid for a weight and its mirror image
    """
    return _mirrored(time, bits), _rise(time, bits, dither=True, mirrored=True)


@claim("P4.3-mirrored-nearest/limit")
def _(bits=5):
    """Rounding to nearest does the same at the end of training

    Source: {SOURCE}
    Domain: {SETTING}, U = V, t={LATE:g}, {bits} bits
    """
    return _mirrored(LATE, bits), _rise(LATE, bits, dither=False, mirrored=True)


def _mirrored(time: float, bits: float, shift: bool = True) -> float:
    gamma = quantised.rounding_noise(bits, SPAN)
    y = SIGMA / (1 + (SIGMA * np.exp(2 * TAU) - 1) * np.exp(-4 * SIGMA * time))
    w1, target = jnp.diag(jnp.sqrt(y)), np.diag(SIGMA)
    noisy, calm = (quantised.mirrored_loss(w1, target, g) for g in (gamma, 0.0))
    return float(noisy - calm - (0 if shift else 2 * D * gamma**2 * (y - SIGMA).sum()))


@claim("T4.4-bits/ours", effect=0.1)
def _(bits=3, n=2):
    """Below log_2(d range²/(6σ_n))/2 bits mode {n} is not worth learning

    The test detects a tenth of a bit.

    Source: Theorem 4.4 (Section 4.2), with rounding
    Domain: {SETTING}, U ≠ V, ideal start
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes the mode's contribution to the loss of rounded networks, apart from -σ_n². It
        decreases with the bits as 4^-b and is σ_n² at the threshold.
        """
        draws = 500 if quick else 2_000
        after = matrices.round_off(generator(key), _run(end=0.0), bits, SPAN, draws, dither=True)
        u, v = matrices.rotations(np.random.default_rng(2), 2, D)
        stages = (np.sqrt(SIGMA * (np.arange(D) < m)) for m in (n, n - 1))
        more, fewer = (after((u * s, s[:, None] * v.T), slice(None)) for s in stages)
        free = SIGMA[n - 1] ** 2
        rise = Estimate.mean(more - fewer + free)
        found = bits + log(rise.value / free, 2) / 2
        return Estimate(found, stderr=(rise.stderr or np.nan) / (2 * log(2) * rise.value))

    return quantised.worthwhile_bits(SIGMA[n - 1], D, SPAN), simulate


@claim("D4.2-bits-{bits}/ours", each=((2, 4.0), (3, 8.0)))
def _(bits, end):
    """The best time to stop pre-training before rounding to b bits is the one for γ² = step²/12

    Source: after Prop 4.3 (Section 4.2), with rounding
    Domain: {SETTING}, U ≠ V, {bits} bits, grids shifted at random, t ≤ {end:g}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        run, draws = _run(end=end), 1_000 if quick else 3_000
        after = matrices.round_off(generator(key), run, bits, SPAN, draws, dither=True)
        return matrices.least(run, after, points=60, few=draws // 3)

    gamma = float(quantised.rounding_noise(bits, SPAN))
    return best_time.best_time(SIGMA, D, gamma, TAU), simulate
