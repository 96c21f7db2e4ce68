"""Total variation of samples: by the cells of a histogram, and by a classifier."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import ArrayLike, Bool, Float

from sail_jax.distances.estimates import Distance, host_samples

__all__ = ["Fit", "total_variation_classifier", "total_variation_histogram"]

Predict = Callable[[Float[np.ndarray, "n dim"]], Bool[np.ndarray, " n"]]
Fit = Callable[[Float[np.ndarray, "n dim"], Bool[np.ndarray, " n"]], Predict]


def total_variation_histogram(
    x: Float[ArrayLike, "m dim"],
    y: Float[ArrayLike, "n dim"],
    *,
    bins: int | Sequence[Float[ArrayLike, "edge"]] = 16,
) -> Distance:
    """Half the sum of |share of x - share of y| over the cells of a grid, for few dimensions.

    bins: of equal width along each axis, over the range of both samples, or the inner edges along
    each axis (the outer cells are unbounded). Two biases of opposite sign: cells merge points,
    which lowers it; chance differences of cells count as distance, which raises it (to 1 if every
    point has a cell of its own). Standard error: the multinomial one of the cells where x has
    more, taken as fixed; at equality it is too large.

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
    used, cell = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
    cell = cell.ravel()
    share = [np.bincount(c, minlength=len(used)) / len(c) for c in (cell[: len(a)], cell[len(a) :])]
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
    """How much more often a classifier says "x" of held-out points of x than of those of y.

    For whatever classifier this estimates a LOWER bound of the total variation, which the best one
    (x where its density is larger) attains: the bias is downwards and nothing but the classifier's
    regret, with no regard to the dimension. Cross-fitted: each fold is judged by a classifier of
    the others. It may come out slightly negative, by chance. Standard error: binomial over held-out
    points, as if the classifiers of the folds were one and fixed.

    fit(points [n, dim], is_x [n]) -> (points -> is_x). By default logistic regression on the
    coordinates, standardised, and their products, balanced: the best classifier for two Gaussians.
    ValueError for samples smaller than 2 folds. Host, float64.
    """
    if not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be an integer >= 2; got {folds!r}")
    a, b = host_samples(x, y, 2 * folds)
    fit = _logistic if fit is None else fit
    rng = np.random.default_rng(seed)
    points, is_x = np.concatenate([a, b]), np.arange(len(a) + len(b)) < len(a)
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
    p, q = (min(max(float(r), 0.0), 1.0) for r in (p, q))
    return math.sqrt(p * (1 - p) / m + q * (1 - q) / n)


def _logistic(points: np.ndarray, is_x: np.ndarray) -> Predict:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(
        StandardScaler(),
        PolynomialFeatures(2, include_bias=False),
        LogisticRegression(class_weight="balanced", max_iter=1000),
    ).fit(points, is_x)
    return lambda new: np.asarray(model.predict(new), bool)
