"""What `growth_training` trains: a network and the examples it learns from, and how it learns."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    """What goes in, and the labels that should come out."""

    inputs: Array
    labels: Array


class Data(NamedTuple):
    """Examples to learn from (of text, all of it in one line), and those held out."""

    learn: Batch
    held_out: Batch


class Schedule(NamedTuple):
    """Adam with a rate that rises linearly over `warmup` steps and then stays."""

    steps: int
    every: int
    batch: int
    rate: float
    warmup: int
    ramp: int


class Masked(NamedTuple):
    """Grown units that a ramp brings in (MSG): the source's spec, and the new size by space."""

    spec: Spec
    sizes: tuple[tuple[str, int], ...]

    @property
    def maps(self) -> dict[str, SpaceMap]:
        return {name: growth.pad(self.spec.space(name).size, new) for name, new in self.sizes}

    def view(self, variables: PyTree, mask: ArrayLike) -> tuple[PyTree, Array | None]:
        """The parameters under the mask, and the weights of the stream in a LayerNorm."""
        maps = self.maps
        stream = [n for n in maps if "layernorm" in self.spec.space(n).nonlinearity.split()]
        weights = jnp.where(growth.grown(maps[stream[0]]), mask, 1.0) if stream else None
        return growth.mask_units(variables, self.spec, maps, mask), weights


@partial(jax.jit, static_argnums=0)
def init(net: nn.Module, data: Data, key: PRNGKeyArray) -> PyTree:
    return net.init(key, draw(net, data, key, 1).inputs)


def of_text(seed: int, *, context: int, held_out: int) -> Data:
    """All of the text to learn from, and windows of what is held out of it."""
    learn, unseen = text.load()
    starts = np.random.default_rng(seed).integers(len(unseen) - context - 1, size=held_out)
    line = jnp.asarray(learn)
    return Data(Batch(line, line), _windows(jnp.asarray(unseen), starts, context))


def of_images(pool: Pool, seed: int, replicates: int, *, held_out: int, rows: bool) -> list[Data]:
    """Images for every seed, a split for each; in rows, or as images."""
    n = len(pool.labels)
    sizes = {"examples": n, "train": n - held_out, "validation": held_out}
    split = image_tasks.split(seed, replicates, **sizes)
    images = pool.images.reshape(n, -1) if rows else pool.images
    pick = lambda i: Batch(jnp.asarray(images[i]), jnp.asarray(pool.labels[i]))  # noqa: E731
    return [Data(pick(a), pick(b)) for a, b in zip(split.train, split.validation, strict=True)]


def _windows(line: Array, starts: ArrayLike, context: int) -> Batch:
    window = line[jnp.asarray(starts)[:, None] + jnp.arange(context + 1)].astype(int)
    return Batch(window[:, :-1], window[:, 1:])


def draw(net: nn.Module, data: Data, key: PRNGKeyArray, count: int) -> Batch:
    """Examples to learn from, with replacement."""
    n = len(data.learn.inputs)
    if isinstance(net, GPT):
        starts = jax.random.randint(key, (count,), 0, n - net.context)
        return _windows(data.learn.inputs, starts, net.context)
    index = jax.random.randint(key, (count,), 0, n)
    return jax.tree.map(lambda x: x[index], data.learn)


def evaluate(
    net: nn.Module, variables: PyTree, batch: Batch, train: bool = False, weights: Any = None
) -> tuple[Float[Array, ""], PyTree]:
    """Mean cross-entropy in nats, and the variables that are no parameters (running statistics,
    which `train` updates). `weights`: of the stream's units in every LayerNorm (MSG)."""
    apply: Callable[..., Any] = net.apply
    with nn.intercept_methods(partial(_masked_norm, weights)):
        if isinstance(net, ResNet) and train:
            logits, rest = apply(variables, batch.inputs, True, mutable=["batch_stats"])
        else:
            logits = apply(variables, batch.inputs)
            rest = {k: v for k, v in variables.items() if k != "params"}
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), rest


def _masked_norm(weights: Any, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
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
    """Variables and Adam's state in the end, and the held-out loss before the first step and after
    every `schedule.every`. Equal keys give equal minibatches to all networks."""

    def loss(
        params: PyTree, rest: PyTree, timed_batch: tuple[Batch, Any], train: bool = True
    ) -> Any:
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
    """Of one training step: 6 N D, N being the parameters that are applied to each of the D tokens,
    images, or (of a convolution) positions; embeddings are looked up, not applied."""
    total = 0.0
    for path, leaf in jax.tree.leaves_with_path(variables["params"]):
        names = [str(entry.key) for entry in path]
        if not any("embed" in name and name != "unembed" for name in names):
            total += np.prod(np.shape(leaf)) * _positions(net, names[0], data)
    return 6 * float(total) * batch


def _positions(net: nn.Module, module: str, data: Data) -> int:
    if isinstance(net, GPT):
        return net.context
    if isinstance(net, MLP) or module == "head":
        return 1
    stage = int(module[len("stage")]) if module.startswith("stage") else 0
    return (-(-data.learn.inputs.shape[1] // 2**stage)) ** 2
