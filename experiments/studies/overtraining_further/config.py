"""The config of `overtraining_further` and its presets."""

import itertools
from typing import Annotated

from annotated_types import Ge, MultipleOf

from experiments.lab.config import (
    Different,
    Increasing,
    Natural,
    NotNegative,
    Positive,
    Rising,
    Seed,
    Some,
    config,
    varied,
)


@config
class Decay:
    """Noise after pre-training, by the decay of the spectrum."""

    d: Annotated[int, Ge(2)] = 8
    """Width of all layers."""
    threshold: Positive = 0.5
    """2 d gamma^2; smaller modes are not worth learning under the noise."""
    decays: Rising[Positive] = (0.4, 0.5, 0.6, 0.75, 0.9, 1.05, 1.2, 1.35, 1.5, 1.7, 1.9, 2.2, 2.5)
    """Decays of the trained networks. Theory's line goes from the first to the last."""
    draws: Annotated[int, Ge(2)] = 1000
    """Draws of noise."""


@config
class Turned:
    """Noise after pre-training on a target with U != V."""

    sigma: Different[Positive] = (2.0, 1.5, 0.6, 0.3)
    """Singular values, descending."""
    gamma: Positive = 0.25
    """Standard deviation of the noise."""
    taus: Rising[Positive] = (1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0)
    """tau for the initial weights e^-tau I."""
    draws: Annotated[int, Ge(2)] = 1000
    """Draws of noise."""


@config
class Bits:
    """Rounding after pre-training."""

    d: Annotated[int, Ge(2)] = 16
    """Width of all layers."""
    decay: Positive = 1.0
    """Exponent by which the singular values fall."""
    bits: Rising[Natural] = (2, 3, 4, 5)
    """Numbers of bits for the best time."""
    shown: Increasing[Natural] = (3, 4, 6)
    """Numbers of bits for the increase of the loss along pre-training."""
    times: Annotated[int, Ge(2)] = 14
    """Number of times at which the increase is measured."""
    draws: Annotated[int, Ge(2)] = 600
    """Number of rotations of the hidden units in which a network is rounded."""


@config
class Sam:
    """Sharpness-aware minimisation."""

    sigma: Different[Positive] = (2.0, 1.0, 0.5)
    """Singular values, descending."""
    tau: Positive = 3.0
    """tau for the initial weights e^-tau I, where times are measured."""
    rhos: Rising[NotNegative] = (0.0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.22, 0.24)
    """Ascents of the trained networks, in units of the gradient."""
    imbalance: Some[Positive] = (1.5, 1.0, 0.5)
    """a^2 - b^2 of each mode at a minimum, the initial values of normalised descent."""
    length: Positive = 0.1
    """Length of the normalised ascent."""
    rate: Positive = 0.01
    """Learning rate of normalised descent."""
    steps: Natural = 3000
    """Its steps."""
    every: Natural = 300
    """Number of steps between points."""


@config
class Labels:
    """Noise on the labels at every step."""

    sigma: Different[Positive] = (2.0, 1.0, 0.6, 0.3)
    """Singular values, descending."""
    imbalance: Some[Positive] = (1.5, 1.0, 0.5, 0.8)
    """Initial a^2 - b^2 of each mode."""
    noise: Positive = 0.5
    """Standard deviation of the noise."""
    rate: Positive = 0.01
    """Learning rate, initial or constant."""
    steps: Natural = 3000
    """Steps of descent."""
    every: Natural = 250
    """Number of steps between points."""
    networks: Annotated[int, Ge(4), MultipleOf(2)] = 60
    """Number of networks, in pairs with opposite noise."""
    rates: Rising[Positive] = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05)
    """Learning rates before the decay, for one balanced mode of size 1 with noise 1."""
    singles: Annotated[int, Ge(4), MultipleOf(2)] = 1000
    """Number of networks of one mode."""
    averaged: Natural = 600
    """Steps over which their curvature is averaged."""


@config
class Config:
    """The parts, and their common settings."""

    scale: Positive = 2.0
    """Largest singular value."""
    tau: Positive = 6.0
    """tau for the initial weights e^-tau I."""
    points: Annotated[int, Ge(2)] = 400
    """Points of theory's lines."""
    decay: Decay = Decay()
    turned: Turned = Turned()
    bits: Bits = Bits()
    sam: Sam = Sam()
    labels: Labels = Labels()
    seed: Seed = 0
    """Seed of singular vectors, noise and rotations."""

    def __post_init__(self) -> None:
        for name, part in (("turned", self.turned), ("sam", self.sam), ("labels", self.labels)):
            if any(a < b for a, b in itertools.pairwise(part.sigma)):
                raise ValueError(f"{name}.sigma must be descending; got {part.sigma}")
        for name, part in (("sam", self.sam), ("labels", self.labels)):
            if len(part.imbalance) != len(part.sigma):
                raise ValueError(
                    f"{name}.imbalance must have a number for each of {name}.sigma, "
                    f"{len(part.sigma)}; got {len(part.imbalance)}"
                )
            if part.every > part.steps:
                raise ValueError(
                    f"{name}.every must be at most {name}.steps = {part.steps}; got {part.every}"
                )


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        tau=2.0,
        points=5,
        decay={"d": 3, "threshold": 0.6, "decays": (0.5, 1.5), "draws": 20},
        turned={"taus": (1.0, 2.0), "draws": 20},
        bits={"d": 3, "bits": (2, 3), "shown": (3,), "times": 3, "draws": 20},
        sam={"rhos": (0.0, 0.1), "steps": 40, "every": 20},
        labels={"steps": 40, "every": 20, "networks": 4, "rates": (0.01, 0.02), "singles": 4}
        | {"averaged": 20},
    ),
}
