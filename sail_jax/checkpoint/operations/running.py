"""The common parts of all operations: a request, its plan, and its execution.

A request is a frozen record of the arguments of one operation. Its `plan` opens the inputs and
returns a `Ready`: the works of the executor, and the record of the result. `planned` keeps the
inputs open, and `carried_out` also executes the works and writes the output.
"""

import contextlib
import faulthandler
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax

from sail_jax import disk
from sail_jax.checkpoint.contents.kinds import check_model
from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.contents.relations import contradictions_of, following
from sail_jax.checkpoint.executor import (
    Limits,
    Progress,
    Record,
    execute,
    limits,
    summary,
)
from sail_jax.checkpoint.formats.extras import carried, config_of
from sail_jax.checkpoint.formats.files import CheckpointError, changed, sample
from sail_jax.checkpoint.formats.folders import HeldError, admit
from sail_jax.checkpoint.formats.open import (
    Checkpoint,
    check_there,
    open_checkpoint,
)
from sail_jax.checkpoint.formats.table import FORMATS, check_written, needs, of_output
from sail_jax.checkpoint.formats.written import unfinished
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.output import parts
from sail_jax.checkpoint.output.coding import HELD, Coding, wanted
from sail_jax.checkpoint.output.parts import Gathering, Part, WaitedError, checked, owners
from sail_jax.checkpoint.output.writer import (
    MEASURED,
    THREADS,
    DiffersError,
    Writer,
    create,
    laid_out,
)
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.checkpoint.sources.requantised import RECORD, Requantisation, requantised
from sail_jax.checks import argument, one_of
from sail_jax.cluster import On, Workers, connected, listener
from sail_jax.merging import random_bits
from sail_jax.merging.work import Work
from sail_jax.provenance import versions
from sail_jax.trees import some_paths

