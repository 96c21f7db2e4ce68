"""Tensors that are read on demand: the protocol, and base classes for implementations.

Readers of files return such tensors, and the engine reads their entries piece by piece.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

Shape = tuple[int, ...]


@runtime_checkable
class Like(Protocol):
    """The name, dtype and shape of a tensor.

    The dtype is NumPy's, or from `ml_dtypes` for bfloat16 and the float8 types.
    """

    @property
    def name(self) -> str:
        """The name of the tensor, the path of its leaf."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its entries."""
        ...

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...


@runtime_checkable
class Tensor(Like, Protocol):
    """A tensor with entries that are read on demand, from several threads at once.

    A tensor that is computed on reading also has an attribute `needs`, the bytes that it keeps in
    memory meanwhile.
    """

    @property
    def source(self) -> str:
        """The location of the tensor, for messages."""
        ...

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries in row-major order."""
        ...


Tensors = Mapping[str, Tensor]
"""The tensors of a checkpoint by name."""


class LastBlock:
    """A cache of the last block read of a tensor, for the next read; threads may share it."""

    def __init__(self, read: Callable[[int], np.ndarray]) -> None:
        """Starts without a block.

        Args:
          read: A function that reads the entries of a block with a given number.
        """
        self._read = read
        self._lock = threading.Lock()
        self._kept = (-1, np.empty(0))

    @property
    def held(self) -> int:
        """The number of entries in memory."""
        return self._kept[1].size

    def get(self, number: int) -> np.ndarray:
        """Returns a block. Unless it is the kept block, it is read, and the kept block is freed
        first.

        Args:
          number: Its number, from 0.

        Returns:
          Its entries.
        """
        with self._lock:
            kept, block = self._kept
            if kept != number:
                self._kept = (-1, np.empty(0))
                block = self._read(number)
                self._kept = (number, block)
            return block

    def forget(self, number: int) -> None:
        """Frees a block if it is the kept block.

        Args:
          number: Its number.
        """
        with self._lock:
            if self._kept[0] == number:
                self._kept = (-1, np.empty(0))


class OnDemand(ABC):
    """A tensor that must be computed before its entries can be read.

    The computed tensor is kept until its last entry is read. Reading a tensor from end to end
    therefore computes it once. If several threads read at once, it may be computed more than once.

    Attributes:
      name: The name of the tensor.
      dtype: The dtype of its entries.
      shape: Its shape.
      source: The location of the tensor, for messages.
    """

    def __init__(self, name: str, dtype: np.dtype, shape: Shape, source: str) -> None:
        self.name, self.dtype, self.shape, self.source = name, dtype, shape, source
        self._lock = threading.Lock()
        self._formed: Any = None

    @property
    @abstractmethod
    def needs(self) -> int:
        """The largest number of bytes in memory between the first and the last read."""

    @abstractmethod
    def form(self) -> Any:
        """Forms the tensor."""

    def fill(self, formed: Any, out: np.ndarray, start: int) -> None:
        """Fills a buffer with entries of the formed tensor."""
        out[...] = formed[start : start + out.size]

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries in row-major order; forms the tensor first if necessary.

        Args:
          out: The buffer to fill, flat, contiguous and of the tensor's dtype.
          start: Row-major index of the first entry to read.

        Raises:
          ValueError: If the buffer is invalid, or the tensor does not have all these entries.
        """
        check_read(self, out, start)
        if not out.size:
            return
        with self._lock:
            if self._formed is None:
                self._formed = self.form()
            formed = self._formed
            # The engine reads from the first entry to the last, so the computed tensor is not
            # needed after the last.
            if start + out.size == math.prod(self.shape):  # the last entries are read
                self._formed = None
        # Outside the lock, several threads can copy at once.
        self.fill(formed, out, start)


def check_read(tensor: Tensor, out: np.ndarray, start: int) -> None:
    """Checks that a buffer can be filled with entries of a tensor.

    Args:
      tensor: The tensor.
      out: The buffer. It must be flat, contiguous and of the tensor's dtype.
      start: Row-major index of the first entry to read.

    Raises:
      ValueError: If the buffer is invalid, or the tensor does not have all these entries.
    """
    size = math.prod(tensor.shape)
    if out.dtype != tensor.dtype or out.ndim != 1 or not out.flags.c_contiguous:
        raise ValueError(
            f"{tensor.name} of {tensor.source}: expected a flat, contiguous {tensor.dtype} buffer, "
            f"got {out.dtype}{list(out.shape)}"
        )
    if start < 0 or start + out.size > size:
        raise ValueError(
            f"{tensor.name} of {tensor.source}: cannot read entries {start} to {start + out.size}, "
            f"has {size}"
        )


def bytes_of(tensor: Like) -> int:
    """Computes the bytes of all entries of a tensor.

    Args:
      tensor: The tensor. Its entries are not read.

    Returns:
      The bytes.
    """
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def held(tensor: Tensor) -> int:
    """Returns the memory that a tensor requires while it is read, without the target buffer.

    Args:
      tensor: The tensor.

    Returns:
      Bytes; 0 for a tensor that is stored in a file.
    """
    return getattr(tensor, "needs", 0)


def same_entries(first: Tensor, second: Tensor, piece: int = 1 << 18) -> bool:
    """Compares the values of two tensors piece by piece, up to the first difference.

    Args:
      first: A tensor.
      second: Another tensor.
      piece: The number of entries to compare at once.

    Returns:
      Whether both have equal shapes and entries. Different dtypes are compared in float32.

    Raises:
      ValueError: If some entries are missing.
    """
    if first.shape != second.shape:
        return False
    size = math.prod(first.shape)
    buffers = [np.empty(min(piece, size), x.dtype) for x in (first, second)]
    for start in range(0, size, piece):
        a, b = (buffer[: size - start] for buffer in buffers)
        first.read(a, start)
        second.read(b, start)
        if a.dtype != b.dtype:
            a, b = a.astype(np.float32), b.astype(np.float32)
        # Bytes are compared first, because NaN does not equal itself.
        if a.tobytes() != b.tobytes() and not np.array_equal(a, b):
            return False
    return True


def read_whole(tensor: Tensor) -> np.ndarray:
    """Reads all entries of a tensor into new memory.

    Args:
      tensor: The tensor.

    Returns:
      The entries in the tensor's shape, at a multiple of 64 bytes. XLA reads such memory in place.

    Raises:
      ValueError: If some entries are missing.
    """
    array = aligned(tensor.shape, tensor.dtype)
    tensor.read(array.reshape(-1))
    return array


def aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Makes an array that starts at a multiple of 64 bytes, which XLA reads in place.

    Args:
      shape: The shape.
      dtype: The dtype.

    Returns:
      The array with arbitrary entries.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + size].view(dtype).reshape(shape)
