"""A network's training as a value: its loss, its optimiser, and its layout on devices.

A `Fit` binds the arguments of the functions in `step`, `loop` and `sharding`, for studies that
train many networks of one shape.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from experiments.lab import progress
from experiments.measures.flops import flops
from experiments.training.loop import Trained, train
from experiments.training.sharding import Layout
from experiments.training.step import Loss, State, Step, Training, init, make_step


class Fit:
    """Trains networks of one shape, any number of them, with one compiled step.

    Args:
      loss: The loss to minimise.
      training: The optimiser, the dtype of the computation, the moving average of the weights.
      layout: The layout of the arrays, for example from `sharding.layout`.
      config: A dataclass with everything that affects the trainings; checkpoints of a different
        config are rejected. It is only required with a folder.
      save_every: The number of steps between two checkpoints.
    """

    def __init__(
        self,
        loss: Loss,
        training: Training,
        layout: Layout,
        config: Any = None,
        save_every: int = 1000,
    ) -> None:
        self.loss, self.training, self.layout = loss, training, layout
        self.config, self.save_every = config, save_every
        self._step: Step | None = None

    def start(self, params: PyTree, key: PRNGKeyArray, mutable: PyTree = None) -> State:
        """Creates the state before the first step, laid out on the devices.

        Args:
          params: The initial parameters, in float32.
          key: The key of all randomness in the steps.
          mutable: The values that the loss carries from step to step without learning them.

        Returns:
          The state.

        Raises:
          TypeError: If a parameter is not float32.
        """
        return self.layout.lay(init(self.training, params, key, mutable))

    def step(self, like: State) -> Step:
        """Returns the step function, which is compiled at the first call.

        Args:
          like: A state with the shapes of all states of the training.

        Returns:
          The step, always the same function.
        """
        if self._step is None:
            self._step = make_step(self.loss, self.training, self.layout.shardings(like))
        return self._step

    def run(
        self,
        state: State,
        batch: Callable[[int], PyTree],
        steps: int,
        folder: Path | None = None,
        **looks: Any,
    ) -> Trained:
        """Trains from a state to a number of steps, or continues from a checkpoint.

        Args:
          state: The initial state, from `start`.
          batch: The batch of a step, as a function of the step's number only.
          steps: The number of steps of the whole training, including those before a resume.
          folder: The folder for checkpoints and metrics, which are found again after a kill. None
            stores nothing, and prints no progress.
          **looks: Other arguments of `loop.train`, such as `evaluate`. A `config`, `save_every` or
            `say` given here replaces the usual one.

        Returns:
          The final state and the record of the training.

        Raises:
          ValueError: As `loop.train`.
          FloatingPointError: As `loop.train`.
          StoreError: As `loop.train`.
        """
        usual: dict[str, Any] = {
            "config": self.config,
            "save_every": self.save_every,
            "say": None if folder is None else progress.say,
        }
        step, place = self.step(state), self.layout.place
        return train(step, state, batch, steps, directory=folder, place=place, **(usual | looks))

    def cost(self, like: State, batch: PyTree) -> float:
        """Counts the floating-point operations of a step.

        The count is for a step without micro-batches, because only one pass of a loop is counted.

        Args:
          like: A state, or its shapes.
          batch: A batch, or its shapes.

        Returns:
          The number of operations; see `flops.flops`.
        """
        whole = dataclasses.replace(self.training, micro_batches=1)
        return flops(make_step(self.loss, whole), like, batch)


def curve(trained: Trained, name: str, every: int = 1) -> Float[np.ndarray, " evaluation"]:
    """Collects the values of one metric along a training.

    Args:
      trained: The training.
      name: The name of the metric.
      every: Only steps that are multiples of this count.

    Returns:
      The values, by increasing step.
    """
    seen = [row[name] for row in trained.rows if name in row and row["step"] % every == 0]
    return np.array(seen, float)
