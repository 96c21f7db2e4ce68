"""The run of `lora_start`: closed forms, and adapters trained by gradient flow."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.typing import ArrayLike

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.lora_start.config import Config
from theory.two_layer import adapters, networks
from theory.two_layer.layers import Layers, theta

DRAWS = 400  # of the law of a random A
BEFORE, AFTER = 0.02, 20.0  # the first and the last time of a curve
WATCHED, BETWEEN = 200, 24  # observation times, and steps of Runge-Kutta between two
DONE = 0.99  # share of the way of two layers


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes all panels, each in closed form (`*_theory`) and by training.

    Returns the dataset.
    - `learned`, `(shown, seed, time)`: the learned part of one direction.
    - `half`, `(rank, row, seed)`: the time until half of one direction is learned.
    - `together`, `(shown, direction, seed)`: the same for directions that are learned together.
    - `moved`, `(start, ratio)`: the first layer's part of the change of two layers.
    """
    parts = (
        ("curves", partial(_curves, config)),
        ("rows", partial(_rows, config)),
        ("directions", partial(_together, config)),
        ("layers", partial(_layers, config)),
    )
    with jax.enable_x64(True):
        found = {k: v for name, compute in parts for k, v in stage(name, compute).items()}
    dims = {
        "learned_theory": ("shown", "time"),
        "learned": ("shown", "seed", "time"),
        "half_theory": ("rank", "every_row"),
        "half": ("rank", "row", "seed"),
        "together_theory": ("shown", "direction"),
        "together": ("shown", "direction", "seed"),
        "moved_theory": ("start", "every_ratio"),
        "moved": ("start", "ratio"),
    }
    coords = {
        "time": _times(config),
        "rank": list(config.ranks),
        "row": ("row", list(config.rows), {"long_name": "squared norm of a row of A"}),
        "every_row": _between(config.rows, config.points),
        "shown": list(config.shown),
        "direction": list(config.directions),
        "start": list(config.starts),
        "ratio": list(config.ratios),
        "every_ratio": _between(config.ratios, config.points),
    }
    data = {name: (axes, found[name]) for name, axes in dims.items()}
    return xr.Dataset(data, coords, picked(config, "width", "rank", "seeds", "target"))


def _times(config: Config) -> np.ndarray:
    return np.geomspace(BEFORE, AFTER, config.points)


def _between(values: Sequence[float], points: int) -> np.ndarray:
    """Returns the values of trained adapters, and more between them for a curve."""
    return np.union1d(values, np.geomspace(values[0], values[-1], points)[1:-1])


def _drawn(config: Config, rank: int, row: float, *where: int) -> np.ndarray:
    """Draws a Gaussian A for each seed."""
    rng = np.random.default_rng([config.seed, *where])
    return np.sqrt(row / config.width) * rng.standard_normal((config.seeds, rank, config.width))


def _law(config: Config, rank: int, rows: ArrayLike) -> dict[str, np.ndarray]:
    """Draws the row and overlap of Gaussian As from their law, without an A: [row, draw]."""
    rng, rows = np.random.default_rng(config.seed), np.asarray(rows)[..., None]
    seen, rest = (rng.chisquare(k, DRAWS) for k in (rank, config.width - 1))
    return {"row": rows / config.width * (seen + rest), "overlap": seen / (seen + rest)}


def _halfway(residual: ArrayLike, row: ArrayLike, overlap: ArrayLike) -> np.ndarray:
    """Computes when `adapters.learned` is half of the residual, by bisection of log t."""
    residual = np.asarray(residual)
    shape = np.broadcast_shapes(residual.shape, np.shape(row))
    low, high = np.full(shape, -12.0), np.full(shape, 12.0)
    for _ in range(50):
        middle = (low + high) / 2
        late = np.asarray(
            adapters.learned(np.exp(middle), residual, row=row, overlap=overlap) > residual / 2
        )
        low, high = np.where(late, low, middle), np.where(late, middle, high)
    return np.exp(high)


def _trained(a: np.ndarray, sizes: Sequence[float], times: np.ndarray, steps: int) -> np.ndarray:
    """Trains adapters on a residual with the first inputs as directions: parts [seed, time, k].

    The adapters are reduced to the directions in which they can move, which is exact.
    """
    k = len(sizes)
    residual = np.zeros((k, a.shape[2]))
    residual[:, :k] = np.diag(np.asarray(sizes))
    zero = jnp.zeros((k, a.shape[1]))
    small = [adapters.reduced(Layers(zero, jnp.asarray(one)), residual) for one in a]
    starts, targets, left, right = jax.tree.map(lambda *rows: jnp.stack(rows), *small)
    paths = _followed(starts, targets, jnp.asarray(times), steps)
    return np.asarray(jnp.einsum("skm,stmn,snk->stk", left, paths, right[..., :k])) / np.asarray(
        sizes
    )


