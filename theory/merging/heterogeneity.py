"""How far task vectors are from their mean, and what sparsification does to it.

Unified merging, Corollary 1 has trimming, sign election and DARE reduce sum_i w_i |d_i - d|^2,
d = sum_i w_i d_i. Only election does, and not strictly. (The zeta_i^2 of its Assumption 3 is about
losses, which no mask changes.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from sail_jax.merging.combining import Transform
from sail_jax.merging.task_vectors import TaskVectors
from theory.merging.tasks import Weights, check_sum
from theory.problems import check


class Effect(NamedTuple):
    """Heterogeneity before and after a transform."""

    before: Float[Array, ""]
    after: Float[Array, ""]


def updates(vectors: TaskVectors) -> PyTree:
    """What a transform leaves of each task vector, stacked: 0 where it is masked."""
    return jax.tree.map(lambda d, w: jnp.where(w != 0, d, 0), vectors.delta, vectors.weight)


def heterogeneity(vectors: PyTree, weights: Weights) -> Float[Array, ""]:
    """sum_i w_i |d_i - sum_j w_j d_j|^2 of task vectors stacked along a leading axis.

    >>> float(heterogeneity(jnp.array([[1.0, 0.0], [0.0, 1.0]]), [0.5, 0.5]))
    0.5
    """
    w = _weights(vectors, weights)

    def leaf(d: Array) -> Array:
        away = d - jnp.tensordot(w, d, 1)
        return w @ jnp.sum(away**2, range(1, d.ndim))

    return sum((leaf(d) for d in jax.tree.leaves(vectors)), start=jnp.zeros(()))


def effect(transform: Transform, vectors: TaskVectors, weights: Weights) -> Effect:
    """Exactly, for any transform of `sail_jax` (`trim`, `elect`, `drop`, chains of them).

    >>> from sail_jax.merging.transforms import trim
    >>> d = jnp.array([[1.0, 0.9], [0.9, 1.0]])
    >>> found = effect(trim(0.5), TaskVectors({"a": d}, {"a": jnp.ones((2, 1))}), [0.5, 0.5])
    >>> [round(float(v), 3) for v in found]
    [0.005, 0.5]
    """
    before, after = updates(vectors), updates(transform(vectors))
    return Effect(heterogeneity(before, weights), heterogeneity(after, weights))


def dare_heterogeneity(
    vectors: PyTree, weights: Weights, rate: ArrayLike, *, rescale: bool = True
) -> Float[Array, ""]:
    """The mean over DARE's masks, of drop rate p: V + p / (1 - p) sum_i w_i (1 - w_i) |d_i|^2;
    (1 - p)^2 V + p (1 - p) sum_i w_i (1 - w_i) |d_i|^2 without rescaling."""
    check("rate", rate, lambda p: (p >= 0) & (p < 1), "in [0, 1)")
    w, p = _weights(vectors, weights), jnp.asarray(rate, float)
    leaves = jax.tree.leaves(vectors)
    squares = sum(jnp.sum(d**2, range(1, d.ndim)) for d in leaves)
    scale = 1.0 if rescale else (1 - p) ** 2
    return scale * (heterogeneity(vectors, w) + p / (1 - p) * jnp.sum(w * (1 - w) * squares))


def _weights(vectors: PyTree, weights: Weights) -> Float[Array, " N"]:
    w = jnp.asarray(weights, float)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(vectors)}
    if w.ndim != 1 or counts != {w.shape}:
        raise ValueError(
            f"weights must have one entry per stacked task vector; got {w.shape} for leading axes "
            f"{sorted(counts)}"
        )
    check("weights", w, lambda x: x >= 0, ">= 0")
    check_sum(w)
    return w
