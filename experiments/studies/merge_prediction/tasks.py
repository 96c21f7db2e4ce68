"""The networks that `merge_prediction` merges: two families of tasks, base models and experts.

A base model is trained with Adam for some steps, or not at all. Experts are tuned from it with
plain SGD, which the merging bounds are about, and are kept at several steps along the way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from experiments.data import digits, image_tasks, text
from experiments.data.files import Pool
from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from sail_jax import probe

CONTEXT, HELD_OUT = 32, 160  # characters of a window; held-out examples of a task
BATCH, BASE_RATE = 16, 3e-3

Learned = Literal["digits", "text"]


class Batch(NamedTuple):
    """Inputs with their labels.

    Attributes:
      inputs: Images as rows, or windows of tokens, of shape (n, ...).
      labels: Classes of shape (n,), or the tokens that come next, of shape (n, `CONTEXT`).
    """

    inputs: Any
    labels: Any


class Data(NamedTuple):
    """The data of one family.

    Attributes:
      base: What base models learn from, in arrays of shape (n, ...).
      learn: What experts learn from, in arrays of shape (task, n, ...).
      held_out: The held-out examples, in arrays of shape (task, n, ...).
      points: The examples to learn from as vectors, between which distances are taken.
    """

    base: Batch
    learn: Batch
    held_out: Batch
    points: Float[np.ndarray, "task n dim"]


class Family(NamedTuple):
    """A network, its tasks, and how its experts are tuned.

    Attributes:
      net: The network.
      tasks: The names of the tasks.
      rates: The learning rates of fine-tuning.
      layers: A pattern of the names of the layers whose features are compared.
      load: Loads the data of some tasks, given a seed and their names.
    """

    net: nn.Module
    tasks: tuple[str, ...]
    rates: tuple[float, ...]
    layers: str
    load: Callable[[int, tuple[str, ...]], Data]


def rotations_and_classes(seed: int, tasks: tuple[str, ...]) -> Data:
    """Loads tasks of scikit-learn's digits: turned, or of some classes only.

    Args:
      seed: The seed of the split.
      tasks: Names such as 'rotate 30' and 'classes 0-4' (see `experiments.data.image_tasks`).

    Returns:
      The data; base models learn from upright digits of all classes. Points are pixels followed by
      the one-hot class.
    """
    pool = Pool(*digits.load())
    split = image_tasks.split(seed, 1, examples=digits.EXAMPLES, train=1197, validation=0)
    learn, exam = split.train[0], split.test[0]
    images, labels, _ = image_tasks.of(pool)
    base = Batch(images[learn], labels[learn])
    sides: tuple[list[Batch], list[Batch]] = [], []
    for task in tasks:
        images, labels, member = image_tasks.of(pool, task)
        a, b = (index[member[index]] for index in (learn, exam))
        # Tasks are stacked, so that all have the same number of examples.
        for side, i in zip(sides, (a[:300], b[:HELD_OUT]), strict=True):
            side.append(Batch(images[i], labels[i]))
    train, test = (jax.tree.map(lambda *x: np.stack(x), *side) for side in sides)
    classes = np.eye(10, dtype=np.float32)[train.labels]
    return Data(base, train, test, np.concatenate([train.inputs, classes], -1))


def quantiles_of_text(seed: int, tasks: tuple[str, ...]) -> Data:
    """Loads tasks of source text: windows sorted by their mean token.

    The mean token depends on the kind of text: spaces are token 0, so that windows with low means
    are mostly indentation.

    Args:
      seed: The seed of the windows.
      tasks: Ranges of percentiles, such as 'text 25-75'.

    Returns:
      The data; base models learn from windows of any mean. Points are the frequencies of
      characters.
    """
    rng, sides = np.random.default_rng(seed), []
    corpus = text.load()
    base = _windows(rng, corpus.train, 3000)
    for line, n, keep in ((corpus.train, 3000, 300), (corpus.held_out, 1500, HELD_OUT)):
        windows = _windows(rng, line, n)
        order = np.argsort(windows.inputs.mean(1), kind="stable")
        parts = []
        for task in tasks:
            first, last = (int(x) * n // 100 for x in task.removeprefix("text ").split("-"))
            index = rng.permutation(order[first:last])[:keep]
            parts.append(jax.tree.map(lambda x, index=index: x[index], windows))
        sides.append(jax.tree.map(lambda *x: np.stack(x), *parts))
    learn, held_out = sides
    frequency = np.eye(text.VOCAB, dtype=np.float32)[learn.inputs].mean(-2)
    return Data(base, learn, held_out, frequency)


def _windows(rng: np.random.Generator, line: np.ndarray, n: int) -> Batch:
    """`n` random windows of a text, with the token that follows each position as its label."""
    start = rng.integers(len(line) - CONTEXT - 1, size=n)
    window = line[start[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return Batch(window[:, :-1], window[:, 1:])


FAMILIES = {
    "digits": Family(
        MLP((48, 48), 10),
        ("rotate -30", "rotate 30", "rotate 60", "classes 0-4", "classes 5-9", "classes 2-7"),
        (0.03, 0.3),
        "hidden_?",
        rotations_and_classes,
    ),
    "text": Family(
        GPT(text.VOCAB, CONTEXT, width=24, layers=2, heads=2, head_dim=12, hidden=48),
        ("text 0-20", "text 40-60", "text 80-100", "text 0-50", "text 50-100"),
        (0.1, 1.0),
        "block_?",
        quantiles_of_text,
    ),
}


def of_logits(logits: Array, labels: Array) -> Float[Array, ""]:
    """Computes the mean cross-entropy.

    Args:
      logits: Logits of shape (..., classes).
      labels: The right classes, of shape (...).

    Returns:
      The loss in nats, a scalar.
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def logits(family: str, params: PyTree, batch: Batch) -> Array:
    """Evaluates a family's network.

    Args:
      family: The name of the family.
      params: The network's variables.
      batch: The batch.

    Returns:
      The logits, of shape (n, classes) or (n, `CONTEXT`, tokens).
    """
    outputs: Any = FAMILIES[family].net.apply(params, batch.inputs)
    return outputs


