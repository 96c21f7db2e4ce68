"""Plans carried out: tensors read, merged and written at once, under a memory limit."""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from sail_jax import disk
from sail_jax.merging.engine import Engine
from sail_jax.merging.streaming import (
    ENTRIES,
    SOME,
    NotFiniteError,
    Unit,
    Work,
    at_a_time,
    finite,
    kept_bytes,
    read_as,
    visiting_bytes,
)
from sail_jax.merging.tensors import Tensor, held

__all__ = [
    "Limits",
    "MergeError",
    "MergeRefusedError",
    "Progress",
    "Record",
    "Sink",
    "execute",
    "limits",
    "memory",
    "peak",
    "resident",
    "summary",
]

CONSTANT = 330 << 20  # bytes of an interpreter with JAX and compiled kernels, measured
KEPT = 64 << 20  # bytes a worker keeps of a tensor between visits, unless told otherwise


class MergeError(ValueError):
    """A merge that cannot go on; the message names the tensors."""


class MergeRefusedError(MergeError, disk.RefusedError):
    """A merge that cannot be done as it was asked for; raised before any tensor is read."""


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
    entries = min(work.size, ENTRIES) if work.needs == "entry" else work.size
    if work.needs == "row" and len(work.shape) > 1:
        entries = min(work.size, max(SOME, work.shape[-1]))
    if at_a_time(work) > 1:
        entries = SOME
    own = {tensor.dtype for tensor in work.inputs}
    width = read_as(work).itemsize
    cast = 0 if own == {read_as(work)} else max(dtype.itemsize for dtype in own) + width
    # what is computed to be read; inputs as read, and one before it is cast; float32 task vectors
    # and weights and what kernels hold beside them; the outcome
    needs = sum(held(tensor) for tensor in work.inputs)
    needs += math.ceil(kept_bytes(work) * work.size * len(work.models))
    each = (3 * 4 + visiting_bytes(work)) * len(work.models)
    return needs + entries * (inputs * width + cast + each + 12)


