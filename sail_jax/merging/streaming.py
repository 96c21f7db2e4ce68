"""Merges evaluated piece by piece, over tensors that may be too large to hold.

Steps run on pieces of a tensor: runs of entries, of rows, or all of it, whatever they need. Runs of
entries have one of four lengths, padded, so that compilation does not grow with the number of
shapes. Small tensors alike go through one program many at a time. Pieces do not depend on memory,
threads or devices, and sums over them are taken in order: neither does the outcome.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from sail_jax.merging import ranking
from sail_jax.merging.arithmetic import gram, number
from sail_jax.merging.leafwise import (
    Data,
    Known,
    Leaf,
    alone,
    data_of,
    digit_bits,
    map_counts,
    summarise,
    through,
)
from sail_jax.merging.steps import Kernel, Needs, Piece, Step, fingerprint, kernel, resolve
from sail_jax.merging.task_vectors import Proposal, written
from sail_jax.merging.tensors import Shape, Tensor

__all__ = [
    "ENTRIES",
    "SOME",
    "Buffers",
    "NotFiniteError",
    "Program",
    "Reader",
    "Resolved",
    "Tree",
    "Unit",
    "Work",
    "at_a_time",
    "finite",
    "is_crowd",
    "kept_bytes",
    "passes",
    "pieces",
    "read_as",
    "tree_bits",
    "units",
    "visiting_bytes",
]

Computed = TypeVar("Computed")

ENTRIES, SOME, FEW, TINY = 1 << 20, 1 << 18, 1 << 14, 1 << 9
"""Entries of a piece, padded; of small tensors, many at a time, SOME altogether."""
CROWD = 1 << 8
"""How many tensors of up to TINY entries have no programs of their own."""
SPARE = 32 << 20
"""Bytes that a worker holds on to besides."""


@runtime_checkable
class Program(Protocol):
    """What is done to tensors: a `Merge`."""

    @property
    def steps(self) -> tuple[Step, ...]: ...

    @property
    def scale(self) -> Any: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def over_tree(self) -> bool: ...

    @property
    def remedy(self) -> str: ...


class Work(NamedTuple):
    """One tensor to merge.

    Attributes:
      name: Of the tensor.
      shape: Of all of its inputs.
      dtype: Of the output.
      models: The tensors that are merged.
      start: What task vectors are relative to, None for 0.
      weights: Shape `[model]`, normalised if they have to be.
      merge: None if the first model is copied, and the others have to agree.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    models: tuple[Tensor, ...]
    start: Tensor | None
    weights: np.ndarray
    merge: Program | None

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.merge.steps if self.merge else ()

    @property
    def needs(self) -> Needs:
        return self.merge.needs if self.merge else "entry"

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


class Run(NamedTuple):
    """A run of a tensor: its first entry, how many there are, and the shape they are read into."""

    start: int
    count: int
    shape: Shape


