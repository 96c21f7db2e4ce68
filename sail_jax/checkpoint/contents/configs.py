"""Applies the changes of a merge to a config.json."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sail_jax.checkpoint.contents.vocabulary import ROLES
from sail_jax.configurations import LAYER_KEYS
from sail_jax.layer_entries import moved

_SPECIAL = {f"{role}_id" for role in ROLES}


def patched_config(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    rows: int | None = None,
    layers: Sequence[int] | None = None,
    tied: bool | None = None,
    special: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Copies a config and applies the changes of a merge.

    Args:
      config: The config of the base or, without one, of the first model.
      dtype: The name of the output's dtype; None to leave it.
      rows: The size of the vocabulary; None to leave it.
      layers: For each layer of the output, the number of its old layer; None to leave them. It
        determines the number of layers, and every entry that belongs to layers (`layer_entries`).
      tied: Whether the head is the embedding; None to leave it.
      special: The ids of special tokens by their keys, such as "eos_token_id". They replace all
        ids in the config; None to leave them.

    Returns:
      The new config; `config` itself is not changed.

    Raises:
      ValueError: If an entry cannot state the kinds of the layers in their new order.

    >>> patched_config({"n_layer": 2, "vocab_size": 9}, layers=[0, 0, 1], rows=10)
    {'n_layer': 3, 'vocab_size': 10}
    """
    # A deep copy, as text_config is changed too.
    new = json.loads(json.dumps(config))
    # Configs of models with several towers keep the text tower's config under text_config.
    parts = [part for part in (new, new.get("text_config")) if isinstance(part, dict)]
    if dtype is not None:
        keys = [key for key in ("torch_dtype", "dtype") if key in new] or ["torch_dtype"]
        new |= dict.fromkeys(keys, dtype)
    for part in parts:
        if rows is not None and "vocab_size" in part:
            part["vocab_size"] = rows
        if special is not None:
            part |= {key: special.get(key) for key in part if key in _SPECIAL}
        if tied is not None and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = tied
        key = next((key for key in LAYER_KEYS if key in part), None)
        if layers is not None and key is not None:
            old, part[key] = part[key], len(layers)
            if type(old) is int:
                part.update(moved(part, old, layers))
    if tied is not None and not any("tie_word_embeddings" in part for part in parts):
        new["tie_word_embeddings"] = tied
    return new