Path_ = str | PathLike[str]
R_co = TypeVar("R_co", bound=Result, covariant=True)
P_co = TypeVar("P_co", bound="Ready[Any]", covariant=True)
P = TypeVar("P", bound="Ready[Any]")
R = TypeVar("R", bound=Result)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, and of the output's files.

    The tensors are the same byte for byte for any values of these options and any number of
    interruptions. So are the files, except for orbax, which draws names and records times, so only
    the values are equal.

    Attributes:
      resume: Whether to continue the work of an interrupted call. A finished output is compared
        with the new values, and is kept; with `force` a different one is replaced.
      max_memory: Bytes that the process may use. By default there is no limit; each thread holds
        one tensor, or a piece of it, at a time.
      threads: The number of workers; by default the number of cores, up to 8.
      allow_nonfinite: Whether inputs may contain NaN and infinities, and results may overflow.
      allow_pickle: Whether PyTorch's pickles are read; their code is never run.
      offline: Whether models on the Hub are read only if they are in the cache of this machine.
      allow_crimes: Whether different architectures may be merged, and an output may contradict its
        config.json.
      strict: Whether parts of a recipe without effect are an error. By default they cause a note.
      force: Whether an existing output is replaced, once the new one is complete. It must be an
        unchanged output of an operation; anything else is refused.
      keep_old: Whether the output that `force` replaces is kept beside the new one, as `NAME.old`;
        then as `NAME.old-2`, and so on.
      copy_tokenizer: Whether a merge copies the files of a tokenizer. Files that a recipe's
        `tokenizer` makes are always written.
      write_model_card: Whether a merge writes a model card and the recipe.
      format: The format of the output; see `create`.
      shard_bytes: The largest number of bytes in a file of the output; see `create`.
      sync: Whether the output is on the disk before it is renamed.
      select: Which tensors of the inputs are used: patterns such as "params/*". The default is the
        weights of a known training state, and all tensors of anything else; see
        `sail_jax.merging.selection`. Like `requantize`, it changes the result; all other options
        change only the run.
      requantize: "fp8" to write weights in FP8 again, in the scheme of the input that provides
        config.json; None for plain weights. For merging, growing, aligning and transplanting.
      part: The part of the output to make, such as (1, 4). Each part is made by a separate process,
        possibly on another host, in a shared file system. Each part consists of some of the files.
        None for the whole output.
      join: Whether the output is made from its parts, when all of them are complete.
      wait: How many seconds a part waits for others without a sign of life, if it needs their
        statistics.
      on: The cluster whose workers make the parts of the output, which must see its folder: its
        address, or a `Client` of Dask; see `sail_jax.cluster.connected`. None for this process.
      progress: Called as `progress(bytes_done, bytes_in_all, tensor)` when a tensor is finished,
        and while waiting for other parts.

    Raises:
      CheckpointError: If no output can have this `format`.
      ValueError: If `requantize` or `part` is invalid, both `part` and `join` are given, or
        `keep_old` is given without `force`.
    """

    resume: bool = False
    max_memory: int | None = None
    threads: int | None = None
    allow_nonfinite: bool = False
    allow_pickle: bool = False
    offline: bool = False
    allow_crimes: bool = False
    strict: bool = False
    force: bool = False
    keep_old: bool = False
    copy_tokenizer: bool = True
    write_model_card: bool = True
    format: str | None = None
    shard_bytes: int = 5_000_000_000
    sync: bool = True
    select: str | None = None
    requantize: Literal["fp8"] | None = None
    part: tuple[int, int] | None = None
    join: bool = False
    wait: float = 600.0
    on: On = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_written(self.format)
        if self.keep_old and not self.force:
            raise ValueError(f"{argument('keep_old')} requires {argument('force', 'True')}")
        if self.requantize is not None:
            one_of(argument("requantize"), self.requantize, ("fp8",))
        if self.part is not None:
            checked(self.part)
            if self.join:
                raise ValueError(f"{argument('part')} and {argument('join')}: expected only one")


DEFAULTS = RunOptions()


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[R_co]):
    """An operation before its execution, when everything is known except the values.

    Its inputs stay open until the context of `planned` ends.

    Attributes:
      out: The path of the output; None to write nothing.
      works: The works of the executor.
      limits: The number of threads, and the memory.
      fingerprint: The identity of this operation, for resuming it, without the content of its
        inputs.
      inputs: The open checkpoints.
      make: Makes the result from the attributes of `Result`.
      notes: Notes for the user, a sentence each.
      view: The checkpoint with the plain files of the output; None for `files` alone.
      files: Further plain files of the output.
      codes: The weights to write in codes; their `errors` are filled. None for none.
      rewrites: The checkpoint to copy with new values for the tensors of `works`; None for an
        output with only these tensors and plain files.
      file: The name of the one file of tensors in an output that is a folder; see `create`.
      done: A file that records finished works and their files. With `run.resume`, an output that it
        describes is not compared, and stays. None for no record.
      measure: Whether norms, cosines and conflicts are recorded.
      divisible: Whether the operation can be done in parts.
      solved: The request with what its plan has computed, for parts that need not compute it
        again. None if a plan only reads headers.
    """

    out: Path | None
    run: RunOptions
    works: tuple[Work, ...]
    limits: Limits
    fingerprint: str
    inputs: tuple[Checkpoint, ...]
    make: Callable[..., R_co]
    notes: tuple[str, ...] = ()
    view: Checkpoint | None = None
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    codes: Requantisation | None = None
    rewrites: Checkpoint | None = None
    file: str | None = None
    done: Path | None = None
    measure: bool = False
    divisible: bool = False
    solved: "Request[Any] | None" = None

    @property
    def tensors(self) -> int:
        """How many tensors the output has."""
        return len(self.works)

    def visits(self) -> Mapping[str, int]:
        """Counts how many times a tensor's inputs are read, by name; once for missing names."""
        return {}

    def completed(self) -> "Ready[R_co]":
        """Adds what the plan alone does not determine, such as a certificate."""
        return self

    def written(self) -> None:
        """Removes intermediate files, after the output has been written."""

    def summary(self) -> str:
        """Describes memory and threads in one line."""
        return summary(self.works, self.limits)


@runtime_checkable
class Request(Protocol[P_co]):
    """The arguments of one operation, which Python and the command line both collect."""

    def plan(self, inputs: "Inputs") -> P_co:
        """Opens the inputs, and plans the works that make the output."""
        ...


