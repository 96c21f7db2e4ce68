"""A grid of runs of one study, over values of some fields of its config.

The axes of a grid are fields of the config, with their values. The points are all combinations of
values. Each point is an ordinary run in a folder of its own, so points are computed in any order,
on any worker, and an interrupted grid continues where it was.

    sweep.json        the study, axes, other fields of the config, versions, and the status
    points/<name>/    the run of each point, without figures
    metrics.jsonl     a line for each finished point: its values, and means of its results
    result.nc         the results of all points in one dataset (`grid_dataset`), written last
    sweep.png         the measurements over the axes (`grid_plots`)

`result.nc` does not depend on the order in which the points were computed, nor on the workers.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from experiments.lab import registry, running, store
from experiments.lab.callbacks import METRICS, Callback, Parts, means
from experiments.lab.config import AnyConfig, documentation, fields, grouped, varied
from experiments.lab.progress import announcing
from sail_jax import cluster, disk
from sail_jax.checks import as_path, nearest, one_of
from sail_jax.cli.kernels import as_here
from sail_jax.cli.progress import Meter, say
from sail_jax.disk import BusyError, RefusedError, StoreError
from sail_jax.provenance import versions
from sail_jax.views import view

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from sail_jax.drawing.printing import Looks

RECORD, POINTS, FIGURE = "sweep.json", "points", "sweep"
MOST = 10_000
"""The largest number of points of a grid."""

# The processes of a cluster share their compiled programs.
REMEMBERING = functools.partial(as_here, contextlib.nullcontext)

Value = bool | int | float | str
"""A value of an axis."""

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "experiment": str,
    "config": dict,
    "axes": dict,
    "versions": dict,
    "devices": list,
    "seconds": float,
    "started": str,
    "status": str,
    "result": (dict, type(None)),
}


@dataclass(frozen=True)
class Grid:
    """The points of a grid, which are not computed yet.

    Attributes:
      study: The study.
      preset: The name of the preset from which the configs are made.
      axes: The values of each axis, by the name of its field.
      points: The config of each point, by the name of its folder. The last axis varies fastest.
    """

    study: registry.Study
    preset: str
    axes: Mapping[str, tuple[Value, ...]]
    points: Mapping[str, AnyConfig]


def planned(
    name: str, axes: Mapping[str, Sequence[Any]], *, preset: str = "default", **changes: Any
) -> Grid:
    """Makes the points of a grid, and computes nothing.

    Args:
      name: The name of the study.
      axes: The values of each axis, by the name of the field. A field within a group has the name
        of the group, such as "budget.steps".
      preset: The config that supplies the default values.
      **changes: Values of other fields that replace the preset's, as for `experiments.run`.

    Returns:
      The grid.

    Raises:
      ValueError: For an unknown study, preset or field, a value that is not allowed or occurs
        twice, an axis without values, a field that is an axis and among `changes`, or more than
        `MOST` points.
    """
    study = registry.load(name)
    one_of("preset", preset, study.presets)
    base, given = study.presets[preset], _by_name(running.with_tuples(changes))
    _check_axes(axes, fields(base), given)
    points: dict[str, AnyConfig] = {}
    kept: dict[str, dict[Value, None]] = {field: {} for field in axes}
    for combination in itertools.product(*axes.values()):
        wanted = dict(zip(axes, map(_plain, combination), strict=True))
        try:
            point = varied(base, **grouped({**given, **wanted}))
        except ValueError as error:
            where = ", ".join(f"{field}={value}" for field, value in wanted.items())
            raise ValueError(f"{error} (at {where})") from None
        at = _at(point, axes)
        for field, value in at.items():
            kept[field][value] = None
        points[_folder(at)] = point
    for field, values in axes.items():
        if len(kept[field]) < len(values):
            raise ValueError(f"{field}: a value occurs twice among those to sweep")
    return Grid(study, preset, {field: tuple(values) for field, values in kept.items()}, points)


def _check_axes(
    axes: Mapping[str, Sequence[Any]], known: Collection[str], given: Collection[str]
) -> None:
    """Checks the fields of axes and the number of points."""
    if not axes:
        raise ValueError("axes must have at least one field")
    for field, values in axes.items():
        if field not in known:
            raise ValueError(f"no field is called '{field}'{nearest(field, known)}")
        if field in given:
            raise ValueError(f"{field} is swept, so it must not be set, too")
        if len(values) == 0:
            raise ValueError(f"{field}: no values to sweep")
    count = math.prod(len(values) for values in axes.values())
    if count > MOST:
        raise ValueError(f"a sweep has at most {MOST:,} points, got {count:,}")


def run_grid(
    name: str,
    axes: Mapping[str, Sequence[Any]],
    *,
    out: str | PathLike[str],
    preset: str = "default",
    resume: bool = False,
    on: cluster.On = None,
    progress: bool = False,
    callback: Callback | None = None,
    **changes: Any,
) -> "GridResult":
    """Runs a study at every combination of values of some fields of its config.

    Args:
      name: The name of the study; see `experiments.list`.
      axes: The values of each axis, by the name of the field. A field within a group has the name
        of the group, such as "budget.steps".
      out: The folder, new or empty unless `resume` is true. Each point is stored in it when it is
        finished.
      preset: The config that supplies the default values.
      resume: Whether to continue a grid that the folder holds already. Axes may have other values
        than before: only the missing points are computed.
      on: Where the points are computed: here (None), or on the workers of a Dask cluster, as
        `sail_jax.cluster.connected` takes it.
      progress: Whether a bar of points is shown on the standard error.
      callback: A function of a number and a row. It is called for each finished point, with the
        values of the axes and the mean of each number of the result.
      **changes: Values of other fields that replace the preset's.

    Returns:
      The result. Its dataset has the axes as its first dimensions.

    Raises:
      ValueError: As `planned`; a `ClusterError` if the cluster cannot be reached or is lost.
      TypeError: If `callback` is not a function of a number and a row.
      CallbackError: If `callback` raised an exception.
      RefusedError: If the folder holds something else or is in use.
      StoreError: If stored files are damaged or cannot be written. Errors of the study pass
        through.
    """
    grid = planned(name, axes, preset=preset, **changes)
    result = compute(grid, out, resume=resume, on=on, progress=progress, callback=callback)
    result.draw()
    return result


@dataclass(frozen=True, repr=False)
class GridResult:
    """The result of a grid.

    Attributes:
      path: Its folder.
      record: The content of `sweep.json`.
      dataset: The results of all points: the axes are the first dimensions of each variable.
    """

    path: Path
    record: Mapping[str, Any]
    dataset: "xr.Dataset"

    @property
    def figures(self) -> "dict[str, Figure]":
        """Its figures by name, drawn again at each call."""
        from experiments.lab import grid_plots

        return grid_plots.plot(self.dataset)

    def to_dataframe(self, variable: str | Sequence[str] | None = None) -> "pd.DataFrame":
        """Returns variables of the dataset as a table with a row for each entry.

        Args:
          variable: The name of a variable, or of several with the same axes; None for all.

        Returns:
          The table, as from `experiments.Result.to_dataframe`.

        Raises:
          ValueError: If a variable is unknown, or the variables have different axes.
        """
        return running.tidy(self.dataset, variable)

    @property
    def summary(self) -> str:
        """A description in sentences of the axes, and of what the figure shows."""
        from experiments.lab import grid_plots

        return grid_plots.summary(self.dataset)

    def draw(self, looks: "Looks | None" = None) -> list[Path]:
        """Writes the figures into the folder.

        Args:
          looks: Their style, width and formats; None for PNG files.

        Returns:
          The paths of the files.

        Raises:
          StoreError: If a file cannot be written.
        """
        from sail_jax.drawing.printing import Looks

        looks = looks or Looks()
        images = looks.files(looks.draw(lambda: self.figures))
        for name, image in images.items():
            disk.write_atomic(self.path / name, image)
        return [self.path / name for name in images]

    def _repr_html_(self) -> str:
        axes = self.record["axes"].items()
        rows = [(field, ", ".join(map(str, values))) for field, values in axes]
        return view(f"{self.record['experiment']} in {self.path}\n{self.summary}", rows)

    def __repr__(self) -> str:
        return f"{self.record['experiment']} in {self.path}\n{self.summary}"


def compute(
    grid: Grid,
    out: str | PathLike[str],
    *,
    resume: bool = False,
    on: cluster.On = None,
    progress: bool = False,
    callback: Callback | None = None,
) -> GridResult:
    """Computes the missing points of a grid, and combines the results.

    Args:
      grid: The grid.
      out: The folder, as for `run_grid`.
      resume: As for `run_grid`.
      on: As for `run_grid`.
      progress: As for `run_grid`.
      callback: As for `run_grid`.

    Returns:
      The result.

    Raises:
      Exception: As `run_grid`.
    """
    path = as_path("out", out)
    with _claimed(path, grid, resume) as record:
        if record["status"] == "unfinished":
            _compute_points(path, grid, record, on, progress, Parts(path / METRICS, callback))
            _finish(path, grid, record, progress)
        return reopen(path)


def reopen(path: Path) -> GridResult:
    """Reads the result of a finished grid.

    Args:
      path: The folder.

    Returns:
      The result.

    Raises:
      RefusedError: If there is no grid, or it is not finished.
      StoreError: If its record or its result is damaged.
    """
    if not (path / RECORD).exists():
        raise RefusedError(f"{path} holds no sweep: {RECORD} is missing")
    record = store.read_record(path / RECORD, _FIELDS)
    if record["status"] != "finished":
        raise RefusedError(f"{path} holds an unfinished sweep: finish it with --resume")
    return GridResult(path, record, store.load_result(path, record))


@dataclass(frozen=True)
class _Point:
    """The task of one point. It can run twice: the second run finds the work of the first."""

    folder: Path
    study: str
    preset: str
    config: AnyConfig


def _plain(value: Any) -> Any:
    """Turns a number of NumPy into one of Python, because configs accept no other."""
    return value.item() if hasattr(value, "item") else value


def _json(value: Value) -> Value:
    """Spells infinities, which JSON cannot write."""
    return str(value) if value in (math.inf, -math.inf) else value


def _by_name(changes: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Returns changes, in the form that `varied` takes, by names such as "budget.steps"."""
    found: dict[str, Any] = {}
    for field, value in changes.items():
        name = f"{group}.{field}".lstrip(".")
        found |= _by_name(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def _at(config: AnyConfig, axes: Mapping[str, Any]) -> dict[str, Value]:
    """Reads the place of a point: the values of the axes in its config."""
    known = fields(config)
    for field in axes:
        value = known[field]
        if not isinstance(value, bool | int | float | str):
            raise ValueError(
                f"{field} cannot be swept: expected a number, a truth value or text, got {value!r}"
            )
    return {field: known[field] for field in axes}


def _folder(at: Mapping[str, Value]) -> str:
    """Returns the name of the folder of a point. Different places have different names."""
    # Sorted, so that another order of the axes finds the same folders.
    name = quote(",".join(f"{field}={at[field]}" for field in sorted(at)), safe=" ,=+")
    # Most file systems allow names of 255 bytes.
    return name if len(name) <= 200 else hashlib.sha256(name.encode()).hexdigest()


def _fixed(grid: Grid) -> dict[str, Any]:
    """Returns the part of the configs that all points have in common, as JSON data."""
    record = store.config_record(next(iter(grid.points.values())))
    for field in grid.axes:
        *groups, name = field.split(".")
        node = record
        for group in groups:
            node = node[group]
        del node[name]
    return record


@contextlib.contextmanager
def _claimed(path: Path, grid: Grid, resume: bool) -> Iterator[dict[str, Any]]:
    """Locks the folder of a grid, and frees it if the grid failed before anything was stored."""
    record, lock, made = store.take(path, functools.partial(_claim, path, grid, resume))
    try:
        yield record
    except Exception:
        if not any((path / POINTS).glob("*")):
            (path / RECORD).unlink(missing_ok=True)
            store.remove_empty(made)
        raise
    finally:
        store.release(lock)


def _claim(path: Path, grid: Grid, resume: bool) -> dict[str, Any]:
    """Returns the record of the grid in a locked folder. A new grid or other axes are written."""
    disk.probe(path)
    fixed = {"experiment": grid.study.name, "config": _fixed(grid), "versions": versions()}
    axes = {field: [*map(_json, values)] for field, values in grid.axes.items()}
    # A process that died while it wrote has left these. The directory still counts as empty.
    leftovers = [*path.glob(".*.part")]
    if not set(path.iterdir()) - set(leftovers):
        started = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"format": disk.FORMAT, **fixed, "started": started}
    else:
        record = _own_record(path, fixed, sorted(axes), resume)
        for leftover in leftovers:
            leftover.unlink()
        if [*record["axes"].items()] == [*axes.items()]:
            return record
    record |= {"axes": axes, "devices": [], "seconds": 0.0, "status": "unfinished", "result": None}
    disk.write_record(path / RECORD, record)
    return record


