"""The series of tiny checkpoints that `overtraining_checkpoints` trains if none are given.

`train` trains the series and `write` saves it in the layout of Hugging Face. The study then reads
it like given checkpoints.
"""

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
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared import language_training as training
from experiments.training import Optimizer, Schedule, Training, sharding
from experiments.training.fit import Fit
from sail_jax.checkpoint import save_checkpoint

# As in `overtraining_language` (overtrained, Table 3).
WARMUP, B2, WEIGHT_DECAY = 0.1, 0.95, 0.1


def train(
    config: Config,
    net: nn.Module,
    corpus: tasks.Corpus,
    where: sharding.Layout,
) -> PyTree:
    """Trains a network once and keeps its parameters after each budget of tokens.

    There is a single schedule: it increases over the first tenth of the steps to the last budget
    and then decays to 0, so only the last checkpoint has reached its end. A budget is rounded down
    to whole steps.

    Args:
      config: The settings; `config.series` has the budgets and the learning rate.
      net: The network.
      corpus: The training text.
      where: The layout of the work on devices; a single training has no members to share.

    Returns:
      The parameters as NumPy arrays `(budget, ...)`.
    """
    series, tokens = config.series, config.series.batch * config.model.context
    steps = [budget // tokens for budget in series.budgets]
    schedule = Schedule(series.rate, steps[-1], round(WARMUP * steps[-1]))
    how = Training(
        Optimizer(schedule, weight_decay=WEIGHT_DECAY, b2=B2),
        config.memory.micro_batches,
        config.compute,
    )

    def loss(params: PyTree, mutable: PyTree, batch: tasks.Batch, key: Array) -> Any:
        """Computes the mean loss of a minibatch. No value is carried between steps."""
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
    """Writes checkpoints as folders in the layout of Hugging Face.

    The names contain the tokens, such as "tokens-65536". A folder that already contains the same
    network is not changed.

    Args:
      net: The network, a GPT or a Llama.
      budgets: Tokens that each checkpoint was trained on.
      stacked: The parameters `(budget, ...)`, from `train`.
      folder: The parent of the folders.

    Returns:
      The paths of the checkpoints' folders, in the order of the budgets.

    Raises:
      ValueError: If a folder with this name contains another network or anything else, or as
        `export`.
      CheckpointError: If a checkpoint cannot be written. It is a `ValueError`.
    """
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
