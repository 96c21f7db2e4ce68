"""Task vectors beside each other: where the changes of several models are at odds."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.checks import as_array, concrete
from sail_jax.merging.arithmetic import gram, task_sum
from sail_jax.merging.task_vectors import Weights, task_vectors, task_weights
from sail_jax.probe.estimates import check_size
from sail_jax.probe.networks import Names
from sail_jax.trees import leaf_paths

__all__ = ["Conflict", "Interference", "conflict", "interference", "sums"]

Sums = tuple[Array, Array, Array]


class Conflict(NamedTuple):
    """Of one leaf, of each ([leaf, ...]), or of all together.

    norms: [model], |Delta_i|. cosines: [model, model], 0 where a norm is. sign_conflict: the
    fraction of entries that some models raise and others lower (what TIES elects signs for, Yadav
    et al. 2023). heterogeneity: sum_i w_i |Delta_i - sum_k w_k Delta_k|^2 (unified merging,
    Corollary 1).
    """

    norms: Float[Array, "*leaf model"]
    cosines: Float[Array, "*leaf model model"]
    sign_conflict: Float[Array, "*leaf"]
    heterogeneity: Float[Array, "*leaf"]


class Interference(NamedTuple):
    """total, and for each of `leaves`: the conflict. matrices: the leaves with two axes or more.

    overlap: [matrix, side, model, model], of the spans of the top singular vectors, of the rows'
    space and of the columns': |U_i^T U_j|_F^2 / rank, from 0 to 1. chance: [matrix, side], what
    random spans have, rank / size.
    """

    total: Conflict
    leaves: Names
    each: Conflict
    matrices: Names
    overlap: Float[Array, "matrix side model model"]
    chance: Float[Array, "matrix side"]


def interference(
    base: PyTree, models: Sequence[PyTree], weights: Weights = None, *, rank: int = 8
) -> Interference:
    """How the task vectors Delta_i = theta_i - base disagree, leaf by leaf and in total.

    weights: of the models in the heterogeneity, equal by default, not negative, divided by their
    sum. rank: of the subspaces, or the size of the smaller side where that is less; where a task
    vector has fewer directions, the lesser number counts. Leaves of more axes are matrices
    [rest, last]. Leaves that are not floating take no part and must agree. Memory: the task
    vectors, and singular vectors of one leaf.

    Raises ValueError, naming model and leaf, for models that do not share the base's structure or
    are not finite, and for weights or a rank that do not fit.

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
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


@jax.jit
def _total(parts: Sums) -> Sums:
    return jax.tree.map(lambda x: x.sum(0), parts)


@jax.jit
def sums(delta: Float[Array, "model ..."], w: Float[Array, "model"]) -> Sums:
    """Inner products, entries of both signs, and the weighted square of deviations: these add up
    over the parts of a leaf, and over leaves."""
    wide = w.astype(delta.dtype).reshape(-1, *(1,) * (delta.ndim - 1))
    opposed = (delta > 0).any(0) & (delta < 0).any(0)
    apart = task_sum(wide * (delta - task_sum(wide * delta)) ** 2)
    return gram(delta), opposed.sum(dtype=w.dtype), apart.sum()


@jax.jit
def conflict(totals: Sums, size: Float[Array, "*leaf"]) -> Conflict:
    """Of what `sums` found, of so many entries."""
    products, opposed, apart = totals
    norms = jnp.sqrt(jnp.diagonal(products, axis1=-2, axis2=-1))
    outer = norms[..., :, None] * norms[..., None, :]
    cosines = jnp.where(outer > 0, products / jnp.where(outer > 0, outer, 1), 0)
    return Conflict(norms, cosines.clip(-1, 1), opposed / jnp.maximum(size, 1), apart)


def _chance(shape: tuple[int, ...], rank: int) -> list[float]:
    sides = int(np.prod(shape[1:-1])), shape[-1]
    return [min(rank, *sides) / n for n in sides]


@partial(jax.jit, static_argnames="rank")
def _overlap(delta: Float[Array, "model ..."], rank: int) -> Float[Array, "side model model"]:
    matrices = delta.reshape(len(delta), -1, delta.shape[-1])
    k = min(rank, *matrices.shape[1:])

    def spans(matrix: Array) -> tuple[Array, Array, Array]:
        U, s, Vt = jnp.linalg.svd(matrix, full_matrices=False)
        live = s[:k] > max(matrix.shape) * jnp.finfo(s.dtype).eps * s[0]
        return U[:, :k] * live, Vt[:k].T * live, live.sum(dtype=s.dtype)

    *sides, ranks = lax.map(spans, matrices)
    least = jnp.minimum(ranks[:, None], ranks)
    products = [jnp.einsum("ipa,jpb->ijab", U, U, precision=lax.Precision.HIGHEST) for U in sides]
    squares = jnp.stack([jnp.sum(x**2, (-2, -1)) for x in products])
    return squares / jnp.maximum(least, 1)
