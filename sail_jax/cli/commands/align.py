"""Permute or rotate a checkpoint to match another.

$ sail-jax align base tuned aligned
"""

import contextlib
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import (
    Parser,
    add_certify,
    add_copying,
    add_input,
    add_output,
    add_parts,
    add_seed,
    add_tables,
    arguments,
    natural,
    on_inputs,
    outcome,
    run_options,
)
from sail_jax.cli.processes import in_parts
from sail_jax.cli.progress import Meter, fitted, say, show

if TYPE_CHECKING:
    from sail_jax.architectures import Rules
    from sail_jax.checkpoint.sources.aligned import Aligned

FAMILIES = ("permutation", "signed", "monomial", "orthogonal", "linear")
MANY = 24  # rows of a table, from which on layers are taken together


def family(text: str) -> tuple[str, str]:
    """Reads --family: NAME for all spaces, or SPACES=NAME with a pattern of the names of spaces.

    Args:
      text: The value of the option.

    Returns:
      The pattern, "" for all spaces, and the name of the family of maps.

    Raises:
      ArgumentTypeError: If there is no family of this name.

    >>> family("signed"), family("v.{i}=orthogonal")
    (('', 'signed'), ('v.{i}', 'orthogonal'))
    """
    pattern, _, name = text.rpartition("=")
    if name not in FAMILIES:
        raise ArgumentTypeError(f"expected one of {', '.join(FAMILIES)}, got '{name}'")
    return pattern, name


