"""Total variation of samples, by a histogram and by a classifier; on the host."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import ArrayLike, Bool, Float

from sail_jax.checks import integer
from sail_jax.distances.estimates import Distance, host_samples

Predict = Callable[[Float[np.ndarray, "n dim"]], Bool[np.ndarray, " n"]]
Fit = Callable[[Float[np.ndarray, "n dim"], Bool[np.ndarray, " n"]], Predict]


def total_variation_histogram(
    x: Float[ArrayLike, "m dim"],
    y: Float[ArrayLike, "n dim"],
    *,
    bins: int | Sequence[Float[ArrayLike, "edge"]] = 16,
) -> Distance:
    """Estimates the total variation distance of two samples by a histogram, for few dimensions.

    It is half the sum of |share of x - share of y| over the cells of a grid. Two biases have
    opposite signs. Cells merge points, which lowers the value. Random differences between cells
    raise it (to 1 if every point has a separate cell).

    The standard error is multinomial, for the set of cells in which x has the larger share, treated
    as fixed. For equal distributions it is too large.

    Args:
      x: At least 2 points `[m, dim]`.
      y: At least 2 points `[n, dim]`.
      bins: The number of cells of equal width along each axis, over the range of both samples; or
        the increasing inner edges of the cells for each axis. The outer cells are then unbounded.

    Returns:
      The distance in [0, 1] and its standard error, as floats.

    Raises:
      ValueError: For invalid bins, and samples that are invalid or not finite.
      TypeError: For values that are not real numbers, or are traced.

    >>> total_variation_histogram(np.array([[0.0], [1.0]]), np.ones((2, 1)), bins=2).value
    0.5
    """
    a, b = host_samples(x, y, 2)
    if isinstance(bins, int):
        if bins < 1:
            raise ValueError(f"bins must be at least 1; got {bins}")
        z = np.concatenate([a, b])
        edges = [
            np.linspace(lo, hi, bins + 1)[1:-1] for lo, hi in zip(z.min(0), z.max(0), strict=True)
        ]
    else:
        edges = [np.asarray(e, np.float64) for e in bins]
        fits = all(e.ndim == 1 and np.isfinite(e).all() and (np.diff(e) > 0).all() for e in edges)
        if len(edges) != a.shape[1] or not fits:
            raise ValueError(
                f"bins: expected a number or increasing edges for each of {a.shape[1]} axes; "
                f"got {bins}"
            )
    cells = [
        np.stack([np.searchsorted(e, z[:, k], "right") for k, e in enumerate(edges)], 1)
        for z in (a, b)
    ]
    # Only cells with points are counted: a full grid would have bins^dim cells.
    used, cell = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
    cell = cell.ravel()
    share = [np.bincount(c, minlength=len(used)) / len(c) for c in (cell[: len(a)], cell[len(a) :])]
    # The total variation is the difference of the two probabilities of this set. Their errors are
    # binomial.
    more = share[0] > share[1]
    value = 0.5 * float(np.abs(share[0] - share[1]).sum())
    return Distance(value, _binomial(share[0][more].sum(), len(a), share[1][more].sum(), len(b)))


def total_variation_classifier(
    x: Float[ArrayLike, "m dim"],
    y: Float[ArrayLike, "n dim"],
    *,
    fit: Fit | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Distance:
    """Estimates a lower bound of the total variation distance of two samples, by a classifier.

    The value is the share of held-out points of x that a classifier calls "x", minus the same share
    for y. The best classifier ("x" where its density is larger) attains the total variation
    distance, and any other stays below it. The only bias is therefore downwards, by the regret of
    the classifier, in any number of dimensions. Each fold of the data is classified by a classifier
    that was fitted to the other folds. The value may be slightly negative by chance.

    The standard error is binomial over held-out points. It treats the classifiers of all folds as
    one fixed classifier.

    Args:
      x: Points `[m, dim]`, at least 2 for each fold.
      y: Points `[n, dim]`, likewise.
      fit: `fit(points [n, dim], is_x [n])` returns a classifier, a function from points to bools:
        whether each belongs to x. The default is logistic regression on the standardised
        coordinates and their products, with balanced classes. That family contains the best
        classifier of two Gaussians.
      folds: The number of folds, at least 2.
      seed: The seed of the random folds.

    Returns:
      The estimate and its standard error, as floats.

    Raises:
      ValueError: For fewer than 2 folds; samples that are smaller than 2 folds, invalid or not
        finite; and a `fit` whose classifiers do not return one bool per point.
      TypeError: For values that are not real numbers, or are traced.

    >>> fit = lambda points, is_x: lambda new: new[:, 0] < 0.5  # a classifier that learns nothing
    >>> total_variation_classifier(np.zeros((4, 1)), np.ones((4, 1)), fit=fit, folds=2).value
    1.0
    """
    integer("folds", folds, 2)
    a, b = host_samples(x, y, 2 * folds)
    fit = _logistic if fit is None else fit
    rng = np.random.default_rng(seed)
    points, is_x = np.concatenate([a, b]), np.arange(len(a) + len(b)) < len(a)
    # Each sample is divided separately, so every fold has points of both.
    fold = np.concatenate([rng.permutation(np.arange(len(z)) % folds) for z in (a, b)])
    said = np.zeros(len(points), bool)
    for k in range(folds):
        held = fold == k
        answer = np.asarray(fit(points[~held], is_x[~held])(points[held]))
        if answer.shape != (held.sum(),) or answer.dtype != bool:
            raise ValueError(
                f"fit: expected a classifier with one bool for each of {held.sum()} points; got "
                f"{answer.dtype} {answer.shape}"
            )
        said[held] = answer
    p, q = float(said[is_x].mean()), float(said[~is_x].mean())
    return Distance(p - q, _binomial(p, len(a), q, len(b)))


def _binomial(p: float, m: int, q: float, n: int) -> float:
    """Computes the standard error of the difference of two shares, p of m points and q of n."""
    p, q = (min(max(float(r), 0.0), 1.0) for r in (p, q))
    return math.sqrt(p * (1 - p) / m + q * (1 - q) / n)


def _logistic(points: np.ndarray, is_x: np.ndarray) -> Predict:
    """The default `fit` of `total_variation_classifier`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(
        StandardScaler(),
        PolynomialFeatures(2, include_bias=False),
        LogisticRegression(class_weight="balanced", max_iter=1000),
    ).fit(points, is_x)
    return lambda new: np.asarray(model.predict(new), bool)
