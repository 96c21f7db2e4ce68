"""A run kept in a directory, so that it can be resumed, re-read and redrawn, and never half-read.

    config.json         what was run, on what, and whether it finished
    stages/<name>.npz   each finished stage: its arrays
    stages/<name>.npz.json   when it is stored, and the checksum
    work/<name>/        what a stage that is not finished keeps for itself
    metrics/<name>/     the lines (.jsonl) that it wrote there: losses and rates, step by step
    result.nc           the dataset (netCDF4), written last
    <figure>.png

Everything is written under a temporary name, synced and renamed. `config.json` is the commit
record: it carries its own checksum and, once the run has finished, that of `result.nc`.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from experiments.lab import processes, stages
from experiments.lab.progress import Stage
from experiments.lab.registry import Study
from experiments.lab.stages import direct as direct  # handed on: the stage without a store
from sail_jax import disk
from sail_jax.disk import RefusedError, StoreError
from sail_jax.provenance import provenance

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

try:
    import fcntl
except ImportError:  # not on Windows: there two runs in one directory are not noticed
    fcntl = None

RECORD, RESULT = "config.json", "result.nc"


def config_record(config: Any) -> dict[str, Any]:
    """The dataclass as JSON data: tuples become lists, infinity the text "inf" (JSON has no such
    number). `TypeError` or `ValueError` where it has no such form."""

    def spelt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spelt(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [spelt(item) for item in value]
        return str(value) if value in (math.inf, -math.inf) else value

    return json.loads(json.dumps(spelt(dataclasses.asdict(config)), allow_nan=False))


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


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """Field by field, where two JSON records disagree."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*new, *old])
        below = (differences(old.get(k), new.get(k), f"{at}.{k}" if at else k) for k in keys)
        return [line for lines in below for line in lines]
    return [] if old == new else [f"{at} was {json.dumps(old)}, now {json.dumps(new)}"]


class Run:
    """One experiment's directory, held by this process from `open` to the end of the `with`."""

    def __init__(self, path: Path, record: dict[str, Any], lock: int | None) -> None:
        self.path = path
        self.record = record
        self._lock = lock
        self._used: set[str] = set()
        self._start = time.perf_counter()
        self._kept_seconds = 0.0

    @classmethod
    def open(
        cls, directory: str | Path, experiment: str, config: Any, *, resume: bool = False
    ) -> Self:
        """Takes `directory` for this run, or raises `RefusedError` before any work is done.

        An empty or new directory is taken; one that holds the same run (same experiment, config,
        versions and device) is taken with `resume`; anything else is refused, with the reason.
        """
        path = Path(directory)
        wanted = {"experiment": experiment, "config": config_record(config), **provenance()}
        taken = processes.by_first(lambda: _take(path, wanted, resume))
        record, lock = (_read_run_record(path), None) if taken is None else taken
        return cls(path, record, lock)

    @property
    def finished(self) -> bool:
        return self.record["status"] == "finished"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stored = self.finished or any((self.path / at).exists() for at in ("stages", "work"))
        failed = kind is not None and issubclass(kind, Exception)
        if failed and not stored and processes.is_first():
            # what was refused at once may be asked for again otherwise
            (self.path / RECORD).unlink(missing_ok=True)
        _release(self._lock)
        self._lock = None

    def stage(
        self, name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        """What `compute()` gives, read back if an earlier process finished this stage.

        With `folder`, `compute(directory)` may keep there what it needs to go on after a kill; when
        the stage is finished the directory goes, but for its files of lines. Raises `ValueError`
        for a name that is not plain text or was used before in this run.
        """
        file = stages.file_name(name)
        saved, work = self.path / "stages" / f"{file}.npz", self.path / "work" / file
        if name in self._used:
            raise ValueError(f"stage '{name}' is used twice in one run: give each its own name")
        self._used.add(name)
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
        if folder and processes.is_first() and work.exists():  # perhaps of one that died here
            with disk.explained("keep the metrics of", work):
                for lines in work.rglob("*.jsonl"):
                    place = self.path / "metrics" / lines.relative_to(work.parent)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(lines, place)
            shutil.rmtree(work)
            with contextlib.suppress(OSError):  # other stages keep something there
                work.parent.rmdir()
        return arrays

    def finish(self, dataset: "xr.Dataset") -> None:
        """Writes the dataset with its provenance, then marks the run as finished."""
        for name, variable in dataset.variables.items():
            if variable.dtype.kind not in "biufUOT":
                raise TypeError(f"{name}: expected numbers or text, got {variable.dtype}")
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
            "wall_seconds": time.perf_counter() - self._start + self._kept_seconds,
        }

        def write() -> None:
            # Through memory, so that a full disk is noticed here and not in HDF5's flush on close.
            data = bytes(dataset.assign_attrs(attributes).to_netcdf(engine="h5netcdf"))
            disk.write_atomic(self.path / RESULT, data)
            result = {"bytes": len(data), "sha256": disk.sha256(data)}
            done = {**record, "status": "finished", "result": result}
            disk.write_record(self.path / RECORD, done)

        processes.by_first(write)
        self.record = _read_run_record(self.path)

    def draw(self, images: Mapping[str, bytes]) -> list[Path]:
        """Writes each PNG as `<name>.png` beside the result."""
        paths = []
        for name, data in images.items():
            if not re.fullmatch(r"\w[\w-]{0,99}", name):
                raise ValueError(f"figure name {name!r}: expected letters, digits, '_' and '-'")
            paths.append(self.path / f"{name}.png")
            if processes.is_first():
                disk.write_atomic(paths[-1], data)
        return paths


