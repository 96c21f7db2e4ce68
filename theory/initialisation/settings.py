"""Tasks, constants and helpers that the claims of this package share."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, Simulate

PAPER = "sail"
ROUNDING = 1e-12  # of hundreds of operations on numbers of order one, in float64

# Tasks of classes +-m: two models' m and the target's, one to two units apart.
MEANS = np.array([[0.9, 0.1, -0.4], [-0.8, 0.6, 0.9]])
TARGET = np.array([0.4, 0.9, 0.3])


def generator(key: Array) -> np.random.Generator:
    """Makes a NumPy random generator from a JAX key.

    It serves simulations that have nothing to compile but their random numbers.

    Args:
      key: Random key.

    Returns:
      The generator.
    """
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def measured(compute: Callable[[], Any], tolerance: float = ROUNDING) -> Simulate:
    """Makes a simulation of a computation without randomness; keys and sizes do not matter.

    Args:
      compute: The computation.
      tolerance: How far off its result may be by rounding.

    Returns:
      The simulation.
    """
    return lambda key, quick: Estimate(float(compute()), tolerance=tolerance)
