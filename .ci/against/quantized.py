"""Weights of quantised checkpoints.

A small model of transformers is quantised, and sail-jax merges it alone. The weights of the output
are compared with the weights that transformers, or compressed-tensors, computes from the same
codes. All numbers must be equal. In cases called "again", sail-jax writes the codes of a merge of
two models (`requantize: fp8`), and they are also compared with the codes that transformers computes
from the plain merge. GPTQ and AWQ are missing, because transformers uses GPU programs for them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import torch
import transformers
from checkpoints import SIZES, merge
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


def model(folder: Path, seed: int = 1) -> Tensors:
    """Saves a small Llama in bfloat16 and returns its tensors."""
    torch.manual_seed(seed)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.2, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear layer that is quantised."""
    return name.endswith("_proj.weight")


def write(folder: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Writes tensors and what is stated about their codes over a saved model."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": about}
    path.write_text(json.dumps(config))


def ours(folder: Path) -> Tensors:
    """The tensors of sail-jax's output for a model alone."""
    return load_file(merge(folder, folder / "a") / "model.safetensors")


def compared(found: Tensors, wanted: Tensors, note: str = "") -> cases.Outcome:
    """Compares all tensors; another dtype or shape is an error."""
    if unlike := found.keys() ^ wanted.keys():
        raise RuntimeError(f"only one side has {sorted(unlike)[:3]}")
    worst, scale = 0.0, 0.0
    for name, tensor in wanted.items():
        got = found[name]
        if (got.dtype, got.shape) != (tensor.dtype, tensor.shape):
            raise RuntimeError(f"{name}: {got.dtype}{list(got.shape)}, not {tensor.dtype}")
        worst = max(worst, float((got.double() - tensor.double()).abs().max()))
        scale = max(scale, float(tensor.abs().max()))
    return cases.Outcome(worst, scale, 0.0, note)


def theirs(folder: Path, **options: Any) -> Tensors:
    """The tensors of the model as transformers loads it from codes."""
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    loaded = kind.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return {name: x.detach().contiguous() for name, x in loaded.state_dict().items()}


def fp8(folder: Path, *, block: int | None) -> cases.Outcome:
    """FP8 with a scale for each block, or for each tensor, that transformers dequantises."""
    save_fp8(folder / "a", block)
    return compared(ours(folder), theirs(folder / "a"))


def save_fp8(folder: Path, block: int | None, seed: int = 1) -> None:
    """Saves a model in FP8."""
    tensors, codes = model(folder, seed), {}
    for name, tensor in tensors.items():
        if not linear(name):
            codes[name] = tensor
            continue
        rows, columns = tensor.shape
        height, width = (block, block) if block else (rows, columns)
        grid = tensor.float().reshape(rows // height, height, columns // width, width)
        scale = grid.abs().amax((1, 3)) / 448
        codes[name] = (grid / scale[:, None, :, None]).reshape(rows, columns).to(FP8)
        codes[f"{name}_scale_inv"] = scale.contiguous()
    about = {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "dequantize": True},
        **({"weight_block_size": [block, block]} if block else {}),
    }
    write(folder, codes, about)


def fp8_again(folder: Path, *, block: int | None) -> cases.Outcome:
    """A merge written in FP8, that transformers dequantises, and quantises from the plain merge."""
    paths = [folder / name for name in "ab"]
    for seed, path in enumerate(paths):
        save_fp8(path, block, seed)
    (folder / "plain").mkdir()
    plain = load_file(merge(folder / "plain", *paths) / "model.safetensors")
    out = merge(folder, *paths, more="requantize: fp8")
    (folder / "read").mkdir()
    read = load_file(merge(folder / "read", out) / "model.safetensors")
    codes, other = load_file(out / "model.safetensors"), 0
    size = [block, block] if block else None
    config = transformers.FineGrainedFP8Config(weight_block_size=size)
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    for name in filter(linear, plain):
        made = quantise.convert({name: plain[name]})
        other += int((made[name].float() != codes[name].float()).sum())
        scale = made[f"{name}_scale_inv"].reshape(codes[f"{name}_scale_inv"].shape)
        torch.testing.assert_close(codes[f"{name}_scale_inv"], scale, rtol=3e-7, atol=0)
    count = sum(x.numel() for name, x in plain.items() if linear(name))
    note = f"{other} of {count} codes are others in transformers, which multiplies by 1 / scale"
    return compared(read, theirs(out), note)


def compressed(folder: Path, form: str, **stated: Any) -> cases.Outcome:
    """A format of compressed-tensors, whose own program makes the codes and the weights."""
    arguments = QuantizationArgs(**stated)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    program = BaseCompressor.get_value_from_registry(form)
    tensors, codes, wanted = model(folder / "a"), {}, {}
    for name, tensor in tensors.items():
        if not linear(name):
            codes[name] = wanted[name] = tensor
            continue
        parts = program.compress({"weight": tensor, **calibrated(tensor, arguments)}, scheme)
        stem = name.removesuffix("weight")
        codes |= {f"{stem}{key}": part.contiguous() for key, part in parts.items()}
        weight = program.decompress(dict(parts), scheme)["weight"]
        wanted[name] = weight.to(torch.bfloat16).contiguous()
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump(mode="json")}}
    about = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    write(folder / "a", codes, about)
    return compared(ours(folder), wanted)


