"""Groups of fields shared by the configs of several studies."""

import dataclasses
from typing import Annotated, Any

from annotated_types import Interval

from experiments.lab.config import Count, Natural, NotNegative, Positive, config
from experiments.training.optimizers import Optimizer, Rule
from experiments.training.schedules import Decay, Schedule


@config
class Descent:
    """The optimiser of a training, and its learning rate over the steps."""

    rule: Rule = "adamw"
    """The optimiser: 'adamw', 'adam' or 'sgd' (with momentum 0.9)."""
    rate: Positive = 1e-2
    """The highest learning rate."""
    warmup: Count = 0
    """Steps over which the learning rate rises to its highest value."""
    decay: Decay = "cosine"
    """The learning rate after the warm-up: 'cosine', 'linear', 'constant', or 'wsd' (constant, then
    linear over the last tenth of the steps)."""
    floor: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """The final learning rate, as a share of the highest."""
    weight_decay: NotNegative = 0.0
    """Coefficient of weight decay, which excludes biases, norms and embeddings."""
    clip: Positive | None = None
    """Largest global norm of a gradient; None turns clipping off."""

    def over(self, steps: int, **others: Any) -> Optimizer:
        """Creates the optimiser of a training of a given length.

        Args:
          steps: The number of steps. A longer warm-up is shortened.
          **others: Other fields of the `Optimizer`, which replace its defaults and this group's
            values.

        Returns:
          The optimiser, with its schedule.

        Raises:
          ValueError: If `steps` is below 1, or a field is not allowed.
        """
        # Even a short training has one step at the highest rate.
        warmup = min(self.warmup, steps - 1)
        schedule = Schedule(self.rate, steps, warmup, self.decay, self.floor)
        own = {"rule": self.rule, "weight_decay": self.weight_decay, "clip": self.clip}
        return dataclasses.replace(Optimizer(schedule, **own), **others)


@config
class Budget:
    """The length of a training, and how often it is evaluated."""

    steps: Natural
    """Training steps."""
    batch: Natural
    """Examples per step."""
    every: Natural
    """Steps between two evaluations."""
    save_every: Natural = 1000
    """Steps between two checkpoints, from which a killed training continues."""


@config
class Epochs:
    """How often a task's examples are used, and how many of them in a step."""

    examples: Natural = 128
    """Examples to fine-tune on."""
    batch: Natural = 8
    """Examples per step."""
    epochs: Natural = 4
    """How often each example is used."""

    def steps(self, examples: int | None = None) -> int:
        """Computes the number of steps.

        Args:
          examples: The number of available examples, which replaces the field if given.

        Returns:
          The number of whole steps of `batch` examples in all epochs.
        """
        return self.epochs * (self.examples if examples is None else examples) // self.batch


@config
class LearnedMaps:
    """The training of the maps of growth, as in LiGO (Wang et al. 2023)."""

    steps: Natural
    """Steps to learn the maps; they count as steps of the large network."""
    rate: Positive = 3e-3
    """Adam's learning rate for the maps."""
