"""The runs of `trajectory_averaging`: at a constant rate, averaged, and at decayed rates."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from experiments.models import presets
from experiments.studies.shared import growth_tasks as tasks
from experiments.studies.trajectory_averaging.config import Config, Task
from experiments.training.descent import descend
from sail_jax.trajectory import decay_of, weights

RULES = {"adam": optax.scale_by_adam(), "sgd": optax.identity()}
# The momentum of the running statistics of `ResNet`'s BatchNorm.
KEPT = 0.9


class State(NamedTuple):
    """A network in training.

    Attributes:
      params: The parameters.
      rest: Running statistics, if the network has any.
      memory: The state of the optimiser.
    """

    params: PyTree
    rest: PyTree
    memory: PyTree


class Halves(NamedTuple):
    """The examples of one repetition.

    Attributes:
      learn: The training data.
      fit: Held-out examples on which windows are chosen and the quadratic is fitted.
      test: The other held-out examples.
    """

    learn: tasks.Data
    fit: tasks.Batch
    test: tasks.Batch

    @classmethod
    def of(cls, data: tasks.Data) -> "Halves":
        """Divides the held-out examples."""
        middle = len(data.held_out.inputs) // 2
        halves = (jax.tree.map(lambda x, at=at: x[at], data.held_out)
                  for at in (slice(middle), slice(middle, None)))  # fmt: skip
        return cls(data, *halves)


@partial(jax.jit, static_argnames=("net", "rule", "batch"))
def _advance(
    net: nn.Module,
    rule: str,
    batch: int,
    state: State,
    data: tasks.Data,
    key: PRNGKeyArray,
    first: Array,
    rates: Float[Array, " steps"],
) -> State:
    """Trains for one step per rate. Step t always uses the same minibatch."""

    def loss(params: PyTree, rest: PyTree, batch: tasks.Batch) -> tuple[Array, PyTree]:
        return tasks.evaluate(net, {"params": params, **rest}, batch, train=True)

    end = descend(
        loss,
        RULES[rule],
        lambda t: rates[t],
        state.params,
        first + jnp.arange(rates.size),
        lambda t: tasks.draw(net, data, jax.random.fold_in(key, t), batch),
        mutable=state.rest,
        memory=state.memory,
    )
    return State(end.params, end.mutable, end.memory)


@partial(jax.jit, static_argnames="net")
def _losses(net: nn.Module, params: PyTree, rest: PyTree, data: Halves) -> Float[Array, " 2"]:
    """Computes the losses on both halves, with the statistics of BatchNorm estimated again.

    The statistics of an average differ from the average of its checkpoints' statistics.
    """
    if rest:
        seen = jax.tree.map(lambda x: x[:512], data.learn.learn)
        empty = jax.tree.map(jnp.zeros_like, rest)
        _, rest = tasks.evaluate(net, {"params": params, **empty}, seen, train=True)
        rest = jax.tree.map(lambda x: x / (1 - KEPT), rest)
    variables = {"params": params, **rest}
    return jnp.stack([tasks.evaluate(net, variables, half)[0] for half in (data.fit, data.test)])


@jax.jit
def _mixed(trees: Sequence[PyTree], weights: Float[Array, " n"]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.tensordot(weights, jnp.stack(leaves), 1), *trees)


def measure(config: Config, task: Task, data: Halves, seed: int) -> dict[str, np.ndarray]:
    """Runs one repetition of a task: one constant run, its averages, and all decayed runs.

    Args:
      config: The config.
      task: The task.
      data: The data of the repetition.
      seed: The number of the repetition.

    Returns:
      Losses on both halves, the last axis: `curve` of the checkpoints of the longest window,
      `(checkpoint, 2)`; `averaged`, `(shape, window, 2)`; `decayed`, `(decay, window, 2)`.
    """
    net, how, every = presets.build(config.network(task)), config.training(task), config.spacing
    key = jax.random.fold_in(jax.random.key(config.seed), seed)
    start, batches = jax.random.split(key)
    variables = tasks.init(net, data.learn, start)
    rest = {k: v for k, v in variables.items() if k != "params"}
    state = State(variables["params"], rest, RULES[how.rule].init(variables["params"]))

    def on(state: State, first: int, rates: np.ndarray) -> State:
        given = jnp.asarray(first), jnp.asarray(rates, jnp.float32)
        return _advance(net, how.rule, how.batch, state, data.learn, batches, *given)

    def losses(params: PyTree, rest: PyTree) -> Any:
        return _losses(net, params, rest, data)

    rising = how.rate * np.minimum(1, np.arange(1, config.steps + 1) / max(how.warmup, 1))
    saved = {}
    for at in range(0, config.steps, every):
        if at >= config.steps - config.windows[-1]:
            saved[at] = state
        state = on(state, at, rising[at : at + every])
    saved[config.steps] = state
    checkpoints = list(saved.values())
    averaged, decayed = [], []
    for shape in config.shapes:
        for window in config.windows:
            last = checkpoints[-1 - window // every :]
            mixed = _mixed([s.params for s in last], jnp.asarray(weights(shape, len(last))))
            averaged.append(losses(mixed, state.rest))
    for decay in config.decays:
        for window in config.windows:
            begin = config.steps - window
            slower, rates = saved[begin], how.rate * decay_of(weights(decay, window + 1))[1:]
            for at in range(0, window, every):
                slower = on(slower, begin + at, rates[at : at + every])
            decayed.append(losses(slower.params, slower.rest))
    grid = (len(config.windows), 2)
    return {
        "curve": np.stack([losses(s.params, s.rest) for s in checkpoints]),
        "averaged": np.stack(averaged).reshape(-1, *grid),
        "decayed": np.stack(decayed).reshape(-1, *grid),
    }
