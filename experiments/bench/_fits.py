"""Fits the growth of a cost: the slope of its logarithm against the logarithm of a size."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

LEVEL = 0.95
LEAST = 2.0  # points below this multiple of the start-up cost carry little information on growth


class Power(NamedTuple):
    """A law cost = start + factor * size ** exponent.

    Attributes:
      exponent: The slope of log(cost - start) on log(size), by least squares.
      half: Half the width of its 95 % confidence interval, from Student's t distribution.
      factor: The factor.
      start: The cost that was subtracted first.
      points: The number of fitted points.
    """

    exponent: float
    half: float
    factor: float
    start: float
    points: int


def power(sizes: Sequence[float], costs: Sequence[float], start: float = 0.0) -> Power | None:
    """Fits a power law to costs above the start-up cost.

    Points that cost less than twice the start are excluded.

    Args:
      sizes: The sizes, above 0.
      costs: The cost of each size.
      start: The measured cost of a size of about 0.

    Returns:
      The law; None if fewer than three points of different sizes are left.

    >>> law = power([1, 2, 4, 8], [5, 9, 17, 33], start=1)
    >>> round(law.exponent, 6), round(law.factor, 6), law.points
    (1.0, 4.0, 4)
    """
    above = [
        (x, cost - start) for x, cost in zip(sizes, costs, strict=True) if cost >= LEAST * start
    ]
    if len(above) < 3 or len({x for x, _ in above}) < 2:
        return None
    x, y = np.log(np.asarray(above, float)).T
    about = x - x.mean()
    slope = float(about @ y / (about @ about))
    rest = y - y.mean() - slope * about
    free = len(above) - 2
    error = np.sqrt(rest @ rest / free / (about @ about))
    t = special.stdtrit(free, (1 + LEVEL) / 2)
    factor = float(np.exp(y.mean() - slope * x.mean()))
    return Power(slope, float(t * error), factor, float(start), len(above))
