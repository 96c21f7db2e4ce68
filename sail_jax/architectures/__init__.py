"""Architectures as data: the feature space of each tensor axis in known models.

`of(config)` finds the architecture of a configuration. Its `rules(config)` are `Rules`, and
`rules.spec(params)` gives the spec that `change_basis`, `growth` and `align` need. Most tables are
stored in files (`files`) and were found by tracing forward passes. `of_tree(params)` finds the
configuration of a MaxText or Tunix tree. For a model without a table, `draft(params)` makes a first
version of the rules.
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
from sail_jax.architectures.text import t5
from sail_jax.architectures.vision import clip, clip_text_model, clip_vision_model
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = [
    "Architecture",
    "Draft",
    "Question",
    "Rules",
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
    "maxtext",
    "mlp",
    "of",
    "of_tree",
    "t5",
    "tunix",
]
