"""What `merge_digits` can be told, and its presets."""

import dataclasses

from experiments.data import digits
from experiments.lab import validate

POSITIVE = ("base_rate", "tune_rate", "max_scale")


@dataclasses.dataclass(frozen=True)
class Config:
    """Pre-train on upright digits, fine-tune on each task, merge."""

    seed: int = 0
    """Seed of the splits, initial weights and minibatches."""
    replicates: int = 5
    """Independent repetitions, each with its own split; at least 2, for the spread."""
    tasks: tuple[str, ...] = ("rotate -20", "rotate 20", "digits 0-4", "digits 5-9")
    """What the experts learn: 'rotate <degrees>', 'digits <first>-<last>' or 'upright'."""
    widths: tuple[int, ...] = (256,)
    """Units of each hidden layer."""
    train: int = 1000
    """Digits to learn from, of 1797."""
    validation: int = 300
    """Digits to choose the scales with; the rest are the test set."""
    batch: int = 64
    """Digits per step, drawn with replacement."""
    base_steps: int = 300
    """Steps of pre-training."""
    tune_steps: int = 200
    """Steps of fine-tuning, for each expert."""
    base_rate: float = 0.1
    """Learning rate of pre-training (decays to 0 along a cosine)."""
    tune_rate: float = 0.1
    """Learning rate of fine-tuning (decays to 0 along a cosine)."""
    momentum: float = 0.9
    """Momentum of both."""
    density: float = 0.2
    """Fraction of each task vector that TIES keeps."""
    scales: int = 20
    """Scales tried, evenly spaced up to `max_scale`."""
    max_scale: float = 2.0
    """Largest scale tried for task arithmetic and TIES."""
    line_points: int = 21
    """Points on the line between the first two experts, ends included."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, scales=2, line_points=2)
        validate.at_least(self, train=1, validation=1, batch=1, base_steps=1, tune_steps=1)
        validate.positive(self, *POSITIVE)
        room = digits.EXAMPLES - self.train
        checks = [
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("density", 0 < self.density <= 1, "in (0, 1]"),
            ("widths", self.widths and min(self.widths) >= 1, "one or more, each at least 1"),
            ("validation", self.validation < room, f"below {room}, to leave digits for the test"),
            ("tasks", len(set(self.tasks)) == len(self.tasks) >= 2, "two or more, all different"),
        ]
        for field, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)}")
        for task in self.tasks:
            try:
                digits.parse(task)
            except ValueError as exc:
                raise ValueError(f"tasks: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        small = {"replicates": 2, "widths": (8,), "base_steps": 20, "tune_steps": 10}
        return cls(tasks=("rotate -20", "digits 0-4"), scales=3, line_points=3, **small)

    @classmethod
    def quick(cls) -> "Config":
        return cls(replicates=3, widths=(128,), base_steps=200, tune_steps=100, scales=10)


PRESETS = {"default": Config(), "quick": Config.quick(), "tiny": Config.tiny()}
