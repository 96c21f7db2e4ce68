"""Averages over one training run: of its checkpoints, or of its iterates during training.

The mean of a run's last checkpoints can replace a decay of the learning rate. `weights` and
`weights_at` compute the weight of each checkpoint for a shape of decay. `weights_of` and `decay_of`
convert factors of decay to weights and back. `methods.trajectory` is the merge with these weights,
and `average_checkpoints` averages files. `average_params` keeps an average next to an optimiser.
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

# These names import optax on first use.
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
