"""What `cross_task_linearity` can be told."""

import dataclasses
from typing import Any

from experiments.data import digits
from experiments.lab import validate
from sail_jax.checks import nearest

ON_ROTATIONS = ("rotated", "scratch", "averaging", "arithmetic", "stitching")
RESNET = ("split_classes", "random_labels")
PARTS = (*ON_ROTATIONS, *RESNET, "theorem")
LEAST = 174  # digits of the rarest class


@dataclasses.dataclass(frozen=True)
class Config:
    """Pre-train, fine-tune, and compare features of weights with features."""

    seed: int = 0
    """Seed of the splits, initial weights, minibatches and random labels."""
    replicates: int = 5
    """Independent repetitions, each with its own split; at least 3, for the spread."""
    parts: tuple[str, ...] = PARTS
    """What to measure."""
    angles: tuple[int, ...] = (22, 45, 68, 90)
    """Degrees by which the digits of the MLP's fine-tuning tasks are rotated."""
    widths: tuple[int, ...] = (100, 100, 100)
    """Units of the MLP's layers."""
    learn: int = 120
    """Digits of each class to learn from."""
    test: int = 50
    """Digits of each class to test on."""
    steps: int = 900
    """Steps of pre-training the MLP, and of fine-tuning it."""
    batch: int = 64
    """Digits per step, drawn with replacement."""
    rate: float = 0.1
    """Learning rate of the MLP, without momentum."""
    splits: tuple[str, ...] = ("digits 0-3", "digits 4-5", "digits 6-7", "digits 8-9")
    """The ResNet's tasks: the first to pre-train on, the others to fine-tune on."""
    resnet_widths: tuple[int, ...] = (8, 16)
    """Channels of the ResNet's stages, a block each."""
    resnet_steps: int = 200
    """Steps of pre-training the ResNet, and of fine-tuning it."""
    resnet_batch: int = 32
    """Digits per step of the ResNet."""
    resnet_rate: float = 0.05
    """Learning rate of the ResNet, with momentum 0.9."""
    memorise: int = 4
    """In `random_labels` pre-training takes so many times the steps, to learn labels by heart."""
    alphas: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Weights of the first of two models."""
    line_points: int = 11
    """Points on the line between two models, ends included, at which accuracies are compared."""
    scales: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """Scales of task vectors, added and subtracted."""
    stitch_scales: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Scales of task vectors of the stitched models."""
    members: int = 8
    """Models fine-tuned on one task in `averaging`, at rates that differ."""
    rates: tuple[float, float] = (0.01, 0.1)
    """The least and the largest rate of `averaging` and `theorem`."""
    checkpoints: int = 4
    """Checkpoints in `theorem`; each has been trained for twice the steps of the one before."""
    checkpoint_steps: int = 100
    """Steps of the first."""
    pair_members: int = 3
    """Models fine-tuned from each checkpoint in `theorem`, at rates that differ."""
    lanczos_steps: int = 10
    """Steps of Lanczos' iteration for a Hessian's norm."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, learn=1, test=1, steps=1, batch=1, line_points=2)
        validate.at_least(self, resnet_steps=1, resnet_batch=1, memorise=1, members=3)
        validate.at_least(self, checkpoints=1, checkpoint_steps=1, pair_members=2, lanczos_steps=1)
        validate.positive(self, "rate", "resnet_rate", "rates", "scales", "stitch_scales")
        validate.positive(self, "alphas", zero=True)
        validate.positive(self, "widths", "resnet_widths")
        fields = ("parts", "angles", "splits", "alphas", "scales", "stitch_scales")
        validate.different(self, *fields, "rates")
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts: there is no '{part}'{nearest(part, PARTS)}")
        checks = [
            ("test", self.learn + self.test <= LEAST, f"at most {LEAST} - learn"),
            ("widths", len(self.widths) >= 1, "one or more"),
            ("resnet_widths", len(self.resnet_widths) >= 1, "one or more"),
            ("angles", len(self.angles) >= 2, "two or more"),
            ("angles", max(map(abs, self.angles)) < 1000, "below 1000"),
            ("splits", len(self.splits) >= 3, "three or more: one to pre-train on, a pair"),
            ("alphas", 0.5 in self.alphas and max(self.alphas) <= 1, "in [0, 1], one of them 0.5"),
        ]
        validate.holds(self, checks)
        for task in self.splits:
            try:
                digits.parse(task)
            except ValueError as exc:
                raise ValueError(f"splits: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        small: dict[str, Any] = {"learn": 12, "test": 6, "steps": 30, "batch": 16, "members": 3}
        short: dict[str, Any] = {"resnet_steps": 4, "resnet_batch": 8, "memorise": 2}
        few: dict[str, Any] = {"checkpoints": 2, "checkpoint_steps": 10, "lanczos_steps": 4}
        points: dict[str, Any] = {"line_points": 3, "scales": (0.2, 0.4), "stitch_scales": (1.0,)}
        sizes: dict[str, Any] = {"widths": (16, 16), "resnet_widths": (4,), "angles": (45, 90)}
        splits = ("digits 0-3", "digits 4-5", "digits 6-7")
        return cls(replicates=3, splits=splits, **small, **short, **few, **points, **sizes)

    @classmethod
    def mlp(cls) -> "Config":
        """What needs no ResNet, with more repetitions."""
        return cls(replicates=10, parts=(*ON_ROTATIONS, "theorem"))

    @classmethod
    def far(cls) -> "Config":
        """Models tuned at rates up to three times that of pre-training end far apart."""
        return cls(parts=("averaging", "theorem"), rates=(0.03, 0.3))

    @classmethod
    def resnet(cls) -> "Config":
        """The ResNet's parts, larger and for longer."""
        return cls(parts=RESNET, resnet_widths=(16, 32), resnet_steps=600, resnet_batch=64)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "mlp": Config.mlp(),
    "far": Config.far(),
    "resnet": Config.resnet(),
    "tiny": Config.tiny(),
}