def pieces(shape: Shape, needs: Needs, crowded: bool = False) -> list[Run]:
    """The runs of a tensor; all but the last of one length are full. `crowded`: whether there are
    many tiny ones."""
    n = math.prod(shape)
    if not n:
        return []
    if needs == "tensor" or (needs == "row" and len(shape) < 2):
        return [Run(0, n, shape)]
    if needs == "row":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        # what rows need takes more memory for every entry, and fresh memory is slow
        step = min(rows, max(1, SOME // columns))
        cut = (step * columns, (step, columns))
        return [Run(s, min(cut[0], n - s), cut[1]) for s in range(0, n, cut[0])]
    if crowded and n <= TINY:
        return [Run(0, n, (TINY,))]
    runs, start = [], 0
    while start < n:  # what is left after the last whole piece in smaller ones: padding costs
        left = n - start
        size = ENTRIES if left >= ENTRIES else FEW if left <= FEW else SOME
        runs.append(Run(start, min(size, left), (size,)))
        start += size
    return runs


def passes(work: Work, bits: int = 16) -> int:
    """How often the entries of a tensor are read, unless they are kept in memory.

    Args:
      one: What is done.
      bits: What a visit of the whole tree counts at a time.
    """
    in_one_piece = len(pieces(work.shape, work.needs)) <= 1
    alone = 0 if in_one_piece else sum(step.passes(16) for step in work.steps if not step.over_tree)
    return 1 + alone + sum(step.passes(bits) for step in work.steps if step.over_tree)


def kept_bytes(work: Work) -> float:
    """Bytes for each entry and model that statistics keep until the tensor is merged."""
    return sum(s.kept_bytes() for step in work.steps for s in step.statistics)


def visiting_bytes(work: Work) -> int:
    """Bytes for each entry of a piece and model that statistics take while they look at it."""
    return sum(s.visiting_bytes(work.size) for step in work.steps for s in step.statistics)


# --- finite values

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
    signed, unsigned = (flat.view(f"{kind}{size}") for kind in "iu")
    return flat.size == 0 or (int(signed.max()) < largest and int(unsigned.max()) < sign + largest)


class NotFiniteError(ValueError):
    """An input or an outcome that holds NaN or infinity.

    Attributes:
      tensor: The input, or the work whose outcome it is.
    """

    def __init__(self, tensor: Tensor | Work):
        super().__init__(f"{tensor.name}: expected finite values, got NaN or infinity")
        self.tensor = tensor


def _refuse(tensors: Sequence[Tensor | Work], rows: np.ndarray, count: int) -> None:
    """NotFiniteError for the first tensor with NaN or infinity among the first `count` entries of
    its row, or as many as it has; what is behind them may be anything."""
    if not finite(rows):
        for tensor, row in zip(tensors, rows, strict=True):
            if not finite(row[: min(count, math.prod(tensor.shape))]):
                raise NotFiniteError(tensor)


# --- memory


def read_as(work: Work) -> np.dtype:
    """What the inputs of a tensor are read as: their own dtype if they share one, float32, or
    float64. A dtype without a zero cannot be padded with it."""
    dtypes = {tensor.dtype for tensor in work.inputs}
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))).name != "float8_e8m0fnu":
        return dtype
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


class Buffers:
    """Aligned memory that a worker reuses from piece to piece: fresh pages are what is slow.

    Args:
      hold: How many bytes of a tensor may be kept between visits instead of being read again.
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
        then made once only, for what will be written there is seen as well. Whoever writes there
        has to wait for whoever reads: `Reader` does."""
        if (alias := self._aliases.get(id(view))) is not None:
            return alias[1]
        array = jax.device_put(view, may_alias=True)
        if _shares(array, view):
            self._aliases[id(view)] = view, array  # which keeps the view, and so its number
        return array

    def trim(self) -> None:
        """Gives memory back that a large tensor took and the next may not need."""
        if sum(memory.size for memory in self._memory.values()) > self.hold + SPARE:
            self.clear()

    def clear(self) -> None:
        """Lets go of all memory; what arrays still lie over lives as long as they do."""
        for table in (self._memory, self._views, self._aliases):
            table.clear()


def _shares(array: Array, view: np.ndarray) -> bool:
    on_host = all(device.platform == "cpu" for device in array.devices())
    return on_host and array.unsafe_buffer_pointer() == view.ctypes.data


