"""Executes the works of a plan under a memory limit.

A `Work` describes one tensor: its inputs and how they are combined. Worker threads read the inputs,
merge them piece by piece with `sail_jax.merging.engine`, and pass the result to a `Sink`, usually
the writer in `sail_jax.checkpoint.output`. `limits` computes how many workers fit in memory.

All workers start compiled programs, which share XLA's pool of threads. This is safe because a
program never waits inside the pool for work that it submitted to the pool. Only decompositions of
matrices did so, and those of `sail_jax.linalg` do not. Workers wait for one another at two places
only, the lock of a tensor that is computed once and the lock of the sink, and hold neither while
they wait for the other.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from sail_jax.checks import argument
from sail_jax.disk import RefusedError, StoreError
from sail_jax.merging.engine import Engine
from sail_jax.merging.extremes import FAINT
from sail_jax.merging.sharing import Sharing
from sail_jax.merging.streaming import NotFiniteError, Unit, all_finite
from sail_jax.merging.tensors import Tensor, held
from sail_jax.merging.work import (
    ENTRIES,
    SOME,
    PieceOf,
    Work,
    at_a_time,
    kept_bytes,
    read_as,
    visiting_bytes,
    workspace,
)

CONSTANT = 330 << 20  # bytes of an interpreter with JAX that compiles kernels, as measured
STATISTICS = 50 << 20  # additional bytes to compile each statistic, such as ranks
KEPT = 64 << 20  # the most bytes of a tensor that a worker keeps between passes


class MergeError(StoreError, ValueError):
    """Raised when a merge cannot continue; the message lists the tensors."""


class MergeRefusedError(MergeError, RefusedError):
    """Raised before any tensor is read if the requested merge is impossible."""

    code = RefusedError.code


@runtime_checkable
class Sink(Protocol):
    """A destination for merged tensors, such as the `Writer` of an output.

    Attributes:
      finished: The names of the tensors that it already contains, which are not merged again.
    """

    finished: frozenset[str]

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None:
        """Receives entries of a tensor, in row-major order; called by any worker."""

    def done(self, name: str) -> None:
        """Records that all entries of a tensor have been written."""


class Limits(NamedTuple):
    """The number of workers, and the memory that they may use.

    Attributes:
      threads: The number of workers.
      hold: Bytes of inputs that each worker may keep when it needs a tensor more than once.
      max_memory: Bytes that the process may use; None for no limit.
      output: Bytes required at the end, if a library makes the output from its tensors.
      sink: Bytes that the sink holds for each worker.
    """

    threads: int
    hold: int
    max_memory: int | None = None
    output: int = 0
    sink: int = 0


class Record(NamedTuple):
    """Measurements of one merged tensor.

    Delta_i is the task vector of model i. The update is the difference between the result and the
    base (or 0 without a base). Sums are taken in float32 over pieces and added in float64.

    Attributes:
      name: The tensor.
      size: Its number of entries.
      norms: |Delta_i|, `[model]`.
      cosines: Cosines between the task vectors, `[model, model]`; 0 where a norm is 0.
      update: The norm of the update.
      alignment: Cosines of the update with the task vectors, `[model]`.
      conflicts: The fraction of entries that some models raise and others lower.
      changed: The fraction of entries in which the update is not 0.
      moved: The number of entries that each model changed, `[model]`.
      kept: The fraction of these entries that remains after task vectors are added, `[model]`;
        0 if there are no such entries.
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


def memory(work: Work, wide: bool = False) -> int:
    """Computes the least memory that a worker needs to merge a tensor.

    Args:
      work: The work for the tensor.
      wide: Whether everything is computed in float64, whatever the dtypes of the inputs.

    Returns:
      The bytes, without the program itself (`program`).
    """
    inputs = len(work.inputs)
    entries = min(work.size, ENTRIES) if work.needs == "entry" else work.size
    if work.needs == "row" and len(work.shape) > 1:
        entries = min(work.size, max(SOME, work.shape[-1]))
    if at_a_time(work) > 1:
        entries = SOME
    own = {tensor.dtype for tensor in work.inputs}
    dtype = np.dtype(np.float64) if wide else read_as(work)
    width = dtype.itemsize
    cast = 0 if own == {dtype} else max(dtype.itemsize for dtype in own) + width
    # For the whole tensor: the memory of computed inputs, and of statistics between passes. For the
    # current entries: inputs as they are read and one before it is cast (`width`, `cast`); for each
    # model, task vectors and weights in float32 and the kernels' buffers (`each`); the result (12);
    # and temporary matrices (`workspace`). `wide` doubles the float32 terms.
    needs = sum(held(tensor) for tensor in work.inputs)
    needs += math.ceil(kept_bytes(work) * work.size * len(work.models))
    needs += 4 * (1 + wide) * workspace(work)
    each = (3 * 4 + visiting_bytes(work)) * len(work.models)
    return needs + entries * (inputs * width + cast + (1 + wide) * (each + 12))


