"""Searches for a merge of checkpoints, scored in memory, by a function or by a command.

If scores can be computed from tensors, all models are in memory and no candidate is written.
Otherwise each candidate is written to a folder, scored there and removed. It is then scored on all
examples at once, since such scores are not available for a part of them.
"""

import json
import math
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float, Int

from sail_jax import searching
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.operations.merging import merge_checkpoints, merge_recipe
from sail_jax.checkpoint.operations.running import DEFAULTS, RunOptions
from sail_jax.checkpoint.operations.trying import in_float32
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.recipes import read_file
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.merging.merge import Merge
from sail_jax.searching.arms import Arm
from sail_jax.searching.journal import plain

Path_ = str | Path


class Scores(NamedTuple):
    """The scores of one checkpoint from a scorer of folders.

    Attributes:
      examples: The name of each example, in a fixed order.
      scores: The score of each example; larger is better.
      tasks: The task of each example; None for one task.
    """

    examples: tuple[str, ...]
    scores: Float[np.ndarray, "n"]
    tasks: tuple[str, ...] | None = None


Scorer = Callable[[Path], Scores]


def by_function(function: Callable[[str], Any]) -> Scorer:
    """Makes a scorer from a function that takes the path of a checkpoint.

    Args:
      function: Takes the path, and returns a score for each example, in the same order each time.

    Returns:
      The scorer.
    """

    def scored(path: Path) -> Scores:
        scores = np.asarray(function(str(path)), float)
        if scores.ndim != 1:
            raise CheckpointError(
                f"score: expected a number for each example, got shape {list(scores.shape)}"
            )
        return Scores(tuple(map(str, range(len(scores)))), scores)

    return scored


