"""Computes tensors of grown networks, and of networks in another basis, as they are read.

A whole tensor is computed when its first entries are read, and kept until its last entries have
been read. Memory is therefore bounded by the largest tensor, and reading a tensor in order computes
it once.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.align.blocks import change_blocks, check_within
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.sources.programs import Function, Programs
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument
from sail_jax.merging.extremes import finite
from sail_jax.merging.tensors import OnDemand, Shape, Tensor, bytes_of, held, read_whole


class Computed(OnDemand):
    """A tensor computed from others as `function(operands, *arrays)`.

    Attributes:
      mark: Distinguishes this computation from others of the same name, for fingerprints.
    """

    def __init__(
        self,
        name: str,
        like: jax.ShapeDtypeStruct,
        parts: Sequence[Tensor],
        function: Function,
        operands: Any,
        programs: Programs,
        *,
        how: str,
        mark: str,
        allow_nonfinite: bool = True,
    ) -> None:
        """Stores the arguments, without reading.

        Args:
          name: The tensor's name.
          like: Its shape and dtype.
          parts: The tensors that it is computed from, which become `arrays`.
          function: The pure function. Tensors with the same computation must share an equal
            function with an equal hash, so it is compiled once for all of them.
          operands: A pytree of the data in which such tensors differ.
          programs: The cache of compiled functions.
          how: A short name of the computation, for messages.
          mark: Distinguishes this computation from others of the same name, for fingerprints.
          allow_nonfinite: Whether NaN and infinities enter the computation. If not, they raise a
            CheckpointError with their location.
        """
        source = " and ".join(dict.fromkeys(part.source for part in parts))
        super().__init__(name, np.dtype(like.dtype), tuple(like.shape), f"{source or name}, {how}")
        self.mark = mark
        self._parts, self._programs = tuple(parts), programs
        self._function, self._operands = function, operands
        self._allow_nonfinite = allow_nonfinite

    @property
    def needs(self) -> int:
        """The largest number of bytes in memory: parts, temporaries and result."""
        with self._precision():
            analysis = self._program().memory_analysis()
        temporary = 0 if analysis is None else analysis.temp_size_in_bytes
        return temporary + bytes_of(self) + sum(bytes_of(part) + held(part) for part in self._parts)

    def form(self) -> np.ndarray:
        with self._precision():
            program, arrays = self._program(), []
            for part in self._parts:
                array = read_whole(part)
                self._check_finite(array, f"NaN or infinity in {part.name} in {part.source}")
                arrays.append(jax.device_put(array, may_alias=True))
            out = np.asarray(jax.block_until_ready(program(self._operands, *arrays))).reshape(-1)
        self._check_finite(
            out, f"{self.name} of {self.source}: values do not fit {self.dtype}, or are NaN"
        )
        return out

    def _check_finite(self, array: np.ndarray, message: str) -> None:
        """Raises a CheckpointError if an array contains NaN or infinities, unless allowed."""
        floating = array.dtype.kind not in "iub"
        if floating and not self._allow_nonfinite and not finite(array):
            on = argument("allow_nonfinite", "True")
            raise CheckpointError(f"{message}; use {on} to compute regardless")

    def _program(self) -> jax.stages.Compiled:
        """Returns the compiled function for the shapes of this tensor."""
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in self._parts]
        return self._programs(self._function, self._operands, shapes)

    def _precision(self) -> AbstractContextManager[None]:
        """Enables 64 bits if and only if a tensor has 64 bits, for any setting of the thread."""
        return jax.enable_x64(any(t.dtype.itemsize == 8 for t in (self, *self._parts)))


@dataclass(frozen=True)
class _ChangeOfBasis:
    """Re-expresses a leaf by maps: `change_blocks`, for a spec of one leaf."""

    spec: Spec
    within: tuple[tuple[str, str], ...]

    def __call__(self, maps: Mapping[str, SpaceMap], array: Array) -> Array:
        ((path, _),) = self.spec.leaves
        return change_blocks({path: array}, self.spec, maps, dict(self.within))[path]


def rebased(
    checkpoint: Checkpoint,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    *,
    within: Mapping[str, str] | None = None,
    how: str = "aligned",
    mark: str = "",
) -> View:
    """Makes a checkpoint with spaces re-expressed by maps, applying `change_basis` leaf by leaf.

    Args:
      checkpoint: The checkpoint.
      spec: The spaces of its tensors.
      maps: The maps, by space. Tensors without a mapped space stay unchanged.
      within: Spaces with a map for each unit of a block; see `sail_jax.align.change_blocks`.
      how: A text added to the sources of tensors, in messages.
      mark: Identifies these maps in fingerprints; see `Computed`.

    Returns:
      The view. Its tensors are computed as they are read.

    Raises:
      ValueError: If a map does not match its space, a block does not match its leaves, or a tensor
        of the checkpoint is missing in the spec.
    """
    within = dict(within or {})
    shared = {name: m for name, m in maps.items() if name not in within}
    spec.check(shared)
    check_within(spec, within)
    programs, tensors = Programs(), {}
    sizes = spec.resized(shared)
    for path, tensor in checkpoint.tensors.items():
        local, names = spec.alone(path)
        own = {new: maps[old] for old, new in names.items() if old in maps}
        if not own:
            tensors[path] = tensor
            continue
        shape: Shape = tuple(
            old if new is None else new
            for old, new in zip(tensor.shape, sizes.shape(path), strict=True)
        )
        blocks = tuple((names[name], names[within[name]]) for name in names if name in within)
        tensors[path] = Computed(
            path, jax.ShapeDtypeStruct(shape, tensor.dtype), [tensor],
            _ChangeOfBasis(local, blocks), own, programs, how=how, mark=mark,
        )  # fmt: skip
    return View([checkpoint], tensors)
