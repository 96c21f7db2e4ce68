"""Distances between Gaussian distributions in closed form, in JAX."""

import math

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf, erfinv
from jaxtyping import Array, ArrayLike, Float

from sail_jax import linalg
from sail_jax.checks import concrete


def total_variation_gaussian(
    gap: Float[ArrayLike, "*batch dim"], covariance: Float[ArrayLike, "..."] = 1.0
) -> Float[Array, "*batch"]:
    """Computes the total variation distance of two Gaussians with one covariance.

    For N(m, S) and N(m + gap, S) it is 2 Phi(D/2) - 1, where D = sqrt(gap^T S^-1 gap) is the
    Mahalanobis length of the gap. SAIL's D/2 (Lemma 2) is an upper bound (Pinsker), which exceeds 1
    for D > 2.

    Args:
      gap: Difference of the means, `[..., dim]`.
      covariance: Matrix `[dim, dim]`, or a number s^2 which stands for s^2 I.

    Returns:
      The distance in [0, 1], `[...]`. Its gradient is 0 at equal means.

    Raises:
      ValueError: For inconsistent shapes, for a covariance that is not symmetric and positive
        definite, and for values that are not finite.
      TypeError: For complex numbers.

    >>> round(float(total_variation_gaussian(np.array([1.0]))), 4)
    0.3829
    """
    gap = _floating("gap", gap)
    if gap.ndim == 0:
        raise ValueError("gap must be a vector [..., dim]; got a scalar")
    white = _whiten(gap, _factor("covariance", covariance, gap.shape[-1]))
    squared = jnp.sum(white**2, -1)
    # A root of 1 instead of 0 avoids a NaN gradient at equal means.
    length = jnp.sqrt(jnp.where(squared > 0, squared, 1))
    # 2 Phi(t) - 1 = erf(t / sqrt(2)), which is accurate for small t, where Phi is near 1/2.
    return erf(jnp.where(squared > 0, length, 0) / (2 * math.sqrt(2)))


def gaussian_separation(total_variation: Float[ArrayLike, "*batch"]) -> Float[Array, "*batch"]:
    """Computes the Mahalanobis length at which Gaussians have a given total variation distance.

    It is 2 Phi^-1((1 + TV)/2), the inverse of `total_variation_gaussian`. SAIL's Theorem 3 requires
    squared Mahalanobis lengths instead of TV^2. The condition number grows as TV approaches 1,
    where the length is infinite.

    Args:
      total_variation: Distances in [0, 1].

    Returns:
      The lengths, of the same shape.

    Raises:
      ValueError: For values outside [0, 1].
      TypeError: For complex numbers.

    >>> round(float(gaussian_separation(0.38292492)), 5)
    1.0
    """
    tv = _floating("total_variation", total_variation)
    values = concrete(tv)
    if values is not None and not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"total_variation must lie in [0, 1]; got {values}")
    return 2 * math.sqrt(2) * erfinv(tv)


def _factor(name: str, covariance: ArrayLike, dim: int) -> Array:
    """Returns a lower Cholesky factor `[dim, dim]`, or a scalar standard deviation."""
    S = _floating(name, covariance)
    if S.shape not in ((), (dim, dim)):
        raise ValueError(f"{name} must be a variance or of shape {(dim, dim)}; got {S.shape}")
    values = concrete(S)
    if S.ndim == 0:
        if values is not None and not values > 0:
            raise ValueError(f"{name} must be a positive variance; got {values}")
        return jnp.sqrt(S)
    if values is not None:
        slack = 16 * np.finfo(values.dtype).eps * np.abs(values).max()
        if np.abs(values - values.T).max() > slack:
            raise ValueError(f"{name} must be symmetric; got {values}")
        least = np.linalg.eigvalsh(values.astype(np.float64))[0]
        if least <= slack:
            raise ValueError(f"{name} must be positive definite; its least eigenvalue is {least}")
    return linalg.cholesky(S)


def _whiten(rows: Array, factor: Array) -> Array:
    """Multiplies each row by the inverse of the factor."""
    if factor.ndim == 0:
        return rows / factor
    flat = rows.reshape(-1, rows.shape[-1]).T
    return linalg.solve_triangular(factor, flat, lower=True).T.reshape(rows.shape)


def _floating(name: str, x: ArrayLike) -> Array:
    """Converts x to a floating array, checked to be real and finite."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real numbers; got {x.dtype}")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    values = concrete(x)
    if values is not None and not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite; got {values}")
    return x
