"""Permute or rotate the units of a checkpoint to match another checkpoint.

$ sail-jax align base tuned aligned
"""

import contextlib
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sail_jax.cli.carrying import carry_out, outcome, tell_notes
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import (
    MODULES,
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
)
from sail_jax.cli.progress import Meter, show

if TYPE_CHECKING:
    from sail_jax.architectures import Rules
    from sail_jax.checkpoint import RunOptions
    from sail_jax.checkpoint.operations.aligning import AlignedCheckpoint
    from sail_jax.checkpoint.sources.aligned import Aligned

FAMILIES = ("permutation", "signed", "monomial", "orthogonal", "linear")
MANY = 24  # rows of a table; in longer tables equal layers share a row


def family(text: str) -> tuple[str, str]:
    """Reads --family: NAME for all spaces, or SPACES=NAME with a pattern of space names.

    Args:
      text: The value of the option.

    Returns:
      The pattern ("" for all spaces), and the name of the family of maps.

    Raises:
      ArgumentTypeError: If the family is unknown.

    >>> family("signed"), family("v.{i}=orthogonal")
    (('', 'signed'), ('v.{i}', 'orthogonal'))
    """
    pattern, _, name = text.rpartition("=")
    if name not in FAMILIES:
        raise ArgumentTypeError(f"expected one of {', '.join(FAMILIES)}, got '{name}'")
    return pattern, name


def weight(text: str) -> tuple[str, float]:
    """Reads --weights: TENSOR=W, the weight of a tensor in the objective.

    Args:
      text: The value of the option.

    Returns:
      The name of the tensor, and its weight.

    Raises:
      ArgumentTypeError: If TENSOR is missing, or the weight is negative or not finite.

    >>> weight("out.kernel=2")
    ('out.kernel', 2.0)
    """
    path, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if path and 0 <= (number := float(value)) < math.inf:
            return path, number
    raise ArgumentTypeError(f"expected TENSOR=W with a number W >= 0, got '{text}'")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add_input(parser, "a", "A", "the reference")
    add(
        "b",
        metavar="B",
        help="the checkpoint whose units are moved to match the units of A",
    )
    add_output(parser, "the aligned B", nargs="?")
    add("--method", metavar="NAME", help="what to compare: weights, the only choice so far")
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
        "--weights",
        metavar="TENSOR=W",
        action="append",
        type=weight,
        help="the weight w_t of a tensor t in the objective, sum_t w_t |A_t - B_t|^2; default: "
        "1 / (|A_t| |B_t|); 0 leaves the tensor out",
    )
    add(
        "--no-normalize",
        dest="normalize",
        action="store_false",
        help="use the weight 1 for every tensor without --weights, as published (Git Re-Basin)",
    )
    add_tables(parser, "B")
    add_seed(parser, "the order of the spaces")
    add(
        "--max-sweeps",
        metavar="N",
        type=natural,
        help="largest number of passes over all spaces; default: 100",
    )
    add("--plan", action="store_true", help="list the spaces that would be matched, and stop")
    add("--full", action="store_true", help="print a row for every space of every layer")
    add_certify(parser)
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint import align_checkpoints
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target

    spec = None if args.spec is None else tables.read_table(args.spec)
    config = None if args.config is None else read_target(args.config)
    if args.plan:
        _plan(args, spec, config)
        return
    if args.out is None:
        raise ValueError("OUT is missing: sail-jax align A B OUT (or use --plan)")
    given = arguments(args, "plan", "full") | {"spec": spec, "config": config}
    weights = dict(args.weights or [])
    given |= {"family": _families(args.family), "weights": weights}

    def operation(run: "RunOptions") -> "AlignedCheckpoint":
        def matching(sweep: int, space: str) -> None:
            assert isinstance(run.progress, Meter)
            run.progress.tell(f"sweep {sweep}" if sweep else "first visit", space)

        return align_checkpoints(run=run, progress=matching, **given)

    told = partial(_tell, full=args.full, normalize=args.normalize, weights=weights)
    carry_out(args, operation, told, [args.a, args.b])


