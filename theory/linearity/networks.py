"""The real thing: small networks, trained, merged and measured; derivatives by autodiff.

A network is a tuple of matrices W_1 [h_1 i], ..., W_L [o h_{L-1}] in the order in which they are
applied, with an activation between them; a constant input serves as bias. Nothing here knows a
closed form. Conventions: `identities`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.linearity.identities import Weights, check_weights, mean

Model = Callable[..., Array]  # f(theta, *args) -> output
Activation = Callable[[Array], Array]


def network(
    layers: Sequence[Float[Array, "out in"]],
    x: Float[Array, "n i"],
    activation: Activation | None = None,
) -> Float[Array, "n o"]:
    """The outputs of a network, linear unless there is an activation."""
    return features(layers, x, activation)[-1]


def features(
    layers: Sequence[Float[Array, "out in"]],
    x: Float[Array, "n i"],
    activation: Activation | None = None,
) -> list[Float[Array, "n h"]]:
    """f^(1), ..., f^(L): after the activation, but the last layer has none."""
    per_layer = []
    for n, w in enumerate(layers, 1):
        x = x @ w.T
        if activation is not None and n < len(layers):
            x = activation(x)
        per_layer.append(x)
    return per_layer


def init(key: Array, sizes: Sequence[int]) -> tuple[Float[Array, "out in"], ...]:
    """Layers [sizes[l + 1] sizes[l]] of independent N(0, 1 / sizes[l])."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[1:], sizes[:-1], strict=True)
    return tuple(jax.random.normal(k, (o, i)) / i**0.5 for k, o, i in shapes)


def gap(f: Callable[..., Any], thetas: Any, weights: Weights, *args: Any) -> Any:
    """f(sum_i a_i theta_i) - sum_i a_i f(theta_i), measured; f(theta, *args) gives an array, or a
    pytree of arrays such as the features of all layers.

    >>> x = jnp.ones((1, 1))
    >>> layers = (jnp.array([1.0, 3.0]).reshape(2, 1, 1),) * 2  # w^2 at w = 1 and w = 3
    >>> float(gap(network, layers, [0.5, 0.5], x)[0, 0])  # 2^2 - (1 + 9) / 2
    -1.0
    """
    a = check_weights(thetas, weights)
    outputs = jax.vmap(lambda theta: f(theta, *args))(thetas)
    return jax.tree.map(jnp.subtract, f(mean(thetas, a), *args), mean(outputs, a))


def mean_squared_error(f: Model, theta: Any, x: Array, y: Array) -> Array:
    return jnp.mean(jnp.sum((f(theta, x) - y) ** 2, axis=-1))


def cross_entropy(logits: Float[Array, "n c"], labels: Float[Array, "n c"]) -> Float[Array, ""]:
    """Mean cross-entropy against one-hot labels."""
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))


@partial(jax.jit, static_argnames=("f", "steps"))
def train(f: Model, start: Any, x: Array, y: Array, rate: ArrayLike, steps: int) -> Any:
    """`steps` steps of gradient descent on the mean squared error."""

    def step(theta: Any, _) -> tuple[Any, None]:
        slope = jax.grad(lambda t: mean_squared_error(f, t, x, y))(theta)
        return jax.tree.map(lambda t, g: t - rate * g, theta, slope), None

    return jax.lax.scan(step, start, length=steps)[0]


@partial(jax.jit, static_argnames=("f", "steps"))
def experts(
    f: Model, start: Any, x: Array, ys: Float[Array, "k n o"], rate: ArrayLike, steps: int
) -> Any:
    """One model fine-tuned from `start` on each of k tasks, stacked."""
    return jax.vmap(lambda y: train(f, start, x, y, rate, steps))(ys)


def hessian(f: Model, theta: Any, *args: Any) -> Float[Array, "*out p p"]:
    """The Hessian of every output in the raveled parameters, dense."""
    flat, unravel = ravel_pytree(theta)
    return jax.hessian(lambda v: f(unravel(v), *args))(flat)


def stack(*thetas: Any) -> Any:
    """Models stacked along a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *thetas)
