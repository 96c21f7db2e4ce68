"""Replace a checkpoint's tokenizer by another checkpoint's.

$ sail-jax transplant base donor out
"""

from argparse import Namespace

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import (
    MODULES,
    Parser,
    add_copying,
    add_input,
    add_output,
    arguments,
    natural,
    on_inputs,
    outcome,
    run_options,
)
from sail_jax.cli.progress import Meter, fitted, say, show


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add_input(parser, "base", "BASE", "the checkpoint")
    add_input(parser, "donor", "DONOR", "the checkpoint with the new tokenizer")
    add_output(parser, "the result")
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="how to make rows for tokens that BASE lacks: omp (orthogonal matching pursuit), "
        "nearest, mean or zero; default: omp",
    )
    parser.add_argument(
        "--k",
        metavar="N",
        type=natural,
        help="make each new row from at most N rows of shared tokens; default: 64",
    )
    parser.add_argument(
        "--pad-to-multiple-of",
        metavar="N",
        type=natural,
        help="round the number of rows up to a multiple of N",
    )
    add_copying(parser)


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: As `transplant_checkpoint` does.
    """
    remember_kernels()
    from sail_jax.checkpoint import transplant_checkpoint

    with Meter(args.quiet) as meter, compiled_for([args.base], offline=args.offline):
        done = transplant_checkpoint(**arguments(args), run=run_options(args, meter))
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(outcome(done))


main = on_inputs(add_arguments, run, MODULES)
