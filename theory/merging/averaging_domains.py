"""Noisy quadratics that attack the bounds on averages of checkpoints.

The ratio compares closed forms. `again` follows the moments of SGD step by step.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem, quadrature
from theory.merging.averaging import (
    LEAST,
    Moments,
    NoisyQuadratic,
    averaged,
    decayed,
    dense_break_even,
)

CHECKPOINTS = 6
NODES = 200


def followed(pace: float, spacing: int, weights: Any, variance: float) -> tuple[Any, Any]:
    """Follows both end points step by step, for h = sigma = 1 and a first mean of 1.

    Args:
      pace: The rate.
      spacing: Steps between checkpoints.
      weights: Weights of the average, oldest checkpoint first.
      variance: Variance of the first checkpoint.

    Returns:
      Mean and variance of the average, and of the run at decayed rates.
    """
    c = np.asarray(weights, float)
    # Fractions of the first checkpoint and of each step's noise, in the iterate and in the sum.
    now, total = np.zeros(1 + spacing * (c.size - 1)), np.zeros(1 + spacing * (c.size - 1))
    now[0] = 1.0
    total += c[0] * now
    mean, spread = 1.0, variance
    for i in range(1, c.size):
        rate = pace * c[i:].sum()
        for step in range(spacing * (i - 1), spacing * i):
            now *= 1 - pace
            now[1 + step] = pace
            mean, spread = (1 - rate) * mean, (1 - rate) ** 2 * spread + rate**2
        total += c[i] * now
    squares = total**2
    return (total[0], variance * squares[0] + squares[1:].sum()), (mean, spread)


def _whole(size: Any) -> int:
    return int(np.floor(float(size)))


# --- the share of the first checkpoint ------------------------------------------------------------

SHARES = {
    "pace": Box(1e-3, 0.999, log=True),
    "spacing": Box(1.0, 20.0, log=True),
    "decay": Box(0.0, 1.0, (CHECKPOINTS - 1,)),
}


def _weights(decay: Any, xp: Any) -> Any:
    padded = xp.concatenate([xp.ones(1), xp.asarray(decay), xp.zeros(1)])
    return padded[:-1] - padded[1:]


def _of(p: Problem, moments: Callable[[NoisyQuadratic, Any], Moments], weights: Any) -> Moments:
    return moments(NoisyQuadratic(1.0, p["pace"], 1.0, jnp.floor(p["spacing"]), 1.0), weights)


def _shares(p: Problem) -> Any:
    weights = _weights(p["decay"], jnp)
    return _of(p, decayed, weights).bias / _of(p, averaged, weights).bias


def _shares_again(p: Problem) -> float:
    weights = _weights(p["decay"], np)
    average, decay = followed(float(p["pace"]), _whole(p["spacing"]), weights, 0.0)
    return float(decay[0] / average[0])


SHARE = Domain(
    f"{CHECKPOINTS} checkpoints 1 to 20 steps apart (rounded down), ηh from .001 to .999, any "
    "decays in [0, 1]",
    SHARES,
    _shares,
    _shares_again,
)

# --- the noise of a uniform average ---------------------------------------------------------------

NOISES = {"pace": Box(1e-3, 1.0, log=True), "forgotten": Box(0.0, 1.0)}
UNIFORM = np.full(CHECKPOINTS, 1 / CHECKPOINTS)


def _start(p: Problem) -> Any:
    """Returns a variance between 0 and the stationary one."""
    return p["forgotten"] * p["pace"] / (2 - p["pace"])


def _noise(p: Problem) -> Any:
    problem = NoisyQuadratic(1.0, p["pace"], 1.0, 1.0, 0.0, _start(p))
    return averaged(problem, UNIFORM).variance / decayed(problem, UNIFORM).variance


def _noise_again(p: Problem) -> float:
    average, decay = followed(float(p["pace"]), 1, UNIFORM, float(_start(p)))
    return float(average[1] / decay[1])


NOISE = Domain(
    f"{CHECKPOINTS} checkpoints a step apart, ηh from .001 to 1, first variance up to the "
    "stationary one",
    NOISES,
    _noise,
    _noise_again,
)

# --- the break-even of dense averages -------------------------------------------------------------


def _least(p: Problem) -> Any:
    return LEAST / dense_break_even(p["time"]) ** 2


def _least_again(p: Problem) -> float:
    """Computes both variances and biases as integrals over the window, in units of its length."""
    t, (at, weight) = float(p["time"]), quadrature(NODES)
    # 1 - d = at. The average integrates correlations e^-lag, the decay integrates added noise.
    average = 2 * np.sum(weight * (1 - at) * np.exp(-t * at))
    decay = np.exp(-t) + 2 * t * np.sum(weight * at**2 * np.exp(-t * at**2))
    bias = np.sum(weight * np.exp(-t * at))
    return float(LEAST * (bias**2 - np.exp(-t)) / (decay - average))


LEAST_DISTANCE = Domain(
    "windows of ηh times their steps from .01 to 50", {"time": Box(0.01, 50.0, log=True)},
    _least, _least_again,
)  # fmt: skip
