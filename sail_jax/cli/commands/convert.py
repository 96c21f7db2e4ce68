"""Convert MaxText and Tunix trees to Hugging Face tensors, and back.

$ sail-jax convert run model --to hugging-face --config config.json
"""

from argparse import Namespace
from pathlib import Path

from sail_jax.cli.options import (
    Parser,
    add_copying,
    add_input,
    arguments,
    natural,
    on_inputs,
    outcome,
    positive,
    run_options,
)
from sail_jax.cli.progress import Meter, fitted, say, show


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
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


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: As `convert_checkpoint` does.
    """
    from sail_jax.checkpoint.operations.converting import convert_checkpoint

    with Meter(args.quiet) as meter:
        done = convert_checkpoint(**arguments(args), run=run_options(args, meter))
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(f"{done.source} to {args.to}")
    show(outcome(done))


main = on_inputs(add_arguments, run)
