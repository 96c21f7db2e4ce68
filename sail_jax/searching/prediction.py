"""Predictions of a quadratic score for weighted means of models.

Let a score be quadratic along the lines between some points theta_i (models and their base). Its
values at the points and half-way between each pair then determine it at all weighted means.
Half-way, it exceeds the mean of the two ends by c_ij / 8. For a score with Hessian -H, c_ij =
(theta_i - theta_j)' H (theta_i - theta_j). At sum_i w_i theta_i with sum_i w_i = 1, it is

    sum_i w_i f_i + 1/2 sum_{i<j} w_i w_j c_ij.

For three models with scores -1, -2, -2 and half-way gains of 0.5, 0.5 and 0, this is -1.67 + 0.44 =
-1.22 at their mean. The formula is exact on the testbed of `theory.merging.quadratic`. Networks
deviate from it if their tasks are far apart, which the comparison with measured scores shows.

References:
  Wortsman et al., Model soups, 2022 (arXiv 2203.05482), Sec. 4, for the same approximation of the
  loss of a soup.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, stats


class Quadratic(NamedTuple):
    """A quadratic score of weighted means.

    Attributes:
      scores: The score of each point.
      curvature: c_ij for each pair of points, symmetric, 0 on the diagonal.
    """

    scores: Float[np.ndarray, "p"]
    curvature: Float[np.ndarray, "p p"]

    def at(self, weights: Float[np.ndarray, "p"]) -> float:
        """Predicts the score of a weighted mean with weights that sum to 1.

        >>> gains = np.array([[0.0, 0.5, 0.5], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]])
        >>> round(fit(np.array([-1.0, -2.0, -2.0]), gains).at(np.full(3, 1 / 3)), 2)
        -1.22
        """
        return float(weights @ self.scores + weights @ self.curvature @ weights / 4)

    def best(self) -> Float[np.ndarray, "p"]:
        """Finds the nonnegative weights of the best mean.

        `proximal.simplex_weights` is exact, but rejects a score that increases away from its
        points, as with a barrier, for which the best mean is at a corner.
        """
        count = len(self.scores)
        starts = [np.full(count, 1 / count), *(0.9 * np.eye(count) + 0.1 / count)]
        found = [
            optimize.minimize(
                lambda w: -self.at(w),
                start,
                bounds=[(0, 1)] * count,
                constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
                method="SLSQP",
            ).x
            for start in starts
        ]
        best = np.clip(max(found, key=self.at), 0, None)
        return best / best.sum()


def fit(scores: Float[np.ndarray, "p"], gains: Float[np.ndarray, "p p"]) -> Quadratic:
    """Fits a quadratic score to points and to the half-way gains between each pair."""
    return Quadratic(scores, 8 * gains)


class Prediction(NamedTuple):
    """The predicted and the measured score of one weighted mean, on the same examples.

    Attributes:
      name: The name of the arm.
      predicted: The predicted score.
      measured: The measured score.
    """

    name: str
    predicted: float
    measured: float


def agreement(predictions: tuple[Prediction, ...]) -> tuple[float, float]:
    """Measures the accuracy of predictions.

    Args:
      predictions: Three or more predictions.

    Returns:
      The root mean square error relative to the standard deviation of measured scores, and
      Spearman's rank correlation. NaN if all values are equal.
    """
    predicted, measured = np.array([p[1:] for p in predictions]).T
    with np.errstate(invalid="ignore", divide="ignore"):
        error = float(np.sqrt(np.mean((predicted - measured) ** 2)) / measured.std())
    if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return error, np.nan
    ranks = np.corrcoef(stats.rankdata(predicted), stats.rankdata(measured))
    return error, float(ranks[0, 1])
