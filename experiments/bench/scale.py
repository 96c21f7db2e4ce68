"""Scaling of costs: processor time, wall time and memory as a size grows by powers of ten.

Each axis makes one size larger: parameters, models, shards and memory limits of merges, parameters
of growth and alignment, dimension and draws of theory's grid, trainings side by side and devices.
Costs are for whole commands (for theory and training: for a second run in one process). The
exponent is the slope of log(cost - start) on log(size), with its 95 % interval by Student's
distribution over the points. The start is the same command with a minimal size, also measured.
Points below twice the start are not fitted. Every row is written to `scale.jsonl` when it is
measured.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench._fits import power
from experiments.bench._measuring import Rows, print_table, some_of
from experiments.bench._scale_axes import AXES, Bench
from sail_jax import disk
from sail_jax.cli.options import Parser, natural

PRESETS = ("tiny", "page", "full")
COSTS = {"cpu_seconds": "CPU-s", "seconds": "wall s", "peak_bytes": "peak"}
LARGE = 450_000_000  # parameters, from which the time per byte should be constant

Row = Mapping[str, Any]


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    default = Path(tempfile.gettempdir()) / "sail-jax-bench-scale"
    add("--preset", choices=PRESETS, default="page", help="the set of sizes; default: %(default)s")
    add("--axes", type=some_of(AXES), default=tuple(AXES), help="of: " + ", ".join(AXES))
    add(
        "--repeats",
        type=natural,
        default=3,
        help="runs of each size, but none after 40 s; default: %(default)s",
    )
    add("--dir", type=Path, default=default, help="for checkpoints; default: %(default)s")
    add("--resume", action="store_true", help="measure only rows that are not in its scale.jsonl")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints costs and exponents, and returns the record; it is not `good` if a command failed."""
    with disk.explained("write to", args.dir):
        args.dir.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.dir / "scale.jsonl", args.resume)
    bench = Bench(args.dir, rows, args.repeats, args.preset == "tiny")
    for name in args.axes:
        AXES[name].measure(bench, AXES[name].sizes[args.preset])
    fits = fitted(rows.all)
    _print(rows.all, fits)
    flat = per_byte(rows.all)
    for method, spread in flat.items():
        print(f"{method}: CPU-s of a byte differ by {spread:.0%} from .5 B parameters on")
    good = not any("failure" in row for row in rows.all)
    units = {name: AXES[name].unit for name in args.axes}
    return {"good": good, "units": units, "rows": rows.all, "fits": fits, "per_byte": flat}


def fitted(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Fits a power law to each cost of each series.

    Args:
      rows: The rows of the record.

    Returns:
      For each series and cost: `axis`, `series`, `cost`, and the fields of `_fits.Power`.
    """
    fits = []
    good = [row for row in rows if "failure" not in row]
    for axis, series in dict.fromkeys((row["axis"], row["series"]) for row in good):
        own = [row for row in good if (row["axis"], row["series"]) == (axis, series)]
        starts = [row for row in own if row["start"]]
        points = [row for row in own if not row["start"]]
        sizes = [row["size"] for row in points]
        for cost in COSTS:
            # The start is not subtracted from memory, because later work reuses it.
            start = starts[0][cost] if starts and cost != "peak_bytes" else 0.0
            law = power(sizes, [row[cost] for row in points], start)
            if law is not None:
                fits.append({"axis": axis, "series": series, "cost": cost, **law._asdict()})
    return fits


def per_byte(rows: Sequence[Row]) -> dict[str, float]:
    """Computes how much the CPU-seconds per byte differ between large merges.

    Args:
      rows: The rows of the record.

    Returns:
      For each method the ratio of the largest to the smallest (cost - start) / bytes, minus 1, from
      half a billion parameters upwards. Methods with fewer than two such points are excluded.
    """
    merges = [row for row in rows if row["axis"] == "parameters" and "failure" not in row]
    found = {}
    for method in dict.fromkeys(row["series"] for row in merges):
        own = [row for row in merges if row["series"] == method]
        start = next((row["cpu_seconds"] for row in own if row["start"]), 0.0)
        large = [row for row in own if row["size"] >= LARGE]
        costs = [(row["cpu_seconds"] - start) / row["bytes"] for row in large]
        if len(costs) > 1:
            found[method] = max(costs) / min(costs) - 1
    return found


def _print(rows: Sequence[Row], fits: Sequence[Row]) -> None:
    """Prints all rows, and the exponents."""
    table = [("axis", "series", "size", *COSTS.values())]
    for row in rows:
        cells = [_cell(row, cost) for cost in COSTS]
        size = f"{row['size']:,}" + " (start)" * row["start"]
        table.append((row["axis"], row["series"], size, *cells))
    print_table(table)
    print()
    exponents: dict[tuple[str, str], dict[str, str]] = {}
    for fit in fits:
        text = f"{fit['exponent']:.2f} ± {fit['half']:.2f}"
        exponents.setdefault((fit["axis"], fit["series"]), {})[fit["cost"]] = text
    body = [(*key, *(cells.get(cost, "-") for cost in COSTS)) for key, cells in exponents.items()]
    print_table([("axis", "series", *(f"exponent of {cost}" for cost in COSTS.values())), *body])


def _cell(row: Row, cost: str) -> str:
    """Returns a cost of a row as text."""
    if "failure" in row:
        return row["failure"]
    return f"{row[cost] / 1e6:.0f} MB" if cost == "peak_bytes" else f"{row[cost]:.2f}"
