"""Maximum mean discrepancy and energy distance: squared distances of means in a Hilbert space.

U-statistics: unbiased, hence negative now and then where the laws are close. Both can be
differentiated, compiled and mapped.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete, nearest
from sail_jax.distances.estimates import Distance, samples

__all__ = ["energy", "median_distance", "mmd"]

Kernel = Callable[[Float[Array, "dim"], Float[Array, "dim"]], Float[Array, ""]]
Estimator = Literal["quadratic", "linear", "features"]

BLOCK = 128  # rows of the kernel matrix held at once
SOME = 1024  # points that stand for all in the median of distances


def mmd(
    x: Float[ArrayLike, "m dim"],
    y: Float[ArrayLike, "n dim"],
    *,
    bandwidth: Float[ArrayLike, ""] | Literal["median"] = "median",
    kernel: Kernel | None = None,
    estimator: Estimator = "quadratic",
    features: int = 512,
    key: Array | None = None,
) -> Distance:
    """The SQUARED maximum mean discrepancy of two laws, unbiased (Gretton et al. 2012).

    Kernel: exp(-|x - y|^2 / 2 bandwidth^2), or `kernel(x, y)` of two points, which must be positive
    semi-definite (verified on a few of the points) and be the same function from call to call for
    the compiled code to be used again. bandwidth "median" is `median_distance(x, y)`: it depends on
    the samples, so that unbiasedness is that of a given bandwidth; no gradient flows through it.

    estimator, and where its standard error comes from:
    "quadratic", all pairs, O((m + n)^2): the jackknife over points of both samples. Conservative:
        sqrt(2) too large where the laws are equal, exact to first order elsewhere. m, n >= 3.
    "linear", disjoint pairs (x_1, x_2), (y_1, y_2), O(n): the standard deviation over pairs.
        m = n >= 4; of odd samples the last point is left out.
    "features", random Fourier features (Rahimi and Recht 2007), `features` frequencies from `key`,
        O((m + n) features): jackknife over points, and spread over frequencies, which overstates.
        Unbiased over both. Gaussian kernel, m, n >= 3, features >= 2.

    Squares are what `proximal.pair_weight(..., squared=True)` takes.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(
            f"estimator: unknown {estimator!r}{nearest(estimator, get_args(Estimator))}"
        )
    a, b = samples(x, y, 4 if estimator == "linear" else 3)
    if estimator == "linear" and a.shape != b.shape:
        raise ValueError(f"y must have as many points as x, {len(a)}; got {len(b)}")
    if kernel is not None and (estimator == "features" or not isinstance(bandwidth, str)):
        raise ValueError('kernel: give no bandwidth and no estimator="features" with it')
    if estimator == "features":
        if key is None or features < 2:
            raise ValueError(f"features: expected a key and features >= 2; got {key}, {features}")
        return _features(a, b, _bandwidth(a, b, bandwidth), key, features)
    function, args = kernel, ()
    if function is None:
        function, args = _gaussian, (_bandwidth(a, b, bandwidth),)
    else:
        _check_kernel(function, a, b)
    return (_linear if estimator == "linear" else _quadratic)(function, args, a, b)


def energy(x: Float[ArrayLike, "m dim"], y: Float[ArrayLike, "n dim"]) -> Distance:
    """The energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'| (Szekely and Rizzo 2013), unbiased.

    The squared MMD of the kernel -|x - y|: no bandwidth, Euclidean norm. 0 only for equal laws (of
    finite mean); Cramer's 2 int (F - G)^2 in one dimension. Standard error: as mmd, "quadratic".

    >>> energy(np.zeros((4, 1)), np.full((4, 1), 2.0))
    Distance(value=Array(4., dtype=float32), stderr=Array(0., dtype=float32))
    """
    return _quadratic(_minus_distance, (), *samples(x, y, 3))


def median_distance(x: Float[ArrayLike, "m dim"], y: Float[ArrayLike, "n dim"]) -> Array:
    """The median Euclidean distance between two points of the pooled samples, a usual bandwidth.

    Of samples with more than 1024 points together, evenly spaced ones stand for all. Taken as a
    constant by gradients. ValueError if it is 0: at least half of the pairs coincide.
    """
    z = jnp.concatenate(samples(x, y, 1))
    z = lax.stop_gradient(z[:: math.ceil(len(z) / SOME)])
    i, j = np.triu_indices(len(z), 1)
    median = _median(z, i, j)
    distance = concrete(median)
    if distance is not None and not distance > 0:
        raise ValueError(f"bandwidth: the median distance is {distance}; give a bandwidth > 0")
    return median


@jax.jit
def _median(z: Array, i: Array, j: Array) -> Array:
    squared = lax.map(lambda p: jnp.sum((p - z) ** 2, -1), z, batch_size=BLOCK)
    return jnp.sqrt(jnp.median(squared[i, j]))