class Inputs:
    """Opens the inputs of an operation, which stay open until it ends.

    Args:
      stack: Closes the inputs.
      writes: Whether the plan will be executed, so the output must be possible.

    Attributes:
      writes: Whether the plan will be executed.
      opened: The open checkpoints, in the order of opening.
    """

    def __init__(self, run: RunOptions, stack: contextlib.ExitStack, writes: bool) -> None:
        self.run, self._stack, self.writes = run, stack, writes
        self.opened: list[Checkpoint] = []

    def __call__(self, path: Path_, *, adapters: bool = False) -> Checkpoint:
        """Opens an input.

        Args:
          path: The checkpoint.
          adapters: Whether it may be an adapter, or anything else without a model. `run.select`
            does not apply to it.

        Returns:
          The open checkpoint.

        Raises:
          CheckpointError: As `open_values` and `check_model` do, and if it lacks tensors.
          ValueError: If `run.select` selects no tensor, or the state of an optimiser.
        """
        run, select = self.run, None if adapters else self.run.select
        checkpoint = self.holds(
            open_values(path, allow_pickle=run.allow_pickle, offline=run.offline, select=select)
        )
        if not checkpoint.tensors:
            raise CheckpointError(f"{path} is a checkpoint without tensors")
        if not adapters:
            check_model(checkpoint)
        # For checking at the end whether an input has changed.
        self.opened.append(checkpoint)
        return checkpoint

    def holds(self, resource: AbstractContextManager[T]) -> T:
        """Enters a context, such as a lock, that ends with the operation."""
        return self._stack.enter_context(resource)

    def look_up(self, paths: Sequence[Path_], out: Path_ | None) -> None:
        """Looks up all inputs before any is downloaded, after checking the output."""
        self.admit(out, paths)
        check_there(paths, offline=self.run.offline)

    def admit(self, out: Path_ | None, paths: Iterable[Path_]) -> None:
        """Raises a CheckpointError if the output must not be written."""
        if self.writes and out is not None:
            admit(Path(out), list(paths), self.run.resume, self.run.force)


@contextlib.contextmanager
def planned(
    request: Request[P], run: RunOptions = DEFAULTS, *, writes: bool = False
) -> Iterator[P]:
    """Plans an operation, as a context manager that keeps its inputs open.

    Args:
      request: The operation.
      writes: Whether the plan will be executed, in which case an invalid output is an error.

    Yields:
      The operation, ready to be executed.

    Raises:
      ValueError: If an input cannot be opened, the request does not match its inputs, or the memory
        limit of `run` is too small.
    """
    with contextlib.ExitStack() as stack:
        yield request.plan(Inputs(run, stack, writes))


def carried_out(
    request: Request[Ready[R]],
    run: RunOptions = DEFAULTS,
    before: Callable[[Any], None] | None = None,
) -> R:
    """Plans an operation, executes its works, and writes the result with the plain files.

    Args:
      request: The operation.
      before: Called with the plan, before any of its tensors is read.

    Returns:
      The result of the operation. Its measurements include tensors that an earlier call finished,
      but not other parts' tensors.

    Raises:
      CheckpointError: If an input cannot be read, the output cannot be written, its config.json
        would contradict its tensors, or an input was changed since it was opened. In the last case
        the output may mix two versions, so it is removed.
      MergeError: As `execute` does.
      ValueError: If the request does not match its inputs.
    """
    if run.on is not None:
        return _divided(request, run, before)
    began = time.monotonic()
    with planned(request, run, writes=True) as ready:
        if before is not None:
            before(ready)
        ready = ready.completed()
        records, unchanged = ({}, False) if ready.out is None else _executed(ready, ready.out)
        ready.written()
    return ready.make(
        out=ready.out, tensors=ready.tensors, notes=ready.notes, unchanged=unchanged,
        seconds=time.monotonic() - began, records=records,
        requantized=ready.codes.errors if ready.codes else {},
    )  # fmt: skip


MOST_PARTS = 64
"""The most parts that an output has on a cluster: each plans the operation anew."""