class Reader:
    """Reads the pieces of a unit as they are asked for, and keeps them if there is room.

    Args:
      unit: Whose inputs are read.
      buffers: Where they are kept.
      check: Whether NaN and infinity are refused, where a piece is read for the first time.
      stopped: Set when nothing more is to be read.
    """

    def __init__(
        self, unit: "Unit", buffers: Buffers, check: bool, stopped: threading.Event | None = None
    ):
        self.unit, self.buffers, self.check, self.stopped = unit, buffers, check, stopped
        self.dtype = unit.dtype
        held = sum(work.size * len(work.inputs) for work in unit.works) * self.dtype.itemsize
        self.keeps = unit.passes > 1 and held <= buffers.hold
        self.read: dict[int, int] = {}  # the slots of pieces that have been read

    def __call__(self, k: int, compute: Callable[[Array | None, Array], Computed]) -> Computed:
        """What is computed of a piece: of start `[tensor, *piece]` and models `[tensor, model,
        *piece]`.

        These arrays lie over memory into which the next piece is read, though JAX takes arrays to
        be immutable and goes on computing behind the caller's back. So they are seen by `compute`
        alone, and the memory is given out again only when all that it returns is there. What it
        started before it failed cannot be waited for: that memory is left to it.
        """
        try:
            return jax.block_until_ready(compute(*self._piece(k)))
        except BaseException:
            self.buffers.clear()
            raise

    def _piece(self, k: int) -> tuple[Array | None, Array]:
        if self.stopped is not None and self.stopped.is_set():
            raise KeyboardInterrupt
        run, works = self.unit.runs[k], self.unit.works
        fresh = k not in self.read
        slot = self.read.setdefault(k, len(self.read) if self.keeps else 0)

        def part(label: str, tensors: Sequence[Tensor], *axes: int) -> Array:
            shape = (self.unit.batch, *axes, *run.shape)
            memory = self.buffers.take((label, slot), shape, self.dtype)
            rows = memory[: len(works)].reshape(-1, math.prod(run.shape))
            if fresh or not self.keeps:
                for tensor, row in zip(tensors, rows, strict=True):
                    self._fill(tensor, row, run)
                if k in self.unit.unchecked and self.check:
                    _refuse(tensors, rows, run.count)
            return self.buffers.on_device(memory)

        starts = [work.start for work in works if work.start is not None]
        start = part("start", starts) if starts else None
        models = part("models", [x for work in works for x in work.models], self.unit.tasks)
        self.unit.unchecked.discard(k)
        return start, models

    def _fill(self, tensor: Tensor, row: np.ndarray, run: Run) -> None:
        count = min(run.count, math.prod(tensor.shape))
        out = row[:count]
        if tensor.dtype == self.dtype:
            tensor.read(out, run.start)
        else:
            raw = self.buffers.take("cast", (count,), tensor.dtype)
            tensor.read(raw, run.start)
            out[:] = raw.astype(self.dtype)
        row[count:] = 0


# --- units


def _first(a: Any, b: Any) -> Any:
    return a


