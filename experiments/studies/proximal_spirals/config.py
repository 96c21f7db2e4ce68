"""The configuration of `proximal_spirals` and its presets."""

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, MultipleOf

from experiments.data.spirals import Sources
from experiments.lab.config import (
    Count,
    Different,
    Increasing,
    Natural,
    NotNegative,
    Positive,
    Seed,
    config,
    varied,
)
from experiments.studies.shared.gamma_sweep import Line, Start


@config
class Spirals:
    """The points of two spirals."""

    points: Annotated[int, Ge(20), MultipleOf(2)] = 500
    """Training points, half on each spiral; even."""
    test: Annotated[int, Ge(2), MultipleOf(2)] = 1000
    """Number of new points for the accuracy; even, and at least a source's number."""
    share: Annotated[float, Gt(0), Le(0.5)] = 0.4
    """Share of the training points in each source, at most 0.5."""
    turns: Positive = 1.0
    """Turns of a spiral."""
    noise: NotNegative = 0.05
    """Standard deviation of the points around the spiral (the radius is 1)."""

    def __post_init__(self) -> None:
        if self.test < self.count:
            raise ValueError(
                f"test must be at least {self.count}, the points of a source; got {self.test}"
            )

    @property
    def count(self) -> int:
        """Points of a source."""
        return round(self.share * self.points)


@config
class Training:
    """The training of every model, by Adam."""

    epochs: Natural = 300
    """Epochs on the sources and on the target."""
    batch: Natural = 100
    """Points per step; a divisor of the training points and of a source's points."""
    rate: Positive = 5e-3
    """Learning rate."""
    every: Natural = 10
    """Epochs between two measurements."""

    def __post_init__(self) -> None:
        if self.epochs % self.every:
            raise ValueError(
                f"epochs must be a multiple of every = {self.every}; got {self.epochs}"
            )


@config
class Config:
    """Train two models on parts of the spirals, merge at every gamma, train on all of them."""

    seed: Seed = 0
    """Seed of the points, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 8
    """Number of independent repetitions, each with its own points and models; at least 2."""
    sources: Different[Sources] = ("classes", "radii", "random")
    """The construction of the two sources: 'classes' (App. K), 'radii' or 'random'."""
    starts: Different[Start] = ("shared", "independent")
    """Whether the two models begin with 'shared' or 'independent' initial weights."""
    data: Spirals = Spirals()
    """The points of the spirals."""
    hidden: Natural = 50
    """Hidden ReLU units."""
    training: Training = Training()
    """The training of every model."""
    looks: Increasing[Count] = (0, 10, 50, 300)
    """Epochs at which loss is shown against gamma and the best gamma is determined."""
    gamma: Line = Line()
    """The values of gamma."""
    loss_epochs: Natural = 10
    """Epochs of training through which the loss of eq. 3 is differentiated."""
    loss_steps: Natural = 100
    """Steps of the descent on that loss."""

    def __post_init__(self) -> None:
        training, data = self.training, self.data
        if data.points % training.batch or data.count % training.batch:
            raise ValueError(
                f"training.batch must be a divisor of {data.points} training points and of "
                f"{data.count} in a source; got {training.batch}"
            )
        if self.loss_epochs > training.epochs:
            raise ValueError(
                f"loss_epochs must be at most training.epochs = {training.epochs}; got "
                f"{self.loss_epochs}"
            )
        if not set(self.looks) <= set(self.epoch().tolist()):
            raise ValueError(
                f"looks must be multiples of training.every = {training.every} up to "
                f"training.epochs = {training.epochs}; got {self.looks}"
            )

    def epoch(self) -> np.ndarray:
        """Lists the epochs at which everything is measured."""
        return np.arange(0, self.training.epochs + 1, self.training.every)


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # More repetitions and choices: an accelerator, or half an hour.
    "paper": varied(
        DEFAULT,
        replicates=32,
        data={"points": 1000},
        training={"every": 5},
        gamma={"points": 61},
        loss_steps=300,
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        replicates=2,
        sources=("classes", "radii"),
        starts=("shared",),
        data={"points": 40, "test": 40},
        hidden=8,
        training={"epochs": 8, "batch": 8, "every": 4},
        looks=(0, 8),
        gamma={"points": 7},
        loss_epochs=1,
        loss_steps=3,
    ),
}
