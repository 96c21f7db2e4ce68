"""The series of tiny checkpoints that `overtraining_checkpoints` trains where none are given."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, PyTree

from experiments.models.pretrained import export, load_pretrained
from experiments.studies.overtraining_checkpoints.config import Config
from experiments.studies.overtraining_checkpoints.data import seeded
from experiments.studies.overtraining_language import tasks, training
from experiments.training import Optimizer, Schedule, Training
from experiments.training.fit import Fit
from sail_jax.checkpoint import save_checkpoint

# as `overtraining_language` has them (overtrained, Table 3)
WARMUP, B2, WEIGHT_DECAY = 0.1, 0.95, 0.1


def train(
    config: Config,
    net: nn.Module,
    corpus: tasks.Corpus,
    where: training.Layout,
) -> PyTree:
    """The parameters after each budget of one training, stacked."""
    series, tokens = config.series, config.series.batch * config.model.context
    steps = [budget // tokens for budget in series.budgets]
    schedule = Schedule(series.rate, steps[-1], round(WARMUP * steps[-1]))
    how = Training(
        Optimizer(schedule, weight_decay=WEIGHT_DECAY, b2=B2),
        config.memory.micro_batches,
        config.compute,
    )

    def loss(params: PyTree, mutable: PyTree, batch: tasks.Batch, key: Array) -> Any:
        return training.nll(net, params, batch, key).mean(), {}, mutable

    fit = Fit(loss, how, where.one)
    first, rest = jax.random.split(jax.random.key(seeded(config, 8)))
    state, order = fit.start(training.first(net, first), rest), seeded(config, 9)
    batch = lambda step: corpus.batch(step, seed=order, size=series.batch)  # noqa: E731
    kept = []
    for end in steps:
        state = fit.run(state, batch, end).state
        kept.append(jax.device_get(state.params))
    return training.stacked(kept)


def write(
    net: Any, budgets: tuple[int, ...], stacked: Mapping[str, Any], folder: Path
) -> list[str]:
    """The checkpoints as folders of Hugging Face's layout, by their tokens; those that are there
    already stay. ValueError where one of these is another network."""
    paths = []
    for budget, params in zip(budgets, training.unstacked(stacked, len(budgets)), strict=True):
        path = folder / f"tokens-{budget}"
        if path.exists():
            same = jax.tree.map(np.array_equal, load_pretrained(path).variables["params"], params)
            if not all(jax.tree.leaves(same)):
                raise ValueError(f"series.folder: {path} holds another network; choose another")
        else:
            tensors, told = export({"params": params}, net)
            text = json.dumps(told, indent=2).encode() + b"\n"
            save_checkpoint(path, tensors, extras={"config.json": text})
        paths.append(str(path))
    return paths
