"""The training behind each part of `cross_task_linearity`; `parts` measures."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from experiments.data.files import DataError, refused
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.studies.cross_task_linearity import models
from experiments.studies.cross_task_linearity import parts as measure
from experiments.studies.cross_task_linearity.config import PARTS, Config
from experiments.studies.cross_task_linearity.models import Batch, Descent, Examples

SETTINGS = ("one task", "two tasks")
WAYS = ("none", "weight matching", "activation matching", "pre-trained")
TARGETS = ("the same images", "rotated images")
LABELS = ("true", "random", "none")
STATISTICS = ("interpolated", "batch")


class Runs:
    """The data of a configuration, and its parts as methods of the trained MLPs."""

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

    def keys(self, part: str, count: int) -> np.ndarray:
        """Data of keys, [replicate, count, 2], of each part its own."""
        own = jax.random.fold_in(jax.random.key(self.config.seed), (*PARTS, "base").index(part))
        keys = jax.random.split(own, (self.config.replicates, count))
        return np.asarray(jax.random.key_data(keys))

    def data(self, *tasks: str) -> Examples:
        """Images to learn from and to test on, of tasks of one size, [replicate, task, ...]."""
        picked = [[models.pick(self.pool, t, part) for t in tasks] for part in self.index]
        for of_part in picked:
            for task, batch in zip(tasks, of_part, strict=True):
                if (n := batch.labels.shape[1]) != (first := of_part[0].labels.shape[1]):
                    raise DataError(
                        f"splits must have as many images each; {task!r} has {n} and {tasks[0]!r} "
                        f"{first} of the publisher's, learn and test draw as many of each class"
                    )
        return Examples(*(models.stack(of_part, 1) for of_part in picked))

    def train(
        self, model: models.Model, start: PyTree, learn: Batch, keys: Any, rate: Any, times: int = 1
    ) -> PyTree:
        """Each of [replicate, model, ...], `times` the steps; rates may differ."""
        how = self.config.resnet if isinstance(model, ResNet) else self.config.mlp
        descent = Descent(how.steps, how.batch, how.momentum)
        return self.descend(model, descent, start, learn, keys, rate, times)

    def descend(
        self, model: models.Model, descent: Descent, start: PyTree, learn: Batch, keys: Any,
        rate: Any, times: int = 1,
    ) -> PyTree:  # fmt: skip
        count = learn.labels.shape[-1]
        rest = self.index.learn.shape[1] - count  # one length, to compile once

        def fit(params: PyTree, learn: Batch, key: models.Key, rate: Any) -> PyTree:
            padded = jax.tree.map(
                lambda x: np.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))), learn
            )
            rounds = np.asarray(key)[None]
            if times > 1:
                split = jax.random.split(jax.random.wrap_key_data(key), times)
                rounds = np.asarray(jax.random.key_data(split))
            for key in rounds:
                params = models.train(model, params, padded, count, key, rate, descent)
            return params

        rate = np.broadcast_to(np.asarray(rate, np.float32), keys.shape[:-1])
        return measure.of_each(fit, start, learn, keys, rate)

    def init(self, model: models.Model, keys: Any) -> PyTree:
        return measure.of_each(partial(models.init, model, self.pool.images.shape[1:]), keys)

    def rotations(self) -> dict[str, Any]:
        """The base, and one expert for each rotation."""
        k, rate = len(self.tasks), self.config.mlp.rate
        keys = self.keys("base", 2 + k)
        start, upright = self.init(self.mlp, keys[:, :1]), self.data("upright").learn
        base = self.train(self.mlp, start, upright, keys[:, 1:2], rate)
        tuned = self.train(
            self.mlp, repeated(base, k), self.data(*self.tasks).learn, keys[:, 2:], rate
        )
        return {"base": base, "experts": tuned}

    def rotated(self, kept: dict[str, Any]) -> dict[str, Any]:
        tests = self.data(*self.tasks).test
        return measure.rotated(self.mlp, kept["experts"], tests, self.config.alphas)

    def scratch(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Two models for one task, then two for two, by each of `WAYS`."""
        last = self.tasks[-1]
        middle = self.tasks[len(self.tasks) // 2 - 1]
        tasks = ("upright", "upright", middle, last)
        keys, data = self.keys("scratch", 3 * len(tasks)), self.data(*tasks)
        first, second, third = (keys[:, i :: len(SETTINGS) + 1] for i in range(3))
        starts = self.init(self.mlp, first)
        own = self.train(self.mlp, starts, data.learn, second, self.config.mlp.rate)
        base = repeated(kept["base"], len(tasks))
        tuned = self.train(self.mlp, base, data.learn, third, self.config.mlp.rate)
        a, b, batch = [], [], []
        for r in range(self.config.replicates):
            for i in (0, 2):
                at = lambda tree, j, r=r: jax.tree.map(lambda x: x[r, j], tree)  # noqa: E731
                left, right = at(own, i), at(own, i + 1)
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
        c, task = self.config, self.tasks[len(self.tasks) // 2 - 1]
        data, keys = self.data(task), self.keys("averaging", c.members)
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
        tests = self.data(*self.tasks).test
        base = only(kept["base"])
        return measure.arithmetic(self.mlp, base, kept["experts"], tests, self.config.scales)

    def stitching(self, kept: dict[str, Any]) -> dict[str, Any]:
        tests, upright = self.data(*self.tasks).test, only(self.data("upright").test)
        arguments = (only(kept["base"]), kept["experts"], tests, upright)
        return measure.stitching(self.mlp, *arguments, self.config.stitch_scales)

    def split_classes(self, _: dict[str, Any]) -> dict[str, Any]:
        first, *others = self.config.splits
        keys, rate = self.keys("split_classes", 2 + len(others)), self.config.resnet.rate
        start = self.init(self.resnet, keys[:, :1])
        base = self.train(self.resnet, start, self.data(first).learn, keys[:, 1:2], rate)
        data = self.data(*others)
        start = repeated(base, len(others))
        tuned = self.train(self.resnet, start, data.learn, keys[:, 2:], rate)
        return measure.split_classes(self.resnet, tuned, data.test, self.config.alphas)

    def random_labels(self, _: dict[str, Any]) -> dict[str, Any]:
        """Two models tuned at two rates, on each of `TARGETS`, from each of `LABELS`: a base that
        learned the labels of upright images, shuffled ones, or none (the initial weights)."""
        c, task = self.config, self.tasks[len(self.tasks) // 2 - 1]
        kinds, upright = len(LABELS), self.data("upright")
        targets = [[repeated(part, kinds) for part in data] for data in (upright, self.data(task))]
        random = models.shuffled(upright.learn, c.seed)
        labels = np.concatenate([upright.learn.labels, random.labels], 1)
        batches = repeated(upright.learn, 2)._replace(labels=labels)
        results = {}
        for name, model, rate in (
            ("mlp", self.mlp, c.mlp.rate),
            ("resnet", self.resnet, c.resnet.rate),
        ):
            keys = self.keys("random_labels", 5)
            start = self.init(model, keys[:, :1])
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
        """From checkpoints along pre-training, models tuned on one task at different rates."""
        c, at = self.config, self.config.theorem
        task = self.tasks[len(self.tasks) // 2 - 1] if at.task == "rotated" else at.task
        data, upright = self.data(task), self.data("upright").learn
        model = self.resnet if at.network == "resnet" else self.mlp
        how = c.resnet if at.network == "resnet" else c.mlp
        keys = self.keys("theorem", 1 + 2 ** (at.checkpoints - 1))
        params, bases = self.init(model, keys[:, :1]), []
        descent = Descent(at.steps, how.batch, how.momentum)
        for n in range(1, keys.shape[1]):
            params = self.descend(model, descent, params, upright, keys[:, n : n + 1], how.rate)
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
    """[replicate, 1, ...] to [replicate, count, ...], of which all are one."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (len(x), count, *x.shape[2:])), tree)


def joined(*trees: PyTree) -> PyTree:
    """Along the second axis."""
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *trees)


def only(tree: PyTree) -> PyTree:
    """[replicate, 1, ...] to [replicate, ...]."""
    return jax.tree.map(lambda x: x[:, 0], tree)
