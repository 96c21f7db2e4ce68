"""The configuration of `merge_prediction` and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval

from experiments.data import image_tasks
from experiments.data.registry import ImagePool, TextData
from experiments.lab.config import Count, Different, Increasing, Natural, Seed, config, varied
from experiments.studies.merge_prediction import tasks
from experiments.studies.shared.checking import must


@config
class Config:
    """Train base models, fine-tune experts, merge them, and compare predictions with results."""

    seed: Seed = 0
    """Seed of data, initial weights, minibatches, the choice of merges and the bootstrap."""
    families: Different[tasks.Learned] = ("images", "text")
    """The families of tasks: 'images' (classify images), 'text' (predict the next token), or
    both."""
    data: ImagePool = ImagePool()
    """The images."""
    train: Natural = 1197
    """Number of training images; the rest are held out."""
    learn: Annotated[int, Interval(ge=16, le=600)] = 300
    """Number of examples of a task on which its experts are trained."""
    held_out: Annotated[int, Interval(ge=64, le=300)] = 160
    """Number of held-out examples of a task; 32 of them are for the probes."""
    text: TextData = TextData()
    """The text."""
    bases: Annotated[int, Ge(2)] = 4
    """Number of base models for each length of pre-training; at least 2, to merge unrelated
    ones."""
    pretrain: Different[Count] = (0, 100, 500)
    """Lengths of pre-training, in steps of Adam; 0 is a shared random initialisation."""
    steps: Increasing[Natural] = (10, 40, 160)
    """Steps of fine-tuning after which experts are kept."""
    sizes: Different[Annotated[int, Ge(2)]] = (2, 3, 4)
    """Numbers of experts in a merge."""
    merges: Natural = 2
    """Number of merges for each base model, rate and number of steps."""
    chunk: Natural = 24
    """Number of merges measured at a time."""
    draws: Annotated[int, Ge(2)] = 500
    """Number of bootstrap samples of base models, for the intervals."""

    def __post_init__(self) -> None:
        if "images" in self.families:
            image_tasks.check_classes("data", tasks.TASKS["images"], self.data.classes)
            image_tasks.check_left("train", self.train, 0, self.data.size)
        most = min(len(tasks.TASKS[name]) for name in self.families)
        few = max(self.sizes) <= most
        must(self, "sizes", few, f"be at most {most}, the number of tasks")


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        families=("images",),
        bases=2,
        pretrain=(20,),
        steps=(5, 20),
        sizes=(2,),
        merges=1,
        draws=20,
    ),
}
