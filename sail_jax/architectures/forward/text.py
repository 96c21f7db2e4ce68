"""Forward passes of language models, from the tensors of a checkpoint.

They cover GPT-2, the Llama family with Granite and its mixtures of experts, BERT, RoBERTa and T5.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sail_jax.architectures.forward.heads import States, outputs
from sail_jax.architectures.forward.layers import (
    See,
    Tensors,
    activation,
    attend,
    attention,
    layer_norm,
    linear,
    rms_norm,
    rotary,
    unseen,
)
from sail_jax.architectures.table import Config, count, flag, setting
from sail_jax.configurations import class_of

Params = Mapping[str, Any]
Tokens = Int[Array | np.ndarray, "batch time"]
Outputs = dict[str, Array]


def gpt2(params: Params, config: Config, tokens: Tokens, see: See = unseen) -> Outputs:
    """Runs GPT-2.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `n_head` and `n_layer`.
      tokens: Token numbers, `(batch, time)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If a tensor or a head is missing, or the activation is unknown.
    """
    t = Tensors(params)
    # Base models are saved without the prefix that models with a head have.
    body = t.maybe("transformer.")
    heads, eps = config["n_head"], config.get("layer_norm_epsilon", 1e-5)
    act = activation(config.get("activation_function", "gelu_new"))

    # GPT-2 stores its kernels as [in, out]; a PyTorch linear layer has [out, in].
    def conv1d(t, name, x):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    wte, mask = body["wte.weight"], jnp.tri(tokens.shape[-1], dtype=bool)
    x = wte[tokens] + body["wpe.weight"][: tokens.shape[-1]]
    for i in range(config["n_layer"]):
        h = body / f"h.{i}."
        qkv = conv1d(h, "attn.c_attn", layer_norm(h, "ln_1", x, eps))
        # Queries and keys have one size. The rest of the projection is values.
        inner = h["attn.c_proj.weight"].shape[0]
        size = (qkv.shape[-1] - inner) // 2
        q, k, v = (
            y.reshape(*y.shape[:2], heads, -1) for y in jnp.split(qkv, (size, 2 * size), axis=-1)
        )
        scale = q.shape[-1] ** -0.5 if config.get("scale_attn_weights", True) else 1.0
        scale /= i + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1
        x = x + conv1d(h, "attn.c_proj", attend(q, k, v, scale=scale, mask=mask))
        y = act(conv1d(h, "mlp.c_fc", layer_norm(h, "ln_2", x, eps)))
        x = see(f"h.{i}", x + conv1d(h, "mlp.c_proj", y))
    stream = {"last_hidden_state": layer_norm(body, "ln_f", x, eps)}
    return outputs("gpt2", t, config, States(stream, tokens, wte))


def llama(params: Params, config: Config, tokens: Tokens, see: See = unseen) -> Outputs:
    """Runs Llama, Mistral (with its sliding window), Qwen2, Qwen3, Granite, or their mixtures.

    Args:
      params: The tensors by name; each expert's tensors separate, or a layer's experts stacked.
      config: The configuration; it must have `num_attention_heads` and `num_hidden_layers`.
      tokens: Token numbers, `(batch, time)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If a tensor is missing, or the activation or the rotary positions are unknown.
    """
    t = Tensors(params)
    # The class for question answering uses GPT-2's name for its body.
    body = t.maybe("model.").maybe("transformer.")
    heads = config["num_attention_heads"]
    shared = setting(config, "num_key_value_heads", default=heads)
    eps = config.get("rms_norm_eps", 1e-5 if _is_mixtral(config) else 1e-6)
    table = body["embed_tokens.weight"]
    time = np.arange(tokens.shape[-1])
    # [query, key]: the number of positions from each key to the query; negative for later keys.
    back = time[:, None] - time
    by = _multipliers(config)
    x = table[tokens] * by.embedding
    for i in range(config["num_hidden_layers"]):
        h = body / f"layers.{i}."
        y = rms_norm(h, "input_layernorm", x, eps)
        q, k, v = (
            linear(h, f"self_attn.{name}_proj", y).reshape(*y.shape[:2], n, -1)
            for name, n in (("q", heads), ("k", shared), ("v", shared))
        )
        if "self_attn.q_norm.weight" in h:
            q, k = (rms_norm(h, f"self_attn.{n}_norm", z, eps) for n, z in (("q", q), ("k", k)))
        size = q.shape[-1]
        frequencies = _frequencies(config, size)
        window = _window(config, i)
        mask = (back >= 0) & ((back < window) if window else True)
        q, k = rotary(q, frequencies), rotary(k, frequencies)
        scale = size**-0.5 if by.attention is None else by.attention
        y = attend(q, k, v, scale=scale, mask=jnp.asarray(mask))
        x = x + linear(h, "self_attn.o_proj", y) * by.residual
        y = rms_norm(h, "post_attention_layernorm", x, eps)
        x = see(f"layers.{i}", x + _feed_forward(h, config, y) * by.residual)
    stream = {"last_hidden_state": rms_norm(body, "norm", x, eps)}
    family = "granite" if _is_granite(config) else "llama"
    return outputs(family, t, config, States(stream, tokens, table))


class _Multipliers(NamedTuple):
    """The factors on embeddings, attention products, the outputs of parts, and logits.

    `attention` is None for the usual 1 / sqrt(size of a head).
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0


