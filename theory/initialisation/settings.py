"""What the claims of this room share."""

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
    """Of NumPy, where a simulation has nothing to compile but its random numbers."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def measured(compute: Callable[[], Any], tolerance: float = ROUNDING) -> Simulate:
    """A deterministic simulation: keys and sizes do not matter."""
    return lambda key, quick: Estimate(float(compute()), tolerance=tolerance)
