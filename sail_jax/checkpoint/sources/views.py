"""Checkpoints whose tensors are computed when they are read: grown, or in another basis.

A `View` is a checkpoint like any other to what merges, plans and writes. A tensor of it is formed
whole from the tensors that it needs, with its first entries, and kept until its last have been
read; so memory is that of the largest tensor, and reading a tensor from end to end forms it once.
"""

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.align.blocks import change_blocks, check_within
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.merging.streaming import Work, finite
from sail_jax.merging.tensors import OnDemand, Shape, Tensor, held, read_whole

__all__ = ["Computed", "View", "grown", "rebased"]

Function = Callable[..., Array]


class _Growth(Protocol):
    """What is needed of `sail_jax.growth.Growth`."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]: ...

    def needs(self, path: str) -> tuple[str, ...]: ...

    def computation(self, path: str) -> tuple[Function, Any]: ...


class View(Checkpoint):
    """A checkpoint made of others, the first of which it is named after and carries the files of;
    all are closed with it. `config` replaces config.json."""

    def __init__(
        self,
        sources: Sequence[Checkpoint],
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        first = sources[0]
        super().__init__(first.path)
        self.base, self._sources = first, tuple(sources)
        self.tensors = dict(tensors)
        self.metadata = dict(first.metadata)
        self.extras = dict(first.extras)
        if config is not None:
            self.extras["config.json"] = json.dumps(config, indent=2).encode() + b"\n"

    def works(self) -> tuple[Work, ...]:
        """What an executor does to copy it."""
        return tuple(
            Work(x.name, x.shape, x.dtype, (x,), None, np.ones(1), None)
            for x in self.tensors.values()
        )

    def close(self) -> None:
        for source in self._sources:
            source.close()


class Computed(OnDemand):
    """A tensor computed from others: `function(operands, *arrays)`, pure.

    function, operands: what is done, equal and hashed alike for tensors of which the same is done,
    and a pytree of what differs between them. mark: what tells this computation from others of the
    same name, for fingerprints. Without `allow_nonfinite`, CheckpointError names what it is
    computed from that is NaN or infinite.
    """

    def __init__(
        self,
        name: str,
        like: jax.ShapeDtypeStruct,
        parts: Sequence[Tensor],
        function: Function,
        operands: Any,
        programs: "Programs",
        *,
        how: str,
        mark: str,
        allow_nonfinite: bool = True,
    ) -> None:
        source = " and ".join(dict.fromkeys(part.source for part in parts))
        super().__init__(name, np.dtype(like.dtype), tuple(like.shape), f"{source or name}, {how}")
        self.mark = mark
        self._parts, self._programs = tuple(parts), programs
        self._function, self._operands = function, operands
        self._allow_nonfinite = allow_nonfinite

    @property
    def needs(self) -> int:
        """Bytes held from the first read to the last, at most: parts, temporaries and outcome."""
        with self._precision():
            analysis = self._program().memory_analysis()
        temporary = 0 if analysis is None else analysis.temp_size_in_bytes
        return temporary + _bytes(self) + sum(_bytes(part) + held(part) for part in self._parts)

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
        floating = array.dtype.kind not in "iub"
        if floating and not self._allow_nonfinite and not finite(array):
            raise CheckpointError(f"{message}; allow_nonfinite=True goes on regardless")

    def _program(self) -> Any:
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in self._parts]
        return self._programs(self._function, self._operands, shapes)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """64 bits if, and only if, something has them, whatever the thread is set to."""
        with jax.enable_x64(any(t.dtype.itemsize == 8 for t in (self, *self._parts))):
            yield


class Programs:
    """Functions compiled once for equal functions of equal shapes, such as those of the layers of a
    network; a `Computed` calls them as `program(operands, *arrays)`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, function: Function, operands: Any, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        key = function, structure, *map(jax.typeof, leaves), *shapes
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = jax.jit(function).lower(operands, *shapes).compile()
            return self._compiled[key]


@dataclass(frozen=True)
class _ChangeOfBasis:
    """A leaf re-expressed by maps: `change_blocks`, for a spec of one leaf."""

    spec: Spec
    within: tuple[tuple[str, str], ...]

    def __call__(self, maps: Mapping[str, SpaceMap], array: Array) -> Array:
        ((path, _),) = self.spec.leaves
        return change_blocks({path: array}, self.spec, maps, dict(self.within))[path]


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def grown(
    checkpoint: Checkpoint,
    growth: _Growth,
    *,
    how: str = "grown",
    mark: str = "",
    allow_nonfinite: bool = True,
) -> View:
    """The checkpoint of the larger network: every leaf of the growth, computed when it is read.

    growth: what `sail_jax.growth.plan` makes of the checkpoint's shapes; entries are those of
    `growth.leaf` under jit. how: what is added to the sources of tensors, in messages; mark: see
    `Computed`. Raises CheckpointError if the checkpoint lacks a tensor that the growth needs.
    """
    programs, tensors = Programs(), {}
    for path, like in growth.leaves.items():
        missing = [name for name in growth.needs(path) if name not in checkpoint.tensors]
        if missing:
            raise CheckpointError(
                f"{checkpoint.path}: '{path}' grows from '{missing[0]}', which is missing"
            )
        tensors[path] = Computed(
            path, like, [checkpoint.tensors[name] for name in growth.needs(path)],
            *growth.computation(path), programs,
            how=how, mark=mark, allow_nonfinite=allow_nonfinite,
        )  # fmt: skip
    return View([checkpoint], tensors, growth.config)


def rebased(
    checkpoint: Checkpoint,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    *,
    within: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    how: str = "aligned",
    mark: str = "",
) -> View:
    """The checkpoint with its spaces re-expressed by maps: `change_basis`, leaf by leaf.

    within: the spaces with a map for each unit of a block, see `sail_jax.align.change_blocks`.
    Tensors of no mapped space are those of the checkpoint. Raises ValueError as `Spec.check` and
    `Spec.axes` do.
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
    return View([checkpoint], tensors, config)
