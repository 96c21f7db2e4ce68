"""Groups of fields that the configs of several studies share."""

import dataclasses
from typing import Annotated, Any

from annotated_types import Interval

from experiments.lab.config import Count, Natural, NotNegative, Positive, config
from experiments.training.optimizers import Optimizer, Rule
from experiments.training.schedules import Decay, Schedule


@config
class Descent:
    """How a network is trained: the rule, and its learning rate over the steps."""

    rule: Rule = "adamw"
    """The optimiser: 'adamw', 'adam' or 'sgd' (with momentum 0.9)."""
    rate: Positive = 1e-2
    """Highest learning rate."""
    warmup: Count = 0
    """Steps over which the learning rate rises to its highest value."""
    decay: Decay = "cosine"
    """How the learning rate goes on after that: 'cosine', 'linear' or 'constant'."""
    floor: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """The learning rate in the end, as a share of the highest."""
    weight_decay: NotNegative = 0.0
    """Coefficient of weight decay; biases, norms and embeddings are left out."""
    clip: Positive | None = None
    """Largest global norm of a gradient; None clips nothing."""

    def over(self, steps: int, **others: Any) -> Optimizer:
        """Makes the optimiser of a training of a given length.

        Args:
          steps: The number of steps. The warm-up is cut to be shorter.
          **others: Other fields of the `Optimizer`, in place of its defaults and of those of this
            group.

        Returns:
          The optimiser, with its schedule.

        Raises:
          ValueError: If `steps` is below 1, or a field is not allowed.
        """
        # A short training has at least one step at the highest rate.
        warmup = min(self.warmup, steps - 1)
        schedule = Schedule(self.rate, steps, warmup, self.decay, self.floor)
        own = {"rule": self.rule, "weight_decay": self.weight_decay, "clip": self.clip}
        return dataclasses.replace(Optimizer(schedule, **own), **others)


@config
class Budget:
    """How long a network is trained, and how often it is looked at."""

    steps: Natural
    """Steps of training."""
    batch: Natural
    """Examples per step."""
    every: Natural
    """Steps between two evaluations."""
    save_every: Natural = 1000
    """Steps between two checkpoints, from which a killed training goes on."""


@config
class LearnedMaps:
    """How the maps of growth are learned, as LiGO's are (Wang et al. 2023)."""

    steps: Natural
    """Steps of learning the maps, counted as steps of the large network."""
    rate: Positive = 3e-3
    """Adam's learning rate of the maps."""
