"""Chooses the weights and makes the merge of every tensor, from the settings of a recipe."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sail_jax import methods
from sail_jax.checkpoint.planning.identity import identity
from sail_jax.checkpoint.planning.jobs import Job
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.recipes import Recipe, RecipeError
from sail_jax.checkpoint.recipe.settings import Ledger
from sail_jax.merging import random_bits
from sail_jax.merging.merge import Merge
from sail_jax.merging.tensors import Tensor

__all__ = ["Chosen", "Hyperparameters"]


class Chosen(NamedTuple):
    """The weights and hyperparameters that a recipe sets for one tensor.

    Attributes:
      weights: One weight per model; None for the method's default.
      options: The hyperparameters by our names; a tuple where each model has its own value.
    """

    weights: tuple[float, ...] | None
    options: dict[str, Any]

    def of(self, kept: Sequence[int]) -> "Chosen":
        """Restricts the choice to some of the models.

        Args:
          kept: The numbers of the models to keep, among those of the tensor.

        Returns:
          Their weights and options; a tuple of equal values becomes that value.
        """
        weights = self.weights and tuple(self.weights[k] for k in kept)
        options = {
            name: _collapsed([value[k] for k in kept]) if isinstance(value, tuple) else value
            for name, value in self.options.items()
        }
        return Chosen(weights, options)


class Hyperparameters:
    """Resolves the settings of a recipe for each tensor, and makes its merges.

    `of` and `merge` are called for every tensor; `notes`, at the end, checks that all settings were
    used.

    Args:
      recipe: The recipe.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.entry = recipe, recipe.entry
        self.ledger = Ledger()
        self.key = random_bits.key(recipe.seed)
        # What was made, checked and compared for earlier tensors, which most tensors are like.
        self.made: dict[Any, Merge] = {}
        self.checked = set[Any]()
        self.compared = set[str]()

    def notes(self) -> list[str]:
        """Checks that every setting had an effect, after all tensors have been resolved."""
        return self.ledger.check(self.recipe.settings())

    def of(self, job: Job) -> Chosen:
        """Resolves the weights and hyperparameters of one tensor.

        What no setting says is mergekit's default under `compat: mergekit`, else that of our
        method.

        Args:
          job: The tensor, and the tensors that it is made of.

        Returns:
          The weights and options, with one value for each of the job's sources where models may
          differ.

        Raises:
          RecipeError: If a parameter that the method needs is not set for the tensor.
        """
        recipe, name = self.recipe, self.recipe.method
        outer = [job.part.parameters, job.module.parameters, recipe.parameters]
        weights, options = None, {}
        for parameter in self.entry.parameters.values():
            if not recipe.reads(parameter.name):
                continue
            default = parameter.default
            if parameter.per_model:
                values = [
                    self.ledger.resolve(
                        [scope.get(parameter.name) for scope in (source.parameters, *outer)],
                        tensor,
                        job.t,
                    )
                    for source, _, tensor in job.sources
                ]
            else:
                scopes = [scope.get(parameter.name) for scope in outer]
                values = [self.ledger.resolve(scopes, job.name, job.t)]
            given = [value is not None for value in values]
            listed = mergekit.MERGEKIT.get(name)
            # What to fill in where no setting says anything: mergekit's default under its
            # conventions. Else nothing at all, so that our method's own default counts, unless the
            # parameter is set for some of the models or has no default.
            if recipe.compat == "mergekit" and listed and parameter.name in listed.parameters:
                fill = default
            elif any(given) or (default is mergekit.REQUIRED and parameter.name != "weight"):
                # Weights of some models only are an error: no default goes with those given.
                fill = default if parameter.name != "weight" else mergekit.REQUIRED
            else:
                continue
            for k, value in enumerate(values):
                if value is not None:
                    continue
                if fill is mergekit.REQUIRED:
                    who = f" for {job.sources[k][0].model}" if parameter.per_model else ""
                    where = job.sources[k][0].where if parameter.per_model else job.part.where
                    raise RecipeError(
                        where,
                        f"{name} needs {parameter.name!r}{who}, which no condition sets for"
                        f" the tensor {job.name!r}",
                    )
                values[k] = fill
            if parameter.option == "weights":
                weights = tuple(values) if None not in values else None
            elif parameter.option is not None:
                options[parameter.option] = tuple(values) if parameter.per_model else values[0]
        options = {key: value for key, value in options.items() if value is not None}
        if mergekit.accepts(name, "compat"):
            options["compat"] = recipe.compat
        if recipe.scope is not None:
            options["scope"] = recipe.scope
        return Chosen(weights, options)

    def differs(self, other: "Hyperparameters", job: Job) -> bool:
        """Tells whether another recipe's hyperparameters would merge a tensor otherwise.

        Args:
          other: The hyperparameters of the other recipe.
          job: The tensor, and the tensors that it is made of.

        Returns:
          Whether the weights or the merge differ. Tensors for which both recipes say the same as
          for an earlier one are not compared again: False. False too if either recipe's values
          cannot be used.
        """
        try:
            pair = [side.of(job) for side in (self, other)]
            if (key := repr(pair)) in self.compared:
                return False
            self.compared.add(key)
            ones = (1.0,) * len(job.sources)
            mine, theirs = (
                (chosen.weights or ones, identity(self._made(self.recipe.method, chosen.options)))
                for chosen in pair
            )
        # The other recipe may not be one that can be carried out at all.
        except (TypeError, ValueError):
            return False
        return mine != theirs

    def merge(
        self,
        job: Job,
        method: str,
        options: dict[str, Any],
        who: Sequence[str],
        base: Tensor | None,
    ) -> Merge:
        """Makes the merge of a tensor, or returns the one already made for its group.

        Tensors with equal options and the same models share one merge, and with it the statistics
        that it takes of the whole tree.

        Args:
          job: The tensor, for messages.
          method: The name of the method.
          options: Its hyperparameters.
          who: The names of the models, of which there are as many as are merged.
          base: The base's tensor; None without one.

        Returns:
          The merge; the same object for all tensors of a group.

        Raises:
          RecipeError: If the method refuses the options, or this number of models.
        """
        key = (method, repr(sorted(options.items())), *who)
        try:
            if key not in self.made:
                self.made[key] = self._made(method, options)
            checked = (method, len(who), base is None)
            if checked not in self.checked:
                self.made[key].check_models(len(who), base is not None)
                self.checked.add(checked)
        except (TypeError, ValueError) as error:
            where = self.recipe.at("merge_method")
            raise RecipeError(where, f"{method}, for {job.name}: {error}") from error
        return self.made[key]

    def _made(self, method: str, options: dict[str, Any]) -> Merge:
        if self.entry.merge is not None and method == self.entry.name:
            return self.entry.merge
        seeded = "key" in methods.options_of(method)
        return methods.get(method)(**options, **({"key": self.key} if seeded else {}))


def _collapsed(values: Sequence[Any]) -> Any:
    """Returns the one value if all are equal, else the tuple of them."""
    return values[0] if len(set(values)) == 1 else tuple(values)
