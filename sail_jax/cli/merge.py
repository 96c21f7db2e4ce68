"""`sail-jax merge`: carries out a recipe, with a plan beforehand and a report after."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import add_copying, file, on_inputs, outcome, run_options
from sail_jax.cli.progress import Meter, fitted, say, show

# The most bytes of a recipe.
LARGEST_RECIPE = 1 << 20
# The most lines of one kind that a run prints about its outcome.
MOST = 5


def add_arguments(parser: Any) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        type=file,
        help="a YAML file as mergekit has it; our own keys may be added",
    )
    add(
        "out",
        metavar="OUT",
        nargs="?",
        type=Path,
        help="where the merge is written: a folder, or a .safetensors or .npz file",
    )
    add("--methods", action="store_true", help="list the methods that a recipe may name, and stop")
    add("--plan", action="store_true", help="show what would be done to every tensor, and stop")
    add("--full", action="store_true", help="with --plan: print a line for every tensor")
    add(
        "--report",
        metavar="DIR",
        type=Path,
        help="measure what was merged, and write report.json and report.html there",
    )
    add(
        "--allow-crimes",
        action="store_true",
        help="merge networks of other architectures, and outputs that contradict their config.json",
    )
    add_copying(parser)


def read_recipe(path: Path) -> Any:
    """Reads the recipe in a file.

    Args:
      path: A YAML file of at most `LARGEST_RECIPE` bytes.

    Returns:
      The `Recipe`.

    Raises:
      RecipeError: If the file holds no valid recipe.
      StoreError: If it cannot be read, or is too long.
    """
    from sail_jax import disk
    from sail_jax.checkpoint.recipe.recipes import parse

    return parse(disk.read_bytes(path, LARGEST_RECIPE), str(path))


def run(args: Namespace) -> int:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      The exit code, 0.

    Raises:
      ValueError: If the recipe or the output is not named, and as `merge_recipe` does.
    """
    remember_kernels()
    from sail_jax.checkpoint.operations import merging
    from sail_jax.checkpoint.planning import cards

    if args.methods:
        show(cards.methods(), end="")
        return 0
    if args.recipe is None:
        raise ValueError("name a recipe: sail-jax merge RECIPE OUT")
    recipe = read_recipe(args.recipe)
    if args.plan:
        with merging.prepared(recipe, _options(args)) as ready:
            show(cards.render(ready.plan, args.full, merging.visits(ready.works)), end="")
            show(ready.summary())
        return 0
    if args.out is None:
        raise ValueError("name the output: sail-jax merge RECIPE OUT")
    inputs = [model.checkpoint for model in recipe.models()]
    with Meter(args.quiet) as meter, compiled_for(inputs, offline=args.offline):
        merged = merging.merge_recipe(
            recipe, args.out, measure=args.report is not None, run=_options(args, meter),
            before=lambda ready: _admit(args.report),
        )  # fmt: skip
    if args.report is not None:
        _report(args, recipe, merged)
    if differing := merged.plan.differing():
        say(fitted(_differing(differing, recipe.integers)))
    for kind, lines in (("lost", merged.plan.losses), ("note", merged.plan.notes)):
        for line in lines[:MOST]:
            say(fitted(f"{kind}: {line}"))
        if len(lines) > MOST:
            say(f"{kind}: and {len(lines) - MOST} more, which --plan lists")
    show(outcome(merged, len(merged.plan.treatments)))
    return 0


def _options(args: Namespace, progress: Any = None) -> Any:
    """The options of the run."""
    return dataclasses.replace(run_options(args, progress), allow_crimes=args.allow_crimes)


def _differing(names: Sequence[str], integers: str) -> str:
    """A line about integers that differ between models."""
    taken = {
        "first": "those of the first are taken",
        "last": "those of the last are taken",
        "max": "the largest are taken",
    }[integers]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"note: integers of {names[0]}{more} differ: {taken} (integers: {integers})"


def _admit(report: Path | None) -> None:
    """Refuses a folder for the report that holds something else, before the merge starts."""
    if report is not None:
        from sail_jax.cli import merge_report

        merge_report.admit(report)


def _report(args: Namespace, recipe: Any, merged: Any) -> None:
    """Writes the report of a merge, and prints where."""
    from sail_jax.cli import merge_report
    from sail_jax.provenance import provenance

    about = {"recipe": recipe.text, "seconds": merged.seconds, **provenance()}
    for path in merge_report.write(args.report, merged.plan, merged.records, about):
        show(path)


main = on_inputs(add_arguments, run)
