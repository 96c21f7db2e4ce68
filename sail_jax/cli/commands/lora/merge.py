"""Merge adapters of one base into one adapter, exactly or truncated to a rank.

$ sail-jax lora merge adapter-a adapter-b merged --rank 16
"""

from argparse import Namespace

from sail_jax.cli.factors import add_factors, table, tell
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, add_set, arguments, on_inputs, run_options, weights
from sail_jax.cli.progress import Meter


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
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
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: If no adapter is given, or --set lacks --method; and as `merge_adapters` does.
    """
    remember_kernels()
    from sail_jax.checkpoint import merge_adapters

    *adapters, out = args.paths
    if not adapters:
        raise ValueError("adapters or OUT are missing: sail-jax lora merge A B OUT")
    if args.set and args.method is None:
        raise ValueError(f"--set {min(dict(args.set))} needs --method")
    given = arguments(args, "paths", "set", "full") | dict(args.set)
    with Meter(args.quiet) as meter:
        done = merge_adapters(adapters, out, run=run_options(args, meter), **given)
    table(done.rows, args.full)
    tell(done)


main = on_inputs(add_arguments, run)
