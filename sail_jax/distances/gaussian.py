"""Distances of Gaussians in closed form."""

import math

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import erf, erfinv
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete

__all__ = ["gaussian_separation", "kl_gaussian", "total_variation_gaussian"]


def total_variation_gaussian(
    gap: Float[ArrayLike, "*batch dim"], covariance: Float[ArrayLike, "..."] = 1.0
) -> Float[Array, "*batch"]:
    """The total variation distance of N(m, covariance) and N(m + gap, covariance).

    2 Phi(D/2) - 1 for the Mahalanobis length D of the gap; SAIL's D/2 (Lemma 2) bounds it (Pinsker)
    and exceeds 1 from D = 2 on. covariance: `[dim, dim]`, or a variance s^2 standing for s^2 I.
    ValueError for a covariance that is not symmetric positive definite, and if not finite.

    >>> round(float(total_variation_gaussian(np.array([1.0]))), 4)
    0.3829
    """
    gap = _floating("gap", gap)
    if gap.ndim == 0:
        raise ValueError("gap must be a vector [..., dim]; got a scalar")
    white = _whiten(gap, _factor("covariance", covariance, gap.shape[-1]))
    squared = jnp.sum(white**2, -1)
    length = jnp.sqrt(jnp.where(squared > 0, squared, 1))  # no NaN gradient at equal means
    return erf(jnp.where(squared > 0, length, 0) / (2 * math.sqrt(2)))


def gaussian_separation(total_variation: Float[ArrayLike, "*batch"]) -> Float[Array, "*batch"]:
    """The Mahalanobis length of the gap at which Gaussians have this total variation distance.

    2 Phi^-1((1 + TV)/2), the inverse of `total_variation_gaussian`. Squared Mahalanobis lengths
    are what SAIL's Theorem 3 needs in place of TV^2. Its condition number grows as TV nears 1
    (infinite at 1). ValueError outside [0, 1].

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
    """KL(N(mean, covariance) | N(other_mean, other_covariance)) in nats; covariances as in
    `total_variation_gaussian`.

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
    ratio = _whiten(L.T, M)  # (M^-1 L)^T
    logs = jnp.log(jnp.diagonal(L)) - jnp.log(jnp.diagonal(M))
    gap = _whiten(mean - other_mean, M)
    return 0.5 * (jnp.sum(ratio**2) - dim + jnp.sum(gap**2)) - jnp.sum(logs)


def _factor(name: str, covariance: ArrayLike, dim: int) -> Array:
    """A lower Cholesky factor `[dim, dim]`, or the standard deviation of a scalar variance."""
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
    return jnp.linalg.cholesky(S)


def _whiten(rows: Array, factor: Array) -> Array:
    if factor.ndim == 0:
        return rows / factor
    flat = rows.reshape(-1, rows.shape[-1]).T
    return solve_triangular(factor, flat, lower=True).T.reshape(rows.shape)


def _floating(name: str, x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real numbers; got {x.dtype}")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    values = concrete(x)
    if values is not None and not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite; got {values}")
    return x
