"""The directory of a run, with the results, so that the run can be resumed, read and drawn again.

    config.json              the study, config, versions, and whether the run finished
    stages/<name>.npz        the arrays of a finished stage
    stages/<name>.npz.json   its record, with the checksum of the arrays
    work/<name>/             files that an unfinished stage keeps for itself
    metrics/<name>/          the lines (.jsonl) that a stage wrote there: losses and rates by step
    metrics.jsonl            a line for each finished stage: its duration, and means of its arrays
    result.nc                the dataset (netCDF4), written last
    <figure>.png                 or .svg, .pdf

Every file is written under a temporary name, synced and renamed, so that no file is ever
incomplete. `config.json` carries its own checksum. When the run has finished, it also contains the
checksum of `result.nc`.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from experiments.lab import callbacks, processes, stages
from experiments.lab.config import AnyConfig, named
from experiments.lab.progress import Stage
from experiments.lab.registry import Study
from experiments.lab.stages import direct as direct  # handed on: the stage without a store
from sail_jax import disk
from sail_jax.disk import RefusedError, StoreError, check_length
from sail_jax.provenance import provenance

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from sail_jax.drawing.printing import Looks

RECORD, RESULT = "config.json", "result.nc"
# How netCDF marks such an array.
_DIMENSION = "This is a netCDF dimension but not a netCDF variable"


def config_record(config: AnyConfig) -> dict[str, Any]:
    """Converts a config to JSON data.

    Args:
      config: A dataclass.

    Returns:
      Its fields by name. Tuples become lists. Infinities become the texts "inf" and "-inf", because
      JSON has no such numbers. Functions become their names, and are never imported again.

    Raises:
      TypeError: If `config` is not a dataclass, or a value cannot be written as JSON.
      ValueError: If a value is NaN.
    """

    def spelt(value: object) -> object:
        """Replaces tuples by lists, and infinities and functions by text."""
        if callable(value) and not isinstance(value, type):
            return named(value)
        if dataclasses.is_dataclass(value):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {key: spelt(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [spelt(item) for item in value]
        return str(value) if value in (math.inf, -math.inf) else value

    if not dataclasses.is_dataclass(config):
        raise TypeError(f"config must be a dataclass; got {type(config).__name__}")
    return json.loads(json.dumps(spelt(config), allow_nan=False))


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "experiment": str,
    "config": dict,
    "seed": int,
    "versions": dict,
    "device": dict,
    "started": str,
    "status": str,
    "result": (dict, type(None)),
}


def differences(old: object, new: object, at: str = "") -> list[str]:
    """Lists the fields in which two JSON records differ.

    Args:
      old: The first record, or a part of one.
      new: The second.
      at: The path of both within a larger record; empty at the top.

    Returns:
      One text for each difference, "path was ..., now ..."; an empty list if the records are equal.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b was 1, now 3']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*new, *old])
        below = (differences(old.get(k), new.get(k), f"{at}.{k}" if at else k) for k in keys)
        return [line for lines in below for line in lines]
    return [] if old == new else [f"{at} was {json.dumps(old)}, now {json.dumps(new)}"]