def accuracy(family: str, params: PyTree, batch: Batch) -> Float[Array, ""]:
    """Computes the share of labels that a network predicts.

    Args:
      family: The name of the family.
      params: The network's variables.
      batch: The batch.

    Returns:
      The accuracy, a scalar in [0, 1].
    """
    return jnp.mean(logits(family, params, batch).argmax(-1) == batch.labels)


def _loss(family: str, params: PyTree, batch: Batch) -> Float[Array, ""]:
    """The mean cross-entropy of a family's network on a batch."""
    return of_logits(logits(family, params, batch), batch.labels)


# the same function objects each time, so that probes compile once
LOSSES = {name: partial(_loss, name) for name in FAMILIES}
NETWORKS = {
    name: probe.flax_network(f.net.apply, f.layers, inputs=lambda batch: batch.inputs)
    for name, f in FAMILIES.items()
}


@partial(jax.jit, static_argnums=0)
def pretrain(family: str, data: Batch, key: PRNGKeyArray, steps: ArrayLike) -> PyTree:
    """Trains a base model with Adam.

    Args:
      family: The name of the family; static.
      data: The examples to learn from.
      key: The key of initial weights and minibatches.
      steps: Number of steps; 0 leaves the initial weights.

    Returns:
      The base model's variables.
    """
    first, rest = jax.random.split(key)
    params, adam = FAMILIES[family].net.init(first, data.inputs[:1]), optax.adam(BASE_RATE)
    return _descend(family, adam, (params, adam.init(params)), data, rest, 0, steps)[0]


@partial(jax.jit, static_argnums=0)
def tune(
    family: str, base: PyTree, learn: Batch, rate: Array | float, key: PRNGKeyArray, steps: Array
) -> PyTree:
    """Tunes experts from a base model with plain SGD, one for each task.

    Args:
      family: The name of the family; static.
      base: The base model's variables.
      learn: The examples of every task, in arrays of shape (task, n, ...).
      rate: The learning rate.
      key: The key of the minibatches.
      steps: The steps at which experts are kept, ascending, of shape (kept,).

    Returns:
      The experts' variables, in leaves of shape (task, kept, ...).
    """
    sgd = optax.sgd(rate)
    ends = jnp.stack([jnp.append(0, steps[:-1]), steps], -1)

    def expert(learn: Batch, key: PRNGKeyArray) -> PyTree:
        def until(state: Any, ends: Array) -> tuple[Any, PyTree]:
            state = _descend(family, sgd, state, learn, key, *ends)
            return state, state[0]

        return jax.lax.scan(until, (base, sgd.init(base)), ends)[1]

    keys = jax.random.split(key, len(learn.labels))
    return jax.lax.map(lambda args: expert(*args), (learn, keys))


def _descend(
    family: str, optimizer: Any, state: Any, data: Batch, key: PRNGKeyArray, start: ArrayLike,
    stop: ArrayLike,
) -> Any:  # fmt: skip
    """Optimises on random minibatches from step `start` to step `stop`."""

    def step(i: Array, state: Any) -> Any:
        params, memory = state
        drawn = jax.random.randint(jax.random.fold_in(key, i), (BATCH,), 0, len(data.labels))
        batch = jax.tree.map(lambda x: jnp.asarray(x)[drawn], data)
        gradient = jax.grad(LOSSES[family])(params, batch)
        update, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, update), memory

    return jax.lax.fori_loop(start, stop, step, state)
