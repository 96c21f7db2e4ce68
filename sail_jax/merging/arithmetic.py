"""Arithmetic on arrays whose leading axis runs over models, the task axis.

The kernels of transforms and reductions are written with these functions. They compute what a plain
NumPy expression would, in an order that XLA compiles into few passes over memory.
"""

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
"""One number for all models, or one number for each model."""

FOLDED = 4
"""The number of rows into which `sums` folds a vector. XLA adds them up in registers; with more
rows it is far slower.
"""


def per_task(f: Callable[..., Array], *arrays: Array) -> Array:
    """Applies a function to the arrays of one task after another, and stacks the results.

    XLA computes this in a single pass over memory. It would compute an expression of the whole
    stacks again, or write it to memory, for each task that is read from it later.

    Args:
      f: Function of one array for each of `arrays`, each without its task axis.
      *arrays: Shape `[task, ...]`, or `[1, ...]` for an array that all tasks share.

    Returns:
      The stacked results, shape `[task, ...]`.
    """
    tasks = max(map(len, arrays))
    # An array with one task stands for all tasks: it is indexed, not broadcast, so that no copy of
    # it is written for each task.
    return jnp.stack([f(*(x[k if len(x) > 1 else 0] for x in arrays)) for k in range(tasks)])


def task_sum(x: Num[Array, "task ..."]) -> Num[Array, "..."]:
    """Sums an array over its leading task axis.

    Tasks are added one after another: XLA reduces a short leading axis far slower on CPUs.

    Args:
      x: Shape `[task, ...]`, of at least one task.

    Returns:
      The sum, shape `[...]`.
    """
    return functools.reduce(jnp.add, [x[k] for k in range(x.shape[0])])


def beside(value: PerModel, delta: Float[Array, "task ..."]) -> Float[Array, "#task ..."]:
    """Reshapes a hyperparameter so that it broadcasts with task vectors.

    Args:
      value: One number, or one for each model, shape `[task]`.
      delta: Shape `[task, ...]`; its dtype is that of the result.

    Returns:
      Shape `[1, 1, ...]` for one number and `[task, 1, ...]` for one for each model, with as many
      axes as `delta`.
    """
    value = jnp.asarray(value, delta.dtype)
    return value.reshape(-1, *(1,) * (delta.ndim - 1))


def sums(*arrays: Float[Array, "..."]) -> tuple[Float[Array, ""], ...]:
    """Sums each of several arrays of one shape.

    Vectors are summed in one pass over what they are computed from, which is several times faster
    on CPUs than one sum after another. The result is as accurate as XLA's own sums, which add in a
    tree: the error is a few eps times the sum of the magnitudes.

    Args:
      *arrays: At least one array; all have the same shape.

    Returns:
      One scalar for each array.
    """
    first = arrays[0]
    # Folding is a reshape: it needs whole rows, and does not fit axes split over devices.
    spread = any(any(jax.typeof(x).sharding.spec) for x in arrays)
    if first.ndim == 1 and first.size and first.size % FOLDED == 0 and not spread:
        return _sums(arrays)
    return tuple(x.sum() for x in arrays)


@jax.custom_jvp
def _sums(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sums vectors whose length is a multiple of `FOLDED`, in one reduction."""

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    # Shapes here: n -> [FOLDED, n / FOLDED]. Reducing axis 0 adds whole rows, entry by entry, which
    # vectorises. One `lax.reduce` takes all arrays together, so that their common inputs are read
    # once.
    rows = tuple(x.reshape(FOLDED, -1) for x in arrays)
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return tuple(part.sum() for part in lax.reduce(rows, zeros, add, (0,)))


@_sums.defjvp
def _sums_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # A sum is linear: tangents are summed, and `lax.reduce` itself is never differentiated.
    return _sums(*primals), tuple(t.sum() for t in tangents[0])


def gram(delta: Float[Array, "task ..."], axis: Sequence[int] | None = None) -> Float[Array, "..."]:
    """Computes the inner products of the arrays of every two models: G[j, k] = <delta_j, delta_k>.

    Inner products of vectors share one reduction, others have a reduction each. Both are several
    times faster on CPUs than a matrix product with so few rows, and as accurate as XLA's sums: the
    error is a few eps |delta_j| |delta_k|.

    Args:
      delta: Shape `[task, ...]`.
      axis: The axes to sum over, counted in `delta` and without the first; all of those by default.

    Returns:
      Shape `[..., task, task]`; the leading axes are those of `delta` that are not summed over.
    """
    pairs = [(j, k) for j in range(len(delta)) for k in range(j + 1)]
    if axis is None:
        products = sums(*(delta[j] * delta[k] for j, k in pairs))
    else:
        over = tuple(a - 1 for a in axis)
        products = tuple(jnp.sum(delta[j] * delta[k], over) for j, k in pairs)
    # A Gram matrix is symmetric, so only its lower half was computed.
    half = dict(zip(pairs, products, strict=True))
    tasks = range(len(delta))
    return jnp.stack(
        [jnp.stack([half[max(j, k), min(j, k)] for k in tasks], -1) for j in tasks], -2
    )


def computed_once(compute: Callable[[], Array], like: Array) -> Array:
    """Evaluates a function so that XLA computes its result once and stores it.

    Under `jit` XLA would repeat the computation for every entry that reads its result, which was
    measured to be twenty times slower on CPUs. It does not fuse across the branches of a
    conditional. So the function is put into a branch that is always taken.

    Args:
      compute: Function without arguments that returns one array.
      like: Any array that holds no infinity. Its first entry decides the branch, so that the
        compiler cannot know which one it is. If it is empty, there is no branch.

    Returns:
      What `compute` returns.
    """
    if like.size == 0:
        return compute()
    shape = jax.eval_shape(compute)
    first = like.reshape(-1)[0]
    # The condition has to depend on data: XLA would remove a constant one, and the branch with it.
    return lax.cond(first != jnp.inf, compute, lambda: jnp.zeros(shape.shape, shape.dtype))


def number(x: ArrayLike) -> Any:
    """Converts a number to an array without compiling a program.

    Args:
      x: A scalar or an array of numbers, which may be traced.

    Returns:
      A NumPy array in float64 if the value is known, so that it is not rounded before it meets the
      arrays; a JAX array of the default float dtype if it is traced.
    """
    value = concrete(x)
    return jnp.asarray(x, float) if value is None else value.astype(np.float64)
