"""Reductions, which map task vectors to one update of the base.

Only reductions remove the task axis. A `Merge` is a transform (`transforms`) followed by a
reduction.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from sail_jax.checks import one_of
from sail_jax.lazy import listed
from sail_jax.merging.arithmetic import Products, add_products, per_task, products, task_sum
from sail_jax.merging.combining import Reduction, reduce, shown
from sail_jax.merging.steps import Fold, Piece, Step, kernel

__all__ = ["Extent", "combination", "mean_where_any", "weighted_mean", "weighted_sum"]
__dir__ = listed(__name__)

Extent = Literal["tree", "tensor", "row", "column"]
"""What counts as one vector: the whole tree, a tensor, a row (the entries along the last axis of a
tensor), or a column (the entries at one place on its last axis).
"""
Coefficients = Callable[..., Float[Array, "*vectors task"]]
"""Function from inner products and weights to coefficients; see `combination`."""


def _weighted_sum(piece: Piece, delta: Array, weight: Array) -> Array:
    """The kernel of `weighted_sum`."""
    return task_sum(per_task(jnp.multiply, weight, delta))


def mean_where_any(delta: Array, weight: Array) -> Array:
    """Computes the weighted mean of a leaf: sum_k w_k delta_k / sum_k w_k.

    Args:
      delta: Shape `[task, ...]`.
      weight: Broadcasts with `delta`.

    Returns:
      Shape `[...]`; 0 where all weights are 0, and where they cancel (|sum w| <= 10 eps sum |w|).
    """
    mass, size = task_sum(weight), task_sum(per_task(jnp.abs, weight))
    # The sum is compared with the sum of magnitudes, because weights that cancel leave rounding
    # errors instead of 0.
    exists = jnp.abs(mass) > 10 * jnp.finfo(mass.dtype).eps * size
    total = task_sum(per_task(jnp.multiply, weight, delta))
    # The inner where keeps the gradient finite at entries that the outer where discards.
    return jnp.where(exists, total / jnp.where(exists, mass, 1), 0)


def _weighted_mean(piece: Piece, delta: Array, weight: Array) -> Array:
    """The kernel of `weighted_mean`."""
    return mean_where_any(delta, weight)


weighted_sum = Reduction(
    (Step(kernel(_weighted_sum), propagates_nonfinite=True, call="weighted_sum"),)
)
"""The reduction sum_k w_k delta_k.

>>> from sail_jax import TaskVectors
>>> vectors = TaskVectors({"a": jnp.array([[3.0, 1.0], [1.0, 1.0]])}, {"a": jnp.ones((2, 1))})
>>> weighted_sum(vectors)["a"].tolist()
[4.0, 2.0]
"""

weighted_mean = Reduction((Step(kernel(_weighted_mean), call="weighted_mean"),))
"""The reduction sum_k w_k delta_k / sum_k w_k over unmasked models; 0 where all are masked.

Weights of both signs may cancel. Where |sum w| <= 10 eps sum |w| the mean is undefined, and the
entry is 0 too. Weights that almost cancel amplify.

