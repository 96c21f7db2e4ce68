"""The real thing: two-layer linear networks trained on sampled or population losses by autodiff.

Nothing here knows a closed form; gradients come from `jax.grad` of the loss. Conventions: `layers`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory import problems
from theory.two_layer.layers import Layers, check_shapes, loss, theta


def objective(layers: Layers, target: Array, anchor: ArrayLike, anchored_to: Array) -> Array:
    """|theta - A|^2 + anchor |theta - theta_0|^2 (overtrained eq. 9)."""
    return loss(layers, target) + anchor * loss(layers, anchored_to)


def batch_objective(
    layers: Layers, x: Float[Array, "m i"], target: Array, anchor: ArrayLike, anchored_to: Array
) -> Array:
    """The same with the mean of |theta x - A x|^2 over a batch."""
    error = x @ (theta(layers) - target).T
    return jnp.mean(jnp.sum(error**2, axis=1)) + anchor * loss(layers, anchored_to)


def stable_rate(start: Layers, target: Array, anchor: ArrayLike = 0.0) -> Array:
    """Below this rate gradient descent from a balanced start does not blow up:
    1 / (2 (1 + anchor) s), s the larger of |A|_op and (|W_1|_op^2 + |W_2|_op^2)/2. At the end the
    largest eigenvalue of the Hessian is 4 (1 + anchor) s, and 2 over it the edge of stability."""
    w1, w2, a = (jnp.linalg.norm(m, 2) for m in (start.w1, start.w2, jnp.asarray(target)))
    return 1 / (2 * (1 + jnp.asarray(anchor)) * jnp.maximum(a, (w1**2 + w2**2) / 2))


def descend(
    start: Layers,
    target: Array,
    rate: ArrayLike,
    steps: int,
    *,
    anchor: ArrayLike = 0.0,
    anchored_to: Array | None = None,
    every: int | None = None,
) -> Layers:
    """`steps` steps of gradient descent on the population loss (overtrained eqs. 16, 17), anchored
    to theta(start) unless told. With `every`, the path after each `every` steps.

    Raises ValueError from `stable_rate` on, unless it is a single step."""
    if steps > 1:
        _check_rate(start, target, rate, anchor)
    return _descend(start, target, rate, steps, anchor, anchored_to, every)


def _check_rate(start: Layers, target: Array, rate: ArrayLike, anchor: ArrayLike) -> None:
    check_shapes(start, target)
    bound = concrete(stable_rate(start, target, anchor))
    if bound is not None:
        words = f"positive and below 1 / (2 (1 + anchor) sigma_1) = {bound:g} to be stable"
        problems.check("rate", rate, lambda r: (r > 0) & (r < bound), words)


@partial(jax.jit, static_argnames=("steps", "every"))
def _descend(
    start: Layers,
    target: Array,
    rate: ArrayLike,
    steps: int,
    anchor: ArrayLike,
    anchored_to: Array | None,
    every: int | None,
) -> Layers:
    centre = theta(start) if anchored_to is None else anchored_to
    gradient = jax.grad(objective)

    def step(layers: Layers, _) -> tuple[Layers, None]:
        g = gradient(layers, target, anchor, centre)
        return jax.tree.map(lambda w, g: w - rate * g, layers, g), None

    if every is None:
        return jax.lax.scan(step, start, length=steps)[0]

    def leg(layers: Layers, _) -> tuple[Layers, Layers]:
        layers, _ = jax.lax.scan(step, layers, length=every)
        return layers, layers

    return jax.lax.scan(leg, start, length=steps // every)[1]


@partial(jax.jit, static_argnames=("steps",))
def gradient_flow(
    start: Layers,
    target: Array,
    times: Float[Array, " times"],
    steps: int,
    *,
    anchor: ArrayLike = 0.0,
) -> Layers:
    """Gradient flow by the classical Runge-Kutta scheme, `steps` steps between ascending times: any
    start, balanced or not; errors of order (curvature x step)^4."""
    centre = theta(start)
    gradient = jax.grad(objective)

    def speed(layers: Layers) -> Layers:
        return jax.tree.map(jnp.negative, gradient(layers, target, anchor, centre))

    def move(layers: Layers, h: Array, direction: Layers) -> Layers:
        return jax.tree.map(lambda w, v: w + h * v, layers, direction)

    def advance(layers: Layers, increment: Array) -> tuple[Layers, Layers]:
        h = increment / steps

        def step(layers: Layers, _) -> tuple[Layers, None]:
            a = speed(layers)
            b = speed(move(layers, h / 2, a))
            c = speed(move(layers, h / 2, b))
            d = speed(move(layers, h, c))
            total = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, a, b, c, d)
            return move(layers, h, total), None

        layers, _ = jax.lax.scan(step, layers, length=steps)
        return layers, layers

    return jax.lax.scan(advance, start, jnp.diff(times, prepend=0.0))[1]


def sgd(
    start: Layers,
    target: Array,
    batches: Float[Array, "steps m i"],
    rate: ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
) -> Layers:
    """Stochastic gradient descent over the given batches of inputs x (overtrained eqs. 10, 11),
    anchored to theta(start). Raises ValueError from `stable_rate` on; small batches need less."""
    _check_rate(start, target, rate, anchor)
    return _sgd(start, target, batches, rate, anchor)


@jax.jit
def _sgd(
    start: Layers, target: Array, batches: Array, rate: ArrayLike, anchor: ArrayLike
) -> Layers:
    centre = theta(start)

    def step(layers: Layers, x: Array) -> tuple[Layers, None]:
        g = jax.grad(batch_objective)(layers, x, target, anchor, centre)
        return jax.tree.map(lambda w, g: w - rate * g, layers, g), None

    return jax.lax.scan(step, start, batches)[0]


@jax.jit
def perturbed_losses(
    layers: Layers, target: Array, gamma: ArrayLike, noise: Layers
) -> Float[Array, " draws"]:
    """|(W_1 + gamma Z_1)(W_2 + gamma Z_2) - A|^2 for noise Z_1 [draws o h], Z_2 [draws h i]."""
    return loss(jax.tree.map(lambda w, z: w + gamma * z, layers, noise), target)


@jax.jit
def hessian(layers: Layers, target: Array) -> Float[Array, "p p"]:
    """The Hessian of |W_1 W_2 - A|^2 by autodiff, entries of W_1 first, both in row order."""
    flat, unravel = ravel_pytree(layers)
    return jax.hessian(lambda flat: loss(unravel(flat), target))(flat)
