"""Feature spaces of torch modules, inferred from their forward pass.

Each case is a small model of transformers, or layers of torch, with random weights, as a function
in JAX (`sail_jax.interop.torch`). Its logits are compared with torch's. The weights are the same,
and only the order of roundings differs. The tolerance is 1e-5 of the largest logit. This is eighty
roundings in float32, about one for each consecutive operation of two layers.

The spec is inferred from one batch and length. It must be the same for another batch and length,
and for one token or image. `check_spec` then changes the basis of every space at the other batch
and length. It uses permutations, and also signs, scales, rotations and invertible maps where the
spec allows them. A case fails if one of these changes has an effect. The last column counts the
changes, and the parameter axes in spaces, among axes with more than one unit. It also lists why the
other axes are fixed.

Experts on one axis are also separated (`unstack`), and then each has separate spaces.

The last case does not need weights. A page's own code traces a Llama of 8 billion parameters on the
meta device. The case counts leaves with other axes than the small Llama's, in the first layers, the
embedding and the head.

Run alone, `python .ci/against/spaces.py [CASE ...]` prints a line for each case.
"""

import collections
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from cases import Case, Outcome
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sail_jax import check_spec, spec_of, stack, unstack
from sail_jax.interop.torch import jax_function
from sail_jax.tracing import Inferred

