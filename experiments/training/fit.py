"""A network's training as a value: what is minimised, by which steps, and where its arrays lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from experiments.lab import progress
from experiments.training.flops import flops
from experiments.training.loop import Trained, train
from experiments.training.step import Loss, State, Step, Training, init, make_step


class Layout(Protocol):
    """Where the arrays of a training lie; see `sharding.Layout`."""

    def shardings(self, state: Any) -> Any: ...
    def lay(self, state: Any) -> Any: ...
    def place(self, batch: Any) -> Any: ...


class Fit:
    """Trains networks of one shape, any number of them by one compiled step.

    Args:
      loss: What is minimised, as `experiments.training.step.Loss`.
      training: The optimiser, the type that is computed in, the moving average of weights.
      layout: Where the arrays lie, such as `sharding.layout` gives it.
      config: All that the trainings depend on: checkpoints of another config are refused.
      save_every: Steps between two checkpoints.
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
        """The state before the first step, where the step expects it."""
        return self.layout.lay(init(self.training, params, key, mutable))

    def step(self, like: State) -> Step:
        """The step, compiled when it is first called; `like` has its shapes."""
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
        """Trains from a state of `start` to step `steps`, or from what `folder` holds; `looks` are
        `evaluate`, `evaluate_every`, `log_every` and `say` of `train`, which tells of itself where
        there is a folder, or another `config` and `save_every` than are usual here."""
        usual: dict[str, Any] = {
            "config": self.config,
            "save_every": self.save_every,
            "say": None if folder is None else progress.say,
        }
        step, place = self.step(state), self.layout.place
        return train(step, state, batch, steps, directory=folder, place=place, **(usual | looks))

    def cost(self, like: State, batch: PyTree) -> float:
        """Floating-point operations of a step, of a state and a batch of these shapes."""
        return flops(make_step(self.loss, self.training), like, batch)


def curve(trained: Trained, name: str, every: int = 1) -> Float[np.ndarray, " evaluation"]:
    """What was measured under a name, at steps that `every` divides."""
    seen = [row[name] for row in trained.rows if name in row and row["step"] % every == 0]
    return np.array(seen, float)
