"""Peak memory and time of studies' presets, each in its own process.

Runs `sail-jax run` for the given presets (default: presets of the transfer studies that take a
minute or less), and prints the peak resident memory of each. For comparison it also prints the peak
of importing jax.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench._measuring import Sample, Table, process
from sail_jax.cli.options import Parser

PRESETS = (
    "transfer_phase/default",
    "transfer_phase/figure_1",
    "transfer_phase/figure_3",
    "transfer_phase/figure_6_7",
    "transfer_phase/depth",
    "transfer_phase/noise",
    "transfer_factors/spectrum",
    "transfer_factors/time",
    "transfer_factors/source",
    "transfer_factors/early_stopping",
    "ridge_transfer/figure_2",
    "divergences/figure_5",
)


def options(parser: Parser) -> None:
    """Adds the arguments of the benchmark."""
    parser.add_argument("presets", nargs="*", default=PRESETS, help="EXPERIMENT/PRESET ...")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a line for each preset, and returns the record; it is not `good` if a run failed."""
    found: dict[str, Sample] = {}
    table = Table("run".ljust(32), "peak GiB", "seconds")
    with tempfile.TemporaryDirectory() as folder:
        commands = {"import jax": [sys.executable, "-c", "import jax; jax.numpy.ones(1)"]}
        for i, name in enumerate(args.presets):
            experiment, _, preset = name.partition("/")
            run = [sys.executable, "-m", "sail_jax.cli", "run", experiment]
            commands[name] = [*run, "--preset", preset or "default", "--out", f"{folder}/{i}"]
        for name, command in commands.items():
            found[name] = sample = process(command, Path(folder, "log"))
            failed = f"  FAILED, {sample.failure}" if sample.failure else ""
            table.row(name, f"{sample.peak / 2**30:.2f}", f"{sample.seconds:.1f}{failed}")
    good = not any(sample.failure for sample in found.values())
    return {"good": good, "runs": {name: sample._asdict() for name, sample in found.items()}}
