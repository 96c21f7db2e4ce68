"""The training of a ResNet in `sail_vision`, with labels or by BYOL, and its measurements.

Supervised networks are measured by their own predictions. BYOL's encoder is measured by two
classifiers on its pooled features, without further training. One is linear, fitted by ridge
regression onto the classes. The other is nearest neighbours (Wu et al., 2018). BatchNorm normalises
by the batch in training and by running statistics in evaluation. `Learner.renewed` measures these
again after weights were transformed or mixed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray, PyTree

from experiments.data import stream
from experiments.data.augment import Augment, augment, pixels
from experiments.lab import progress
from experiments.lab.config import varied
from experiments.models import presets
from experiments.models.resnet import ResNet
from experiments.studies.sail_vision.config import Config, Paradigm
from experiments.studies.sail_vision.data import Data, Examples, Scale, scale
from experiments.training import Optimizer, State, Training, init, sharding
from experiments.training.byol import Byol, Head
from experiments.training.chunks import in_chunks
from experiments.training.fit import Fit, curve
from sail_jax.align import reset_statistics

TEMPERATURE = 0.07  # how fast a neighbour's weight decreases with its distance
# The number of images evaluated at once.
CHUNK = 500
# Trainings with at least this many steps report their progress.
LONG = 1000
RECIPES: dict[str, Augment] = {
    "none": Augment(),
    "digits": Augment(shift=1, brightness=0.2, noise=0.05),
    # The augmentations of He et al. 2016 for CIFAR.
    "crop_flip": Augment(shift=4, flip=0.5),
    # The augmentations of Grill et al. 2020, App. B, without blur and hue, and with crops of at
    # least a fifth of the image, because images have 32 to 64 pixels.
    "byol": Augment(
        area=0.2, flip=0.5, brightness=0.4, contrast=0.4, saturation=0.2, grey=0.2, solarise=0.1
    ),
}
MEASURES = {"supervised": ("top1", "top5", "test_loss"), "byol": ("top1", "top5", "neighbours")}


class Learner:
    """One kind of training of one network, compiled once for all seeds and starts.

    Attributes:
      paradigm: "supervised" or "byol".
      config: The settings.
      steps: Steps of training, over which the schedules run.
      net: The network.
      image: Zeros of the shape of one image, after an axis of examples.
      scale: Mean and deviation of each channel, by which images are standardised.
      state: Creates the trainer's initial state from variables and a key.
      byol: BYOL's networks around the encoder; not used in supervised training.
      training: The optimiser.
      fitting: The trainer.
    """

    def __init__(
        self, config: Config, sizes: dict[str, Any], paradigm: Paradigm, steps: int, data: Data
    ) -> None:
        self.paradigm: Paradigm = paradigm
        self.config, self.steps = config, steps
        self.net = resnet(sizes)
        self.image = jnp.zeros((1, *data.learn.images.shape[1:]))
        self.scale = scale(data.learn.images)
        self.state = jax.jit(self._state)
        supervised = paradigm == "supervised"
        self.byol = Byol(
            partial(features, self.net),
            Head(config.contrast.hidden, config.contrast.outputs),
            Head(config.contrast.hidden, config.contrast.outputs),
            steps,
            config.contrast.target_decay,
        )
        optimizer = config.optimizer
        if not supervised:
            optimizer = varied(optimizer, rate=config.contrast.rate)
        # BYOL's encoder also contains the classifier's weights, unused
        undecayed = (*Optimizer.undecayed, "encoder/head/*")
        self.training = Training(optimizer.over(steps, undecayed=undecayed))
        loss = self._supervised if supervised else self._byol
        where = sharding.layout(config.shard)
        self.fitting = Fit(loss, self.training, where, config, config.budget.save_every)
        self._predict = jax.jit(lambda variables, x: self.net.apply(variables, self.seen(x)))
        self._features = jax.jit(self._pooled)

    def scratch(self, key: PRNGKeyArray) -> PyTree:
        """Draws initial variables of the ResNet."""
        return _initial(self.net, key, self.image)

    def _state(self, variables: PyTree, key: PRNGKeyArray) -> State:
        """Creates the state before the first step; BYOL's two heads are drawn at random."""
        first, second = jax.random.split(key)
        params, stats = variables["params"], variables["batch_stats"]
        if self.paradigm == "byol":
            width = self.net.widths[-1]
            params, stats = self.byol.init(params, stats, width, first)
        return init(self.training, params, second, stats)

    def variables(self, state: State) -> PyTree:
        """Extracts the ResNet from the trainer's state."""
        params, stats = state.params, state.mutable
        if self.paradigm == "byol":
            params, stats = params["encoder"], stats["stats"]["encoder"]
        return {"params": params, "batch_stats": stats}

    def fit(
        self,
        variables: PyTree,
        learn: Examples,
        data: Data,
        key: PRNGKeyArray,
        seed: int,
        folder: Path | None,
    ) -> tuple[PyTree, dict[str, np.ndarray]]:
        """Trains a network and measures it during training.

        It is measured before the first step and after every `config.budget.every` steps.

        - `folder`: directory for checkpoints, from which a killed training continues. None stores
          none.

        It returns the trained variables; and curves by name: `(evaluation,)` for everything in
        `MEASURES`, and "train_loss", the loss of the minibatch at each evaluation but the last.
        """
        every = self.config.budget.every

        def batch(t: int) -> Examples:
            size = self.config.budget.batch
            return learn.where(stream.indices(t, examples=len(learn.labels), size=size, seed=seed))

        trained = self.fitting.run(
            self.fitting.layout.lay(self.state(variables, key)),
            batch,
            self.steps,
            folder,
            log_every=every,
            evaluate=lambda state: self.measure(self.variables(state), data),
            evaluate_every=every,
            say=progress.say if self.steps >= LONG else None,
        )
        curves = {name: curve(trained, name) for name in MEASURES[self.paradigm]}
        curves["train_loss"] = curve(trained, "loss", every)
        curves = {name: values.astype(np.float32) for name, values in curves.items()}
        return sharding.gathered(self.variables(trained.state)), curves

    def measure(self, variables: PyTree, data: Data) -> dict[str, float]:
        """Measures a network on the test images.

        It returns the entries of `MEASURES` for this kind of training: accuracies as fractions, and
        "test_loss" in nats.
        """
        if self.paradigm == "supervised":
            logits = self._over(self._predict, variables, data.test.images)
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, data.test.labels)
            return {**top(logits, data.test.labels), "test_loss": float(nats.mean())}
        bank = self._over(self._features, variables, data.learn.images)
        seen = self._over(self._features, variables, data.test.images)
        linear = ridge(bank, data.learn.labels, seen, data.classes, self.config.probe.ridge)
        near = neighbours(bank, data.learn.labels, seen, data.classes, self.config.probe.neighbours)
        nearest = top(near, data.test.labels)["top1"]
        return {**top(linear, data.test.labels), "neighbours": nearest}

    def renewed(self, variables: PyTree, images: Num[np.ndarray, "n ..."]) -> PyTree:
        """Measures BatchNorm's running statistics again.

        A mixture of statistics may have negative variances, and differs from the statistics of the
        mixed network.
        """
        sample = images[: self.config.statistics]
        starts = range(0, len(sample), CHUNK)
        batches = [self.seen(jnp.asarray(sample[i : i + CHUNK])) for i in starts]
        leaves = {
            name: (f"batch_stats/{norm}/mean", f"batch_stats/{norm}/var")
            for name, norm in normalised(self.net)
        }
        return reset_statistics(variables, partial(_convolved, self.net), batches, leaves)

    def cost(self) -> float:
        """Counts the floating-point operations of a training step."""
        # Shapes are sufficient: nothing is computed.
        key = jax.random.key(0)
        state = jax.eval_shape(lambda: self.state(self.scratch(key), key))
        n = self.config.budget.batch
        images = jax.ShapeDtypeStruct((n, *self.image.shape[1:]), jnp.float32)
        labels = jax.ShapeDtypeStruct((n,), jnp.int32)
        return self.fitting.cost(state, Examples(images, labels))  # type: ignore[arg-type]

    def seen(self, images: Num[Array, "*n height width channel"]) -> Float[Array, "..."]:
        """Standardises images for the network."""
        return standardised(images, self.scale)

    def _supervised(
        self, params: PyTree, stats: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array], PyTree]:
        """Computes the cross-entropy of augmented images, in the trainer's form."""
        images = self.seen(augment(batch.images, key, RECIPES[self.config.augment]))
        logits, stats = applied(self.net, params, stats, images)
        nats = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch.labels
        )
        return nats.mean(), {}, stats

    def _byol(
        self, params: PyTree, carried: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array], PyTree]:
        """Computes BYOL's loss of two augmented views, in the trainer's form."""
        views = (
            self.seen(augment(batch.images, k, RECIPES[self.config.contrast.views]))
            for k in jax.random.split(key)
        )
        return self.byol.loss(params, carried, *views)

    def _pooled(self, variables: PyTree, images: Array) -> Array:
        """Computes the classifier's inputs for images, under running statistics."""
        stats = variables["batch_stats"]
        return features(self.net, variables["params"], stats, self.seen(images), False)[0]

    def _over(self, fn: Callable[..., Array], variables: PyTree, images: np.ndarray) -> np.ndarray:
        """Applies a function to all images, in chunks."""
        size = min(CHUNK, len(images))
        return in_chunks(lambda at: fn(variables, images[at]), np.arange(len(images)), size)


