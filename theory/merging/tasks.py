"""Tasks with quadratic losses of one curvature, and the training and merging of experts.

The loss of a sample on task i is (x - z).H(x - z) / 2 with z ~ N(c_i, s^2 I), in the eigenbasis of
H. Bounded heterogeneity (Assumption 3 of Li et al., 2026, arXiv 2601.21690) requires a common H.
Expert i makes K_i steps of SGD from the common start, on n_i samples, in batches of b_i drawn with
replacement. The merged model is start + sum_i w_i (x_i - start). `quadratic` has exact expectations
on these tasks and `simulation` draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory.problems import check, check_squares, check_sum

Numbers = Any  # what becomes an array
Weights = Sequence[float] | ArrayLike  # one number per task, of sum 1
PerTask = Numbers  # one number, or one per task


class Training(NamedTuple):
    """The parameters of training and merging that the bounds use in addition to `Constants`.

    `Training.of` checks and broadcasts its arguments.

    Attributes:
      samples: Number of samples n_i of each task, `(N,)`.
      steps: Number of SGD steps K_i of each task, `(N,)`.
      batch: Batch size b_i of each task, `(N,)`. inf means all samples, without noise.
      rate: Learning rate, a scalar.
      weights: Merging weights `(N,)` of sum 1.
    """

    samples: Float[Array, " N"]
    steps: Float[Array, " N"]
    batch: Float[Array, " N"]
    rate: Float[Array, ""]
    weights: Float[Array, " N"]

    @classmethod
    def of(
        cls,
        samples: PerTask,
        steps: PerTask,
        batch: PerTask,
        rate: ArrayLike,
        weights: Weights | None = None,
        tasks: int | None = None,
    ) -> "Training":
        """Checks numbers of training and broadcasts them to one entry per task.

        Args:
          samples: Number of samples of each task, or one number for all; integers >= 1.
          steps: Number of SGD steps of each task, or one number for all; integers >= 1.
          batch: Batch size of each task, or one number for all; integers >= 1, or inf for all
            samples.
          rate: Learning rate, finite and > 0.
          weights: Merging weights `(N,)`, >= 0, of sum 1; equal if None.
          tasks: Number of tasks N. None takes the length of the longest argument.

        Returns:
          The training.

        Raises:
          ValueError: If an argument is out of range or has another number of entries.

        >>> Training.of(samples=[50, 80], steps=10, batch=4, rate=0.1).weights.tolist()
        [0.5, 0.5]
        """
        per_task = {"samples": samples, "steps": steps, "batch": batch}
        if weights is not None:
            per_task["weights"] = weights
        shapes = {name: np.shape(value) for name, value in per_task.items()}
        n = max((s[0] for s in shapes.values() if s), default=1) if tasks is None else tasks
        for name, shape in shapes.items():
            if shape not in ((n,), ()) or (name == "weights" and shape != (n,)):
                raise ValueError(f"{name} must have one entry per task, {n}; got shape {shape}")
        check("samples", samples, lambda x: (x >= 1) & _whole(x), "whole numbers >= 1")
        check("steps", steps, lambda x: (x >= 1) & _whole(x), "whole numbers >= 1")
        infinite = lambda x: (x >= 1) & (_whole(x) | (x == np.inf))  # noqa: E731
        check("batch", batch, infinite, "whole numbers >= 1 (inf: all samples, no noise)")
        if np.shape(rate) != ():
            raise ValueError(f"rate must be one number; got shape {np.shape(rate)}")
        check("rate", rate, lambda x: (x > 0) & (x < np.inf), "finite and > 0")
        w = jnp.full(n, 1 / n, float) if weights is None else jnp.asarray(weights, float)
        check("weights", w, lambda x: x >= 0, ">= 0")
        check_sum(w)
        m, k, b = (jnp.broadcast_to(jnp.asarray(x, float), (n,)) for x in (samples, steps, batch))
        return cls(m, k, b, jnp.asarray(rate, float), w)


@dataclass(frozen=True, eq=False, init=False)
class QuadraticTasks:
    """The testbed, with tasks, training and merging in one pytree of arrays.

    Constructor arguments may be lists, and a single number in place of one per task is used for
    all. `batch` may exceed `samples`, because batches are drawn with replacement; inf is gradient
    descent on all samples. Raises a ValueError for numbers out of range, weights that do not sum to
    1, and a rate of 2 / L or more, where gradient descent diverges.

    Attributes:
      curvature: Eigenvalues of the common Hessian H, `(d,)`, > 0.
      centres: Mean c_i of the samples of each task, `(N, d)`.
      noise: Standard deviation s of the samples, a scalar.
      samples: Number of samples n_i of each task, `(N,)`.
      steps: Number of SGD steps K_i of each task, `(N,)`.
      batch: Batch size b_i of each task, `(N,)`.
      rate: Learning rate, a scalar.
      weights: Merging weights `(N,)` of sum 1; equal by default.
      start: Common start of the experts, `(d,)`; 0 by default.

    >>> tasks = QuadraticTasks([1.0, 0.2], [[1.0, 0.0], [0.0, 1.0]], noise=0.5, samples=40,
    ...                        steps=20, batch=4, rate=0.1)
    >>> tasks.number, tasks.weights.tolist()
    (2, [0.5, 0.5])
    """

    curvature: Float[Array, " d"]
    centres: Float[Array, "N d"]
    noise: Float[Array, ""]
    samples: Float[Array, " N"]
    steps: Float[Array, " N"]
    batch: Float[Array, " N"]
    rate: Float[Array, ""]
    weights: Float[Array, " N"]
    start: Float[Array, " d"]

    def __init__(
        self,
        curvature: Numbers,
        centres: Numbers,
        noise: ArrayLike,
        samples: PerTask,
        steps: PerTask,
        batch: PerTask,
        rate: ArrayLike,
        weights: Weights | None = None,
        start: Numbers = 0.0,
    ):
        h, c = jnp.asarray(curvature, float), jnp.asarray(centres, float)
        if h.ndim != 1 or c.ndim != 2 or c.shape[1:] != h.shape or not c.size:
            raise ValueError(
                f"curvature and centres must be [d] and [tasks, d]; got {h.shape} and {c.shape}"
            )
        if np.shape(start) not in ((), h.shape):
            raise ValueError(f"start must be [{h.size}] or a number; got {np.shape(start)}")
        if np.shape(noise) != ():
            raise ValueError(f"noise must be one number; got shape {np.shape(noise)}")
        check("curvature", h, lambda x: (x > 0) & (x < np.inf), "finite and > 0")
        check_squares("centres", c)
        check_squares("start", start)
        check("noise", noise, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
        rest = Training.of(samples, steps, batch, rate, weights, tasks=len(c))
        steep, pace = concrete(h), concrete(rest.rate)
        if steep is not None and pace is not None and not pace * steep.max() < 2:
            raise ValueError(
                f"rate must be below 2 / L = {2 / steep.max():g}, or gradient descent diverges; "
                f"got {pace:g}"
            )
        values = {"curvature": h, "centres": c, "noise": jnp.asarray(noise, float)}
        values |= {"start": jnp.broadcast_to(jnp.asarray(start, float), h.shape)}
        for name, value in (values | rest._asdict()).items():
            object.__setattr__(self, name, value)

    @property
    def number(self) -> int:
        """The number of tasks N."""
        return self.centres.shape[0]

    @property
    def training(self) -> Training:
        """The training and merging of the experts."""
        return Training(*(getattr(self, name) for name in Training._fields))


_NAMES = tuple(field.name for field in fields(QuadraticTasks))


def _unflatten(_: None, leaves: Any) -> QuadraticTasks:
    # Not through __init__: leaves may be anything here.
    tasks = object.__new__(QuadraticTasks)
    for name, leaf in zip(_NAMES, leaves, strict=True):
        object.__setattr__(tasks, name, leaf)
    return tasks


jax.tree_util.register_pytree_node(
    QuadraticTasks, lambda t: ([getattr(t, name) for name in _NAMES], None), _unflatten
)


def _whole(x: np.ndarray) -> np.ndarray | np.bool:
    return np.isfinite(x) & (x == np.round(x))
