"""Checkpoints: read, merged tensor by tensor, and written.

`open_checkpoint` and `save_checkpoint` know the formats, `recipes` the YAML, `plan` what happens to
every tensor, `executor` how, and `merge_checkpoints` puts them together. `views` are checkpoints
whose tensors are computed when read: grown (`grow_checkpoint`), or in another basis
(`align_checkpoints`).
"""

from typing import TYPE_CHECKING

from sail_jax.checkpoint.files import CheckpointError
from sail_jax.checkpoint.merging import merge_checkpoints, merge_recipe
from sail_jax.checkpoint.open import Checkpoint, load_checkpoint, open_checkpoint
from sail_jax.checkpoint.writer import create, save_checkpoint
from sail_jax.lazy import lazily
from sail_jax.merging.tensors import Tensor

if TYPE_CHECKING:
    from sail_jax.checkpoint.aligning import align_checkpoints
    from sail_jax.checkpoint.comparing import Comparison, compare_checkpoints
    from sail_jax.checkpoint.growing import grow_checkpoint

__getattr__, __dir__ = lazily(
    __name__,
    {
        "align_checkpoints": "aligning",
        "Comparison": "comparing",
        "compare_checkpoints": "comparing",
        "grow_checkpoint": "growing",
    },
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "Tensor",
    "align_checkpoints",
    "compare_checkpoints",
    "create",
    "grow_checkpoint",
    "load_checkpoint",
    "merge_checkpoints",
    "merge_recipe",
    "open_checkpoint",
    "save_checkpoint",
]
