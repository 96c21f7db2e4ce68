"""Runs `merging_scaling` stage by stage and gathers the results in one dataset.

`networks` computes the networks, `testbed` the quadratic losses.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data import image_tasks
from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.merging_scaling import experts, networks, testbed
from experiments.studies.merging_scaling.config import LAWS, Config
from theory.merging import Constants, Training, excess_risk_bound
from theory.merging.scaling import Law


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Measures the networks and the testbed at every value of every law.

    It returns a dataset over law and point: the `value`; `loss`, `accuracy` and `train_loss` of
    networks by replicate and merge, and `stability` by replicate; their bounds `network_bound_*`;
    and `testbed_*`, exact, bounded and simulated. The measured constants and the centre are
    attributes. With pre-trained networks instead of the MLP, it returns the dataset of
    `experts.measured`.

    It raises `DataError` if the data cannot be read or are not sufficient.
    """
    if config.experts.network != "none":
        return experts.measured(config, stage)
    with refused():
        pool = config.data.pool(config.seed)
        config.check_left(n := len(pool.labels))
        sizes = {"train": config.pretraining.images, "validation": config.pool}
        split = image_tasks.split(config.seed, config.replicates, examples=n, **sizes)
        upright = image_tasks.pick([image_tasks.of(pool)], split.train)
        upright = jax.tree.map(lambda x: x[:, 0], upright)
        exam = networks.examine(config, pool, split)
    base_key, key, merge_key, bed_key = jax.random.split(jax.random.key(config.seed), 4)
    keys = jax.random.split(key, config.replicates)
    merge_keys = jax.random.split(merge_key, config.replicates)

    base = stage(
        "pre-train the base",
        lambda: networks.pretrain(config, upright, jax.random.split(base_key, config.replicates)),
    )

    def trained(setting: Mapping[str, Any], marks: tuple[int, ...]) -> Any:
        how = jnp.array(marks), base, exam.images, exam.labels
        return networks.finetune(
            config, setting["batch"], *how, setting["samples"], setting["rate"], keys
        )

    def measured(setting: Mapping[str, Any], pairs: PyTree, mark: int) -> dict[str, Any]:
        experts, twins = (jax.tree.map(lambda x: x[:, :, mark], tree) for tree in pairs)
        how = setting["samples"], setting["tasks"]
        return networks.measure(config, base, experts, twins, exam, *how, merge_keys)

    def centre() -> dict[str, Any]:
        """Measures the laws of steps and of tasks on one set of trainings.

        Fewer steps correspond to earlier networks of a training, and fewer tasks to a part of its
        experts.
        """
        setting, marks = config.at(), config.swept.steps
        pairs = trained(setting, marks)
        middle = len(marks) // 2
        measures = {f"steps{i}": measured(setting, pairs, i) for i in range(len(marks))}
        for i, n in enumerate(config.swept.tasks):
            measures[f"tasks{i}"] = measured(setting | {"tasks": n}, pairs, middle)
        return measures

    def elsewhere(law: Law, value: float) -> dict[str, Any]:
        setting = config.at(law, value)
        return measured(setting, trained(setting, (setting["steps"],)), 0)

    nets = stage("networks by steps and by tasks", centre)
    middle = len(config.swept.steps) // 2
    for law in ("batch", "rate", "samples"):
        for i, value in enumerate(config.values(law)):
            nets[f"{law}{i}"] = (
                nets[f"steps{middle}"]
                # The centre is the same setting for every law.
                if i == middle
                else stage(f"networks by {law}, {value:g}", partial(elsewhere, law, value))
            )
    constants = stage(
        "constants of a run",
        lambda: networks.constants(config, base, nets[f"steps{middle}"]["merged"], exam),
    )
    bed = stage("quadratics", lambda: testbed.measure(config, bed_key))
    points = range(len(config.swept.steps))
    stacked = {
        name: np.stack([[nets[f"{law}{i}"][name] for i in points] for law in LAWS])
        for name in ("loss", "accuracy", "train_loss", "stability")
    }
    return _dataset(config, stacked, constants, bed)


def _dataset(
    config: Config, nets: dict[str, Any], constants: dict[str, Any], bed: dict[str, Any]
) -> xr.Dataset:
    """Builds the labelled dataset of all results; `run` describes its content."""
    at = ("law", "point")
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("loss", "accuracy", "train_loss"), (*at, "replicate", "merge")
    )
    dims["stability"] = (*at, "replicate")
    data = {name: (dims[name], values) for name, values in nets.items()}
    data |= {f"network_{k}": (at, v) for k, v in _bounds(config, constants).items()}
    data |= {f"testbed_{k}": (at, v) for k, v in bed.items()}
    data["value"] = (at, np.array([config.values(law) for law in LAWS], float))
    centre = config.at()
    attrs = {k: float(v) for k, v in constants.items()} | {
        f"centre_{k}": v for k, v in centre.items()
    }
    return xr.Dataset(data, {"law": list(LAWS), "merge": list(networks.MERGES)}, attrs)


def _bounds(config: Config, constants: dict[str, Any]) -> dict[str, np.ndarray]:
    """Computes the printed bounds of Theorems 3 and 1 along every law, with measured constants."""
    measured = Constants(**{name: constants[name] for name in Constants._fields})
    rows = []
    for law in LAWS:
        for value in config.values(law):
            s = config.at(law, value)
            n = int(s.pop("tasks"))
            bound = excess_risk_bound(measured, Training.of(**s, tasks=n))
            rows.append((bound.excess, bound.stability))
    excess, stability = np.reshape(rows, (len(LAWS), -1, 2)).transpose(2, 0, 1)
    return {"bound_excess": excess, "bound_stability": stability}
