"""Weights of the proximal parameter: the combination of models that is nearest a target (SAIL).

By SAIL's Theorem 3 they follow from distances alone: d_i* = |theta_i - theta*| from model to
target, and d_ij = |theta_i - theta_j| between models, in any common unit. With H_ij = d_i*^2 +
d_j*^2 - d_ij^2 (eq. 13) the squared distance of the merge from the target is w^T H w / 2, for
weights of sum 1.

The paper puts total variation distances of tasks in the place of distances of parameters. For
Gaussian tasks of one covariance s^2 I, the latter are proportional to the gap of the means, hence
to `distances.gaussian_separation(tv)` and not to TV itself: `tv_bias` is the error that this makes.
Unbiased squares (`distances.mmd`, `distances.energy`) go in with `squared=True`.

Where the models are at hand there are `from_parameters` (eq. 4, a known target) and `from_loss`
(eq. 3).
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
