"""Conditions under which pre-training helps a regularised learner.

The paper compares transfer with training from scratch without a penalty. Here both have a penalty.
Tasks beta_s and beta_t have norm 1 and the angle theta. A source w was fitted to other data. The
learners of the target task are

    ridge from scratch   |y - X b|^2 / (2n) + penalty |b|^2 / 2
    L2-SP                |y - X b|^2 / (2n) + penalty |b - scale w|^2 / 2
    direction            |y - X b|^2 / (2n) + penalty |(I - P_w) b|^2 / 2.

The last one does not penalise the component along w. At an infinite penalty, it is linear transfer.

*L2-SP against ridge.* Both are ridge regression, of the offsets beta_t - scale w and beta_t. For
isotropic inputs the mean risk is D^2 B + V for an offset of mean square D^2, and B, V depend on the
penalty alone. L2-SP therefore has the lower risk if D^2 < 1, for any n, d and sigma. This holds at
any common penalty, and with the best penalty for each side. `distance2` computes D^2 from the
numbers of `wishart.learned`.

*The direction against ridge.* Write x = (z, x') along and across w. Rotate the n samples such that
z lies along the first one. The other n - 1 rows are then independent of the free part. On these
rows, the rest of b is ridge regression in d - 1 dimensions. The first row fits the free part, and
its noise is the label noise plus the error of the rest. So

    E R + sigma^2 = (E R' + sigma^2) (n - 1) / (n - 2),

where R' is the risk of that regression (`risks.refitted_risk`). It is exact at any n > 2, d,
penalty and covariance. For inputs of covariance Sigma, x' has its conditional covariance given z.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear import covariance, penalised
from theory.deep_linear.risks import refitted_risk, rest_allowed
from theory.deep_linear.wishart import Learned

Spectrum = Float[Array, " d"]


# --- L2-SP ----------------------------------------------------------------------------------------


@problems.in_float64
def distance2(theta: ArrayLike, source: Learned, scale: ArrayLike = 1.0) -> Array:
    """Computes the mean square of the distance from a target to a multiple of a learned source.

        1 - 2 scale overlap cos + scale^2 size2

    L2-SP is better than ridge regression from scratch if this is below 1. The penalty with the
    smallest mean risk is exactly `penalised.best_penalty` at its square root.

    Args:
      theta: Angle between the tasks in radians, in [0, pi].
      source: The mean overlap and size of the source fit.
      scale: The multiple, of either sign.

    Returns:
      E |beta_t - scale w|^2, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(distance2(jnp.pi / 3, Learned(jnp.array(0.4), jnp.array(0.4)))), 4)
    1.0
    """
    problems.check_theta(theta)
    problems.check("scale", scale, np.isfinite, "finite")
    overlap, size2 = _checked(source)
    cos, _ = problems.cos_sin(theta)
    scale = jnp.asarray(scale, dtype=float)
    return 1 - 2 * scale * overlap * cos + scale**2 * size2


@problems.in_float64
def best_scale(theta: ArrayLike, source: Learned) -> Array:
    """Computes the multiple of a learned source that is closest to the target in mean square.

        overlap cos / size2

    The squared distance there is 1 - overlap^2 cos^2 / size2, which is below 1 at every angle but
    pi/2.

    Args:
      theta: Angle between the tasks in radians, in [0, pi].
      source: The mean overlap and size of the source fit, of positive size.

    Returns:
      The multiple, negative beyond pi/2, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.
    """
    problems.check_theta(theta)
    overlap, size2 = _checked(source)
    cos, _ = problems.cos_sin(theta)
    return overlap * cos / size2


@problems.in_float64
def l2sp_boundary(source: Learned) -> Array:
    """Computes the angle above which L2-SP is worse than ridge regression.

        arccos(size2 / (2 overlap))

    It does not depend on the target's n, d and sigma, nor on the penalty. It is pi/3 for a source
    with the best penalty for its own task, at any number of source samples, because overlap and
    size2 are then equal. A source of least norm has, with n_s samples and noise sigma_s,

        cos = (1 + sigma_s^2 d / (|n_s - d| - 1)) / 2.

    Args:
      source: The mean overlap and size of the source fit, of positive overlap.

    Returns:
      The angle in radians; 0 if L2-SP hurts at every angle.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Hedges, Source-optimal training is transfer-suboptimal, 2025 (arXiv 2511.08401), finds for
      isotropic inputs that neither the number of target samples nor their noise matters.

    >>> round(float(l2sp_boundary(Learned(jnp.array(0.4), jnp.array(0.4))) / jnp.pi), 4)
    0.3333
    """
    overlap, size2 = _checked(source)
    ratio = size2 / (2 * overlap)
    helps = ratio < 1
    return jnp.where(helps, jnp.arccos(jnp.where(helps, ratio, 0.0)), 0.0)


def _checked(source: Learned) -> tuple[Array, Array]:
    overlap, size2 = source
    for name, value in (("overlap", overlap), ("size2", size2)):
        problems.check(name, value, lambda v: (v > 0) & (v < np.inf), "finite and > 0")
    return jnp.asarray(overlap, dtype=float), jnp.asarray(size2, dtype=float)


# --- the direction --------------------------------------------------------------------------------


@renamed("n", "d", "theta", "sigma", until="0.4")
@problems.in_float64
def direction_risk(*, n: ArrayLike, d: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the risk with the source's direction free and the best penalty on the rest.

    It is `refitted_risk` of `penalised.best_risk` at n - 1, d - 1 and the distance sin(theta). The
    first is exact, and the second is a limit of large n and d. The best penalty sigma^2 (d - 1) /
    (n sin^2) is exact. It is finite unless sin = 0, so this risk is below the risk of linear
    transfer.

    Args:
      n: Number of samples, > 2.
      d: Dimension, >= 2.
      theta: Angle between the source's direction and the target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(direction_risk(n=50, d=100, theta=0.3, sigma=0.5)), 4)
    0.084
    """
    problems.check_theta(theta)
    _check_more(n, d)
    _, sin = problems.cos_sin(theta)
    n, d = jnp.asarray(n, dtype=float), jnp.asarray(d, dtype=float)
    return refitted_risk(
        n=n, rest=penalised.best_risk(n=n - 1, d=d - 1, distance=sin, sigma=sigma), sigma=sigma
    )


