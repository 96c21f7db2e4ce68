"""The config of `divergences`, and its presets."""

from math import pi
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Interval
from pydantic import AfterValidator

from experiments.lab.config import Different, Positive, Seed, config, varied
from sail_jax import distances

NORMS = {"Manhattan": 1, "Euclidean": 2}
MODES = {"linear": "linear transfer", "fine_tuning": "fine-tuning"}


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("must be odd")
    return number


@config
class Config:
    """Source and target at angles from 0 to pi, at several loads.

    ValueError is raised if two loads give the same number of samples, if a load gives fewer than 5
    samples or fewer than 4 away from d, or if the first load gives too many samples for matching.
    """

    FORMER: ClassVar = {"gammas": "loads"}

    d: Annotated[int, Ge(4)] = 500
    """Input dimension."""
    loads: Different[Positive] = (0.5, 0.2, 1.5)
    """Loads n/d, all different. The panels of transferability against a distance show the first."""
    sigma: Positive = 0.2
    """Standard deviation of the label noise, positive: at 0 the KL divergence is infinite."""
    thetas: Annotated[int, Ge(5), AfterValidator(_odd)] = 17
    """Number of angles from 0 to pi; an odd number, to include pi/2."""
    draws: Annotated[int, Ge(2)] = 20
    """Number of simulated target data sets for each load."""
    points: Annotated[int, Interval(ge=2, le=distances.LARGEST)] = 300
    """Number of points matched for W_1 and the Dudley metric, in the three dimensions in which the
    laws differ."""
    matchings: Annotated[int, Ge(2)] = 5
    """Number of independent repetitions of that matching."""
    samplings: Annotated[int, Ge(2)] = 6
    """Number of independent estimates of W_1 in d dimensions, from loads[0] d points of each
    law."""
    seed: Seed = 0
    """Seed of all samples."""

    def __post_init__(self) -> None:
        n = self.counts()
        if len(set(n)) < len(n):
            raise ValueError(f"loads must differ in n = load d; got {self.loads}")
        if min(n) < 5 or any(abs(k - self.d) < 4 for k in n):
            raise ValueError(
                "loads must have n = load d at least 5, and 4 or more away from d = "
                f"{self.d} (otherwise the variance of the risks is infinite); got n = {n}"
            )
        if n[0] > distances.LARGEST:
            raise ValueError(f"loads[0] d must be at most {distances.LARGEST}; got {n[0]}")

    def counts(self) -> list[int]:
        """Computes the number of samples n at each load."""
        return [round(load * self.d) for load in self.loads]

    def angles(self) -> np.ndarray:
        """Computes the angles between source and target."""
        return np.linspace(0, pi, self.thetas)


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "figure_5": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        d=12,
        loads=(0.5, 1.5),
        thetas=5,
        draws=4,
        points=20,
        matchings=2,
        samplings=2,
    ),
}
