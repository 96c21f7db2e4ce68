"""Runs `proximal_gamma` stage by stage and gathers the results in one dataset.

`training` does the computations of each stage, for all repetitions at once.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data.registry import SAME, TEXTS
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.proximal_gamma import training
from experiments.studies.proximal_gamma.config import Config
from experiments.studies.proximal_gamma.training import DISTANCES, LABELS
from experiments.studies.shared import gamma_sweep as line
from experiments.studies.shared.gamma_sweep import STARTS, Start


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains models on the sources, merges them at every gamma, and trains on the target.

    Each pair of overlaps has a stage for its distances and one for its sweep of gamma. Without
    overlap there is a sweep for every kind of start. Other overlaps are swept only for the first
    kind, for `config.overlaps.steps` steps.

    Returns a dataset over start and seed: the held-out `loss` by look and gamma, `scratch_loss`,
    the `best` gamma by look, the `predicted` gamma by distance, and how far the losses at this
    gamma (`excess`) and at gamma = 0, 1/2 and 1 (`end_excess`) are above the lowest. Over alpha and
    beta: `overlap_loss`, `overlap_best`, `overlap_predicted`, and the distances with their errors.
    With `tsne`, the `map` of blocks by part.
    """
    config, data = training.load(config)
    initial = jax.device_get(training.initial(config))

    def weights_of(which: list[int]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:, which], initial)

    def swept(start: Start, overlaps: tuple[float, float], steps: int) -> dict[str, Any]:
        parts = training.parts(data, training.sources(config, data, *overlaps))
        learned = training.learn(config, weights_of(STARTS[start]), data, *parts)
        tuned = training.tune(config, steps, learned["model"], data)
        models = jax.device_get(learned["model"])  # theta_1, theta_2 and theta*
        weights = line.weights_by_parameters(models, jax.tree.map(lambda leaf: leaf[:, 2], models))
        return {"scratch": learned["loss"][:, 2], **tuned, "parameters": weights}

    apart, sweeps, overlapping = {}, {}, {}
    for overlaps in config.overlaps.pairs():
        name = "alpha {:g}, beta {:g}".format(*overlaps)
        apart[overlaps] = stage(
            f"distances, {name}", partial(training.apart, config, data, overlaps)
        )
        if overlaps != (0, 0):
            compute = partial(swept, config.starts[0], overlaps, config.overlaps.steps)
            overlapping[overlaps] = stage(f"sweep, {name}", compute)
            continue
        for start in config.starts:
            compute = partial(swept, start, overlaps, config.looks[-1])
            sweeps[start] = stage(f"sweep, {start} start", compute)
    dataset = _dataset(config, apart, sweeps, overlapping)
    if config.tsne:
        placed = stage("t-SNE of blocks", lambda: {"map": training.mapped(config, data)})
        dataset["map"] = ("part", "placed", "axis"), placed["map"]
    return dataset


def _dataset(config: Config, apart: Mapping, sweeps: Mapping, overlapping: Mapping) -> xr.Dataset:
    """Builds the labelled dataset of all results; `run` describes its content."""
    gamma, main = config.gamma.values(), apart[0, 0]
    seeds, alphas, betas = config.replicates, config.overlaps.alphas, config.overlaps.betas
    loss = np.stack([np.asarray(sweeps[s]["loss"], float) for s in config.starts])
    loss = loss.swapaxes(2, 3)  # [start, seed, look, gamma]
    predicted = np.stack([np.c_[main["weight"], sweeps[s]["parameters"]].T for s in config.starts])
    where = np.broadcast_to(predicted[..., None], (*predicted.shape, len(config.looks)))
    several = np.broadcast_to(loss[:, None], (*where.shape, len(gamma)))
    # The sweep without overlap is not repeated, because it includes this number of steps.
    first = loss[0, :, config.looks.index(config.overlaps.steps)]
    by_overlap = {
        (0.0, 0.0): first,
        **{at: np.asarray(part["loss"], float)[..., -1] for at, part in overlapping.items()},
    }
    grid = ("alpha", "beta")

    def over(parts: Mapping[tuple[float, float], np.ndarray]) -> np.ndarray:
        array = np.array([parts[at] for at in config.overlaps.pairs()])
        return array.reshape(len(alphas), len(betas), *array.shape[1:])

    overlap = over(by_overlap)
    values = {
        name: over({at: part[name] for at, part in apart.items()}) for name in ("value", "error")
    }
    weight = over({at: part["weight"] for at, part in apart.items()})
    per_pair = (*grid, "seed", "distance", "pair")
    return xr.Dataset(
        {
            "loss": (("start", "seed", "look", "gamma"), loss, {"units": "nats per token"}),
            "scratch_loss": (
                ("start", "seed", "look"),
                np.stack([sweeps[s]["scratch"] for s in config.starts]).astype(float),
            ),
            "best": (("start", "seed", "look"), line.lowest(gamma, loss)),
            "predicted": (("start", "way", "seed"), predicted),
            "excess": (
                ("start", "way", "seed", "look"),
                line.at(gamma, several, where) - loss.min(-1)[:, None],
                {"long_name": "loss at the predicted gamma above the lowest"},
            ),
            "end_excess": (
                ("start", "seed", "look", "end"),
                line.ends(gamma, loss) - loss.min(-1)[..., None],
                {"long_name": "loss at gamma = 0, 1/2, 1 above the lowest"},
            ),
            "overlap_loss": ((*grid, "seed", "gamma"), overlap),
            "overlap_best": ((*grid, "seed"), line.lowest(gamma, overlap)),
            "overlap_predicted": ((*grid, "seed", "distance"), weight),
            "distance_value": (per_pair, values["value"]),
            "distance_error": (per_pair, values["error"]),
        },
        {
            "start": list(config.starts),
            "seed": np.arange(seeds),
            "look": list(config.looks),
            "gamma": ("gamma", gamma, {"long_name": "weight of the first model", "units": "1"}),
            "way": list(LABELS),
            "distance": list(DISTANCES),
            "pair": list(line.PAIRS),
            "end": list(line.ENDS),
            "alpha": list(alphas),
            "beta": list(betas),
        },
        {
            "overlap_steps": config.overlaps.steps,
            "block": config.blocks.length,
            "text": " to ".join(
                dict.fromkeys(
                    TEXTS[name].source.name
                    for name in (config.data.name, config.target_data.name)
                    if name != SAME
                )
            ),
        },
    )