def _divided(
    request: Request[Ready[R]], run: RunOptions, before: Callable[[Any], None] | None
) -> R:
    """Makes the parts of an output on the workers of a cluster, and joins them here."""
    began, here = time.monotonic(), replace(run, on=None, progress=None)
    check_whole(here, f"{argument('on')} makes all parts, and joins them")
    with connected(run.on) as workers, planned(request, run, writes=True) as ready:
        if before is not None:
            before(ready)
        if ready.out is None:
            raise CheckpointError(f"{argument('on')}: there is no output to divide")
        count = _parts(ready, ready.out)
        partial = unfinished(ready.out)
        if parts.begun(partial) and not run.resume:
            raise CheckpointError(
                f"{partial} holds unfinished parts; continue them with "
                f"{argument('resume', 'True')}, or remove it"
            )
        own, unchanged = ready.solved or request, False
        # When joining was interrupted, all parts are complete.
        if not (run.resume and parts.joining(partial)):
            make = functools.partial(_made, own, replace(here, threads=run.threads or 1), count)
            try:
                unchanged = _in_rounds(workers, make, count, _Heard(ready, run.progress))
            finally:
                parts.forget(partial)
        if unchanged:
            ready = ready.completed()
            return ready.make(
                out=ready.out, tensors=ready.tensors, notes=ready.notes, unchanged=True,
                seconds=time.monotonic() - began, records={}, requantized={},
            )  # fmt: skip
    done = carried_out(own, replace(here, join=True))
    return replace(done, seconds=time.monotonic() - began)


def _parts(ready: Ready[Any], out: Path) -> int:
    """The number of parts of an output, whatever the number of workers is."""
    tensors = wanted(ready.works, ready.codes)
    _, layout = laid_out(out, tensors, ready.run.format, ready.file, ready.run.shard_bytes)
    if not ready.divisible or ready.rewrites is not None or layout.convert is not None:
        raise CheckpointError(
            f"{argument('on')} divides the files of an output, but {out} is written as one; write "
            "safetensors to a folder"
        )
    return min(len(parts.groups(layout, _made_with(ready.codes))), MOST_PARTS)


def _made(request: Request[Any], run: RunOptions, count: int, number: int) -> bool | None:
    """Makes or continues a part, as a task.

    Returns whether the output was finished before; None if the part has written its statistics, and
    others have not.
    """
    hear, last = listener(), time.monotonic()

    def tell(done: int, total: int, tensor: str) -> None:
        nonlocal last
        if hear is not None and time.monotonic() - last > _TELL:
            last = time.monotonic()
            hear((done, tensor))

    run = replace(run, part=(number, count), resume=True, wait=0.0, progress=tell)
    end = time.monotonic() + _LINGER
    while True:
        try:
            return carried_out(request, run).unchanged
        except WaitedError:
            return None
        except HeldError:
            # A worker that was lost to the scheduler may still write this part for a moment.
            if time.monotonic() > end:
                raise
            time.sleep(1)


# Seconds between two messages on the progress of a part, and for which a lost worker may linger.
_TELL, _LINGER = 0.2, 60


def _in_rounds(
    workers: Workers, make: Callable[[int], bool | None], count: int, heard: "_Heard"
) -> bool:
    """Makes all parts. Returns whether the output was finished before.

    A statistic over the tree needs the contribution of each part. A part ends when one is missing,
    and goes on in the next round, when all of them lie in the folder of unfinished work.
    """
    left, unchanged = [*range(1, count + 1)], False
    while left:
        waiting = []
        for place, done in workers.each(make, left, heard.of(left)):
            if done is None:
                waiting.append(left[place])
            unchanged |= bool(done)
        left = sorted(waiting)
    return unchanged