def standardised(images: Num[Array, "*n channel"], scale: Scale) -> Float[Array, "*n channel"]:
    """Subtracts the mean of each channel and divides by its deviation."""
    mean, std = (jnp.array(x, jnp.float32) for x in scale)
    return (pixels(images) - mean) / std


def resnet(sizes: dict[str, Any]) -> ResNet:
    """Builds a ResNet."""
    net = presets.build(sizes)
    assert isinstance(net, ResNet)
    return net


def normalised(net: ResNet) -> list[tuple[str, str]]:
    """Lists each convolution with the BatchNorm that normalises it.

    It returns pairs of paths (convolution, BatchNorm), from the input to the output.
    """
    pairs = [("stem", "stem_bn")]
    for x, (s, b) in net.places().items():
        pairs += [(f"{x}/conv1", f"{x}/bn1"), (f"{x}/conv2", f"{x}/bn2")]
        if s and not b:
            pairs.append((f"{x}/proj", f"{x}/proj_bn"))
    return pairs


@partial(jax.jit, static_argnums=0)
def _initial(net: ResNet, key: PRNGKeyArray, image: Array) -> PyTree:
    """Draws initial variables, compiled once for each network and shape of images."""
    return net.init(key, image)


@partial(jax.jit, static_argnums=0)
def _convolved(net: ResNet, variables: PyTree, images: Array) -> dict[str, Array]:
    """Computes the outputs of all convolutions under running statistics, by their paths."""
    _, caught = net.apply(
        variables,
        images,
        capture_intermediates=lambda module, _: isinstance(module, nn.Conv),
        mutable=["intermediates"],
    )
    out = {}
    for name, _ in normalised(net):
        node: PyTree = caught["intermediates"]
        for part in name.split("/"):
            node = node[part]
        (out[name],) = node["__call__"]
    return out


