"""An opened input of a merge: its tensors by their names after renaming, its config, its head."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.planning.layers import role
from sail_jax.checkpoint.recipe.patterns import renaming
from sail_jax.checkpoint.recipe.recipes import Recipe, RecipeError, Ref
from sail_jax.checkpoint.sources.adapters import adapted
from sail_jax.merging.tensors import Tensor

__all__ = [
    "Input",
    "Opened",
    "is_derived",
    "patched_config",
    "unmatched_renames",
]

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DERIVED = re.compile(r"\.(inv_freq|masked_bias|position_ids|num_batches_tracked)$")


class Opened(Protocol):
    """What is needed of a checkpoint."""

    path: Path
    tensors: dict[str, Tensor]
    extras: dict[str, Path]


def is_derived(name: str) -> bool:
    """Buffers that are computed or counted, not learned: absent or unequal without harm."""
    return _DERIVED.search(name) is not None


class Input:
    """A checkpoint of a recipe, with its adapter in it; RecipeError if renaming makes two tensors
    one, ValueError if the adapter does not fit."""

    def __init__(self, ref: Ref, opened: Opened, adapter: Opened | None = None, *, recipe: Recipe):
        self.ref, self.opened = ref, opened
        stored = opened.tensors
        if adapter is not None:
            stored = adapted(
                stored, adapter.tensors, config_of(adapter.extras, "adapter_config.json")
            )
        self.tensors: dict[str, Tensor] = {}
        self.renamed = set()
        renames = {pattern: renaming(pattern, new) for pattern, new in recipe.rename.items()}
        for name, tensor in stored.items():
            new = name
            for pattern, rename in renames.items():
                done = rename(new)
                if done != new:
                    self.renamed.add(pattern)
                new = done
            if new in self.tensors:
                raise RecipeError(
                    recipe.at("rename"), f"{ref}: two tensors would be called {new!r}"
                )
            self.tensors[new] = tensor
        self.config = config_of(opened.extras)

    @property
    def tied(self) -> bool | None:
        """What its config says about the head being the embedding, if anything."""
        return _look_up(self.config, "tie_word_embeddings")

    def embedding(self, width: int | None = None) -> Tensor | None:
        """The (first) token embedding, [tokens, width]."""
        for name, tensor in self.tensors.items():
            fits = len(tensor.shape) == 2 and width in (None, tensor.shape[-1])
            if role(name) == "embedding" and fits:
                return tensor
        return None

    def has_own(self, head: str) -> bool:
        """Whether a head is stored and is not merely a copy of a tied embedding."""
        return head in self.tensors and self.tied is not True

    def get(self, name: str, width: int | None = None) -> tuple[Tensor | None, str]:
        """The tensor called `name`, and a note: for a tied head the embedding instead."""
        if name in self.tensors and not (role(name) == "head" and self.tied is True):
            return self.tensors[name], ""
        if role(name) == "head" and not name.endswith("bias"):
            embedding = self.embedding(width)
            if embedding is not None and (self.tied is not False):
                return embedding, f"{self.ref} is tied: merged by its embedding"
        return self.tensors.get(name), ""


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and key in part:
            return part[key]
    return None


def unmatched_renames(recipe: Recipe, inputs: Iterable[Input]) -> None:
    """RecipeError for a pattern that renames nothing."""
    used = set().union(*(model.renamed for model in inputs))
    for pattern in recipe.rename:
        if pattern not in used:
            raise RecipeError(recipe.at("rename"), f"{pattern!r} renames no tensor of any input")


def patched_config(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    rows: int | None = None,
    layers: Sequence[int] | None = None,
    tied: bool | None = None,
) -> dict[str, Any]:
    """A config with what a merge changes: the dtype, the vocabulary's size, the layers (as numbers
    of those of the old model, for what is listed by layer), whether the head is tied."""
    new = json.loads(json.dumps(config))
    parts = [part for part in (new, new.get("text_config")) if isinstance(part, dict)]
    if dtype is not None:
        keys = [key for key in ("torch_dtype", "dtype") if key in new] or ["torch_dtype"]
        new |= dict.fromkeys(keys, dtype)
    for part in parts:
        if rows is not None and "vocab_size" in part:
            part["vocab_size"] = rows
        if tied is not None and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = tied
        key = next((key for key in LAYER_KEYS if key in part), None)
        if layers is not None and key is not None:
            old, part[key] = part[key], len(layers)
            kinds = part.get("layer_types")
            if isinstance(kinds, list) and len(kinds) == old and max(layers) < len(kinds):
                part["layer_types"] = [kinds[i] for i in layers]
    if tied is not None and not any("tie_word_embeddings" in part for part in parts):
        new["tie_word_embeddings"] = tied
    return new
