"""Checkpoints on disk: opened, written, merged, grown, aligned and compared, tensor by tensor.

`open_checkpoint`, `load_checkpoint` and `save_checkpoint` read and write all file formats.
`merge_checkpoints` and `merge_recipe` merge. `average_checkpoints` averages the steps of a training
run. `grow_checkpoint` makes a larger network and `upcycle_checkpoint` a mixture of experts.
`align_checkpoints` brings one network near another. `convert_checkpoint` changes names and layouts,
`transplant_checkpoint` the tokenizer. `compare_checkpoints` measures how far networks disagree.
`extract_adapter`, `merge_adapters` and `apply_adapter` are for adapters of low rank. All of them
read tensors as needed, so models may be larger than the memory.
"""

from typing import TYPE_CHECKING

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint, load_checkpoint, open_checkpoint
from sail_jax.checkpoint.output.writer import create, save_checkpoint
from sail_jax.lazy import lazily
from sail_jax.merging.tensors import Tensor

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.adapting import (
        apply_adapter,
        extract_adapter,
        merge_adapters,
    )
    from sail_jax.checkpoint.operations.aligning import align_checkpoints
    from sail_jax.checkpoint.operations.averaging import average_checkpoints
    from sail_jax.checkpoint.operations.comparing import Comparison, compare_checkpoints
    from sail_jax.checkpoint.operations.converting import convert_checkpoint
    from sail_jax.checkpoint.operations.growing import grow_checkpoint
    from sail_jax.checkpoint.operations.merging import merge_checkpoints, merge_recipe
    from sail_jax.checkpoint.operations.running import RunOptions
    from sail_jax.checkpoint.operations.transplanting import transplant_checkpoint
    from sail_jax.checkpoint.operations.upcycling import upcycle_checkpoint

__getattr__, __dir__ = lazily(
    __name__,
    {
        "align_checkpoints": "operations.aligning",
        "apply_adapter": "operations.adapting",
        "average_checkpoints": "operations.averaging",
        "Comparison": "operations.comparing",
        "compare_checkpoints": "operations.comparing",
        "convert_checkpoint": "operations.converting",
        "extract_adapter": "operations.adapting",
        "grow_checkpoint": "operations.growing",
        "merge_adapters": "operations.adapting",
        "merge_checkpoints": "operations.merging",
        "merge_recipe": "operations.merging",
        "RunOptions": "operations.running",
        "transplant_checkpoint": "operations.transplanting",
        "upcycle_checkpoint": "operations.upcycling",
    },
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "RunOptions",
    "Tensor",
    "align_checkpoints",
    "apply_adapter",
    "average_checkpoints",
    "compare_checkpoints",
    "convert_checkpoint",
    "create",
    "extract_adapter",
    "grow_checkpoint",
    "load_checkpoint",
    "merge_adapters",
    "merge_checkpoints",
    "merge_recipe",
    "open_checkpoint",
    "save_checkpoint",
    "transplant_checkpoint",
    "upcycle_checkpoint",
]
