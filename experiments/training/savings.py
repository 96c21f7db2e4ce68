"""How much sooner a training arrives where another one does."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Bool, Float


class Savings(NamedTuple):
    """By way and seed, beside training from scratch with the same seed."""

    level: Float[np.ndarray, "way seed"]
    """The lowest held-out loss that both reach."""
    reached: Bool[np.ndarray, "way seed"]
    """Whether that is the lowest that scratch reaches."""
    steps: Float[np.ndarray, "way seed"]
    """To that level, those ahead of the training included."""
    scratch_steps: Float[np.ndarray, "way seed"]
    """To that level, from scratch."""

    @property
    def saved(self) -> Float[np.ndarray, "way seed"]:
        return self.scratch_steps - self.steps


def savings(
    loss: Float[np.ndarray, "way seed evaluation"],
    every: int,
    *,
    scratch: int = 0,
    ahead: ArrayLike = 0,
) -> Savings:
    """Of losses measured before the first and after every `every` steps.

    scratch: the way that all are compared with. ahead: steps that a way takes before its first
    measurement, a number or one per way.
    """
    best = loss.min(axis=-1)
    level = np.maximum(best, best[scratch])
    steps, by_scratch = np.zeros_like(level), np.zeros_like(level)
    for way, seed in np.ndindex(level.shape):
        below = partial(first_below, level=level[way, seed], every=every)
        steps[way, seed], by_scratch[way, seed] = below(loss[way, seed]), below(loss[scratch, seed])
    ahead = np.broadcast_to(np.asarray(ahead, float), len(loss))[:, None]
    return Savings(level, best <= best[scratch], steps + ahead, by_scratch)


def first_below(loss: Float[np.ndarray, " evaluation"], level: float, every: int) -> float:
    """The step at which the loss first is `level` or less, interpolated between evaluations; it
    must be somewhere.

    >>> first_below(np.array([3.0, 2.0, 1.0]), 1.5, 10)
    15.0
    """
    i = int(np.argmax(loss <= level))
    if i == 0:
        return 0.0
    return every * (i - float((level - loss[i]) / (loss[i - 1] - loss[i])))
