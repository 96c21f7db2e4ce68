"""Joins several tensors in sequence, such as the stacked experts of a mixture."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import jax
import numpy as np

from sail_jax.checkpoint.sources.adapted import read_as
from sail_jax.merging.tensors import Tensor, check_read, held


class Joined:
    """A tensor with the entries of several tensors, one after another, in row-major order.

    Attributes:
      name: The name of the tensor.
      dtype: The dtype of its entries, to which the other tensors are cast.
      shape: Its shape.
      source: The paths of the other tensors, for messages.
    """

    def __init__(self, name: str, like: jax.ShapeDtypeStruct, tensors: Sequence[Tensor]) -> None:
        """Stores the arguments, without reading.

        Args:
          name: Its name.
          like: Its shape and dtype.
          tensors: The tensors that it is made of.
        """
        self.name, self.dtype, self.shape = name, np.dtype(like.dtype), tuple(like.shape)
        self.source = " and ".join(dict.fromkeys(x.source for x in tensors))
        self._tensors = tuple(tensors)
        self._starts = [0, *accumulate(math.prod(x.shape) for x in tensors)]

    @property
    def needs(self) -> int:
        """The bytes in memory while it is read; each tensor is freed after its end."""
        # The executor reads pieces of at most 2^20 entries.
        return max(
            held(x) + (x.dtype != self.dtype) * min(math.prod(x.shape), 1 << 20) * x.dtype.itemsize
            for x in self._tensors
        )

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries, in row-major order.

        Args:
          out: The buffer to fill: flat, contiguous, of the tensor's dtype.
          start: Row-major index of the first entry to read.

        Raises:
          ValueError: If the buffer is invalid, or the tensor is shorter than the request.
        """
        check_read(self, out, start)
        done = 0
        while done < out.size:
            at = start + done
            which = bisect_right(self._starts, at) - 1
            piece = out[done : done + self._starts[which + 1] - at]
            read_as(self._tensors[which], piece, at - self._starts[which])
            done += piece.size
