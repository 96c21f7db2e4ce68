"""Means over data in batches, and estimates with their standard errors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete, integer
from sail_jax.merging.arithmetic import unit_of


class Estimate(NamedTuple):
    """A mean and its standard error.

    Attributes:
      value: The mean.
      stderr: Its standard error, of the same shape.
    """

    value: Float[Array, "..."]
    stderr: Float[Array, "..."]


def examples(data: PyTree, least: int = 1) -> int:
    """Counts the examples in data.

    Args:
      data: A tree of arrays `(n, ...)`.
      least: The smallest required number of examples.

    Returns:
      n, the length of the leading axis of every leaf.

    Raises:
      ValueError: If leaves differ in length or have no leading axis, or there are too few examples.
    """
    shapes = [np.shape(x) for x in jax.tree.leaves(data)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(f"data: expected leaves [n, ...] of one length n >= 1, got {shapes}")
    (n,) = lengths.pop()
    if n < least:
        raise ValueError(f"data: expected at least {least} examples for standard errors, got {n}")
    return n


def check_size(**sizes: int | None) -> None:
    """Checks that sizes are integers >= 1.

    `**sizes` are values by name; None is accepted. Raises a ValueError if a size is not an integer
    or is less than 1.
    """
    for name, size in sizes.items():
        if size is not None:
            integer(name, size)


def check_finite(what: str, x: ArrayLike) -> None:
    """Checks that known values are finite.

    `x` is an array. Traced values are not checked. Raises a ValueError if a value is not finite.
    """
    values = concrete(x)
    if values is not None and not np.isfinite(values).all():
        raise ValueError(f"{what}: expected finite values, got {values}")


def batches(data: PyTree, batch_size: int | None) -> tuple[int, PyTree, PyTree | None]:
    """Splits data into full batches and a rest.

    Args:
      data: A tree of arrays `(n, ...)`.
      batch_size: The number of examples in a batch, at most all. None: all.

    Returns:
      The size of a batch, the full batches, arrays `(batch, size, ...)`, and the remaining
      examples, arrays `(n % size, ...)`, or None.
    """
    n = examples(data)
    size = min(batch_size or n, n)
    end = n - n % size
    data = jax.tree.map(jnp.asarray, data)
    full = jax.tree.map(lambda x: x[:end].reshape(-1, size, *x.shape[1:]), data)
    return size, full, jax.tree.map(lambda x: x[end:], data) if end < n else None


def mean(f: Callable[[PyTree], PyTree], data: PyTree, batch_size: int | None) -> PyTree:
    """Averages a function over data batch by batch, with equal weights of all examples.

    Args:
      f: A function of a batch that returns a tree of means over its examples.
      data: A tree of arrays `(n, ...)`.
      batch_size: The number of examples in a batch. None: all.

    Returns:
      The mean over all examples, a tree such as `f` returns.
    """
    n = examples(data)
    size, full, rest = batches(data, batch_size)
    if size == n:
        return f(data)

    # The weight of each batch is its number of examples, since the last one may be smaller.
    def add(total: PyTree, batch: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + size / n * x, total, f(batch)), None

    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], full))
    total, _ = lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), full)
    if rest is None:
        return total
    return jax.tree.map(lambda t, x: t + n % size / n * x, total, f(rest))


def over_examples(f: Callable[[PyTree], PyTree], data: PyTree, batch_size: int | None) -> PyTree:
    """Estimates the means of per-example values, with standard errors over examples.

    Args:
      f: A function of a batch that returns a tree of arrays `(example, ...)`.
      data: A tree of arrays `(n, ...)` with n >= 2 examples.
      batch_size: The number of examples in a batch. None: all.

    Returns:
      The tree with an `Estimate` of shape `(...)` instead of each array.

    References:
      Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983: pooling the
      moments of batches.
    """
    # A single example does not deviate from its mean.
    n = examples(data, least=2)
    size, full, rest = batches(data, batch_size)

    def moments(batch: PyTree) -> PyTree:
        return jax.tree.map(lambda x: _Moments(m := x.mean(0), jnp.sum((x - m) ** 2, 0)), f(batch))

    def pool(total: PyTree, batch: PyTree, count: ArrayLike, new: int) -> PyTree:
        def leaf(a: _Moments, b: _Moments) -> _Moments:
            # Means are moved toward the new ones. Differences of accumulated sums would cancel.
            share = jnp.asarray(new / (count + new), a.mean.dtype)
            seen = jnp.asarray(count, a.mean.dtype)
            shift = b.mean - a.mean
            return _Moments(a.mean + share * shift, a.square + b.square + share * seen * shift**2)

        return jax.tree.map(leaf, total, moments(batch), is_leaf=_is_moments)

    if size == n:
        total = moments(data)
    else:
        # Zeros with a count of 0 are the neutral element of `pool`.
        shapes = jax.eval_shape(moments, jax.tree.map(lambda x: x[0], full))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        counts = size * jnp.arange(n // size)
        total, _ = lax.scan(lambda t, x: (pool(t, x[1], x[0], size), None), start, (counts, full))
        if rest is not None:
            total = pool(total, rest, n - n % size, n % size)

    def finish(pooled: _Moments) -> Estimate:
        # The unbiased variance is square / (n - 1). The variance of the mean is this divided by n.
        return Estimate(pooled.mean, jnp.sqrt(pooled.square / (n * (n - 1))))

    return jax.tree.map(finish, total, is_leaf=_is_moments)


class _Moments(NamedTuple):
    """Computes the mean of some examples, and the sum of their squared deviations from it."""

    mean: Array
    square: Array


def _is_moments(x: object) -> bool:
    return isinstance(x, _Moments)


def estimate(draws: Float[Array, "draw ..."]) -> Estimate:
    """Estimates a mean from independent draws.

    `draws` are at least two draws, `(draw, ...)`. Returns their mean and its standard error,
    `(...)`.
    """
    unit = unit_of(draws)  # keeps squares of deviations in range
    spread = unit * (draws * (1 / unit)).std(0, ddof=1)
    return Estimate(draws.mean(0), spread / jnp.sqrt(len(draws)))
