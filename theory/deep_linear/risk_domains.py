"""Problems on which statements about mean risks of deep linear networks are attacked.

A risk has two parts. One is the part of the target outside the row space of the data. The other is
the noise times the mean inverse of a chi-square, or of a Marchenko-Pastur eigenvalue. These means
are integrals here.
"""

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import integrate, optimize, special

from theory.adversary import Box, Domain, Problem, quadrature


def inverse_mean(dim: Any) -> Any:
    """Computes E[1 / chi^2_dim], dim >= 3, from the mean of exp(-t chi^2), v = (1 + 2 t)^(-1/2)."""
    v, dv = quadrature(64)
    return jnp.sum(dv * jnp.power(v, dim - 3))


def inverse_mean_again(dim: float) -> float:
    """Computes the same from the distribution function of chi^2.

    Args:
      dim: The degrees of freedom, at least 3.

    Returns:
      The mean.
    """

    def part(y: float) -> float:
        return float(special.chdtr(dim, y) / y**2)

    # It is 1 beyond the last of the ends.
    ends = [0.0, dim / 4, dim, 3 * dim, 20 * dim + 100]
    return sum(integrate.quad(part, a, b)[0] for a, b in pairwise(ends)) + 1 / ends[-1]


def _scratch(inverse: Any, p: Problem) -> Any:
    """Computes the scratch risk. (X X^T)^-1 has the diagonal 1 / chi^2_(d-n+1)."""
    n, d = p["samples"], p["samples"] + p["more"]
    return 1 - n / d + p["sigma"] ** 2 * n * inverse(p["more"] + 1)


def _refitted(inverse: Any, p: Problem) -> Any:
    """Computes the refitted risk. The error of the scale is the noise plus the rest of the target,
    divided by |z|.
    """
    outside = np.sin(p["theta"]) if inverse is inverse_mean_again else jnp.sin(p["theta"])
    return outside**2 + (p["sigma"] ** 2 + outside**2) * inverse(p["samples"])


SNR_PRINTED = Domain(
    "σ from 1 to 3, any θ, n from 3 to 50, d from n + 2 to n + 100",
    {
        "samples": Box(3.0, 50.0, log=True),
        "more": Box(2.0, 100.0, log=True),
        "sigma": Box(1.0, 3.0),
        "theta": Box(0.0, np.pi),
    },
    lambda p: _refitted(inverse_mean, p) / _scratch(inverse_mean, p),
    lambda p: float(_refitted(inverse_mean_again, p) / _scratch(inverse_mean_again, p)),
)


def _first_sample(inverse: Any, p: Problem) -> Any:
    """Divides the risk with one sample by the risk without any, which is 1."""
    return _scratch(inverse, {"samples": 1.0, "more": p["d"] - 1, "sigma": p["sigma"]})


DESCENT_PRINTED = Domain(
    "σ from .1 to 3, d from 3 to 100",
    {"d": Box(3.0, 100.0, log=True), "sigma": Box(0.1, 3.0, log=True)},
    lambda p: _first_sample(inverse_mean, p),
    lambda p: float(_first_sample(inverse_mean_again, p)),
)

_ANGLES = (np.arange(400) + 0.5) * np.pi / 400


def _limit(p: Problem) -> Any:
    """Divides the limit of R_lt by the limit of R_sc, with eigenvalues 1 + load + 2 sqrt(load)
    cos(t).
    """
    load = p["load"]
    eigenvalue = 1 + load + 2 * jnp.sqrt(load) * jnp.cos(_ANGLES)
    inverse = 2 * jnp.mean(jnp.sin(_ANGLES) ** 2 / eigenvalue**2)
    return jnp.sin(p["theta"]) ** 2 / (1 - load + p["sigma"] ** 2 * load * inverse)


def _limit_again(p: Problem) -> float:
    """Computes the same by the density of eigenvalues and the best multiple of the source."""
    load, theta = float(p["load"]), float(p["theta"])
    low, high = (1 - load**0.5) ** 2, (1 + load**0.5) ** 2

    def density(x: float) -> float:
        return ((high - x) * (x - low)) ** 0.5 / (2 * np.pi * load * x)

    inverse = integrate.quad(lambda x: density(x) / x, low, high, limit=400)[0]
    source, target = np.array([1.0, 0.0]), np.array([np.cos(theta), np.sin(theta)])
    best: Any = optimize.minimize_scalar(lambda b: float(np.sum((b * source - target) ** 2)))
    return float(best.fun / (1 - load + p["sigma"] ** 2 * load * inverse))


SNR = Domain(
    "σ from 1 to 3, any θ, load from .001 to .9, in the limit n, d → ∞",
    {
        "load": Box(1e-3, 0.9, log=True),
        "sigma": Box(1.0, 3.0),
        "theta": Box(0.0, np.pi),
    },
    _limit,
    _limit_again,
)
