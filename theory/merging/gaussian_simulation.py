"""Merges of random task vectors by `sail_jax.merging`, with losses measured entry by entry.

`gaussian` computes the expectations of these draws without any draw or merge.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize_scalar

from sail_jax import methods
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import weighted_sum
from sail_jax.merging.transforms import trim
from theory.claims import generator
from theory.merging.gaussian import GaussianTasks, Method
from theory.problems import defined


class Drawn(NamedTuple):
    """Task vectors, and the losses of the tasks in each entry, h (x - c)^2 / 2.

    Attributes:
      vectors: Task vectors, the entries along the last axis.
      optima: The optimum c of each task.
      curvature: The curvature h of each task.
    """

    vectors: Float[np.ndarray, "T n"]
    optima: Float[np.ndarray, "T n"]
    curvature: Float[np.ndarray, "T n"]

    def loss(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Computes the mean loss over tasks, entry by entry."""
        return (self.curvature * (x - self.optima) ** 2).mean(0) / 2

    def excess(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Computes the mean loss minus its value at the best point of each entry."""
        total = self.curvature.sum(0)
        # If all curvatures are 0, every point is optimal.
        best = (self.curvature * self.optima).sum(0) / np.where(total, total, 1.0)
        return self.loss(x) - self.loss(best)

    def best_scale(self, x: Float[np.ndarray, " n"]) -> float:
        """Searches for the factor of a merge with the smallest mean loss."""

        def risk(scale: float) -> float:
            return float(self.loss(scale * x).mean())

        search: Any = minimize_scalar(risk, bracket=(0.0, 1.0))
        return float(search.x)


@defined
def draw_tasks(key: Array, tasks: GaussianTasks, entries: int) -> Drawn:
    """Draws the task vectors of one merge, and the tasks' optima and curvatures.

    Args:
      key: Random key.
      tasks: The tasks.
      entries: Number of entries, >= 1.

    Returns:
      The draws.
    """
    rng, shape = generator(key), (tasks.tasks, entries)
    shared = tasks.shared * rng.standard_normal(entries)
    used = rng.random(shape) < tasks.support
    own = tasks.heterogeneity * rng.standard_normal(shape)
    optima = np.where(used, shared + own, 0.0)
    vectors = optima + tasks.noise * rng.standard_normal(shape)
    return Drawn(vectors, optima, np.where(used, 1.0, tasks.elsewhere))


@defined
def merge_drawn(
    key: Array,
    vectors: Float[np.ndarray, "T n"],
    method: Method,
    density: float = 1.0,
    *,
    tensors: int = 1,
) -> Float[np.ndarray, " n"]:
    """Merges task vectors by the methods that merge checkpoints, with the scale 1.

    A threshold depends on all entries of a tensor, and so do their losses. Tensors are trimmed one
    by one, so their losses are independent.

    Args:
      key: Random key of DARE's masks.
      vectors: Task vectors.
      method: The merge, as for `gaussian.merge_moments`.
      density: The fraction of entries that is kept, in (0, 1].
      tensors: The number of tensors of equal size into which the entries are divided.

    Returns:
      The update of the base.

    Raises:
      ValueError: For another method or density, or if `tensors` does not divide the number of
        entries.
    """
    if tensors < 1 or vectors.shape[1] % tensors:
        raise ValueError(f"tensors must divide {vectors.shape[1]} entries; got {tensors}")
    makers: dict[Method, Callable[[], Merge]] = {
        "average": lambda: methods.task_arithmetic(normalize=True),
        "dare": lambda: methods.dare_linear(density=density, key=key, normalize=True),
        "trim": lambda: Merge(trim(density, "tensor"), weighted_sum, normalize=True),
        "ties": lambda: methods.ties(density=density, scope="tensor"),
    }
    base = [np.zeros(vectors.shape[1] // tensors)] * tensors
    models = [np.split(vector, tensors) for vector in vectors]
    return np.concatenate(makers[method]()(models, base))
