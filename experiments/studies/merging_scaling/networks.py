"""The networks of `merging_scaling`: data for the tasks, experts with their twins, and merges.

`run` calls these functions, each for all repetitions at once. `testbed` is their counterpart with
quadratic losses.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from experiments.data import image_tasks
from experiments.data.files import Pool
from experiments.data.image_tasks import Split, Task
from experiments.models.mlp import MLP
from experiments.studies.merging_scaling.config import Config
from sail_jax import methods
from theory.merging.measure import measure_constants

MERGES = ("average", "TIES", "DARE", "AdaMerging")


class Exam(NamedTuple):
    """The data of every repetition and task; each repetition has its own order of tasks.

    Attributes:
      images: Training images of experts. An expert that is fine-tuned on s samples uses the first s
        of the n images. n is one more than the largest number of samples: twins use the last image
        to replace another.
      labels: Their classes, of shape (R, T, n).
      unlabelled: Test images for AdaMerging, in batches.
      test: The test images, in arrays of shape (R, T, ...).
    """

    images: Float[np.ndarray, "R T n 64"]
    labels: np.ndarray
    unlabelled: Float[np.ndarray, "R T batches 32 64"]
    test: Task


def constants(config: Config, base: PyTree, merged: PyTree, exam: Exam) -> dict[str, Any]:
    """Measures the constants of the bounds on the networks of the first repetition, at the centre.

    They are measured at the pre-trained network and at the average of the experts. The infimum of
    each loss is assumed to be 0.

    - `base`: the pre-trained networks, in leaves of shape (replicate, ...).
    - `merged`: the averages of the experts, in leaves of shape (replicate, ...).

    It returns the constants of `theory.merging.Constants` by name, each the largest over both
    points and all tasks.
    """
    centre = config.at()
    n, count = centre["samples"], centre["tasks"]
    tasks = [(exam.images[0, i, :n], exam.labels[0, i, :n]) for i in range(count)]
    points = [jax.tree.map(lambda x: jnp.asarray(x[0]), tree) for tree in (base, merged)]
    key = jax.random.key(config.seed)
    worst = measure_constants(partial(_mean_loss, config), tasks, points, key).worst()
    return {name: np.max(value) for name, value in worst._asdict().items()}


def _mean_loss(config: Config, params: PyTree, batch: tuple[Array, Array]) -> Array:
    """Computes the mean cross-entropy on a batch."""
    return _losses(config, params, *batch).mean()


def _losses(config: Config, params: PyTree, images: ArrayLike, labels: ArrayLike) -> Array:
    """Computes the cross-entropy of each image."""
    outputs = _logits(config, params, images)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)


def _logits(config: Config, params: PyTree, images: ArrayLike) -> Array:
    """Computes the logits of a network."""
    return jnp.asarray(MLP(config.widths, config.data.classes).apply(params, images))


def examine(config: Config, pool: Pool, split: Split) -> Exam:
    """Divides the images among the tasks of every repetition."""
    rng = np.random.default_rng(config.seed)
    most = max(config.swept.samples) + 1
    tasks = [image_tasks.of(pool, task) for task in config.tasks]
    rows = []
    for tuning, test in zip(split.validation, split.test, strict=True):
        for i in rng.permutation(len(tasks)):
            images, labels, member = tasks[i]
            own, seen = tuning[member[tuning]][:most], test[member[test]]
            if len(own) < most or not len(seen):
                raise ValueError(
                    f"swept.samples must be at most {len(own) - 1}, because {config.tasks[i]!r} "
                    "has "
                    f"only {len(own)} of {config.pool} images; got {most - 1}"
                )
            drawn = rng.choice(seen, (16, 32))
            part = images[test], labels[test], member[test]
            rows.append((images[own], labels[own], images[drawn], *part))
    shape = (config.replicates, len(tasks))
    own, labels, unlabelled, *test = (
        np.stack(x).reshape(*shape, *np.shape(x[0])) for x in zip(*rows, strict=True)
    )
    return Exam(own, labels, unlabelled, Task(*test))


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0))
def pretrain(config: Config, exam: Task, key: Array) -> PyTree:
    """Trains the networks from which experts start, with SGD, one for each repetition.

    - `config`: the config (static).
    - `exam`: the training images, in arrays of shape (replicate, n, ...).

    It returns the variables, in leaves of shape (replicate, ...).
    """
    first, rest = jax.random.split(key)
    params = MLP(config.widths, config.data.classes).init(first, exam.images[:1])

    def step(params: PyTree, key: Array) -> tuple[PyTree, None]:
        drawn = jax.random.randint(key, (64,), 0, len(exam.labels))
        batch = jnp.asarray(exam.images)[drawn], jnp.asarray(exam.labels)[drawn]
        return _descend(config, params, batch, config.pretraining.rate), None

    return jax.lax.scan(step, params, jax.random.split(rest, config.pretraining.steps))[0]


def _descend(config: Config, params: PyTree, batch: tuple[Array, Array], rate: ArrayLike) -> PyTree:
    """Takes one step of SGD."""
    gradient = jax.grad(partial(_mean_loss, config))(params, batch)
    return jax.tree.map(lambda x, g: x - rate * g, params, gradient)


@partial(jax.jit, static_argnums=(0, 1))
def finetune(
    config: Config,
    batch: int,
    marks: Int[Array, " m"],
    base: PyTree,
    images: Array,
    labels: Array,
    samples: ArrayLike,
    rate: ArrayLike,
    keys: Array,
) -> tuple[PyTree, PyTree]:
    """Fine-tunes an expert for each task with SGD, and its twin with one sample replaced.

    In every step an expert and its twin draw samples with the same indices. At index 0, the twin
    uses a sample that is not used by any expert.

    - `config`: the config (static).
    - `batch`: samples per step (static).
    - `marks`: the numbers of steps after which networks are kept, increasing.
    - `base`: the initial networks, in leaves of shape (replicate, ...).
    - `samples`: number of samples of each task, at most n - 1.

    It returns the experts and their twins, each in leaves of shape (replicate, task, m, ...).
    """
    # Training continues from each mark to the next, so that longer runs contain shorter ones.
    spans = jnp.stack([jnp.roll(marks, 1).at[0].set(0), marks], 1)

    def of_task(start: PyTree, images: Array, labels: Array, key: Array) -> Any:
        def step(k: Array, pair: PyTree) -> PyTree:
            uniform = jax.random.uniform(jax.random.fold_in(key, k), (batch,))
            place = jnp.minimum((uniform * samples).astype(int), samples - 1)
            # the twin's first sample is the one that no expert uses
            places = jnp.stack([place, jnp.where(place == 0, len(labels) - 1, place)])
            descend = partial(_descend, config, rate=rate)
            return jax.vmap(descend)(pair, (images[places], labels[places]))

        def until(pair: PyTree, span: Array) -> tuple[PyTree, PyTree]:
            pair = jax.lax.fori_loop(span[0], span[1], step, pair)
            return pair, pair

        pair = jax.tree.map(lambda x: jnp.stack([x, x]), start)
        return jax.lax.scan(until, pair, spans)[1]  # [m, 2]

    def replicate(start: PyTree, images: Array, labels: Array, key: Array) -> Any:
        # a task's batches do not depend on the number of other tasks
        task_keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        return jax.vmap(partial(of_task, start))(images, labels, task_keys)

    pairs = jax.vmap(replicate)(base, images, labels, keys)
    experts, twins = (jax.tree.map(lambda x, i=i: x[:, :, :, i], pairs) for i in (0, 1))
    return experts, twins


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0, 0, 0, None, None, 0))
def measure(
    config: Config,
    base: PyTree,
    experts: PyTree,
    twins: PyTree,
    exam: Exam,
    samples: ArrayLike,
    count: ArrayLike,
    key: Array,
) -> dict[str, Any]:
    """Merges the first experts of each repetition by every method of `MERGES`, and measures them.

    It is mapped over repetitions; shapes below include that axis.

    - `config`: the config (static).
    - `base`: the experts' initial networks, in leaves of shape (replicate, ...).
    - `experts`: the experts, in leaves of shape (replicate, task, ...).

    It returns means over the tasks of the merged experts, of shape (replicate, merge): `loss` and
    `accuracy` on the test, and `train_loss` on the experts' samples. It also returns `stability`,
    of shape (replicate,), the mean squared change of the average after replacing one expert's
    sample; and `merged`, the averages.
    """
    tasks = range(len(exam.labels))
    merged = jnp.arange(len(tasks)) < count
    # the others are the base, which contributes nothing, so that one compilation is sufficient for
    # all counts
    models = [
        jax.tree.map(lambda b, x, i=i: jnp.where(merged[i], x[i], b), base, experts) for i in tasks
    ]
    weights = merged / count

    def predict(i: int, params: PyTree, images: Array) -> Array:
        return jnp.where(merged[i], _logits(config, params, images), 0)

    ways = [
        methods.linear()(models, weights=weights),
        methods.ties(density=config.merging.density)(models, base),
        methods.dare_linear(density=1 - config.merging.drop, key=key)(
            models, base, weights=weights
        ),
        methods.adamerging(
            models,
            base,
            [partial(predict, i) for i in tasks],
            [exam.unlabelled[i] for i in tasks],
            init=1 / count,
            steps=config.merging.ada_steps,
            optimizer=optax.adam(config.merging.ada_rate),
        ).params,
    ]
    # The number of samples is traced: a mask selects the first ones.
    seen = jnp.broadcast_to(jnp.arange(exam.labels.shape[1]) < samples, exam.labels.shape)

    def mean(values: Array, member: Array) -> Array:
        return weights @ ((values * member).sum(-1) / member.sum(-1))

    def grade(params: PyTree) -> tuple[Array, ...]:
        test = exam.test
        right = _logits(config, params, test.images).argmax(-1) == test.labels
        return (
            mean(_losses(config, params, test.images, test.labels), jnp.asarray(test.member)),
            mean(right, jnp.asarray(test.member)),
            mean(_losses(config, params, exam.images, exam.labels), seen),
        )

    graded = [jnp.stack(x) for x in zip(*map(grade, ways), strict=True)]
    squares = jax.tree.map(
        lambda a, b: jnp.sum((a - b).reshape(len(a), -1) ** 2, 1), experts, twins
    )
    # Definition 2: the mean over the perturbed expert; the average moves by that expert's weight
    stability = (weights / count**2) @ sum(jax.tree.leaves(squares))
    names = ("loss", "accuracy", "train_loss")
    return {**dict(zip(names, graded, strict=True)), "stability": stability, "merged": ways[0]}
