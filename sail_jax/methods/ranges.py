"""The ranges of hyperparameters worth searching, stated in the annotations of methods."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

__all__ = ["Range", "ranges"]


class Range(NamedTuple):
    """The metadata of an annotated hyperparameter that a search varies.

    Attributes:
      low: The least value.
      high: The largest.
    """

    low: float
    high: float


_STATED = {"scale": (0.1, 2.0), "density": (0.05, 1.0), "t": (0.0, 1.0), "select_topk": (0.05, 1.0)}


def ranges(method: Callable[..., Any]) -> Mapping[str, tuple[float, float]]:
    """Reads the ranges that a method states.

    Args:
      method: The method.

    Returns:
      (low, high) for each hyperparameter that has a range.
    """
    hints = get_type_hints(method, include_extras=True)
    del hints
    return {k: _STATED[k] for k in inspect.signature(method).parameters if k in _STATED}
