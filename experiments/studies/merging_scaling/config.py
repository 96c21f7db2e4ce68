"""What `merging_scaling` can be told."""

import dataclasses
import itertools
from typing import Any, get_args

from experiments.data import digits
from experiments.lab import validate
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
        validate.holds(self, checks)
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


PRESETS = {"default": Config(), "many": Config.many(), "tiny": Config.tiny()}
