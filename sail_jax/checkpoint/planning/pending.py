"""Results of merges that have not run yet, which plans can use but not read."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.planning.plan import Plan
from sail_jax.merging.tensors import Shape


class PendingError(Exception):
    """Raised when a plan requires the values of a result that does not exist yet."""


class Pending(NamedTuple):
    """A tensor that a merge will write.

    Attributes:
      name: Its name.
      dtype: Its dtype.
      shape: Its shape.
      source: The name of the merge.
    """

    name: str
    dtype: np.dtype
    shape: Shape
    source: str

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Refuses to read entries, because they do not exist yet."""
        del out, start
        raise PendingError(f"values of {self.source} are needed, which must be merged first")


def pending(plan: Plan, name: str) -> Checkpoint:
    """Makes the checkpoint that a plan will produce.

    Args:
      plan: The plan.
      name: The name of the checkpoint.

    Returns:
      A checkpoint with the names, dtypes and shapes of the tensors, and with the plain files.
    """
    checkpoint = Checkpoint(Path(name))
    checkpoint.format = "safetensors"
    checkpoint.tensors = {t.name: Pending(t.name, t.dtype, t.shape, name) for t in plan.treatments}
    checkpoint.extras = dict(plan.extras)
    return checkpoint
