"""Simulators that train, merge and measure small networks, with derivatives by autodiff.

The closed forms of this package are compared with these simulators, which use none of them. A
network is a tuple of matrices W_1 `(h_1, i)`, ..., W_L `(o, h_{L-1})` in the order in which they
are applied, with an activation between them. A constant input acts as bias. `identities` has the
other conventions.
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
from theory.problems import defined

Model = Callable[..., Array]  # f(theta, *args) -> output
Activation = Callable[[Array], Array]


@defined
def network(
    layers: Sequence[Float[Array, "out in"]],
    x: Float[Array, "n i"],
    activation: Activation | None = None,
) -> Float[Array, "n o"]:
    """Computes the outputs of a network.

    Args:
      layers: Weight matrices, first layer first.
      x: Inputs `(n, i)`.
      activation: Function between the layers. None makes a linear network.

    Returns:
      The outputs `(n, o)`.
    """
    return features(layers, x, activation)[-1]


@defined
def features(
    layers: Sequence[Float[Array, "out in"]],
    x: Float[Array, "n i"],
    activation: Activation | None = None,
) -> list[Float[Array, "n _"]]:
    """Computes the features f^(1), ..., f^(L) of every layer.

    Args:
      layers: Weight matrices, first layer first.
      x: Inputs `(n, i)`.
      activation: Function between the layers. None makes a linear network.

    Returns:
      The features of each layer, `(n, h)`, after the activation. The last layer is linear.
    """
    per_layer = []
    for n, w in enumerate(layers, 1):
        x = x @ w.T
        if activation is not None and n < len(layers):
            x = activation(x)
        per_layer.append(x)
    return per_layer


@defined
def init(key: Array, sizes: Sequence[int]) -> tuple[Float[Array, "out in"], ...]:
    """Draws the initial weights of a network, independent N(0, 1 / inputs of the layer).

    Args:
      key: Random key.
      sizes: Widths of input, hidden layers and output.

    Returns:
      Matrices `(sizes[l + 1], sizes[l])`, first layer first.
    """
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[1:], sizes[:-1], strict=True)
    return tuple(jax.random.normal(k, (o, i)) / i**0.5 for k, o, i in shapes)


@defined
def gap(f: Callable[..., Any], thetas: Any, weights: Weights, *args: Any) -> Any:
    """Measures the gap f(sum_i a_i theta_i) - sum_i a_i f(theta_i).

    Args:
      f: Model f(theta, *args). It returns an array or a pytree of arrays, such as the features of
        all layers.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.
      *args: Further arguments of the model.

    Returns:
      The gap, with the structure and shapes of f's output.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> x = jnp.ones((1, 1))
    >>> layers = (jnp.array([1.0, 3.0]).reshape(2, 1, 1),) * 2  # w^2 at w = 1 and w = 3
    >>> float(gap(network, layers, [0.5, 0.5], x)[0, 0])  # 2^2 - (1 + 9) / 2
    -1.0
    """
    a = check_weights(thetas, weights)
    outputs = jax.vmap(lambda theta: f(theta, *args))(thetas)
    return jax.tree.map(jnp.subtract, f(mean(thetas, a), *args), mean(outputs, a))


@defined
def mean_squared_error(f: Model, theta: Any, x: Array, y: Array) -> Array:
    """Computes the mean squared error of a model, summed over outputs.

    Args:
      f: Model f(theta, x).
      theta: Parameters.
      x: Inputs `(n, i)`.
      y: Targets `(n, o)`.

    Returns:
      The error, a scalar.
    """
    return jnp.mean(jnp.sum((f(theta, x) - y) ** 2, axis=-1))


@defined
def cross_entropy(logits: Float[Array, "n c"], labels: Float[Array, "n c"]) -> Float[Array, ""]:
    """Computes the mean cross-entropy against one-hot labels.

    Args:
      logits: Logits `(n, c)`.
      labels: One-hot labels `(n, c)`.

    Returns:
      The cross-entropy, a scalar.
    """
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))


@defined
@partial(jax.jit, static_argnames=("f", "steps"))
def train(f: Model, start: Any, x: Array, y: Array, rate: ArrayLike, steps: int) -> Any:
    """Trains a model by full-batch gradient descent on the mean squared error.

    Args:
      f: Model f(theta, x).
      start: Initial parameters.
      x: Inputs `(n, i)`.
      y: Targets `(n, o)`.
      rate: Learning rate.
      steps: Number of steps.

    Returns:
      The trained parameters.
    """

    def step(theta: Any, _) -> tuple[Any, None]:
        slope = jax.grad(lambda t: mean_squared_error(f, t, x, y))(theta)
        return jax.tree.map(lambda t, g: t - rate * g, theta, slope), None

    return jax.lax.scan(step, start, length=steps)[0]


@defined
@partial(jax.jit, static_argnames=("f", "steps"))
def experts(
    f: Model, start: Any, x: Array, ys: Float[Array, "k n o"], rate: ArrayLike, steps: int
) -> Any:
    """Fine-tunes one model on each of k tasks, all from the same start.

    Args:
      f: Model f(theta, x).
      start: Initial parameters.
      x: Inputs `(n, i)`, shared by the tasks.
      ys: Targets of the tasks, `(k, n, o)`.
      rate: Learning rate.
      steps: Number of steps.

    Returns:
      The trained parameters, stacked along a leading axis k.
    """
    return jax.vmap(lambda y: train(f, start, x, y, rate, steps))(ys)


@defined
def hessian(f: Model, theta: Any, *args: Any) -> Float[Array, "*out p p"]:
    """Computes the dense Hessian of every output of a model, by autodiff.

    Args:
      f: Model f(theta, *args).
      theta: Parameters.
      *args: Further arguments of the model.

    Returns:
      The Hessians `(..., p, p)` in the raveled parameters, with the output's axes first.
    """
    flat, unravel = ravel_pytree(theta)
    return jax.hessian(lambda v: f(unravel(v), *args))(flat)


@defined
def stack(*thetas: Any) -> Any:
    """Stacks models along a new leading axis.

    Args:
      *thetas: Models of the same structure and shapes.

    Returns:
      The stacked pytree.
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *thetas)
