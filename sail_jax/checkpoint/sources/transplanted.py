"""Makes embedding rows for new tokens of a model, from tokens that it shares with a donor."""

import functools
import hashlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.averaged import Blocked
from sail_jax.checkpoint.sources.programs import Programs
from sail_jax.checkpoint.sources.rows import Rows
from sail_jax.merging.extremes import finite
from sail_jax.merging.tensors import LastBlock, Tensor, aligned, held
from sail_jax.transplant import Method, combined

# The number of rows that are made at once, which does not depend on the memory, so that an output
# is always the same byte for byte.
BATCH = 256
# The number of anchor rows that are read at once.
_READ = 4096
# These programs are cached like those of `jax.jit`: embedding and head, and all merges, share them.
_PROGRAMS = Programs()


class Making(NamedTuple):
    """The rows to make, and the rows from which they are made.

    Attributes:
      targets: The rows of the donor's new tokens, `[new]`.
      theirs: The donor's rows of the shared tokens, `[shared]`.
      own: The model's rows of the same tokens, `[shared]`.
      method: The method of making them.
      k: The largest number of rows from which a new row is made.
    """

    targets: np.ndarray
    theirs: np.ndarray
    own: np.ndarray
    method: Method
    k: int


@dataclass(frozen=True)
class _Transplant:
    """`combined` with its static arguments, by which cached programs are distinguished."""

    method: Method
    k: int

    def __call__(self, _: Any, targets: Array, anchors: Array, own: Array) -> Array:
        return combined(targets, anchors, own, self.method, self.k)


class Transplanted(Blocked):
    """The rows of a model's new tokens, which are made in batches as they are read.

    Anchors stay in memory from the first read to the last, in float32. New rows are read and made
    a batch at a time.

    Attributes:
      mark: Distinguishes these rows from others of the same name, for fingerprints.
    """

    def __init__(self, model: Tensor, donor: Tensor, making: Making) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
          model: The model's embedding or head, which contains the shared tokens.
          donor: The donor's embedding or head.
          making: The rows to make, and the rows from which they are made.
        """
        new, shared = len(making.targets), len(making.own)
        self.block = BATCH * model.shape[1]
        source = f"{model.source}, with rows made from {donor.source}"
        super().__init__(model.name, model.dtype, (new, *model.shape[1:]), source)
        said = [making.method, making.k, donor.name, donor.shape, str(donor.dtype)]
        rows = (making.targets, making.theirs, making.own)
        said += [hashlib.sha256(x.astype(np.int64).tobytes()).hexdigest() for x in rows]
        self.mark = repr(said)
        self._targets = _of(donor, making.targets)
        self._anchors, self._own = _of(donor, making.theirs), _of(model, making.own)
        wide = any(x.dtype.itemsize == 8 for x in (model, donor))
        self._wide = np.dtype(np.float64 if wide else np.float32)
        self._function = _Transplant(making.method, min(making.k, shared))

    @property
    def needs(self) -> int:
        """The largest number of bytes in memory while it is read."""
        with self._precision():
            analysis = self._program().memory_analysis()
        temporary = 0 if analysis is None else analysis.temp_size_in_bytes
        parts = (self._targets, self._anchors, self._own)
        anchors = sum(math.prod(x.shape) for x in parts[1:]) * self._wide.itemsize
        batch = BATCH * sum(x.shape[1] for x in (*parts, self)) * self._wide.itemsize
        read = _READ * max(x.shape[1] * x.dtype.itemsize for x in parts)
        return temporary + anchors + batch + read + max(map(held, parts))

    def form(self) -> LastBlock:
        """Reads the anchors.

        Returns:
          The batches, each computed on demand.
        """
        with self._precision():
            parts = (self._anchors, self._own)
            read = [jax.device_put(self._read(x), may_alias=True) for x in parts]
        return LastBlock(functools.partial(self._made, *read))

    def _made(self, anchors: Array, own: Array, number: int) -> np.ndarray:
        """Makes the rows of a batch, one after another."""
        first = number * BATCH
        last = min(first + BATCH, self.shape[0])
        # The last batch is padded with zero rows, so one program makes all batches.
        targets = aligned((BATCH, self._targets.shape[1]), self._wide)
        targets[last - first :] = 0
        self._read(self._targets, targets[: last - first], first)
        with self._precision():
            made = np.asarray(self._program()(None, targets, anchors, own))[: last - first]
        with np.errstate(over="ignore"):
            cast = made.astype(self.dtype)
        if not finite(cast):
            raise CheckpointError(f"{self.name} of {self.source}: they do not fit {self.dtype}")
        return cast.reshape(-1)

    def _read(self, rows: Tensor, out: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """Reads rows in the dtype of the arithmetic; NaN and infinities raise a CheckpointError."""
        width = rows.shape[1]
        out = aligned(rows.shape, self._wide) if out is None else out
        for at in range(0, len(out), _READ):
            part = np.empty((min(_READ, len(out) - at), width), rows.dtype)
            rows.read(part.reshape(-1), (first + at) * width)
            if not finite(part):
                raise CheckpointError(
                    f"NaN or infinity in {rows.name} of {rows.source}: no rows can be made of it"
                )
            out[at : at + len(part)] = part
        return out

    def _program(self) -> jax.stages.Compiled:
        """Returns the compiled function for these shapes."""
        shapes = [(BATCH, self._targets.shape[1]), self._anchors.shape, self._own.shape]
        likes = [jax.ShapeDtypeStruct(shape, self._wide) for shape in shapes]
        return _PROGRAMS(self._function, None, likes)

    def _precision(self) -> AbstractContextManager[None]:
        """Enables 64 bits if and only if a tensor has 64 bits, for any setting of the thread."""
        return jax.enable_x64(self._wide.itemsize == 8)


def _of(tensor: Tensor, rows: np.ndarray) -> Rows:
    """Returns some rows of a tensor, as a tensor."""
    return Rows((tensor,), np.zeros(len(rows), np.int64), rows)
