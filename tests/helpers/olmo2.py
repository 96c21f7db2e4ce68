"""A small OLMo 2: tensors under the names that transformers writes, and its logits from the paper.

Its norms come after the branches, x + RMSNorm(f(x)). Those of queries and keys average over the
units of all heads together, and have a gain for each of them, which no axis of a head shows.

References:
  OLMo team, 2 OLMo 2 Furious, 2024 (arXiv 2501.00656), Sec. 2.
"""

import numpy as np

CONFIG = {
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def tensors(seed=0):
    """Random tensors, gains about one."""
    block = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "self_attn.q_norm": (16,), "self_attn.k_norm": (8,),
        "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "post_attention_layernorm": (16,), "post_feedforward_layernorm": (16,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (20, 16), "model.norm": (16,), "lm_head": (20, 16)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": (0.5 * rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def logits(tensors, config):
    """The logits of seven tokens, in float64; a forward pass as `--certify` takes it."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    x = t["model.embed_tokens.weight"][[3, 1, 4, 1, 5, 9, 2]]
    n = len(x)

    def norm(x, name):
        mean = np.mean(x**2, -1, keepdims=True)
        return x / np.sqrt(mean + config["rms_norm_eps"]) * t[f"{name}.weight"]

    def linear(x, name):
        return x @ t[f"{name}.weight"].T

    def rotated(x):  # [head, token, unit]; pair (i, i + size / 2) turns by theta^(-2i / size)
        half = x.shape[-1] // 2
        angle = np.arange(n)[:, None] * config["rope_theta"] ** -(np.arange(half) / half)
        cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def split(x, heads):
        return x.reshape(n, heads, -1).swapaxes(0, 1)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        own = f"{layer}.self_attn"
        q = rotated(split(norm(linear(x, f"{own}.q_proj"), f"{own}.q_norm"), heads))
        k = rotated(split(norm(linear(x, f"{own}.k_proj"), f"{own}.k_norm"), shared))
        v = split(linear(x, f"{own}.v_proj"), shared)
        k, v = (np.repeat(side, heads // shared, 0) for side in (k, v))
        scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        scores = np.exp(np.where(np.tri(n) > 0, scores, -np.inf))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)
        x = x + norm(linear(mixed, f"{own}.o_proj"), f"{layer}.post_attention_layernorm")
        gate = linear(x, f"{layer}.mlp.gate_proj")
        hidden = gate / (1 + np.exp(-gate)) * linear(x, f"{layer}.mlp.up_proj")
        branch = linear(hidden, f"{layer}.mlp.down_proj")
        x = x + norm(branch, f"{layer}.post_feedforward_layernorm")
    return linear(norm(x, "model.norm"), "lm_head")
