"""Sorts the keys of an adapter's file by the weight that they belong to.

PEFT wraps modules, and the wrappers appear in its keys. One weight may therefore appear several
times: as its factors (`x.lora_A.weight`), as the weight that they change (`x.base_layer.weight`),
as a copy that was trained whole (`x.modules_to_save.weight`, or simply `x.weight`), as the weight
that the copy replaced (`x.original_module.weight`), and as rows that were trained alone
(`x.token_adapter.trainable_tokens_delta`). This module only sorts the keys.
"""

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.adapter_config import AdapterConfig
from sail_jax.checkpoint.sources.renamings import Names
from sail_jax.merging.tensors import Tensor, Tensors

PREFIX = "base_model.model."
# The rest of a key after the module's name. The adapter's name may come in between.
_FACTOR = re.compile(
    r"(?<=.)\.(?P<what>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?P<end>\.weight|\.bias|)\Z"
)
_PARTS = {
    ("lora_A", ".weight"): "A",
    ("lora_B", ".weight"): "B",
    ("lora_B", ".bias"): "bias",
    ("lora_embedding_A", ""): "A",
    ("lora_embedding_B", ""): "B",
    ("lora_magnitude_vector", ""): "magnitude",
    ("lora_magnitude_vector", ".weight"): "magnitude",
}
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_WRAPPED = ".base_layer"
# The end of a module's name in all keys except that of a plain tensor.
_WRAPPER = re.compile(
    r"(?<=.)\.(?:lora_|base_layer\.|token_adapter\.|modules_to_save\.|original_module\.)"
)
_SAVED, _ORIGINAL = ".modules_to_save.", ".original_module."
# These are saved whole if the vocabulary was resized; `role` contains the names of other families.
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte")


@dataclass
class Pair:
    """The factors of one module or parameter, with related tensors.

    Attributes:
      module: The name of the module.
      nested: The number of wrappers around these factors. If parameters share a module, each
        wrapper surrounds the previous one.
      embedding: Whether they change an embedding.
      parts: The tensors: "A" and "B", "magnitude" of DoRA, "bias" of B.
    """

    module: str
    nested: int
    embedding: bool | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Whole:
    """The whole tensors of an adapter for one name.

    Attributes:
      saved: Trained copies, by key; they replace the weight.
      stored: The original weights, by key: the base of the factors, or the weight before resizing.
    """

    saved: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Stated:
    """The content of an adapter, sorted.

    Attributes:
      source: Where the adapter lies, for messages.
      pairs: Factors, in the order of the keys.
      whole: Whole tensors by the name of the weight.
      tokens: Rows that were trained alone, by module.
    """

    source: str
    pairs: list[Pair] = field(default_factory=list)
    whole: dict[str, Whole] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)


def read_keys(tensors: Tensors, config: AdapterConfig, names: Container[str] = ()) -> Stated:
    """Sorts the tensors of an adapter.

    Args:
      tensors: The tensors of `adapter_model.safetensors`; at least one.
      config: Its config.
      names: The names of the base's tensors.

    Returns:
      The sorted tensors.

    Raises:
      CheckpointError: If a key is unknown, if the config contradicts it, if two adapters have
        factors of one module, or the other factor of a pair is missing.
    """
    stated = Stated(next(iter(tensors.values())).source)
    pairs: dict[tuple[str, int], Pair] = {}
    whole: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise CheckpointError(
                f"{tensor.source}: expected keys '{PREFIX}...' in an adapter, got {key!r}"
            )
        rest = key.removeprefix(PREFIX)
        if match := _FACTOR.search(rest):
            part = _PARTS.get((match["what"], match["end"]))
            end, nested = match.start(), 0
            while rest.endswith(_WRAPPED, 0, end):
                end, nested = end - len(_WRAPPED), nested + 1
            module = rest[:end]
            if part is None or not module:
                raise _no_factor(tensor, key)
            pair = pairs.setdefault((module, nested), Pair(module, nested))
            if part in "AB":
                embedding = match["what"].startswith("lora_embedding")
                if pair.embedding not in (None, embedding):
                    raise _no_factor(tensor, key)
                pair.embedding = embedding
            if part in pair.parts:
                raise CheckpointError(f"{tensor.source}: several adapters for {module!r}")
            pair.parts[part] = tensor
        elif match := _TOKENS.fullmatch(rest):
            if match["module"] in stated.tokens:
                raise CheckpointError(f"{tensor.source}: several adapters for {match['module']!r}")
            stated.tokens[match["module"]] = tensor
        elif ".lora_" in key:
            raise _no_factor(tensor, key)
        else:
            whole[rest] = key, tensor
    stated.pairs = list(pairs.values())
    for pair in stated.pairs:
        _check_pair(pair, config)
    modules = {pair.module for pair in stated.pairs} | stated.tokens.keys()
    for rest, (key, tensor) in whole.items():
        name, saved, announced = _whole(rest, config, modules, names)
        if not announced:
            raise CheckpointError(
                f"{tensor.source}: unknown key {key!r}: it is not a factor, and its module is not "
                f"in modules_to_save {config.modules_to_save or []}"
            )
        entry = stated.whole.setdefault(name, Whole())
        (entry.saved if saved else entry.stored)[key] = tensor
    return stated


