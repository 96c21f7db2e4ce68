"""Replace a checkpoint's tokenizer by another checkpoint's.

$ sail-jax transplant base donor out
"""

from argparse import Namespace
from functools import partial

from sail_jax.cli.carrying import carry_out
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import (
    MODULES,
    Parser,
    add_copying,
    add_input,
    add_output,
    add_parts,
    arguments,
    natural,
    on_inputs,
)


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
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
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint import transplant_checkpoint

    operation = partial(transplant_checkpoint, **arguments(args))
    carry_out(args, operation, inputs=[args.base])


main = on_inputs(add_arguments, run, MODULES)
