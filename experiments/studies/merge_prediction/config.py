"""What `merge_prediction` can be told, and its presets."""

import dataclasses
from typing import Any

from experiments.lab import validate
from experiments.studies.merge_prediction import tasks
from sail_jax.checks import nearest


@dataclasses.dataclass(frozen=True)
class Config:
    """Train base models, tune experts, merge them, and hold predictions against outcomes."""

    seed: int = 0
    """Seed of data, initial weights, minibatches, the choice of merges and the bootstrap."""
    families: tuple[str, ...] = ("digits", "text")
    """What is learned."""
    bases: int = 4
    """Base models of each length of pre-training; at least 2, for merges of unrelated ones."""
    pretrain: tuple[int, ...] = (0, 100, 500)
    """Lengths of pre-training, in steps of Adam; 0 is a random initialisation that is shared."""
    steps: tuple[int, ...] = (10, 40, 160)
    """Steps of fine-tuning at which experts are taken, ascending."""
    sizes: tuple[int, ...] = (2, 3, 4)
    """How many experts are merged."""
    merges: int = 2
    """Merges of experts of each base model, rate and number of steps."""
    chunk: int = 24
    """Merges measured at a time."""
    draws: int = 500
    """Bootstrap samples of base models, for the intervals."""

    def __post_init__(self) -> None:
        validate.at_least(self, bases=2, merges=1, chunk=1, draws=2)
        validate.different(self, "families", "pretrain", "steps", "sizes")
        validate.positive(self, "steps")
        validate.positive(self, "pretrain", zero=True)
        for name in self.families:
            if name not in tasks.FAMILIES:
                raise ValueError(f"families: {name!r} is none{nearest(name, tasks.FAMILIES)}")
        most = min(len(tasks.FAMILIES[name].tasks) for name in self.families)
        checks = [
            ("steps", list(self.steps) == sorted(self.steps), "ascending"),
            ("sizes", 2 <= min(self.sizes) <= max(self.sizes) <= most, f"from 2 to {most}"),
        ]
        validate.holds(self, checks)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        few: dict[str, Any] = {"pretrain": (20,), "steps": (5, 20), "sizes": (2,)}
        return cls(families=("digits",), bases=2, merges=1, draws=20, **few)


PRESETS: dict[str, Config] = {"default": Config(), "tiny": Config.tiny()}
