"""The run of `overtraining_checkpoints`: its order of stages, and the resulting dataset."""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.data.registry import OFFLINE_TEXT
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.models import presets
from experiments.models.gpt import GPT
from experiments.models.llama import Llama
from experiments.models.pretrained import read_config
from experiments.studies.overtraining_checkpoints import data, measure, series
from experiments.studies.overtraining_checkpoints.config import Config
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared import language_training as training
from experiments.training import sharding

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]

# Measurements of `measure.fine_tune` that do not require benchmarks.
FOUND = ("base", "validation", "test", "distance")


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Perturbs and fine-tunes every checkpoint of a series.

    There is one stage for the noise on each checkpoint, and one for each of its tasks.
    `memory.together` splits these into several stages of fewer fine-tunings.

    Returns the dataset, with losses in nats per token:
    - `base`, `(budget, seed)`: the loss on held-out text of pre-training.
    - `noisy`, `(budget, seed, gamma)`: the same under noise.
    - `before`, `(task, budget, seed)`: the loss on the tasks' test examples before fine-tuning.
    - `tuned_*`, `(task, budget, seed, rate)`: the results of `measure.fine_tune`.
    - `unigram`: the loss of predicting each token from its frequency alone.
    - `answers`, `(budget, benchmark)`, and `tuned_answers`, `(task, budget, seed, rate,
      benchmark)`: the fractions of correct answers, only with benchmarks.
    The attributes are the number of `parameters`, the `rank` of adapters (0 without), the
    `source` ("folders" or "series") and the `unit` of budgets ("tokens" or "order").
    """
    with contextlib.ExitStack() as stack:
        with refused():
            where = sharding.layout(config.shard)
            parts = config.memory.micro_batches
            where.check(**{"tune.batch": config.tune.batch // parts})
        paths = _given(config) if config.checkpoints is not None else _trained(config, stage, stack)
        with refused():
            net: Any = data.network(config, paths)
            budgets, unit = data.budgets(config, paths)
            loaded = data.load(config, net.vocab, _end(config, paths[0]))
        plan = list(itertools.product(range(config.replicates), range(len(config.tune.rates))))
        noisy, tuned = [], []
        for k, path in enumerate(paths, 1):
            noisy.append(
                stage(f"perturb checkpoint {k}", partial(_refusing(measure.perturb), config, net,
                                                         loaded, path))
            )  # fmt: skip
            tuned.append([])
            for i, task in enumerate(loaded.tasks):
                which = f" task {i + 1}" if len(loaded.tasks) > 1 else ""
                teach = partial(_refusing(measure.fine_tune), config, net, where, loaded, task)
                found = [
                    stage(
                        f"fine-tune checkpoint {k}{which}{part}", partial(teach, path, some),
                        folder=True,
                    )
                    for part, some in config.memory.parts(plan)
                ]  # fmt: skip
                tuned[-1].append(jax.tree.map(lambda *x: np.concatenate(x), *found))
        return _dataset(config, net, loaded, budgets, noisy, tuned).assign_attrs(unit=unit)


def _refusing(compute: Callable[..., T]) -> Callable[..., T]:
    """Wraps a stage's computation: its ValueErrors about checkpoints become DataErrors."""

    def computed(*arguments: object) -> T:
        """Computes the stage."""
        with refused():
            return compute(*arguments)

    return computed


def _given(config: Config) -> Sequence[str]:
    """Returns the config's folders; rejects an empty list, as in presets."""
    if not config.checkpoints:
        with refused():
            raise ValueError(
                "checkpoints must be folders of 3 or more checkpoints of one training, from the "
                "first to the last, such as allenai/OLMo-1B-hf's revisions (huggingface.co); the "
                "default preset trains a series of tiny ones"
            )
    return config.checkpoints or ()


def _trained(config: Config, stage: Stage, stack: contextlib.ExitStack) -> Sequence[str]:
    """Trains a series of checkpoints and returns their folders, which `stack` may remove."""
    with refused():
        # Without dropout, because a config.json of `export` has none.
        shape = config.model.network(dropout=0.0)
        where, net = sharding.layout(config.shard), presets.build(shape)
        corpus = tasks.load(config.data, shape["vocab"], config.model.context, ())
    stacked = stage("series of checkpoints", partial(series.train, config, net, corpus, where))
    folder = config.series.folder or stack.enter_context(tempfile.TemporaryDirectory())
    with refused():
        return series.write(net, config.series.budgets, stacked, Path(folder))


def _end(config: Config, path: str) -> tuple[int, ...]:
    """Returns the token that ends a text, if config.json has one; none for the offline text."""
    end = read_config(path).get("eos_token_id")
    return (end,) if isinstance(end, int) and config.data.name != OFFLINE_TEXT else ()


def _dataset(
    config: Config,
    net: GPT | Llama,
    loaded: data.Data,
    budgets: np.ndarray,
    noisy: Sequence[Arrays],
    tuned: Sequence[Sequence[Arrays]],
) -> xr.Dataset:
    """Builds the dataset from the stages' results.

    `noisy` has one result for each checkpoint, `tuned` one for each checkpoint and task.
    """
    runs, nats = ("task", "budget", "seed", "rate"), {"units": "nats per token"}
    shape = (len(loaded.tasks), len(budgets), config.replicates, len(config.tune.rates))
    over = lambda name: np.stack([found[name] for found in noisy])  # noqa: E731

    def of_runs(name: str) -> np.ndarray:
        """Stacks a measurement as `(task, budget, seed, rate, ...)`."""
        values = np.stack([[found[name] for found in by_task] for by_task in tuned], 1)
        return values.reshape(*shape, *values.shape[3:])

    variables: dict[str, Any] = {
        "base": (("budget", "seed"), over("base"), nats),
        "noisy": (("budget", "seed", "gamma"), over("noisy"), nats),
        "before": (("task", "budget", "seed"), np.swapaxes(over("before"), 0, 1), nats),
        "unigram": ((), loaded.unigram, nats),
        **{
            f"tuned_{name}": (runs, of_runs(name), {} if name == "distance" else nats)
            for name in FOUND
        },
    }
    coords: dict[str, Any] = {
        "budget": budgets,
        "seed": np.arange(config.replicates),
        "gamma": np.asarray(config.gammas),
        "rate": np.asarray(config.tune.rates),
        "task": [Path(name).stem for name in config.tune.tasks],
    }
    if loaded.benchmarks:
        variables["answers"] = (("budget", "benchmark"), over("answers"))
        variables["tuned_answers"] = ((*runs, "benchmark"), of_runs("answers"))
        coords["benchmark"] = list(loaded.benchmarks)
    shapes = jax.eval_shape(lambda key: training.first(net, key), jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    rank = 0 if config.tune.rank is None else config.tune.rank
    given = "folders" if config.checkpoints is not None else "series"
    return xr.Dataset(variables, coords, {"parameters": size, "rank": rank, "source": given})