def applied(net: ResNet, params: PyTree, stats: PyTree, images: Array) -> tuple[Array, PyTree]:
    """Applies a ResNet in training: BatchNorm normalises by the batch.

    - `images`: standardised images, `(n, height, width, channel)`.

    It returns the logits `(n, class)`, and the running statistics moved towards the batch's.
    """
    variables = {"params": params, "batch_stats": stats}
    logits, rest = net.apply(variables, images, True, mutable=["batch_stats"])
    return logits, rest["batch_stats"]


def features(
    net: ResNet, params: PyTree, stats: PyTree, images: Array, train: bool
) -> tuple[Float[Array, "n feature"], PyTree]:
    """Computes the classifier's input: the last block's output, averaged over each image.

    - `images`: standardised images, `(n, height, width, channel)`.

    It returns the features `(n, feature)`, and the running statistics, changed only if `train`.
    """
    *_, last = net.places()
    _, rest = net.apply(
        {"params": params, "batch_stats": stats},
        images,
        train,
        capture_intermediates=lambda module, _: module.name == last,
        mutable=["batch_stats", "intermediates"],
    )
    (out,) = cast(Any, rest)["intermediates"][last]["__call__"]
    return out.mean(axis=(1, 2)), rest["batch_stats"]


def top(scores: Float[np.ndarray, "n class"], labels: Int[np.ndarray, " n"]) -> dict[str, float]:
    """Computes the shares of images for which the label scores best, or among the best five.

    A class that ties with the right one counts as better.

    - `scores`: scores of the classes, `(n, class)`.
    - `labels`: the correct classes, `(n,)`.

    >>> top(np.array([[2.0, 1.0, 0.0], [1.0, 1.0, 0.0]]), np.array([0, 1]))
    {'top1': 0.5, 'top5': 1.0}
    """
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    before = (scores >= own).sum(1) - 1
    return {"top1": float((before < 1).mean()), "top5": float((before < 5).mean())}