@partial(jax.jit, static_argnames="steps")
def _followed(starts: Layers, targets: jax.Array, times: jax.Array, steps: int) -> jax.Array:
    def one(start: Layers, target: jax.Array, times: jax.Array) -> jax.Array:
        return theta(networks.gradient_flow(start, target, times, steps))

    return jax.vmap(one)(starts, targets, times)


def _crossed(
    config: Config, rank: int, row: float, sizes: Sequence[float], *where: int
) -> np.ndarray:
    """Trains adapters and returns when half of each direction is learned, [direction, seed]."""
    a = _drawn(config, rank, row, *where)
    seen = [adapters.equivalent(a, v) for v in np.eye(config.width)[: np.size(sizes)]]
    rows, overlaps = np.moveaxis(np.array(seen), 1, 0)
    # The closed form only determines the time of observation.
    longest = _halfway(np.asarray(sizes)[:, None], rows, overlaps).max(0)
    times = 4 * longest[:, None] * np.linspace(0, 1, WATCHED + 1)[1:]
    parts = _trained(a, sizes, times, BETWEEN)
    return np.array(
        [
            [_first(part, time) for part, time in zip(of, times, strict=True)]
            for of in np.moveaxis(parts, 2, 0)
        ]
    )


def _first(part: np.ndarray, time: np.ndarray) -> float:
    """Interpolates the first time at which a part is half. NaN if it never is."""
    after = int(np.argmax(part > 0.5))
    if part[after] <= 0.5:
        return np.nan
    before = (part[after - 1], time[after - 1]) if after else (0.0, 0.0)
    return float(np.interp(0.5, (before[0], part[after]), (before[1], time[after])))


def _curves(config: Config) -> dict[str, np.ndarray]:
    times, found = _times(config), {"learned_theory": [], "learned": []}
    for n, row in enumerate(config.shown):
        law = _law(config, config.rank, row)
        theory = adapters.learned(times[:, None], 1.0, **law)
        found["learned_theory"].append(np.asarray(theory).mean(1))
        a, every = _drawn(config, config.rank, row, 0, n), np.tile(times, (config.seeds, 1))
        found["learned"].append(_trained(a, (1.0,), every, 100)[..., 0])
    return {name: np.array(values) for name, values in found.items()}


def _rows(config: Config) -> dict[str, np.ndarray]:
    rows = _between(config.rows, config.points)
    theory = [_halfway(1.0, **_law(config, rank, rows)).mean(1) for rank in config.ranks]
    half = [
        [_crossed(config, rank, row, (1.0,), 1, i, j)[0] for j, row in enumerate(config.rows)]
        for i, rank in enumerate(config.ranks)
    ]
    return {"half_theory": np.array(theory), "half": np.array(half)}


def _together(config: Config) -> dict[str, np.ndarray]:
    size = np.array(config.directions)[:, None]
    theory = [_halfway(size, **_law(config, config.rank, row)).mean(1) for row in config.shown]
    found = [
        _crossed(config, config.rank, row, config.directions, 2, j)
        for j, row in enumerate(config.shown)
    ]
    return {"together_theory": np.array(theory), "together": np.array(found)}


def _layers(config: Config) -> dict[str, np.ndarray]:
    """Trains adapters on both layers until most of the way to the target."""
    level, one = 1 + DONE * (config.target - 1), jnp.ones((1, 1))

    def weights(ratios: Sequence[float] | np.ndarray) -> np.ndarray:
        return np.sqrt(np.array([ratios, 1 / np.asarray(ratios)])).T

    def part(ends: ArrayLike, own: np.ndarray) -> np.ndarray:
        moved = np.asarray(ends) - own
        return moved[..., 0] / moved.sum(-1)

    def theory(start: float, own: np.ndarray) -> np.ndarray:
        ends = jax.vmap(lambda w: adapters.layer_weights(level, w, [start] * 2))(jnp.asarray(own))
        return part(ends, own)

    def trained(start: float, own: np.ndarray) -> float:
        time = adapters.layer_time(level, config.target, own, [start] * 2)
        frozen, pair = [w * one for w in own], Layers(0 * one, start * one)
        path = networks.layers_flow(frozen, [pair] * 2, config.target * one, time[None], 3000)
        return float(part(own + np.array([float(theta(of)[0, 0, 0]) for of in path]), own))

    every, few = weights(_between(config.ratios, config.points)), weights(config.ratios)
    return {
        "moved_theory": np.array([theory(start, every) for start in config.starts]),
        "moved": np.array([[trained(start, own) for own in few] for start in config.starts]),
    }
