"""The networks of `merge_prediction`: two families of tasks, base models and experts.

A base model is trained with Adam for some steps, or not at all. Experts are fine-tuned from it with
plain SGD, as the merging bounds assume, and are kept after several numbers of steps.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from experiments.data import image_tasks
from experiments.data.files import DataError, Pool
from experiments.data.tokens import Tokens
from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from sail_jax import probe

CONTEXT = 32  # tokens of a window
BATCH, BASE_RATE = 16, 3e-3

Learned = Literal["images", "text"]
TASKS: dict[str, tuple[str, ...]] = {
    "images": (
        "rotate -30", "rotate 30", "rotate 60", "classes 0-4", "classes 5-9", "classes 2-7",
    ),
    "text": ("text 0-20", "text 40-60", "text 80-100", "text 0-50", "text 50-100"),
}  # fmt: skip


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
      base: Training data of base models, in arrays of shape (n, ...).
      learn: Training data of experts, in arrays of shape (task, n, ...).
      held_out: The held-out examples, in arrays of shape (task, n, ...).
      points: The training examples as vectors, for distances between tasks.
    """

    base: Batch
    learn: Batch
    held_out: Batch
    points: Float[np.ndarray, "task n dim"]


class Family(NamedTuple):
    """A network, its tasks, and the settings of its experts' fine-tuning.

    Attributes:
      net: The network.
      tasks: The names of the tasks.
      rates: The learning rates of fine-tuning.
      layers: A name pattern of the layers with compared features.
    """

    net: nn.Module
    tasks: tuple[str, ...]
    rates: tuple[float, ...]
    layers: str


def of_images(classes: int) -> Family:
    """Describes the family of tasks on images."""
    return Family(MLP((48, 48), classes), TASKS["images"], (0.03, 0.3), "hidden_?")


def of_text(vocab: int) -> Family:
    """Describes the family of tasks on a text."""
    net = GPT(vocab, CONTEXT, width=24, layers=2, heads=2, head_dim=12, hidden=48)
    return Family(net, TASKS["text"], (0.1, 1.0), "block_?")


class Examples(NamedTuple):
    """The numbers of a task's examples.

    Attributes:
      learn: The number of training examples.
      held_out: The number of held-out examples.
    """

    learn: int
    held_out: int


def rotations_and_classes(
    pool: Pool, classes: int, train: int, seed: int, tasks: tuple[str, ...], each: Examples
) -> Data:
    """Makes tasks of images: all of them rotated, or some classes only.

    It returns the data. Base models learn from upright images of all classes. Points are pixels
    followed by the one-hot class.
    """
    split = image_tasks.split(seed, 1, examples=len(pool.labels), train=train, validation=0)
    learn, exam = split.train[0], split.test[0]
    images, labels, _ = image_tasks.of(pool)
    base = Batch(images[learn], labels[learn])
    sides: tuple[list[Batch], list[Batch]] = [], []
    for task in tasks:
        images, labels, member = image_tasks.of(pool, task)
        a, b = (index[member[index]] for index in (learn, exam))
        # Tasks are stacked, so all must have the same number of examples.
        for field, side, i, n in zip(Examples._fields, sides, (a, b), each, strict=True):
            if len(i) < n:
                raise DataError(f"{field} must be at most {len(i)}, for '{task}'; got {n}")
            side.append(Batch(images[i[:n]], labels[i[:n]]))
    learnt, held_out = (jax.tree.map(lambda *x: np.stack(x), *side) for side in sides)
    one_hot = np.eye(classes, dtype=np.float32)[learnt.labels]
    return Data(base, learnt, held_out, np.concatenate([learnt.inputs, one_hot], -1))


