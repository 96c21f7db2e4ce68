"""Pre-trained networks of `merging_scaling`: experts on tasks of images in folders, and merges.

An expert is a backbone and a head. Backbones are merged, including BatchNorm's running statistics.
A merge is tested on each task under the head of the task's own expert. `run` calls `measured`.
`networks` is the counterpart with an MLP on one set of images.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree, UInt8

from experiments.data.files import DataError, refused
from experiments.data.image_folders import Pictures
from experiments.lab.progress import Stage
from experiments.models.backbones import Backbone, encode, load_backbone
from experiments.studies.merging_scaling.config import CHECKPOINTS, Config, Settings
from experiments.training import sharding
from experiments.training.fit import Fit
from experiments.training.optimizers import Optimizer
from experiments.training.schedules import Schedule
from experiments.training.step import Training
from sail_jax import methods

SETTINGS = tuple(Settings.__dataclass_fields__)
CHUNK = 128  # images that are evaluated at once
CLIP_SCALE = 100.0  # the factor on the normalised features of CLIP in its logits


class Task(NamedTuple):
    """A task.

    Attributes:
      name: The name of its folder.
      learn: The training images, in a separate order.
      test: A function from indices to the test images.
      labels: The labels of these, `(n,)`.
      classes: The number of classes.
    """

    name: str
    learn: Pictures
    test: Callable[[Int[np.ndarray, "*any"]], UInt8[np.ndarray, "*any side side 3"]]
    labels: Int[np.ndarray, " n"]
    classes: int


def load(config: Config) -> tuple[Backbone, list[Task]]:
    """Reads the checkpoint, lists images, and decodes the test images if they are few."""
    how = config.experts
    with refused():
        if how.checkpoint is None:
            home = CHECKPOINTS[how.network]
            raise DataError(
                f"experts.checkpoint must name the folder of {home} (published at "
                f"huggingface.co/{home}); the default, experts.network = none, needs no files"
            )
        backbone = load_backbone(how.checkpoint)
        tasks = []
        for k, name in enumerate(how.data.names):
            learn, test = (how.data.listed(name, s, "experts.data") for s in ("train", "test"))
            if learn.names != test.names:
                raise DataError(
                    f"{how.data.folder}/{name}: train and test must have the same classes; got "
                    f"{len(learn.names)} and {len(test.names)}"
                )
            rng = np.random.default_rng((config.seed, k))
            order = rng.permutation(len(learn.paths))
            chosen = rng.permutation(len(test.paths))[: how.data.test]
            seen = Pictures(test, how.data.side, chosen)
            pictures = Pictures(learn, how.data.side, order)
            tasks.append(Task(name, pictures, seen.reader(), seen.labels, len(learn.names)))
    return backbone, tasks


def groups(config: Config, count: int) -> list[tuple[int, ...]]:
    """Draws different groups of tasks, or lists all if there are not enough.

    It returns the groups, each with increasing numbers.

    >>> from experiments.studies.merging_scaling.config import PRESETS
    >>> [len(groups(PRESETS["paper_resnet18"], n)) for n in (6, 20)]
    [15, 1]
    """
    total, most = len(config.experts.data.names), config.experts.groups
    if math.comb(total, count) <= most:
        return list(itertools.combinations(range(total), count))
    rng, drawn = np.random.default_rng((config.seed, 1 << 20, count)), set()
    while len(drawn) < most:
        drawn.add(tuple(sorted(rng.permutation(total)[:count].tolist())))
    return sorted(drawn)


def logits(
    backbone: Backbone, variables: PyTree, images: Array | np.ndarray, *, train: bool = False
) -> tuple[Float[Array, "n class"], PyTree]:
    """Runs an expert, or a merge under an expert's head.

    - `images`: pixels from 0 to 255, `(n, side, side, 3)`.
    """
    found = encode(backbone, variables["params"], variables["statistics"], images, train=train)
    x, statistics = found
    if backbone.config["model_type"] == "clip":
        x = CLIP_SCALE * x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    kernel, bias = variables["head"]
    return x @ kernel + bias, statistics


def tuned(
    config: Config, backbone: Backbone, task: Task, setting: dict[str, Any], marks: Sequence[int]
) -> dict[str, Any]:
    """Fine-tunes the backbone and a head on one task, at a constant rate.

    - `marks`: the numbers of steps after which the expert is kept, increasing.

    It returns for each mark `at<steps>`: the expert as one vector, `body` and `head`.
    """
    how = config.experts
    optimizer = Optimizer(
        Schedule(setting["rate"], marks[-1], decay="constant"), rule=how.rule, momentum=how.momentum
    )

    def loss(params: PyTree, statistics: PyTree, batch: PyTree, _: Array) -> Any:
        images, labels = batch
        variables = {**params, "statistics": statistics}
        out, statistics = logits(backbone, variables, images, train=True)
        own = optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()
        return own, {}, statistics

    count = max(1, round(setting["ratio"] * len(task.learn.labels)))
    number, take = how.data.names.index(task.name), task.learn.reader(count)

    def batch(t: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.random.default_rng((config.seed, 2, number, t)).random(setting["batch"])
        which = (drawn * count).astype(int)
        return take(which), task.learn.labels[which]

    fit = Fit(loss, Training(optimizer), sharding.layout("data"))
    params = {"params": dict(backbone.params), "head": _head(backbone, task)}
    state = fit.start(
        jax.tree.map(jnp.asarray, params),
        jax.random.key(config.seed),
        jax.tree.map(jnp.asarray, dict(backbone.statistics)),
    )
    kept = {}
    for mark in marks:
        state = fit.run(state, batch, mark).state
        body = {"params": state.params["params"], "statistics": state.mutable}
        parts = {"body": body, "head": state.params["head"]}
        kept[f"at{mark}"] = {name: np.asarray(ravel_pytree(x)[0]) for name, x in parts.items()}
    return kept


def _head(backbone: Backbone, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Returns kernel and bias of a head, all 0."""
    run = partial(encode, backbone, backbone.params, backbone.statistics)
    width = jax.eval_shape(run, task.test(np.arange(1)))[0].shape[1]
    return np.zeros((width, task.classes), np.float32), np.zeros(task.classes, np.float32)


