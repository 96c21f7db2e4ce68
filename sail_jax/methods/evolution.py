"""Searches for merging coefficients without gradients, by CMA-ES.

The objective may be any function of hyperparameters, such as the score of merged models on a
benchmark. If the loss of the merged model is differentiable, `learned` requires far fewer
evaluations.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cmaes
import numpy as np

Options = dict[str, Any]


class Evaluation(NamedTuple):
    """One evaluation of the objective.

    Attributes:
      options: The hyperparameters by name: a float, or an array for several bounds.
      value: The objective there; it may be NaN or infinite.
    """

    options: Options
    value: float


class Found(NamedTuple):
    """The result of a search.

    Attributes:
      best: The hyperparameters with the smallest finite value.
      value: The objective there.
      history: All evaluations in order.
    """

    best: Options
    value: float
    history: tuple[Evaluation, ...]


def search(
    objective: Callable[[Options], float],
    bounds: Mapping[str, tuple[float, float] | Sequence[tuple[float, float]]],
    *,
    budget: int = 100,
    seed: int = 0,
    population: int | None = None,
    start: Mapping[str, Any] | None = None,
    spread: float = 1 / 6,
    history: Sequence[Evaluation] = (),
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> Found:
    """Searches for the hyperparameters that minimise an objective, within bounds.

    The search runs CMA-ES on bounds scaled to [0, 1]. It stops after `budget` evaluations, or
    earlier when CMA-ES has converged. Equal arguments give equal searches.

    Args:
      objective: The function of {name: value} to minimise, for instance
        `lambda options: loss(methods.ties(**options)(models, base))`. To maximise a score, return
        its negative. A value that is not finite counts as the largest finite value so far, at least
        0. It is never the result.
      bounds: For each name, (low, high) for a number, or a sequence of such pairs for an array of
        numbers (for example `weights`).
      budget: The largest number of evaluations, at least 1. Evaluations in `history` count.
      seed: The seed of the random draws.
      population: Evaluations per generation, at least 2; 4 + floor(3 log(dimension)) by default.
      start: The initial point, with the names of `bounds`; the middle of the bounds by default.
      spread: The standard deviation of the first generation, as a fraction of the bounds' width.
      history: Evaluations of an interrupted search with the same arguments. They are reused, and
        the search continues as if it had not been interrupted.
      on_evaluation: A function that is called with each new evaluation, for instance to record it
        for `history`.

    Returns:
      The best evaluation, and all evaluations.

    Raises:
      ValueError: For invalid bounds, budget, population, spread or start, for a history of another
        search, or if all values are infinite or NaN.

    References:
      Hansen, The CMA Evolution Strategy: A Tutorial, 2016 (arXiv 1604.00772).

    >>> found = search(lambda found: (found["scale"] - 0.3) ** 2, {"scale": (0.0, 1.0)}, budget=60)
    >>> round(found.best["scale"], 2)
    0.3
    """
    low, high = _limits(bounds)
    if budget < 1 or not (population is None or population >= 2) or not 0 < spread < math.inf:
        raise ValueError(
            "expected budget >= 1, population >= 2 and spread > 0, got "
            f"{budget}, {population}, {spread}"
        )
    mean = np.full(low.size, 0.5) if start is None else (_flat(start, bounds) - low) / (high - low)
    if not ((mean >= 0) & (mean <= 1)).all():
        raise ValueError(f"start: expected values within the bounds, got {dict(start or {})}")
    unit = np.tile([0.0, 1.0], (low.size, 1))
    strategy = cmaes.CMA(mean, spread, bounds=unit, seed=seed, population_size=population)

    evaluations: list[Evaluation] = []
    # CMA-ES compares values. Values that are not finite are replaced by the largest finite value.
    worst = 0.0
    while len(evaluations) < budget and not strategy.should_stop():
        generation = []
        for _ in range(min(strategy.population_size, budget - len(evaluations))):
            x = strategy.ask()
            options = _named(low + (high - low) * x, bounds)
            # CMA-ES with the same seed proposes the same points. A resumed search replays its
            # history and evaluates only new points.
            new = _recorded(history, len(evaluations), options, bounds)
            if new is None:
                # A copy: an objective that changes its arrays must not change the record.
                new = Evaluation(options, float(objective(copy.deepcopy(options))))
                if on_evaluation is not None:
                    on_evaluation(new)
            evaluations.append(new)
            generation.append((x, new.value))
        worst = max([worst, *(v for _, v in generation if math.isfinite(v))])
        # CMA-ES accepts only whole generations. A generation cut short by the budget is only
        # recorded.
        if len(generation) == strategy.population_size:
            strategy.tell([(x, v if math.isfinite(v) else worst) for x, v in generation])
    finite = [e for e in evaluations if math.isfinite(e.value)]
    if not finite:
        raise ValueError(f"objective: none of {len(evaluations)} values was finite")
    best = min(finite, key=lambda e: e.value)
    return Found(best.options, best.value, tuple(evaluations))


def _limits(bounds: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Checks the bounds; returns the lower and the upper bounds, `[dimension]` each."""
    if not bounds:
        raise ValueError("bounds: expected at least one name")
    pairs = []
    for name, given in bounds.items():
        try:
            pair = np.asarray(given, float)
        except (TypeError, ValueError) as error:
            raise ValueError(f"bounds, {name!r}: expected numbers, got {given!r}") from error
        if pair.shape != (2,) and (pair.ndim != 2 or pair.shape[1:] != (2,) or not pair.size):
            raise ValueError(f"bounds, {name!r}: expected (low, high) or several, got {given!r}")
        pair = pair.reshape(-1, 2)
        if not (np.isfinite(pair).all() and (pair[:, 0] < pair[:, 1]).all()):
            raise ValueError(f"bounds, {name!r}: expected finite low < high, got {given!r}")
        pairs.append(pair)
    low, high = np.concatenate(pairs).T
    return low, high


def _named(x: np.ndarray, bounds: Mapping[str, Any]) -> Options:
    """Converts a point of the search to hyperparameters by name."""
    options: Options = {}
    for name, given in bounds.items():
        n = np.size(given) // 2
        options[name] = float(x[0]) if np.ndim(given) == 1 else x[:n].copy()
        x = x[n:]
    return options


def _flat(options: Mapping[str, Any], bounds: Mapping[str, Any]) -> np.ndarray:
    """Converts hyperparameters by name to a point of the search; the inverse of `_named`."""
    parts = [np.atleast_1d(np.asarray(options.get(name), float)) for name in bounds]
    sizes = [np.size(given) // 2 for given in bounds.values()]
    if options.keys() != bounds.keys() or [part.shape for part in parts] != [(n,) for n in sizes]:
        raise ValueError(
            f"start: expected one value per bound of {list(bounds)}, got {dict(options)}"
        )
    return np.concatenate(parts)


def _recorded(
    history: Sequence[Evaluation], i: int, options: Options, bounds: Mapping[str, Any]
) -> Evaluation | None:
    """Returns the i-th evaluation of the history, checked, or None after its end."""
    if i >= len(history):
        return None
    then, value = history[i]
    same = then.keys() == options.keys() and all(
        np.array_equal(then[k], options[k]) for k in bounds
    )
    if not same:
        raise ValueError(f"history[{i}]: expected the options {options} of this search, got {then}")
    return Evaluation(options, float(value))
