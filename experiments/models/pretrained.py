"""Converts Hugging Face's checkpoints to modules of this package: GPT-2, Llama and OLMo 1."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, PyTree

from experiments.models.gpt import GPT
from experiments.models.llama import Llama
from experiments.models.presets import describe
from sail_jax.architectures.table import Config, count, divided, flag
from sail_jax.checkpoint import load_checkpoint
from sail_jax.trees import path_str

_BLOCK = r"block_(\d+)/"

# Hugging Face's name for each of our leaves, with {} for the number of the block. Some of its
# tensors fuse queries, keys and values. The number after the colon selects the third.
_GPT2 = {
    "token_embed/embedding": "wte.weight",
    "position_embed": "wpe.weight",
    "block_{}/ln_1/scale": "h.{}.ln_1.weight",
    "block_{}/ln_1/bias": "h.{}.ln_1.bias",
    **{
        f"block_{{}}/{ours}/{leaf}": f"h.{{}}.attn.c_attn.{theirs}:{part}"
        for part, ours in enumerate("qkv")
        for leaf, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "block_{}/o/kernel": "h.{}.attn.c_proj.weight",
    "block_{}/o/bias": "h.{}.attn.c_proj.bias",
    "block_{}/ln_2/scale": "h.{}.ln_2.weight",
    "block_{}/ln_2/bias": "h.{}.ln_2.bias",
    "block_{}/in/kernel": "h.{}.mlp.c_fc.weight",
    "block_{}/in/bias": "h.{}.mlp.c_fc.bias",
    "block_{}/out/kernel": "h.{}.mlp.c_proj.weight",
    "block_{}/out/bias": "h.{}.mlp.c_proj.bias",
    "ln/scale": "ln_f.weight",
    "ln/bias": "ln_f.bias",
    "unembed/kernel": "lm_head.weight",
}
_LLAMA = {
    "token_embed/embedding": "embed_tokens.weight",
    "block_{}/norm_1/scale": "layers.{}.input_layernorm.weight",
    **{f"block_{{}}/{n}/kernel": f"layers.{{}}.self_attn.{n}_proj.weight" for n in "qkvo"},
    "block_{}/norm_2/scale": "layers.{}.post_attention_layernorm.weight",
    **{
        f"block_{{}}/{n}/kernel": f"layers.{{}}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")
    },
    "norm/scale": "norm.weight",
    "unembed/kernel": "lm_head.weight",
}
# Buffers that some releases saved with the parameters.
_BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")


class Pretrained(NamedTuple):
    """A network read from a checkpoint.

    Attributes:
      module: The module.
      variables: Its variables: `module.apply(variables, tokens)` computes logits.
      config: Its configuration, of type "flax_gpt" or "flax_llama"; see `presets.build`.
    """

    module: nn.Module
    variables: PyTree
    config: dict[str, Any]


def load_pretrained(
    path: str | Path,
    *,
    vocab: int | None = None,
    context: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Pretrained:
    """Loads a network from a local folder in the format of Hugging Face.

    Args:
      path: The folder with `config.json` and the weights.
      vocab: The number of tokens of the data for the network. The vocabulary of the checkpoint may
        be padded up to the next multiple of 512. None skips the check.
      context: The longest sequence of the data. None skips the check.
      dtype: The dtype of the parameters.

    Returns:
      The network, with all positions of the checkpoint.

    Raises:
      ValueError: If `config.json` cannot be read, it describes a model that the modules cannot
        represent, the vocabulary or the positions do not match, or as `convert`.
      CheckpointError: If the weights are missing or damaged.
    """
    folder = Path(path)
    module = module_of(read_config(folder))
    # Embeddings beyond the tokens may be padding.
    if vocab is not None and not vocab <= module.vocab <= -(-vocab // 512) * 512:
        raise ValueError(
            f"{folder}: the checkpoint's vocabulary has {module.vocab} tokens, the data's {vocab}"
        )
    if context is not None and context > module.context:
        raise ValueError(
            f"{folder}: sequences of {context} were requested, but the checkpoint has positions "
            f"for {module.context}"
        )
    variables = convert(load_checkpoint(folder), module, dtype=dtype)
    return Pretrained(module, variables, describe(module))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the `config.json` of a folder.

    Args:
      folder: The folder of a checkpoint.

    Returns:
      The entries.

    Raises:
      ValueError: If the file is missing or is not a JSON object.
    """
    told = Path(folder) / "config.json"
    if not told.is_file():
        raise ValueError(f"{folder}: expected a folder with config.json and the weights")
    try:
        config = json.loads(told.read_text())
    except ValueError as error:
        raise ValueError(f"{told} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{told}: expected an object, got {type(config).__name__}")
    return config


