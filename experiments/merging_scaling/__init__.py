"""How does a merge change with the steps, batch, rate, samples and tasks of its experts?

Unified merging (arXiv 2601.21690) reads laws of each off a bound on the excess risk of the merged
model. Here each is swept about one centre, at the same values twice. On quadratic losses, where the
excess, the stability and the bound are exact, beside SGD on drawn data. And on networks: one is
pre-trained on upright handwritten digits, copies are fine-tuned by SGD on rotations and classes of
them and merged by averaging, TIES (Yadav et al. 2023), DARE (Yu et al. 2024) and AdaMerging (Yang
et al. 2024), which sees the inputs of the test without labels, as its authors have it. The
stability of Definition 2 is measured, not bounded: every expert has a twin that saw the same
batches with one sample replaced.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array

from experiments import validate
from experiments.data import digits
from experiments.merging_scaling import networks
from experiments.merging_scaling.plots import plot as plot
from experiments.merging_scaling.plots import summary as summary
from experiments.progress import Stage
from experiments.store import direct
from theory.merging import (
    Constants,
    QuadraticTasks,
    Training,
    dare,
    excess_risk_bound,
    scaling,
    simulate,
)
from theory.merging.scaling import Law

LAWS: tuple[Law, ...] = get_args(Law)
FIELDS = {"tasks": "merged"}  # of the config, where they are not called as the law


@dataclasses.dataclass(frozen=True)
class Config:
    """What is swept, one at a time; the middle value of each is the centre for the others."""

    seed: int = 0
    """Seed of the splits, weights, minibatches and centres."""
    replicates: int = 8
    """Independent repetitions, each with its own split and order of tasks; at least 2."""
    steps: tuple[int, ...] = (10, 30, 100, 300, 1000)
    """Steps K of fine-tuning, increasing."""
    batch: tuple[int, ...] = (1, 4, 16, 64, 128)
    """Samples b per step, drawn with replacement."""
    rate: tuple[float, ...] = (0.02, 0.06, 0.2, 0.5, 1.0)
    """Rates of fine-tuning; the largest curvature of the quadratics is 1."""
    samples: tuple[int, ...] = (10, 30, 100, 200, 350)
    """Samples n per task."""
    merged: tuple[int, ...] = (1, 2, 4, 6, 8)
    """How many experts N are merged."""
    tasks: tuple[str, ...] = (
        *(f"rotate {angle}" for angle in (-60, -40, -20, 20, 40, 60)),
        "digits 0-4",
        "digits 5-9",
    )
    """What experts learn: 'rotate <degrees>', 'digits <first>-<last>' or 'upright'."""
    widths: tuple[int, ...] = (64,)
    """Units of each hidden layer."""
    pretrain: int = 500
    """Upright digits to pre-train on, of 1797."""
    pool: int = 800
    """Digits to fine-tune on, none of them seen before; the rest are the test set."""
    base_steps: int = 600
    """Steps of pre-training, of 64 digits each."""
    base_rate: float = 0.2
    """Rate of pre-training."""
    density: float = 0.2
    """Fraction of each task vector that TIES keeps."""
    drop: float = 0.5
    """Fraction of each task vector that DARE drops."""
    ada_steps: int = 100
    """Steps of AdaMerging, from the average."""
    ada_rate: float = 0.001
    """Adam's rate in them, its authors' by default."""
    dimensions: int = 8
    """Of the quadratics."""
    condition: float = 100.0
    """Ratio of their largest to their smallest curvature."""
    spread: float = 0.5
    """Standard deviation of the tasks' centres about a point at distance 1 from the start."""
    noise: float = 1.0
    """Standard deviation of a sample about its centre."""
    runs: int = 400
    """Simulations of the quadratics at each value; 0 draws none, and leaves the closed forms."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, pretrain=1, pool=1, base_steps=1, runs=0)
        validate.at_least(self, ada_steps=0, dimensions=1, condition=1)
        validate.positive(self, "rate", "base_rate", "ada_rate")
        validate.positive(self, "spread", "noise", zero=True)
        room, most = digits.EXAMPLES - self.pretrain, len(self.tasks)
        swept = {FIELDS.get(law, law): self.values(law) for law in LAWS}
        checks = [
            ("density", 0 < self.density <= 1, "in (0, 1]"),
            ("drop", 0 <= self.drop < 1, "in [0, 1)"),
            ("widths", self.widths and min(self.widths) >= 1, "one or more, each at least 1"),
            ("pool", self.pool < room, f"below {room}, to leave digits for the test"),
            ("tasks", len(set(self.tasks)) == most >= 2, "two or more, all different"),
            ("merged", max(self.merged, default=0) <= most, f"at most the number of tasks, {most}"),
            ("rate", max(self.rate, default=0) < 2, "below 2, or the quadratics diverge"),
            ("runs", self.runs != 1, "0, or at least 2 for their spread"),
            ("samples", min(self.samples, default=0) >= 2, "at least 2"),
        ]
        for field, values in swept.items():
            whole = field == "rate" or min(values, default=0) >= 1
            increasing = all(a < b for a, b in itertools.pairwise(values))
            odd = len(values) == len(self.steps) >= 3 and len(values) % 2 == 1
            checks += [
                (field, whole and increasing, "at least 1 and increasing"),
                (field, odd, "3, 5, 7, ... values, as many of each"),
            ]
        for field, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{field} must be {allowed}; got {getattr(self, field)}")
        for task in self.tasks:
            try:
                digits.parse(task)
            except ValueError as exc:
                raise ValueError(f"tasks: {exc}") from exc

    def values(self, law: Law) -> tuple[float, ...]:
        return getattr(self, FIELDS.get(law, law))

    def at(self, law: Law | None = None, value: float | None = None) -> dict[str, Any]:
        """The setting at the centre, except for one."""
        centre = {name: self.values(name)[len(self.steps) // 2] for name in LAWS}
        return centre if law is None else centre | {law: value}

    @classmethod
    def tiny(cls) -> "Config":
        swept = {"steps": (5, 10, 20), "batch": (4, 8, 16), "rate": (0.1, 0.2, 0.4)}
        swept |= {"samples": (5, 10, 20), "merged": (1, 2, 3)}
        tasks = ("rotate -30", "rotate 30", "digits 0-4")
        small = {"base_steps": 20, "ada_steps": 3, "dimensions": 2, "runs": 0, "widths": (8,)}
        return cls(replicates=2, tasks=tasks, **swept, **small)

    @classmethod
    def many(cls) -> "Config":
        """As many task groups as the paper's, and wider networks."""
        return cls(replicates=15, widths=(256, 256), runs=4000, ada_steps=500)


