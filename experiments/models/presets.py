"""The papers' networks by name: a configuration, as `sail_jax.architectures.of` reads it, holds
the fields of a module and, as `model_type`, which module it is."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn

from experiments.models.gpt import GPT
from experiments.models.llama import Llama
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.models.sit import SiT
from experiments.models.vit import ViT
from sail_jax.checks import nearest

__all__ = ["MODULES", "PRESETS", "build", "config", "describe", "of_type"]

MODULES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "flax_gpt": GPT,
        "flax_llama": Llama,
        "flax_mlp": MLP,
        "flax_resnet": ResNet,
        "flax_sit": SiT,
        "flax_vit": ViT,
    }
)


def _gpt(layers: int, heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    width = heads * head_dim
    sizes = {"width": width, "layers": layers, "heads": heads, "head_dim": head_dim}
    return {"model_type": "flax_gpt", **sizes, "hidden": 4 * width, "tied": True, **more}


def _olmo(layers: int) -> dict[str, Any]:
    """Table 3 of overtrained: as many heads as layers, of 64 units, MLPs of 4 widths, 50304 tokens,
    a context of 1024, dropout 0.1.

    Not in the paper: RMSNorm with epsilon 1e-5 and rotary base 10000 (Llama's), keys for every
    query, and tied embeddings (as OLMo-1B has them). The table's shapes have 1.8M, 14.2M and 47.8M
    parameters beside the embeddings, not the stated 15M, 30M and 90M, and 11.4M, 33.5M and 76.8M
    with them. The paper's muP is a matter of initial scales and rates, and is not here.
    """
    sizes = {"width": 64 * layers, "layers": layers, "heads": layers, "head_dim": 64}
    sizes |= {"vocab": 50304, "context": 1024, "hidden": 256 * layers}
    return {"model_type": "flax_llama", **sizes, "tied": True, "dropout": 0.1}


def _resnet(blocks: list[int], *, modified: bool = False) -> dict[str, Any]:
    """He et al. 2016, Table 1, for ImageNet; "modified", as SAIL 4.5 has it for CIFAR and Tiny
    ImageNet without saying how, by a stem of 3 x 3 without stride or pooling."""
    c = {"model_type": "flax_resnet", "widths": [64, 128, 256, 512], "blocks": blocks}
    return {**c, "outputs": 10 if modified else 1000, "stem": "small" if modified else "standard"}


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # overtrained, Table 3
        "olmo-15m": _olmo(3),
        "olmo-30m": _olmo(6),
        "olmo-90m": _olmo(9),
        "llama-tiny": {
            **{"model_type": "flax_llama", "vocab": 256, "context": 64, "width": 32, "layers": 2},
            **{"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 64, "tied": False},
        },
        # SAIL 4.1 gives 6 layers of width 384; heads, context and dropout are nanoGPT's for that
        # size, the vocabulary GPT-2's: 30.0M parameters, 10.6M beside the embeddings (SAIL: 21M)
        "nanogpt-6x384": _gpt(6, 6, 64, vocab=50257, context=256, dropout=0.2, layer_norm_eps=1e-5),
        # Radford et al. 2019: 124M
        "gpt2-small": _gpt(12, 12, 64, vocab=50257, context=1024, layer_norm_eps=1e-5),
        "gpt-tiny": _gpt(2, 4, 8, vocab=256, context=64, tied=False),
        # SAIL 4.5
        "resnet18": _resnet([2, 2, 2, 2]),
        "resnet34": _resnet([3, 4, 6, 3]),
        "resnet18-modified": _resnet([2, 2, 2, 2], modified=True),
        "resnet34-modified": _resnet([3, 4, 6, 3], modified=True),
        # SAIL, Appendix J: the latents of 256 x 256 images, 130M; the velocity alone, without the
        # variances that the released code also has as outputs
        "sit-b/2": {
            **{"model_type": "flax_sit", "side": 32, "channels": 4, "classes": 1000, "patch": 2},
            **{"width": 768, "layers": 12, "heads": 12, "head_dim": 64, "hidden": 3072},
        },
        "sit-tiny": {
            **{"model_type": "flax_sit", "side": 8, "channels": 1, "classes": 10, "patch": 2},
            **{"width": 32, "layers": 2, "heads": 4, "head_dim": 8, "hidden": 128},
        },
        "resnet-tiny": {**_resnet([1, 2], modified=True), "widths": [8, 16]},
    }
)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a preset with other values for some of its fields.

    >>> config("gpt2-small", context=256)["context"]
    256
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}{nearest(name, PRESETS)}: {', '.join(PRESETS)}")
    return {**PRESETS[name], **changes}


def of_type(model_type: str) -> Callable[[str], str]:
    """What a config's field that names a preset of one type is checked with.

    >>> of_type("flax_sit")("sit-tiny")
    'sit-tiny'
    """
    names = [name for name, preset in PRESETS.items() if preset["model_type"] == model_type]

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}{nearest(name, names)}")
        return name

    return check


def build(configuration: Mapping[str, Any]) -> nn.Module:
    """The module of a configuration; ValueError, naming what it knows, for another model.

    >>> build(config("llama-tiny", layers=1)).layers
    1
    """
    kind = configuration.get("model_type")
    if not isinstance(kind, str) or kind not in MODULES:
        raise ValueError(f"'model_type' must be one of {', '.join(MODULES)}, got {kind!r}")
    fields = {k: v for k, v in configuration.items() if k != "model_type"}
    allowed = getattr(MODULES[kind], "__dataclass_fields__", {})
    if unknown := sorted(set(fields) - {k for k in allowed if k not in ("parent", "name")}):
        raise ValueError(f"{kind} has no field {unknown[0]!r}{nearest(unknown[0], allowed)}")
    return MODULES[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of a module: what `build` made it of, with every default stated."""
    for kind, made in MODULES.items():
        if type(module) is made:
            names = [n for n in type(module).__dataclass_fields__ if n not in ("parent", "name")]
            values = {n: getattr(module, n) for n in names}
            lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
            return {"model_type": kind, **{n: v for n, v in lists.items() if v is not None}}
    raise ValueError(f"no configuration is known for a {type(module).__name__}")
