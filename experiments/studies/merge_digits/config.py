"""What `merge_digits` is told, and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval

from experiments.data import digits
from experiments.lab.config import Natural, Positive, Seed, Some, config, varied


@config
class Training:
    """Gradient descent with momentum, whose learning rate decays to 0 along a cosine."""

    steps: Natural
    """Steps of training."""
    rate: Positive = 0.1
    """Learning rate in the beginning."""
    batch: Natural = 64
    """Digits per step, drawn with replacement."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Momentum: the share of a step that the next one repeats."""


@config
class Merging:
    """Task arithmetic and TIES, whose scales are chosen on held-out digits."""

    density: Annotated[float, Interval(gt=0, le=1)] = 0.2
    """Fraction of each task vector that TIES keeps."""
    scales: Annotated[int, Ge(2)] = 20
    """How many scales are tried, evenly spaced up to the largest."""
    largest: Positive = 2.0
    """Largest scale that is tried."""


@config
class Config:
    """Pre-train on upright digits, fine-tune on each task, merge."""

    seed: Seed = 0
    """Seed of the splits, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 5
    """Independent repetitions, each with its own split; at least 2, for the spread."""
    tasks: digits.Tasks = ("rotate -20", "rotate 20", "digits 0-4", "digits 5-9")
    """What the experts learn: 'rotate <degrees>', 'digits <first>-<last>' or 'upright'."""
    widths: Some[Natural] = (256,)
    """Units of each hidden layer."""
    train: Natural = 1000
    """Digits to learn from, of 1797."""
    validation: Natural = 300
    """Digits to choose the scales with; the rest are the test set."""
    pretraining: Training = Training(steps=300)
    tuning: Training = Training(steps=200)
    merging: Merging = Merging()
    line_points: Annotated[int, Ge(2)] = 21
    """Points on the line between the first two experts, ends included."""

    def __post_init__(self) -> None:
        room = digits.EXAMPLES - self.train
        if self.validation >= room:
            raise ValueError(
                f"validation must be below {room}, to leave digits for the test; got "
                f"{self.validation}"
            )


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "quick": varied(
        DEFAULT,
        replicates=3,
        widths=(128,),
        pretraining={"steps": 200},
        tuning={"steps": 100},
        merging={"scales": 10},
    ),
    "tiny": varied(
        DEFAULT,
        replicates=2,
        tasks=("rotate -20", "digits 0-4"),
        widths=(8,),
        pretraining={"steps": 20},
        tuning={"steps": 10},
        merging={"scales": 3},
        line_points=3,
    ),
}
