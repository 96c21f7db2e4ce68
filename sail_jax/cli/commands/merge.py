"""Merge checkpoints by a recipe, tensor by tensor.

$ sail-jax merge recipe.yaml merged --report report
"""

import os
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli import mergekit
from sail_jax.cli.carrying import carry_out, outcome, show_shares
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import (
    Parser,
    add_copying,
    add_output,
    add_parts,
    add_strict,
    file,
    on_inputs,
    run_options,
)
from sail_jax.cli.progress import fitted, say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.merging import Merged, Prepared
    from sail_jax.checkpoint.recipe.recipes import Recipe

# The largest number of lines of one kind that a run prints about its result.
MOST = 5


def _recipe(text: str) -> Path:
    """Reads the path of a recipe."""
    if os.path.isdir(text):
        raise ArgumentTypeError(f"expected a YAML file that lists the models; {text} is a folder")
    return file(text)


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        type=_recipe,
        help="a YAML file in mergekit's format, with further keys of sail-jax",
    )
    add_output(parser, "the merge", nargs="?")
    add("--methods", action="store_true", help="list the methods for recipes, and stop")
    add("--plan", action="store_true", help="print what happens to every tensor, and stop")
    add("--full", action="store_true", help="with --plan: print a line for every tensor")
    add(
        "--report",
        metavar="DIR",
        type=Path,
        help="measure the merge, and write report.json and report.html to DIR",
    )
    add_strict(parser)
    add_copying(parser)
    add_parts(parser)
    mergekit.add_options(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint.operations import merging
    from sail_jax.checkpoint.planning import cards
    from sail_jax.checkpoint.recipe.recipes import read_file

    if args.methods:
        show(cards.methods(), end="")
        return
    if args.recipe is None:
        raise ValueError("RECIPE is missing: sail-jax merge RECIPE OUT")
    recipes = [mergekit.seeded(recipe, args.random_seed) for recipe in read_file(args.recipe)]
    if args.plan:
        _plan(args, recipes)
        return
    if args.out is None:
        raise ValueError("OUT is missing: sail-jax merge RECIPE OUT")
    inputs = [x.checkpoint for recipe in recipes for x in recipe.models()]
    several = len(recipes) > 1

    def report(recipe: "Recipe") -> Path | None:
        """Returns the folder of the report on a recipe."""
        named = several and recipe.name and args.report
        return args.report / recipe.name if named else args.report

    operation = partial(
        merging.merge_recipe, recipes, args.out, measure=args.report is not None,
        before=lambda ready: _admit(report(ready.recipe)),
    )  # fmt: skip
    used = {name for recipe in recipes for name in recipe.uses}

    def told(last: "Merged") -> None:
        for merged in (*last.others, last):
            _report(report(merged.recipe), merged)
            _said(merged, f"{merged.recipe.name}: " if several and merged.recipe.name else "")
            # The folder of an intermediate model has been removed by now.
            where = f"{merged.recipe.name}, intermediate" if merged.recipe.name in used else None
            show(outcome(merged, where))
            if where is None and not merged.unchanged:
                for line in _summary(merged):
                    show(fitted(line))

    with mergekit.on_device(args.device):
        carry_out(args, operation, told, inputs)


def _summary(merged: "Merged") -> list[str]:
    """Returns two lines: what was merged, and where to find details."""
    from sail_jax.checkpoint.formats.hub import shortened

    base = merged.recipe.base_model
    refs = dict.fromkeys(source.model for source in merged.recipe.sources())
    models = [str(ref) for ref in refs if ref != base]
    names = shortened(models if base is None else [*models, str(base)])
    on = "" if base is None else f" on {names.pop()}"
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    what = f"merged by {merged.recipe.method}: {', '.join(names[:MOST])}{more}{on}"
    card = merged.out / "README.md"
    inputs = [base.checkpoint] if base is not None else []
    inspect = shlex.join(["sail-jax", "inspect", *inputs, str(merged.out)])
    return [what, f"see {card}, and {inspect}" if card.exists() else f"see {inspect}"]


def _plan(args: Namespace, recipes: Sequence["Recipe"]) -> None:
    """Prints the plan of each recipe in the file."""
    from sail_jax.checkpoint.operations import merging
    from sail_jax.checkpoint.planning import cards

    with merging.previewed(recipes, run_options(args)) as plans:
        for number, (recipe, ready) in enumerate(zip(recipes, plans, strict=True)):
            if len(recipes) > 1:
                uses = f", which uses {', '.join(recipe.uses)}" if recipe.uses else ""
                who = recipe.name or "the last one"
                show(f"{chr(10) * (number > 0)}document {number + 1}, {who}{uses}")
            if isinstance(ready, merging.Prepared):
                show(cards.render(ready.plan, args.full, ready.visits()), end="")
                show(ready.summary())
                _costs(args, ready)
            else:
                show(f"not planned: {ready}")


def _costs(args: Namespace, ready: "Prepared") -> None:
    """Prints the CPU time of a merge, and the bytes that each part reads and writes."""
    from sail_jax.checkpoint.planning import costs

    read_once = sum(work.reads for work in ready.works)
    seconds = costs.cpu_seconds(ready.plan.method, ready.plan.compat, read_once)
    if seconds is not None:
        hours = (
            f"{seconds / 3600:.1f} CPU-hours" if seconds > 3600 else f"{seconds:.0f} CPU-seconds"
        )
        show(f"processor: about {hours}, by {costs.SOURCE}")
    show_shares(args.part, ready)


def _said(merged: "Merged", who: str) -> None:
    """Prints the notes on a merge, each line after `who`."""
    if differing := merged.plan.differing():
        say(fitted(f"{who}{_differing(differing, merged.recipe.integers)}"))
    for kind, lines in (("lost", merged.plan.losses), ("note", merged.plan.notes)):
        for line in lines[:MOST]:
            say(fitted(f"{who}{kind}: {line}"))
        if len(lines) > MOST:
            say(fitted(f"{who}{kind}: and {len(lines) - MOST} more; --plan lists them"))


def _differing(names: Sequence[str], integers: str) -> str:
    """Returns a line about integers that differ between the models."""
    taken = {
        "first": "the first model's are used",
        "last": "the last model's are used",
        "max": "the largest are used",
    }[integers]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"note: integers of {names[0]}{more} differ: {taken} (integers: {integers})"


def _admit(report: Path | None) -> None:
    """Rejects a report folder with other contents, before the merge starts."""
    if report is not None:
        from sail_jax.cli import merge_report

        merge_report.admit(report)


def _report(folder: Path | None, merged: "Merged") -> None:
    """Writes the report of a merge, and prints its paths."""
    if folder is None:
        return
    from sail_jax.checkpoint.sources.requantised import summary
    from sail_jax.cli import merge_report
    from sail_jax.provenance import provenance

    about = {"recipe": merged.recipe.text, "seconds": merged.seconds, **provenance()}
    if merged.requantized:
        about["requantize"] = summary(merged.requantized)
    for path in merge_report.write(folder, merged.plan, merged.records, about):
        show(path)


main = on_inputs(add_arguments, mergekit.answering(run))
