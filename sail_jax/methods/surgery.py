"""Representation surgery: undo, per task, what merging did to the features."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.learning import Learned, check_batches, learn

__all__ = ["Surgery", "representation_surgery"]


class Surgery(NamedTuple):
    """f' = f - ReLU(f down) up on features f [..., feature].

    >>> Surgery(jnp.ones((2, 1)), jnp.array([[1.0, 0.0]]))(jnp.array([3.0, 1.0])).tolist()
    [-1.0, 1.0]
    """

    down: Float[Array, "feature rank"]
    up: Float[Array, "rank feature"]

    def __call__(self, features: Float[Array, "... feature"]) -> Float[Array, "... feature"]:
        return features - jax.nn.relu(features @ self.down) @ self.up


def representation_surgery(
    features: Callable[[PyTree, PyTree], Float[Array, "batch feature"]],
    merged: PyTree,
    model: PyTree,
    batches: PyTree,
    *,
    key: Array,
    rank: int = 16,
    steps: int = 1000,
    optimizer: optax.GradientTransformation | None = None,
) -> Learned:
    """The `Surgery` of one task (Yang et al. 2024): merged features, put back to its own.

    Minimises the mean |f'(merged) - f(model)| over unlabelled inputs of the task; features(params,
    inputs) are usually those in front of the head, computed once per batch. down starts He-uniform
    from `key` and up at 0, so that surgery starts as the identity. batches: leaves [n, batch, ...];
    step t takes batch t mod n. optimizer: Adam at 1e-3 by default.

    params and coefficients of what is returned are the `Surgery`, to be put between the features of
    the merged model and the head of this task.
    """
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    check_batches(batches)

    def pair(inputs: PyTree) -> tuple[Array, Array]:
        sides = tuple(features(params, inputs) for params in (merged, model))
        if sides[0].shape != sides[1].shape:
            raise ValueError(
                f"features: expected those of the model, {sides[1].shape}, to have the shape of "
                f"those of the merged model, {sides[0].shape}"
            )
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), sides)

    pairs = lax.map(pair, batches)
    width, dtype = pairs[0].shape[-1], pairs[0].dtype
    start = Surgery(
        jax.nn.initializers.he_uniform()(key, (width, rank), dtype), jnp.zeros((rank, width), dtype)
    )

    def loss(surgery: Surgery, pair: tuple[Array, Array]) -> Float[Array, ""]:
        return jnp.abs(surgery(pair[0]) - pair[1]).mean()

    return learn(loss, lambda s, key: s, start, pairs, steps=steps, optimizer=optimizer)
