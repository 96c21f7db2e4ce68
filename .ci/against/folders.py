"""Folders of architectures without a table in sail-jax.

`sail-jax align` infers the spaces from the forward pass of the class in transformers, brings the
units of one model into the order of another's, and runs both. Here transformers loads the output.
Its logits must equal the original model's, because only the order of roundings changed.
`sail-jax grow` builds the class with other configuration entries, one at a time. This shows the
entry that sets the size of each space, and the tensors of each layer.

The tolerance is eighty roundings of the largest logit, about one for each consecutive operation.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import EPS, Case, Outcome, loaded, logits, sail_jax

TEXT = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
OPT = TEXT | {"ffn_dim": 36, "word_embed_proj_dim": 24, "init_std": 0.3}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": HEADS,
    "Phi3ForCausalLM": GROUPED,
    "Olmo2ForCausalLM": GROUPED,
    # More heads of keys than the network has that its table was found from.
    "CohereForCausalLM": GROUPED | {
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "OPTForCausalLM": {k: v for k, v in OPT.items() if k != "intermediate_size"},
    "GPTNeoXForCausalLM": TEXT,
    # Saved expert by expert, and run with all experts in one tensor.
    "MixtralForCausalLM": HEADS | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": HEADS | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    },
    # A quarter of each head is rotated.
    "StableLmForCausalLM": GROUPED | {"hidden_size": 64},
    "Starcoder2ForCausalLM": GROUPED,
    # Queries, keys and values of each head lie together.
    "BloomForCausalLM": {"vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 4,
                         "initializer_range": 0.3, "pad_token_id": 0},
    "FalconForCausalLM": TEXT,
}  # fmt: skip


# Off in depth alone: they normalise what a layer writes, and added layers write zero but for
# rounding.
INEXACT = {"Gemma2ForCausalLM", "Olmo2ForCausalLM"}


# Run by a forward pass of sail-jax.
OWN = {
    "MixtralForCausalLM": "mixtral in sail_jax", "Qwen3MoeForCausalLM": "qwen3_moe in sail_jax",
}  # fmt: skip


def saved(name: str, seed: int, folder: Path) -> None:
    """Saves a random model. Norms and biases that are ones and zeros would hide mistakes."""
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name]))
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(folder)


def grown(name: str, folder: Path) -> Outcome:
    """Grows a random model to twice its width and depth, and compares it with itself before."""
    saved(name, 0, folder / "a")
    said = sail_jax("grow", folder / "a", folder / "out", "--width", "2x", "--depth", "2x")
    before, after = logits(loaded(folder / "a")), logits(loaded(folder / "out"))
    difference, scale = float((before - after).abs().max()), float(before.abs().max())
    exact = "exactness: the function is preserved" in said
    if exact == (name in INEXACT):
        raise RuntimeError(said.splitlines()[-1])
    if not exact:
        return Outcome(0.0, scale, 0.0, f"not exact, and printed so: off by {difference:.1g}")
    return Outcome(difference, scale, 80 * EPS * scale, "")


def aligned(name: str, folder: Path) -> Outcome:
    """Aligns two random models, and compares the second with itself before."""
    for seed, at in enumerate(("a", "b")):
        saved(name, seed, folder / at)
    said = sail_jax("align", folder / "a", folder / "b", folder / "out")
    by = OWN.get(name, f"{name} in transformers")
    if f"by the forward pass of {by}" not in said:
        raise RuntimeError(said.splitlines()[-1])
    moved = sum(len(line.split()) > 3 and line.split()[1] == "permutation"
                for line in said.splitlines())  # fmt: skip
    before, after = logits(loaded(folder / "b")), logits(loaded(folder / "out"))
    difference = float((before - after).abs().max())
    scale = float(before.abs().max())
    return Outcome(difference, scale, 80 * EPS * scale, f"{moved} spaces aligned")


CASES = [
    Case(name, "a model before and after it is aligned with another", partial(aligned, name))
    for name in MODELS
] + [
    Case(f"{name}, grown", "a model and itself at twice its width and depth", partial(grown, name))
    for name in MODELS
]
