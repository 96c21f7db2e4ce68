"""Over-training of two-layer linear networks in closed form: the tasks, and losses over time.

`overtraining_linear` uses them for its diagrams, and `overtraining_language` for the theory next to
its measurements.
"""

from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from experiments.lab.config import Count, NotNegative, Positive, config

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike


@config
class Tasks:
    """The tasks of pre-training and of fine-tuning, and the initial network."""

    d: Annotated[int, Ge(2)] = 12
    """Width of all layers."""
    scale: Positive = 2.0
    """Largest singular value of the pre-training task."""
    decay: NotNegative = 1.0
    """Exponent by which its singular values fall: the i-th is scale i^-decay."""
    tau: Positive = 6.0
    """tau for the initial weights: both layers begin as e^-tau I."""
    ratio: Positive = 3.0
    """Singular values of the fine-tuning task over the pre-training task's, in the misaligned
    modes."""
    kept: Count = 0
    """Number of leading modes in which both tasks are equal."""

    def __post_init__(self) -> None:
        if self.kept >= self.d:
            raise ValueError(f"kept must be below d = {self.d}; got {self.kept}")

    def spectrum(self, decay: float | None = None) -> np.ndarray:
        """Computes the singular values of the pre-training task, scale i^-decay.

        Args:
          decay: The exponent; None for that of the config.

        Returns:
          The values, `(d,)`.
        """
        power = self.decay if decay is None else decay
        return self.scale * np.arange(1, self.d + 1, dtype=float) ** -power

    def target(self, sigma: np.ndarray, ratio: float | None = None) -> np.ndarray:
        """Computes the singular values of the fine-tuning task.

        Args:
          sigma: Singular values of the pre-training task, `(d,)`.
          ratio: The ratio in the misaligned modes; None for that of the config.

        Returns:
          The values, `(d,)`.
        """
        ratio = self.ratio if ratio is None else ratio
        return np.where(np.arange(self.d) < self.kept, sigma, ratio * sigma)

    def times(self, sigma: np.ndarray, points: int) -> np.ndarray:
        """Lists pre-training times from before the first mode is learned until after the last.

        Args:
          sigma: Singular values of the pre-training task, the largest first.
          points: The number of times.

        Returns:
          The times, `(points,)`, equally spaced in their logarithm.
        """
        return np.geomspace(0.25 * self.tau / sigma[0], 1.5 * self.tau / sigma[-1], points)


def pre_trained(tasks: Tasks, sigma: np.ndarray, times: np.ndarray) -> "jax.Array":
    """Computes the modes of the network after pre-training.

    Args:
      tasks: The tasks, with the initial network.
      sigma: Singular values of the pre-training task, `(mode,)`.
      times: Pre-training times, `(time,)`.

    Returns:
      The modes, `(time, mode)`.
    """
    from theory.two_layer import modes

    return modes.mode(times[:, None], np.exp(-2 * tasks.tau), sigma)


def tuned_losses(
    start: "jax.Array",
    sigma: np.ndarray,
    target: np.ndarray,
    time: "ArrayLike",
    anchor: "ArrayLike" = 0.0,
) -> "tuple[jax.Array, jax.Array]":
    """Computes the losses on both tasks after fine-tuning.

    Args:
      start: Modes after pre-training, `(time, mode)`.
      sigma: Singular values of the pre-training task.
      target: Singular values of the fine-tuning task, of any shape that broadcasts with `start`.
      time: The time of fine-tuning, learning rate times steps.
      anchor: The strength lambda of the penalty that keeps weights close to their initial values.

    Returns:
      The pre-training loss and the fine-tuning loss, summed over the modes' axis.
    """
    import jax.numpy as jnp

    from theory.two_layer import fine_tuning

    after = fine_tuning.mode(time, start, target, anchor)
    return jnp.sum((after - sigma) ** 2, -1), jnp.sum((after - target) ** 2, -1)


def inflection(times: np.ndarray, loss: "ArrayLike") -> np.ndarray:
    """Finds the time after which more pre-training hurts.

    Args:
      times: Pre-training times, `(time,)`.
      loss: The pre-training loss afterwards, `(row, time)`.

    Returns:
      The time with the smallest loss in each row; NaN if this is the last time.
    """
    best = times[np.asarray(loss).argmin(1)]
    return np.where(best < times[-1], best, np.nan)
