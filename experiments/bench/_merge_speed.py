"""Times whole merges from file to file, in turns with a plain copy and with mergekit."""

import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import Track, check_space, print_table, take_turns
from experiments.bench._merge_peer import OFFLINE, TUNED, Peer
from experiments.bench._merge_recipes import Job
from sail_jax.cli.progress import say

SIZES = {
    "tiny": Llama(64, 160, 2, 512),
    "50m": Llama(512, 1376, 6),
    "0.5b": Llama(1536, 4096, 14, heads=12),
}
# With any such variable, the command keeps glibc's allocator settings; this is their default.
UNTUNED = {"MALLOC_ARENA_TEST": "0"}

# Reads all files but the last into one reused buffer, and writes the first to the last.
_COPIER = """
import os, sys
sync, *files, out = sys.argv[1:]
buffer = memoryview(bytearray(1 << 20))
target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
for i, file in enumerate(files):
    source = os.open(file, os.O_RDONLY)
    while n := os.readv(source, [buffer]):
        if i == 0:
            os.write(target, buffer[:n])
    os.close(source)
if sync == "sync":
    os.fsync(target)
"""


class Turns(NamedTuple):
    """The number of runs of each program.

    Attributes:
      ours: The number of timed runs of sail-jax, and of copying.
      peer: The number of timed runs of mergekit.
      beside: The methods that mergekit also runs.
      both: The methods that both programs run with either allocator: glibc's default and one that
        keeps freed memory. By default mergekit has the first, and sail-jax the second.
    """

    ours: int
    peer: int
    beside: Collection[str] = ()
    both: Collection[str] = ()


def copying(files: Sequence[Path], out: Path, *, sync: bool) -> list[str]:
    """Returns the command that only reads files and writes a copy of the first.

    It is a lower bound on the time of a merge of these files.
    """
    words = ["sync" if sync else "no", *map(str, files), str(out)]
    return [sys.executable, "-I", "-S", "-c", _COPIER, *words]


def checkpoints(folder: Path, name: str, llama: Llama, count: int = 4) -> list[Path]:
    """Writes the base and the fine-tuned models, unless they exist.

    Args:
      folder: The folder for models of all sizes.
      name: The name of the size, which is also the folder of its models.
      llama: The sizes of the models.
      count: The number of models, including the base.

    Returns:
      The folders of the models, the base first.

    Raises:
      StoreError: If there is not enough space for the models and the outputs of merges.
    """
    names = ["base", *(f"tuned-{i}" for i in range(count - 1))]
    folders = [folder / name / model for model in names]
    size = 2 * llama.parameters  # bytes
    need = (2 + sum(not f.exists() for f in folders)) * size
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, need)
    if not all(f.exists() for f in folders):
        say(f"writing {len(folders)} checkpoints of {size / 1e9:.2f} GB to {folder / name} ...")
        for f in folders:
            shutil.rmtree(f, ignore_errors=True)
        write(folders, llama)
    return folders


