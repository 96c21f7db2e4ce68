"""Where every byte of an output lies, computed before the first is written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sail_jax.merging.tensors import Shape

__all__ = ["Layout", "Region", "Wanted"]

Wanted = Mapping[str, tuple[np.dtype, Shape]]


class Region(NamedTuple):
    """A run of a tensor's bytes in a file."""

    file: str
    offset: int
    length: int


class Layout(NamedTuple):
    """The files of an output: which bytes are tensors and which are known from the start.

    `regions` holds the runs of each tensor in order, `fixed` the (file, offset, bytes) between
    them, `sizes` that of each file. `seal(folder)` fills what depends on the tensors' bytes.
    """

    regions: Mapping[str, Sequence[Region]]
    fixed: Sequence[tuple[str, int, bytes]]
    sizes: Mapping[str, int]
    seal: Callable[[Path], None] | None = None