def ridge(
    bank: Float[np.ndarray, "n feature"],
    labels: Int[np.ndarray, " n"],
    seen: Float[np.ndarray, "m feature"],
    classes: int,
    penalty: float,
) -> Float[np.ndarray, "m class"]:
    """Scores classes by ridge regression from features to one-hot classes.

    The regression has a constant and minimises the mean squared error over examples plus penalty
    |w|^2. Features are standardised first, so that their scale does not matter.

    - `bank`: features of the images for the fit, `(n, feature)`.
    - `labels`: their classes, `(n,)`.
    - `seen`: features of the images to score, `(m, feature)`.
    - `penalty`: coefficient of the squared weights, > 0.

    It returns the scores, `(m, class)`.
    """
    mean, std = bank.mean(0, dtype=np.float64), bank.std(0, dtype=np.float64)
    # A constant unit carries no information: it becomes 0 instead of 0 / 0.
    std = np.where(std > 1e-6 * std.max(initial=1e-12), std, np.inf)
    x = (bank - mean) / std
    y = np.eye(classes)[labels]
    gram = x.T @ x / len(x) + penalty * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x.T @ (y - y.mean(0)) / len(x))
    return (seen - mean) / std @ weights + y.mean(0)


def neighbours(
    bank: Float[np.ndarray, "n feature"],
    labels: Int[np.ndarray, " n"],
    seen: Float[np.ndarray, "m feature"],
    classes: int,
    count: int,
) -> Float[np.ndarray, "m class"]:
    """Scores classes by the nearest neighbours of an image.

        score of class c = sum over neighbours of that class of exp((cosine - 1) / 0.07)

    - `bank`: features of the images for comparison, `(n, feature)`.
    - `labels`: their classes, `(n,)`.
    - `seen`: features of the images to score, `(m, feature)`.
    - `count`: number of neighbours with the largest cosines; at most n.

    It returns the scores, `(m, class)`.

    References:
      Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018
      (arXiv 1805.01978).
    """
    unit = lambda x: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)  # noqa: E731
    units, scores = unit(bank), []
    for i in range(0, len(seen), CHUNK):
        near = unit(seen[i : i + CHUNK]) @ units.T
        at = np.argpartition(-near, count - 1, axis=1)[:, :count]
        # Minus 1, the largest cosine, so that the exponential cannot overflow.
        votes = np.exp((np.take_along_axis(near, at, axis=1) - 1) / TEMPERATURE)
        one_hot = np.eye(classes)[labels[at]]
        scores.append((votes[..., None] * one_hot).sum(1))
    return np.concatenate(scores)