def write_recipe(path: Path, recipe: Mapping[str, Any]) -> Path:
    """Writes a recipe to a file, as JSON, which is YAML too.

    Args:
      path: The file. Its folder is created if it is missing.
      recipe: The recipe.

    Returns:
      The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=1))
    return path


def run(
    folder: Path,
    size: str,
    jobs: Mapping[str, Job],
    ours: Sequence[str],
    peer: Peer | None,
    turns: Turns,
) -> dict[str, Any]:
    """Measures all jobs on models of one size, and prints a table.

    The commands take turns, so a change of the system's load affects all of them equally.

    Args:
      folder: The folder for models and outputs.
      size: The name of the size, a key of `SIZES`.
      jobs: The merges, by name.
      ours: The command of sail-jax; recipe and output are appended.
      peer: mergekit; None to omit it.
      turns: The number of runs of each program.

    Returns:
      The record: the measurements of every command, the target ratios that were met, and `good`,
      whether everything ran.
    """
    llama = SIZES[size]
    models = checkpoints(folder, size, llama)
    files = [model / "model.safetensors" for model in models]
    recipes, out = folder / "recipes", folder / "out"
    tracks: dict[str, Track] = {}

    def track(name: str, command: list[str], repeats: int, env: Mapping[str, str] = {}) -> None:
        tracks[name] = Track(command, repeats, [], env)

    for count in sorted({job.files for job in jobs.values()}):
        for sync in (False, True):
            name = f"limit {count}" + " synced" * sync
            track(name, copying(files[:count], out / "copy", sync=sync), turns.ours)
    track("import", [sys.executable, "-c", "import jax"], turns.ours)
    for name, job in jobs.items():
        recipe = write_recipe(recipes / f"{size}-{name}.yaml", job.recipe(models, ours=True))
        command = [*ours, str(recipe), str(out / "merged")]
        track(f"ours {name}", command, turns.ours)
        if name in turns.both:
            track(f"untuned ours {name}", command, turns.ours, UNTUNED)
        if peer is None or name not in turns.beside or job.beside or job.alone:
            continue
        plain = write_recipe(recipes / f"{size}-{name}-peer.yaml", job.recipe(models, ours=False))
        command = peer.command(plain, out / "merged")
        track(f"peer {name}", command, turns.peer, OFFLINE)
        if name in turns.both:
            track(f"tuned peer {name}", command, turns.peer, {**OFFLINE, **TUNED})

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    log = folder / "log.txt"
    for kind in ("limit", "ours", "peer"):  # an unmeasured run fills the cache
        for first in [name for name in tracks if name.startswith(kind)][:1]:
            clear()
            tracks[first].once(log)
    for name, sample in take_turns(tracks, clear, log):
        say(f"  {size} {name}: {sample.failure or f'{sample.seconds:.2f} s'}")
    shutil.rmtree(out, ignore_errors=True)
    records = {name: t.record() for name, t in tracks.items()}
    print(
        f"\n{size}: {llama.parameters:,} parameters, {len(files)} files of "
        f"{files[0].stat().st_size / 1e9:.2f} GB, bfloat16"
    )
    rows = {name: _row(name, job, records) for name, job in jobs.items()}
    print_table([_HEADER, *rows.values()])
    for count in sorted({job.files for job in jobs.values()}):
        plain, synced = (_span(records[f"limit {count}{end}"]) for end in ("", " synced"))
        print(f"limit, {count} files in and 1 out: {plain} s; synced to disk {synced} s")
    for name, record in records.items():
        if "failure" in record:
            print(f"{name}: FAILED, {record['failure']}")
    good = not any("failure" in record for record in records.values())
    met = {name: row[-1] for name, row in rows.items()}
    return {
        "size": size,
        "parameters": llama.parameters,
        "good": good,
        "met": met,
        "tracks": records,
    }


_HEADER = (
    *("method", "ours, s", "peak GB", "x limit", "x synced", "x floor"),
    *("peer, s", "peak GB", "peer / ours", "tuned / ours", "wanted"),
)


def _row(name: str, job: Job, records: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
    """Returns a row of the table."""
    none: dict[str, Any] = {"failure": "not run"}
    ours = records[f"ours {name}"]
    peer = records.get(f"peer {job.beside or name}", none)
    tuned = records.get(f"tuned peer {job.beside or name}", none)
    limit, synced = (records[f"limit {job.files}{end}"] for end in ("", " synced"))
    least = [record.get("cpu_seconds", nan) for record in (limit, records["import"])]
    floor = ours.get("cpu_seconds", nan) / sum(least)

    def ratio(a: Mapping[str, Any], b: Mapping[str, Any]) -> float | None:
        return None if "failure" in a or "failure" in b else a["seconds"] / b["seconds"]

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    over, faster = ratio(ours, limit), ratio(peer, ours)
    return (
        name,
        _span(ours),
        _peak(ours),
        number(over),
        number(ratio(ours, synced)),
        f"{floor:.2f}",
        _span(peer),
        _peak(peer),
        number(faster),
        number(ratio(tuned, ours)),
        _verdict(job, ours, ratio(ours, synced), faster, floor),
    )


def _verdict(
    job: Job, ours: Mapping[str, Any], over: float | None, faster: float | None, floor: float
) -> str:
    """Returns a job's targets, and whether they were met, as far as they were measured.

    `over` is the ratio to the copy that is flushed to disk, like the output of sail-jax. `floor` is
    the ratio of CPU times to the copy that is not flushed, and the import of JAX.
    """
    peak = None if "failure" in ours else ours["peak_bytes"] / 1e9
    checks: list[tuple[bool, str, float | None, Callable[[float], bool]]] = [
        (job.limit < inf, f"synced limit <= {job.limit:g}x", over, lambda x: x <= job.limit),
        (job.floor < inf, f"floor <= {job.floor:g}x", floor, lambda x: x <= job.floor),
        (job.peer > 0, f"peer >= {job.peer:g}x", faster, lambda x: x >= job.peer),
        (job.peak < inf, f"peak < {job.peak:g} GB", peak, lambda x: x < job.peak),
    ]
    said = [
        text + ("" if value is None else " met" if holds(value) else " MISSED")
        for wanted, text, value, holds in checks
        if wanted
    ]
    return ", ".join(said) or "-"


def _span(record: Mapping[str, Any]) -> str:
    """Returns the median of the seconds, with the minimum and the maximum."""
    if "failure" in record:
        return "-"
    return f"{record['seconds']:.2f} ({record['min']:.2f} to {record['max']:.2f})"


def _peak(record: Mapping[str, Any]) -> str:
    """Returns the peak in GB."""
    return "-" if "failure" in record else f"{record['peak_bytes'] / 1e9:.2f}"
