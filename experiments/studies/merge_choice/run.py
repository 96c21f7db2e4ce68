"""The run of `merge_choice`: theory on a grid, and merges of drawn task vectors on part of it."""

from itertools import pairwise
from typing import Any

import jax
import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.merge_choice.config import Config
from theory import merging
from theory.merging.gaussian import GaussianTasks, Method

BEDS = ("dense", "own curvature", "common curvature")
BEST: tuple[Method, ...] = ("average", "trim", "ties")
PUBLISHED = ("average", "task arithmetic", "dare", "trim", "ties")


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes the excess risk of merges over beds, tasks, heterogeneity and noise.

    All excess risks are divided by the base's. Over (bed, tasks, share, noise) the dataset has
    `best` of each merge at its best density and scale, with `density` and `scale`; and `published`
    at published settings. `best_measured` and `published_measured` are for drawn task vectors, by
    part (a tensor each), over `at_share` and `at_noise`. `best_measured` uses the settings that are
    best in theory. `scale_measured` is the scale with the smallest measured loss at these
    densities.
    """
    grids = [
        stage(f"{bed}, {n} tasks", lambda bed=bed, n=n: _grid(config, bed, n))
        for bed in BEDS
        for n in config.tasks
    ]
    sizes = len(BEDS), len(config.tasks)
    names = {
        "best": ("share", "noise", "algorithm"),
        "density": ("share", "noise", "algorithm"),
        "scale": ("share", "noise", "algorithm"),
        "published": ("share", "noise", "setting"),
        "best_measured": ("at_share", "at_noise", "algorithm", "part"),
        "scale_measured": ("at_share", "at_noise", "algorithm", "part"),
        "published_measured": ("at_share", "at_noise", "setting", "part"),
    }

    def joined(name: str) -> np.ndarray:
        stacked = np.stack([np.asarray(grid[name]) for grid in grids])
        return stacked.reshape(*sizes, *stacked.shape[1:])

    data = {name: (("bed", "tasks", *dims), joined(name)) for name, dims in names.items()}
    coords = {
        "bed": list(BEDS),
        "tasks": ("tasks", list(config.tasks), {"long_name": "tasks"}),
        "share": ("share", list(config.shares), {"long_name": "heterogeneity"}),
        "noise": ("noise", list(config.noises), {"long_name": "noise"}),
        "at_share": list(config.shares[:: config.measured_shares]),
        "at_noise": list(config.noises[:: config.measured_noises]),
        "algorithm": list(BEST),
        "setting": list(PUBLISHED),
    }
    about = {"support": config.support, "least": config.least, "entries": config.entries}
    return xr.Dataset(data, coords, about | _settings(config))


def _settings(config: Config) -> dict[str, float]:
    """Returns the published settings, for labels."""
    return {f"published_{name}": value for name, value in vars(config.published).items()}


def _tasks(config: Config, bed: str, count: int, share: float, noise: float) -> GaussianTasks:
    """Returns the tasks of one point. A task's optimum has variance 1 at used entries."""
    support = 1.0 if bed == "dense" else config.support
    everywhere = float(bed == "common curvature")
    return GaussianTasks(count, (1 - share) ** 0.5, share**0.5, noise, support, everywhere)


def _published(config: Config, count: int) -> list[tuple[Method, float, float]]:
    """Returns the published merges as method, density and scale."""
    how = config.published
    return [
        ("average", 1.0, 1.0),
        ("average", 1.0, how.arithmetic * count),
        ("dare", how.dare, 1.0),
        ("trim", how.trim, 1.0),
        ("ties", how.ties, 1.0),
    ]


def _grid(config: Config, bed: str, count: int) -> dict[str, Any]:
    """Computes one bed with one number of tasks, at all heterogeneities and noises."""
    shape = len(config.shares), len(config.noises)
    found = {name: np.zeros((*shape, len(BEST))) for name in ("best", "density", "scale")}
    found["published"] = np.zeros((*shape, len(PUBLISHED)))
    measured: dict[str, list[np.ndarray]] = {"best": [], "scale": [], "published": []}
    published = _published(config, count)
    for i, share in enumerate(config.shares):
        for j, noise in enumerate(config.noises):
            tasks = _tasks(config, bed, count, share, noise)
            base = tasks.start / 2
            for k, method in enumerate(BEST):
                at = merging.best_merge(tasks, method, cells=config.cells)
                found["density"][i, j, k], found["scale"][i, j, k] = at.density, at.scale
                found["best"][i, j, k] = at.excess / base
            for k, (method, density, scale) in enumerate(published):
                moments = merging.merge_moments(tasks, method, density, cells=config.cells)
                found["published"][i, j, k] = moments.excess(scale) / base
            if i % config.measured_shares == 0 and j % config.measured_noises == 0:
                best = zip(BEST, found["density"][i, j], found["scale"][i, j], strict=True)
                key = jax.random.fold_in(jax.random.key(config.seed), BEDS.index(bed))
                key = jax.random.fold_in(jax.random.fold_in(key, count), len(measured["best"]))
                risks, scales = _measured(config, key, tasks, [*best, *published])
                measured["best"].append(risks[: len(BEST)] / base)
                measured["published"].append(risks[len(BEST) :] / base)
                measured["scale"].append(scales)
    rows = -(-shape[0] // config.measured_shares), -(-shape[1] // config.measured_noises)
    for name, values in measured.items():
        stacked = np.stack(values)
        found[f"{name}_measured"] = stacked.reshape(*rows, *stacked.shape[1:])
    return found


def _measured(
    config: Config, key: jax.Array, tasks: GaussianTasks, merges: list[tuple[Method, float, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Merges drawn task vectors.

    It returns the mean excess by merge and part of the entries, and the best scale of the first
    merges, which have their best settings.
    """
    drawn = merging.draw_tasks(key, tasks, config.parts * config.entries)
    cuts = np.arange(config.parts + 1) * config.entries
    parts = [slice(*ends) for ends in pairwise(cuts)]
    pieces = [merging.Drawn(*(x[:, part] for x in drawn)) for part in parts]
    risks, scales = [], []
    for method, density, scale in merges:
        update = merging.merge_drawn(
            key, drawn.vectors, method, float(density), tensors=config.parts
        )
        both = list(zip(pieces, parts, strict=True))
        risks.append([piece.excess(scale * update[part]).mean() for piece, part in both])
        if len(scales) < len(BEST):
            scales.append([piece.best_scale(update[part]) for piece, part in both])
    return np.array(risks), np.array(scales)
