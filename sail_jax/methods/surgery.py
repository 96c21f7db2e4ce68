"""Representation surgery, a small map per task that undoes the effect of merging on features."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.learning import Learned, check_batches, learn
from sail_jax.merging.task_vectors import in_float64


class Surgery(NamedTuple):
    """The map f' = f - ReLU(f down) up on features f `[..., feature]`, a callable pytree.

    Attributes:
      down: Shape `[feature, rank]`.
      up: Shape `[rank, feature]`. It starts at 0, which makes the map the identity.

    >>> Surgery(jnp.ones((2, 1)), jnp.array([[1.0, 0.0]]))(jnp.array([3.0, 1.0])).tolist()
    [-1.0, 1.0]
    """

    down: Float[Array, "feature rank"]
    up: Float[Array, "rank feature"]

    def __call__(self, features: Float[Array, "... feature"]) -> Float[Array, "... feature"]:
        return features - jax.nn.relu(features @ self.down) @ self.up


@in_float64("merged", "model")
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
    """Learns a map from the merged model's features back to the features of one task's own model.

    The map f' = f - ReLU(f down) up (`Surgery`) minimises the mean of :math:`|f'(x) - g(x)|` over
    unlabelled inputs x of the task. f are the features of the merged model and g the features of
    the task's model. The map is inserted between the features of the merged model and the head of
    this task.

    Args:
      features: `features(params, inputs)` returns features `[batch, feature]`, usually the inputs
        of the head. They are computed once for each batch.
      merged: The merged model.
      model: The model of the task.
      batches: Inputs with leaves `[n, batch, ...]`. Step t uses batch t mod n.
      key: A PRNG key for the initialisation of `down` (He-uniform). `up` starts at 0, so the map
        starts as the identity.
      rank: The inner width of the map, at least 1. The authors use 16.
      steps: The number of steps of gradient descent.
      optimizer: Adam at 1e-3 by default.

    Returns:
      The `Surgery`, both as `params` and as `coefficients`, and the losses.

    Raises:
      ValueError: For a rank below 1, batches without entries, features of the two models that
        differ in shape, or a loss that is not finite.

    References:
      Yang et al., Representation Surgery for Multi-Task Model Merging, 2024 (arXiv 2402.02705).

    >>> features = lambda params, x: x @ params["w"]
    >>> merged, own = {"w": jnp.eye(2)}, {"w": jnp.diag(jnp.array([0.5, 1.0]))}
    >>> x, key = jnp.ones((1, 4, 2)), jax.random.key(0)
    >>> got = representation_surgery(features, merged, own, x, key=key, steps=100)
    >>> bool(got.losses[-1] < got.losses[0]), got.params.down.shape
    (True, (2, 16))
    """
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    check_batches(batches)

    def pair(inputs: PyTree) -> tuple[Array, Array]:
        sides = tuple(features(params, inputs) for params in (merged, model))
        if sides[0].shape != sides[1].shape:
            raise ValueError(
                f"features: expected one shape, got {sides[1].shape} for the task's model and "
                f"{sides[0].shape} for the merged model"
            )
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), sides)

    # Features do not depend on the learned map, so they are computed once instead of in each step.
    pairs = lax.map(pair, batches)
    width, dtype = pairs[0].shape[-1], pairs[0].dtype
    start = Surgery(
        # The map starts as the identity, because `up` is 0.
        jax.nn.initializers.he_uniform()(key, (width, rank), dtype),
        jnp.zeros((rank, width), dtype),
    )

    def loss(surgery: Surgery, pair: tuple[Array, Array]) -> Float[Array, ""]:
        return jnp.abs(surgery(pair[0]) - pair[1]).mean()

    return learn(loss, lambda s, key: s, start, pairs, steps=steps, optimizer=optimizer)
