"""The config of `overtraining_lora` and its presets."""

from typing import Annotated

from annotated_types import Ge

from experiments.lab.config import Increasing, Natural, Positive, Seed, config, varied
from experiments.studies.shared.linear_overtraining import Tasks


@config
class Adapter:
    """The adapters, and the fine-tuning time of adapters and whole networks."""

    ranks: Increasing[Natural] = (1, 2, 4)
    """Ranks r, at most the width d."""
    scale: Positive = 2.0
    """The scale s of B A."""
    start: Positive = 0.1
    """Standard deviation of the entries of A, or its entry in each leading mode; B is initially
    0."""
    time: Positive = 0.3
    """Time of fine-tuning, learning rate times steps, in the panels of the pre-training time."""
    steps: Natural = 300
    """Steps of SGD in that time."""


@config
class Networks:
    """The trained networks."""

    times: Annotated[int, Ge(2)] = 8
    """Number of pre-training times at which networks are fine-tuned."""
    seeds: Annotated[int, Ge(2)] = 6
    """Number of networks for each point."""
    batch: Natural = 64
    """Samples per step of SGD."""
    rate: Positive = 0.01
    """Learning rate of pre-training."""
    until: Positive = 40.0
    """Time that counts as the end of fine-tuning."""
    shares: Annotated[int, Ge(2)] = 9
    """Number of points along the pre-trained share of a mode."""


@config
class Config:
    """Tasks, adapters and networks."""

    tasks: Tasks = Tasks(d=8, decay=0.7, tau=4.0, ratio=3.0)
    adapter: Adapter = Adapter()
    networks: Networks = Networks()
    points: Annotated[int, Ge(3)] = 100
    """Points of each curve in closed form."""
    seed: Seed = 0
    """Seed of tasks, batches and adapters."""

    def __post_init__(self) -> None:
        if self.adapter.ranks[-1] > self.tasks.d:
            raise ValueError(
                f"adapter.ranks must be at most tasks.d = {self.tasks.d}; got {self.adapter.ranks}"
            )
        # Gradient descent is stable below 1 / (2 sigma_1); batches fluctuate.
        bound = 1 / (4 * self.tasks.scale)
        if self.networks.rate > bound:
            raise ValueError(
                f"networks.rate must be at most 1 / (4 tasks.scale) = {bound:g} to be stable; "
                f"got {self.networks.rate}"
            )


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        points=5,
        tasks={"d": 3, "tau": 2.0},
        adapter={"ranks": (1, 2), "steps": 20},
        networks={"times": 3, "seeds": 2, "batch": 8, "until": 10.0, "shares": 3},
    ),
}
