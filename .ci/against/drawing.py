"""Random adapters of peft over many model types, for the comparison in `adapters`."""

import random
import shutil
from pathlib import Path
from typing import Any

import cases
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from sail_jax.checkpoint import apply_adapter

_D = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
_D |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_D |= {"max_position_embeddings": 96}
_KV = _D | {"num_key_value_heads": 2}
_MOE = _KV | {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
_MOE |= {"moe_intermediate_size": 24, "n_routed_experts": 4, "head_dim": 8}
_MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_MLA |= {"v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 8}
_IMAGE |= {"patch_size": 4, "num_attention_heads": 4, "num_channels": 3}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 96}
_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
_NEO |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 96}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_OPT |= {"vocab_size": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 96}
# The class of each, and how its configuration is made. Names in files and in memory differ in the
# first ones.
FAMILIES = {
    "GPTNeoXForCausalLM": _D,
    "MixtralForCausalLM": _MOE,
    "Qwen3MoeForCausalLM": _MOE,
    "Qwen2MoeForCausalLM": _MOE | {"shared_expert_intermediate_size": 24},
    "OlmoeForCausalLM": _MOE,
    "PhimoeForCausalLM": _MOE,
    "GraniteMoeForCausalLM": _MOE,
    "MiniMaxForCausalLM": _MOE | {"block_size": 32},
    "DeepseekV3ForCausalLM": _MOE | _MLA | {"head_dim": 4, "num_key_value_heads": 4},
    "Ernie4_5_MoeForCausalLM": _MOE | {"moe_num_experts": 3, "moe_k": 2},
    "ViTForImageClassification": _IMAGE,
    "DeiTForImageClassification": _IMAGE,
    "LlamaForCausalLM": _KV,
    "MistralForCausalLM": _KV,
    "Qwen2ForCausalLM": _KV,
    "Gemma2ForCausalLM": _KV | {"head_dim": 8},
    "Phi3ForCausalLM": _KV,
    "PhiForCausalLM": _KV,
    "StableLmForCausalLM": _KV,
    "GPT2LMHeadModel": _GPT,
    "GPTJForCausalLM": _GPT | {"rotary_dim": 4},
    "GPTNeoForCausalLM": _NEO,
    "OPTForCausalLM": _OPT,
    "BertForMaskedLM": _D,
    "FalconForCausalLM": _D,
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
}


def base(kind: str, folder: Path, seed: int) -> Any:
    """Saves a small model of a class with random values, tied or not."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, kind)
    tied = {} if "Image" in kind else {"tie_word_embeddings": bool(seed % 2)}
    model = model_class(model_class.config_class(**(FAMILIES[kind] | tied)))
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape) / 8
    model.save_pretrained(folder)
    return cases.loaded(folder)


def drawn(model: Any, draw: random.Random) -> LoraConfig:
    """Draws what of a model an adapter trains."""
    linear = [n for n, x in model.named_modules() if type(x).__name__ in ("Linear", "Conv1D")]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    wholes = [n for n, x in model.named_modules() if n and [*x.parameters(recurse=False)]]
    wholes = sorted({name.rpartition(".")[2] for name in wholes} - {str(i) for i in range(9)})
    parameters = sorted(
        {
            ".".join(name.split(".")[-2:])
            for name, x in model.named_parameters()
            if ".experts." in name and x.ndim == 3
        }
    )
    targets = draw.sample(ends, min(len(ends), draw.randint(1, 4)))
    settings: dict[str, Any] = {"target_modules": targets, "r": draw.randint(1, 4)}
    settings["lora_alpha"] = draw.choice([1, 4, 7, 16])
    settings["use_rslora"] = draw.random() < 0.2
    settings["use_dora"] = draw.random() < 0.25
    settings["bias"] = draw.choice(["none", "none", "all", "lora_only"])
    if draw.random() < 0.5:
        left = [name for name in wholes if name not in targets]
        settings["modules_to_save"] = draw.sample(left, min(len(left), draw.randint(1, 2)))
    if parameters and not settings["use_dora"] and draw.random() < 0.4:
        settings["target_parameters"] = parameters
    if draw.random() < 0.3:
        settings["rank_pattern"] = {draw.choice(targets): draw.randint(1, 5)}
    if draw.random() < 0.2:
        settings["layers_to_transform"] = [draw.randint(0, 1)]
    if draw.random() < 0.2 and not settings.get("modules_to_save") and not settings["use_dora"]:
        settings["trainable_token_indices"] = draw.sample(range(60), 3)
    return LoraConfig(**settings)


def compared(kind: str, seeds: range, folder: Path) -> cases.Outcome:
    """Compares adapted models with peft's; counts those that differ, and refusals."""
    equal, apart, refused, words = 0, 0, 0, ""
    for seed in seeds:
        draw, place = random.Random(seed), folder / str(seed)
        theirs = None
        while theirs is None:
            shutil.rmtree(place, ignore_errors=True)
            model = base(kind, place / "base", seed)
            try:
                theirs = get_peft_model(model, drawn(model, draw))
            # What peft does not train is drawn again.
            except (ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError):
                continue
        with torch.no_grad():
            for weight in theirs.parameters():
                if weight.requires_grad:
                    weight += torch.randn(weight.shape) / 8
        theirs.save_pretrained(place / "adapter")
        try:
            again = PeftModel.from_pretrained(cases.loaded(place / "base"), place / "adapter")
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError):
            continue  # peft does not load it itself
        want = cases.logits(again.eval())
        try:
            apply_adapter(place / "base", place / "adapter", place / "out")
            ours = cases.loaded(place / "out")
        except (ValueError, RuntimeError) as error:
            refused, words = refused + 1, words or f"; {seed}: {str(error).rpartition(': ')[2]}"
            print(kind, seed, error, flush=True)
            continue
        difference = float((cases.logits(ours) - want).abs().max())
        if difference <= cases.rounding(ours, 16):
            equal += 1
        else:
            apart, words = apart + 1, words or f"; {seed}: {difference:.1e}"
            print(kind, seed, "apart", difference, float(want.abs().max()), flush=True)
        shutil.rmtree(place)
    return cases.Outcome(apart, equal, 0, f"{equal} equal, {refused} refused{words}")
