"""Data that merges of sharded leaves send between devices, from their compiled programs.

`sharding` starts this in a process whose CPU appears as `DEVICES` devices. Usage: python -m
experiments.bench._sharding_process AXES PLACEMENTS METHOD... prints a line of JSON for each method
and each placement. PLACEMENTS are separated by commas, or by plus signs for placements of leaves in
one tree. Leaves have no values, because programs are only compiled.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.bench._compile_process import REQUIRED
from sail_jax import Merge, methods
from sail_jax.methods.registry import example

Axes = Literal["Auto", "Explicit"]
"""Whether the compiler chooses the sharding of results ("Auto"), or types do ("Explicit")."""
AXES = get_args(Axes)
DEVICES = 8
MODELS = 3
PLACEMENTS = {
    "rows": ((512, 256), PartitionSpec(("x", "y"))),
    "columns": ((256, 512), PartitionSpec(None, ("x", "y"))),
    "both": ((384, 256), PartitionSpec("x", "y")),
    "vector": ((65536,), PartitionSpec(("x", "y"))),
}
"""The shape of a leaf, and its divided axes, on a mesh of 4 times 2 devices."""
LEAVES = 2
"""The number of leaves of each placement. Leaves of one shape share a loop, so one is too few.
"""
BYTES = {"pred": 1, "u8": 1, "s8": 1, "u16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4}

QUICK: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options: the exchange between devices is fixed before optimisation for one device."""

_KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf" = (.*?) ((?:ragged-)?(?:{_KINDS}))(?:-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALLED = re.compile(r"(\w+)=(%[\w.-]+|\{%[^}]*\})")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Sent(NamedTuple):
    """A collective operation of a program.

    Attributes:
      kind: Its name in HLO.
      shapes: The data on each device after it, such as "f32[16,12]"; several are sent together.
    """

    kind: str
    shapes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Computes the size in bytes of the received data on each device."""
        return sum(BYTES[dtype] * entries for dtype, entries in map(_sized, self.shapes))


def _sized(shape: str) -> tuple[str, int]:
    """Returns the dtype of a shape in HLO, and its number of entries."""
    dtype, _, axes = shape.rstrip("]").partition("[")
    return dtype, math.prod(int(n) for n in axes.split(",") if n)


def collectives(hlo: str) -> Counter[Sent]:
    """Finds the collective operations of a compiled program.

    Args:
      hlo: The text of the program, after partitioning for the devices.

    Returns:
      The number of executions of each. An operation in a loop counts as often as the loop is known
      to run (once if this is not known). All branches of a conditional count.
    """
    own: dict[str, list[Sent]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if (start := _COMPUTATION.match(line)) is not None:
            name = start[2]
            entry = name if start[1] else entry
            own[name], calls[name] = [], []
        elif name:
            if (found := _COLLECTIVE.search(line)) is not None:
                own[name].append(Sent(found[2], tuple(re.findall(r"\w+\[[\d,]*\]", found[1]))))
            turns = _TRIPS.search(line)
            for role, called in _CALLED.findall(line):
                times = int(turns[1]) if turns is not None and role == "body" else 1
                calls[name] += [(one.strip(" %{}"), times) for one in called.split(",")]

    def carried_out(computation: str, times: int) -> Iterator[tuple[Sent, int]]:
        yield from ((sent, times) for sent in own[computation])
        for called, turns in calls[computation]:
            if called in own:
                yield from carried_out(called, times * turns)

    total: Counter[Sent] = Counter()
    for sent, times in carried_out(entry, 1):
        total[sent] += times
    return total


def method(name: str, statistics: Any) -> Merge:
    """Builds the merge of a method with its default options, and its statistics of data."""
    options = dict(REQUIRED.get(name, {}), **statistics)
    if "key" in methods.options_of(name):
        options["key"] = jax.random.key(0)
    return methods.get(name)(**options)


def program(name: str, axes: Axes, placements: Sequence[str]) -> dict[str, Any]:
    """Compiles a merge of leaves that are divided among all devices.

    Args:
      name: The name of the method.
      axes: The kind of all axes of the mesh.
      placements: Keys of `PLACEMENTS`; the tree has `LEAVES` leaves of each.

    Returns:
      The method's `needs` of a leaf, the `text` of the program, and whether each merged leaf is
      `there`: with the placement of the base's leaf.
    """
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[axes],) * 2)

    def leaf(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))

    tree = {f"{p}{i}": leaf(*PLACEMENTS[p]) for p in placements for i in range(LEAVES)}
    made = example(name)
    count = MODELS if made is None else min(MODELS, made.models[1] or MODELS)
    statistics: Any = {}
    if name == "fisher":
        statistics = {"fishers": [tree] * count}
    if name == "regmean":
        square = {k: leaf(x.shape[:1] * 2, PartitionSpec("x", "y")) for k, x in tree.items()}
        statistics = {"grams": [{k: square[k] for k, x in tree.items() if x.ndim == 2}] * count}
    needs = []

    @jax.jit
    def merged(statistics: Any, models: Sequence[Any], base: Any) -> Any:
        merge = method(name, statistics)
        needs.append(merge.needs)
        return merge(models, base)

    compiled = merged.lower(statistics, [tree] * count, tree).compile(QUICK)
    found: Any = compiled.output_shardings
    there = all(found[k].is_equivalent_to(x.sharding, x.ndim) for k, x in tree.items())
    return {"needs": needs[0], "text": compiled.as_text(), "there": there}


def main(axes: Axes, placements: str, *names: str) -> None:
    """Prints the data that cross devices, a line of JSON for each method and placement."""
    for name in names:
        for some in placements.split(","):
            found = program(name, axes, some.split("+"))
            sent = [[*one, times] for one, times in collectives(found.pop("text")).items()]
            about = {"method": name, "placement": some, "sent": sent}
            print(json.dumps({**about, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
