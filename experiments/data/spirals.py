"""Two interleaving spirals, one per class, and pairs of source sets that are cut out of them."""

from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float32, Int

Sources = Literal["classes", "radii", "random"]
SOURCES: tuple[Sources, ...] = get_args(Sources)


class Points(NamedTuple):
    """Points in the plane, and the spiral, 0 or 1, that each lies on."""

    x: Float32[np.ndarray, "*sets n 2"]
    y: Int[np.ndarray, "*sets n"]


def spirals(rng: np.random.Generator, n: int, *, turns: float, noise: float) -> Points:
    """n points (even), half on each spiral, uniform in the area swept, in random order.

    A spiral runs from the centre to radius 1 in `turns` turns; noise: standard deviation, along
    either axis.

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
    """Which points (one set, `[n, 2]`) make the two sources: `count` each, none in both.

    "classes": some of the first spiral, some of the second, so that each source knows one label
    (SAIL, App. K); "radii": the innermost and the outermost; "random": any.
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
