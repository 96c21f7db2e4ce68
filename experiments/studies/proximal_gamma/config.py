"""The configuration of `proximal_gamma` and its presets."""

from math import gcd
from typing import Annotated

from annotated_types import Ge, Interval
from pydantic import AfterValidator

from experiments.data import text
from experiments.lab.config import (
    Count,
    Different,
    Increasing,
    Natural,
    Positive,
    Seed,
    config,
    varied,
)
from experiments.models.gpt import GPT
from experiments.training.gamma_sweep import Line, Start


def _from_zero(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Checks that the shares begin with 0, the case that others are compared with."""
    if shares[0] != 0:
        raise ValueError("must begin with 0")
    return shares


Shares = Annotated[
    Increasing[Annotated[float, Interval(ge=0, le=1)]],
    AfterValidator(_from_zero),
]
"""Shares in [0, 1], increasing from 0."""


@config
class Overlaps:
    """How much the parts of the text have in common; the pair (0, 0) is swept from every start."""

    alphas: Shares = (0.0, 0.5, 1.0)
    """Overlaps of the sources with each other, the first one 0."""
    betas: Shares = (0.0, 0.5)
    """Overlaps of both sources with the target, the first one 0."""
    steps: Count = 50
    """Steps on the target after which overlaps are compared; one of the looks."""

    def pairs(self) -> list[tuple[float, float]]:
        """Lists all combinations of overlaps.

        Returns:
          Pairs (alpha, beta), the first of them (0, 0).
        """
        return [(alpha, beta) for alpha in self.alphas for beta in self.betas]


@config
class Blocks:
    """The blocks into which the text is cut."""

    length: Annotated[int, Ge(2)] = 48
    """Tokens (characters) of a block; the GPT sees all but the last, and predicts the next."""
    source: Natural = 6000
    """Blocks of a source."""
    distance: Annotated[int, Ge(4)] = 800
    """Blocks that stand for a part in distances; at most those of a source."""
    held_out: Annotated[int, Ge(2)] = 128
    """Blocks on which the loss is measured, like the target's, from modules kept from training."""

    def __post_init__(self) -> None:
        if self.source < self.distance:
            raise ValueError(
                f"source must be at least distance = {self.distance}; got {self.source}"
            )


@config
class Sizes:
    """The size of a GPT."""

    width: Natural = 32
    """Units of the stream that runs through the layers."""
    layers: Natural = 2
    """Number of layers."""
    heads: Natural = 2
    """Attention heads; they divide the width."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must be a divisor of width = {self.width}; got {self.heads}")


@config
class Training:
    """How every model is trained, by Adam at a rate that rises and then stays."""

    steps: Natural = 400
    """Steps on a source, and on the target from scratch."""
    batch: Natural = 8
    """Blocks per step, drawn with replacement."""
    rate: Positive = 3e-3
    """Highest learning rate."""
    warmup: Natural = 20
    """Steps over which the learning rate rises from 0."""


@config
class Config:
    """Train a GPT on each source, merge at every gamma, train on the target."""

    seed: Seed = 0
    """Seed of the sources, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 5
    """Independent repetitions, each with its own sources and models; at least 2, for the spread."""
    starts: Different[Start] = ("shared", "independent")
    """Whether the two models start from the 'shared' or from 'independent' initial weights; the
    first is that of the overlap sweep."""
    overlaps: Overlaps = Overlaps()
    """The overlaps of sources and target."""
    looks: Increasing[Count] = (0, 50, 100, 200)
    """Steps on the target after which the loss is measured."""
    gamma: Line = Line()
    """The values of gamma."""
    blocks: Blocks = Blocks()
    """The blocks of text."""
    gpt: Sizes = Sizes()
    """The size of every model."""
    training: Training = Training()
    """How every model is trained."""
    at_once: Natural = 256
    """Networks trained side by side, of all seeds and gammas: more take more memory."""

    def __post_init__(self) -> None:
        if self.looks == (0,):
            raise ValueError(f"looks must not end before training; got {self.looks}")
        if self.overlaps.steps not in self.looks:
            raise ValueError(
                f"overlaps.steps must be among looks = {self.looks}; got {self.overlaps.steps}"
            )
        steps, least = self.training.steps, self.looks[-1]
        if steps < least or steps % self.every:
            raise ValueError(
                f"training.steps must be a multiple of {self.every} (of which looks are) and at "
                f"least {least}; got {steps}"
            )

    @property
    def every(self) -> int:
        """The greatest number of steps of which all `looks` are multiples."""
        return gcd(*self.looks)

    def network(self) -> GPT:
        """Builds the GPT of this config.

        Returns:
          The network, without weights.
        """
        sizes = self.gpt
        return GPT(
            vocab=text.VOCAB,
            context=self.blocks.length - 1,
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            head_dim=sizes.width // sizes.heads,
            hidden=4 * sizes.width,
        )


DEFAULT = Config()
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # the paper's blocks and a GPT of the size of GPT-2's smallest, on the text there is: hours on a
    # large accelerator
    "paper": varied(
        DEFAULT,
        overlaps={"alphas": _QUARTERS, "betas": _QUARTERS},
        blocks={"length": 1024, "source": 500, "distance": 500},
        gpt={"width": 768, "layers": 12, "heads": 12},
        training={"steps": 2000, "rate": 6e-4, "warmup": 100},
        at_once=2,
    ),
    # seconds, for tests
    "tiny": varied(
        DEFAULT,
        replicates=2,
        starts=("shared",),
        overlaps={"alphas": (0.0,), "steps": 40},
        looks=(0, 20, 40),
        gamma={"points": 7},
        blocks={"length": 16, "source": 200, "distance": 40, "held_out": 16},
        gpt={"width": 8, "layers": 1},
        training={"steps": 40, "batch": 4, "warmup": 5},
    ),
}
