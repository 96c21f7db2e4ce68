"""The run of `merge_or_pool`: its stages, and the resulting dataset."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.merge_or_pool.config import Config
from theory import merging
from theory.deep_linear import covariance
from theory.deep_linear.several import Inputs
from theory.merging import RegressionTasks

WAYS = ("average", "pooled")
WEIGHTS = ("average", "own data", "other data")
KAPPAS = np.logspace(-3, 3, 300)
"""Effective ridges among which the best penalties are chosen."""
# One program for all points of the map.
COMPILED = jax.jit(merging.compared)
CURVED_LOAD, CURVED_SPREAD, FLAT = 3.0, 2.0, 0.1
"""Load, spread and small eigenvalue of the panel of different curvatures."""


class Point(NamedTuple):
    """Theory at one load and spread, with the settings of both sides.

    Attributes:
      average: The mean excess of averaged experts.
      pooled: The mean excess of pooled training.
      gain: log2 of the risk of the pooled model over that of experts on their own tasks.
      scale: The scale of the average.
      ridge: The penalty of the experts.
      pooled_ridge: The penalty of pooled training.
    """

    average: float
    pooled: float
    gain: float = 0.0
    scale: float = 1.0
    ridge: float = 0.0
    pooled_ridge: float = 0.0


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes excess risks in theory and on random data.

    Returns a dataset with excess risks over (load, spread, way) without penalties, over (few_load,
    spread, way) with the best penalties, and over (angle, weights). Simulated ones have a last axis
    `draw`. Maps of log2(pooled / average) in theory are over finer loads and spreads.
    """
    parts = {
        "plain": partial(_grid, config, 0, config.loads, _exact),
        "tuned": partial(_grid, config, 1, config.few_loads, _best),
        "curved": partial(_curved, config),
    }
    with jax.enable_x64(True):
        found = {name: stage(name, compute) for name, compute in parts.items()}
        n = _fine(config, config.loads) * config.d
        line = merging.spread_boundary(n=n, d=config.d, tasks=config.tasks, sigma=1.0)
    data: dict[str, tuple] = {"line": ("fine_load", np.asarray(line))}
    along = {"plain": ("load", "spread", "way"), "tuned": ("few_load", "spread", "way")}
    for name, (load, *_) in along.items():
        fine = f"fine_{load}", "fine_spread"
        data[f"{name}_map"] = (fine, found[name]["map"])
        data[f"{name}_experts"] = (fine, found[name]["experts"])
    for name, dims in (along | {"curved": ("angle", "weights")}).items():
        data[f"{name}_theory"] = (dims, found[name]["theory"])
        data[name] = ((*dims, "draw"), found[name]["excess"])
    coords = {
        "load": list(config.loads),
        "few_load": list(config.few_loads),
        "spread": list(config.spreads),
        "angle": ("angle", list(config.angles), {"units": "rad"}),
        "way": list(WAYS),
        "weights": list(WEIGHTS),
        "fine_load": _fine(config, config.loads),
        "fine_few_load": _fine(config, config.few_loads),
        "fine_spread": _fine(config, config.spreads),
    }
    about = {"curved_load": CURVED_LOAD, "curved_spread": CURVED_SPREAD}
    return xr.Dataset(data, coords, picked(config, "d", "tasks", "sigma", "draws") | about)


def _fine(config: Config, values: Sequence[float]) -> np.ndarray:
    return np.geomspace(values[0], values[-1], config.cells)


def _grid(
    config: Config, panel: int, loads: Sequence[float], solve: Callable[[RegressionTasks], Point]
) -> Mapping[str, np.ndarray]:
    """Compares the average with pooled training on a map, and on the points of the data sets."""
    s = np.asarray(covariance.power_law(config.d, config.decay))
    rng = np.random.default_rng([config.seed, 8])
    turn = np.linalg.qr(rng.standard_normal((config.d, config.d)))[0]
    curvatures = np.stack([turn * s @ turn.T] * config.tasks)
    theory, excess = [], []
    for i, load in enumerate(loads):
        for j, spread in enumerate(config.spreads):
            tasks = _tasks(config, curvatures, load, spread)
            at = solve(tasks)
            theory.append(at[:2])
            key = _key(config, panel, i, j)
            fitted = merging.fit_experts(
                key, tasks, config.draws, ridge=at.ridge, pooled_ridge=at.pooled_ridge
            )
            excess.append(_measured(tasks, fitted, [at.scale * _even(tasks)]))
    fine = [
        [solve(_tasks(config, curvatures, x, y))[:3] for y in _fine(config, config.spreads)]
        for x in _fine(config, loads)
    ]
    average, pooled, gain = np.moveaxis(np.array(fine), -1, 0)
    grid = len(loads), len(config.spreads), len(WAYS)
    return {
        "map": np.log2(pooled / average),
        "experts": gain,
        "theory": np.reshape(theory, grid),
        "excess": np.reshape(excess, (*grid, config.draws)),
    }


