"""Plans carried out: tensors read, merged and written at once, under a memory limit.

Workers are threads, each with one tensor at a time: XLA and system calls release the interpreter,
so reading, computing and writing overlap. Which worker takes which tensor, when, and how much is
kept in memory change nothing of what is written.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from sail_jax.checkpoint.streaming import (
    ENTRIES,
    SOME,
    Buffers,
    Leaf,
    Visit,
    Work,
    added,
    coarsest,
    finite,
    is_tree_scope,
    keeps,
    passes,
    settle,
)
from sail_jax.checkpoint.tensors import Tensor
from sail_jax.merging.task_vectors import Fold

__all__ = [
    "Limits",
    "MergeError",
    "Progress",
    "Record",
    "Sink",
    "execute",
    "limits",
    "memory",
    "peak",
    "resident",
]

CONSTANT = 330 << 20  # bytes of an interpreter with JAX and compiled kernels, measured
KEPT = 64 << 20  # bytes a worker keeps of a tensor between visits, unless told otherwise


class MergeError(ValueError):
    """A merge that cannot go on; the message names the tensors."""


class Sink(Protocol):
    """Where merged tensors go: `Writer`, or a dictionary in disguise."""

    finished: frozenset[str]

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None: ...

    def done(self, name: str) -> None: ...


class Limits(NamedTuple):
    """How many workers, and the bytes that each may keep of a tensor between visits."""

    threads: int
    hold: int


class Record(NamedTuple):
    """What was measured of one tensor, from sums in float32 over pieces, added in float64.

    norms `[model]` of the task vectors, cosines `[model, model]`, norm of the update and its
    cosines `[model]` with them; fractions of entries: conflicts (task vectors of both signs) and
    changed; moved `[model]`: how many entries a model moved, and kept `[model]`: the fraction of
    them that is kept, 0 if there are none.
    """

    name: str
    size: int
    norms: list[float]
    cosines: list[list[float]]
    update: float
    alignment: list[float]
    conflicts: float
    changed: float
    moved: list[float]
    kept: list[float]


Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, tensor just finished)


def memory(work: Work) -> int:
    """Bytes that a worker needs at least for this tensor."""
    inputs = len(work.inputs)
    grain = coarsest(work.program)
    entries = min(work.size, ENTRIES) if grain == "entry" else work.size
    if grain == "row" and len(work.shape) > 1:
        entries = min(work.size, max(SOME, work.shape[-1]))
    widest = max(tensor.dtype.itemsize for tensor in work.inputs)
    # what is computed to be read; inputs as read; float32 votes and weights and what kernels hold
    # beside them; the outcome
    needs = sum(getattr(tensor, "needs", 0) for tensor in work.inputs)
    needs += math.ceil(keeps(work.program) * work.size * len(work.models))
    return needs + entries * (inputs * widest + 3 * 4 * len(work.models) + 12)


def limits(works: Sequence[Work], max_memory: int | None, threads: int | None = None) -> Limits:
    """As many workers as there are cores, fewer if memory forbids, and what is left to keep
    tensors in. MergeError, naming the largest tensor, if not even one fits."""
    wanted = threads or min(8, os.cpu_count() or 1)
    needs = sorted((memory(work) for work in works), reverse=True) or [0]
    if max_memory is None:
        return Limits(wanted, KEPT)
    room = max_memory - CONSTANT
    largest = max(works, key=memory, default=None)
    if room < needs[0] and largest is not None:
        raise MergeError(
            f"--max-memory: {largest.name} needs {_mib(CONSTANT + needs[0])} "
            f"({_mib(CONSTANT)} of it for the program), got {_mib(max_memory)}"
        )
    fitting = max(k for k in range(1, wanted + 1) if sum(needs[:k]) <= room)
    return Limits(fitting, max(0, min(KEPT, room // fitting - needs[0])))


def peak(works: Sequence[Work], limits: Limits) -> int:
    """Bytes that the process takes at most, as far as it is planned."""
    needs = sorted(map(memory, works), reverse=True)
    return CONSTANT + sum(needs[: limits.threads]) + limits.threads * limits.hold


def resident() -> int:
    """Bytes that the process holds now; CONSTANT where the system does not say."""
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if statm.exists()
        else CONSTANT
    )


def _mib(size: int) -> str:
    return f"{-(-size // (1 << 20))} MiB"


class _Run:
    """What workers share: the sink, progress, and whether to stop."""

    def __init__(
        self, works: Sequence[Work], sink: Sink, limits: Limits, allow_nonfinite: bool,
        measure: bool, progress: Progress | None,
    ):  # fmt: skip
        self.sink, self.limits, self.measure, self.progress = sink, limits, measure, progress
        self.allow_nonfinite = allow_nonfinite
        self.total = sum(work.reads for work in works)
        # for all or for none: tensors share the statistics of a tree, and so their precision
        self.wide = any(t.dtype == np.float64 for work in works for t in work.inputs)
        self.done_bytes = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.local = threading.local()
        self.records: dict[str, Record] = {}

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """64 bits wherever an input has them; a setting of the thread that asks."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()

    def buffers(self) -> Buffers:
        if not hasattr(self.local, "buffers"):
            self.local.buffers = Buffers(self.limits.hold)
        return self.local.buffers

    @contextlib.contextmanager
    def visit(self, leaf: Leaf) -> Iterator[Visit]:
        with self.precision():
            yield Visit(leaf.work, self.buffers(), self.check)
        self.buffers().trim()

    def check(self, tensors: Sequence[Tensor], entries: np.ndarray) -> None:
        if self.stopped.is_set():
            raise KeyboardInterrupt
        if not self.allow_nonfinite and not finite(entries):
            pairs = zip(tensors, entries, strict=True)
            raise _NonFiniteError(next(tensor for tensor, own in pairs if not finite(own)))

    def merge(self, leaf: Leaf) -> None:
        try:
            self._merge(leaf)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise MergeError(f"{leaf.work.name}: {error}") from error

    def _merge(self, leaf: Leaf) -> None:
        """One tensor from its inputs to the sink; its rules are settled, or of leaf scope."""
        if leaf.work.expression is None:
            self._copy(leaf.work)
            return
        with self.visit(leaf) as visit:
            if not leaf.known:
                settle(
                    leaf.work.program, [leaf], lambda f, _: (leaf.fold(f, visit), leaf.work.size)
                )
            self._write(leaf, visit)
        leaf.known.clear()  # masks, maybe: all leaves are listed until the last is merged

    def fold(self, leaf: Leaf, fold: Fold) -> Any:
        with self.visit(leaf) as visit:
            return leaf.fold(fold, visit)

    def _write(self, leaf: Leaf, visit: Visit) -> None:
        work, sums = leaf.work, {}
        for start, entries, seen in leaf.outcome(visit, self.measure):
            if not self.allow_nonfinite and not finite(entries):
                raise MergeError(
                    f"{work.name}: the merged values do not fit {work.dtype}, whose largest is "
                    f"{_largest(work.dtype):.4g}; choose a wider out_dtype"
                )
            self.sink.write(work.name, entries, start)
            sums = {k: v + sums.get(k, 0) for k, v in seen.items()}
        if self.measure:
            self.records[work.name] = _record(work, sums)
        self.finish(work.name, work.reads)

    def _copy(self, work: Work) -> None:
        first, *others = work.models
        buffers = self.buffers()
        for start in range(0, work.size, ENTRIES):
            shape = (min(ENTRIES, work.size - start),)
            entries = buffers.take("copy", shape, first.dtype)
            first.read(entries, start)
            if self.stopped.is_set():
                raise KeyboardInterrupt
            for other in others:
                same = buffers.take("other", shape, other.dtype)
                other.read(same, start)
                if not np.array_equal(entries, same):
                    raise MergeError(
                        f"{work.name}: {first.dtype} values differ between {first.source} and "
                        f"{other.source}; what is not floating is copied, and has to agree"
                    )
            self.sink.write(work.name, entries.astype(work.dtype, copy=False), start)
        self.finish(work.name, work.reads)

    def finish(self, name: str, size: int) -> None:
        with self.lock:
            self.sink.done(name)
            self.done_bytes += size
            if self.progress is not None:
                self.progress(self.done_bytes, self.total, name)