class _Heard:
    """The progress of all parts, from what their tasks tell.

    Args:
      ready: The operation.
      progress: Called as `RunOptions.progress` is.
    """

    def __init__(self, ready: Ready[Any], progress: Progress | None) -> None:
        visits = ready.visits()
        self._total = sum(work.reads * visits.get(work.name, 1) for work in ready.works)
        self._progress, self._done = progress, dict[int, tuple[int, int]]()

    def of(self, numbers: Sequence[int]) -> Callable[[int, Any], None] | None:
        """Begins a round with some parts."""
        # What a part has read in this round is counted from 0.
        self._done = {number: (sum(both), 0) for number, both in self._done.items()}
        return None if self._progress is None else functools.partial(self._hear, [*numbers])

    def _hear(self, numbers: Sequence[int], place: int, message: tuple[int, str]) -> None:
        assert self._progress is not None
        now, tensor = message
        before, latest = self._done.get(numbers[place], (0, 0))
        # Messages of a task that was run again begin anew.
        self._done[numbers[place]] = before, max(latest, now)
        done = sum(map(sum, self._done.values()))
        self._progress(min(done, self._total), self._total, tensor)


def check_options(options: Mapping[str, object]) -> None:
    """Checks that options of a run are not among the operation's own options.

    Args:
      options: Keyword arguments of an operation.

    Raises:
      TypeError: If one of them is a field of `RunOptions`; the message shows the right call.
    """
    for one in fields(RunOptions):
        if (name := one.name) in options:
            raise TypeError(f"{name} is an option of the run: pass run=RunOptions({name}=...)")


def check_whole(
    run: RunOptions,
    why: str = "this operation cannot be done in parts",
) -> None:
    """CheckpointError with the reason `why` if `run` makes or joins parts."""
    chosen = {"part": run.part is not None, "join": run.join, "on": run.on is not None}
    for name in (name for name, given in chosen.items() if given):
        raise CheckpointError(f"{argument(name)}: {why}")


def unselected(checkpoint: Checkpoint) -> list[str]:
    """Lists the selected part of a checkpoint, and the losses of the output.

    Args:
      checkpoint: The open checkpoint.

    Returns:
      Sentences; empty if all of it is used.
    """
    said = checkpoint.about()
    if checkpoint.rest:
        said.append(
            f"left out, as not selected: {some_paths([*checkpoint.rest], 1)}; the optimiser's "
            "state starts anew, or growth.change_state transforms it in Python"
        )
    return said


def notes_on_format(works: Sequence[Work], out: Path, run: RunOptions) -> tuple[str, ...]:
    """Describes what other programs cannot read in an output.

    Args:
      works: The works that make its tensors.
      out: The path of the output.

    Returns:
      A sentence, or nothing.
    """
    format = FORMATS.get(run.format) if run.format else of_output(out)
    said = format.note(work.dtype for work in works) if format and format.note else ""
    return (said,) if said else ()


def bounds(works: Sequence[Work], run: RunOptions, *, coded: bool = False) -> Limits:
    """Computes the limits of works and their output; codes (`coded`) wait for their scales."""
    sink = HELD if coded else 0
    return limits(works, run.max_memory, run.threads, output=needs(run.format), sink=sink)


def codes_of_output(
    checkpoint: Checkpoint, works: Sequence[Work], run: RunOptions
) -> Requantisation | None:
    """Chooses the weights of an output to write in codes, if requested.

    Args:
      checkpoint: The input that provides config.json.
      works: The works of the operation.
      run: Options of the run, with the request.

    Returns:
      The choice; None without a request.

    Raises:
      CheckpointError: As `requantised` does.
    """
    if run.requantize is None:
        return None
    try:
        return requantised(checkpoint, works)
    except CheckpointError as error:
        raise CheckpointError(f"{argument('requantize', run.requantize)}: {error}") from error


def state_of(inputs: Sequence[Checkpoint]) -> dict[str, tuple[int, int, int]]:
    """Returns properties that change when an input does: size, time and checksum of each file.

    The checksum covers some of the bytes. It also distinguishes versions whose sizes and times were
    made equal.

    Args:
      inputs: The open checkpoints.

    Returns:
      The three by path.
    """
    files = {path: about for checkpoint in inputs for path, about in checkpoint.files.items()}
    return {
        str(path): (about.st_size, about.st_mtime_ns, sample(path, about.st_size))
        for path, about in sorted(files.items())
    }


