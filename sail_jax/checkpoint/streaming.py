"""Expressions evaluated piece by piece, over tensors too large to hold.

The same rules and counts that merge pytrees (`sail_jax.merging`) run here on pieces of a
tensor: runs of entries, of rows, or all of it, whatever the finest of its kernels' grains allows.
Runs of entries have one of three lengths, padded, so that compilation does not grow with the
number of shapes. Pieces do not depend on memory, threads or devices, and sums over them are taken
in order: neither does the outcome.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from sail_jax.checkpoint.tensors import Shape, Tensor
from sail_jax.merging.merge import Expression, with_base
from sail_jax.merging.reductions import gram
from sail_jax.merging.task_vectors import (
    Chain,
    Each,
    Fold,
    Grain,
    Kernel,
    Leafwise,
    Masked,
    Place,
    Weights,
    task_weights,
)

__all__ = [
    "Buffers",
    "Leaf",
    "Visit",
    "Work",
    "added",
    "coarsest",
    "finite",
    "is_tree_scope",
    "keeps",
    "passes",
    "pieces",
    "settle",
    "work",
]

ENTRIES, SOME, FEW = 1 << 20, 1 << 18, 1 << 14
SPARE = 32 << 20  # bytes that a worker holds on to besides
GRAINS: tuple[Grain, ...] = ("entry", "row", "leaf")


class Work(NamedTuple):
    """One tensor to merge. models: those that vote; start: what their votes are deltas from, None
    for 0; weights: `[model]`, normalised if they have to be. Without an expression the first model
    is copied, and the others have to agree."""

    name: str
    shape: Shape
    dtype: np.dtype
    models: tuple[Tensor, ...]
    start: Tensor | None
    weights: np.ndarray
    expression: Expression | None

    @property
    def program(self) -> Chain:
        return Chain((self.expression.rule, self.expression.count) if self.expression else ())

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.models if self.start is None else (self.start, *self.models)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def reads(self) -> int:
        """Bytes of one visit to all inputs."""
        return sum(self.size * tensor.dtype.itemsize for tensor in self.inputs)


def work(
    name: str,
    shape: Shape,
    dtype: np.dtype,
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Weights,
    expression: Expression,
) -> Work:
    """An expression for one tensor; raises as the expression does in memory."""
    expression.check_models(len(models), base is not None)
    if expression.base == "votes":
        models, weights = (base, *models), with_base(weights)  # type: ignore[arg-type]
    start = base if expression.base in ("required", "optional") else None
    with jax.enable_x64(True):
        w = task_weights(weights, len(models), expression.normalize)
    return Work(name, shape, np.dtype(dtype), tuple(models), start, np.asarray(w), expression)


class Piece(NamedTuple):
    start: int
    count: int
    shape: Shape


def pieces(shape: Shape, grain: Grain) -> list[Piece]:
    n = math.prod(shape)
    if grain == "leaf" or (grain == "row" and len(shape) < 2):
        return [Piece(0, n, shape)]
    if grain == "row":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        # what rows need takes more memory for every entry, and fresh memory is slow
        step = min(rows, max(1, SOME // max(1, columns))) or 1
        cut = (step * columns, (step, columns))
        return [Piece(s, min(cut[0], n - s), cut[1]) for s in range(0, n, max(1, cut[0]))]
    found, start = [], 0
    while start < n:  # what is left after the last whole piece in smaller ones: padding costs
        left = n - start
        size = ENTRIES if left >= ENTRIES else FEW if left <= FEW else SOME
        found.append(Piece(start, min(size, left), (size,)))
        start += size
    return found


def _arithmetic(dtypes: set[np.dtype]) -> np.dtype:
    """What inputs of these dtypes are read as: their own if it is one, float32, or float64."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


