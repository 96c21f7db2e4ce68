"""Wasserstein distances in one dimension, with its monotone optimal plan, and sliced distances."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import integer, one_key
from sail_jax.distances.estimates import Distance, host_samples, samples

# The number of projections that are sorted at once.
BLOCK = 16


def wasserstein(
    x: Float[ArrayLike, "m"],
    y: Float[ArrayLike, "n"],
    *,
    p: float = 1,
    x_weights: Float[ArrayLike, "m"] | None = None,
    y_weights: Float[ArrayLike, "n"] | None = None,
) -> Distance:
    """Computes the p-Wasserstein distance of two weighted samples of numbers, with an error.

    The distance of the samples is exact, computed on the host in float64. The standard error is for
    the distance as an estimate for the distributions. By the delta method with the Kantorovich
    potentials f and g it is the root of the variance of mean f(x) + mean g(y), over p W^(p-1). It
    is valid if the distributions differ. If they are equal, the error is meaningless, and the value
    is biased upwards, of order n^(-1/2p) to n^(-1/2).

    Args:
      x: At least 2 numbers, `[m]`.
      y: At least 2 numbers, `[n]`.
      p: The order, a finite number >= 1.
      x_weights: Numbers >= 0, `[m]`, not all 0; they are normalised. Equal by default.
      y_weights: Likewise, `[n]`.

    Returns:
      The distance and its standard error, as floats.

    Raises:
      ValueError: For another p, invalid samples or weights, and values that are not finite.
      TypeError: For values that are not real numbers, or are traced.

    >>> wasserstein(np.array([0.0, 1.0]), np.array([5.0, 6.0, 7.0]), p=1).value
    5.5
    """
    if not (isinstance(p, int | float) and 1 <= p < math.inf):
        raise ValueError(f"p must be a finite number >= 1; got {p}")
    a, b = (_column(name, z) for name, z in (("x", x), ("y", y)))
    a, b = host_samples(a, b, 2)
    (a, u), (b, v) = _sorted("x", a[:, 0], x_weights), _sorted("y", b[:, 0], y_weights)
    # Between two levels both quantile functions are constant: W_p^p is a finite sum over the levels
    # at which either jumps.
    to_a, to_b = np.cumsum(u), np.cumsum(v)
    levels = np.unique(np.concatenate([to_a[:-1], to_b[:-1], [0.0]]))
    levels = levels[levels < 1]
    # The last cumulative weight is excluded, because rounding may leave it below 1.
    i = np.minimum(np.searchsorted(to_a[:-1], levels, "right"), len(a) - 1)
    j = np.minimum(np.searchsorted(to_b[:-1], levels, "right"), len(b) - 1)
    cost = np.abs(a[i] - b[j]) ** p
    power = float(np.diff(np.append(levels, 1.0)) @ cost)
    value = power ** (1 / p)
    # The derivative of W^p by the weights of a sample is its Kantorovich potential.
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
    """Estimates the sliced Wasserstein distance of two samples, from random projections to lines.

    It is (E_u W_p(u.x, u.y)^p)^(1/p) over uniform unit vectors u. The distance along each
    projection is exact, for any m and n. It is computed in JAX and differentiable.

    The standard error is over projections only (delta method through the p-th root). It measures
    the error relative to the sliced distance of these samples. As an estimate for the
    distributions, the value is also biased upwards.

    Args:
      key: The PRNG key of the projections.
      x: Points `[m, dim]`.
      y: Points `[n, dim]`.
      p: The order, a finite number >= 1.
      projections: Their number, at least 2.

    Returns:
      The distance and its standard error, as JAX scalars.

    Raises:
      ValueError: For another p or number of projections, and invalid samples.
      TypeError: For samples that are not real numbers.

    References:
      Rabin et al., Wasserstein Barycenter and Its Application to Texture Mixing, 2011.

    >>> got = sliced_wasserstein(jax.random.key(0), np.zeros((3, 1)), np.full((2, 1), 2.0))
    >>> float(got.value)  # in one dimension every projection has the distance itself
    2.0
    """
    one_key(key)
    if not (isinstance(p, int | float) and 1 <= p < math.inf):
        raise ValueError(f"p must be a finite number >= 1; got {p}")
    integer("projections", projections, 2)
    return _sliced(key, *samples(x, y, 1), p, projections)


@functools.partial(jax.jit, static_argnames=("p", "projections"))
def _sliced(key: Array, x: Array, y: Array, p: float, projections: int) -> Distance:
    """Runs `sliced_wasserstein` on checked arguments."""
    u = jax.random.normal(key, (projections, x.shape[1]), x.dtype)
    # A Gaussian vector has no preferred direction: its normalised direction is uniform on the
    # sphere.
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
    """Computes the Kantorovich potential at the points of `a`, up to a constant.

    It follows the monotone plan. If both points move at once, there are two dual solutions, and
    this is their mean.
    """
    then, now, other, same = i[:-1], i[1:], j[:-1], j[1:]
    # Along the plan f(a_i) + g(b_j) = |a_i - b_j|^p. As i advances with j fixed, f changes by the
    # change of the cost.
    step = np.abs(a[now] - b[other]) ** p - np.abs(a[then] - b[other]) ** p
    step += np.abs(a[now] - b[same]) ** p - np.abs(a[then] - b[same]) ** p
    potential = np.zeros(len(a))
    potential[i] = np.append(0.0, np.cumsum(step / 2))  # equal at equal i: a step of 0
    return potential


def _spread(potential: np.ndarray, weights: np.ndarray) -> float:
    """Computes the variance of a weighted mean of potentials; points of weight 0 do not count."""
    centred = weights * (potential - weights @ potential)
    n = np.count_nonzero(weights)
    return float(centred @ centred) * n / max(n - 1, 1)


def _column(name: str, z: ArrayLike) -> ArrayLike:
    """Converts a sample of numbers `[n]` to points `[n, 1]`."""
    if not isinstance(z, jax.Array):
        z = np.asarray(z)
    if z.ndim != 1:
        raise ValueError(
            f"{name} must be a sample of numbers [n]; got shape {z.shape} "
            "(sliced_wasserstein takes points)"
        )
    return z[:, None]


def _sorted(name: str, z: np.ndarray, weights: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the numbers, and normalises their weights."""
    w = np.ones(len(z)) if weights is None else np.asarray(weights, np.float64)
    if w.shape != z.shape or not np.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise ValueError(
            f"{name}_weights: expected {len(z)} finite numbers >= 0, not all 0; got {weights}"
        )
    order = np.argsort(z)
    return z[order], w[order] / w.sum()
