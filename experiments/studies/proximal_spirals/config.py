"""What `proximal_spirals` can be told."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.data import spirals
from experiments.data.spirals import Sources
from experiments.lab import validate
from experiments.training.gamma_sweep import STARTS, Start


@dataclass(frozen=True)
class Config:
    """Train two models on parts of the spirals, merge at every gamma, train on all of them."""

    seed: int = 0
    """Seed of the points, initial weights and minibatches."""
    replicates: int = 8
    """Independent repetitions, each with its own points and models; at least 2, for the spread."""
    sources: tuple[Sources, ...] = ("classes", "radii", "random")
    """How the two sources are cut out: 'classes' (App. K), 'radii' or 'random'."""
    starts: tuple[Start, ...] = ("shared", "independent")
    """Whether the two models start from the 'shared' or from 'independent' initial weights."""
    points: int = 500
    """Training points, half on each spiral; even."""
    test: int = 1000
    """Fresh points for the accuracy; even."""
    share: float = 0.4
    """Share of the training points in each source, at most 0.5."""
    turns: float = 1.0
    """Turns of a spiral."""
    noise: float = 0.05
    """Standard deviation of the points about it (the radius is 1)."""
    hidden: int = 50
    """Hidden ReLU units."""
    rate: float = 5e-3
    """Adam's learning rate, for all training."""
    batch: int = 100
    """Points per step; divides the training points and those of a source."""
    epochs: int = 300
    """Epochs of training, on the sources and on the target."""
    every: int = 10
    """Epochs between two measurements; divides `epochs`."""
    looks: tuple[int, ...] = (0, 10, 50, 300)
    """Epochs at which loss is shown against gamma and the best gamma is sought."""
    gammas: int = 31
    """Values of gamma, evenly spaced."""
    gamma_min: float = -1.0
    """Smallest gamma."""
    gamma_max: float = 2.0
    """Largest gamma."""
    loss_epochs: int = 10
    """Epochs of training through which eq. 3 is descended."""
    loss_steps: int = 100
    """Steps of that descent."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, points=20, test=2, hidden=1, batch=1, gammas=3)
        validate.at_least(self, epochs=1, every=1, loss_epochs=1, loss_steps=1)
        validate.positive(self, "turns", "rate", "share")
        validate.positive(self, "noise", zero=True)
        validate.different(self, "sources", "starts", "looks")
        for field, known in (("sources", spirals.SOURCES), ("starts", tuple(STARTS))):
            if odd := [name for name in getattr(self, field) if name not in known]:
                raise ValueError(f"{field} must be among {', '.join(known)}; got '{odd[0]}'")
        allowed = range(0, self.epochs + 1, self.every)
        checks = [
            ("points", self.points % 2 == 0, "even"),
            ("test", self.test % 2 == 0, "even"),
            ("share", self.share <= 0.5, "at most 0.5"),
            ("epochs", self.epochs % self.every == 0, f"a multiple of every = {self.every}"),
            ("test", self.test >= self.count, f"at least {self.count}, the points of a source"),
            ("loss_epochs", self.loss_epochs <= self.epochs, f"at most epochs = {self.epochs}"),
            (
                "looks",
                set(self.looks) <= set(allowed) and list(self.looks) == sorted(self.looks),
                f"increasing multiples of every = {self.every} up to epochs = {self.epochs}",
            ),
            ("gamma_max", self.gamma_max > self.gamma_min, f"above gamma_min = {self.gamma_min}"),
            (
                "batch",
                self.points % self.batch == self.count % self.batch == 0,
                f"a divisor of {self.points} training points and of {self.count} in a source",
            ),
        ]
        validate.holds(self, checks)

    @property
    def count(self) -> int:
        """Points of a source."""
        return round(self.share * self.points)

    def gamma(self) -> np.ndarray:
        return np.linspace(self.gamma_min, self.gamma_max, self.gammas)

    def epoch(self) -> np.ndarray:
        """Epochs at which everything is measured."""
        return np.arange(0, self.epochs + 1, self.every)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"points": 40, "test": 40, "batch": 8, "hidden": 8, "gammas": 7}
        short: dict[str, Any] = {"epochs": 8, "every": 4, "looks": (0, 8)}
        one: dict[str, Any] = {"sources": ("classes", "radii"), "starts": ("shared",)}
        return cls(replicates=2, loss_epochs=1, loss_steps=3, **sizes, **short, **one)

    @classmethod
    def paper(cls) -> "Config":
        """More of everything that the paper leaves open: an accelerator, or half an hour."""
        return cls(replicates=32, points=1000, every=5, gammas=61, loss_steps=300)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "paper": Config.paper(),
    "tiny": Config.tiny(),
}