class Judge:
    """Merges experts, and measures the accuracy and loss of networks on tasks.

    Args:
      config: The config.
      backbone: The fine-tuned network.
      tasks: The tasks.

    Attributes:
      base: The parameters and statistics of the backbone before fine-tuning.
      unravel: Turns the vector of an expert's backbone into such a tree.
      heads: Turns the vector of a head into a tree, for each task.
    """

    def __init__(self, config: Config, backbone: Backbone, tasks: list[Task]) -> None:
        self.config, self.backbone, self.tasks = config, backbone, tasks
        body = {"params": dict(backbone.params), "statistics": dict(backbone.statistics)}
        self.base = jax.tree.map(jnp.asarray, body)
        self.unravel = ravel_pytree(self.base)[1]
        self.heads = [ravel_pytree(_head(backbone, task))[1] for task in tasks]
        self._graded = jax.jit(self._grade)

    def _grade(
        self, body: PyTree, head: PyTree, images: Array, labels: Array, counted: Array
    ) -> Array:
        """Computes the sum of losses and the number of correct answers, over the counted images."""
        out = logits(self.backbone, {**body, "head": head}, images)[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(out, labels)
        right = out.argmax(-1) == labels
        return jnp.stack([losses.sum(where=counted), right.sum(where=counted)])

    def grade(self, body: PyTree, head: Array, task: int) -> Float[np.ndarray, "2"]:
        """Measures a backbone under a head on a task's test images.

        It returns the mean loss in nats, and the accuracy.
        """
        of, head = self.tasks[task], self.heads[task](jnp.asarray(head))
        n, sums = len(of.labels), []
        size = min(CHUNK, n)
        for start in range(0, n, size):
            # the last part is padded, so that all have one shape, which is compiled once
            at = np.arange(start, start + size)
            which = np.minimum(at, n - 1)
            found = self._graded(body, head, of.test(which), of.labels[which], at < n)
            sums.append(np.asarray(found))
        return np.sum(sums, 0) / n

    def merged(self, way: str, experts: list[dict[str, Any]], group: tuple[int, ...]) -> PyTree:
        """Merges the experts of a group of tasks."""
        models = [self.unravel(jnp.asarray(expert["body"])) for expert in experts]
        how, weights = self.config.merging, jnp.full(len(group), 1 / len(group))
        key = jax.random.key(self.config.seed)
        if way == "TIES":
            return methods.ties(density=how.density)(models, self.base)
        if way == "DARE":
            merge = methods.dare_linear(density=1 - how.drop, key=key)
            return merge(models, self.base, weights=weights)
        if way == "AdaMerging":
            heads = [
                self.heads[t](jnp.asarray(e["head"])) for t, e in zip(group, experts, strict=True)
            ]
            predict = [
                lambda body, x, head=head: logits(self.backbone, {**body, "head": head}, x)[0]
                for head in heads
            ]
            return methods.adamerging(
                models,
                self.base,
                predict,
                [self._unlabelled(task) for task in group],
                init=1 / len(group),
                steps=how.ada_steps,
                optimizer=optax.adam(how.ada_rate),
            ).params
        return methods.linear()(models, weights=weights)

    def _unlabelled(self, task: int) -> np.ndarray:
        """Draws sixteen batches of 16 test images. Some images may be drawn twice."""
        rng = np.random.default_rng((self.config.seed, 3, task))
        of = self.tasks[task]
        return of.test(rng.integers(0, len(of.labels), (16, 16)))


def measured(config: Config, stage: Stage) -> xr.Dataset:
    """Fine-tunes experts, merges groups of them, and measures the merges.

    It returns a dataset over law, point, replicate (a group) and merge: `loss` and `accuracy`,
    means over the test images of the group or over its tasks. They are NaN if a law has fewer
    points or there are fewer groups. It also has the `value` by law and point, and
    `expert_accuracy` by task at the centre.
    """
    how = config.experts
    backbone, tasks = load(config)
    judge, centre = Judge(config, backbone, tasks), dataclasses.asdict(how.centre)
    swept = dataclasses.asdict(how.swept)
    fixed = tuple(how.data.names.index(name) for name in how.group)

    def experts(
        name: str, setting: dict[str, Any], marks: Sequence[int], which: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        return {
            t: stage(
                f"expert, {name}, {tasks[t].name}",
                partial(tuned, config, backbone, tasks[t], setting, marks),
            )
            for t in which
        }

    def merges(of: Mapping[int, dict[str, Any]], drawn: Sequence[tuple[int, ...]]) -> Any:
        """Computes loss and accuracy of the merges of all groups, each [group, merge]."""
        found = np.full((2, how.groups, len(how.merges)), np.nan)
        for g, group in enumerate(drawn):
            chosen = [of[t] for t in group]
            images = [len(tasks[t].labels) if how.pooled else 1 for t in group]
            for m, way in enumerate(how.merges):
                body = judge.merged(way, chosen, group)
                graded = [judge.grade(body, of[t]["head"], t) for t in group]
                found[:, g, m] = np.average(graded, 0, weights=images)
        return {"loss": found[0], "accuracy": found[1]}

    most = max(map(len, swept.values()))
    shape = (len(SETTINGS), most, how.groups, len(how.merges))
    data = {name: np.full(shape, np.nan) for name in ("loss", "accuracy")}
    values = np.full(shape[:2], np.nan)
    at_centre = experts("centre", centre, swept["steps"], range(len(tasks)))
    # the centre is a point of every law, where all merge the same groups
    known: dict[Any, dict[str, Any]] = {}
    for i, law in enumerate(SETTINGS):
        for k, value in enumerate(swept[law]):
            setting, name = centre | {law: value}, f"{law} {value:g}"
            drawn = [fixed] if fixed and law != "tasks" else groups(config, setting["tasks"])
            at = (*setting.values(), *drawn)
            if at not in known:
                of = at_centre
                if law not in ("steps", "tasks"):
                    which = sorted(set(itertools.chain(*drawn)))
                    of = experts(name, setting, (setting["steps"],), which)
                own = {t: expert[f"at{setting['steps']}"] for t, expert in of.items()}
                known[at] = stage(f"merges, {name}", partial(merges, own, drawn))
            for key, into in data.items():
                into[i, k] = known[at][key]
            values[i, k] = value

    def alone() -> dict[str, Any]:
        own = [expert[f"at{centre['steps']}"] for expert in at_centre.values()]
        bodies = (judge.unravel(jnp.asarray(expert["body"])) for expert in own)
        graded = [
            judge.grade(b, e["head"], t) for t, (b, e) in enumerate(zip(bodies, own, strict=True))
        ]
        return {"accuracy": np.array(graded)[:, 1]}

    axes = ("law", "point", "replicate", "merge")
    return xr.Dataset(
        {
            **{name: (axes, array) for name, array in data.items()},
            "value": (axes[:2], values),
            "expert_accuracy": (("task",), stage("experts alone", alone)["accuracy"]),
        },
        {"law": list(SETTINGS), "merge": list(how.merges), "task": list(how.data.names)},
        {"network": how.network},
    )
