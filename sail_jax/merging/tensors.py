"""A tensor that lies somewhere unread: what readers hand out and the executor consumes."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

__all__ = ["OnDemand", "Shape", "Tensor", "Tensors", "check_read", "held", "read_whole"]

Shape = tuple[int, ...]


@runtime_checkable
class Tensor(Protocol):
    """Name, dtype and shape of a tensor, and its entries on demand.

    dtype is a NumPy dtype, with `ml_dtypes` for bfloat16 and the float8s. `source` says where it
    lies, for messages. Reading may happen from several threads at once. One that is computed also
    has `needs`, the bytes that it holds meanwhile.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def source(self) -> str: ...

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Fills `out` (flat, contiguous, of this dtype) with the entries from `start` on, in
        row-major order. ValueError if they are not all there."""
        ...


Tensors = Mapping[str, Tensor]


class OnDemand(ABC):
    """A tensor that has to be formed before entries of it can be read.

    What is formed with the first entries is kept until the last have been read, so that reading
    a tensor from end to end forms it once. Two readers at once are safe; the second may have it
    formed anew.
    """

    def __init__(self, name: str, dtype: np.dtype, shape: Shape, source: str) -> None:
        self.name, self.dtype, self.shape, self.source = name, dtype, shape, source
        self._lock = threading.Lock()
        self._formed: Any = None

    @property
    @abstractmethod
    def needs(self) -> int:
        """Bytes held from the first read to the last, at most."""

    @abstractmethod
    def form(self) -> Any:
        """All entries, flat; or whatever `fill` makes them of."""

    def fill(self, formed: Any, out: np.ndarray, start: int) -> None:
        """Fills `out`, which is not empty, with the entries from `start` on."""
        out[...] = formed[start : start + out.size]

    def read(self, out: np.ndarray, start: int = 0) -> None:
        check_read(self, out, start)
        if not out.size:
            return
        with self._lock:
            if self._formed is None:
                self._formed = self.form()
            formed = self._formed
            if start + out.size == math.prod(self.shape):
                self._formed = None
        self.fill(formed, out, start)


def check_read(tensor: Tensor, out: np.ndarray, start: int) -> None:
    """ValueError unless `out` can be filled with entries of the tensor from `start` on."""
    size = math.prod(tensor.shape)
    if out.dtype != tensor.dtype or out.ndim != 1 or not out.flags.c_contiguous:
        raise ValueError(
            f"{tensor.name} of {tensor.source}: expected a flat, contiguous {tensor.dtype} buffer, "
            f"got {out.dtype}{list(out.shape)}"
        )
    if start < 0 or start + out.size > size:
        raise ValueError(
            f"{tensor.name} of {tensor.source}: entries {start} to {start + out.size} asked for, "
            f"has {size}"
        )


def held(tensor: Tensor) -> int:
    """Bytes that a tensor holds while it is read, beside what it is read into."""
    return getattr(tensor, "needs", 0)


def read_whole(tensor: Tensor) -> np.ndarray:
    """All entries, at a multiple of 64 bytes: XLA reads such memory in place."""
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    at = -memory.ctypes.data % 64
    flat = memory[at : at + size].view(tensor.dtype)
    tensor.read(flat)
    return flat.reshape(tensor.shape)
