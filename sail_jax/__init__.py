"""Merge, grow and transfer neural networks as pure pytree transforms.

Geometry: `spec` names the feature space of every array axis, makers in `sail_jax.growth` return
`SpaceMap`s, aligners in `sail_jax.align` find them, `change_basis` applies them, `exactness` and
`certificate` say what was preserved. `architectures` names the spaces of known networks.
Merging: a merge is a value, `sail_jax.methods.<name>(...)` or a `Merge` of `transforms` and one of
the `reductions`. Applied to models it merges pytrees, given to `merge_checkpoints` files.
"""

from typing import TYPE_CHECKING

from sail_jax import methods
from sail_jax.basis.certificate import Certificate, Report, certificate, exactness
from sail_jax.basis.change_basis import change_basis, unfuse
from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.basis.maps import (
    Selection,
    SpaceMap,
    classify,
    compose,
    defect,
    identity,
    invert,
    select,
)
from sail_jax.basis.spaces import Spec, spec
from sail_jax.lazy import lazily
from sail_jax.merging import reductions, transforms
from sail_jax.merging.combining import Reduction, Transform, chain, masked
from sail_jax.merging.merge import Merge
from sail_jax.merging.task_vectors import TaskVectors, apply, task_vectors

if TYPE_CHECKING:
    from sail_jax import (
        align,
        architectures,
        checkpoint,
        distances,
        growth,
        lora,
        probe,
        proximal,
    )
    from sail_jax.checkpoint import merge_checkpoints

__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        **dict.fromkeys(("align", "architectures", "checkpoint", "distances", "growth"), ""),
        **dict.fromkeys(("lora", "probe", "proximal"), ""),
        "merge_checkpoints": "checkpoint",
    },
)

__all__ = [
    "NONLINEARITIES",
    "Certificate",
    "Family",
    "Merge",
    "Reduction",
    "Report",
    "Selection",
    "SpaceMap",
    "Spec",
    "TaskVectors",
    "Transform",
    "align",
    "apply",
    "architectures",
    "certificate",
    "chain",
    "change_basis",
    "checkpoint",
    "classify",
    "compose",
    "defect",
    "distances",
    "exactness",
    "growth",
    "identity",
    "invert",
    "lora",
    "masked",
    "merge_checkpoints",
    "methods",
    "probe",
    "proximal",
    "reductions",
    "select",
    "spec",
    "task_vectors",
    "transforms",
    "unfuse",
]
