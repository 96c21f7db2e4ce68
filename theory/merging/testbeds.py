"""The tasks of this room's ledger, and simulators on them. Built when called, in the precision of
the check; few shapes, so that claims share their compilations."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from theory.claims import Estimate, Simulate
from theory.merging.bounds import Bound, Form, excess_risk_bound
from theory.merging.quadratic import constants, exact
from theory.merging.simulation import simulate
from theory.merging.tasks import QuadraticTasks

PAPER = "unified-merging"
RUNS = 4000
ROUNDING = 1e-12  # of tens of operations on numbers of order one, in float64

Bed = Callable[[], QuadraticTasks]


def mixed() -> QuadraticTasks:
    """Three tasks that differ in everything but their curvature; rate 0.4 / L."""
    centres = [[0.3, -1.0], [1.2, 0.4], [-0.5, 0.8]]
    return QuadraticTasks(
        [1.0, 0.3], centres, 0.7, [6, 9, 20], [5, 1, 12], [1, 4, 2], 0.4, [0.5, 0.2, 0.3], [1, -2]
    )


def minimiser(tasks: int, samples: int) -> QuadraticTasks:
    """Gradient descent that ends at the empirical minimiser in one step."""
    return QuadraticTasks([1.0], [[0.0]] * tasks, 1.0, samples, 1, np.inf, 1.0)


def long(tasks: int, steps: int) -> QuadraticTasks:
    """Many steps, ten samples, rate 1 / (8 K L) as Lemma 3 asks, batches of one, one centre."""
    return QuadraticTasks([1.0], [[0.0]] * tasks, 1.0, 10, steps, 1, 1 / (8 * steps))


def edge() -> QuadraticTasks:
    """Theorem 2's rate sqrt(N / K) = 0.1, just below 2 / L; one centre, little noise."""
    h = 10 * (2 - 1e-4)
    return QuadraticTasks([h, h / 2], [[0.0, 0.0]] * 3, 1e-4, 20, 300, 4, 0.1, start=[4.0, 0.0])


def admissible() -> QuadraticTasks:
    """Both step sizes of the paper at once: L sqrt(N K) = 1/8, rate sqrt(N / K) = 1 / (8 K L)."""
    tasks, steps = 3, 12
    h = 1 / (8 * (tasks * steps) ** 0.5)
    centres = [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]
    rate = (tasks / steps) ** 0.5
    return QuadraticTasks([h, h / 2], centres, 0.1, 20, steps, 4, rate, start=2.0)


def generator(key: jax.Array) -> np.random.Generator:
    """NumPy's, from a key: nothing to compile."""
    return np.random.default_rng(np.asarray(jax.random.bits(key, (4,), np.uint32)))


def expected(bed: Bed, field: str) -> Callable[[], float]:
    """A quantity in closed form, its mean over tasks."""
    return lambda: float(np.mean(getattr(exact(bed()), field)))


def bound(bed: Bed, field: str, form: Form = "printed", **options: Any) -> Callable[[], float]:
    def predict() -> float:
        tasks = bed()
        risk_bound = excess_risk_bound(constants(tasks), tasks.training, form=form, **options)
        return float(getattr(risk_bound, field))

    return predict


def bounds(bed: Bed) -> Bound:
    tasks = bed()
    return excess_risk_bound(constants(tasks), tasks.training)


def drawn(bed: Bed, field: str, runs: int = RUNS) -> Simulate:
    """A quantity of SGD on drawn data, its mean over tasks."""

    def run(key: jax.Array, quick: bool) -> Estimate:
        quantities = simulate(key, bed(), runs // 10 if quick else runs)
        values = np.asarray(getattr(quantities, field))
        return Estimate.mean(values.reshape(len(values), -1).mean(1))

    return run


def measured(compute: Callable[[], Any], tolerance: float = ROUNDING) -> Simulate:
    """A deterministic simulation: keys and sizes do not matter."""
    return lambda key, quick: Estimate(float(compute()), tolerance=tolerance)
