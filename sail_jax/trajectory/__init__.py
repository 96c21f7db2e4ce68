"""Averages over one training run: of its checkpoints, and of its iterates while it trains.

The mean of a run's last checkpoints stands in for a decay of the learning rate. `weights` and
`weights_at` have the weight of each checkpoint for a shape of decay. `weights_of` and `decay_of`
turn factors of decay into weights and back. `methods.trajectory` is the merge with these weights,
and `average_checkpoints` averages files. `average_params` keeps an average beside an optimiser.
"""

from typing import TYPE_CHECKING

from sail_jax.lazy import lazily
from sail_jax.trajectory.shapes import (
    SHAPES,
    At,
    Shape,
    decay_of,
    effective_number,
    mean_age,
    weights,
    weights_at,
    weights_of,
)

if TYPE_CHECKING:
    from sail_jax.trajectory.online import AverageState, average_params, averaged

# They bring optax with them, when they are first asked for.
__getattr__, __dir__ = lazily(
    __name__, dict.fromkeys(("AverageState", "average_params", "averaged"), "online")
)

__all__ = [
    "SHAPES",
    "At",
    "AverageState",
    "Shape",
    "average_params",
    "averaged",
    "decay_of",
    "effective_number",
    "mean_age",
    "weights",
    "weights_at",
    "weights_of",
]