@renamed("n", "d", "sigma", until="0.4")
@problems.in_float64
def direction_sin2(*, n: ArrayLike, d: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes sin^2 of the angle beyond which a free direction hurts, for large n and d.

    Let R be the best risk from scratch and r = `rest_allowed` at R. The risks are equal where

        sin^2 = r (r + sigma^2) / (r (d - n) / (d - 1) + sigma^2).

    In the limit n, d -> inf this is 1, so the free direction never hurts.

    Args:
      n: Number of samples, > 2.
      d: Dimension, >= 2.
      sigma: Standard deviation of the label noise, > 0.

    Returns:
      Values in [0, 1], with the broadcast shape of the arguments; 0 if the direction hurts at every
      angle.

    Raises:
      ValueError: If an argument is out of range.

    >>> sine = jnp.sqrt(direction_sin2(n=50, d=100, sigma=0.5))
    >>> free = direction_risk(n=50, d=100, theta=jnp.arcsin(sine), sigma=0.5)
    >>> bool(abs(free - penalised.best_risk(n=50, d=100, distance=1.0, sigma=0.5)) < 1e-6)
    True
    """
    _check_more(n, d)
    problems.check("sigma", sigma, lambda s: s > 0, "positive")
    n, d = jnp.asarray(n, dtype=float), jnp.asarray(d, dtype=float)
    rest = rest_allowed(
        n=n, risk=penalised.best_risk(n=n, d=d, distance=1.0, sigma=sigma), sigma=sigma
    )
    return jnp.clip(penalised.distance2_of(n=n - 1, d=d - 1, risk=rest, sigma=sigma), 0.0, 1.0)


def _check_more(n: ArrayLike, d: ArrayLike) -> None:
    problems.check("n", n, lambda n: (n > 2) & (n < np.inf), "a finite number of samples > 2")
    problems.check("d", d, lambda d: (d >= 2) & (d < np.inf), "a finite dimension >= 2")


@renamed("theta", "sigma", until="0.4")
@problems.in_float64
def linear_transfer_load(*, theta: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the load up to which linear transfer is better than ridge regression, in the limit.

        cos^2 (1 + sigma^2 / sin^2)

    Above this load the target's own samples are worth more than the source. Compared with training
    without a penalty there are three such loads (`risks.linear_transfer_boundary`). This one is
    cos^2 times the largest of them.

    Args:
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The load n / d, with the broadcast shape of the arguments; inf if the angle is 0 or pi.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(linear_transfer_load(theta=jnp.pi / 4, sigma=0.5)), 4)
    0.75
    """
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    cos, sin = problems.cos_sin(theta)
    sigma = jnp.asarray(sigma, dtype=float)
    across = jnp.where(sin > 0, sin, 1.0)
    return jnp.where(sin > 0, cos**2 * (1 + (sigma / across) ** 2), jnp.inf)


# --- any covariance -------------------------------------------------------------------------------


@renamed("n", "sigma", "ridge", "scale", until="0.4")
@problems.in_float64
def offset_from_source(
    eigenvalues: Spectrum,
    beta_s: Spectrum,
    beta_t: Spectrum,
    *,
    n: ArrayLike,
    sigma: ArrayLike,
    ridge: ArrayLike = 0.0,
    scale: ArrayLike = 1.0,
) -> Spectrum:
    """Computes the distance of a target from a source fitted to n samples, along each eigenvector.

    With kappa and the risk R_s of the source fit, the mean square of beta_t - scale w is

        (beta_t - scale s beta_s / (s + kappa))^2 + scale^2 (R_s + sigma^2) s / (n (s + kappa)^2).

    `penalised.best_risk_of` takes the root of this as the offset of L2-SP.

    Args:
      eigenvalues: Eigenvalues of the covariance of the source's inputs `(d,)`.
      beta_s: Source in its eigenbasis, `(d,)`, nonzero.
      beta_t: Target in the same basis, `(d,)`.
      n: Number of source samples, > 0; one number.
      sigma: Standard deviation of the noise on the source labels, >= 0; one number.
      ridge: Penalty of the source fit, >= 0; one number.
      scale: The multiple of the source; one number.

    Returns:
      The root of the mean square along each eigenvector `(d,)`, in the limit of large n and d.

    Raises:
      ValueError: If an argument is out of range, shapes do not conform, or the source fit has an
        infinite risk.
    """
    covariance.check_vectors(eigenvalues, beta_s=beta_s, beta_t=beta_t)
    problems.check_sigma(sigma)
    problems.check("scale", scale, np.isfinite, "finite")
    source, target = (jnp.asarray(v, dtype=float) for v in (beta_s, beta_t))
    at = covariance.equivalent(eigenvalues, n, ridge)
    risk = at.risk(source**2, sigma)
    problems.check("the source's risk", risk, lambda r: r < np.inf, "finite")
    s, kappa = at.eigenvalues, at.kappa
    seen = s > 0
    inverse = jnp.where(seen, 1 / (jnp.where(seen, s, 1.0) + kappa), 0.0)
    mean = target - scale * s * inverse * source
    spread = scale * jnp.sqrt((risk + jnp.asarray(sigma, dtype=float) ** 2) / n * s) * inverse
    return jnp.hypot(mean, spread)


@problems.in_float64
def across(
    eigenvalues: Spectrum, direction: Spectrum, beta_t: Spectrum
) -> tuple[Spectrum, Spectrum]:
    """Finds the problem that remains if the component along a direction is fitted freely.

    The remaining covariance is Sigma - Sigma w w^T Sigma / (w^T Sigma w). The risk from n - 1
    samples is exactly the `rest` of `refitted_risk` at n samples.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, d >= 2.
      direction: The free direction w in the eigenbasis of Sigma, `(d,)`, not in its null space.
      beta_t: Target in the eigenbasis of Sigma, `(d,)`.

    Returns:
      The remaining eigenvalues `(d - 1,)`, and the target in their eigenbasis `(d - 1,)`.

    Raises:
      ValueError: If shapes do not conform, or the direction has variance 0.
    """
    s = covariance.check_spectrum(eigenvalues)
    covariance.check_vectors(eigenvalues, direction=direction, beta_t=beta_t)
    root = jnp.sqrt(s)
    feature = root * jnp.asarray(direction, dtype=float)
    problems.check("w^T Sigma w", feature @ feature, lambda v: v > 0, "positive")
    # Let the columns of Q be orthonormal and orthogonal to Sigma^(1/2) w. The remaining covariance
    # is A A^T for A = Sigma^(1/2) Q. Its eigenvalues cannot be negative, unlike those of a
    # difference.
    basis, _ = linalg.qr(feature[:, None], mode="complete")
    vectors, values, _ = linalg.svd(root[:, None] * basis[:, 1:], full_matrices=False)
    return values**2, vectors.T @ jnp.asarray(beta_t, dtype=float)
