"""Which way of using the source is best, and by how much: the practitioner's question."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from theory import problems
from theory.deep_linear import risks


def transfer_risks(
    n: ArrayLike, d: ArrayLike, theta: ArrayLike, sigma: ArrayLike, *, depth: ArrayLike = 2
) -> dict[str, Array]:
    """Expected risk of each method; arrays broadcast; inf where a mean is infinite.

    "scratch", "linear transfer" and "ridge transfer" (at the best ridge) are exact at finite n and
    d; "fine-tuning" subtracts the limiting gain (n, d -> inf) from the exact scratch risk.
    """
    scratch = risks.scratch_risk(n, d, sigma, allow_infinite=True)
    gain = risks.transferability("fine_tune", n, d, theta, sigma, depth=depth)
    plain = risks.linear_transfer_risk(n, theta, sigma, allow_infinite=True)
    best = risks.optimal_ridge(n, theta, sigma)
    # The best ridge is infinite at theta = pi/2 (nothing is transferred) and 0 without any error.
    finite = jnp.isfinite(best) & (best < 1e12) & (best > 0)
    ridge = risks.linear_transfer_risk(
        n, theta, sigma, jnp.where(finite, best, 1.0), allow_infinite=True
    )
    ridge = jnp.where(finite, ridge, jnp.where(best > 0, 1.0, plain))
    found = {
        "scratch": scratch,
        "linear transfer": plain,
        "ridge transfer": ridge,
        "fine-tuning": scratch - gain,
    }
    shape = jnp.broadcast_shapes(*(v.shape for v in found.values()))
    return {name: jnp.broadcast_to(value, shape) for name, value in found.items()}


class Advice(NamedTuple):
    """The method of least expected risk, the risk it leaves, and what the next best would cost."""

    method: str
    risk: float
    runner_up: str
    margin: float
    risks: dict[str, float]


def advise(n: int, d: int, theta: float, sigma: float, *, depth: float = 2) -> Advice:
    """The best way to use a source at angle theta, for n samples in d dimensions.

    >>> advise(50, 500, 0.3, 0.2).method
    'fine-tuning'
    >>> advise(2000, 500, 1.2, 0.2).method
    'scratch'
    """
    found = {k: float(v) for k, v in transfer_risks(n, d, theta, sigma, depth=depth).items()}
    # sorted is stable: where methods tie, the simpler one is named
    first, second, *_ = sorted(found, key=found.__getitem__)
    return Advice(first, found[first], second, found[second] - found[first], found)


def angle(beta_s: ArrayLike, beta_t: ArrayLike) -> Array:
    """The angle between two weight vectors, accurate at both ends of [0, pi].

    Kahan's form 2 atan2(|u - v|, |u + v|) of unit vectors.
    """
    unit = []
    for name, beta in (("beta_s", beta_s), ("beta_t", beta_t)):
        vector = jnp.asarray(beta, dtype=float)
        size = jnp.linalg.norm(vector)
        problems.check(f"|{name}|", size, lambda s: (s > 0) & (s < np.inf), "positive and finite")
        unit.append(vector / size)
    if unit[0].shape != unit[1].shape:
        raise ValueError(
            f"beta_s and beta_t must have one shape; got {unit[0].shape} and {unit[1].shape}"
        )
    return 2 * jnp.arctan2(jnp.linalg.norm(unit[0] - unit[1]), jnp.linalg.norm(unit[0] + unit[1]))
