"""The configuration of `merge_digits` and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval

from experiments.data import image_tasks
from experiments.data.registry import ImagePool
from experiments.lab.config import Natural, Positive, Seed, Some, config, varied


@config
class Training:
    """Gradient descent with momentum, whose learning rate decays to 0 along a cosine."""

    steps: Natural
    """Steps of training."""
    rate: Positive = 0.1
    """Learning rate in the beginning."""
    batch: Natural = 64
    """Images per step, drawn with replacement."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Momentum: the share of a step that the next one repeats."""


@config
class Merging:
    """Task arithmetic and TIES, whose scales are chosen on held-out images."""

    density: Annotated[float, Interval(gt=0, le=1)] = 0.2
    """Fraction of each task vector that TIES keeps."""
    scales: Annotated[int, Ge(2)] = 20
    """How many scales are tried, evenly spaced up to the largest."""
    largest: Positive = 2.0
    """Largest scale that is tried."""


@config
class Config:
    """Pre-train on upright images, fine-tune on each task, merge."""

    seed: Seed = 0
    """Seed of the splits, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 5
    """Independent repetitions, each with its own split; at least 2, for the spread."""
    data: ImagePool = ImagePool()
    """The images."""
    tasks: image_tasks.Tasks = ("rotate -20", "rotate 20", "classes 0-4", "classes 5-9")
    """What the experts learn: 'rotate <degrees>', 'classes <first>-<last>' or 'upright'."""
    widths: Some[Natural] = (256,)
    """Units of each hidden layer."""
    train: Natural = 1000
    """Images to learn from."""
    validation: Natural = 300
    """Images to choose the scales with; the rest are the test set."""
    pretraining: Training = Training(steps=300)
    """How the network that experts start from is trained."""
    tuning: Training = Training(steps=200)
    """How experts are trained."""
    merging: Merging = Merging()
    """How experts are merged."""
    line_points: Annotated[int, Ge(2)] = 21
    """Points on the line between the first two experts, ends included."""

    def __post_init__(self) -> None:
        image_tasks.check_classes("tasks", self.tasks, self.data.classes)
        self.check_left(self.data.size)

    def check_left(self, examples: int | None) -> None:
        """Checks that images are left for the test."""
        image_tasks.check_left("validation", self.validation, self.train, examples)


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
        tasks=("rotate -20", "rotate 20", "classes 0-4"),
        widths=(24,),
        pretraining={"steps": 150},
        tuning={"steps": 60},
        merging={"scales": 3, "largest": 1.0, "density": 0.3},
        line_points=3,
    ),
}
