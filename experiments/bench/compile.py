"""Compilation of merges: CPU-seconds and memory to the first and to the second result.

Every method merges two models of 6, 60 and 300 leaves, which have 6 shapes: under `jit`, eagerly,
and from file to file. Each method and way of calling it has a separate process, which compiles
again for every number of leaves. The start of the process and of JAX's backend is excluded. The
table has all CPU-seconds and, for the first result, the ratio to task arithmetic on the same tree.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from experiments.bench._compile_process import WAYS
from experiments.bench._measuring import Table, answers, some_of
from sail_jax import methods
from sail_jax.cli.options import Parser, natural
from sail_jax.cli.progress import say

PEER = "task_arithmetic"

Found = dict[str, float]


def measured(name: str, way: str, leaves: Sequence[int]) -> list[Found]:
    """Measures a method in a separate process: CPU-seconds of two results, and the memory."""
    # This process must not reuse programs that an earlier process compiled.
    fresh = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return answers("_compile_process", [name, way, *map(str, leaves)], fresh)


def row(name: str, way: str, found: Sequence[Found], peer: Sequence[Found]) -> tuple[str, ...]:
    """Makes one row of the table: a method, called in one way, compared with the method `PEER`."""
    cells = [
        f"{ours['first']:6.2f} ({ours['first'] / other['first']:4.1f} x) {ours['second']:6.3f}"
        for ours, other in zip(found, peer, strict=True)
    ]
    held = f"{found[-1]['held']:.2f}" if "held" in found[-1] else ""
    return (name, way, *cells, f"{found[-1]['peak'] / 1e9:.2f} GB", held)


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    names, ways = tuple(methods.METHODS), ",".join(WAYS)
    add("--methods", type=some_of(names), default=names, help="comma-separated; default: all")
    add("--ways", type=some_of(WAYS), default=ways, help="comma-separated; default: %(default)s")
    add("--leaves", type=_counts, default="6,60,300", help="comma-separated; default: %(default)s")


def _counts(text: str) -> list[int]:
    """Reads comma-separated integers from 1."""
    return [natural(part) for part in text.split(",")]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table, and returns the record."""
    heads = [f"{n} leaves: first, second".ljust(24) for n in args.leaves]
    print("CPU-seconds; in brackets compared with " + PEER)
    table = Table("method".ljust(17), "way  ", *heads, "peak   ", "held")
    record: dict[str, dict[str, list[Found]]] = {}
    for way in args.ways:
        peer = measured(PEER, way, args.leaves)
        for name in [PEER, *(name for name in args.methods if name != PEER)]:
            say(f"{name}, {way} ...")
            found = peer if name == PEER else measured(name, way, args.leaves)
            record.setdefault(way, {})[name] = found
            table.row(*row(name, way, found, peer))
    return {"found": record}
