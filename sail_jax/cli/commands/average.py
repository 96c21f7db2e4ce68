"""Average the checkpoints of a training run.

$ sail-jax average run averaged --last 5
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sail_jax.cli.carrying import admit_last, carry_out, outcome, show_shares
from sail_jax.cli.options import (
    Parser,
    add_copying,
    add_parts,
    arguments,
    natural,
    on_inputs,
    run_options,
    weights,
)
from sail_jax.cli.progress import show

# These are spelled out, like the choices below, because the library is imported after the arguments
# are read.
SHAPES = ("uniform", "linear", "cosine", "1-sqrt", "1-square", "ema", "wma")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "paths",
        metavar="RUN [OUT]",
        nargs="+",
        help="the folder of a run, a pattern such as 'run/checkpoint-*', or a list of checkpoints; "
        "then the output; default: RUN-average, in the folder that holds RUN",
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument(
        "--steps",
        metavar="A:B:S",
        help="average the steps from A to B, every S steps; A, B and S are optional",
    )
    steps.add_argument("--last", metavar="N", type=natural, help="average the N newest checkpoints")
    steps.add_argument(
        "--window", metavar="W", type=natural, help="average the checkpoints of the last W steps"
    )
    add(
        "--shape",
        choices=SHAPES,
        help="the learning-rate decay that the average imitates; default: uniform",
    )
    add("--decay", metavar="B", type=float, help="the factor of --shape ema, between 0 and 1")
    add(
        "--weights",
        metavar="C,C,...",
        type=weights,
        help="one weight per checkpoint, oldest first; replaces --shape",
    )
    add(
        "--at",
        choices=("points", "means"),
        help="compute the weights from the decay at each checkpoint (points), or from its mean "
        "between two checkpoints (means); default: points",
    )
    add(
        "--state",
        choices=("last", "zero", "drop", "average-moments"),
        help="the optimiser state in the output; default: last for a run, otherwise drop",
    )
    add(
        "--as",
        dest="write_as",
        choices=("run", "params", "safetensors"),
        help="write a run that its trainer can restore, or only the parameters; default: run for "
        "orbax checkpoints",
    )
    add("--plan", action="store_true", help="show what would be done, and stop")
    add("--full", action="store_true", help="with --plan: print a line for every tensor")
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    from sail_jax.checkpoint.operations.averaging import AverageRequest
    from sail_jax.checkpoint.operations.running import carried_out, planned

    *named, last = args.paths
    paths, out = (named, Path(last)) if named else ([last], None)
    given = arguments(args, "paths", "steps", "last", "plan", "full")
    request = AverageRequest(_chosen(args, paths), out, **given)
    if args.plan:
        with planned(request, run_options(args)) as ready:
            show(ready.about())
            if args.full:
                for name, gets in ready.gets.items():
                    show(f"  {name}: {gets}")
            show(ready.summary())
            show(f"output: {ready.out}, as {ready.write_as}")
            if ready.write_as != "run":
                show_shares(args.part, ready)
        return
    if named:
        admit_last(last, args)
    operation = partial(carried_out, request, before=lambda ready: show(ready.about()))
    carry_out(args, operation, lambda done: show(outcome(done)))


def _chosen(args: Namespace, paths: Sequence[str]) -> str | list[str]:
    """Returns the checkpoints that the paths and options select."""
    choice = f"last:{args.last}" if args.last is not None else args.steps
    if choice is None:
        return paths[0] if len(paths) == 1 else list(paths)
    option = "--steps" if args.last is None else "--last"
    if len(paths) > 1:
        raise ValueError(f"{option} chooses from one run, got {len(paths)} paths")
    from sail_jax.checkpoint.formats import runs

    if runs.split(paths[0])[1] is not None:
        raise ValueError(f"{option}: the path already selects steps: {paths[0]}")
    text = f"{paths[0]}@{choice}"
    if runs.split(text)[1] is None:
        raise ValueError(f"{option}: expected A:B:S such as 1000:5000:500, got '{choice}'")
    return text


main = on_inputs(add_arguments, run)