def _executed(ready: Ready[Any], out: Path) -> tuple[dict[str, Record], bool]:
    """Executes works and writes the output.

    Returns the measurements by tensor name, and whether an earlier call had finished the output.
    """
    works, run, codes = ready.works, ready.run, ready.codes
    if run.requantize is not None and codes is None:
        raise CheckpointError(
            f"{argument('requantize', run.requantize)}: only merging, growing, aligning and "
            "transplanting write FP8 again"
        )
    part = None if run.part is None else checked(run.part)
    if not ready.divisible:
        check_whole(run)
    # This is part of the fingerprint: a merge from other versions of the inputs is not resumed.
    state = state_of(ready.inputs)
    beside = {} if ready.rewrites else _consistent(ready, out)
    marks = [ready.fingerprint, state]
    if codes is not None:
        beside["config.json"] = codes.config(beside)
        marks.append(sorted(codes.layouts.items()))
    mark, computing = disk.sha256(repr(marks).encode()), _computing()
    made = disk.sha256(repr([mark, computing]).encode())
    record = ready.done if run.resume and not ready.measure else None
    if record is not None and _is_done(record, made, out):
        return {}, True

    def written(resume: bool) -> tuple[dict[str, Record], bool]:
        """Executes the works, or compares their results with a finished output."""
        with create(
            out, wanted(works, codes),
            fingerprint=mark, versions=computing, rewrites=ready.rewrites, format=run.format,
            file=ready.file, shard_bytes=run.shard_bytes, resume=resume, sync=run.sync, record=True,
            force=run.force, keep_old=run.keep_old, part=part, join=run.join,
            belongs=_made_with(codes),
        ) as writer:  # fmt: skip
            sink = writer if codes is None else Coding(writer, codes, works)
            records = _noted(writer) if ready.measure else {}
            if not run.join:
                records |= execute(
                    works, sink, ready.limits, allow_nonfinite=run.allow_nonfinite,
                    measure=ready.measure, progress=run.progress,
                    keep=functools.partial(_note, writer),
                    sharing=None if part is None else _sharing(writer, part, out, works, run),
                    stalled=functools.partial(_report, writer.partial),
                )  # fmt: skip
            if writer.folder and part is None:
                for name, data in beside.items():
                    writer.extra(name, data)
                if codes is not None and codes.errors:
                    writer.extra(RECORD, codes.record())
            try:
                # This is checked at the end, when everything has been read.
                _check_unchanged(ready.inputs, state)
            except CheckpointError:
                with contextlib.suppress(disk.StoreError):
                    writer.abandon()
                raise
            writer.commit()
        return records, writer.unchanged

    try:
        records, unchanged = written(run.resume)
    except DiffersError:
        if not run.force:
            raise
        # The existing output is different, and may be replaced. The comparison leaves no files.
        records, unchanged = written(False)
    if ready.done is not None:
        disk.write_record(ready.done, {"format": disk.FORMAT, "works": made, "files": _left(out)})
    return records, unchanged


class Share(NamedTuple):
    """The work of one of several processes.

    Attributes:
      read: The bytes that it reads, in all passes.
      written: The bytes of its tensors.
    """

    read: int
    written: int


def shares(ready: Ready[Any], count: int) -> list[Share]:
    """Computes the work of each part of an output.

    Args:
      ready: The operation.
      count: The number of parts.

    Returns:
      The share of each part.

    Raises:
      CheckpointError: If the output has fewer files than parts.
    """
    out = Path("the output") if ready.out is None else ready.out
    tensors, visits = wanted(ready.works, ready.codes), ready.visits()
    _, layout = laid_out(out, tensors, ready.run.format, None, ready.run.shard_bytes)
    of = owners(layout, out, count, _made_with(ready.codes))
    read, written = [0] * count, [0] * count
    for work in ready.works:
        read[of[work.name]] += work.reads * visits.get(work.name, 1)
    for name, (dtype, shape) in tensors.items():
        written[of[name]] += math.prod(shape) * dtype.itemsize
    return [*map(Share, read, written)]


def _made_with(codes: Requantisation | None) -> dict[str, str]:
    """Returns the weight of each tensor of scales, which must be in the same part."""
    layouts = {} if codes is None else codes.layouts
    return {layout.scales_of(name): name for name, layout in layouts.items()}


