"""The trainer of the studies, and building blocks of trainings.

`loop.train` runs a training step by step, with checkpoints. `step` compiles the step, `fit` binds
it to a loss and an optimiser, and `descent` trains small networks within one program.
"""

from experiments.training.checkpoints import Checkpoints
from experiments.training.loop import Trained, train
from experiments.training.optimizers import Optimizer
from experiments.training.schedules import Schedule
from experiments.training.step import State, Training, init, make_step, stateless
from sail_jax.lazy import listed

__dir__ = listed(__name__)

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
