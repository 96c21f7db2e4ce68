"""The tasks that the claims of this package share, and simulators on them.

Tasks are built when called, in the precision of the check. There are few shapes, so that claims
share their compilations.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from theory import claims
from theory.claims import Estimate, Simulate, compiled
from theory.merging.bounds import Bound, Form, excess_risk_bound
from theory.merging.quadratic import constants, exact
from theory.merging.simulation import simulate
from theory.merging.tasks import QuadraticTasks

# Sources refer to sections, because the HTML edition has no page numbers.
PAPER = "unified-merging"
claim = partial(claims.claim, PAPER)
RUNS = 4000

Bed = Callable[[], QuadraticTasks]


def mixed() -> QuadraticTasks:
    """Returns three tasks that differ in everything except their curvature, with the rate 0.4 / L.

    Returns:
      The testbed.
    """
    centres = [[0.3, -1.0], [1.2, 0.4], [-0.5, 0.8]]
    return QuadraticTasks(
        [1.0, 0.3], centres, 0.7, [6, 9, 20], [5, 1, 12], [1, 4, 2], 0.4, [0.5, 0.2, 0.3], [1, -2]
    )


def minimiser(tasks: int, samples: int) -> QuadraticTasks:
    """Returns tasks on which gradient descent reaches the empirical minimiser in one step."""
    return QuadraticTasks([1.0], [[0.0]] * tasks, 1.0, samples, 1, np.inf, 1.0)


def long(tasks: int, steps: int) -> QuadraticTasks:
    """Returns tasks of many steps at the rate 1 / (8 K L) of Lemma 3.

    They have ten samples each, batches of one sample, and the same centre.
    """
    return QuadraticTasks([1.0], [[0.0]] * tasks, 1.0, 10, steps, 1, 1 / (8 * steps))


def edge() -> QuadraticTasks:
    """Returns tasks with Theorem 2's rate sqrt(N / K) = 0.1, just below 2 / L.

    They have one centre and little noise.
    """
    h = 10 * (2 - 1e-4)
    return QuadraticTasks([h, h / 2], [[0.0, 0.0]] * 3, 1e-4, 20, 300, 4, 0.1, start=[4.0, 0.0])


def admissible() -> QuadraticTasks:
    """Returns tasks that satisfy both conditions of the paper on the step size.

    L sqrt(N K) = 1/8, so the rate sqrt(N / K) equals 1 / (8 K L).

    Returns:
      The testbed.
    """
    tasks, steps = 3, 12
    h = 1 / (8 * (tasks * steps) ** 0.5)
    centres = [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]
    rate = (tasks / steps) ** 0.5
    return QuadraticTasks([h, h / 2], centres, 0.1, 20, steps, 4, rate, start=2.0)


def expected(bed: Bed, field: str) -> float:
    """Computes a quantity in closed form, its mean over tasks."""
    return float(np.mean(getattr(exact(bed()), field)))


def bound(bed: Bed, field: str, form: Form = "printed", coefficient: float = 5.0) -> float:
    """Computes one part of the excess risk bound.

    Args:
      bed: Returns the testbed.
      field: Name of the part, a field of `Bound`.
      form: "printed" or "corrected".
      coefficient: As for `excess_risk_bound`.

    Returns:
      The part.
    """

    def part(tasks: QuadraticTasks) -> Array:
        about = constants(tasks), tasks.training
        return getattr(excess_risk_bound(*about, form=form, coefficient=coefficient), field)

    return compiled(part, bed())


def bounds(bed: Bed) -> Bound:
    """Computes the printed bound on a testbed."""
    tasks = bed()
    return excess_risk_bound(constants(tasks), tasks.training)


def drawn(bed: Bed, field: str, runs: int = RUNS) -> Simulate:
    """Makes a simulation of a quantity by SGD on drawn data, its mean over tasks.

    Args:
      bed: Returns the testbed.
      field: Name of the quantity, a field of `Quantities`.
      runs: Number of runs. Quick checks use a tenth of them.

    Returns:
      The simulation. Its estimate is a mean over runs.
    """

    def run(key: jax.Array, quick: bool) -> Estimate:
        quantities = simulate(key, bed(), runs // 10 if quick else runs)
        values = np.asarray(getattr(quantities, field))
        return Estimate.mean(values.reshape(len(values), -1).mean(1))

    return run
