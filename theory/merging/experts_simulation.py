"""Fits experts to drawn samples, and merges them by solving for every model itself.

`experts` computes the means of these draws without any draw, fit or merge.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from theory.claims import generator
from theory.merging.experts import RegressionTasks
from theory.problems import defined

BATCH = 500  # data sets that are solved at a time


class FittedExperts(NamedTuple):
    """Experts of drawn data sets, and the model of the pooled data.

    Attributes:
      experts: The expert of each task, `(draws, T, d)`.
      pooled: The model of the pooled data, `(draws, d)`.
    """

    experts: Float[np.ndarray, "draws T d"]
    pooled: Float[np.ndarray, "draws d"]


@defined
def fit_experts(
    key: Array,
    tasks: RegressionTasks,
    draws: int,
    *,
    ridge: float = 0.0,
    pooled_ridge: float = 0.0,
) -> FittedExperts:
    """Draws data sets and fits them.

    Args:
      key: Random key.
      tasks: The tasks.
      draws: The number of data sets of all tasks.
      ridge: The penalty of the experts. 0 needs n_t >= d.
      pooled_ridge: The penalty of pooled training. 0 needs N >= d.

    Returns:
      The fits.
    """
    rng, counts = generator(key), [min(BATCH, draws - at) for at in range(0, draws, BATCH)]
    fits = [_fitted(rng, tasks, count, ridge, pooled_ridge) for count in counts]
    return FittedExperts(*map(np.concatenate, zip(*fits, strict=True)))


def _fitted(
    rng: np.random.Generator, tasks: RegressionTasks, draws: int, ridge: float, pooled_ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """Solves the normal equations of a few data sets."""
    d, total = tasks.teachers.shape[1], tasks.samples.sum()
    experts, whole, pull = [], total * pooled_ridge * np.eye(d), 0.0
    rows = zip(tasks.curvatures, tasks.teachers, tasks.samples, tasks.sigma, strict=True)
    for curvature, teacher, n, sigma in rows:
        x = rng.standard_normal((draws, int(n), d)) @ np.linalg.cholesky(curvature).T
        y = x @ teacher + sigma * rng.standard_normal((draws, int(n)))
        xt = x.swapaxes(1, 2)
        gram, own = xt @ x, xt @ y[..., None]
        experts.append(np.linalg.solve(gram + n * ridge * np.eye(d), own)[..., 0])
        whole, pull = whole + gram, pull + own
    return np.stack(experts, 1), np.linalg.solve(whole, pull)[..., 0]


@defined
def mean_risks(tasks: RegressionTasks, models: Float[np.ndarray, "... d"]) -> np.ndarray:
    """Computes the mean over tasks of E (x.b - x.beta_t)^2, without a formula for the best model.

    Args:
      tasks: The tasks.
      models: The models b.

    Returns:
      The mean risks `(...)`.
    """
    roots = np.linalg.cholesky(tasks.curvatures).swapaxes(1, 2)
    missed = [(models - b) @ root.T for b, root in zip(tasks.teachers, roots, strict=True)]
    return np.mean([np.sum(part**2, -1) for part in missed], 0)


@defined
def least_risk(tasks: RegressionTasks) -> float:
    """Solves for the least mean risk of one model, by least squares.

    Args:
      tasks: The tasks.

    Returns:
      The risk.
    """
    roots = np.linalg.cholesky(tasks.curvatures).swapaxes(1, 2)
    targets = np.concatenate([r @ b for r, b in zip(roots, tasks.teachers, strict=True)])
    best = np.linalg.lstsq(np.concatenate(list(roots)), targets)[0]
    return float(mean_risks(tasks, best))
