"""Computes the weights of quantised networks from codes and scales as they are read.

All schemes use one formula, `(code - zero) * scale`. A scale and a zero belong to a block of the
weight. The schemes differ in how codes are packed, and in the order of the matrices.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.merging.tensors import LastBlock, OnDemand, Shape, Tensor, bytes_of, read_whole

# The number of entries that are computed at once.
_BLOCK = 1 << 16
# The number of scales that are checked at once.
_CHUNK = 1 << 18

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
"""The values of four-bit floating-point codes, by code."""
with np.errstate(over="ignore"):
    E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""The values of exponents stored in bytes, by byte."""


@functools.cache
def values_of(dtype: np.dtype) -> np.ndarray:
    """Lists the values of 8-bit floating-point codes in float32, by code.

    Args:
      dtype: One of the float8 types. NumPy casts entries one at a time, five times as slowly.

    Returns:
      The 256 values.
    """
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def integers(bits: int, offset: int) -> np.ndarray:
    """Lists the values of integer codes minus an offset, by code."""
    return np.arange(1 << bits, dtype=np.float32) - np.float32(offset)


class Codes(NamedTuple):
    """Matrices of codes in a tensor.

    Attributes:
      tensor: The stored tensor.
      stored: Its shape as (matrices, rows, words).
      shape: The shape of the matrices of values, `[..., rows, columns]`.
      values: The value of each code; None where each entry is its own value.
      at: The first bit of each code in a row of words, little-endian; empty without `values`.
      bits: The number of bits of a code.
      words_turned: Whether the matrices of words are stored transposed.
      turned: Whether the matrices of values are stored transposed.
    """

    tensor: Tensor
    stored: Shape
    shape: Shape
    values: np.ndarray | None = None
    at: np.ndarray = np.empty(0, np.int64)
    bits: int = 0
    words_turned: bool = False
    turned: bool = False

    def part(self, stored: np.ndarray, first: int, last: int) -> np.ndarray:
        """Computes rows of a matrix in float32 from its stored entries."""
        words = stored.T if self.words_turned else stored
        if self.turned:
            return self.decode(words, first, last).T
        return self.decode(words[first:last], 0, self.shape[-1])

    def decode(self, words: np.ndarray, first: int, last: int) -> np.ndarray:
        """Computes columns of values from rows of words, in float32."""
        if self.values is None and words.dtype.name.startswith("float8"):
            return values_of(words.dtype)[words[:, first:last].view(np.uint8)]
        if self.values is None:
            return words[:, first:last].astype(np.float32)
        found = np.ascontiguousarray(words).view(np.uint8)
        byte, shift = np.divmod(self.at[first:last], 8)
        codes = found[:, byte]
        if 8 % self.bits:
            # A code may begin in one byte and end in the next.
            after = found[:, np.minimum(byte + 1, found.shape[1] - 1)]
            codes = codes | (after.astype(np.uint16) << 8)
        return self.values[(codes >> shift.astype(codes.dtype)) & ((1 << self.bits) - 1)]


class Blocks(NamedTuple):
    """The scale of each entry of a weight.

    Attributes:
      rows: The number of rows that share a scale.
      columns: The number of columns that share a scale.
      group: The index of the scale of each column, if the file contains it; otherwise None, and
        `columns` consecutive columns share a scale.
    """

    rows: int
    columns: int
    group: Tensor | None = None


class _Formed(NamedTuple):
    """The data in memory while a weight is read: scales, zeros, indices of scales, and codes."""

    scale: np.ndarray
    zero: np.ndarray | None
    column: np.ndarray
    factor: np.float32
    matrix: LastBlock


