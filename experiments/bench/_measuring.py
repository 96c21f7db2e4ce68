"""Measures times of calls, and times and memory of processes, for all benchmarks.

This module does not import jax before a call is timed, so that processes that it starts remain
small.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax import disk
from sail_jax.checks import nearest
from sail_jax.cli.progress import say
from sail_jax.disk import StoreError


def some_of(options: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Creates a reader of comma-separated names, for an option.

    Returns the reader. It raises `ArgumentTypeError` at a name that is not allowed.
    """
    allowed = tuple(options)

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"unknown name '{name}'{nearest(name, allowed)}")
        return names

    return read


class Times(NamedTuple):
    """Seconds of several calls of a function.

    Attributes:
      first: Seconds of the first call, which compiles.
      later: Seconds of each later call.
    """

    first: float
    later: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the later calls."""
        return statistics.median(self.later)

    def __str__(self) -> str:
        return f"{spread(self.later)} s, {self.first:.2f} s with compilation"

    def record(self) -> dict[str, float]:
        """Returns the times in the form of a record."""
        return {"first": self.first, **summary(self.later)}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median, smallest and largest of some times, in the form of a record."""
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def spread(seconds: Sequence[float]) -> str:
    """Returns the median of some times as text, with the smallest and largest in brackets."""
    return f"{statistics.median(seconds):.3g} ({min(seconds):.3g} to {max(seconds):.3g})"


def once(job: Callable[[], object]) -> float:
    """Returns the seconds of one call, until its result is computed."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(job())
    return time.perf_counter() - start


def times(job: Callable[[], object], repeats: int) -> Times:
    """Times a first call of a function, and `repeats` later ones."""
    return Times(once(job), tuple(once(job) for _ in range(repeats)))


def in_turns(jobs: Sequence[Callable[[], object]], repeats: int) -> list[Times]:
    """Times functions like `times`, in turns, so that a change of load affects all of them."""
    turns = [[once(job) for job in jobs] for _ in range(repeats + 1)]
    return [Times(first, tuple(later)) for first, *later in zip(*turns, strict=True)]


class Table:
    """A table that prints each row when it is added.

    Args:
      *heading: The headings. A column is as wide as its heading, including trailing spaces.
    """

    def __init__(self, *heading: str) -> None:
        self._widths = list(map(len, heading))
        self.row(*heading)

    def row(self, *cells: object) -> None:
        """Prints a row."""
        padded = (str(cell).ljust(n) for cell, n in zip(cells, self._widths, strict=True))
        print("  ".join(padded).rstrip(), flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints known rows, in columns as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *body = rows
    table = Table(*(cell.ljust(n) for cell, n in zip(heading, widths, strict=True)))
    for row in body:
        table.row(*row)


def device() -> str:
    """Returns the devices and the version of JAX as text."""
    import jax

    devices = jax.devices()
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return f"device: {count}{devices[0].device_kind}, jax {jax.__version__}"


def check_space(folder: Path, need: float) -> None:
    """Raises an error if a folder has fewer free bytes than required."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise StoreError(f"{folder}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")


