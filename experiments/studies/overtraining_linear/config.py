"""The config of `overtraining_linear` and its presets."""

from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge

from experiments.lab.config import Natural, NotNegative, Positive, Seed, config, varied
from experiments.studies.shared.linear_overtraining import Tasks

Diagram = Literal[
    "perturbation", "learning_rate", "anchor", "misalignment", "sensitivity", "trade_off"
]


# The other axis (rows) of each diagram. The x axis is the pre-training time, or, in "misalignment",
# the decay of the spectrum.
ROWS: Mapping[Diagram, str] = {
    "perturbation": "perturbation $γ$",
    "learning_rate": "fine-tuning rate $η$",
    "anchor": "anchor $λ$",
    "misalignment": "misalignment $σ^{ft} / σ^{pre}$",
    "sensitivity": "perturbation $γ$",
    "trade_off": "exponent $p$ of the rate, $η ∝ t^{-p}$",
}


@config
class Tuning:
    """The fine-tuning of networks, in the diagrams that fine-tune."""

    steps: Natural = 200
    """Steps of gradient descent."""
    rate: Positive = 0.003
    """Learning rate if it does not vary; in trade_off, the rate at short pre-training times."""
    nu: Positive = 3.0
    """Variance of the weights' noise per unit of the learning rate, in trade_off."""


@config
class Networks:
    """The trained networks, for comparison with the closed forms."""

    cells: tuple[Annotated[int, Ge(2)], Annotated[int, Ge(2)]] = (6, 12)
    """Numbers of simulated points along the other axis and along pre-training time."""
    seeds: Annotated[int, Ge(2)] = 4
    """Number of networks for each simulated point."""
    batch: Natural = 64
    """Samples per step of stochastic gradient descent."""
    rate: Positive = 0.01
    """Learning rate of pre-training."""


@config
class Config:
    """One diagram: its tasks, its fine-tuning and its networks."""

    diagram: Diagram = "perturbation"
    """The diagram, by the quantity that varies besides the pre-training time."""
    rows: tuple[NotNegative, NotNegative] = (0.0, 0.35)
    """Range of the other axis, besides the pre-training time (in `misalignment`, the decay)."""
    points: Annotated[int, Ge(3)] = 100
    """Closed-form points along either axis."""
    tasks: Tasks = Tasks()
    tuning: Tuning = Tuning()
    networks: Networks = Networks()
    seed: Seed = 0
    """Seed of tasks, batches and noise."""

    def __post_init__(self) -> None:
        low, high = self.rows
        if high <= low:
            raise ValueError(f"rows must be a range, low < high; got {self.rows}")
        # Gradient descent on |W_1 W_2 - A|^2 is stable below 2 / (4 sigma_1); batches fluctuate.
        bound = 1 / (4 * self.tasks.scale)
        if self.networks.rate > bound:
            raise ValueError(
                f"networks.rate must be at most 1 / (4 tasks.scale) = {bound:g} to be stable; "
                f"got {self.networks.rate}"
            )
        if self.diagram not in ("perturbation", "sensitivity"):
            name, fastest = "tuning.rate", self.tuning.rate
            if self.diagram == "learning_rate":
                name, fastest = "rows", high
            # The same for fine-tuning, with a task `ratio` times as large, and with the anchor.
            ratio = high if self.diagram == "misalignment" else self.tasks.ratio
            pull = 1 + (high if self.diagram == "anchor" else 0)
            bound = 1 / (4 * self.tasks.scale * max(1.0, ratio) * pull)
            if fastest > bound:
                raise ValueError(
                    f"{name} must be at most 1 / (4 (1 + lambda) sigma_1) = {bound:g} to be "
                    f"stable; got {fastest:g}"
                )


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "perturbation": DEFAULT,
    "learning_rate": varied(DEFAULT, diagram="learning_rate", rows=(0.0, 0.003)),
    "anchor": varied(DEFAULT, diagram="anchor", rows=(0.0, 4.0), tuning={"steps": 400}),
    "misalignment": varied(
        DEFAULT,
        diagram="misalignment",
        rows=(0.5, 5.0),
        tuning={"steps": 150, "rate": 0.002},
        networks={"cells": (6, 5)},
    ),
    "sensitivity": varied(DEFAULT, diagram="sensitivity", rows=(0.02, 0.6)),
    "trade_off": varied(
        DEFAULT,
        diagram="trade_off",
        rows=(0.0, 0.4),
        tasks={"d": 10, "ratio": 4.0, "kept": 2},
        tuning={"steps": 20, "rate": 0.03},
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        points=5,
        tasks={"d": 3, "tau": 2.0},
        tuning={"steps": 5},
        networks={"cells": (2, 3), "seeds": 2, "batch": 8},
    ),
}
