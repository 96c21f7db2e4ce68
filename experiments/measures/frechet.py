"""The Fréchet distance between the normal distributions of two samples.

References:
  Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017 (arXiv 1706.08500).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float


class Normal(NamedTuple):
    """A normal distribution, in float64.

    Attributes:
      mean: Its mean.
      root: A root R of its covariance, which equals R^T R.
    """

    mean: Float[np.ndarray, " d"]
    root: Float[np.ndarray, "r d"]


def fit(sample: Float[ArrayLike, "n d"]) -> Normal:
    """Fits a normal distribution to a sample.

    The covariance, with divisor n - 1, is never formed: a QR decomposition gives its root. This
    avoids the loss of digits by squaring, and allows n < d.

    Args:
      sample: The n points, at least two.

    Returns:
      The distribution.

    Raises:
      ValueError: If the sample has a different shape or fewer points, or a point is not finite.

    >>> normal_fit = fit([[0.0], [2.0]])
    >>> normal_fit.mean.tolist(), (normal_fit.root**2).round(6).tolist()
    ([1.0], [[2.0]])
    """
    X = np.asarray(sample, np.float64)
    if X.ndim != 2 or len(X) < 2:
        raise ValueError(f"sample must be [n, d] with n of at least 2; got shape {list(X.shape)}")
    bad = ~np.isfinite(X).all(axis=1)
    if bad.any():
        raise ValueError(f"sample[{int(np.argmax(bad))}] is not finite")
    mean = X.mean(axis=0)
    root = np.linalg.qr((X - mean) / np.sqrt(len(X) - 1), mode="r")
    return Normal(mean, np.asarray(root))


def normal(mean: Float[ArrayLike, " d"], covariance: Float[ArrayLike, "d d"]) -> Normal:
    """Creates a normal distribution from its mean and covariance.

    Args:
      mean: The mean.
      covariance: The covariance. Only its symmetric part is used. Eigenvalues that are negative due
        to rounding are set to 0.

    Returns:
      The distribution.

    Raises:
      ValueError: If the shapes are not those of a mean and its covariance.
    """
    mean, covariance = (np.asarray(x, np.float64) for x in (mean, covariance))
    if mean.ndim != 1 or covariance.shape != 2 * mean.shape:
        raise ValueError(
            f"expected a mean [d] and a covariance [d, d]; got shapes {list(mean.shape)} and "
            f"{list(covariance.shape)}"
        )
    # A Cholesky factorisation requires a definite matrix, but covariances of few samples are
    # singular.
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return Normal(mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


def distance(a: Normal, b: Normal) -> float:
    """Computes the squared Fréchet distance between two normal distributions.

    |m_a - m_b|^2 + tr(A + B - 2 (A^(1/2) B A^(1/2))^(1/2))

    With A = R_a^T R_a and B = R_b^T R_b, the last trace is the nuclear norm of R_a R_b^T. The
    errors of its singular values are eps times the largest one. Square roots of eigenvalues would
    have errors of sqrt(eps).

    Args:
      a: A distribution.
      b: Another one, of the same dimension.

    Returns:
      The squared distance, at least 0, in the squared unit of the features.

    Raises:
      ValueError: If the dimensions differ.

    References:
      Dowson and Landau, The Fréchet distance between multivariate normal distributions, 1982.

    >>> distance(normal([0.0], [[4.0]]), normal([3.0], [[1.0]]))
    10.0
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"dimensions must be equal; got {a.mean.size} and {b.mean.size}")
    shared = np.linalg.svd(a.root @ b.root.T, compute_uv=False).sum()
    apart = np.sum((a.mean - b.mean) ** 2) + np.sum(a.root**2) + np.sum(b.root**2) - 2 * shared
    return float(np.maximum(apart, 0.0))


def between(a: Float[ArrayLike, "n d"], b: Float[ArrayLike, "m d"]) -> float:
    """Computes the squared Fréchet distance between normal distributions fitted to two samples.

    The distance is biased upwards by O(1/n + 1/m). Compare only samples of equal sizes, and report
    the distance between two samples of one distribution for scale.
    """
    return distance(fit(a), fit(b))
