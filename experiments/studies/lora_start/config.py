"""The config of `lora_start` and its presets."""

from typing import Annotated

from annotated_types import Ge

from experiments.lab.config import Increasing, Natural, Positive, Rising, Seed, config, varied


@config
class Config:
    """Adapters, residuals and sizes.

    A rank above the width, or fewer inputs than directions, raises ValueError.
    """

    width: Annotated[int, Ge(2)] = 512
    """Number of inputs i. A is r x i."""
    ranks: Rising[Natural] = (1, 4, 16)
    """Ranks r in the panel of the rows."""
    rows: Rising[Positive] = (0.01, 0.03, 0.1, 0.33, 1.0, 3.0, 10.0)
    """Squared norms of a row of A, i times the variance of an entry, over the residual."""
    shown: Increasing[Positive] = (0.03, 0.33, 3.0)
    """Squared norms of a row in the other panels."""
    rank: Natural = 8
    """The rank in the other panels."""
    directions: Rising[Positive] = (0.25, 0.4, 0.63, 1.0)
    """Singular values of a residual whose directions are learned together."""
    ratios: Rising[Positive] = (0.5, 0.71, 0.84, 1.0, 1.19, 1.41, 2.0)
    """Ratios of the frozen weights of two layers, whose product is 1."""
    starts: Rising[Positive] = (0.001, 0.03, 0.3, 1.0)
    """Entries of both A in the panel of two layers."""
    target: Annotated[float, Ge(1.5)] = 4.0
    """Target of the mode in the panel of two layers."""
    seeds: Annotated[int, Ge(2)] = 16
    """Number of adapters for each point."""
    points: Annotated[int, Ge(3)] = 60
    """Points of each curve in closed form."""
    seed: Seed = 0
    """Seed of A."""

    def __post_init__(self) -> None:
        if max(*self.ranks, self.rank) > self.width:
            raise ValueError(
                f"ranks and rank must be at most width = {self.width}; "
                f"got {self.ranks} and {self.rank}"
            )
        if len(self.directions) > self.width:
            raise ValueError(
                f"directions must be at most width = {self.width} numbers; got {self.directions}"
            )


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        width=16,
        ranks=(1, 4),
        rows=(0.03, 0.33, 3.0),
        shown=(0.33,),
        rank=2,
        directions=(0.5, 1.0),
        ratios=(0.5, 1.0),
        starts=(0.03, 0.3),
        seeds=2,
        points=4,
    ),
}
