"""Forward passes of known architectures, for certificates.

Each is a pure function `(params, config, inputs) -> outputs` of a flat dictionary of tensors by
their Hugging Face names. It returns the outputs of the configuration's class: those of its heads by
name, the main one first, or the states of a base model. It computes in the precision of the
tensors. A fourth argument, `see`, is called with the name of each layer and its outputs. Its return
value replaces the outputs.
"""

from sail_jax.architectures.forward.text import bert, gpt2, llama, roberta, t5
from sail_jax.architectures.forward.vision import (
    clip,
    clip_images,
    clip_text_model,
    clip_vision_model,
    mlp,
    vit,
)
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = [
    "bert",
    "clip",
    "clip_images",
    "clip_text_model",
    "clip_vision_model",
    "gpt2",
    "llama",
    "mlp",
    "roberta",
    "t5",
    "vit",
]
