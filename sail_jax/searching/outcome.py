"""What a search answers, and everything it tried."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sail_jax.searching.arms import Arm
from sail_jax.searching.evidence import LEVEL, Comparison
from sail_jax.searching.prediction import Prediction, agreement


class Trial(NamedTuple):
    """One candidate, scored on some examples.

    Attributes:
      name: The name of an arm, or of a model.
      options: The hyperparameters; empty for a model.
      examples: The examples, by their place in the data.
      scores: The score of each; larger is better.
      by_task: The mean score of each task.
    """

    name: str
    options: Mapping[str, Any]
    examples: Int[np.ndarray, "n"]
    scores: Float[np.ndarray, "n"]
    by_task: Float[np.ndarray, "task"]

    @property
    def score(self) -> float:
        """The mean over tasks."""
        return float(self.by_task.mean())


class Outcome(NamedTuple):
    """The answer of a search.

    Attributes:
      recommended: The name of what to use: an arm, or one of the models.
      options: Its hyperparameters; empty for a model.
      found: The best merge on the part of the examples on which merges were chosen.
      arm: Its arm, with which it can be made again.
      p: The p value of "some model, or the base, is at least as good as this merge", on the other
        part. It is the largest of the p values against each. The merge is recommended if it is at
        most 5 %.
      comparisons: The merge compared with the best single model, the uniform soup, and task
        arithmetic at its usual scale, on the other part. All intervals hold together at 95 %.
      models: The mean score of each model, and of the base if there is one, on the other part.
      predictions: What a quadratic score predicts for weighted means, and what was measured; empty
        if the budget did not suffice to fit it.
      front: The merges and models that no other one beats in every task, on the first part.
      tasks: The names of the tasks.
      trials: Everything that was scored, in order.
      searched: The number of examples of the first part.
      judged: The number of examples of the other part.
      evaluations: How often the first part was scored as a whole; parts of it count as such.
      untried: Arms for which the budget did not suffice.
    """

    recommended: str
    options: Mapping[str, Any]
    found: Trial
    arm: Arm
    p: float
    comparisons: tuple[Comparison, ...]
    models: dict[str, float]
    predictions: tuple[Prediction, ...]
    front: tuple[Trial, ...]
    tasks: tuple[str, ...]
    trials: tuple[Trial, ...]
    searched: int
    judged: int
    evaluations: float
    untried: tuple[str, ...]

    @property
    def is_merge(self) -> bool:
        """Whether a merge is recommended."""
        return self.recommended not in self.models

    def __str__(self) -> str:
        best = self.comparisons[0]
        name = _named(self.found.name, self.found.options)
        if self.is_merge:
            answer = [f"Use {name}. It is better than every single model (p = {self.p:.2g})."]
        else:
            answer = [
                f"Use {self.recommended}. No merge is shown to be better than every single model.",
                f"The best that was found is {name} (p = {self.p:.2g}; {LEVEL} is needed).",
            ]
        for found in self.comparisons:
            low, high = found.interval
            answer.append(
                f"Compared with {found.against}: {found.difference:+.4g} [{low:+.4g}, {high:+.4g}]."
            )
        if not self.is_merge and best.needed is not None and best.needed > best.examples:
            answer.append(
                f"About {best.needed - best.examples} more examples would tell "
                f"{abs(best.difference):.2g} apart."
            )
        if len(self.predictions) >= 3:
            error, rank = agreement(self.predictions)
            answer.append(
                f"A quadratic model of the score predicted {len(self.predictions)} weighted means "
                f"with an error of {error:.2g} of their spread (rank correlation {rank:.2f})."
            )
        answer.append(
            f"Merges were chosen on {self.searched} examples and compared on {self.judged} others."
        )
        return "\n".join(answer)


def _named(name: str, options: Mapping[str, Any]) -> str:
    """An arm with its hyperparameters, as one would call it."""
    told = ", ".join(
        f"{key}={np.array2string(np.asarray(value), precision=3, separator=', ')}"
        for key, value in options.items()
    )
    return f"{name}({told})" if told else name


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Lists the trials that no other one beats: none is as good in all tasks and better in one.

    Args:
      trials: Trials on the same examples.

    Returns:
      Those on the front, in their order.
    """
    scores = np.stack([trial.by_task for trial in trials])
    as_good = (scores[None] >= scores[:, None]).all(-1)
    better = (scores[None] > scores[:, None]).any(-1)
    beaten = np.logical_or.reduce(as_good & better, axis=1)
    return tuple(trial for trial, worse in zip(trials, beaten, strict=True) if not worse)
