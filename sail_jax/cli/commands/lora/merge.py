"""Merge adapters of one base into one, exactly or to a rank.

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
        help="the adapters, folders in PEFT's layout; then where the merged one is written",
    )
    add(
        "--weights",
        metavar="W,W,...",
        type=weights,
        help="a weight for each adapter; default: 1 each",
    )
    add(
        "--method",
        metavar="NAME",
        help="merge core matrices by a method of `sail-jax merge --methods`, such as ties; "
        "default: add up the changes",
    )
    add_set(parser)
    add_factors(parser, rank="; default: nothing is cut off, and ranks add up")


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: If no adapter is named, or an option of no method; and as `merge_adapters` does.
    """
    remember_kernels()
    from sail_jax.checkpoint import merge_adapters

    *adapters, out = args.paths
    if not adapters:
        raise ValueError("name the adapters and the output: sail-jax lora merge A B OUT")
    if args.set and args.method is None:
        raise ValueError(f"--set {min(dict(args.set))}: an option of --method, which is not given")
    given = arguments(args, "paths", "set", "full") | dict(args.set)
    with Meter(args.quiet) as meter:
        done = merge_adapters(adapters, out, run=run_options(args, meter), **given)
    table(done.rows, args.full)
    tell(done)


main = on_inputs(add_arguments, run)
