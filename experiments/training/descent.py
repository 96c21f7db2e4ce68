"""Gradient descent within one program for small networks; `vmap` trains many of them at once.

`loop` is for long trainings, which require checkpoints.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

Loss = Callable[[PyTree, PyTree, Any], tuple[Array, PyTree]]
"""A loss: `(params, mutable, batch) -> (loss, mutable)`, without the key and metrics of `step`."""


class Descended(NamedTuple):
    """The result of a training.

    Attributes:
      params: The parameters.
      mutable: The values carried from step to step without being learned, such as running
        statistics.
      memory: The state of the optimiser.
      measured: The measurements: leaves `(1 + steps / every, ...)`, before the first step and after
        every `every` steps; None without measurements.
    """

    params: PyTree
    mutable: PyTree
    memory: PyTree
    measured: PyTree


def descend(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    rate: Callable[[Array], Any],
    params: PyTree,
    feed: PyTree,
    draw: Callable[[Any], Any],
    *,
    mutable: PyTree = None,
    memory: PyTree = None,
    measure: Callable[[PyTree, PyTree, Any], PyTree] | None = None,
    every: int | None = None,
) -> Descended:
    """Minimises a loss by gradient descent, with one step for each entry of `feed`.

    Args:
      loss: The loss: `(params, mutable, batch) -> (loss, mutable)`.
      optimizer: Turns gradients into the direction of a step, such as `optax.scale_by_adam()`.
      rate: The learning rate of a step, by the number of steps taken before it.
      params: The parameters before the first step.
      feed: The data that distinguish the steps: a pytree with leaves `(steps, ...)`, such as keys
        or indices of examples.
      draw: Makes the batch of a step from its entry of `feed`.
      mutable: The values that the loss carries from step to step.
      memory: The state of the optimiser to continue from; None for a new state.
      measure: Computes the measurements from parameters, `mutable` and the number of steps taken.
      every: The number of steps between two measurements, a divisor of the number of steps. Both
        this and `measure` must be given for measurements.

    Returns:
      The parameters after the last step, the carried values, and the measurements.

    >>> square = lambda params, mutable, batch: (jnp.sum(params**2), mutable)
    >>> end = descend(square, optax.identity(), lambda t: 0.25, jnp.array(8.0), jnp.arange(2),
    ...               lambda entry: None, measure=lambda params, mutable, t: params, every=1)
    >>> float(end.params), end.measured.tolist()
    (2.0, [8.0, 4.0, 2.0])
    """

    def step(state: PyTree, told: PyTree) -> tuple[PyTree, None]:
        """Takes one step along the gradient of the step's own batch."""
        params, mutable, memory = state
        t, told = told
        gradient, mutable = jax.grad(loss, has_aux=True)(params, mutable, draw(told))
        update, memory = optimizer.update(gradient, memory, params)
        params = jax.tree.map(lambda p, u: p - rate(t) * u, params, update)
        return (params, mutable, memory), None

    memory = optimizer.init(params) if memory is None else memory
    steps = len(jax.tree.leaves(feed)[0])
    told, state = (jnp.arange(steps), feed), (params, mutable, memory)
    if measure is None or every is None:
        (params, mutable, memory), _ = jax.lax.scan(step, state, told)
        return Descended(params, mutable, memory, None)

    def chunk(state: PyTree, told: PyTree) -> tuple[PyTree, PyTree]:
        """Takes the steps between two measurements, then measures."""
        state, _ = jax.lax.scan(step, state, told)
        return state, measure(state[0], state[1], told[0][-1] + 1)

    first = measure(params, mutable, 0)
    # [steps, ...] -> [measurements, every, ...]: two nested scans. The outer scan measures.
    chunks = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), told)
    (params, mutable, memory), later = jax.lax.scan(chunk, state, chunks)
    measured = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    return Descended(params, mutable, memory, measured)
