"""The result of a search and all its trials."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sail_jax.searching.arms import Arm
from sail_jax.searching.evidence import LEVEL, Comparison
from sail_jax.searching.prediction import Prediction, agreement


class Trial(NamedTuple):
    """The scores of one candidate on some examples.

    Attributes:
      name: The name of an arm, or of a model.
      options: The hyperparameters; empty for a model.
      examples: The positions of the examples in the data.
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
        """The mean score over tasks."""
        return float(self.by_task.mean())


class Outcome(NamedTuple):
    """The result of a search.

    Attributes:
      recommended: The name of the recommended arm or model.
      options: Its hyperparameters; empty for a model.
      found: The best merge on the examples for choosing merges.
      arm: Its arm, which can make it again.
      p: The p value of "some model, or the base, is at least as good as this merge" on the held-out
        examples. It is the largest of the p values against each. The merge is recommended if p is
        at most 5 %.
      comparisons: Comparisons of the merge with the best single model, the uniform soup, and task
        arithmetic at its usual scale, on the held-out examples. The intervals have a joint
        confidence of 95 %.
      models: The mean score of each model, and of the base if given, on the held-out examples.
      predictions: The predictions of a quadratic score for weighted means, and the measured scores.
        Empty if the budget was too small for the fit.
      front: The Pareto front over tasks: merges and models that no other dominates, on
        the examples for choosing merges.
      tasks: The names of the tasks.
      trials: All scored candidates, in order.
      searched: The number of examples for choosing merges.
      judged: The number of held-out examples for the comparison.
      evaluations: The number of scorings of all examples for choosing merges, where scoring a
        fraction of them counts as this fraction.
      untried: Arms that the budget did not reach.
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
                f"The best merge found is {name} (p = {self.p:.2g}; {LEVEL} is needed).",
            ]
        for found in self.comparisons:
            low, high = found.interval
            answer.append(
                f"Compared with {found.against}: {found.difference:+.4g} [{low:+.4g}, {high:+.4g}]."
            )
        if not self.is_merge and best.needed is not None and best.needed > best.examples:
            answer.append(
                f"About {best.needed - best.examples} more examples would show a difference of "
                f"{abs(best.difference):.2g}."
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
        chosen_on = {*self.trials[0].examples.tolist()}
        choosing = sum(trial.examples[0] in chosen_on for trial in self.trials)
        answer.append(
            f"Trials: {choosing} to choose the merge ({self.evaluations:.3g} of the budget), and "
            f"{len(self.trials) - choosing} for the comparison, which the budget does not include."
        )
        return "\n".join(answer)


def _named(name: str, options: Mapping[str, Any]) -> str:
    """Formats an arm with its hyperparameters as a call."""
    told = ", ".join(
        f"{key}={np.array2string(np.asarray(value), precision=3, separator=', ')}"
        for key, value in options.items()
    )
    return f"{name}({told})" if told else name


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Lists the Pareto front: trials that no other trial dominates.

    Args:
      trials: Trials on the same examples.

    Returns:
      The trials on the front, in their order.
    """
    scores = np.stack([trial.by_task for trial in trials])
    as_good = (scores[None] >= scores[:, None]).all(-1)
    better = (scores[None] > scores[:, None]).any(-1)
    beaten = np.logical_or.reduce(as_good & better, axis=1)
    return tuple(trial for trial, worse in zip(trials, beaten, strict=True) if not worse)
