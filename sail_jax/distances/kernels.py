"""Maximum mean discrepancy and energy distance: squared distances of means in a Hilbert space.

The estimates are U-statistics. They are unbiased, and therefore sometimes negative if the
distributions are close. They can be differentiated, compiled and mapped.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete, one_of
from sail_jax.distances.estimates import Distance, samples

Kernel = Callable[[Float[Array, "dim"], Float[Array, "dim"]], Float[Array, ""]]
Estimator = Literal["quadratic", "linear", "features"]

# The number of rows of the kernel matrix that are in memory at once.
BLOCK = 128
# The number of points that represent all in the median of distances.
SOME = 1024


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
    """Estimates the SQUARED maximum mean discrepancy (MMD) of two distributions, without bias.

    MMD^2 = E k(X, X') + E k(Y, Y') - 2 E k(X, Y). The default kernel is
    k(x, y) = exp(-|x - y|^2 / (2 bandwidth^2)). `proximal.pair_weight(..., squared=True)` takes
    squares.

    There are three estimators, each with its own standard error:

    - "quadratic" uses all pairs, O((m + n)^2), and requires m, n >= 3. Its standard error is the
      jackknife over the points of both samples. It is conservative: sqrt(2) too large for equal
      distributions, exact to first order otherwise.
    - "linear" uses disjoint pairs (x_1, x_2), (y_1, y_2), O(n), and requires m = n >= 4. The last
      of an odd number of points is ignored. Its standard error is the standard deviation over
      pairs.
    - "features" uses random Fourier features, O((m + n) features), and requires m, n >= 3. It is
      unbiased over both points and frequencies. Its standard error adds the jackknife over points
      and the spread over frequencies, which is too large.

    Args:
      x: Points `[m, dim]` of one distribution.
      y: Points `[n, dim]` of the other.
      bandwidth: The width of the Gaussian kernel, > 0, or "median" for `median_distance(x, y)`. The
        median depends on the samples, so only estimates with a fixed bandwidth are unbiased. No
        gradient flows through the median.
      kernel: A function `kernel(x, y)` of two points `[dim]` that replaces the Gaussian kernel. It
        must be symmetric and positive semi-definite, which is checked on a few of the points. To
        reuse compiled code, pass the same function object in each call.
      estimator: "quadratic", "linear" or "features", see above.
      features: The number of frequencies for "features", at least 2.
      key: The PRNG key of "features".

    Returns:
      The estimate and its standard error, as JAX scalars.

    Raises:
      ValueError: For invalid samples (see above), another `estimator` or `bandwidth`, a
        kernel that is not positive semi-definite or is given together with a bandwidth or
        "features", "features" without a key, and a median distance of 0.
      TypeError: For samples that are not real numbers.

    References:
      Gretton et al., A Kernel Two-Sample Test, 2012. Rahimi and Recht, Random Features for
      Large-Scale Kernel Machines, 2007.

    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> got = mmd(x, x + 10.0, bandwidth=1.0)  # far apart: twice the mean of k over pairs in x
    >>> round(float(got.value), 4), round(2 * (2 * math.exp(-0.5) + math.exp(-2.0)) / 3, 4)
    (0.8989, 0.8989)
    """
    one_of("estimator", estimator, Estimator)
    a, b = samples(x, y, 4 if estimator == "linear" else 3)
    if estimator == "linear" and a.shape != b.shape:
        raise ValueError(f"y must have as many points as x, {len(a)}; got {len(b)}")
    if kernel is not None and (estimator == "features" or not isinstance(bandwidth, str)):
        raise ValueError('kernel: it excludes a bandwidth and estimator="features"')
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
    """Estimates the energy distance of two distributions, without bias.

    It is `2 E|X - Y| - E|X - X'| - E|Y - Y'|` with the Euclidean norm. This is the squared MMD of
    the kernel `-|x - y|`, without a bandwidth. It is 0 only for equal distributions (of finite
    mean).
    In one dimension it is Cramer's 2 int (F - G)^2.

    Args:
      x: At least 3 points `[m, dim]` of one distribution.
      y: At least 3 points `[n, dim]` of the other.

    Returns:
      The estimate and its standard error (as in `mmd` with "quadratic"), as JAX scalars.

    Raises:
      ValueError: For invalid samples.
      TypeError: For samples that are not real numbers.

    References:
      Szekely and Rizzo, Energy statistics: A class of statistics based on distances, 2013.

    >>> energy(np.zeros((4, 1)), np.full((4, 1), 2.0))
    Distance(value=Array(4., dtype=float32), stderr=Array(0., dtype=float32))
    """
    return _quadratic(_minus_distance, (), *samples(x, y, 3))


def median_distance(x: Float[ArrayLike, "m dim"], y: Float[ArrayLike, "n dim"]) -> Array:
    """Computes the median Euclidean distance between points of two samples, a usual bandwidth.

    All pairs of the pooled samples count. If there are more than 1024 points in total, evenly
    spaced ones represent all. Gradients treat the median as a constant.

    Args:
      x: Points `[m, dim]`.
      y: Points `[n, dim]`.

    Returns:
      The median, a scalar.

    Raises:
      ValueError: If it is 0, for example because at least half of the pairs coincide; and for
        invalid samples.
      TypeError: For samples that are not real numbers.

    >>> float(median_distance(np.array([[0.0], [1.0]]), np.array([[3.0]])))  # of 1, 2 and 3
    2.0
    """
    z = jnp.concatenate(samples(x, y, 1))
    # The median requires all pairs at once, which is affordable for this many points.
    z = lax.stop_gradient(z[:: math.ceil(len(z) / SOME)])
    i, j = np.triu_indices(len(z), 1)
    median = _median(z, i, j)
    distance = concrete(median)
    if distance is not None and not distance > 0:
        raise ValueError(f"bandwidth: the median distance is {distance}; give a bandwidth > 0")
    return median


@jax.jit
def _median(z: Array, i: Array, j: Array) -> Array:
    """Computes the median of the distances between points i and j of z."""
    squared = lax.map(lambda p: jnp.sum((p - z) ** 2, -1), z, batch_size=BLOCK)
    return jnp.sqrt(jnp.median(squared[i, j]))


def _bandwidth(x: Array, y: Array, given: ArrayLike | str) -> Array:
    """Returns the checked bandwidth as an array."""
    if isinstance(given, str):
        if given != "median":
            raise ValueError(f'bandwidth must be "median" or a number > 0; got {given!r}')
        return median_distance(x, y)
    value = concrete(given)
    if value is not None and not (value.shape == () and np.isfinite(value) and value > 0):
        raise ValueError(f'bandwidth must be "median" or a number > 0; got {given}')
    return jnp.asarray(given, x.dtype)


def _gaussian(x: Array, y: Array, bandwidth: Array) -> Array:
    """Computes the Gaussian kernel of two points."""
    return jnp.exp(-0.5 * jnp.sum(((x - y) / bandwidth) ** 2))


def _minus_distance(x: Array, y: Array) -> Array:
    """Computes minus the distance of two points, with gradient 0 if they coincide."""
    squared = jnp.sum((x - y) ** 2)
    return -jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _check_kernel(kernel: Kernel, x: Array, y: Array) -> None:
    """Checks on up to 128 points that a kernel is symmetric and positive semi-definite."""
    z = jnp.concatenate([x[:64], y[:64]])
    gram = concrete(jax.vmap(jax.vmap(kernel, (None, 0)), (0, None))(z, z))
    if gram is None:
        return
    if gram.shape != (len(z), len(z)) or not np.isfinite(gram).all():
        raise ValueError("kernel must map two points [dim] to one finite number")
    # Eigenvalues of a rounded n x n matrix have errors up to about n eps times its size.
    slack = len(z) * np.finfo(gram.dtype).eps * np.abs(gram).max()
    least = np.linalg.eigvalsh(gram.astype(np.float64))[0]
    if np.abs(gram - gram.T).max() > slack or least < -slack:
        raise ValueError(
            "kernel must be symmetric and positive semi-definite; its matrix on "
            f"{len(z)} of the points has the least eigenvalue {least:.3g}"
        )


@functools.partial(jax.jit, static_argnames="kernel")
def _quadratic(kernel: Callable, args: tuple, x: Array, y: Array) -> Distance:
    """Estimates from all pairs."""
    m, z = len(x), jnp.concatenate([x, y])
    index = jnp.arange(len(z))

    # Otherwise the gradient would store the kernel matrix and every difference of points.
    @jax.checkpoint
    def sums(i: Array, point: Array) -> tuple[Array, Array]:
        row = jax.vmap(lambda other: kernel(point, other, *args))(z)
        # A U-statistic excludes the pairs of a point with itself, which makes it unbiased.
        row = jnp.where(index == i, 0, row)
        return row[:m].sum(), row[m:].sum()

    to_x, to_y = lax.map(lambda at: sums(*at), (index, z), batch_size=min(BLOCK, len(z)))
    return _two_sample(to_x[:m], to_y[:m], to_y[m:], to_x[m:])


def _two_sample(within_x: Array, across_x: Array, within_y: Array, across_y: Array) -> Distance:
    """Computes the U-statistic with its jackknife error.

    The arguments are the sums of the kernel from each point over the other points of either sample.
    """
    m, n = len(within_x), len(within_y)
    # Sums over the m - 1 other points, and over all n points of the other sample.
    value = within_x.mean() / (m - 1) + within_y.mean() / (n - 1) - 2 * across_x.mean() / n

    def spread(within: Array, across: Array, m: int, n: int) -> Array:
        # The effect of omitting a point, minus its mean over the points.
        change = (within - within.mean()) / (m - 2) - (across - across.mean()) / n
        return 4 / (m * (m - 1)) * jnp.sum(change**2)

    return Distance(
        value, jnp.sqrt(spread(within_x, across_x, m, n) + spread(within_y, across_y, n, m))
    )


@functools.partial(jax.jit, static_argnames="kernel")
def _linear(kernel: Callable, args: tuple, x: Array, y: Array) -> Distance:
    """Estimates from disjoint pairs."""
    pairs = len(x) // 2
    k = jax.vmap(lambda p, q: kernel(p, q, *args))
    (x1, x2), (y1, y2) = (z[: 2 * pairs].reshape(pairs, 2, -1).swapaxes(0, 1) for z in (x, y))
    h = k(x1, x2) + k(y1, y2) - k(x1, y2) - k(x2, y1)
    return Distance(h.mean(), h.std(ddof=1) / math.sqrt(pairs))


@functools.partial(jax.jit, static_argnames="features")
def _features(x: Array, y: Array, bandwidth: Array, key: Array, features: int) -> Distance:
    """Estimates from random Fourier features of the Gaussian kernel."""
    w = jax.random.normal(key, (features, x.shape[1]), x.dtype) / bandwidth
    m, n, centre = len(x), len(y), lax.stop_gradient(x.mean(0))  # centring keeps phases accurate
    phases = (jnp.matmul(z - centre, w.T, precision="highest") for z in (x, y))
    a, b = (jnp.stack([jnp.cos(t), jnp.sin(t)], 1) for t in phases)  # [n, 2, features]
    of_x, of_y = a.sum(0), b.sum(0)
    # cos^2 + sin^2 = 1 for each point with itself: m of the m^2 pairs, subtracted as in a
    # U-statistic.
    gaps = (jnp.sum(of_x**2, 0) - m) / (m * (m - 1)) + (jnp.sum(of_y**2, 0) - n) / (n * (n - 1))
    gaps -= 2 * jnp.sum(of_x * of_y, 0) / (m * n)

    def to(z: Array, total: Array) -> Array:
        return jnp.einsum("nsf,sf->n", z, total, precision="highest") / features

    # Minus the kernel of a point with itself, which is 1.
    points = _two_sample(to(a, of_x) - 1, to(a, of_y), to(b, of_y) - 1, to(b, of_x))
    return Distance(gaps.mean(), jnp.sqrt(points.stderr**2 + gaps.var(ddof=1) / features))
