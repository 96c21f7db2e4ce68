"""Memory that a worker reuses for reading pieces."""

import math
from collections.abc import Hashable

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.merging.tensors import Shape

SPARE = 32 << 20
"""Bytes that a worker may keep in addition to the pieces of a tensor that it holds."""


class Buffers:
    """Aligned memory that a worker reuses from piece to piece, because fresh pages are slow.

    Args:
      hold: Bytes of a tensor that may be kept between passes instead of being read again.
    """

    def __init__(self, hold: int = 0) -> None:
        self.hold = hold
        self._memory: dict[Hashable, np.ndarray] = {}
        self._views: dict[Hashable, dict[tuple[Shape, np.dtype], np.ndarray]] = {}
        self._aliases: dict[int, tuple[np.ndarray, Array]] = {}
        self._size = 0

    def take(self, label: Hashable, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """Returns an array over the memory of a label.

        Args:
          label: The label of the memory, hashable. Arrays with the same label overlap.
          shape: The shape of the array.
          dtype: The dtype of the array.

        Returns:
          An array of zeros or of earlier contents, at a multiple of 64 bytes. XLA reads such memory
          in place.
        """
        count = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(label)
        if memory is None or memory.size < count + 64:
            self._size += count + 64 - (0 if memory is None else memory.size)
            memory = self._memory[label] = np.zeros(count + 64, np.uint8)
            # Arrays over the old memory keep it alive, but it is not written again.
            for view in self._views.pop(label, {}).values():
                self._aliases.pop(id(view), None)
        views = self._views.setdefault(label, {})
        if (shape, dtype) not in views:
            at = -memory.ctypes.data % 64
            views[shape, dtype] = memory[at : at + count].view(dtype).reshape(shape)
        return views[shape, dtype]

    def on_device(self, view: np.ndarray) -> Array:
        """Returns the JAX array of an array from `take`, with its present entries.

        If possible, both share their memory. The JAX array is then made only once, and later writes
        to the memory change it too. A writer must therefore wait until all computations that read
        it are done, as `Reader` does.

        Args:
          view: An array from `take`.

        Returns:
          The JAX array.
        """
        if (alias := self._aliases.get(id(view))) is not None:
            return alias[1]
        array = jax.device_put(view, may_alias=True)
        if _shares(array, view):
            self._aliases[id(view)] = view, array  # keeps the view alive, so its id stays unique
        return array

    def trim(self) -> None:
        """Frees all memory if it exceeds `hold` by more than `SPARE` bytes."""
        if self._size > self.hold + SPARE:
            self.clear()

    def clear(self) -> None:
        """Frees all memory. Memory that JAX arrays still share is freed with these arrays."""
        for table in (self._memory, self._views, self._aliases):
            table.clear()
        self._size = 0


def _shares(array: Array, view: np.ndarray) -> bool:
    """Checks whether a JAX array shares the memory of a NumPy array."""
    (device,) = array.devices()
    return device.platform == "cpu" and array.unsafe_buffer_pointer() == view.ctypes.data
