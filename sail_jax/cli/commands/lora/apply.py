"""Merge an adapter into its base model.

$ sail-jax lora apply base adapter model
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli.carrying import carry_out, tell
from sail_jax.cli.options import Parser, add_copying, arguments, on_inputs
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.adapting import Applied


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("base", metavar="BASE", help="the model on which the adapter was trained")
    add("adapter", metavar="ADAPTER", help="the adapter, a folder in PEFT's layout")
    add("out", metavar="OUT", type=Path, help="the output path of the merged model")
    add_copying(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    from sail_jax.checkpoint import apply_adapter

    def told(done: "Applied") -> None:
        show(f"{done.changed} of {done.tensors} tensors changed")
        tell(done)

    carry_out(args, partial(apply_adapter, **arguments(args)), told)


main = on_inputs(add_arguments, run)