def _own_record(
    path: Path, fixed: Mapping[str, Any], axes: list[str], resume: bool
) -> dict[str, Any]:
    """Reads the record in a folder, and refuses other grids than the wanted one."""
    if not (path / RECORD).exists():
        raise RefusedError(f"{path} is not empty and holds no sweep; choose another --out")
    store.check_own(path)
    record = store.read_record(path / RECORD, _FIELDS)
    # With other axes, other fields remain in the config: that would be said twice.
    unlike = store.differences(sorted(record["axes"]), axes, "the axes")
    unlike = unlike or store.differences({k: record[k] for k in fixed}, fixed)
    if unlike:
        raise RefusedError(
            f"{path} holds another sweep ({'; '.join(unlike)}); choose another --out"
        )
    if not resume:
        raise RefusedError(
            f"{path} holds this sweep already, {record['status']}; add --resume to continue it or "
            "to add values, or choose another --out"
        )
    return record


def _compute_points(
    path: Path,
    grid: Grid,
    record: Mapping[str, Any],
    on: cluster.On,
    progress: bool,
    parts: Parts,
) -> None:
    """Computes the points that are not finished, and reports each."""
    # Workers may have another working directory.
    folder = path.resolve() / POINTS
    total = len(grid.points)
    stored = {name: _stored(folder / name, config, record) for name, config in grid.points.items()}
    missing = {
        name: _Point(folder / name, grid.study.name, grid.preset, grid.points[name])
        for name, run in stored.items()
        if run is None
    }
    _report_stored(grid, stored, parts)
    done, names = total - len(missing), [*missing]
    if progress and done:
        say(f"  {done} of {total} points were finished before")
    if not missing:
        return
    with (
        Meter(quiet=not progress, unit="points") as meter,
        cluster.connected(on, around=REMEMBERING) as workers,
    ):
        meter(done, total, "")

        def heard(place: int, stage: str) -> None:
            meter(done, total, f"{names[place]}: {stage}")

        for place, found in workers.each(_compute, [*missing.values()], heard):
            done += 1
            meter(done, total, names[place])
            parts.add(_row(grid, names[place], found))


