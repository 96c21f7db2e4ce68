"""The configuration of `proximal_gamma` and its presets."""

from math import gcd
from typing import Annotated

from annotated_types import Ge, Interval
from pydantic import AfterValidator

from experiments.data.registry import OtherText, TextData
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
from experiments.studies.shared.gamma_sweep import Line, Start


def _from_zero(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Checks that the fractions start with 0, the case for comparison."""
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
    """The overlaps between the parts of the text. The pair (0, 0) is swept for every kind of
    start."""

    alphas: Shares = (0.0, 0.5, 1.0)
    """Overlaps of the sources with each other, the first one 0."""
    betas: Shares = (0.0, 0.5)
    """Overlaps of both sources with the target, the first one 0."""
    steps: Count = 50
    """Steps on the target after which overlaps are compared; one of the looks."""

    def pairs(self) -> list[tuple[float, float]]:
        """Lists all combinations of overlaps."""
        return [(alpha, beta) for alpha in self.alphas for beta in self.betas]


@config
class Blocks:
    """The blocks into which the text is cut."""

    length: Annotated[int, Ge(2)] = 48
    """Number of tokens of a block (characters, for the offline text). The GPT reads all but the
    last, and predicts the next."""
    of_text: Natural | None = None
    """Number of blocks drawn from each text before everything else, at most all of them; None for
    all. Held-out blocks are drawn in the same way."""
    source: Natural = 6000
    """Number of blocks of a source."""
    distance: Annotated[int, Ge(4)] = 800
    """Number of blocks that represent a part in distances; at most a source's."""
    held_out: Annotated[int, Ge(2)] = 128
    """Number of blocks to measure the loss on. They resemble the target, but are held out."""

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
    tied: bool = False
    """Whether the output layer is the transposed embedding."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must be a divisor of width = {self.width}; got {self.heads}")


@config
class Training:
    """The training of every model, by Adam with a warmup and a constant rate."""

    steps: Natural = 400
    """Steps on a source, and on the target from scratch."""
    batch: Natural = 8
    """Blocks per step, drawn with replacement."""
    rate: Positive = 3e-3
    """The highest learning rate."""
    warmup: Natural = 20
    """Steps over which the learning rate rises from 0."""


@config
class Config:
    """Train a GPT on each source, merge at every gamma, train on the target."""

    seed: Seed = 0
    """Seed of the sources, initial weights and minibatches."""
    replicates: Annotated[int, Ge(2)] = 5
    """Number of independent repetitions, each with its own sources and models; at least 2."""
    starts: Different[Start] = ("shared", "independent")
    """Whether the two models begin with 'shared' or 'independent' initial weights. The overlap
    sweep uses the first kind."""
    data: TextData = TextData()
    """The text of the sources."""
    target_data: OtherText = OtherText()
    """The text of the target. If it is another text, all of it is D_t (Fig. 2d)."""
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
    """The training of every model."""
    tsne: Count = 0
    """Number of blocks of each part that t-SNE places on a map (Figs. 2a and 4); 0 draws no map."""
    at_once: Natural = 256
    """Networks trained side by side, over all seeds and gammas; more networks need more memory."""

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
                f"training.steps must be a multiple of {self.every} (which divides the looks) "
                "and at "
                f"least {least}; got {steps}"
            )

    @property
    def every(self) -> int:
        """The largest number of steps that divides all `looks`."""
        return gcd(*self.looks)

    @property
    def vocab(self) -> int:
        """The size of the vocabulary, from the name or read by `training.resolved`."""
        vocab = self.data.known_vocab
        assert vocab is not None, "the vocabulary has not been read yet"
        return vocab

    def network(self) -> GPT:
        """Builds the GPT of this config.

        Returns the network, without weights.
        """
        sizes = self.gpt
        return GPT(
            vocab=self.vocab,
            context=self.blocks.length - 1,
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            head_dim=sizes.width // sizes.heads,
            hidden=4 * sizes.width,
            tied=sizes.tied,
        )


DEFAULT = Config()
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
# SAIL, Sec. 4.3 and 4.4 and App. H.1: nanoGPT with 6 layers and 384 units, blocks of 1024 GPT-2
# tokens of OpenWebText, gamma from -1 to 2 by .1, looks after 50, 100 and 200 steps. Hours on a
# large accelerator
PAPER = varied(
    DEFAULT,
    data=TextData("openwebtext"),
    replicates=2,  # the paper has one; two is the minimum here
    # From 0 to 1 in the paper, by quarters here (our choice).
    overlaps={"alphas": _QUARTERS, "betas": _QUARTERS},
    # The amount of text is not printed: 61 million tokens (our choice). A source may have half of a
    # third of it, because beta = 1 takes both sources from the target.
    blocks={
        "length": 1024,
        "of_text": 60_000,
        "source": 10_000,
        "distance": 500,
        "held_out": 256,
    },
    # Heads of 64 units and tied embeddings, as in nanoGPT.
    gpt={"width": 384, "layers": 6, "heads": 6, "tied": True},
    # Not printed: nanoGPT's rate and batch (without accumulation); steps and warm-up are our
    # choice.
    training={"steps": 2000, "batch": 12, "rate": 6e-4, "warmup": 100},
    tsne=300,
    at_once=2,
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "paper": PAPER,
    # From OpenWebText to WikiText-103 (Figs. 2d and 4).
    "paper_wikitext": varied(
        PAPER,
        target_data=OtherText("wikitext-103"),
        overlaps={"alphas": (0.0,), "betas": (0.0,)},
    ),
    # Seconds, for tests.
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
