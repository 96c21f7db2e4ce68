"""Unified merging (arXiv 2601.21690): its bounds beside the exact risk of merged experts.

A testbed solved exactly (`tasks`, `quadratic`, `simulation`), the bounds as printed and repaired
(`bounds`), sparsification and heterogeneity (`heterogeneity`), laws in each hyperparameter
(`scaling`), constants of real runs (`measure`), and the ledger (`claims`).
"""

from theory.merging.bounds import (
    Bound,
    Constants,
    chi_square,
    excess_risk_bound,
    local_stability,
    surrogate_gradient,
)
from theory.merging.heterogeneity import (
    Effect,
    dare_heterogeneity,
    effect,
    heterogeneity,
    updates,
)
from theory.merging.measure import Measured, measure_constants
from theory.merging.quadratic import Dropped, Quantities, constants, dare, exact
from theory.merging.scaling import Laws, scaling
from theory.merging.simulation import simulate
from theory.merging.tasks import QuadraticTasks, Training

__all__ = [
    "Bound",
    "Constants",
    "Dropped",
    "Effect",
    "Laws",
    "Measured",
    "QuadraticTasks",
    "Quantities",
    "Training",
    "chi_square",
    "constants",
    "dare",
    "dare_heterogeneity",
    "effect",
    "exact",
    "excess_risk_bound",
    "heterogeneity",
    "local_stability",
    "measure_constants",
    "scaling",
    "simulate",
    "surrogate_gradient",
    "updates",
]