def _exact(tasks: RegressionTasks) -> Point:
    """Computes the exact risks of least squares for one curvature."""
    count, d = tasks.teachers.shape
    expert = tasks.sigma[0] ** 2 * d / (tasks.samples[0] - d - 1)
    pooled = float(merging.pooled_least_squares(tasks))
    return Point(expert / count, pooled, float(np.log2((pooled + tasks.floor) / expert)))


def _best(tasks: RegressionTasks) -> Point:
    """Finds the best penalties of both sides, and the best scale of the average, in the limit."""
    s, basis = np.linalg.eigh(tasks.curvature)
    parts, count, n = tasks.teachers @ basis, len(tasks.teachers), tasks.samples[0]
    about = parts.mean(0) ** 2, parts.var(0, ddof=1)
    at = COMPILED(s, *about, n=n, tasks=count, sigma=tasks.sigma[0], kappa=KAPPAS)
    one, other = (int(np.argmin(risk)) for risk in (at.scaled, at.pooled))
    ridges = [
        KAPPAS[i] * max(0.0, 1 - np.sum(s / (s + KAPPAS[i])) / samples)
        for i, samples in ((one, n), (other, count * n))
    ]
    gain = float(np.log2(np.min(at.model) / np.min(at.expert)))
    return Point(
        float(at.scaled[one]), float(at.pooled[other]), gain, float(at.scale[one]), *ridges
    )


def _tasks(config: Config, curvatures: np.ndarray, load: float, spread: float) -> RegressionTasks:
    """Makes tasks whose mean teacher has the norm 1 in the mean curvature.

    Their spread in it is given in units of the noise's variance.
    """
    rng, curvature = np.random.default_rng([config.seed, 9]), curvatures.mean(0)
    shared = rng.standard_normal(config.d)
    own = rng.standard_normal((config.tasks, config.d))
    own -= own.mean(0)
    size2, spread2 = (np.einsum("...i,ij,...j", v, curvature, v).sum() for v in (shared, own))
    unit = np.sqrt((config.tasks - 1) * spread / spread2)
    teachers = shared / np.sqrt(size2) + config.sigma * unit * own
    return RegressionTasks(curvatures, teachers, config.count(load), config.sigma)


def _even(tasks: RegressionTasks) -> np.ndarray:
    count, d = tasks.teachers.shape
    return np.stack([np.eye(d) / count] * count)


def _key(config: Config, *place: int) -> jax.Array:
    key = jax.random.key(config.seed)
    for i in place:
        key = jax.random.fold_in(key, i)
    return key


def _measured(
    tasks: RegressionTasks, fitted: merging.FittedExperts, weights: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Measures the excess of merges, and of pooled training as the last one."""
    merged = [np.einsum("tij,ntj->ni", w, fitted.experts) for w in weights]
    least = merging.least_risk(tasks)
    return [merging.mean_risks(tasks, b) - least for b in (*merged, fitted.pooled)]


def _curved(config: Config) -> Mapping[str, np.ndarray]:
    """Compares weights if half of the tasks have rotated curvatures."""
    theory, excess = [], []
    for i, angle in enumerate(config.angles):
        turns = np.where(np.arange(config.tasks) < config.tasks // 2, 0.0, angle)
        curvatures = [Inputs((1.0, FLAT), float(turn)).covariance(config.d) for turn in turns]
        tasks = _tasks(config, np.stack(curvatures), CURVED_LOAD, CURVED_SPREAD)
        weights = [_even(tasks), merging.curvature_weights(tasks)]
        fits = merging.expert_fits(tasks)
        average, other = (float(merging.merge_excess(tasks, fits, w)) for w in weights)
        theory.append([average, float(merging.pooled_excess(tasks)), other])
        fitted = merging.fit_experts(_key(config, 2, i), tasks, config.draws)
        # RegMean with Gram matrices of the experts' own data is pooled training.
        average, other, own = _measured(tasks, fitted, weights)
        excess.append([average, own, other])
    return {"theory": np.array(theory), "excess": np.array(excess)}
