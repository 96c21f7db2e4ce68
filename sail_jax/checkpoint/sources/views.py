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
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core
from jaxtyping import Array

from sail_jax.align.blocks import change_blocks
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.merging.streaming import Work, finite
from sail_jax.merging.tensors import Shape, Tensor

__all__ = ["Computed", "View", "grown", "rebased"]

Compute = Callable[[Mapping[str, Array]], Array]


class _Growth(Protocol):
    """What is needed of `sail_jax.growth.Growth`."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]: ...

    def needs(self, path: str) -> tuple[str, ...]: ...

    def leaf(self, path: str, arrays: Mapping[str, Array]) -> Array: ...


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


class Computed:
    """A tensor computed from others: `compute({their names: arrays})`, pure, traced once.

    mark: what tells this computation from others of the same name, for fingerprints. Without
    `allow_nonfinite`, CheckpointError names what it is computed from that is NaN or infinite.
    Two readers at once are safe; the second may have it formed anew.
    """

    def __init__(
        self,
        name: str,
        like: jax.ShapeDtypeStruct,
        parts: Mapping[str, Tensor],
        compute: Compute,
        programs: "Programs",
        *,
        how: str,
        mark: str,
        allow_nonfinite: bool = True,
    ) -> None:
        self.name, self.mark = name, mark
        self.dtype, self.shape = np.dtype(like.dtype), tuple(like.shape)
        self.source = " and ".join(dict.fromkeys(part.source for part in parts.values()))
        self.source = f"{self.source or name}, {how}"
        self._parts, self._compute, self._programs = dict(parts), compute, programs
        self._allow_nonfinite = allow_nonfinite
        self._lock = threading.Lock()
        self._program: tuple[Any, Sequence[Any]] | None = None
        self._entries: np.ndarray | None = None

    @property
    def needs(self) -> int:
        """Bytes held from the first read to the last, at most: parts, temporaries and outcome."""
        with self._lock, self._precision():
            found = self._traced()[0].memory_analysis()
        temporary = 0 if found is None else found.temp_size_in_bytes
        inputs = sum(_bytes(part) + getattr(part, "needs", 0) for part in self._parts.values())
        return inputs + temporary + _bytes(self)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        size = math.prod(self.shape)
        if start < 0 or start + out.size > size:
            raise ValueError(
                f"{self.name} of {self.source}: entries {start} to {start + out.size} asked for, "
                f"has {size}"
            )
        if not out.size:
            return
        with self._lock:
            if self._entries is None:
                self._entries = self._formed()
            entries = self._entries
            if start + out.size == size:
                self._entries = None
        out[...] = entries[start : start + out.size]

    def _formed(self) -> np.ndarray:
        with self._precision():
            run, constants = self._traced()
            arrays = [_array(part, self._allow_nonfinite) for part in self._parts.values()]
            put = [jax.device_put(x, may_alias=True) for x in arrays]
            out = np.asarray(jax.block_until_ready(run(constants, *put))).reshape(-1)
        if not self._allow_nonfinite and out.dtype.kind not in "iub" and not finite(out):
            raise CheckpointError(
                f"{self.name} of {self.source}: values do not fit {self.dtype}, or are NaN; "
                "--allow-nonfinite goes on regardless"
            )
        return out

    def _traced(self) -> tuple[Any, Sequence[Any]]:
        if self._program is None:
            names, like = list(self._parts), jax.ShapeDtypeStruct
            shapes = [like(part.shape, part.dtype) for part in self._parts.values()]
            self._program = self._programs(
                lambda *arrays: self._compute(dict(zip(names, arrays, strict=True))), shapes
            )
        return self._program

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """64 bits if, and only if, something has them, whatever the thread is set to."""
        everything = [self, *self._parts.values()]
        with jax.enable_x64(any(t.dtype.itemsize == 8 for t in everything)):
            yield


class Programs:
    """Functions compiled once for all that differ in nothing but their constants, such as the
    layers of a network; a `Computed` calls them as `run(constants, *arrays)`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, f: Callable[..., Array], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Any, Sequence[Any]]:
        jaxpr, constants = _folded(jax.make_jaxpr(f)(*shapes))
        key: Any = str(jaxpr)
        if not _says_all(jaxpr):
            key = object()

        def run(constants: Sequence[Any], *arrays: Array) -> Array:
            return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*arrays)[0]

        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = jax.jit(run).lower(constants, *shapes).compile()
            return self._compiled[key], constants


def _folded(traced: core.ClosedJaxpr) -> tuple[core.Jaxpr, list[Any]]:
    """A jaxpr without the equations that depend on constants alone (a key of a tensor's own, say):
    their outcomes are constants, too."""
    jaxpr, rest = traced.jaxpr, []
    known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    for equation in jaxpr.eqns:
        used = [v for v in equation.invars if not isinstance(v, core.Literal)]
        if equation.effects or any(v not in known for v in used):
            rest.append(equation)
            continue
        one = jaxpr.replace(
            constvars=[], invars=used, outvars=equation.outvars, eqns=[equation],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )  # fmt: skip
        values = core.jaxpr_as_fun(core.ClosedJaxpr(one, []))(*(known[v] for v in used))
        known |= zip(equation.outvars, values, strict=True)
    inside = {v for e in rest for v in e.invars if not isinstance(v, core.Literal)}
    inside |= {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    constants = [v for v in known if v in inside]
    return jaxpr.replace(constvars=constants, eqns=rest), [known[v] for v in constants]


def _says_all(jaxpr: core.Jaxpr) -> bool:
    """Whether the text of a jaxpr determines it: no arrays are folded into it or its parts."""
    for equation in jaxpr.eqns:
        if any(isinstance(v, core.Literal) and np.size(v.val) > 1 for v in equation.invars):
            return False
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, core.ClosedJaxpr) and part.consts:
                    return False
                inner = getattr(part, "jaxpr", part)
                if isinstance(inner, core.Jaxpr) and not _says_all(inner):
                    return False
    return True


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _array(tensor: Tensor, allow_nonfinite: bool) -> np.ndarray:
    """A whole tensor at a multiple of 64 bytes, which XLA reads in place."""
    memory = np.empty(_bytes(tensor) + 64, np.uint8)
    at = -memory.ctypes.data % 64
    flat = memory[at : at + _bytes(tensor)].view(tensor.dtype)
    tensor.read(flat)
    if not allow_nonfinite and flat.dtype.kind not in "iub" and not finite(flat):
        raise CheckpointError(
            f"NaN or infinity in {tensor.name} in {tensor.source}; "
            "--allow-nonfinite goes on regardless"
        )
    return flat.reshape(tensor.shape)


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
            path, like, {name: checkpoint.tensors[name] for name in growth.needs(path)},
            lambda arrays, path=path: growth.leaf(path, arrays), programs,
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
    programs, tensors = Programs(), {}
    sizes = spec.resized(shared)
    for path, tensor in checkpoint.tensors.items():
        axes = spec.axes(path)
        if not any(factor.space in maps for axis in axes for factor in axis):
            tensors[path] = tensor
            continue
        shape: Shape = tuple(
            old if new is None else new
            for old, new in zip(tensor.shape, sizes.shape(path), strict=True)
        )
        tensors[path] = Computed(
            path, jax.ShapeDtypeStruct(shape, tensor.dtype), {path: tensor},
            lambda arrays, path=path: change_blocks(dict(arrays), spec, maps, within)[path],
            programs, how=how, mark=mark,
        )  # fmt: skip
    return View([checkpoint], tensors, config)
