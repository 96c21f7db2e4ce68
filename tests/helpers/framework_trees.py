"""Decoders of MaxText and Tunix in plain JAX, written from their public sources, on their trees.

They compute the logits of one text. `tensors` draws a network of Hugging Face.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PATTERN = 6
SIZES = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 11,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama31": {"model_type": "llama", "tie_word_embeddings": False, "rope_scaling": LLAMA31},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 6, "sliding_window": 3, "attn_logit_softcapping": 2.0}
    | {"final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"query_pre_attn_scalar": 6, "sliding_window": 3, "num_hidden_layers": 7}
    | {"rope_local_base_freq": 100.0}
    | {"layer_types": [("full" if n % 6 == 5 else "sliding") + "_attention" for n in range(7)]},
}


def config(kind: str, **others: Any) -> dict[str, Any]:
    """The configuration of a small network of a kind, at Hugging Face."""
    return {"model_type": kind, **SIZES, **CONFIGS[kind], **others}


def tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, Any]:
    """Random tensors by their names at Hugging Face."""
    rng = np.random.default_rng(seed)
    kind, e, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))
    gemma, pair = kind.startswith("gemma"), kind in ("gemma2", "gemma3_text")
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, e),
        "self_attn.k_proj.weight": (kv, e),
        "self_attn.v_proj.weight": (kv, e),
        "self_attn.o_proj.weight": (e, q),
        "mlp.gate_proj.weight": (f, e),
        "mlp.up_proj.weight": (f, e),
        "mlp.down_proj.weight": (e, f),
        "input_layernorm.weight": (e,),
        "post_attention_layernorm.weight": (e,),
    }
    if pair:
        layer |= {f"{n}_feedforward_layernorm.weight": (e,) for n in ("pre", "post")}
    if kind == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (q if n == "q" else kv,) for n in "qkv"}
    if kind in ("qwen3", "gemma3_text"):
        layer |= {f"self_attn.{n}_norm.weight": (config["head_dim"],) for n in "qk"}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], e), "model.norm.weight": (e,)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # Norms of Gemma are near 0, those of others near 1.
        mean = float("norm" in name and not gemma)
        return (mean + 0.3 * rng.standard_normal(shape)).astype(dtype)

    return {name: drawn(name, shape) for name, shape in shapes.items()}


def maxtext(params: Any, tokens: Any, config: dict[str, Any], axis: int = 1) -> jax.Array:
    """MaxText's decoder: its queries, norms and embeddings hold what Hugging Face computes."""
    kind, decoder = config["model_type"], params["decoder"]
    gemma, eps = kind.startswith("gemma"), config["rms_norm_eps"]

    def norm(x: Any, at: Any) -> jax.Array:
        return _rms(x, eps) * at["scale"]

    def layer(x: Any, p: Any, end: str, n: int) -> jax.Array:
        local = "sliding" in config["layer_types"][n] if "layer_types" in config else False
        first = "norm" if gemma else "layer_norm"
        at = p[f"self_attention{end}"]
        y = norm(x, p[f"pre_self_attention_{first}{end}"])
        q, k, v = (jnp.tensordot(y, at[i]["kernel"], 1) for i in ("query", "key", "value"))
        if "bias" in at["query"]:
            q, k, v = q + at["query"]["bias"], k + at["key"]["bias"], v + at["value"]["bias"]
        if "query_norm" in at:
            q, k = norm(q, at["query_norm"]), norm(k, at["key_norm"])
        q, k = (_rope(i, config, local, pairs="rope_scaling" in config) for i in (q, k))
        if kind in ("qwen2", "qwen3"):
            q = q * config["head_dim"] ** -0.5
        if kind == "gemma3_text":
            q = q * config["query_pre_attn_scalar"] ** -0.5
        out = jnp.tensordot(_attend(q, k, v, config, local), at["out"]["kernel"], 2)
        if kind in ("gemma2", "gemma3_text"):
            out = norm(out, p[f"post_self_attention_norm{end}"])
        x = x + out
        y = norm(x, p[f"{'pre_ffw_norm' if gemma else 'post_self_attention_layer_norm'}{end}"])
        mlp = p[f"mlp{end}"]
        out = _act(y @ mlp["wi_0"]["kernel"], gemma) * (y @ mlp["wi_1"]["kernel"])
        out = out @ mlp["wo"]["kernel"]
        if kind in ("gemma2", "gemma3_text"):
            out = norm(out, p[f"post_ffw_norm{end}"])
        return x + out

    def cut(tree: Any, n: int) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.index_in_dim(x, n, min(axis, x.ndim - 1), False), tree
        )

    x = params["token_embedder"]["embedding"][tokens]
    for n in range(config["num_hidden_layers"]):
        if kind == "gemma2":
            folder = (
                cut(decoder["layers"], n // 2)
                if "layers" in decoder
                else decoder[f"layers_{n // 2}"]
            )
            x = layer(x, folder, ("_local", "_global")[n % 2], n)
        elif kind == "gemma3_text" and "layers_0" not in decoder:
            whole = config["num_hidden_layers"] // PATTERN * PATTERN
            if n < whole:
                p = cut(decoder["layers"][f"layers_{n % PATTERN}"], n // PATTERN)
            else:
                p = decoder["layers_remainder"][f"layers_{n - whole}"]
            x = layer(x, p, "", n)
        else:
            p = cut(decoder["layers"], n) if "layers" in decoder else decoder[f"layers_{n}"]
            x = layer(x, p, "", n)
    x = norm(x, decoder["decoder_norm"])
    if "logits_dense" in decoder:
        return x @ decoder["logits_dense"]["kernel"]
    logits = x @ params["token_embedder"]["embedding"].T
    if gemma:
        logits = logits / config["hidden_size"] ** 0.5
    return _cap(logits, config.get("final_logit_softcapping"))[:, : config["vocab_size"]]


def tunix(params: Any, tokens: Any, config: dict[str, Any]) -> jax.Array:
    """Tunix's decoders, of Llama 3, Qwen 2 and 3, and Gemma 1 to 3."""
    kind, eps = config["model_type"], config["rms_norm_eps"]
    gemma = kind.startswith("gemma")

    def norm(x: Any, at: Any) -> jax.Array:
        return _rms(x, eps) * (1 + at["scale"] if gemma else at["w"])

    x = params["embedder"]["input_embedding"][tokens]
    x = x * config["hidden_size"] ** 0.5 if gemma else x
    for n in range(config["num_hidden_layers"]):
        p = params["layers"][n] if isinstance(params["layers"], list) else params["layers"][str(n)]
        at = p["attn"]
        local = "sliding" in config["layer_types"][n] if "layer_types" in config else False
        y = norm(x, p["pre_attention_norm" if gemma else "input_layernorm"])
        if gemma:
            if "qkv_einsum" in at:
                q, k, v = jnp.einsum("TD,SNDH->STNH", y, at["qkv_einsum"]["w"])
            else:
                q = jnp.einsum("TD,NDH->TNH", y, at["q_einsum"]["w"])
                k, v = jnp.einsum("SD,CKDH->CSKH", y, at["kv_einsum"]["w"])
            if "_query_norm" in at:
                q, k = norm(q, at["_query_norm"]), norm(k, at["_key_norm"])
        else:
            q, k, v = (jnp.einsum("TD,DNH->TNH", y, at[f"{i}_proj"]["w"]) for i in "qkv")
            if "q_bias" in at:
                q, k, v = (
                    i + at[f"{m}_bias"].reshape(i.shape[1:])
                    for i, m in ((q, "q"), (k, "k"), (v, "v"))
                )
            if "q_norm" in at:
                q, k = norm(q, at["q_norm"]), norm(k, at["k_norm"])
        q, k = _rope(q, config, local), _rope(k, config, local)
        q = q * (config.get("query_pre_attn_scalar") or config["head_dim"]) ** -0.5
        out = at["attn_vec_einsum" if gemma else "o_proj"]["w"]
        out = jnp.einsum("TNH,NHD->TD", _attend(q, k, v, config, local), out)
        if kind in ("gemma2", "gemma3_text"):
            out = norm(out, p["post_attn_norm" if kind == "gemma2" else "post_attention_norm"])
        x = x + out
        y = norm(x, p["pre_ffw_norm" if gemma else "post_attention_layernorm"])
        mlp = p["mlp"]
        out = _act(y @ mlp["gate_proj"]["kernel"], gemma) * (y @ mlp["up_proj"]["kernel"])
        out = out @ mlp["down_proj"]["kernel"]
        x = x + (norm(out, p["post_ffw_norm"]) if kind in ("gemma2", "gemma3_text") else out)
    x = norm(x, params["final_norm"])
    if "lm_head" in params:
        return x @ params["lm_head"]["w"]
    logits = x @ params["embedder"]["input_embedding"].T
    return _cap(logits, config.get("final_logit_softcapping"))[:, : config["vocab_size"]]


def _rms(x: Any, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def _act(x: Any, gemma: bool) -> jax.Array:
    return jax.nn.gelu(x, approximate=True) if gemma else jax.nn.silu(x)


def _cap(x: Any, bound: float | None) -> jax.Array:
    return jnp.tanh(x / bound) * bound if bound else x


def _rope(x: Any, config: dict[str, Any], local: bool, pairs: bool = False) -> jax.Array:
    """Rotates the units of heads: (first halves, second halves), or pairs side by side."""
    size = x.shape[-1]
    base = config.get("rope_local_base_freq") if local else None
    rate = (base or config["rope_theta"]) ** (-2 * np.arange(size // 2) / size)
    if scaling := config.get("rope_scaling"):
        length = 2 * np.pi / rate
        old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = np.clip((old / length - low) / (high - low), 0, 1)
        rate = (1 - smooth) * rate / factor + smooth * rate
    angle = np.arange(len(x))[:, None] * rate
    sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else jnp.split(x, 2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return jnp.stack([a, b], -1).reshape(x.shape) if pairs else jnp.concatenate([a, b], -1)


def _attend(q: Any, k: Any, v: Any, config: dict[str, Any], local: bool) -> jax.Array:
    """Causal attention in which groups of queries share keys and values."""
    t, heads, size = q.shape
    grouped = q.reshape(t, k.shape[1], -1, size)
    logits = _cap(jnp.einsum("tkgd,skd->kgts", grouped, k), config.get("attn_logit_softcapping"))
    ago = np.arange(t)[:, None] - np.arange(t)
    seen = (ago >= 0) & ((ago < config["sliding_window"]) if local else True)
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30))
    return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(t, heads, size)
