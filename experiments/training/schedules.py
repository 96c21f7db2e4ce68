"""Learning rates by step: a linear warm-up, then a decay to a floor."""

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

Decay = Literal["cosine", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning rate that rises linearly to `peak`, then decays to `floor * peak` after `steps`.

    The warm-up starts at peak / (warmup + 1), so that no step is taken at rate 0. Step number
    `warmup` is the first at `peak`. This is nanoGPT's schedule; the models of the paper on
    overtraining decay to 0.

    Attributes:
      peak: The highest learning rate.
      steps: The steps of the whole training, the warm-up included.
      warmup: The number of steps below the peak at the beginning.
      decay: What follows the warm-up: "cosine", "linear" or "constant".
      floor: The rate at the end as a share of the peak, from 0 to 1. "constant" ignores it.

    Raises:
      ValueError: If a field is not allowed.

    >>> rate = Schedule(peak=1.0, steps=12, warmup=3, decay="linear", floor=0.1)
    >>> [round(float(rate(t)), 3) for t in (0, 1, 3, 12, 99)]
    [0.25, 0.5, 1.0, 0.1, 0.1]
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: Decay = "cosine"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.peak < math.inf:
            raise ValueError(f"peak must be finite and > 0; got {self.peak}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0; got {self.warmup}")
        if self.steps <= self.warmup:
            raise ValueError(f"steps must exceed warmup = {self.warmup}; got {self.steps}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], a share of the peak; got {self.floor}")
        if self.decay not in get_args(Decay):
            raise ValueError(f"decay must be one of {', '.join(get_args(Decay))}; got {self.decay}")

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        """Computes the learning rate of a step.

        Args:
          step: The number of the step, from 0.

        Returns:
          The rate, a scalar. After `steps` it stays what it was at the end.
        """
        after = self.steps - self.warmup
        falling = {
            "cosine": optax.cosine_decay_schedule(self.peak, after, self.floor),
            "linear": optax.linear_schedule(self.peak, self.floor * self.peak, after),
            "constant": optax.constant_schedule(self.peak),
        }[self.decay]
        rising = optax.linear_schedule(self.peak / (self.warmup + 1), self.peak, self.warmup)
        return jnp.asarray(optax.join_schedules([rising, falling], [self.warmup])(step))
