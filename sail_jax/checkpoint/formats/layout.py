"""The byte layout of an output: where each tensor goes, computed before anything is written.

Each format that can be written has a function that makes such a `Layout`; the writer in
`sail_jax.checkpoint.output` then writes tensors to their positions, in any order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.files import explained
from sail_jax.merging.tensors import Shape

Wanted = Mapping[str, tuple[np.dtype, Shape]]
# Tensors begin at multiples of this many bytes, so mapped tensors of any dtype are aligned.
_ALIGNED = 64


class Region(NamedTuple):
    """A run of consecutive bytes of a tensor in a file.

    Attributes:
      file: The name of the file, within the output or its stage.
      offset: The position of the first byte in the file.
      length: The number of bytes.
    """

    file: str
    offset: int
    length: int


class Layout(NamedTuple):
    """The files of an output, and the position of each tensor in them.

    Attributes:
      regions: For each tensor the runs of its bytes, in the order of its entries.
      fixed: Everything between the tensors, such as headers: (file, offset, bytes) each.
      sizes: The size in bytes of each file.
      convert: None if these files are the output. Otherwise they are a stage, because a library
        writes the output in one go: `convert(stage, out)` makes the output at `out` from the files
        in the folder `stage`.
      whole: The size in bytes of `convert`'s output if it also has other tensors; else 0.
    """

    regions: Mapping[str, Sequence[Region]]
    fixed: Sequence[tuple[str, int, bytes]]
    sizes: Mapping[str, int]
    convert: Callable[[Path, Path], None] | None = None
    whole: int = 0

    def entries(
        self, folder: Path, name: str, dtype: np.dtype, first: int, last: int
    ) -> np.ndarray:
        """Reads entries of a tensor that is stored in one run, like the tensors of a stage.

        Args:
          folder: The folder of the files.
          name: The tensor.
          dtype: Its dtype.
          first: The index of the first entry.
          last: The index after the last one.

        Returns:
          The entries, flat.

        Raises:
          CheckpointError: If they cannot be read.
        """
        [(file, start, _)] = self.regions[name]
        at, count = start + first * dtype.itemsize, (last - first) * dtype.itemsize
        # Not mapped into memory: pages once read would count as used until the map is closed.
        with explained("read", folder / file):
            return np.fromfile(folder / file, np.uint8, count, offset=at).view(dtype)


def staged(tensors: Wanted, file: str) -> Layout:
    """Lays out tensors one after another in a single file, for formats that a library writes.

    Args:
      tensors: The dtype and shape of each tensor, by name.
      file: The name of the file.

    Returns:
      A layout that contains only the tensors, each at a multiple of 64 bytes.
    """
    regions, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        regions[name] = [Region(file, end, size)]
        # A negative number modulo n is the distance to the next multiple of n.
        end += size + -size % _ALIGNED
    return Layout(regions, [], {file: end})