def weight(text: str) -> tuple[str, float]:
    """Reads --weigh: TENSOR=W, how much a tensor counts in the matching.

    Args:
      text: The value of the option.

    Returns:
      The name of the tensor, and its weight.

    Raises:
      ArgumentTypeError: If no tensor is named, or the weight is negative or not finite.

    >>> weight("out.kernel=2")
    ('out.kernel', 2.0)
    """
    path, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if path and 0 <= (number := float(value)) < math.inf:
            return path, number
    raise ArgumentTypeError(f"expected TENSOR=W, a number from 0, got '{text}'")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add_input(parser, "a", "A", "the reference")
    add(
        "b",
        metavar="B",
        help="the checkpoint that is moved so that its units match the units of A",
    )
    add_output(parser, "the aligned B", nargs="?")
    add("--method", metavar="NAME", help="what is matched: weights, the only choice so far")
    add(
        "--family", metavar="[SPACES=]NAME", action="append", type=family,
        help=f"the kind of map: {', '.join(FAMILIES)}; default: permutation",
    )  # fmt: skip
    add(
        "--spaces",
        metavar="GLOB",
        action="append",
        help="match only these spaces, such as 'hidden.*'",
    )
    add(
        "--weigh",
        dest="weights",
        metavar="TENSOR=W",
        action="append",
        type=weight,
        help="how much a tensor counts in the matching; default: 1, and 0 leaves it out",
    )
    add_tables(parser, "B")
    add_seed(parser, "the order in which spaces are matched")
    add(
        "--max-sweeps",
        metavar="N",
        type=natural,
        help="most passes over all spaces; default: 100",
    )
    add("--plan", action="store_true", help="list the spaces that would be matched, and stop")
    add("--full", action="store_true", help="print a row for every space of every layer")
    add_certify(parser)
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> bool | None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      Of a part, whether the output was finished before; None of anything else.

    Raises:
      ValueError: If the output is not named, or --family is given both for all spaces and for some;
        and as `align_checkpoints` does.
    """
    remember_kernels()
    from sail_jax.checkpoint.operations import aligning
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target

    spec = None if args.spec is None else tables.read_table(args.spec)
    config = None if args.config is None else read_target(args.config)
    if args.plan:
        _plan(args, spec, config)
        return None
    if args.out is None:
        raise ValueError("name the output: sail-jax align A B OUT (or --plan)")
    with Meter(args.quiet) as meter, compiled_for([args.a, args.b], offline=args.offline):

        def matching(sweep: int, space: str) -> None:
            meter.tell(f"sweep {sweep}" if sweep else "first visit", space)

        given = arguments(args, "plan", "full") | {"spec": spec, "config": config}
        given |= {"family": _families(args.family), "weights": dict(args.weights or [])}
        done = aligning.align_checkpoints(run=run_options(args, meter), progress=matching, **given)
    if args.part is not None:
        show(outcome(done, part=args.part))
        return done.unchanged
    aligned = done.aligned
    for note in dict.fromkeys(collapsed_text(note) for note in aligned.notes):
        say(fitted(f"note: {note}"))
    show(table(aligned, full=args.full))
    before, after = aligned.distance
    show(
        f"distance |A - B| / |A|: {before:.4g} before, {after:.4g} after "
        f"({len(aligned.history) - 1} sweeps)"
    )
    for agreement in done.agreement:
        show(f"B before and after, {agreement}")
    show(f"{outcome(done)}; exactness: {done.verdict}")
    return None


def _families(given: Sequence[tuple[str, str]] | None) -> str | dict[str, str]:
    """Returns one name for all spaces, or names by pattern."""
    if not given:
        return "permutation"
    alone = [name for pattern, name in given if not pattern]
    if alone and len(given) > 1:
        raise ValueError("--family: either one NAME for all spaces, or SPACES=NAME for each")
    return alone[0] if alone else dict(given)


def _plan(args: Namespace, spec: "Rules | None", config: Mapping[str, Any] | None) -> None:
    """Prints the spaces that would be matched; no tensor is read."""
    from sail_jax import align
    from sail_jax.checkpoint.sources import aligned
    from sail_jax.checkpoint.sources.quantised import open_values

    with open_values(
        args.b, allow_pickle=args.allow_pickle, offline=args.offline, select=args.select
    ) as checkpoint:
        resolved = aligned.spec_of(checkpoint, config, spec)
        layers, chosen = aligned.to_match(resolved, checkpoint, args.spaces)
    within = align.nested(resolved)
    rows = [("space", "size", "each", "tensors")]
    experts = {layer.space: layer for layer in layers}
    for label, names in _grouped(experts, args.full).items():
        moved = sum(len(experts[n].routers) + sum(map(len, experts[n].parts)) for n in names)
        rows.append((label, str(len(experts[names[0]].parts)), "", str(moved)))
    for label, names in _grouped(chosen, args.full).items():
        first = names[0]
        block = "" if first not in within else f"of {resolved.space(within[first]).size} alone"
        tensors = len(dict.fromkeys(use.path for name in names for use in resolved.uses(name)))
        rows.append((label, str(resolved.space(first).size), block, str(tensors)))
    from sail_jax.basis.spaces import table as columns

    show(columns(rows))


def collapsed(name: str) -> str:
    """Replaces the numbers in a name by {i}, so that it is the same for all layers.

    >>> collapsed("encoder.hidden.3")
    'encoder.hidden.{i}'
    """
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "{i}", name)


def collapsed_text(text: str) -> str:
    """Replaces the numbers in all names that a message quotes.

    >>> collapsed_text("'hidden.3' is permuted in 2 sweeps")
    "'hidden.{i}' is permuted in 2 sweeps"
    """
    return re.sub(r"'[^']*'", lambda m: collapsed(m[0]), text)


def _grouped(names: Iterable[str], full: bool) -> dict[str, list[str]]:
    """Groups names by the label of their row: where there are many, layers share one."""
    names = list(names)
    apart = full or len(names) <= MANY
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name if apart else collapsed(name), []).append(name)
    return {
        (f"{label} x {len(same)}" if len(same) > 1 else same[0]): same
        for label, same in groups.items()
    }


def table(aligned: "Aligned", *, full: bool = False) -> str:
    """Formats what was matched as a table: a row for each space, or for a space in all layers.

    Args:
      aligned: The alignment, as `align_maps` returns it.
      full: Whether every space of every layer has a row, even if there are many.

    Returns:
      Columns of the units that moved, the similarity before and after, and what the axes show to be
      lost.
    """
    from sail_jax.basis.spaces import table as columns

    matches = {match.space: match for match in aligned.matches}
    rows = [("space", "family", "units", "moved", "similarity", "after", "lost by its axes")]
    lost = {row.space: row.lost for row in aligned.report.spaces}
    for label, names in _grouped(matches, full).items():
        of = [matches[name] for name in names]
        units, moved = (sum(getattr(m, key) for m in of) for key in ("units", "moved"))
        before, after = (sum(getattr(m, k) for m in of) / len(of) for k in ("before", "after"))
        families = " or ".join(dict.fromkeys(m.family for m in of))
        rows.append(
            (
                label, families, str(units), str(moved), f"{before:.4f}", f"{after:.4f}",
                " or ".join(dict.fromkeys(lost[n] for n in names if lost[n])) or "nothing found",
            )
        )  # fmt: skip
    return columns(rows)


main = on_inputs(add_arguments, in_parts(run))
