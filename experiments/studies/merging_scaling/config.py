"""The configuration of `merging_scaling` and its presets."""

import dataclasses
from typing import Annotated, Any, get_args

from annotated_types import Ge, Interval, Lt

from experiments.data import image_tasks
from experiments.data.registry import ImagePool
from experiments.lab.config import (
    Count,
    Finite,
    Increasing,
    Natural,
    NotNegative,
    Positive,
    Seed,
    Some,
    config,
    varied,
)
from theory.merging.scaling import Law

LAWS: tuple[Law, ...] = get_args(Law)


@config
class Swept:
    """What is swept, one at a time; the middle value of each is the centre for the others."""

    steps: Increasing[Natural] = (10, 30, 100, 300, 1000)
    """Steps K of fine-tuning."""
    batch: Increasing[Natural] = (1, 4, 16, 64, 128)
    """Samples b per step, drawn with replacement."""
    rate: Increasing[Annotated[Positive, Lt(2)]] = (0.02, 0.06, 0.2, 0.5, 1.0)
    """Learning rates of fine-tuning; from 2 on the quadratics, of largest curvature 1, diverge."""
    samples: Increasing[Annotated[int, Ge(2)]] = (10, 30, 100, 200, 350)
    """Samples n per task."""
    tasks: Increasing[Natural] = (1, 2, 4, 6, 8)
    """How many experts N are merged."""

    def __post_init__(self) -> None:
        for law, values in dataclasses.asdict(self).items():
            if not len(values) == len(self.steps) >= 3 or len(values) % 2 == 0:
                raise ValueError(
                    f"{law} must be 3, 5, 7, ... values, as many of each; got {values}"
                )


@config
class Pretraining:
    """How the network that all experts start from is trained, in steps of 64 upright images."""

    images: Natural = 500
    """Upright images to pre-train on."""
    steps: Natural = 600
    """Steps of pre-training."""
    rate: Positive = 0.2
    """Learning rate of pre-training."""


@config
class Merging:
    """The ways to merge."""

    density: Annotated[float, Interval(gt=0, le=1)] = 0.2
    """Fraction of each task vector that TIES keeps."""
    drop: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    """Fraction of each task vector that DARE drops."""
    ada_steps: Count = 100
    """Steps of AdaMerging, from the average."""
    ada_rate: Positive = 0.001
    """Adam's learning rate in AdaMerging; the default is its authors'."""


@config
class Quadratics:
    """The testbed: quadratic losses, of which excess risk and stability are known exactly."""

    dimensions: Natural = 8
    """Dimensions of the quadratics."""
    condition: Annotated[Finite, Ge(1)] = 100.0
    """Ratio of the largest to the smallest curvature."""
    spread: NotNegative = 0.5
    """Standard deviation of the tasks' centres about a point at distance 1 from the start."""
    noise: NotNegative = 1.0
    """Standard deviation of a sample about its task's centre."""
    runs: Count = 400
    """Simulations of the quadratics at each value; 0 draws none, and leaves the closed forms."""

    def __post_init__(self) -> None:
        if self.runs == 1:
            raise ValueError("runs must be 0, or at least 2 for their spread; got 1")


@config
class Config:
    """Merge fine-tuned networks, and quadratics, under every setting of the sweep."""

    seed: Seed = 0
    """Seed of the splits, weights, minibatches and centres."""
    replicates: Annotated[int, Ge(2)] = 8
    """Independent repetitions, each with its own split and order of tasks; at least 2."""
    swept: Swept = Swept()
    """The values of each hyperparameter."""
    data: ImagePool = ImagePool()
    """The images."""
    tasks: image_tasks.Tasks = (
        *(f"rotate {angle}" for angle in (-60, -40, -20, 20, 40, 60)),
        "classes 0-4",
        "classes 5-9",
    )
    """What experts learn: 'rotate <degrees>', 'classes <first>-<last>' or 'upright'."""
    widths: Some[Natural] = (64,)
    """Units of each hidden layer."""
    pool: Natural = 800
    """Images to fine-tune on, none of them seen before; the rest are the test set."""
    pretraining: Pretraining = Pretraining()
    """How the network that experts start from is trained."""
    merging: Merging = Merging()
    """How experts are merged."""
    quadratics: Quadratics = Quadratics()
    """The testbed of quadratic losses."""

    def __post_init__(self) -> None:
        image_tasks.check_classes("tasks", self.tasks, self.data.classes)
        self.check_left(self.data.size)
        most = len(self.tasks)
        if self.swept.tasks[-1] > most:
            raise ValueError(
                f"swept.tasks must be at most the number of tasks, {most}; got {self.swept.tasks}"
            )

    def check_left(self, examples: int | None) -> None:
        """Checks that images are left for the test.

        Args:
          examples: The number of images, or None if it is not known yet, which passes.

        Raises:
          ValueError: If none is left beside those for pre-training and fine-tuning.
        """
        image_tasks.check_left("pool", self.pool, self.pretraining.images, examples)

    def values(self, law: Law) -> tuple[float, ...]:
        """Returns the values of one hyperparameter.

        Args:
          law: The hyperparameter.

        Returns:
          Its values, increasing.
        """
        return getattr(self.swept, law)

    def at(self, law: Law | None = None, value: float | None = None) -> dict[str, Any]:
        """Returns a setting of all hyperparameters: the centre, with at most one of them changed.

        Args:
          law: The hyperparameter to change; None changes none.
          value: Its value.

        Returns:
          The value of each hyperparameter, by name.
        """
        centre = {name: self.values(name)[len(self.swept.steps) // 2] for name in LAWS}
        return centre if law is None else centre | {law: value}


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # as many task groups as the paper's, and wider networks
    "many": varied(
        DEFAULT,
        replicates=15,
        widths=(256, 256),
        merging={"ada_steps": 500},
        quadratics={"runs": 4000},
    ),
    "tiny": varied(
        DEFAULT,
        replicates=2,
        swept={
            "steps": (5, 20, 40),
            "batch": (4, 8, 16),
            "rate": (0.1, 0.2, 0.4),
            "samples": (5, 10, 20),
            "tasks": (1, 2, 3),
        },
        tasks=("rotate -30", "rotate 30", "classes 0-4"),
        widths=(8,),
        pretraining={"steps": 60},
        merging={"ada_steps": 3},
        quadratics={"dimensions": 2, "runs": 0},
    ),
}
