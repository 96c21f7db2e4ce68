"""Transfer between linear tasks by deep linear networks (features-are-fate, arXiv 2410.08194)."""

from theory.deep_linear.estimators import fine_tune_limit, linear_transfer_fit, scratch_fit
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
    "Boundary",
    "Overlaps",
    "fine_tune_boundary",
    "fine_tune_limit",
    "fine_tune_risk",
    "linear_transfer_boundary",
    "linear_transfer_fit",
    "linear_transfer_limit",
    "linear_transfer_risk",
    "nested_overlaps",
    "null_scale",
    "optimal_ridge",
    "overlaps_law",
    "scratch_fit",
    "scratch_limit",
    "scratch_risk",
    "simulate_overlaps",
    "transferability",
    "transferability_limit",
]