class Buffers:
    """Aligned memory that a worker reuses from piece to piece: fresh pages are what is slow.

    hold: how many bytes of a tensor may be kept between visits instead of being read again.
    """

    def __init__(self, hold: int = 0) -> None:
        self.hold = hold
        self._memory: dict[Any, np.ndarray] = {}
        self._views: dict[Any, dict[Any, np.ndarray]] = {}
        self._aliases: dict[int, tuple[np.ndarray, Array]] = {}

    def take(self, label: Any, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """An array of zeros or of what was there before, at a multiple of 64 bytes: XLA reads such
        memory in place."""
        count = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(label)
        if memory is None or memory.size < count + 64:
            memory = self._memory[label] = np.zeros(count + 64, np.uint8)
            for view in self._views.pop(label, {}).values():
                self._aliases.pop(id(view), None)
        views = self._views.setdefault(label, {})
        if (shape, dtype) not in views:
            at = -memory.ctypes.data % 64
            views[shape, dtype] = memory[at : at + count].view(dtype).reshape(shape)
        return views[shape, dtype]

    def on_device(self, view: np.ndarray) -> Array:
        """What was taken, as the device sees it now: over the same memory where that can be, and
        then made once only, for what will be written there is seen as well."""
        if (known := self._aliases.get(id(view))) is not None:
            return known[1]
        array = jax.device_put(view, may_alias=True)
        if _shares(array, view):
            self._aliases[id(view)] = view, array  # which keeps the view, and so its number
        return array

    def trim(self) -> None:
        """Gives memory back that a large tensor took and the next may not need."""
        if sum(memory.size for memory in self._memory.values()) > self.hold + SPARE:
            for kept in (self._memory, self._views, self._aliases):
                kept.clear()


def _shares(array: Array, view: np.ndarray) -> bool:
    on_host = all(device.platform == "cpu" for device in array.devices())
    return on_host and array.unsafe_buffer_pointer() == view.ctypes.data


class Visit:
    """The pieces of a leaf's inputs, read as they are asked for and kept if there is room.

    check: told of what was just read, tensors and `[tensor, *piece]`.
    """

    def __init__(
        self, work: Work, buffers: Buffers, check: Callable[[Sequence[Tensor], np.ndarray], None]
    ):
        self.work, self.buffers, self.check = work, buffers, check
        self.dtype = _arithmetic({tensor.dtype for tensor in work.inputs})
        held = work.size * len(work.inputs) * self.dtype.itemsize
        self.keeps = passes(work.program) > 1 and held <= buffers.hold
        self.read: dict[Piece, int] = {}  # the slots of pieces that have been read

    def __call__(self, piece: Piece) -> tuple[Array | None, Array]:
        """start `[1, *piece]`, stack `[model, *piece]`: to be used before the next is asked for."""
        fresh = piece not in self.read
        slot = self.read.setdefault(piece, len(self.read) if self.keeps else 0)

        def part(label: str, tensors: Sequence[Tensor]) -> Array:
            rows = self.buffers.take((label, slot), (len(tensors), *piece.shape), self.dtype)
            if fresh or not self.keeps:
                self._fill(tensors, rows, piece)
                if fresh:
                    self.check(tensors, rows)
            return self.buffers.on_device(rows)

        start = None if self.work.start is None else part("start", (self.work.start,))
        return start, part("stack", self.work.models)

    def _fill(self, tensors: Sequence[Tensor], rows: np.ndarray, piece: Piece) -> None:
        for tensor, row in zip(tensors, rows.reshape(len(tensors), -1), strict=True):
            out = row[: piece.count]
            if tensor.dtype == self.dtype:
                tensor.read(out, piece.start)
            else:
                raw = self.buffers.take("cast", (piece.count,), tensor.dtype)
                tensor.read(raw, piece.start)
                out[:] = raw.astype(self.dtype)
            row[piece.count :] = 0


@dataclass
class Leaf:
    """Work under way: the kernels known so far, from left to right."""

    work: Work
    known: list[Leafwise] = field(default_factory=list)

    def grain(self, *more: Grain) -> Grain:
        return max([*(k.grain for k in self.known), *more, "entry"], key=GRAINS.index)

    def place(self, piece: Piece) -> Place:
        name = np.uint32(zlib.crc32(self.work.name.encode()))
        return Place(name, np.uint32(piece.start), np.uint32(piece.count))

    def kernels(self, piece: Piece) -> tuple[Kernel, ...]:
        return tuple(k.at((self.work.name, piece.start)) for k in self.known)

    def weights(self, dtype: np.dtype) -> np.ndarray:
        return self.work.weights.astype(np.float64 if dtype == np.float64 else np.float32)

    def fold(self, fold: Fold, visit: Visit) -> Any:
        """The sum of a fold over this leaf, or its summaries by piece."""
        parts = {}
        for piece in pieces(self.work.shape, self.grain(fold.grain)):
            part = _on_host(
                _summarise(
                    self.kernels(piece), fold.summary, self.place(piece), *visit(piece),
                    self.weights(visit.dtype),
                )
            )  # fmt: skip
            key = (self.work.name, piece.start)
            if fold.add is None or not parts:
                parts[key] = part
            else:
                first = next(iter(parts))
                parts[first] = fold.add(parts[first], part)
        return parts if fold.add is None else next(iter(parts.values()), None)

    def outcome(
        self, visit: Visit, measure: bool
    ) -> Iterator[tuple[int, np.ndarray, dict[str, np.ndarray]]]:
        """(first entry, entries, measurements) of the merged tensor, piece by piece."""
        expression = self.work.expression
        scale = np.asarray(expression.scale if expression else 1, self.weights(visit.dtype).dtype)
        for piece in pieces(self.work.shape, self.grain()):
            out, seen = _outcome(
                self.kernels(piece), self.place(piece), *visit(piece),
                self.weights(visit.dtype), scale, jnp.dtype(self.work.dtype), measure,
            )  # fmt: skip
            flat = np.asarray(jax.block_until_ready(out)).reshape(-1)[: piece.count]
            yield piece.start, flat, {k: np.asarray(v, float) for k, v in seen.items()}


def _on_host(tree: Any) -> Any:
    """Arrays of NumPy, after a wait in which other threads run."""
    return jax.device_get(jax.block_until_ready(tree))


def _votes(
    kernels: Sequence[Kernel], place: Place, start: Array | None, stack: Array, weight: Array
) -> tuple[Array, Array]:
    dtype = jnp.float64 if stack.dtype == jnp.float64 else jnp.float32
    delta = stack.astype(dtype)
    delta = delta if start is None else delta - start.astype(dtype)
    weight = weight.astype(dtype).reshape(-1, *(1,) * (stack.ndim - 1))
    for kernel in kernels:
        delta, weight = kernel(place, delta, weight)
    return delta, weight


@jax.jit
def _summarise(
    kernels: Sequence[Kernel], summary: Kernel, place: Place, start: Any, stack: Array, weight: Any
) -> Any:
    return summary(place, *_votes(kernels, place, start, stack, weight))


@functools.partial(jax.jit, static_argnames=("dtype", "measure"))
def _outcome(
    kernels: Sequence[Kernel], place: Place, start: Any, stack: Array, weight: Any, scale: Any,
    dtype: Any, measure: bool,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    delta, weight = _votes(kernels[:-1], place, start, stack, weight)
    if measure:  # two readers, computed once
        delta, weight = lax.optimization_barrier((delta, weight))
    change = scale * kernels[-1](place, delta, weight)
    out = change if start is None else start[0].astype(change.dtype) + change
    seen = _measured(place, start, stack, delta, weight, out) if measure else {}
    return out.astype(dtype), seen


def _measured(
    place: Place, start: Any, stack: Array, delta: Array, weight: Array, out: Array
) -> dict[str, Array]:
    """Sums over a piece, from which norms, cosines, conflicts and kept fractions follow."""
    raw, _ = _votes((), place, start, stack, jnp.ones(len(stack)))
    change = out if start is None else out - start[0].astype(out.dtype)
    inside = place.inside(out.shape)
    inside = True if inside is None else inside
    count = functools.partial(jnp.sum, dtype=jnp.uint32)
    axes = range(1, raw.ndim)
    return {
        "gram": gram(jnp.concatenate([raw, change[None]])),
        "moved": count(raw != 0, axes),
        "kept": count((delta != 0) & (weight != 0) & inside, axes),
        "conflicts": count((raw > 0).any(0) & (raw < 0).any(0)),
        "changed": count(change != 0),
    }


# --- rules and counts resolved into kernels


def _parts(rule: Any) -> Iterator[Any]:
    if isinstance(rule, Chain):
        yield from itertools.chain.from_iterable(map(_parts, rule.rules))
    else:
        yield rule


def is_tree_scope(rule: Any) -> bool:
    """Whether a rule or count needs a statistic of more than one tensor."""
    return any(
        isinstance(part, Fold) or (isinstance(part, Masked) and is_tree_scope(part.rule))
        for part in _parts(rule)
    )


def _folds(rule: Any) -> Iterator[Fold]:
    for part in _parts(rule):
        if isinstance(part, Each | Masked):
            yield from _folds(part.rule)
        elif isinstance(part, Fold):
            yield part


def passes(rule: Any) -> int:
    """How often the entries are visited at least: for every fold, and once to merge them."""
    return 1 + sum(fold.visits for fold in _folds(rule))


def keeps(rule: Any) -> float:
    """Bytes for every vote that its folds keep until it is merged."""
    return sum(fold.keeps for fold in _folds(rule))


def coarsest(rule: Any) -> Grain:
    """The coarsest grain that a rule names before it is resolved."""
    grains: list[Grain] = ["entry"]
    for part in _parts(rule):
        inner = isinstance(part, Each | Masked)
        grains.append(coarsest(part.rule) if inner else getattr(part, "grain", "entry"))
    return max(grains, key=GRAINS.index)


def settle(
    rule: Any, leaves: Sequence[Leaf], fold: Callable[[Fold, Sequence[Leaf]], tuple[Any, int]]
) -> None:
    """Resolves a rule or a count into kernels for each leaf, folding where it has to.

    `fold(f, leaves)` visits the leaves and gives what `f.then` takes. TypeError for rules that are
    bare functions: they see all leaves at once, and cannot be streamed.
    """
    for part in _parts(rule):
        if isinstance(part, Leafwise):
            for leaf in leaves:
                leaf.known.append(part)
        elif isinstance(part, Fold):
            if leaves:
                settle(part.then(*fold(part, leaves)), leaves, fold)
        elif isinstance(part, Each):
            for leaf in leaves:
                settle(part.rule, [leaf], fold)
        elif isinstance(part, Masked):
            settle(part.rule, [leaf for leaf in leaves if part.chosen(leaf.work.name)], fold)
        else:
            raise TypeError(f"{part!r} cannot be streamed: expected Leafwise, Fold, Each or Chain")


def added(fold: Fold, parts: Sequence[Any]) -> Any:
    """What leaves contribute to a fold, in their order."""
    if fold.add is None:
        return {piece: part for leaf in parts for piece, part in leaf.items()}
    return functools.reduce(fold.add, [part for part in parts if part is not None])


_EXPONENT = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}
_BFLOAT16 = 0x7F80


def finite(x: np.ndarray) -> bool:
    """Whether a float array has neither NaN nor infinity, from its bits: one integer maximum."""
    name, size = x.dtype.name, x.dtype.itemsize
    if size == 1 or size not in _EXPONENT:
        return bool(np.isfinite(x.astype(np.float32)).all())
    largest = _BFLOAT16 if name == "bfloat16" else _EXPONENT[size]
    sign = 1 << (8 * size - 1)
    flat = x.reshape(-1)
    # positive ones by the largest signed integer, negative ones by the largest unsigned
    positive, every = (flat.view(f"{kind}{size}") for kind in "iu")
    return flat.size == 0 or (int(positive.max()) < largest and int(every.max()) < sign + largest)
