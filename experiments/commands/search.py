"""`sail-jax search`: searches for a merge on held-out examples, and states the evidence for it."""

import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sail_jax.cli.options import Parser, add_offline, function, natural, on_inputs, seed, size
from sail_jax.cli.progress import say, show

if TYPE_CHECKING:
    from sail_jax.searching import Arm, Outcome, Trial

SCHEMA = "sail-jax search 1"


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "models",
        metavar="MODEL",
        nargs="+",
        help="checkpoints to merge, two or more; recipes (.yaml) among them are tried as they are",
    )
    add("--base", metavar="CKPT", help="what the models were tuned from")
    add(
        "--data",
        metavar="FILE",
        nargs="+",
        default=[],
        help="held-out examples, a file for each task: .npz, or .jsonl of questions or texts",
    )
    add("--tokenizer", metavar="FILE", type=Path, help="the models' tokenizer.json, for .jsonl")
    add("--config", metavar="FILE", help="the models' config.json; default: beside the first")
    add(
        "--score",
        metavar="MODULE:FUNCTION",
        help="with --data: function(params, batch), a score for each example, larger is better; "
        "without: function(path), the same for a checkpoint",
    )
    add(
        "--command",
        metavar="WORDS",
        help="a command with {checkpoint} in it, which prints a line of JSON for each example: "
        '{"example": "7", "score": 0.5, "task": "arc"}',
    )
    add("--methods", metavar="M,M", help="what to try; default: all methods that fit, and weights")
    add(
        "--groups",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="also try a scale for each of these groups of tensors, such as '*.attn.*'",
    )
    add(
        "--budget",
        metavar="N",
        type=natural,
        default=60,
        help="how often merges may be scored on all examples of the search; default: %(default)s",
    )
    add("--seconds", metavar="S", type=float, default=math.inf, help="try nothing new after this")
    add(
        "--judge",
        metavar="F",
        type=float,
        default=0.5,
        help="the fraction of examples that only the final comparison sees; default: %(default)s",
    )
    add("--seed", metavar="N", type=seed, default=0, help="seed of all draws; default: %(default)s")
    add("--out", metavar="DIR", type=Path, help="write a page, a record and the recipe there")
    add("--resume", action="store_true", help="go on with a search in --out")
    add("--plan", action="store_true", help="print what would be tried, and stop")
    add("--max-memory", metavar="BYTES", type=size, help="for merges that are written")
    add("--allow-pickle", action="store_true", help="read PyTorch's .bin, without running it")
    add_offline(parser)


def run(args: Namespace) -> int:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      The exit code, 0.

    Raises:
      ValueError: If the options do not fit one another, or a checkpoint or a file of examples
        cannot be read.
    """
    from experiments.pages import search as pages

    if args.score and args.command:
        raise ValueError("--score and --command: give one of them")
    if args.command and args.data:
        raise ValueError("--command has its own examples: leave out --data")
    if not (args.data or args.score or args.command):
        raise ValueError("expected --data, --score or --command, which score the models")
    if args.resume and args.out is None:
        raise ValueError("--resume: give --out, the folder of the search")
    return pages.main(args, _prepared(args))


def _prepared(args: Namespace) -> Any: ...


main = on_inputs(add_arguments, run)
