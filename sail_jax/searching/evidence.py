"""Paired comparisons of scores on the same examples.

Two candidates are scored on the same examples. The difficulty of an example then cancels in the
difference. The standard error of the difference is far smaller than the errors of the two means.
For example, let scores have standard deviation 1 and correlation 0.98. Then 400 examples
distinguish means that differ by 0.02 (with a standard error of 0.01). Separate examples would need
10,000.

With tasks, all tasks count equally, regardless of their numbers of examples. The difference is the
mean of the tasks' differences, and its degrees of freedom follow Welch and Satterthwaite.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import special

LEVEL = 0.05
"""The largest probability of recommending a merge that is not better."""
POWER = 0.8
"""The probability of finding a difference, in computations of the number of examples."""


class Comparison(NamedTuple):
    """A comparison of one candidate with another on the same examples.

    Attributes:
      against: The name of the other candidate.
      difference: The mean score of the candidate minus the mean score of the other.
      error: The standard error of the difference.
      interval: The two ends of the confidence interval of the difference.
      p: The one-sided p value of Student's t test of "the candidate is not better".
      examples: The number of examples.
      needed: The number of examples that would show this difference with probability `POWER`, in a
        one-sided test at level `LEVEL`. None for a difference of 0.
    """

    against: str
    difference: float
    error: float
    interval: tuple[float, float]
    p: float
    examples: int
    needed: int | None


def means(
    scores: Float[np.ndarray, "n"], tasks: Int[np.ndarray, "n"]
) -> tuple[Float[np.ndarray, "task"], Float[np.ndarray, "task"]]:
    """Computes the mean score of each task and its squared standard error.

    Args:
      scores: A score for each example.
      tasks: The number of each example's task, from 0 without gaps.

    Returns:
      The means and the squared standard errors; NaN for a task with one example.
    """
    count = np.bincount(tasks)
    mean = np.bincount(tasks, scores) / count
    squares = np.bincount(tasks, (scores - mean[tasks]) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return mean, squares / (count - 1) / count


def compare(
    against: str,
    candidate: Float[np.ndarray, "n"],
    other: Float[np.ndarray, "n"],
    tasks: Int[np.ndarray, "n"] | None = None,
    *,
    confidence: float = 1 - LEVEL,
) -> Comparison:
    """Compares two candidates by their scores on the same examples.

    Args:
      against: The name of the other candidate.
      candidate: The candidate's score on each example; larger is better.
      other: The other's scores, on the same examples.
      tasks: The number of each example's task, from 0; one task by default.
      confidence: The confidence of the two-sided interval.

    Returns:
      The comparison. If a task has fewer than two examples, the interval is infinite and p is 1.

    >>> scores = np.array([1.0, 2.0, 3.0, 4.0])
    >>> found = compare("A", scores + [0.1, 0.2, 0.1, 0.2], scores)
    >>> f"{found.difference:.2f} +- {found.error:.3f}, p {found.p:.3f}, {found.needed} needed"
    '0.15 +- 0.029, p 0.007, 2 needed'
    """
    gains = np.asarray(candidate, float) - np.asarray(other, float)
    places = np.zeros(len(gains), int) if tasks is None else tasks
    if not len(gains) or np.bincount(places).min() < 2:
        mean = float(means(gains, places)[0].mean()) if len(gains) else math.nan
        return Comparison(against, mean, math.inf, (-math.inf, math.inf), 1.0, len(gains), None)
    by_task, squares = means(gains, places)
    difference = float(by_task.mean())
    variance = float(squares.sum()) / len(squares) ** 2
    error = math.sqrt(variance)
    # Equal differences may differ in their last bits.
    if error <= len(gains) * np.finfo(float).eps * abs(difference):
        p = 0.0 if difference > 0 else 1.0
        return Comparison(against, difference, 0.0, (difference, difference), p, len(gains), None)
    counts = np.bincount(places)
    freedom = squares.sum() ** 2 / (squares**2 / (counts - 1)).sum()
    p = float(special.stdtr(freedom, -difference / error))
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    deviation = error * math.sqrt(len(gains))
    needed = examples_needed(difference, deviation)
    interval = (difference - half, difference + half)
    return Comparison(against, difference, error, interval, p, len(gains), needed)


def examples_needed(
    difference: float, deviation: float, *, level: float = LEVEL, power: float = POWER
) -> int | None:
    """Computes the number of examples that distinguish a difference from 0 (normal approximation).

    Args:
      difference: The difference of the means.
      deviation: The standard deviation of the difference on one example.
      level: The level of the one-sided test.
      power: The probability of finding the difference.

    Returns:
      The number of examples, at least 2; None for a difference of 0.

    >>> examples_needed(0.005, 0.1)
    2474
    """
    if not difference or not math.isfinite(difference):
        return None
    reach = float(special.ndtri(1 - level) + special.ndtri(power))
    return max(2, math.ceil((reach * deviation / difference) ** 2))


def task_numbers(tasks: object, n: int) -> tuple[Int[np.ndarray, "n"], tuple[str, ...]]:
    """Numbers the tasks of examples.

    Args:
      tasks: The name or number of each example's task; None for one task.
      n: The number of examples.

    Returns:
      The number of each example's task, from 0, and the names of the tasks.

    Raises:
      ValueError: Unless `tasks` has one entry for each example.
    """
    if tasks is None:
        return np.zeros(n, int), ("all",)
    names = np.asarray(tasks)
    if names.shape != (n,):
        raise ValueError(f"tasks: expected one for each of {n} examples, got {list(names.shape)}")
    known, numbers = np.unique(names, return_inverse=True)
    return numbers, tuple(map(str, known))
