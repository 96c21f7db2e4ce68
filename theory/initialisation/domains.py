"""Problems that attack bounds of SAIL: quadratics for Theorem 2 and laws for Section 4.4."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from sail_jax.proximal import pair_weight
from theory.adversary import Box, Domain, Problem

STEPS = 4


def _loss(p: Problem, at: Any) -> Any:
    """Computes J - J* of the diagonal quadratic."""
    return (p["curvature"] * at**2).sum() / 2


def _descended(p: Problem, steps: int) -> Any:
    h = p["curvature"]
    return (1 - p["pace"] / h.max() * h) ** steps * p["start"]


def _eq_6(p: Problem) -> Any:
    """Divides the guaranteed relative decrease of J per step by the actual one. Small steps attain
    the bound itself.
    """
    left = (_loss(p, _descended(p, STEPS)) / _loss(p, p["start"])) ** (1 / STEPS)
    return p["pace"] / p["curvature"].max() * p["curvature"].min() / (1 - left)


def _descent(p: Problem) -> Any:
    largest = p["curvature"].max()
    rate, slope = p["pace"] / largest, ((p["curvature"] * p["start"]) ** 2).sum()
    bound = _loss(p, p["start"]) - rate * (1 - largest * rate / 2) * slope
    return _loss(p, _descended(p, 1)) / bound


def _slope(p: Problem) -> Any:
    slope = ((p["curvature"] * p["start"]) ** 2).sum()
    return 2 * p["curvature"].min() * _loss(p, p["start"]) / slope


def _eq_7(p: Problem) -> Any:
    return _loss(p, p["start"]) / (p["curvature"].max() * (p["start"] ** 2).sum() / 2)


def _again(ratio: Callable[[Any], Any], p: Problem) -> float:
    """Computes the same with the full matrix in rotated coordinates, step by step."""
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


def _embedded(p: Problem) -> tuple[Any, Any, Any]:
    """Computes the squared MMD D_1t, D_2t, D_12 of laws on 4 points, with a Gaussian kernel."""
    kernel = jnp.exp(-((p["points"][:, None] - p["points"]) ** 2) / 2)
    first, second, target = (law / law.sum() for law in p["laws"])
    changes = (first - target, second - target, first - second)
    one, two, between = (change @ kernel @ change for change in changes)
    return one, two, between


def _half_beside_weight(p: Problem) -> Any:
    one, two, between = _embedded(p)
    return 0.5 / ((one + between - two) / (2 * between))


def _half_beside_weight_again(p: Problem) -> float:
    """Computes the same by sums over pairs of points, with the weight of `sail_jax`."""
    x, laws = p["points"], [np.asarray(law) / np.sum(law) for law in p["laws"]]

    def inner(a: np.ndarray, b: np.ndarray) -> float:
        pairs = ((i, j) for i in range(len(x)) for j in range(len(x)))
        return sum(a[i] * b[j] * float(np.exp(-((x[i] - x[j]) ** 2) / 2)) for i, j in pairs)

    one, two, between = (
        inner(laws[i], laws[i]) + inner(laws[j], laws[j]) - 2 * inner(laws[i], laws[j])
        for i, j in ((0, 2), (1, 2), (0, 1))
    )
    return 0.5 / float(pair_weight(one, two, between, squared=True, model=2))


def _second_nearer(p: Problem) -> Any:
    one, two, between = _embedded(p)
    return jnp.minimum(one - two, between - 1e-3)


WEIGHT = Domain(
    "laws on 4 points, Gaussian kernel, D₁ farther from D_t than D₂, D₁₂² of .001 or more",
    {"points": Box(-3.0, 3.0, (4,)), "laws": Box(0.01, 1.0, (3, 4))},
    _half_beside_weight,
    _half_beside_weight_again,
    allowed=_second_nearer,
)
