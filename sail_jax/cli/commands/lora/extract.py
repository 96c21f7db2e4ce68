"""Extract a low-rank adapter from a fine-tuned model and its base.

$ sail-jax lora extract base tuned adapter --rank 16
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli.carrying import carry_out, tell
from sail_jax.cli.factors import add_factors, table
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, arguments, on_inputs, reader
from sail_jax.cli.progress import fitted, say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.adapting import Extracted

energy = reader(float, lambda x: 0 < x <= 1, "a number above 0, up to 1")


def patterns(text: str) -> list[str]:
    """Reads --modules-to-save: patterns separated by commas."""
    return [pattern for pattern in text.split(",") if pattern]


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("base", metavar="BASE", help="the model before fine-tuning: a path, or a name on the Hub")
    add("tuned", metavar="TUNED", help="the model after fine-tuning")
    add("out", metavar="OUT", type=Path, help="the output folder of the adapter")
    add(
        "--energy",
        metavar="E",
        type=energy,
        help="keep this fraction of the squared singular values of each change, such as 0.9; "
        "with --rank, the smaller rank is used",
    )
    add(
        "--modules-to-save",
        metavar="NAMES",
        type=patterns,
        help="store changed modules in full, such as 'lm_head,*norm'; the word rest selects all "
        "tensors without factors, such as norms and biases",
    )
    add_factors(parser, rank="")


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint import extract_adapter

    def told(done: "Extracted") -> None:
        table(done.rows, args.full)
        if done.saved:
            show(f"stored in full: {len(done.saved)} tensors")
        for name, reason in done.lost.items():
            say(fitted(f"lost: {name} ({reason})"))
        if count := len(done.lost):
            say(f"note: {count} changed tensors are lost; --modules-to-save rest stores them")
        tell(done)

    carry_out(args, partial(extract_adapter, **arguments(args, "full")), told)


main = on_inputs(add_arguments, run)
