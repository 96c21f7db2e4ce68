"""Two-layer linear networks, solved: pre-train, perturb, fine-tune (overtrained, Springer et al.
2025).

Conventions: `layers`. Beyond the names below: `modes`, `perturbation` and `fine_tuning` (closed
forms for aligned tasks), `sharpness`, `networks` (training the real thing), `claims` (the ledger).
"""

from theory.two_layer.fine_tuning import fine_tuned_spectrum, misalignment_threshold
from theory.two_layer.layers import (
    Layers,
    grams,
    ideal,
    identity_start,
    imbalance,
    loss,
    size,
    tangent_kernel,
    theta,
    thin,
)
from theory.two_layer.modes import learned_modes, plateau_rates, plateau_times
from theory.two_layer.perturbation import inflection_index, perturbed_loss
from theory.two_layer.riccati import Trajectory, flow, substeps, trajectory

__all__ = [
    "Layers",
    "Trajectory",
    "fine_tuned_spectrum",
    "flow",
    "grams",
    "ideal",
    "identity_start",
    "imbalance",
    "inflection_index",
    "learned_modes",
    "loss",
    "misalignment_threshold",
    "perturbed_loss",
    "plateau_rates",
    "plateau_times",
    "size",
    "substeps",
    "tangent_kernel",
    "theta",
    "thin",
    "trajectory",
]