Drawn = tuple["xr.Dataset", dict[str, "Figure"]]


def complete(
    run: Run,
    study: Study,
    config: Any,
    watch: Callable[[Stage], Stage] = lambda stage: stage,
) -> Drawn:
    """Runs `study` unless it has finished, then draws it from what is stored.

    `watch` wraps the stage (progress). Returns the dataset as stored, and its figures.
    """
    if not run.finished:
        run.finish(study.run(config, watch(run.stage)))
    return redraw(run, study)


def redraw(run: Run, study: Study) -> Drawn:
    """Draws a finished run's figures again, from its result alone, and stores them."""
    from sail_jax.drawing import style

    dataset, figures = drawn(run, study)
    run.draw({name: style.png(figure) for name, figure in figures.items()})
    return dataset, figures


def drawn(run: Run, study: Study) -> Drawn:
    """A finished run's result, and its figures; nothing is written."""
    dataset = load_result(run.path, run.record)
    return dataset, study.plot(dataset)


def reopen(directory: str | Path) -> Run:
    """A finished run, to read and redraw; `StoreError` if it is missing, damaged or unfinished."""
    path = Path(directory)
    if not path.is_dir() or not (path / RECORD).exists():
        raise RefusedError(f"{path} holds no run: there is no {RECORD}")
    record = _read_run_record(path)
    if record["status"] != "finished":
        raise RefusedError(f"{path} holds an unfinished run: finish it with --resume")
    return Run(path, record, None)


def load_result(path: Path, record: Mapping[str, Any]) -> "xr.Dataset":
    """The stored dataset, every byte checked before any is interpreted."""
    import xarray as xr

    file, expected = path / RESULT, record["result"]
    data = disk.read_bytes(file, expected["bytes"])
    if len(data) != expected["bytes"] or disk.sha256(data) != expected["sha256"]:
        raise StoreError(f"{file} is damaged: its checksum does not match the one in {RECORD}")
    return xr.load_dataset(io.BytesIO(data), engine="h5netcdf", decode_times=False)


def _hold(path: Path) -> int | None:
    """An exclusive lock on the directory, which the system drops when the process ends."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RefusedError(f"{path} is in use by another run; choose another --out") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _take(path: Path, wanted: dict[str, Any], resume: bool) -> tuple[dict[str, Any], int | None]:
    """The record of the run to do in `path`, and the lock that keeps others out."""
    if path.exists() and not path.is_dir():
        raise RefusedError(f"{path} is not a directory; choose another --out")
    try:
        with disk.explained("write to", path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _hold(path)
    except StoreError as exc:
        raise RefusedError(str(exc)) from exc
    try:
        return _claim(path, wanted, resume), lock
    except BaseException:
        _release(lock)
        raise


def _claim(path: Path, wanted: dict[str, Any], resume: bool) -> dict[str, Any]:
    """The record of the run to do in `path`: the unfinished one found there, or a new one."""
    disk.probe(path)
    leftovers = [*path.glob(".*.part"), *path.glob("stages/.*.part")]  # of a process that died
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


def _read_run_record(path: Path) -> dict[str, Any]:
    record = disk.read_record(path / RECORD, _FIELDS)
    match record["status"], record["result"]:
        case ("unfinished", None) | ("finished", {"bytes": int(), "sha256": str()}):
            return record
    raise StoreError(f"{path / RECORD} is damaged: its status and result disagree")
