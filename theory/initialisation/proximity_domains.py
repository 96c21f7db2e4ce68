"""Problems that attack the bounds of SAIL's Theorem 1 and Appendix C.

X is the squared distance of a pre-trained model. P(X >= alpha Y) is linear in the law of X, so a
constant X is the worst case. Here X has two values.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import integrate, special

from theory.adversary import Box, Domain, Problem, quadrature

NODES = 400  # of Gauss-Legendre quadrature


def _below(y: float, dim: float, length: float) -> float:
    """Computes P(Y <= y) of a noncentral chi^2."""
    return float(special.chndtr(y, dim, length) if length > 0 else special.chdtr(dim, y))


def _below_again(y: float, dim: float, length: float, weight: float = 1.0) -> float:
    """Computes the same for weight (z - sqrt(length))^2 + chi^2_(dim-1), by quadrature over z.

    z runs over the values that the first square allows, as sqrt(y / weight) sin(t).
    """
    middle, reach = np.sqrt(length), np.sqrt(y / weight)
    if dim == 1:
        return float(special.ndtr(reach - middle) - special.ndtr(-reach - middle))
    # Beyond 10 the normal density is below 1e-22.
    ends = np.arcsin(np.clip(np.array([middle - 10, middle + 10]) / reach, -1, 1))
    nodes, weights = quadrature(NODES)
    t = ends[0] + (ends[1] - ends[0]) * nodes
    z = reach * np.sin(t)
    density = np.exp(-((z - middle) ** 2) / 2) / np.sqrt(2 * np.pi) * reach * np.cos(t)
    rest = special.chdtr(dim - 1, np.maximum(y - weight * z**2, 0))
    return float((ends[1] - ends[0]) * np.sum(weights * density * rest))


def _inverse(dim: float, length: float) -> float:
    """Computes E[1 / Y] as a mixture of means of central chi^2."""
    j = np.arange(int(length / 2 + 12 * np.sqrt(length / 2 + 1)) + 30)
    chance = np.exp(special.xlogy(j, length / 2) - length / 2 - special.gammaln(j + 1))
    return float(np.sum(chance / (dim + 2 * j - 2)))


def _inverse_again(dim: float, length: float) -> float:
    """Computes the same from the mean of exp(-t Y)."""

    def mean(t: float) -> float:
        return float(np.exp(-length * t / (1 + 2 * t) - dim / 2 * np.log1p(2 * t)))

    scale = 1 / (dim + length)
    pieces = [(a * scale, b * scale) for a, b in ((0, 1), (1, 5), (5, 30), (30, 1e3), (1e3, 1e7))]
    return float(sum(integrate.quad(mean, *ends, epsabs=1e-13)[0] for ends in pieces))


def _places(p: Problem) -> tuple[Any, Any, float, float]:
    """Returns two values of X / alpha with their probabilities, the dimension and |theta*|^2."""
    dim, length = float(p["dim"]), float(p["length"])
    chances = np.array([p["chance"], 1 - p["chance"]])
    return p["shares"] * (dim + length), chances, dim, length


def _markov(inverse: bool, p: Problem) -> float:
    """Divides P(X >= alpha Y) by E X E[1/Y] / alpha, or by E X / (alpha E Y)."""
    x, chances, dim, length = _places(p)
    nearer = chances @ [_below(y, dim, length) for y in x]
    return nearer / (chances @ x * (_inverse(dim, length) if inverse else 1 / (dim + length)))


def _markov_again(inverse: bool, p: Problem) -> float:
    x, chances, dim, length = _places(p)
    nearer = chances @ [_below_again(y, dim, length) for y in x]
    # E Y, the mean of a sum of squares.
    mean = (dim - 1) + (1 + np.sqrt(length) ** 2)
    return nearer / (chances @ x * (_inverse_again(dim, length) if inverse else 1 / mean))


def markov(low: float, high: float, inverse: bool = False) -> Domain:
    """Returns the problems of Theorem 1 in some dimensions.

    Args:
      low: The smallest dimension. It may be fractional if it is above 1.
      high: The largest.
      inverse: Whether the bound has E[1 / Y] in place of 1 / E Y.

    Returns:
      The domain.
    """
    dims = f"d={low:g}" if low == high else f"d from {low:g} to {high:g}"
    return Domain(
        f"X of two values, {dims}, |θ*|² up to 1e5",
        {
            "dim": Box(low, high, log=True),
            "length": Box(1e-6, 1e5, log=True),
            "shares": Box(1e-2, 3.0, (2,), log=True),
            "chance": Box(0.0, 1.0),
        },
        partial(_markov, inverse),
        partial(_markov_again, inverse),
        smooth=False,
    )


def _union(of_models: bool, p: Problem) -> float:
    """Divides P(rho > 1/2) by n (2L/mu) E X E[1/Y], where the first direction is the steepest.

    The models are on the first axis and are merged to the mean of their positions.
    """
    n, dim, steep = int(p["models"]), float(p["dim"]), float(p["steep"])
    places = p["places"][:n] * np.sqrt(dim)
    chance = _below_again(2 * steep * places.mean() ** 2, dim, 0.0, steep)
    bound = 2 * steep * np.mean(places**2) / (dim - 2)
    return chance / (bound * n if of_models else bound)


def _union_again(p: Problem) -> float:
    """Computes the same by quadrature over the chi^2 of the other directions."""
    n, dim, steep = int(p["models"]), float(p["dim"]), float(p["steep"])
    places = p["places"][:n] * np.sqrt(dim)
    room = 2 * steep * np.mean(places) ** 2
    spread = np.sqrt(2 * dim)
    # Positions where the density is large. Quadrature would miss them in a long interval.
    ends = [max(0.0, dim + k * spread) for k in (-9, -6, -4, -2, -1, 0, 1, 2, 4, 6, 9, 20)]
    ends = sorted({min(end, room) for end in (0.0, *ends)})

    def density(x: float) -> float:
        k = (dim - 1) / 2
        flat = np.exp(special.xlogy(k - 1, x / 2) - x / 2 - special.gammaln(k)) / 2
        return float(flat * special.chdtr(1, (room - x) / steep))

    pairs = pairwise(ends)
    chance = sum(integrate.quad(density, *ends, epsabs=1e-14)[0] for ends in pairs)
    bound = n * 2 * steep * np.square(places).mean() * _inverse_again(dim, 0.0)
    return float(chance / bound)


UNION = Domain(
    "1 to 3 models on the steepest axis, d from 3 to 1e5, L/μ from 1 to 10",
    {
        "models": Box(1.0, 3.999),
        "dim": Box(3.0, 1e5, log=True),
        "steep": Box(1.0, 10.0, log=True),
        "places": Box(-2.0, 2.0, (3,)),
    },
    partial(_union, True),
    _union_again,
    allowed=lambda p: abs(p["places"][: int(p["models"])].mean()) - 0.05,
    smooth=False,
    without={"n": partial(_union, False)},
)


def _losses(p: Problem) -> tuple[float, float]:
    """Computes J - J* of the pre-trained model, which is nearer by the root of mu / 2L, and of the
    other.
    """
    h = p["curvature"]
    far, way = p["start"], p["way"]
    closer = h.min() / (2 * h.max()) * (far**2).sum() / (way**2).sum()
    near = p["closer"] * closer**0.5 * way
    return (h * near**2).sum() / 2, (h * far**2).sum() / 2


def _half(p: Problem) -> Any:
    near, far = _losses(p)
    return near / (far / 2)


def _half_printed(p: Problem) -> Any:
    """Evaluates J(theta^P) - J* <= J(theta_rand) / 2 - J*, which depends on J*."""
    near, far = _losses(p)
    return near / ((p["best"] + far) / 2 - p["best"])


def _half_again(printed: bool, p: Problem) -> float:
    """Computes the same in rotated coordinates, with the losses themselves."""
    turn = np.linalg.qr(np.vander([1.0, 2.0, 3.0]))[0]
    H, best = turn @ np.diag(p["curvature"]) @ turn.T, float(p["best"])
    values = np.linalg.eigvalsh(H)
    far, way = turn @ p["start"], turn @ p["way"]
    size = np.linalg.norm(far) * np.sqrt(values[0] / values[-1] / 2) * p["closer"]
    near = way * size / np.linalg.norm(way)
    losses = [best + at @ H @ at / 2 for at in (near, far)]
    half = losses[1] / 2 - best if printed else (losses[1] - best) / 2
    return float((losses[0] - best) / half)


HALF = Domain(
    "quadratics in 3 dimensions, curvatures .05 to 1, |θ^P - θ*|² ≤ (μ/2L)|θ_rand - θ*|²",
    {
        "curvature": Box(0.05, 1.0, (3,), log=True),
        "start": Box(-2.0, 2.0, (3,)),
        "way": Box(-2.0, 2.0, (3,)),
        "closer": Box(0.01, 1.0),
        "best": Box(-1.0, 1.0),
    },
    _half,
    partial(_half_again, False),
    allowed=lambda p: (p["start"] ** 2).sum() * (p["way"] ** 2).sum() - 0.01,
)
HALF_PRINTED = replace(HALF, ratio=_half_printed, again=partial(_half_again, True))
