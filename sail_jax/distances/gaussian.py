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
    from D = 2 on.

    Args:
      gap: Difference of the means, `[..., dim]`.
      covariance: Matrix `[dim, dim]`, or a number s^2 which stands for s^2 I.

    Returns:
      The distance in [0, 1], `[...]`. Its gradient is 0 at equal means.

    Raises:
      ValueError: For shapes that do not fit, for a covariance that is not symmetric and positive
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

    It is 2 Phi^-1((1 + TV)/2), the inverse of `total_variation_gaussian`. SAIL's Theorem 3 needs
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


def kl_gaussian(
    mean: Float[ArrayLike, "dim"],
    covariance: Float[ArrayLike, "..."],
    other_mean: Float[ArrayLike, "dim"],
    other_covariance: Float[ArrayLike, "..."],
) -> Float[Array, ""]:
    """Computes the Kullback-Leibler divergence of two Gaussians, in nats.

    KL(N(m, S) | N(n, T)) = (tr(T^-1 S) - dim + (m - n)^T T^-1 (m - n) + log det T - log det S) / 2.

    Args:
      mean: m, `[dim]`.
      covariance: S, a matrix `[dim, dim]`, or a number s^2 which stands for s^2 I.
      other_mean: n, `[dim]`.
      other_covariance: T, likewise.

    Returns:
      The divergence, a scalar.

    Raises:
      ValueError: For shapes that do not fit, for a covariance that is not symmetric and positive
        definite, and for values that are not finite.
      TypeError: For complex numbers.

    >>> float(kl_gaussian(np.array([0.0, 1.0]), 1.0, np.array([0.0, 3.0]), 1.0))
    2.0
    """
    mean, other_mean = _floating("mean", mean), _floating("other_mean", other_mean)
    if mean.ndim != 1 or mean.shape != other_mean.shape:
        raise ValueError(
            f"mean and other_mean must be vectors [dim]; got {mean.shape}, {other_mean.shape}"
        )
    dim = mean.shape[0]
    L, M = (
        F if F.ndim else F * jnp.eye(dim, dtype=F.dtype)
        for F in (
            _factor("covariance", covariance, dim),
            _factor("other_covariance", other_covariance, dim),
        )
    )
    # tr(T^-1 S) = |M^-1 L|_F^2 for the factors S = L L^T and T = M M^T: no inverse is formed.
    ratio = _whiten(L.T, M)  # (M^-1 L)^T
    logs = jnp.log(jnp.diagonal(L)) - jnp.log(jnp.diagonal(M))
    gap = _whiten(mean - other_mean, M)
    return 0.5 * (jnp.sum(ratio**2) - dim + jnp.sum(gap**2)) - jnp.sum(logs)


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