class Run:
    """One run of a study in a directory, which is locked until the end of the `with` block.

    `open` begins or resumes a run, and `reopen` reads a finished one. If several processes share
    one run, all of them open it, and only the first writes.

    Attributes:
      path: The directory.
      record: The content of `config.json`: study, config, seed, versions, device, time and status.
    """

    def __init__(
        self, path: Path, record: dict[str, Any], lock: int | None, made: Sequence[Path] = ()
    ) -> None:
        self.path = path
        self.record = record
        self._lock = lock
        self._made = made
        self._used: set[str] = set()
        self._start = time.perf_counter()
        self._kept_seconds = 0.0

    @classmethod
    def open(
        cls, directory: str | Path, experiment: str, config: AnyConfig, *, resume: bool = False
    ) -> Self:
        """Claims a directory for a run, before any work is done.

        An empty or new directory is accepted. A directory that already contains the same run is
        accepted only with `resume`. The same run has the same study, config, versions and device.

        Args:
          directory: The directory. It is created if it is missing.
          experiment: The name of the study.
          config: Its config, a dataclass with a field `seed`.
          resume: Whether to continue or read a run that the directory already contains.

        Returns:
          The run. Use it in a `with` block: its end unlocks the directory.

        Raises:
          RefusedError: If the directory contains anything else, contains this run and `resume` is
            false, is in use by another run, or cannot be written to.
          StoreError: If the record of the run in it is damaged.
          TypeError: As `config_record`.
          ValueError: As `config_record`.
        """
        path = Path(directory)
        wanted = {"experiment": experiment, "config": config_record(config), **provenance()}
        taken = processes.by_first(lambda: take(path, lambda: _claim(path, wanted, resume)))
        # Processes other than the first read the files that the first has written, without a lock.
        return cls(path, _read_run_record(path), None) if taken is None else cls(path, *taken)

    @property
    def finished(self) -> bool:
        """Whether the result of the run is stored."""
        return self.record["status"] == "finished"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Unlocks the directory, and releases it if the run failed before anything was stored."""
        stored = self.finished or any((self.path / at).exists() for at in ("stages", "work"))
        failed = kind is not None and issubclass(kind, Exception)
        if failed and not stored and processes.is_first():
            # Without a record, another run with another config can use the directory.
            (self.path / RECORD).unlink(missing_ok=True)
            remove_empty(self._made)
        release(self._lock)
        self._lock = None

    def stage(
        self, name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        """Computes a stage and stores it, or reads it back if it was stored before.

        Args:
          name: The name of the stage, used once in a run; see `stages.file_name`.
          compute: Computes the stage: a dictionary of arrays, or of such dictionaries. It is called
            with no argument, or with the path of a directory if `folder` is true.
          folder: Whether `compute` receives a directory for files that it requires to continue
            after a kill. The directory is removed once the stage is finished. Its .jsonl files move
            to `metrics`.

        Returns:
          The arrays, as `stages.as_arrays` returns them.

        Raises:
          ValueError: If the name was used before in this run or does not have the right form, and
            as `stages.as_arrays`.
          TypeError: As `stages.as_arrays`.
          StoreError: If the stored stage is damaged, or the stage cannot be written.
        """
        file = stages.file_name(name)
        saved, work = self.path / "stages" / f"{file}.npz", self.path / "work" / file
        if name in self._used:
            raise ValueError(f"stage '{name}' is used twice in one run: give each its own name")
        self._used.add(name)
        # All processes must take the same branch, because their devices compute together.
        if processes.agreed(stages.finished(saved)):
            arrays, seconds = stages.read(saved, name)
            self._kept_seconds += seconds
        else:
            start = time.perf_counter()
            if folder:
                with disk.explained("write to", work):
                    work.mkdir(parents=True, exist_ok=True)
            arrays = stages.as_arrays(compute(work) if folder else compute())
            took = time.perf_counter() - start
            processes.by_first(lambda: stages.write(saved, name, arrays, took))
        # Also required if the stage was read back: a process may have died between storing and this
        # line.
        if folder and processes.is_first() and work.exists():
            with disk.explained("keep the metrics of", work):
                for lines in work.rglob("*.jsonl"):
                    place = self.path / "metrics" / lines.relative_to(work.parent)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(lines, place)
            shutil.rmtree(work)
            # Other stages may still keep files there.
            with contextlib.suppress(OSError):
                work.parent.rmdir()
        return arrays

    def finish(self, dataset: "xr.Dataset", seconds: float = 0.0) -> None:
        """Stores the result of the run, then marks the run as finished.

        Args:
          dataset: The result. It is stored with the config, seed, versions, device and computing
            time as its attributes.
          seconds: The computing time before the run was opened.

        Raises:
          TypeError: If a variable contains neither numbers nor text.
          StoreError: If it cannot be written.
        """
        record = self.record
        attributes = {
            **dataset.attrs,
            "experiment": record["experiment"],
            "config": json.dumps(record["config"]),
            "seed": record["seed"],
            "versions": json.dumps(record["versions"]),
            "device": record["device"]["kind"],
            "device_count": record["device"]["count"],
            "started": record["started"],
            "wall_seconds": time.perf_counter() - self._start + self._kept_seconds + seconds,
        }

        def write() -> None:
            """Writes the result, and then the record that marks it as finished."""
            # The record comes second. It marks the run as finished, so the result must exist first.
            result = write_result(self.path, dataset.assign_attrs(attributes))
            done = {**record, "status": "finished", "result": result}
            disk.write_record(self.path / RECORD, done)

        check_storable(dataset)
        processes.by_first(write)
        self.record = _read_run_record(self.path)

    def draw(self, images: Mapping[str, bytes]) -> list[Path]:
        """Writes figures into the directory of the run.

        Args:
          images: The content of each file by its name, such as "risk.png". A name has at most 100
            letters, digits, "_" and "-" before its suffix.

        Returns:
          The paths of the files.

        Raises:
          ValueError: If a name does not have this form.
          StoreError: If a file cannot be written.
        """
        paths = []
        for name, data in images.items():
            if not re.fullmatch(r"\w[\w-]{0,99}\.(png|svg|pdf)", name):
                raise ValueError(f"figure name {name!r}: expected letters, digits, '_' and '-'")
            paths.append(self.path / name)
            if processes.is_first():
                disk.write_atomic(paths[-1], data)
        return paths


Drawn = tuple["xr.Dataset", dict[str, "Figure"]]


def complete(
    run: Run,
    study: Study,
    config: AnyConfig,
    watch: Callable[[Stage], Stage] = lambda stage: stage,
    shown: int | None = None,
    looks: "Looks | None" = None,
    callback: callbacks.Callback | None = None,
) -> Drawn:
    """Computes the result of a run unless it is stored already, then draws it.

    Args:
      run: The run, opened with `config`.
      study: The study.
      config: Its config.
      watch: Wraps the stage function that the study receives, to report progress. The default
        changes nothing.
      shown: The number of figures to write, from the first; None writes all of them.
      looks: Their style, width and formats; None for PNG files.
      callback: Receives the metrics of stages and trainings; None for no callback.

    Returns:
      The stored dataset, and the written figures by name.

    Raises:
      StoreError: If stored files are damaged or cannot be written. Errors of the study pass
        through.
    """
    if run.finished:
        with showing(run.path):
            return redraw(run, study, shown, looks)
    stage = callbacks.logged(watch(run.stage), run.path / callbacks.METRICS, callback)
    run.finish(study.run(config, stage))
    return redraw(run, study, shown, looks)


@contextlib.contextmanager
def showing(path: Path) -> Iterator[None]:
    """Turns an error that a study raises for a stored result into one line.

    The result may come from another version of the study, or from someone else.

    Args:
      path: The directory of the run.

    Yields:
      Nothing.

    Raises:
      StoreError: If the body of the `with` statement raises an error that is typical of results
        without the data that the study shows.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        why = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise StoreError(f"{path}: this version cannot show its result ({why[:200]})") from exc


