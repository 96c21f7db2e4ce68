"""Peak memory and time of studies' presets, each in a process of its own.

Runs `sail-jax run` for the named presets (default: presets of the transfer studies that take a
minute or less), and prints the peak resident memory of each. For comparison it also prints that of
importing jax.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

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


def peak(command: Sequence[str]) -> tuple[float, float, int]:
    """Runs a command and measures its peak memory.

    Args:
      command: The words of the command. Its output is thrown away.

    Returns:
      The largest resident memory in GiB, the seconds, and the exit status.
    """
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return usage.ru_maxrss * unit / 2**30, time.perf_counter() - start, child.returncode


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the benchmark and prints a line for each preset.

    Args:
      parser: The parser of the command, to which options are added.
      argv: The arguments of the command.

    Returns:
      The exit status: 0, or 1 if a run failed.

    Raises:
      UsageError: If an option is unknown.
    """
    parser.add_argument("presets", nargs="*", default=PRESETS, help="EXPERIMENT/PRESET ...")
    args = parser.read(argv)
    floor, seconds, _ = peak([sys.executable, "-c", "import jax; jax.numpy.ones(1)"])
    print(f"{'import jax':32s} {floor:5.2f} GiB {seconds:6.1f} s")
    failed = False
    for name in args.presets:
        experiment, _, preset = name.partition("/")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "sail_jax.cli", "run", experiment]
            options = ["--preset", preset or "default", "--out", f"{folder}/out"]
            memory, seconds, status = peak([*command, *options])
        failed |= status != 0
        note = "" if status == 0 else f"  FAILED, exit {status}"
        print(f"{name:32s} {memory:5.2f} GiB {seconds:6.1f} s{note}", flush=True)
    return int(failed)
