"""Runs `merge_digits` stage by stage and gathers the results in one dataset.

Each stage computes all repetitions at once.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from experiments.data import image_tasks
from experiments.data.files import refused
from experiments.data.image_tasks import Task
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.models.mlp import MLP
from experiments.studies.merge_digits.config import Config, Training
from experiments.training.descent import descend
from sail_jax import methods

SWEPT = ("task arithmetic", "TIES")


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the networks, merges them and measures the merges.

    It returns a dataset over replicate: the test `accuracy` of every model on every task, and the
    accuracy `predicted` by adding outputs (NaN for models without a prediction); the `validation`
    accuracy by merge and scale, and the `chosen_scale`; and along the line between the first two
    experts, `line_accuracy`, `line_predicted` by outputs, and `line_chord`, the interpolated
    accuracies.

    It raises `DataError` if the data cannot be read or are not sufficient.
    """
    upright, learn, choose, test = load(config)
    keys = jax.random.split(jax.random.key(config.seed), (config.replicates, 2))

    base = stage("pre-train the base", lambda: _pretrain(config, upright, keys[:, 0]))
    experts = stage("fine-tune the experts", lambda: _finetune(config, base, learn, keys[:, 1]))
    added = stage("merge the experts", lambda: _merge(config, base, experts))
    tried = stage("try every scale", lambda: _try_scales(config, base, added, choose))
    scale = np.asarray(_scales(config))
    chosen = scale[tried["accuracy"].argmax(-1)]
    tested = stage(
        "test the merged models", lambda: _test(config, base, experts, added, chosen, test)
    )
    line = stage("walk from one expert to another", lambda: _walk(config, experts, test))
    by_model, by_end = ("replicate", "model", "task"), ("replicate", "weight", "end")
    return xr.Dataset(
        {
            "accuracy": (by_model, tested["accuracy"]),
            "predicted": (by_model, tested["predicted"]),
            "validation": (("replicate", "merge", "scale"), tried["accuracy"]),
            "chosen_scale": (("replicate", "merge"), chosen),
            "line_accuracy": (by_end, line["accuracy"]),
            "line_predicted": (by_end, line["predicted"]),
            "line_chord": (by_end, line["chord"]),
        },
        {
            "model": ["base", *(f"expert: {task}" for task in config.tasks), "soup", *SWEPT],
            "task": list(config.tasks),
            "merge": list(SWEPT),
            "scale": scale,
            "weight": np.asarray(_weights(config)),
            "end": list(config.tasks[:2]),
        },
    )


def load(config: Config) -> tuple[Task, Task, Task, Task]:
    """Loads the images and divides them among the stages.

    It returns upright images to pre-train on, in arrays of shape (replicate, 1, example, ...);
    then, for every task, images to fine-tune on, to choose scales with and to test on, each in
    arrays of shape (replicate, task, example, ...).

    It raises `DataError` if the data cannot be read or are not sufficient.
    """
    with refused():
        pool = config.data.pool(config.seed)
        config.check_left(n := len(pool.labels))
        sizes = {"train": config.train, "validation": config.validation}
        split = image_tasks.split(config.seed, config.replicates, examples=n, **sizes)
        upright = image_tasks.pick([image_tasks.of(pool)], split.train)
        tasks = [image_tasks.of(pool, task) for task in config.tasks]
        learn, choose, test = (image_tasks.pick(tasks, index) for index in split)
    return upright, learn, choose, test


def _scales(config: Config) -> Array:
    """Returns the scales to try, without 0."""
    return jnp.linspace(0, config.merging.largest, config.merging.scales + 1)[1:]


def _weights(config: Config) -> Array:
    """Returns the weights of the second expert along the line."""
    return jnp.linspace(0, 1, config.line_points)


