"""The weights and knobs of every tensor, from the settings of a recipe."""

from collections.abc import Sequence
from typing import Any

from sail_jax import methods
from sail_jax.checkpoint import mergekit
from sail_jax.checkpoint.jobs import Job
from sail_jax.checkpoint.recipes import Recipe, RecipeError
from sail_jax.checkpoint.settings import Ledger
from sail_jax.checkpoint.tensors import Tensor
from sail_jax.merging import random_bits

__all__ = ["Knobs"]


class Knobs:
    """Resolves the settings of a recipe; `notes`, at the end, checks that all of them were used."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.entry = recipe, mergekit.entry(recipe.method)
        self.ledger = Ledger()
        self.expressed, self.key = set[str](), random_bits.key(recipe.seed)

    def notes(self) -> list[str]:
        """RecipeError for a filter that decided nothing or reads two ways; see `Ledger.check`."""
        return self.ledger.check(self.recipe.settings())

    def of(self, job: Job) -> tuple[tuple[float, ...] | None, dict[str, Any]]:
        """The weights and knobs for a tensor, as set, or mergekit's defaults."""
        recipe, name = self.recipe, self.recipe.method
        outer = [job.part.parameters, job.module.parameters, recipe.parameters]
        weights, knobs = None, {}
        for parameter in self.entry.parameters.values():
            default = parameter.default
            if parameter.per_model:
                values = [
                    self.ledger.resolve(
                        [scope.get(parameter.name) for scope in (source.parameters, *outer)],
                        tensor,
                        job.t,
                    )
                    for source, _, tensor in job.votes
                ]
            else:
                scopes = [scope.get(parameter.name) for scope in outer]
                values = [self.ledger.resolve(scopes, job.name, job.t)]
            given = [value is not None for value in values]
            known = mergekit.MERGEKIT.get(name)
            if recipe.compat == "mergekit" and known and parameter.name in known.parameters:
                fill = default
            elif any(given) or (default is mergekit.REQUIRED and parameter.name != "weight"):
                fill = default if parameter.name != "weight" else mergekit.REQUIRED
            else:
                continue
            for k, value in enumerate(values):
                if value is not None:
                    continue
                if fill is mergekit.REQUIRED:
                    who = f" for {job.votes[k][0].model}" if parameter.per_model else ""
                    where = job.votes[k][0].where if parameter.per_model else job.part.where
                    raise RecipeError(
                        where,
                        f"{name} needs {parameter.name!r}{who}, which no condition sets for"
                        f" the tensor {job.name!r}",
                    )
                values[k] = fill
            if parameter.knob == "weights":
                weights = tuple(values) if values[0] is not None else None
            elif parameter.knob is not None and self._takes(parameter, values):
                knobs[parameter.knob] = tuple(values) if parameter.per_model else values[0]
        knobs = {key: value for key, value in knobs.items() if value is not None}
        if mergekit.accepts(name, "compat"):
            knobs["compat"] = recipe.compat
        if recipe.scope is not None:
            knobs["scope"] = recipe.scope
        return weights, knobs

    def check(
        self, job: Job, method: str, knobs: dict[str, Any], models: int, base: Tensor | None
    ) -> None:
        """RecipeError for knobs that the method refuses, or as many models."""
        key = repr((method, sorted(knobs.items()), models, base is None))
        if method not in methods.METHODS or key in self.expressed:
            return
        self.expressed.add(key)
        try:
            expression = methods.expression(method, key=self.key, **knobs)
            expression.check_models(models, base is not None)
        except (TypeError, ValueError) as error:
            where = self.recipe.at("merge_method")
            raise RecipeError(where, f"{method}, for {job.name}: {error}") from error

    def _takes(self, parameter: mergekit.Parameter, values: Sequence[Any]) -> bool:
        if mergekit.accepts(self.recipe.method, str(parameter.knob)) is not False:
            return True
        if any(value != parameter.default for value in values):
            raise RecipeError(
                self.recipe.at("merge_method"),
                f"{parameter.name} of {self.recipe.method} can only be {parameter.default} here",
            )
        return False
