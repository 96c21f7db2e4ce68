"""What `overtraining_linear` can be told, and its presets."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.lab import validate

Diagram = Literal[
    "perturbation", "learning_rate", "anchor", "misalignment", "sensitivity", "trade_off"
]


# What each diagram has on its other axis.
ROWS = {
    "perturbation": "perturbation $γ$",
    "learning_rate": "fine-tuning rate $η$",
    "anchor": "anchor $λ$",
    "misalignment": "misalignment $σ^{ft} / σ^{pre}$",
    "sensitivity": "perturbation $γ$",
    "trade_off": "exponent $p$ of the rate, $η ∝ t^{-p}$",
}


@dataclass(frozen=True)
class Config:
    """One diagram."""

    diagram: Diagram = "perturbation"
    """Which."""
    d: int = 12
    """Width of all layers."""
    scale: float = 2.0
    """Largest singular value of the pre-training task."""
    decay: float = 1.0
    """Exponent by which its singular values fall."""
    tau: float = 6.0
    """Initial weights are e^-tau I."""
    ratio: float = 3.0
    """sigma_ft / sigma_pre of the misaligned modes."""
    kept: int = 0
    """Leading modes that the fine-tuning task has in common with pre-training."""
    rows: tuple[float, float] = (0.0, 0.35)
    """Range of the other axis."""
    points: int = 100
    """Closed-form points along either axis."""
    steps: int = 200
    """Fine-tuning steps."""
    rate: float = 0.003
    """Fine-tuning rate, where it does not vary; at first, in trade_off."""
    nu: float = 3.0
    """Variance of the weights' noise per unit of rate, in trade_off."""
    cells: tuple[int, int] = (6, 12)
    """Simulated points along the other axis and along pre-training time."""
    seeds: int = 4
    """Networks per simulated point."""
    batch: int = 64
    """Samples per step of stochastic gradient descent."""
    pre_rate: float = 0.01
    """Pre-training rate of the simulated networks."""
    seed: int = 0
    """Seed of tasks, batches and noise."""

    def __post_init__(self):
        validate.at_least(self, d=2, points=3, steps=1, seeds=2, batch=1, kept=0, decay=0)
        validate.positive(self, "scale", "tau", "ratio", "rate", "nu", "pre_rate")
        if self.diagram not in ROWS:
            raise ValueError(f"diagram must be one of {', '.join(ROWS)}; got {self.diagram!r}")
        if self.kept >= self.d:
            raise ValueError(f"kept must be below d = {self.d}; got {self.kept}")
        if min(self.cells) < 2:
            raise ValueError(f"cells must be at least 2 along both axes; got {self.cells}")
        low, high = self.rows
        if not 0 <= low < high < np.inf:
            raise ValueError(f"rows must be a range 0 <= low < high; got {self.rows}")
        # Gradient descent on |W_1 W_2 - A|^2 is stable below 2 / (4 sigma_1); batches fluctuate.
        bound = 1 / (4 * self.scale)
        if self.pre_rate > bound:
            raise ValueError(
                f"pre_rate must be at most 1 / (4 scale) = {bound:g} to be stable; "
                f"got {self.pre_rate}"
            )
        if self.diagram not in ("perturbation", "sensitivity"):
            fastest = high if self.diagram == "learning_rate" else self.rate
            top = self.scale * max(1.0, high if self.diagram == "misalignment" else self.ratio)
            pull = 1 + (high if self.diagram == "anchor" else 0)
            bound = 1 / (4 * top * pull)
            if fastest > bound:
                raise ValueError(
                    f"{'rows' if self.diagram == 'learning_rate' else 'rate'} must be at most "
                    f"1 / (4 (1 + lambda) sigma_1) = {bound:g} to be stable; got {fastest:g}"
                )

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=3, tau=2.0, points=5, cells=(2, 3), seeds=2, batch=8, steps=5)

    def spectrum(self, decay: float | None = None) -> np.ndarray:
        """Singular values of the pre-training task."""
        power = self.decay if decay is None else decay
        return self.scale * np.arange(1, self.d + 1, dtype=float) ** -power

    def target(self, sigma: np.ndarray, ratio: float | None = None) -> np.ndarray:
        """Singular values of the fine-tuning task."""
        ratio = self.ratio if ratio is None else ratio
        return np.where(np.arange(self.d) < self.kept, sigma, ratio * sigma)

    def times(self, sigma: np.ndarray, points: int) -> np.ndarray:
        """Pre-training times, evenly spaced in their logarithm, from before the first mode is
        learned until after the last: tau / 4 sigma_1 to 1.5 tau / sigma_d."""
        return np.geomspace(0.25 * self.tau / sigma[0], 1.5 * self.tau / sigma[-1], points)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "perturbation": Config(),
    "learning_rate": Config(diagram="learning_rate", rows=(0.0, 0.003)),
    "anchor": Config(diagram="anchor", rows=(0.0, 4.0), steps=400),
    "misalignment": Config(
        diagram="misalignment", rows=(0.5, 5.0), steps=150, rate=0.002, cells=(6, 5)
    ),
    "sensitivity": Config(diagram="sensitivity", rows=(0.02, 0.6)),
    "trade_off": Config(
        diagram="trade_off", d=10, ratio=4.0, kept=2, rows=(0.0, 0.4), steps=20, rate=0.03
    ),
    "tiny": Config.tiny(),
}
