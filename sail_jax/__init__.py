"""Merge, grow and transfer neural networks with pure functions on JAX pytrees.

Merging: `methods` contains one function per published method. The function returns a `Merge`, which
is called on pytrees of parameters, or passed to `merge_checkpoints` for files on disk. Growing and
aligning: `spec_of` infers the feature space of every array axis from a forward pass, and `spec`
reads them from a table. The functions of `growth` and `align` return maps between such spaces
(`SpaceMap`), and `change_basis` applies them to parameters. `exactness` and `certificate` report
whether the network still computes the same function. Names are imported on first use, which keeps
`import sail_jax` fast.

>>> import jax.numpy as jnp
>>> from sail_jax import methods
>>> base = {"w": jnp.zeros(2)}
>>> merge = methods.task_arithmetic(scale=0.5)
>>> merge([{"w": jnp.array([2.0, 0.0])}, {"w": jnp.array([0.0, 4.0])}], base)["w"].tolist()
[1.0, 2.0]
"""

from sail_jax.lazy import lazily

TYPE_CHECKING = False  # as in `typing`, which is imported only when needed
if TYPE_CHECKING:
    from sail_jax import (
        align,
        architectures,
        checkpoint,
        distances,
        growth,
        lora,
        methods,
        probe,
        proximal,
        trajectory,
        transplant,
    )
    from sail_jax.basis.certificate import Certificate, Report, Verdict, certificate, exactness
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
    from sail_jax.checkpoint import merge_checkpoints
    from sail_jax.merging import reductions, transforms
    from sail_jax.merging.combining import Reduction, Transform, chain, masked
    from sail_jax.merging.merge import Merge
    from sail_jax.merging.task_vectors import TaskVectors, apply, task_vectors
    from sail_jax.searching import search
    from sail_jax.tracing import Checked, Inferred, check_spec, spec_of, stack, unstack

__version__ = "0.3.0"

_HOMES = {
    "": "align architectures checkpoint distances growth lora methods probe proximal trajectory "
    "transplant",
    "merging.": "reductions transforms",
    "basis.certificate": "Certificate Report Verdict certificate exactness",
    "basis.change_basis": "change_basis unfuse",
    "basis.families": "NONLINEARITIES Family",
    "basis.maps": "Selection SpaceMap classify compose defect identity invert select",
    "basis.spaces": "Spec spec",
    "checkpoint": "merge_checkpoints",
    "merging.combining": "Reduction Transform chain masked",
    "merging.merge": "Merge",
    "merging.task_vectors": "TaskVectors apply task_vectors",
    "searching": "search",
    "tracing": "Checked Inferred check_spec spec_of stack unstack",
}

__getattr__, __dir__ = lazily(
    __name__, {name: home for home, names in _HOMES.items() for name in names.split()}
)
__all__ = [
    "NONLINEARITIES",
    "Certificate",
    "Checked",
    "Family",
    "Inferred",
    "Merge",
    "Reduction",
    "Report",
    "Selection",
    "SpaceMap",
    "Spec",
    "TaskVectors",
    "Transform",
    "Verdict",
    "align",
    "apply",
    "architectures",
    "certificate",
    "chain",
    "change_basis",
    "check_spec",
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
    "search",
    "select",
    "spec",
    "spec_of",
    "stack",
    "task_vectors",
    "trajectory",
    "transforms",
    "transplant",
    "unfuse",
    "unstack",
]
