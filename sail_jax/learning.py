"""Gradient descent on coefficients that determine the parameters of a network.

Learned merges, learned growth and proximal weights use `learn`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.checks import concrete, integer


class Learned(NamedTuple):
    """Learned coefficients and the resulting network.

    Attributes:
      params: The network, `merge(coefficients, None)`.
      coefficients: The learned coefficients.
      losses: The loss at each step, `[step]`, before its update.
    """

    params: PyTree
    coefficients: PyTree
    losses: Float[Array, "step"]


def learn(
    loss: Callable[[PyTree, PyTree], Float[Array, ""]],
    merge: Callable[[PyTree, Array | None], PyTree],
    coefficients: PyTree,
    batches: PyTree,
    *,
    steps: int,
    optimizer: optax.GradientTransformation | None = None,
    project: Callable[[PyTree], PyTree] | None = None,
    key: Array | None = None,
) -> Learned:
    """Minimises the loss of a network over coefficients that determine its parameters.

    Each step follows the gradient of loss(merge(coefficients, key), batch) with respect to the
    coefficients. All steps are one compiled loop. Arrays that `merge` closes over (such as task
    vectors) are in memory once, not once per step.

    Args:
      loss: `loss(params, batch)`, a scalar.
      merge: `merge(coefficients, key)` computes the params, differentiably. Step t gets the key
        fold_in(key, t). The merge after the last step gets None.
      coefficients: The initial coefficients, a pytree of numbers or arrays.
      batches: Leaves `[n, ...]`. Step t uses entry t mod n of each.
      steps: The number of steps, an integer >= 0.
      optimizer: Adam at 1e-3 by default.
      project: Applied to the coefficients after every step.
      key: A PRNG key. Without it, `merge` gets None in every step.

    Returns:
      The network after the last step, its coefficients and the losses.

    Raises:
      ValueError: For an invalid number of steps, batches without entries, and a loss that is not
        finite. The message contains the first such step. A traced loss is not checked.

    >>> merge = lambda c, key: {"w": c * jnp.array([1.0, 2.0])}
    >>> loss = lambda params, target: jnp.sum((params["w"] - target) ** 2)
    >>> got = learn(loss, merge, 0.0, jnp.array([[3.0, 6.0]]), steps=50, optimizer=optax.sgd(0.1))
    >>> f"{got.coefficients:.3f}", got.losses[0]
    ('3.000', Array(45., dtype=float32))
    """
    integer("steps", steps, 0)
    check_batches(batches)
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    coefficients = jax.tree.map(lambda c: jnp.asarray(c, jnp.result_type(c, float)), coefficients)
    batches = jax.tree.map(jnp.asarray, batches)

    def step(state: tuple[PyTree, Any], t: Array) -> tuple[tuple[PyTree, Any], Array]:
        coefficients, memory = state
        # Leaves may have different numbers of batches. Each restarts independently.
        batch = jax.tree.map(lambda x: x[t % x.shape[0]], batches)
        # Without a key, `merge` draws nothing, in the steps and at the end.
        step_key = None if key is None else jax.random.fold_in(key, t)
        objective = lambda c: loss(merge(c, step_key), batch)  # noqa: E731
        value, gradient = jax.value_and_grad(objective)(coefficients)
        updates, memory = optimizer.update(gradient, memory, coefficients)
        coefficients = optax.apply_updates(coefficients, updates)
        return (coefficients if project is None else project(coefficients), memory), value

    start = coefficients, optimizer.init(coefficients)
    (coefficients, _), losses = lax.scan(step, start, jnp.arange(steps))
    value = concrete(losses)
    if value is not None and not np.isfinite(value).all():
        # `argmin` finds the first False.
        t = int(np.argmin(np.isfinite(value)))
        raise ValueError(f"loss: expected finite values, got {value[t]} in step {t} of {steps}")
    return Learned(merge(coefficients, None), coefficients, losses)


def check_batches(batches: PyTree) -> None:
    """Checks that batches have leaves, each with a nonempty leading axis.

    Args:
      batches: A pytree of arrays `[n, ...]`.

    Raises:
      ValueError: If the batches are empty or a leading axis is.
    """
    shapes = [np.shape(x) for x in jax.tree.leaves(batches)]
    if not shapes or any(shape[:1] in ((), (0,)) for shape in shapes):
        raise ValueError(f"batches: expected leaves [n, ...] with n >= 1, got shapes {shapes}")
