"""Two-layer ReLU networks in the mean-field scaling, and their training by gradient descent.

The network is f(x) = (1/m) sum_i c_i relu(w_i.x) with x ~ N(0, I_d) (Features are fate, arXiv
2410.08194, Section 4, eq. 18). Riemannian gradient descent keeps hidden vectors on the unit sphere:
the radial part of the gradient is removed, and each step ends with a normalisation. Losses are E(f
- f*)^2 / 2 and |y - f(X)|^2 / (2n). The learning rate is multiplied by m, so time does not depend
on the width. `risk` is the full E(f - f*)^2.

A population loss is a difference of numbers of order |f*|^2. float32 cannot resolve it below about
1e-8. Use float64 (`with jax.enable_x64(True)`) where this matters. The result has the precision
of the input.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.student_teacher import arc_cosine

SMALL = 1e-7  # output weights at initialisation (features-are-fate, App. D.2)


class Network(NamedTuple):
    """The network f(x) = (1/m) sum_i c_i relu(w_i.x).

    Attributes:
      c: Output weights `(m,)`.
      w: Hidden vectors `(m, d)`.
    """

    c: Float[Array, " m"]
    w: Float[Array, "m d"]


class Descent(NamedTuple):
    """The state at which gradient descent stopped. Descent can continue from it.

    Attributes:
      network: The network.
      loss: Its loss, a scalar.
      steps: Number of steps taken so far.
    """

    network: Network
    loss: Float[Array, ""]
    steps: Array


@problems.defined
def sphere(key: Array, m: int, d: int) -> Float[Array, "m d"]:
    """Draws independent uniform unit vectors.

    Args:
      key: Random key.
      m: Number of vectors, at least 1.
      d: Dimension, at least 1.

    Returns:
      The vectors `(m, d)`.

    Raises:
      ValueError: If m < 1 or d < 1.
    """
    if m < 1 or d < 1:
        raise ValueError(f"need m >= 1 and d >= 1; got m={m}, d={d}")
    w = jax.random.normal(key, (m, d))
    return w / jnp.linalg.norm(w, axis=1, keepdims=True)


@problems.defined
def teacher(key: Array, m: int, d: int) -> Network:
    """Draws a teacher network: m random neurons with output weights c = 1.

    The paper does not state its c*. Of c = 1 and c = +-1, only c = 1 reproduces |P_perp f|^2 of its
    Fig. 4(d).

    Args:
      key: Random key.
      m: Number of neurons, at least 1.
      d: Input dimension, at least 1.

    Returns:
      The network.

    Raises:
      ValueError: If m < 1 or d < 1.

    >>> teacher(jax.random.key(0), 3, 2).c.tolist()
    [1.0, 1.0, 1.0]
    """
    return Network(jnp.ones(m), sphere(key, m, d))


@problems.defined
def student(key: Array, m: int, d: int) -> Network:
    """Draws a student network before training. Its output is 0 up to 1e-7.

    Args:
      key: Random key.
      m: Number of neurons, at least 1.
      d: Input dimension, at least 1.

    Returns:
      The network.

    Raises:
      ValueError: If m < 1 or d < 1.

    >>> student(jax.random.key(0), 3, 2).w.shape
    (3, 2)
    """
    return Network(jnp.full(m, SMALL), sphere(key, m, d))


@problems.defined
def ablate(key: Array, target: Network, mu: ArrayLike) -> Network:
    """Returns a source network: the target without a random fraction of its neurons.

    The output weights of the remaining neurons are multiplied by m / (number of remaining neurons).
    Removed neurons become zeros, so the shape does not depend on mu. Sources of the same key are
    nested: a larger mu removes all neurons that a smaller one removes.

    Args:
      key: Random key.
      target: The target network.
      mu: Fraction to remove, in [0, 1), such that mu * m is an integer.

    Returns:
      The source network, with the shapes of the target.

    Raises:
      ValueError: If mu is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (19).

    >>> key = jax.random.key(0)
    >>> sorted(ablate(key, teacher(key, 4, 2), 0.5).c.tolist())
    [0.0, 0.0, 2.0, 2.0]
    """
    m = target.c.size
    problems.check(
        "mu",
        mu,
        lambda mu: (mu >= 0) & (mu < 1) & (abs(mu * m - np.round(mu * m)) < 1e-6 * m),
        f"a fraction in [0, 1) that removes a whole number of the {m} neurons",
    )
    removed = jnp.round(jnp.asarray(mu) * m)
    # The order of removal is drawn once and does not depend on mu, which makes sources nested.
    kept = jax.random.permutation(key, m) >= removed
    c = jnp.where(kept, target.c * (m / (m - removed)), 0.0)
    return Network(c.astype(target.c.dtype), jnp.where(kept[:, None], target.w, 0.0))


@problems.defined
def features(w: Float[Array, "m d"], x: Float[Array, "n d"]) -> Float[Array, "n m"]:
    """Computes the hidden activations relu(w_i.x), the features of linear transfer.

    Args:
      w: Hidden vectors `(m, d)`.
      x: Inputs `(n, d)`.

    Returns:
      The activations `(n, m)`.

    >>> features(jnp.eye(2), jnp.array([[1.0, -2.0]])).tolist()
    [[1.0, 0.0]]
    """
    return jax.nn.relu(x @ w.T)


@problems.defined
def predict(network: Network, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Computes the outputs f(x) of a network.

    Args:
      network: The network.
      x: Inputs `(n, d)`.

    Returns:
      The outputs `(n,)`.

    >>> predict(Network(jnp.ones(2), jnp.eye(2)), jnp.array([[1.0, -2.0]])).tolist()
    [0.5]
    """
    return features(network.w, x) @ network.c / network.c.size


