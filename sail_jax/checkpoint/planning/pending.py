"""Outcomes of merges that have not been carried out: they can be planned with, but not read."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.planning.plan import Plan
from sail_jax.merging.tensors import Shape


class PendingError(Exception):
    """Raised where a plan needs the values of an outcome that is not there yet."""


class Pending(NamedTuple):
    """A tensor that a merge will write.

    Attributes:
      name: Its name.
      dtype: Its dtype.
      shape: Its shape.
      source: What the merge is called.
    """

    name: str
    dtype: np.dtype
    shape: Shape
    source: str

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Refuses to read entries: there are none yet."""
        del out, start
        raise PendingError(f"values of {self.source} are needed, which has to be merged first")


def pending(plan: Plan, name: str) -> Checkpoint:
    """Makes the checkpoint that a plan will lead to.

    Args:
      plan: The plan.
      name: What the checkpoint is called.

    Returns:
      A checkpoint with the names, dtypes and shapes of the tensors and with the files beside them.
    """
    checkpoint = Checkpoint(Path(name))
    checkpoint.format = "safetensors"
    checkpoint.tensors = {t.name: Pending(t.name, t.dtype, t.shape, name) for t in plan.treatments}
    checkpoint.extras = dict(plan.extras)
    return checkpoint
