"""Transfer learning between linear tasks with deep linear networks.

The subject is Tahir et al., Features are fate, 2024 (arXiv 2410.08194). This package exports
closed-form risks, their distributions, estimators on given data, and simulators. Tasks, data and
random keys come first; numbers such as n, d, load, theta and sigma are keyword-only. The load is n
/ d. The modules contain more functions. `penalised` and `wishart` cover ridge regression and L2-SP,
in the limit and exactly, and `regularised` compares them with transfer. `covariance` is for inputs
of any covariance. `scales` and `diagonal` are for layers of unequal size, from rich to lazy.
`sources` is for several sources, and `subspace` and `ranks` for sources and fine-tuning of rank k.
`divergences` computes distances between tasks. `networks` trains networks by gradient descent.
"""

from sail_jax.deprecated import former
from sail_jax.lazy import listed
from theory.deep_linear.advice import (
    Advice,
    SampleAdvice,
    advise,
    advise_features,
    advise_sample,
    advise_tasks,
    angle,
    transfer_risks,
)
from theory.deep_linear.distributions import (
    RiskLaw,
    SampledLaw,
    fine_tuning_law,
    linear_transfer_law,
    scratch_law,
)
from theory.deep_linear.drawing import phase_diagram
from theory.deep_linear.estimators import fine_tuning_limit, linear_transfer_fit, scratch_fit
from theory.deep_linear.flow import fine_tuning_flow, linear_flow
from theory.deep_linear.grid import nested_overlaps, simulate_overlaps
from theory.deep_linear.laws import overlaps_law
from theory.deep_linear.overlaps import Overlaps, null_scale
from theory.deep_linear.pretraining import Source, source_from, source_law, source_limit
from theory.deep_linear.risks import (
    Boundary,
    fine_tuning_boundary,
    fine_tuning_risk,
    linear_transfer_boundary,
    linear_transfer_limit,
    linear_transfer_risk,
    linear_transfer_sin2,
    optimal_ridge,
    scratch_limit,
    scratch_risk,
    transferability,
    transferability_limit,
)
from theory.deep_linear.training_time import flow_risk, linear_transfer_flow_risk

__dir__ = listed(__name__)
__getattr__ = former(
    __name__,
    {f"fine_tune_{of}": f"fine_tuning_{of}" for of in ("boundary", "flow", "law", "limit", "risk")},
    until="0.4",
)

__all__ = [
    "Advice",
    "Boundary",
    "Overlaps",
    "RiskLaw",
    "SampleAdvice",
    "SampledLaw",
    "Source",
    "advise",
    "advise_features",
    "advise_sample",
    "advise_tasks",
    "angle",
    "fine_tuning_boundary",
    "fine_tuning_flow",
    "fine_tuning_law",
    "fine_tuning_limit",
    "fine_tuning_risk",
    "flow_risk",
    "linear_flow",
    "linear_transfer_boundary",
    "linear_transfer_fit",
    "linear_transfer_flow_risk",
    "linear_transfer_law",
    "linear_transfer_limit",
    "linear_transfer_risk",
    "linear_transfer_sin2",
    "nested_overlaps",
    "null_scale",
    "optimal_ridge",
    "overlaps_law",
    "phase_diagram",
    "scratch_fit",
    "scratch_law",
    "scratch_limit",
    "scratch_risk",
    "simulate_overlaps",
    "source_from",
    "source_law",
    "source_limit",
    "transfer_risks",
    "transferability",
    "transferability_limit",
]
