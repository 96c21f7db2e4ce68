"""Distances between samples by matching their points, on the host and in float64.

Samples are arrays `[n, dim]`, one point per row, each of weight 1/n. All results are exact for the
given samples. Samples represent their distributions only roughly: in many dimensions, two samples
of the SAME distribution have distances far from 0.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from sail_jax.distances.estimates import host_samples

METRICS: dict[float, Literal["cityblock", "euclidean", "chebyshev"]] = {
    1: "cityblock",
    2: "euclidean",
    math.inf: "chebyshev",
}

# A matching of n points stores n^2 float64 costs (512 MiB at 8192) and takes up to n^3 time.
LARGEST = 8192


def wasserstein1(x: ArrayLike, y: ArrayLike, *, norm: float = 2) -> float:
    """Computes the Wasserstein-1 distance of two samples, the mean cost of their best matching.

    In one dimension it sorts. Otherwise it solves an assignment problem, with up to n^3 time and
    n^2 costs in memory.

    Args:
      x: Points `[n, dim]`, at most `LARGEST` of them.
      y: Points of the same shape.
      norm: The norm of differences of points: 1 (Manhattan), 2 (Euclidean) or `math.inf`
        (largest coordinate).

    Returns:
      The distance.

    Raises:
      ValueError: For another norm, samples that are not finite or too large, and shapes that
        differ.
      TypeError: For values that are not real numbers, or are traced.

    >>> wasserstein1(np.array([[0.0, 0], [1, 0]]), np.array([[1.0, 2], [0, 2]]))
    2.0
    """
    a, b = _samples(x, y, norm)
    if a.shape[1] == 1:
        return float(np.abs(np.sort(a[:, 0]) - np.sort(b[:, 0])).mean())
    cost = _costs(a, b, norm)
    return float(cost[_match(cost)].mean())


class Dudley(NamedTuple):
    """The Dudley metric of two samples, and a function h that attains it.

    Attributes:
      value: The distance, mean(h_x) - mean(h_y).
      lipschitz: The Lipschitz constant of h.
      h_x: Values of h at the points of x, of size at most 1 - lipschitz.
      h_y: Values of h at the points of y, likewise.
    """

    value: float
    lipschitz: float
    h_x: Float[np.ndarray, " n"]
    h_y: Float[np.ndarray, " n"]


def dudley(x: ArrayLike, y: ArrayLike, *, norm: float = 2) -> Dudley:
    """Computes the Dudley metric of two samples.

    It is the largest mean h(x) - mean h(y) over functions h with |h|_L + |h|_inf <= 1 (Lipschitz
    constant plus largest size), and never more than 2.

    For a given Lipschitz constant L it is a Wasserstein distance. Its metric is min(L |x - y|, 2
    (1 - L)), which is concave in L. Cutting planes, with one matching each, find the best L to
    1e-12 in a few steps.

    Args:
      x: Points `[n, dim]`, at most `LARGEST` of them.
      y: Points of the same shape.
      norm: The norm of differences of points: 1 (Manhattan), 2 (Euclidean) or `math.inf`
        (largest coordinate).

    Returns:
      The distance with a function that attains it.

    Raises:
      ValueError: For another norm, samples that are not finite or too large, and shapes that
        differ.
      TypeError: For values that are not real numbers, or are traced.

    >>> dudley(np.zeros((2, 1)), np.full((2, 1), 2.0)).value  # h falls from 1/2 to -1/2
    1.0
    """
    # At any L the best matching costs least, so each matching gives an upper bound there. The next
    # L is the maximum over L of the minimum of these bounds, until the best matching attains the
    # bound.
    distance = _costs(*_samples(x, y, norm), norm)
    pairs = _match(distance)
    matched = [distance[pairs]]
    lipschitz, bound = _peak(np.stack(matched))
    cost = np.minimum(lipschitz * distance, 2 * (1 - lipschitz))
    pairs = _match(cost)
    while cost[pairs].mean() < bound - 1e-12:
        matched.append(distance[pairs])
        lipschitz, below = _peak(np.stack(matched))
        # The cut did not lower the bound, which is then as accurate as rounding allows.
        if below >= bound:
            break
        bound = below
        cost = np.minimum(lipschitz * distance, 2 * (1 - lipschitz))
        pairs = _match(cost)
    h_x, h_y = _potentials(cost, pairs)
    return Dudley(float(h_x.mean() - h_y.mean()), lipschitz, h_x, h_y)


def _samples(x: ArrayLike, y: ArrayLike, norm: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns both checked samples in float64."""
    if norm not in METRICS:
        raise ValueError(f"norm must be 1, 2 or inf; got {norm}")
    a, b = host_samples(x, y, 1)
    for name, sample in (("x", a), ("y", b)):
        if len(sample) > LARGEST:
            raise ValueError(f"{name} must have at most {LARGEST} points; got {len(sample)}")
    if a.shape != b.shape:
        raise ValueError(f"y must have the shape of x, {a.shape}; got {b.shape}")
    return a, b


def _costs(x: np.ndarray, y: np.ndarray, norm: float) -> np.ndarray:
    """Computes the distances from each point of x to each of y."""
    from scipy.spatial.distance import cdist

    return cdist(x, y, METRICS[norm])


def _match(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns of the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(cost)


def _peak(matched: Float[np.ndarray, "cuts n"]) -> tuple[float, float]:
    """Maximises the minimum over cuts of mean min(L d, 2 (1 - L)) over L in [0, 1]."""
    low, high = 0.0, 1.0
    # Bisection continues to the last bit, because L is about 1/d for points that are far apart.
    while low < (L := (low + high) / 2) < high:
        rising = L * matched < 2 * (1 - L)
        lowest = np.where(rising, L * matched, 2 * (1 - L)).mean(1).argmin()
        # The minimum of concave functions is concave. The slope of the lowest one at L shows on
        # which side the maximum lies.
        slope = np.where(rising[lowest], matched[lowest], -2.0).mean()
        low, high = (L, high) if slope >= 0 else (low, L)
    return L, float(np.minimum(L * matched, 2 * (1 - L)).mean(1).min())


def _potentials(
    cost: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes dual values of a best matching, h_x[i] - h_y[j] <= cost[i, j], centred on 0.

    They are shortest paths (Bellman-Ford) along
    h_y[m(i)] <= h_y[m(j)] + cost[i, m(j)] - cost[i, m(i)], where m(i) is the match of i.
    """
    paid = cost[pairs]
    steps = cost[:, pairs[1]] - paid[:, None]
    h = np.zeros(len(paid))
    # A shortest path visits each point at most once, so n rounds are enough.
    for _ in range(len(paid)):
        shorter = (steps + h).min(1)
        if (shorter >= h - 1e-15).all():
            break
        h = shorter
    h_x, h_y = h + paid, np.empty_like(h)
    h_y[pairs[1]] = h
    # The infimum extension has the same Lipschitz constant as the cost on both samples, and loses
    # nothing.
    h_x, h_y = (cost + h_y).min(1), h_y
    centre = (max(h_x.max(), h_y.max()) + min(h_x.min(), h_y.min())) / 2
    return h_x - centre, h_y - centre
