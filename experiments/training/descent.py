"""Small networks, trained whole within one program: under `vmap` many seeds and tasks at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

Loss = Callable[[PyTree, PyTree, Any], tuple[Array, PyTree]]
"""`(params, mutable, batch) -> (loss, mutable)`, as of `Fit`, without metrics."""


class Descended(NamedTuple):
    """What a training ends with."""

    params: PyTree
    mutable: PyTree
    """What is carried unlearned, such as running statistics."""
    memory: PyTree
    """The optimiser's."""
    measured: PyTree
    """Before the first and after every `every` steps; None where nothing is."""


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
    """Gradient descent along `feed`, a step for each entry of its leading axis.

    Args:
      loss: What is minimised.
      optimizer: The direction of a step, such as `optax.scale_by_adam()`.
      rate: The learning rate by the number of steps taken.
      params: Parameters before the first step.
      feed: What each step is told, leaves `[step, ...]`: a key, or which examples to take.
      draw: The batch of a step, by what it is told.
      mutable: What the loss carries from step to step.
      memory: The optimiser's, if it does not begin anew.
      measure: Looks at parameters, mutable and the number of steps taken.
      every: Steps between two looks, a divisor of their number.
    """

    def step(state: Any, told: Any) -> tuple[Any, None]:
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

    def chunk(state: Any, told: Any) -> tuple[Any, PyTree]:
        state, _ = jax.lax.scan(step, state, told)
        return state, measure(state[0], state[1], told[0][-1] + 1)

    first = measure(params, mutable, 0)
    chunks = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), told)
    (params, mutable, memory), later = jax.lax.scan(chunk, state, chunks)
    measured = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    return Descended(params, mutable, memory, measured)