def quantiles_of_text(corpus: Tokens, seed: int, tasks: tuple[str, ...], each: Examples) -> Data:
    """Makes tasks of a text: windows sorted by their mean token.

    The mean token depends on the kind of text. In the source of Python's library spaces are token
    0, so windows with low means are mostly indentation.

    - `tasks`: ranges of percentiles, such as 'text 25-75'.

    It returns the data. Base models learn from windows of any mean. Points are the frequencies of
    tokens.
    """
    for part, line in (("to learn from", corpus.train), ("held out", corpus.held_out)):
        if len(line) < CONTEXT + 2:
            raise DataError(f"text: expected at least {CONTEXT + 2} tokens {part}, got {len(line)}")
    rng, sides = np.random.default_rng(seed), []
    base = _windows(rng, corpus.train, 3000)
    for line, n, keep in ((corpus.train, 3000, each.learn), (corpus.held_out, 1500, each.held_out)):
        windows = _windows(rng, line, n)
        order = np.argsort(windows.inputs.mean(1), kind="stable")
        parts = []
        for task in tasks:
            first, last = (int(x) * n // 100 for x in task.removeprefix("text ").split("-"))
            index = rng.permutation(order[first:last])[:keep]
            parts.append(jax.tree.map(lambda x, index=index: x[index], windows))
        sides.append(jax.tree.map(lambda *x: np.stack(x), *parts))
    learn, held_out = sides
    count = np.zeros((*learn.inputs.shape[:2], corpus.vocab), np.float32)
    for at in np.ndindex(count.shape[:2]):
        count[at] = np.bincount(learn.inputs[at], minlength=corpus.vocab)
    return Data(base, learn, held_out, count / CONTEXT)


def _windows(rng: np.random.Generator, line: np.ndarray, n: int) -> Batch:
    """Draws `n` random windows of a text. Labels are the token that follows each position."""
    start = rng.integers(len(line) - CONTEXT - 1, size=n)
    window = line[start[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return Batch(window[:, :-1], window[:, 1:])


def of_logits(logits: Array, labels: Array) -> Float[Array, ""]:
    """Computes the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def logits(family: Family, params: PyTree, batch: Batch) -> Array:
    """Evaluates a family's network."""
    return jnp.asarray(family.net.apply(params, batch.inputs))


def accuracy(family: Family, params: PyTree, batch: Batch) -> Float[Array, ""]:
    """Computes the fraction of labels that a network predicts."""
    return jnp.mean(logits(family, params, batch).argmax(-1) == batch.labels)


def _loss(family: Family, params: PyTree, batch: Batch) -> Float[Array, ""]:
    """Computes the mean cross-entropy of a family's network on a batch."""
    return of_logits(logits(family, params, batch), batch.labels)


# It returns the same function object each time, so that probes compile once.
@cache
def loss_of(family: Family) -> Callable[[PyTree, Batch], Float[Array, ""]]:
    """Returns the loss of a family's network."""
    return partial(_loss, family)


@cache
def network_of(family: Family) -> Callable[..., Any]:
    """Returns a family's network in the form that probes require."""
    return probe.flax_network(family.net.apply, family.layers, inputs=lambda batch: batch.inputs)


@partial(jax.jit, static_argnums=0)
def pretrain(family: Family, data: Batch, key: PRNGKeyArray, steps: ArrayLike) -> PyTree:
    """Trains a base model with Adam.

    - `family`: the family (static).
    """
    first, rest = jax.random.split(key)
    params, adam = family.net.init(first, data.inputs[:1]), optax.adam(BASE_RATE)
    return _descend(family, adam, (params, adam.init(params)), data, rest, 0, steps)[0]


@partial(jax.jit, static_argnums=0)
def tune(
    family: Family, base: PyTree, learn: Batch, rate: Array | float, key: PRNGKeyArray, steps: Array
) -> PyTree:
    """Fine-tunes experts from a base model with plain SGD, one for each task.

    - `family`: the family (static).
    - `learn`: the examples of every task, in arrays of shape (task, n, ...).
    - `steps`: the steps at which experts are kept, ascending, of shape (kept,).

    It returns the experts' variables, in leaves of shape (task, kept, ...).
    """
    sgd = optax.sgd(rate)
    ends = jnp.stack([jnp.append(0, steps[:-1]), steps], -1)

    def expert(learn: Batch, key: PRNGKeyArray) -> PyTree:
        def until(state: PyTree, ends: Array) -> tuple[PyTree, PyTree]:
            state = _descend(family, sgd, state, learn, key, *ends)
            return state, state[0]

        return jax.lax.scan(until, (base, sgd.init(base)), ends)[1]

    keys = jax.random.split(key, len(learn.labels))
    return jax.lax.map(lambda args: expert(*args), (learn, keys))


def _descend(
    family: Family,
    optimizer: optax.GradientTransformation,
    state: PyTree,
    data: Batch,
    key: PRNGKeyArray,
    start: ArrayLike,
    stop: ArrayLike,
) -> PyTree:
    """Optimises on random minibatches from step `start` to step `stop`."""

    def step(i: Array, state: PyTree) -> PyTree:
        params, memory = state
        drawn = jax.random.randint(jax.random.fold_in(key, i), (BATCH,), 0, len(data.labels))
        batch = jax.tree.map(lambda x: jnp.asarray(x)[drawn], data)
        gradient = jax.grad(loss_of(family))(params, batch)
        update, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, update), memory

    return jax.lax.fori_loop(start, stop, step, state)
