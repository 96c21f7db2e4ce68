"""Pretraining on finitely many samples, and the resulting random source.

The paper pretrains on the population loss. On n_s samples, training from small weights instead ends
at beta_hat = X^+ y (Features are fate, Thm 3.5), and the features have rank one along it. The
target data are independent of beta_hat and isotropic, so only its norm and its angle to the target
matter. All results for an infinitely pretrained network therefore hold with the norm and the angle
of this random `Source`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear.laws import overlaps_law
from theory.deep_linear.overlaps import Overlaps


class Source(NamedTuple):
    """Norm and angle of a pretrained predictor, relative to a unit target.

    The laws take both, as in `risks.fine_tuning_risk(load=0.5, theta=source.theta, sigma=0.2,
    size=source.size)`.

    Attributes:
      size: Norm |beta_hat| of the pretrained predictor.
      theta: Angle between beta_hat and the target, in radians.
    """

    size: Array
    theta: Array


@problems.defined
def source_from(overlaps: Overlaps, theta: ArrayLike, sigma: ArrayLike) -> Source:
    """Computes the source that was fitted to given source data.

    Args:
      overlaps: Overlaps of the source data sets.
      theta: Angle between the true source task and the target, in radians.
      sigma: Standard deviation of the noise on the source labels.

    Returns:
      One source per data set; the arguments broadcast against the leading axes.

    >>> seen = Overlaps(jnp.eye(3), jnp.zeros(3), jnp.asarray(200))  # n > d: all is seen
    >>> round(float(source_from(seen, 0.5, 0.0).theta), 4)
    0.5
    """
    gram, sigma = overlaps.gram, jnp.asarray(sigma, dtype=float)
    # beta_hat = P beta_s + sigma X^+ noise lies in the row space, so its inner products involve P
    # beta_s and P nu.
    along = gram[..., 0, 0] + sigma * gram[..., 0, 2]
    across = gram[..., 0, 1] + sigma * gram[..., 1, 2]
    size2 = gram[..., 0, 0] + sigma * (2 * gram[..., 0, 2] + sigma * gram[..., 2, 2])
    inner = jnp.cos(theta) * along + jnp.sin(theta) * across
    # |beta_hat|^2 minus the square of its part along the target. It may be negative due to
    # rounding.
    across2 = jnp.maximum(size2 - inner**2, 0.0)
    return Source(jnp.sqrt(size2), jnp.arctan2(jnp.sqrt(across2), inner))


@renamed("n", "d", "theta", "sigma", "draws", until="0.4")
@problems.defined
def source_law(
    key: Array, *, n: int, d: int, theta: ArrayLike, sigma: ArrayLike, draws: int
) -> Source:
    """Draws sources from the exact law of pretraining on n Gaussian samples in d dimensions.

    Args:
      key: Random key.
      n: Number of source samples, at least 1.
      d: Dimension, at least 2.
      theta: Angle between the true source task and the target, in radians, in [0, pi].
      sigma: Standard deviation of the noise on the source labels, >= 0.
      draws: Number of independent draws.

    Returns:
      The sources, with a trailing axis `draws`; theta and sigma broadcast against it.

    Raises:
      ValueError: If an argument is out of range.
    """
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    return source_from(overlaps_law(key, n=n, d=d, draws=draws), theta, sigma)


@renamed("load", "theta", "sigma", until="0.4", gamma="load")
@problems.in_float64
def source_limit(*, load: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> Source:
    """Computes the pretrained source in the limit n, d -> inf at load n / d.

    With seen = min(load, 1) and the noise part v of the scratch risk (`risks.scratch_limit`),

        |beta_hat|^2 -> seen + v,  <beta_hat, beta_s> -> seen.

    At load = 1 with noise, beta_hat has infinite norm and is orthogonal to the target.

    Args:
      load: Load of pretraining, > 0; inf gives the paper's population loss.
      theta: Angle between the true source task and the target, in radians, in [0, pi].
      sigma: Standard deviation of the noise on the source labels, >= 0.

    Returns:
      The limiting source, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(source_limit(load=jnp.inf, theta=0.5, sigma=0.2).size)
    1.0
    """
    problems.check("load", load, lambda g: g > 0, "a load n/d > 0")
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    cos, sin = problems.cos_sin(theta)
    load, sigma = jnp.asarray(load, dtype=float), jnp.asarray(sigma, dtype=float)
    seen, gap = jnp.minimum(load, 1.0), jnp.abs(load - 1)
    noise = jnp.where(gap > 0, sigma**2 * seen / jnp.where(gap > 0, gap, 1.0), jnp.inf)
    noise = jnp.where(sigma > 0, noise, 0.0)
    endless = jnp.isinf(noise)
    across2 = jnp.where(endless, 1.0, noise) + seen * (1 - seen) + (seen * sin) ** 2
    theta = jnp.arctan2(jnp.sqrt(across2), jnp.where(endless, 0.0, seen * cos))
    return Source(jnp.broadcast_to(jnp.sqrt(seen + noise), theta.shape), theta)
