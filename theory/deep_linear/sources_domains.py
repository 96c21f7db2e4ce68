"""Problems that attack a bound on equal weights and a bound on the ranks of fine-tuning."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import optimize

from theory.adversary import Box, Domain, Problem
from theory.deep_linear.risk_domains import inverse_mean, inverse_mean_again

SOURCES = 4


def _uniform(p: Problem) -> Any:
    """Divides the mean squared distance of equal weights by the least one and by the bound in
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
    """Adds the part outside or unseen, and the noise times the mean inverse of a chi-square."""
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