def _report_stored(grid: Grid, stored: Mapping[str, store.Run | None], parts: Parts) -> None:
    """Reports stored points without a row: a process may have died between the two."""
    reported = {(*(str(row.get(field)) for field in grid.axes),) for row in parts.lines.rows}
    for name, run in stored.items():
        row = _row(grid, name, {})
        if run is not None and (*map(str, row.values()),) not in reported:
            parts.add(_row(grid, name, _means(run)))


def _row(grid: Grid, name: str, found: Mapping[str, float]) -> dict[str, Value]:
    """Returns the row of a point: its values of the axes, and the means of its results."""
    at = {field: _json(value) for field, value in _at(grid.points[name], grid.axes).items()}
    return {**at, **found, **at}


def _means(run: store.Run) -> dict[str, float]:
    """Averages each number of the result of a finished run."""
    return means(store.load_result(run.path, run.record).data_vars)


def _stored(folder: Path, config: AnyConfig, record: Mapping[str, Any]) -> store.Run | None:
    """Opens the run of a point of the grid with this record; None if it is not finished."""
    try:
        run = store.reopen(folder)
    except RefusedError:
        return None
    wanted = {
        "experiment": record["experiment"],
        "config": store.config_record(config),
        "versions": record["versions"],
    }
    if unlike := store.differences({k: run.record[k] for k in wanted}, wanted):
        raise RefusedError(f"{folder} holds another run ({'; '.join(unlike)}); remove it")
    return run


