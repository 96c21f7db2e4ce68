"""What `proximal_spirals` and `proximal_gamma` share: the line through two models, the best point
on it, and the points that are predicted from distances."""

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
from sail_jax import proximal
from sail_jax.distances import Distance, median_distance
from sail_jax.distances import mmd as one_mmd

Start = Literal["shared", "independent"]
# whose initial weights theta_1, theta_2 and the model trained on the target alone have
STARTS = {"shared": [0, 0, 0], "independent": [0, 1, 2]}
PAIRS = ("1-target", "2-target", "1-2")
DECIDED = 2.0  # standard errors beyond which a difference counts
SHARP = 0.1  # standard error of a best gamma that others can be held against
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
        if self.largest <= self.smallest:
            raise ValueError(
                f"largest must be above smallest = {self.smallest}; got {self.largest}"
            )

    def values(self) -> np.ndarray:
        return np.linspace(self.smallest, self.largest, self.points)


def on_line(one: PyTree, two: PyTree, gamma: Float[Array, ""]) -> PyTree:
    """gamma theta_1 + (1 - gamma) theta_2; theta_1 itself at 1 and theta_2 at 0."""
    return jax.tree.map(lambda a, b: gamma * a + (1 - gamma) * b, one, two)


def lowest(
    gamma: Float[np.ndarray, " gamma"], loss: Float[np.ndarray, "*runs gamma"]
) -> np.ndarray:
    """Where each loss is lowest: the vertex of the parabola through the lowest point of the evenly
    spaced grid and its neighbours, or the end of the grid. NaN if no loss is finite.

    >>> grid = np.linspace(-1, 2, 4)
    >>> lowest(grid, np.stack([(grid - 0.3) ** 2, grid])).round(6).tolist()
    [0.3, -1.0]
    """
    finite = np.where(np.isfinite(loss), loss, np.inf)
    i = finite.argmin(-1)
    inner = np.clip(i, 1, len(gamma) - 2)
    left, middle, right = (
        np.take_along_axis(finite, (inner + k)[..., None], -1)[..., 0] for k in (-1, 0, 1)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = (left - right) / (2 * (left - 2 * middle + right))
    inside = (i == inner) & np.isfinite(shift)
    vertex = gamma[i] + np.where(inside, shift, 0) * (gamma[1] - gamma[0])
    return np.where(np.isfinite(finite.min(-1)), vertex, np.nan)


def at(
    gamma: Float[np.ndarray, " gamma"],
    loss: Float[np.ndarray, "*runs gamma"],
    where: Float[np.ndarray, "*runs"],
) -> np.ndarray:
    """Each loss at its own point, linear between those of the grid and constant beyond; NaN at NaN.

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
    """The losses at `ENDS`."""
    return np.stack([at(gamma, loss, np.full(loss.shape[:-1], end)) for end in ENDS], -1)


def weight(found: Mapping[str, Distance], *, squared: bool) -> float:
    """The weight of model 1 by SAIL's eq. 11 from the distances of `PAIRS`; NaN where that of the
    sources is not above 0 by `DECIDED` standard errors: then no weight is better than another."""
    error = np.nan_to_num(float(found["1-2"].stderr))  # NaN: exact, or not known
    if not float(found["1-2"].value) > DECIDED * error:
        return np.nan
    return float(proximal.pair_weight(*(found[p].value for p in PAIRS), squared=squared))


def weights_by_parameters(models: PyTree, target: PyTree) -> Float[np.ndarray, " seed"]:
    """The weight of model 1 by SAIL's eq. 4 with sum 1, from models `[seed, 2, ...]` and the one
    trained on the target `[seed, ...]`."""

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
    """`measure` of the pairs named in `PAIRS`."""
    pairs = dict(zip(PAIRS, ((one, target), (two, target), (one, two)), strict=True))
    return {name: measure(*pair) for name, pair in pairs.items()}


def mmd(
    one: Float[np.ndarray, "m feature"],
    two: Float[np.ndarray, "n feature"],
    target: Float[np.ndarray, "k feature"],
) -> dict[str, Distance]:
    """The MMD of those pairs, squared, with one bandwidth for all."""
    width = median_distance(np.concatenate([one, two]), target)
    return distances(partial(one_mmd, bandwidth=width), one, two, target)


def decided(values: xr.DataArray) -> int:
    """The sign of the mean over seeds, 0 within `DECIDED` standard errors of 0 or if unknown.

    >>> [decided(xr.DataArray(values, dims="seed")) for values in ([1.0, 1.1], [1.0, -1.1])]
    [1, 0]
    """
    mean, error = (float(v) for v in mean_and_error(values))
    return int(np.sign(mean)) if abs(mean) > DECIDED * error else 0


def barrier(one: xr.Dataset) -> bool:
    """Whether the mean of the models is worse than either of them, by `end_excess`: where seeds
    have their best gamma on both sides, the mean over seeds lies between."""
    loss = one["end_excess"]
    return all(decided(loss.sel(end=0.5) - loss.sel(end=end)) > 0 for end in (0.0, 1.0))


def is_known(one: xr.Dataset) -> bool:
    """Whether seeds agree on the best gamma."""
    return float(mean_and_error(one["best"])[1]) <= SHARP


def stated_best(one: xr.Dataset) -> str:
    """The best gamma, or how many seeds have it on which side where a barrier parts them."""
    below, count = int((one["best"] < 0.5).sum()), one["best"].size
    if not barrier(one):
        return stated(one["best"])
    if below in (0, count):
        return f"{stated(one['best'])} (a barrier at 1/2)"
    return f"either side of a barrier at 1/2 ({below} of {count} seeds below)"


def by_case(
    cases: Mapping[str, xr.Dataset],
    looks: Int[np.ndarray, " look"],
    told: Callable[[xr.Dataset, int], str],
) -> str:
    """What is told of each case at each look."""
    sentences = (
        f"{name}: {', '.join(told(case, n) for n in looks)}" for name, case in cases.items()
    )
    return "; ".join(sentences)


def lead(loss: xr.DataArray, scratch: xr.DataArray) -> xr.DataArray:
    """By how much each seed's loss is below that from scratch, at the gamma that is best in the
    mean over the other seeds.

    >>> loss = xr.DataArray([[1.0, 9.0], [2.0, 9.0], [9.0, 3.0]], dims=("seed", "gamma"))
    >>> lead(loss, xr.DataArray([10.0, 10.0, 10.0], dims="seed")).values
    array([9., 8., 1.])
    """
    values = loss.transpose("seed", "gamma").values
    finite = np.where(np.isfinite(values), values, np.inf)
    best = [np.delete(finite, seed, 0).sum(0).argmin() for seed in range(len(finite))]
    return scratch - finite[np.arange(len(finite)), best]


def met(known: Sequence[tuple[xr.Dataset, int]], way: str) -> str:
    """In how many of those cases, at those looks, the prediction is defined and within `DECIDED`
    s.e. of the best."""
    gaps = [(case["predicted"].sel(way=way) - case["best"].sel(look=look)) for case, look in known]
    gaps = [gap for gap in gaps if np.isfinite(mean_and_error(gap)[1])]
    return f"{sum(decided(gap) == 0 for gap in gaps)} of {len(gaps)}"