def _bandwidth(x: Array, y: Array, given: ArrayLike | str) -> Array:
    if isinstance(given, str):
        if given != "median":
            raise ValueError(f'bandwidth must be "median" or a number > 0; got {given!r}')
        return median_distance(x, y)
    value = concrete(given)
    if value is not None and not (value.shape == () and np.isfinite(value) and value > 0):
        raise ValueError(f'bandwidth must be "median" or a number > 0; got {given}')
    return jnp.asarray(given, x.dtype)


def _gaussian(x: Array, y: Array, bandwidth: Array) -> Array:
    return jnp.exp(-0.5 * jnp.sum(((x - y) / bandwidth) ** 2))


def _minus_distance(x: Array, y: Array) -> Array:
    squared = jnp.sum((x - y) ** 2)
    return -jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _check_kernel(kernel: Kernel, x: Array, y: Array) -> None:
    z = jnp.concatenate([x[:64], y[:64]])
    gram = concrete(jax.vmap(jax.vmap(kernel, (None, 0)), (0, None))(z, z))
    if gram is None:
        return
    if gram.shape != (len(z), len(z)) or not np.isfinite(gram).all():
        raise ValueError("kernel must map two points [dim] to one finite number")
    slack = len(z) * np.finfo(gram.dtype).eps * np.abs(gram).max()
    least = np.linalg.eigvalsh(gram.astype(np.float64))[0]
    if np.abs(gram - gram.T).max() > slack or least < -slack:
        raise ValueError(
            "kernel must be symmetric and positive semi-definite; its matrix on "
            f"{len(z)} of the points has the least eigenvalue {least:.3g}"
        )


@functools.partial(jax.jit, static_argnames="kernel")
def _quadratic(kernel: Callable, args: tuple, x: Array, y: Array) -> Distance:
    m, z = len(x), jnp.concatenate([x, y])
    index = jnp.arange(len(z))

    @jax.checkpoint  # else the gradient holds the kernel matrix, and every difference of points
    def sums(i: Array, point: Array) -> tuple[Array, Array]:
        row = jax.vmap(lambda other: kernel(point, other, *args))(z)
        row = jnp.where(index == i, 0, row)
        return row[:m].sum(), row[m:].sum()

    to_x, to_y = lax.map(lambda at: sums(*at), (index, z), batch_size=min(BLOCK, len(z)))
    return _two_sample(to_x[:m], to_y[:m], to_y[m:], to_x[m:])


def _two_sample(within_x: Array, across_x: Array, within_y: Array, across_y: Array) -> Distance:
    """The U-statistic of sums of the kernel over the other points of either sample, jackknifed."""
    m, n = len(within_x), len(within_y)
    value = within_x.mean() / (m - 1) + within_y.mean() / (n - 1) - 2 * across_x.mean() / n

    def spread(within: Array, across: Array, m: int, n: int) -> Array:
        # what leaving out a point changes, less the mean of that over the points
        change = (within - within.mean()) / (m - 2) - (across - across.mean()) / n
        return 4 / (m * (m - 1)) * jnp.sum(change**2)

    return Distance(
        value, jnp.sqrt(spread(within_x, across_x, m, n) + spread(within_y, across_y, n, m))
    )


@functools.partial(jax.jit, static_argnames="kernel")
def _linear(kernel: Callable, args: tuple, x: Array, y: Array) -> Distance:
    pairs = len(x) // 2
    k = jax.vmap(lambda p, q: kernel(p, q, *args))
    (x1, x2), (y1, y2) = (z[: 2 * pairs].reshape(pairs, 2, -1).swapaxes(0, 1) for z in (x, y))
    h = k(x1, x2) + k(y1, y2) - k(x1, y2) - k(x2, y1)
    return Distance(h.mean(), h.std(ddof=1) / math.sqrt(pairs))


@functools.partial(jax.jit, static_argnames="features")
def _features(x: Array, y: Array, bandwidth: Array, key: Array, features: int) -> Distance:
    w = jax.random.normal(key, (features, x.shape[1]), x.dtype) / bandwidth
    m, n, centre = len(x), len(y), lax.stop_gradient(x.mean(0))  # phases lose no digits to it
    phases = (jnp.matmul(z - centre, w.T, precision="highest") for z in (x, y))
    a, b = (jnp.stack([jnp.cos(t), jnp.sin(t)], 1) for t in phases)  # [n, 2, features]
    of_x, of_y = a.sum(0), b.sum(0)
    gaps = (jnp.sum(of_x**2, 0) - m) / (m * (m - 1)) + (jnp.sum(of_y**2, 0) - n) / (n * (n - 1))
    gaps -= 2 * jnp.sum(of_x * of_y, 0) / (m * n)

    def to(z: Array, total: Array) -> Array:
        return jnp.einsum("nsf,sf->n", z, total, precision="highest") / features

    points = _two_sample(to(a, of_x) - 1, to(a, of_y), to(b, of_y) - 1, to(b, of_x))
    return Distance(gaps.mean(), jnp.sqrt(points.stderr**2 + gaps.var(ddof=1) / features))
