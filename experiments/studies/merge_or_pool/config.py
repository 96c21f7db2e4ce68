"""The config of `merge_or_pool`, and its presets."""

from math import pi
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from experiments.lab.config import NotNegative, Positive, Rising, Seed, config, varied

Angle = Annotated[float, Interval(ge=0, le=pi / 2)]


@config
class Config:
    """Sizes of the problems, and the values that vary in each panel.

    A d that is not a multiple of 4, and loads of fewer than d + 4 samples, raise ValueError.
    """

    d: Annotated[int, Ge(8)] = 24
    """Dimension, a multiple of 4."""
    tasks: Annotated[int, Ge(2)] = 4
    """Number of tasks."""
    sigma: Positive = 0.5
    """Standard deviation of the label noise."""
    decay: NotNegative = 1.0
    """Exponent of the decay of the inputs' eigenvalues. 0 is uncorrelated inputs."""
    loads: Rising[Annotated[float, Gt(1)]] = (1.25, 1.5, 2.0, 3.0, 5.0)
    """Samples per dimension of an expert without a penalty."""
    few_loads: Rising[Positive] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Samples per dimension of an expert with its best penalty."""
    spreads: Rising[Positive] = (0.05, 0.2, 0.8, 3.2)
    """Variance of the teachers in the norm of the curvature, in units of the noise's variance."""
    angles: Rising[Angle] = (0.0, pi / 8, pi / 4, 3 * pi / 8, pi / 2)
    """Angles between the eigenvectors of the curvatures, in radians."""
    cells: Annotated[int, Ge(2)] = 24
    """Points of theory's maps along each axis."""
    draws: Annotated[int, Ge(2)] = 200
    """Data sets for each point. Each point has its own."""
    seed: Seed = 0
    """Seed of the teachers and the data sets."""

    def __post_init__(self) -> None:
        if self.d % 4:
            raise ValueError(f"d must be a multiple of 4; got {self.d}")
        if self.count(self.loads[0]) < self.d + 4:
            raise ValueError(
                f"loads must be at least (d + 4) / d = {(self.d + 4) / self.d:.3g}, or risks have "
                f"no variance; got {self.loads[0]}"
            )

    def count(self, load: float) -> int:
        """Returns the number of samples of an expert."""
        return max(1, round(load * self.d))


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        d=8,
        tasks=2,
        loads=(1.5, 3.0),
        few_loads=(0.5, 2.0),
        spreads=(0.1, 2.0),
        angles=(0.0, pi / 2),
        cells=4,
        draws=20,
    ),
}