>>> from sail_jax import TaskVectors
>>> weight = {"a": jnp.array([[1.0, 0.0], [3.0, 0.0]])}
>>> weighted_mean(TaskVectors({"a": jnp.array([[4.0, 1.0], [8.0, 1.0]])}, weight))["a"].tolist()
[7.0, 0.0]
"""


@shown
def combination(coefficients: Coefficients, *args: Any, scope: Extent = "tensor") -> Reduction:
    """Makes a reduction to a linear combination of task vectors: sum_k c_k delta_k.

    The coefficients are a function of the inner products and the weights of the task vectors: c =
    coefficients(*args, products, weights). The result lies in their span and depends only on their
    angles and lengths. Weights must not differ between entries, so a masking transform cannot
    precede this reduction.

    Args:
      coefficients: `(*args, products, weights) -> [*vectors, task]`. `products` contains the
        `lengths` of the task vectors up to a common factor, `[*vectors, task]`, and the `cosines`
        of their angles, `[*vectors, task, task]`; see `arithmetic.Products`. `weights` has the
        shape `[task]`. The function should exist as long as the process, because compiled code is
        cached for it.
      *args: First arguments of `coefficients`: arrays, or other arguments of a kernel.
      scope: The extent of one vector: the "tree", each "tensor", each "row" or each "column". A row
        runs along the last axis of a tensor. A column consists of the entries at one position on
        the last axis, over all other axes. A leaf with one axis is one row, and also one column.

    Returns:
      The reduction.

    Raises:
      ValueError: For an unknown scope. When the reduction is applied, for weights that differ
        between entries.

    >>> from sail_jax import TaskVectors
    >>> def shortest(products, weights):
    ...     return (products.lengths == products.lengths.min()).astype(float)
    >>> vectors = TaskVectors({"a": jnp.array([[3.0, 4.0], [1.0, 2.0]])}, {"a": jnp.ones((2, 1))})
    >>> combination(shortest)(vectors)["a"].tolist()
    [1.0, 2.0]
    """
    one_of("scope", scope, Extent)
    count = kernel(coefficients, *args)
    if scope == "row":
        return reduce(kernel(_by_row, count), needs="row", propagates_nonfinite=True)
    sums = Fold(
        kernel(_by_column if scope == "column" else _by_tensor),
        kernel(_coefficients, count),
        # Gram matrices of pieces are added. Their weights are equal and are not added.
        _add,
    )
    # A piece of whole rows has an entry of every column, so sums over pieces match.
    needs = "row" if scope == "column" else "entry"
    over = "tree" if scope == "tree" else "tensor"
    # Over the tree every result would be NaN, which would hide the faulty input.
    shown = over == "tensor"
    return reduce(kernel(_combine), sums, needs=needs, scope=over, propagates_nonfinite=shown)


def _weights(delta: Array, weight: Array) -> Float[Array, "task"]:
    """Returns the weight of each model; raises a ValueError if weights differ between entries."""
    if weight.size != len(delta):
        raise ValueError(f"expected one weight per model and tensor, got shape {weight.shape}")
    return weight.reshape(-1)


def _by_tensor(piece: Piece, delta: Array, weight: Array) -> tuple[Products, Array]:
    """Computes the inner products of whole tensors, and the weights."""
    return products(delta, at_scale_1=piece.at_scale_1), _weights(delta, weight)


def _by_column(piece: Piece, delta: Array, weight: Array) -> tuple[Products, Array]:
    """Computes the inner products of columns, and the weights."""
    axis = range(1, delta.ndim - 1) if delta.ndim > 2 else None
    return products(delta, axis), _weights(delta, weight)


def _add(a: tuple[Products, Array], b: tuple[Products, Array]) -> tuple[Products, Array]:
    """Adds the inner products of two pieces."""
    return add_products(a[0], b[0]), b[1]  # every piece has the same weights


def _coefficients(count: Coefficients, prepared: tuple[()], sums: tuple[Products, Array]) -> Array:
    """Computes coefficients, which are NaN if a task vector contains NaN or infinity."""
    finite = jnp.isfinite(sums[0].inner).all((-2, -1))[..., None]
    # Coefficients of infinite products might look finite (x / inf is 0). NaN propagates to the
    # result, and the error then contains the tensor.
    return jnp.where(finite, count(*sums), jnp.nan)


def _by_row(count: Coefficients, piece: Piece, delta: Array, weight: Array) -> Array:
    """Combines the rows of a piece."""
    found = products(delta, [delta.ndim - 1] if delta.ndim > 1 else None)
    c = _coefficients(count, (), (found, _weights(delta, weight)))
    return _combine(c[..., None, :] if delta.ndim > 1 else c, piece, delta, weight)


def _combine(c: Float[Array, "... task"], piece: Piece, delta: Array, weight: Array) -> Array:
    """Combines task vectors with coefficients along the last axes of a leaf.

    `c` has the shape `[*last axes, task]` and broadcasts over the other axes.
    """
    c = jnp.moveaxis(c.astype(delta.dtype), -1, 0)
    return task_sum(c.reshape(len(c), *(1,) * (delta.ndim - c.ndim), *c.shape[1:]) * delta)