class Unit:
    """What is merged at a time: one tensor of many pieces, or tiny ones of one piece each.

    Attributes:
      works: The tensors.
      runs: The pieces; if there are several, of the one tensor.
      dtype: What inputs are read as.
      unchecked: The pieces of which it is not known yet whether inputs are finite.
      known: The kernels of the steps resolved so far, None where one does not apply.
      own: For each step and piece the further arguments of its kernel, stacked over tensors.
    """

    def __init__(self, works: Sequence[Work], bits: int, crowded: bool):
        first = works[0]
        self.works, self.bits = tuple(works), bits
        self.merge, self.steps = first.merge, first.steps
        largest = max(works, key=lambda work: work.size)
        self.runs = pieces(largest.shape, first.needs, crowded)
        self.unchecked = set(range(len(self.runs)))
        self.batch = at_a_time(first, crowded)
        self.dtype = read_as(first)
        wide = np.float64 if self.dtype == np.float64 else np.float32
        self.weights = self._stacked([work.weights.astype(wide) for work in works])
        self.names = self._stacked([fingerprint(work.name) for work in works])
        self.known: Known = ()
        self.own: list[list[tuple[Any, ...]]] = []

    @property
    def name(self) -> str:
        return self.works[0].name

    @property
    def passes(self) -> int:
        return passes(self.works[0], self.bits)

    @property
    def tasks(self) -> int:
        return len(self.works[0].models)

    @property
    def count(self) -> np.int32:
        """How many tensors there are, of those a batch has room for."""
        return np.int32(len(self.works))

    def _stacked(self, values: Sequence[Any]) -> Any:
        """Pytrees of NumPy, one of each tensor, on a leading axis of the length of a batch; what is
        behind the last of them is not looked at."""

        def stack(*x: Any) -> np.ndarray:
            out = np.zeros((self.batch, *np.shape(x[0])), np.asarray(x[0]).dtype)
            out[: len(x)] = x
            return out

        return jax.tree.map(stack, *values)

    def place(self, k: int) -> Piece:
        """The pieces number k of all tensors, stacked."""
        run = self.runs[k]
        sizes = [np.uint32(min(run.count, work.size)) for work in self.works]
        return Piece(
            self.names,
            np.full(self.batch, run.start, np.uint32),
            None if self.works[0].needs == "tensor" else self._stacked(sizes),
            on_host=jax.default_backend() == "cpu",
        )

    def data(self, start: Array | None, models: Array) -> Data:
        """The arrays of a piece of all tensors, stacked, with what else belongs to them."""
        dtype = str(jnp.dtype(self.works[0].dtype))
        source = Proposal(start, models, self.weights, dtype)
        leaf = Leaf(self.name, self.works[0].size, source)
        local = data_of(self.steps, leaf).local
        return Data(source, jax.tree.map(lambda x: np.asarray(x)[None], local))

    def parts(
        self, summary: Kernel, keep: bool, reader: Reader, add: Callable[[Any, Any], Any] = _first
    ) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """(piece, (what it contributes, what its tensors keep, stacked)), for a statistic of the
        next step."""
        for k in range(len(self.runs)):
            args = (add, keep, self.count, self.known, self._own(k), summary)
            place = self.place(k)
            yield k, reader(k, lambda *x: _parts(*args, self.data(*x), place))  # noqa: B023

    def _own(self, k: int) -> tuple[tuple[Any, ...], ...]:
        return tuple(step[k] if step else () for step in self.own)

    def forget(self) -> None:
        """Lets go of what was kept: units are listed until the last of them is finished."""
        self.known, self.own = (), []

    def resolved(self, step_kernel: Kernel | None, own: Sequence[tuple[Any, ...]] = ()) -> None:
        """Takes the kernel of the next step, and further arguments of it for each piece."""
        self.known, self.own = (*self.known, step_kernel), [*self.own, list(own)]

    def resolve(self, step: Step, reader: Reader) -> None:
        """Finds the statistics of the next step, if they are of tensors alone."""
        if not self.runs or not step.applies(self.name):
            self.resolved(None)
        elif len(self.runs) == 1:
            prepared = self._stacked([step.prepare(work.size) for work in self.works])
            self.resolved(alone(step), [(prepared,)])
        else:
            tensor = Tree([self], lambda function: function(0, self, reader), 16)
            self.resolved(*tensor.resolve(step, step.prepare(self.works[0].size))[0])

    def outcome(
        self, reader: Reader, measure: bool = False
    ) -> Iterator[tuple[Work, int, np.ndarray, dict[str, np.ndarray]]]:
        """(tensor, first entry, entries, measurements) of what is merged, piece by piece.

        Raises:
          NotFiniteError: For outcomes that do not fit their dtype, if the reader checks.
        """
        tail = kernel(written, number(self.merge.scale if self.merge else 1.0))
        for step in self.steps[len(self.known) :]:
            self.resolve(step, reader)
        for k, (start, count, _) in enumerate(self.runs):
            args, place = (self.count, self.known, self._own(k), tail), self.place(k)
            out, seen = reader(k, lambda *x: _outcomes(*args, self.data(*x), place, measure))  # noqa: B023
            rows = np.asarray(out).reshape(self.batch, -1)
            if reader.check:
                _refuse(self.works, rows[: len(self.works)], count)
            for b, work in enumerate(self.works):
                mine = {name: np.asarray(x[b], float) for name, x in seen.items()}
                yield work, start, rows[b, : min(count, work.size)], mine


def at_a_time(work: Work, crowded: bool = False) -> int:
    """How many tensors alike are merged at a time; 1 unless they are small."""
    if work.size > FEW or any(step.local is not None for step in work.steps):
        return 1
    return SOME // (TINY if crowded and work.size <= TINY else FEW)


