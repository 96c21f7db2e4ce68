"""Architectures as data: in which feature space each tensor axis of a known model lives.

A table such as `llama(config)` gives `Rules`, and `rules.spec(params)` gives the spec that
`change_basis`, `growth` and `align` need. `of(config)` finds the architecture of a configuration,
and `of_tree(params)` the configuration of a tree of MaxText or Tunix.
For a model that no table knows, `draft(params)` makes rules to start from.
"""

from sail_jax.architectures import forward
from sail_jax.architectures.detect import Architecture, of
from sail_jax.architectures.draft import Draft, Question, draft
from sail_jax.architectures.flax import (
    flax_gpt,
    flax_llama,
    flax_mlp,
    flax_resnet,
    flax_sit,
    flax_vit,
    mlp,
)
from sail_jax.architectures.frameworks import maxtext, of_tree, tunix
from sail_jax.architectures.table import Rules
from sail_jax.architectures.text import bert, gpt2, llama, roberta, t5
from sail_jax.architectures.vision import clip, clip_text_model, clip_vision_model, vit

__all__ = [
    "Architecture",
    "Draft",
    "Question",
    "Rules",
    "bert",
    "clip",
    "clip_text_model",
    "clip_vision_model",
    "draft",
    "flax_gpt",
    "flax_llama",
    "flax_mlp",
    "flax_resnet",
    "flax_sit",
    "flax_vit",
    "forward",
    "gpt2",
    "llama",
    "maxtext",
    "mlp",
    "of",
    "of_tree",
    "roberta",
    "t5",
    "tunix",
    "vit",
]