@problems.defined
def kernel(w: Float[Array, "m d"], x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """Computes the feature kernel k(x, x'), independent of the output weights.

    It is the mean of relu(w_i.x) relu(w_i.x') over the nonzero neurons.

    Args:
      w: Hidden vectors `(m, d)`.
      x: Inputs `(n, d)`.

    Returns:
      The kernel matrix `(n, n)`.

    Raises:
      ValueError: If all neurons are zero.

    >>> kernel(jnp.eye(2), jnp.array([[1.0, 2.0]])).tolist()
    [[2.5]]
    """
    phi, alive = features(w, x), jnp.sum(jnp.any(w != 0, axis=1))
    problems.check("the number of nonzero neurons", alive, lambda m: m >= 1, "at least 1")
    return phi @ phi.T / alive


@problems.defined
def inner(f: Network, g: Network) -> Float[Array, ""]:
    """Computes the inner product E f(x) g(x) of two networks, exactly.

    Args:
      f: First network.
      g: Second network.

    Returns:
      The inner product, a scalar.

    >>> neuron = Network(jnp.ones(1), jnp.array([[1.0, 0.0]]))
    >>> round(float(inner(neuron, neuron)), 4)
    0.5
    """
    return (f.c @ arc_cosine.gram(f.w, g.w) @ g.c) / (f.c.size * g.c.size)


@problems.defined
@jax.jit
def risk(f: Network, g: Network) -> Float[Array, ""]:
    """Computes the risk E (f(x) - g(x))^2 of one network as a prediction of another, exactly.

    The rounding error is about eps (|f|^2 + |g|^2).

    Args:
      f: First network.
      g: Second network.

    Returns:
      The risk, a scalar.

    >>> neuron = Network(jnp.ones(1), jnp.array([[1.0, 0.0]]))
    >>> float(risk(neuron, neuron))
    0.0
    """
    return inner(f, f) - 2 * inner(f, g) + inner(g, g)


@problems.defined
@jax.jit
def variance(f: Network) -> Float[Array, ""]:
    """Computes the variance of a network's output over inputs.

    Args:
      f: The network.

    Returns:
      The variance, a scalar.

    >>> round(float(variance(Network(jnp.ones(1), jnp.array([[1.0, 0.0]])))), 4)  # 1/2 - 1/(2 pi)
    0.3408
    """
    return inner(f, f) - (arc_cosine.relu_mean(f.w) @ f.c / f.c.size) ** 2


@problems.defined
def pretrain(
    start: Network | Descent, source: Network, rate: ArrayLike, steps: int, tolerance: ArrayLike
) -> Descent:
    """Trains a network on the population loss E(f - source)^2 / 2, which has a closed form.

    Training stops when the loss is at most `tolerance` or after `steps` more steps. Pass the result
    as `start` to continue.

    Args:
      start: Initial network, or the result of an earlier descent.
      source: The network to fit.
      rate: Learning rate > 0; it is multiplied by the width.
      steps: Largest number of further steps, >= 0.
      tolerance: Loss at which training stops, >= 0.

    Returns:
      The trained network with its loss and number of steps.

    Raises:
      ValueError: If rate, steps or tolerance are out of range.
    """
    check_descent(rate, steps, tolerance)
    return _descend(_population_loss, start, rate, steps, tolerance, source, inner(source, source))


@problems.defined
def scratch(
    start: Network | Descent, x: Array, y: Array, rate: ArrayLike, steps: int, tolerance: ArrayLike
) -> Descent:
    """Trains a network on samples, by full-batch descent on |y - f(X)|^2 / (2n).

    Training stops as in `pretrain`.

    Args:
      start: Initial network, or the result of an earlier descent.
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      rate: Learning rate > 0; it is multiplied by the width.
      steps: Largest number of further steps, >= 0.
      tolerance: Loss at which training stops, >= 0.

    Returns:
      The trained network with its loss and number of steps.

    Raises:
      ValueError: If rate, steps or tolerance are out of range.
    """
    check_descent(rate, steps, tolerance)
    return _descend(_training_loss, start, rate, steps, tolerance, x, y)


def check_descent(rate: ArrayLike, steps: ArrayLike, tolerance: ArrayLike) -> None:
    """Checks the options of a descent.

    Args:
      rate: Learning rate.
      steps: Largest number of steps.
      tolerance: Loss at which training stops.

    Raises:
      ValueError: If one of them is out of range.
    """
    problems.check("rate", rate, lambda r: (r > 0) & (r < np.inf), "a finite learning rate > 0")
    problems.check("steps", steps, lambda s: (s >= 0) & (s < np.inf), "a number of steps >= 0")
    problems.check("tolerance", tolerance, lambda t: t >= 0, "a loss >= 0")


def _population_loss(network: Network, source: Network, norm: Array) -> Array:
    return 0.5 * (inner(network, network) - 2 * inner(network, source) + norm)


def _training_loss(network: Network, x: Array, y: Array) -> Array:
    return 0.5 * jnp.mean((y - predict(network, x)) ** 2)


@partial(jax.jit, static_argnums=0)
def _descend(
    loss: Callable[..., Array],
    start: Network | Descent,
    rate: ArrayLike,
    steps: ArrayLike,
    tolerance: ArrayLike,
    *data,
) -> Descent:
    network = start.network if isinstance(start, Descent) else start
    taken = start.steps if isinstance(start, Descent) else jnp.zeros((), int)
    # Gradients of a mean over m neurons are of order 1 / m.
    rate, limit = rate * network.c.size, taken + steps
    measure = jax.value_and_grad(loss)

    # One gradient per iteration, and none outside the loop. A resumed run then repeats the same
    # instructions and is bitwise identical.
    def turn(state):
        (c, w), _, step, _ = state
        value, gradient = measure(Network(c, w), *data)
        going = (value > tolerance) & (step < limit)
        # The Riemannian gradient on the unit sphere. Normalisation then returns to the sphere.
        radial = jnp.sum(gradient.w * w, axis=1, keepdims=True)
        ahead = w - rate * (gradient.w - radial * w)
        moved = Network(
            c - rate * gradient.c, ahead / jnp.linalg.norm(ahead, axis=1, keepdims=True)
        )
        network = jax.tree.map(lambda new, old: jnp.where(going, new, old), moved, Network(c, w))
        return network, value, step + going, going

    start_loss = jnp.full((), jnp.inf, network.c.dtype)
    network, value, step, _ = jax.lax.while_loop(
        lambda state: state[3], turn, (network, start_loss, taken, jnp.array(True))
    )
    return Descent(network, value, step)
