"""Problems that attack Lemmas A.9 to A.11, A.23 and A.28 of overtrained, mode by mode.

The ratio follows the recursion of the modes. `again` trains the layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.two_layer import networks
from theory.two_layer.layers import Layers

# --- the rate (A.28) -------------------------------------------------------

FEW = 5  # steps


def _end(p: Problem, steps: int) -> tuple[Any, Any]:
    """Computes the layers' mode after some steps, and its limit."""
    pre, ft, rate, anchor = (p[name] for name in ("pre", "ft", "rate", "anchor"))
    x = pre**0.5
    for _ in range(steps):
        x = x + 2 * rate * x * (ft - x**2 + anchor * (pre - x**2))
    return x, ((ft + anchor * pre) / (1 + anchor)) ** 0.5


def _contracted(factor: Callable[[Any], Any], p: Problem) -> Any:
    """Divides the guaranteed relative progress per step by the actual one."""
    x, limit = _end(p, FEW)
    left = jnp.abs(x - limit) / jnp.abs(p["pre"] ** 0.5 - limit)
    least = factor(p) * p["rate"] * jnp.minimum(p["pre"], p["ft"])
    return least / (1 - left ** (1 / FEW))


def _contracted_again(factor: Callable[[Any], Any], p: Problem) -> float:
    """Computes the same by gradient descent of a network of one unit."""
    one = jnp.ones((1, 1))
    start = Layers(*(float(p["pre"]) ** 0.5 * one for _ in range(2)))
    options = {"anchor": float(p["anchor"]), "anchored_to": float(p["pre"]) * one, "every": FEW}
    path = networks.descend(start, float(p["ft"]) * one, float(p["rate"]), FEW, **options)
    x, limit = float(path.w1[-1, 0, 0]), float(_end(p, 0)[1])
    left = abs(x - limit) / abs(p["pre"] ** 0.5 - limit)
    return float(factor(p) * p["rate"] * min(p["pre"], p["ft"])) / (1 - left ** (1 / FEW))


