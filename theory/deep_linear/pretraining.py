"""Pretraining on finitely many samples: the source that transfer really starts from.

Small weights trained on n_s source samples end at beta_hat = X^+ y (features-are-fate Thm 3.5), and
their features sparsify to it. The target data are independent of it and have no preferred
direction, so all that matters is how long beta_hat is and at which angle to the target it lies:
with this random `Source` in the place of (1, theta), everything known about an infinitely
pretrained network holds. The paper pretrains on the population loss, n_s = inf.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from theory import problems
from theory.deep_linear.laws import overlaps_law
from theory.deep_linear.overlaps import Overlaps
from theory.deep_linear.risks import scratch_limit


class Source(NamedTuple):
    """What pretraining found, seen from a unit target: its norm and its angle to the target (rad).

    Pass them on: `risks.linear_transfer_risk(n, source.theta, sigma)`,
    `risks.fine_tune_risk(gamma, source.theta, sigma, depth, source.size)`, `Overlaps.fine_tune`.
    """

    size: Array
    theta: Array


def source_from(overlaps: Overlaps, theta: ArrayLike, sigma: ArrayLike) -> Source:
    """The source fitted to these source data, whose labels have noise sigma; the target lies at
    angle theta to the true source."""
    gram, sigma = overlaps.gram, jnp.asarray(sigma, dtype=float)
    # beta_hat = P beta_s + sigma X^+ noise; what is in the row space sees P beta_s and P nu.
    along = gram[..., 0, 0] + sigma * gram[..., 0, 2]
    across = gram[..., 0, 1] + sigma * gram[..., 1, 2]
    size2 = gram[..., 0, 0] + sigma * (2 * gram[..., 0, 2] + sigma * gram[..., 2, 2])
    inner = jnp.cos(theta) * along + jnp.sin(theta) * across
    return Source(jnp.sqrt(size2), _angle(inner, size2))


def source_law(
    key: Array, n: int, d: int, theta: ArrayLike, sigma: ArrayLike, draws: int
) -> Source:
    """Exact draws of what pretraining on n samples in d dimensions finds."""
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    return source_from(overlaps_law(key, n, d, draws), theta, sigma)


def source_limit(gamma: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> Source:
    """The limit n, d -> inf at source load gamma = n/d > 0; gamma = inf is the paper's source.

    |beta_hat|^2 -> min(gamma, 1) + (noise part of the scratch risk), <beta_hat, beta_s> ->
    min(gamma, 1). At gamma = 1 with noise beta_hat is infinitely long and tells nothing.
    """
    problems.check("gamma", gamma, lambda g: g > 0, "a load n/d > 0")
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    gamma, theta, sigma = (jnp.asarray(v, dtype=float) for v in (gamma, theta, sigma))
    known = jnp.minimum(gamma, 1.0)
    load = jnp.where(jnp.isinf(gamma), 1e30, gamma)  # noise then averages out
    noise = scratch_limit(load, sigma, allow_infinite=True) - jnp.maximum(1 - load, 0.0)
    size2 = known + noise
    inner = jnp.where(jnp.isinf(size2), 0.0, jnp.cos(theta) * known)
    size2, inner = jnp.broadcast_arrays(size2, inner)
    return Source(jnp.sqrt(size2), _angle(inner, size2))


def _angle(inner: Array, size2: Array) -> Array:
    """Angle of a vector of squared norm size2 to a unit vector."""
    finite = jnp.where(jnp.isinf(size2), 1.0, size2)
    across2 = jnp.maximum(finite - inner**2, 0.0)
    return jnp.arctan2(jnp.sqrt(across2), inner)
