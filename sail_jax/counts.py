"""Counts: what the votes add up to. The task axis disappears here and nowhere else."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.task_vectors import TaskVectors, tally

__all__ = ["average", "total"]


def total(vectors: TaskVectors) -> PyTree:
    """sum_k w_k delta_k.

    >>> votes = TaskVectors({"a": jnp.array([[3.0, 1.0], [1.0, 1.0]])}, {"a": jnp.ones((2, 1))})
    >>> total(votes)["a"].tolist()
    [4.0, 2.0]
    """
    return jax.tree.map(lambda delta, weight: tally(weight * delta), *vectors)


def average(vectors: TaskVectors) -> PyTree:
    """sum_k w_k delta_k / sum_k w_k over those who vote; 0 where nobody does.

    Weights of both signs may cancel: where |sum w| is within rounding (10 eps) of 0 relative to
    sum |w| there is no average, and the entry is 0 as well. Short of that they amplify.
    """

    def mean(delta: Array, weight: Array) -> Array:
        mass, size = tally(weight), tally(jnp.abs(weight))
        exists = jnp.abs(mass) > 10 * jnp.finfo(mass.dtype).eps * size
        # the inner where keeps the gradient finite at entries that the outer one discards
        return jnp.where(exists, tally(weight * delta) / jnp.where(exists, mass, 1), 0)

    return jax.tree.map(mean, *vectors)