V = 50
_TOLERANCE = 1e-5
_BODY = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
_BODY |= {"num_attention_heads": 4}
_TEXT = _BODY | {"vocab_size": V, "max_position_embeddings": 32, "pad_token_id": 0}
_TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_IMAGES = _BODY | {"image_size": 16, "patch_size": 4, "num_labels": 5}
_GPT = {"vocab_size": V, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
_GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_MLA = {"moe_intermediate_size": 20, "num_key_value_heads": 4, "n_routed_experts": 8}
_MLA |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_MLA |= {"first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16}
_MLA |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_BART = {"vocab_size": V, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 36}
_BART |= {"decoder_ffn_dim": 36, "max_position_embeddings": 32, "pad_token_id": 0}
_BART |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_T5 = {"vocab_size": V, "d_model": 24, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0}
_WHISPER = {"vocab_size": V, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 4}
_WHISPER |= {"encoder_ffn_dim": 36, "num_mel_bins": 10, "max_source_positions": 16}
_WHISPER |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 36}
_WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_WHISPER |= {"max_target_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None}
_PAIR = {
    "text_config": _TEXT | {"num_hidden_layers": 1, "max_position_embeddings": 16},
    "vision_config": _BODY | {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 16}
    | {"patch_size": 4},
}  # fmt: skip
_MAMBA = {"vocab_size": V, "hidden_size": 24, "state_size": 4, "num_hidden_layers": 2}
_SPEECH = _BODY | {"vocab_size": V, "conv_dim": (16, 16), "conv_kernel": (10, 3)}
_SPEECH |= {"conv_stride": (5, 2), "num_conv_pos_embeddings": 4, "pad_token_id": 0}
_SPEECH |= {"num_conv_pos_embedding_groups": 2}

Inputs = Callable[[int], dict[str, np.ndarray]]


def tokens(other: int) -> dict[str, np.ndarray]:
    """Tokens, another batch and length for every number."""
    size = (2 + other, 7 - 2 * other)
    return {"input_ids": np.random.default_rng(other).integers(3, V, size).astype(np.int32)}


def both(other: int) -> dict[str, np.ndarray]:
    """Tokens for an encoder and for a decoder."""
    given = tokens(other)
    return given | {"decoder_input_ids": given["input_ids"][:, ::-1].copy()}


def images(other: int, size: int = 16, name: str = "pixel_values") -> dict[str, np.ndarray]:
    """Random images."""
    shape = (2 + other, 3, size, size)
    return {name: np.random.default_rng(other).normal(size=shape).astype(np.float32)}


def pairs(other: int) -> dict[str, np.ndarray]:
    """Texts and images."""
    return tokens(other) | images(other)


def sounds(other: int) -> dict[str, np.ndarray]:
    """Spectra of sounds."""
    shape = (2 + other, 10, 32)
    values = np.random.default_rng(other).normal(size=shape).astype(np.float32)
    return {"input_features": values}


def spoken(other: int) -> dict[str, np.ndarray]:
    """Spectra for an encoder and tokens for a decoder."""
    return sounds(other) | {"decoder_input_ids": tokens(other)["input_ids"]}


def waves(other: int) -> dict[str, np.ndarray]:
    """Waves of sounds."""
    shape = (2 + other, 200 + 40 * other)
    return {"input_values": np.random.default_rng(other).normal(size=shape).astype(np.float32)}


def rows(other: int) -> dict[str, np.ndarray]:
    """Sequences of vectors."""
    shape = (2 + other, 7 - 2 * other, 6)
    return {"input": np.random.default_rng(other).normal(size=shape).astype(np.float32)}


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Takes it."""
        return outputs[0]


# Layers of torch, between linear ones.
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], Inputs]] = {
    "LSTM": (lambda: [nn.Linear(6, 8), nn.LSTM(8, 10, 2, batch_first=True, bidirectional=True),
                      First(), nn.Linear(20, 3)], rows),
    "GRU": (lambda: [nn.Linear(6, 8), nn.GRU(8, 10, batch_first=True), First(),
                     nn.Linear(10, 3)], rows),
    "encoder layer": (lambda: [nn.Linear(6, 8),
                               nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
                               nn.Linear(8, 3)], rows),
    "weight norm": (lambda: [weight_norm(nn.Linear(6, 8)), nn.Mish(), weight_norm(nn.Linear(8, 8)),
                             nn.GLU(), nn.Linear(4, 2)], rows),
    "convolutions": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Hardswish(),
                              nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, groups=2), nn.GroupNorm(4, 12),
                              nn.ReLU(), nn.ConvTranspose2d(12, 5, 2, stride=2), nn.Softplus(),
                              nn.Upsample(scale_factor=2), nn.Conv2d(5, 2, 1)],
                     partial(images, name="input")),
    "pixel shuffle": (lambda: [nn.Conv2d(3, 8, 1), nn.ReLU(), nn.PixelShuffle(2),
                               nn.Conv2d(2, 5, 1), nn.Tanh(), nn.PixelUnshuffle(2),
                               nn.Conv2d(20, 2, 1)], partial(images, name="input")),
}  # fmt: skip

# A name, the class, what its configuration has, and its inputs.
MODELS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "Llama": ("LlamaForCausalLM", _HEADS, tokens),
    "Llama, tied": ("LlamaForCausalLM", _HEADS | {"tie_word_embeddings": True}, tokens),
    "Mistral": ("MistralForCausalLM", _HEADS | {"sliding_window": 4}, tokens),
    "Qwen2": ("Qwen2ForCausalLM", _GROUPED, tokens),
    "Qwen3": ("Qwen3ForCausalLM", _HEADS, tokens),
    "Gemma": ("GemmaForCausalLM", _HEADS, tokens),
    "Gemma 2": ("Gemma2ForCausalLM", _HEADS | {"sliding_window": 4}, tokens),
    "Gemma 3": ("Gemma3ForCausalLM", _HEADS | {"sliding_window": 4}, tokens),
    "OLMo": ("OlmoForCausalLM", _GROUPED, tokens),
    "OLMo 2": ("Olmo2ForCausalLM", _GROUPED, tokens),
    "Phi": ("PhiForCausalLM", _TEXT | {"hidden_size": 32}, tokens),
    "Phi-3": ("Phi3ForCausalLM", _GROUPED | {"hidden_size": 32}, tokens),
    "Cohere": ("CohereForCausalLM", _GROUPED, tokens),
    "Granite": ("GraniteForCausalLM", _GROUPED, tokens),
    "GLM": ("GlmForCausalLM", _HEADS, tokens),
    "Nemotron": ("NemotronForCausalLM", _HEADS, tokens),
    "SmolLM3": ("SmolLM3ForCausalLM", _GROUPED, tokens),
    "StableLM": ("StableLmForCausalLM", _GROUPED | {"hidden_size": 32}, tokens),
    "StarCoder2": ("Starcoder2ForCausalLM", _GROUPED, tokens),
    "GPT-NeoX": ("GPTNeoXForCausalLM", _TEXT | {"hidden_size": 32, "rotary_pct": 0.5}, tokens),
    "GPT-2": ("GPT2LMHeadModel", _GPT, tokens),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", _GPT, tokens),
    "GPT-J": ("GPTJForCausalLM", _GPT | {"n_embd": 32, "rotary_dim": 4}, tokens),
    "OPT": ("OPTForCausalLM", _TEXT | {"ffn_dim": 36, "word_embed_proj_dim": 24}, tokens),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": V, "hidden_size": 24, "n_layer": 2, "n_head": 4},
              tokens),
    "Falcon": ("FalconForCausalLM", _TEXT | {"hidden_size": 32}, tokens),
    "Falcon, grouped": ("FalconForCausalLM", _TEXT | {"hidden_size": 32, "num_kv_heads": 2}
                        | {"new_decoder_architecture": True}, tokens),
    "CodeGen": ("CodeGenForCausalLM", _GPT | {"n_embd": 32, "rotary_dim": 4}, tokens),
    "MPT": ("MptForCausalLM", {"vocab_size": V, "d_model": 24, "n_layers": 2, "n_heads": 4,
                               "max_seq_len": 32}, tokens),
    "Mixtral": ("MixtralForCausalLM", _HEADS | {"num_local_experts": 4}, tokens),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", _GROUPED | _EXPERTS
                  | {"hidden_size": 32, "shared_expert_intermediate_size": 28}, tokens),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", _HEADS | _EXPERTS, tokens),
    "OLMoE": ("OlmoeForCausalLM", _GROUPED | _EXPERTS | {"hidden_size": 32}, tokens),
    "GPT-OSS": ("GptOssForCausalLM", _HEADS | {"num_local_experts": 4, "sliding_window": 4},
                tokens),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", _TEXT | _MLA, tokens),
    "Mamba": ("MambaForCausalLM", _MAMBA | {"time_step_rank": 5}, tokens),
    "Mamba 2": ("Mamba2ForCausalLM", _MAMBA | {"num_heads": 6, "head_dim": 8, "n_groups": 2,
                                               "chunk_size": 4}, tokens),
    "BERT": ("BertForMaskedLM", _TEXT, tokens),
    "RoBERTa": ("RobertaForMaskedLM", _TEXT, tokens),
    "DistilBERT": ("DistilBertForMaskedLM", {"vocab_size": V, "dim": 24, "hidden_dim": 36,
                                             "n_layers": 2, "n_heads": 4,
                                             "max_position_embeddings": 32}, tokens),
    "ALBERT": ("AlbertForMaskedLM", _TEXT | {"embedding_size": 10}, tokens),
    "ELECTRA": ("ElectraForMaskedLM", _TEXT | {"embedding_size": 10}, tokens),
    "MPNet": ("MPNetForMaskedLM", _TEXT, tokens),
    "ModernBERT": ("ModernBertForMaskedLM", _TEXT | {"local_attention": 4, "cls_token_id": 1,
                                                     "sep_token_id": 2}, tokens),
    "DeBERTa": ("DebertaV2ForMaskedLM", _TEXT | {"relative_attention": True,
                                                 "pos_att_type": ["c2p", "p2c"],
                                                 "position_buckets": 8, "share_att_key": True,
                                                 "norm_rel_ebd": "layer_norm"}, tokens),
    "T5": ("T5ForConditionalGeneration", _T5, both),
    "BART": ("BartForConditionalGeneration", _BART, both),
    "Pegasus": ("PegasusForConditionalGeneration", _BART, both),
    "ViT": ("ViTForImageClassification", _IMAGES, images),
    "DeiT": ("DeiTForImageClassification", _IMAGES, images),
    "DINOv2": ("Dinov2ForImageClassification", _IMAGES | {"mlp_ratio": 2}, images),
    "BEiT": ("BeitForImageClassification", _IMAGES | {"use_relative_position_bias": True}, images),
    "Swin": ("SwinForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 8,
                                            "depths": [1, 2], "num_heads": [2, 4],
                                            "window_size": 4, "num_labels": 5},
             partial(images, size=32)),
    "SegFormer": ("SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1],
                                                      "sr_ratios": [2, 1], "hidden_sizes": [8, 12],
                                                      "patch_sizes": [7, 3], "strides": [4, 2],
                                                      "num_attention_heads": [2, 3],
                                                      "mlp_ratios": [2, 2], "num_labels": 5},
                  partial(images, size=32)),
    "ConvNeXt": ("ConvNextForImageClassification", {"hidden_sizes": [8, 12], "depths": [1, 1],
                                                    "num_stages": 2, "num_labels": 5},
                 partial(images, size=32)),
    "ConvNeXt V2": ("ConvNextV2ForImageClassification", {"hidden_sizes": [8, 12],
                                                         "depths": [1, 1], "num_stages": 2,
                                                         "num_labels": 5},
                    partial(images, size=32)),
    "ResNet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 24],
                                                "depths": [1, 2], "num_labels": 5},
               partial(images, size=32)),
    "RegNet": ("RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 24],
                                                "depths": [1, 1], "groups_width": 8,
                                                "num_labels": 5}, partial(images, size=32)),
    "CLIP": ("CLIPModel", _PAIR | {"projection_dim": 12}, pairs),
    "SigLIP": ("SiglipModel", _PAIR | {"vision_config": _IMAGES | {"num_hidden_layers": 1}}, pairs),
    "Whisper's encoder": ("models.whisper.modeling_whisper.WhisperEncoder", _WHISPER, sounds),
    "Whisper": ("WhisperForConditionalGeneration", _WHISPER, spoken),
    "wav2vec 2.0": ("Wav2Vec2ForCTC", _SPEECH, waves),
}  # fmt: skip

# Models whose experts lie on one axis.
EXPERTS = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "GPT-OSS", "DeepSeek-V3")


def build(name: str, **other: Any) -> tuple[Any, Inputs]:
    """A small model with random weights, none of them 0 or 1 as at its start, and its inputs.

    Its configuration has also the other entries.
    """
    torch.manual_seed(0)
    if name in LAYERS:
        layers, inputs = LAYERS[name]
        model: Any = nn.Sequential(*layers()).eval()
    else:
        path, settings, inputs = MODELS[name]
        kind: Any = transformers
        for part in path.split("."):
            kind = getattr(kind, part)
        model = kind(kind.config_class(**settings | other)).eval()
    with torch.no_grad():
        for key, x in model.state_dict(keep_vars=True).items():
            if x.is_floating_point():
                gain = "norm" in key.lower() and key.endswith("weight")
                x.copy_(torch.randn(x.shape) * 0.3 + gain)
                if key.endswith("running_var"):
                    x.abs_().add_(0.5)
    return model, inputs


def compare(name: str, each: dict[str, int], _folder: Path) -> Outcome:
    """Runs a case, with some parameters taken apart."""
    model, inputs = build(name)
    net, whole = jax_function(model)
    params = unstack(whole, each)

    def apply(parts: Any, *given: Any) -> Any:
        return net(stack(parts), *given)

    first, second = inputs(0), inputs(1)
    ours = jax.tree.leaves(jax.jit(apply)(params, second))
    with torch.no_grad():
        made = model(**{key: torch.from_numpy(x) for key, x in second.items()})
    made = {"": made} if isinstance(made, torch.Tensor) else made
    names = [key for key in made if "logits" in key] or list(made)[:1]
    theirs = [made[key].numpy() for key in sorted(names)]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    scale = max(float(np.abs(a).max()) for a in theirs)
    found = spec_of(apply, params, first)
    one = {key: x[:1, :1] if key.endswith("ids") else x[:1] for key, x in first.items()}
    if any(spec_of(apply, params, other).spec != found.spec for other in (second, one)):
        raise RuntimeError("inputs of another shape give another spec")
    checked = check_spec(found.spec, apply, params, second)
    if checked.failed:
        trial = checked.failed[0]
        raise RuntimeError(
            f"{len(checked.failed)} of {len(checked.trials)} changes matter: {trial.change} of "
            f"{trial.space or 'all'}, {trial.leaves}"
        )
    note = f"{len(checked.trials)} changes, {axes_listed(found, params)}"
    if found.unknown:
        note += f"; no rule for {', '.join(found.unknown)}"
    return Outcome(difference, scale, _TOLERANCE * scale, note)


def axes_listed(found: Inferred, params: Any) -> str:
    """Counts the axes that are in a space, and lists what fixed the others.

    Args:
      found: The spec of a network.
      params: Its parameters.

    Returns:
      Both, for the table.
    """
    sizes = [n for x in jax.tree.leaves(params) for n in x.shape]
    axes = [axis for leaf in found.spec.leaves for axis in leaf.axes]
    free = sum(bool(axis) for axis in axes)
    reasons = collections.Counter(_short(why) for why in found.why.values())
    listed = ", ".join(f"{n} {why}" for why, n in reasons.most_common())
    return f"{free} of {sum(n > 1 for n in sizes)} axes ({listed or 'all'})"


def _short(why: str) -> str:
    """A reason without its line of source."""
    return re.sub(r" \(.*?\)$", "", why)


_PAGE = Path(__file__).parents[2] / "docs/how_to/own_networks.md"
_MEASURED = """
import json, re, time
import jax.numpy, torch, transformers.models.llama.modeling_llama
def peak():
    return int(re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read())[1]) / 1e3
start, before = time.process_time(), peak()
{code}
took, more = time.process_time() - start, peak() - before
print(json.dumps([took, more, module.num_parameters(), list(found.unknown), found.rules]))
"""


def page(_folder: Path) -> Outcome:
    """Runs the lines of the page for a large model, and compares its axes with the small one's."""
    section = _PAGE.read_text().split("\n## A torch module\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    run = [sys.executable, "-c", _MEASURED.format(code=code)]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    took, memory, count, unknown, large = json.loads(printed.splitlines()[-1])
    model, inputs = build("Llama")
    small = spec_of(*jax_function(model), inputs(0)).rules
    # The order that rotary embeddings fix is of as many units as a head has.
    wrong = [k for k, axes in small.items() if axes != large[k]]
    note = f"{count / 1e9:.1f} billion parameters in {took:.0f} s and {memory:.0f} MB"
    if unknown:
        note += f"; no rule for {', '.join(unknown)}"
    return Outcome(len(wrong), len(small), 0, note)


CASES = [Case(name, MODELS[name][0], partial(compare, name, {})) for name in MODELS]
CASES += [
    Case(f"{name}, each expert", MODELS[name][0], partial(compare, name, {"*.experts.*": 0}))
    for name in EXPERTS
]
CASES += [Case(name, "layers of torch", partial(compare, name, {})) for name in LAYERS]
CASES.append(Case("8 billion parameters", "leaves with other axes than in the small Llama", page))


def main(wanted: list[str]) -> None:
    """Prints a line for each case, and what fixed axes."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                got = case.run(Path(folder))
                line = f"{got.difference / got.scale:.1e} {got.note}"
                line = ("" if got.difference <= got.tolerance else "APART ") + line
            except Exception as error:
                if wanted:
                    raise
                line = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        print(f"{case.name}: {line} [{time.process_time() - start:.1f} s]", flush=True)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
