"""Problems on which Theorem 2.2 is attacked as printed: two tasks of one feature."""

from dataclasses import replace
from math import pi, sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf
from scipy import integrate, special

from theory.adversary import Box, Domain, Problem, quadrature
from theory.deep_linear import divergences
from theory.deep_linear.divergence_domains import dudley_upper

_SIZES = {"f": Box(0.05, 2.0, log=True), "sigma": Box(0.05, 2.0, log=True)}
_DELTA = {"delta": Box(0.1, 10.0, log=True)}


def _of_proof(p: Problem) -> Any:
    """Returns tasks f x_1 and g x_1 with the proof's |g|, at which (28) is delta."""
    g = jnp.sqrt(jnp.abs(2 * p["delta"] * jnp.exp(p["sigma"] ** 2 / 2) - p["f"] ** 2))
    zero = 0 * p["f"]
    return {**p, "source": jnp.stack([p["f"], zero]), "target": jnp.stack([g, zero])}


def _dudley_of_proof(p: Problem) -> Any:
    """Divides delta by an upper bound of the Dudley metric."""
    upper = divergences.dudley_bounds(p["source"], p["target"], p["sigma"]).upper
    return p["delta"] / upper


DUDLEY = Domain(
    "δ from .1 to 10, |f| and σ from .05 to 2, g of the proof",
    _SIZES | _DELTA,
    lambda p: _dudley_of_proof(_of_proof(p)),
    lambda p: float(p["delta"] / dudley_upper(_of_proof(p))),
)


def _variation(p: Problem) -> Any:
    """Divides delta by twice the total variation, which is erf(|f-g| |x| / (2 sqrt(2) sigma)) given
    x.
    """
    gap = jnp.abs(p["source"][0] - p["target"][0])
    # With u = P(|x| <= x) the mean over x is one over (0, 1), here by t = x / (1 + x).
    t, dt = quadrature(200)
    x = t / (1 - t)
    density = 2 * np.exp(-(x**2) / 2) / sqrt(2 * pi) / (1 - t) ** 2 * dt
    return p["delta"] / (2 * jnp.sum(density * erf(gap * x / (2 * sqrt(2) * p["sigma"]))))


def _variation_again(p: Problem) -> float:
    gap = abs(float(p["source"][0] - p["target"][0]))

    def excess(x: float) -> float:
        """Computes the ratio of both densities of y, given x."""
        density = 2 * np.exp(-(x**2) / 2) / sqrt(2 * pi)
        return float((2 * special.ndtr(gap * x / (2 * p["sigma"])) - 1) * density)

    return float(p["delta"] / (2 * integrate.quad(excess, 0, 12, points=[0.01, 0.1, 1])[0]))


VARIATION = replace(
    DUDLEY,
    ratio=lambda p: _variation(_of_proof(p)),
    again=lambda p: _variation_again(_of_proof(p)),
)


def _cosines(p: Problem) -> Any:
    """Divides (28) by (27), with E cos(f.x) by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    means = [jnp.sum(weights * jnp.cos(size * nodes)) / sqrt(2 * pi) for size in p["sizes"]]
    return jnp.sum(p["sizes"] ** 2) / jnp.abs(means[0] - means[1])


COSINES = Domain(
    "|f| and |g| from .05 to 3",
    {"sizes": Box(0.05, 3.0, (2,), log=True)},
    _cosines,
    lambda p: float(np.sum(p["sizes"] ** 2) / abs(np.subtract(*np.exp(-(p["sizes"] ** 2) / 2)))),
    allowed=lambda p: jnp.abs(p["sizes"][0] - p["sizes"][1]) - 0.01,
)


def _choice(p: Problem) -> tuple[Any, Any]:
    """Returns the gap of the means of y over sigma, per unit of x, and delta for g = -alpha f."""
    alpha = p["above"] * p["sigma"] * p["delta"] ** 0.5 / p["f"]
    return (1 + alpha) * p["f"] / p["sigma"], p["delta"]


def _divergence(p: Problem) -> Any:
    """Divides delta by E_f log p_f / p_g, by quadrature over x and noise."""
    gap, delta = _choice(p)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    x, noise = nodes[:, None], nodes
    log_ratio = ((noise + gap * x) ** 2 - noise**2) / 2
    return delta / (weights @ log_ratio @ weights / (2 * pi))


def _divergence_again(p: Problem) -> float:
    """Computes the same by the determinants and traces of the two normal laws of (x, y)."""
    gap, delta = _choice(p)
    first, second = (np.array([[1.0, a], [a, 1 + a**2]]) for a in (0.0, float(gap)))
    trace = np.trace(np.linalg.solve(second, first))
    return float(delta / ((trace - 2 - np.log(np.linalg.det(first) / np.linalg.det(second))) / 2))


CHOICE = Domain(
    "δ from .1 to 10, |f| and σ from .05 to 2, α from 1 to 3 times σ√δ/|f|",
    _SIZES | _DELTA | {"above": Box(1.0, 3.0)},
    _divergence,
    _divergence_again,
)