class _NonFiniteError(MergeError):
    def __init__(self, tensor: Tensor):
        super().__init__(tensor.name)
        self.tensor = tensor


def execute(
    works: Sequence[Work],
    sink: Sink,
    limits: Limits,
    *,
    allow_nonfinite: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
) -> dict[str, Record]:
    """Merges all that the sink has not yet, and gives what was `measure`d by name.

    Work of one tree-scope expression (the same object) shares its statistics; when some of it is
    still to do, all of it is read. Raises MergeError for inputs with NaN or infinities, naming them
    all, and for outcomes that overflow; on an exception or interrupt workers stop within a piece.
    """
    run = _Run(works, sink, limits, allow_nonfinite, measure, progress)
    groups: dict[int, list[Work]] = {}
    alone: list[Leaf] = []
    for work in works:
        if is_tree_scope(work.program):
            groups.setdefault(id(work.expression), []).append(work)
        elif work.name in sink.finished:
            run.done_bytes += work.reads
        else:
            alone.append(Leaf(work))
    with _pool(run) as each:
        for group in groups.values():
            alone += _settled(group, run, each)
        # the largest first, so that none is left for a single worker in the end
        cost = {id(leaf): leaf.work.reads * passes(leaf.work.program) for leaf in alone}
        each(run.merge, sorted(alone, key=lambda leaf: -cost[id(leaf)]))
    return run.records


