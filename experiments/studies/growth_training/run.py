"""Runs `growth_training` stage by stage and gathers the results in one dataset.

`shared.growth_tasks` contains the data and the training loop, and `shared.growth_ways` the growth
methods.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.measures.savings import savings
from experiments.models import presets
from experiments.studies.growth_training.config import Config
from experiments.studies.shared import growth_tasks as tasks
from experiments.studies.shared import growth_ways as ways


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the small networks, grows them by every method, and trains the large ones.

    The small networks are one stage, and each method is one stage, for all seeds together.

    Returns a dataset over way ("scratch" first, then the methods) and seed: the held-out `loss` by
    step, `step0_excess`, and the steps and compute saved (see `experiments.measures.savings`). It
    also has `source_loss` of the small networks, whether growth is `exact` and Adam's state is
    `moved`, and `flops` of one training step of each network.
    """
    data = load(config)
    source = stage("train the source", lambda: _seeds(config, partial(_source, config, data)))
    trained = {
        method: stage(
            f"train {method}",
            lambda m=method: _seeds(config, partial(_large, config, data, source, m)),
        )
        for method in (ways.SCRATCH, *config.methods)
    }
    return _dataset(config, data[0], source, trained)


def load(config: Config) -> list[tasks.Data]:
    """Loads the data of every repetition.

    Returns the data, one entry for each repetition. Text is the same for all. Images have a new
    split for each.

    Raises `DataError` if the data cannot be read or are not sufficient.
    """
    with refused():
        if config.task == "text":
            sizes = {"context": config.context, "held_out": config.held_out}
            return [tasks.of_text(config.seed, **sizes)] * config.replicates
        pool, rows = config.data.pool(config.seed), config.task == "images_mlp"
        config.check_left(len(pool.labels))
        how = config.seed, config.replicates
        return tasks.of_images(pool, *how, held_out=config.held_out, rows=rows)


def _seeds(config: Config, fn: Callable[[int], PyTree]) -> PyTree:
    """Calls `fn` for every repetition and stacks the results.

    The first call compiles. The others then run in threads, because each of these small networks
    occupies only one core.
    """
    first = jax.block_until_ready(fn(0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [first, *pool.map(fn, range(1, config.replicates))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def _keys(config: Config, seed: int) -> jax.Array:
    """Returns five keys of a repetition.

    They are for initial weights and minibatches of the small network, the same of the large
    network, and growth.
    """
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), seed), 5)


def _source(config: Config, data: list[tasks.Data], seed: int) -> dict[str, Any]:
    """Trains the small network of a repetition."""
    first, batches = _keys(config, seed)[:2]
    net = presets.build(config.network(large=False))
    variables = tasks.init(net, data[seed], first)
    state = tasks.ADAM.init(variables["params"])
    schedule = config.schedule(config.source_steps)
    trained = tasks.train(net, schedule, variables, state, data[seed], batches, None)
    variables, state, loss = trained
    return {"variables": variables, **state._asdict(), "loss": loss}


def _large(
    config: Config, data: list[tasks.Data], source: Mapping[str, Any], method: str, seed: int
) -> dict[str, Any]:
    """Grows the small network of a repetition, or starts from scratch; trains the large one."""
    first, batches, grow = _keys(config, seed)[2:]
    small, large = config.network(large=False), config.network(large=True)
    net = presets.build(large)
    of_seed = jax.tree.map(lambda leaf: leaf[seed], dict(source))
    # A stage returns dictionaries, so Adam's state is reconstructed from its fields.
    state = type(tasks.ADAM.init({}))(*(of_seed[k] for k in ("count", "mu", "nu")))
    if method == ways.SCRATCH:
        start = ways.restarted(tasks.init(net, data[seed], first))
    elif method in ways.LEARNED:
        maps = config.maps
        how = ways.Learning(method, maps.steps, config.budget.batch, maps.rate)
        start = ways.learn(how, of_seed["variables"], small, large, data[seed], grow)
    elif method == ways.TRANSPORT:
        steps = config.maps.steps
        first_steps = config.schedule(steps)._replace(every=steps)
        start = ways.transport(first_steps, of_seed["variables"], small, large, data[seed], grow)
    else:
        move = config.optimizer.state == "move"
        start = ways.grow(
            method, of_seed["variables"], state, small, large, data[seed], grow, move=move
        )
    schedule = config.schedule(config.budget.steps)
    _, _, loss = tasks.train(net, schedule, *start[:2], data[seed], batches, start.masked)
    return {"loss": loss, "exact": start.exact, "moved": start.moved}


def _dataset(
    config: Config, data: tasks.Data, source: Mapping[str, Any], trained: Mapping[str, Any]
) -> xr.Dataset:
    """Creates the labelled dataset of all results; `run` describes its content."""
    methods, budget = list(trained), config.budget
    loss = np.stack([trained[m]["loss"] for m in methods]).astype(float)
    ahead = np.array([config.maps.steps if m in ways.PREPARED else 0 for m in methods])
    level, reached, steps, scratch = savings(loss, budget.every, ahead=ahead)
    cost = [
        tasks.flops(presets.build(sizes), ways.shapes(sizes, data), data, budget.batch)
        for sizes in (config.network(large=False), config.network(large=True))
    ]
    spent, earlier = cost[1] * scratch, cost[0] * config.source_steps
    # Training from scratch, the first way, requires no small network.
    before = np.where(np.arange(len(methods)) == 0, 0.0, earlier)[:, None]
    per_seed = ("way", "seed")
    # Where scratch begins at the level, it has used no compute, which could not be a divisor.
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = {
            "compute_saved": 1 - cost[1] * steps / spent,
            "compute_saved_with_source": 1 - (cost[1] * steps + before) / spent,
        }
    return xr.Dataset(
        {
            "loss": (("way", "seed", "step"), loss, {"units": "nats"}),
            "source_loss": (("seed", "source_step"), np.asarray(source["loss"], float)),
            "step0_excess": (per_seed, loss[..., 0] - np.asarray(source["loss"], float)[:, -1]),
            "level": (per_seed, level, {"long_name": "lowest held-out loss that both reach"}),
            "reached": (per_seed, reached),
            "steps": (per_seed, steps),
            "scratch_steps": (per_seed, scratch),
            "saved": (per_seed, scratch - steps, {"units": "steps"}),
            **{name: (per_seed, value, {"units": "1"}) for name, value in saved.items()},
            "learning_steps": ("way", ahead),
            "exact": ("way", [bool(trained[m]["exact"].all()) for m in methods]),
            "moved": ("way", [bool(trained[m]["moved"].all()) for m in methods]),
            "flops": ("network", cost, {"long_name": "of one training step"}),
        },
        {
            "way": methods,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, budget.steps + 1, budget.every),
            "source_step": np.arange(0, config.source_steps + 1, budget.every),
            "network": ["small", "large"],
        },
        {"task": config.task, "data": config.data.name, "steps": budget.steps},
    )
