"""Wasserstein distances in one dimension, where the best plan is monotone, and along many."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.distances.estimates import Distance, host_samples, samples

__all__ = ["sliced_wasserstein", "wasserstein"]

BLOCK = 16  # projections sorted at once


def wasserstein(
    x: Float[ArrayLike, "m"],
    y: Float[ArrayLike, "n"],
    *,
    p: float = 1,
    x_weights: Float[ArrayLike, "m"] | None = None,
    y_weights: Float[ArrayLike, "n"] | None = None,
) -> Distance:
    """The p-Wasserstein distance of two weighted samples of numbers, exact, and its standard error.

    Weights (not negative, of any positive sum) are divided by their sum; equal by default. The
    standard error, of the distance as an estimate for the laws, is the delta method with the
    Kantorovich potentials f, g: the variance of mean f(x) + mean g(y), over p W^(p-1). It holds
    where the laws differ; where they are equal the value is biased upwards, of order n^(-1/2p) to
    n^(-1/2), and the error not meaningful. Host, float64.

    >>> wasserstein(np.array([0.0, 1.0]), np.array([5.0, 6.0, 7.0]), p=1).value
    5.5
    """
    if not (isinstance(p, int | float) and 1 <= p < math.inf):
        raise ValueError(f"p must be a finite number >= 1; got {p}")
    a, b = (_column(name, z) for name, z in (("x", x), ("y", y)))
    a, b = host_samples(a, b, 2)
    (a, u), (b, v) = _sorted("x", a[:, 0], x_weights), _sorted("y", b[:, 0], y_weights)
    to_a, to_b = np.cumsum(u), np.cumsum(v)
    levels = np.unique(np.concatenate([to_a[:-1], to_b[:-1], [0.0]]))
    levels = levels[levels < 1]
    i = np.minimum(np.searchsorted(to_a[:-1], levels, "right"), len(a) - 1)
    j = np.minimum(np.searchsorted(to_b[:-1], levels, "right"), len(b) - 1)
    cost = np.abs(a[i] - b[j]) ** p
    power = float(np.diff(np.append(levels, 1.0)) @ cost)
    value = power ** (1 / p)
    variance = _spread(_potential(a, b, i, j, p), u) + _spread(_potential(b, a, j, i, p), v)
    slope = p * value ** (p - 1)
    return Distance(value, math.sqrt(variance) / slope if slope else 0.0)


def sliced_wasserstein(
    key: Array,
    x: Float[ArrayLike, "m dim"],
    y: Float[ArrayLike, "n dim"],
    *,
    p: float = 2,
    projections: int = 128,
) -> Distance:
    """(E_u W_p(u.x, u.y)^p)^(1/p) over uniform unit vectors u (Rabin et al. 2011), in JAX.

    Exact along each of the `projections` (>= 2), whatever m and n. The standard error is that over
    projections alone (delta method through the p-th root): how far the value is from the sliced
    distance of these samples. From that of their laws it is biased upwards besides.
    """
    if not (isinstance(p, int | float) and 1 <= p < math.inf):
        raise ValueError(f"p must be a finite number >= 1; got {p}")
    if not isinstance(projections, int) or projections < 2:
        raise ValueError(f"projections must be an integer >= 2; got {projections!r}")
    return _sliced(key, *samples(x, y, 1), p, projections)


@functools.partial(jax.jit, static_argnames=("p", "projections"))
def _sliced(key: Array, x: Array, y: Array, p: float, projections: int) -> Distance:
    u = jax.random.normal(key, (projections, x.shape[1]), x.dtype)
    u /= jnp.linalg.norm(u, axis=1, keepdims=True)
    m, n = len(x), len(y)
    levels = np.union1d(np.arange(m) * n, np.arange(n) * m)  # of quantiles, times m n: exact
    i, j = levels // n, levels // m
    share = np.diff(np.append(levels, m * n)) / (m * n)

    def power(u: Array) -> Array:
        along = lambda z: jnp.sort(jnp.matmul(z, u, precision="highest"))  # noqa: E731
        gap = jnp.abs(along(x)[i] - along(y)[j])
        gap = jnp.where(gap > 0, gap, 1) ** p * (gap > 0)
        return jnp.sum(gap * jnp.asarray(share, x.dtype))

    powers = lax.map(power, u, batch_size=min(BLOCK, projections))
    mean = powers.mean()
    positive = jnp.where(mean > 0, mean, 1)
    value = jnp.where(mean > 0, positive ** (1 / p), 0)
    error = powers.std(ddof=1) / math.sqrt(projections)
    return Distance(value, jnp.where(mean > 0, error * positive ** (1 / p - 1) / p, 0))


def _potential(a: np.ndarray, b: np.ndarray, i: np.ndarray, j: np.ndarray, p: float) -> np.ndarray:
    """The Kantorovich potential at the points of `a`, up to a constant, along the monotone plan.

    Where both points move at once there are two dual solutions, of which this is the mean.
    """
    then, now, other, same = i[:-1], i[1:], j[:-1], j[1:]
    step = np.abs(a[now] - b[other]) ** p - np.abs(a[then] - b[other]) ** p
    step += np.abs(a[now] - b[same]) ** p - np.abs(a[then] - b[same]) ** p
    potential = np.zeros(len(a))
    potential[i] = np.append(0.0, np.cumsum(step / 2))  # equal at equal i: a step of 0
    return potential


def _spread(potential: np.ndarray, weights: np.ndarray) -> float:
    """The variance of a weighted mean of potentials; points of weight 0 count for nothing."""
    centred = weights * (potential - weights @ potential)
    n = np.count_nonzero(weights)
    return float(centred @ centred) * n / max(n - 1, 1)


def _column(name: str, z: ArrayLike) -> ArrayLike:
    if not isinstance(z, jax.Array):
        z = np.asarray(z)
    if z.ndim != 1:
        raise ValueError(
            f"{name} must be a sample of numbers [n]; got shape {z.shape} "
            "(sliced_wasserstein takes points)"
        )
    return z[:, None]


def _sorted(name: str, z: np.ndarray, weights: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    w = np.ones(len(z)) if weights is None else np.asarray(weights, np.float64)
    if w.shape != z.shape or not np.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise ValueError(
            f"{name}_weights: expected {len(z)} finite numbers >= 0, not all 0; got {weights}"
        )
    order = np.argsort(z)
    return z[order], w[order] / w.sum()