def _replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `fn(config, ...)`, a function of one repetition, for all repetitions at once."""
    return jax.jit(
        lambda config, *args: jax.vmap(functools.partial(fn, config))(*args), static_argnums=0
    )


def _apply(config: Config, params: PyTree, images: Array | np.ndarray) -> Any:
    """Computes the logits of a network."""
    return MLP(config.widths, config.data.classes).apply(params, images)


@_replicated
def _pretrain(config: Config, exam: Task, key: Array) -> PyTree:
    """Trains the base network on upright images."""
    first, rest = jax.random.split(key)
    params = MLP(config.widths, config.data.classes).init(first, exam.images[0])
    (exam,) = _split(exam, 1)
    return _train(config, config.pretraining, params, exam, rest)


@_replicated
def _finetune(config: Config, base: PyTree, exam: Task, key: Array) -> PyTree:
    """Trains an expert on each task from the base network."""
    train = functools.partial(_train, config, config.tuning, base)
    return jax.vmap(train)(exam, jax.random.split(key, len(config.tasks)))


def _train(config: Config, how: Training, params: PyTree, exam: Task, key: Array) -> PyTree:
    """Minimises the cross-entropy on one task's images by gradient descent with momentum.

    Drawn images that do not belong to the task are ignored.
    """

    def loss(params: PyTree, _: None, batch: Task) -> tuple[Array, None]:
        logits = _apply(config, params, batch.images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        # A small batch may have drawn no image of the task.
        return (losses * batch.member).sum() / jnp.maximum(batch.member.sum(), 1), None

    def draw(key: Array) -> Task:
        drawn = jax.random.randint(key, (how.batch,), 0, exam.labels.shape[0])
        return jax.tree.map(lambda x: x[drawn], exam)

    rate = optax.cosine_decay_schedule(how.rate, how.steps)
    keys = jax.random.split(key, how.steps)
    return descend(loss, optax.trace(how.momentum), rate, params, keys, draw).params


def _grade(logits: Float[Array, "task example class"], exam: Task) -> Float[Array, " task"]:
    """Computes the accuracy on each task, among the images that belong to it."""
    right = (logits.argmax(-1) == exam.labels) & exam.member
    return right.sum(-1) / exam.member.sum(-1)


def _split(stacked: PyTree, count: int) -> list[PyTree]:
    """Returns the first `count` trees of a stacked one."""
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(count)]


@_replicated
def _merge(config: Config, base: PyTree, experts: PyTree) -> PyTree:
    """Returns the task vector of each merge in `SWEPT` at scale 1, along a leading axis.

    Both are linear in their scale, so one merge is sufficient for all scales.
    """
    task_vectors = jax.tree.map(jnp.subtract, experts, base)
    # As one vector: both methods use the whole network, and compile a program for each leaf.
    models = [ravel_pytree(model)[0] for model in _split(task_vectors, len(config.tasks))]
    unravel, zero = ravel_pytree(base)[1], jnp.zeros_like(models[0])
    merges = methods.task_arithmetic(), methods.ties(density=config.merging.density)
    return _stacked([unravel(merge(models, zero)) for merge in merges])


def _stacked(trees: list[PyTree]) -> PyTree:
    """Stacks trees of one structure along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _moved(base: PyTree, added: PyTree, scale: Array) -> PyTree:
    """Returns a merge of this scale."""
    return jax.tree.map(lambda b, a: b + scale * a, base, added)


@_replicated
def _try_scales(config: Config, base: PyTree, added: PyTree, exam: Task) -> dict[str, Array]:
    """Computes the mean validation accuracy over the tasks, of shape (merge, scale)."""

    def mean(added: PyTree, scale: Array) -> Array:
        return _grade(_apply(config, _moved(base, added, scale), exam.images), exam).mean()

    over_scales = jax.vmap(mean, (None, 0))
    return {"accuracy": jax.vmap(over_scales, (0, None))(added, _scales(config))}


@_replicated
def _test(
    config: Config, base: PyTree, experts: PyTree, added: PyTree, chosen: Array, exam: Task
) -> dict[str, Array]:
    """Computes the accuracy of every model on every task, and the prediction from added outputs.

    Both have shape (model, task). Missing predictions are NaN.
    """
    count = len(config.tasks)
    soup = methods.linear()(_split(experts, count))
    merged = jax.vmap(functools.partial(_moved, base))(added, chosen)
    # One pass for all models, because separate passes would make the program several times as long.
    parts = (_stacked([base]), experts, _stacked([soup]), merged)
    everyone = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    outputs = jax.vmap(lambda params: _apply(config, params, exam.images))(everyone)
    grade = jax.vmap(lambda logits: _grade(logits, exam))
    # Added outputs predict the soup and task arithmetic. TIES changes task vectors before adding
    # them.
    tuned = (outputs[1 : 1 + count] - outputs[0]).sum(0)
    predicted = grade(jnp.stack([outputs[0] + scale * tuned for scale in (1 / count, chosen[0])]))
    unknown = jnp.full((1 + count, count), jnp.nan)
    return {
        "accuracy": grade(outputs),
        "predicted": jnp.concatenate([unknown, predicted, unknown[:1]]),
    }


@_replicated
def _walk(config: Config, experts: PyTree, exam: Task) -> dict[str, Array]:
    """Computes accuracies along the line from the first expert to the second, on their two tasks.

    These are the accuracies of interpolated weights and of interpolated outputs, and the
    interpolated accuracies. Each has shape (weight, 2).
    """
    exam = jax.tree.map(lambda leaf: leaf[:2], exam)
    models = _split(experts, 2)
    outputs = [_apply(config, model, exam.images) for model in models]
    ends = [_grade(output, exam) for output in outputs]

    def at(w: Array) -> dict[str, Array]:
        between = methods.linear()(models, weights=jnp.stack([1 - w, w]))
        return {
            "accuracy": _grade(_apply(config, between, exam.images), exam),
            "predicted": _grade((1 - w) * outputs[0] + w * outputs[1], exam),
            "chord": (1 - w) * ends[0] + w * ends[1],
        }

    return jax.vmap(at)(_weights(config))