def _multipliers(config: Config) -> _Multipliers:
    """Reads Granite's factors from the configuration."""
    if not _is_granite(config):
        return _Multipliers()
    return _Multipliers(
        *(setting(config, f"{key}_multiplier", default=1.0) for key in _Multipliers._fields)
    )


def _is_granite(config: Config) -> bool:
    return str(config.get("model_type") or class_of(config).lower()).startswith("granite")


def _is_mixtral(config: Config) -> bool:
    return config.get("model_type") == "mixtral"


def _feed_forward(h: Tensors, config: Config, y: Array) -> Array:
    """Runs the feed-forward part of a layer: a gated layer, or a router with such layers as
    experts.

    The router computes a weight of each expert for each token, by a softmax over all experts. Only
    the largest weights count. Mixtral and Granite normalise them to sum one, as does Qwen-MoE if
    `norm_topk_prob` is true. Qwen2-MoE adds a shared expert with a separate weight for each token.
    Granite adds one with weight 1.
    """
    act = activation(config.get("hidden_act", "silu"))

    def gated(t: Tensors, gate: str, up: str, down: str) -> Array:
        return linear(t, down, act(linear(t, gate, y)) * linear(t, up, y))

    def joined(gate_up: Array, down: Array) -> Array:
        gate, up = jnp.split(y @ gate_up.T, 2, axis=-1)
        return act(gate) * up @ down.T

    mixture, names, router = h / "mlp.", ("gate_proj", "up_proj", "down_proj"), "gate"
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    if _is_granite(config) and "mlp.gate_proj.weight" not in h:
        mixture, router = h / "block_sparse_moe.", "router.layer"
        stacks = ("input_linear.weight", "output_linear.weight")
    elif "block_sparse_moe.gate.weight" in h:
        mixture, names = h / "block_sparse_moe.", ("w1", "w3", "w2")
    elif "gate.weight" not in mixture:
        return gated(mixture, *names)
    shares = jax.nn.softmax(linear(mixture, router, y).astype(jnp.float32), axis=-1)
    experts = shares.shape[-1]
    always = _is_mixtral(config) or _is_granite(config)
    default = 2 if always else 4 if config.get("model_type") == "qwen2_moe" else 8
    used = count(config, "num_experts_per_tok", default=default)
    if used > experts:
        raise ValueError(
            f"the configuration's 'num_experts_per_tok' is {used}, but a router has {experts} rows"
        )
    largest, which = jax.lax.top_k(shares, used)
    if always or flag(config, "norm_topk_prob", default=False):
        largest = largest / largest.sum(-1, keepdims=True)
    # [batch, time, expert]: 0 for experts that the token does not use.
    weights = (largest[..., None] * jax.nn.one_hot(which, experts)).sum(-2).astype(y.dtype)
    outcomes: Iterable[Array]
    if stacks[0] in mixture:
        outcomes = starmap(joined, zip(*(mixture[name] for name in stacks), strict=True))
    else:
        outcomes = (gated(mixture / f"experts.{e}.", *names) for e in range(experts))
    mixed = sum((weights[..., e, None] * z for e, z in enumerate(outcomes)), jnp.zeros_like(y))
    if "shared_expert_gate.weight" in mixture:
        share = jax.nn.sigmoid(linear(mixture, "shared_expert_gate", y))
        mixed += share * gated(mixture / "shared_expert.", *names)
    if "shared_mlp.input_linear.weight" in h:
        mixed += joined(*(h[f"shared_mlp.{name}put_linear.weight"] for name in ("in", "out")))
    return mixed


