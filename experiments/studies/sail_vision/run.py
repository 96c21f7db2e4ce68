"""The run of `sail_vision`: its stages, and the resulting dataset."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.measures.savings import savings
from experiments.studies.sail_vision import starts
from experiments.studies.sail_vision.config import LIGO, SCRATCH, Config, Paradigm
from experiments.studies.sail_vision.data import Data, load, weights
from experiments.studies.sail_vision.training import MEASURES, Learner
from experiments.training import sharding

Sources = dict[str, dict[str, PyTree]]  # by paradigm, and there by "seed source"
TRAINED = {SCRATCH: 0, "first": 1, "second": 1}  # the sources of a start; two of the others


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the sources, makes the starts, and trains the large networks, a stage for each start.

    It returns the dataset. Names of variables begin with "supervised_" or "byol_", followed by:
    - the measures of `training.MEASURES` along training, `(way, seed, step)`.
    - `train_loss`: the loss of the minibatch, `(way, seed, batch_step)`.
    - `saved`, `reached`, `scratch_steps`, `compute` and `scratch_compute`, `(way, seed)`: the
      savings of a start against training from scratch, in steps and FLOPs until the best result
      that both reach.
    - `sources_compute` and `ahead`, `(way,)`: FLOPs and steps before the training.
    The dataset also has `weight`, `(seed, source)`, the sources' weights in SAIL's merge. The
    attribute `paradigms` lists the kinds of training, separated by spaces.

    It raises `DataError` if data are missing or too few, or devices cannot share the batch.
    """
    with refused():
        sharding.layout(config.shard).check(**{"budget.batch": config.budget.batch})
        data = load(config)
    sources: Sources = {}

    @cache
    def learner_of(paradigm: Paradigm, large: bool) -> Learner:
        steps = config.budget.steps if large else config.source_steps
        # Equal networks and schedules share one compiled step.
        same = config.network(large=True) == config.network(large=False)
        if large and same and steps == config.source_steps:
            return learner_of(paradigm, False)
        return Learner(config, config.network(large=large), paradigm, steps, data[0])

    for paradigm in config.sources():
        learner = learner_of(paradigm, False)
        learn = partial(_sources, learner, data)
        sources[paradigm] = stage(f"train {paradigm} sources", learn, folder=True)
    parts = {}
    for paradigm in config.paradigms():
        learner = learner_of(paradigm, True)
        measured = {}
        for way in config.ways(paradigm):
            learn = partial(_large, learner, data, sources, way)
            measured[way] = stage(f"train {paradigm} from {way}", learn, folder=True)
        costs = learner_of(paradigm, False).cost(), learner.cost()
        parts[paradigm] = _part(config, paradigm, costs, measured)
    return _dataset(config, data, parts)


def _keys(config: Config, seed: int) -> jax.Array:
    """Creates the random keys of a seed.

    Two are for the sources' initial weights and two for their training. The others are for the
    large network's initial weights, its training, and transformations.
    """
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), seed), 7)


def _seed(config: Config, seed: int) -> int:
    """Computes the seed of the order of minibatches."""
    return config.seed * config.replicates + seed


def _sources(learner: Learner, data: list[Data], folder: Path | None) -> dict[str, Any]:
    """Trains both sources of every seed; returns their variables by "seed source"."""
    config, out = learner.config, {}
    for seed, seed_data in enumerate(data):
        first, own, *training = _keys(config, seed)[:4]
        # Equal keys give equal initial weights.
        starting = (first, first if config.origin == "common" else own)
        trained = []
        for i, (key, how) in enumerate(zip(starting, training, strict=True)):
            at = None if folder is None else folder / f"{seed} {i}"
            variables, _ = learner.fit(
                learner.scratch(key), seed_data.parts[i], seed_data, how, _seed(config, seed), at
            )
            trained.append(variables)
        if config.origin == "aligned":
            trained = starts.aligned(config.network(large=False), trained)
        out |= {f"{seed} {i}": variables for i, variables in enumerate(trained)}
    return out


def _large(
    learner: Learner, data: list[Data], sources: Sources, way: str, folder: Path | None
) -> dict[str, Any]:
    """Trains the large network of every seed from one start; returns curves [seed, evaluation]."""
    config, curves = learner.config, []
    for seed, seed_data in enumerate(data):
        first, training, transforming = _keys(config, seed)[4:]
        pairs = {p: [models[f"{seed} {i}"] for i in range(2)] for p, models in sources.items()}
        begin = starts.start(way, learner, pairs, seed_data, (first, transforming))
        at = None if folder is None else folder / str(seed)
        _, curve = learner.fit(begin, seed_data.learn, seed_data, training, _seed(config, seed), at)
        curves.append(curve)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *curves)


def _part(
    config: Config, paradigm: Paradigm, costs: tuple[float, float], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Creates the variables of one kind of training, with its name as their prefix.

    `costs` are the FLOPs of a step of the small network and of the large one.
    """
    ways = list(measured)
    dims = (f"{paradigm}_way", "seed")
    curves = {
        name: np.stack([measured[way][name] for way in ways]).astype(float)
        for name in (*MEASURES[paradigm], "train_loss")
    }
    # The lowest BYOL loss is not the best, because a collapsed network has 0.
    fallen = curves["test_loss"] if paradigm == "supervised" else 1 - curves["top1"]
    # A step of learning maps is counted as one of the large network.
    ahead = np.array([config.maps.steps if way == LIGO else 0 for way in ways])
    gain = savings(fallen, config.budget.every, ahead=ahead)
    small, cost = costs
    needed = np.array([TRAINED.get(way, 2) for way in ways])
    units = {"test_loss": "nats", "train_loss": "nats" if paradigm == "supervised" else "1"}
    out: dict[str, Any] = {
        name: ((*dims, "step" if name != "train_loss" else "batch_step"), value,
               {"units": units.get(name, "1")})
        for name, value in curves.items()
    }  # fmt: skip
    out |= {
        "reached": (dims, gain.reached),
        "saved": (dims, gain.saved, {"units": "steps"}),
        "scratch_steps": (dims, gain.scratch_steps, {"units": "steps"}),
        "compute": (dims, cost * gain.steps, {"units": "FLOP"}),
        "scratch_compute": (dims, cost * gain.scratch_steps, {"units": "FLOP"}),
        "sources_compute": (dims[0], needed * small * config.source_steps, {"units": "FLOP"}),
        "ahead": (dims[0], ahead, {"units": "steps"}),
        "flops": ("network", [small, cost], {"long_name": "of a training step"}),
    }
    return {
        **{f"{paradigm}_{name}": value for name, value in out.items()},
        dims[0]: (dims[0], ways),
    }


def _dataset(config: Config, data: list[Data], parts: Mapping[str, Any]) -> xr.Dataset:
    """Joins the variables of both kinds of training, and adds the weights of the merge."""
    steps = np.arange(0, config.budget.steps + 1, config.budget.every)
    variables = {name: value for part in parts.values() for name, value in part.items()}
    variables["weight"] = (
        ("seed", "source"),
        np.stack([weights(seed_data) for seed_data in data]),
        {"long_name": "weight of a source in SAIL's merge"},
    )
    about = {
        "data": config.data.name,
        "transformation": config.transformation,
        "paradigms": " ".join(parts),
        "steps": config.budget.steps,
        "classes": data[0].classes,
    }
    coordinates = {
        "seed": np.arange(config.replicates),
        "step": steps,
        "batch_step": steps[:-1],
        "network": ["small", "large"],
        "source": ["first", "second"],
    }
    return xr.Dataset(variables, coordinates, about)
