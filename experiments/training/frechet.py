"""The Fréchet distance between the normal distributions of two samples (Heusel et al. 2017)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float

__all__ = ["Normal", "between", "distance", "fit", "normal"]


class Normal(NamedTuple):
    """A normal distribution in float64, its covariance as a product: root' root."""

    mean: Float[np.ndarray, " d"]
    root: Float[np.ndarray, "r d"]


def fit(sample: Float[ArrayLike, "n d"]) -> Normal:
    """The sample's mean and (n - 1)-covariance, whose root is found without forming it: so nothing
    is lost below the square root of the precision, and n may be less than d.

    `ValueError` for fewer than two points, or one that is not finite.
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
    """From its moments; eigenvalues that rounding made negative count as 0."""
    mean, covariance = (np.asarray(x, np.float64) for x in (mean, covariance))
    if mean.ndim != 1 or covariance.shape != 2 * mean.shape:
        raise ValueError(
            f"expected a mean [d] and a covariance [d, d]; got shapes {list(mean.shape)} and "
            f"{list(covariance.shape)}"
        )
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return Normal(mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


def distance(a: Normal, b: Normal) -> float:
    """|m_a - m_b|^2 + tr(A + B - 2 (A^(1/2) B A^(1/2))^(1/2)), a squared distance (Dowson and
    Landau, 1982), in the unit of the features squared.

    With A = R_a' R_a the last trace is the nuclear norm of R_a R_b': singular values carry an error
    of eps times the largest, where a root of eigenvalues would carry one of its square root.

    >>> distance(normal([0.0], [[4.0]]), normal([3.0], [[1.0]]))
    10.0
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features: {a.mean.size} of one and {b.mean.size} of the other")
    shared = np.linalg.svd(a.root @ b.root.T, compute_uv=False).sum()
    apart = np.sum((a.mean - b.mean) ** 2) + np.sum(a.root**2) + np.sum(b.root**2) - 2 * shared
    return float(np.maximum(apart, 0.0))


def between(a: Float[ArrayLike, "n d"], b: Float[ArrayLike, "m d"]) -> float:
    """The distance of two samples' fits. It is biased upwards, by O(1/n + 1/m): compare those of
    equal sizes, and with that of two samples of one distribution."""
    return distance(fit(a), fit(b))
