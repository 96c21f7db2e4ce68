"""Compares task vectors: where the changes of several models conflict.

This requires only the parameters, and neither data nor a network.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.checks import as_array, concrete
from sail_jax.merging.arithmetic import Products, products, task_sum, total_products
from sail_jax.merging.matrices import svd
from sail_jax.merging.task_vectors import Weights, in_float64, task_vectors, task_weights
from sail_jax.probe.estimates import check_size
from sail_jax.probe.networks import Names
from sail_jax.trees import leaf_paths

Sums = tuple[Products, Array, Products]


class Conflict(NamedTuple):
    """The conflict of task vectors in one leaf, in each of several leaves, or over all leaves.

    For several leaves, all arrays have a leading axis of leaves.

    Attributes:
      norms: The norms |Delta_i| of the task vectors, `(model,)`.
      cosines: The cosines between them, `(model, model)`; 0 if a norm is 0.
      sign_conflict: The fraction of entries that some models raise and others lower, a scalar.
        TIES elects a sign for these entries.
      heterogeneity: sum_i w_i |Delta_i - sum_k w_k Delta_k|^2, a scalar. As a square it may be 0 or
        infinite in float32 even if the norms are not.
    """

    norms: Float[Array, "*leaf model"]
    cosines: Float[Array, "*leaf model model"]
    sign_conflict: Float[Array, "*leaf"]
    heterogeneity: Float[Array, "*leaf"]


class Interference(NamedTuple):
    """The conflict of the task vectors of several models, in total and leaf by leaf.

    Attributes:
      total: The conflict over all leaves together.
      leaves: The paths of the floating leaves.
      each: The conflict in each of `leaves`, `(leaf, ...)`.
      matrices: The paths of the leaves with at least two axes.
      overlap: The overlap of the spans of two task vectors' top singular vectors,
        `(matrix, side, model, model)`: |U_i^T U_j|_F^2 / rank, from 0 to 1. Side 0 is for the first
        axes, side 1 for the last axis.
      chance: The mean overlap of random spans, rank / size, `(matrix, side)`.
    """

    total: Conflict
    leaves: Names
    each: Conflict
    matrices: Names
    overlap: Float[Array, "matrix side model model"]
    chance: Float[Array, "matrix side"]


@in_float64("base", "models")
def interference(
    base: PyTree, models: Sequence[PyTree], weights: Weights = None, *, rank: int = 8
) -> Interference:
    """Measures the conflict of the task vectors Delta_i = theta_i - base of several models.

    The task vectors, and the singular vectors of one leaf, are in memory.

    Args:
      base: The parameters before fine-tuning. Non-floating leaves are ignored and must be equal in
        all models.
      models: The parameters of the models.
      weights: The weights of the models in the heterogeneity, `(model,)`. They are normalised to
        sum one. None: equal weights.
      rank: The number of singular vectors that span the compared subspaces, at most the size of a
        leaf's side. If a task vector has fewer directions, the overlap is divided by their number.
        Leaves with more than two axes count as matrices `(rest, last)`.

    Returns:
      Norms, cosines, sign conflicts, heterogeneity and overlaps.

    Raises:
      ValueError: For models that differ from the base in structure or are not finite (with the
        names of the model and the leaf), for missing floating leaves, and for invalid weights or an
        invalid rank.
      TypeError: For leaves with dtypes that cannot be merged, such as complex ones.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708), for sign conflicts. Li et al., A Unified
      Generalization Framework for Model Merging, 2026 (arXiv 2601.21690), Corollary 1, for
      heterogeneity.

    >>> one, two = jnp.array([[1.0, 1.0], [0.0, 0.0]]), jnp.array([[1.0, -1.0], [0.0, 0.0]])
    >>> found = interference({"w": jnp.zeros((2, 2))}, [{"w": one}, {"w": two}], rank=1)
    >>> found.total.cosines[0, 1].item(), found.total.sign_conflict.item()
    (0.0, 0.25)
    >>> found.overlap[0, :, 0, 1].round(3).tolist()  # the same inputs, other outputs
    [1.0, 0.0]
    """
    check_size(rank=rank)
    delta = task_vectors(models, base).delta
    names, leaves = Names(leaf_paths(delta)), jax.tree.leaves(delta)
    if not leaves:
        raise ValueError("base: expected floating leaves, got none")
    k = len(models)
    w = task_weights(np.full(k, 1 / k) if weights is None else weights, k, normalize=True)
    values = concrete(w)
    if values is not None and (values < 0).any():
        raise ValueError(f"weights: expected values >= 0, got {values}")
    by_leaf = _stacked([sums(x, w) for x in leaves])
    size = as_array(np.array([x.size // k for x in leaves], w.dtype))
    # Matrices have at least two axes, in addition to the axis of models.
    matrices = [i for i, x in enumerate(leaves) if x.ndim > 2 and x.size]
    overlaps = [_overlap(leaves[i], rank) for i in matrices]
    chances = [_chance(leaves[i].shape, rank) for i in matrices]
    return Interference(
        conflict(_total(by_leaf), size.sum()),
        names,
        conflict(by_leaf, size),
        Names(names[i] for i in matrices),
        jnp.stack(overlaps) if matrices else jnp.zeros((0, 2, k, k)),
        as_array(np.array(chances)) if matrices else jnp.zeros((0, 2)),
    )


@jax.jit
def _stacked(parts: list[Sums]) -> Sums:
    """Stacks the sums of all leaves, `(leaf, ...)`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


