"""Checkpoints of a few hundred entries: the tensors and configuration of a Llama, and savers."""

import json

import ml_dtypes
import numpy as np

from sail_jax.checkpoint import save_checkpoint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


def shapes(layers=2):
    block = {
        "input_layernorm": (16,),
        "self_attn.q_proj": (16, 16),
        "self_attn.k_proj": (8, 16),
        "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16),
        "post_attention_layernorm": (16,),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
    }
    found = {"model.embed_tokens.weight": (20, 16)}
    for i in range(layers):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": (16,), "lm_head.weight": (20, 16)}


SHAPES = shapes()


def tensors(seed=0, scale=0.3, dtype=ml_dtypes.bfloat16, layers=2):
    """Random tensors of a Llama, its norms' gains about one."""
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.normal(size=shape) + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes(layers).items()
    }


def save(folder, params, config=None):
    extras = {} if config is None else {"config.json": json.dumps(config).encode()}
    save_checkpoint(folder, {name: np.asarray(x) for name, x in params.items()}, extras=extras)
    return folder


def tuned(base, seed, scale=0.05):
    rng = np.random.default_rng(seed)
    return {k: (x + scale * rng.standard_normal(x.shape)).astype(x.dtype) for k, x in base.items()}
