"""The images, networks and training of `cross_task_linearity`.

All tasks draw the same number of images from each class, so that their test sets have the same
shape and can be joined. For the probes, BatchNorm's running statistics are parameters like all
others, and are interpolated. The alternative ignores them and normalises by the probed images.
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
from experiments.studies.cross_task_linearity.config import Network
from experiments.training.descent import descend
from sail_jax.align import activation_matching, weight_matching
from sail_jax.architectures import of
from sail_jax.basis.change_basis import change_basis
from sail_jax.probe import Apply, features, flax_network, sequential

Model = MLP | ResNet
# The data of a random key. NumPy can stack arrays, but not keys.
Key = UInt32[Array, "2"]


class Batch(NamedTuple):
    """Images with labels.

    Other axes, such as replicates and tasks, may come before the axes given here.

    Attributes:
      images: Pixels in [0, 1], `(..., n, height, width, channel)`.
      labels: Classes, `(..., n)`.
    """

    images: Float[np.ndarray, "*any n height width channel"]
    labels: Int[np.ndarray, "*any n"]


class Index(NamedTuple):
    """The images of the pool that are used for training and for testing.

    Attributes:
      learn: Indices of the training images, `(replicate, n)`.
      test: Indices of the test images, `(replicate, m)`.
    """

    learn: Int[np.ndarray, "replicate n"]
    test: Int[np.ndarray, "replicate m"]


class Examples(NamedTuple):
    """The images of one or more tasks.

    Attributes:
      learn: Training images; all leaves are `(replicate, task, ...)`.
      test: Test images; all leaves are `(replicate, task, ...)`.
    """

    learn: Batch
    test: Batch


def split(
    labels: Int[np.ndarray, " n"], classes: int, seed: int, replicates: int, *, learn: int,
    test: int,
) -> Index:  # fmt: skip
    """Draws training and test images, the same number from each class.

    Draws are independent between repetitions. Within one repetition no image is in both sets.

    - `labels`: the class of every image of the pool, `(n,)`.
    - `classes`: number of classes. Each needs at least `learn` + `test` images.
    - `seed`: seed of the draws, >= 0.

    It returns indices of the images, `(replicate, class, learn)` and `(replicate, class, test)`.
    """
    rng = np.random.default_rng(seed)
    where = [np.flatnonzero(labels == c) for c in range(classes)]
    drawn = [[rng.permutation(w)[: learn + test] for w in where] for _ in range(replicates)]
    parts = np.split(np.array(drawn), [learn], axis=2)
    return Index(*(part.reshape(replicates, -1) for part in parts))


def pick(pool: Pool, task: str, index: Int[np.ndarray, "replicate n"]) -> Batch:
    """Gathers the images of a task.

    - `index`: images from which the task's images are taken, `(replicate, n)`.

    It returns the images, rotated by the task's angle, and their labels: `(replicate, m, ...)`,
    the same number in each repetition.

    It raises `ValueError` if the task's name is unknown.
    """
    angle, classes = image_tasks.parse(task)
    if classes is not None:
        index = index[np.isin(pool.labels[index], list(classes))].reshape(len(index), -1)
    return Batch(image_tasks.turned(pool.images, angle)[index], pool.labels[index])


def shuffled(batch: Batch, seed: int) -> Batch:
    """Permutes the labels of each repetition, which can then only be memorised."""
    rng = np.random.default_rng(seed)
    return batch._replace(labels=rng.permuted(batch.labels, axis=-1))


def union(one: Batch, two: Batch) -> Batch:
    """Joins two sets of images along their first axis."""
    return jax.tree.map(lambda *x: np.concatenate(x), one, two)


def weights_alone(variables: PyTree) -> PyTree:
    """Drops running statistics, for a network that normalises by its input images."""
    return {"params": variables["params"]}


def _seen(model: Model, images: Array | np.ndarray) -> Array | np.ndarray:
    """Reshapes images for the model: unchanged for a ResNet, as rows for an MLP."""
    return images if isinstance(model, ResNet) else images.reshape(len(images), -1)


@partial(jax.jit, static_argnames=("model", "shape"))
def init(model: Model, shape: tuple[int, ...], key: Key) -> PyTree:
    """Draws the initial variables of a network."""
    return model.init(jax.random.wrap_key_data(key), _seen(model, jnp.zeros((1, *shape))))


def _mlp(
    params: PyTree, batch: Batch, override: Mapping[str, Array] | None = None
) -> tuple[Array, dict[str, Array]]:
    """Applies an `MLP` and returns its features: the units of each hidden layer after their ReLU.

    Features can be replaced by given ones, as required for stitching. The Flax module only gives
    access to the units before their ReLU.
    """

    def layer(name: str) -> Callable[[PyTree, Any], Array]:
        def apply(p: PyTree, x: PyTree) -> Array:
            x = x.images.reshape(len(x.images), -1) if isinstance(x, Batch) else x
            y = x @ p["params"][name]["kernel"] + p["params"][name]["bias"]
            return y if name == "out" else nn.relu(y)

        return apply

    hidden = [f"hidden_{i}" for i in range(len(params["params"]) - 1)]
    chain = {name: layer(name) for name in hidden} | {"output": layer("out")}
    return sequential(chain)(params, batch, override)


def network(model: Model, normalise: str = "interpolated") -> Apply:
    """Creates the function that the probes call in place of a model.

    The features of an MLP are the units of each hidden layer after their ReLU. The features of a
    ResNet are the outputs of its blocks. Equal arguments give the same function object, so that the
    probes compile once for each.
    """
    return _mlp if isinstance(model, MLP) else _resnet(model, normalise)  # type: ignore[arg-type]


# Cached, because the probes compile again for each function object.
@functools.cache
def _resnet(model: Any, normalise: str) -> Apply:
    """Creates `network` for a ResNet."""

    # `train=True` normalises by the batch. The returned running statistics are dropped
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
    """Creates the mean cross-entropy of a network, in nats."""
    return _loss(network(model, normalise))


@functools.cache
def _loss(net: Apply) -> Callable[[PyTree, Batch], Float[Array, ""]]:
    """Creates `loss` of a network in the form that the probes require."""

    def of(params: PyTree, batch: Batch) -> Float[Array, ""]:
        logits = net(params, batch)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return of


def correct(logits: Float[Array, "n class"], batch: Batch) -> Float[Array, " n"]:
    """Marks the images for which the label has the largest logit.

    The probes average this metric.
    """
    return (logits.argmax(-1) == batch.labels).astype(logits.dtype)


@partial(jax.jit, static_argnames=("model", "normalise"))
def accuracy(
    model: Model, params: PyTree, batch: Batch, normalise: str = "interpolated"
) -> Float[Array, ""]:
    """Computes the fraction of images that a network classifies correctly."""
    return correct(network(model, normalise)(params, batch)[0], batch).mean()


@partial(jax.jit, static_argnames=("model", "how"))
def train(
    model: Model,
    start: PyTree,
    batch: Batch,
    count: Int[ArrayLike, ""],
    key: Key,
    rate: ArrayLike,
    how: Network,
) -> PyTree:
    """Trains a network by stochastic gradient descent at a constant rate on the cross-entropy.

    A ResNet normalises by each minibatch, and its running statistics follow those of the
    minibatches. The rate is traced; the field `how.rate` is ignored.

    - `count`: number of images from which minibatches are drawn. It is not static: tasks of
      different sizes share one compiled program if they are padded to one length.
    """

    def cost(params: PyTree, rest: PyTree, drawn: Batch) -> tuple[Array, PyTree]:
        variables, x = {"params": params, **rest}, _seen(model, drawn.images)
        if isinstance(model, ResNet):
            logits, rest = model.apply(variables, x, True, mutable=["batch_stats"])
        else:
            logits = jnp.asarray(model.apply(variables, x))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, drawn.labels)
        return losses.mean(), rest

    def draw(key: Array) -> Batch:
        # Below `count`, so that padding is never drawn.
        drawn = jax.random.randint(key, (how.batch,), 0, count)
        return jax.tree.map(lambda x: x[drawn], batch)

    # Values that gradients do not change: the running statistics of a ResNet; none for an MLP.
    rest = {name: x for name, x in start.items() if name != "params"}
    keys = jax.random.split(jax.random.wrap_key_data(key), how.steps)
    direction, params = optax.trace(how.momentum), start["params"]
    end = descend(cost, direction, lambda _: rate, params, keys, draw, mutable=rest)
    return {"params": end.params, **end.mutable}


def each(fn: Callable[..., PyTree], *stacked: PyTree) -> PyTree:
    """Applies a function to every entry of the leading axis, one after another.

    The function's programs are compiled once for all entries. On a CPU, networks of this size do
    not benefit from running in parallel.
    """
    stacked = jax.tree.map(np.asarray, stacked)
    n = len(jax.tree.leaves(stacked)[0])
    return stack([fn(*jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(n)])


def repeated(tree: PyTree, like: PyTree) -> PyTree:
    """Repeats every entry of the leading axis along a second one, as long as in `like`."""
    count = jax.tree.leaves(like)[0].shape[1]
    return jax.tree.map(lambda x: np.broadcast_to(x[:, None], (len(x), count, *x.shape[1:])), tree)


def stack(trees: list[PyTree], axis: int = 0) -> PyTree:
    """Stacks trees of arrays leaf by leaf."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *trees)


def aligned(model: MLP, how: str, reference: PyTree, params: PyTree, batch: Batch) -> PyTree:
    """Permutes the hidden units of an MLP to match a reference network.

    It returns `params` with its hidden units permuted, which does not change its function.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836).
    """
    sizes = {"model_type": "flax_mlp", "widths": list(model.widths), "outputs": model.outputs}
    spec = of(sizes).rules(sizes).spec(params)
    if how == "weights":
        maps = weight_matching(reference, params, spec)
    else:
        first, second = (_by_space(p, batch) for p in (reference, params))
        maps = activation_matching(first, second, spec)
    return change_basis(params, spec, maps)


def _by_space(params: PyTree, batch: Batch) -> dict[str, Array]:
    """Computes the activations of an MLP by the spec's names of its hidden spaces."""
    by_layer = features(_mlp, params, batch)  # the hidden layers, and the output
    return {f"hidden.{i}": by_layer[f"hidden_{i}"] for i in range(len(by_layer) - 1)}
