"""Means over data that come in batches, and estimates with their standard errors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete

__all__ = [
    "Estimate",
    "check_finite",
    "check_size",
    "estimate",
    "examples",
    "mean",
    "over_examples",
]


class Estimate(NamedTuple):
    """A mean and its standard error, arrays of one shape."""

    value: Float[Array, "..."]
    stderr: Float[Array, "..."]


def examples(data: PyTree, least: int = 1) -> int:
    """How many there are: the length of every leaf; ValueError for others, or fewer than least."""
    shapes = [np.shape(x) for x in jax.tree.leaves(data)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(f"data: expected leaves [n, ...] of one length n >= 1, got {shapes}")
    (n,) = lengths.pop()
    if n < least:
        raise ValueError(f"data: expected at least {least} examples for standard errors, got {n}")
    return n


def check_size(**sizes: Any) -> None:
    """ValueError unless each is None or an integer >= 1."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int | np.integer) or size < 1):
            raise ValueError(f"{name}: expected an integer >= 1, got {size!r}")


def check_finite(what: str, x: Any) -> None:
    """ValueError unless the values of x, where they are known, are finite."""
    values = concrete(x)
    if values is not None and not np.isfinite(values).all():
        raise ValueError(f"{what}: expected finite values, got {values}")


def batches(data: PyTree, batch_size: int | None) -> tuple[int, PyTree, PyTree | None]:
    """The size of a batch, full batches [batch, size, ...], and the rest [n % size, ...]."""
    n = examples(data)
    size = min(batch_size or n, n)
    end = n - n % size
    data = jax.tree.map(jnp.asarray, data)
    full = jax.tree.map(lambda x: x[:end].reshape(-1, size, *x.shape[1:]), data)
    return size, full, jax.tree.map(lambda x: x[end:], data) if end < n else None


def mean(f: Callable[[PyTree], PyTree], data: PyTree, batch_size: int | None) -> PyTree:
    """The mean over all examples of f, the mean over those of a batch; every one counts as much."""
    n = examples(data)
    size, full, rest = batches(data, batch_size)
    if size == n:
        return f(data)

    def add(total: PyTree, batch: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + size / n * x, total, f(batch)), None

    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], full))
    total, _ = lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), full)
    if rest is None:
        return total
    return jax.tree.map(lambda t, x: t + n % size / n * x, total, f(rest))


def over_examples(f: Callable[[PyTree], PyTree], data: PyTree, batch_size: int | None) -> PyTree:
    """An `Estimate` for every leaf of f(batch), [example, ...]; moments are pooled batch by batch
    (Chan, Golub & LeVeque 1983)."""
    n = examples(data, least=2)
    size, full, rest = batches(data, batch_size)

    def moments(batch: PyTree) -> PyTree:
        return jax.tree.map(lambda x: _Moments(m := x.mean(0), jnp.sum((x - m) ** 2, 0)), f(batch))

    def pool(total: PyTree, batch: PyTree, count: ArrayLike, new: int) -> PyTree:
        def leaf(a: _Moments, b: _Moments) -> _Moments:
            share = jnp.asarray(new / (count + new), a.mean.dtype)
            seen = jnp.asarray(count, a.mean.dtype)
            shift = b.mean - a.mean
            return _Moments(a.mean + share * shift, a.square + b.square + share * seen * shift**2)

        return jax.tree.map(leaf, total, moments(batch), is_leaf=_is_moments)

    if size == n:
        total = moments(data)
    else:
        shapes = jax.eval_shape(moments, jax.tree.map(lambda x: x[0], full))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        counts = size * jnp.arange(n // size)
        total, _ = lax.scan(lambda t, x: (pool(t, x[1], x[0], size), None), start, (counts, full))
        if rest is not None:
            total = pool(total, rest, n - n % size, n % size)

    def finish(pooled: _Moments) -> Estimate:
        return Estimate(pooled.mean, jnp.sqrt(pooled.square / (n * (n - 1))))

    return jax.tree.map(finish, total, is_leaf=_is_moments)


class _Moments(NamedTuple):
    """A mean, and the sum of squares about it."""

    mean: Array
    square: Array


def _is_moments(x: Any) -> bool:
    return isinstance(x, _Moments)


def estimate(draws: Float[Array, "draw ..."]) -> Estimate:
    """The mean of independent draws, at least two."""
    return Estimate(draws.mean(0), draws.std(0, ddof=1) / jnp.sqrt(len(draws)))
