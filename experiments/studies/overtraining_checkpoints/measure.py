"""The stages of `overtraining_checkpoints`: each reads, changes and measures one checkpoint.

`run` decides which checkpoints, tasks and learning rates are computed together.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from experiments.data import stream
from experiments.data.choices import Packed
from experiments.measures import choice_scores
from experiments.models.gpt import GPT
from experiments.models.pretrained import load_pretrained, read_config
from experiments.studies.overtraining_checkpoints.adapters import LoRA
from experiments.studies.overtraining_checkpoints.config import Config
from experiments.studies.overtraining_checkpoints.data import Data, Task, seeded
from experiments.studies.shared import language_training as training
from experiments.studies.shared.language_tasks import Batch
from experiments.training import Optimizer, Schedule, Training, sharding
from sail_jax.trees import path_str


def perturb(config: Config, net: nn.Module, data: Data, path: str) -> dict[str, Any]:
    """Measures a checkpoint without change, and its pre-training loss under Gaussian noise.

    The perturbed parameters are theta + gamma epsilon, where epsilon is normal with the standard
    deviations of `deviations`.

    Returns losses in nats per token, and answers:
    - "base": the loss on held-out text without noise, `(seed,)`.
    - "noisy": its mean over draws of noise, `(seed, gamma)`.
    - "before": the loss on each task's test examples without noise, `(task, seed)`.
    - "answers": the fraction of correct answers without noise, `(benchmark,)`; only with
      benchmarks.

    Raises `ValueError` if the weights are missing, damaged or do not match config.json, or as
    `deviations`.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eq. 1, Figures 3 and 65.
    """
    params = load_pretrained(path).variables["params"]
    deviation = deviations(config, net, path)
    loss = partial(_mean_loss, net, config.memory.at_once)
    base = np.array([loss(params, held) for held in data.held_out])
    noisy = np.zeros((config.replicates, len(config.gammas)))
    for k, held in enumerate(data.held_out):
        for draw in range(config.draws):
            # One epsilon for all sizes and checkpoints, so that differences do not come from the
            # draw.
            key = jax.random.key(seeded(config, 3, k, draw))
            for i, gamma in enumerate(config.gammas):
                moved = _noisy(params, deviation, key, gamma)
                noisy[k, i] += loss(moved, held) / config.draws
    before = [[loss(params, t.of(part.test)) for part in t.parts] for t in data.tasks]
    found = {"base": base, "noisy": noisy, "before": np.array(before)}
    asked = _answers(net, params, data, config.memory.at_once)
    return found | ({"answers": asked} if data.benchmarks else {})


def deviations(config: Config, net: nn.Module, path: str) -> PyTree:
    """Computes the standard deviations of the noise, those of the initial weights.

    `config.deviation` selects them: measured on initial weights of our module ("module"), or the
    initializer_range of the checkpoint's config.json ("stated"). In the latter case, GPT-2's output
    projections of attention and MLP have 1 / sqrt(2 layers) of it.

    Args:
      config: The settings.
      net: The network.
      path: Folder of the checkpoint; only "stated" reads it.

    Returns:
      A float32 scalar for each array of parameters; 0 for biases and the scales of norms.

    Raises:
      ValueError: If initializer_range is required, and is missing or not a positive number.
    """
    if config.deviation == "module":
        spread = jax.jit(
            lambda key: jax.tree.map(jnp.std, net.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
        )
        return spread(jax.random.key(seeded(config, 4)))
    told = read_config(path).get("initializer_range")
    if not isinstance(told, int | float) or not 0 < told < math.inf:
        raise ValueError(f"{path}/config.json: missing initializer_range; use --deviation module")
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

    def leaf(where: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> Array:
        """Returns the stated deviation of one array; vectors are initially constant, so theirs is
        0."""
        name = path_str(where)
        matrix = name.endswith(("kernel", "embedding", "position_embed"))
        # GPT-2 divides the terms added to the stream by the square root of their number
        adds = isinstance(net, GPT) and name.endswith(("o/kernel", "out/kernel"))
        scale = 1 / math.sqrt(2 * net.layers) if adds else 1.0
        return jnp.float32(told * scale * matrix)

    return jax.tree.map_with_path(leaf, shapes)


@jax.jit
def _noisy(params: PyTree, deviation: PyTree, key: Array, gamma: float) -> PyTree:
    """Adds noise to the parameters: theta + gamma epsilon, epsilon ~ N(0, Sigma) (eq. 1)."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(
        lambda x, s, k: x + gamma * s * jax.random.normal(k, x.shape, x.dtype),
        params, deviation, keys,
    )  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def _losses(net: nn.Module, at_once: int, params: PyTree, batch: Batch) -> Array:
    """Computes the mean over sequences of their mean losses, in nats per token."""
    return training.each_nll(net, params, batch, at_once).mean()