PRESETS = {"default": Config, "many": Config.many, "tiny": Config.tiny}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Both halves, on the coordinates `law` and `point`."""
    split = digits.split(
        config.seed, config.replicates, train=config.pretrain, validation=config.pool
    )
    upright = jax.tree.map(lambda x: x[:, 0], digits.pick([digits.load()], split.train))
    exam = networks.examine(config, split)
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

    def measured(setting: Mapping[str, Any], pairs: Any, mark: int) -> dict[str, Any]:
        experts, twins = (jax.tree.map(lambda x: x[:, :, mark], tree) for tree in pairs)
        how = setting["samples"], setting["tasks"]
        return networks.measure(config, base, experts, twins, exam, *how, merge_keys)

    def centre() -> dict[str, Any]:
        """Networks at other K are the same ones earlier and later; at other N, more of them."""
        here, marks = config.at(), config.steps
        pairs = trained(here, marks)
        middle = len(marks) // 2
        found = {f"steps{i}": measured(here, pairs, i) for i in range(len(marks))}
        for i, n in enumerate(config.merged):
            found[f"tasks{i}"] = measured(here | {"tasks": n}, pairs, middle)
        return found

    def elsewhere(law: Law, value: float) -> dict[str, Any]:
        setting = config.at(law, value)
        return measured(setting, trained(setting, (setting["steps"],)), 0)

    found = stage("networks by steps and by tasks", centre)
    middle = len(config.steps) // 2
    for law in ("batch", "rate", "samples"):
        for i, value in enumerate(config.values(law)):
            found[f"{law}{i}"] = (
                found[f"steps{middle}"]
                if i == middle
                else stage(f"networks by {law}, {value:g}", partial(elsewhere, law, value))
            )
    constants = stage(
        "constants of a run",
        lambda: networks.constants(config, base, found[f"steps{middle}"]["merged"], exam),
    )
    bed = stage("quadratics", lambda: _testbed(config, bed_key))
    points = range(len(config.steps))
    stacked = {
        name: np.stack([[found[f"{law}{i}"][name] for i in points] for law in LAWS])
        for name in ("loss", "accuracy", "train_loss", "stability")
    }
    return _dataset(config, stacked, constants, bed)


def _dataset(
    config: Config, nets: dict[str, Any], constants: dict[str, Any], bed: dict[str, Any]
) -> xr.Dataset:
    at = ("law", "point")
    each: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("loss", "accuracy", "train_loss"), (*at, "replicate", "merge")
    )
    each["stability"] = (*at, "replicate")
    data = {name: (each[name], values) for name, values in nets.items()}
    data |= {f"network_{k}": (at, v) for k, v in _bounds(config, constants).items()}
    data |= {f"testbed_{k}": (at, v) for k, v in bed.items()}
    data["value"] = (at, np.array([config.values(law) for law in LAWS], float))
    centre = config.at()
    attrs = {k: float(v) for k, v in constants.items()} | {
        f"centre_{k}": v for k, v in centre.items()
    }
    return xr.Dataset(data, {"law": list(LAWS), "merge": list(networks.MERGES)}, attrs)


def _bounds(config: Config, constants: dict[str, Any]) -> dict[str, np.ndarray]:
    """Theorem 3 along every law, its constants those measured."""
    known = Constants(**{name: constants[name] for name in Constants._fields})
    rows = []
    for law in LAWS:
        for value in config.values(law):
            s = config.at(law, value)
            n = int(s.pop("tasks"))
            found = excess_risk_bound(known, Training.of(**s, tasks=n))
            rows.append((found.excess, found.stability))
    excess, stability = np.reshape(rows, (len(LAWS), -1, 2)).transpose(2, 0, 1)
    return {"bound_excess": excess, "bound_stability": stability}


def quadratics(
    config: Config, law: Law | None = None, value: float | None = None
) -> QuadraticTasks:
    """The testbed at one setting."""
    s = config.at(law, value)
    shape = max(config.merged), config.dimensions
    centres = 1 / config.dimensions**0.5 + config.spread * np.random.default_rng(
        config.seed
    ).standard_normal(shape)
    curvature = np.geomspace(1, 1 / config.condition, config.dimensions)
    n = int(s.pop("tasks"))
    return QuadraticTasks(curvature, centres[:n], config.noise, **s)


def _testbed(config: Config, key: Array) -> dict[str, Any]:
    """Closed forms, both bounds, and simulations with their standard errors, `[law, point]`."""
    rows = []
    for i, law in enumerate(LAWS):
        values = config.values(law)
        widest = quadratics(config, law, values[-1])
        found = scaling(widest, law, values)
        row = {
            f"{kind}_{name}": getattr(getattr(found, kind), name)
            for kind in ("exact", "bound", "corrected")
            for name in ("excess", "stability")
        }
        row["exact_generalisation"] = found.exact.generalisation
        row["exact_optimisation"] = found.exact.optimisation
        beds = [quadratics(config, law, value) for value in values]
        row["dare_excess"] = np.array([dare(bed, config.drop).excess for bed in beds])
        if config.runs:
            drawn = [
                _simulated(config, bed, jax.random.fold_in(jax.random.fold_in(key, i), j))
                for j, bed in enumerate(beds)
            ]
            row |= {name: np.array([one[name] for one in drawn]) for name in drawn[0]}
        rows.append(row)
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _simulated(config: Config, bed: QuadraticTasks, key: Array) -> dict[str, float]:
    """Means over runs and their standard errors."""
    draws, found = simulate(key, bed, config.runs), {}
    for name in ("excess", "stability"):
        x = np.asarray(getattr(draws, name))
        found[f"simulated_{name}"] = float(x.mean())
        found[f"simulated_{name}_error"] = float(x.std(ddof=1) / len(x) ** 0.5)
    return found
