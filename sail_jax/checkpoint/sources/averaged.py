"""Computes the weighted sum of one tensor over the checkpoints of a run, block by block.

One checkpoint is read at a time, so memory does not grow with their number. It contains one block,
the smallest unit in which every checkpoint can be read.
"""

import math
from collections.abc import Sequence

import numpy as np

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checks import argument
from sail_jax.merging.tensors import LastBlock, OnDemand, Shape, Tensor, check_read, held
from sail_jax.merging.work import ENTRIES

# The number of entries that are multiplied and added at a time, which fit in the processor's cache.
_SLICE = 1 << 16


class Blocked(OnDemand):
    """A tensor that is computed block by block, as a `LastBlock`.

    Several threads may read at once, at any offset. A thread that reads consecutive entries
    computes nothing twice.

    Attributes:
      block: The number of entries of a block.
    """

    block: int

    def fill(self, formed: LastBlock, out: np.ndarray, start: int) -> None:
        done = 0
        while done < out.size:
            number, inside = divmod(start + done, self.block)
            part = formed.get(number)[inside : inside + out.size - done]
            out[done : done + part.size] = part
            done += part.size


class Averaged(Blocked):
    """The sum of c_j theta_j over checkpoints j, in float64.

    In float32 the products of its smallest numbers would be 0. Reading it raises a CheckpointError
    if a checkpoint cannot be read, or contains NaN or infinity without `allow_nonfinite`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], weights: Sequence[float], allow_nonfinite: bool = False
    ) -> None:
        """Stores the arguments, without reading.

        Args:
          tensors: The tensor in each checkpoint, oldest first, all with one shape.
          weights: The weights c, one for each. A tensor of weight 0 is not read.
          allow_nonfinite: Whether NaN and infinities are added like other values.
        """
        last = tensors[-1]
        super().__init__(last.name, last.dtype, last.shape, last.source)
        pairs = [(x, float(c)) for x, c in zip(tensors, weights, strict=True) if c]
        self._tensors, self._weights = tuple(x for x, _ in pairs), tuple(c for _, c in pairs)
        self._allow_nonfinite = allow_nonfinite
        size = math.prod(self.shape)
        block = max(getattr(tensor, "block", 1) for tensor in tensors)
        self.block = min(max(1, size), block * max(1, ENTRIES // max(1, block)))

    @property
    def needs(self) -> int:
        """The largest number of bytes in memory while it is read."""
        read = max(tensor.dtype.itemsize for tensor in self._tensors)
        each = max(map(held, self._tensors))
        cast = 0 if self.dtype == np.float64 else self.dtype.itemsize
        return each + self.block * (8 + read + cast)

    def form(self) -> LastBlock:
        return LastBlock(self._summed)

    def _summed(self, number: int) -> np.ndarray:
        """Computes the entries of a block."""
        start = number * self.block
        count = min(self.block, math.prod(self.shape) - start)
        # The sum of negative zeros is -0.0, which adding to 0.0 would change to 0.0.
        total = np.full(count, -0.0, np.float64)
        read: dict[np.dtype, np.ndarray] = {}
        for tensor, weight in zip(self._tensors, self._weights, strict=True):
            entries = read.setdefault(tensor.dtype, np.empty(count, tensor.dtype))
            tensor.read(entries, start)
            for at in range(0, count, _SLICE):
                with np.errstate(invalid="ignore"):  # of signalling NaN
                    part = entries[at : at + _SLICE].astype(np.float64)
                if not self._allow_nonfinite and not np.isfinite(part).all():
                    raise CheckpointError(
                        f"NaN or infinity in {tensor.name} of {tensor.source}; "
                        f"use {argument('allow_nonfinite', 'True')} to average regardless"
                    )
                # With `allow_nonfinite`, infinities of both signs may meet.
                with np.errstate(over="ignore", invalid="ignore"):
                    part *= weight
                    total[at : at + _SLICE] += part
        del read
        with np.errstate(over="ignore", invalid="ignore"):
            cast = total.astype(self.dtype, copy=False)
        if not self._allow_nonfinite and not np.isfinite(cast).all():
            raise CheckpointError(f"{self.name}: the average does not fit {self.dtype}")
        return cast


class Zeros:
    """A tensor of zeros.

    Attributes:
      name: The name of the tensor.
      dtype: The dtype of its entries.
      shape: Its shape.
      source: Its supposed location, for messages.
    """

    def __init__(self, name: str, dtype: np.dtype, shape: Shape, source: str) -> None:
        self.name, self.dtype, self.shape, self.source = name, dtype, shape, source

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Fills a buffer with zeros.

        Args:
          out: The buffer to fill: flat, contiguous, of the tensor's dtype.
          start: Row-major index of the first entry.

        Raises:
          ValueError: If the buffer is invalid, or the tensor does not have all these entries.
        """
        check_read(self, out, start)
        out[...] = 0
