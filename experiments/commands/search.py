"""Search for a merge on held-out examples, and test it on others.

$ sail-jax search ex/expert-0 ex/expert-1 --base ex/base --data ex/held_out --out found
"""

import atexit
import contextlib
import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sail_jax.cli.options import (
    Parser,
    add_offline,
    add_on,
    add_seed,
    function,
    natural,
    on_inputs,
    size,
)
from sail_jax.cli.progress import say, show

if TYPE_CHECKING:
    from sail_jax.searching import Arm, Outcome, Trial

JOURNAL, RECORD, PAGE, RECIPE = "trials.jsonl", "answer.json", "answer.html", "recipe.yaml"


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "models",
        metavar="MODEL",
        nargs="+",
        help="checkpoints to merge, two or more; recipes (.yaml) are scored without changes",
    )
    add("--base", metavar="CKPT", help="the checkpoint that the models were fine-tuned from")
    add(
        "--data",
        metavar="FILE",
        nargs="+",
        default=[],
        help="held-out examples, a file for each task: .npz, or .jsonl of questions or texts",
    )
    add("--tokenizer", metavar="FILE", help="the models' tokenizer.json, for .jsonl")
    add("--config", metavar="FILE", help="the models' config.json; default: the first model's")
    add(
        "--score",
        metavar="MODULE:FUNCTION",
        type=function,
        help="a scoring function, larger is better: with --data, function(params, batch) returns a "
        "score for each example; without, function(path) does so for a checkpoint",
    )
    add(
        "--command",
        metavar="WORDS",
        help="a command that contains {checkpoint} and prints a line of JSON for each example: "
        '{"example": "7", "score": 0.5, "task": "arc"}',
    )
    add("--methods", metavar="M,M", help="methods to try; default: all that fit, and weights")
    add(
        "--groups",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="also try a scale for each of these groups of tensors, such as '*.attn.*'",
    )
    add(
        "--refine",
        choices=("cmaes", "gradient"),
        default="cmaes",
        help="how to refine the best merge: by scores alone, or by gradients if it has them",
    )
    add(
        "--budget",
        metavar="N",
        type=natural,
        default=60,
        help="how many times all examples of the search may be scored; default: %(default)s",
    )
    add("--seconds", metavar="S", type=float, default=math.inf, help="start no new trial after S")
    add(
        "--judge",
        metavar="F",
        type=float,
        default=0.5,
        help="the fraction of examples kept for the final comparison; default: %(default)s",
    )
    add_seed(parser, "all draws", 0)
    add("--out", metavar="DIR", type=Path, help=f"write {PAGE}, {RECORD} and {RECIPE} there")
    add("--resume", action="store_true", help="continue the search in --out")
    add("--plan", action="store_true", help="print the plan of the search, and exit")
    add("--max-memory", metavar="BYTES", type=size, help="the memory limit for written merges")
    add("--allow-pickle", action="store_true", help="read PyTorch's .bin, without running its code")
    add_on(parser, "score candidates at the same time")
    add_offline(parser)


