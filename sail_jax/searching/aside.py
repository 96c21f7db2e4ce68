"""Scores of several candidates at a time, on the workers of a cluster."""

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sail_jax.cluster import Workers
from sail_jax.searching.arms import Arm
from sail_jax.searching.searches import Measure, Wanted

Scores = Float[np.ndarray, "n"]


class SideBySide(Measure):
    """Scores candidates on workers. The trials have the order, and scores, of a search here.

    Args:
      make: Makes the measure, once in each worker. It is picklable.
      workers: The workers.
    """

    def __init__(self, make: Callable[[], Measure], workers: Workers) -> None:
        self._score, self._workers = partial(_scored, str(uuid.uuid4()), make), workers
        self._wanted: deque[tuple[int, Wanted]] = deque()
        self._results: Iterator[tuple[int, Scores]] = iter(())
        self._scores: dict[int, Scores] = {}

    def ahead(self, wanted: Sequence[Wanted]) -> None:
        """Begins scores that the search will ask for next, in this order."""
        self._wanted, self._scores = deque(enumerate(wanted)), {}
        self._results = self._workers.each(self._score, wanted)

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Scores:
        return self._one(Wanted(k, {}, examples))

    def merge(self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]) -> Scores:
        return self._one(Wanted(arm, options, examples))

    def _one(self, wanted: Wanted) -> Scores:
        if not self._wanted or not self._wanted[0][1].same(wanted):
            self.ahead([wanted])
        place, _ = self._wanted.popleft()
        while place not in self._scores:
            finished, scores = next(self._results)
            self._scores[finished] = scores
        return self._scores.pop(place)


# The measure of the current search, with its key: a worker makes it once.
_made: dict[str, Measure] = {}


def _scored(key: str, make: Callable[[], Measure], wanted: Wanted) -> Scores:
    """Scores a candidate, as a task."""
    if key not in _made:
        _made.clear()
        _made[key] = make()
    return wanted.by(_made[key])
