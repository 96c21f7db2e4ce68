"""Two-layer linear networks, trained by gradient descent on sampled or population losses.

The closed forms of this package are compared with these simulators, which use no closed form:
gradients are computed by `jax.grad`. The conventions are in `layers`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from theory import problems
from theory.two_layer.layers import Layers, check_shapes, loss, theta


@problems.defined
def objective(layers: Layers, target: Array, anchor: ArrayLike, anchored_to: Array) -> Array:
    """Computes the objective |theta - A|^2 + anchor |theta - theta_0|^2.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      anchor: Strength of the anchor.
      anchored_to: Anchored map theta_0 `(o, i)`.

    Returns:
      The objective, a scalar.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eq. (9).
    """
    return loss(layers, target) + anchor * loss(layers, anchored_to)


@problems.defined
def batch_objective(
    layers: Layers, x: Float[Array, "m i"], target: Array, anchor: ArrayLike, anchored_to: Array
) -> Array:
    """Computes the objective on a batch, with the mean of |theta x - A x|^2 as the loss.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      x: Batch of inputs `(m, i)`.
      target: Target map A `(o, i)`.
      anchor: Strength of the anchor.
      anchored_to: Anchored map theta_0 `(o, i)`.

    Returns:
      The objective, a scalar.
    """
    error = x @ (theta(layers) - target).T
    return jnp.mean(jnp.sum(error**2, axis=1)) + anchor * loss(layers, anchored_to)


@problems.defined
def stable_rate(start: Layers, target: Array, anchor: ArrayLike = 0.0) -> Array:
    """Computes a learning rate below which gradient descent from a balanced start is stable.

    It is 1 / (2 (1 + anchor) s), where s is the larger of |A|_op and (|W_1|_op^2 + |W_2|_op^2)/2.
    The largest eigenvalue of the Hessian at the end of training is 4 (1 + anchor) s. The edge of
    stability is 2 divided by it.

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      anchor: Strength of the anchor.

    Returns:
      The rate, a scalar.
    """
    w1, w2, a = (linalg.spectral_norm(m) for m in (start.w1, start.w2, jnp.asarray(target)))
    return 1 / (2 * (1 + jnp.asarray(anchor)) * jnp.maximum(a, (w1**2 + w2**2) / 2))


@problems.defined
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
    """Trains both layers by gradient descent on the population loss with an anchor.

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      rate: Learning rate, below `stable_rate` if there is more than one step.
      steps: Number of steps.
      anchor: Strength of the anchor.
      anchored_to: Anchored map `(o, i)`. None is theta(start).
      every: The number of steps between networks of a path. None returns only the end.

    Returns:
      The trained weights; with `every`, the path with a leading axis `steps // every`.

    Raises:
      ValueError: If there is more than one step and the rate is not in (0, `stable_rate`), or
        shapes do not conform.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eqs. (16), (17).
    """
    if steps > 1:
        _check_rate(start, target, rate, anchor)
    return _descend(start, target, rate, steps, anchor, anchored_to, every)


def _check_rate(start: Layers, target: Array, rate: ArrayLike, anchor: ArrayLike) -> None:
    check_shapes(start, target)
    # Traced values cannot be compared.
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

    # Only one network of every interval is stored.
    def leg(layers: Layers, _) -> tuple[Layers, Layers]:
        layers, _ = jax.lax.scan(step, layers, length=every)
        return layers, layers

    return jax.lax.scan(leg, start, length=steps // every)[1]


@problems.defined
@partial(jax.jit, static_argnames=("steps",))
def gradient_flow(
    start: Layers,
    target: Array,
    times: Float[Array, " times"],
    steps: int,
    *,
    anchor: ArrayLike = 0.0,
) -> Layers:
    """Integrates gradient flow by the classical Runge-Kutta scheme of fourth order.

    Any start is allowed, balanced or not. Errors are of order (curvature x step)^4.

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      times: Ascending times `(times,)`, >= 0.
      steps: Number of steps between neighbouring times.
      anchor: Strength of the anchor |theta - theta(start)|^2.

    Returns:
      The weights with a leading axis `times`.
    """
    centre = theta(start)
    gradient = jax.grad(objective)
    return _integrate(lambda w: gradient(w, target, anchor, centre), start, times, steps)


def _integrate(
    gradient: Callable[[Layers], Layers], start: Layers, times: Array, steps: int
) -> Layers:
    """Follows minus a gradient by the classical Runge-Kutta scheme, from time to time."""

    def speed(layers: Layers) -> Layers:
        return jax.tree.map(jnp.negative, gradient(layers))

    def move(layers: Layers, h: Array, direction: Layers) -> Layers:
        return jax.tree.map(lambda w, v: w + h * v, layers, direction)

    def advance(layers: Layers, increment: Array) -> tuple[Layers, Layers]:
        h = increment / steps

        def step(layers: Layers, _) -> tuple[Layers, None]:
            # Classical Runge-Kutta has slopes at the start, twice in the middle and at the end of
            # the step.
            a = speed(layers)
            b = speed(move(layers, h / 2, a))
            c = speed(move(layers, h / 2, b))
            d = speed(move(layers, h, c))
            total = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, a, b, c, d)
            return move(layers, h, total), None

        layers, _ = jax.lax.scan(step, layers, length=steps)
        return layers, layers

    return jax.lax.scan(advance, start, jnp.diff(times, prepend=0.0))[1]


@problems.defined
def sgd(
    start: Layers,
    target: Array,
    batches: Float[Array, "steps m i"],
    rate: ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
) -> Layers:
    """Trains both layers by stochastic gradient descent over given batches.

    The anchor is theta(start).

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      batches: Inputs `(steps, m, i)`, one batch for each step.
      rate: Learning rate, below `stable_rate`. Small batches need a smaller one.
      anchor: Strength of the anchor.

    Returns:
      The trained weights.

    Raises:
      ValueError: If the rate is not in (0, `stable_rate`), or shapes do not conform.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eqs. (10), (11).
    """
    _check_rate(start, target, rate, anchor)
    return _sgd(start, target, batches, rate, anchor)


@jax.jit
def _sgd(
    start: Layers, target: Array, batches: Array, rate: ArrayLike, anchor: ArrayLike
) -> Layers:
    centre = theta(start)
    return _over(lambda w, x: batch_objective(w, x, target, anchor, centre), start, batches, rate)


def _over(
    error: Callable[[Layers, Array], Array], start: Layers, batches: Array, rate: ArrayLike
) -> Layers:
    """Descends an error by one step on each batch."""

    def step(layers: Layers, x: Array) -> tuple[Layers, None]:
        g = jax.grad(error)(layers, x)
        return jax.tree.map(lambda w, g: w - rate * g, layers, g), None

    return jax.lax.scan(step, start, batches)[0]


@problems.defined
@jax.jit
def perturbed_losses(
    layers: Layers, target: Array, gamma: ArrayLike, noise: Layers
) -> Float[Array, " draws"]:
    """Computes the loss of one network under several draws of weight noise.

        |(W_1 + gamma Z_1)(W_2 + gamma Z_2) - A|^2

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      gamma: Standard deviation of the noise.
      noise: Standard normal Z_1 `(draws, o, h)` and Z_2 `(draws, h, i)`.

    Returns:
      The losses `(draws,)`.
    """
    return loss(jax.tree.map(lambda w, z: w + gamma * z, layers, noise), target)


@problems.defined
@jax.jit
def hessian(layers: Layers, target: Array) -> Float[Array, "p p"]:
    """Computes the Hessian of |W_1 W_2 - A|^2 by autodiff.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.

    Returns:
      The Hessian `(p, p)`, p = o h + h i, entries of W_1 first, both in row-major order.
    """
    flat, unravel = ravel_pytree(layers)
    return jax.hessian(lambda flat: loss(unravel(flat), target))(flat)


@problems.defined
def adapted(frozen: Layers, adapter: Layers, scale: ArrayLike = 1.0) -> Layers:
    """Returns a network with a low-rank adapter on W_1, the layers W_1 + s B A and W_2.

    With W_2 = I it is an adapter on the map W_1.

    Args:
      frozen: The pre-trained weights W_1 `(o, h)` and W_2 `(h, i)`.
      adapter: B `(o, r)` and A `(r, h)`.
      scale: The scale s.

    Returns:
      The network.
    """
    return Layers(frozen.w1 + scale * adapter.w1 @ adapter.w2, frozen.w2)


@problems.defined
@partial(jax.jit, static_argnames=("steps",))
def adapter_flow(
    frozen: Layers,
    start: Layers,
    target: Array,
    times: Float[Array, " times"],
    steps: int,
    *,
    scale: ArrayLike = 1.0,
) -> Layers:
    """Integrates gradient flow of an adapter, like `gradient_flow` for whole networks.

    Args:
      frozen: The pre-trained weights W_1 `(o, h)` and W_2 `(h, i)`, which are not trained.
      start: B `(o, r)` and A `(r, h)` at the start, balanced or not.
      target: Target map A_ft `(o, i)`.
      times: Ascending times `(times,)`, >= 0.
      steps: Number of steps between neighbouring times.
      scale: The scale s.

    Returns:
      B and A with a leading axis `times`.
    """
    gradient = jax.grad(lambda adapter: loss(adapted(frozen, adapter, scale), target))
    return _integrate(gradient, start, times, steps)


@problems.defined
@partial(jax.jit, static_argnames=("steps",))
def layers_flow(
    frozen: Sequence[Array],
    starts: Sequence[Layers],
    target: Array,
    times: Float[Array, " times"],
    steps: int,
    *,
    scale: ArrayLike = 1.0,
) -> list[Layers]:
    """Integrates gradient flow of adapters on every layer of a linear network of any depth.

    Args:
      frozen: The pre-trained weights, the last layer first, which are not trained.
      starts: B and A at the start for each layer, balanced or not.
      target: Target map A_ft `(o, i)`.
      times: Ascending times `(times,)`, >= 0.
      steps: Number of steps between neighbouring times.
      scale: The scale s.

    Returns:
      The layers' B and A with a leading axis `times`.
    """

    def error(adapters: list[Layers]) -> Array:
        whole = [w + scale * theta(of) for w, of in zip(frozen, adapters, strict=True)]
        return jnp.sum((reduce(jnp.matmul, whole) - target) ** 2)

    # Every pytree of weights is integrated alike.
    return cast("Any", _integrate)(jax.grad(error), list(starts), times, steps)


@problems.defined
@jax.jit
def adapter_sgd(
    frozen: Layers,
    start: Layers,
    target: Array,
    batches: Float[Array, "steps m i"],
    rate: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
) -> Layers:
    """Trains an adapter by stochastic gradient descent over given batches.

    Args:
      frozen: The pre-trained weights W_1 `(o, h)` and W_2 `(h, i)`, which stay.
      start: B `(o, r)` and A `(r, h)` at the start.
      target: Target map A_ft `(o, i)`.
      batches: Inputs `(steps, m, i)`, one batch for each step.
      rate: Learning rate.
      scale: The scale s.

    Returns:
      B and A at the end.
    """

    def error(adapter: Layers, x: Array) -> Array:
        network = adapted(frozen, adapter, scale)
        return batch_objective(network, x, target, 0.0, target)

    return _over(error, start, batches, rate)
