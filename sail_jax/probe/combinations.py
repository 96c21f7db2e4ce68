"""Weighted combinations of models, and the weights of such combinations.

The probes stack their models once (`stack`), mix them at each point (`mixer`), and evaluate many
points in chunks (`sweep`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete
from sail_jax.merging.task_vectors import origin, task_vectors

Numbers: TypeAlias = np.ndarray | Array
"""An array in float64 (NumPy), or a JAX array while traced."""


def stack(models: Sequence[PyTree]) -> PyTree:
    """Stacks the floating leaves of models on a leading axis.

    Args:
      models: Parameter trees of one structure.

    Returns:
      A tree of arrays `(model, ...)` in float32 or wider; None for each leaf that is not floating.

    Raises:
      ValueError: If there are no models, they differ in structure or shapes, have non-finite
        values, or have different non-floating leaves. Messages contain the model and the leaf.
      TypeError: If `models` is not a sequence, or leaves have dtypes that cannot be merged.
    """
    if isinstance(models, str) or not isinstance(models, Sequence) or not models:
        # `task_vectors` raises the error with the details.
        return task_vectors(models, None).delta
    try:
        # `task_vectors` checks each leaf from the host. Here one program checks all of them, and
        # the leaves are checked separately only for the message.
        stacked, well = _stack(tuple(models))
    # Outside `jit`, `task_vectors` reports a leaf that is not an array.
    except TypeError:
        return task_vectors(models, origin(models[0])).delta
    if (valid := concrete(well)) is not None and not valid:
        # This raises an error about the model and the leaf.
        task_vectors(models, origin(models[0]))
    return stacked


@jax.jit
def _stack(models: tuple[PyTree, ...]) -> tuple[PyTree, Array]:
    """Stacks the models, and checks whether their values are finite and equal where required.

    `task_vectors` cannot check values while they are traced.
    """
    stacked = task_vectors(models, origin(models[0])).delta
    well = [jnp.isfinite(x).all() for x in jax.tree.leaves(stacked)]
    first, *others = map(jax.tree.leaves, models)
    for leaves in others:
        pairs = zip(first, leaves, strict=True)
        well += [(a == b).all() for a, b in pairs if not jnp.issubdtype(a.dtype, jnp.floating)]
    return stacked, jnp.array(well, bool).all()


def mixer(like: PyTree, stacked: PyTree) -> Callable[[Float[Array, "model"]], PyTree]:
    """Makes the function that combines models: weights -> sum_k w_k theta_k.

    `like` is a parameter tree with the dtypes and the non-floating leaves. `stacked` contains the
    models, as returned by `stack`. Returns a function of weights `(model,)` that returns a
    parameter tree.
    """

    def leaf(x: Array | None, template: Any, w: Float[Array, "model"]) -> Any:
        if x is None:
            return template
        # Models are added one after another in the wide dtype, and cast once to the leaf's dtype.
        terms = (w[i].astype(x.dtype) * x[i] for i in range(1, len(x)))
        return sum(terms, w[0].astype(x.dtype) * x[0]).astype(jnp.result_type(template))

    def mix(w: Float[Array, "model"]) -> PyTree:
        mixed = jax.tree.map(
            lambda x, template: leaf(x, template, w), stacked, like, is_leaf=lambda x: x is None
        )
        # The barrier prevents XLA from fusing the combination into each of its consumers, which
        # would compute it again for every one of them.
        return lax.optimization_barrier(mixed)

    return mix


def weighted(w: Float[Array, "n"], x: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """Computes the weighted sum sum_n w_n x_n in full precision."""
    return jnp.tensordot(w.astype(x.dtype), x, 1, precision=lax.Precision.HIGHEST)


def sweep(f: Callable[[PyTree], PyTree], over: PyTree, chunk_size: int) -> PyTree:
    """Applies a function to every entry of a tree of arrays, several entries at a time."""
    n = len(jax.tree.leaves(over)[0])
    return lax.map(f, over, batch_size=min(chunk_size, n) if chunk_size > 1 else None)


def numbers(name: str, x: ArrayLike | Sequence[float]) -> Numbers:
    """Returns a vector of finite numbers.

    `x` contains numbers; traced values are not checked. Returns the vector, `(n,)` with n >= 1:
    float64 in NumPy if the values are known, else a JAX array. Raises a ValueError if `x` is not a
    non-empty vector of finite numbers.
    """
    vector = _real(name, x)
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"{name}: expected a vector of numbers, got shape {vector.shape}")
    return vector


def line(alphas: ArrayLike | Sequence[float]) -> Numbers:
    """Returns the weights of the points alpha theta_a + (1 - alpha) theta_b."""
    return numbers("alphas", alphas)[:, None] * np.array([1, -1]) + np.array([0, 1])


def points(weights: Any, models: int, sum_to_one: bool = True) -> Numbers:
    """Returns checked weights of models, point by point.

    Args:
      weights: `(point, model)`. None: one point of equal weights.
      models: The number of models.
      sum_to_one: Whether every row must sum to 1, up to rounding.

    Returns:
      The weights, `(point, model)`: float64 in NumPy if they are known, else a JAX array.

    Raises:
      ValueError: If the weights have another shape, are not finite, or do not sum to 1.
    """
    if weights is None:
        return np.full((1, models), 1 / models)
    w = _real("weights", weights)
    if w.ndim != 2 or w.shape[1] != models or not len(w):
        raise ValueError(
            f"weights: expected [point, model] with {models} models, got shape {w.shape}"
        )
    if sum_to_one and isinstance(w, np.ndarray):
        sums, slack = w.sum(1), 4 * models * float(jnp.finfo(jnp.result_type(float)).eps)
        if not (abs(sums - 1) <= slack * (1 + abs(w).sum(1))).all():
            raise ValueError(f"weights: expected rows that sum to 1, got sums {sums}")
    return w


def _real(name: str, x: ArrayLike | Sequence[float]) -> Numbers:
    """Converts finite numbers to an array, on the host if they are known (without compiling)."""
    try:
        host = concrete(x)
        values = jnp.asarray(x, jnp.result_type(float)) if host is None else host.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected numbers, got {x!r}") from error
    if isinstance(values, np.ndarray) and not np.isfinite(values).all():
        raise ValueError(f"{name}: expected finite values, got {values}")
    return values


def simplex_grid(models: int, divisions: int) -> Float[np.ndarray, "point model"]:
    """Returns all weights on the simplex that are multiples of 1 / divisions.

    There are (divisions + models - 1) choose (models - 1) of them. For random weights instead of a
    grid use `jax.random.dirichlet(key, jnp.ones(models), (n,))`.

    Args:
      models: The number of models, at least 1.
      divisions: The number of steps from 0 to 1, at least 1.

    Returns:
      The weights, `(point, model)`. Every row sums to 1.

    Raises:
      ValueError: If `models` or `divisions` is less than 1.

    >>> simplex_grid(2, 2).tolist(), len(simplex_grid(4, 6))
    ([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], 84)
    """
    if models < 1 or divisions < 1:
        raise ValueError(f"models, divisions: expected >= 1, got {models}, {divisions}")
    # Stars and bars: put `models - 1` bars among `divisions` stars. The stars between two bars are
    # the numerator of a model's weight.
    places = models + divisions - 1
    bars = np.array(list(itertools.combinations(range(places), models - 1)), int)
    bars = bars.reshape(len(bars), models - 1)
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, places)))
    return (np.diff(edges, axis=1) - 1) / divisions
