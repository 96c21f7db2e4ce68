"""A tensor that lies somewhere unread: what readers hand out and the executor consumes."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

__all__ = ["Shape", "Tensor", "Tensors"]

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