def program(works: Sequence[Work]) -> int:
    """Computes the bytes that the process requires independently of the sizes of tensors."""
    statistics = (sum(len(step.statistics) for step in work.steps) for work in works)
    return CONSTANT + STATISTICS * max(statistics, default=0)


def limits(
    works: Sequence[Work],
    max_memory: int | None,
    threads: int | None = None,
    wide: bool = False,
    output: int = 0,
    sink: int = 0,
) -> Limits:
    """Chooses the number of workers, and how much of a tensor each may keep.

    There are as many workers as cores (up to 8), or fewer if memory forbids. The remaining memory
    keeps inputs that are needed more than once.

    Args:
      works: All works of the plan.
      max_memory: Bytes that the process may use, the program included. None for no limit.
      threads: The most workers; None for one per core, up to 8.
      wide: Whether everything is computed in float64, whatever the dtypes of the inputs.
      output: Bytes required at the end, if a library makes the output from its tensors.
      sink: Bytes that the sink holds for each worker.

    Returns:
      The limits, for `execute`.

    Raises:
      MergeRefusedError: If the largest tensor or the assembly of the output does not fit in
        `max_memory`. The message contains the required bytes.
    """
    wanted = threads or min(8, os.cpu_count() or 1)
    if max_memory is None:
        return Limits(wanted, KEPT, output=output, sink=sink)
    needs = sorted((memory(work, wide) + sink for work in works), reverse=True) or [0]
    own = program(works)
    room = max_memory - own
    largest = max(works, key=lambda work: memory(work, wide), default=None)
    if room < needs[0] and largest is not None:
        raise MergeRefusedError(
            f"{argument('max_memory')}: {largest.name} needs {mib(own + needs[0])} "
            f"({mib(own)} of it for the program), got {mib(max_memory)}"
        )
    if room < output:
        raise MergeRefusedError(
            f"{argument('max_memory')}: an output of this format needs {mib(own + output)} "
            f"({mib(own)} of it for the program), got {mib(max_memory)}"
        )
    # All workers may hold one of the largest tensors at once, so these must fit together.
    fitting = max(k for k in range(1, wanted + 1) if sum(needs[:k]) <= room)
    hold = max(0, min(KEPT, room // fitting - needs[0]))
    return Limits(fitting, hold, max_memory, output, sink)


def peak(works: Sequence[Work], limits: Limits) -> int:
    """Estimates the peak memory of the process in bytes.

    Args:
      works: All works of the plan.
      limits: The result of `limits` for them.

    Returns:
      The bytes, the program included.
    """
    needs = sorted(map(memory, works), reverse=True)
    at_work = sum(needs[: limits.threads]) + limits.threads * (limits.hold + limits.sink)
    # Workers have freed their memory when the output is made.
    return program(works) + max(at_work, limits.output)


def summary(works: Sequence[Work], limits: Limits) -> str:
    """Describes memory and threads in one line, for printed plans.

    Args:
      works: All works of the plan.
      limits: The result of `limits` for them.

    Returns:
      The line, without a line break.
    """
    threads = f"{limits.threads} thread{'s' * (limits.threads > 1)}"
    return f"peak memory: at most {peak(works, limits) / 1e9:.2f} GB, in {threads}"


def resident() -> int:
    """Measures the resident memory of the process in bytes.

    Returns:
      The bytes; `CONSTANT` on systems other than Linux.
    """
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if statm.exists()
        else CONSTANT
    )


def mib(size: int) -> str:
    """Formats a number of bytes as MiB, rounded up, so that a limit of this size is sufficient.

    Args:
      size: The number of bytes.

    Returns:
      The number with its unit.

    >>> mib(960_000_000)
    '916 MiB'
    """
    return f"{-(-size // (1 << 20))} MiB"


class _Run:
    """State shared by the workers of one `execute` call: the sink, measurements, progress."""

    def __init__(
        self,
        works: Sequence[Work],
        sink: Sink,
        measure: bool,
        progress: Progress | None,
        keep: Callable[[Record], None] | None,
    ):
        self.sink, self.measure, self.progress, self.keep = sink, measure, progress, keep
        # Progress counts bytes of inputs, which determine the time, and not tensors.
        self.total = sum([work.reads for work in works])
        self.missing = {work.name for work in works} - sink.finished
        self.done_bytes = sum(work.reads for work in works if not self.wanted(work))
        self.lock = threading.Lock()
        self.sums: dict[str, dict[str, np.ndarray | np.floating]] = {}
        self.records: dict[str, Record] = {}

    def wanted(self, work: Work) -> bool:
        """Checks whether this tensor is still missing in the sink."""
        return work.name in self.missing

    def carry_out(
        self, works: Sequence[Work], engine: Engine, stalled: Callable[[float], None] | None
    ) -> None:
        """Takes all wanted works to the sink, except the pieces in `engine.faint`."""
        with engine.pulse.watched(stalled) if stalled else contextlib.nullcontext():
            todo = engine.prepared(works, self.wanted)
            # The largest first: otherwise one worker may be left with it at the end.
            todo.sort(key=lambda unit: -sum([w.reads for w in unit.works]) * unit.passes)
            engine.each(lambda unit: self.finish(unit, engine), todo)
        self.missing = {name for name, _ in engine.faint}

    def finish(self, unit: Unit, engine: Engine) -> None:
        """Merges a unit of work, from its inputs to the sink."""
        todo = [work for work in unit.works if self.wanted(work)]
        if unit.merge is None:
            for work in todo:
                self._copy(work, engine)
        else:
            self._merge(unit, engine)
        pieces = range(len(unit.runs))
        whole = [w for w in todo if not any((w.name, k) in engine.faint for k in pieces)]
        # The sink's journal and the caller's function are called by one worker at a time.
        with self.lock:
            for work in whole:
                if work.name in self.sums:
                    record = _record(work, self.sums.pop(work.name))
                    self.records[work.name] = record
                    if self.keep is not None:
                        self.keep(record)
                self.sink.done(work.name)
                self.done_bytes += work.reads
                if self.progress is not None:
                    self.progress(self.done_bytes, self.total, work.name)

    def _merge(self, unit: Unit, engine: Engine) -> None:
        """Merges a unit piece by piece, and adds up the measurements of each tensor."""
        with engine.reader(unit) as reader:
            for work, start, entries, seen in unit.outcome(reader, self.measure):
                # A unit of several tensors is merged as a whole, even if a resumed run had finished
                # some of them.
                if not self.wanted(work):
                    continue
                self.sink.write(work.name, entries, start)
                if self.measure:
                    so_far = self.sums.get(work.name, {})
                    self.sums[work.name] = {k: v + so_far.get(k, 0) for k, v in seen.items()}
        unit.forget()

    def _copy(self, work: Work, engine: Engine) -> None:
        """Copies a tensor."""
        (tensor,) = work.models
        buffers = engine.buffers()
        for start in range(0, work.size, ENTRIES):
            entries = buffers.take("copy", (min(ENTRIES, work.size - start),), tensor.dtype)
            tensor.read(entries, start)
            engine.pulse.beat()
            self.sink.write(work.name, entries.astype(work.dtype, copy=False), start)


def execute(
    works: Sequence[Work],
    sink: Sink,
    limits: Limits,
    *,
    allow_nonfinite: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
    keep: Callable[[Record], None] | None = None,
    sharing: Sharing | None = None,
    stalled: Callable[[float], None] | None = None,
) -> dict[str, Record]:
    """Executes works: reads inputs, merges them, and writes the results to a sink.

    Tensors in `sink.finished` are skipped. XLA flushes subnormal results to 0. Pieces with numbers
    that may become subnormal are computed in float64, after all others. On an exception or an
    interrupt the workers stop within one piece.

    Args:
      works: The works. Works of one merge (the same object) share its statistics of the whole
        tree; while any of them is unfinished, all of them are read.
      sink: The destination of the results.
      limits: The number of workers, and how much they may keep.
      allow_nonfinite: Whether NaN and infinities are merged like other values, and results may
        overflow.
      measure: Whether norms, cosines and conflicts are recorded.
      progress: Called as `progress(bytes_done, bytes_in_all, name)` when a tensor is finished.
      keep: Called with the measurements of a tensor before the sink records it as finished.
      sharing: The connection to other processes, which carry out some of the works; this process
        leaves those works out. None without other processes.
      stalled: Called with the seconds since the last piece when no worker makes progress for a
        minute, in a thread of its own.

    Returns:
      The measurements by tensor name; empty unless `measure`.

    Raises:
      MergeError: If inputs contain NaN or infinities (the message lists them), results overflow
        their dtype, a step of a merge rejects its input, or memory is too small for the pieces in
        float64.
    """
    mine = works
    if sharing is not None:
        mine = [work for work in works if sharing.owner(work.name) == sharing.mine]
    run, check = _Run(mine, sink, measure, progress, keep), not allow_nonfinite
    try:
        with Engine(works, limits.threads, limits.hold, check, sharing=sharing) as engine:
            run.carry_out(works, engine, stalled)
        if faint := engine.faint:
            # Other processes may have no such pieces, so nothing is shared with them here.
            threads, hold, *_ = _in_float64(works, faint, limits)
            with Engine(works, threads, hold, check, faint) as engine:
                run.carry_out(works, engine, stalled)
    except NotFiniteError as error:
        if isinstance(error.tensor, Work):
            raise MergeError(_refused(error.tensor, error.nan)) from None
        raise MergeError(_all_nonfinite(works, error.tensor)) from None
    except ValueError as error:
        # Subclasses, such as CheckpointError, already have a message for users.
        if type(error) is not ValueError:
            raise
        raise MergeError(str(error)) from error
    return run.records


def _in_float64(works: Sequence[Work], faint: Set[PieceOf], most: Limits) -> Limits:
    """Returns the limits for the pieces in float64; raises a MergeError if memory is too small."""
    names = {name for name, _ in faint}
    merges = {id(work.merge) for work in works if work.name in names}
    # Statistics over the tree are computed again from all tensors of a merge.
    again = [
        work
        for work in works
        if work.name in names
        or (work.merge is not None and work.merge.over_tree and id(work.merge) in merges)
    ]
    try:
        return limits(again, most.max_memory, most.threads, wide=True, sink=most.sink)
    except MergeRefusedError as error:
        raise MergeError(
            f"{min(names)}: numbers below {FAINT:.0e}, which float32 would lose, are computed in "
            f"float64, for which {error}; resume with more"
        ) from None


def _refused(work: Work, nan: bool) -> str:
    """Returns the message about results that contain NaN or overflow the dtype of the output."""
    if nan and work.merge and work.merge.remedy:
        return f"{work.name}: {work.merge.remedy}"
    return (
        f"{work.name}: the merged values do not fit {work.dtype}, which ends at "
        f"{_largest(work.dtype):.4g}; choose a wider out_dtype"
    )


def _all_nonfinite(works: Sequence[Work], first: Tensor, limit: int = 10) -> str:
    """Returns the message about NaN and infinities, which lists every tensor that contains any.

    It also reads the inputs that no worker has read yet, for at most 20 seconds.
    """
    tensors = [first]
    # Users want a complete list, but should not wait until hundreds of gigabytes are read for it.
    until = time.monotonic() + 20
    for work in works:
        for tensor in work.inputs:
            if tensor not in tensors and time.monotonic() < until and not all_finite(tensor):
                tensors.append(tensor)
    names = "; ".join(f"{tensor.name} in {tensor.source}" for tensor in tensors[:limit])
    more = f" and {len(tensors) - limit} more" if len(tensors) > limit else ""
    on = argument("allow_nonfinite", "True")
    return f"NaN or infinity in {names}{more}; use {on} to merge regardless"


def _largest(dtype: np.dtype) -> float:
    """Returns the largest finite number of a dtype."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)


def _record(work: Work, sums: Mapping[str, np.ndarray | np.floating]) -> Record:
    """Computes the measurements of a tensor from sums over its entries.

    `sums["gram"]` contains the inner products of the task vectors and, as the last entry, the
    update.
    """
    lengths = np.sqrt(np.maximum(np.diag(sums["gram"]), 0))
    outer = np.outer(lengths, lengths)
    cosines = np.divide(sums["gram"], outer, out=np.zeros_like(outer), where=outer > 0)
    moved = np.asarray(sums["moved"])
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