def _settled(group: Sequence[Work], run: _Run, each: Callable[..., list[Any]]) -> list[Leaf]:
    """The leaves of a tree-scope program that are still to be written, their kernels known."""
    todo = {work.name for work in group} - run.sink.finished
    run.done_bytes += sum(work.reads for work in group if work.name not in todo)
    if not todo:
        return []
    leaves = [Leaf(work) for work in sorted(group, key=lambda work: work.name)]

    def fold(f: Fold, chosen: Sequence[Leaf]) -> tuple[Any, int]:
        sums, place = _InOrder(f), {id(leaf): k for k, leaf in enumerate(chosen)}
        each(lambda leaf: sums.add(place[id(leaf)], run.fold(leaf, f)), chosen)
        return sums.total(), sum(leaf.work.size for leaf in chosen)

    with run.precision():
        settle(group[0].program, leaves, fold)
    return [leaf for leaf in leaves if leaf.work.name in todo]


class _InOrder:
    """What leaves contribute to a fold, added in their order as they come: kept for all leaves of a
    large model, histograms would fill the memory."""

    def __init__(self, fold: Fold) -> None:
        self.fold, self.lock, self.next = fold, threading.Lock(), 0
        self.sums: list[Any] = []
        self.early: dict[int, Any] = {}

    def add(self, k: int, part: Any) -> None:
        with self.lock:
            self.early[k] = part
            while self.next in self.early:
                ready = [*self.sums, self.early.pop(self.next)]
                self.next += 1
                if ready[-1] is not None:  # a leaf without entries
                    self.sums = [added(self.fold, ready)]

    def total(self) -> Any:
        return self.sums[0] if self.sums else added(self.fold, [])


@contextlib.contextmanager
def _pool(run: _Run) -> Iterator[Callable[..., list[Any]]]:
    """A map over threads, in order; the first exception stops all and is raised here."""
    with ThreadPoolExecutor(run.limits.threads, "merge") as pool:

        def each(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
            futures: list[Future] = [pool.submit(work, item) for item in items]
            try:
                pending = set(futures)
                while pending:  # in short waits: an interrupt is noticed between them
                    finished, pending = wait(pending, 0.2, FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
            except BaseException as error:
                run.stopped.set()
                for future in futures:
                    future.cancel()
                wait(futures)
                if isinstance(error, _NonFiniteError):
                    raise MergeError(_all_nonfinite(items, error)) from None
                raise
            return [future.result() for future in futures]

        try:
            yield each
        finally:
            run.stopped.set()


def _all_nonfinite(leaves: Sequence[Leaf], error: _NonFiniteError, limit: int = 10) -> str:
    """The sentence about NaN and infinities, after a look at the inputs that are left."""
    found = [error.tensor]
    until = time.monotonic() + 20
    for leaf in leaves:
        for tensor in leaf.work.inputs:
            if tensor not in found and time.monotonic() < until and not _all_finite(tensor):
                found.append(tensor)
    names = "; ".join(f"{tensor.name} in {tensor.source}" for tensor in found[:limit])
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return f"NaN or infinity in {names}{more}; --allow-nonfinite goes on regardless"


def _all_finite(tensor: Tensor) -> bool:
    size = int(np.prod(tensor.shape))
    buffer = np.empty(min(size, ENTRIES), tensor.dtype)
    for start in range(0, size, ENTRIES):
        part = buffer[: min(ENTRIES, size - start)]
        tensor.read(part, start)
        if not finite(part):
            return False
    return True


def _largest(dtype: np.dtype) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)


def _record(work: Work, sums: Mapping[str, np.ndarray]) -> Record:
    lengths = np.sqrt(np.maximum(np.diag(sums["gram"]), 0))
    outer = np.outer(lengths, lengths)
    cosines = np.divide(sums["gram"], outer, out=np.zeros_like(outer), where=outer > 0)
    moved = sums["moved"]
    kept = np.divide(sums["kept"], moved, out=np.zeros_like(moved), where=moved > 0)
    size = max(1, work.size)
    return Record(
        work.name,
        work.size,
        lengths[:-1].tolist(),
        cosines[:-1, :-1].tolist(),
        float(lengths[-1]),
        cosines[-1, :-1].tolist(),
        float(sums["conflicts"]) / size,
        float(sums["changed"]) / size,
        moved.tolist(),
        kept.tolist(),
    )
