"""Savings of training steps: by how many steps one training reaches a loss earlier."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Bool, Float


class Savings(NamedTuple):
    """The numbers of steps in which two trainings reach a common loss, by strategy and seed.

    Each strategy is compared with training from scratch at the same seed. Arrays have the axes
    `(way, seed)`, with one entry of "way" for each strategy.

    Attributes:
      level: The lowest held-out loss that both reach.
      reached: Whether this level is the lowest loss of training from scratch.
      steps: The strategy's steps to that loss, including the steps before its first measurement.
      scratch_steps: The steps of training from scratch to that loss.
    """

    level: Float[np.ndarray, "way seed"]
    reached: Bool[np.ndarray, "way seed"]
    steps: Float[np.ndarray, "way seed"]
    scratch_steps: Float[np.ndarray, "way seed"]

    @property
    def saved(self) -> Float[np.ndarray, "way seed"]:
        """The steps from scratch minus the strategy's steps."""
        return self.scratch_steps - self.steps


def savings(
    loss: Float[np.ndarray, "way seed evaluation"],
    every: int,
    *,
    scratch: int = 0,
    ahead: ArrayLike = 0,
) -> Savings:
    """Compares the numbers of steps that trainings need to reach a loss with training from scratch.

    Args:
      loss: The held-out losses, before the first step and after every `every` steps.
      every: The number of steps between two measurements.
      scratch: The index of training from scratch.
      ahead: The steps of a strategy before its first measurement: one number for all, or one for
        each strategy.

    Returns:
      The steps by strategy and seed.

    >>> loss = np.array([[[4.0, 3.0, 2.0]], [[3.0, 2.0, 1.0]]])  # two strategies, one seed
    >>> savings(loss, every=10).saved.tolist()
    [[0.0], [10.0]]
    """
    best = loss.min(axis=-1)
    # The lowest loss that both trainings reach, so that each of them has a step for it.
    level = np.maximum(best, best[scratch])
    steps, by_scratch = np.zeros_like(level), np.zeros_like(level)
    for way, seed in np.ndindex(level.shape):
        below = partial(first_below, level=float(level[way, seed]), every=every)
        steps[way, seed], by_scratch[way, seed] = below(loss[way, seed]), below(loss[scratch, seed])
    ahead = np.broadcast_to(np.asarray(ahead, float), len(loss))[:, None]
    return Savings(level, best <= best[scratch], steps + ahead, by_scratch)


def first_below(loss: Float[np.ndarray, " evaluation"], level: float, every: int) -> float:
    """Computes the step at which a loss first reaches a level, by linear interpolation.

    Args:
      loss: The losses, before the first step and after every `every` steps.
      level: The level. One of the losses must be at or below it.
      every: The number of steps between two measurements.

    Returns:
      The step, which may not be an integer.

    >>> first_below(np.array([3.0, 2.0, 1.0]), 1.5, 10)
    15.0
    """
    i = int(np.argmax(loss <= level))
    if i == 0:
        return 0.0
    return every * (i - float((level - loss[i]) / (loss[i - 1] - loss[i])))
