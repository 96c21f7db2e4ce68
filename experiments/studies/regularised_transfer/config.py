"""The config of `regularised_transfer`, and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval

from experiments.lab.config import Natural, Positive, Rising, Seed, config, varied


@config
class Config:
    """Sizes of the problems, and numbers of data sets."""

    d: Annotated[int, Interval(ge=8, le=200)] = 40
    """Input dimension, a multiple of 2."""
    sigma: Positive = 0.2
    """Standard deviation of the noise on the target's labels."""
    loads: Rising[Positive] = (0.15, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.9)
    """Loads n/d of the data sets; n is at least 3."""
    angles: Annotated[int, Ge(4)] = 13
    """Angles between the tasks, evenly spaced from 0 to 90 degrees."""
    draws: Annotated[int, Ge(20)] = 600
    """Number of simulated target data sets for each load."""
    source_loads: Rising[Positive] = (0.25, 0.5, 0.7, 1.4, 2.0, 3.0)
    """Loads n_s/d of the source at which sources are drawn."""
    source_sigma: Positive = 0.4
    """Standard deviation of the noise on the source's labels."""
    source_draws: Annotated[int, Ge(20)] = 4000
    """Number of simulated pairs of source and target data sets for each load of the source."""
    variances: tuple[Positive, Positive] = (1.0, 0.2)
    """Variances of the inputs, first where both tasks agree, then where they have opposite
    signs."""
    step: Natural = 1
    """Spacing of the sample numbers at which theory is computed, in addition to those with data."""
    seed: Seed = 0
    """Seed of the simulated data sets."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        d=12,
        loads=(0.5, 1.2),
        angles=4,
        draws=40,
        source_loads=(0.34, 2.0),
        source_draws=400,
        step=2,
    ),
}
