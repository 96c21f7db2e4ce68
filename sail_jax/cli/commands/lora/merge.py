"""Merge adapters of one base into one adapter, exactly or truncated to a rank.

$ sail-jax lora merge adapter-a adapter-b merged --rank 16
"""

from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING

from sail_jax.cli.carrying import admit_last, carry_out, tell
from sail_jax.cli.factors import add_factors, table
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, add_set, arguments, on_inputs, weights

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.adapting import MergedAdapters


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "paths",
        metavar="ADAPTER ... OUT",
        nargs="+",
        help="the adapters, folders in PEFT's layout; then the output folder",
    )
    add(
        "--weights",
        metavar="W,W,...",
        type=weights,
        help="one weight per adapter; default: 1 each",
    )
    add(
        "--method",
        metavar="NAME",
        help="merge the core matrices by a method of `sail-jax merge --methods`, such as ties; "
        "default: add up the changes",
    )
    add_set(parser)
    add_factors(parser, rank="; default: no truncation, and the ranks add up")


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint import merge_adapters

    *adapters, out = args.paths
    if not adapters:
        raise ValueError("adapters or OUT are missing: sail-jax lora merge A B OUT")
    if args.set and args.method is None:
        raise ValueError(f"--set {min(dict(args.set))} needs --method")
    admit_last(out, args)
    given = arguments(args, "paths", "set", "full") | dict(args.set)

    def told(done: "MergedAdapters") -> None:
        table(done.rows, args.full)
        tell(done)

    carry_out(args, partial(merge_adapters, adapters, out, **given), told)


main = on_inputs(add_arguments, run)
