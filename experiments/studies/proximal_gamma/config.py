"""What `proximal_gamma` can be told."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from experiments.data import text
from experiments.lab import validate
from experiments.models.gpt import GPT
from experiments.training.gamma_sweep import STARTS, Start


@dataclass(frozen=True)
class Config:
    """Train a GPT on either source, merge at every gamma, train on the target."""

    seed: int = 0
    """Seed of the sources, initial weights and minibatches."""
    replicates: int = 4
    """Independent repetitions, each with its own sources and models; at least 2, for the spread."""
    starts: tuple[Start, ...] = ("shared", "independent")
    """Whether the two models start from the 'shared' or from 'independent' initial weights; the
    first is that of the overlap sweep."""
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Overlaps of the sources with each other, the first one 0."""
    betas: tuple[float, ...] = (0.0, 0.5)
    """Overlaps of both with the target, the first one 0."""
    looks: tuple[int, ...] = (0, 50, 100, 200)
    """Steps on the target after which the loss is measured."""
    overlap_steps: int = 50
    """Steps on the target for the overlaps; among `looks`."""
    gammas: int = 31
    """Values of gamma, evenly spaced."""
    gamma_min: float = -1.0
    """Smallest gamma."""
    gamma_max: float = 2.0
    """Largest gamma."""
    block: int = 48
    """Tokens (characters) of a block; the GPT sees all but the last, and predicts the next."""
    source_blocks: int = 6000
    """Blocks of a source."""
    distance_blocks: int = 800
    """Blocks that stand for a part in distances; at least 4 and at most `source_blocks`."""
    held_out: int = 128
    """Blocks for the loss, like the target's, from modules kept from training."""
    width: int = 32
    """Units of the GPT's stream."""
    layers: int = 2
    """Blocks of the GPT."""
    heads: int = 2
    """Attention heads; must divide the width."""
    source_steps: int = 400
    """Steps of training on a source, and on the target from scratch."""
    batch: int = 8
    """Blocks per step, drawn with replacement."""
    rate: float = 3e-3
    """Adam's learning rate, for all training."""
    warmup: int = 20
    """Steps over which the rate rises from 0."""
    at_once: int = 256
    """Networks trained side by side, of all seeds and gammas: memory."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, gammas=3, block=2, held_out=2, distance_blocks=4)
        validate.at_least(
            self, width=1, layers=1, heads=1, source_steps=1, batch=1, warmup=1, at_once=1
        )
        validate.at_least(self, source_blocks=self.distance_blocks)
        validate.positive(self, "rate")
        validate.different(self, "starts", "alphas", "betas", "looks")
        if odd := [name for name in self.starts if name not in STARTS]:
            raise ValueError(f"starts must be among {', '.join(STARTS)}; got '{odd[0]}'")
        for field in ("alphas", "betas"):
            shares = getattr(self, field)
            if shares[0] != 0 or list(shares) != sorted(shares) or shares[-1] > 1:
                raise ValueError(f"{field} must rise from 0 and not exceed 1; got {shares}")
        if self.looks[0] < 0 or list(self.looks) != sorted(self.looks) or not self.looks[-1]:
            raise ValueError(f"looks must be increasing steps, not all 0; got {self.looks}")
        checks = [
            ("overlap_steps", self.overlap_steps in self.looks, f"among looks = {self.looks}"),
            ("gamma_max", self.gamma_max > self.gamma_min, f"above gamma_min = {self.gamma_min}"),
            ("heads", self.width % self.heads == 0, f"a divisor of width = {self.width}"),
            (
                "source_steps",
                self.source_steps >= self.looks[-1] and self.source_steps % self.every == 0,
                f"a multiple of {self.every} (of which looks are) and at least {self.looks[-1]}",
            ),
        ]
        validate.holds(self, checks)

    @property
    def every(self) -> int:
        """The steps of which all `looks` are multiples."""
        return gcd(*self.looks)

    def gamma(self) -> np.ndarray:
        return np.linspace(self.gamma_min, self.gamma_max, self.gammas)

    def overlaps(self) -> list[tuple[float, float]]:
        return [(alpha, beta) for alpha in self.alphas for beta in self.betas]

    def network(self) -> GPT:
        return GPT(
            vocab=text.VOCAB,
            context=self.block - 1,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.width // self.heads,
            hidden=4 * self.width,
        )

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"block": 16, "width": 8, "layers": 1, "batch": 4, "gammas": 7}
        blocks: dict[str, Any] = {"source_blocks": 200, "distance_blocks": 40, "held_out": 16}
        short: dict[str, Any] = {"source_steps": 40, "looks": (0, 20, 40), "overlap_steps": 40}
        some: dict[str, Any] = {"alphas": (0.0,), "betas": (0.0, 0.5), "starts": ("shared",)}
        return cls(replicates=2, warmup=5, **sizes, **blocks, **short, **some)

    @classmethod
    def paper(cls) -> "Config":
        """The paper's blocks and a GPT of the size of GPT-2's smallest, on the text there is: hours
        on a large accelerator."""
        shares = (0.0, 0.25, 0.5, 0.75, 1.0)
        blocks: dict[str, Any] = {"block": 1024, "source_blocks": 500, "distance_blocks": 500}
        sizes: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12, "at_once": 2}
        long: dict[str, Any] = {"source_steps": 2000, "rate": 6e-4, "warmup": 100}
        return cls(alphas=shares, betas=shares, **blocks, **sizes, **long)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "paper": Config.paper(),
    "tiny": Config.tiny(),
}
