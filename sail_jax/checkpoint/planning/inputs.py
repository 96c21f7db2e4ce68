"""Describes an opened input of a merge: its renamed tensors, its config and its head.

The traversal of a recipe (`jobs`) and the planner get tensors from an `Input`, which also resolves
a head that is tied to the embedding.
"""

import re
from functools import cached_property

from sail_jax.checkpoint.contents.layers import Role, role
from sail_jax.checkpoint.contents.relations import tied
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe.parts import Recipe, Ref
from sail_jax.checkpoint.recipe.patterns import renaming
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.merging.tensors import Tensor

_DERIVED = re.compile(r"\.(inv_freq|masked_bias|position_ids|num_batches_tracked)$")


def is_derived(name: str) -> bool:
    """Checks whether a tensor is a computed or counted buffer, not a learned parameter.

    Such buffers (rotary frequencies, position ids, counters) may be missing or different.

    Args:
      name: The name of the tensor.

    Returns:
      Whether its last part is the name of such a buffer.

    >>> is_derived("layers.0.rotary_emb.inv_freq"), is_derived("layers.0.mlp.up_proj.weight")
    (True, False)
    """
    return _DERIVED.search(name) is not None


class Renaming:
    """The renaming of a recipe, as a function of the name of a tensor.

    Args:
      recipe: The recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._used = recipe, set()
        self._renames = {pattern: renaming(pattern, new) for pattern, new in recipe.rename.items()}

    def __call__(self, name: str) -> str:
        """Renames a tensor.

        Patterns are applied one after another, each to the previous result, so their order in the
        recipe matters.
        """
        for pattern, rename in self._renames.items():
            done = rename(name)
            if done != name:
                self._used.add(pattern)
            name = done
        return name

    def check_used(self) -> None:
        """Checks that every pattern has renamed a tensor.

        Raises:
          RecipeError: If a pattern renamed no tensor.
        """
        for pattern in self._renames:
            if pattern not in self._used:
                raise RecipeError(
                    self._recipe.at("rename"), f"the pattern {pattern!r} matches no tensor"
                )


class Input:
    """A checkpoint of a recipe, with its tensors renamed.

    Args:
      ref: The checkpoint in the recipe.
      opened: The open checkpoint, with its adapter.
      recipe: The recipe, for messages.
      rename: Its renaming.

    Attributes:
      ref: The checkpoint in the recipe.
      name: Its name in messages.
      opened: The open checkpoint.
      tensors: The tensors by their names after renaming.
      config: The content of its config.json; empty without one.

    Raises:
      RecipeError: If renaming gives two tensors the same name.
      ValueError: If a config cannot be read.
    """

    def __init__(self, ref: Ref, opened: Checkpoint, *, recipe: Recipe, rename: Renaming):
        self.ref, self.name, self.opened = ref, str(ref), opened
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in opened.tensors.items():
            new = rename(name)
            if new in self.tensors:
                raise RecipeError(
                    recipe.at("rename"), f"{ref}: two tensors would be called {new!r}"
                )
            self.tensors[new] = tensor
        self.config = config_of(opened.extras)

    @cached_property
    def tied(self) -> bool | None:
        """Whether the head is the embedding, see `relations.tied`."""
        return tied(self.config, self.tensors)

    def embedding(self, width: int | None = None) -> Tensor | None:
        """Returns the token embedding, the first one if there are several.

        Args:
          width: The size that its last axis must have; None for any.

        Returns:
          A tensor `[tokens, width]`, or None.
        """
        for name, tensor in self.tensors.items():
            fits = len(tensor.shape) == 2 and width in (None, tensor.shape[-1])
            if role(name) == "embedding" and fits:
                return tensor
        return None

    def table(self, part: Role) -> Tensor | None:
        """Returns the matrix over tokens for an input or an output, under any name.

        Args:
          part: "embedding", or "head" for a separate head or else the embedding.

        Returns:
          A tensor `[tokens, width]`, or None.
        """
        for name, tensor in self.tensors.items():
            if part == "head" == role(name) and len(tensor.shape) == 2 and self.has_own(name):
                return tensor
        return self.embedding()

    def has_own(self, head: str) -> bool:
        """Checks whether a head is stored that is not only a copy of a tied embedding."""
        return head in self.tensors and self.tied is not True

    def get(self, name: str, width: int | None = None) -> tuple[Tensor | None, str]:
        """Returns a tensor by name; for a tied head, the embedding.

        Args:
          name: The name of the tensor, after renaming.
          width: The size that the last axis of an embedding must have to stand for a head; None for
            any.

        Returns:
          The tensor, or None if it is missing in the input; and a note for the user, or "".
        """
        if name in self.tensors and not (role(name) == "head" and self.tied is True):
            return self.tensors[name], ""
        if role(name) == "head" and not name.endswith("bias"):
            embedding = self.embedding(width)
            if embedding is not None and (self.tied is not False):
                return embedding, f"{self.ref} is tied: merged by its embedding"
        # A head that its config calls tied is only a copy. It is used here if no embedding has the
        # right width.
        return self.tensors.get(name), ""
