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
    """Train base models, tune experts, merge them, and compare predictions with outcomes."""

    seed: Seed = 0
    """Seed of data, initial weights, minibatches, the choice of merges and the bootstrap."""
    families: Different[tasks.Learned] = ("images", "text")
    """What is learned: classes of images, the next token of a text, or both."""
    data: ImagePool = ImagePool()
    """The images."""
    train: Natural = 1197
    """Images to learn from; the rest are held out."""
    learn: Annotated[int, Interval(ge=16, le=600)] = 300
    """Examples of a task that its experts learn from."""
    held_out: Annotated[int, Interval(ge=64, le=300)] = 160
    """Held-out examples of a task; 32 of them are for the probes."""
    text: TextData = TextData()
    """The text."""
    bases: Annotated[int, Ge(2)] = 4
    """Base models of each length of pre-training; at least 2, for merges of unrelated ones."""
    pretrain: Different[Count] = (0, 100, 500)
    """Lengths of pre-training, in steps of Adam; 0 is a random initialisation that is shared."""
    steps: Increasing[Natural] = (10, 40, 160)
    """Steps of fine-tuning at which experts are taken."""
    sizes: Different[Annotated[int, Ge(2)]] = (2, 3, 4)
    """How many experts are merged."""
    merges: Natural = 2
    """Merges of experts of each base model, rate and number of steps."""
    chunk: Natural = 24
    """Merges measured at a time."""
    draws: Annotated[int, Ge(2)] = 500
    """Bootstrap samples of base models, for the intervals."""

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