class Dequantised(OnDemand):
    """A weight `(code - zero) * scale`, computed as it is read.

    It is computed in float32. Codes in the order of the weight are read together with the requested
    entries. For other codes, one matrix of codes is kept; its size is a fraction of the weight's.
    Scales and zeros are kept in their stored dtype.
    """

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        codes: Codes,
        scale: Codes,
        blocks: Blocks,
        *,
        zero: Codes | None = None,
        factor: Tensor | None = None,
        divided: bool = False,
        rounded: np.dtype | None = None,
    ) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
          name: Its name.
          dtype: Its dtype.
          codes: Its codes, in the weight's shape.
          scale: The scales; one matrix for all, or one for each matrix of the weight.
          blocks: The scale of each entry.
          zero: The zeros, which are subtracted from codes, in the scales' shape; None for none.
          factor: One number by which all scales are multiplied, or divided.
          divided: Whether they are divided by it.
          rounded: A dtype to which values are rounded before they are cast to `dtype`.
        """
        super().__init__(name, dtype, codes.shape, codes.tensor.source)
        self._codes, self._scale, self._zero, self._blocks = codes, scale, zero, blocks
        self._factor, self._divided, self._rounded = factor, divided, rounded
        self._turned = codes.words_turned or codes.turned

    @property
    def needs(self) -> int:
        """The bytes of scales, zeros and groups, of a matrix of codes, and of a block's arrays."""
        kept = [self._scale.tensor, *([self._zero.tensor] if self._zero else [])]
        matrix = bytes_of(self._codes.tensor) // max(1, self._codes.stored[0])
        block = 32 * min(math.prod(self.shape), max(_BLOCK, self.shape[-1])) + 32 * self.shape[-1]
        return sum(map(bytes_of, kept)) + (matrix if self._turned else 0) + block

    def form(self) -> _Formed:
        zero = None if self._zero is None else _read(self._zero)
        scale, factor = _read(self._scale), np.float32(1)
        table = self._scale.values
        for at in range(0, scale.size, _CHUNK):
            part = scale.reshape(-1)[at : at + _CHUNK]
            part = part.astype(np.float32) if table is None else table[part]
            _check_finite(part, self._scale.tensor)
        if self._factor is not None:
            factor = np.float32(read_whole(self._factor).item())
            _check_finite(np.asarray(factor), self._factor)
            if self._divided and not factor:
                raise CheckpointError(f"{self._factor.source}: '{self._factor.name}' is 0")
        columns = self.shape[-1]
        if (group := self._blocks.group) is None:
            column = np.arange(columns) // max(1, self._blocks.columns)
        else:
            column, last = read_whole(group).astype(np.int64), self._scale.shape[-1]
            if column.size and not 0 <= column.min() <= column.max() < last:
                worst = column[(column < 0) | (column >= last)][0]
                raise CheckpointError(
                    f"{group.source}: '{group.name}' has the group {worst}; expected 0 to "
                    f"{last - 1}"
                )
        if self._scale.shape[-1] == 1:
            column = np.zeros(1, np.int64)
        return _Formed(scale, zero, column, factor, LastBlock(self._matrix))

    def fill(self, formed: _Formed, out: np.ndarray, start: int) -> None:
        rows, columns = self.shape[-2:]
        row, last = start // columns, -(-(start + out.size) // columns)
        while row < last:
            which, first = divmod(row, rows)
            stop = min(first + max(1, _BLOCK // columns), rows, first + last - row)
            block = self._block(formed, which, first, stop).reshape(-1)
            begin, end = row * columns - start, (row + stop - first) * columns - start
            out[max(begin, 0) : end] = block[max(-begin, 0) : block.size - max(end - out.size, 0)]
            row += stop - first

    def _matrix(self, which: int) -> np.ndarray:
        """Reads the stored entries of one matrix of codes."""
        _, rows, words = self._codes.stored
        flat = np.empty(rows * words, self._codes.tensor.dtype)
        self._codes.tensor.read(flat, which * rows * words)
        return flat.reshape(rows, words)

    def _block(self, formed: _Formed, which: int, first: int, stop: int) -> np.ndarray:
        """Computes rows of one matrix of the weight."""
        codes, (_, rows, words) = self._codes, self._codes.stored
        if self._turned:
            block = codes.part(formed.matrix.get(which), first, stop)
        else:
            flat = np.empty((stop - first) * words, codes.tensor.dtype)
            codes.tensor.read(flat, (which * rows + first) * words)
            block = codes.decode(flat.reshape(-1, words), 0, self.shape[-1])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if formed.zero is not None and self._zero is not None:
                block -= self._spread(self._zero, formed.zero, formed.column, which, first, stop)
            scale = self._spread(self._scale, formed.scale, formed.column, which, first, stop)
            if self._factor is not None:
                scale = scale / formed.factor if self._divided else scale * formed.factor
            block *= scale
            return (block if self._rounded is None else block.astype(self._rounded)).astype(
                self.dtype
            )

    def _spread(
        self,
        codes: Codes,
        stored: np.ndarray,
        column: np.ndarray,
        which: int,
        first: int,
        stop: int,
    ) -> np.ndarray:
        """Repeats the scales of rows, or their zeros, for the entries of these rows."""
        if codes.shape[-2] == 1:
            part, rows = codes.part(stored[which % len(stored)], 0, 1), [0]
        else:
            high, height = first // self._blocks.rows, self._blocks.rows
            low = (stop - 1) // height + 1
            part = codes.part(stored[which % len(stored)], high, low)
            rows = np.arange(first, stop) // height - high
        return part[:, column][rows]


def _read(codes: Codes) -> np.ndarray:
    """Reads the stored entries, as (matrices, rows, words)."""
    return read_whole(codes.tensor).reshape(codes.stored)


def _check_finite(values: np.ndarray, tensor: Tensor) -> None:
    """Raises CheckpointError if scales are not finite."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{tensor.source}: '{tensor.name}' has scales that are not finite")
