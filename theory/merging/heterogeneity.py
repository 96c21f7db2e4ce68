"""Distances of task vectors from their mean, before and after sparsification.

By Corollary 1 of Li et al., 2026 (arXiv 2601.21690), trimming, sign election and DARE reduce sum_i
w_i |d_i - d|^2 with d = sum_i w_i d_i. Only election does, and not strictly. (The zeta_i^2 of the
paper's Assumption 3 is a property of the losses, and masks do not change it.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from sail_jax.merging.combining import Transform
from sail_jax.merging.task_vectors import TaskVectors
from theory.merging.tasks import Weights
from theory.problems import check, check_sum, defined


class Effect(NamedTuple):
    """The heterogeneity of task vectors before and after a transform.

    Attributes:
      before: Heterogeneity before.
      after: Heterogeneity after.
    """

    before: Float[Array, ""]
    after: Float[Array, ""]


@defined
def updates(vectors: TaskVectors) -> PyTree:
    """Returns each task vector with 0 where it is masked.

    Args:
      vectors: Task vectors, stacked along a leading axis.

    Returns:
      The updates, with the structure and shapes of `vectors.delta`.

    >>> vectors = TaskVectors(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0]]))
    >>> updates(vectors).tolist()
    [[1.0, 0.0]]
    """
    return jax.tree.map(lambda d, w: jnp.where(w != 0, d, 0), vectors.delta, vectors.weight)


@defined
def heterogeneity(vectors: PyTree, weights: Weights) -> Float[Array, ""]:
    """Computes the heterogeneity sum_i w_i |d_i - sum_j w_j d_j|^2 of task vectors.

    Args:
      vectors: Pytree of N task vectors stacked along a leading axis.
      weights: Weights `(N,)`, >= 0, of sum 1.

    Returns:
      The heterogeneity, a scalar.

    Raises:
      ValueError: If the weights do not conform, are negative or do not sum to 1.

    References:
      Li et al., 2026 (arXiv 2601.21690), Corollary 1.

    >>> float(heterogeneity(jnp.array([[1.0, 0.0], [0.0, 1.0]]), [0.5, 0.5]))
    0.5
    """
    w = _weights(vectors, weights)

    def leaf(d: Array) -> Array:
        away = d - jnp.tensordot(w, d, 1)
        return w @ jnp.sum(away**2, range(1, d.ndim))

    return sum((leaf(d) for d in jax.tree.leaves(vectors)), start=jnp.zeros(()))


@defined
def effect(transform: Transform, vectors: TaskVectors, weights: Weights) -> Effect:
    """Computes the heterogeneity of task vectors before and after a transform, exactly.

    Args:
      transform: Any transform of `sail_jax.merging`, such as `trim`, `elect`, `drop` or a chain of
        them.
      vectors: Task vectors, stacked along a leading axis.
      weights: Weights `(N,)`, >= 0, of sum 1.

    Returns:
      The heterogeneity before and after.

    Raises:
      ValueError: If the weights do not conform, are negative or do not sum to 1.

    >>> from sail_jax.merging.transforms import trim
    >>> d = jnp.array([[1.0, 0.9], [0.9, 1.0]])
    >>> found = effect(trim(0.5), TaskVectors({"a": d}, {"a": jnp.ones((2, 1))}), [0.5, 0.5])
    >>> [round(float(v), 3) for v in found]
    [0.005, 0.5]
    """
    before, after = updates(vectors), updates(transform(vectors))
    return Effect(heterogeneity(before, weights), heterogeneity(after, weights))


@defined
def dare_heterogeneity(
    vectors: PyTree, weights: Weights, rate: ArrayLike, *, rescale: bool = True
) -> Float[Array, ""]:
    """Computes the mean heterogeneity after DARE, over its random masks.

    With drop rate p and the heterogeneity V before,

        rescaled:   V + p / (1 - p) sum_i w_i (1 - w_i) |d_i|^2
        otherwise:  (1 - p)^2 V + p (1 - p) sum_i w_i (1 - w_i) |d_i|^2

    Args:
      vectors: Pytree of N task vectors stacked along a leading axis.
      weights: Weights `(N,)`, >= 0, of sum 1.
      rate: Drop rate p in [0, 1).
      rescale: Whether DARE divides kept entries by 1 - p.

    Returns:
      The mean heterogeneity, a scalar.

    Raises:
      ValueError: If the rate is out of range, or the weights do not conform, are negative or do not
        sum to 1.

    References:
      Corrects Li et al., 2026 (arXiv 2601.21690), Corollary 1.

    >>> float(dare_heterogeneity(jnp.array([[1.0, 0.0], [0.0, 1.0]]), [0.5, 0.5], 0.5))
    1.0
    """
    check("rate", rate, lambda p: (p >= 0) & (p < 1), "in [0, 1)")
    w, p = _weights(vectors, weights), jnp.asarray(rate, float)
    leaves = jax.tree.leaves(vectors)
    squares = sum(jnp.sum(d**2, range(1, d.ndim)) for d in leaves)
    scale = 1.0 if rescale else (1 - p) ** 2
    # The masks are independent. The variance v_i = p / (1 - p) |d_i|^2 of d_i adds w_i (1 - w_i)
    # v_i to a weighted variance.
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
