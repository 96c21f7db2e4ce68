"""What `transfer_phase` can be told, and its presets."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.lab import validate


@dataclass(frozen=True)
class Config:
    """Target data sets of n = gamma d samples in d dimensions, from a source at angle theta."""

    d: int = 500
    """Input dimension."""
    draws: int = 20
    """Independent target data sets per point."""
    gammas: int = 40
    """Number of loads gamma = n/d, evenly spaced midpoints of (0, gamma_max)."""
    gamma_max: float = 2.0
    """Largest load."""
    thetas: int = 41
    """Number of angles from 0 to pi/2; 8 k + 1 puts the slices on the grid."""
    sigmas: tuple[float, ...] = (0.0, 0.2)
    """Standard deviations of the label noise."""
    depths: tuple[float, ...] = (1, 2, 4)
    """Numbers of layers of the fine-tuned network; inf is allowed."""
    modes: tuple[Literal["linear", "fine_tune"], ...] = ("linear", "fine_tune")
    """Ways of transfer to show."""
    seed: int = 0
    """Seed of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=4, draws=2, gammas=2, thetas=9)
        validate.positive(self, "gamma_max")
        validate.positive(self, "sigmas", zero=True)
        validate.different(self, "sigmas", "depths", "modes")
        if self.thetas % 8 != 1:
            raise ValueError(f"thetas must be 8 k + 1 (9, 17, ..., 41, ...); got {self.thetas}")
        if not all(depth >= 1 for depth in self.depths):
            raise ValueError(f"depths must be at least 1; got {self.depths}")
        if not set(self.modes) <= {"linear", "fine_tune"}:
            raise ValueError(f"modes must be linear or fine_tune, or both; got {self.modes}")
        n = self.counts()
        if n[0] <= 2:
            raise ValueError(
                f"the smallest load gives n = {n[0]} samples; linear transfer has a finite mean "
                "from n = 3 on: raise d or gamma_max, or lower gammas"
            )
        if len(np.unique(n)) < len(n):
            raise ValueError(
                f"{self.gammas} loads up to {self.gamma_max} coincide at d = {self.d}; raise d or "
                "lower gammas"
            )
        if max(self.sigmas) > 0 and (near := n[np.abs(n - self.d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of d = {self.d}, where the mean risk is infinite for "
                "sigma > 0: change gammas or gamma_max"
            )

    def counts(self) -> np.ndarray:
        """Samples n at each load."""
        midpoints = (np.arange(self.gammas) + 0.5) / self.gammas * self.gamma_max
        return np.round(midpoints * self.d).astype(int)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=24, draws=4, gammas=8, thetas=9, depths=(1, 2))

    @classmethod
    def quick(cls) -> "Config":
        """A coarser diagram in a smaller dimension."""
        return cls(d=200, draws=10, gammas=20, thetas=25)


# The paper's figures; figure 7 is figure 6 beside its simulation, which ours always shows.
_NOISELESS = Config(sigmas=(0.0,), modes=("linear",))


PRESETS: dict[str, Config] = {
    "default": Config(),
    "figure_1": Config(sigmas=(0.2,), modes=("linear",)),
    "figure_3": Config(sigmas=(0.2,), modes=("fine_tune",), depths=(2,)),
    "figure_6": _NOISELESS,
    "figure_7": _NOISELESS,
    "depth": Config(
        sigmas=(0.5,), modes=("fine_tune",), depths=(1, 2, 3, 4, np.inf), gamma_max=1.2
    ),
    "noise": Config(sigmas=(0.0, 0.2, 0.5, 1.0), depths=(2,)),
    "quick": Config.quick(),
    "tiny": Config.tiny(),
}
