"""Merge an adapter into its base model.

$ sail-jax lora apply base adapter model
"""

from argparse import Namespace
from pathlib import Path

from sail_jax.cli.factors import tell
from sail_jax.cli.options import Parser, add_copying, arguments, on_inputs, run_options
from sail_jax.cli.progress import Meter, show


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add("base", metavar="BASE", help="the model on which the adapter was trained")
    add("adapter", metavar="ADAPTER", help="the adapter, a folder in PEFT's layout")
    add("out", metavar="OUT", type=Path, help="the output path of the merged model")
    add_copying(parser)


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: As `apply_adapter` does.
    """
    from sail_jax.checkpoint import apply_adapter

    with Meter(args.quiet) as meter:
        done = apply_adapter(**arguments(args), run=run_options(args, meter))
    show(f"{done.changed} of {done.tensors} tensors changed")
    tell(done)


main = on_inputs(add_arguments, run)
