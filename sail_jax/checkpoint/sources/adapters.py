"""Adds LoRA adapters in PEFT's layout to a base, tensor by tensor as it is read.

An adapter is a pair of files, `adapter_config.json` and `adapter_model.safetensors`. `with_adapter`
adds one to a checkpoint, and `adapted` to the tensors of a base. `config_for` makes the content of
the first file. `adapter_weights` sorts an adapter's content by weight; this module combines it with
the base as PEFT's modules do.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sail_jax.checkpoint.contents.configs import patched_config
from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.listing import of_tokenizer
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe.declared import kind
from sail_jax.checkpoint.sources.adapted import Adapted, Named, same
from sail_jax.checkpoint.sources.adapter_config import checked
from sail_jax.checkpoint.sources.adapter_formats import in_peft
from sail_jax.checkpoint.sources.adapter_keys import read_keys, renamed
from sail_jax.checkpoint.sources.adapter_weights import Weight, Weights, lacking
from sail_jax.checkpoint.sources.renamings import Names
from sail_jax.checkpoint.sources.rows import Rows
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import nearest
from sail_jax.configurations import Config, look_up
from sail_jax.merging.tensors import Tensor, Tensors

_VOCABULARY = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")


class _Combined(NamedTuple):
    """A model with its adapter.

    Attributes:
      tensors: All tensors by name.
      rows: The rows of its embedding; None if the base has equally many.
      untied: Whether the head is no longer the embedding.
      notes: Notes for the user.
    """

    tensors: dict[str, Tensor]
    rows: int | None
    untied: bool
    notes: list[str]


def adapted(
    base: Tensors,
    tensors: Tensors,
    config: Config,
    dtype: np.dtype | None = None,
    *,
    model: Config | None = None,
) -> dict[str, Tensor]:
    """Adds a LoRA adapter to the tensors of a base; each sum is computed as it is read.

    A weight becomes W + s B A, where s = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
    `rank_pattern` and `alpha_pattern` give single modules their own r and alpha. Embeddings, and
    weights stored as [in, out], get (B A)^T instead. W is the base layer that the adapter stores
    for the module, or else the weight of the base. Convolutions, stacked experts
    (`target_parameters`), DoRA's magnitudes, biases of B (`lora_bias`) and rows that were trained
    alone (`trainable_token_indices`) are computed as in PEFT. Whole tensors in the adapter
    (`modules_to_save`, biases, saved embeddings) replace the base's.

    If `model` ties the head to the embedding, a change of one side leaves the other unchanged, as
    in PEFT's modules. A stored base layer, and rows that were trained alone, belong to both sides.
    A head that is equal to the embedding in the end stays tied; otherwise it becomes a separate
    tensor.

    References:
      Hu et al., LoRA, 2021 (arXiv 2106.09685); Kalajdzievski, A Rank Stabilization Scaling Factor
      for Fine-Tuning with LoRA, 2023 (arXiv 2312.03732), for `use_rslora`; Liu et al., DoRA, 2024
      (arXiv 2402.09353).
    """
    return _combined(base, tensors, config, model or {}, dtype).tensors


def with_adapter(
    base: Checkpoint, adapter: Checkpoint, *, rename: Callable[[str], str] | None = None
) -> View:
    """Adds an open adapter to an open checkpoint.

    The configuration follows the tensors: `vocab_size` if the adapter resized the vocabulary, and
    `tie_word_embeddings` if only one side of a tie changed. If the adapter's folder has a
    tokenizer, the adapter was trained with it, and its files replace the base's.

    Args:
      base: The checkpoint of the base model.
      adapter: The folder of the adapter.
      rename: Renames weights of the adapter that are missing in the base; None renames none.

    Returns:
      The adapted model as a checkpoint.

    Raises:
      CheckpointError: As `adapted` does.
      ValueError: If a configuration cannot be read.
    """
    model = config_of(base.extras)
    names = Names(base.tensors, model)
    tensors, config, notes = in_peft(adapter, names)
    combined = _combined(base.tensors, tensors, config, model, names=names, rename=rename)
    new = None
    if model and (combined.rows is not None or combined.untied):
        tied = False if combined.untied else None
        new = patched_config(model, rows=combined.rows, tied=tied)
    view = View([base], combined.tensors, new)
    view.extras = _with_tokenizer(view.extras, adapter.extras)
    view.notes = (*notes, *combined.notes)
    return view


def notes_on(base: Checkpoint, adapted: View) -> list[str]:
    """Lists what is missing in an adapter, and its changes to other files than tensors.

    Args:
      base: The base.
      adapted: The result of `with_adapter`.

    Returns:
      Sentences to which the caller adds the name of the model.
    """
    before, after = config_of(base.extras), config_of(adapted.extras)
    notes = list(adapted.notes)
    for key in ("vocab_size", "tie_word_embeddings"):
        old, new = look_up(before, key), look_up(after, key)
        if old != new:
            notes.append(f"{key} is {kind(new)} with its adapter, {kind(old)} without")
    own = (file is not base.extras.get(n) for n, file in tokenizer_files(adapted.extras).items())
    if any(own):
        notes.append("its tokenizer's files are the adapter's")
    return notes


def config_for(
    ranks: Mapping[str, int],
    saved: Iterable[str] = (),
    *,
    base_model: str | None = None,
    bias: str = "none",
    fan_in_fan_out: bool = False,
    task_type: str | None = None,
) -> dict[str, Any]:
    """Makes the content of `adapter_config.json` for factors with the scale 1.

    Args:
      ranks: The rank of the factors, by the name of the module.
      saved: The names of the modules that are stored whole.
      base_model: The name of the base model.
      bias: "all" if biases are stored, else "none".
      fan_in_fan_out: Whether a weight is stored as [in, out].
      task_type: The task, if PEFT has a name for it.

    Returns:
      The content.

    >>> config_for({"a": 2, "b": 1})["rank_pattern"]
    {'^b': 1}
    """
    most = max(ranks.values(), default=1)
    # The config contains one rank for all modules; modules with another rank are listed.
    pattern = {f"^{re.escape(m)}": r for m, r in ranks.items() if r != most}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": pattern,
        "alpha_pattern": dict(pattern),
        "target_modules": sorted(ranks),
        "modules_to_save": sorted(set(saved)) or None,
        "bias": bias,
        "fan_in_fan_out": fan_in_fan_out,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def tokenizer_files(extras: Mapping[str, Path | bytes]) -> dict[str, Path | bytes]:
    """Returns the files of a tokenizer among a checkpoint's plain files.

    Args:
      extras: The files by name.

    Returns:
      The tokenizer's files.
    """
    return {name: file for name, file in extras.items() if of_tokenizer(name)}


def _combined(
    base: Tensors,
    tensors: Tensors,
    config: Config,
    model: Config,
    dtype: np.dtype | None = None,
    names: Names | None = None,
    rename: Callable[[str], str] | None = None,
) -> _Combined:
    """Combines the content of an adapter with the base, weight by weight."""
    if not tensors:
        raise CheckpointError("adapter: expected factors A and B, got no tensors at all")
    read = checked(config, _source(tensors))
    names = Names(base, model) if names is None else names
    if rename is not None:
        tensors = renamed(tensors, read, names, rename)
    weights = Weights.of(read_keys(tensors, read, names), read, base, model, names)
    must, may = lacking(weights, read, names, base, model)
    if must:
        raise CheckpointError(
            f"{_source(tensors)}: its config asks for factors of {_some(must)} ({len(must)} in "
            "all), which it lacks: a part of it may be lost; otherwise list only the trained "
            "modules in target_modules"
        )
    notes = [f"its adapter has no factors for {_some(may)} ({len(may)} in all)"] * bool(may)
    merged: dict[str, Tensor] = dict(base)
    sides = weights.sides
    for name, weight in weights.weights.items():
        if name not in sides:
            merged[name] = _value(name, weight, base.get(name), base, dtype)
    untied = False
    if sides:
        embedding, head = sides
        values = {
            name: _value(name, weight, base[embedding], base, dtype)
            for name, weight in weights.both_sides().items()
        }
        merged[embedding] = values[embedding]
        untied = not same(values[embedding], values[head])
        if untied:
            merged[head] = values[head]
            # BERT and RoBERTa tie the head's bias with its weight.
            outer, _, last = head.rpartition(".decoder.")
            bias, copy = f"{outer}.bias", f"{outer}.decoder.bias"
            if last and bias in merged and copy not in merged:
                merged[copy] = Named(merged[bias], copy)
        elif head in base:
            merged[head] = Named(values[embedding], head)
    return _Combined(merged, _rows(base, merged, _source(tensors)), untied, notes)


def _value(
    name: str, weight: Weight, start: Tensor | None, base: Tensors, dtype: np.dtype | None
) -> Tensor:
    """Combines one weight with the content of the adapter, as PEFT's modules do."""
    if weight.saved is not None:
        return _fitting(name, weight.saved, start)
    own = None if start is None else start.dtype
    if weight.stored is not None:
        start = _fitting(name, weight.stored, start)
    if start is None:
        raise CheckpointError(f"{weight.source}: {name!r} is not in the base{nearest(name, base)}")
    start = start if start.name == name else Named(start, name)
    if weight.change is not None:
        weight.change.check(name, start)
        return Adapted(start, weight.change, own if dtype is None else dtype)
    if weight.rows is None:
        return start
    start = Named(start, name, own)
    delta, rows = weight.rows
    fits = len(start.shape) == 2 and delta.shape == (len(rows), start.shape[1])
    if not fits or max(rows, default=0) >= start.shape[0]:
        raise CheckpointError(
            f"{delta.source}: expected {len(rows)} rows of {name!r} {start.shape}, got shape "
            f"{delta.shape}"
        )
    row = np.arange(start.shape[0])
    part = np.zeros_like(row)
    part[rows], row[rows] = 1, np.arange(len(rows))
    return Rows((start, Named(delta, name, start.dtype)), part, row)


