"""Every method under every `--max-memory`, by the size of the largest tensor: is a cap exceeded?

A merge that does not fit must be rejected before it reads a tensor, with the name of one. The
smallest cap that a method accepts is parsed from the error for a cap that is far too small. It is
tested if it is below the largest cap, without a compilation cache, because compilers also use
memory.
"""

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench._llama import Llama
from experiments.bench._measuring import Rows, Sample, print_table, process
from experiments.bench._merge_recipes import Job
from experiments.bench._merge_speed import checkpoints, write_recipe
from sail_jax import disk
from sail_jax.cli.options import size
from sail_jax.cli.progress import say

LEAST = "least"
WIDTH = 1024  # one side of the largest tensors: two of an MLP with many rows, one with long ones
PATIENCE = 200  # CPU-seconds, after which a merge is stopped; its peak counts
COLD = {"JAX_ENABLE_COMPILATION_CACHE": "false"}

Row = dict[str, Any]


def run(
    folder: Path,
    ours: Sequence[str],
    jobs: Mapping[str, Job],
    caps: Sequence[str],
    entries: Sequence[int],
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Merges by every method under every cap, and prints the peaks.

    Only checkpoints of one size are on disk at a time. Each row is written to `caps.jsonl` in
    the folder when it is measured.

    Args:
      folder: The folder for checkpoints and outputs.
      ours: The command that merges; recipe and output are appended.
      jobs: The merges, by name.
      caps: Values of `--max-memory`; "least" is the smallest that the method accepts.
      entries: Sizes of the largest tensor, each a multiple of 1,024.
      resume: Whether the rows of an earlier run are reused.

    Returns:
      The record: a row for each merge, the number of each kind, and whether all of them stayed
      below their caps.
    """
    most = max((size(cap) for cap in caps if cap != LEAST), default=0)
    rows = Rows(folder / "caps.jsonl", resume)
    for largest in entries:
        keys = [{"largest": largest, "method": m, "cap": cap} for m in jobs for cap in caps]
        if all(rows.has(**key) for key in keys):
            for key in keys:
                rows.add(dict, **key)
            continue
        models = checkpoints(folder, f"largest-{largest}", Llama(WIDTH, largest // WIDTH, 1, WIDTH))
        for method, job in jobs.items():
            path = folder / "recipes" / f"{largest}-{method}.yaml"
            recipe = write_recipe(path, job.recipe(models, ours=True))
            command = [*ours, str(recipe), str(folder / "out" / "merged")]
            for cap in caps:
                row = rows.add(
                    lambda command=command, cap=cap: _merged(folder, command, cap, most),
                    largest=largest, method=method, cap=cap,
                )  # fmt: skip
                say(
                    f"  {largest:,} {method} {cap}: {row['kind']}, {row['peak_bytes'] / 1e6:.0f} MB"
                )
        shutil.rmtree(folder / f"largest-{largest}")
        shutil.rmtree(folder / "out")
    counts = Counter(row["kind"] for row in rows.all)
    _print(rows.all)
    print(f"{len(rows.all)} merges: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items())))
    good = not counts["over"] and not counts["failed"]
    return {"good": good, "counts": dict(counts), "caps": rows.all}


def _merged(folder: Path, command: Sequence[str], cap: str, most: int) -> Row:
    """Merges once under a cap, and returns the result; "least" is tried up to `most`."""
    log, env = folder / "log.txt", {}
    # A stopped merge leaves unfinished files behind.
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    if cap == LEAST:
        asked = process([*command, "--max-memory", "1MB"], log)
        needs = re.search(r" needs (\d+) MiB", asked.failure)
        if needs is None:
            return {"bytes": 0, "peak_bytes": asked.peak, "kind": "failed", "said": asked.failure}
        cap, env = f"{needs[1]}MiB", COLD
        if most and size(cap) > most:
            return {"bytes": size(cap), "peak_bytes": 0, "kind": "larger", "said": ""}
    sample = process([*command, "--max-memory", cap], log, env, most=PATIENCE)
    row = {"bytes": size(cap), "peak_bytes": sample.peak, "cpu_seconds": sample.cpu}
    return {**row, "kind": _kind(sample, size(cap)), "said": sample.failure}


def _kind(sample: Sample, cap: int) -> str:
    """Returns "kept", "refused", "over", "stopped" (by the time limit, below the cap) or
    "failed"."""
    if sample.peak > cap and sample.status != disk.RefusedError.code:
        return "over"
    if not sample.failure:
        return "kept"
    named = re.search(r"max-memory: \S+ needs \d+ MiB", sample.failure)
    if sample.status == disk.RefusedError.code and named:
        return "refused"
    return "stopped" if sample.status < 0 else "failed"


def _print(rows: Sequence[Row]) -> None:
    """Prints peaks in MB, a column for each size of the largest tensor."""
    sizes = sorted({row["largest"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        peak = f"{row['peak_bytes'] / 1e6:.0f} of {row['bytes'] / 1e6:.0f}"
        text = row["kind"] if row["kind"] in ("refused", "larger") else peak
        if row["kind"] in ("over", "failed", "stopped"):
            text += " " + row["kind"].upper()
        cells.setdefault((row["method"], row["cap"]), {})[row["largest"]] = text
    header = ("peak MB", "--max-memory", *(f"{n / 1e6:.0f} M entries" for n in sizes))
    body = [(m, cap, *(c.get(n, "-") for n in sizes)) for (m, cap), c in cells.items()]
    print_table([header, *body])
