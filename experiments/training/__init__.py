"""One trainer for the papers' network experiments."""

from experiments.training.checkpoints import Checkpoints
from experiments.training.loop import Trained, train
from experiments.training.optimizers import Optimizer
from experiments.training.schedules import Schedule
from experiments.training.step import State, Training, init, make_step, stateless

__all__ = [
    "Checkpoints",
    "Optimizer",
    "Schedule",
    "State",
    "Trained",
    "Training",
    "init",
    "make_step",
    "stateless",
    "train",
]