def by_command(command: str, *, timeout: float | None = None) -> Scorer:
    """Makes a scorer from a command that prints a line of JSON for each example.

    The command runs without a shell. Lines other than a JSON object with a "score" are skipped,
    because programs also print other output.

    Args:
      command: The command, with "{checkpoint}" in place of the path. It prints lines such as
        {"example": "arc/17", "score": 0.0, "task": "arc"}; the task may be left out.
      timeout: The largest number of seconds of one call; None for no limit.

    Returns:
      The scorer.

    Raises:
      ValueError: If "{checkpoint}" is missing in the command.
    """
    words = shlex.split(command)
    if not any("{checkpoint}" in word for word in words):
        raise ValueError(f"command: expected {{checkpoint}} in it, got {command!r}")

    def scored(path: Path) -> Scores:
        filled = [word.replace("{checkpoint}", str(path)) for word in words]
        try:
            done = subprocess.run(filled, capture_output=True, timeout=timeout, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CheckpointError(f"command: {words[0]}: {error}") from error
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            said = f": {last[0]}" if last else ""
            raise CheckpointError(f"command: {words[0]} ended with {done.returncode}{said}")
        return _read_scores(done.stdout.decode(errors="replace"), words[0])

    return scored


def _read_scores(text: str, command: str) -> Scores:
    """Reads the lines that a command printed."""
    found: dict[str, tuple[float, str | None]] = {}
    for line in text.splitlines():
        record = _record(line)
        if record is None:
            continue
        name, score, task = str(record["example"]), record["score"], record.get("task")
        if name in found:
            raise CheckpointError(f"command: {command} scored example {name!r} twice")
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise CheckpointError(
                f"command: {command}: expected a number as score of {name!r}, got {score!r}"
            )
        found[name] = float(score), None if task is None else str(task)
    if not found:
        raise CheckpointError(
            f"command: {command} printed no line such as " + '{"example": "1", "score": 0.5}'
        )
    # The examples have a fixed order, regardless of the order of the output.
    names = tuple(sorted(found))
    tasks = tuple(found[name][1] for name in names)
    if None in tasks and any(task is not None for task in tasks):
        raise CheckpointError(f"command: {command} gives a task for only some examples")
    known = tuple(task for task in tasks if task is not None)
    return Scores(names, np.array([found[name][0] for name in names]), known or None)


def _record(line: str) -> Mapping[str, Any] | None:
    """Returns the record in a line that contains an example and its score; None otherwise."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"example", "score"} <= record.keys() else None


def _passing(run: RunOptions) -> RunOptions:
    """Returns options for temporary outputs, which are not flushed to disk."""
    return replace(run, sync=False, write_model_card=False, force=False, resume=False)


class InFolders(searching.Measure):
    """Scores of checkpoints in folders; a candidate is written, scored and removed.

    Args:
      models: The checkpoints.
      base: Their base; None without one.
      scorer: Scores a folder on all examples.
      run: How candidates are merged.
      folder: The folder for candidates.
    """

    def __init__(
        self,
        models: Sequence[Path_],
        base: Path_ | None,
        scorer: Scorer,
        run: RunOptions,
        folder: Path,
    ):
        self._models, self._base, self._run = models, base, _passing(run)
        self._points = [*models] if base is None else [*models, base]
        self._scorer, self._folder = scorer, folder
        self._known: dict[Any, np.ndarray] = {}
        first = scorer(Path(models[0]))
        self.examples, self.tasks = first.examples, first.tasks
        self._known[0] = first.scores

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        if k not in self._known:
            self._known[k] = self.scored(Path(self._points[k]), str(self._points[k]))
        return self._known[k][examples]

    def merge(
        self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        key = arm.name, tuple((name, np.asarray(x).tobytes()) for name, x in options.items())
        if key not in self._known:
            merge, weights = arm.merge(options)
            out = self._folder / "candidate"
            merge_checkpoints(
                self._models,
                out,
                base=self._base,
                method=merge,
                weights=None if weights is None else [float(w) for w in weights],
                run=self._run,
            )
            try:
                self._known[key] = self.scored(out, arm.name)
            finally:
                shutil.rmtree(out)
        return self._known[key][examples]

    def scored(self, path: Path, name: str) -> Float[np.ndarray, "n"]:
        """Scores a folder on all examples.

        Args:
          path: The folder.
          name: Its name in messages.

        Returns:
          The scores.

        Raises:
          CheckpointError: If the scorer returns other examples than for the first model.
        """
        found = self._scorer(path)
        if found.examples != self.examples or found.tasks != self.tasks:
            odd = sorted(set(found.examples) ^ set(self.examples))
            raise CheckpointError(
                f"score of {name}: expected the {len(self.examples)} examples of the first model, "
                f"got {len(found.examples)}{f', and {odd[0]!r} differs' if odd else ''}"
            )
        return found.scores


def loaded(path: Path_, *, run: RunOptions = DEFAULTS) -> dict[str, Any]:
    """Reads the tensors of a checkpoint for scores in memory.

    Args:
      path: The checkpoint.
      run: Whether pickles are read, and models downloaded.

    Returns:
      The tensors by name, floating ones in float32.

    Raises:
      CheckpointError: As `open_checkpoint` does, and for quantised tensors.
    """
    with open_values(path, allow_pickle=run.allow_pickle, offline=run.offline) as opened:
        return in_float32(opened)


def search_checkpoints(
    models: Sequence[Path_],
    base: Path_ | None = None,
    *,
    scorer: Scorer,
    candidates: Iterable[str | Arm] | None = None,
    names: Sequence[str] | None = None,
    budget: int = 60,
    seconds: float = math.inf,
    judge: float = 0.5,
    seed: int = 0,
    history: Sequence[searching.Trial] = (),
    on_trial: Callable[[searching.Trial], None] | None = None,
    folder: Path_ | None = None,
    run: RunOptions = DEFAULTS,
) -> searching.Outcome:
    """Searches for a merge of checkpoints that are scored in folders.

    For scores from tensors in memory, give the tensors to `sail_jax.search`.

    Args:
      models: The checkpoints, two or more.
      base: The checkpoint before fine-tuning; None without a base.
      scorer: Scores a folder; `by_function` and `by_command` make one.
      candidates: As in `sail_jax.search`.
      names: The names of the models; their paths by default.
      budget: As in `sail_jax.search`; each candidate is scored on all examples.
      seconds: As in `sail_jax.search`.
      judge: As in `sail_jax.search`.
      seed: As in `sail_jax.search`.
      history: As in `sail_jax.search`.
      on_trial: As in `sail_jax.search`.
      folder: The folder for candidates, on a disk with room for one; a temporary folder by
        default.
      run: How candidates are merged.

    Returns:
      The recommended model, with the evidence.

    Raises:
      ValueError: As `sail_jax.search` does.
      CheckpointError: If a checkpoint cannot be read or merged, or a score is not as expected.
    """
    listed = searching.arms(len(models), base is not None, candidates, seed=seed)
    with tempfile.TemporaryDirectory(prefix="sail-jax-search-", dir=folder) as made:
        measure = InFolders(models, base, scorer, run, Path(made))
        return searching.search_with(
            measure,
            len(measure.examples),
            listed,
            names or [str(model) for model in models],
            with_base=base is not None,
            tasks=measure.tasks,
            whole=True,
            budget=budget,
            seconds=seconds,
            judge=judge,
            seed=seed,
            history=history,
            on_trial=on_trial,
        )


def recipe_of(
    arm: Arm,
    options: Mapping[str, Any],
    models: Sequence[Path_],
    base: Path_ | None,
    *,
    seed: int = 0,
) -> str:
    """Writes a candidate as a recipe for `merge`.

    Args:
      arm: The arm.
      options: Its hyperparameters.
      models: The checkpoints.
      base: Their base; None without one.
      seed: The seed of methods with random draws, as given to `arms`.

    Returns:
      The YAML text.

    Raises:
      ValueError: If the arm has scales of groups, or its merge is not a method of the registry.
    """
    merge, weights = arm.merge(options)
    entry = mergekit.entry(merge.name)
    if arm.groups:
        raise ValueError(f"{arm.name}: a recipe cannot have scales of groups")
    chosen = {
        entry.keys.get(name, name): value
        for name, value in merge.options.items()
        if value is not None and name not in ("key", "compat")
    }
    listed: list[dict[str, Any]] = [{"model": str(model)} for model in models]
    for one, weight in zip(listed, () if weights is None else weights, strict=False):
        one["parameters"] = {"weight": float(weight)}
    recipe: dict[str, Any] = {"merge_method": merge.name, "compat": "paper", "models": listed}
    if base is not None and merge.base != "unused":
        recipe["base_model"] = str(base)
    if "key" in merge.options:
        recipe["seed"] = seed
    if chosen:
        recipe["parameters"] = plain(chosen)
    return yaml.safe_dump(recipe, sort_keys=False)


def recipe_arm(name: str) -> Arm:
    """Makes the arm of a given recipe; `WithRecipes` scores it.

    Args:
      name: The name of the recipe.

    Returns:
      The arm.
    """
    return Arm(name, _of_recipe)


def _of_recipe() -> Merge:
    """Stands for a recipe, which is not a single merge."""
    return Merge(name="recipe")


def models_of(files: Iterable[Path]) -> tuple[list[str], str | None]:
    """Lists the models of recipes, and their base.

    Args:
      files: The recipes.

    Returns:
      The paths of all models except the base, in order, and of the base; None without one.

    Raises:
      RecipeError: If a file is not a recipe.
      ValueError: If recipes have different bases.
    """
    models: dict[str, None] = {}
    bases: dict[str, None] = {}
    for file in files:
        for recipe in read_file(file):
            if recipe.base_model is not None:
                bases[recipe.base_model.path] = None
            models |= dict.fromkeys(ref.path for ref in recipe.models())
    if len(bases) > 1:
        raise ValueError(f"recipes: expected one base, got {', '.join(bases)}")
    base = next(iter(bases), None)
    return [model for model in models if model != base], base


class WithRecipes(searching.Measure):
    """Scores recipes by merging them into a folder, and all other arms with another measure.

    Args:
      inner: The other measure.
      recipes: The recipes, by the names of their arms.
      run: How they are merged.
      folder: The folder for their results, one after another.
    """

    def __init__(
        self,
        inner: searching.InMemory | InFolders,
        recipes: Mapping[str, Path],
        run: RunOptions,
        folder: Path,
    ):
        self._inner, self._recipes, self._folder = inner, recipes, folder
        self._run = _passing(run)
        self._known: dict[str, np.ndarray] = {}

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        return self._inner.model(k, examples)

    def merge(
        self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        if arm.name not in self._recipes:
            return self._inner.merge(arm, options, examples)
        if arm.name not in self._known:
            # All examples are scored at once, because the merge usually takes longer than the
            # scores.
            out = self._folder / "recipe"
            merge_recipe(read_file(self._recipes[arm.name]), out, run=self._run)
            try:
                self._known[arm.name] = self._whole(out, arm.name)
            finally:
                shutil.rmtree(out)
        return self._known[arm.name][examples]

    def _whole(self, out: Path, name: str) -> Float[np.ndarray, "n"]:
        if isinstance(self._inner, InFolders):
            return self._inner.scored(out, name)
        return self._inner.scores(loaded(out, run=self._run), np.arange(self._inner.examples))
