"""The config of `ridge_transfer`, and its presets."""

from math import pi
from typing import Annotated

from annotated_types import Ge, Interval

from experiments.lab.config import NotNegative, Positive, Seed, config, varied

Samples = Annotated[int, Ge(5)]
Angle = Annotated[float, Interval(ge=0, lt=pi / 2)]


@config
class Config:
    """Two cases side by side: the paper's, and one with few samples."""

    d: Annotated[int, Ge(2)] = 500
    """Input dimension."""
    ns: tuple[Samples, Samples] = (250, 10)
    """Numbers of target samples, one for each case. They are at least 5, because with fewer the
    variance at ridge 0 is infinite."""
    thetas: tuple[Angle, Angle] = (pi / 8, 3 * pi / 8)
    """Angles between source and target, one for each case, in radians, below pi/2."""
    sigma: NotNegative = 0.2
    """Standard deviation of the label noise."""
    ridges: Annotated[int, Ge(2)] = 21
    """Number of ridge strengths, evenly spaced from 0."""
    ridge_max: tuple[Positive, Positive] = (0.5, 2.0)
    """Largest ridge strengths, one for each case."""
    draws: Annotated[int, Ge(2)] = 2000
    """Number of simulated target data sets for each case."""
    seed: Seed = 0
    """Seed of the simulated data sets."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # The paper's 20 draws.
    "figure_2": varied(DEFAULT, draws=20),
    # Seconds, for tests.
    "tiny": varied(DEFAULT, d=8, ns=(30, 5), ridges=3, draws=50),
}