def _fitting(name: str, tensor: Tensor, start: Tensor | None) -> Tensor:
    """Checks a whole tensor that replaces the base's; only its number of rows may differ."""
    if start is not None and start.shape[1:] != tensor.shape[1:]:
        raise CheckpointError(
            f"{tensor.source}: expected {name!r} of shape {start.shape}, got {tensor.shape}"
        )
    return Named(tensor, name)


def _rows(base: Tensors, merged: Tensors, source: str) -> int | None:
    """Returns the number of rows of a resized vocabulary, equal for embedding and head."""
    old = {name: x.shape[0] for name, x in base.items() if role(name) and x.shape}
    new = {name: merged[name].shape[0] for name in merged if role(name) and merged[name].shape}
    changed = {name for name in new if old.get(name, new[name]) != new[name]}
    if not changed:
        return None
    name = min(changed)
    # Tensors with as many rows as the old vocabulary must have as many as the new one.
    for other, rows in new.items():
        if old.get(other, old[name]) == old[name] and rows != new[name]:
            raise CheckpointError(
                f"{source}: {name!r} has {new[name]} rows, but {other!r} has {rows}; save the "
                "adapter with both (modules_to_save), or resize the base first"
            )
    return new[name]


def _with_tokenizer(
    base: Mapping[str, Path | bytes], adapter: Mapping[str, Path | bytes]
) -> dict[str, Path | bytes]:
    """Returns the files of a base with the adapter's tokenizer."""
    files = tokenizer_files(adapter)
    # A complete tokenizer replaces the base's; a single template is added to it.
    whole = any(fnmatch.fnmatchcase(name, part) for name in files for part in _VOCABULARY)
    kept = {name: file for name, file in base.items() if not (whole and of_tokenizer(name))}
    return kept | files


def _source(tensors: Tensors) -> str:
    """Returns the path of an adapter, for messages."""
    return next(iter(tensors.values())).source


def _some(names: list[str]) -> str:
    """Lists the first three names, for messages."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