@jax.jit
def _total(parts: Sums) -> Sums:
    """Adds the sums of all leaves."""
    inner, opposed, apart = parts
    return total_products(inner), opposed.sum(0), total_products(apart)


@jax.jit
def sums(delta: Float[Array, "model ..."], w: Float[Array, "model"]) -> Sums:
    """Computes the input of `conflict` for one leaf, or for a part of it.

    All three add up over the parts of a leaf, and over leaves.

    Args:
      delta: The task vectors, `(model, ...)`.
      w: The weights of the models, `(model,)`, with sum 1.

    Returns:
      The inner products of the task vectors, the number of entries with both signs, and sum_i w_i
      |Delta_i - sum_k w_k Delta_k|^2, as the product of one vector with itself.
    """
    wide = w.astype(delta.dtype).reshape(-1, *(1,) * (delta.ndim - 1))
    opposed = (delta > 0).any(0) & (delta < 0).any(0)
    inner = products(delta)
    own = delta * (1 / inner.top)
    apart = task_sum(wide * (own - task_sum(wide * own)) ** 2)
    return inner, opposed.sum(dtype=w.dtype), Products(inner.top, apart.sum().reshape(1, 1))


@jax.jit
def conflict(totals: Sums, size: Float[Array, "*leaf"]) -> Conflict:
    """Computes norms, cosines and fractions from the output of `sums`.

    Args:
      totals: The output of `sums`, summed over parts or leaves, or stacked `(leaf, ...)`.
      size: The number of entries of a task vector there, `()` or `(leaf,)`.

    Returns:
      The conflict.
    """
    inner, opposed, apart = totals
    unit = apart.unit[..., 0]
    # Rounding may give cosines above 1, and an empty leaf has no entries to divide by.
    return Conflict(
        inner.lengths * inner.top,
        inner.cosines.clip(-1, 1),
        opposed / jnp.maximum(size, 1),
        unit * (unit * apart.inner[..., 0, 0]),
    )


def _chance(shape: tuple[int, ...], rank: int) -> list[float]:
    """Computes the mean overlap of random spans on both sides of a leaf."""
    sides = int(np.prod(shape[1:-1])), shape[-1]
    return [min(rank, *sides) / n for n in sides]


@partial(jax.jit, static_argnames="rank")
def _overlap(delta: Float[Array, "model ..."], rank: int) -> Float[Array, "side model model"]:
    """Computes the overlaps of the top singular subspaces of all pairs, on both sides."""
    matrices = delta.reshape(len(delta), -1, delta.shape[-1])
    k = min(rank, *matrices.shape[1:])

    def spans(matrix: Array) -> tuple[Array, Array, Array]:
        # Singular vectors are arbitrary if the singular value is only rounding. They are set to 0
        # and do not count.
        U, s, V = svd(matrix)
        return U[:, :k], V[:, :k], (s[:k] > 0).sum(dtype=s.dtype)

    *sides, ranks = lax.map(spans, matrices)
    least = jnp.minimum(ranks[:, None], ranks)
    cosines = [jnp.einsum("ipa,jpb->ijab", U, U, precision=lax.Precision.HIGHEST) for U in sides]
    # |U_i^T U_j|_F^2 is the sum of squared cosines of the principal angles between the two spans.
    squares = jnp.stack([jnp.sum(x**2, (-2, -1)) for x in cosines])
    return squares / jnp.maximum(least, 1)
