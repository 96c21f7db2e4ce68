"""Weights of a run's checkpoints, and the equivalent decay of the learning rate.

Checkpoints theta_0, ..., theta_k are listed oldest first, n = k + 1, with the updates U_i = theta_i
- theta_{i-1} between them. With d_0 = 1 and d_{k+1} = 0,

    sum_j c_j theta_j = theta_0 + sum_i d_i U_i    where  c_j = d_j - d_{j+1},  d_i = sum_{j>=i} c_j

The average with weights c is therefore the point that the same updates reach if each U_i is
multiplied by d_i. This holds for given updates of any optimiser. A run with a decayed rate would
have had other updates.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from sail_jax.checks import argument, integer, one_of

Shape = Literal["uniform", "linear", "cosine", "1-sqrt", "1-square", "ema", "wma"]
"""A shape of decay; see `weights`."""
SHAPES: tuple[Shape, ...] = get_args(Shape)
"""All values of `Shape`."""
At = Literal["points", "means"]
"""The convention for the decay of an update; see `weights_at`."""
Vector = Float[np.ndarray, "n"]


def weights(shape: Shape, n: int, *, decay: float | None = None) -> Vector:
    """Computes the weight of each of n equidistant checkpoints, for a shape of decay.

    | shape | c_j | d_i |
    |---|---|---|
    | "uniform", "linear" | 1/n | 1 - i/n |
    | "cosine" | sin(pi/2n) sin(pi(2j+1)/2n) | (1 + cos(pi i/n))/2 |
    | "1-sqrt" | (sqrt(j+1) - sqrt(j))/sqrt(n) | 1 - sqrt(i/n) |
    | "1-square" | (2j+1)/n^2 | 1 - (i/n)^2 |
    | "ema" | (1-b) b^(n-1-j)/(1-b^n) | (1 - b^(n-i))/(1 - b^n) |
    | "wma" | 2(j+1)/(n(n+1)) | 1 - i(i+1)/(n(n+1)) |

    "ema" is the exponential moving average without bias, with b = `decay`. "wma" is the mean with
    weights 1, 2, ..., n.

    Args:
      shape: The shape.
      n: The number of checkpoints, at least 1.
      decay: The factor b in (0, 1), only for "ema".

    Returns:
      The weights c, oldest checkpoint first. They are positive and sum to 1.

    Raises:
      ValueError: For an unknown shape, for n < 1, and for a `decay` that is missing, out of range,
        or given for another shape.

    References:
      Tian et al., WSM: Decay-free learning rate schedule via checkpoint merging, 2025 (arXiv
      2507.17634); Li et al., Model merging in pre-training of large language models, 2025 (arXiv
      2505.12082).

    >>> weights("uniform", 4).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> weights("1-square", 2).tolist(), weights("wma", 2).round(3).tolist()
    ([0.25, 0.75], [0.333, 0.667])
    """
    check_decay(shape, decay)
    integer("n", n)
    j = np.arange(n, dtype=float)
    if shape == "cosine":
        return np.sin(math.pi / (2 * n)) * np.sin(math.pi * (2 * j + 1) / (2 * n))
    if shape == "1-sqrt":
        # The difference of the two roots, written without cancellation.
        return 1 / (np.sqrt(j + 1) + np.sqrt(j)) / math.sqrt(n)
    if shape == "1-square":
        return (2 * j + 1) / n**2
    if shape == "ema":
        assert decay is not None
        return (1 - decay) * decay ** (n - 1 - j) / -math.expm1(n * math.log(decay))
    if shape == "wma":
        return 2 * (j + 1) / (n * (n + 1))
    return np.full(n, 1 / n)


def weights_at(
    steps: Sequence[int], shape: Shape, at: At = "points", *, decay: float | None = None
) -> Vector:
    """Computes the weight of each checkpoint of a run, from the steps of the checkpoints.

    The shape is a function f of the position in the run that falls from f(0) = 1 to f(1) = 0. The
    factor d_i of the update between two checkpoints follows one of two conventions:

    - "points": `d_i = f(x_i)` with `x_i = (t_i - t_0) / (t_k - t_0) * k/n`. The decay would reach 0
      one mean distance after the last step. For equidistant checkpoints these are
      `weights(shape, n)`.
    - "means": d_i is the mean of f from `x_{i-1}` to `x_i`, where
      `x_i = (t_i - t_0) / (t_k - t_0)`. The decay reaches 0 at the last step. For equidistant
      checkpoints, "linear" is then the trapezoid rule. Its first and last checkpoint have half the
      weight of the others.

    "uniform" gives every checkpoint the weight 1/n for any steps, in both conventions.

    Args:
      steps: The steps in increasing order. Only their differences matter.
      shape: The shape; see `weights`.
      at: The convention.
      decay: The factor of "ema" for a mean distance between checkpoints; see `weights`.

    Returns:
      The weights, oldest checkpoint first. They are nonnegative and sum to 1.

    Raises:
      ValueError: For steps that do not increase, for an unknown convention, and as in `weights`.

    >>> weights_at([100, 200, 400], "linear").round(3).tolist()
    [0.222, 0.444, 0.333]
    >>> weights_at([100, 200, 300], "linear", at="means").tolist()
    [0.25, 0.5, 0.25]
    """
    check_decay(shape, decay)
    one_of(argument("at"), at, At)
    t = np.asarray(steps, float)
    if t.ndim != 1 or not t.size or not np.isfinite(t).all() or (np.diff(t) <= 0).any():
        raise ValueError(f"steps: expected steps in rising order, got {list(steps)!r}")
    n = len(t)
    if shape == "uniform" or n == 1:
        return np.full(n, 1 / n)
    x = (t - t[0]) / (t[-1] - t[0])
    if at == "points":
        d, _ = _decayed(shape, x * (n - 1) / n, n, decay)
    else:
        _, total = _decayed(shape, x, n, decay)
        d = np.concatenate([[1.0], np.diff(total) / np.diff(x)])
    return weights_of(d)


def _decayed(shape: Shape, x: Vector, n: int, decay: float | None) -> tuple[Vector, Vector]:
    """Computes the shape f at positions x of a run of n checkpoints, and its integral F."""
    if shape == "cosine":
        return (1 + np.cos(math.pi * x)) / 2, (x + np.sin(math.pi * x) / math.pi) / 2
    if shape == "1-sqrt":
        return 1 - np.sqrt(x), x - 2 / 3 * x**1.5
    if shape == "1-square":
        return 1 - x**2, x - x**3 / 3
    if shape == "ema":
        assert decay is not None
        slope = n * math.log(decay)
        whole = -math.expm1(slope)
        f = -np.expm1(slope * (1 - x)) / whole
        return f, (x + (np.exp(slope * (1 - x)) - math.exp(slope)) / slope) / whole
    if shape == "wma":
        return 1 - (n * x**2 + x) / (n + 1), x - (n * x**3 / 3 + x**2 / 2) / (n + 1)
    return 1 - x, x - x**2 / 2


def weights_of(factors: Sequence[float] | np.ndarray) -> Vector:
    """Computes the weights of the average that is equivalent to given factors on updates.

    Args:
      factors: d_0, ..., d_k with d_0 = 1, the factors on the updates before each checkpoint.

    Returns:
      The weights c_j = d_j - d_{j+1}, which sum to 1. They are nonnegative if the factors do not
      increase.

    Raises:
      ValueError: Unless the factors are finite numbers, and the first is 1.

    >>> weights_of([1.0, 0.5, 0.25]).tolist()
    [0.5, 0.25, 0.25]
    """
    d = _vector("factors", factors)
    if d[0] != 1:
        raise ValueError(f"factors: expected 1 for the first checkpoint, got {d[0]}")
    return d - np.append(d[1:], 0.0)


def decay_of(weights: Sequence[float] | np.ndarray) -> Vector:
    """Computes the factors on updates that are equivalent to an average with given weights.

    Args:
      weights: The weights c, oldest checkpoint first, which sum to 1.

    Returns:
      The factors d_i = sum of c_j over j >= i; d_0 is 1.

    Raises:
      ValueError: Unless the weights are finite numbers that sum to 1.

    >>> decay_of([0.5, 0.25, 0.25]).tolist()
    [1.0, 0.5, 0.25]
    """
    d = np.cumsum(_convex(weights)[::-1])[::-1].copy()
    # Other entries of d have rounding errors from sums. The first is known exactly.
    d[0] = 1.0
    return d


def effective_number(weights: Sequence[float] | np.ndarray) -> float:
    """Computes the number of equal weights that would reduce independent noise as much.

    Args:
      weights: The weights c, which sum to 1.

    Returns:
      1 / sum of c_j^2.

    Raises:
      ValueError: As in `decay_of`.

    >>> effective_number([0.5, 0.5])
    2.0
    """
    return float(1 / np.sum(_convex(weights) ** 2))


def mean_age(weights: Sequence[float] | np.ndarray) -> float:
    """Computes the mean age of the average, in checkpoints behind the last.

    Args:
      weights: The weights c, oldest checkpoint first, which sum to 1.

    Returns:
      sum of (k - j) c_j, which equals k minus the sum of the factors d_1, ..., d_k.

    Raises:
      ValueError: As in `decay_of`.

    >>> mean_age([0.25, 0.25, 0.5])
    0.75
    """
    c = _convex(weights)
    return float(np.sum(np.arange(len(c))[::-1] * c))


def check_decay(shape: Shape, decay: float | None) -> None:
    """Checks the name of a shape and its factor.

    Args:
      shape: The shape.
      decay: The factor of "ema"; None for other shapes.

    Raises:
      ValueError: As in `weights`.
    """
    one_of(argument("shape"), shape, SHAPES)
    if shape != "ema" and decay is not None:
        raise ValueError(f"{argument('decay')}: expected none for {shape!r}, got {decay!r}")
    if shape == "ema" and not (isinstance(decay, float | np.floating) and 0 < decay < 1):
        raise ValueError(
            f"{argument('decay')}: expected a number between 0 and 1 for 'ema', got {decay!r}"
        )


def _vector(name: str, values: Sequence[float] | np.ndarray) -> Vector:
    x = np.asarray(values, float)
    if x.ndim != 1 or not x.size or not np.isfinite(x).all():
        raise ValueError(f"{name}: expected finite numbers, one for each checkpoint, got {values}")
    return x


def _convex(values: Sequence[float] | np.ndarray) -> Vector:
    """Checks that weights sum to 1, up to rounding."""
    c = _vector("weights", values)
    if abs(c.sum() - 1) > 1e-9 * max(1.0, np.abs(c).sum()):
        raise ValueError(f"weights: expected a sum of 1, got {c.sum()}")
    return c