def redraw(run: Run, study: Study, shown: int | None = None, looks: "Looks | None" = None) -> Drawn:
    """Draws the figures of a finished run again, from its stored result, and writes them.

    Args:
      run: The run.
      study: Its study.
      shown: The number of figures to write, from the first; None writes all of them.
      looks: Their style, width and formats; None for PNG files.

    Returns:
      The stored dataset, and the written figures by name.

    Raises:
      StoreError: If the result is damaged, or a figure cannot be written.
    """
    from sail_jax.drawing.printing import Looks

    looks = looks or Looks()
    dataset, figures = drawn(run, study, looks)
    figures = dict(list(figures.items())[:shown])
    run.draw(looks.files(figures))
    return dataset, figures


def drawn(run: Run, study: Study, looks: "Looks | None" = None) -> Drawn:
    """Draws the figures of a finished run without writing them.

    Args:
      run: The run.
      study: Its study.
      looks: Their style and width.

    Returns:
      The stored dataset, and the figures by name.

    Raises:
      StoreError: If the result is damaged.
    """
    dataset = load_result(run.path, run.record)
    plot = study.plot if looks is None else functools.partial(looks.draw, study.plot)
    return dataset, plot(dataset)


def reopen(directory: str | Path) -> Run:
    """Opens a finished run, to read it and to draw it again.

    Args:
      directory: The directory of the run.

    Returns:
      The run, without a lock on its directory.

    Raises:
      RefusedError: If there is no run, or it is not finished.
      StoreError: If its record is damaged.
    """
    path = Path(directory)
    check_length(path)
    if not path.is_dir() or not (path / RECORD).exists():
        raise RefusedError(f"{path} holds no run: {RECORD} is missing")
    record = _read_run_record(path)
    if record["status"] != "finished":
        raise RefusedError(f"{path} holds an unfinished run: finish it with --resume")
    return Run(path, record, None)


