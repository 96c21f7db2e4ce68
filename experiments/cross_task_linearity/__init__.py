"""Do networks fine-tuned from one checkpoint act as linear maps of their parameters?

The experiments of cross-task linearity (arXiv 2402.03660) on scikit-learn's digits. A ReLU MLP is
pre-trained on upright digits and fine-tuned on rotated ones, a ResNet on some classes and then on
others. Features of interpolated weights are compared with interpolated features (Figures 2, 3);
without pre-training, aligned and not (Figure 11); after pre-training on random labels (Figure 12);
averaged weights with averaged logits (Figure 4); sums and differences of task vectors (Figures 7,
8), and stitched (Figures 9, 10); and Theorem 1's main term with the gap of the loss (B.2).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from experiments import validate
from experiments.cross_task_linearity.answers import findings as findings
from experiments.cross_task_linearity.answers import r_squared
from experiments.cross_task_linearity.answers import summary as summary
from experiments.cross_task_linearity.parts import QUANTILES, pairs, subsets
from experiments.cross_task_linearity.runs import (
    LABELS,
    ON_ROTATIONS,
    PARTS,
    RESNET,
    SETTINGS,
    STATISTICS,
    TARGETS,
    WAYS,
    Runs,
)
from experiments.data import digits
from experiments.progress import Stage
from experiments.store import direct
from sail_jax.checks import nearest

LEAST = 174  # digits of the rarest class


@dataclasses.dataclass(frozen=True)
class Config:
    """Pre-train, fine-tune, and compare features of weights with features."""

    seed: int = 0
    """Seed of the splits, initial weights, minibatches and random labels."""
    replicates: int = 5
    """Independent repetitions, each with its own split; at least 3, for the spread."""
    parts: tuple[str, ...] = PARTS
    """What to measure."""
    angles: tuple[int, ...] = (22, 45, 68, 90)
    """Degrees by which the digits of the MLP's fine-tuning tasks are rotated."""
    widths: tuple[int, ...] = (100, 100, 100)
    """Units of the MLP's layers."""
    learn: int = 120
    """Digits of each class to learn from."""
    test: int = 50
    """Digits of each class to test on."""
    steps: int = 900
    """Steps of pre-training the MLP, and of fine-tuning it."""
    batch: int = 64
    """Digits per step, drawn with replacement."""
    rate: float = 0.1
    """Learning rate of the MLP, without momentum."""
    splits: tuple[str, ...] = ("digits 0-3", "digits 4-5", "digits 6-7", "digits 8-9")
    """The ResNet's tasks: the first to pre-train on, the others to fine-tune on."""
    resnet_widths: tuple[int, ...] = (8, 16)
    """Channels of the ResNet's stages, a block each."""
    resnet_steps: int = 200
    """Steps of pre-training the ResNet, and of fine-tuning it."""
    resnet_batch: int = 32
    """Digits per step of the ResNet."""
    resnet_rate: float = 0.05
    """Learning rate of the ResNet, with momentum 0.9."""
    memorise: int = 4
    """In `random_labels` pre-training takes so many times the steps, to learn labels by heart."""
    alphas: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Weights of the first of two models."""
    line_points: int = 11
    """Points on the line between two models, ends included, at which accuracies are compared."""
    scales: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """Scales of task vectors, added and subtracted."""
    stitch_scales: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Scales of task vectors of the stitched models."""
    members: int = 8
    """Models fine-tuned on one task in `averaging`, at rates that differ."""
    rates: tuple[float, float] = (0.01, 0.1)
    """The least and the largest rate of `averaging` and `theorem`."""
    checkpoints: int = 4
    """Checkpoints in `theorem`; each has been trained for twice the steps of the one before."""
    checkpoint_steps: int = 100
    """Steps of the first."""
    pair_members: int = 3
    """Models fine-tuned from each checkpoint in `theorem`, at rates that differ."""
    lanczos_steps: int = 10
    """Steps of Lanczos' iteration for a Hessian's norm."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, learn=1, test=1, steps=1, batch=1, line_points=2)
        validate.at_least(self, resnet_steps=1, resnet_batch=1, memorise=1, members=3)
        validate.at_least(self, checkpoints=1, checkpoint_steps=1, pair_members=2, lanczos_steps=1)
        validate.positive(self, "rate", "resnet_rate", "rates", "scales", "stitch_scales")
        validate.positive(self, "alphas", zero=True)
        validate.positive(self, "widths", "resnet_widths")
        fields = ("parts", "angles", "splits", "alphas", "scales", "stitch_scales")
        validate.different(self, *fields, "rates")
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts: there is no '{part}'{nearest(part, PARTS)}")
        checks = [
            ("test", self.learn + self.test <= LEAST, f"at most {LEAST} - learn"),
            ("widths", len(self.widths) >= 1, "one or more"),
            ("resnet_widths", len(self.resnet_widths) >= 1, "one or more"),
            ("angles", len(self.angles) >= 2, "two or more"),
            ("angles", max(map(abs, self.angles)) < 1000, "below 1000"),
            ("splits", len(self.splits) >= 3, "three or more: one to pre-train on, a pair"),
            ("alphas", 0.5 in self.alphas and max(self.alphas) <= 1, "in [0, 1], one of them 0.5"),
        ]
        for field, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{field} must be {allowed}; got {getattr(self, field)}")
        for task in self.splits:
            try:
                digits.parse(task)
            except ValueError as exc:
                raise ValueError(f"splits: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        small: dict[str, Any] = {"learn": 12, "test": 6, "steps": 30, "batch": 16, "members": 3}
        short: dict[str, Any] = {"resnet_steps": 4, "resnet_batch": 8, "memorise": 2}
        few: dict[str, Any] = {"checkpoints": 2, "checkpoint_steps": 10, "lanczos_steps": 4}
        points: dict[str, Any] = {"line_points": 3, "scales": (0.2, 0.4), "stitch_scales": (1.0,)}
        sizes: dict[str, Any] = {"widths": (16, 16), "resnet_widths": (4,), "angles": (45, 90)}
        splits = ("digits 0-3", "digits 4-5", "digits 6-7")
        return cls(replicates=3, splits=splits, **small, **short, **few, **points, **sizes)

    @classmethod
    def mlp(cls) -> "Config":
        """What needs no ResNet, with more repetitions."""
        return cls(replicates=10, parts=(*ON_ROTATIONS, "theorem"))

    @classmethod
    def far(cls) -> "Config":
        """Models tuned at rates up to three times that of pre-training end far apart."""
        return cls(parts=("averaging", "theorem"), rates=(0.03, 0.3))

    @classmethod
    def resnet(cls) -> "Config":
        """The ResNet's parts, larger and for longer."""
        return cls(parts=RESNET, resnet_widths=(16, 32), resnet_steps=600, resnet_batch=64)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "mlp": Config.mlp,
    "far": Config.far,
    "resnet": Config.resnet,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains and measures, part by part; everything is repeated over the axis `replicate`."""
    runs = Runs(config)
    kept: dict[str, Any] = {}
    if any(part in ON_ROTATIONS for part in config.parts):
        kept = stage("pre-train and fine-tune the MLP", runs.rotations)
    found = {part: stage(_NAMES[part], partial(getattr(runs, part), kept)) for part in config.parts}
    return _dataset(config, found)


_NAMES = {
    "rotated": "rotated digits, line and distribution",
    "scratch": "from scratch, aligned or not",
    "averaging": "weights or logits averaged",
    "arithmetic": "addition and negation",
    "stitching": "stitching",
    "split_classes": "ResNet on split classes",
    "random_labels": "pre-training on random labels",
    "theorem": "Theorem 1 on the loss",
}


def _dataset(config: Config, found: dict[str, dict[str, Any]]) -> xr.Dataset:
    variables: dict[str, tuple[tuple[str, ...], Any]] = {}

    def put(name: str, tree: dict[str, Any], dims: str, **others: str) -> None:
        """Variables `name_key`; `others`: the axes of those that have not `dims`."""
        for key, value in tree.items():
            variables[f"{name}_{key}"] = (
                tuple(others.get(key, dims).split()), np.asarray(value, float)
            )  # fmt: skip

    coords = _coordinates(config)

    def line(name: str, part: dict[str, Any], pair: str, layer: str) -> None:
        own = f"replicate {pair} {layer}"
        put(name, part["line"], f"{own} alpha", baseline=own)
        put(f"{name}_spread", part["spread"], f"{own} quantile")

    def half(name: str, part: dict[str, Any], axes: str, layer: str) -> None:
        small = dict.fromkeys(("barrier", "middle", "ends"), axes)
        put(name, part, f"{axes} {layer}", **small)

    for part, tree in found.items():
        if part == "rotated":
            line("rotated", tree, "pair", "layer")
            losses = {key: tree[key] for key in ("barrier", "own_loss", "other_loss")}
            put("rotated", losses, "replicate pair")
        elif part == "split_classes":
            for how in STATISTICS:
                line(f"split_{how}", tree[how], "split_pair", "block")
        elif part == "scratch":
            half("scratch", tree, "replicate setting way", "layer")
        elif part == "random_labels":
            for name, layer in (("mlp", "layer"), ("resnet", "block")):
                one = dict(tree[name])
                put(f"random_{name}", {"learned": one.pop("learned")}, "replicate learned")
                for how, measured in one.items():
                    half(f"random_{name}_{how}", measured, "replicate target labels", layer)
        elif part == "averaging":
            sets = tree["sets"] | {"gap": np.swapaxes(tree["sets"]["gap"], 1, 2)}
            axes = {"members": "replicate member", "gap": "replicate subset layer"}
            put("averaging", sets, "replicate subset", **axes)
            put("line", tree["line"], "replicate pair weight")
        elif part == "arithmetic":
            put("addition", tree["addition"], "replicate pair layer scale")
            for form in ("midpoint", "reflection"):
                put(form, tree[form], "replicate task layer scale")
        elif part == "stitching":
            ends = dict.fromkeys(("own", "upper"), "replicate pair")
            put("stitched", tree["plain"], "replicate pair hidden", **ends)
            put("stitched_addition", tree["addition"], "replicate pair stitch_scale hidden")
            put("stitched_negation", tree["negation"], "replicate task stitch_scale hidden")
            put("stitched_base", tree["base"], "replicate task")
        else:
            shape = (config.replicates, config.checkpoints, -1)
            each = {name: value.reshape(shape) for name, value in tree.items()}
            put("theorem", each, "replicate checkpoint checkpoint_pair")
            variables |= r_squared(tree, config.seed)
    used = {axis for axes, _ in variables.values() for axis in axes}
    dataset = xr.Dataset(variables, {k: v for k, v in coords.items() if k in used})
    if "averaging" in found:
        count = (subsets(config.members) > 0).sum(1)
        dataset = dataset.assign_coords(size=("subset", count))
    return dataset.assign_attrs(parts=" ".join(config.parts), seed=config.seed)


def _coordinates(config: Config) -> dict[str, Any]:
    hidden = [f"hidden {i + 1}" for i in range(len(config.widths))]
    tasks = [f"{angle}°" for angle in config.angles]
    others = [task.removeprefix("digits ") for task in config.splits[1:]]
    return {
        "replicate": np.arange(config.replicates),
        "pair": [f"{tasks[i]}, {tasks[j]}" for i, j in pairs(len(tasks))],
        "split_pair": [f"{others[i]}, {others[j]}" for i, j in pairs(len(others))],
        "task": tasks,
        "layer": [*hidden, "output"],
        "hidden": hidden,
        "block": [*(f"block {i + 1}" for i in range(len(config.resnet_widths))), "output"],
        "alpha": list(config.alphas),
        "quantile": list(QUANTILES),
        "setting": list(SETTINGS),
        "way": list(WAYS),
        "target": list(TARGETS),
        "labels": list(LABELS),
        "learned": list(LABELS[:2]),
        "member": np.arange(config.members),
        "subset": np.arange(len(subsets(config.members))),
        "weight": np.linspace(0, 1, config.line_points),
        "scale": list(config.scales),
        "stitch_scale": list(config.stitch_scales),
        "checkpoint": config.checkpoint_steps * 2 ** np.arange(config.checkpoints),
        "checkpoint_pair": np.arange(len(pairs(config.pair_members))),
    }


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """A figure for each part that was run."""
    from experiments.cross_task_linearity import plots

    return plots.draw(dataset)
