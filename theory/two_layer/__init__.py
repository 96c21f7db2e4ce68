"""Closed forms for two-layer linear networks that are pre-trained, perturbed and fine-tuned.

The subject is Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv
2503.19206). `layers` defines the conventions. `riccati` solves gradient flow from any balanced
start. The modules `modes`, `perturbation`, `fine_tuning` and `sharpness` contain closed forms for
aligned tasks, and `networks` trains networks by gradient descent.
"""

from sail_jax.lazy import listed
from theory.two_layer.fine_tuning import fine_tuned_spectrum, misalignment_threshold
from theory.two_layer.layers import (
    Layers,
    balanced_start,
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

__dir__ = listed(__name__)

__all__ = [
    "Layers",
    "Trajectory",
    "balanced_start",
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
