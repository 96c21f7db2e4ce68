"""Merges of leaves divided among devices: data that each device receives, relative to a leaf.

Compiles every method for a mesh of 4 x 2 devices, which are simulated on a CPU, and analyses the
programs without running them. Leaves are matrices sharded along their rows, their columns or both,
or sharded vectors. Figures count the bytes on each device after an exchange, for one merged leaf:
as a multiple of the whole leaf, or in bytes below 0.01 of it. The exit code is 1 if a method
receives more than necessary (`allowed`).
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench._measuring import Table, answers, on_devices, some_of
from experiments.bench._sharding_process import AXES, DEVICES, LEAVES, MODELS, PLACEMENTS, Sent
from sail_jax import methods
from sail_jax.cli.options import Parser
from sail_jax.cli.progress import say

FEW = 1 << 10
"""The largest number of bytes of "a few numbers"; the smallest leaf has 256 times as many."""
Found = Mapping[str, Any]
"""A record of one method and placement: see `_sharding_process`."""


def compiled(axes: str, placements: Sequence[str], names: Sequence[str]) -> list[Found]:
    """Compiles methods in a process whose CPU appears as `DEVICES` devices; a row for each leaf."""
    env = {**on_devices(DEVICES), "JAX_PLATFORMS": "cpu"}
    return answers("_sharding_process", [axes, ",".join(placements), *names], env)


def received(found: Found) -> dict[str, int]:
    """Adds up the bytes on each device after exchanges, by kind, for all leaves."""
    total: dict[str, int] = {}
    for kind, shapes, times in found["sent"]:
        total[kind] = total.get(kind, 0) + times * Sent(kind, tuple(shapes)).bytes
    return total


def allowed(found: Found) -> tuple[float, float]:
    """Computes how much a method may receive, from the parts of a leaf that it requires.

    - Single entries: sums, of a few numbers for each model.
    - Rows: a few numbers for each row, and the rows that are cut. Each device gets its share of
      the rows of a matrix, and all of a vector, which is one row.
    - Matrices: the matrix of every model, or its Gram matrix. OPCM gets each twice, for the norm
      of its sum and for the result.

    Args:
      found: The record of one method.

    Returns:
      The bytes of the largest sum, and of everything else that is sent.
    """
    shapes = {name: PLACEMENTS[name][0] for name in found["placement"].split("+")}
    of_each = 4 * MODELS * LEAVES
    if found["needs"] == "entry":
        return FEW, 0
    if found["needs"] == "row":
        cut = {"rows": 0, "columns": 1 / MODELS, "both": 1 / MODELS, "vector": 3}
        moved = sum(cut[name] * math.prod(shape) for name, shape in shapes.items())
        return 2 * of_each * max(map(max, shapes.values())), of_each * moved
    squares = [max(shape) ** 2 for shape in shapes.values() if len(shape) > 1]
    return of_each * max(squares, default=FEW), 2 * of_each * sum(squares)


def excess(found: Found) -> str:
    """Describes a collective that is not `allowed`; "" if all are."""
    most, rest = allowed(found)
    sums = {tuple(shapes) for kind, shapes, _ in found["sent"] if kind == "all-reduce"}
    large = [shapes for shapes in sums if Sent("all-reduce", shapes).bytes > most]
    others = {kind: n for kind, n in received(found).items() if kind != "all-reduce"}
    if large:
        return f"all-reduce of {', '.join(large[0])}"
    if sum(others.values()) > rest:
        return ", ".join(f"{kind} of {n:,} bytes" for kind, n in others.items())
    return "" if found["there"] else "outputs are not placed as the base"


def cell(found: Found) -> str:
    """Formats the data that each device receives for one leaf: moved / summed."""
    leaf = 4 * math.prod(PLACEMENTS[found["placement"]][0])
    total = {kind: n / LEAVES for kind, n in received(found).items()}
    summed, moved = total.pop("all-reduce", 0.0), sum(total.values())
    amounts = [f"{n / leaf:.2f}" if n > leaf / 100 else f"{n:.0f} B" for n in (moved, summed)]
    return " / ".join(amounts) if moved or summed else "-"


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    names, kinds = tuple(methods.METHODS), ",".join(AXES)
    add("--methods", type=some_of(names), default=names, help="comma-separated; default: all")
    add("--axes", type=some_of(AXES), default=kinds, help="comma-separated; default: %(default)s")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table for each kind of axes, and returns the record."""
    record: dict[str, list[Found]] = {}
    good = True
    for axes in args.axes:
        say(f"{axes} axes ...")
        record[axes] = compiled(axes, list(PLACEMENTS), args.methods)
        print(f"{axes} axes: received by each device for one leaf, in leaves: moved / summed")
        table = Table("method".ljust(17), "needs ", *(name.ljust(15) for name in PLACEMENTS), "")
        for name in args.methods:
            own = [found for found in record[axes] if found["method"] == name]
            beyond = [f"{one['placement']}: {why}" for one in own if (why := excess(one))]
            good = good and not beyond
            table.row(name, own[0]["needs"], *map(cell, own), "; ".join(beyond))
    return {"good": good, "found": record}