def limits(works: Sequence[Work], max_memory: int | None, threads: int | None = None) -> Limits:
    """As many workers as there are cores, fewer if memory forbids, and what is left to keep
    tensors in. MergeRefusedError, naming the largest tensor, if not even one fits."""
    wanted = threads or min(8, os.cpu_count() or 1)
    needs = sorted((memory(work) for work in works), reverse=True) or [0]
    if max_memory is None:
        return Limits(wanted, KEPT)
    room = max_memory - CONSTANT
    largest = max(works, key=memory, default=None)
    if room < needs[0] and largest is not None:
        raise MergeRefusedError(
            f"max_memory: {largest.name} needs {_mib(CONSTANT + needs[0])} "
            f"({_mib(CONSTANT)} of it for the program), got {_mib(max_memory)}"
        )
    fitting = max(k for k in range(1, wanted + 1) if sum(needs[:k]) <= room)
    return Limits(fitting, max(0, min(KEPT, room // fitting - needs[0])))


def peak(works: Sequence[Work], limits: Limits) -> int:
    """Bytes that the process takes at most, as far as it is planned."""
    needs = sorted(map(memory, works), reverse=True)
    return CONSTANT + sum(needs[: limits.threads]) + limits.threads * limits.hold


def summary(works: Sequence[Work], limits: Limits) -> str:
    """One line on memory and threads."""
    threads = f"{limits.threads} thread{'s' * (limits.threads > 1)}"
    return f"peak memory: at most {peak(works, limits) / 1e9:.2f} GB, in {threads}"


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
    """What workers share: the sink, what was measured, and how far they are."""

    def __init__(self, works: Sequence[Work], sink: Sink, measure: bool, progress: Progress | None):
        self.sink, self.measure, self.progress = sink, measure, progress
        self.total = sum(work.reads for work in works)
        self.done_bytes = sum(work.reads for work in works if not self.wanted(work))
        self.lock = threading.Lock()
        self.records: dict[str, Record] = {}

    def wanted(self, work: Work) -> bool:
        return work.name not in self.sink.finished

    def finish(self, unit: Unit, engine: Engine) -> None:
        """From the inputs to the sink."""
        todo = [work for work in unit.works if self.wanted(work)]
        if unit.merge is None:
            for work in todo:
                self._copy(work, engine)
        else:
            self._merge(unit, engine)
        with self.lock:
            for work in todo:
                self.sink.done(work.name)
                self.done_bytes += work.reads
                if self.progress is not None:
                    self.progress(self.done_bytes, self.total, work.name)

    def _merge(self, unit: Unit, engine: Engine) -> None:
        sums: dict[str, dict[str, np.ndarray]] = {}
        works = {work.name: work for work in unit.works}
        with engine.reader(unit) as reader:
            for work, start, entries, seen in unit.outcome(reader, self.measure):
                if not self.wanted(work):
                    continue
                self.sink.write(work.name, entries, start)
                so_far = sums.get(work.name, {})
                sums[work.name] = {k: v + so_far.get(k, 0) for k, v in seen.items()}
        if self.measure:
            self.records |= {name: _record(works[name], totals) for name, totals in sums.items()}
        unit.forget()

    def _copy(self, work: Work, engine: Engine) -> None:
        first, *others = work.models
        buffers = engine.buffers()
        for start in range(0, work.size, ENTRIES):
            shape = (min(ENTRIES, work.size - start),)
            entries = buffers.take("copy", shape, first.dtype)
            first.read(entries, start)
            if engine.stopped.is_set():
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


def execute(
    works: Sequence[Work],
    sink: Sink,
    limits: Limits,
    *,
    allow_nonfinite: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
) -> dict[str, Record]:
    """Merges all that the sink has not yet.

    Args:
      works: Those of one merge (the same object) share its statistics of the tree; when some of
        them are still to do, all are read.
      sink: Where the outcome goes.
      limits: How many workers, and what they may keep.
      allow_nonfinite: Whether NaN and infinities are merged, and outcomes may overflow.
      measure: Whether norms, cosines and conflicts are recorded.
      progress: Told when a tensor is finished.

    Returns:
      What was measured, by name.

    Raises:
      MergeError: For inputs with NaN or infinities, naming them all, and for outcomes that
        overflow. On an exception or interrupt workers stop within a piece.
    """
    run = _Run(works, sink, measure, progress)
    try:
        with Engine(works, limits.threads, limits.hold, not allow_nonfinite) as engine:
            todo = engine.prepared(works, run.wanted)
            # the largest first, so that none is left for a single worker in the end
            cost = {id(unit): sum(w.reads for w in unit.works) * unit.passes for unit in todo}
            todo.sort(key=lambda unit: -cost[id(unit)])
            engine.each(lambda unit: run.finish(unit, engine), todo)
    except NotFiniteError as error:
        if isinstance(error.tensor, Work):
            raise MergeError(_overflow(error.tensor)) from None
        raise MergeError(_all_nonfinite(works, error.tensor)) from None
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise MergeError(str(error)) from error
    return run.records


def _overflow(work: Work) -> str:
    remedy = f"; {work.merge.remedy}" if work.merge and work.merge.remedy else ""
    return (
        f"{work.name}: the merged values do not fit {work.dtype}, whose largest is "
        f"{_largest(work.dtype):.4g}; choose a wider out_dtype{remedy}"
    )


def _all_nonfinite(works: Sequence[Work], first: Tensor, limit: int = 10) -> str:
    """The sentence about NaN and infinities, after a look at the inputs that are left."""
    tensors = [first]
    until = time.monotonic() + 20
    for work in works:
        for tensor in work.inputs:
            if tensor not in tensors and time.monotonic() < until and not _all_finite(tensor):
                tensors.append(tensor)
    names = "; ".join(f"{tensor.name} in {tensor.source}" for tensor in tensors[:limit])
    more = f" and {len(tensors) - limit} more" if len(tensors) > limit else ""
    return f"NaN or infinity in {names}{more}; allow_nonfinite=True goes on regardless"


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
