"""Which table a configuration asks for."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sail_jax.architectures import flax, forward, text, vision
from sail_jax.architectures.forward.inputs import Inputs, both, images, of_part, tokens, vectors
from sail_jax.architectures.table import Config, Rules

__all__ = ["Architecture", "of"]


class Architecture(NamedTuple):
    """A family of networks.

    Attributes:
      name: What errors and reports call it.
      rules: Its table at a configuration.
      logits: `logits(params, config, inputs)`, None where no forward pass is known.
      inputs: `inputs(config, rng)`, random inputs to run it on.
      causal: Whether outputs at a token predict the next.
    """

    name: str
    rules: Callable[[Config], Rules]
    logits: Callable[[Any, Config, Any], Any] | None = None
    inputs: Inputs = tokens
    causal: bool = False


_FAMILIES = (
    Architecture("gpt2", text.gpt2, forward.gpt2, causal=True),
    Architecture("llama", text.llama, forward.llama, causal=True),
    Architecture("bert", text.bert, forward.bert),
    Architecture("roberta", text.roberta, forward.roberta),
    Architecture("t5", text.t5, forward.t5, both(tokens, tokens)),
    Architecture("vit", vision.vit, forward.vit, images),
    Architecture(
        "clip",
        vision.clip,
        forward.clip,
        both(of_part("text_config", tokens), of_part("vision_config", images)),
    ),
    Architecture("mlp", flax.mlp, forward.mlp, vectors),
    Architecture("flax_mlp", flax.flax_mlp),
    Architecture("flax_resnet", flax.flax_resnet),
    Architecture("flax_gpt", flax.flax_gpt),
    Architecture("flax_llama", flax.flax_llama),
    Architecture("flax_sit", flax.flax_sit),
    Architecture("flax_vit", flax.flax_vit),
)
# model types that are a family under another name
_KIN = {"mistral": "llama", "qwen2": "llama", "qwen3": "llama", "xlm-roberta": "roberta"}
_BY_NAME = {family.name: family for family in _FAMILIES}
_MODEL_TYPES = _BY_NAME | {model_type: _BY_NAME[name] for model_type, name in _KIN.items()}


def of(config: Config) -> Architecture:
    """The family of a configuration, by its `model_type`, or else by its `architectures`.

    Raises ValueError, naming the known types, if there is none: a type that is nearly spelt like
    one of them is another architecture.

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
            f"no table for the architecture {name!r} (known: {', '.join(_MODEL_TYPES)}): draft "
            "one, sail-jax grow CKPT --draft, answer what it asks, and give it, rules=..."
        )
    return _MODEL_TYPES[name]