def check_storable(dataset: "xr.Dataset") -> None:
    """Checks that `write_result` can store a dataset.

    Args:
      dataset: The dataset.

    Raises:
      TypeError: If a variable holds neither numbers nor text.
    """
    for name, variable in dataset.variables.items():
        # NumPy's kinds of booleans, numbers and text. netCDF cannot store complex numbers.
        if variable.dtype.kind not in "biufUOT":
            raise TypeError(f"{name}: expected numbers or text, got {variable.dtype}")


_SETTING = threading.Lock()


@contextlib.contextmanager
def _without_cluster() -> Iterator[None]:
    """Makes xarray take locks of this process, although a Dask cluster may be connected.

    It would ask the cluster for the lock of a file, also for bytes in memory. The scheduler does
    not know such a lock.
    """
    dask: Any = sys.modules.get("dask")
    if dask is None:
        yield
        return
    # The setting is one for all threads.
    with _SETTING, dask.config.set(scheduler="synchronous"):
        yield


def write_result(path: Path, dataset: "xr.Dataset") -> dict[str, Any]:
    """Writes a dataset as `result.nc`.

    Args:
      path: The directory.
      dataset: The dataset, which `check_storable` accepts.

    Returns:
      The size of the file in bytes and its checksum: the "result" of a record.

    Raises:
      StoreError: If it cannot be written.
    """
    # The bytes are built in memory, so a full disk raises here and not in HDF5's flush on close.
    with _without_cluster():
        data = bytes(dataset.to_netcdf(engine="h5netcdf"))
    disk.write_atomic(path / RESULT, data)
    return {"bytes": len(data), "sha256": disk.sha256(data)}


def load_result(path: Path, record: Mapping[str, Any]) -> "xr.Dataset":
    """Reads the result of a finished run after checking all of its bytes.

    Args:
      path: The directory of the run.
      record: The content of its `config.json`, with the size and checksum of the result.

    Returns:
      The dataset.

    Raises:
      StoreError: If the result is missing, does not match its checksum, or does not have the form
        that `Run.finish` writes.
    """
    import xarray as xr

    file, expected = path / RESULT, record["result"]
    data = disk.read_bytes(file, expected["bytes"])
    if len(data) != expected["bytes"] or disk.sha256(data) != expected["sha256"]:
        raise StoreError(f"{file} is damaged: its checksum does not match the one in {RECORD}")
    try:
        _check_contained(data)
        # Undecoded, because xarray would turn numbers with a unit such as "days" into durations.
        return xr.load_dataset(io.BytesIO(data), engine="h5netcdf", decode_times=False)
    # The checksum protects against damage, not against forgery: it lies next to the file. HDF5,
    # h5netcdf and xarray raise errors of many types, some with many lines.
    except Exception as exc:
        why = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise StoreError(f"{file} is damaged: {why}") from exc


def _check_contained(data: bytes) -> None:
    """Raises a ValueError unless the bytes of a result contain all of its arrays, uncompressed.

    HDF5 can read entries from other files, follow links to them, and expand or repeat a few bytes
    to any size. `Run.finish` uses none of these features.
    """
    import h5py

    left = len(data)
    with h5py.File(io.BytesIO(data)) as file:
        for name in file:
            link = file.get(name, getlink=True)
            array = file[name] if isinstance(link, h5py.HardLink) else None
            if not isinstance(array, h5py.Dataset) or array.external or array.is_virtual:
                raise ValueError(f"'{name}' does not hold its own array")
            # A dimension without coordinates is stored as an array of its length, which is never
            # read.
            unread = str(array.attrs.get("NAME", "")).startswith(_DIMENSION)
            left -= 0 if unread else array.nbytes
            if left < 0:
                raise ValueError(f"its arrays need more than its {len(data)} bytes")


