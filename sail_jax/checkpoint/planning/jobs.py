"""Traverses a recipe and lists, for each tensor of the output, the input tensors that it requires.

The traversal only pairs names. `plan` turns each `Job` into a `Treatment`, from shapes and dtypes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sail_jax.checkpoint.contents.layers import is_early, position, role, stacks
from sail_jax.checkpoint.planning.inputs import Input, is_derived
from sail_jax.checkpoint.recipe.parts import Module, Recipe, Ref, Slice, Source
from sail_jax.checkpoint.recipe.recipes import merged_sources
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checks import nearest


class Job(NamedTuple):
    """A tensor of the output, and the names of the tensors that it is made from.

    Attributes:
      name: Its name in the output.
      sources: For each merged model, its source in the recipe, the input, and the name of the
        tensor there.
      base: The input that task vectors start at and the name of the tensor there; None without one.
      t: The position of its layer in the slice, in [0, 1], at which settings are interpolated.
      module: Its module in the recipe.
      part: Its slice in the recipe.
    """

    name: str
    sources: tuple[tuple[Source, Input, str], ...]
    base: tuple[Input, str] | None
    t: float
    module: Module
    part: Slice


def jobs(recipe: Recipe, inputs: Mapping[Ref, Input], losses: list[str]) -> Iterator[Job]:
    """Yields every tensor of the output, with the tensors that it is made from.

    In a slice of n > 1 layers, layer i has t = i / (n - 1). The only layer of a slice has t = 1,
    and tensors outside the layers have t = 0 (as in mergekit).

    Args:
      recipe: The recipe.
      inputs: Its inputs.
      losses: A list that collects the parts of inputs that will be missing in the output.

    Yields:
      The tensors, in the order of the output.

    Raises:
      RecipeError: If tensors belong to no module or a module has no tensors, if a model has tensors
        that are not in the output, or if the requested layers do not exist or differ in number.
    """
    walk = _Walk(recipe, inputs, losses)
    for module in recipe.modules:
        yield from walk.module(module)


class _Place(NamedTuple):
    """A slice with its sources, their inputs, and the base of the task vectors.

    The output contains the tensors of the lead.
    """

    module: Module
    part: Slice
    inputs: Sequence[tuple[Source, Input]]
    base: Input | None
    lead: Source

    def job(self, name: str, t: float) -> Job:
        """Returns the job of a tensor with the same name in all inputs."""
        sources = tuple((source, model, name) for source, model in self.inputs)
        return Job(name, sources, self.base and (self.base, name), t, self.module, self.part)


class _Walk:
    """The state of the traversal of one recipe."""

    def __init__(self, recipe: Recipe, inputs: Mapping[Ref, Input], losses: list[str]):
        self.recipe, self.inputs, self.losses = recipe, inputs, losses
        self.entry = recipe.entry

    def module(self, module: Module) -> Iterator[Job]:
        """Yields a module's tensors: those before the layers, each slice's layers, and the rest."""
        offsets: dict[str, int] = {}
        for which, part in enumerate(module.slices):
            sources, listed = merged_sources(self.recipe, part)
            inputs = [(source, self.inputs[source.model]) for source in sources]
            start = listed if self.entry.base in ("required", "optional") else None
            base = None if start is None else self.inputs[start.model]
            at = _Place(module, part, inputs, base, start or sources[0])
            names = self.members(module, self.inputs[at.lead.model])
            self.check_extra(at, names)
            # Embeddings belong to the first slice, and the last norm and the head to the last one.
            outside = [name for name in names if position(name) is None]
            early = [name for name in outside if is_early(name)]
            if which == 0:
                yield from (at.job(name, 0.0) for name in early)
            yield from self.layers(at, names, offsets)
            if which == len(module.slices) - 1:
                late = [name for name in outside if not is_early(name)] + self.heads(at, names)
                yield from (at.job(name, 0.0) for name in late)

    def members(self, module: Module, model: Input) -> list[str]:
        """Lists the tensors of an input that belong to a module."""
        if not module.name:
            return list(model.tensors)
        owners = _owners([m.name for m in self.recipe.modules], model.tensors)
        homeless = [name for name, owner in owners.items() if owner is None]
        if homeless:
            raise RecipeError(
                self.recipe.at("modules"),
                f"{len(homeless)} tensors of {model.ref} belong to no module, such as"
                f" {homeless[0]!r}; a module called default takes the rest",
            )
        names = [name for name, owner in owners.items() if owner == module.name]
        if not names:
            parts = {part for name in model.tensors for part in re.split(r"[./]", name)[:-1]}
            raise RecipeError(
                module.where,
                f"no tensor of {model.ref} belongs to the module"
                + nearest(module.name, sorted(p for p in parts if not p.isdigit())),
            )
        return names

    def check_extra(self, at: _Place, names: Sequence[str]) -> None:
        """Refuses or notes tensors of other models that are not in the output."""
        expected = set(names)
        for source, model in at.inputs:
            if source.model == at.lead.model or source.layers is not None:
                continue
            # A head that others lack is allowed: they may be tied, and `heads` adds it.
            names_there = self.members(at.module, model)
            extra = [x for x in names_there if x not in expected and role(x) != "head"]
            learned = [name for name in extra if not is_derived(name)]
            if learned and self.recipe.extra == "error":
                # Surplus tensors of a deeper model are reported as additional layers.
                self.same_depth(at, names)
                raise RecipeError(
                    source.where,
                    f"{model.ref} has {len(learned)} tensors that {at.lead.model} lacks, such as"
                    f" {learned[0]!r}; set extra: ignore to leave them out, or rename them",
                )
            if extra:
                shown = f"{extra[0]}{', ...' if len(extra) > 1 else ''}"
                self.losses.append(f"{len(extra)} tensors of {model.ref} are left out: {shown}")

    def heads(self, at: _Place, names: Sequence[str]) -> list[str]:
        """Lists the separate heads of another input that are missing in the lead."""
        known = set(names)
        heads = dict.fromkeys(
            name
            for _, model in at.inputs
            for name in self.members(at.module, model)
            if name not in known and role(name) == "head" and model.has_own(name)
        )
        return list(heads)

    def layers(self, at: _Place, names: Sequence[str], offsets: dict[str, int]) -> Iterator[Job]:
        """Yields the tensors of a slice's layers, numbered after the layers of earlier slices."""
        depth = stacks(names)
        places = [(name, place) for name in names if (place := position(name)) is not None]
        if at.lead.layers is None:
            self.same_depth(at, names)
            for name, place in places:
                n = depth[place.stack]
                yield at.job(name, place.index / (n - 1) if n > 1 else 1.0)
            return
        if len(depth) != 1:
            got = ", ".join(depth) or "none"
            raise RecipeError(
                at.part.where,
                f"slices need one stack of layers, got {got}; choose one under modules",
            )
        stack = next(iter(depth))
        for source in [at.lead, *(source for source, _ in at.inputs)]:
            n = stacks(self.members(at.module, self.inputs[source.model])).get(stack, 0)
            first, end = source.layers or (0, 0)
            if first < end and end > n:
                raise RecipeError(
                    source.where,
                    f"layer_range {[first, end]} is beyond {source.model}, which has {n} layers",
                )
        a, b = at.lead.layers
        for i in range(b - a):
            t = i / (b - a - 1) if b - a > 1 else 1.0
            for name, place in places:
                if place.index == a + i:
                    # Only the numbers in the output are consecutive; each source counts from the
                    # first layer of its own range.
                    sources = tuple(
                        (source, model, place.at((source.layers or (a, b))[0] + i))
                        for source, model in at.inputs
                    )
                    out = place.at(offsets.get(stack, 0) + i)
                    yield at.job(name, t)._replace(name=out, sources=sources)
        offsets[stack] = offsets.get(stack, 0) + b - a

    def same_depth(self, at: _Place, names: Sequence[str]) -> None:
        """Checks that stacks of the same name have equally many layers in all models."""
        depth = stacks(names)
        for source, model in at.inputs:
            # A stack that is missing in the lead is not a difference of depth: its tensors are
            # reported as surplus.
            for stack, n in stacks(model.tensors).items():
                if depth.get(stack, n) != n:
                    raise RecipeError(
                        source.where,
                        f"{model.ref} has {n} layers in {stack}, not {depth[stack]}; choose which"
                        " in slices",
                    )


# For a module's name in a recipe, the components of tensor names that stand for the same tower.
_TOWERS = {
    "text_decoder": ("text_decoder", "language_model", "text_model"),
    "vision_tower": ("vision_tower", "visual", "vision_model", "vision_encoder"),
    "multi_modal_projector": ("multi_modal_projector", "projector", "connector", "merger"),
}
_MAIN = ("default", "text_decoder", "decoder")


def is_main(name: str) -> bool:
    """Checks whether a config's number of layers counts the layers of this module."""
    return name in _MAIN


def _owners(modules: Sequence[str], names: Iterable[str]) -> dict[str, str | None]:
    """Finds the module that each tensor belongs to.

    It is the first module with a name, or a synonym for the same tower, that is a component of the
    tensor's name. Otherwise it is the module that takes the rest (`_MAIN`), or None without one.
    """
    rest = next((name for name in _MAIN if name in modules), None)
    owners = {}
    for name in names:
        parts = set(re.split(r"[./]", name))
        fits = (m for m in modules if parts & {m, *_TOWERS.get(m, ())})
        owners[name] = next(fits, rest)
    return owners
