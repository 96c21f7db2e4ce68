"""Merges of arrays that lie in the memory of one CPU.

They go through the engine that merges files (`engine`, `streaming`): arrays are read piece by
piece, and outcomes are written into new arrays. `Merge` uses this where nothing is traced.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sail_jax.merging.engine import Engine
from sail_jax.merging.streaming import Unit
from sail_jax.merging.tensors import Shape
from sail_jax.merging.work import Work

__all__ = ["InMemory", "merge_arrays"]

SEVERAL = 1 << 22
"""The total number of entries above which several threads are used."""
KEPT = 64 << 20
"""Bytes of a tensor that a thread keeps between passes, instead of copying them again."""


class InMemory(NamedTuple):
    """An array in memory, read piece by piece like a tensor of a file.

    Attributes:
      name: The path of the leaf.
      source: Whose array it is, for messages: "model 0", "base".
      array: The entries.
    """

    name: str
    source: str
    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of the array."""
        return self.array.dtype

    @property
    def shape(self) -> Shape:
        """The shape of the array."""
        return self.array.shape

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Copies consecutive entries, in row-major order, into a buffer."""
        out[:] = self.array.reshape(-1)[start : start + len(out)]


def merge_arrays(works: Sequence[Work]) -> list[np.ndarray]:
    """Merges tensors whose inputs are in memory.

    Args:
      works: What to do for each tensor.

    Returns:
      The merged array of each work, of its shape and dtype, in the order of `works`. JAX can take
      the memory of each as it is, and nobody else holds it.

    Raises:
      NotFiniteError: If an input or an outcome holds NaN or infinity.
      ValueError: For what kernels raise; the message starts with the path of the leaf.
    """
    outcomes = {work.name: _aligned(work.size, work.dtype) for work in works}
    size = sum(work.size for work in works)
    threads = min(8, os.cpu_count() or 1) if size > SEVERAL else 1

    def finish(engine: Engine, unit: Unit) -> None:
        with engine.reader(unit) as reader:
            for work, start, entries, _ in unit.outcome(reader):
                outcomes[work.name][start : start + len(entries)] = entries
        # A unit stays in the list of all units until the last one is merged, so it has to free
        # what it kept for its steps now.
        unit.forget()

    with Engine(works, threads, KEPT) as engine:
        engine.each(functools.partial(finish, engine), engine.prepared(works))
    if engine.faint:
        faint = {name for name, _ in engine.faint}
        with Engine(works, threads, KEPT, only=engine.faint) as wide:
            todo = wide.prepared(works, lambda work: work.name in faint)
            wide.each(functools.partial(finish, wide), todo)
    return [outcomes[work.name].reshape(work.shape) for work in works]


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Allocates a flat array at a multiple of 64 bytes, which XLA uses without copying it."""
    # NumPy aligns to 16 bytes only. So 64 bytes more are taken, and the array begins at the first
    # multiple of 64 among them.
    memory = np.empty(size * dtype.itemsize + 64, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + math.prod((size, dtype.itemsize))].view(dtype)
