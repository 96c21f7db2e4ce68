"""Long lists of points within one run, computed and stored in chunks, on all devices.

`lab.grid` runs whole studies at points of their config.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import ceil
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from experiments.lab.progress import Stage
from experiments.lab.store import direct


def sweep(
    fn: Callable[[Any], Mapping[str, Any]],
    points: Sequence[Any] | np.ndarray,
    stage: Stage = direct,
    name: str = "chunk",
    *,
    chunk: int,
) -> dict[str, Any]:
    """Applies a function to many points in chunks, with one stage for each chunk.

    An interrupted sweep continues after its last finished chunk, if `stage` stores results. If this
    process has several devices, `chunk` is rounded up to a multiple of their number, so that
    `over_devices` keeps all of them busy. If the chunk size divides `len(points)`, a compiled `fn`
    is compiled once.

    Args:
      fn: Maps a slice of the points to a (nested) dictionary of arrays, whose leading axis runs
        over the points of the slice.
      points: The points, at least one. They are sliced along the leading axis.
      stage: The stage function. The default stores nothing.
      name: The name of the stages: "name 3/20" is the third of 20.
      chunk: The number of points in each stage, at least 1.

    Returns:
      The dictionary of `fn` for all points, as NumPy arrays concatenated along their leading axes.

    Raises:
      ValueError: If `chunk` is below 1, there are no points, or an array does not have one entry
        for each point.

    >>> sweep(lambda n: {"square": n**2}, np.arange(5), name="numbers", chunk=2)
    {'square': array([ 0,  1,  4,  9, 16])}
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(points) == 0:
        raise ValueError("points must not be empty")
    # The average number of devices per process is used, so that all processes form the same chunks.
    devices = _sharing(jax.device_count() // jax.process_count())
    chunk = devices * ceil(chunk / devices)
    slices = [points[i : i + chunk] for i in range(0, len(points), chunk)]
    parts = []
    for i, batch in enumerate(slices):
        part = stage(f"{name} {i + 1}/{len(slices)}", partial(fn, batch))
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if np.shape(leaf)[:1] != (len(batch),):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)}: expected a leading axis of length "
                    f"{len(batch)}, one entry per point, got shape {np.shape(leaf)}"
                )
        parts.append(part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def cores() -> int:
    """Counts the CPU cores that this process may use.

    Returns:
      The number of cores, at least 1. If the system supports it, cores that this process must not
      use are not counted.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sharing(devices: int) -> int:
    """Returns the number of devices that are used: on a CPU, at most its number of cores."""
    return min(devices, cores()) if jax.default_backend() == "cpu" else devices


def over_devices(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Distributes the points of a function over the devices of this process.

    Create the returned function once and call it often: it is compiled once for each number of
    points. On one device, `fn` is called directly, without compilation.

    Args:
      fn: A pure function `fn(points, *common)`. It maps arrays whose leading axis runs over points
        to arrays with the same leading axis, and treats each point alike.

    Returns:
      A function with the arguments and results of `fn`. The arguments after the first are copied to
      each device.

    >>> double = over_devices(lambda x, by: {"double": by * x})
    >>> double(np.arange(4), 2)["double"].tolist()
    [0, 2, 4, 6]
    """

    def shared(points: PyTree, *common: PyTree) -> PyTree:
        """Applies `fn`, after padding the points to a multiple of the number of devices."""
        n = len(jax.tree.leaves(points)[0])
        per_device = ceil(n / _sharing(jax.local_device_count()))
        # Further devices would receive only repeated points.
        devices = jax.local_devices()[: ceil(n / per_device)]
        if len(devices) == 1:
            return fn(points, *common)
        # Every device requires the same number of points: the last point is repeated, and its
        # results are removed.
        index = np.minimum(np.arange(per_device * len(devices)), n - 1)
        filled = jax.tree.map(lambda x: x[index], points)
        results = program(tuple(devices), len(common))(filled, *common)
        return results if len(index) == n else jax.tree.map(lambda x: x[:n], results)

    @lru_cache
    def program(devices: tuple[Any, ...], others: int) -> Callable[..., PyTree]:
        """Compiles `fn` for some devices, and for a number of arguments after the points."""
        axis = "points"
        mesh = jax.make_mesh((len(devices),), (axis,), (AxisType.Auto,), devices=devices)
        specs = (P(axis), *[P()] * others)
        # Every device has a copy of the common arguments, so that no device waits for another.
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(axis), check_vma=False)
        )

    return shared
