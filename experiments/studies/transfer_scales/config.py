"""The config of `transfer_scales`, and its presets."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Interval

from experiments.lab.config import (
    Finite,
    NotNegative,
    Positive,
    Rising,
    Seed,
    Share,
    config,
    varied,
)

Angle = Annotated[float, Interval(ge=0, le=180)]
Overlap = Annotated[float, Interval(ge=0, le=1)]
FEATURES = 8
"""One entry in this many is a feature of a task."""


@config
class Config:
    """Sparse tasks for diagonal networks, and tasks for two layers."""

    FORMER: ClassVar = {"gamma": "load"}

    d: Annotated[int, Ge(FEATURES)] = 64
    """Input dimension of the data sets. An eighth of the entries of each task are features. Shares
    of the source are rounded to whole features; multiples of 8 allow the most shares."""
    load: Share = 0.4
    """Load n / d."""
    sigma: NotNegative = 0.1
    """Standard deviation of the label noise of diagonal networks."""
    overlaps: Rising[Overlap] = (0.0, 0.25, 0.375, 0.5, 0.75, 1.0)
    """Shares of the target's features that the source has, for the data sets."""
    scales: Rising[Positive] = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
    """Scales |u^2 - v^2| times the root of d, for the data sets. A feature is 2.8 in this unit."""
    thetas: Rising[Angle] = (40.0, 52.0, 64.0)
    """Angles between the tasks of two layers, in degrees."""
    imbalances: Rising[Finite] = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0)
    """Imbalances of two layers, for the data sets."""
    layers_sigma: NotNegative = 0.8
    """Standard deviation of the label noise of two layers."""
    points: Annotated[int, Ge(2)] = 13
    """Numbers of overlaps and of scales at which theory is computed; ten times as many
    imbalances."""
    draws: Annotated[int, Ge(2)] = 300
    """Data sets for each point."""
    seed: Seed = 0
    """Seed of the data sets."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        d=16,
        overlaps=(0.0, 0.5, 1.0),
        scales=(0.1, 10.0),
        thetas=(40.0, 64.0),
        imbalances=(-2.0, 2.0),
        points=2,
        draws=4,
    ),
}
