"""Copies non-float tensors of several models as one tensor, by the rule for different values."""

from collections.abc import Sequence

import numpy as np

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.merging.integers import Integers, differ, remedy, rule_for, taken
from sail_jax.merging.tensors import Tensor, check_read, held


class Chosen:
    """Integers, bools or complex numbers of several models, selected by a rule as they are read.

    Attributes:
      name: The name of the tensor.
      dtype: Its dtype, the same in all models.
      shape: Its shape, the same in all models.
      source: The paths of the tensors.
      mark: The rule, for fingerprints and notes.
      differs: Whether the entries read so far differ between models.
    """

    def __init__(self, tensors: Sequence[Tensor], integers: Integers) -> None:
        """Stores the arguments, without reading.

        Args:
          tensors: The tensor of the base, if any, and of each model. They have the same dtype and
            shape.
          integers: The rule for integers.
        """
        first = tensors[0]
        integers = rule_for(first.dtype, integers)
        self.name, self.dtype, self.shape = first.name, first.dtype, first.shape
        self.source = " and ".join(dict.fromkeys(x.source for x in tensors))
        self.mark, self.differs = f"integers: {integers}", False
        self._tensors = tuple(tensors)
        self._integers: Integers = integers

    @property
    def needs(self) -> int:
        """The number of bytes in memory while it is read, without the output buffer."""
        # The executor reads pieces of at most 2^20 entries.
        piece = min(int(np.prod(self.shape)), 1 << 20) * self.dtype.itemsize
        return len(self._tensors) * piece + sum(map(held, self._tensors))

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries, in row-major order.

        Args:
          out: The buffer to fill: flat, contiguous, of the tensor's dtype.
          start: Row-major index of the first entry to read.

        Raises:
          CheckpointError: If the models differ and the rule is "refuse".
          ValueError: If the tensor is shorter than the request.
        """
        check_read(self, out, start)
        values = [np.empty(out.size, self.dtype) for _ in self._tensors]
        for value, tensor in zip(values, self._tensors, strict=True):
            tensor.read(value, start)
        if differ(values):
            self.differs = True
            if self._integers == "refuse":
                raise CheckpointError(
                    f"{self.name}: {self.dtype} values differ between {self.source}; "
                    + remedy(self.dtype, "with integers: first, last or max one of them is taken")
                )
        out[...] = taken(values, self._integers)
