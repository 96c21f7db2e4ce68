"""How many steps a training saves: how much sooner it reaches a loss than another one does."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Bool, Float


class Savings(NamedTuple):
    """The steps to a loss that two trainings reach, by way and seed.

    Each way to train is compared with training from scratch with the same seed. Arrays are `(way,
    seed)`.

    Attributes:
      level: The lowest held-out loss that both reach.
      reached: Whether that is the lowest that training from scratch reaches.
      steps: The steps of the way to that loss, with those ahead of its first measurement.
      scratch_steps: The steps of training from scratch to that loss.
    """

    level: Float[np.ndarray, "way seed"]
    reached: Bool[np.ndarray, "way seed"]
    steps: Float[np.ndarray, "way seed"]
    scratch_steps: Float[np.ndarray, "way seed"]

    @property
    def saved(self) -> Float[np.ndarray, "way seed"]:
        """How many steps fewer the way takes than training from scratch."""
        return self.scratch_steps - self.steps


def savings(
    loss: Float[np.ndarray, "way seed evaluation"],
    every: int,
    *,
    scratch: int = 0,
    ahead: ArrayLike = 0,
) -> Savings:
    """Compares the steps that trainings take to a loss with those from scratch.

    Args:
      loss: The held-out losses, before the first and after every `every` steps.
      every: The number of steps between two measurements.
      scratch: The number of the way that is training from scratch.
      ahead: The steps that a way takes before its first measurement: a number for all, or one for
        each way.

    Returns:
      The steps by way and seed.

    >>> loss = np.array([[[4.0, 3.0, 2.0]], [[3.0, 2.0, 1.0]]])  # two ways, one seed
    >>> savings(loss, every=10).saved.tolist()
    [[0.0], [10.0]]
    """
    best = loss.min(axis=-1)
    # The lowest loss that both trainings reach: each of them has a step for it.
    level = np.maximum(best, best[scratch])
    steps, by_scratch = np.zeros_like(level), np.zeros_like(level)
    for way, seed in np.ndindex(level.shape):
        below = partial(first_below, level=level[way, seed], every=every)
        steps[way, seed], by_scratch[way, seed] = below(loss[way, seed]), below(loss[scratch, seed])
    ahead = np.broadcast_to(np.asarray(ahead, float), len(loss))[:, None]
    return Savings(level, best <= best[scratch], steps + ahead, by_scratch)


def first_below(loss: Float[np.ndarray, " evaluation"], level: float, every: int) -> float:
    """Computes the step at which a loss first is at or below a level, between measurements
    linearly.

    Args:
      loss: The losses, before the first and after every `every` steps.
      level: The level. One of the losses must be at or below it.
      every: The number of steps between two measurements.

    Returns:
      The step, which need not be whole.

    >>> first_below(np.array([3.0, 2.0, 1.0]), 1.5, 10)
    15.0
    """
    i = int(np.argmax(loss <= level))
    if i == 0:
        return 0.0
    return every * (i - float((level - loss[i]) / (loss[i - 1] - loss[i])))
