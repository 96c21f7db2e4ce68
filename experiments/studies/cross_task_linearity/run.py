"""The run of `cross_task_linearity`: its stages, and the dataset of their results.

`runs` does the work of a stage.
"""

from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.cross_task_linearity.answers import r_squared
from experiments.studies.cross_task_linearity.config import ON_ROTATIONS, Config
from experiments.studies.cross_task_linearity.parts import QUANTILES, pairs, subsets
from experiments.studies.cross_task_linearity.runs import (
    LABELS,
    SETTINGS,
    STATISTICS,
    TARGETS,
    WAYS,
    Runs,
)

# The names of stages, which appear on the terminal and in the names of stored files.
_NAMES = {
    "rotated": "rotated images, line and distribution",
    "scratch": "from scratch, aligned or not",
    "averaging": "weights or logits averaged",
    "arithmetic": "addition and negation",
    "stitching": "stitching",
    "split_classes": "ResNet on split classes",
    "random_labels": "pre-training on random labels",
    "theorem": "Theorem 1 on the loss",
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains and measures, part by part.

    It returns the dataset. Names of variables begin with their part's name. Every measurement has
    the dimension "replicate", except the regressions of the part "theorem". The attributes are
    `parts`, separated by spaces, and `seed`.

    It raises `DataError` if the data are missing or have too few images of a class.
    """
    runs = Runs(config)
    trained: dict[str, Any] = {}
    if any(part in ON_ROTATIONS for part in config.parts):
        trained = stage("pre-train and fine-tune the MLP", runs.rotations)
    results = {
        part: stage(_NAMES[part], partial(getattr(runs, part), trained)) for part in config.parts
    }
    return _dataset(config, results)


def _dataset(config: Config, results: dict[str, dict[str, Any]]) -> xr.Dataset:
    """Builds the dataset: names and dimensions for the arrays of all parts."""
    variables: dict[str, tuple[tuple[str, ...], Any]] = {}

    def put(name: str, tree: dict[str, Any], dims: str, **others: str) -> None:
        """Adds variables `name_key` with the dimensions `dims`, or with dimensions in `others`."""
        for key, value in tree.items():
            variables[f"{name}_{key}"] = (
                tuple(others.get(key, dims).split()), np.asarray(value, float)
            )  # fmt: skip

    coords = _coordinates(config)

    def line(name: str, part: dict[str, Any], pair: str, layer: str) -> None:
        """Adds the measurements along the line between two models."""
        own = f"replicate {pair} {layer}"
        put(name, part["line"], f"{own} alpha", baseline=own)
        put(f"{name}_spread", part["spread"], f"{own} quantile")

    def half(name: str, part: dict[str, Any], axes: str, layer: str) -> None:
        """Adds the measurements half way between two models. Some of them have no layer axis."""
        small = dict.fromkeys(("barrier", "middle", "ends"), axes)
        put(name, part, f"{axes} {layer}", **small)

    for part, tree in results.items():
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
                by_way = dict(tree[name])
                put(f"random_{name}", {"learned": by_way.pop("learned")}, "replicate learned")
                for how, measured in by_way.items():
                    half(f"random_{name}_{how}", measured, "replicate target labels", layer)
        elif part == "averaging":
            # The probe's gap is [layer, subset].
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
            shape = (config.replicates, config.theorem.checkpoints, -1)
            by_checkpoint = {name: value.reshape(shape) for name, value in tree.items()}
            put("theorem", by_checkpoint, "replicate checkpoint checkpoint_pair")
            variables |= r_squared(tree, config.seed)
    used = {axis for axes, _ in variables.values() for axis in axes}
    dataset = xr.Dataset(variables, {k: v for k, v in coords.items() if k in used})
    if "averaging" in results:
        count = (subsets(config.members) > 0).sum(1)
        dataset = dataset.assign_coords(size=("subset", count))
    return dataset.assign_attrs(parts=" ".join(config.parts), seed=config.seed)


def _coordinates(config: Config) -> dict[str, Any]:
    """Lists the labels along every dimension that the parts may use."""
    hidden = [f"hidden {i + 1}" for i in range(len(config.mlp.widths))]
    tasks = [f"{angle:g}°" for angle in config.angles]
    blocks = len(config.resnet.widths) * config.resnet.blocks
    others = [task.removeprefix("classes ") for task in config.splits[1:]]
    return {
        "replicate": np.arange(config.replicates),
        "pair": [f"{tasks[i]}, {tasks[j]}" for i, j in pairs(len(tasks))],
        "split_pair": [f"{others[i]}, {others[j]}" for i, j in pairs(len(others))],
        "task": tasks,
        "layer": [*hidden, "output"],
        "hidden": hidden,
        "block": [*(f"block {i + 1}" for i in range(blocks)), "output"],
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
        "checkpoint": config.theorem.steps * 2 ** np.arange(config.theorem.checkpoints),
        "checkpoint_pair": np.arange(len(pairs(config.theorem.members))),
    }
