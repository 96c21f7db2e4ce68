"""Callbacks, which receive the metrics of trainings, studies and sweeps while these run.

Any function of a step and its numbers is a `Callback`. `JsonLines` and `TensorBoard` are callbacks
that write files. A study does not pass a callback on to its trainings: `logged` does.
"""

import contextlib
import importlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from experiments.lab import processes
from experiments.lab.config import named
from experiments.lab.progress import Stage
from sail_jax import disk
from sail_jax.checks import as_path, callable_with
from sail_jax.disk import RefusedError, StoreError

METRICS = "metrics.jsonl"
MAX_FILE = 1 << 30  # bytes
Row = dict[str, Any]
Scalars = Mapping[str, float | str]
"""Numbers by name. The last part of a name is the metric. Parts before it, which end with "/", are
the series: the training, or the replicate within one."""


class Callback(Protocol):
    """Receives the metrics of one step of a training, or the results of one part of a study.

    Args:
      step: The step of the training, or the number of the stage or point, from 0. A training that
        continues from a checkpoint repeats the steps after it.
      scalars: The numbers by name. A row of a stage or a point also contains strings: the name of
        the stage, or values of the config.
    """

    def __call__(self, step: int, scalars: Scalars, /) -> object: ...


class CallbackError(RuntimeError):
    """Raised if a callback raised an exception. All finished work is stored before."""


class JsonLines:
    """A callback that keeps rows, and writes each as a line of JSON.

    Rows from step `step` on are removed from the file, because the training repeats these steps. A
    last line that a kill left unfinished is removed, too.

    Args:
      path: The file. None keeps the rows only in memory.
      step: The step from which the training continues. Rows of earlier steps are read from the
        file.
      kept: Whether the state of that step was stored next to the file, which must then exist. A
        state from elsewhere starts a new file, for any step.

    Attributes:
      path: The file.
      rows: The rows, each with its "step".

    Raises:
      StoreError: If any other line is damaged, or the training continues but the file is missing.
    """

    def __init__(self, path: Path | None, step: int = 0, kept: bool = True) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        if kept and path.exists():
            self.rows = [row for row in _read(path) if row["step"] < step]
        elif step and kept:
            raise StoreError(
                f"{path} is missing: put it back, or remove the checkpoints too, to begin again"
            )
        disk.write_atomic(path, b"".join(map(_line, self.rows)))

    def __call__(self, step: int, scalars: Scalars) -> None:
        """Adds a row, and writes it to the file."""
        row = {"step": step, **scalars} | {"step": step}
        for name, value in row.items():
            if not isinstance(value, str) and not math.isfinite(value):
                raise FloatingPointError(f"step {step}: the metric {name!r} is {value}")
        self.rows.append(row)
        if self.path is not None:
            with disk.explained("write", self.path), open(self.path, "ab") as file:
                file.write(_line(row))

    def sync(self) -> None:
        """Flushes the rows to the disk.

        It raises `StoreError` if this fails.
        """
        if self.path is not None:
            with disk.explained("write", self.path):
                disk.sync(self.path)


def _line(row: Row) -> bytes:
    """Formats a row as a line of the file."""
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _read(path: Path) -> list[Row]:
    """Reads the rows of a file, except an unfinished last line."""
    *lines, torn = disk.read_bytes(path, MAX_FILE).split(b"\n")
    # The text after the last line break is empty, or a line that a kill left unfinished.
    del torn
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError("no step")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            where = f"{path} is damaged in line {number}"
            raise StoreError(f"{where}: expected a row of metrics with its step") from exc
        rows.append(row)
    return rows


