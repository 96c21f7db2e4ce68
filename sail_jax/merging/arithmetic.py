"""Arithmetic on arrays with a leading task axis, written so that XLA makes few passes of it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Num

from sail_jax.checks import concrete

__all__ = ["PerModel", "beside", "computed_once", "gram", "number", "per_task", "sums", "task_sum"]

PerModel = Float[ArrayLike, ""] | Float[ArrayLike, "task"] | Sequence[float]
"""One number, or one for each model."""

FOLDED = 4
"""Rows that a reduction of several arrays adds up in registers; more are far slower."""


def per_task(f: Callable[..., Array], *arrays: Array) -> Array:
    """`f` of the entries of one task after another, stacked again.

    XLA computes what is written like this in one pass. An expression of whole stacks it computes
    anew, or writes to memory, for every task that is read of it later.

    Args:
      f: Takes one array for each of `arrays`, without the task axis.
      *arrays: Shape `[task, ...]`, or `[1, ...]` where all tasks share it.

    Returns:
      Shape `[task, ...]`.
    """
    tasks = max(map(len, arrays))
    return jnp.stack([f(*(x[k if len(x) > 1 else 0] for x in arrays)) for k in range(tasks)])


def task_sum(x: Num[Array, "task ..."]) -> Num[Array, "..."]:
    """The sum over tasks, one by one: XLA reduces a short leading axis far slower on CPUs."""
    return functools.reduce(jnp.add, [x[k] for k in range(x.shape[0])])


def beside(value: PerModel, delta: Float[Array, "task ..."]) -> Float[Array, "#task ..."]:
    """One number or one per model, in the dtype of `delta`, of a shape that broadcasts with it."""
    value = jnp.asarray(value, delta.dtype)
    return value.reshape(-1, *(1,) * (delta.ndim - 1))


def sums(*arrays: Float[Array, "..."]) -> tuple[Float[Array, ""], ...]:
    """The sum of each of some arrays of one shape.

    Of vectors in one pass over what they are computed from, several times faster on CPUs than one
    by one. As accurate as XLA's sums, which are trees: an error of a few eps times the sum of the
    magnitudes.
    """
    first = arrays[0]
    spread = any(any(jax.typeof(x).sharding.spec) for x in arrays)
    if first.ndim == 1 and first.size and first.size % FOLDED == 0 and not spread:
        return _sums(arrays)
    return tuple(x.sum() for x in arrays)


@jax.custom_jvp
def _sums(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    rows = tuple(x.reshape(FOLDED, -1) for x in arrays)
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return tuple(part.sum() for part in lax.reduce(rows, zeros, add, (0,)))


@_sums.defjvp
def _sums_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return _sums(*primals), tuple(t.sum() for t in tangents[0])


def gram(delta: Float[Array, "task ..."], axis: Sequence[int] | None = None) -> Float[Array, "..."]:
    """Inner products of the models' arrays.

    Of vectors the pairs share one reduction, elsewhere each has its own. Both are several times
    faster on CPUs than a matrix product this thin, and as accurate as XLA's sums: an error of a
    few eps |delta_j| |delta_k|.

    Args:
      delta: Shape `[task, ...]`.
      axis: The axes to sum over, all but the first by default.

    Returns:
      `<delta_j, delta_k>`, shape `[..., task, task]`.
    """
    pairs = [(j, k) for j in range(len(delta)) for k in range(j + 1)]
    if axis is None:
        products = sums(*(delta[j] * delta[k] for j, k in pairs))
    else:
        over = tuple(a - 1 for a in axis)
        products = tuple(jnp.sum(delta[j] * delta[k], over) for j, k in pairs)
    half = dict(zip(pairs, products, strict=True))
    tasks = range(len(delta))
    return jnp.stack(
        [jnp.stack([half[max(j, k), min(j, k)] for k in tasks], -1) for j in tasks], -2
    )


def computed_once(compute: Callable[[], Array], like: Array) -> Array:
    """`compute()`, kept as an array under `jit`.

    XLA would repeat the computation for every reader of every entry, and there are many: it is
    twenty times slower on CPUs. It does not look into branches, and this one is always taken.

    Args:
      compute: Takes nothing.
      like: Any array that is not empty and has no infinities.
    """
    if like.size == 0:
        return compute()
    shape = jax.eval_shape(compute)
    first = like.reshape(-1)[0]
    return lax.cond(first != jnp.inf, compute, lambda: jnp.zeros(shape.shape, shape.dtype))


def number(x: ArrayLike) -> Any:
    """A float as an array: of NumPy, in float64, if it is known, so that nothing is compiled and
    nothing rounded before it meets the arrays."""
    value = concrete(x)
    return jnp.asarray(x, float) if value is None else value.astype(np.float64)