class _Search(NamedTuple):
    """A search that is ready to start.

    Attributes:
      measure: The `Measure` that scores models and merges.
      n: The number of examples.
      tasks: The task of each example; None for one task.
      arms: The methods to try.
      models: The paths of the models.
      base: The path of their base; None without one.
      names: The names of the models.
      recipes: The recipes to score without changes, by name.
      whole: Whether each candidate is always scored on all examples.
    """

    measure: Any
    n: int
    tasks: Sequence[str] | None
    arms: Sequence["Arm"]
    models: list[str]
    base: str | None
    names: list[str]
    recipes: dict[str, Path]
    whole: bool


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: If the options are inconsistent, or a checkpoint or a file of examples cannot be
        read or scored.
    """
    from sail_jax import disk, searching
    from sail_jax.cluster import connected
    from sail_jax.searching.aside import SideBySide
    from sail_jax.searching.journal import Journal

    _check(args)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sail-jax-search-"))
        ready = _ready(args, Path(folder))
        if args.plan:
            show(_plan(ready, args))
            return
        journal, identity = None, {}
        if args.out is not None:
            identity = _identity(args, ready)
            with disk.explained("write to", args.out):
                args.out.mkdir(parents=True, exist_ok=True)
            journal = Journal(args.out / JOURNAL, identity)
            if args.resume:
                journal.resume()
            elif any(args.out.iterdir()):
                raise disk.RefusedError(f"{args.out} is not empty; --resume continues a search")
            journal.begin()
        measure = ready.measure
        if args.on is not None:
            if args.refine == "gradient":
                raise ValueError("--on: --refine gradient computes here; use --refine cmaes")
            again = Namespace(**{**vars(args), "on": None})
            measure = SideBySide(partial(_measured, again), stack.enter_context(connected(args.on)))
        seen = _Seen(ready, journal.add if journal is not None else None)
        outcome = searching.search_with(
            measure,
            ready.n,
            ready.arms,
            ready.names,
            with_base=ready.base is not None,
            tasks=ready.tasks,
            whole=ready.whole,
            descend=ready.measure.descend if args.refine == "gradient" else None,
            budget=args.budget,
            seconds=args.seconds,
            judge=args.judge,
            seed=args.seed,
            history=() if journal is None else journal.trials,
            on_trial=seen,
        )
    show(str(outcome))
    if args.out is not None:
        _write(args.out, ready, outcome, identity, args.seed)


def _measured(args: Namespace) -> Any:
    """Makes the measure of a search, in a worker."""
    folder = tempfile.TemporaryDirectory(prefix="sail-jax-search-")
    atexit.register(folder.cleanup)
    return _ready(args, Path(folder.name)).measure


def _write(
    out: Path, ready: _Search, outcome: "Outcome", identity: Mapping[str, Any], seed: int
) -> None:
    """Writes the recipe of the best merge, the record and the page."""
    from experiments.pages import search as pages
    from sail_jax import disk
    from sail_jax.checkpoint.operations import searching as operations

    recipe = None
    if outcome.found.name in ready.recipes:
        recipe = ready.recipes[outcome.found.name].read_text()
    else:
        with contextlib.suppress(ValueError):  # recipes cannot express scales of groups
            recipe = operations.recipe_of(
                outcome.arm, outcome.found.options, ready.models, ready.base, seed=seed
            )
    record = pages.record(outcome, identity)
    if recipe is not None:
        disk.write_atomic(out / RECIPE, recipe.encode())
    disk.write_atomic(out / RECORD, pages.as_json(record))
    disk.write_atomic(out / PAGE, pages.page(outcome, record, recipe).encode())
    show(out / PAGE)
    if recipe is not None and outcome.is_merge:
        show(f"sail-jax merge {out / RECIPE} OUT")


def _check(args: Namespace) -> None:
    """Checks that the options are consistent."""
    if args.score and args.command:
        raise ValueError("--score and --command: give only one of them")
    if args.command and args.data:
        raise ValueError("--command has its own examples: leave out --data")
    if not (args.data or args.score or args.command):
        raise ValueError("expected --data, --score or --command, which score the models")
    if args.resume and args.out is None:
        raise ValueError("--resume needs --out, the folder of the search")
    recipes = any(map(_is_recipe, args.models))
    if (args.groups or args.refine == "gradient") and (recipes or not args.data):
        raise ValueError("--groups and --refine gradient need --data and models without recipes")


def _is_recipe(path: str) -> bool:
    return path.endswith((".yaml", ".yml"))


def _ready(args: Namespace, folder: Path) -> _Search:
    """Opens the models and the examples, and lists the methods to try."""
    from sail_jax import searching
    from sail_jax.checkpoint.operations import searching as operations
    from sail_jax.checkpoint.operations.running import RunOptions

    recipes = {Path(x).stem: Path(x) for x in args.models if _is_recipe(x)}
    models = [x for x in args.models if not _is_recipe(x)]
    base = args.base
    if recipes:
        named, of_recipes = operations.models_of(recipes.values())
        models, base = models or named, base or of_recipes
    names = [Path(x).name for x in models]
    names = names if len({*names, "base"}) > len(names) else models
    methods = None if args.methods is None else args.methods.split(",")
    count, has_base = len(models), base is not None
    arms = [
        *searching.arms(count, has_base, methods, groups=args.groups, seed=args.seed),
        *map(operations.recipe_arm, recipes),
    ]
    options = RunOptions(
        max_memory=args.max_memory, allow_pickle=args.allow_pickle, offline=args.offline
    )
    if args.data:
        measure, n, tasks = _in_memory(args, models, base, options)
    else:
        scorer = (
            operations.by_command(args.command)
            if args.command
            else operations.by_function(args.score)
        )
        measure = operations.InFolders(models, base, scorer, options, folder)
        n, tasks = len(measure.examples), measure.tasks
    if recipes:
        measure = operations.WithRecipes(measure, recipes, options, folder)
    return _Search(measure, n, tasks, arms, models, base, names, recipes, not args.data)


def _in_memory(
    args: Namespace, models: Sequence[str], base: str | None, options: Any
) -> tuple[Any, int, Sequence[str]]:
    """Returns the function that scores tensors in memory, the number of examples, and their
    tasks."""
    from experiments.measures import held_out
    from sail_jax.checkpoint.operations import searching as operations
    from sail_jax.checkpoint.operations import trying
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.searching.searches import InMemory

    examples = held_out.read(args.data, args.tokenizer)
    paths = [*models] if base is None else [*models, base]
    score: Callable[..., Any]
    if args.score is None:
        config = None if args.config is None else read_target(args.config)
        running = trying.running(
            paths,
            held_out.examples(examples),
            config,
            run=options,
        )
        tensors = running.models
        score, data = held_out.score(running, examples)
    else:
        tensors = [operations.loaded(path, run=options) for path in paths]
        score, data = args.score, examples.data
    own, start = tensors[: len(models)], None if base is None else tensors[-1]
    n = len(examples.tasks)
    return InMemory(own, start, score, data, min(n, 32)), n, examples.tasks


class _Seen:
    """Records each trial, and prints the best score so far."""

    def __init__(self, ready: _Search, add: Callable[["Trial"], None] | None):
        self._ready, self._add = ready, add
        self._best, self._said, self._count = -math.inf, 0.0, 0

    def __call__(self, trial: "Trial") -> None:
        if self._add is not None:
            self._add(trial)
        self._count += 1
        if len(trial.examples) < self._ready.n * 0.1:
            return
        better = trial.score > self._best
        self._best = max(self._best, trial.score)
        if time.monotonic() - self._said > 5 or (better and time.monotonic() - self._said > 1):
            self._said = time.monotonic()
            say(f"  trial {self._count}: {trial.name} {trial.score:.4g}; best {self._best:.4g}")


def _plan(ready: _Search, args: Namespace) -> str:
    """Describes the plan of the search."""
    from sail_jax import searching

    numbers, tasks = searching.task_numbers(ready.tasks, ready.n)
    first, second = searching.parts(numbers, args.judge, args.seed)
    lines = [
        f"models: {', '.join(ready.names)}; base: {ready.base or 'none'}",
        f"examples: {len(first)} to choose a merge, {len(second)} to judge it",
        f"budget: {args.budget} scores of {len(first)} examples",
        f"methods: {len(ready.arms)}",
    ]
    if len(tasks) > 1:
        lines.insert(2, f"tasks: {', '.join(tasks)}")
    for arm in ready.arms:
        told = ", ".join(f"{key} in {pair}" for key, pair in arm.bounds.items())
        lines.append(f"  {arm.name}{f': {told}' if told else ''}")
    return "\n".join(lines)


def _identity(args: Namespace, ready: _Search) -> dict[str, Any]:
    """Returns the options that must be equal when a search is resumed."""
    from sail_jax import disk
    from sail_jax.checkpoint.formats.open import open_checkpoint
    from sail_jax.checkpoint.operations.running import state_of
    from sail_jax.checkpoint.operations.trying import MOST

    read = [*args.data, *ready.recipes.values()]
    with contextlib.ExitStack() as stack:
        inputs = [
            stack.enter_context(
                open_checkpoint(path, allow_pickle=args.allow_pickle, offline=args.offline)
            )
            for path in (*ready.models, *([] if ready.base is None else [ready.base]))
        ]
        files = state_of(inputs)
    return {
        "models": ready.models,
        "base": ready.base,
        "data": list(args.data),
        "files": files
        | {str(path): disk.sha256(disk.read_bytes(Path(path), MOST)) for path in read},
        "score": None if args.score is None else f"{args.score.__module__}:{args.score.__name__}",
        "command": args.command,
        "arms": [arm.name for arm in ready.arms],
        "groups": list(args.groups),
        "refine": args.refine,
        "budget": args.budget,
        "judge": args.judge,
        "seed": args.seed,
    }


main = on_inputs(add_arguments, run)