def is_crowd(works: Sequence[Work]) -> bool:
    """Whether there are many tiny tensors to merge among them."""
    return sum(0 < work.size <= TINY and work.merge is not None for work in works) > CROWD


def units(works: Sequence[Work], crowded: bool, bits: int = 16) -> list[Unit]:
    """Units of work for one merge: small tensors alike together, in their order, others alone."""
    alike: dict[Any, list[Work]] = {}
    for k, work in enumerate(works):
        batch = at_a_time(work, crowded)
        if batch == 1:
            alike[k] = [work]
            continue
        shape = None if work.needs == "entry" else work.shape
        inputs = (len(work.models), work.start is None, *(x.dtype for x in work.inputs))
        applied = tuple(step.applies(work.name) for step in work.steps)
        key = (batch, shape, work.dtype, inputs, applied, work.size == 0, id(work.merge))
        alike.setdefault(key, []).append(work)
    return [
        Unit(group[i : i + step], bits, crowded)
        for group in alike.values()
        for step in [at_a_time(group[0], crowded)]
        for i in range(0, len(group), step)
    ]


Resolved = tuple[Kernel | None, list[tuple[Any, ...]]]
"""The kernel of a step for a unit, and further arguments of it for each piece."""


class Tree:
    """The visit of all pieces of some units.

    Args:
      units: In order.
      visit: (function) -> nothing: calls it for each unit, in any order, maybe at once, with its
        place and a reader.
      bits: See `Visit`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        visit: Callable[[Callable[[int, Unit, Reader], None]], None],
        bits: int,
    ):
        self.units, self.visit, self.bits = units, visit, bits
        self.tasks = units[0].tasks

    def resolve(self, step: Step, prepared: Any) -> list[Resolved]:
        """The kernel of a step for each unit."""
        kernel, own = resolve(step, self, prepared)
        return [
            (kernel, [tuple(argument[place, k] for argument in own) for k in range(len(unit.runs))])
            for place, unit in enumerate(self.units)
        ]

    def fold(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> Any:
        return self._visit(summary, add, False)[0]

    def keep(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        return self._visit(summary, add, True)

    def _visit(
        self, summary: Kernel, add: Callable[[Any, Any], Any], keep: bool
    ) -> tuple[Any, dict[Any, Any]]:
        sums, own = _InOrder(add), {}

        def visit_unit(place: int, unit: Unit, reader: Reader) -> None:
            parts = []
            for k, (part, mine) in unit.parts(summary, keep, reader, add):
                parts.append(part)
                if keep:
                    own[place, k] = mine
            sums.add(place, [_total(parts, add)] if parts else [])

        self.visit(visit_unit)
        return sums.total(), own

    def each(self, function: Callable[..., Any], *own: Any) -> Any:
        return {key: function(*(argument[key] for argument in own)) for key in own[0]}

    def before(self, own: Any) -> Any:
        names = {
            (place, k): [(work.name, unit.runs[k].start) for work in unit.works]
            for place, unit in enumerate(self.units)
            for k in range(len(unit.runs))
        }
        entries = [(at, key, b) for key, places in names.items() for b, at in enumerate(places)]
        entries.sort()

        def running(*counts: ranking.Wide) -> list[ranking.Wide]:
            by_key = dict(zip(own, counts, strict=True))
            so_far: Any = np.zeros(counts[0].lo.shape[1:], np.int64)
            sums = {key: np.zeros(n.lo.shape, np.int64) for key, n in by_key.items()}
            for _, key, b in entries:
                sums[key][b] = so_far
                count = by_key[key]
                so_far = so_far + (count.hi[b].astype(np.int64) << 16) + count.lo[b]
            return [ranking.wide(sums[key]) for key in own]

        spread = map_counts(running, *jax.device_get(list(own.values())))
        return {
            key: jax.tree.map(lambda x, i=i: x[i], spread, is_leaf=lambda x: isinstance(x, list))
            for i, key in enumerate(own)
        }

    def sizes(self) -> Any:
        raise NotImplementedError("files are not searched bit by bit")

    def run(self, function: Kernel, *args: Any) -> Any:
        return _run(function, *args)

    def repeat(self, times: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        return functools.reduce(lambda state, i: body(i, state), range(times), state)


def tree_bits(works: Sequence[Work]) -> int:
    """How many bits a visit of all these tensors counts at a time."""
    return digit_bits(sum(work.size for work in works), len(works))


class _InOrder:
    """Parts added in their order as they come: kept for all leaves of a large model, histograms
    would fill the memory."""

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        self.function, self.lock, self.next = add, threading.Lock(), 0
        self.sum: list[Any] = []
        self.early: dict[int, list[Any]] = {}

    def add(self, place: int, part: list[Any]) -> None:
        """A part, or none, of a place."""
        with self.lock:
            self.early[place] = part
            while self.next in self.early:
                ready = [*self.sum, *self.early.pop(self.next)]
                self.next += 1
                self.sum = [_total(ready, self.function)] if ready else []

    def total(self) -> Any:
        return self.sum[0]


# --- compiled


def _total(parts: Iterable[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The sum of parts in their order."""
    return functools.reduce(functools.partial(_sum, add), parts)


