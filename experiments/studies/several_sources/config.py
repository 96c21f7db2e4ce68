"""The config of `several_sources`, and its presets."""

from math import pi
from typing import Annotated

from annotated_types import Ge, Interval, Lt

from experiments.lab.config import NotNegative, Positive, Rising, Seed, config, varied

Angle = Annotated[float, Interval(ge=0, le=pi / 2)]


@config
class Config:
    """Sizes of the data sets, and the values that vary in each panel.

    A d that is not a multiple of 16 raises ValueError.
    """

    d: Annotated[int, Ge(16)] = 96
    """Dimension, a multiple of 16."""
    noises: Rising[Positive] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    """Noise of the second source, which has the target's task. The first source has noise 0.5 and a
    task at 0.5 rad."""
    angles: Rising[Angle] = (0.0, pi / 8, pi / 4, 3 * pi / 8, pi / 2)
    """Angles by which the directions of the source's inputs are rotated, in radians."""
    shares: Rising[Annotated[float, Ge(0), Lt(1)]] = (
        *(0.02, 0.05, 0.1, 0.17, 0.23, 0.28),
        *(0.5, 0.6, 0.7, 0.8, 0.9),
    )
    """Numbers of directions as shares of d; shares near n = 0.375 d are left out."""
    sigma: NotNegative = 0.5
    """Standard deviation of the target's label noise."""
    draws: Annotated[int, Ge(2)] = 300
    """Data sets for each point."""
    seed: Seed = 0
    """Seed of the data sets."""

    def __post_init__(self) -> None:
        if self.d % 16:
            raise ValueError(f"d must be a multiple of 16; got {self.d}")

    def samples(self) -> int:
        """Returns the number of target samples of the third panel."""
        return 3 * self.d // 8

    def ranks(self) -> list[int]:
        """Returns the numbers of directions, increasing. None is within 3 of n."""
        counts = {max(1, round(share * self.d)) for share in self.shares} | {self.d}
        return sorted(k for k in counts if abs(k - self.samples()) > 3)


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT, d=16, noises=(0.2, 1.6), angles=(0.0, pi / 2), shares=(0.1, 0.8), draws=40
    ),
}
