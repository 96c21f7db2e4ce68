"""Adds changes of low rank to weights as they are read."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.merging.tensors import (
    OnDemand,
    Shape,
    Tensor,
    bytes_of,
    held,
    read_whole,
    same_entries,
)

# The number of entries of B A that are computed at once.
_BLOCK = 1 << 18
# The number of entries that are converted at once.
_CHUNK = 1 << 20


class Change(NamedTuple):
    """The change that an adapter makes to a weight: scale * B A, or a variant of LoRA.

    Attributes:
      B: The factor `[out, rank]`; of a convolution `[out, rank, 1, ...]`; of stacked experts
        `[out, rank * experts]`, the expert changing fastest. For the change of a bias `[out]`.
      A: The factor `[rank, in]`; of a convolution `[rank, in, k, ...]`; of stacked experts
        `[experts * rank, in]`, the rank changing fastest. None stands for the number 1.
      scale: The factor on the product.
      transposed: Whether (B A)^T is added, because the weight is stored as [in, out].
      magnitude: DoRA's norms of the output units; None without DoRA.
      experts: The number of stacked pairs of factors.
      one: An expert and the added rows of its product, for a base that stores each expert in
        separate tensors; None for all.
    """

    B: Tensor
    A: Tensor | None
    scale: float
    transposed: bool = False
    magnitude: Tensor | None = None
    experts: int = 1
    one: tuple[int, int, int] | None = None

    def check(self, name: str, base: Tensor) -> None:
        """Checks that the change can be added to a weight.

        Args:
          name: The name of the weight, for messages.
          base: The weight.

        Raises:
          CheckpointError: If the shape or the dtype is incompatible.
        """
        what = f"{name} of {self.B.source}: expected"
        if base.shape != self.shape:
            flipped = base.shape == self.shape[::-1]
            raise CheckpointError(
                f"{what} a change of shape {base.shape}, got {self.shape}"
                f"{' (fan_in_fan_out?)' if flipped else ''}"
            )
        if not jnp.issubdtype(base.dtype, jnp.floating):
            raise CheckpointError(f"{what} a base of a floating dtype, got {base.dtype}")
        units = self.shape[-1] if self.transposed else self.shape[0]
        if self.magnitude is not None and math.prod(self.magnitude.shape) != units:
            raise CheckpointError(f"{what} {units} magnitudes, got shape {self.magnitude.shape}")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the change."""
        return tuple(x for x in (self.B, self.A, self.magnitude) if x is not None)

    @property
    def shape(self) -> Shape:
        """The shape of the weight that it changes."""
        if self.A is None:
            return self.B.shape
        if self.one is not None:
            return (self.one[2] - self.one[1], self.A.shape[1])
        shape = (self.B.shape[0], *self.A.shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.experts == 1 else (self.experts, *shape)

    def matrices(self, scale: float | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Reads the factors.

        Args:
          scale: The multiplier of the factor that comes from B; by default `self.scale`.

        Returns:
          For each expert a left and a right factor, in float32.
        """
        # The small factor is scaled once, instead of every block of the product.
        B = _whole(self.B) * np.float32(self.scale if scale is None else scale)
        A = np.ones((1, 1), np.float32) if self.A is None else _whole(self.A)
        if self.one is not None:
            expert, first, last = self.one
            B = B.reshape(B.shape[0], -1, self.experts)[first:last, :, expert]
            return [(np.ascontiguousarray(B), A.reshape(self.experts, -1, A.shape[-1])[expert])]
        if self.experts == 1:
            pairs = [(B.reshape(B.shape[0], -1), A.reshape(A.shape[0], -1))]
        else:
            lefts = B.reshape(B.shape[0], -1, self.experts).transpose(2, 0, 1)
            rights = A.reshape(self.experts, -1, A.shape[-1])
            pairs = list(zip(np.ascontiguousarray(lefts), rights, strict=True))
        # (B A)^T = A^T B^T: a transposed product is a product of transposed factors.
        return [(right.T, left.T) for left, right in pairs] if self.transposed else pairs

    def equals(self, other: "Change") -> bool:
        """Checks whether another change is the same product of the same factors.

        Args:
          other: The other change.

        Returns:
          True if it is. False if it is not, or if only the sums could show it.
        """
        if self.magnitude is not None or other.magnitude is not None:
            return False
        if self.scale != other.scale or self.experts != other.experts:
            return False
        # The scale, which is in the left or the right factor, is not compared.
        pairs = zip(self.matrices(1.0), other.matrices(1.0), strict=True)
        return all(np.array_equal(x, y) for one in pairs for x, y in zip(*one, strict=True))


_Matrices = list[tuple[np.ndarray, np.ndarray]]
_Formed = tuple[_Matrices, np.ndarray | None]
"""The factors of each expert, and DoRA's multipliers of the sum."""


class Adapted(OnDemand):
    """A weight with a change added: base + scale * B A, computed as it is read.

    The sum is taken in float32 and rounded once. With DoRA's magnitudes m, it is multiplied by
    m / |sum| before that, where the norm is taken over the inputs of each output unit. The factors
    are kept in memory, but the product is not. It is computed in blocks of rows that depend only on
    the shape, so an entry has the same bits regardless of what else is read.

    Attributes:
      base: The weight without the adapter.
      change: The change that is added.

    References:
      Hu et al., LoRA, 2021 (arXiv 2106.09685); Liu et al., DoRA, 2024 (arXiv 2402.09353), Eq. 5.
    """

    def __init__(self, base: Tensor, change: Change, dtype: np.dtype | None = None) -> None:
        """Stores the arguments, without reading.

        Args:
          base: The weight without the adapter, of the change's shape.
          change: The change that is added.
          dtype: The dtype of the sum; by default the base's.
        """
        dtype = base.dtype if dtype is None else np.dtype(dtype)
        super().__init__(base.name, dtype, base.shape, f"{base.source} + {change.B.source}")
        self.base, self.change = base, change
        matrices = base.shape[0] if change.experts > 1 and change.one is None else 1
        self._columns = base.shape[-1] if matrices > 1 else math.prod(base.shape[1:])
        self._rows = math.prod(base.shape) // max(1, matrices * self._columns)

    @property
    def needs(self) -> int:
        """The bytes of the factors and of a block: the base, its change, and their sum."""
        parts = self.change.tensors
        entries = sum(math.prod(part.shape) for part in parts)
        block = max(_BLOCK, self._columns) * (self.base.dtype.itemsize + 3 * 4)
        if self.change.magnitude is not None:
            # The norms, and a block's multipliers.
            entries += 4 * (self._rows + self._columns)
            block += max(_BLOCK, self._columns) * 3 * 8
        if self.change.experts > 1:
            entries *= 2  # the factors of single experts are copied out
        return 4 * entries + block + sum(map(held, (self.base, *parts)))

    def form(self) -> _Formed:
        matrices = self.change.matrices()
        if self.change.magnitude is None:
            return matrices, None
        squares = np.zeros(self._columns if self.change.transposed else self._rows)
        for begin, total in self._sums(matrices, 0, math.prod(self.shape)):
            square = total.astype(np.float64).reshape(-1, self._columns) ** 2
            row = begin // self._columns
            if self.change.transposed:
                squares += square.sum(0)
            else:
                squares[row : row + len(square)] = square.sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = _whole(self.change.magnitude).reshape(-1) / np.sqrt(squares)
        return matrices, gain.astype(np.float32)

    def fill(self, formed: _Formed, out: np.ndarray, start: int) -> None:
        matrices, gain = formed
        for begin, total in self._sums(matrices, start, start + out.size):
            if gain is not None:
                at = np.arange(begin, begin + total.size)
                c = self._columns
                total *= gain[at % c if self.change.transposed else at // c]
            out[begin - start : begin - start + total.size] = total.astype(self.dtype)

    def _sums(self, matrices: _Matrices, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields base + change block by block: the first entry, and the sums in float32."""
        columns = self._columns
        size, height = self._rows * columns, max(1, _BLOCK // columns)
        for which in range(start // size, -(-stop // size)):
            left, right = matrices[which]
            first = which * size
            low, high = max(start, first) - first, min(stop, first + size) - first
            # Blocks begin at multiples of their height, regardless of where a read begins.
            for row in range(low // columns // height * height, -(-high // columns), height):
                at = row * columns
                begin, end = max(low, at), min(high, at + height * columns)
                original = np.empty(end - begin, self.base.dtype)
                self.base.read(original, first + begin)
                change = (left[row : row + height] @ right).reshape(-1)[begin - at : end - at]
                # The sum is in float32 with a single cast, because adding in bfloat16 would round
                # small changes away.
                yield first + begin, original.astype(np.float32) + change


class Named:
    """A tensor under another name, and optionally in another dtype."""

    def __init__(self, tensor: Tensor, name: str, dtype: np.dtype | None = None) -> None:
        """Stores the arguments, without reading.

        Args:
          tensor: The tensor.
          name: Its new name.
          dtype: Its new dtype; by default its own.
        """
        self.tensor, self.name = tensor, name
        self.dtype = tensor.dtype if dtype is None else dtype
        self.shape, self.source = tensor.shape, tensor.source

    @property
    def needs(self) -> int:
        """The bytes that the tensor itself requires."""
        return held(self.tensor)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries; see `Tensor`.

        Args:
          out: The buffer to fill.
          start: Row-major index of the first entry.
        """
        read_as(self.tensor, out, start)


class Turned(OnDemand):
    """The transpose of a small matrix."""

    def __init__(self, tensor: Tensor) -> None:
        """Stores the matrix, without reading."""
        super().__init__(tensor.name, tensor.dtype, tensor.shape[::-1], tensor.source)
        self.tensor = tensor

    @property
    def needs(self) -> int:
        """The bytes of the matrix and its transpose."""
        return 2 * bytes_of(self.tensor) + held(self.tensor)

    def form(self) -> np.ndarray:
        return read_whole(self.tensor).T.reshape(-1)


class Piece(Named):
    """Consecutive entries of a tensor, as a tensor of another shape."""

    def __init__(self, tensor: Tensor, name: str, start: int, shape: Shape) -> None:
        """Stores the arguments, without reading.

        Args:
          tensor: The tensor.
          name: The name of the piece.
          start: Row-major index of its first entry.
          shape: Its shape.
        """
        super().__init__(tensor, name)
        self.start, self.shape = start, shape

    def read(self, out: np.ndarray, start: int = 0) -> None:
        read_as(self.tensor, out, self.start + start)


def read_as(tensor: Tensor, out: np.ndarray, start: int = 0) -> None:
    """Reads consecutive entries into a buffer, and casts them to the buffer's dtype.

    Args:
      tensor: The tensor.
      out: The buffer to fill: flat and contiguous.
      start: Row-major index of the first entry.
    """
    if out.dtype == tensor.dtype:
        return tensor.read(out, start)
    for at in range(0, out.size, _CHUNK):
        buffer = np.empty(min(_CHUNK, out.size - at), tensor.dtype)
        tensor.read(buffer, start + at)
        out[at : at + buffer.size] = buffer.astype(out.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Checks whether two tensors have equal values.

    For weights with the same kind of change, the factors are compared. Other tensors are read in
    pieces, up to the first difference.

    Args:
      a: A tensor.
      b: Another.

    Returns:
      Whether shapes and all values are equal.
    """
    a, b = _under(a), _under(b)
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if isinstance(a, Adapted) and isinstance(b, Adapted) and _alike(a, b):
        return True
    return same_entries(a, b)


def _alike(a: Adapted, b: Adapted) -> bool:
    """Checks whether two weights have the same base and the same change."""
    # B A of a head and (B A)^T of an embedding are the same change, although they are rounded
    # differently.
    return a.change.equals(b.change) and same(a.base, b.base)


def _under(tensor: Tensor) -> Tensor:
    """Returns the tensor under a chain of new names."""
    while type(tensor) is Named and tensor.dtype == tensor.tensor.dtype:
        tensor = tensor.tensor
    return tensor


def _whole(tensor: Tensor) -> np.ndarray:
    """Loads a tensor into memory, in float32."""
    return read_whole(tensor).astype(np.float32)
