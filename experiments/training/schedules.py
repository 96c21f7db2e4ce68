"""Learning rates by step: warm-up, then a decay to a floor."""

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

Decay = Literal["cosine", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a decay that ends at `floor * peak` after `steps`.

    The warm-up starts at `peak / (warmup + 1)`, so that no step is taken at rate 0, and step
    `warmup` is the first at `peak` (nanoGPT; the overtrained paper's models decay to 0).

    >>> rate = Schedule(peak=1.0, steps=12, warmup=3, decay="linear", floor=0.1)
    >>> [round(float(rate(t)), 3) for t in (0, 1, 3, 12, 99)]
    [0.25, 0.5, 1.0, 0.1, 0.1]
    """

    peak: float
    """Highest learning rate."""
    steps: int
    """Steps of the whole training, warm-up included."""
    warmup: int = 0
    """Steps below the peak in the beginning."""
    decay: Decay = "cosine"
    """What follows the warm-up: 'cosine', 'linear' or 'constant'."""
    floor: float = 0.0
    """The rate in the end as a share of the peak; 'constant' ignores it."""

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
        after = self.steps - self.warmup
        falling = {
            "cosine": optax.cosine_decay_schedule(self.peak, after, self.floor),
            "linear": optax.linear_schedule(self.peak, self.floor * self.peak, after),
            "constant": optax.constant_schedule(self.peak),
        }[self.decay]
        rising = optax.linear_schedule(self.peak / (self.warmup + 1), self.peak, self.warmup)
        return jnp.asarray(optax.join_schedules([rising, falling], [self.warmup])(step))
