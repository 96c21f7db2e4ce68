"""The config of `choice_prediction`, and its presets."""

from typing import Annotated, Literal

from annotated_types import Ge, Interval

from experiments.data.registry import ImagePool, TextData
from experiments.lab.config import (
    Different,
    Increasing,
    Natural,
    NotNegative,
    Positive,
    Rising,
    Seed,
    config,
    varied,
)
from experiments.studies.shared.checking import must

Learned = Literal["images", "text"]
Flip = Annotated[float, Interval(ge=0, lt=0.5)]


@config
class Levels:
    """The levels of each factor. Each level occurs about equally often."""

    samples: Increasing[Annotated[int, Ge(8)]] = (12, 24, 48, 96, 192)
    """Training samples n of a target task, of images."""
    text_samples: Increasing[Annotated[int, Ge(8)]] = (24, 48, 96, 192, 384)
    """Training samples n of a target task, of a text."""
    flips: Different[Annotated[int, Interval(ge=0, le=10)]] = (0, 1, 2, 3, 5, 8)
    """How many of the ten classes have another label than in the source's task."""
    noises: Different[Flip] = (0.0, 0.1, 0.25)
    """Fractions of wrong training labels."""
    source: Increasing[Natural] = (60, 400)
    """Training samples of the source, of images."""
    text_source: Increasing[Natural] = (1600, 9600)
    """Training samples of the source, of a text."""
    experts: Different[Annotated[int, Interval(ge=2, le=6)]] = (2, 4)
    """Experts in a merge."""


@config
class Training:
    """How networks are trained, by Adam on the squared error."""

    steps: Natural = 300
    """Steps of every training but the source's."""
    every: Natural = 30
    """Every training may end before its first step, and after every so many. A divisor of
    `steps`."""
    expert_steps: Natural = 120
    """Steps of the experts that are merged. A multiple of `every`, at most `steps`."""
    batch: Natural = 16
    """Samples in a minibatch."""
    source_batch: Natural = 64
    """Samples in a minibatch of the source."""
    source_steps: Natural = 600
    """Steps of the source."""
    rate: Positive = 3e-3
    """Learning rate."""
    penalties: Rising[NotNegative] = (1e-3, 1e-2, 1e-1)
    """Penalties of scratch training, transfer and L2-SP."""

    def __post_init__(self) -> None:
        must(self, "every", self.steps % self.every == 0, "be a divisor of steps")
        ends = range(self.every, self.steps + 1, self.every)
        must(self, "expert_steps", self.expert_steps in ends, "be a multiple of every, up to steps")


@config
class Config:
    """The settings, and the networks that are trained in each."""

    families: Different[Learned] = ("images", "text")
    """'images' (an MLP), 'text' (a GPT), or both."""
    transfers: Natural = 32
    """Settings of transfer in each family."""
    merges: Natural = 12
    """Settings of merges in each family."""
    seeds: Annotated[int, Ge(2)] = 3
    """Repetitions of each setting, with other data and initial weights."""
    levels: Levels = Levels()
    """The factors."""
    training: Training = Training()
    """The training."""
    data: ImagePool = ImagePool()
    """The images. Label c belongs to the class c modulo 10."""
    text: TextData = TextData()
    """The text."""
    validation: Annotated[int, Ge(16)] = 150
    """Examples that choose penalties and stopping times, with clean labels."""
    test: Annotated[int, Ge(16)] = 300
    """Examples of the test loss, with clean labels."""
    draws: Annotated[int, Ge(100)] = 2000
    """Draws of a forecast, and bootstrap samples of settings."""
    chunk: Natural = 24
    """Repetitions that are computed together."""
    seed: Seed = 1
    """Seed of the settings, data and initial weights."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Other settings. The study was developed on this seed, and on 0.
    "pilot": varied(DEFAULT, transfers=10, merges=8, seeds=2, seed=1000),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        families=("images",),
        transfers=4,
        merges=2,
        seeds=2,
        levels={"samples": (12, 16), "experts": (2,)},
        training={
            "steps": 20,
            "source_steps": 20,
            "every": 10,
            "expert_steps": 10,
            "penalties": (1e-3, 1e-2),
        },
        validation=16,
        test=32,
        draws=100,
    ),
}
