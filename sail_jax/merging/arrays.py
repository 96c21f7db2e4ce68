"""Arrays of one CPU merged like files: by the same engine, from memory and to memory."""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.merging.engine import Engine
from sail_jax.merging.streaming import Unit, Work
from sail_jax.merging.tensors import Shape

__all__ = ["InMemory", "merge_arrays"]

SEVERAL = 1 << 22
"""Entries from which several workers pay."""
KEPT = 64 << 20
"""Bytes of a tensor that a worker keeps between visits, instead of copying them again."""


class InMemory(NamedTuple):
    """An array as a tensor that is read piece by piece; `source` says whose it is."""

    name: str
    source: str
    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def shape(self) -> Shape:
        return self.array.shape

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Copies the entries from `start` on."""
        out[:] = self.array.reshape(-1)[start : start + len(out)]


def merge_arrays(works: Sequence[Work]) -> list[Array]:
    """The outcome of each work, whose inputs are in memory.

    Raises:
      NotFiniteError: For inputs and outcomes that are not finite.
      ValueError: What kernels raise, with the path of the leaf.
    """
    outcomes = {work.name: _aligned(work.size, work.dtype) for work in works}
    size = sum(work.size for work in works)
    threads = min(8, os.cpu_count() or 1) if size > SEVERAL else 1
    with Engine(works, threads, KEPT) as engine:

        def finish(unit: Unit) -> None:
            with engine.reader(unit) as reader:
                for work, start, entries, _ in unit.outcome(reader):
                    outcomes[work.name][start : start + len(entries)] = entries
            unit.forget()

        engine.each(finish, engine.prepared(works))
    arrays: Any = [outcomes[work.name].reshape(work.shape) for work in works]
    return jax.device_put(arrays, may_alias=True)


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Memory that XLA takes as it is, at a multiple of 64 bytes."""
    memory = np.empty(size * dtype.itemsize + 64, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + math.prod((size, dtype.itemsize))].view(dtype)
