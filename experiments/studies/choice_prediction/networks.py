"""The networks and tasks of `choice_prediction`, and what became of each choice.

A task gives a label of 1 or -1 to each of ten classes. The source's task and the target's differ in
some of them. The classes of images are those of the data. The classes of a text are ten groups of
tokens of about equal frequency, and the task is to predict the group of the next token. Inputs may
be shifted: images are rotated by 30 degrees, and from a text the last token is removed.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from experiments.data import image_tasks
from experiments.data.files import Pool
from experiments.data.tokens import Tokens
from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from experiments.training.descent import descend

CLASSES, CONTEXT, WINDOWS = 10, 8, 12_000
CHOICES = ("scratch", "transfer", "fine-tuning", "L2-SP")


class Family(NamedTuple):
    """A network with one output, and the name of its last layer."""

    net: nn.Module
    head: str


class Examples(NamedTuple):
    """All examples of a family, without a shift and with it.

    Attributes:
      inputs: Images as rows, or windows of tokens, `(2, example, ...)`.
      classes: The class of each example, from 0 to 9.
    """

    inputs: Any
    classes: Int[np.ndarray, " example"]


class Problem(NamedTuple):
    """Repetitions of settings. All arrays have a leading axis over repetitions.

    Attributes:
      key: A seed of initial weights and minibatches.
      shift: 1 if the inputs of the target are shifted, else 0.
      source: The source's examples; the first `source_count` are used.
      source_count: The number of examples of the source.
      signs: The source's label of each class `(..., 10)`.
      examples: Training examples of each target task `(..., task, most)`; the first n are used.
      count: The number of samples n.
      wrong: -1 for wrong training labels, else 1, `(..., task, most)`.
      tasks: Each task's label of each class `(..., task, 10)`.
      validation: Examples to choose with.
      test: Examples of the test.
    """

    key: np.ndarray
    shift: np.ndarray
    source: np.ndarray
    source_count: np.ndarray
    signs: np.ndarray
    examples: np.ndarray
    count: np.ndarray
    wrong: np.ndarray
    tasks: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def of_images(pool: Pool) -> tuple[Family, Examples]:
    """Makes the MLP, and the images upright and rotated."""
    sides = [image_tasks.of(pool, task).images for task in ("upright", "rotate 30")]
    return Family(MLP((24, 24), 1), "out"), Examples(np.stack(sides), pool.labels % CLASSES)


def of_text(corpus: Tokens, seed: int) -> tuple[Family, Examples]:
    """Makes the GPT, and random windows of a text, with a later and an earlier end."""
    counts = np.bincount(corpus.train, minlength=corpus.vocab)
    group, sizes = np.zeros(corpus.vocab, int), np.zeros(CLASSES)
    for token in np.argsort(-counts, kind="stable"):
        group[token] = sizes.argmin()
        sizes[group[token]] += counts[token]
    start = np.random.default_rng(seed).integers(len(corpus.train) - CONTEXT - 2, size=WINDOWS)
    line = np.asarray(corpus.train[start[:, None] + np.arange(CONTEXT + 2)], np.int32)
    inputs = np.stack([line[:, 1:-1], line[:, :-2]])
    net = GPT(corpus.vocab, CONTEXT, width=16, layers=1, heads=2, head_dim=8, hidden=32)
    return Family(net, "unembed"), Examples(inputs, group[line[:, -1]])


def output(family: Family, params: PyTree, inputs: Array) -> Float[Array, " n"]:
    """Evaluates the network's one output: of the last position, and the first of several."""
    out = jnp.asarray(family.net.apply({"params": params}, inputs))
    return out.reshape(len(inputs), -1, out.shape[-1])[:, -1, 0]


def _start(family: Family, inputs: Array, key: Array) -> PyTree:
    return family.net.init(key, inputs[:1])["params"]


class Sample(NamedTuple):
    """Inputs and labels, of which the first `count` are used."""

    inputs: Any
    labels: Any
    count: Any


class How(NamedTuple):
    """Settings of a training that are static: see `config.Training`."""

    steps: int
    every: int
    expert_steps: int
    batch: int
    source_batch: int
    source_steps: int
    rate: float
    penalties: tuple[float, ...]


