"""Problems on which the bounds of SAIL's Theorem 2 are attacked: quadratics in three dimensions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from theory.adversary import Box, Domain

STEPS = 4


def _loss(p: Any, at: Any) -> Any:
    """J - J* of the diagonal quadratic."""
    return (p["curvature"] * at**2).sum() / 2


def _descended(p: Any, steps: int) -> Any:
    h = p["curvature"]
    return (1 - p["pace"] / h.max() * h) ** steps * p["start"]


def _eq_6(p: Any) -> Any:
    """The share by which a step must lower J beside that by which steps do: small steps attain the
    bound itself."""
    left = (_loss(p, _descended(p, STEPS)) / _loss(p, p["start"])) ** (1 / STEPS)
    return p["pace"] / p["curvature"].max() * p["curvature"].min() / (1 - left)


def _descent(p: Any) -> Any:
    largest = p["curvature"].max()
    rate, slope = p["pace"] / largest, ((p["curvature"] * p["start"]) ** 2).sum()
    bound = _loss(p, p["start"]) - rate * (1 - largest * rate / 2) * slope
    return _loss(p, _descended(p, 1)) / bound


def _slope(p: Any) -> Any:
    slope = ((p["curvature"] * p["start"]) ** 2).sum()
    return 2 * p["curvature"].min() * _loss(p, p["start"]) / slope


def _eq_7(p: Any) -> Any:
    return _loss(p, p["start"]) / (p["curvature"].max() * (p["start"] ** 2).sum() / 2)


def _again(ratio: Callable[[Any], Any], p: Any) -> float:
    """Of the full matrix in turned coordinates, step by step."""
    turn = np.linalg.qr(np.vander([1.0, 2.0, 3.0]))[0]
    h, start = p["curvature"], turn @ p["start"]
    H = turn @ np.diag(h) @ turn.T
    at, largest, least = start, h.max(), h.min()
    path = [at := at - p["pace"] / largest * (H @ at) for _ in range(STEPS)]
    before, slope = start @ H @ start / 2, np.sum((H @ start) ** 2)
    rate = p["pace"] / largest
    left = (path[-1] @ H @ path[-1] / 2 / before) ** (1 / STEPS)
    found: dict[Any, Any] = {
        _eq_6: rate * least / (1 - left),
        _descent: path[0] @ H @ path[0] / 2 / (before - rate * (1 - largest * rate / 2) * slope),
        _slope: 2 * least * before / slope,
        _eq_7: before / (largest * (start @ start) / 2),
    }
    return float(found[ratio])


def _quadratics(ratio: Callable[[Any], Any]) -> Domain:
    return Domain(
        "quadratics in 3 dimensions, curvatures .05 to 1, η < 1/L",
        {
            "curvature": Box(0.05, 1.0, (3,), log=True),
            "start": Box(-2.0, 2.0, (3,)),
            "pace": Box(0.01, 0.999),
        },
        ratio,
        partial(_again, ratio),
        allowed=lambda p: (p["start"] ** 2).sum() - 0.01,
    )


CONTRACTION, DESCENT, SLOPE, EXCESS = map(_quadratics, (_eq_6, _descent, _slope, _eq_7))