def compressed_again(folder: Path) -> cases.Outcome:
    """A merge written in FP8 with a scale for each row, that compressed-tensors dequantises."""
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    measured = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=measured)
    program = BaseCompressor.get_value_from_registry("float-quantized")
    paths = [folder / name for name in "ab"]
    for seed, path in enumerate(paths):
        codes = {}
        for name, tensor in model(path, seed).items():
            if not linear(name):
                codes[name] = tensor
                continue
            parts = program.compress({"weight": tensor, **calibrated(tensor, arguments)}, scheme)
            stem = name.removesuffix("weight")
            codes |= {f"{stem}{key}": part.contiguous() for key, part in parts.items()}
            codes[f"{stem}input_scale"] = torch.ones(1)
        groups = {"group_0": scheme.model_dump(mode="json")}
        about = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        write(path, codes, {**about, "config_groups": groups, "ignore": ["lm_head"]})
    out = merge(folder, *paths, more="requantize: fp8")
    (folder / "read").mkdir()
    read = load_file(merge(folder / "read", out) / "model.safetensors")
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    # Its own check of what is stated.
    kept = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    if kept.input_activations.dynamic is not True or kept.weights != arguments:
        raise RuntimeError(f"the output states {stated}")
    tensors, wanted = load_file(out / "model.safetensors"), {}
    for name in read:
        stem = name.removesuffix("weight")
        wanted[name] = tensors[name]
        if linear(name):
            parts = {"weight": tensors[name], "weight_scale": tensors[f"{stem}weight_scale"]}
            weight = program.decompress(parts, scheme)["weight"]
            wanted[name] = weight.to(torch.bfloat16).contiguous()
    return compared(read, wanted)


def calibrated(tensor: torch.Tensor, arguments: QuantizationArgs) -> Tensors:
    """The scales of a weight, and its zeros, as compressed-tensors wants them."""
    size = arguments.group_size or tensor.shape[1]
    groups = tensor.float().unflatten(1, (-1, size))
    if arguments.type == "float" and arguments.num_bits == 4:
        scale = groups.abs().amax(-1) / 6
        if size == 32:
            return {"weight_scale": torch.exp2(scale.log2().ceil()).to(torch.bfloat16)}
        one = 448 / scale.max()
        return {"weight_scale": (scale * one).to(FP8).float(), "weight_global_scale": one.view(1)}
    if arguments.type == "float":
        return {"weight_scale": (groups.abs().amax(-1) / 448).to(torch.bfloat16)}
    most = 1 << (arguments.num_bits - 1)
    if arguments.symmetric:
        scale = (groups.abs().amax(-1) / most).to(torch.bfloat16)
        return {"weight_scale": scale, "weight_zero_point": torch.zeros(scale.shape).char()}
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / (2 * most - 1)).to(torch.bfloat16)
    zero = (-most - low / scale.float()).round().clamp(-most, most - 1)
    return {"weight_scale": scale, "weight_zero_point": zero.char()}


def gpt_oss(folder: Path) -> cases.Outcome:
    """MXFP4 as gpt-oss has it, which transformers dequantises."""
    torch.manual_seed(1)
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2,
        vocab_size=64, layer_types=["full_attention"],
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "a")
    codes = {}
    for name, tensor in load_file(folder / "a" / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes[name] = tensor
            continue
        experts, inputs, rows = tensor.shape
        shape = (experts, rows, inputs // 32)
        codes[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        codes[f"{name}_scales"] = torch.randint(110, 130, shape, dtype=torch.uint8)
    write(folder / "a", codes, {"quant_method": "mxfp4"})
    found = ours(folder)
    loaded = theirs(folder / "a", quantization_config=transformers.Mxfp4Config(dequantize=True))
    return compared(found, loaded)


GROUPS = {"strategy": "group", "group_size": 32}
_CASES: dict[str, tuple[str, Callable[[Path], cases.Outcome]]] = {
    "FP8 of blocks": ("`weight_scale_inv` of 32x32 blocks", partial(fp8, block=32)),
    "FP8 of tensors": ("`weight_scale_inv` of one number", partial(fp8, block=None)),
    "FP8 of blocks, again": ("`requantize: fp8` of two models", partial(fp8_again, block=32)),
    "FP8 of tensors, again": ("`requantize: fp8` of two models", partial(fp8_again, block=None)),
    "compressed-tensors, FP8, channels, again": (
        *("`requantize: fp8` of two models", compressed_again),
    ),
    "MXFP4": ("experts of gpt-oss", gpt_oss),
}
for form, what, arguments in (
    ("pack-quantized", "int4, groups", {"num_bits": 4, **GROUPS}),
    ("pack-quantized", "int4, groups and zeros", {"num_bits": 4, "symmetric": False, **GROUPS}),
    ("pack-quantized", "int8 in words, channels", {"num_bits": 8, "strategy": "channel"}),
    ("pack-quantized", "int3, groups", {"num_bits": 3, **GROUPS}),
    ("int-quantized", "int8, channels", {"num_bits": 8, "strategy": "channel"}),
    (
        *("int-quantized", "int8, channels and zeros"),
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ),
    ("float-quantized", "FP8, channels", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    (
        *("nvfp4-pack-quantized", "NVFP4"),
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    ("mxfp4-pack-quantized", "MXFP4", {"num_bits": 4, "type": "float", **GROUPS}),
):
    _CASES[f"compressed-tensors, {what}"] = (
        f"`{form}`",
        partial(compressed, form=form, **arguments),
    )

CASES = [cases.Case(name, what, run) for name, (what, run) in _CASES.items()]
