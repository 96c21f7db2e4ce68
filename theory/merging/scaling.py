"""Computes the exact excess risk and its bounds as functions of each training hyperparameter.

Exact values come from `quadratic`, bounds from `bounds`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from theory.merging.bounds import Bound, excess_risk_bound
from theory.merging.quadratic import Quantities, constants, exact
from theory.merging.tasks import QuadraticTasks
from theory.problems import typed

Law = Literal["steps", "batch", "rate", "samples", "tasks"]


class Laws(NamedTuple):
    """Exact quantities and bounds along the values of one hyperparameter.

    Quantities per task are means over tasks. All leaves have a leading axis `values`.

    Attributes:
      values: Values of the hyperparameter.
      exact: Exact expectations.
      bound: Theorem 3 as printed.
      corrected: The corrected bound. It is NaN where it does not apply (rates above 1 / L, single
        samples).
    """

    values: Float[np.ndarray, " v"]
    exact: Quantities
    bound: Bound
    corrected: Bound


@typed
def scaling(
    tasks: QuadraticTasks, law: Law, values: Sequence[float], *, coefficient: float = 5.0
) -> Laws:
    """Computes exact quantities and both bounds as one hyperparameter varies.

    All other numbers are as in `tasks`.

    Args:
      tasks: The testbed.
      law: The hyperparameter. "steps", "batch" and "samples" are set for every task, and "rate" is
        the learning rate. "tasks" uses the first N tasks, with proportional weights.
      values: Its values.
      coefficient: Coefficient of the term in A_3 of the printed bound (see `excess_risk_bound`).

    Returns:
      Exact quantities and bounds, with a leading axis `values`.

    Raises:
      ValueError: If `law` is unknown, `values` is empty, or a value is out of range.

    >>> tasks = QuadraticTasks([1.0], [[1.0], [-1.0]], noise=1.0, samples=40, steps=20, batch=4,
    ...                        rate=0.1)
    >>> laws = scaling(tasks, "batch", [1, 4, 16])
    >>> bool(laws.exact.stability[0] > laws.exact.stability[-1])
    True
    >>> bool(laws.bound.stability[0] < laws.bound.stability[-1])
    True
    """
    if np.ndim(values) != 1 or not len(values):
        raise ValueError(f"values must be a non-empty sequence; got shape {np.shape(values)}")
    # The settings have equal shapes, except for "tasks", so one compilation serves them.
    settings = [_with(tasks, law, value) for value in values]
    points = [_point(setting, coefficient) for setting in settings]
    quantities, printed, corrected = jax.tree.map(lambda *x: jnp.stack(x), *points)
    return Laws(np.asarray(values, float), quantities, printed, corrected)


def _with(tasks: QuadraticTasks, law: Law, value: float) -> QuadraticTasks:
    """Returns the tasks with one hyperparameter replaced."""
    if law != "tasks":
        return replace(tasks, **{law: value})
    if not 1 <= value <= tasks.number or value != int(value):
        raise ValueError(f"tasks must be whole numbers in 1 .. {tasks.number}; got {value:g}")
    first = slice(int(value))
    parts = {name: getattr(tasks, name)[first] for name in ("centres", "samples", "steps", "batch")}
    weights = tasks.weights[first]
    return replace(tasks, weights=weights / weights.sum(), **parts)


@partial(jax.jit, static_argnums=1)
def _point(tasks: QuadraticTasks, coefficient: float) -> tuple[Quantities, Bound, Bound]:
    quantities, consts = exact(tasks), constants(tasks)
    printed = excess_risk_bound(consts, tasks.training, coefficient=coefficient)
    corrected = excess_risk_bound(consts, tasks.training, form="corrected")
    # The same rounding as in `surrogate_gradient`.
    claimed = (tasks.rate * consts.smoothness <= 1 + 1e-6) & (tasks.samples.min() >= 2)
    corrected = jax.tree.map(lambda x: jnp.where(claimed, x, jnp.nan), corrected)
    return jax.tree.map(lambda x: x.mean(), quantities), printed, corrected
