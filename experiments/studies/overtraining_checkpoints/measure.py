"""The stages of `overtraining_checkpoints`: what is done to one checkpoint, from its folder."""

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
from experiments.models.gpt import GPT
from experiments.models.pretrained import load_pretrained, read_config
from experiments.studies.overtraining_checkpoints.adapters import LoRA
from experiments.studies.overtraining_checkpoints.config import Config
from experiments.studies.overtraining_checkpoints.data import Data, Task, seeded
from experiments.studies.overtraining_language import training
from experiments.studies.overtraining_language.tasks import Batch
from experiments.training import Optimizer, Schedule, Training, choice_scores
from sail_jax.trees import path_str


def perturb(config: Config, net: nn.Module, data: Data, path: str) -> dict[str, Any]:
    """A checkpoint as it is, and under noise: its loss on held-out text [seed] and [seed, gamma],
    on each task's test examples [task, seed], and its answers [benchmark]."""
    params = load_pretrained(path).variables["params"]
    deviation = deviations(config, net, path)
    loss = partial(_mean_loss, net, config.memory.at_once)
    base = np.array([loss(params, held) for held in data.held_out])
    noisy = np.zeros((config.replicates, len(config.gammas)))
    for k, held in enumerate(data.held_out):
        for draw in range(config.draws):
            key = jax.random.key(seeded(config, 3, k, draw))
            for i, gamma in enumerate(config.gammas):
                moved = _noisy(params, deviation, key, gamma)
                noisy[k, i] += loss(moved, held) / config.draws
    before = [[loss(params, t.of(part.test)) for part in t.parts] for t in data.tasks]
    found = {"base": base, "noisy": noisy, "before": np.array(before)}
    asked = _answers(net, params, data, config.memory.at_once)
    return found | ({"answers": asked} if data.benchmarks else {})


def deviations(config: Config, net: nn.Module, path: str) -> PyTree:
    """The standard deviations of the initial weights, a number for each leaf, 0 where all weights
    of a leaf are alike; ValueError where the configuration is to state them and does not."""
    if config.deviation == "module":
        spread = jax.jit(
            lambda key: jax.tree.map(jnp.std, net.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
        )
        return spread(jax.random.key(seeded(config, 4)))
    told = read_config(path).get("initializer_range")
    if not isinstance(told, int | float) or not 0 < told < math.inf:
        raise ValueError(
            f"{path}: config.json states no initializer_range; give --deviation module"
        )
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

    def leaf(where: Any, x: Any) -> Array:
        name = path_str(where)
        matrix = name.endswith(("kernel", "embedding", "position_embed"))
        # GPT-2 divides what adds to the stream by the root of how often that happens
        adds = isinstance(net, GPT) and name.endswith(("o/kernel", "out/kernel"))
        scale = 1 / math.sqrt(2 * net.layers) if adds else 1.0
        return jnp.float32(told * scale * matrix)

    return jax.tree.map_with_path(leaf, shapes)


@jax.jit
def _noisy(params: PyTree, deviation: PyTree, key: Array, gamma: float) -> PyTree:
    """theta + gamma epsilon, epsilon ~ N(0, Sigma) (eq. 1)."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(
        lambda x, s, k: x + gamma * s * jax.random.normal(k, x.shape, x.dtype),
        params, deviation, keys,
    )  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def _losses(net: nn.Module, at_once: int, params: PyTree, batch: Batch) -> Array:
    return training.each_nll(net, params, batch, at_once).mean()


def _mean_loss(net: nn.Module, at_once: int, params: PyTree, batch: Batch) -> float:
    return float(_losses(net, min(at_once, len(batch.tokens)), params, batch))


@partial(jax.jit, static_argnums=(0, 3))
def _answered(net: nn.Module, params: PyTree, packed: Any, at_once: int) -> Array:
    apply: Any = lambda tokens: net.apply({"params": params}, tokens)  # noqa: E731
    return choice_scores.answered(apply, packed, batch_size=at_once)


def _answers(
    net: nn.Module, params: PyTree, data: Data, at_once: int
) -> Float[np.ndarray, " benchmark"]:
    """The share of right answers to each benchmark."""
    asked = data.benchmarks.values()
    return np.array([float(_answered(net, params, packed, at_once)) for packed in asked])


@jax.jit
def _distance(a: PyTree, b: PyTree) -> Array:
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), a, b)
    return jnp.sqrt(sum(jax.tree.leaves(squares)))


def fine_tune(
    config: Config,
    net: nn.Module,
    where: training.Layout,
    data: Data,
    task: Task,
    path: str,
    some: Sequence[tuple[int, int]],
    folder: Path | None,
) -> dict[str, np.ndarray]:
    """A checkpoint taught a task, for some (repetition, rate): its loss on held-out text, on the
    task's validation and test examples, its answers, and how far it moved, [run, ...]."""
    tune, params = config.tune, load_pretrained(path).variables["params"]
    top, steps = tune.rates[-1], tune.steps
    # AdamW's decays are PyTorch's, and there is no weight decay (Table 2)
    optimizer = Optimizer(
        Schedule(top, steps, tune.warmup), members=tuple(tune.rates[i] / top for _, i in some)
    )
    how = Training(optimizer, config.memory.micro_batches, config.compute)
    orders = {k: seeded(config, 5, k) for k, _ in some}

    def batch(step: int) -> Batch:
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
    return adapters(params, own)