def _mean_loss(net: nn.Module, at_once: int, params: PyTree, batch: Batch) -> float:
    """Computes `_losses` as a number, with at most as many sequences at once as there are."""
    return float(_losses(net, min(at_once, len(batch.tokens)), params, batch))


@partial(jax.jit, static_argnums=(0, 3))
def _answered(net: nn.Module, params: PyTree, packed: Packed, at_once: int) -> Array:
    """Computes the fraction of correct answers to one benchmark."""
    apply: Any = lambda tokens: net.apply({"params": params}, tokens)  # noqa: E731
    return choice_scores.answered(apply, packed, batch_size=at_once)


def _answers(
    net: nn.Module, params: PyTree, data: Data, at_once: int
) -> Float[np.ndarray, " benchmark"]:
    """Computes the fraction of correct answers to each benchmark."""
    asked = data.benchmarks.values()
    return np.array([float(_answered(net, params, packed, at_once)) for packed in asked])


@jax.jit
def _distance(a: PyTree, b: PyTree) -> Array:
    """Computes the Euclidean distance between two sets of parameters."""
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), a, b)
    return jnp.sqrt(sum(jax.tree.leaves(squares)))


def fine_tune(
    config: Config,
    net: nn.Module,
    where: sharding.Layout,
    data: Data,
    task: Task,
    path: str,
    some: Sequence[tuple[int, int]],
    folder: Path | None,
) -> dict[str, np.ndarray]:
    """Fine-tunes a checkpoint on a task, several times in parallel, and measures the results.

    Args:
      config: The settings.
      net: The network.
      where: The layout of the work on devices.
      data: The data of the measurements.
      task: The task of the fine-tuning.
      path: Folder of the checkpoint.
      some: The fine-tunings: the number of the repetition, and the index of the learning rate in
        `config.tune.rates`.
      folder: Directory for states of the training, from which a killed one continues. None stores
        no states.

    Returns:
      Measurements of each fine-tuning. Losses are in nats per token:
      - "base": the loss on held-out text of pre-training, `(run,)`.
      - "validation" and "test": the loss on these examples of the task, `(run,)`.
      - "distance": the Euclidean distance from the checkpoint's parameters, `(run,)`.
      - "answers": the fraction of correct answers, `(run, benchmark)`; only with benchmarks.

    Raises:
      ValueError: If the weights are missing, damaged or do not match config.json, or the rank of
        adapters is too large for a matrix.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Section 2 and Table 2.
    """
    tune, params = config.tune, load_pretrained(path).variables["params"]
    top, steps = tune.rates[-1], tune.steps()
    # AdamW's decays are PyTorch's, without weight decay (Table 2); a member's rate is a fraction of
    # the highest one
    optimizer = Optimizer(
        Schedule(top, steps, tune.warmup), members=tuple(tune.rates[i] / top for _, i in some)
    )
    how = Training(optimizer, config.memory.micro_batches, config.compute)
    # All rates and checkpoints use examples in the same order, which differs only between
    # repetitions.
    orders = {k: seeded(config, 5, k) for k, _ in some}

    def batch(step: int) -> Batch:
        """Gathers the examples of a step, `(example, member, ...)`."""
        size = {"examples": tune.examples, "size": tune.batch}
        index = [task.parts[k].learn[stream.indices(step, seed=orders[k], **size)] for k, _ in some]
        return task.of(np.stack(index, 1))

    key = jax.random.key(seeded(config, 6, *some[0]))
    adapters = None if tune.rank is None else LoRA(tune.rank, tune.alpha)
    if adapters is None:
        before: list[PyTree] = [params] * len(some)
    else:
        drawn = {k: jax.random.key(seeded(config, 7, k)) for k, _ in some}
        before = [adapters.start(params, drawn[k]) for k, _ in some]
    after = training.together(
        net, how, before, batch, steps, key=key, where=where, directory=folder, config=config,
        save_every=config.save_every, frozen=None if adapters is None else params, join=adapters,
    )  # fmt: skip
    rows = []
    loss = partial(_mean_loss, net, config.memory.at_once)
    for (k, _), own in zip(some, after, strict=True):
        whole = own if adapters is None else _joined(adapters, params, own)
        part = task.parts[k]
        row: dict[str, Any] = {
            "base": loss(whole, data.held_out[k]),
            "validation": loss(whole, task.of(part.validation)),
            "test": loss(whole, task.of(part.test)),
            "distance": float(_distance(whole, params)),
        }
        if data.benchmarks:
            row["answers"] = _answers(net, whole, data, config.memory.at_once)
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@partial(jax.jit, static_argnums=0)
def _joined(adapters: LoRA, params: PyTree, own: PyTree) -> PyTree:
    """Adds trained adapters to the parameters, in a compiled function."""
    return adapters(params, own)
