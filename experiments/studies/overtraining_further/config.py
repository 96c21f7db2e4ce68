"""The config of `overtraining_further` and its presets."""

from typing import Annotated

from annotated_types import Ge

from experiments.lab.config import Increasing, Natural, Positive, Rising, Seed, config, varied


@config
class Decay:
    """Noise after pre-training, by the decay of the spectrum."""

    d: Annotated[int, Ge(2)] = 8
    """Width of all layers."""
    threshold: Positive = 0.5
    """2 d gamma^2: noise makes it not worth while to learn modes that are smaller."""
    decays: Rising[Positive] = (0.4, 0.5, 0.6, 0.75, 0.9, 1.05, 1.2, 1.35, 1.5, 1.7, 1.9, 2.2, 2.5)
    """Decays at which networks are trained; theory's line goes from the first to the last."""
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
    """Bits at which the best time is looked for."""
    shown: Increasing[Natural] = (3, 4, 6)
    """Bits at which the rise of the loss is shown along pre-training."""
    times: Annotated[int, Ge(2)] = 14
    """Times at which the rise is measured."""
    draws: Annotated[int, Ge(2)] = 600
    """Rotations of the hidden units in which a network is rounded."""


@config
class Config:
    """The parts, and what they share."""

    scale: Positive = 2.0
    """Largest singular value."""
    tau: Positive = 6.0
    """Logarithm of the initial weights, negated."""
    points: Annotated[int, Ge(2)] = 400
    """Points of theory's lines."""
    decay: Decay = Decay()
    bits: Bits = Bits()
    seed: Seed = 0
    """Seed of singular vectors, noise and rotations."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        tau=2.0,
        points=5,
        decay={"d": 3, "threshold": 0.6, "decays": (0.5, 1.5), "draws": 20},
        bits={"d": 3, "bits": (2, 3), "shown": (3,), "times": 3, "draws": 20},
    ),
}
