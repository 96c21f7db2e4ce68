"""Estimators on simulated data sets, for some settings of the explorer's first section.

The simulation averages an estimator's closed form on one data set: `Overlaps` for training to the
end, `linear_flow` for a linear model with early stopping. The axis "course" first has the depths
(trained to convergence), then the stopping times of a linear model (depth 1).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from experiments.lab.progress import Stage
from theory import deep_linear as dl


class Grid(NamedTuple):
    """The settings of the simulation: all combinations, by the names of the page's controls.

    Attributes:
      d: Dimension of the inputs.
      draws: Number of data sets.
      n: Numbers of samples; none is within 1 of d, where a mean may be infinite.
      theta: Angles between the tasks in degrees.
      sigma: Standard deviations of the label noise.
      depth: Numbers of layers of the fine-tuned network; 1 comes first.
      ridge: Penalties of ridge transfer; the first is None, the best one at each point.
      source: Samples of pre-training over d; the first is inf, the population.
      time: Stopping times of a linear model; the last is None, training to the end.
    """

    d: int = 200
    draws: int = 32
    n: tuple[int, ...] = (25, 75, 125, 175, 225, 275, 325, 375)
    theta: tuple[float, ...] = (15, 30, 45, 60, 75, 90, 120, 150)
    sigma: tuple[float, ...] = (0.0, 0.1, 0.2, 0.5, 1.0)
    depth: tuple[float, ...] = (1, 2, 3, np.inf)
    ridge: tuple[float | None, ...] = (None, 0.1, 1.0)
    source: tuple[float, ...] = (np.inf, 2.0, 0.5)
    time: tuple[float | None, ...] = (1.0, 10.0, 100.0, None)


TINY = Grid(
    d=40, draws=4, n=(10, 60), theta=(30, 60, 90), sigma=(0.0, 0.5), depth=(1, 2),
    ridge=(None, 0.1), source=(np.inf, 2.0), time=(3.0, None),
)  # fmt: skip

# For each strategy: the settings that it depends on, in the order of its numbers.
AXES = {
    "scratch": "source time sigma theta n",
    "linear transfer": "source time sigma theta n",
    "ridge transfer": "source ridge sigma theta n",
    "fine-tuning": "source course sigma theta n",
}


def compute(grid: Grid, key: Array, stage: Stage) -> dict[str, np.ndarray]:
    """Computes means and standard errors of risks and gains.

    Args:
      grid: The settings.
      key: Random key of the data sets.
      stage: The stage function that computes or reads back the simulation.

    Returns:
      Means of risks over the axes `AXES` by strategy, and their standard errors as "error of ...";
      means of gains as "gain of ..." and their errors as "error of gain of ...".
    """
    with jax.enable_x64(True):
        draws = stage("estimators on simulated data sets", partial(simulate, grid, key))
    scratch, last = draws["scratch"], len(grid.time) - 1
    # Paired with scratch training that stops at the same time.
    courses = [last] * len(grid.depth) + [*range(last)]
    peers = {"ridge transfer": scratch[:, :, [last]], "fine-tuning": scratch[:, :, courses]}
    found = {}
    for way, values in draws.items():
        gain = peers.get(way, scratch) - values
        for name, sample in ((way, values), (f"gain of {way}", gain)):
            found[name] = sample.mean(0)
            found[f"error of {name}"] = sample.std(0, ddof=1) / np.sqrt(len(sample))
    return found


def simulate(grid: Grid, key: Array) -> dict[str, np.ndarray]:
    """Computes every strategy on the same data sets, and the source on other data sets.

    Args:
      grid: The settings.
      key: Random key.

    Returns:
      Risks by strategy, over draws and the axes `AXES`.
    """
    n, theta = np.array(grid.n), np.radians(grid.theta)
    sigma, times = np.array(grid.sigma), np.array(grid.time[:-1])
    ridges, sources = np.array(grid.ridge[1:], float), np.array(grid.source)
    noise, angle = sigma[:, None, None], theta[:, None]
    perfect = dl.source_limit(load=sources[:, None, None, None], theta=angle, sigma=noise)
    best = dl.optimal_ridge(n=n, theta=perfect.theta, sigma=noise)  # in theory
    key_target, key_source, key_early = jax.random.split(key, 3)
    finite = [round(s * grid.d) for s in grid.source if np.isfinite(s)]
    overlaps = dl.simulate_overlaps(jax.random.split(key_target, grid.draws), n.tolist(), grid.d)
    seen = dl.simulate_overlaps(jax.random.split(key_source, grid.draws), finite, grid.d)
    keys = jax.random.split(key_early, (grid.draws, n.size))
    paths = _early(keys, jnp.asarray(n), grid.d, int(n.max()), times)
    found = _simulated(
        overlaps, seen, *paths, theta, sigma, np.array(grid.depth, float), ridges, best,
    )  # fmt: skip
    return {name: np.asarray(values) for name, values in found.items()}


@partial(jax.jit, static_argnums=(2, 3))
def _early(keys: Array, n: Array, d: int, most: int, times: Array) -> tuple[Array, Array]:
    """Returns Gram matrices and scales for early stopping, [draw, load, time, ...].

    They contain the remaining parts of both tasks, and the learned part of the noise, when a linear
    model and the refitted scale stop.
    """
    plane = jnp.eye(d, 2)

    def one(key: Array, n: Array) -> tuple[Array, Array]:
        key_x, key_noise = jax.random.split(key)
        # Each load has the same number of rows; rows beyond n are empty. Time is therefore
        # multiplied by n / most.
        rows = (jnp.arange(most) < n)[:, None]
        x = jnp.where(rows, jax.random.normal(key_x, (most, d)), 0.0)
        noise = jnp.where(rows[:, 0], jax.random.normal(key_noise, (most,)), 0.0)
        labels = jnp.concatenate([x @ plane, noise[:, None]], -1).T
        flow = jax.vmap(dl.linear_flow, (None, 0, None, None))
        learned = flow(x, labels, jnp.zeros(d), times * most / n)  # [label, time, d]
        left = jnp.concatenate([plane.T[:, None] - learned[:2], learned[2:]])
        scale = flow(x[:, :1], labels, jnp.zeros(1), times * most / n)
        return jnp.einsum("atd,btd->tab", left, left), scale[..., 0].T

    return jax.lax.map(lambda draw: jax.vmap(one)(draw, n), keys)


@jax.jit
def _simulated(
    overlaps: dl.Overlaps, seen: dl.Overlaps, left: Array, scale: Array, theta: Array, sigma: Array,
    depths: Array, ridges: Array, best: Array,
) -> dict[str, Array]:  # fmt: skip
    noise, angle = sigma[:, None, None], theta[:, None]
    # [draw, source, sigma, theta, load] throughout
    wide = (slice(None), slice(None), None, None, None)
    drawn = dl.source_from(dl.Overlaps(seen.gram[wide], seen.source[wide], seen.n), angle, noise)
    first = jnp.zeros_like(drawn.theta[:, :1])  # the population's
    source_theta = jnp.concatenate([first + angle, drawn.theta], 1)
    source_size = jnp.concatenate([first + 1, jnp.broadcast_to(drawn.size, drawn.theta.shape)], 1)
    wide = (slice(None), None, None, None)
    at = dl.Overlaps(overlaps.gram[wide], overlaps.source[wide], overlaps.n)
    shape = jnp.broadcast_shapes(source_theta.shape, at.gram.shape[:-2], noise.shape)

    def over(axis: ArrayLike, way: Callable[[Array], Array]) -> Array:
        return jax.vmap(lambda value: jnp.broadcast_to(way(value), shape), out_axes=2)(axis)

    tuned = over(depths, lambda L: at.fine_tune(source_theta, noise, L, source_size))
    linear = over(jnp.zeros(1), lambda ridge: at.linear_transfer(source_theta, noise, ridge))
    shrunk = over(ridges, lambda ridge: at.linear_transfer(source_theta, noise, ridge))
    best = jnp.broadcast_to(at.linear_transfer(source_theta, noise, best), shape)[:, :, None]
    scratch = over(jnp.zeros(1), lambda _: at.scratch(source_theta, noise))
    cos, sin = jnp.cos(source_theta), jnp.sin(source_theta)
    left = left[:, None, None, None]  # [draw, 1, 1, 1, load, time, 3, 3]

    def stopped(time: Array, start: ArrayLike) -> Array:
        y = jnp.stack(jnp.broadcast_arrays(cos - start, sin, -noise), -1)
        return jnp.einsum("...i,...ij,...j->...", y, left[..., time, :, :], y)

    def refitted(time: Array) -> Array:
        one, other, rest = jnp.moveaxis(scale[:, None, None, None, :, time], -1, 0)
        return (one * cos + other * sin + rest * noise - cos) ** 2 + sin**2

    early = jnp.arange(scale.shape[2])
    return {
        "scratch": jnp.concatenate([over(early, lambda t: stopped(t, 0.0)), scratch], 2),
        "linear transfer": jnp.concatenate([over(early, refitted), linear], 2),
        "ridge transfer": jnp.concatenate([best, shrunk], 2),
        "fine-tuning": jnp.concatenate([tuned, over(early, lambda t: stopped(t, source_size))], 2),
    }
