"""`sail-jax convert`: checkpoints of MaxText, Tunix and Hugging Face made into one another."""

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from sail_jax.cli.options import add_copying, natural, on_inputs, outcome, run_options
from sail_jax.cli.progress import Meter, fitted, say, show


def _positive(text: str) -> float:
    """Reads --lora-alpha."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"expected a positive number, got '{text}'")
    return value


def add_arguments(parser: Any) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CKPT",
        help="the checkpoint: a folder, a file of tensors, or a name on the Hub",
    )
    add("out", metavar="OUT", type=Path, help="where the other checkpoint is written")
    add(
        "--to",
        metavar="WHAT",
        required=True,
        help="what is written: hugging-face, maxtext or tunix",
    )
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help="the network's config.json at Hugging Face, or its folder; default: CKPT/config.json",
    )
    add("--dtype", metavar="NAME", help="the dtype of the output; default: that of CKPT")
    add(
        "--lora-alpha",
        metavar="ALPHA",
        type=_positive,
        help="add the factors that qwix stores next to weights to these, with this alpha",
    )
    add(
        "--no-scan-layers",
        dest="scan_layers",
        action="store_false",
        default=None,
        help="write a tree of MaxText whose layers are not stacked",
    )
    add(
        "--param-scan-axis",
        metavar="AXIS",
        type=int,
        choices=(0, 1),
        help="the axis on which a tree of MaxText stacks its layers, 0 or 1; default: 1",
    )
    add(
        "--vocab-size",
        metavar="ROWS",
        type=natural,
        help="rows of the vocabulary of the tree that is written, with padding",
    )
    add(
        "--rope",
        metavar="ORDER",
        choices=("halves", "interleaved"),
        help="how MaxText lays out pairs of rotated units: halves or interleaved; default: "
        "interleaved for Llama 3.1 and later",
    )
    add_copying(parser)


def run(args: Namespace) -> int:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      The exit code, 0.

    Raises:
      ValueError: As `convert_checkpoint` does.
    """
    from sail_jax.checkpoint.operations.converting import convert_checkpoint

    names = ("scan_layers", "param_scan_axis", "vocab_size", "rope")
    options = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    with Meter(args.quiet) as meter:
        done = convert_checkpoint(
            args.checkpoint, args.out, args.to, config=args.config, dtype=args.dtype,
            lora_alpha=args.lora_alpha, run=run_options(args, meter), **options,
        )  # fmt: skip
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(f"{done.source} to {args.to}")
    show(outcome(done, done.tensors))
    return 0


main = on_inputs(add_arguments, run)
