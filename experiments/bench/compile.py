"""Compilation of merges: CPU-seconds and memory to the first and to the second result.

Every method merges two models of 6, 60 and 300 leaves, which have 6 shapes: under `jit`, eagerly,
and from file to file. Each method and way has a process of its own, which compiles anew for every
number of leaves. Starting the process and JAX's backend is not counted. All figures are printed,
and for the first result the ratio to task arithmetic on the same tree.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bench._compile_process import WAYS
from sail_jax import disk, methods
from sail_jax.cli.options import Parser
from sail_jax.cli.progress import say

SCHEMA = "sail-jax bench compile 1"
PEER = "task_arithmetic"

Found = dict[str, float]


def measure(name: str, way: str, leaves: Sequence[int]) -> list[Found]:
    """Measures a method that is called in one way, in a process of its own.

    Args:
      name: The name of the method.
      way: How it is called, a key of `WAYS`.
      leaves: The numbers of leaves.

    Returns:
      For each number of leaves, CPU-seconds of the `first` and `second` result, and the process's
      `peak` memory in bytes; for "jit" also `held` (see `_compile_process.jitted`).

    Raises:
      RuntimeError: If the process fails. The message has its last line.
    """
    command = [sys.executable, "-m", "experiments.bench._compile_process", name, way]
    # What an earlier process compiled must not be found by this one.
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    child = subprocess.run([*command, *map(str, leaves)], env=env, capture_output=True, text=True)
    if child.returncode:
        said = child.stderr.strip().splitlines() or ["silent"]
        raise RuntimeError(f"{name}, {way}: exit {child.returncode}: {said[-1]}")
    return [json.loads(line) for line in child.stdout.splitlines()]


def row(name: str, way: str, found: Sequence[Found], peer: Sequence[Found]) -> str:
    """Formats one line of the table.

    Args:
      name: The name of the method.
      way: How it was called.
      found: The measurements of the method, for each number of leaves.
      peer: The measurements of the method that it is compared with.

    Returns:
      The line.
    """
    cells = [
        f"{ours['first']:6.2f} ({ours['first'] / other['first']:4.1f} x) {ours['second']:6.3f}"
        for ours, other in zip(found, peer, strict=True)
    ]
    held = [f"{ours['held']:4.2f}" for ours in found if "held" in ours][-1:]
    return "  ".join([f"{name:17s} {way:5s}", *cells, f"{found[-1]['peak'] / 1e9:5.2f} GB", *held])


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the benchmark and prints a table.

    Args:
      parser: The parser of the command, to which options are added.
      argv: The arguments of the command.

    Returns:
      The exit status, 0.

    Raises:
      UsageError: If an argument is unknown or out of range.
      RuntimeError: If a process fails.
    """
    add = parser.add_argument
    add("--methods", default=",".join(methods.METHODS), help="comma-separated; default: all")
    add("--ways", default=",".join(WAYS), help="comma-separated; default: %(default)s")
    add("--leaves", default="6,60,300", help="comma-separated; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="also write a record there")
    args = parser.read(argv)
    names, ways = args.methods.split(","), args.ways.split(",")
    for kind, given, allowed in (("method", names, methods.METHODS), ("way", ways, WAYS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"unknown {kind} {unknown[0]!r}: expected some of {', '.join(allowed)}")
    leaves = [int(n) for n in args.leaves.split(",") if n.isdecimal() and int(n) > 0]
    if len(leaves) != len(args.leaves.split(",")):
        parser.error(f"--leaves: expected numbers > 0, got {args.leaves!r}")
    heads = [f"{n} leaves: first, second" for n in leaves]
    print("CPU-seconds; in brackets beside " + PEER)
    print("  ".join([f"{'method':17s} {'way':5s}", *(f"{h:24s}" for h in heads), "    peak  held"]))
    record: dict[str, Any] = {}
    for way in ways:
        peer = measure(PEER, way, leaves)
        for name in [PEER, *(name for name in names if name != PEER)]:
            say(f"{name}, {way} ...")
            measured = peer if name == PEER else measure(name, way, leaves)
            record.setdefault(way, {})[name] = measured
            print(row(name, way, measured, peer), flush=True)
    if args.json:
        from sail_jax.provenance import provenance

        about = {"schema": SCHEMA, "argv": list(argv), **provenance(), "found": record}
        disk.write_atomic(args.json, json.dumps(about, indent=2).encode() + b"\n")
    return 0
