"""The networks of `merging_scaling`: digits split among tasks, experts with twins, and merges."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from experiments.data import image_tasks
from experiments.data.files import Pool
from experiments.data.image_tasks import Split, Task
from experiments.models.mlp import MLP
from experiments.studies.merging_scaling.config import Config
from sail_jax import methods
from theory.merging.measure import measure_constants

MERGES = ("average", "TIES", "DARE", "AdaMerging")


class Exam(NamedTuple):
    """Of each replicate and task, tasks in the replicate's own order: what experts see, one sample
    more than the most; inputs for AdaMerging; the test."""

    images: Float[np.ndarray, "R T n 64"]
    labels: np.ndarray
    unlabelled: Float[np.ndarray, "R T batches 32 64"]
    test: Task


def constants(config: Config, base: PyTree, merged: PyTree, exam: Exam) -> dict[str, Any]:
    """Of the first replicate at the centre: the largest at its start and at its average, over tasks
    too. The losses' infimum is taken to be 0."""
    centre = config.at()
    n, count = centre["samples"], centre["tasks"]
    tasks = [(exam.images[0, i, :n], exam.labels[0, i, :n]) for i in range(count)]
    points = [jax.tree.map(lambda x: jnp.asarray(x[0]), tree) for tree in (base, merged)]
    key = jax.random.key(config.seed)
    worst = measure_constants(partial(_mean_loss, config), tasks, points, key).worst()
    return {name: np.max(value) for name, value in worst._asdict().items()}


def _mean_loss(config: Config, params: PyTree, batch: tuple[Array, Array]) -> Array:
    return _losses(config, params, *batch).mean()


def _losses(config: Config, params: PyTree, images: Any, labels: Any) -> Array:
    outputs = _logits(config, params, images)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)


def _logits(config: Config, params: PyTree, images: Any) -> Any:
    return MLP(config.widths, config.data.classes).apply(params, images)


def examine(config: Config, pool: Pool, split: Split) -> Exam:
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
                    f"swept.samples must be at most {len(own) - 1}, which is what "
                    f"{config.tasks[i]!r} has of {config.pool} images; got {most - 1}"
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
    first, rest = jax.random.split(key)
    params = MLP(config.widths, config.data.classes).init(first, exam.images[:1])

    def step(params: PyTree, key: Array) -> tuple[PyTree, None]:
        drawn = jax.random.randint(key, (64,), 0, len(exam.labels))
        batch = jnp.asarray(exam.images)[drawn], jnp.asarray(exam.labels)[drawn]
        return _descend(config, params, batch, config.pretraining.rate), None

    return jax.lax.scan(step, params, jax.random.split(rest, config.pretraining.steps))[0]


def _descend(config: Config, params: PyTree, batch: tuple[Array, Array], rate: Any) -> PyTree:
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
    samples: Any,
    rate: Any,
    keys: Array,
) -> tuple[PyTree, PyTree]:
    """Experts and their twins, `[replicate, task, m]`, after each number of steps in `marks`."""
    spans = jnp.stack([jnp.roll(marks, 1).at[0].set(0), marks], 1)

    def of_task(start: PyTree, images: Array, labels: Array, key: Array) -> Any:
        def step(k: Array, pair: PyTree) -> PyTree:
            uniform = jax.random.uniform(jax.random.fold_in(key, k), (batch,))
            place = jnp.minimum((uniform * samples).astype(int), samples - 1)
            # the twin's first sample is the one that no expert has
            places = jnp.stack([place, jnp.where(place == 0, len(labels) - 1, place)])
            descend = partial(_descend, config, rate=rate)
            return jax.vmap(descend)(pair, (images[places], labels[places]))

        def until(pair: PyTree, span: Array) -> tuple[PyTree, PyTree]:
            pair = jax.lax.fori_loop(span[0], span[1], step, pair)
            return pair, pair

        pair = jax.tree.map(lambda x: jnp.stack([x, x]), start)
        return jax.lax.scan(until, pair, spans)[1]  # [m, 2]

    def replicate(start: PyTree, images: Array, labels: Array, key: Array) -> Any:
        # a task's batches do not depend on how many others there are
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
    samples: Any,
    count: Any,
    key: Array,
) -> dict[str, Any]:
    """The first `count` experts of one replicate, merged in every way: means over their tasks,
    `[merge]`."""
    tasks = range(len(exam.labels))
    merged = jnp.arange(len(tasks)) < count
    # the others are the base, of which no merge takes anything: one compilation for all counts
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
    # Definition 2: the mean over which expert is perturbed, and the average moves by its share
    stability = (weights / count**2) @ sum(jax.tree.leaves(squares))
    names = ("loss", "accuracy", "train_loss")
    return {**dict(zip(names, graded, strict=True)), "stability": stability, "merged": ways[0]}
