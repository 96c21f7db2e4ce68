"""Which table a configuration asks for."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sail_jax.architectures import flax, forward, text, vision
from sail_jax.architectures.table import Config, Rules
from sail_jax.checks import nearest

__all__ = ["Architecture", "of"]


class Architecture(NamedTuple):
    """A family: `rules(config)`, and `logits(params, config, inputs)`, None for Flax modules."""

    name: str
    rules: Callable[[Config], Rules]
    logits: Callable[[Any, Config, Any], Any] | None = None


_LLAMA = ("llama", text.llama, forward.llama)
_ROBERTA = ("roberta", text.roberta, forward.roberta)
_MODEL_TYPES = {
    model_type: Architecture(*family)
    for model_type, family in {
        "gpt2": ("gpt2", text.gpt2, forward.gpt2),
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "bert": ("bert", text.bert, forward.bert),
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "t5": ("t5", text.t5, forward.t5),
        "vit": ("vit", vision.vit, forward.vit),
        "clip": ("clip", vision.clip, forward.clip),
        "mlp": ("mlp", flax.mlp, forward.mlp),
        "flax_mlp": ("flax_mlp", flax.flax_mlp),
        "flax_resnet": ("flax_resnet", flax.flax_resnet),
        "flax_gpt": ("flax_gpt", flax.flax_gpt),
        "flax_llama": ("flax_llama", flax.flax_llama),
        "flax_sit": ("flax_sit", flax.flax_sit),
        "flax_vit": ("flax_vit", flax.flax_vit),
    }.items()
}


def of(config: Config) -> Architecture:
    """The family of a configuration, by its `model_type`, or else by its `architectures`.

    Raises ValueError, naming the nearest known types, if there is none.

    >>> of({"model_type": "mistral"}).name, of({"architectures": ["BertForMaskedLM"]}).name
    ('llama', 'bert')
    """
    name, classes = config.get("model_type"), config.get("architectures") or [""]
    if not isinstance(name, str | None):
        raise ValueError(f"the configuration's 'model_type' must be a text, got {name!r}")
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"the configuration's 'architectures' must be texts, got {classes!r}")
    if name is None:
        name = re.sub(r"(For\w+|LMHeadModel|Model)$", "", classes[0]).lower()
        name = {"xlmroberta": "xlm-roberta"}.get(name, name)
    if not name:
        raise ValueError("the configuration states neither 'model_type' nor 'architectures'")
    if name not in _MODEL_TYPES:
        raise ValueError(
            f"no table for the architecture {name!r}{nearest(name, _MODEL_TYPES)}; write rules "
            "for it, starting from sail_jax.architectures.draft(params)"
        )
    return _MODEL_TYPES[name]
