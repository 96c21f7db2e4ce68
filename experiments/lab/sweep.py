"""A long list of points, computed and remembered chunk by chunk, on all devices at once."""

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
    """`fn(points)`, taken `chunk` points at a time, one stage each (`name 3/20`).

    `fn` maps a slice of the points to a (nested) dict of arrays whose leading axis runs over that
    slice; the parts are concatenated along it. A `chunk` that divides `len(points)` compiles once.
    Of several devices it is made a multiple, so that all of them are at work (`over_devices`).

    >>> sweep(lambda n: {"square": n**2}, np.arange(5), name="numbers", chunk=2)
    {'square': array([ 0,  1,  4,  9, 16])}

    Raises `ValueError` for a chunk below one, no points, or a part of the wrong length.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(points) == 0:
        raise ValueError("points must not be empty")
    devices = _sharing(jax.device_count() // jax.process_count())  # the same for every process
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
    """Of the CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sharing(devices: int) -> int:
    """How many of the devices take part. Of a CPU that was told to be several, no more than it has
    cores: beyond, LAPACK's batches wait for threads that wait for them (jaxlib 0.10, dgesdd)."""
    return min(devices, cores()) if jax.default_backend() == "cpu" else devices


def over_devices(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fn(points, *common)` with the points shared out over the devices of this process.

    `fn` is pure, maps arrays whose leading axis runs over points to arrays of which the same is
    true, and treats each point alike. Where the devices do not divide the points, the last point is
    repeated, and what it gives again is dropped. To be made once and called often: each number of
    points compiles once.

    >>> double = over_devices(lambda x, by: {"double": by * x})
    >>> double(np.arange(4), 2)["double"].tolist()
    [0, 2, 4, 6]
    """

    def shared(points: PyTree, *common: PyTree) -> PyTree:
        n = len(jax.tree.leaves(points)[0])
        per_device = ceil(n / _sharing(jax.local_device_count()))
        devices = jax.local_devices()[: ceil(n / per_device)]  # more would repeat points alone
        if len(devices) == 1:
            return fn(points, *common)
        index = np.minimum(np.arange(per_device * len(devices)), n - 1)
        filled = jax.tree.map(lambda x: x[index], points)
        results = program(tuple(devices), len(common))(filled, *common)
        return results if len(index) == n else jax.tree.map(lambda x: x[:n], results)

    @lru_cache
    def program(devices: tuple[Any, ...], others: int) -> Callable[..., PyTree]:
        axis = "points"
        mesh = jax.make_mesh((len(devices),), (axis,), (AxisType.Auto,), devices=devices)
        specs = (P(axis), *[P()] * others)
        # what is common is used by every device without a word between them
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(axis), check_vma=False)
        )

    return shared
