"""Determines the weights and the merge of every tensor from the settings of a recipe."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sail_jax import methods
from sail_jax.checkpoint.planning.jobs import Job
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.parts import Recipe
from sail_jax.checkpoint.recipe.settings import Ledger, Value
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.merging import random_bits
from sail_jax.merging.merge import Merge

Option = Value | tuple[Value, ...]
"""A hyperparameter of one tensor: one value, or one for each model."""


class Choice(NamedTuple):
    """The weights and hyperparameters that a recipe sets for one tensor.

    Attributes:
      weights: One weight per model; None for the method's default.
      options: The hyperparameters by our names; a tuple if each model has its own value.
    """

    weights: tuple[float, ...] | None
    options: dict[str, Option]

    def of(self, kept: Sequence[int]) -> "Choice":
        """Restricts the choice to some of the models.

        Args:
          kept: The indices of the models to keep, among the tensor's models.

        Returns:
          Their weights and options; a tuple of equal values becomes that value.
        """
        weights = self.weights and tuple(self.weights[k] for k in kept)
        options = {
            name: _collapsed([value[k] for k in kept]) if isinstance(value, tuple) else value
            for name, value in self.options.items()
        }
        return Choice(weights, options)


class Hyperparameters:
    """Resolves the settings of a recipe for each tensor, and makes its merges.

    `of` and `merge` are called for every tensor. At the end, `notes` checks that all settings were
    used.

    Args:
      recipe: The recipe.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.entry = recipe, recipe.entry
        self.parameters = [*recipe.read().values()]
        keys = [self.entry.parameter(name) for name, _ in recipe.given()]
        self.named = {parameter.name for parameter in keys if parameter}
        listed = mergekit.MERGEKIT.get(recipe.method)
        # Parameters with mergekit's default, unless they are set.
        self.theirs = listed.parameters if listed and recipe.compat == "mergekit" else {}
        # Hyperparameters from the recipe's top level.
        above = {"compat": recipe.compat, "scope": recipe.scope}
        if not mergekit.accepts(recipe.method, "compat"):
            del above["compat"]
        self.above = {name: value for name, value in above.items() if value is not None}
        self.ledger = Ledger()
        self.key = random_bits.key(recipe.seed)
        # Results for earlier tensors are cached, because most tensors are alike.
        self.made: dict[tuple[str, ...], Merge] = {}
        self.compared = set[str]()

    def notes(self) -> list[str]:
        """Checks that every setting had an effect, after all tensors have been resolved."""
        return self.ledger.check(self.recipe.settings())

    def of(self, job: Job) -> Choice:
        """Resolves the weights and hyperparameters of one tensor.

        Without a setting, the value is mergekit's default under `compat: mergekit`, and our
        method's default otherwise.

        Args:
          job: The tensor, and the tensors that it is made from.

        Returns:
          The weights and options, with one value for each of the job's sources if models may
          differ.

        Raises:
          RecipeError: If a parameter that the method requires is not set for the tensor.
        """
        weights, options = None, {}
        for parameter in self.parameters:
            values = self._values(parameter, job)
            if parameter.option == "weights":
                numbers = tuple(value for value in values if isinstance(value, float | int))
                weights = numbers if numbers and len(numbers) == len(values) else None
            elif parameter.option is not None and values:
                options[parameter.option] = tuple(values) if parameter.per_model else values[0]
        options = {key: value for key, value in options.items() if value is not None}
        return Choice(weights, {**options, **self.above})

    def _values(self, parameter: mergekit.Parameter, job: Job) -> list[Value | None]:
        """Returns the values of a parameter, per source or for all; empty if unset."""
        values: list[Value | None] = [None] * (len(job.sources) if parameter.per_model else 1)
        if parameter.name in self.named:
            outer = (job.part.parameters, job.module.parameters, self.recipe.parameters)
            readers = [(outer, job.name)]
            if parameter.per_model:
                readers = [((source.parameters, *outer), name) for source, _, name in job.sources]
            values = [
                self.ledger.resolve(map(parameter.of, filter(None, scopes)), name, job.t)
                for scopes, name in readers
            ]
        weight = parameter.name == "weight"
        # Without a setting, mergekit's default is used under its conventions. Otherwise the result
        # is empty, and our method's default is used, unless the parameter is set for some of the
        # models or has no default.
        theirs = parameter.name in self.theirs
        optional = not theirs and (weight or not parameter.required)
        if optional and values.count(None) == len(values):
            return []
        # Weights for only some models are an error: there is no suitable default for the others.
        fill = mergekit.REQUIRED if weight and not theirs else parameter.default
        if fill is mergekit.REQUIRED and None in values:
            source = job.sources[values.index(None)][0] if parameter.per_model else None
            who = f" for {source.model}" if source else ""
            raise RecipeError(
                source.where if source else job.part.where,
                f"{self.recipe.method} needs {parameter.name!r}{who}, but no condition sets it for"
                f" the tensor {job.name!r}",
            )
        return [fill if value is None else value for value in values]

    def differs(
        self, other: "Hyperparameters", job: Job, chosen: Choice, who: Sequence[str]
    ) -> bool:
        """Checks whether another recipe's hyperparameters give a different merge of a tensor.

        Args:
          other: The hyperparameters of the other recipe.
          job: The tensor, and the tensors that it is made from.
          chosen: The choice of this recipe for the tensor.
          who: The names of the merged models.

        Returns:
          Whether the weights or the merge differ. False for tensors with the same hyperparameters
          as an earlier one, which are not compared again, and if either recipe's values are
          invalid.
        """
        try:
            every = range(len(job.sources))
            pair = [choice.of(every) for choice in (chosen, other.of(job))]
            if (key := repr(pair)) in self.compared:
                return False
            self.compared.add(key)
            mine, theirs = [self._made(self.recipe.method, x.options, who) for x in pair]
        # The other recipe may be invalid.
        except (TypeError, ValueError):
            return False
        ones = (1.0,) * len(job.sources)
        weights = [choice.weights or ones for choice in pair]
        # Steps that differ mostly show it; the identity of a merge takes longer.
        shown = weights[0] != weights[1] or repr(mine.steps) != repr(theirs.steps)
        return shown or mine.identity != theirs.identity

    def merge(
        self,
        job: Job,
        method: str,
        options: Mapping[str, Option],
        who: Sequence[str],
    ) -> Merge:
        """Makes the merge of a tensor, or returns the one already made for its group.

        Tensors with equal options and the same models share one merge, and its statistics of the
        whole tree.

        Args:
          job: The tensor, for messages.
          method: The name of the method.
          options: Its hyperparameters.
          who: The names of the merged models.

        Returns:
          The merge; the same object for all tensors of a group.

        Raises:
          RecipeError: If the method refuses the options.
        """
        try:
            return self._made(method, options, who)
        except (TypeError, ValueError) as error:
            where = self.recipe.at("merge_method")
            raise RecipeError(where, f"{method}, for {job.name}: {error}") from error

    def _made(self, method: str, options: Mapping[str, Option], who: Sequence[str]) -> Merge:
        if self.entry.merge is not None and method == self.entry.name:
            return self.entry.merge
        key = (method, repr(sorted(options.items())), *who)
        if key not in self.made:
            seeded = {"key": self.key} if mergekit.accepts(method, "key") else {}
            self.made[key] = methods.get(method)(**options, **seeded)
        return self.made[key]


def _collapsed(values: Sequence[Value]) -> Option:
    """Returns the one value if all are equal, else the tuple of them."""
    return values[0] if len(set(values)) == 1 else tuple(values)
