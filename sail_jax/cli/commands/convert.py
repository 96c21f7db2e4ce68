"""Convert MaxText and Tunix trees to Hugging Face tensors, and back.

$ sail-jax convert run model --to hugging-face --config config.json
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli.carrying import carry_out, outcome, tell_notes
from sail_jax.cli.options import (
    Parser,
    add_copying,
    add_input,
    add_parts,
    arguments,
    natural,
    on_inputs,
    positive,
)
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.converting import Converted


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add_input(parser, "path", "CKPT", "the checkpoint")
    add("out", metavar="OUT", type=Path, help="the output path")
    add(
        "--to",
        metavar="WHAT",
        required=True,
        help="the output layout: hugging-face, maxtext or tunix",
    )
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help="the network's Hugging Face config.json, or its folder; default: CKPT/config.json",
    )
    add("--dtype", metavar="NAME", help="the dtype of the output; default: the dtype of CKPT")
    add(
        "--lora-alpha",
        metavar="ALPHA",
        type=positive,
        help="merge the LoRA factors that qwix stores into the weights, with this alpha",
    )
    add(
        "--no-scan-layers",
        dest="scan_layers",
        action="store_false",
        default=None,
        help="write a MaxText tree without stacked layers",
    )
    add(
        "--param-scan-axis",
        metavar="AXIS",
        type=int,
        choices=(0, 1),
        help="the axis on which MaxText stacks its layers, 0 or 1; default: 1",
    )
    add(
        "--vocab-size",
        metavar="ROWS",
        type=natural,
        help="vocabulary rows of the output, including padding",
    )
    add(
        "--rope",
        metavar="ORDER",
        choices=("halves", "interleaved"),
        help="how MaxText orders the rotated pairs: halves or interleaved; default: interleaved "
        "for Llama 3.1 and later",
    )
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    from sail_jax.checkpoint import convert_checkpoint

    def told(done: "Converted") -> None:
        tell_notes(done)
        show(f"{done.source} to {args.to}")
        show(outcome(done))

    carry_out(args, partial(convert_checkpoint, **arguments(args)), told)


main = on_inputs(add_arguments, run)