def _report(folder: Path, pause: float) -> None:
    """Writes what each thread waits for to the folder of unfinished work, and logs one line."""
    said = f"no progress for {pause:.0f} s"
    with contextlib.suppress(OSError):
        with open(folder / THREADS, "w") as file:
            named = [f"{thread.ident:#x} {thread.name}" for thread in threading.enumerate()]
            print(said, *named, sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file)
        said += f"; {folder / THREADS} has what each thread waits for"
    logging.getLogger(__name__).warning(said)


def _note(writer: Writer, record: Record) -> None:
    """Stores the measurements of a tensor with the unfinished work."""
    writer.note(MEASURED, json.dumps(record).encode())


def _noted(writer: Writer) -> dict[str, Record]:
    """Returns the measurements of tensors that earlier runs or other parts finished."""
    records = {}
    for line in writer.lines(MEASURED):
        # The last line of a killed run may be incomplete.
        with contextlib.suppress(ValueError, TypeError):
            record = Record(*json.loads(line))
            if record.name in writer.finished:
                records[record.name] = record
    return records


def _sharing(
    writer: Writer, part: Part, out: Path, works: Sequence[Work], run: RunOptions
) -> Gathering:
    """Returns the connection of a part to the others."""
    total = sum(work.reads for work in works if writer.owners[work.name] == part.number - 1)

    def waiting(who: str) -> None:
        if run.progress is not None:
            run.progress(0, total, f"waiting for statistics of {who}")

    return Gathering(unfinished(out), part, writer.owners, writer.head, run.wait, waiting)


def _computing() -> dict[str, str]:
    """Returns the versions of the programs that affect the values of an output."""
    return {
        **versions(),
        "device": jax.default_backend(),
        "random bits": f"stream {random_bits.STREAM}",
    }


def _left(out: Path) -> dict[str, list[int]]:
    """Returns properties that identify the files of an output, by their paths."""
    with open_checkpoint(out) as written:
        return {path: list(about) for path, about in state_of([written]).items()}


def _is_done(done: Path, made: str, out: Path) -> bool:
    """Checks whether a record describes these works and the existing output."""
    try:
        record = disk.read_record(done, {"works": str, "files": dict})
        return record["works"] == made and record["files"] == _left(out)
    # Without a record, or with a damaged one, the output is compared.
    except (disk.StoreError, CheckpointError):
        return False


def _consistent(ready: Ready[Any], out: Path) -> dict[str, bytes | Path]:
    """Returns the plain files of an output, with a config.json that matches its tensors.

    Raises a CheckpointError if that is impossible. Ties of the head are not checked, because a copy
    may be stored.
    """
    own = {} if ready.view is None else ready.view.extras
    files = {name: data for name, data in own.items() if carried(name)} | dict(ready.files)
    config = config_of(files)
    written = {work.name: work for work in ready.works}
    if not config:
        return files
    if config.get("tie_word_embeddings"):
        written = {name: work for name, work in written.items() if role(name) != "head"}
    new, left = following(config, written)
    if left and not ready.run.allow_crimes:
        found = [x.key for checkpoint in ready.inputs for x in contradictions_of(checkpoint)]
        remedy = (
            "correct the config.json of the input"
            if left[0].key in found
            else f"no space is known of all axes that {left[0].key!r} counts, so it has to stay"
        )
        raise CheckpointError(f"{out} would contradict itself: {left[0]}; {remedy}")
    if new != config:
        files["config.json"] = json.dumps(new, indent=2, ensure_ascii=False).encode() + b"\n"
    return files


def _check_unchanged(inputs: Sequence[Checkpoint], state: Mapping[str, object]) -> None:
    """Raises a CheckpointError if an input was changed since it was opened."""
    for checkpoint in inputs:
        checkpoint.check_unchanged()
    for path, now in state_of(inputs).items():
        # A program that writes through a memory map changes bytes first, and the system updates the
        # time later: so the samples are compared too.
        if now != state[path]:
            raise changed(path)
