"""Merges checkpoints on disk: from a recipe to a plan, its execution, and the output."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.folders import admit
from sail_jax.checkpoint.formats.open import Checkpoint, check_there
from sail_jax.checkpoint.formats.table import of_output
from sail_jax.checkpoint.operations.between import between
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    Ready,
    Request,
    RunOptions,
    bounds,
    carried_out,
    check_options,
    check_whole,
    notes_on_format,
    planned,
)
from sail_jax.checkpoint.planning import cards
from sail_jax.checkpoint.planning import plan as planning
from sail_jax.checkpoint.planning.openings import paths
from sail_jax.checkpoint.planning.pending import PendingError, pending
from sail_jax.checkpoint.planning.plan import Plan
from sail_jax.checkpoint.recipe.recipes import Recipe, finals, parse_all, read_file, simple
from sail_jax.checks import as_path, described
from sail_jax.merging.merge import Merge
from sail_jax.merging.work import Work, passes, tree_bits


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Merged(Result):
    """The result of a merge.

    Attributes:
      recipe: The recipe.
      plan: The treatment of every tensor.
      others: The results of the other documents of the file, in their order. Outputs that only
        other documents use have been removed.
    """

    recipe: Recipe
    plan: Plan
    others: tuple["Merged", ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared(Ready[Merged]):
    """A merge before its execution.

    Attributes:
      recipe: The recipe.
      plan: The treatment of every tensor.
    """

    recipe: Recipe
    plan: Plan

    def visits(self) -> dict[str, int]:
        groups: dict[int, list[Work]] = {}
        for work in self.works:
            # Works of one merge share the same object, and statistics of the tree cover all of
            # them.
            groups.setdefault(id(work.merge), []).append(work)
        return {
            work.name: passes(work, tree_bits(group)) for group in groups.values() for work in group
        }

    def completed(self) -> "Prepared":
        assert self.out is not None
        notes = (*self.plan.notes, *notes_on_format(self.works, self.out, self.run))
        plan = self.plan._replace(notes=notes)
        files = dict(plan.extras)
        if self.run.write_model_card:
            files["README.md"] = cards.model_card(self.recipe, plan, self.out.name).encode()
            if self.recipe.text:
                files["recipe.yaml"] = self.recipe.text.encode()
        return dataclasses.replace(
            self, plan=plan, files=files, notes=(*plan.losses, *notes),
            make=functools.partial(self.make, plan=plan),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MergeRequest(Request[Prepared]):
    """A merge by one recipe.

    Attributes:
      recipe: The recipe.
      out: The path of the output; None for a plan alone.
      measure: Whether norms, cosines and conflicts of each tensor are recorded.
      documents: The results of other documents of the file, by name: their paths, or their plans if
        they are not executed. All inputs of the file have been looked up. None for a file of one
        document.
      done: A file that records finished works; see `Ready`.
    """

    recipe: Recipe
    out: Path | None = None
    measure: bool = False
    documents: Mapping[str, Path | Plan] | None = None
    done: Path | None = None

    def plan(self, inputs: Inputs) -> Prepared:
        """Plans the treatment of every tensor from the headers of the inputs."""
        run, recipe, documents = inputs.run, self.recipe, self.documents or {}
        if self.documents is None:
            _check_inputs([recipe], run)
        if run.select is not None:
            recipe = recipe.model_copy(update={"select": run.select})
        if run.requantize is not None:
            recipe = recipe.model_copy(update={"requantize": run.requantize})

        def open(path: str) -> Checkpoint:
            place = documents.get(path, path)
            if isinstance(place, Plan):
                return pending(place, path)
            # The recipe marks adapters, and the planner checks them.
            return inputs(place, adapters=True)

        plan = planning.plan(
            recipe, open, allow_crimes=run.allow_crimes, strict=run.strict,
            copy_tokenizer=run.copy_tokenizer,
        )  # fmt: skip
        works = tuple(treatment.work for treatment in plan.treatments)
        mark = planning.fingerprint(plan)
        inputs.admit(self.out, [checkpoint.path for checkpoint in inputs.opened])
        return Prepared(
            recipe=recipe, plan=plan, out=self.out, run=run, works=works, fingerprint=mark,
            limits=bounds(works, run, coded=plan.codes is not None), inputs=tuple(inputs.opened),
            notes=plan.notes, codes=plan.codes, done=self.done, measure=self.measure,
            divisible=True, make=functools.partial(Merged, recipe=self.recipe, plan=plan),
        )  # fmt: skip


def _check_inputs(recipes: Sequence[Recipe], run: RunOptions) -> None:
    """Finds all inputs before any is downloaded, except results of other recipes of the file."""
    places: dict[str, Callable[[], object]] = {}
    for one in recipes:
        for ref in one.models():
            for path in paths([ref]):
                if path not in one.uses:
                    places.setdefault(path, functools.partial(one.place_of, ref))
    check_there(places, offline=run.offline, places=places)


@contextlib.contextmanager
def previewed(
    recipes: Sequence[Recipe], run: RunOptions = DEFAULTS
) -> Iterator[list[Prepared | PendingError]]:
    """Plans the documents of a file one after another, as a context manager; nothing is written.

    Args:
      recipes: The recipes, as `parse_all` orders them.

    Yields:
      Each merge, ready except for the results of other merges; or the reason why it cannot be
      planned before the others are executed.

    Raises:
      ValueError: As `planned` does.
    """
    _check_inputs(recipes, run)
    with contextlib.ExitStack() as stack:
        plans: dict[str, Plan] = {}
        found: list[Prepared | PendingError] = []
        for recipe in recipes:
            unknown = [name for name in recipe.uses if name not in plans]
            try:
                if unknown:
                    raise PendingError(f"{unknown[0]} is not planned yet")
                ready = stack.enter_context(planned(MergeRequest(recipe, documents=plans), run))
                plans[recipe.name or ""] = ready.plan
                found.append(ready)
            except PendingError as error:
                found.append(error)
        yield found


def merge_recipe(
    recipe: Recipe | Sequence[Recipe] | Path_,
    out: Path_,
    *,
    measure: bool = False,
    run: RunOptions = DEFAULTS,
    before: Callable[[Prepared], None] | None = None,
) -> Merged:
    """Merges checkpoints by a recipe, and writes the output atomically.

    YAML of several documents makes several merges, and later ones may use earlier ones by name.
    Results for other documents are stored in a folder next to the output until all of them are
    done. After an error or an interruption, finished work is kept, and `run.resume` continues from
    there.

    Args:
      recipe: The recipe: the path of a YAML file, YAML text, or a parsed recipe; or several, as
        `parse_all` orders them. Text of one line that ends in .yaml or .yml is a path.
      out: The path of the output. A name with the suffix of a format, such as .npz, makes one file.
        Any other name makes a folder with config.json, the tokenizer, a model card and the recipe's
        YAML, if there is one. If several documents are not used by others, each gets a folder with
        its name there.
      measure: Whether norms, cosines and conflicts of each tensor are recorded.
      before: Called for each merge when everything except the values is known, before any of its
        tensors is read.

    Returns:
      The result. For several documents it is the last one's, and includes the others.

    Raises:
      ValueError: RecipeError, CheckpointError and MergeError.
      TypeError: If `recipe` or `out` is of another type.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> for name, value in {"a": 1.0, "b": 4.0}.items():
    ...     save_checkpoint(f"{folder}/{name}", {"w": np.full(2, value, np.float32)})
    >>> recipe = f'''
    ... merge_method: linear
    ... models:
    ...   - {{model: {folder}/a, parameters: {{weight: 2}}}}
    ...   - {{model: {folder}/b, parameters: {{weight: 1}}}}
    ... '''
    >>> load_checkpoint(merge_recipe(recipe, f"{folder}/out").out)["w"]
    array([2., 2.], dtype=float32)
    """
    out, recipes = as_path("out", out), _recipes(recipe)
    if len(recipes) == 1:
        return carried_out(MergeRequest(recipes[0], out, measure), run, before)
    check_whole(
        dataclasses.replace(run, on=None),
        f"the recipe has {len(recipes)} documents, but only one can be made in parts; make a file "
        "of each",
    )
    last = finals(recipes)
    if len(last) > 1 and of_output(out) is not None:
        raise CheckpointError(f"{out}: expected a folder for {len(last)} models; this is one file")
    # All of them are planned before any is executed, so an error in the last one is found at once.
    with previewed(recipes, run) as plans:
        ready = [plan for plan in plans if isinstance(plan, Prepared)]
        admit(
            out,
            [checkpoint.path for plan in ready for checkpoint in plan.inputs],
            run.resume,
            run.force,
            [one.name or "" for one in last] if len(last) > 1 else (),
        )
    used = {name for one in recipes for name in one.uses}
    with between(out, used, run.resume) as folder:
        places: dict[str, Path] = {}
        done: list[Merged] = []
        for number, one in enumerate(recipes):
            place, how = out / (one.name or "") if len(last) > 1 else out, run
            if one.name is not None and one.name in used:
                # Other documents read the tokenizer and the configuration, which only a folder has.
                place, how = folder / "models" / one.name, dataclasses.replace(run, format=None)
            record = folder / "done" / f"{number}.json"
            request = MergeRequest(one, place, measure, places, record)
            done.append(carried_out(request, how, before))
            places[one.name or ""] = place
    return dataclasses.replace(done[-1], others=tuple(done[:-1]))


def _recipes(recipe: Recipe | Sequence[Recipe] | Path_) -> tuple[Recipe, ...]:
    """Reads the recipes in any form that `merge_recipe` takes."""
    if isinstance(recipe, Recipe):
        return (recipe,)
    if isinstance(recipe, str) and not re.fullmatch(r"[^\n]+\.ya?ml", recipe):
        return parse_all(recipe)
    if isinstance(recipe, str | PathLike):
        return read_file(recipe)
    several = tuple(recipe) if isinstance(recipe, Sequence) else ()
    if not several or not all(isinstance(one, Recipe) for one in several):
        expected = "the path of a YAML file, YAML text, or parsed recipes"
        raise TypeError(f"recipe: expected {expected}; got {described(recipe)}")
    return several


def merge_checkpoints(
    models: Sequence[Path_],
    out: Path_,
    *,
    base: Path_ | None = None,
    method: str | Merge = "linear",
    weights: Sequence[float] | None = None,
    compat: str | None = None,
    measure: bool = False,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> Merged:
    """Merges checkpoints on disk, tensor by tensor, into a new one.

    Args:
      models: Folders or files of any format that `open_checkpoint` reads, PyTorch's with
        `run.allow_pickle`; or names on the Hub, such as org/name@revision.
      out: The path of the output; see `merge_recipe`.
      base: The checkpoint before fine-tuning; methods without task vectors do not require it.
      method: A merge, such as `methods.ties(density=0.2)`; or the name of a method, whose
        hyperparameters are then among the options.
      weights: One per model; the default depends on the method and is mostly 1.
      compat: For a method by name, the origin of the defaults: "paper" (the default) or "mergekit".
      measure: Whether norms, cosines and conflicts of each tensor are recorded.
      **options: Hyperparameters of a method by name, one number or, where models have their own,
        one for each; and dtype, out_dtype, scope, seed, rename, rest, missing, extra,
        integers, tokenizer, chat_template (see `checkpoint.recipe.recipes.simple`).

    Returns:
      The result.

    Raises:
      ValueError: RecipeError, CheckpointError and MergeError.
      TypeError: If an option of `run` is among the options.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> for name, value in {"a": 1.0, "b": 4.0}.items():
    ...     save_checkpoint(f"{folder}/{name}", {"w": np.full(3, value, np.float32)})
    >>> merged = merge_checkpoints([f"{folder}/a", f"{folder}/b"], f"{folder}/out", weights=[2, 1])
    >>> load_checkpoint(merged.out)["w"]
    array([2., 2., 2.], dtype=float32)
    """
    as_path("out", out)
    check_options(options)
    recipe = simple(models, base, method, weights=weights, compat=compat, **options)
    return merge_recipe(recipe, out, measure=measure, run=run)
