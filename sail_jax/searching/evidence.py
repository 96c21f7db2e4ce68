"""Paired comparisons of scores on the same examples.

Two candidates are scored on the same examples. What makes an example easy or hard then cancels in
the difference, so that its standard error is far smaller than the errors of the two means: with
scores of standard deviation 1 that correlate by 0.98, 400 examples tell means apart that differ by
0.02 (a standard error of 0.01), where separate examples would take 10,000.

With tasks, all tasks count alike, however many examples each has: the difference is the mean of the
tasks' differences, and its degrees of freedom are those of Welch and Satterthwaite.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import special

LEVEL = 0.05
"""The probability with which a merge that is not better is recommended, at most."""
POWER = 0.8
"""The probability of finding a difference, for which numbers of examples are computed."""


class Comparison(NamedTuple):
    """One candidate compared with another on the same examples.

    Attributes:
      against: The name of the other candidate.
      difference: The mean score of the candidate less that of the other.
      error: The standard error of the difference.
      interval: The two ends of the interval of the difference, at the stated confidence.
      p: Student's one-sided p value of "the candidate is not better".
      examples: The number of examples.
      needed: The number of examples with which this difference would be found with probability
        `POWER` at level `LEVEL`, one-sided; None if there is no difference.
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
    """Computes the mean score of each task, and the square of its standard error.

    Args:
      scores: A score for each example.
      tasks: The number of each example's task, from 0, none left out.

    Returns:
      The means, and the squared standard errors; NaN for a task of one example.
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
      The comparison. With fewer than two examples of a task nothing is known: the interval is
      infinite, and p is 1.

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
    # Equal gains may differ in their last bits.
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
    """Computes how many examples tell a difference from 0, by the normal approximation.

    Args:
      difference: The difference of the means.
      deviation: The standard deviation of the difference on one example.
      level: The level of the one-sided test.
      power: The probability with which the difference is to be found.

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
      ValueError: Unless there is one for each example.
    """
    if tasks is None:
        return np.zeros(n, int), ("all",)
    names = np.asarray(tasks)
    if names.shape != (n,):
        raise ValueError(f"tasks: expected one for each of {n} examples, got {list(names.shape)}")
    known, numbers = np.unique(names, return_inverse=True)
    return numbers, tuple(map(str, known))
