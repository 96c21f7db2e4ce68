"""What `divergences` can be told, and its presets."""

from dataclasses import dataclass
from math import pi

import numpy as np

from experiments.lab import validate
from sail_jax import distances

NORMS = {"Manhattan": 1, "Euclidean": 2}
MODES = {"linear": "linear transfer", "fine_tune": "fine-tuning"}


@dataclass(frozen=True)
class Config:
    """Source and target at angles over [0, pi], at the loads named."""

    d: int = 500
    """Input dimension."""
    gammas: tuple[float, ...] = (0.5, 0.2, 1.5)
    """Loads n/d, all different; the panels against each distance take the first."""
    sigma: float = 0.2
    """Standard deviation of the label noise, positive: at 0 the KL divergence is infinite."""
    thetas: int = 17
    """Number of angles from 0 to pi; odd, so that pi/2 is among them."""
    draws: int = 20
    """Simulated target data sets per load."""
    points: int = 300
    """Points matched for W_1 and Dudley in the three dimensions in which the laws differ."""
    matchings: int = 5
    """Independent repetitions of that."""
    samplings: int = 6
    """Independent estimates of W_1 from n = gammas[0] d points of either law in d dimensions."""
    seed: int = 0
    """Seed of all samples."""

    def __post_init__(self):
        validate.at_least(self, d=4, thetas=5, draws=2, points=2, matchings=2, samplings=2)
        validate.positive(self, "sigma", "gammas")
        if self.points > distances.LARGEST:
            raise ValueError(f"points must be at most {distances.LARGEST}; got {self.points}")
        if self.thetas % 2 == 0:
            raise ValueError(f"thetas must be odd; got {self.thetas}")
        n = self.counts()
        if not n or len(set(n)) < len(n):
            raise ValueError(f"gammas must differ in n = gamma d; got {self.gammas}")
        if min(n) < 5 or any(abs(k - self.d) < 4 for k in n):
            raise ValueError(
                "gammas must have n = gamma d at least 5, and 4 or more away from d = "
                f"{self.d} (elsewhere the risks have no finite variance); got n = {n}"
            )
        if n[0] > distances.LARGEST:
            raise ValueError(f"gammas[0] d must be at most {distances.LARGEST}; got {n[0]}")

    def counts(self) -> list[int]:
        """Samples n at each load."""
        return [round(gamma * self.d) for gamma in self.gammas]

    def angles(self) -> np.ndarray:
        return np.linspace(0, pi, self.thetas)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=12, gammas=(0.5, 1.5), thetas=5, draws=4, points=20, matchings=2, samplings=2)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "figure_5": Config(),
    "tiny": Config.tiny(),
}