class Rows:
    """Rows of a long benchmark, each written to a file when it is measured.

    Args:
      path: The file, a line of JSON for each row.
      resume: Whether rows already in the file are reused. Otherwise the file is overwritten.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self._path, self.all = path, list[dict[str, Any]]()
        lines = path.read_text().splitlines() if resume and path.exists() else []
        # An interrupted run may have left half a line at the end.
        self._old = [json.loads(line) for line in lines if line.endswith("}")]
        path.write_text("".join(json.dumps(row) + "\n" for row in self._old))

    def has(self, **key: Any) -> bool:
        """Returns whether the file of an earlier run has this row."""
        return any(key.items() <= row.items() for row in self._old)

    def add(self, measure: Callable[[], Mapping[str, Any]], **key: Any) -> dict[str, Any]:
        """Measures a row, or reads it from the file, and returns it."""
        found = next((row for row in self._old if key.items() <= row.items()), None)
        if found is None:
            found = {**key, **measure()}
            with self._path.open("a") as file:
                file.write(json.dumps(found) + "\n")
        self.all.append(found)
        return found


# A child's peak includes its parent's memory at the start. It is therefore started by a bare
# interpreter and not by the benchmark, which has drawn gigabytes of random numbers.
_STARTER = """
import json, os, sys, time
most, log, *command = sys.argv[1:]
if most != "0":
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(most), int(most)))
to_log = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
both = (os.POSIX_SPAWN_DUP2, 1, 2)
start = time.perf_counter()
child = os.posix_spawnp(command[0], command, os.environ, file_actions=[to_log, both])
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([seconds, usage.ru_maxrss * unit, os.waitstatus_to_exitcode(status), cpu]))
"""


class Sample(NamedTuple):
    """One run of a command.

    Attributes:
      seconds: Its wall time.
      peak: Its largest resident memory in bytes.
      failure: The reason of a failure; "" if there was none.
      cpu: CPU-seconds of all its threads.
      status: Its exit code; below 0 the signal that stopped it.
    """

    seconds: float
    peak: int
    failure: str
    cpu: float = float("nan")
    status: int = -1


def process(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    most: int = 0,
) -> Sample:
    """Runs a command until it exits, and measures it.

    Pending writes of the system are flushed to disk before the clock starts.

    Args:
      command: The words of the command.
      log: The file for its output.
      env: Variables to add to this process's environment.
      most: CPU-seconds after which the system stops the command; 0 for no limit.

    Returns:
      The measurement. A failure of the command is reported in it, not raised.
    """
    if hasattr(os, "sync"):
        os.sync()
    start = [sys.executable, "-I", "-S", "-c", _STARTER, str(most), str(log), *command]
    # Without compiled Python files every run would compile them again.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(start, env={**inherited, **(env or {})}, capture_output=True, text=True)
    if done.returncode:
        return Sample(float("nan"), 0, done.stderr.strip().splitlines()[-1])
    seconds, peak, status, cpu = json.loads(done.stdout)
    if status == 0:
        return Sample(seconds, peak, "", cpu, status)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failure = f"exit {status}: {said[-1].strip() if said else 'silent'}"
    return Sample(seconds, peak, failure, cpu, status)


class Track(NamedTuple):
    """A command that runs in turn with others, and its measurements so far.

    Attributes:
      command: The words of the command.
      repeats: The number of timed runs.
      samples: The measurements so far.
      env: Variables added to the environment.
    """

    command: Sequence[str]
    repeats: int
    samples: list[Sample]
    env: Mapping[str, str] = {}

    def once(self, log: Path) -> Sample:
        """Runs the command once."""
        return process(self.command, log, self.env)

    def record(self) -> dict[str, Any]:
        """Summarises the runs.

        Returns the median, smallest and largest of their seconds, their number, and the highest
        peak; or only the first failure.
        """
        if failure := next((s.failure for s in self.samples if s.failure), ""):
            return {"failure": failure}
        return {
            **summary([s.seconds for s in self.samples]),
            "cpu_seconds": statistics.median(s.cpu for s in self.samples),
            "repeats": len(self.samples),
            "peak_bytes": max(s.peak for s in self.samples),
        }


def take_turns(
    tracks: Mapping[str, Track], clear: Callable[[], object], log: Path
) -> Iterator[tuple[str, Sample]]:
    """Runs commands in turns, so that a change of the system's load affects all of them equally.

    Args:
      tracks: The commands by name. A command that failed is not repeated.
      clear: Removes the output of the command before.
      log: The file for the commands' output.

    Yields:
      The name of each run and its measurement, which is also stored in its track.
    """
    for turn in range(max(track.repeats for track in tracks.values())):
        for name, track in tracks.items():
            if turn < track.repeats and not any(s.failure for s in track.samples):
                clear()
                track.samples.append(track.once(log))
                yield name, track.samples[-1]


def answers(module: str, words: Sequence[str], env: Mapping[str, str]) -> list[Any]:
    """Runs a module of this folder in a separate process, which prints lines of JSON.

    Args:
      module: The name of the module.
      words: The arguments of its command line.
      env: Variables to add to this process's environment.

    Returns:
      The values of the lines.

    Raises:
      RuntimeError: If the process fails. The message contains its arguments and its last line.
    """
    command = [sys.executable, "-m", f"experiments.bench.{module}", *words]
    child = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    if child.returncode:
        said = child.stderr.strip().splitlines() or ["silent"]
        raise RuntimeError(f"{', '.join(words[:2])}: exit {child.returncode}: {said[-1]}")
    return [json.loads(line) for line in child.stdout.splitlines()]


def carry_out(
    commands: Mapping[str, str], out: Path, program: Sequence[str] = ("-m", "sail_jax.cli")
) -> dict[str, dict[str, float]]:
    """Runs commands of sail-jax one after the other, each in a separate process.

    Args:
      commands: The words after "sail-jax", by name.
      out: The folder for the record NAME.json of a benchmark, or the results NAME of a study.
      program: The arguments of the interpreter before these words.

    Returns:
      The wall time in "seconds" and the exit "code" of each command.
    """
    with disk.explained("write to", out):
        out.mkdir(parents=True, exist_ok=True)
    took: dict[str, dict[str, float]] = {}
    for name, words in commands.items():
        say(f"{words} ...")
        start = time.perf_counter()
        # Records hold their arguments. A relative path keeps this machine's folders out of them.
        record = ["--json", os.path.relpath(out / f"{name}.json")]
        result = record if words.startswith("bench") else ["--out", str(out / name)]
        done = subprocess.run([sys.executable, *program, *words.split(), *result], check=False)
        took[name] = {"seconds": time.perf_counter() - start, "code": done.returncode}
        print(f"{words}: {took[name]['seconds']:.0f} s\n", flush=True)
    return took


def on_devices(count: int) -> dict[str, str]:
    """Returns variables with which JAX sees the CPU as `count` devices."""
    devices = f"--xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()}
