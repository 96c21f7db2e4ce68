"""Data for training grown networks, and the common training loop.

`growth_ways` makes the initial large networks for `train`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.module import InterceptorContext
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from experiments.data import image_tasks, text
from experiments.data.files import Pool
from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.training.descent import descend
from sail_jax import growth
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec

TASKS = {"text": "flax_gpt", "images_mlp": "flax_mlp", "images_resnet": "flax_resnet"}


class Batch(NamedTuple):
    """Inputs with their labels.

    Attributes:
      inputs: Tokens of shape (n, context), images (n, side, side, channel), or images as rows (n,
        pixels).
      labels: The tokens that come next, of shape (n, context), or classes of shape (n,).
    """

    inputs: Array
    labels: Array


class Data(NamedTuple):
    """The examples of one repetition.

    Attributes:
      learn: The training examples. For text, inputs and labels are both the whole text, of shape
        (characters,), from which `draw` takes windows.
      held_out: The examples on which losses are measured.
    """

    learn: Batch
    held_out: Batch


class Schedule(NamedTuple):
    """A training with Adam, with a linear warmup over `warmup` steps and a constant learning rate.

    Attributes:
      steps: Number of steps.
      every: Steps between two evaluations, a divisor of `steps`.
      batch: Examples per step.
      rate: The highest learning rate.
      warmup: Steps of the warmup.
      ramp: Steps over which masked structural growth activates its units.
    """

    steps: int
    every: int
    batch: int
    rate: float
    warmup: int
    ramp: int


class Masked(NamedTuple):
    """The units of a grown network that a ramp activates, in masked structural growth.

    Attributes:
      spec: The axes of the small network.
      sizes: For each feature space that grows, its name and its new size.
    """

    spec: Spec
    sizes: tuple[tuple[str, int], ...]

    @property
    def maps(self) -> dict[str, SpaceMap]:
        """Returns, for each space that grows, the map that pads it with new units."""
        return {name: growth.pad(self.spec.space(name).size, new) for name, new in self.sizes}

    def view(self, variables: PyTree, mask: ArrayLike) -> tuple[PyTree, Array | None]:
        """Applies the mask to the parameters of the large network.

        - `mask`: how active new units are, from 0 (absent) to 1 (fully active).

        It returns the masked variables; and the weight of each unit in a LayerNorm of the
        residual stream, of shape (width,). The weight is None if no growing space is normalised by
        a LayerNorm.
        """
        maps = self.maps
        stream = [n for n in maps if "layernorm" in self.spec.space(n).nonlinearity.split()]
        weights = jnp.where(growth.grown(maps[stream[0]]), mask, 1.0) if stream else None
        return growth.mask_units(variables, self.spec, maps, mask), weights


@partial(jax.jit, static_argnums=0)
def init(net: nn.Module, data: Data, key: PRNGKeyArray) -> PyTree:
    """Draws the initial variables of a network.

    Args:
      net: The network; static.
      data: The data, for the shape of an input.
      key: A random key.

    Returns:
      The variables: `params`, and running statistics if the network has any.
    """
    return net.init(key, draw(net, data, key, 1).inputs)


def of_text(seed: int, *, context: int, held_out: int) -> Data:
    """Loads the text of Python's standard library as data.

    Args:
      seed: The seed of the held-out windows.
      context: Characters in a window.
      held_out: Number of held-out windows.

    Returns:
      The data, as tokens.
    """
    learn, unseen = text.load()
    starts = np.random.default_rng(seed).integers(len(unseen) - context - 1, size=held_out)
    line = jnp.asarray(learn)
    return Data(Batch(line, line), _windows(jnp.asarray(unseen), starts, context))


def of_images(pool: Pool, seed: int, replicates: int, *, held_out: int, rows: bool) -> list[Data]:
    """Splits images into data for every repetition.

    Args:
      pool: The images.
      seed: The seed of the splits.
      replicates: Number of repetitions.
      held_out: Number of held-out images in each split.
      rows: Whether to flatten images into rows, for an MLP.

    Returns:
      The data of each repetition. All other images are training images.
    """
    n = len(pool.labels)
    sizes = {"examples": n, "train": n - held_out, "validation": held_out}
    split = image_tasks.split(seed, replicates, **sizes)
    images = pool.images.reshape(n, -1) if rows else pool.images
    pick = lambda i: Batch(jnp.asarray(images[i]), jnp.asarray(pool.labels[i]))  # noqa: E731
    return [Data(pick(a), pick(b)) for a, b in zip(split.train, split.validation, strict=True)]


def _windows(line: Array, starts: ArrayLike, context: int) -> Batch:
    """Returns the windows of tokens that begin at `starts`; labels are one token ahead."""
    window = line[jnp.asarray(starts)[:, None] + jnp.arange(context + 1)].astype(int)
    return Batch(window[:, :-1], window[:, 1:])


def draw(net: nn.Module, data: Data, key: PRNGKeyArray, count: int) -> Batch:
    """Draws training examples, with replacement.

    Args:
      net: The network; a GPT gets windows of its context's length.
      data: The data.
      key: A random key.
      count: Number of examples.

    Returns:
      The batch, of `count` examples.
    """
    n = len(data.learn.inputs)
    if isinstance(net, GPT):
        starts = jax.random.randint(key, (count,), 0, n - net.context)
        return _windows(data.learn.inputs, starts, net.context)
    index = jax.random.randint(key, (count,), 0, n)
    return jax.tree.map(lambda x: x[index], data.learn)


def evaluate(
    net: nn.Module,
    variables: PyTree,
    batch: Batch,
    train: bool = False,
    weights: Array | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """Computes the mean cross-entropy of a network on a batch.

    Args:
      net: The network.
      variables: Its variables.
      batch: The batch.
      train: Whether a ResNet normalises by the batch and updates its running statistics.
      weights: The weight of each unit of the stream in every LayerNorm (for masked structural
        growth), of shape (width,); None for ordinary LayerNorms.

    Returns:
      The loss in nats, a scalar; and the variables other than `params`, updated if `train`.
    """
    apply: Callable[..., Any] = net.apply
    with nn.intercept_methods(partial(_masked_norm, weights)):
        if isinstance(net, ResNet) and train:
            logits, rest = apply(variables, batch.inputs, True, mutable=["batch_stats"])
        else:
            logits = apply(variables, batch.inputs)
            rest = {k: v for k, v in variables.items() if k != "params"}
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), rest


def _masked_norm(
    weights: Array | None,
    call: Callable[..., PyTree],
    args: Sequence[Array],
    kwargs: Mapping[str, PyTree],
    context: InterceptorContext,
) -> PyTree:
    """Replaces a call of a LayerNorm by one that weights the units, if there are weights."""
    if weights is None or not isinstance(context.module, nn.LayerNorm):
        return call(*args, **kwargs)
    own = context.module.variables["params"]
    (x,) = args
    return growth.masked_layernorm(x, weights) * own["scale"] + own["bias"]


ADAM = optax.scale_by_adam()


@partial(jax.jit, static_argnames=("net", "schedule", "masked"))
def train(
    net: nn.Module,
    schedule: Schedule,
    variables: PyTree,
    state: PyTree,
    data: Data,
    key: PRNGKeyArray,
    masked: Masked | None = None,
) -> tuple[PyTree, PyTree, Float[Array, "evaluation"]]:
    """Trains a network on random minibatches, and measures the held-out loss during training.

    All networks with the same key use the same minibatches.

    Args:
      net: The network; static.
      schedule: The length and rate of the training; static.
      variables: The variables before the first step.
      state: The state of `ADAM`.
      data: The data.
      key: The key of the minibatches.
      masked: The units that a ramp activates; None if all units are active. Static.

    Returns:
      The variables and Adam's state after the last step, and the held-out loss before the first
      step and after every `schedule.every`, of shape (steps / every + 1,).
    """

    def loss(
        params: PyTree, rest: PyTree, timed_batch: tuple[Batch, Any], train: bool = True
    ) -> Any:
        # The mask of new units depends on the step, so that the step is part of the batch.
        batch, t = timed_batch
        seen, weights = {"params": params, **rest}, None
        if masked is not None:
            seen, weights = masked.view(seen, growth.ramp(t, 0, schedule.ramp))
        return evaluate(net, seen, batch, train=train, weights=weights)

    end = descend(
        loss,
        ADAM,
        lambda t: schedule.rate * jnp.minimum(1, (t + 1) / schedule.warmup),
        variables["params"],
        jnp.arange(schedule.steps),
        lambda t: (draw(net, data, jax.random.fold_in(key, t), schedule.batch), t),
        mutable={k: v for k, v in variables.items() if k != "params"},
        memory=state,
        measure=lambda params, rest, t: loss(params, rest, (data.held_out, t), False)[0],
        every=schedule.every,
    )
    return {"params": end.params, **end.mutable}, end.memory, end.measured


def flops(net: nn.Module, variables: PyTree, data: Data, batch: int) -> float:
    """Estimates the floating-point operations of one training step, as 6 N D.

    N is the number of parameters, and D the number of times that each is applied: once for each
    token, image or position of a convolution. Embeddings are looked up, not applied, and are
    excluded.

    Args:
      net: The network.
      variables: Its variables, or their shapes.
      data: The data, for the size of an image.
      batch: Examples per step.

    Returns:
      The number of operations.
    """
    total = 0.0
    for path, leaf in jax.tree.leaves_with_path(variables["params"]):
        names = [str(entry.key) for entry in path]
        if not any("embed" in name and name != "unembed" for name in names):
            total += np.prod(np.shape(leaf)) * _positions(net, names[0], data)
    return 6 * float(total) * batch


def _positions(net: nn.Module, module: str, data: Data) -> int:
    """Returns how often an example uses a module's parameters: per token or pixel."""
    if isinstance(net, GPT):
        return net.context
    if isinstance(net, MLP) or module == "head":
        return 1
    # Each stage except the first halves the sides of the image.
    stage = int(module[len("stage")]) if module.startswith("stage") else 0
    return (-(-data.learn.inputs.shape[1] // 2**stage)) ** 2
