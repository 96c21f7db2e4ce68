"""Checkpoints made from others, which are planned, merged and written like any other."""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.configurations import Config
from sail_jax.merging.tensors import Tensor
from sail_jax.merging.work import Work, copy


class View(Checkpoint):
    """A checkpoint made from others.

    It has the path and the plain files of the first one.

    Attributes:
      base: The first of the checkpoints.
      notes: Notes for the user.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        sources: Sequence[Checkpoint],
        tensors: Mapping[str, Tensor],
        config: Config | None = None,
        dtype: np.dtype | None = None,
    ) -> None:
        """Replaces a checkpoint's tensors.

        Args:
          sources: The checkpoints from which the tensors are made; closing the view closes them.
          tensors: The tensors of the view, by name.
          config: The new config.json. None keeps the first source's.
          dtype: The dtype of copied tensors; None keeps each tensor's dtype.
        """
        first = sources[0]
        super().__init__(first.path)
        self.base, self._sources = first, tuple(sources)
        self.tensors, self._dtype = dict(tensors), dtype
        self.metadata = dict(first.metadata)
        self.snapshot, self.scheme = first.snapshot, first.scheme
        self.extras = dict(first.extras)
        if config is not None:
            self.extras["config.json"] = json.dumps(config, indent=2).encode() + b"\n"

    def works(self) -> tuple[Work, ...]:
        """Lists the works that copy all tensors, for an executor."""
        # A tensor may have several names, none of which is its own.
        return tuple(copy(name, self._dtype or x.dtype, x) for name, x in self.tensors.items())

    def close(self) -> None:
        """Closes all checkpoints that the view is made from."""
        for source in self._sources:
            source.close()
