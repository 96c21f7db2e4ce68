"""Runs `proximal_spirals` stage by stage and gathers the results in one dataset.

`training` does the computations of each stage, for all repetitions at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data.spirals import Sources
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.proximal_spirals import training
from experiments.studies.proximal_spirals.config import Config
from experiments.studies.proximal_spirals.training import DISTANCES, LABELS
from experiments.studies.shared import gamma_sweep as line
from experiments.studies.shared.gamma_sweep import STARTS, Start

MEASURED = ("loss", "accuracy", "gradient")


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains models on the sources, merges them at every gamma, and trains on all points.

    Each kind of start has a stage for training from scratch, each kind of sources one for its
    distances, and each combination of both a stage for its sweep of gamma and one for the predicted
    weights.

    Returns a dataset over sources, start and seed: `loss`, `accuracy` and `gradient` by epoch and
    gamma, the `best` gamma by look, the `predicted` gamma by method, and how far the losses at this
    gamma (`excess`) and at gamma = 0, 1/2 and 1 (`end_excess`) are above the lowest. It also has
    the measures of training from scratch (`scratch_*`), and the distances with their errors.
    """
    data = {how: training.load(config, how) for how in config.sources}
    initial = jax.device_get(training.initial(config))

    def weights_of(which: int | list[int]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:, which], initial)

    # Any kind of sources can be used here, because it does not change the points.
    scratch = {
        start: stage(
            f"train from scratch, {start}",
            lambda s=start: training.scratch(
                config, weights_of(STARTS[s][2]), data[config.sources[0]]
            ),
        )
        for start in config.starts
    }
    apart = {
        how: stage(f"distances, {how}", lambda h=how: training.apart(config, data[h]))
        for how in config.sources
    }
    swept, weights = {}, {}
    for how in config.sources:
        for start in config.starts:
            where = how, start
            name = f"sources by {how}, {start} start"
            swept[where] = stage(
                f"sweep, {name}",
                lambda h=how, s=start: training.sweep(config, weights_of(STARTS[s][:2]), data[h]),
            )
            weights[where] = stage(
                f"weights, {name}",
                lambda h=how, s=start, w=where: training.weights(
                    config, data[h], swept[w]["models"], scratch[s]["model"]
                ),
            )
    return _dataset(config, scratch, apart, swept, weights)


def _dataset(
    config: Config, scratch: Mapping, apart: Mapping, swept: Mapping, weights: Mapping
) -> xr.Dataset:
    """Builds the labelled dataset of all results; `run` describes its content."""
    gamma, looks = config.gamma.values(), [config.epoch().tolist().index(n) for n in config.looks]

    def over(fn: Callable[[Sources, Start], Any]) -> np.ndarray:
        return np.array([[fn(how, start) for start in config.starts] for how in config.sources])

    def way(name: str, how: Sources, start: Start) -> np.ndarray:
        if name in DISTANCES:
            return apart[how]["weight"][:, list(DISTANCES).index(name)]
        return weights[how, start][name]

    places = ("sources", "start")
    variables: dict[str, Any] = {
        name: (
            (*places, "seed", "epoch", "gamma"),
            over(lambda h, s, n=name: swept[h, s][n].swapaxes(1, 2)),
        )
        for name in MEASURED
    }
    loss = variables["loss"][1][..., looks, :].astype(float)
    best = line.lowest(gamma, loss)
    predicted = over(lambda h, s: [way(name, h, s) for name in LABELS])
    where = np.broadcast_to(predicted[..., None], (*predicted.shape, len(looks)))
    several = np.broadcast_to(loss[:, :, None], (*where.shape, len(gamma)))
    per_seed = ("sources", "distance", "pair", "seed")
    variables |= {
        **{
            f"scratch_{name}": (
                ("start", "seed", "epoch"),
                np.array([scratch[s][name] for s in config.starts]),
            )
            for name in MEASURED
        },
        "best": ((*places, "seed", "look"), best),
        "predicted": ((*places, "way", "seed"), predicted),
        "excess": (
            (*places, "way", "seed", "look"),
            line.at(gamma, several, where) - loss.min(-1)[:, :, None],
            {"long_name": "loss at the predicted gamma above the lowest", "units": "nats"},
        ),
        "end_excess": (
            (*places, "seed", "look", "end"),
            line.ends(gamma, loss) - loss.min(-1)[..., None],
            {"long_name": "loss at gamma = 0, 1/2, 1 above the lowest", "units": "nats"},
        ),
        "distance_value": (
            per_seed,
            np.array([apart[h]["value"].transpose(1, 2, 0) for h in config.sources]),
        ),
        "distance_error": (
            per_seed,
            np.array([apart[h]["error"].transpose(1, 2, 0) for h in config.sources]),
        ),
    }
    return xr.Dataset(
        variables,
        {
            "sources": list(config.sources),
            "start": list(config.starts),
            "way": list(LABELS),
            "distance": list(DISTANCES),
            "pair": list(line.PAIRS),
            "seed": np.arange(config.replicates),
            "epoch": config.epoch(),
            "look": list(config.looks),
            "end": list(line.ENDS),
            "gamma": ("gamma", gamma, {"long_name": "weight of the first model", "units": "1"}),
        },
    )