def _train(
    family: Family,
    how: How,
    sample: Sample,
    start: PyTree,
    key: Array,
    *,
    frozen: PyTree,
    centre: PyTree = None,
    penalty: Array | float = 0.0,
    measure: Any = None,
) -> tuple[PyTree, Any]:
    """Trains the layers in `start`, with a penalty on their distance from `centre`.

    Returns all parameters at the end, and what was measured before the first step and after every
    `how.every` steps.
    """
    whole = lambda layers: {**frozen, **layers}  # noqa: E731

    def loss(layers: PyTree, mutable: PyTree, batch: Array) -> tuple[Array, PyTree]:
        error = output(family, whole(layers), sample.inputs[batch]) - sample.labels[batch]
        value = jnp.mean(error**2) / 2
        if centre is not None:
            apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), layers, centre)
            value += penalty / 2 * sum(jax.tree.leaves(apart))
        return value, mutable

    draw = lambda key: jax.random.randint(key, (how.batch,), 0, sample.count)  # noqa: E731
    seen = None if measure is None else lambda layers, mutable, t: measure(whole(layers))
    keys = jax.random.split(key, how.steps)
    end = descend(
        loss, optax.scale_by_adam(), lambda t: how.rate, start, keys, draw,
        measure=seen, every=how.every,
    )  # fmt: skip
    return whole(end.params), end.measured


def _source(family: Family, how: How, data: Examples, problem: Problem, key: Array) -> PyTree:
    """Trains the source from scratch."""
    first, second = jax.random.split(key)
    sample = _sample(data, problem, None)
    how = how._replace(batch=how.source_batch, steps=how.source_steps)
    start = _start(family, sample.inputs, first)
    return _train(family, how, sample, start, second, frozen={})[0]


def _sample(data: Examples, problem: Problem, task: Array | int | None) -> Sample:
    """Returns the training sample of the source (None) or of a task."""
    if task is None:
        chosen, count = problem.source, problem.source_count
        labels = problem.signs[data.classes[chosen]]
        return Sample(data.inputs[0][chosen], labels, count)
    chosen = problem.examples[task]
    labels = problem.tasks[task][data.classes[chosen]] * problem.wrong[task]
    return Sample(data.inputs[problem.shift][chosen], labels, problem.count)


def _losses(family: Family, data: Examples, problem: Problem, task: Any, params: PyTree) -> Array:
    """Computes the squared error on the validation and on the test examples."""
    inputs, signs = data.inputs[problem.shift], problem.tasks[task]
    return jnp.stack(
        [
            jnp.mean((output(family, params, inputs[i]) - signs[data.classes[i]]) ** 2)
            for i in (problem.validation, problem.test)
        ]
    )


@partial(jax.jit, static_argnums=(0, 1))
def transfers(family: Family, how: How, data: Examples, problems: Problem) -> dict[str, Array]:
    """Trains networks by every choice, and measures what theory needs before.

    It returns the test loss of each choice at its best penalty and stopping time (`loss`), and for
    theory the `labels`, the outputs (`source_output`, `start_output`) and Gram matrices of tangent
    features (`source_gram`, `head_gram`, `start_gram`) on the training sample. These are padded.
    """

    def one(problem: Problem) -> dict[str, Array]:
        keys = jax.random.split(jax.random.key(problem.key), 5)
        source, sample = _source(family, how, data, problem, keys[0]), _sample(data, problem, 0)
        fresh = _start(family, sample.inputs, keys[1])
        measure = partial(_losses, family, data, problem, 0)
        penalties = jnp.asarray(how.penalties)
        zeros = partial(jax.tree.map, jnp.zeros_like)

        def tried(begin: PyTree, centre: PyTree, penalties: Array, key: Array) -> Array:
            """Trains with each penalty. Returns losses `(penalty, end, 2)`."""
            frozen = {name: x for name, x in source.items() if name not in begin}
            of = lambda penalty: _train(  # noqa: E731
                family, how, sample, begin, key,
                frozen=frozen, centre=centre, penalty=penalty, measure=measure,
            )[1]  # fmt: skip
            return jax.lax.map(of, penalties)

        # One loop, which is compiled once, trains all layers from both starts.
        starts = jax.tree.map(lambda *x: jnp.stack(x), (fresh, zeros(fresh)), (source, source))
        whole = jax.lax.map(
            lambda x: tried(x[0], x[1], jnp.append(penalties, 0.0), x[2]), (*starts, keys[2:4])
        )
        head = zeros({family.head: source[family.head]})
        best = {
            "scratch": whole[0],
            "transfer": tried(head, head, penalties, keys[4]),
            "fine-tuning": whole[1, -1:],
            "L2-SP": whole[1, :-1],
        }
        flat = [best[name].reshape(-1, 2) for name in CHOICES]
        ends = [losses[jnp.argmin(losses[:, 0]), 1] for losses in flat]
        grams = _grams(family, source, sample.inputs)
        return {
            "loss": jnp.stack(ends),
            "labels": sample.labels,
            "source_output": output(family, source, sample.inputs),
            "start_output": output(family, fresh, sample.inputs),
            "source_gram": _total(grams),
            "head_gram": grams[family.head],
            "start_gram": _total(_grams(family, fresh, sample.inputs)),
        }

    return jax.vmap(one)(problems)