def module_of(config: Config) -> GPT | Llama:
    """Creates the module that a configuration of Hugging Face describes.

    Args:
      config: The content of `config.json`, with the `model_type` "gpt2", "llama" or "olmo".

    Returns:
      The module, without parameters.

    Raises:
      ValueError: If an entry is missing or cannot be represented by the modules. The message
        contains the name of the entry.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    if kind in ("llama", "olmo"):
        return _llama(config)
    raise ValueError(f"'model_type' must be 'gpt2', 'llama' or 'olmo', got {kind!r}")


def _gpt2(config: Config) -> GPT:
    """Returns the module of a GPT-2 configuration."""
    # Both are the approximation by tanh, as in `nn.gelu`.
    _demand(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _demand(config, "scale_attn_weights", True)
    _demand(config, "scale_attn_by_inverse_layer_idx", False)
    _demand(config, "add_cross_attention", False)
    width, heads = count(config, "n_embd"), count(config, "n_head")
    return GPT(
        vocab=count(config, "vocab_size"),
        context=count(config, "n_positions"),
        width=width,
        layers=count(config, "n_layer"),
        heads=heads,
        head_dim=divided(width, heads, "n_head heads in n_embd units"),
        hidden=count(config, "n_inner", default=4 * width),
        tied=flag(config, "tie_word_embeddings", default=True),
        layer_norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _llama(config: Config) -> Llama:
    """Returns the module of a Llama or OLMo configuration."""
    olmo = config["model_type"] == "olmo"
    _demand(config, "hidden_act", "silu")
    _demand(config, "attention_bias", False)
    _demand(config, "mlp_bias", False)
    _demand(config, "clip_qkv", None)
    # Older configurations have "rope_theta" at the top level, newer ones in a separate group.
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    rope |= {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    _demand(rope, "rope_type", "default")
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    size = count(config, "head_dim", default=0)
    return Llama(
        vocab=count(config, "vocab_size"),
        context=count(config, "max_position_embeddings", default=2048),
        width=width,
        layers=count(config, "num_hidden_layers"),
        heads=heads,
        head_dim=size or divided(width, heads, "num_attention_heads heads in hidden_size units"),
        hidden=count(config, "intermediate_size"),
        kv_heads=count(config, "num_key_value_heads", default=heads),
        tied=flag(config, "tie_word_embeddings", default=False),
        norm="layernorm" if olmo else "rmsnorm",
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rms_norm_eps=1e-5 if olmo else config.get("rms_norm_eps", 1e-6),
    )


def _demand(config: Config, key: str, *accepted: object) -> None:
    """Checks that an entry has one of the known values; the first is the default of a missing
    entry.
    """
    value = config.get(key, accepted[0])
    if value not in accepted:
        expected = " or ".join(map(repr, accepted))
        raise ValueError(f"the configuration's {key!r} must be {expected} here, got {value!r}")


def convert(
    tensors: Mapping[str, Any], module: GPT | Llama, *, dtype: DTypeLike = jnp.float32
) -> PyTree:
    """Converts the tensors of a checkpoint of Hugging Face to the variables of a module.

    Kernels are transposed where the layouts differ. Fused queries, keys and values are split, and
    heads get their own axis. Buffers that some releases saved are omitted.

    Args:
      tensors: The arrays by their Hugging Face names, with or without the prefix "transformer." or
        "model.".
      module: The module from `module_of`.
      dtype: The dtype of the parameters.

    Returns:
      The variables of the module.

    Raises:
      ValueError: If a tensor is missing, is not used, or does not have the shape that the module
        requires, or if embeddings are tied but the checkpoint's head differs from them. The message
        contains the name of the tensor.
    """
    gpt = isinstance(module, GPT)
    names, prefix = (_GPT2, "transformer.") if gpt else (_LLAMA, "model.")
    left = {name.removeprefix(prefix): x for name, x in tensors.items()}
    left = {name: x for name, x in left.items() if not _BUFFERS.fullmatch(name)}
    # A fused tensor is read three times, so it must be kept after the first read. `left` contains
    # the tensors that were never read.
    have = dict(left)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)

    def leaf(path: jax.tree_util.KeyPath, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Finds the tensor of one of our leaves, and converts it to the leaf's layout."""
        ours = path_str(path).removeprefix("params/")
        layer = re.match(_BLOCK, ours)
        theirs = names[re.sub(_BLOCK, "block_{}/", ours)].format(layer and layer[1])
        theirs, _, part = theirs.partition(":")
        if theirs not in have:
            raise ValueError(f"the tensor {theirs!r} for {ours!r} is missing in the checkpoint")
        left.pop(theirs, None)
        x = _laid_out(np.asarray(have[theirs]), theirs, ours, part, like.shape, gpt)
        return jnp.asarray(x, dtype)

    variables = jax.tree.map_with_path(leaf, shapes)
    if module.tied and "lm_head.weight" in left:
        table = have["wte.weight" if gpt else "embed_tokens.weight"]
        if not np.array_equal(left.pop("lm_head.weight"), table):
            raise ValueError("'lm_head.weight' differs from the embeddings, which are tied")
    if left:
        raise ValueError(f"the network has no place for the checkpoint's {min(left)!r}")
    return variables


