"""Grow a checkpoint in width and depth.

$ sail-jax grow base larger --width 2x --depth 2x
"""

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.checks import storage
from sail_jax.cli.carrying import carry_out, outcome, show_shares, tell_notes
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
    add_set,
    add_tables,
    arguments,
    entry,
    on_inputs,
    reader,
    run_options,
)
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.growing import Growing, Grown


def _times(text: str) -> float:
    """Parses a factor such as 2x, 1.5x or 2; whole numbers become int.

    >>> _times("2x"), _times("1.5")
    (2, 1.5)
    """
    value = float(text.lower().removesuffix("x"))
    return int(value) if value.is_integer() else value


factor = reader(_times, lambda x: 0 < x < 1e6, "a factor such as 2x")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add_input(parser, "path", "CKPT", "the checkpoint to grow", nargs="?")
    add_output(parser, "the grown checkpoint", nargs="?")
    add(
        "--to",
        metavar="WHAT",
        action="append",
        help="the target sizes: another model's config.json, or one of its entries as KEY=VALUE; "
        "2x doubles the present value; smaller sizes need --method magnitude",
    )
    add(
        "--width",
        metavar="2x",
        type=factor,
        help="growth factor of the residual stream, the hidden layers and the number of heads",
    )
    add("--depth", metavar="2x", type=factor, help="growth factor of the number of layers")
    add(
        "--method",
        metavar="NAME",
        help="the growth method; --methods lists them; default: lemon",
    )
    add(
        "--depth-method",
        metavar="NAME",
        help="the method that adds layers; --method then only widens",
    )
    add_set(parser)
    add(
        "--lossless",
        dest="require_lossless",
        action="store_true",
        default=None,
        help="fail unless running both networks shows equal outputs",
    )
    add_seed(parser, "the random draws")
    add_tables(parser, "CKPT")
    add(
        "--draft",
        action="store_true",
        help="print a draft of the --spec file with its open questions, and stop",
    )
    add("--methods", action="store_true", help="list the growth methods, and stop")
    add("--plan", action="store_true", help="show what would be done, and stop")
    add_certify(parser)
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    if args.methods:
        _methods()
        return
    if args.path is None:
        raise ValueError("CKPT is missing: sail-jax grow CKPT OUT")
    if args.draft:
        _draft(args)
        return
    to, options = _target(args), _options(args)
    remember_kernels()
    from sail_jax.checkpoint.operations.growing import GrowRequest
    from sail_jax.checkpoint.operations.running import carried_out, planned
    from sail_jax.checkpoint.recipe import tables

    of_methods = ("depth_method", "require_lossless")
    own = ("width", "depth", "set", "spec", "draft", "methods", "plan")
    given = arguments(args, *own, *of_methods) | {"to": to, "out": args.out}
    named = {name: getattr(args, name) for name in of_methods}
    given["options"] = {k: v for k, v in named.items() if v is not None} | options
    if args.spec is not None:
        given["rules"] = tables.read_table(args.spec)
    request = GrowRequest(**given)
    if args.plan:
        with planned(request, run_options(args)) as ready:
            _show(ready)
            show_shares(args.part, ready)
        return
    if args.out is None:
        raise ValueError("OUT is missing: sail-jax grow CKPT OUT")
    carry_out(args, partial(carried_out, request), _tell, [args.path])


def _tell(done: "Grown") -> None:
    """Prints what was grown, and whether the function is preserved."""
    tell_notes(done)
    show(done.growth.report)
    for agreement in done.agreement:
        show(agreement)
    show(f"{outcome(done)}; exactness: {done.verdict}")


def _options(args: Namespace) -> dict[str, object]:
    """Returns the values of --set, and rejects options that no method has."""
    from sail_jax.checks import nearest
    from sail_jax.growth.named import METHODS

    options = dict(args.set)
    names = {"untie", *(name for method in METHODS.values() for name in method.options)}
    for name in options:
        if name not in names:
            raise ValueError(f"--set {name}: no such option{nearest(name, names)}")
    return options


def _target(args: Namespace) -> str | Mapping[str, object]:
    """Returns the target of --to, --width and --depth."""
    factors = {"width": args.width, "depth": args.depth}
    factors = {key: value for key, value in factors.items() if value is not None}
    given = args.to or []
    if bool(given) == bool(factors):
        raise ValueError(
            "give the target: either --to (a config.json, or its entries as KEY=VALUE), or "
            "factors: --width 2x, --depth 2x or both"
        )
    if factors:
        return factors
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    if files := [text for text in given if "=" not in text]:
        raise ValueError(f"--to {files[0]}: a config.json cannot be combined with another --to")
    try:
        entries = [entry(text) for text in given]
    except ArgumentTypeError as error:
        raise ValueError(f"--to: {error}") from error
    keys = [key for key, _ in entries]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--to sets {twice[0]!r} more than once")
    return dict(entries)


def _methods() -> None:
    """Prints the growth methods."""
    from sail_jax.growth.named import METHODS

    width = max(map(len, METHODS))
    for name, method in METHODS.items():
        show(f"{name:{width}}  {method.about} ({method.source})")


def _draft(args: Namespace) -> None:
    """Prints a draft of a table of spaces."""
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.checkpoint.sources.quantised import open_values

    config = None if args.config is None else read_target(args.config)
    with open_values(
        args.path, allow_pickle=args.allow_pickle, offline=args.offline, select=args.select
    ) as checkpoint:
        show(tables.draft_table(checkpoint, config), end="")


def _show(ready: "Growing") -> None:
    """Prints the plan of a growth."""
    about = ready.about
    show(f"{about['method']}, seed {about['seed']}: {about['source']}")
    for key, (old, new) in about["changes"].items():
        show(f"  {key}: {old} to {new}")
    base = ready.larger.base.tensors.values()
    before, after = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors)
        for tensors in (base, ready.larger.tensors.values())
    )
    show(f"reads {storage(before)}, writes {storage(after)} in {len(ready.works)} tensors")
    show(ready.growth.report)
    for note in ready.growth.notes:
        show(f"note: {note}")
    show(ready.summary())
    show(f"exactness: {about['exactness']}")


main = on_inputs(add_arguments, run, MODULES)
