"""Parameters learned by descent through a function that makes a network of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.checks import concrete

__all__ = ["Learned", "check_batches", "learn"]


class Learned(NamedTuple):
    """params: the merged model; coefficients: how it was merged; losses: [step], before each."""

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
    """Minimise loss(merge(coefficients), batch) over `coefficients` by `steps` of `optimizer`.

    merge(coefficients, key): any method here, or anything else that can be differentiated; step t
    gets fold_in(key, t), and the final merge None. batches: leaves [n, ...]; step t sees entry
    t mod n of each. project: applied after every step. optimizer: Adam at 1e-3 by default.

    One compiled loop; what `merge` closes over (task vectors, say) is held once, not per step.
    ValueError for a loss that is not finite, with the step at which it first was.

    >>> merge = lambda c, key: {"w": c * jnp.array([1.0, 2.0])}
    >>> loss = lambda params, target: jnp.sum((params["w"] - target) ** 2)
    >>> got = learn(loss, merge, 0.0, jnp.array([[3.0, 6.0]]), steps=50, optimizer=optax.sgd(0.1))
    >>> f"{got.coefficients:.3f}", got.losses[0]
    ('3.000', Array(45., dtype=float32))
    """
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps: expected an integer >= 0, got {steps!r}")
    check_batches(batches)
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    coefficients = jax.tree.map(lambda c: jnp.asarray(c, jnp.result_type(c, float)), coefficients)
    batches = jax.tree.map(jnp.asarray, batches)

    def step(state: tuple[PyTree, Any], t: Array) -> tuple[tuple[PyTree, Any], Array]:
        coefficients, memory = state
        batch = jax.tree.map(lambda x: x[t % x.shape[0]], batches)
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
        t = int(np.argmin(np.isfinite(value)))
        raise ValueError(f"loss: expected finite values, got {value[t]} in step {t} of {steps}")
    return Learned(merge(coefficients, None), coefficients, losses)


def check_batches(batches: PyTree) -> None:
    """ValueError unless `batches` has leaves, all with a leading axis that is not empty."""
    shapes = [np.shape(x) for x in jax.tree.leaves(batches)]
    if not shapes or any(shape[:1] in ((), (0,)) for shape in shapes):
        raise ValueError(f"batches: expected leaves [n, ...] with n >= 1, got shapes {shapes}")
