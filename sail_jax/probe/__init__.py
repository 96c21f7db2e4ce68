"""Probes: measurements on trained models that predict whether, and how well, they will merge.

A probe is a pure function of (apply, params, batch) or of (loss, params, data). It is compiled
internally and also works inside `jax.jit`. A new function object is compiled again, so pass the
same object each time. `networks` defines the interface of networks. Its `flax_network` and
`sequential` make networks from Flax modules and from chains of plain functions. Results are named
tuples of arrays.

- Connectivity: `barrier`, `simplex_barrier`.
- Features: `cross_task_linearity`, `k_model_linearity`, `addition`, `negation`, `stitching`.
- Outputs: `averaging`.
- Curvature: `hessian_spectrum`, `spectral_density`.
- Sensitivity: `gaussian_sensitivity`, `fine_tuning_sensitivity`.
- Parameters alone: `interference`.
"""

from sail_jax.lazy import listed
from sail_jax.probe.combinations import simplex_grid
from sail_jax.probe.combining import Averaging, Metric, Stitching, averaging, stitching
from sail_jax.probe.connectivity import Barrier, Loss, barrier, simplex_barrier
from sail_jax.probe.curvature import Spectrum, hessian_spectrum, spectral_density
from sail_jax.probe.estimates import Estimate
from sail_jax.probe.linearity import (
    Linearity,
    addition,
    cross_task_linearity,
    k_model_linearity,
    negation,
)
from sail_jax.probe.networks import Apply, Names, features, flax_network, sequential
from sail_jax.probe.sensitivity import (
    Sensitivity,
    TuningSensitivity,
    fine_tuning_sensitivity,
    gaussian_sensitivity,
)
from sail_jax.probe.tasks import Conflict, Interference, interference

__dir__ = listed(__name__)

__all__ = [
    "Apply",
    "Averaging",
    "Barrier",
    "Conflict",
    "Estimate",
    "Interference",
    "Linearity",
    "Loss",
    "Metric",
    "Names",
    "Sensitivity",
    "Spectrum",
    "Stitching",
    "TuningSensitivity",
    "addition",
    "averaging",
    "barrier",
    "cross_task_linearity",
    "features",
    "fine_tuning_sensitivity",
    "flax_network",
    "gaussian_sensitivity",
    "hessian_spectrum",
    "interference",
    "k_model_linearity",
    "negation",
    "sequential",
    "simplex_barrier",
    "simplex_grid",
    "spectral_density",
    "stitching",
]
