"""Code shared by `proximal_spirals` and `proximal_gamma`: the line through two models.

It defines the points on the line, the best of them, and the predictions from distances. gamma is
the weight of the first model: theta(gamma) = gamma theta_1 + (1 - gamma) theta_2.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import jax
import numpy as np
import xarray as xr
from annotated_types import Ge
from jaxtyping import Array, Float, Int, PyTree

from experiments.lab.config import Finite, config
from experiments.lab.findings import mean_and_error, stated
from experiments.studies.shared.checking import must
from sail_jax import proximal
from sail_jax.distances import Distance, median_distance
from sail_jax.distances import mmd as one_mmd

Start = Literal["shared", "independent"]
# By kind of start: the draws of initial weights of theta_1, of theta_2, and of the model that is
# trained only on the target.
STARTS = {"shared": [0, 0, 0], "independent": [0, 1, 2]}
PAIRS = ("1-target", "2-target", "1-2")  # of the sources 1 and 2 and the target
# The number of standard errors from which a difference is significant.
DECIDED = 2.0
SHARP = 0.1  # the largest standard error of a best gamma that serves as a reference
PUBLISHED = -0.1244  # gamma* of SAIL, Sec. 4.4
ENDS = (0.0, 0.5, 1.0)  # gammas of both models, and of their mean


@config
class Line:
    """The points between and beyond two models, evenly spaced in gamma, the weight of the first."""

    points: Annotated[int, Ge(3)] = 31
    """Number of values of gamma."""
    smallest: Finite = -1.0
    """Smallest gamma."""
    largest: Finite = 2.0
    """Largest gamma."""

    def __post_init__(self) -> None:
        beyond = self.largest > self.smallest
        must(self, "largest", beyond, f"be above smallest = {self.smallest}")

    def values(self) -> np.ndarray:
        """Lists the values of gamma.

        Returns:
          `points` values from `smallest` to `largest`, evenly spaced.
        """
        return np.linspace(self.smallest, self.largest, self.points)


def on_line(one: PyTree, two: PyTree, gamma: Float[Array, ""]) -> PyTree:
    """Computes a point on the line through two models: gamma theta_1 + (1 - gamma) theta_2.

    Args:
      one: The parameters theta_1.
      two: The parameters theta_2.
      gamma: The weight of the first.

    Returns:
      The parameters of the point: theta_1 itself at gamma = 1, theta_2 at 0.
    """
    return jax.tree.map(lambda a, b: gamma * a + (1 - gamma) * b, one, two)


def lowest(
    gamma: Float[np.ndarray, " gamma"], loss: Float[np.ndarray, "*runs gamma"]
) -> np.ndarray:
    """Estimates where each loss is lowest along the line.

    The estimate is the vertex of the parabola through the lowest point of the grid and its two
    neighbours. If the lowest point is an end of the grid, the estimate is that end.

    Args:
      gamma: The grid, evenly spaced, with at least three points.
      loss: The losses on the grid.

    Returns:
      The gamma of the lowest loss, of the shape of `loss` without its last axis; NaN if no loss is
      finite.

    >>> grid = np.linspace(-1, 2, 4)
    >>> lowest(grid, np.stack([(grid - 0.3) ** 2, grid])).round(6).tolist()
    [0.3, -1.0]
    """
    finite = np.where(np.isfinite(loss), loss, np.inf)
    i = finite.argmin(-1)
    # An end of the grid uses its neighbour instead, so that all three points exist. The result is
    # not used there.
    inner = np.clip(i, 1, len(gamma) - 2)
    left, middle, right = (
        np.take_along_axis(finite, (inner + k)[..., None], -1)[..., 0] for k in (-1, 0, 1)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        # The vertex of the parabola through three points one step apart, in steps from the middle.
        shift = (left - right) / (2 * (left - 2 * middle + right))
    inside = (i == inner) & np.isfinite(shift)
    vertex = gamma[i] + np.where(inside, shift, 0) * (gamma[1] - gamma[0])
    return np.where(np.isfinite(finite.min(-1)), vertex, np.nan)


def at(
    gamma: Float[np.ndarray, " gamma"],
    loss: Float[np.ndarray, "*runs gamma"],
    where: Float[np.ndarray, "*runs"],
) -> np.ndarray:
    """Interpolates each loss linearly at its own gamma.

    Args:
      gamma: The grid, increasing.
      loss: The losses on the grid.
      where: The gamma of each loss.

    Returns:
      The losses at these gammas. Beyond the grid, they are the losses of its ends; NaN if `where`
      is NaN.

    >>> at(np.array([0.0, 1.0]), np.array([[2.0, 4.0], [2.0, 4.0]]), np.array([0.5, 7.0]))
    array([3., 4.])
    """
    values = np.empty(where.shape)
    for run in np.ndindex(where.shape):
        values[run] = np.interp(where[run], gamma, loss[run])
    return values


def ends(
    gamma: Float[np.ndarray, " gamma"], loss: Float[np.ndarray, "*runs gamma"]
) -> Float[np.ndarray, "*runs 3"]:
    """Interpolates each loss at the two models and at their mean.

    Args:
      gamma: The grid, increasing.
      loss: The losses on the grid.

    Returns:
      The losses at the gammas of `ENDS`.
    """
    return np.stack([at(gamma, loss, np.full(loss.shape[:-1], end)) for end in ENDS], -1)


def weight(found: Mapping[str, Distance], *, squared: bool) -> float:
    """Predicts the weight of model 1 from distances.

    Args:
      found: The distances of `PAIRS`.
      squared: Whether they are squares of distances.

    Returns:
      The weight. It is NaN unless the distance of the two sources exceeds 0 by `DECIDED` standard
      errors. Otherwise no weight is better than another.

    Raises:
      ValueError: As `sail_jax.proximal.pair_weight`, such as for distances that break the triangle
        inequality.

    References:
      SAIL (Structured-Initialization Learning), eq. 11.
    """
    error = np.nan_to_num(float(found["1-2"].stderr))  # NaN: exact, or not known
    if not float(found["1-2"].value) > DECIDED * error:
        return np.nan
    return float(proximal.pair_weight(*(found[p].value for p in PAIRS), squared=squared))


def weights_by_parameters(models: PyTree, target: PyTree) -> Float[np.ndarray, " seed"]:
    """Computes the weight of model 1 in the combination closest to the target's parameters.

    The weights have the sum 1 and minimise |w theta_1 + (1 - w) theta_2 - theta*|^2.

    Args:
      models: The parameters of the models, with leaves `(seed, 2 or more, ...)`. The first two are
        used.
      target: The parameters of the model that was trained on the target, `(seed, ...)`.

    Returns:
      The weight of model 1 for each seed.

    Raises:
      ValueError: If the two models of a seed are the same.

    References:
      SAIL (Structured-Initialization Learning), eq. 4.
    """

    def of(seed: int) -> float:
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[seed, i], models) for i in range(2))
        goal = jax.tree.map(lambda leaf: leaf[seed], target)
        return proximal.from_parameters([first, second], goal, constraint="affine").weights[0]

    return np.array([of(seed) for seed in range(len(jax.tree.leaves(models)[0]))])


def distances(
    measure: Callable[[np.ndarray, np.ndarray], Distance],
    one: np.ndarray,
    two: np.ndarray,
    target: np.ndarray,
) -> dict[str, Distance]:
    """Measures the distance of each pair in `PAIRS`.

    Args:
      measure: The distance of two samples.
      one: The sample of source 1.
      two: The sample of source 2.
      target: The sample of the target.

    Returns:
      The distances by the name of their pair.
    """
    pairs = dict(zip(PAIRS, ((one, target), (two, target), (one, two)), strict=True))
    return {name: measure(*pair) for name, pair in pairs.items()}


def mmd(
    one: Float[np.ndarray, "m feature"],
    two: Float[np.ndarray, "n feature"],
    target: Float[np.ndarray, "k feature"],
) -> dict[str, Distance]:
    """Estimates the squared MMD of each pair in `PAIRS`, with one bandwidth for all.

    The bandwidth is the median distance between points of all three samples.

    Args:
      one: The sample of source 1.
      two: The sample of source 2.
      target: The sample of the target.

    Returns:
      The squared distances by the name of their pair.

    Raises:
      ValueError: As `sail_jax.distances.median_distance`, such as if the median is 0.
    """
    # One bandwidth for all pairs, because the weight compares their distances.
    width = median_distance(np.concatenate([one, two]), target)
    return distances(partial(one_mmd, bandwidth=width), one, two, target)


def decided(values: xr.DataArray) -> int:
    """Returns the sign of a mean over seeds if it differs from 0 significantly, else 0.

    >>> [decided(xr.DataArray(values, dims="seed")) for values in ([1.0, 1.1], [1.0, -1.1])]
    [1, 0]
    """
    mean, error = (float(v) for v in mean_and_error(values))
    return int(np.sign(mean)) if abs(mean) > DECIDED * error else 0


def barrier(one: xr.Dataset) -> bool:
    """Returns whether the mean of two models is worse than either of them.

    If so, the seeds may have their best gammas on both sides of 1/2. The mean over seeds is then in
    between, where it is best for no seed.
    """
    loss = one["end_excess"]
    return all(decided(loss.sel(end=0.5) - loss.sel(end=end)) > 0 for end in (0.0, 1.0))


def is_known(one: xr.Dataset) -> bool:
    """Returns whether the seeds agree on the best gamma, and the grid contains it for all of them.

    Args:
      one: The dataset of one case, with the variable `best` by "seed" and the grid `gamma`.

    Returns:
      Whether its standard error is at most `SHARP`, and no seed has its best gamma at an end of the
      grid. The best gamma of such a seed may be anywhere beyond.
    """
    return _beyond(one) == 0 and float(mean_and_error(one["best"])[1]) <= SHARP


def _beyond(one: xr.Dataset) -> int:
    """Counts the seeds with their best gamma at an end of the grid."""
    grid = one["gamma"].values
    return int(np.isin(one["best"].values, grid[[0, -1]]).sum())


def stated_best(one: xr.Dataset) -> str:
    """Formats the best gamma of one case.

    Args:
      one: The dataset of the case, with the variables `best` and `end_excess` and the grid `gamma`.

    Returns:
      Mean ± standard error, and the number of seeds with their best gamma at an end of the grid. If
      a barrier separates the seeds, the number of seeds below it.
    """
    below, count = int((one["best"] < 0.5).sum()), one["best"].size
    beyond = f" ({_beyond(one)} of {count} seeds at an end of the grid)" if _beyond(one) else ""
    if not barrier(one):
        return f"{stated(one['best'])}{beyond}"
    if below in (0, count):
        return f"{stated(one['best'])} (a barrier at 1/2){beyond}"
    return f"either side of a barrier at 1/2 ({below} of {count} seeds below)"


def by_case(
    cases: Mapping[str, xr.Dataset],
    looks: Int[np.ndarray, " look"],
    told: Callable[[xr.Dataset, int], str],
) -> str:
    """Formats each case, at each number of steps, in one line.

    Args:
      cases: The datasets by the name of the case.
      looks: The numbers of steps, or of epochs.
      told: Returns the text for a case and a number.

    Returns:
      The texts of a case after its name, separated by commas, and the cases by semicolons.
    """
    sentences = (
        f"{name}: {', '.join(told(case, n) for n in looks)}" for name, case in cases.items()
    )
    return "; ".join(sentences)


def lead(loss: xr.DataArray, scratch: xr.DataArray) -> xr.DataArray:
    """Computes how far each seed's loss is below the loss of training from scratch.

    The loss is evaluated at the gamma with the best mean over the other seeds, so that the choice
    and the judgement use different data.

    Args:
      loss: The losses, with dimensions "seed" and "gamma".
      scratch: The losses of training from scratch, with the dimension "seed".

    Returns:
      The differences by seed; positive if the loss is lower than from scratch.

    >>> loss = xr.DataArray([[1.0, 9.0], [2.0, 9.0], [9.0, 3.0]], dims=("seed", "gamma"))
    >>> lead(loss, xr.DataArray([10.0, 10.0, 10.0], dims="seed")).values
    array([9., 8., 1.])
    """
    values = loss.transpose("seed", "gamma").values
    finite = np.where(np.isfinite(values), values, np.inf)
    # Infinite if one of the other seeds diverged, so that such a gamma is not chosen.
    best = [np.delete(finite, seed, 0).sum(0).argmin() for seed in range(len(finite))]
    return scratch - finite[np.arange(len(finite)), best]


def met(known: Sequence[tuple[xr.Dataset, int]], way: str) -> str:
    """Counts the cases in which a prediction agrees with the best gamma.

    Args:
      known: The datasets of cases, each with the relevant number of steps.
      way: The kind of prediction.

    Returns:
      Text such as "3 of 4": the number of cases in which the prediction is within `DECIDED`
      standard errors of the best gamma, among the cases in which at least two seeds define it.
    """
    gaps = [(case["predicted"].sel(way=way) - case["best"].sel(look=look)) for case, look in known]
    gaps = [gap for gap in gaps if np.isfinite(mean_and_error(gap)[1])]
    return f"{sum(decided(gap) == 0 for gap in gaps)} of {len(gaps)}"
