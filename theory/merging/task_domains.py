"""Two quadratic tasks that attack the bounds of unified-merging.

The ratio compares closed forms. `again` follows the experts step by step (`followed`). Sizes are
integers but have the derivatives of real numbers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.merging.bounds import Form, excess_risk_bound
from theory.merging.followed import Followed
from theory.merging.quadratic import constants, exact
from theory.merging.tasks import QuadraticTasks

STEPS, MANY = 200, 700

Tasks = Callable[[Any], QuadraticTasks]


def _whole(size: Any) -> Any:
    return size + jax.lax.stop_gradient(jnp.floor(size) - size)


def sizes(p: Problem) -> tuple[Any, Any, Any]:
    """Returns the samples, steps and batches of both tasks, as integers."""
    return _whole(p["samples"]), _whole(p["steps"]), _whole(p["batch"])


def _built(p: Problem, curvature: Any, rate: Any, of: tuple[Any, Any, Any]) -> QuadraticTasks:
    weights = jnp.stack([p["weight"], 1 - p["weight"]])
    return QuadraticTasks(curvature, p["centres"], p["noise"], *of, rate, weights, p["start"])


def paced(p: Problem) -> QuadraticTasks:
    """Builds tasks with a rate that is a fraction of 1 / L."""
    return _built(p, p["curvature"], p["pace"] / jnp.max(p["curvature"]), sizes(p))


def slow(p: Problem) -> QuadraticTasks:
    """Builds tasks with a rate that is a fraction of 1 / (8 K L), where K is the larger number of
    steps.

    Args:
      p: The problem.

    Returns:
      The tasks.
    """
    of = sizes(p)
    rate = p["pace"] / (8 * jnp.max(p["curvature"]) * jnp.max(of[1]))
    return _built(p, p["curvature"], rate, of)


def minimised(p: Problem) -> QuadraticTasks:
    """Builds tasks with experts at the minimisers of their empirical risks."""
    samples = _whole(p["samples"])
    return _built(p, p["curvature"], 1 / p["curvature"][0], (samples, 1, jnp.inf))


def tied(p: Problem) -> QuadraticTasks:
    """Builds tasks with the rate sqrt(N / mean K), a fraction of 2 / L.

    Args:
      p: The problem.

    Returns:
      The tasks.
    """
    of = sizes(p)
    rate = jnp.sqrt(2 / jnp.mean(of[1]))
    steepest = 2 * (1 - p["below"]) / rate
    return _built(p, p["curvature"] / jnp.max(p["curvature"]) * steepest, rate, of)


def admissible(p: Problem) -> QuadraticTasks:
    """Builds tasks with the rate sqrt(N / mean K), at most 1 / (8 K L) for both K.

    Args:
      p: The problem.

    Returns:
      The tasks.
    """
    of = sizes(p)
    rate = jnp.sqrt(2 / jnp.mean(of[1]))
    steepest = p["pace"] / (8 * jnp.max(of[1]) * rate)
    return _built(p, p["curvature"] / jnp.max(p["curvature"]) * steepest, rate, of)


BOXES = {
    "curvature": Box(0.05, 1.0, (2,), log=True),
    "centres": Box(-1.0, 1.0, (2, 2)),
    "start": Box(-3.0, 3.0, (2,)),
    "noise": Box(1e-3, 2.0, log=True),
    "samples": Box(2, 100, (2,), log=True),
    "steps": Box(1, STEPS, (2,), log=True),
    "batch": Box(1, 32, (2,), log=True),
    "pace": Box(1e-3, 1.0, log=True),
    "weight": Box(0.0, 1.0),
}
_ONE = {"curvature": Box(0.1, 1.0, (1,)), "centres": Box(-1.0, 1.0, (2, 1))}
_ONE |= {"start": Box(-3.0, 3.0, (1,))}
MINIMISED = {n: BOXES[n] for n in ("noise", "samples", "weight")} | _ONE
LONG = {**BOXES, "steps": Box(1, MANY, (2,), log=True), "pace": Box(1e-4, 1.0, log=True)}
TIED = {
    **BOXES,
    "below": Box(1e-5, 1.0 - 1e-3, log=True),
    "centres": Box(-0.01, 0.01, (2, 2)),
    "noise": Box(1e-4, 1.0, log=True),
}
WORDS = (
    "two quadratic tasks of one curvature in {} dimensions, 2 to 100 samples (sizes rounded down), "
)
PACED = WORDS.format(2) + f"1 to {STEPS} steps, η ≤ 1/L"
ROOT = WORDS.format(2) + f"1 to {STEPS} steps, η = √(N/K̄) "


Side = Callable[[QuadraticTasks], Any]


def _ratio(tasks: Tasks, left: Side, right: Side, p: Problem) -> Any:
    given = tasks(p)
    return jnp.max(left(given) / right(given))


def domain(
    words: str,
    boxes: Mapping[str, Box],
    tasks: Tasks,
    left: Side,
    right: Side,
    again: Callable[[Followed], Any],
    without: Mapping[str, Side] | None = None,
) -> Domain:
    """Compares two quantities of tasks. With one ratio per task, the larger one is used.

    Args:
      words: The problems, in words.
      boxes: The range of each of their parts.
      tasks: Builds the tasks of a problem.
      left: The quantity that is smaller if the bound holds.
      right: The bound.
      again: The ratio of both for experts that are followed step by step.
      without: Bounds without a term, by the name of the term.

    Returns:
      The domain.
    """
    return Domain(
        words,
        boxes,
        partial(_ratio, tasks, left, right),
        lambda p: float(np.max(again(Followed(tasks(p))))),
        without={
            name: partial(_ratio, tasks, left, rest) for name, rest in (without or {}).items()
        },
    )


def quantity(name: str) -> Side:
    """Returns a function that computes a quantity in closed form."""
    return lambda tasks: getattr(exact(tasks), name)


def bound(name: str, form: Form, **options: Any) -> Side:
    """Returns a function that computes a part of the bound of the excess risk.

    Args:
      name: A field of `Bound`.
      form: "printed" or "corrected".
      **options: Further arguments of `excess_risk_bound`.

    Returns:
      The function of tasks.
    """
    return lambda tasks: getattr(
        excess_risk_bound(constants(tasks), tasks.training, form=form, **options), name
    )