def _laid_out(
    x: np.ndarray, theirs: str, ours: str, part: str, shape: tuple[int, ...], gpt: bool
) -> np.ndarray:
    """Converts one of Hugging Face's tensors to our layout.

    GPT-2 stores the kernels of its blocks as [in, out]. All other kernels are [out, in]. Our heads
    have their own axis. `part` selects the third of a fused tensor; "" means not fused.
    """
    want = shape
    if ours.endswith("/kernel"):
        # The output projection of attention reads heads and their units. All others read one axis.
        reads = len(want) - 1 if ours.endswith("o/kernel") else 1
        want = (int(np.prod(want[:reads])), int(np.prod(want[reads:])))
    elif "bias" in ours:
        want = (int(np.prod(want)),)
    turned = ours.endswith("/kernel") and (not gpt or theirs == "lm_head.weight")
    stored = want[::-1] if turned else (*want[:-1], 3 * want[-1]) if part else want
    if x.shape != stored:
        raise ValueError(f"tensor {theirs!r}: expected shape {list(stored)}, got {list(x.shape)}")
    x = x.T if turned else np.split(x, 3, axis=-1)[int(part)] if part else x
    return x.reshape(shape)


def export(variables: PyTree, module: GPT | Llama) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts a network to the tensors and the configuration of a Hugging Face checkpoint.

    This is the inverse of `convert`: `load_pretrained` reads the saved result as the same network.
    Only dropout is lost, because the configuration has no field for it.

    Args:
      variables: The variables of the module, `{"params": ...}`.
      module: The module.

    Returns:
      The arrays by their Hugging Face names, in the layout and with the prefix of GPT-2, Llama or
      OLMo and the dtype of the variables, and the entries of config.json.

    Raises:
      ValueError: If no configuration can describe the module, for example a LayerNorm with an
        epsilon that differs from OLMo's.
    """
    gpt = isinstance(module, GPT)
    names, prefix = (_GPT2, "transformer.") if gpt else (_LLAMA, "model.")
    config = _told_gpt2(module) if gpt else _told_llama(module)
    # A field that the configuration cannot express would be lost silently.
    if _plain(module_of(config)) != _plain(module):
        raise ValueError(f"no configuration of {config['model_type']} describes {module}")
    tensors: dict[str, np.ndarray] = {}
    thirds: dict[str, dict[int, np.ndarray]] = {}

    def leaf(path: jax.tree_util.KeyPath, value: Array) -> None:
        """Converts one of our leaves to Hugging Face's layout; `_laid_out` is the inverse."""
        ours = path_str(path).removeprefix("params/")
        layer = re.match(_BLOCK, ours)
        theirs = names[re.sub(_BLOCK, "block_{}/", ours)].format(layer and layer[1])
        theirs, _, part = theirs.partition(":")
        x = np.asarray(value)
        if ours.endswith("/kernel"):
            reads = x.ndim - 1 if ours.endswith("o/kernel") else 1
            x = x.reshape(int(np.prod(x.shape[:reads])), -1)
            x = x.T if not gpt or theirs == "lm_head.weight" else x
        elif "bias" in ours:
            x = x.reshape(-1)
        full = theirs if theirs == "lm_head.weight" else prefix + theirs
        if part:  # a third of a fused tensor, which is joined below
            thirds.setdefault(full, {})[int(part)] = x
        else:
            tensors[full] = np.ascontiguousarray(x)

    jax.tree.map_with_path(leaf, variables)
    for name, parts in thirds.items():
        tensors[name] = np.concatenate([parts[k] for k in range(3)], -1)
    return tensors, config


def _plain(module: GPT | Llama) -> dict[str, Any]:
    """Returns a module's fields that affect its computation, except dropout."""
    kv_heads = getattr(module, "kv_heads", None) or module.heads
    return {**describe(module), "kv_heads": kv_heads, "dropout": 0.0}


def _told_gpt2(module: GPT) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": module.vocab,
        "n_positions": module.context,
        "n_embd": module.width,
        "n_layer": module.layers,
        "n_head": module.heads,
        "n_inner": module.hidden,
        "tie_word_embeddings": module.tied,
        "layer_norm_epsilon": module.layer_norm_eps,
    }


def _told_llama(module: Llama) -> dict[str, Any]:
    olmo = module.norm == "layernorm"
    return {
        "model_type": "olmo" if olmo else "llama",
        "architectures": ["OlmoForCausalLM" if olmo else "LlamaForCausalLM"],
        "vocab_size": module.vocab,
        "max_position_embeddings": module.context,
        "hidden_size": module.width,
        "num_hidden_layers": module.layers,
        "num_attention_heads": module.heads,
        "num_key_value_heads": module.kv_heads or module.heads,
        "head_dim": module.head_dim,
        "intermediate_size": module.hidden,
        "tie_word_embeddings": module.tied,
        "rope_theta": module.rope_theta,
        "rms_norm_eps": module.rms_norm_eps,
    }
