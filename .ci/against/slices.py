"""Slices of models whose layers differ.

sail-jax repeats layers of small random networks whose config.json states the kinds of layers, by a
list, by layers' numbers, by counts or by periods. transformers loads the output. The difference
counts tensors that are missing, unknown or of another shape, and layers that differ from the layer
that they were made of in a class or in a plain attribute of one of their modules. Where no entry
can state the kinds in the new order, sail-jax has to refuse the merge and name the entry.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import Case, Outcome, sail_jax

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 4,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
}
TWICE = ((0, 4), (2, 6))
KINDS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, int], ...], str]] = {
    # The class, its entries, the slices, and the entry that a refusal has to name; "" for none.
    "a list of rotary layers": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1, 1, 0]}, TWICE, ""),
    "an interval of rotary layers": ("SmolLM3", {"no_rope_layer_interval": 3}, TWICE, ""),
    "lists of rotary and sparse layers": (
        "Llama4",
        {**EXPERTS, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        TWICE,
        "",
    ),
    "types of attention": (
        "GPTNeo",
        {"num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]]},
        TWICE,
        "",
    ),
    "layers with experts from one to another": (
        "Ernie4_5_Moe",
        {**EXPERTS, "moe_layer_start_index": 1, "moe_layer_end_index": 4},
        TWICE,
        "",
    ),
    "dense layers among those with experts": (
        "Ernie4_5_Moe",
        {**EXPERTS, "moe_layer_start_index": 1, "moe_layer_end_index": 4},
        ((0, 6), (0, 6)),
        "moe_layer_end_index",
    ),
    "the last layers with experts": (
        "Ernie4_5_Moe",
        {**EXPERTS, "moe_layer_start_index": 1, "moe_layer_end_index": 5},
        TWICE,
        "",
    ),
    "dense layers by their numbers": (
        "Qwen3Moe",
        {**EXPERTS, "mlp_only_layers": [1, 4], "decoder_sparse_step": 1},
        TWICE,
        "",
    ),
    "a period of experts": (
        "Qwen2Moe",
        {**EXPERTS, "mlp_only_layers": [], "decoder_sparse_step": 2},
        TWICE,
        "",
    ),
    "sliding windows from a layer on": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        TWICE,
        "",
    ),
    "the first layers are dense": (
        "DeepseekV3",
        {**EXPERTS, **LATENT, "first_k_dense_replace": 2},
        ((0, 2), (1, 6)),
        "",
    ),
    "a first dense layer that comes again": (
        "Dots1",
        {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
        ((0, 3), (0, 6)),
        "first_k_dense_replace",
    ),
    "a period of global attention": ("Gemma3", {"sliding_window": 8}, TWICE, ""),
    "periods that the slices keep": (
        "Jamba",
        {
            **EXPERTS,
            **MAMBA,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        TWICE,
        "",
    ),
    "periods of attention and of experts": (
        "Jamba",
        {
            **EXPERTS,
            **MAMBA,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        ((0, 3), (0, 6)),
        "expert_layer_period",
    ),
    "layers with attention by their numbers": (
        "Lfm2",
        {"full_attn_idxs": [2, 5]},
        TWICE,
        "",
    ),
    "a scale for each place": ("DiffLlama", {}, TWICE, "self_attn.lambda_init"),
    "a scale by the depth": ("MiniCPM3", LATENT, TWICE, "scale_depth"),
    "recurrent layers in turn": (
        "RecurrentGemma",
        {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 32},
        TWICE,
        "",
    ),
    "a table with a part for each layer": (
        "Gemma3n",
        {
            "intermediate_size": [48, 48, 48, 64, 64, 64],
            "activation_sparsity_pattern": [0.0] * 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 48,
            "laurel_rank": 4,
        },
        TWICE,
        "hidden_size_per_layer_input",
    ),
}


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a network: its longest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=lambda m: (len(m), sum(1 for _ in m.modules()))))


def computes(layer: torch.nn.Module) -> dict[str, Any]:
    """The classes of a layer's modules, and their plain attributes except the layer's number."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        found[name] = type(module).__name__
        for key, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | None)
            if plain and key not in ("layer_idx", "layer_id", "training", "_is_full_backward_hook"):
                found[f"{name}.{key}"] = value
    return found


def repeated(kind: str, folder: Path) -> Outcome:
    """Merges slices of one network, and compares the layers of the output with its own."""
    name, entries, slices, refused = KINDS[kind]
    family = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    config = family.config_class(**SIZES | entries)
    family(config).save_pretrained(folder / "a")
    before = family.from_pretrained(folder / "a")
    parts = "".join(
        f"- sources: [{{model: {folder}/a, layer_range: [{start}, {stop}]}}]\n"
        for start, stop in slices
    )
    (folder / "r.yaml").write_text(f"merge_method: passthrough\nslices:\n{parts}")
    try:
        sail_jax("merge", folder / "r.yaml", folder / "out")
    except RuntimeError as error:
        if refused and f"'{refused}'" in str(error):
            return Outcome(0.0, 1.0, 0.0, f"refused: {refused}")
        raise
    if refused:
        raise RuntimeError(f"not refused, although {refused} cannot state the layers")
    after, info = family.from_pretrained(folder / "out", output_loading_info=True)
    wrong = [str(x) for key in info for x in info[key] if info[key] and "_keys" in key]
    order = [i for start, stop in slices for i in range(start, stop)]
    old, new = layers(before), layers(after)
    assert len(new) == len(order)
    for j, i in enumerate(order):
        a, b = computes(old[i]), computes(new[j])
        wrong += [f"layer {j}: {key}" for key in {*a, *b} if a.get(key) != b.get(key)]
    kinds = len({str(sorted(computes(x).items(), key=str)) for x in old})
    note = ", ".join(wrong[:3]) if wrong else f"{kinds} kinds of layers"
    return Outcome(float(len(wrong)), float(len(order)), 0.0, note)


CASES = [
    Case(f"{KINDS[k][0]}: {k}", "tensors and kinds of layers", partial(repeated, k)) for k in KINDS
]
