"""Problems that attack the order of inflection points by their spectra."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.two_layer import networks
from theory.two_layer.layers import ideal, loss

THREE = 3


def _smaller(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns a spectrum and one with smaller or equal entries, both descending."""
    sigma = np.sort(p["sigma"])[::-1]
    return sigma, np.sort(sigma * p["share"])[::-1]


def _stage(sigma: np.ndarray, n: int) -> np.ndarray:
    return np.diag(np.sqrt(sigma) * (np.arange(THREE) < n))


def _by_differences(sigma: np.ndarray, gamma: float) -> list[float]:
    """Computes mean losses under noise, up to a constant, by second differences in each weight."""
    target, losses = np.diag(sigma), []
    steps = gamma * np.eye(2 * THREE**2).reshape(-1, 2, THREE, THREE)
    for n in range(THREE + 1):
        w = np.stack([_stage(sigma, n)] * 2)
        up, down = (
            np.sum(((w + s * steps)[:, 0] @ (w + s * steps)[:, 1] - target) ** 2, (-2, -1))
            for s in (1, -1)
        )
        plain = np.sum((w[0] @ w[1] - target) ** 2)
        losses.append(float(plain + np.sum(up + down - 2 * plain) / 2))
    return losses


def _by_hessians(sigma: np.ndarray, gamma: float) -> list[float]:
    """Computes the same from the trace of the Hessian, by autodiff."""
    target, losses = jnp.diag(sigma), []
    for n in range(THREE + 1):
        layers = ideal(target, n)
        trace = np.trace(np.asarray(networks.hessian(layers, target)))
        losses.append(float(loss(layers, target) + gamma**2 / 2 * trace))
    return losses


def _ratio(losses: Callable[[np.ndarray, float], list[float]], p: Problem) -> Any:
    gamma, counts = float(p["gamma"]), []
    for sigma in _smaller(p):
        rises = np.flatnonzero(np.diff(losses(sigma, gamma)) > 0)
        counts.append(rises[0] if rises.size else THREE)
    before, after = counts
    # The inflection points plus 1, since they may be 0.
    return (1 + after) / (1 + before)


SMALLER = Domain(
    "d = 3, a spectrum and one below it, 1 more than the inflection points, 0 to 3",
    {
        "sigma": Box(0.1, 3.0, (THREE,)),
        "share": Box(0.2, 1.0, (THREE,)),
        "gamma": Box(0.05, 1.0, log=True),
    },
    partial(_ratio, _by_differences),
    partial(_ratio, _by_hessians),
    smooth=False,
)
