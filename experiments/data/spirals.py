"""Two interleaving spirals, one for each class, and pairs of source sets drawn from them."""

from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float32, Int

Sources = Literal["classes", "radii", "random"]
SOURCES: tuple[Sources, ...] = get_args(Sources)


class Points(NamedTuple):
    """Points in the plane, and the spiral of each.

    Attributes:
      x: The points, float32 `(..., n, 2)`.
      y: The spiral of each point, 0 or 1: integers `(..., n)`.
    """

    x: Float32[np.ndarray, "*sets n 2"]
    y: Int[np.ndarray, "*sets n"]


def spirals(rng: np.random.Generator, n: int, *, turns: float, noise: float) -> Points:
    """Draws points on two spirals, half of them on each, in random order.

    A spiral runs from the centre to radius 1. The second spiral is the first one rotated by half a
    circle. Points are spread evenly over the area that the spirals sweep: the square of the radius
    is uniform.

    Args:
      rng: The source of random numbers.
      n: The number of points, even and at least 2.
      turns: The number of turns of a spiral.
      noise: Standard deviation of the Gaussian noise along either axis.

    Returns:
      The points `(n, 2)` and their spirals `(n,)`.

    Raises:
      ValueError: If `n` is odd or below 2.

    >>> found = spirals(np.random.default_rng(0), 6, turns=1.0, noise=0.0)
    >>> found.x.shape, int(found.y.sum()), bool((np.hypot(*found.x.T) < 1).all())
    ((6, 2), 3, True)
    """
    if n < 2 or n % 2:
        raise ValueError(f"n must be even and at least 2; got {n}")
    y = rng.permutation(np.arange(n) % 2)
    radius = np.sqrt(rng.random(n))
    angle = 2 * np.pi * turns * radius + np.pi * y
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return Points((x + noise * rng.normal(size=(n, 2))).astype(np.float32), y)


def sources(
    rng: np.random.Generator, points: Points, how: Sources, count: int
) -> tuple[Int[np.ndarray, " count"], Int[np.ndarray, " count"]]:
    """Chooses the points of two disjoint source sets.

    Args:
      rng: The source of random numbers.
      points: One set of points, `(n, 2)`.
      how: "classes" for points of the first spiral and points of the second, so each source has one
        label; "radii" for the innermost and the outermost points; "random" for any.
      count: The number of points in each source, from 1 to n / 2.

    Returns:
      The indices of the first and of the second source, `(count,)` each.

    Raises:
      ValueError: If `how` is unknown or `count` is out of range.

    References:
      SAIL, App. K, has sources with one label each.

    >>> points = Points(np.array([[0.1, 0.0], [0.9, 0.0]], np.float32), np.array([0, 1]))
    >>> [index.tolist() for index in sources(np.random.default_rng(0), points, "radii", 1)]
    [[0], [1]]
    """
    order = rng.permutation(len(points.y))
    if how == "radii":
        order = np.argsort(np.hypot(*points.x.T))
    elif how == "classes":
        order = order[np.argsort(points.y[order], kind="stable")]
    elif how != "random":
        raise ValueError(f"sources must be one of {', '.join(SOURCES)}; got '{how}'")
    if not 1 <= count <= len(order) // 2:
        raise ValueError(f"count must be from 1 to {len(order) // 2}; got {count}")
    return order[:count], order[-count:]
