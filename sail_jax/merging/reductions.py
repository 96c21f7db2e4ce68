"""Counts: what the votes add up to. The task axis disappears here and nowhere else."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from sail_jax.merging.task_vectors import (
    Count,
    Each,
    Fold,
    Grain,
    Leafwise,
    Place,
    by_task,
    sums,
    tally,
)
from sail_jax.merging.transforms import one_of, scoped

__all__ = ["Vectors", "average", "combination", "gram", "total"]

Vectors = Literal["tree", "tensor", "row", "column"]
Coefficients = Callable[..., Float[Array, "*vectors task"]]


def _total(place: Place, delta: Array, weight: Array) -> Array:
    return tally(by_task(jnp.multiply, weight, delta))


def _average(place: Place, delta: Array, weight: Array) -> Array:
    mass, size = tally(weight), tally(by_task(jnp.abs, weight))
    exists = jnp.abs(mass) > 10 * jnp.finfo(mass.dtype).eps * size
    # the inner where keeps the gradient finite at entries that the outer one discards
    return jnp.where(exists, _total(place, delta, weight) / jnp.where(exists, mass, 1), 0)


total = Leafwise(Partial(_total))
"""sum_k w_k delta_k.

>>> votes = TaskVectors({"a": jnp.array([[3.0, 1.0], [1.0, 1.0]])}, {"a": jnp.ones((2, 1))})
>>> total(votes)["a"].tolist()
[4.0, 2.0]
"""

average = Leafwise(Partial(_average))
"""sum_k w_k delta_k / sum_k w_k over those who vote; 0 where nobody does.

Weights of both signs may cancel: where |sum w| is within rounding (10 eps) of 0 relative to
sum |w| there is no average, and the entry is 0 as well. Short of that they amplify.
"""


def combination(coefficients: Coefficients, *args: Any, scope: Vectors = "tensor") -> Count:
    """sum_k c_k delta_k with c = coefficients(*args, gram, weights): vectors in the span of the
    votes, found from their angles and lengths alone.

    gram: `[*vectors, task, task]`, <delta_j, delta_k>. weights: `[task]`; it is a ValueError if a
    rule has made them differ between entries. `coefficients` lives as long as the process, and
    acts on each Gram matrix of a stack; `args` are arrays.

    scope: what a vector is. The "tree", each "tensor", each "row" of it (the entries along its last
    axis), or each "column" (those of one place on its last axis, over all other axes). A leaf with
    one axis is one row and one column.

    Squares that overflow are a ValueError where they are known: not while traced or under "row".
    """
    one_of("scope", scope, Vectors)
    if scope == "row":
        return Leafwise(Partial(_by_row(coefficients), *args), grain="row")

    def then(statistics: tuple[Array, Array], size: int) -> Count:
        known = concrete(statistics[0])
        if known is not None and not np.isfinite(known).all():
            raise ValueError(
                "expected votes whose squares add up to a finite number, got an inner product of "
                f"infinity or NaN in {statistics[0].dtype}"
            )
        c = _compiled(coefficients)(*args, *statistics)
        return Leafwise(Partial(_combine, c), grain=grain)

    grain: Grain = "row" if scope == "column" else "entry"
    if scope == "column":
        return Each(Fold(Partial(_by_column), then, _same_weights, grain))
    return scoped(scope, Fold(Partial(_by_tensor), then, _same_weights))


@functools.cache
def _compiled(coefficients: Coefficients) -> Coefficients:
    return jax.jit(coefficients)


def gram(delta: Float[Array, "task ..."], axis: Sequence[int] | None = None) -> Float[Array, "..."]:
    """<delta_j, delta_k> over `axis`, all but the first by default: [..., task, task].

    Of vectors the pairs share one reduction, elsewhere each has its own: both several times faster
    on CPUs than a matrix product this thin, and as accurate as XLA's sums, which are trees (error
    of a few eps |delta_j| |delta_k|).
    """
    if axis is None:
        pairs = [(j, k) for j in range(len(delta)) for k in range(j + 1)]
        found = dict(zip(pairs, sums(*(delta[j] * delta[k] for j, k in pairs)), strict=True))
        return _symmetric(len(delta), lambda j, k: found[j, k])
    over = tuple(a - 1 for a in axis)
    return _symmetric(len(delta), lambda j, k: jnp.sum(delta[j] * delta[k], over))


def _symmetric(n: int, entry: Callable[[int, int], Array]) -> Float[Array, "..."]:
    """The matrix, on the last axes, of entries j >= k."""
    half = {(j, k): entry(j, k) for j in range(n) for k in range(j + 1)}
    return jnp.stack(
        [jnp.stack([half[max(j, k), min(j, k)] for k in range(n)], -1) for j in range(n)], -2
    )


def _weights(delta: Array, weight: Array) -> Float[Array, "task"]:
    if weight.size != len(delta):
        raise ValueError(f"expected one weight per model and tensor, got shape {weight.shape}")
    return weight.reshape(-1)


def _same_weights(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return a[0] + b[0], a[1]


@jax.jit
def _by_tensor(place: Place, delta: Array, weight: Array) -> tuple[Array, Array]:
    return gram(delta), _weights(delta, weight)


@jax.jit
def _by_column(place: Place, delta: Array, weight: Array) -> tuple[Array, Array]:
    axis = range(1, delta.ndim - 1) if delta.ndim > 2 else None
    return gram(delta, axis), _weights(delta, weight)


@functools.cache
def _by_row(coefficients: Coefficients) -> Callable[..., Array]:
    def kernel(*rest: Any) -> Array:
        *args, place, delta, weight = rest
        products = gram(delta, [delta.ndim - 1] if delta.ndim > 1 else None)
        c = coefficients(*args, products, _weights(delta, weight))
        return _combine(c[..., None, :] if delta.ndim > 1 else c, place, delta, weight)

    return jax.jit(kernel)


@jax.jit
def _combine(c: Float[Array, "... task"], place: Place, delta: Array, weight: Array) -> Array:
    """`c` belongs to the last axes of a vote, those it lacks are alike."""
    c = jnp.moveaxis(c.astype(delta.dtype), -1, 0)
    return tally(c.reshape(len(c), *(1,) * (delta.ndim - c.ndim), *c.shape[1:]) * delta)
