"""Weights of the proximal parameter, the combination of models closest to a target (SAIL).

By SAIL's Theorem 3, these weights depend only on distances in any common unit. d_i* = |theta_i -
theta*| is the distance from model to target, and d_ij = |theta_i - theta_j| the distance between
models. With H_ij = d_i*^2 + d_j*^2 - d_ij^2 (eq. 13), the squared distance of the merge from the
target is w^T H w / 2, for weights with sum 1.

The paper uses total variation distances of tasks instead of distances of parameters. For Gaussian
tasks with one covariance s^2 I, distances of parameters are proportional to the gap of the means.
They are therefore proportional to `distances.gaussian_separation(tv)`, not to TV. `tv_bias`
computes the resulting error. Unbiased squares (`distances.mmd`, `distances.energy`) require
`squared=True`.

If the models are available, use `from_parameters` (eq. 4, for a known target) or `from_loss` (eq.
3).
"""

from sail_jax.lazy import listed
from sail_jax.proximal.models import (
    Constraint,
    after_training,
    from_loss,
    from_parameters,
    sweep,
)
from sail_jax.proximal.quadratic import (
    Weights,
    affine_weights,
    gram_from_distances,
    pair_weight,
    simplex_weights,
    tv_bias,
)

__dir__ = listed(__name__)

__all__ = [
    "Constraint",
    "Weights",
    "affine_weights",
    "after_training",
    "from_loss",
    "from_parameters",
    "gram_from_distances",
    "pair_weight",
    "simplex_weights",
    "sweep",
    "tv_bias",
]
