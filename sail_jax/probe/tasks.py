"""Task vectors beside each other: where the changes of several models are at odds.

This needs the parameters alone, no data and no network.
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
    """How task vectors disagree in one leaf, in each of several leaves, or in all together.

    For each of several leaves, all arrays have a leading axis of leaves.

    Attributes:
      norms: The norms |Delta_i| of the task vectors, `(model,)`.
      cosines: The cosines between them, `(model, model)`; 0 where a norm is 0.
      sign_conflict: The fraction of entries that some models raise and others lower, a scalar.
        These are the entries for which TIES elects a sign.
      heterogeneity: sum_i w_i |Delta_i - sum_k w_k Delta_k|^2, a scalar. It is a square, which may
        be 0 or infinite in float32 where the norms are not.
    """

    norms: Float[Array, "*leaf model"]
    cosines: Float[Array, "*leaf model model"]
    sign_conflict: Float[Array, "*leaf"]
    heterogeneity: Float[Array, "*leaf"]


class Interference(NamedTuple):
    """How the task vectors of several models disagree, in total and leaf by leaf.

    Attributes:
      total: The conflict over all leaves together.
      leaves: The paths of the floating leaves.
      each: The conflict in each of `leaves`, `(leaf, ...)`.
      matrices: The paths of the leaves with two axes or more.
      overlap: How much the spans of the top singular vectors of two task vectors have in common,
        `(matrix, side, model, model)`: |U_i^T U_j|_F^2 / rank, from 0 to 1. Side 0 is that of the
        first axes, side 1 that of the last.
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
    """Measures how the task vectors Delta_i = theta_i - base of several models disagree.

    Memory holds the task vectors, and the singular vectors of one leaf.

    Args:
      base: The parameters that the models were tuned from. Leaves that are not floating take no
        part, and must be equal in all models.
      models: The parameters of the models.
      weights: The weights of the models in the heterogeneity, `(model,)`. They are divided by their
        sum. None: equal ones.
      rank: How many singular vectors span the subspaces that are compared; fewer where a side of a
        leaf is smaller. Where a task vector has fewer directions, the overlap is divided by their
        number. Leaves with more than two axes are taken as matrices `(rest, last)`.

    Returns:
      Norms, cosines, sign conflicts, heterogeneity and overlaps.

    Raises:
      ValueError: For models that differ from the base in structure or are not finite (naming model
        and leaf), no floating leaves, and weights or a rank that do not fit.
      TypeError: For leaves of dtypes that cannot be merged, such as complex ones.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708): sign conflicts; Li et al., A Unified
      Generalization Framework for Model Merging, 2026 (arXiv 2601.21690), Corollary 1:
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
    # Matrices have two axes or more, beside the one that numbers the models.
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
    """The sums of all leaves stacked, `(leaf, ...)`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


@jax.jit
def _total(parts: Sums) -> Sums:
    """The sums over all leaves together."""
    inner, opposed, apart = parts
    return total_products(inner), opposed.sum(0), total_products(apart)


@jax.jit
def sums(delta: Float[Array, "model ..."], w: Float[Array, "model"]) -> Sums:
    """Computes what `conflict` needs to know of one leaf, or of a part of it.

    All three add up over the parts of a leaf, and over leaves.

    Args:
      delta: The task vectors, `(model, ...)`.
      w: The weights of the models, `(model,)`, of sum 1.

    Returns:
      The inner products of the task vectors; how many entries have both signs; and sum_i w_i
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
    """Makes norms, cosines and fractions of what `sums` returned.

    Args:
      totals: What `sums` returned, summed over parts or leaves, or stacked `(leaf, ...)`.
      size: How many entries a task vector has there, `()` or `(leaf,)`.

    Returns:
      The conflict.
    """
    inner, opposed, apart = totals
    unit = apart.unit[..., 0]
    # Rounding may take cosines beyond 1, and an empty leaf has no entries to divide by.
    return Conflict(
        inner.lengths * inner.top,
        inner.cosines.clip(-1, 1),
        opposed / jnp.maximum(size, 1),
        unit * (unit * apart.inner[..., 0, 0]),
    )


def _chance(shape: tuple[int, ...], rank: int) -> list[float]:
    """The mean overlap of random spans of both sides of a leaf."""
    sides = int(np.prod(shape[1:-1])), shape[-1]
    return [min(rank, *sides) / n for n in sides]


@partial(jax.jit, static_argnames="rank")
def _overlap(delta: Float[Array, "model ..."], rank: int) -> Float[Array, "side model model"]:
    """The overlaps of the top singular subspaces of all pairs of task vectors, on both sides."""
    matrices = delta.reshape(len(delta), -1, delta.shape[-1])
    k = min(rank, *matrices.shape[1:])

    def spans(matrix: Array) -> tuple[Array, Array, Array]:
        # Singular vectors point anywhere where the singular value is nothing but rounding, so these
        # are 0 and do not count.
        U, s, V = svd(matrix)
        return U[:, :k], V[:, :k], (s[:k] > 0).sum(dtype=s.dtype)

    *sides, ranks = lax.map(spans, matrices)
    least = jnp.minimum(ranks[:, None], ranks)
    cosines = [jnp.einsum("ipa,jpb->ijab", U, U, precision=lax.Precision.HIGHEST) for U in sides]
    # |U_i^T U_j|_F^2 is the sum of squared cosines of the principal angles between the two spans.
    squares = jnp.stack([jnp.sum(x**2, (-2, -1)) for x in cosines])
    return squares / jnp.maximum(least, 1)
