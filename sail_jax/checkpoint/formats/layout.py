"""Where every byte of an output lies, computed before the first is written."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sail_jax.merging.tensors import Shape

__all__ = ["Layout", "Region", "Wanted", "staged"]

Wanted = Mapping[str, tuple[np.dtype, Shape]]
_ALIGNED = 64  # bytes, so that tensors of any type can be used where they lie


class Region(NamedTuple):
    """A run of a tensor's bytes in a file."""

    file: str
    offset: int
    length: int


class Layout(NamedTuple):
    """The files of an output: which bytes are tensors and which are known from the start.

    `regions` holds the runs of each tensor in order, `fixed` the (file, offset, bytes) between
    them, `sizes` that of each file. Where a library writes the output in one go, these files are
    a stage on the way, and `convert(stage, out)` makes the output at `out` of those in the folder
    `stage`.
    """

    regions: Mapping[str, Sequence[Region]]
    fixed: Sequence[tuple[str, int, bytes]]
    sizes: Mapping[str, int]
    convert: Callable[[Path, Path], None] | None = None


def staged(tensors: Wanted, file: str) -> Layout:
    """The tensors one after another in one file, and nothing else."""
    regions, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        regions[name] = [Region(file, end, size)]
        end += size + -size % _ALIGNED
    return Layout(regions, [], {file: end})