def _frequencies(config: Config, size: int) -> Float[Array, "{size}//2"]:
    """Returns the frequencies of rotary positions: plain, "linear" scaling, or Llama 3.1's."""
    # Names differ between releases of transformers: "rope_parameters" is the newer name of the
    # group, and "type" the older name of "rope_type".
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    usual = 1e6 if _is_mixtral(config) else 1e4
    base = rope.get("rope_theta", config.get("rope_theta", usual))
    f = 1 / base ** (np.arange(0, size, 2) / size)
    if kind == "linear":
        f = f / setting(rope, "factor")
    elif kind == "llama3":
        old = setting(rope, "original_max_position_embeddings")
        low, high = setting(rope, "low_freq_factor"), setting(rope, "high_freq_factor")
        # `old * f / (2 pi)` is the number of turns of a pair within the old context. Pairs with
        # many turns keep their frequency (smooth = 1), slow pairs are divided by the factor, and
        # the frequencies in between are interpolated.
        smooth = np.clip((old * f / (2 * math.pi) - low) / (high - low), 0, 1)
        f = f * (smooth + (1 - smooth) / setting(rope, "factor"))
    elif kind != "default":
        raise ValueError(f"rotary positions of type {kind!r} are not supported")
    return jnp.asarray(f, jnp.float32)