def _grams(family: Family, params: PyTree, inputs: Array) -> dict[str, Array]:
    """Computes the Gram matrix of the output's gradients, for each layer."""
    of = lambda x: jax.grad(lambda p: output(family, p, x[None])[0])(params)  # noqa: E731
    rows = {name: jax.tree.leaves(layer) for name, layer in jax.vmap(of)(inputs).items()}
    flat = {name: [x.reshape(len(x), -1) for x in layer] for name, layer in rows.items()}
    return {name: jnp.asarray(sum(x @ x.T for x in layer)) for name, layer in flat.items()}


def _total(grams: dict[str, Array]) -> Array:
    return jnp.sum(jnp.stack(list(grams.values())), 0)


@partial(jax.jit, static_argnums=(0, 1))
def experts(family: Family, how: How, data: Examples, problems: Problem) -> dict[str, Array]:
    """Trains a source, and from it an expert of each task.

    It returns the flat parameters of the source (`base`), and the task vectors of experts trained
    on all samples (`vectors`), and on each half of them (`halves`).
    """
    short = how._replace(steps=how.expert_steps)

    def one(problem: Problem) -> dict[str, Array]:
        keys = jax.random.split(jax.random.key(problem.key), 4)
        source = _source(family, how, data, problem, keys[0])
        flat = ravel_pytree(source)[0]

        def expert(task: Array, first: Any, count: Any, key: Array) -> Array:
            inputs, labels, _ = _sample(data, problem, task)
            rolled = Sample(jnp.roll(inputs, -first, 0), jnp.roll(labels, -first, 0), count)
            end, _ = _train(family, short, rolled, source, key, frozen={})
            return ravel_pytree(end)[0] - flat

        n, tasks = problem.count, jnp.arange(len(problem.tasks))
        ends = []
        for key, (first, count) in zip(
            keys[1:], ((0, n), (0, n // 2), (n // 2, n // 2)), strict=True
        ):
            each = jax.random.split(key, len(tasks))
            ends.append(jax.vmap(expert, (0, None, None, 0))(tasks, first, count, each))
        return {"base": flat, "vectors": ends[0], "halves": jnp.stack(ends[1:])}

    return jax.vmap(one)(problems)


@partial(jax.jit, static_argnums=0)
def merged_losses(family: Family, data: Examples, problems: Problem, flat: Array) -> Array:
    """Computes the mean test loss over tasks of flat parameters `(repetition, merge, entry)`."""
    unravel = ravel_pytree(_start(family, jnp.asarray(data.inputs[0]), jax.random.key(0)))[1]

    def one(problem: Problem, merges: Array) -> Array:
        def mean(vector: Array) -> Array:
            of = lambda task: _losses(family, data, problem, task, unravel(vector))[1]  # noqa: E731
            return jnp.mean(jax.lax.map(of, jnp.arange(len(problem.tasks))))

        return jax.lax.map(mean, merges)

    return jax.vmap(one)(problems, flat)