def _compute(point: _Point) -> dict[str, float]:
    """Computes a point unless it is finished. Returns the means of its results."""
    study, hears = registry.load(point.study), cluster.listener()
    try:
        with running.compiling(point.preset), _open(point) as run:
            if run.finished:
                return _means(run)
            stage = run.stage if hears is None else announcing(run.stage, hears)
            dataset = study.run(point.config, stage)
            run.finish(dataset)
            return means(dataset.data_vars)
    except Exception as error:
        error.add_note(f"The point is {point.folder}.")
        raise


def _open(point: _Point) -> store.Run:
    """Opens the run of a point, and waits while another process has it.

    A scheduler that misses a busy worker for a while gives its task to another worker, too.
    """
    while True:
        try:
            return store.Run.open(point.folder, point.study, point.config, resume=True)
        except RefusedError as error:
            if not isinstance(error.__cause__, BusyError):
                raise
        time.sleep(1)


def _finish(path: Path, grid: Grid, record: Mapping[str, Any], progress: bool) -> None:
    """Combines the results of all points, and marks the grid as finished."""
    from experiments.lab import grid_dataset

    results, devices, seconds = [], [], 0.0
    with Meter(quiet=not progress, unit="points") as meter:
        for name, config in grid.points.items():
            meter(len(results), len(grid.points), f"{name}: reading")
            run = _stored(path / POINTS / name, config, record)
            if run is None:
                raise StoreError(f"{path / POINTS / name} is lost; compute it again with --resume")
            results.append(store.load_result(run.path, run.record))
            seconds += float(results[-1].attrs["wall_seconds"])
            if run.record["device"] not in devices:
                devices.append(run.record["device"])
    first = next(iter(grid.points.values()))
    about = {field: _about(first, field) for field in grid.axes}
    combined = grid_dataset.combined(grid.axes, results, about)
    kinds = sorted({f"{device['count']} x {device['kind']}" for device in devices})
    attributes = {
        "experiment": grid.study.name,
        "config": json.dumps(record["config"]),
        "versions": json.dumps(record["versions"]),
        "device": ", ".join(kinds),
    }
    result = store.write_result(path, combined.assign_attrs(attributes))
    finished = {
        "devices": sorted(devices, key=json.dumps),
        "seconds": seconds,
        "status": "finished",
        "result": result,
    }
    disk.write_record(path / RECORD, {**record, **finished})


def _about(config: AnyConfig, field: str) -> str:
    """Returns the first sentence of the documentation of a field, without its full stop."""
    *groups, name = field.split(".")
    for group in groups:
        config = getattr(config, group)
    return documentation(type(config)).get(name, "").partition(". ")[0].rstrip(".")
