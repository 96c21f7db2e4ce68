"""Tasks with quadratic losses of one curvature, and how experts are trained on them and merged.

Loss (x - z).H(x - z) / 2 with z ~ N(c_i, s^2 I) on task i, in the eigenbasis of H: a common H is
what bounded heterogeneity (unified merging, Assumption 3) asks of quadratics. Expert i: K_i steps
of SGD from the common start, on n_i samples, batches of b_i drawn with replacement. Merged:
start + sum_i w_i (x_i - start).
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory.problems import check

Numbers = Any  # what becomes an array
Weights = Any  # one number per task, of sum 1
PerTask = Numbers  # one number, or one per task


class Training(NamedTuple):
    """How experts were trained and are merged: what the bounds know besides `Constants`."""

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
        """Checked, one entry per task: of `tasks`, or as many as the longest argument has. Equal
        weights unless given.

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


def check_sum(weights: Float[Array, " N"]) -> None:
    """ValueError unless known weights sum to 1, to 4 eps per weight."""
    total = concrete(weights.sum())
    if total is not None and not abs(total - 1) <= 4 * weights.size * jnp.finfo(weights.dtype).eps:
        raise ValueError(f"weights must sum to 1; got {total:g}")


@dataclass(frozen=True, eq=False, init=False)
class QuadraticTasks:
    """The testbed, a pytree of arrays: one number per task broadcasts. `noise` is the standard
    deviation s; `batch` may exceed `samples` (it is drawn with replacement), and inf is gradient
    descent on all samples.

    ValueError for numbers out of range, weights that do not sum to 1, and a rate of 2 / L or more,
    where gradient descent diverges.

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
        check("centres", c, np.isfinite, "finite")
        check("start", start, np.isfinite, "finite")
        check("noise", noise, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
        rest = Training.of(samples, steps, batch, rate, weights, tasks=len(c))
        edge = concrete(rest.rate * h.max())
        if edge is not None and not edge < 2:
            raise ValueError(
                f"rate must be below 2 / L = {2 / float(h.max()):g}, or gradient descent diverges; "
                f"got {float(rest.rate):g}"
            )
        values = {"curvature": h, "centres": c, "noise": jnp.asarray(noise, float)}
        values |= {"start": jnp.broadcast_to(jnp.asarray(start, float), h.shape)}
        for name, value in (values | rest._asdict()).items():
            object.__setattr__(self, name, value)

    @property
    def number(self) -> int:
        return self.centres.shape[0]

    @property
    def training(self) -> Training:
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
