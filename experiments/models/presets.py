"""The networks of the papers by name, and networks as configurations.

A configuration is a dictionary with the fields of a module, and `model_type`, the key of the module
in `MODULES`. `sail_jax.architectures.of` reads the same dictionaries.
"""

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
    """Returns a GPT. Its width is the width of all heads together; MLPs are four times as wide."""
    width = heads * head_dim
    sizes = {"width": width, "layers": layers, "heads": heads, "head_dim": head_dim}
    return {"model_type": "flax_gpt", **sizes, "hidden": 4 * width, "tied": True, **more}


def _olmo(layers: int) -> dict[str, Any]:
    """Returns a small OLMo of the paper on overtraining, with the sizes of Table 3.

    It has as many heads as layers, of 64 units, MLPs of 4 widths, 50304 tokens, a context of 1024
    and dropout 0.1.

    Not in the paper: RMSNorm with epsilon 1e-5 and rotary base 10000 (Llama's), keys for every
    query, and tied embeddings (as in OLMo-1B). The table's shapes have 1.8M, 14.2M and 47.8M
    parameters without the embeddings, not the stated 15M, 30M and 90M, and 11.4M, 33.5M and 76.8M
    with them. The paper's muP, of initial scales and learning rates, is `experiments.training.mup`.

    References:
      Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv 2503.19206),
      Table 3.
    """
    sizes = {"width": 64 * layers, "layers": layers, "heads": layers, "head_dim": 64}
    sizes |= {"vocab": 50304, "context": 1024, "hidden": 256 * layers}
    return {"model_type": "flax_llama", **sizes, "tied": True, "dropout": 0.1}


def _resnet(blocks: list[int], *, modified: bool = False) -> dict[str, Any]:
    """Returns a ResNet of He et al. 2016, Table 1, for ImageNet; or "modified", for small images.

    SAIL, Section 4.5, uses "modified" networks for CIFAR and Tiny ImageNet without specifying the
    modification. Here their stem is a 3 x 3 convolution without stride or pooling.
    """
    c = {"model_type": "flax_resnet", "widths": [64, 128, 256, 512], "blocks": blocks}
    return {**c, "outputs": 10 if modified else 1000, "stem": "small" if modified else "standard"}


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Overtrained, Table 3.
        "olmo-15m": _olmo(3),
        "olmo-30m": _olmo(6),
        "olmo-90m": _olmo(9),
        "llama-tiny": {
            **{"model_type": "flax_llama", "vocab": 256, "context": 64, "width": 32, "layers": 2},
            **{"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 64, "tied": False},
        },
        # SAIL 4.1 gives 6 layers of width 384. Heads, context and dropout are nanoGPT's for that
        # size, and the vocabulary is GPT-2's: 30.0M parameters, 10.6M without the embeddings (SAIL:
        # 21M)
        "nanogpt-6x384": _gpt(6, 6, 64, vocab=50257, context=256, dropout=0.2, layer_norm_eps=1e-5),
        # Radford et al. 2019: 124M
        "gpt2-small": _gpt(12, 12, 64, vocab=50257, context=1024, layer_norm_eps=1e-5),
        "gpt-tiny": _gpt(2, 4, 8, vocab=256, context=64, tied=False),
        # SAIL 4.5
        "resnet18": _resnet([2, 2, 2, 2]),
        "resnet34": _resnet([3, 4, 6, 3]),
        "resnet18-modified": _resnet([2, 2, 2, 2], modified=True),
        "resnet34-modified": _resnet([3, 4, 6, 3], modified=True),
        # SAIL, Appendix J: latents of 256 x 256 images, 130M. Only the velocity, without the
        # variances that the released code also outputs
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
    """Returns the configuration of a preset, with new values for some of its fields.

    Args:
      name: The name of the preset, a key of `PRESETS`.
      **changes: New values by field. They are checked by `build`, not here.

    Returns:
      The configuration, a new dictionary.

    Raises:
      ValueError: If there is no such preset. The message contains the closest name, and all names.

    >>> config("gpt2-small", context=256)["context"]
    256
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}{nearest(name, PRESETS)}: {', '.join(PRESETS)}")
    return {**PRESETS[name], **changes}


def of_type(model_type: str) -> Callable[[str], str]:
    """Creates a check that a name belongs to a preset of one type of model.

    A study's config annotates the field for its network with this check.

    Args:
      model_type: The type, a key of `MODULES`.

    Returns:
      A function that returns its argument, and raises `ValueError` if it is not such a preset.

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
    """Builds the module that a configuration describes.

    Args:
      configuration: The fields of the module, and `model_type`, a key of `MODULES`. Lists are
        treated as tuples.

    Returns:
      The module, without parameters; call its `init`.

    Raises:
      ValueError: If the model type or a field is unknown. The message lists the known ones.

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
    # Flax modules are hashed, but JSON only has lists.
    return MODULES[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def describe(module: nn.Module) -> dict[str, Any]:
    """Returns the configuration that a module can be built from: the inverse of `build`.

    Args:
      module: A module of one of the classes in `MODULES`.

    Returns:
      Its model type and all its fields, including defaults, except those that are None. Tuples
      become lists.

    Raises:
      ValueError: If the module has another class.

    >>> describe(build(config("resnet-tiny")))["widths"]
    [8, 16]
    """
    for kind, made in MODULES.items():
        if type(module) is made:
            names = [n for n in type(module).__dataclass_fields__ if n not in ("parent", "name")]
            values = {n: getattr(module, n) for n in names}
            lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
            return {"model_type": kind, **{n: v for n, v in lists.items() if v is not None}}
    raise ValueError(f"no configuration is known for a {type(module).__name__}")
