"""What `ridge_transfer` can be told, and its presets."""

from dataclasses import dataclass
from math import pi

from experiments.lab import validate


@dataclass(frozen=True)
class Config:
    """Two cases side by side: the paper's, and one with few samples."""

    d: int = 500
    """Input dimension."""
    ns: tuple[int, int] = (250, 10)
    """Target samples of each case."""
    thetas: tuple[float, float] = (pi / 8, 3 * pi / 8)
    """Source-target angle of each case, in radians."""
    sigma: float = 0.2
    """Standard deviation of the label noise."""
    ridges: int = 21
    """Number of ridge strengths, evenly spaced from 0."""
    ridge_max: tuple[float, float] = (0.5, 2.0)
    """Largest ridge strength of each case."""
    draws: int = 2000
    """Simulated target data sets per case."""
    seed: int = 0
    """Seed of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=2, draws=2, ridges=2)
        validate.positive(self, "sigma", zero=True)
        validate.positive(self, "ridge_max")
        if min(self.ns) <= 4:
            raise ValueError(
                f"ns must be at least 5 (below, the variance at ridge 0 is infinite); got {self.ns}"
            )
        if not all(0 <= t < pi / 2 for t in self.thetas):
            raise ValueError(f"thetas must be in [0, pi/2); got {self.thetas}")

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=8, ns=(30, 5), ridges=3, draws=50)

    @classmethod
    def figure_2(cls) -> "Config":
        """The paper's 20 draws."""
        return cls(draws=20)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "figure_2": Config.figure_2(),
    "tiny": Config.tiny(),
}
