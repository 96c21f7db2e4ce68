"""What `transfer_phase` can be told, and its presets."""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge
from pydantic import AfterValidator

from experiments.lab.config import Different, NotNegative, Positive, Seed, config, varied


def _with_slices(thetas: int) -> int:
    if thetas % 8 != 1:
        raise ValueError("must be 8 k + 1 (9, 17, ..., 41, ...)")
    return thetas


@config
class Config:
    """Target data sets of n = gamma d samples in d dimensions, from a source at angle theta."""

    d: Annotated[int, Ge(4)] = 500
    """Input dimension."""
    draws: Annotated[int, Ge(2)] = 20
    """Independent target data sets per point."""
    gammas: Annotated[int, Ge(2)] = 40
    """Number of loads gamma = n/d, evenly spaced midpoints of (0, gamma_max)."""
    gamma_max: Positive = 2.0
    """Largest load."""
    thetas: Annotated[int, Ge(9), AfterValidator(_with_slices)] = 41
    """Number of angles from 0 to pi/2; 8 k + 1 puts the slices on the grid."""
    sigmas: Different[NotNegative] = (0.0, 0.2)
    """Standard deviations of the label noise."""
    depths: Different[Annotated[float, Ge(1)]] = (1, 2, 4)
    """Numbers of layers of the fine-tuned network; inf is allowed."""
    modes: Different[Literal["linear", "fine_tune"]] = ("linear", "fine_tune")
    """Ways of transfer to show: 'linear', 'fine_tune', or both."""
    seed: Seed = 0
    """Seed of the simulated data sets."""

    def __post_init__(self) -> None:
        n = self.counts()
        if n[0] <= 2:
            raise ValueError(
                f"the smallest load gives n = {n[0]} samples; linear transfer has a finite mean "
                "from n = 3 on: raise d or gamma_max, or lower gammas"
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


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "figure_1": varied(DEFAULT, sigmas=(0.2,), modes=("linear",)),
    "figure_3": varied(DEFAULT, sigmas=(0.2,), modes=("fine_tune",), depths=(2,)),
    # Figure 7 is Figure 6 beside its simulation, which ours always shows
    "figure_6_7": varied(DEFAULT, sigmas=(0.0,), modes=("linear",)),
    "depth": varied(
        DEFAULT,
        gamma_max=1.2,
        sigmas=(0.5,),
        depths=(1, 2, 3, 4, np.inf),
        modes=("fine_tune",),
    ),
    "noise": varied(DEFAULT, sigmas=(0.0, 0.2, 0.5, 1.0), depths=(2,)),
    # a coarser diagram in a smaller dimension
    "quick": varied(DEFAULT, d=200, draws=10, gammas=20, thetas=25),
    # seconds, for tests
    "tiny": varied(DEFAULT, d=24, draws=4, gammas=8, thetas=9, depths=(1, 2)),
}
