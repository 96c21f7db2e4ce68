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
    across2 = jnp.maximum(size2 - inner**2, 0.0)
    return Source(jnp.sqrt(size2), jnp.arctan2(jnp.sqrt(across2), inner))


def source_law(
    key: Array, n: int, d: int, theta: ArrayLike, sigma: ArrayLike, draws: int
) -> Source:
    """Exact draws of what pretraining on n samples in d dimensions finds."""
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    return source_from(overlaps_law(key, n, d, draws), theta, sigma)


@problems.in_float64
def source_limit(gamma: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> Source:
    """The limit n, d -> inf at source load gamma = n/d > 0; gamma = inf is the paper's source.

    |beta_hat|^2 -> min(gamma, 1) + (noise part of the scratch risk), <beta_hat, beta_s> ->
    min(gamma, 1). At gamma = 1 with noise beta_hat is infinitely long and tells nothing.
    """
    problems.check("gamma", gamma, lambda g: g > 0, "a load n/d > 0")
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    cos, sin = problems.cos_sin(theta)
    gamma, sigma = jnp.asarray(gamma, dtype=float), jnp.asarray(sigma, dtype=float)
    seen, gap = jnp.minimum(gamma, 1.0), jnp.abs(gamma - 1)
    noise = jnp.where(gap > 0, sigma**2 * seen / jnp.where(gap > 0, gap, 1.0), jnp.inf)
    noise = jnp.where(sigma > 0, noise, 0.0)
    endless = jnp.isinf(noise)
    across2 = jnp.where(endless, 1.0, noise) + seen * (1 - seen) + (seen * sin) ** 2
    theta = jnp.arctan2(jnp.sqrt(across2), jnp.where(endless, 0.0, seen * cos))
    return Source(jnp.broadcast_to(jnp.sqrt(seen + noise), theta.shape), theta)
