"""Problems that attack the claim that no filter of a source is nearer to the target.

A filter multiplies the fit of least norm along the i-th right singular vector of the source's data
by f_i. All penalties, and all times at which training may stop, are filters.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem

MORE = 3  # directions that the source's data do not show


def _nearest(p: Problem) -> Any:
    """Divides the distance of the best scaled ridge by the distance of a filter, both as means over
    tasks and noise.

    Both sides are sums over the eigenvalues x of X^T X.
    """
    x, f = p["eigenvalues"], p["filter"]
    d = x.size + MORE
    cos = jnp.cos(p["theta"])
    best = 1 - cos**2 * jnp.sum(x / (x + d * p["sigma"] ** 2)) / d
    one = 1 - 2 * cos * jnp.sum(f) / d + jnp.sum(f**2 * (1 / d + p["sigma"] ** 2 / x))
    return best / one


def _nearest_again(p: Problem) -> float:
    """Computes the same with matrices, for data with these eigenvalues."""
    rng = np.random.default_rng(0)
    x, f, sigma, cos = p["eigenvalues"], p["filter"], float(p["sigma"]), np.cos(p["theta"])
    n, d = x.size, x.size + MORE
    u, v = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (n, d))
    v = v[:, :n]
    data = u @ np.diag(np.sqrt(x)) @ v.T

    def distance2(linear: np.ndarray) -> float:
        """Computes E|beta_t - linear y|^2 for beta_s of variance 1/d along every direction."""
        on_task = linear @ data
        missed = cos * np.eye(d) - on_task
        noise = sigma**2 * np.sum(linear**2)
        return float(np.sin(p["theta"]) ** 2 + np.sum(missed**2) / d + noise)

    ridge = np.linalg.solve(data.T @ data + d * sigma**2 * np.eye(d), data.T)
    return distance2(cos * ridge) / distance2(v @ np.diag(f / np.sqrt(x)) @ u.T)


FILTERS = Domain(
    "any filter of 4 eigenvalues from .01 to 100 in 7 dimensions, any θ, σ from .01 to 3",
    {
        "eigenvalues": Box(1e-2, 1e2, (4,), log=True),
        "filter": Box(-1.0, 2.0, (4,)),
        "theta": Box(0.0, np.pi),
        "sigma": Box(1e-2, 3.0, log=True),
    },
    _nearest,
    _nearest_again,
)
