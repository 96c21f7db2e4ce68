"""The training behind each part of `cross_task_linearity`.

`parts` measures the trained networks, and `run` names the results.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, PyTree

from experiments.data.files import DataError, refused
from experiments.lab.config import varied
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.studies.cross_task_linearity import models
from experiments.studies.cross_task_linearity import parts as measure
from experiments.studies.cross_task_linearity.config import PARTS, Config, Network
from experiments.studies.cross_task_linearity.models import Batch, Examples

SETTINGS = ("one task", "two tasks")
WAYS = ("none", "weight matching", "activation matching", "pre-trained")
TARGETS = ("the same images", "rotated images")
LABELS = ("true", "random", "none")
STATISTICS = ("interpolated", "batch")


class Runs:
    """The data of a config, and for each part a method that trains networks and measures them.

    It raises `DataError`, a ValueError, if data are missing or have too few images of a class.

    Attributes:
      config: The config of the run.
      pool: All images and their labels.
      index: The training and test images, by repetition and class.
      mlp: The architecture of the MLP.
      resnet: The architecture of the ResNet, one block per stage.
      tasks: Names of the MLP's fine-tuning tasks, one for each angle.
      middle: The middle one of these.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        classes = config.data.classes
        with refused():
            if config.learn is None or config.test is None:
                self.pool, count = config.data.published()
                parts = np.split(np.arange(len(self.pool.labels)), [count])
                self.index = models.Index(*(np.tile(x, (config.replicates, 1)) for x in parts))
            else:
                self.pool = config.data.pool(config.seed)
                labels = self.pool.labels
                config.check_left(int(np.bincount(labels, minlength=classes).min()))
                self.index = models.split(
                    labels, classes, config.seed, config.replicates,
                    learn=config.learn, test=config.test,
                )  # fmt: skip
        self.mlp = MLP(config.mlp.widths, classes)
        self.resnet = ResNet(config.resnet.widths, config.resnet.blocks, classes)
        self.tasks = [f"rotate {angle:g}" for angle in config.angles]
        self.middle = self.tasks[len(self.tasks) // 2 - 1]

    def keys(self, part: str, count: int) -> np.ndarray:
        """Creates random keys that are not used by any other part.

        It returns data of the keys, `(replicate, count, 2)`.

        It raises `ValueError` if the part is unknown.
        """
        own = jax.random.fold_in(jax.random.key(self.config.seed), (*PARTS, "base").index(part))
        keys = jax.random.split(own, (self.config.replicates, count))
        return np.asarray(jax.random.key_data(keys))

    def data(self, *tasks: str) -> Examples:
        """Gathers the images of tasks with the same number of images.

        It returns training and test images, `(replicate, task, ...)`.
        """
        picked = [[models.pick(self.pool, t, part) for t in tasks] for part in self.index]
        for of_part in picked:
            for task, batch in zip(tasks, of_part, strict=True):
                if (n := batch.labels.shape[1]) != (first := of_part[0].labels.shape[1]):
                    raise DataError(
                        f"splits must have equally many images; {task!r} has {n} and {tasks[0]!r} "
                        f"{first} of the publisher's; learn and test draw equally many of each "
                        "class"
                    )
        return Examples(*(models.stack(of_part, 1) for of_part in picked))

    def train(
        self,
        model: models.Model,
        start: PyTree,
        learn: Batch,
        keys: np.ndarray,
        rate: ArrayLike,
        times: int = 1,
        steps: int | None = None,
    ) -> PyTree:
        """Trains every model of a stack with the config's settings for its architecture.

        - `start`: variables before the first step, `(replicate, model, ...)`.
        - `learn`: training images, `(replicate, model, n, ...)`.
        - `keys`: data of random keys, `(replicate, model, 2)`.
        - `rate`: learning rate; an array broadcasts to `(replicate, model)`.
        - `times`: factor on the number of steps. Momentum is reset each time.
        - `steps`: the number of steps; None for the config's.
        """
        how = self.how(model) if steps is None else varied(self.how(model), steps=steps)
        count = learn.labels.shape[-1]
        # Images are padded to one length, so that training is compiled once.
        rest = self.index.learn.shape[1] - count

        def fit(params: PyTree, learn: Batch, key: models.Key, rate: ArrayLike) -> PyTree:
            padded = jax.tree.map(
                lambda x: np.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))), learn
            )
            # A loop outside the compiled program, in which the number of steps is static.
            rounds = np.asarray(key)[None]
            if times > 1:
                split = jax.random.split(jax.random.wrap_key_data(key), times)
                rounds = np.asarray(jax.random.key_data(split))
            for key in rounds:
                params = models.train(model, params, padded, count, key, rate, how)
            return params

        rates = np.broadcast_to(np.asarray(rate, np.float32), keys.shape[:-1])
        return measure.of_each(fit, start, learn, keys, rates)

    def how(self, model: models.Model) -> Network:
        """Returns the training settings of an architecture."""
        return self.config.resnet if isinstance(model, ResNet) else self.config.mlp

    def init(self, model: models.Model, keys: np.ndarray) -> PyTree:
        """Draws the initial variables of a stack of models."""
        return measure.of_each(partial(models.init, model, self.pool.images.shape[1:]), keys)

    def rotations(self) -> dict[str, Any]:
        """Pre-trains the MLP on upright images and fine-tunes it on each rotation.

        It returns the models that the parts on rotations receive as `kept`:
        - "base": the pre-trained one, `(replicate, 1, ...)`.
        - "experts": one for each angle, `(replicate, task, ...)`.
        """
        k, rate = len(self.tasks), self.config.mlp.rate
        keys = self.keys("base", 2 + k)
        start, upright = self.init(self.mlp, keys[:, :1]), self.data("upright").learn
        base = self.train(self.mlp, start, upright, keys[:, 1:2], rate)
        tuned = self.train(
            self.mlp, repeated(base, k), self.data(*self.tasks).learn, keys[:, 2:], rate
        )
        return {"base": base, "experts": tuned}

    def rotated(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "rotated": MLPs fine-tuned on rotated images."""
        tests = self.data(*self.tasks).test
        return measure.rotated(self.mlp, kept["experts"], tests, self.config.alphas)

    def scratch(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "scratch": pairs of MLPs with and without pre-training.

        In the first setting both models learn upright images. In the second each learns its own
        rotation. Each pair is measured unaligned, after the second model was aligned to the first
        by weights or by activations, and after both were fine-tuned from the base instead.

        It returns the results of `parts.halfway`, `(replicate, setting, way, ...)`, in the order of
        `SETTINGS` and `WAYS`.
        """
        tasks = ("upright", "upright", self.middle, self.tasks[-1])
        # Keys of each model: its initial weights, its own training, its training from the base.
        keys, data = self.keys("scratch", 3 * len(tasks)), self.data(*tasks)
        first, second, third = (keys[:, i :: len(SETTINGS) + 1] for i in range(3))
        # Unlike in `rotations`, every model has its own initial weights.
        starts = self.init(self.mlp, first)
        own = self.train(self.mlp, starts, data.learn, second, self.config.mlp.rate)
        base = repeated(kept["base"], len(tasks))
        tuned = self.train(self.mlp, base, data.learn, third, self.config.mlp.rate)
        a, b, batch = [], [], []
        for r in range(self.config.replicates):
            for i in (0, 2):
                at = lambda tree, j, r=r: jax.tree.map(lambda x: x[r, j], tree)  # noqa: E731
                left, right = at(own, i), at(own, i + 1)
                # Aligned on training images, measured on test images.
                seen = models.union(at(data.learn, i), at(data.learn, i + 1))
                matched = [
                    models.aligned(self.mlp, how, left, right, seen)
                    for how in ("weights", "activations")
                ]
                a += [left, left, left, at(tuned, i)]
                b += [right, *matched, at(tuned, i + 1)]
                batch += [models.union(at(data.test, i), at(data.test, i + 1))] * len(WAYS)
        measured = models.each(
            partial(measure.halfway, self.mlp, ""), *map(models.stack, (a, b, batch))
        )
        shape = (self.config.replicates, len(SETTINGS), len(WAYS))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), measured)

    def averaging(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "averaging": models fine-tuned on one rotation at different learning rates.

        It returns "sets", the results of `parts.averaging`; and "line", the results of
        `parts.along_the_line` for the experts of `kept`.
        """
        c, data = self.config, self.data(self.middle)
        keys = self.keys("averaging", c.members)
        learn = repeated(data.learn, c.members)
        base = repeated(kept["base"], c.members)
        tuned = self.train(self.mlp, base, learn, keys, np.geomspace(*c.rates, c.members))
        tests = self.data(*self.tasks).test
        line = np.linspace(0, 1, c.line_points)
        return {
            "sets": measure.averaging(self.mlp, tuned, only(data.test)),
            "line": measure.along_the_line(self.mlp, kept["experts"], tests, line),
        }

    def arithmetic(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "arithmetic": sums and negatives of the experts' task vectors."""
        tests = self.data(*self.tasks).test
        base = only(kept["base"])
        return measure.arithmetic(self.mlp, base, kept["experts"], tests, self.config.scales)

    def stitching(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "stitching": features of some models in the upper layers of others."""
        tests, upright = self.data(*self.tasks).test, only(self.data("upright").test)
        arguments = (only(kept["base"]), kept["experts"], tests, upright)
        return measure.stitching(self.mlp, *arguments, self.config.stitch_scales)

    def split_classes(self, _: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "split_classes": ResNets pre-trained on some classes, fine-tuned on
        others."""
        first, *others = self.config.splits
        keys, rate = self.keys("split_classes", 2 + len(others)), self.config.resnet.rate
        start = self.init(self.resnet, keys[:, :1])
        base = self.train(self.resnet, start, self.data(first).learn, keys[:, 1:2], rate)
        data = self.data(*others)
        start = repeated(base, len(others))
        tuned = self.train(self.resnet, start, data.learn, keys[:, 2:], rate)
        return measure.split_classes(self.resnet, tuned, data.test, self.config.alphas)

    def random_labels(self, _: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "random_labels": networks pre-trained on true labels, random ones or none.

        Two models are fine-tuned from each base, one at the full and one at half the learning rate.
        They are fine-tuned on the images of pre-training, or on rotated ones, always with true
        labels. "None" means initial weights.

        It returns measurements of "mlp" and of "resnet":
        - "learned": the accuracy of the bases on the labels of pre-training,
          `(replicate, labels)`.
        - "interpolated" and, for the ResNet, "batch": the results of `parts.halfway` by how
          BatchNorm normalises, `(replicate, target, labels, ...)`, in the order of `TARGETS`
          and `LABELS`.
        """
        c = self.config
        kinds, upright = len(LABELS), self.data("upright")
        images = upright, self.data(self.middle)
        targets = [[repeated(part, kinds) for part in data] for data in images]
        random = models.shuffled(upright.learn, c.seed)
        labels = np.concatenate([upright.learn.labels, random.labels], 1)
        batches = repeated(upright.learn, 2)._replace(labels=labels)
        results = {}
        for name, model in (("mlp", self.mlp), ("resnet", self.resnet)):
            rate = self.how(model).rate
            keys = self.keys("random_labels", 5)
            start = self.init(model, keys[:, :1])
            # Both bases use the same minibatches, so that they differ only in their labels.
            same = np.repeat(keys[:, 1:2], 2, 1)
            bases = self.train(model, repeated(start, 2), batches, same, rate, c.memorise)
            starts = joined(bases, start)
            tuned = [
                [
                    self.train(model, starts, learn, np.repeat(key, kinds, 1), r)
                    for key, r in ((keys[:, 3:4], rate), (keys[:, 4:5], rate / 2))
                ]
                for learn, _ in targets
            ]
            by_heart = measure.of_each(partial(models.accuracy, model), bases, batches)
            ways = {
                how: models.stack(
                    [
                        measure.of_each(partial(measure.halfway, model, how), *pair, tests)
                        for pair, (_, tests) in zip(tuned, targets, strict=True)
                    ],
                    1,
                )
                for how in (STATISTICS if name == "resnet" else STATISTICS[:1])
            }
            results[name] = {"learned": by_heart, **ways}
        return results

    def theorem(self, _: dict[str, Any]) -> dict[str, Any]:
        """Runs the part "theorem": models fine-tuned from checkpoints along pre-training.

        Checkpoints are taken after 1, 2, 4, ... times `config.theorem.steps`. From each, several
        models are fine-tuned on one rotation at different learning rates.

        It returns the results of `parts.theorem`, `(replicate x checkpoint, pair)`.
        """
        c, at = self.config, self.config.theorem
        data = self.data(self.middle if at.task == "rotated" else at.task)
        upright = self.data("upright").learn
        model = self.resnet if at.network == "resnet" else self.mlp
        keys = self.keys("theorem", 1 + 2 ** (at.checkpoints - 1))
        params, bases = self.init(model, keys[:, :1]), []
        rate = self.how(model).rate
        for n in range(1, keys.shape[1]):
            own = keys[:, n : n + 1]
            params = self.train(model, params, upright, own, rate, steps=at.steps)
            if n & (n - 1) == 0:
                bases.append(params)
        shape = (c.replicates * at.checkpoints, at.members + 1)
        keys = jax.random.split(jax.random.key(c.seed + 1), shape)
        keys = np.asarray(jax.random.key_data(keys)).reshape(c.replicates, -1, *shape[1:], 2)
        learn, test = data if at.tuned_on == "learn" else reversed(data)
        rates, learn = np.geomspace(*c.rates, at.members), repeated(learn, at.members)
        found = []
        for base, own in zip(bases, keys.swapaxes(0, 1), strict=True):
            tuned = self.train(model, repeated(base, at.members), learn, own[:, 1:], rates)
            start, tuned = (models.weights_alone(tree) for tree in (only(base), tuned))
            found.append(
                measure.theorem(model, start, tuned, only(test), own[:, 0], at.lanczos_steps)
            )
        return measure.flat(models.stack(found, 1))


def repeated(tree: PyTree, count: int) -> PyTree:
    """Repeats the single entry of the second axis."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (len(x), count, *x.shape[2:])), tree)


def joined(*trees: PyTree) -> PyTree:
    """Concatenates trees along their second axis."""
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *trees)


def only(tree: PyTree) -> PyTree:
    """Drops the second axis, which has one entry."""
    return jax.tree.map(lambda x: x[:, 0], tree)
