"""The axes of `scale`: commands for each size, one axis at a time."""

import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import Rows, Sample, check_space, on_devices, process
from experiments.bench._merge_recipes import JOBS
from experiments.bench._merge_speed import SIZES, checkpoints, copying, write_recipe
from sail_jax.cli.options import size as in_bytes
from sail_jax.cli.progress import say
from sail_jax.disk import StoreError

LLAMAS: Mapping[str, Llama] = {
    **SIZES,
    "tiny-2": Llama(128, 320, 2, 2048),
    "tiny-3": Llama(256, 640, 2, 4096),
    "5m": Llama(256, 688, 5, 2000),
    "20m": Llama(384, 1024, 8, 8000),
    "0.1b": Llama(768, 2048, 7),
    "0.2b": Llama(1024, 2752, 11),
    "1b": Llama(2048, 5504, 17, heads=16),
    "2b": Llama(2560, 6912, 23, heads=20),
    "3b": Llama(2560, 6912, 36, heads=20),
}
FLAT = Llama(128, 352, 290, 1000)  # many tensors that are small, for many shards
MERGED = ("linear", "ties")
ENOUGH = 40.0  # seconds; slower commands are not repeated


class Bench(NamedTuple):
    """The settings that every axis uses.

    Attributes:
      folder: The folder for checkpoints and outputs, which are removed afterwards.
      rows: The collection of measurements.
      repeats: The number of measurements of each command, fewer after `ENOUGH` seconds.
      tiny: Whether all sizes are as small as possible.
    """

    folder: Path
    rows: Rows
    repeats: int
    tiny: bool = False

    def add(
        self, command: Sequence[str], key: Mapping[str, Any], more: Mapping[str, Any] = {}
    ) -> None:
        """Measures a command that writes `out`, unless its row exists, and adds `more`."""
        row = self.rows.add(lambda: {**self._measured(command), **more}, **key)
        say(f"  {key['axis']} {key['series']} {key['size']:,}: {in_words(row)}")

    def _measured(self, command: Sequence[str]) -> dict[str, Any]:
        samples: list[Sample] = []
        for _ in range(self.repeats):
            self._clear()
            samples.append(process(command, self.folder / "log.txt"))
            if samples[-1].failure:
                return {"failure": samples[-1].failure}
            if sum(sample.seconds for sample in samples) > ENOUGH:
                break
        self._clear()
        cpu, seconds = ([getattr(s, name) for s in samples] for name in ("cpu", "seconds"))
        return costs(cpu, seconds, max(sample.peak for sample in samples))

    @property
    def out(self) -> Path:
        """The path of outputs: a folder, or the file of a copy."""
        return self.folder / "out"

    def _clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.unlink(missing_ok=True)

    def recipe(self, method: str, models: Sequence[Path], count: int) -> list[str]:
        """Builds the command that merges `count` models, after the base if the method has one."""
        job = JOBS[method]
        own = models[: count + (job.base == "base")]
        text = job._replace(files=len(own)).recipe(own, ours=True)
        path = write_recipe(self.folder / "recipes" / f"{method}-{count}.yaml", text)
        return [*CLI, "merge", str(path), str(self.out), "--quiet"]

    def key(self, axis: str, series: str, size: float, start: bool = False) -> dict[str, Any]:
        """Builds the key of a row. For a `start`, the fit uses the row as the cost of size 0."""
        return {"axis": axis, "series": series, "size": size, "start": start}

    def known(self, keys: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether the file of an earlier run has all these rows, which are then reused."""
        if not all(self.rows.has(**key) for key in keys):
            return False
        for key in keys:
            self.rows.add(dict, **key)
        return True

    def models(self, name: str, llama: Llama, count: int) -> list[Path]:
        """Writes checkpoints of one size; the caller removes their folder."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return checkpoints(self.folder, name, llama, count)

    def drop(self, name: str) -> None:
        """Removes checkpoints."""
        shutil.rmtree(self.folder / name, ignore_errors=True)


def costs(cpu: Sequence[float], seconds: Sequence[float], peak: int) -> dict[str, Any]:
    """Summarises the costs of several runs for a row."""
    return {
        "cpu_seconds": statistics.median(cpu),
        "cpu_least": min(cpu),
        "cpu_most": max(cpu),
        "seconds": statistics.median(seconds),
        "peak_bytes": peak,
        "repeats": len(cpu),
    }


CLI = [sys.executable, "-m", "sail_jax.cli"]


def in_words(row: Mapping[str, Any]) -> str:
    """Returns a row's costs as text."""
    if "failure" in row:
        return row["failure"]
    return (
        f"{row['cpu_seconds']:.2f} CPU-s, {row['seconds']:.2f} s, {row['peak_bytes'] / 1e6:.0f} MB"
    )


# --- merges


def parameters(bench: Bench, sizes: Sequence[str]) -> None:
    """Merges of two models, by their number of parameters, and copies of as many bytes.

    Files that do not fit into the machine's memory are read from its disk, which affects a copy as
    much as a merge.
    """
    for place, name in enumerate(("tiny", *sizes)):
        llama, start = LLAMAS[name], place == 0
        read = {m: 2 + (JOBS[m].base == "base") for m in MERGED}
        read |= {f"copy of {files} files": files for files in read.values()}
        keys = {series: bench.key("parameters", series, llama.parameters, start) for series in read}
        if bench.known(list(keys.values())):
            continue
        models = bench.models(name, llama, 3)
        for series, key in keys.items():
            files = [model / "model.safetensors" for model in models[: read[series]]]
            moved = 2 * llama.parameters * (len(files) + 1)  # bytes read once and written once
            merge = series in MERGED
            command = (
                bench.recipe(series, models, 2) if merge else copying(files, bench.out, sync=False)
            )
            bench.add(command, key, {"bytes": moved})
        bench.drop(name)


def models(bench: Bench, sizes: Sequence[int]) -> None:
    """Merges of more models of 50 M parameters."""
    name = "tiny-2" if bench.tiny else "50m"
    for start in (True, False):
        counts = sizes[:1] if start else sizes
        keys = [bench.key("models", m, n, start) for n in counts for m in MERGED]
        if bench.known(keys):
            continue
        folder = "tiny" if start else name
        written = bench.models(folder, LLAMAS[folder], max(counts) + 1)
        for key in keys:
            bench.add(bench.recipe(key["series"], written, key["size"]), key)
        bench.drop(folder)


def shards(bench: Bench, sizes: Sequence[int]) -> None:
    """Merges of two models of 58 M parameters in 2,613 tensors, by the number of their files."""
    llama = LLAMAS["tiny"] if bench.tiny else FLAT
    cuts = [_cut(llama, count) for count in sizes]
    keys = [bench.key("shards", "linear", count) for _, count in cuts]
    if bench.known(keys):
        return
    plain = bench.models("plain", llama, 2)
    for (most, count), key in zip(cuts, keys, strict=True):
        # sail-jax's own merges of one model write its shards.
        option = ["--shard-size", f"{most}B"]
        parts = []
        for model in plain:
            parts.append(model.parent / f"{model.name}-{count}")
            copy = bench.recipe("linear", [model], 1)
            copy[copy.index(str(bench.out))] = str(parts[-1])
            made = process([*copy, *option], bench.folder / "log.txt")
            if made.failure:
                raise StoreError(f"shards: {made.failure}")
        found = len(list(parts[0].glob("*.safetensors")))
        if found != count:
            raise StoreError(f"shards: expected {count} files, found {found}")
        bench.add([*bench.recipe("linear", parts, 2), *option], key)
        for part in parts:
            shutil.rmtree(part)
    bench.drop("plain")


def _cut(llama: Llama, count: int) -> tuple[int, int]:
    """Finds the largest `--shard-size` for at least this many files, and their number."""
    tensors = [2 * prod(shape) for shape in llama.shapes().values()]

    def files(most: int) -> int:
        made, left = 0, 0
        for tensor in tensors:
            if tensor > left:  # the writer fills one file after another
                made, left = made + 1, most
            left -= tensor
        return made

    low, high = 1, 2 * llama.parameters + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if files(middle) >= count else (low, middle)
    return low, files(low)


def memory(bench: Bench, sizes: Sequence[str]) -> None:
    """Merges of two models of 200 M parameters by TIES, by the value of `--max-memory`."""
    name = "tiny" if bench.tiny else "0.2b"
    written = bench.models(name, LLAMAS[name], 3)
    command = bench.recipe("ties", written, 2)
    refused = process([*command, "--max-memory", "1MB"], bench.folder / "log.txt").failure
    needs = re.search(r" needs (\d+) MiB", refused)
    if needs is None:
        raise StoreError(f"memory: {refused}")
    least = int(needs[1]) << 20
    for text in sizes:
        cap = least if text == "least" else in_bytes(text)
        if cap >= least:
            key = bench.key("memory", "ties", cap)
            bench.add([*command, "--max-memory", f"{cap}B"], key)
    bench.drop(name)


# --- growth and alignment


def _networks(
    bench: Bench, axis: str, series: str, sizes: Sequence[str]
) -> Iterator[tuple[str, Llama, dict[str, Any]]]:
    """Yields the networks of an axis that are not yet measured, with the keys of their rows."""
    for place, name in enumerate(("tiny", *sizes)):
        llama = LLAMAS[name]
        key = bench.key(axis, series, llama.parameters, start=place == 0)
        if not bench.known([key]):
            check_space(bench.folder, 2 * llama.parameters * 4)
            yield name, llama, key


def growth(bench: Bench, sizes: Sequence[str]) -> None:
    """Networks made 1.5 times as wide, by their number of parameters before."""
    for name, llama, key in _networks(bench, "growth", "--width 1.5x", sizes):
        (model,) = bench.models(name, llama, 1)
        grow = [*CLI, "grow", str(model), str(bench.out), "--quiet"]
        bench.add([*grow, "--width", "1.5x", "--no-certify"], key)
        bench.drop(name)


def alignment(bench: Bench, sizes: Sequence[str]) -> None:
    """Runs two sweeps of weight matching of unrelated networks, by parameters."""
    for name, llama, key in _networks(bench, "alignment", "2 sweeps", sizes):
        bench.drop(name)
        pair = [bench.folder / name / which for which in "ab"]
        for seed, folder in enumerate(pair):
            write([folder], llama, seed=seed)
        align = [*CLI, "align", *map(str, pair), str(bench.out), "--quiet"]
        bench.add([*align, "--max-sweeps", "2", "--no-certify"], key)
        bench.drop(name)


# --- theory and training: what a second run in one process costs


def _inside(axis: str, series: str) -> Callable[[Bench, Sequence[int]], None]:
    """Creates an axis of computations without a start-up cost to subtract."""

    def measure(bench: Bench, sizes: Sequence[int]) -> None:
        for size in sizes:
            devices = size if axis == "devices" else 1
            row = bench.rows.add(
                lambda size=size, devices=devices: _computed(bench, axis, size, devices),
                **bench.key(axis, series, size),
            )
            say(f"  {axis} {size:,}: {in_words(row)}")

    return measure


def _computed(bench: Bench, job: str, size: int, devices: int) -> dict[str, Any]:
    """Runs a job of `_scale_process` on the given number of devices."""
    log = bench.folder / "log.txt"
    words = [sys.executable, "-m", "experiments.bench._scale_process", job, str(size)]
    sample = process([*words, str(bench.repeats)], log, on_devices(devices))
    if sample.failure:
        return {"failure": sample.failure}
    found = json.loads(log.read_text().splitlines()[-1])
    return costs(found["cpu"], found["seconds"], found["peak"])


class Axis(NamedTuple):
    """An axis: a size that grows.

    Attributes:
      measure: Adds a row for each size.
      unit: The unit of the size.
      sizes: The sizes by preset.
    """

    measure: Callable[[Bench, Sequence[Any]], None]
    unit: str
    sizes: Mapping[str, Sequence[Any]]


def _sizes(tiny: Sequence[Any], page: Sequence[Any], full: Sequence[Any]) -> dict[str, Any]:
    return {"tiny": tiny, "page": page, "full": full}


_B = ("0.5b", "1b", "2b", "3b")
AXES: Mapping[str, Axis] = {
    "parameters": Axis(
        parameters,
        "parameters",
        _sizes(("tiny-2", "tiny-3"), ("50m", "0.2b", "0.5b", "1b"), ("50m", "0.1b", "0.2b", *_B)),
    ),
    "models": Axis(models, "models", _sizes((2, 3), (2, 4, 8, 16), (2, 4, 8, 16))),
    "shards": Axis(
        shards,
        "files of each model",
        _sizes((1, 10), (1, 30, 300, 2000), (1, 30, 100, 300, 1000, 2000)),
    ),
    "memory": Axis(
        memory,
        "bytes of --max-memory",
        _sizes(
            ("least", "1GB"),
            ("300MB", "least", "700MB", "1GB", "1500MB"),
            ("300MB", "400MB", "least", "700MB", "1GB", "1500MB", "2GB"),
        ),
    ),
    "growth": Axis(
        growth,
        "parameters before",
        _sizes(
            ("tiny-2", "tiny-3"), ("50m", "0.2b", "0.5b"), ("50m", "0.1b", "0.2b", "0.5b", "1b")
        ),
    ),
    "alignment": Axis(
        alignment,
        "parameters of either",
        _sizes(
            ("tiny-2",), ("5m", "20m", "50m"), ("5m", "20m", "50m", "0.1b", "0.2b", "0.5b", "1b")
        ),
    ),
    "dimension": Axis(
        _inside("dimension", "phase diagram, 4 draws"),
        "dimension d",
        _sizes((125,), (125, 250, 500), (125, 250, 500, 1000)),
    ),
    "draws": Axis(
        _inside("draws", "phase diagram, d = 200"),
        "draws",
        _sizes((2,), (5, 10, 20, 40), (5, 10, 20, 40, 80)),
    ),
    "members": Axis(
        _inside("members", "100 steps of small GPTs"),
        "trainings side by side",
        _sizes((1,), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)),
    ),
    "devices": Axis(
        _inside("devices", "8 trainings"),
        "forced devices",
        _sizes((2,), (1, 2, 4, 8), (1, 2, 4, 8)),
    ),
}
