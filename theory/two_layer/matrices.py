"""Simulators of pre-training and of noise after it, in NumPy: whole weight matrices, no modes.

They share nothing with the closed forms but the loss |W_1 W_2 - A|^2 and its two gradients.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import root_scalar

from theory import problems
from theory.claims import Estimate

Pair = tuple[np.ndarray, np.ndarray]
Path = Callable[[float], Pair]

_ERROR = 1e-10  # of the integrator, relative and absolute


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
def pre_train(w1: np.ndarray, w2: np.ndarray, target: np.ndarray, end: float) -> Run:
    """Integrates gradient flow by an adaptive scheme of eighth order.

    Args:
      w1: Initial W_1 `(o, h)`.
      w2: Initial W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      end: How long to train, at unit rate.

    Returns:
      The run.
    """
    (o, h), i = w1.shape, w2.shape[1]

    def apart(flat: np.ndarray) -> Pair:
        return flat[: o * h].reshape(o, h), flat[o * h :].reshape(h, i)

    def speed(_: float, flat: np.ndarray) -> np.ndarray:
        return -np.concatenate([g.ravel() for g in gradients(*apart(flat), target)])

    start = np.concatenate([w1.ravel(), w2.ravel()])
    found = solve_ivp(
        speed, (0.0, end), start, "DOP853", dense_output=True, rtol=_ERROR, atol=_ERROR * 1e-6
    )
    return Run(lambda time: apart(found.sol(time)), target, end)


@problems.defined
def noisy_losses(pair: Pair, target: np.ndarray, noise: Pair) -> np.ndarray:
    """Computes the loss under draws of noise on the weights.

    Args:
      pair: Both weight matrices.
      target: Target map A `(o, i)`.
      noise: What is added to each, `(draws, o, h)` and `(draws, h, i)`. The noise is symmetric:
        a draw's loss is the mean over both signs of either matrix.

    Returns:
      The losses `(draws,)`.
    """
    losses = []
    for signs in product((1, -1), repeat=2):
        w1, w2 = (w + sign * z for w, sign, z in zip(pair, signs, noise, strict=True))
        losses.append(np.sum((w1 @ w2 - target) ** 2, (-2, -1)))
    return np.mean(losses, 0)


@problems.defined
def least(
    run: Run, after: Callable[[Pair, slice], np.ndarray], points: int = 120, few: int = 100
) -> Estimate:
    """Looks for the time of least mean loss, with common random numbers.

    A grid of times finds the neighbourhood, and the root of the mean slope is looked for there.

    Args:
      run: The pre-training.
      after: Returns the losses `(draws,)` of what is done to a network afterwards, for a slice of
        the draws, with the same random numbers at every call.
      points: How many times the grid has.
      few: How many draws are enough on the grid.

    Returns:
      The time, with the standard error of the root of a mean; 0 where the loss only rises, inf
      where the last time is the best.
    """
    times = np.linspace(0.0, run.end, points)
    k = int(np.argmin([after(run.at(t), slice(few)).mean() for t in times]))
    if k in (0, points - 1):
        return Estimate(0.0 if k == 0 else np.inf, tolerance=times[1])
    h, every = times[1] / 100, slice(None)

    def slopes(time: float, h: float = h) -> np.ndarray:
        return (after(run.at(time + h), every) - after(run.at(time - h), every)) / (2 * h)

    low, high = max(times[k] - 3 * times[1], h), min(times[k] + 3 * times[1], run.end - h)
    time = root_scalar(lambda t: slopes(t).mean(), bracket=(low, high), xtol=1e-3 * times[1]).root
    found = slopes(time)
    bend = (slopes(time + 10 * h).mean() - found.mean()) / (10 * h)
    return Estimate(time, stderr=(Estimate.mean(found).stderr or 0.0) / bend)
