"""Grow a checkpoint in width and depth.

$ sail-jax grow base larger --width 2x --depth 2x
"""

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import (
    Parser,
    add_certify,
    add_copying,
    add_input,
    add_output,
    add_parts,
    add_seed,
    add_set,
    add_tables,
    arguments,
    entry,
    on_inputs,
    outcome,
    reader,
    run_options,
    show_shares,
)
from sail_jax.cli.processes import in_parts
from sail_jax.cli.progress import Meter, fitted, say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.growing import Growing


def _times(text: str) -> float:
    """How many times, as 2x, 1.5x or 2; an int if it is whole.

    >>> _times("2x"), _times("1.5")
    (2, 1.5)
    """
    value = float(text.lower().removesuffix("x"))
    return int(value) if value.is_integer() else value


factor = reader(_times, lambda x: 0 < x < 1e6, "a factor such as 2x")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add_input(parser, "path", "CKPT", "the checkpoint to grow", nargs="?")
    add_output(parser, "the grown checkpoint", nargs="?")
    add(
        "--to",
        metavar="WHAT",
        action="append",
        help="the sizes to grow to: another model's config.json, or one entry of it as KEY=VALUE; "
        "2x means twice the present value; smaller sizes are for --method magnitude",
    )
    add(
        "--width",
        metavar="2x",
        type=factor,
        help="factor by which the residual stream, hidden layers and number of heads grow",
    )
    add("--depth", metavar="2x", type=factor, help="factor by which the number of layers grows")
    add(
        "--method",
        metavar="NAME",
        help="how the network is grown, one of --methods; default: lemon",
    )
    add(
        "--depth-method",
        metavar="NAME",
        help="how layers are added, where --method is for the width alone",
    )
    add_set(parser)
    add(
        "--lossless",
        dest="require_lossless",
        action="store_true",
        default=None,
        help="refuse a growth unless a run of both networks shows that their outputs agree",
    )
    add_seed(parser, "what is drawn")
    add_tables(parser, "CKPT")
    add(
        "--draft",
        action="store_true",
        help="print a draft of the file for --spec, with open questions, and stop",
    )
    add("--methods", action="store_true", help="list the growth methods, and stop")
    add("--plan", action="store_true", help="show what would be done, and stop")
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
      ValueError: If the checkpoint, the output or the target is not named, and as `grow_checkpoint`
        does.
    """
    if args.methods:
        _methods()
        return None
    if args.path is None:
        raise ValueError("name the checkpoint: sail-jax grow CKPT OUT")
    if args.draft:
        _draft(args)
        return None
    to, options = _target(args), _options(args)
    remember_kernels()
    from sail_jax.checkpoint.operations import growing
    from sail_jax.checkpoint.recipe import tables

    own = ("to", "width", "depth", "set", "spec", "draft", "methods", "plan")
    given = arguments(args, *own) | {"to": to, **options}
    if args.spec is not None:
        given["rules"] = tables.read_table(args.spec)
    if args.plan:
        given = {name: value for name, value in given.items() if name not in ("out", "certify")}
        with growing.growing(run=run_options(args), **given) as ready:
            _show(ready)
            show_shares(args, ready, codes=ready.codes)
        return None
    if args.out is None:
        raise ValueError("name the output: sail-jax grow CKPT OUT")
    with Meter(args.quiet) as meter, compiled_for([args.path], offline=args.offline):
        done = growing.grow_checkpoint(run=run_options(args, meter), **given)
    if args.part is not None:
        show(outcome(done, part=args.part))
        return done.unchanged
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(done.growth.report)
    for agreement in done.agreement:
        show(agreement)
    show(f"{outcome(done)}; exactness: {done.verdict}")
    return None


def _options(args: Namespace) -> dict[str, object]:
    """Returns what --set says, after checking that some method has each of these options."""
    from sail_jax.checks import nearest
    from sail_jax.growth.named import METHODS

    options = dict(args.set)
    names = {"untie", *(name for method in METHODS.values() for name in method.options)}
    for name in options:
        if name not in names:
            raise ValueError(f"--set {name}: no such option{nearest(name, names)}")
    return options


def _target(args: Namespace) -> str | Mapping[str, object]:
    """Returns the target that --to, --width and --depth ask for."""
    factors = {"width": args.width, "depth": args.depth}
    factors = {key: value for key, value in factors.items() if value is not None}
    given = args.to or []
    if bool(given) == bool(factors):
        raise ValueError(
            "say what to grow to: either --to (a config.json, or entries of it as KEY=VALUE), or "
            "factors, --width 2x, --depth 2x or both"
        )
    if factors:
        return factors
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    if files := [text for text in given if "=" not in text]:
        raise ValueError(f"--to {files[0]}: a config.json stands alone, not beside other --to")
    try:
        entries = [entry(text) for text in given]
    except ArgumentTypeError as error:
        raise ValueError(f"--to: {error}") from error
    keys = [key for key, _ in entries]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--to states {twice[0]!r} more than once")
    return dict(entries)


def _methods() -> None:
    """Prints the growth methods."""
    from sail_jax.growth.named import METHODS

    width = max(map(len, METHODS))
    for name, method in METHODS.items():
        show(f"{name:{width}}  {method.about} ({method.source})")


def _draft(args: Namespace) -> None:
    """Prints a table of spaces to start from."""
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.checkpoint.sources.quantised import open_values

    config = None if args.config is None else read_target(args.config)
    with open_values(
        args.path, allow_pickle=args.allow_pickle, offline=args.offline, select=args.select
    ) as checkpoint:
        show(tables.draft_table(checkpoint, config), end="")


def _show(ready: "Growing") -> None:
    """Prints what a growth would do."""
    about = ready.about
    show(f"{about['method']}, seed {about['seed']}: {about['source']}")
    for key, (old, new) in about["changes"].items():
        show(f"  {key}: {old} to {new}")
    base = ready.view.base.tensors.values()
    before, after = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors)
        for tensors in (base, ready.view.tensors.values())
    )
    show(f"reads {before / 1e9:.3f} GB, writes {after / 1e9:.3f} GB in {len(ready.works)} tensors")
    show(ready.growth.report)
    for note in ready.growth.notes:
        show(f"note: {note}")
    show(ready.summary())
    show(f"exactness: {about['exactness']}")


main = on_inputs(add_arguments, in_parts(run))
