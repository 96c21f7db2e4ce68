"""What `transfer_factors` can be told, and its presets."""

from dataclasses import dataclass
from math import pi
from typing import Literal

import numpy as np

from experiments.lab import validate

Factor = Literal["spectrum", "time", "source"]


@dataclass(frozen=True)
class Config:
    """Loads x values of one factor, at one angle and noise."""

    factor: Factor = "spectrum"
    """What varies besides the load."""
    values: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Its values: exponents >= 0, times >= 0 (inf allowed), or source loads > 0 (inf allowed)."""
    theta: float = pi / 4
    """Angle between the tasks in the inner product of the inputs, in radians."""
    sigma: float = 0.3
    """Standard deviation of the label noise, of source and target data."""
    depth: int = 2
    """Layers of the fine-tuned network."""
    d: int = 160
    """Input dimension."""
    draws: int = 20
    """Independent data sets per point."""
    gammas: int = 16
    """Number of loads gamma = n/d, evenly spaced midpoints of (gamma_min, gamma_max)."""
    gamma_min: float = 0.0
    """Lower end of the loads."""
    gamma_max: float = 2.0
    """Upper end of the loads."""
    seed: int = 0
    """Seed of the tasks and of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=4, draws=2, gammas=2, depth=1)
        validate.positive(self, "sigma", zero=True)
        allowed = {
            "spectrum": ("finite exponents >= 0", lambda v: 0 <= v < np.inf),
            "time": ("times >= 0", lambda v: v >= 0),
            "source": ("loads > 0", lambda v: v > 0),
        }
        if self.factor not in allowed:
            raise ValueError(f"factor must be one of {', '.join(allowed)}; got {self.factor!r}")
        words, ok = allowed[self.factor]
        ascending = all(a < b for a, b in zip(self.values, self.values[1:], strict=False))
        if not self.values or not all(map(ok, self.values)) or not ascending:
            raise ValueError(f"values must be ascending {words}; got {self.values}")
        if not 0 <= self.theta <= pi:
            raise ValueError(f"theta must be an angle in [0, pi]; got {self.theta}")
        if not 0 <= self.gamma_min < self.gamma_max < np.inf:
            raise ValueError(
                f"need 0 <= gamma_min < gamma_max; got {self.gamma_min} and {self.gamma_max}"
            )
        n = self.counts()
        if n[0] <= 2 or len(np.unique(n)) < len(n):
            raise ValueError(
                f"loads must give different n >= 3; got {n.tolist()}: raise d or lower gammas"
            )
        if (near := n[np.abs(n - self.d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of d = {self.d}, where the mean risk is infinite: "
                "change gammas, gamma_min or gamma_max"
            )

    def counts(self) -> np.ndarray:
        """Samples n at each load."""
        share = (np.arange(self.gammas) + 0.5) / self.gammas
        load = self.gamma_min + share * (self.gamma_max - self.gamma_min)
        return np.round(load * self.d).astype(int)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(values=(0.0, 1.0), d=16, draws=4, gammas=4)


TIMES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, np.inf)
SOURCES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, np.inf)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "spectrum": Config(),
    "time": Config(factor="time", values=TIMES, depth=1),
    "source": Config(factor="source", values=SOURCES),
    "early_stopping": Config(
        factor="time",
        values=(30.0, 100.0, 1000.0, np.inf),
        theta=pi / 8,
        sigma=0.2,
        gamma_min=0.7,
        gamma_max=1.3,
    ),
    "tiny": Config.tiny(),
}
