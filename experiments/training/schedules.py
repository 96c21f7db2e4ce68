"""Learning rates by step: a linear warm-up, then a decay to a floor, at once or at the end."""

from typing import Annotated, Literal

import jax.numpy as jnp
import optax
from annotated_types import Interval
from jaxtyping import Array, ArrayLike, Float

from experiments.lab.config import Count, Natural, Positive, config

Decay = Literal["cosine", "linear", "constant", "wsd"]


@config
class Schedule:
    """A learning rate that increases linearly to `peak`, then decays to `floor * peak` after
    `steps`.

    The warm-up starts at peak / (warmup + 1), so that every step has a positive rate. Step number
    `warmup` is the first at `peak`. This is nanoGPT's schedule; the models of the paper on
    overtraining decay to 0.

    Attributes:
      peak: The highest learning rate.
      steps: The steps of the whole training, the warm-up included.
      warmup: The number of steps below the peak at the beginning.
      decay: The phase after the warm-up: "cosine", "linear", "constant", or "wsd" (warm-up, stable,
        decay), which is constant at the peak and decreases linearly over the last steps.
      floor: The final rate as a fraction of the peak, from 0 to 1. "constant" ignores it.
      cooldown: The fraction of all steps over which "wsd" decreases, in (0, 1]; others ignore it.
        It is rounded to whole steps, at least one, and does not overlap the warm-up.

    Raises:
      ValueError: If a field is not allowed.

    References:
      Hu et al., MiniCPM, 2024 (arXiv 2404.06395), for warm-up, stable, decay.

    >>> rate = Schedule(peak=1.0, steps=12, warmup=3, decay="linear", floor=0.1)
    >>> [round(float(rate(t)), 3) for t in (0, 1, 3, 12, 99)]
    [0.25, 0.5, 1.0, 0.1, 0.1]
    """

    peak: Positive
    steps: Natural
    warmup: Count = 0
    decay: Decay = "cosine"
    floor: Annotated[float, Interval(ge=0, le=1)] = 0.0
    cooldown: Annotated[float, Interval(gt=0, le=1)] = 0.1

    def __post_init__(self) -> None:
        if self.steps <= self.warmup:
            raise ValueError(f"steps must exceed warmup = {self.warmup}; got {self.steps}")

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        """Computes the learning rate of a step.

        - `step`: the number of the step, from 0.
        """
        after = self.steps - self.warmup
        last = min(max(1, round(self.cooldown * self.steps)), after)
        falling = {
            "cosine": optax.cosine_decay_schedule(self.peak, after, self.floor),
            "linear": optax.linear_schedule(self.peak, self.floor * self.peak, after),
            "constant": optax.constant_schedule(self.peak),
            "wsd": optax.linear_schedule(self.peak, self.floor * self.peak, last, after - last),
        }[self.decay]
        rising = optax.linear_schedule(self.peak / (self.warmup + 1), self.peak, self.warmup)
        return jnp.asarray(optax.join_schedules([rising, falling], [self.warmup])(step))
