"""Average the checkpoints of a training run.

$ sail-jax average run averaged --last 5
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from sail_jax.cli.options import (
    Parser,
    add_copying,
    add_parts,
    arguments,
    natural,
    on_inputs,
    outcome,
    run_options,
    show_shares,
    weights,
)
from sail_jax.cli.processes import in_parts
from sail_jax.cli.progress import Meter, show

# Written out, as are the choices below: the library is imported after the arguments are read.
SHAPES = ("uniform", "linear", "cosine", "1-sqrt", "1-square", "ema", "wma")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "paths",
        metavar="RUN [OUT]",
        nargs="+",
        help="the folder of a run, a pattern such as 'run/checkpoint-*', or a list of checkpoints; "
        "then where the average is written, by default beside the run: RUN-average",
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument(
        "--steps",
        metavar="A:B:S",
        help="average the steps from A to B, every S; A, B or S may be left out",
    )
    steps.add_argument("--last", metavar="N", type=natural, help="average the N newest checkpoints")
    steps.add_argument(
        "--window", metavar="W", type=natural, help="average the checkpoints of the last W steps"
    )
    add(
        "--shape",
        choices=SHAPES,
        help="the decay of the learning rate for which the average stands; default: uniform",
    )
    add("--decay", metavar="B", type=float, help="the factor of --shape ema, between 0 and 1")
    add(
        "--weights",
        metavar="C,C,...",
        type=weights,
        help="a weight for each checkpoint, oldest first, in place of a shape",
    )
    add(
        "--at",
        choices=("points", "means"),
        help="read the decay at each checkpoint, or as a mean between two; default: points",
    )
    add(
        "--state",
        choices=("last", "zero", "drop", "average-moments"),
        help="what becomes of the optimiser's state; default: last in a run, else drop",
    )
    add(
        "--as",
        dest="write_as",
        choices=("run", "params", "safetensors"),
        help="write a run that its trainer restores, or the parameters alone; default: run for the "
        "checkpoints of orbax",
    )
    add("--plan", action="store_true", help="show what would be done, and stop")
    add("--full", action="store_true", help="with --plan: print a line for every tensor")
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> bool | None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      Of a part, whether the output was finished before; None of anything else.

    Raises:
      ValueError: As `average_checkpoints` does.
    """
    from sail_jax.checkpoint.operations import averaging

    *named, last = args.paths
    paths, out = (named, Path(last)) if named else ([last], None)
    given = arguments(args, "paths", "steps", "last", "plan", "full")
    checkpoints = _chosen(args, paths)
    if args.plan:
        with averaging.averaging(checkpoints, out, run=run_options(args), **given) as ready:
            show(ready.about())
            if args.full:
                for name, gets in ready.gets.items():
                    show(f"  {name}: {gets}")
            show(ready.summary())
            show(f"output: {ready.out}, as {ready.write_as}")
            if ready.write_as != "run":
                show_shares(Namespace(**{**vars(args), "out": ready.out}), ready)
        return None
    with Meter(args.quiet) as meter:
        done = averaging.average_checkpoints(
            checkpoints, out, run=run_options(args, meter),
            before=lambda ready: show(ready.about()), **given,
        )  # fmt: skip
    show(outcome(done, part=args.part))
    return done.unchanged


def _chosen(args: Namespace, paths: Sequence[str]) -> str | list[str]:
    """The checkpoints that paths and options name together."""
    choice = f"last:{args.last}" if args.last is not None else args.steps
    if choice is None:
        return paths[0] if len(paths) == 1 else list(paths)
    option = "--steps" if args.last is None else "--last"
    if len(paths) > 1:
        raise ValueError(f"{option} chooses from one run, got {len(paths)} paths")
    from sail_jax.checkpoint.formats import runs

    if runs.split(paths[0])[1] is not None:
        raise ValueError(f"{option}: the path names steps already, {paths[0]}")
    text = f"{paths[0]}@{choice}"
    if runs.split(text)[1] is None:
        raise ValueError(f"{option}: expected A:B:S such as 1000:5000:500, got '{choice}'")
    return text


main = on_inputs(add_arguments, in_parts(run))
