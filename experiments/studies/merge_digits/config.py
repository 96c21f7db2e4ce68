"""The configuration of `merge_digits` and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval

from experiments.data import image_tasks
from experiments.data.registry import ImagePool
from experiments.lab.config import Natural, Positive, Seed, Some, config, varied


@config
class Training:
    """Gradient descent with momentum. Its learning rate decays to 0 along a cosine."""

    steps: Natural
    """Training steps."""
    rate: Positive = 0.1
    """Initial learning rate."""
    batch: Natural = 64
    """Images per step, drawn with replacement."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Momentum: the share of a step that the next one repeats."""


@config
class Merging:
    """Task arithmetic and TIES. Their scales are chosen on held-out images."""

    density: Annotated[float, Interval(gt=0, le=1)] = 0.2
    """Fraction of each task vector that TIES keeps."""
    scales: Annotated[int, Ge(2)] = 20
    """Number of scales to try, evenly spaced up to the largest."""
    largest: Positive = 2.0
    """Largest scale to try."""


@config
class Config:
    """Pre-train on upright images, fine-tune on each task, merge."""

    seed: Seed = 0
    """Seed of the splits, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 5
    """Number of independent repetitions, each with its own split; at least 2, for the spread."""
    data: ImagePool = ImagePool()
    """The images."""
    tasks: image_tasks.Tasks = ("rotate -20", "rotate 20", "classes 0-4", "classes 5-9")
    """The experts' tasks: 'rotate <degrees>', 'classes <first>-<last>' or 'upright'."""
    widths: Some[Natural] = (256,)
    """Units of each hidden layer."""
    train: Natural = 1000
    """Number of training images."""
    validation: Natural = 300
    """Number of images to choose the scales with; the rest are the test set."""
    pretraining: Training = Training(steps=300)
    """The training of the base network."""
    tuning: Training = Training(steps=200)
    """The fine-tuning of experts."""
    merging: Merging = Merging()
    """The merges of the experts."""
    line_points: Annotated[int, Ge(2)] = 21
    """Number of points on the line between the first two experts, including the ends."""

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
