"""Transfer between linear tasks by deep linear networks (features-are-fate, arXiv 2410.08194).

Beyond the names below: `covariance` (any spectrum), `subspace` (sources of rank k), `networks`
(training the real thing).
"""

from theory.deep_linear.advice import Advice, advise, angle, transfer_risks
from theory.deep_linear.distributions import RiskLaw, linear_transfer_law, scratch_law
from theory.deep_linear.estimators import fine_tune_limit, linear_transfer_fit, scratch_fit
from theory.deep_linear.flow import fine_tune_flow
from theory.deep_linear.grid import nested_overlaps, simulate_overlaps
from theory.deep_linear.laws import overlaps_law
from theory.deep_linear.overlaps import Overlaps, null_scale
from theory.deep_linear.risks import (
    Boundary,
    fine_tune_boundary,
    fine_tune_risk,
    linear_transfer_boundary,
    linear_transfer_limit,
    linear_transfer_risk,
    optimal_ridge,
    scratch_limit,
    scratch_risk,
    transferability,
    transferability_limit,
)

__all__ = [
    "Advice",
    "Boundary",
    "Overlaps",
    "RiskLaw",
    "advise",
    "angle",
    "fine_tune_boundary",
    "fine_tune_flow",
    "fine_tune_limit",
    "fine_tune_risk",
    "linear_transfer_boundary",
    "linear_transfer_fit",
    "linear_transfer_law",
    "linear_transfer_limit",
    "linear_transfer_risk",
    "nested_overlaps",
    "null_scale",
    "optimal_ridge",
    "overlaps_law",
    "scratch_fit",
    "scratch_law",
    "scratch_limit",
    "scratch_risk",
    "simulate_overlaps",
    "transfer_risks",
    "transferability",
    "transferability_limit",
]