def contraction(ours: bool) -> Domain:
    """Returns the problems of the rate of Lemma A.28.

    Args:
      ours: Whether the bound is the sharper one.

    Returns:
      The domain.
    """
    factor = (lambda p: 4 * (1 + p["anchor"])) if ours else (lambda p: 2.0)
    return Domain(
        f"one mode, {FEW} steps, 4η(λ+2)Γ < 1, σ_0² and σ² apart by 1 % or more",
        {
            "pre": Box(0.01, 3.0),
            "ft": Box(0.01, 3.0),
            "rate": Box(1e-4, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_contracted, factor),
        partial(_contracted_again, factor),
        allowed=lambda p: jnp.minimum(
            1 - 4 * p["rate"] * (p["anchor"] + 2) * jnp.maximum(p["pre"], p["ft"]),
            jnp.abs(p["pre"] / p["ft"] - 1) - 0.01,
        ),
    )


# --- enough steps (A.10, A.21, A.23) --------------------------------------------------------------

MOST = 20_000  # steps

Pace = Callable[[Any], float]


def _pace_printed(p: Problem) -> float:
    """Computes the steps as printed in Assumption A.21, without the rate."""
    return min(p["pre"], p["ft"])


def _pace_slow(p: Problem) -> float:
    return p["rate"] * min(p["pre"], p["ft"])


def _pace_corrected(p: Problem) -> float:
    return 4 * p["rate"] * (1 + p["anchor"]) * min(p["pre"], p["ft"])


def _near(p: Problem) -> tuple[float, float]:
    """Returns the bound of Lemma A.23, lambda_0 = lambda, and a fraction of the largest epsilon of
    A.21.
    """
    size = max(p["pre"], p["ft"])
    near = (p["pre"] - p["ft"]) ** 2 / ((1 + p["anchor"]) ** 2 * size)
    return near / 500, p["share"] * near / (4000 * size)


def _any(p: Problem) -> tuple[float, float]:
    """Returns the bound of Lemma A.11, any epsilon, here up to Gamma."""
    epsilon = p["share"] * max(p["pre"], p["ft"])
    return epsilon, epsilon


def _first(p: Problem) -> tuple[float, float]:
    """Returns an epsilon below a tenth of the first error, and the one for which the steps of
    Assumption A.10 are log(first error / epsilon) / pace.
    """
    first = abs(p["pre"] - p["ft"]) / (1 + p["anchor"])
    return p["share"] * first / 10, 10 * p["share"] * max(p["pre"], p["ft"])


def _floats(p: Problem) -> dict[str, float]:
    return {name: float(value) for name, value in p.items()}


def _enough(pace: Pace, bounds: Callable[[Any], tuple[float, float]], p: Problem) -> int:
    epsilon = bounds(p)[1]
    return int(np.ceil(np.log(100 * max(p["pre"], p["ft"]) / epsilon) / pace(p)))


def _left(pace: Pace, bounds: Callable[[Any], tuple[float, float]], p: Problem) -> float:
    """Divides the remaining distance after the required steps by its bound."""
    p = _floats(p)
    x, limit = _end(p, _enough(pace, bounds, p))
    return abs(x**2 - limit**2) / bounds(p)[0]


def _left_again(pace: Pace, bounds: Callable[[Any], tuple[float, float]], p: Problem) -> float:
    """Computes the same by descent on both layers of a network with one unit."""
    p = _floats(p)
    first, second = p["pre"] ** 0.5, -(p["pre"] ** 0.5)
    target, anchored = -p["ft"], first * second
    for _ in range(_enough(pace, bounds, p)):
        slope = 2 * (first * second - target) + 2 * p["anchor"] * (first * second - anchored)
        first, second = first - p["rate"] * slope * second, second - p["rate"] * slope * first
    limit = np.average([target, anchored], weights=[1.0, p["anchor"]])
    return float(abs(first * second - limit) / bounds(p)[0])


def _steps(words: str, pace: Pace, bounds: Callable[[Any], tuple[float, float]]) -> Domain:
    return Domain(
        f"d = n = 1, {words}, 4η(λ+2)Γ < 1, up to {MOST:,} steps",
        {
            "pre": Box(0.05, 3.0),
            "ft": Box(0.05, 3.0),
            "rate": Box(1e-2, 0.2, log=True),
            "anchor": Box(0.0, 5.0),
            "share": Box(1e-3, 1.0, log=True),
        },
        partial(_left, pace, bounds),
        partial(_left_again, pace, bounds),
        allowed=lambda p: min(
            1 - 4 * p["rate"] * (p["anchor"] + 2) * max(p["pre"], p["ft"]),
            abs(p["pre"] / p["ft"] - 1) - 0.01,
            1 - _enough(pace, bounds, p) / MOST,
        ),
        smooth=False,
    )


_SMALL = "λ_0 = λ, ϵ at most that of A.21"
STEPS_PRINTED = _steps(_SMALL, _pace_printed, _near)
STEPS = _steps(_SMALL, _pace_corrected, _near)
CONVERGED = _steps(f"{_SMALL}, K as in Assumption A.10", _pace_slow, _near)
PRECISE = _steps("ϵ at most Γ", _pace_slow, _any)
LEAST = _steps("ϵ at most a tenth of the first error", _pace_corrected, _first)

# --- norms along the path (A.9) -------------------------------------------------------------------

PATH = 12  # steps


def _largest(p: Problem) -> Any:
    """Divides the largest mode after a step by Gamma, as roots."""
    x, found = jnp.sqrt(p["pre"]), []
    for _ in range(PATH):
        pull = p["ft"] - x**2 + p["anchor"] * (p["pre"] - x**2)
        x = x + 2 * p["rate"] * x * pull
        found.append(x)
    size = jnp.maximum(p["pre"].max(), p["ft"].max())
    return jnp.abs(jnp.stack(found)).max() / jnp.sqrt(size)


def _largest_again(p: Problem) -> float:
    """Computes the same by gradient descent of layers with rotated singular vectors."""
    u, v = (
        np.linalg.qr(np.array(m))[0] for m in ([[1.0, 2.0], [3.0, 5.0]], [[2.0, 1.0], [1.0, 3.0]])
    )
    root = np.sqrt(p["pre"])
    start = Layers(jnp.asarray(u * root), jnp.asarray(root[:, None] * v.T))
    target, rate, anchor = (u * p["ft"]) @ v.T, float(p["rate"]), float(p["anchor"])
    path = networks.descend(start, jnp.asarray(target), rate, PATH, anchor=anchor, every=1)
    norms = [np.linalg.norm(np.asarray(w), 2, axis=(1, 2)).max() for w in path]
    return float(max(norms) / np.sqrt(max(*p["pre"], *p["ft"])))


NORMS = Domain(
    f"two modes, {PATH} steps, 4η(λ+2)Γ < 1",
    {
        "pre": Box(0.01, 3.0, (2,)),
        "ft": Box(0.01, 3.0, (2,)),
        "rate": Box(1e-4, 0.12, log=True),
        "anchor": Box(0.0, 10.0),
    },
    _largest,
    _largest_again,
    allowed=lambda p: (
        1 - 4 * p["rate"] * (p["anchor"] + 2) * jnp.maximum(p["pre"].max(), p["ft"].max())
    ),
)
