"""What `cross_task_linearity` trains and probes: images, a ReLU MLP and a ResNet, and gradient
descent on them.

Splits are stratified, so that the test sets of all tasks have one shape, and unions of them too.
BatchNorm's running statistics are parameters like others to the probes, which interpolate them;
or they are forgotten, and a network normalises by the very images that it is probed on.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree, UInt32

from experiments.data import image_tasks
from experiments.data.files import Pool
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.training.descent import descend
from sail_jax.align import activation_matching, weight_matching
from sail_jax.architectures import of
from sail_jax.basis.change_basis import change_basis
from sail_jax.probe import Apply, features, flax_network, sequential

Model = MLP | ResNet
Key = UInt32[Array, "2"]  # the data of a key


class Batch(NamedTuple):
    """Images, pixels in [0, 1], with labels; some axes may stand before these."""

    images: Float[np.ndarray, "*any n height width channel"]
    labels: Int[np.ndarray, "*any n"]


class Index(NamedTuple):
    """Which images to learn from and to test on."""

    learn: Int[np.ndarray, "replicate n"]
    test: Int[np.ndarray, "replicate m"]


class Examples(NamedTuple):
    """The images of one task, or of several, [replicate, task, ...]."""

    learn: Batch
    test: Batch


class Descent(NamedTuple):
    """Stochastic gradient descent: steps of `batch` images, drawn with replacement."""

    steps: int
    batch: int
    momentum: float


def split(
    labels: Int[np.ndarray, " n"], classes: int, seed: int, replicates: int, *, learn: int,
    test: int,
) -> Index:  # fmt: skip
    """Independent draws of `learn` and `test` images of each class, with no image in both."""
    rng = np.random.default_rng(seed)
    where = [np.flatnonzero(labels == c) for c in range(classes)]
    drawn = [[rng.permutation(w)[: learn + test] for w in where] for _ in range(replicates)]
    parts = np.split(np.array(drawn), [learn], axis=2)
    return Index(*(part.reshape(replicates, -1) for part in parts))


def pick(pool: Pool, task: str, index: Int[np.ndarray, "replicate n"]) -> Batch:
    """The images of a task (`experiments.data.image_tasks`), as many in each replicate."""
    angle, classes = image_tasks.parse(task)
    if classes is not None:
        index = index[np.isin(pool.labels[index], list(classes))].reshape(len(index), -1)
    return Batch(image_tasks.turned(pool.images, angle)[index], pool.labels[index])


def shuffled(batch: Batch, seed: int) -> Batch:
    """The labels of each replicate in random order: nothing to learn but by heart."""
    rng = np.random.default_rng(seed)
    return batch._replace(labels=rng.permuted(batch.labels, axis=-1))


def union(one: Batch, two: Batch) -> Batch:
    return jax.tree.map(lambda *x: np.concatenate(x), one, two)


def weights_alone(variables: PyTree) -> PyTree:
    """Variables without running statistics, for a network that normalises by the images it sees."""
    return {"params": variables["params"]}


def _seen(model: Model, images: Any) -> Array:
    return images if isinstance(model, ResNet) else images.reshape(len(images), -1)


@partial(jax.jit, static_argnames=("model", "shape"))
def init(model: Model, shape: tuple[int, ...], key: Key) -> PyTree:
    """The initial variables of a network that sees images of this shape."""
    return model.init(jax.random.wrap_key_data(key), _seen(model, jnp.zeros((1, *shape))))


def _mlp(
    params: PyTree, batch: Batch, override: Mapping[str, Array] | None = None
) -> tuple[Array, dict[str, Array]]:
    """An `MLP` that shows what its units give, after the ReLU."""

    def layer(name: str) -> Callable[[PyTree, Any], Array]:
        def apply(p: PyTree, x: Any) -> Array:
            x = x.images.reshape(len(x.images), -1) if isinstance(x, Batch) else x
            y = x @ p["params"][name]["kernel"] + p["params"][name]["bias"]
            return y if name == "out" else nn.relu(y)

        return apply

    hidden = [f"hidden_{i}" for i in range(len(params["params"]) - 1)]
    chain = {name: layer(name) for name in hidden} | {"output": layer("out")}
    return sequential(chain)(params, batch, override)


def network(model: Model, normalise: str = "interpolated") -> Apply:
    """The network as the probes take it: of an MLP the units of each layer after their ReLU, of a
    ResNet what each block gives, and the logits. One object for each model, to compile once.

    normalise: "interpolated", by running statistics that are variables like others; "batch", by
    the statistics of the images seen, all at once.
    """
    resnet: Any = model
    return _mlp if isinstance(model, MLP) else _resnet(resnet, normalise)


@functools.cache
def _resnet(model: Any, normalise: str) -> Apply:

    def by_batch(variables: PyTree, x: Array, mutable: list[str], **options: Any) -> Any:
        return model.apply(variables, x, True, mutable=[*mutable, "batch_stats"], **options)

    return flax_network(
        model.apply if normalise == "interpolated" else by_batch,
        "stage?_block?",
        inputs=lambda batch: _seen(model, batch.images),
    )


def loss(
    model: Model, normalise: str = "interpolated"
) -> Callable[[PyTree, Batch], Float[Array, ""]]:
    """Mean cross-entropy in nats; one function for each model."""
    return _loss(network(model, normalise))


@functools.cache
def _loss(net: Apply) -> Callable[[PyTree, Batch], Float[Array, ""]]:

    def of(params: PyTree, batch: Batch) -> Float[Array, ""]:
        logits = net(params, batch)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return of


def correct(logits: Float[Array, "n class"], batch: Batch) -> Float[Array, " n"]:
    """1 where the class is right: a metric of the probes."""
    return (logits.argmax(-1) == batch.labels).astype(logits.dtype)


@partial(jax.jit, static_argnames=("model", "normalise"))
def accuracy(
    model: Model, params: PyTree, batch: Batch, normalise: str = "interpolated"
) -> Float[Array, ""]:
    return correct(network(model, normalise)(params, batch)[0], batch).mean()


@partial(jax.jit, static_argnames=("model", "descent"))
def train(
    model: Model,
    start: PyTree,
    batch: Batch,
    count: Int[ArrayLike, ""],
    key: Key,
    rate: ArrayLike,
    descent: Descent,
) -> PyTree:
    """Gradient descent at a constant rate on the cross-entropy of the first `count` images (of a
    ResNet normalised by each minibatch, whose statistics it follows)."""

    def cost(params: PyTree, rest: PyTree, drawn: Batch) -> tuple[Array, PyTree]:
        variables, x = {"params": params, **rest}, _seen(model, drawn.images)
        if isinstance(model, ResNet):
            logits, rest = model.apply(variables, x, True, mutable=["batch_stats"])
        else:
            logits: Any = model.apply(variables, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, drawn.labels)
        return losses.mean(), rest

    def draw(key: Array) -> Batch:
        drawn = jax.random.randint(key, (descent.batch,), 0, count)
        return jax.tree.map(lambda x: x[drawn], batch)

    rest = {name: x for name, x in start.items() if name != "params"}
    keys = jax.random.split(jax.random.wrap_key_data(key), descent.steps)
    direction, params = optax.trace(descent.momentum), start["params"]
    end = descend(cost, direction, lambda _: rate, params, keys, draw, mutable=rest)
    return {"params": end.params, **end.mutable}


def each(fn: Callable[..., PyTree], *stacked: PyTree) -> PyTree:
    """`fn` of every entry of the leading axis, one after the other: what it calls is compiled once
    for all, and on a CPU networks this small gain nothing side by side."""
    stacked = jax.tree.map(np.asarray, stacked)
    n = len(jax.tree.leaves(stacked)[0])
    return stack([fn(*jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(n)])


def stack(trees: list[PyTree], axis: int = 0) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *trees)


def aligned(model: MLP, how: str, reference: PyTree, params: PyTree, batch: Batch) -> PyTree:
    """`params` with their units in the order of the reference's (Git Re-Basin): by "weights" or,
    by the correlations over a batch, by "activations"."""
    sizes = {"model_type": "flax_mlp", "widths": list(model.widths), "outputs": model.outputs}
    spec = of(sizes).rules(sizes).spec(params)
    if how == "weights":
        maps = weight_matching(reference, params, spec)
    else:
        first, second = (_by_space(p, batch) for p in (reference, params))
        maps = activation_matching(first, second, spec)
    return change_basis(params, spec, maps)


def _by_space(params: PyTree, batch: Batch) -> dict[str, Array]:
    by_layer = features(_mlp, params, batch)
    return {f"hidden.{i}": by_layer[f"hidden_{i}"] for i in range(len(by_layer) - 1)}
