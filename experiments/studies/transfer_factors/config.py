"""The config of `transfer_factors`, and its presets."""

from collections.abc import Callable, Mapping
from math import inf, pi
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Interval

from experiments.lab.config import Increasing, Natural, NotNegative, Positive, Seed, config, varied

Factor = Literal["spectrum", "time", "source"]
VALUES: Mapping[Factor, tuple[str, Callable[[float], bool]]] = {
    "spectrum": ("finite exponents >= 0", lambda v: 0 <= v < inf),
    "time": ("times >= 0", lambda v: v >= 0),
    "source": ("loads > 0", lambda v: v > 0),
}


@config
class Loads:
    """The loads n/d: midpoints of equal parts of a range.

    An empty range raises ValueError.
    """

    number: Annotated[int, Ge(2)] = 16
    """Number of loads."""
    low: NotNegative = 0.0
    """Lower end of the range."""
    high: Positive = 2.0
    """Upper end of the range."""

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise ValueError(f"high must be above low = {self.low}; got {self.high}")


@config
class Config:
    """Loads and values of one factor, at one angle between the tasks and one level of noise.

    ValueError is raised if a value is invalid for the factor, if the loads give fewer than 3
    samples or the same number twice, or if a number of samples is within 1 of d.
    """

    factor: Factor = "spectrum"
    """The factor besides the load: the decay of the input 'spectrum', the training 'time', or the
    load of the 'source'."""
    values: Increasing[float] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Values of the factor: exponents >= 0, times >= 0 (inf allowed), or source loads > 0 (inf
    allowed)."""
    theta: Annotated[float, Interval(ge=0, le=pi)] = pi / 4
    """Angle between the tasks in radians, at most pi, in the inner product of the inputs'
    covariance."""
    sigma: NotNegative = 0.3
    """Standard deviation of the label noise, for source and target data."""
    depth: Natural = 2
    """Layers of the fine-tuned network."""
    d: Annotated[int, Ge(4)] = 160
    """Input dimension."""
    draws: Annotated[int, Ge(2)] = 20
    """Independent data sets for each point."""
    loads: Loads = Loads()
    seed: Seed = 0
    """Seed of the tasks and of the simulated data sets."""

    def __post_init__(self) -> None:
        words, ok = VALUES[self.factor]
        if not all(map(ok, self.values)):
            raise ValueError(f"values must be {words}; got {self.values}")
        n = self.counts()
        if n[0] <= 2 or len(np.unique(n)) < len(n):
            raise ValueError(
                f"loads must give different n >= 3; got {n.tolist()}: raise d or lower loads.number"
            )
        if (near := n[np.abs(n - self.d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of d = {self.d}, where the mean risk is infinite: "
                "change loads.number, loads.low or loads.high"
            )

    def counts(self) -> np.ndarray:
        """Computes the number of samples n at each load.

        Returns the numbers, increasing.
        """
        loads = self.loads
        share = (np.arange(loads.number) + 0.5) / loads.number
        return np.round((loads.low + share * (loads.high - loads.low)) * self.d).astype(int)


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "spectrum": DEFAULT,
    "time": varied(
        DEFAULT, factor="time", values=(1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, inf), depth=1
    ),
    "source": varied(DEFAULT, factor="source", values=(0.25, 0.5, 0.8, 1.25, 2.0, 4.0, inf)),
    "early_stopping": varied(
        DEFAULT,
        factor="time",
        values=(30.0, 100.0, 1000.0, inf),
        theta=pi / 8,
        sigma=0.2,
        loads={"low": 0.7, "high": 1.3},
    ),
    # Seconds, for tests.
    "tiny": varied(DEFAULT, values=(0.0, 1.0), d=16, draws=4, loads={"number": 4}),
}