def release(lock: int | None) -> None:
    """Unlocks a directory that `take` locked."""
    if lock is not None:
        os.close(lock)


def remove_empty(made: Sequence[Path]) -> None:
    """Removes the empty ones among directories that `take` created.

    Args:
      made: The directories, innermost first.
    """
    with contextlib.suppress(OSError):
        for folder in made:
            folder.rmdir()


def take(
    path: Path, claim: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], int | None, list[Path]]:
    """Creates and locks a directory, and claims it.

    Args:
      path: The directory.
      claim: Reads or writes its record. It is called while no other process can change it.

    Returns:
      The record, the lock, and the created directories, innermost first.

    Raises:
      RefusedError: If the directory is in use or cannot be written to.
      Exception: The error of `claim`. The created directories are then removed.
    """
    if path.exists() and not path.is_dir():
        raise RefusedError(f"{path} is not a directory; choose another --out")
    # Listed before they are created, so that a run that fails immediately leaves none of them
    # behind.
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with disk.explained("write to", path):
            path.mkdir(parents=True, exist_ok=True)
            lock = disk.lock(path, links=True)
    except disk.BusyError as exc:
        raise RefusedError(f"{exc}; choose another --out") from exc
    except StoreError as exc:
        raise RefusedError(str(exc)) from exc
    try:
        return claim(), lock, made
    except BaseException:
        remove_empty(made)
        release(lock)
        raise


def _claim(path: Path, wanted: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Returns the record of the unfinished run in a locked directory, or writes a new record."""
    disk.probe(path)
    # These were left by a process that died while writing. The directory is still considered empty.
    leftovers = [*path.glob(".*.part"), *path.glob("stages/.*.part")]
    if not set(path.iterdir()) - set(leftovers):
        record = {
            "format": disk.FORMAT,
            **wanted,
            "seed": wanted["config"]["seed"],
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "status": "unfinished",
            "result": None,
        }
        disk.write_record(path / RECORD, record)
        return record
    if not (path / RECORD).exists():
        raise RefusedError(f"{path} is not empty and holds no run; choose another --out")
    check_own(path)
    record = _read_run_record(path)
    unlike = differences({k: record[k] for k in wanted}, wanted)
    if unlike:
        raise RefusedError(f"{path} holds another run ({'; '.join(unlike)}); choose another --out")
    if not resume:
        how = "add --resume to continue it, or choose another --out"
        if record["status"] == "finished":
            how = "choose another --out, or redraw it with: sail-jax plot"
        raise RefusedError(f"{path} holds this run already, {record['status']}; {how}")
    for leftover in leftovers:
        leftover.unlink()
    return record


def check_own(path: Path) -> None:
    """Refuses to continue in a directory of a run that another user may have prepared.

    Results would be written through its links, and its stages would count as this run's.

    Args:
      path: The directory.

    Raises:
      RefusedError: If another user owns or can change something in it.
    """
    with disk.explained("read", path):
        why = disk.foreign(path, links=True)
        if what := f"{path} {why}" if why else disk.stranger(path):
            raise RefusedError(f"{what}, which no run leaves there; choose another --out")


def _read_run_record(path: Path) -> dict[str, Any]:
    """Reads the record of a run."""
    return read_record(path / RECORD, _FIELDS)


def read_record(file: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Reads the record of a result, and checks that its status and its result agree.

    Args:
      file: The record.
      fields: The types of its fields, as `disk.read_record` takes them. "status" and "result" are
        among them.

    Returns:
      The record.

    Raises:
      StoreError: If it is damaged.
    """
    record = disk.read_record(file, fields)
    match record["status"], record["result"]:
        case ("unfinished", None) | ("finished", {"bytes": int(), "sha256": str()}):
            return record
    raise StoreError(f"{file} is damaged: its status and result disagree")