class TensorBoard:
    """A callback that writes files for TensorBoard: a run for each series. Strings are left out.

    The first step of a series hides what the folder has of this step and later ones, because a
    continued training repeats them.

    Args:
      folder: The folder for `tensorboard --logdir`.

    Raises:
      RefusedError: If the package tensorboardX is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._folder = as_path("folder", folder)
        self._files: dict[str, Path] = {}
        try:
            event = importlib.import_module("tensorboardX.proto.event_pb2").Event
            checksum = importlib.import_module("tensorboardX.record_writer").masked_crc32c
        except ImportError as exc:
            how = "install it with: pip install 'sail-jax[tensorboard]'"
            raise RefusedError(f"TensorBoard needs tensorboardX, which is missing; {how}") from exc
        self._event, self._checksum = event, checksum

    def __call__(self, step: int, scalars: Scalars) -> None:
        """Writes the numbers of a row."""
        series: dict[str, list[dict[str, Any]]] = {}
        for name, value in scalars.items():
            if not isinstance(value, str):
                of, _, metric = name.rpartition("/")
                series.setdefault(of, []).append({"tag": metric, "simple_value": value})
        for name, values in series.items():
            if name not in self._files:
                self._begin(name, step)
            self._write(name, step=step, summary={"value": values})

    def _begin(self, series: str, step: int) -> None:
        """Begins a file. TensorBoard reads the files of a folder in the order of their names."""
        folder = self._folder / quote(series.replace("/", ", "), safe=" ,=+:").lstrip(".")
        with disk.explained("write to", folder):
            folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._files[series] = folder / name
        self._write(series, file_version="brain.Event:2")
        self._write(series, step=step, session_log={"status": "START"})

    def _write(self, series: str, **event: Any) -> None:
        """Appends an event: its length and its bytes, each with a checksum."""
        data = self._event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        path = self._files[series]
        with disk.explained("write", path), open(path, "ab") as file:
            file.write(length + checks[0] + data + checks[1])


WRITERS: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard}
"""The callbacks that a command offers by name: each takes the folder for its files."""


class Reporter:
    """Writes rows, and passes them on to a callback. An error of the callback is kept for later.

    A training stores its state before it raises that error. Only the first of several processes
    calls the callback.

    Args:
      lines: Receives all rows.
      callback: Receives rows until it raises an exception. None for no callback.
      series: The series, which the names for the callback begin with; empty for none.

    Attributes:
      lines: As given.
      error: The exception of the callback; None without one.

    Raises:
      TypeError: If the callback is not a function of a step and its scalars.
    """

    def __init__(self, lines: JsonLines, callback: Callback | None, series: str = "") -> None:
        if callback is not None:
            callable_with("callback", callback, "step", "scalars")
        self.lines = lines
        self.error: Exception | None = None
        self._callback = callback if processes.is_first() else None
        self._series = f"{series}/" if series else ""

    def __call__(self, step: int, scalars: Scalars) -> None:
        """Writes a row, and calls the callback."""
        self.lines(step, scalars)
        if self._callback is None or self.error is not None:
            return
        try:
            self._callback(step, {f"{self._series}{name}": x for name, x in scalars.items()})
        except StoreError as exc:
            self.error = exc
        except Exception as exc:
            why = f"failed at step {step} ({type(exc).__name__}: {exc})"
            self.error = CallbackError(f"the callback {named(self._callback)} {why}")
            self.error.__cause__ = exc

    def check(self, *notes: str) -> None:
        """Raises the exception of the callback, if there is one, with notes."""
        if self.error is not None:
            for note in notes:
                self.error.add_note(note)
            raise self.error


class Parts(Reporter):
    """Reports the finished parts of a study or a sweep: one row for each, numbered from 0.

    Args:
      path: The file for the rows. It is made at the first row, and continued if it exists.
      callback: Receives the new rows. None for no callback.

    Raises:
      StoreError: If the file is damaged.
      TypeError: As `Reporter`.
    """

    def __init__(self, path: Path | None, callback: Callback | None) -> None:
        found = path if path is not None and path.exists() else None
        super().__init__(JsonLines(found, sys.maxsize), callback)
        self._path = path

    def add(self, scalars: Scalars) -> None:
        """Reports a part.

        Args:
          scalars: Its row, without the number.

        Raises:
          CallbackError: If the callback raises an exception.
          StoreError: If the row cannot be written.
        """
        # Only now, so that a run that fails before its first part leaves no file.
        self.lines.path = self._path
        self(len(self.lines.rows), scalars)
        self.check()


def means(arrays: Mapping[Any, Any]) -> dict[str, float]:
    """Averages arrays for a row.

    Args:
      arrays: Arrays by name.

    Returns:
      The mean of the finite entries of each numeric array. Arrays without finite entries, strings
      and nested dictionaries, such as parameters, are left out.

    >>> means({"loss": [1.0, 3.0, float("nan")], "word": "a", "params": {"w": [1.0]}})
    {'loss': 2.0}
    """
    import numpy as np

    found = {}
    for name, array in arrays.items():
        values = np.asarray(array)
        if values.dtype.kind not in "biuf":
            continue
        finite = values[np.isfinite(values)]
        if finite.size:
            found[str(name)] = float(finite.mean(dtype=float))
    # The sum of very large numbers may overflow.
    return {name: mean for name, mean in found.items() if math.isfinite(mean)}


class _Stage(NamedTuple):
    """A stage that is running, and how many of its trainings had the same series."""

    callback: Callback
    name: str
    folder: Path | None
    seen: Counter[str]


_running: ContextVar[_Stage | None] = ContextVar("running", default=None)


def logged(stage: Stage, path: Path | None, callback: Callback | None) -> Stage:
    """Wraps a stage function so that it reports each finished stage, and the trainings in it.

    The row of a stage has its name, its duration in seconds, and the mean of each numeric array. A
    stage that was read back has no duration, and a row only if the file has none.

    Args:
      stage: The stage function.
      path: The file for the rows of stages; None for no file.
      callback: Receives the rows of stages and of trainings. The names of a training begin with its
        stage and, within that, its folder or its number. None for no callback.

    Returns:
      A stage function with the same results.

    Raises:
      StoreError: If the file is damaged.
      TypeError: If the callback is not a function of a step and its scalars.
    """
    if not processes.is_first():
        return stage
    parts = Parts(path, callback)
    before = {str(row.get("stage")) for row in parts.lines.rows}

    def reported(
        name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        took = {}

        def timed(*where: Any) -> Mapping[str, Any]:
            """Computes with the callback for trainings, and measures the duration."""
            start = time.perf_counter()
            with _passed_on(callback, name, *where):
                result = compute(*where)
            took["seconds"] = round(time.perf_counter() - start, 3)
            return result

        # A stage function without folders may omit this argument.
        arrays = stage(name, timed, folder=True) if folder else stage(name, timed)
        if took or name not in before:
            facts = {"stage": name, **took}
            parts.add({**facts, **means(arrays), **facts})
        return arrays

    return reported


@contextlib.contextmanager
def _passed_on(callback: Callback | None, name: str, folder: Path | None = None) -> Iterator[None]:
    """Sets the callback of trainings during the block."""
    found = None if callback is None else _Stage(callback, name, folder, Counter())
    token = _running.set(found)
    try:
        yield
    finally:
        _running.reset(token)


def training(lines: JsonLines, callback: Callback | None, directory: str | Path | None) -> Reporter:
    """Creates the reporter of a training.

    Args:
      lines: Receives all rows.
      callback: Receives them, too. None for the callback of the stage that is running, if `logged`
        has given it one.
      directory: The directory of the training, which names its series within the stage; None if
        it has none.

    Returns:
      The reporter.

    Raises:
      TypeError: If the callback is not a function of a step and its scalars.
    """
    stage = _running.get()
    if callback is not None or stage is None:
        return Reporter(lines, callback)
    series = stage.name
    if directory is not None and stage.folder is not None:
        series = os.path.normpath(f"{series}/{os.path.relpath(directory, stage.folder)}")
    stage.seen[series] += 1
    if stage.seen[series] > 1:
        series += f"/{stage.seen[series]}"
    return Reporter(lines, stage.callback, series)
