"""The real thing: deep linear networks f(x) = x W_1 W_2 ... W_L trained by gradient descent.

Nothing here knows a closed form. W_1 ... W_{L-1} are [d, d], W_L is [d] (features-are-fate eq. 9),
or [d, m] for m outputs, whose squared errors add up.
Losses and units: `theory.problems`. Gradient descent at a small rate stands for gradient flow.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems

Weights = tuple[Array, ...]


class Trained(NamedTuple):
    """Weights after descent and the largest gradient entry left (how far from stationary)."""

    weights: Weights
    gradient: Array


def small_weights(
    key: Array, d: int, depth: int, alpha: ArrayLike, outputs: int | None = None
) -> Weights:
    """alpha times an initialisation that satisfies the paper's eq. (22): W_l = alpha
    sqrt(depth - l + 1) orthogonal for l < depth, W_depth = alpha unit vector, or `outputs`
    orthonormal ones."""
    if d < 1 or depth < 1:
        raise ValueError(f"need d >= 1 and depth >= 1; got d={d}, depth={depth}")
    if outputs is not None and not 1 <= outputs <= d:
        raise ValueError(f"outputs must be from 1 to d = {d}; got {outputs}")
    problems.check("alpha", alpha, lambda a: a > 0, "a positive scale")
    *keys, last = jax.random.split(key, depth)
    square = tuple(
        jnp.asarray(alpha) * jnp.sqrt(depth - l) * jax.random.orthogonal(k, d)
        for l, k in enumerate(keys)
    )
    basis = jnp.linalg.qr(jax.random.normal(last, (d, outputs or 1)))[0]
    return (*square, jnp.asarray(alpha) * (basis if outputs else basis[:, 0]))


def predictor(weights: Weights) -> Float[Array, "d *m"]:
    """beta = W_1 ... W_L, multiplied from the right: no product of two square matrices."""
    *square, beta = weights
    for w in reversed(square):
        beta = w @ beta
    return beta


def pretrain(weights: Weights, beta_s: Array, rate: ArrayLike, steps: int) -> Trained:
    """Descent on the population loss |beta - beta_s|^2 / 2 of the source task."""
    return _descend(_population_loss, weights, (), rate, steps, beta_s)


def fine_tune(weights: Weights, x: Array, y: Array, rate: ArrayLike, steps: int) -> Trained:
    """Descent of all layers on |y - X beta|^2 / (2n); scratch training if the weights are small and
    random."""
    return _descend(_training_loss, weights, (), rate, steps, x, y)


def linear_transfer(weights: Weights, x: Array, y: Array, rate: ArrayLike, steps: int) -> Trained:
    """Descent of the last layer alone on |y - X beta|^2 / (2n)."""
    *frozen, last = weights
    trained = _descend(_training_loss, (last,), tuple(frozen), rate, steps, x, y)
    return Trained((*frozen, *trained.weights), trained.gradient)


def _population_loss(weights: Weights, beta_s: Array) -> Array:
    return 0.5 * jnp.sum((predictor(weights) - beta_s) ** 2)


def _training_loss(weights: Weights, x: Array, y: Array) -> Array:
    return 0.5 * jnp.sum((y - x @ predictor(weights)) ** 2) / x.shape[0]


@partial(jax.jit, static_argnames="loss")
def _descend(
    loss: Callable[..., Array],
    weights: Weights,
    frozen: Weights,
    rate: ArrayLike,
    steps: ArrayLike,
    *data: Array,
) -> Trained:
    gradient = jax.grad(lambda weights: loss((*frozen, *weights), *data))

    def step(_, weights: Weights) -> Weights:
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradient(weights))

    weights = jax.lax.fori_loop(0, steps, step, weights)
    return Trained(weights, jnp.max(jnp.stack([jnp.abs(g).max() for g in gradient(weights)])))
