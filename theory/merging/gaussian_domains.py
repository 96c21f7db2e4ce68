"""Merges that attack the optimality of the average: means of any odd function of an entry.

The function is a sum of ramps, like trimming with a soft threshold. The ratio compares the excess
risks of the average at its best scale and of such a mean.
"""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from theory.adversary import Box, Domain, Problem

TASKS = 3
RAMPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # where they begin, in standard deviations
NODES = 48

BOXES = {
    "shared": Box(0.05, 1.0, log=True),
    "heterogeneity": Box(0.2, 2.0, log=True),
    "noise": Box(0.2, 2.0, log=True),
    "slopes": Box(-1.0, 1.0, (len(RAMPS),)),
}


@cache
def _hermite() -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights for the mean over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()


def _of_moments(p: Problem, square: Any, product: Any) -> Any:
    """Divides the excess of the average at its best scale by the excess of a merge with these
    moments.
    """
    start = p["shared"] ** 2 + p["heterogeneity"] ** 2 / TASKS
    noise = p["noise"] ** 2 / TASKS
    least = start * noise / (start + noise)
    return least / (square - 2 * product + start)


def _normal(x: Any) -> Any:
    return jnp.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


def _ratio(p: Problem) -> Any:
    """Computes the ratio by moments of ramps and Gauss-Hermite quadrature over the shared part."""
    s, own2 = p["shared"], p["heterogeneity"] ** 2 + p["noise"] ** 2
    own, spread = jnp.sqrt(own2), jnp.sqrt(s**2 + own2)
    nodes, weights = _hermite()
    mu, cuts, slopes = s * nodes, np.array(RAMPS), jnp.asarray(p["slopes"])

    def above(mean: Any) -> Any:
        """Computes E max(tau - cut, 0) of a normal tau about each mean, for each ramp."""
        z = (mean[:, None] - cuts * spread) / own
        return own * (z * ndtr(z) + _normal(z))

    mean = mu + (above(mu) - above(-mu)) @ slopes
    # E max(|z| - r, 0) max(|z| - q, 0) for r <= q. The slope 1 of the average is one more ramp.
    low, high = np.minimum(cuts[:, None], cuts), np.maximum(cuts[:, None], cuts)
    pairs = 2 * ((1 + low * high) * ndtr(-high) - low * _normal(high))
    total = slopes.at[0].add(1.0)
    square = spread**2 * (total @ pairs @ total) / TASKS
    square += (1 - 1 / TASKS) * (weights @ mean**2)
    # By Stein E tau g(tau) = spread^2 E g'(tau). tau_2 and c_1 have only the shared part in common.
    tilt = 1 + slopes @ (2 * ndtr(-cuts))
    known = s**2 + p["heterogeneity"] ** 2 / TASKS
    return _of_moments(p, square, known * tilt)


def _ratio_again(p: Problem) -> float:
    """Computes the same by dense sums over the shared part, and over an entry about it."""
    s, own = float(p["shared"]), float(np.hypot(p["heterogeneity"], p["noise"]))
    nodes = {count: np.linspace(-7.0, 7.0, count) for count in (201, 1001)}
    at, entry = nodes[201], nodes[1001]
    weight, inner = (np.exp(-(x**2) / 2) for x in (at, entry))
    weight, inner = weight / weight.sum(), inner / inner.sum()
    tau = s * at[:, None] + own * entry
    sizes = np.abs(tau)
    merged = sizes.copy()
    for slope, ramp in zip(np.asarray(p["slopes"]), RAMPS, strict=True):
        merged += float(slope) * np.maximum(sizes - ramp * np.hypot(s, own), 0.0)
    merged *= np.sign(tau)
    mean = merged @ inner
    square = weight @ (merged**2 @ inner) / TASKS + (1 - 1 / TASKS) * (weight @ mean**2)
    share = float(p["heterogeneity"]) ** 2 / own**2
    optimum = s * at[:, None] * (1 - share) + share * tau
    product = weight @ ((merged * optimum) @ inner) / TASKS
    product += (1 - 1 / TASKS) * (weight @ (s * at * mean))
    return float(_of_moments(p, square, product))


ENTRYWISE = Domain(
    f"{TASKS} tasks, the mean of any odd piecewise linear function of each entry",
    BOXES,
    _ratio,
    _ratio_again,
)