def renamed(
    tensors: Tensors, config: AdapterConfig, names: Names, rename: Callable[[str], str]
) -> dict[str, Tensor]:
    """Renames the modules of an adapter whose weights are missing in the base.

    Args:
      tensors: The tensors of `adapter_model.safetensors`.
      config: Its config.
      names: The names of the base's tensors.
      rename: A function from the name of a weight to its new name. It has an effect if the base has
        a weight with the new name.

    Returns:
      The tensors by their new keys.

    Raises:
      CheckpointError: If the config has other entries for a module under its new name, or two
        tensors get the same key.
    """
    new: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        rest = key.removeprefix(PREFIX)
        match = _WRAPPER.search(rest)
        module = rest[: match.start()] if match else rest.rpartition(".")[0]
        end = ".weight" if match else rest[len(module) :]
        name = module + end if names.exactly(module + end) else rename(module + end)
        called = name.removesuffix(end)
        if called != module and name in names:
            for of in (config.scale, config.is_saved, config.tokens, config.parameters):
                if of(module) != of(called):
                    raise CheckpointError(
                        f"{tensor.source}: its config has an entry for {module!r}, which the "
                        f"recipe renames to {called!r}; rename it in the config, too"
                    )
            key = PREFIX + called + rest[len(module) :]
        if key in new:
            raise CheckpointError(f"{tensor.source}: two tensors would be called {key!r}")
        new[key] = tensor
    return new


def _whole(
    rest: str, config: AdapterConfig, modules: Iterable[str], names: Container[str]
) -> tuple[str, bool, bool]:
    """Returns the weight of a whole tensor, and whether it is a listed trained copy."""
    if _SAVED in rest:
        before, _, after = rest.partition(_SAVED)
        # The name of the adapter may come in between: "score.modules_to_save.default.weight".
        _, dot, last = after.partition(".")
        plain = f"{before}.{after}"
        name = f"{before}.{last}" if dot and plain not in names else plain
        return name, True, config.is_saved(before)
    if _ORIGINAL in rest:
        name = rest.replace(_ORIGINAL, ".")
        return name, False, config.is_saved(name.rpartition(".")[0])
    # A wrapper of rows and a wrapper of factors use the same name for the wrapped module.
    name = rest.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
    module, _, parameter = name.rpartition(".")
    if name == rest and config.is_saved(module):
        return name, True, True
    return name, False, (
        (parameter == "bias" and config.bias not in (None, "none"))
        or (name != rest and module in modules)
        or role(name) != ""
        or module.rpartition(".")[2] in _EMBEDDINGS
    )  # fmt: skip


def _check_pair(pair: Pair, config: AdapterConfig) -> None:
    """Raises a CheckpointError unless a pair is complete and matches the config."""
    source = next(iter(pair.parts.values())).source
    for side in "AB":
        if side not in pair.parts:
            raise CheckpointError(f"{source}: lora_{side} of {pair.module!r} is missing")
    if bool(config.use_dora) != ("magnitude" in pair.parts):
        has = "a" if "magnitude" in pair.parts else "no"
        raise CheckpointError(
            f"{source}: {pair.module!r} has {has} lora_magnitude_vector, but its config has "
            f"'use_dora': {bool(config.use_dora)}"
        )
    if "bias" in pair.parts and not config.lora_bias:
        raise CheckpointError(
            f"{source}: {pair.module!r} has a lora_B.bias, but its config has 'lora_bias': False"
        )


def _no_factor(tensor: Tensor, key: str) -> CheckpointError:
    """Makes the error for a key that resembles a factor's."""
    return CheckpointError(f"{tensor.source}: {key!r} is not a factor A or B of an adapter")