def _window(config: Config, layer: int) -> int | None:
    """Returns a layer's window in tokens, including the token itself; None if it is unlimited."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds:
        return window if kinds[layer] == "sliding_attention" else None
    # Qwen configurations have a window even if it is unused, and use it only in the upper layers.
    if config.get("model_type", "").startswith("qwen"):
        used = config.get("use_sliding_window") and layer >= config.get("max_window_layers", 0)
        return window if used else None
    return window


def bert(params: Params, config: Config, tokens: Tokens, see: See = unseen) -> Outputs:
    """Runs BERT on one segment.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `num_attention_heads` and `num_hidden_layers`.
      tokens: Token numbers, `(batch, time)`, without padding.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If a tensor or a head is missing, or the activation is unknown.
    """
    t = Tensors(params)
    positions = jnp.arange(tokens.shape[-1])
    states = _bert(t.maybe("bert."), config, tokens, positions, see)
    return outputs("bert", t, config, states)


def roberta(params: Params, config: Config, tokens: Tokens, see: See = unseen) -> Outputs:
    """Runs RoBERTa. Its positions start after the padding position and do not count padding.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `num_attention_heads` and `num_hidden_layers`, and may
        have `pad_token_id` (default: 1).
      tokens: Token numbers, `(batch, time)`. Padding is masked.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If `pad_token_id` is not a whole number, a tensor is missing, or the activation is
        unknown.
    """
    t = Tensors(params)
    pad = setting(config, "pad_token_id", default=1)
    if not isinstance(pad, int):
        raise ValueError(f"the configuration's 'pad_token_id' must be a whole number, got {pad!r}")
    # Padding has the position `pad`; real tokens have positions from `pad + 1` on.
    real = tokens != pad
    positions = jnp.cumsum(real, axis=-1) * real + pad
    states = _bert(t.maybe("roberta."), config, tokens, positions, see, real)
    return outputs("roberta", t, config, states)


def _bert(
    t: Tensors, config: Config, tokens: Tokens, positions: Array, see: See,
    real: Array | None = None,
) -> States:  # fmt: skip
    """Computes the states of BERT; `real` marks tokens other than padding."""
    eps, act = config.get("layer_norm_eps", 1e-12), activation(config.get("hidden_act", "gelu"))
    e = t / "embeddings."
    x = e["word_embeddings.weight"][tokens] + e["position_embeddings.weight"][positions]
    # All tokens belong to the first of the two segments.
    x = layer_norm(e, "LayerNorm", x + e["token_type_embeddings.weight"][0], eps)
    qkvo = "attention.self.query attention.self.key attention.self.value attention.output.dense"
    mask = None if real is None else real[:, None, None, :]
    if config.get("is_decoder"):
        causal = jnp.tri(tokens.shape[-1], dtype=bool)
        mask = causal if mask is None else causal & mask
        # Padding before the first token has nothing to attend to, so it may attend to itself.
        mask |= ~mask.any(-1, keepdims=True) & jnp.eye(tokens.shape[-1], dtype=bool)
    for i in range(config["num_hidden_layers"]):
        h = t / f"encoder.layer.{i}."
        y = attention(h, qkvo, x, config["num_attention_heads"], mask=mask)
        x = layer_norm(h, "attention.output.LayerNorm", x + y, eps)
        y = linear(h, "output.dense", act(linear(h, "intermediate.dense", x)))
        x = see(f"encoder.layer.{i}", layer_norm(h, "output.LayerNorm", x + y, eps))
    out = {"last_hidden_state": x}
    if "pooler.dense.weight" in t:
        out["pooler_output"] = jnp.tanh(linear(t, "pooler.dense", x[:, 0]))
    return States(out, tokens, e["word_embeddings.weight"])


def t5(params: Params, config: Config, tokens: tuple[Tokens, Tokens], see: See = unseen) -> Outputs:
    """Runs T5 on tokens of the encoder and of the decoder, without padding.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `num_heads`, `num_layers` and `d_model`.
      tokens: Token numbers of the encoder and of the decoder, each `(batch, time)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If a tensor or a head is missing, or the activation is unknown.
    """
    t, (source, target) = Tensors(params), tokens
    body = t.maybe("transformer.")
    table = body["shared.weight"]
    memory = _t5(body, config, "encoder", table[source], None, see)
    # Classes without a decoder use the encoder's output.
    if class_of(config).endswith(("EncoderModel", "ForTokenClassification")):
        stream = {"last_hidden_state": memory}
    else:
        stream = {"last_hidden_state": _t5(body, config, "decoder", table[target], memory, see)}
        stream["encoder_last_hidden_state"] = memory
    return outputs("t5", t, config, States(stream, source, table))


def _t5(t: Tensors, config: Config, tower: str, x: Array, memory: Array | None, see: See) -> Array:
    """Computes the last states of one tower. With `memory`, the encoder's, it is the decoder."""
    heads, eps = config["num_heads"], config.get("layer_norm_epsilon", 1e-6)
    kind = config.get("feed_forward_proj", "relu")
    # In T5 v1.1, "gated-gelu" means the tanh approximation.
    act = activation("gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-"))
    decodes = memory is not None
    buckets = _buckets(x.shape[1], config, bidirectional=not decodes)
    # The first layer of a tower stores the relative position biases of all its layers.
    first = t / f"{tower}.block.0.layer.0.SelfAttention."
    bias = jnp.moveaxis(first["relative_attention_bias.weight"][buckets], -1, 0)
    mask = jnp.tri(x.shape[1], dtype=bool) if decodes else None
    count = config["num_layers"]
    count = setting(config, "num_decoder_layers", default=count) if decodes else count
    for i in range(count):
        h = t / f"{tower}.block.{i}."
        y = rms_norm(h, "layer.0.layer_norm", x, eps)
        h0 = h / "layer.0.SelfAttention."
        # T5 does not divide attention logits by sqrt(size of a head).
        x = x + attention(h0, "q k v o", y, heads, scale=1.0, bias=bias, mask=mask)
        if decodes:
            y = rms_norm(h, "layer.1.layer_norm", x, eps)
            h1 = h / "layer.1.EncDecAttention."
            # Attention between the towers has no relative positions, so it has no bias.
            x = x + attention(h1, "q k v o", y, heads, source=memory, scale=1.0)
        last = "layer.2." if decodes else "layer.1."
        y = rms_norm(h, f"{last}layer_norm", x, eps)
        f = h / f"{last}DenseReluDense."
        gated = "wi_0.weight" in f
        y = act(linear(f, "wi_0", y)) * linear(f, "wi_1", y) if gated else act(linear(f, "wi", y))
        x = see(f"{tower}.block.{i}", x + linear(f, "wo", y))
    return rms_norm(t, f"{tower}.final_layer_norm", x, eps)


def _buckets(n: int, config: Config, *, bidirectional: bool) -> Int[np.ndarray, "query key"]:
    """Assigns a bucket to each relative position: near distances have their own, far ones share."""
    count = config.get("relative_attention_num_buckets", 32)
    far = config.get("relative_attention_max_distance", 128)
    # ahead[query, key] is the distance from the query forward to the key.
    ahead = np.arange(n) - np.arange(n)[:, None]
    offset = np.zeros_like(ahead)
    # An encoder has half of its buckets for each direction; a decoder only looks back.
    if bidirectional:
        count //= 2
        offset = count * (ahead > 0)
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    # Half of the buckets have one distance each. In the other half, buckets widen geometrically up
    # to the distance `far`, and the last one contains all larger distances.
    exact = count // 2
    # The maximum keeps the logarithm finite at distance 0; `where` discards that value.
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(far / exact)
    large = np.minimum(exact + (ratio * (count - exact)).astype(int), count - 1)
    return offset + np.where(distance < exact, distance, large)
