"""A long list of points, computed and remembered chunk by chunk."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.progress import Stage
from experiments.store import direct


def sweep(
    fn: Callable[[Any], Mapping[str, Any]],
    points: Sequence[Any] | np.ndarray,
    stage: Stage = direct,
    name: str = "chunk",
    *,
    chunk: int,
) -> dict[str, Any]:
    """`fn(points)`, taken `chunk` points at a time, one stage each (`name 3/20`).

    `fn` maps a slice of the points to a (nested) dict of arrays whose leading axis runs over that
    slice; the parts are concatenated along it. A `chunk` that divides `len(points)` compiles once.

    >>> sweep(lambda n: {"square": n**2}, np.arange(5), name="numbers", chunk=2)
    {'square': array([ 0,  1,  4,  9, 16])}

    Raises `ValueError` for a chunk below one, no points, or a part of the wrong length.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(points) == 0:
        raise ValueError("points must not be empty")
    slices = [points[i : i + chunk] for i in range(0, len(points), chunk)]
    parts = []
    for i, some in enumerate(slices):
        part = stage(f"{name} {i + 1}/{len(slices)}", partial(fn, some))
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if np.shape(leaf)[:1] != (len(some),):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)}: expected a leading axis of length "
                    f"{len(some)}, one entry per point, got shape {np.shape(leaf)}"
                )
        parts.append(part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