def _tell(
    done: "AlignedCheckpoint", full: bool, normalize: bool, weights: Mapping[str, float]
) -> None:
    """Prints what was matched, and the distance of the networks."""
    aligned = done.aligned
    tell_notes(done, collapsed_text)
    show(table(aligned, full=full))
    if aligned.maps:
        show(objective(aligned.history, normalize, weights))
    before, after = aligned.distance
    show(
        f"distance |A - B| / |A|: {before:.4g} before, {after:.4g} after "
        f"({len(aligned.history) - 1} sweeps changed a map)"
    )
    for agreement in done.agreement:
        show(f"B before and after, {agreement}")
    show(f"{outcome(done)}; exactness: {done.verdict}")


def _families(given: Sequence[tuple[str, str]] | None) -> str | dict[str, str]:
    """Returns one family name for all spaces, or family names by pattern."""
    if not given:
        return "permutation"
    alone = [name for pattern, name in given if not pattern]
    if alone and len(given) > 1:
        raise ValueError("--family: give either one NAME for all spaces, or SPACES=NAME each time")
    return alone[0] if alone else dict(given)


def _plan(args: Namespace, spec: "Rules | None", config: Mapping[str, Any] | None) -> None:
    """Prints the spaces that would be matched, without reading a tensor."""
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
    """Replaces the numbers in a name by {i}, which gives all layers one name.

    >>> collapsed("encoder.hidden.3")
    'encoder.hidden.{i}'
    """
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "{i}", name)


def collapsed_text(text: str) -> str:
    """Replaces the numbers in the quoted names of a message.

    >>> collapsed_text("'hidden.3' is permuted in 2 sweeps")
    "'hidden.{i}' is permuted in 2 sweeps"
    """
    return re.sub(r"'[^']*'", lambda m: collapsed(m[0]), text)


def _grouped(names: Iterable[str], full: bool) -> dict[str, list[str]]:
    """Groups names by the label of their row. In long tables, equal layers share a row."""
    names = list(names)
    apart = full or len(names) <= MANY
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name if apart else collapsed(name), []).append(name)
    return {
        (f"{label} x {len(same)}" if len(same) > 1 else same[0]): same
        for label, same in groups.items()
    }


def objective(history: Sequence[float], normalize: bool, weights: Mapping[str, float]) -> str:
    """Formats the objective of the matching, with its values.

    Args:
      history: The objective before the first sweep and after each sweep.
      normalize: Whether tensors have the default weights, or the published ones.
      weights: The weights of single tensors.

    Returns:
      One line.

    >>> print(objective((2.0, 1.5, 1.25), False, {}))
    objective (weight matching): sum_t |A_t - B_t|^2; 2 before the sweeps, 1.25 after
    """
    form = "sum_t |A_t - B_t|^2 / (|A_t| |B_t|)" if normalize else "sum_t |A_t - B_t|^2"
    if weights:
        form += f", except {len(weights)} tensor{'s' * (len(weights) > 1)} by --weights"
    values = f"{history[0]:.4g} before the sweeps, {history[-1]:.4g} after"
    return f"objective (weight matching): {form}; {values}"


def table(aligned: "Aligned", *, full: bool = False) -> str:
    """Formats the matches as a table with a row for each space, or for a space in all layers.

    Args:
      aligned: The alignment, as `align_maps` returns it.
      full: Whether every space of every layer has a row, even if there are many.

    Returns:
      A table. Its columns include the number of moved units, the similarity before and after, and
      the loss according to the axes.
    """
    from sail_jax.basis.spaces import table as columns

    matches = {match.space: match for match in aligned.matches}
    rows = [("space", "family", "units", "moved", "similarity", "after", "known loss")]
    lost = {row.space: row.lost for row in aligned.report.spaces}
    for label, names in _grouped(matches, full).items():
        of = [matches[name] for name in names]
        units, moved = (sum(getattr(m, key) for m in of) for key in ("units", "moved"))
        before, after = (sum(getattr(m, k) for m in of) / len(of) for k in ("before", "after"))
        families = " or ".join(dict.fromkeys(m.family for m in of))
        rows.append(
            (
                label, families, str(units), str(moved), f"{before:.4f}", f"{after:.4f}",
                " or ".join(dict.fromkeys(lost[n] for n in names if lost[n])) or "none",
            )
        )  # fmt: skip
    return columns(rows)


main = on_inputs(add_arguments, run, MODULES)
