"""Simulates pre-training and the steps after it, with whole weight matrices in NumPy.

They share only the loss |W_1 W_2 - A|^2 and its two gradients with the closed forms.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.integrate import solve_ivp

from theory import problems
from theory.claims import Estimate

Pair = tuple[np.ndarray, np.ndarray]
Path = Callable[[float], Pair]
After = Callable[[Pair, slice], np.ndarray]  # losses of a network afterwards, for some of the draws

_ERROR = 1e-10  # of the integrator
WINDOW, NODES, DEGREE = 2, 13, 4  # of the fit of `least`: steps of the grid on either side


class Run(NamedTuple):
    """A network along pre-training, and its target.

    Attributes:
      at: Returns both weight matrices at a time.
      target: The target map.
      end: The last time.
    """

    at: Path
    target: np.ndarray
    end: float


@problems.defined
def gradients(w1: np.ndarray, w2: np.ndarray, target: np.ndarray) -> Pair:
    """Computes the gradients of |W_1 W_2 - A|^2 by W_1 and by W_2."""
    off = w1 @ w2 - target
    return 2 * off @ w2.T, 2 * w1.T @ off


@problems.defined
def pre_train(
    w1: np.ndarray, w2: np.ndarray, target: np.ndarray, end: float, *, rho: float = 0.0
) -> Run:
    """Integrates gradient flow by an adaptive scheme of eighth order.

    Args:
      w1: Initial W_1 `(o, h)`.
      w2: Initial W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      end: The duration of training, at unit rate.
      rho: The gradient is computed after an ascent of rho times the gradient, as in SAM without
        normalisation.

    Returns:
      The run.
    """
    (o, h), i = w1.shape, w2.shape[1]

    def apart(flat: np.ndarray) -> Pair:
        return flat[: o * h].reshape(o, h), flat[o * h :].reshape(h, i)

    def speed(_: float, flat: np.ndarray) -> np.ndarray:
        pair = apart(flat)
        if rho:
            found = gradients(*pair, target)
            pair = pair[0] + rho * found[0], pair[1] + rho * found[1]
        return -np.concatenate([g.ravel() for g in gradients(*pair, target)])

    start = np.concatenate([w1.ravel(), w2.ravel()])
    found = solve_ivp(
        speed, (0.0, end), start, "DOP853", dense_output=True, rtol=_ERROR, atol=_ERROR * 1e-6
    )
    return Run(lambda time: apart(found.sol(time)), target, end)


@problems.defined
def sharpness_aware(pair: Pair, target: np.ndarray, rho: float, rate: float, steps: int) -> Pair:
    """Descends by SAM, with the gradient after an ascent of length rho along the gradient.

    Args:
      pair: Both weight matrices at the start.
      target: The target map.
      rho: The length of the ascent.
      rate: Learning rate.
      steps: The number of steps.

    Returns:
      Both weight matrices at the end.
    """
    w1, w2 = pair
    for _ in range(steps):
        g1, g2 = gradients(w1, w2, target)
        scale = rho / np.sqrt(np.sum(g1**2) + np.sum(g2**2))
        g1, g2 = gradients(w1 + scale * g1, w2 + scale * g2, target)
        w1, w2 = w1 - rate * g1, w2 - rate * g2
    return w1, w2


@problems.defined
def label_noise(
    rng: np.random.Generator,
    pair: Pair,
    target: np.ndarray,
    noise: float,
    rates: np.ndarray,
    watch: Callable[[int, Pair], None] = lambda step, pair: None,
) -> Pair:
    """Descends with new noise on the labels at every step.

    The second half of the networks has the noise of the first half with the opposite sign. In the
    mean of a pair (`paired`), all odd terms in the noise cancel.

    Args:
      rng: Random generator.
      pair: Both weight matrices at the start, of an even number of networks: `(networks, o, h)`
        and `(networks, h, i)`.
      target: The target map.
      noise: Standard deviation of the noise.
      rates: The learning rate of each step.
      watch: A function that is called after each step with the number of steps and both weight
        matrices.

    Returns:
      Both weight matrices at the end.
    """
    w1, w2 = pair
    for step, rate in enumerate(rates, 1):
        half = noise * rng.standard_normal((len(w1) // 2, *target.shape))
        off = w1 @ w2 - target - np.concatenate([half, -half])
        w1, w2 = w1 - 2 * rate * off @ w2.mT, w2 - 2 * rate * w1.mT @ off
        watch(step, (w1, w2))
    return w1, w2


@problems.defined
def paired(values: np.ndarray) -> np.ndarray:
    """Takes the mean over each pair of networks of `label_noise`.

    Args:
      values: A number for each network, `(networks,)`.

    Returns:
      The means, `(networks / 2,)`.
    """
    return np.reshape(values, (2, -1)).mean(0)


@problems.defined
def noisy_losses(pair: Pair, target: np.ndarray, noise: Pair) -> np.ndarray:
    """Computes the loss under draws of noise on the weights.

    Args:
      pair: Both weight matrices.
      target: Target map A `(o, i)`.
      noise: The noise of each matrix, `(draws, o, h)` and `(draws, h, i)`. A draw's loss is the
        mean over both signs of either matrix, which makes the noise symmetric.

    Returns:
      The losses `(draws,)`.
    """
    losses = []
    for signs in product((1, -1), repeat=2):
        w1, w2 = (w + sign * z for w, sign, z in zip(pair, signs, noise, strict=True))
        losses.append(np.sum((w1 @ w2 - target) ** 2, (-2, -1)))
    return np.mean(losses, 0)


@problems.defined
def rounded(
    weights: np.ndarray, bits: float, span: float, shift: np.ndarray | float = 0.0
) -> np.ndarray:
    """Rounds to the nearest of 2^bits multiples of a step, on a shifted grid.

    Args:
      weights: The weights.
      bits: Bits of a weight.
      span: The range that the steps divide.
      shift: The shift of the grid in steps, for all weights or for each.

    Returns:
      The rounded weights.
    """
    step, levels = span / 2**bits, 2 ** (bits - 1)
    return step * (np.clip(np.rint(weights / step + shift), -levels, levels - 1) - shift)


@problems.defined
def rotations(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
    """Draws orthogonal matrices uniformly.

    Args:
      rng: Random generator.
      count: The number of matrices.
      d: Their size.

    Returns:
      The matrices `(count, d, d)`.
    """
    q, r = np.linalg.qr(rng.standard_normal((count, d, d)))
    # Without the signs of R's diagonal the law of Q is not uniform.
    return q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]


@problems.defined
def add_noise(rng: np.random.Generator, run: Run, gamma: float, draws: int) -> After:
    """Draws Gaussian noise on both layers, the same for every network of a run.

    Args:
      rng: Random generator.
      run: The pre-training.
      gamma: Standard deviation of the noise.
      draws: The number of draws.

    Returns:
      A function of a network and a slice of the draws, which returns their losses.
    """
    first, second = (gamma * rng.standard_normal((draws, *w.shape)) for w in run.at(0.0))

    def after(pair: Pair, part: slice) -> np.ndarray:
        return noisy_losses(pair, run.target, (first[part], second[part]))

    return after


@problems.defined
def round_off(
    rng: np.random.Generator,
    run: Run,
    bits: float,
    span: float,
    draws: int,
    *,
    dither: bool = False,
    mirrored: bool = False,
) -> After:
    """Draws rotations of the hidden units of a network, and rounds it after each.

    Args:
      rng: Random generator.
      run: The pre-training of square layers.
      bits: Bits of a weight.
      span: The range that the steps divide.
      draws: The number of rotations of the hidden units.
      dither: Whether every weight's grid is shifted at random. Otherwise weights are rounded to
        nearest.
      mirrored: Whether W_1 and the transpose of W_2 have the same shifts.

    Returns:
      A function of a network and a slice of the draws, which returns their losses.
    """
    d = run.target.shape[0]
    turns = rotations(rng, draws, d)
    shifts = rng.uniform(-0.5, 0.5, (2, draws, d, d)) * dither
    if mirrored:
        shifts[1] = shifts[0].swapaxes(1, 2)

    def after(pair: Pair, part: slice) -> np.ndarray:
        turn, (first, second) = turns[part], shifts[:, part]
        w1 = rounded(pair[0] @ turn, bits, span, first)
        w2 = rounded(turn.swapaxes(1, 2) @ pair[1], bits, span, second)
        return np.sum((w1 @ w2 - run.target) ** 2, (1, 2))

    return after


@problems.defined
def least(run: Run, after: After, points: int = 120, few: int = 100) -> Estimate:
    """Finds the time with the smallest mean loss, with common random numbers.

    A grid of times determines the neighbourhood, where every draw's loss is fitted by a polynomial
    of the time. Rounded weights jump, so differences over short times are not informative.

    Args:
      run: The pre-training.
      after: Returns the losses `(draws,)` of a network after the perturbation, for a slice of the
        draws, with the same random numbers at every call.
      points: The number of times of the grid.
      few: The number of draws for the grid.

    Returns:
      The time, with the standard error of the root of a mean slope. It is 0 if the loss only
      increases, and inf if the last time is the best.
    """
    times = np.linspace(0.0, run.end, points)
    k = int(np.argmin([after(run.at(t), slice(few)).mean() for t in times]))
    if k in (0, points - 1):
        return Estimate(0.0 if k == 0 else np.inf, tolerance=times[1])
    low, high = times[max(k - WINDOW, 0)], times[min(k + WINDOW, points - 1)]
    middle, half = (low + high) / 2, (high - low) / 2
    x = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    losses = np.stack([after(run.at(t), slice(None)) for t in middle + half * x])
    fits = np.polynomial.Polynomial.fit
    mean = fits(x, losses.mean(1), DEGREE, domain=(-1, 1)).deriv()
    roots = [r.real for r in mean.roots() if abs(r.imag) < 1e-9 and abs(r) < 1]
    # With noise there may be no minimum within the window: the time is then only known up to the
    # window.
    root = min((r for r in roots if mean.deriv()(r) > 0), key=abs, default=None)
    if root is None:
        return Estimate(float(middle), stderr=float(half))
    slopes = np.polynomial.polynomial.polyfit(x, losses, DEGREE)[1:].T @ (
        np.arange(1, DEGREE + 1) * root ** np.arange(DEGREE)
    )
    error = (Estimate.mean(slopes).stderr or 0.0) / mean.deriv()(root)
    return Estimate(middle + half * root, stderr=half * error)
