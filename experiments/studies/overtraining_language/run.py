"""The run of `overtraining_language`: its order of `stages`, and their dataset."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.models import presets
from experiments.studies.overtraining_language import stages
from experiments.studies.overtraining_language.config import Config
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared import language_training as training
from experiments.training import sharding

Arrays = Mapping[str, np.ndarray]


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Pre-trains, perturbs and fine-tunes the models, a stage for each budget and for each task.

    `memory.together` splits a stage into several stages of fewer models.

    Returns the dataset, with losses in nats per token:
    - `base`, `(budget, seed)`: the loss on held-out text of pre-training.
    - `noise_*`, `(budget, seed, noise)`: the results of `stages.perturb`.
    - `tuned_*`, `(task, budget, seed, rate)`, some also along `scale`: the results of
      `stages.fine_tune`; the own losses of texts with classes are in nats per text.
    - `theory_*`: the results of `stages.theory`.
    - `unigram`: the loss of predicting each token from its frequency alone.
    The attributes are the number of `parameters`, the `model`, and `kept_perplexity` if the config
    has one.
    """
    with refused():
        where = sharding.layout(config.shard)
        batches = {"pretrain.batch": config.pretrain.batch, "tune.batch": config.tune.batch}
        parts = config.memory.micro_batches
        where.check(**{name: size // parts for name, size in batches.items()})
        net = presets.build(config.network)
        vocab, names = config.network["vocab"], config.tune.tasks
        corpus = tasks.load(config.data, vocab, config.model.context, names)
        sizes = (config.tune.examples, config.tune.held_out, config.tune.held_out)
        encode = tasks.encoder(config.data, config.tune.tokenizer)
        taught = [tasks.task(name, corpus, sizes, config.seed, encode) for name in names]
        for name, task in zip(names, taught, strict=True):
            _check(config, name, task)
        held_out = corpus.held_out(config.held_out, config.seed)
    bases: list[PyTree] = []
    for budget in config.pretrain.budgets:
        for k, part in config.memory.parts(range(config.replicates)):
            trained = stage(
                f"pre-train {budget} tokens{k}",
                partial(stages.pre_train, config, net, corpus, where, budget, part),
                folder=True,
            )
            bases += training.unstacked(trained, len(part))
    # (budget, replicate) of every model, in the order of `bases`
    plan = list(itertools.product(range(len(config.pretrain.budgets)), range(config.replicates)))
    noisy = _joined(
        stage(f"perturb{k}", partial(stages.perturb, config, net, where, held_out, bases, part))
        for k, part in config.memory.parts(range(len(plan)))
    )
    tuned = []
    for i, task in enumerate(taught):
        runs = list(itertools.product(range(len(plan)), range(len(config.tune.rates))))
        # A path is not a valid name of a stage, which must begin with a letter or digit.
        name = config.tune.tasks[i] if config.tune.tasks[i] in tasks.TASKS else f"task {i + 1}"
        tune = partial(stages.fine_tune, config, net, where, held_out, task, bases)
        measured = _joined(
            stage(f"fine-tune {name}{k}", partial(tune, part), folder=True)
            for k, part in config.memory.parts(runs)
        )
        tuned.append(measured)
    theory = stage("two-layer theory", stages.theory)
    frequencies = corpus.unigram(held_out)
    return _dataset(config, noisy, tuned, theory).assign(unigram=((), frequencies))


def _check(config: Config, name: str, task: tasks.Task) -> None:
    """Checks that a task's examples give enough steps; a file may have too few examples."""
    try:
        config.tune.check_steps(len(task.learn.tokens))
    except ValueError as error:
        raise ValueError(f"tune.{error} ({name})") from None


def _joined(parts: Iterable[Arrays]) -> dict[str, np.ndarray]:
    """Concatenates the results of parts along their leading axis."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _dataset(
    config: Config, noisy: Arrays, tuned: Sequence[Arrays], theory: Mapping[str, Arrays]
) -> xr.Dataset:
    """Builds the dataset: names and dimensions for the stages' arrays."""
    models, runs = ("budget", "seed"), ("task", "budget", "seed", "rate")
    shape = (len(config.pretrain.budgets), config.replicates)
    base = noisy["base"].reshape(shape)
    nats = {"units": "nats per token"}
    data: dict[str, Any] = {"base": (models, base, nats)}
    for name in ("increase", "predicted", "draws_error"):
        data[f"noise_{name}"] = ((*models, "noise"), noisy[name].reshape(*shape, -1), nats)
    for name, value in tuned[0].items():
        values = np.stack([measured[name] for measured in tuned])
        dims = runs if value.ndim == 1 else (*runs, "scale")
        values = values.reshape(len(tuned), *shape, len(config.tune.rates), *value.shape[1:])
        data[f"tuned_{name}"] = (dims, values, {} if name in ("distance", "epoch") else nats)
    for name, curves in theory.items():
        data[f"theory_{name}_loss"] = ((f"theory_{name}", f"theory_{name}_time"), curves["loss"])
        data[f"theory_{name}_inflection"] = (f"theory_{name}", curves["inflection"])
    coords = {
        "budget": ("budget", np.asarray(config.pretrain.budgets), {"units": "tokens"}),
        "seed": np.arange(config.replicates),
        "noise": np.asarray(config.noise),
        "rate": np.asarray(config.tune.rates),
        "scale": np.asarray(config.tune.scales),
        "task": [Path(name).stem for name in config.tune.tasks],
        **{f"theory_{name}": diagram["row"] for name, diagram in theory.items()},
        **{f"theory_{name}_time": diagram["time"] for name, diagram in theory.items()},
    }
    net = presets.build(config.network)
    params = jax.eval_shape(lambda key: training.first(net, key), jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(params))
    attrs: dict[str, Any] = {"parameters": size, "model": config.model.preset or "small"}
    if config.kept_perplexity is not None:
        attrs["kept_perplexity"] = config.kept_perplexity
    return xr.Dataset(data, coords, attrs)