_sum = jax.jit(lambda add, a, b: add(a, b), static_argnums=0)
_run = jax.jit(lambda function, *args: function(*args))


def _bound(kernels: Known, own: tuple[tuple[Any, ...], ...]) -> Known:
    return tuple(k and k.bind(*more) for k, more in zip(kernels, own, strict=True))


@functools.partial(jax.jit, static_argnames=("add", "keep"))
def _parts(
    add: Callable[[Any, Any], Any], keep: bool, count: Array, kernels: Known, own: Any,
    summary: Kernel, data: Data, place: Piece,
) -> tuple[Any, Any]:  # fmt: skip
    """What the tensors of a batch contribute in all, and what each keeps, stacked."""

    def contribute(x: Any) -> tuple[Any, Any]:
        mine, data, place = x
        contribution = summarise(_bound(kernels, mine), summary, data, place)
        return contribution if keep else (contribution, ())

    return _batched(contribute, count, (own, data, place), add)


@functools.partial(jax.jit, static_argnames="measure")
def _outcomes(
    count: Array, kernels: Known, own: Any, tail: Kernel, data: Data, place: Piece, measure: bool
) -> tuple[Array, dict[str, Array]]:
    def merged(x: Any) -> tuple[Any, Any]:
        mine, data, place = x
        steps: Any = _bound(kernels, mine)
        *first, last = steps
        vectors: tuple[Array, Array] = through(first, data, place)
        delta, weight = lax.optimization_barrier(vectors) if measure else vectors  # computed once
        change, out = tail(data.source, last(place.beside(data.local[-1]), delta, weight))
        return (), (out, _measured(place, data.source, delta, weight, change) if measure else {})

    return _batched(merged, count, (own, data, place), _first)[1]


def _batched(
    body: Callable[[Any], tuple[Any, Any]], count: Array, xs: Any, add: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """The sum of the first and a stack of the second results of `body`, over the first `count` of
    leading axes."""
    first = jax.tree.map(lambda x: x[0], xs)
    room = len(jax.tree.leaves(xs)[0])
    if room == 1:
        part, own = body(first)
        return part, jax.tree.map(lambda x: x[None], own)

    def step(i: Array, sofar: tuple[Any, Any]) -> tuple[Any, Any]:
        item = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), xs)
        part, own = body(item)
        put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return add(sofar[0], part), jax.tree.map(put, sofar[1], own)

    body = jax.jit(body)  # traced once, for its shapes and for the loop
    part, own = jax.eval_shape(body, first)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), part)
    stack = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), own)
    return lax.fori_loop(0, count, step, (total, stack))


def _measured(
    place: Piece, source: Proposal, delta: Array, weight: Array, change: Array
) -> dict[str, Array]:
    """Sums over a piece, from which norms, cosines, conflicts and kept fractions follow."""
    raw, _ = source.vectors()
    inside = place.inside(change.shape)
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
