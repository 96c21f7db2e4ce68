"""An accelerator: merges in its memory, compiled exchanges, and a study of each kind.

Runs `bench merge --device`, `bench sharding` and four small studies in separate processes, in about
five minutes of one GPU. Their records, the results of the studies and accelerator.json are written
to --out. Merges have their share of the bandwidth of a copy; those below 0.6 are listed. It also
runs on a CPU; --preset tiny takes a minute there.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench._measuring import Table, carry_out, device
from sail_jax.cli.options import Parser

LEAST = 0.6
"""The share of a copy's bandwidth that every merge should reach."""
STUDIES = ("transfer_phase", "merge_digits", "growth_training", "sail_language")
"""Of closed forms, merged networks, grown networks and trained networks."""
PRESETS: Mapping[str, Mapping[str, str]] = {
    "tiny": {
        "merge": "bench merge --device --size tiny --methods linear,dare_ties --repeat 1",
        "sharding": "bench sharding --methods linear --axes Auto",
        "transfer_phase": "run transfer_phase --preset tiny",
    },
    "full": {
        "merge": "bench merge --device --size 0.5b",
        "sharding": "bench sharding --methods linear,ties,dare_ties,della,slerp,tsv_m --axes Auto",
        **{name: f"run {name} --preset tiny" for name in STUDIES},
    },
}


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the folder for all results")
    add("--preset", choices=tuple(PRESETS), default="full", help="default: %(default)s")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything, prints a table, and returns the record."""
    args.json = args.json or args.out / "accelerator.json"
    commands, file = PRESETS[args.preset], args.out / "compiling.txt"
    file.unlink(missing_ok=True)
    took = carry_out(commands, args.out, ("-m", "experiments.bench._compiling", str(file)))
    lines = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
    compiling = {Path(result).stem: float(seconds) for seconds, result in lines}
    print(device())
    table = Table("command".ljust(max(map(len, commands.values()))), "seconds", "compiling")
    for name, words in commands.items():
        took[name]["compiling"] = compiling[name]
        table.row(words, f"{took[name]['seconds']:.1f}".ljust(7), f"{compiling[name]:.1f}")
    path = args.out / "merge.json"
    (row,) = json.loads(path.read_text())["device_memory"] if path.exists() else [{"methods": {}}]
    slow = {name: own["of_copy"] for name, own in row["methods"].items() if own["of_copy"] < LEAST}
    print(f"below {LEAST:.0%} of a copy: " + (", ".join(slow) or "none"))
    good = not any(run["code"] for run in took.values())
    return {"good": good, "took": took, "below": slow}
