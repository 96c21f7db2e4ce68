"""A network's training as a value: its loss, its optimiser, and where its arrays lie on devices.

A `Fit` binds what the functions of `step`, `loop` and `sharding` need, for studies that train many
networks of one shape.
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
      loss: What is minimised.
      training: The optimiser, the dtype of the computation, the moving average of the weights.
      layout: Where the arrays lie, such as `sharding.layout` gives it.
      config: A dataclass with all that the trainings depend on: checkpoints of another config are
        refused. It is needed only where there is a folder.
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
        """Makes the state before the first step, laid out on the devices.

        Args:
          params: The initial parameters, in float32.
          key: The key of all that is random in the steps.
          mutable: What the loss carries from step to step without learning it.

        Returns:
          The state.

        Raises:
          TypeError: If a parameter is not float32.
        """
        return self.layout.lay(init(self.training, params, key, mutable))

    def step(self, like: State) -> Step:
        """Returns the step function, which is compiled when it is first called.

        Args:
          like: A state with the shapes of all states that the step will see.

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
        """Trains from a state to a number of steps, or goes on from a checkpoint.

        Args:
          state: The state to begin with, from `start`.
          batch: The batch of a step, by its number alone.
          steps: The number of steps of the whole training, those before a resume included.
          folder: Where checkpoints and metrics are kept, and found again after a kill. None keeps
            nothing, and prints no progress.
          **looks: Other arguments of `loop.train`, such as `evaluate`. A `config`, `save_every` or
            `say` given here is used in place of the usual one.

        Returns:
          The final state, and how the training went.

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

        They are those of a step without micro-batches: of a loop over these, only one pass would be
        counted.

        Args:
          like: A state, or its shapes.
          batch: A batch, or its shapes.

        Returns:
          The number of operations; see `flops.flops`.
        """
        whole = dataclasses.replace(self.training, micro_batches=1)
        return flops(make_step(self.loss, whole), like, batch)


def curve(trained: Trained, name: str, every: int = 1) -> Float[np.ndarray, " evaluation"]:
    """Collects what was measured under one name along a training.

    Args:
      trained: The training.
      name: The name of the metric.
      every: Only values at steps that this divides are taken.

    Returns:
      The values, by increasing step.
    """
    seen = [row[name] for row in trained.rows if name in row and row["step"] % every == 0]
    return np.array(seen, float)
