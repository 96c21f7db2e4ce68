"""Problems that attack bounds on equal weights, on the ranks of fine-tuning, and on filters.

A filter multiplies the fit of minimum norm along the i-th right singular vector of the source's
data by f_i. All penalties and all stopping times are filters.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import optimize

from theory.adversary import Box, Domain, Problem
from theory.deep_linear.risk_domains import inverse_mean, inverse_mean_again

SOURCES = 4


def _uniform(p: Problem) -> Any:
    """Divides the mean squared distance of equal weights by the smallest one and by the bound in
    kappa.
    """
    v = p["spread"]
    kappa = v.max() / v.min()
    return v.mean() * (1 / v).mean() * 4 * kappa / (kappa + 1) ** 2


def _uniform_again(p: Problem) -> float:
    """Computes the same by a search over weights of sum 1, from equal ones."""
    v = np.asarray(p["spread"], float)

    def risk(first: np.ndarray) -> float:
        weights = np.append(first, 1 - first.sum())
        return float(np.sum(weights**2 * v))

    equal = np.full(SOURCES - 1, 1 / SOURCES)
    # The first steps are in units of v, which is up to a thousand.
    least: Any = optimize.minimize(risk, equal, method="BFGS", options={"gtol": 1e-10})
    kappa = v.max() / v.min()
    return risk(equal) / float(least.fun) / ((kappa + 1) ** 2 / (4 * kappa))


UNIFORM = Domain(
    f"{SOURCES} independent sources without bias, E|b_s - β_t|² from .1 to 10",
    {"spread": Box(0.1, 10.0, (SOURCES,), log=True)},
    _uniform,
    _uniform_again,
)


def _rank_risk(inverse: Any, n: Any, d: Any, k: Any, sigma: Any) -> Any:
    """Adds the part outside or unseen, and noise x the mean inverse of a chi-square."""
    least, most = (np.minimum, np.maximum) if isinstance(n, float) else (jnp.minimum, jnp.maximum)
    outside = 1 - k / d
    unseen = (k / d) * most(1 - n / k, 0.0)
    return outside + unseen + (outside + sigma**2) * least(n, k) * inverse(abs(n - k) + 1)


def _numbers(p: Problem) -> tuple[Any, Any, Any, Any]:
    return p["samples"], p["d"], p["share"] * p["d"], p["sigma"]


def _ends(p: Problem) -> Any:
    n, d, k, sigma = _numbers(p)
    whole = _rank_risk(inverse_mean, n, d, d, sigma)
    return jnp.minimum(whole, 1.0) / _rank_risk(inverse_mean, n, d, k, sigma)


def _ends_again(p: Problem) -> float:
    n, d, k, sigma = map(float, _numbers(p))
    whole = _rank_risk(inverse_mean_again, n, d, d, sigma)
    return min(whole, 1.0) / _rank_risk(inverse_mean_again, n, d, k, sigma)


def _apart(p: Problem) -> Any:
    n, d, k, _ = _numbers(p)
    return jnp.minimum(abs(n - k), abs(n - d)) - 2


ENDS = Domain(
    "σ from .1 to 3, d from 4 to 200, n from 1 to 400, 0 < k < d, |n-k|, |n-d| ≥ 2",
    {
        "samples": Box(1.0, 400.0, log=True),
        "d": Box(4.0, 200.0, log=True),
        "share": Box(0.01, 0.99),
        "sigma": Box(0.1, 3.0, log=True),
    },
    _ends,
    _ends_again,
    allowed=_apart,
)


# --- no filter of a source is nearer to the target ------------------------------------------------

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
