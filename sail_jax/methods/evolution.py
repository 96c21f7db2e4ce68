"""Search for merging coefficients without gradients, by CMA-ES (Hansen 2016)."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cmaes
import numpy as np

__all__ = ["Evaluation", "Found", "search"]

Options = dict[str, Any]


class Evaluation(NamedTuple):
    """options: by name, floats, or arrays where several bounds were given; value: the objective."""

    options: Options
    value: float


class Found(NamedTuple):
    """The best evaluation, and all of them in order."""

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
    """The options within `bounds` of the least objective found in at most `budget` evaluations.

    objective({name: value}): what to minimise (the negative of a score), for instance
    `lambda options: loss(methods.ties(**options)(models, base))`. Values that are not finite count
    as the worst seen and are never the result. bounds: name -> (low, high) for a number, or a
    sequence of such pairs for an array of them, as for `weights`.

    The search runs on bounds scaled to [0, 1], from `start` (their middle by default) with a
    standard deviation of `spread`; `population` per generation, 4 + floor(3 log dimension) by
    default. It stops early once CMA-ES has converged. Equal arguments give equal searches.

    history: evaluations of an interrupted search with the same arguments (`on_evaluation` is called
    with each new one, to record it): they are taken as they are, and the search goes on as if it
    had never stopped. budget counts them.

    ValueError for bounds, start, budget or history that do not fit, and if no value was finite.

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
    worst = 0.0
    while len(evaluations) < budget and not strategy.should_stop():
        generation = []
        for _ in range(min(strategy.population_size, budget - len(evaluations))):
            x = strategy.ask()
            options = _named(low + (high - low) * x, bounds)
            new = _recorded(history, len(evaluations), options, bounds)
            if new is None:
                new = Evaluation(options, float(objective(copy.deepcopy(options))))
                if on_evaluation is not None:
                    on_evaluation(new)
            evaluations.append(new)
            generation.append((x, new.value))
        worst = max([worst, *(v for _, v in generation if math.isfinite(v))])
        if len(generation) == strategy.population_size:
            strategy.tell([(x, v if math.isfinite(v) else worst) for x, v in generation])
    finite = [e for e in evaluations if math.isfinite(e.value)]
    if not finite:
        raise ValueError(f"objective: none of {len(evaluations)} values was finite")
    best = min(finite, key=lambda e: e.value)
    return Found(best.options, best.value, tuple(evaluations))


def _limits(bounds: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
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
    options: Options = {}
    for name, given in bounds.items():
        n = np.size(given) // 2
        options[name] = float(x[0]) if np.ndim(given) == 1 else x[:n].copy()
        x = x[n:]
    return options


def _flat(options: Mapping[str, Any], bounds: Mapping[str, Any]) -> np.ndarray:
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
    if i >= len(history):
        return None
    then, value = history[i]
    same = then.keys() == options.keys() and all(
        np.array_equal(then[k], options[k]) for k in bounds
    )
    if not same:
        raise ValueError(f"history[{i}]: expected the options {options} of this search, got {then}")
    return Evaluation(options, float(value))
