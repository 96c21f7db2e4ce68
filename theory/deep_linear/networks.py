"""Deep linear networks f(x) = x W_1 W_2 ... W_L, trained by gradient descent.

These simulators use no closed form; the closed forms of this package are compared with them. W_1,
..., W_{L-1} are `(d, d)`. W_L is `(d,)` (Features are fate, arXiv 2410.08194, eq. 9), or `(d, m)`
for m outputs. The squared errors of the outputs are summed. Losses and units are as in
`theory.problems`. Gradient descent at a small rate approximates gradient flow.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory import problems

Weights = tuple[Array, ...]


class Trained(NamedTuple):
    """A network after gradient descent.

    Attributes:
      weights: Its weight matrices, first layer first.
      gradient: The largest absolute entry of the final gradient, a scalar.
      loss: The final training loss, a scalar.
      steps: The number of steps taken, a scalar.
    """

    weights: Weights
    gradient: Array
    loss: Array
    steps: Array


@problems.defined
def small_weights(
    key: Array, d: int, depth: int, alpha: ArrayLike, outputs: int | None = None
) -> Weights:
    """Draws small initial weights that satisfy eq. (22) of Features are fate.

    W_l is alpha sqrt(depth - l + 1) times a random orthogonal matrix for l < depth. W_depth is
    alpha times a random unit vector, or times `outputs` orthonormal ones.

    Args:
      key: Random key.
      d: Dimension, at least 1.
      depth: Number of weight matrices, at least 1.
      alpha: Scale of the weights, > 0.
      outputs: Number of outputs, at most d; a vector W_depth if None.

    Returns:
      The weights, first layer first.

    Raises:
      ValueError: If an argument is out of range.
    """
    if d < 1 or depth < 1:
        raise ValueError(f"need d >= 1 and depth >= 1; got d={d}, depth={depth}")
    if outputs is not None and not 1 <= outputs <= d:
        raise ValueError(f"outputs must be from 1 to d = {d}; got {outputs}")
    problems.check("alpha", alpha, lambda a: a > 0, "a positive scale")
    *keys, last = jax.random.split(key, depth)
    square = tuple(
        jnp.asarray(alpha) * jnp.sqrt(depth - l) * linalg.orthogonal(k, d)
        for l, k in enumerate(keys)
    )
    # QR of Gaussian columns gives orthonormal columns in random directions.
    basis = linalg.qr(jax.random.normal(last, (d, outputs or 1)))[0]
    return (*square, jnp.asarray(alpha) * (basis if outputs else basis[:, 0]))


@problems.defined
def gaussian_weights(key: Array, d: int, depth: int, alpha: ArrayLike) -> Weights:
    """Draws weights of alpha times independent normal entries, as in the paper's experiments.

    For wide layers they violate eq. (22), which `small_weights` satisfies.

    Args:
      key: Random key.
      d: Dimension of inputs and width of every layer.
      depth: Number of layers.
      alpha: Scale of the weights, above 0.

    Returns:
      The layers: `depth - 1` of shape `[d, d]`, then one of shape `[d]`.

    Raises:
      ValueError: If `d` or `depth` is below 1, or `alpha` is not positive.

    References:
      features-are-fate (arXiv 2410.08194), App. D.1.
    """
    if d < 1 or depth < 1:
        raise ValueError(f"need d >= 1 and depth >= 1; got d={d}, depth={depth}")
    problems.check("alpha", alpha, lambda a: a > 0, "a positive scale")
    shapes = [(d, d)] * (depth - 1) + [(d,)]
    keys = jax.random.split(key, depth)
    return tuple(
        jnp.asarray(alpha) * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)
    )


@problems.defined
def least_invariant(weights: Weights) -> Float[Array, ""]:
    """Computes the largest lambda for which weights satisfy eq. (22) of Features are fate.

        W_l^T W_l - W_{l+1} W_{l+1}^T >= lambda I for all l < L

    Lemma 3.3 and Theorems 3.4 to 3.9 assume that lambda is above 0. Gradient flow conserves these
    matrices (eq. 35).

    Args:
      weights: Weight matrices, first layer first, at least two.

    Returns:
      The smallest eigenvalue of all these matrices, a scalar.

    Raises:
      ValueError: If there is only one layer.

    References:
      features-are-fate (arXiv 2410.08194), eqs. (22) and (35).

    >>> bool(least_invariant(small_weights(jax.random.key(0), 5, 3, 0.5)) > 0)
    True
    """
    if len(weights) < 2:
        raise ValueError(f"need at least two layers; got {len(weights)}")

    def least(w: Array, following: Array) -> Array:
        following = following.reshape(len(following), -1)
        return linalg.eigvalsh(w.T @ w - following @ following.T)[0]

    return jnp.stack([least(*pair) for pair in pairwise(weights)]).min()


@problems.defined
def narrow_weights(beta: Float[Array, " d"], depth: int) -> Weights:
    """Builds the balanced network of width one that computes `beta`.

    Balanced networks of rank one and any width that compute the same predictor still do so after
    every step of descent. Descent from small weights produces such networks as alpha -> 0.

    Args:
      beta: The predictor, `[d]`.
      depth: Number of layers.

    Returns:
      The layers, each of norm `|beta|^{1/depth}`: `[d, 1]`, then `[1, 1]`, the last `[1]`; for one
      layer `[d]`.

    Raises:
      ValueError: If `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1; got {depth}")
    if depth == 1:
        return (beta,)
    size = jnp.linalg.norm(beta)
    layer = size ** (1 / depth)
    first = beta / jnp.where(size > 0, size, 1.0) * layer
    return (first[:, None], *[layer[None, None]] * (depth - 2), layer[None])


@problems.defined
def start_of_growth(
    weights: Weights, x: Float[Array, "n d"], y: Float[Array, " n"]
) -> Float[Array, " d"]:
    """Computes the predictor from which a balanced network of rank one follows training from small
    weights.

    Let s = X^T y / n and u = s / |s|. Two small layers first obey a linear flow. In it p = (W_1^T u
    + W_2) / 2 grows as e^{|s| t} and nothing else grows. They soon equal the network that started
    at |p|^2 u, up to relative errors O(alpha). One layer starts at its own weights.

    Args:
      weights: One or two small layers, `[d]` or `[d, d]` and `[d]`.
      x: Inputs.
      y: Labels.

    Returns:
      The predictor at time 0.

    Raises:
      ValueError: If there are more than two layers, because their initial growth is not linear.
    """
    *first, last = weights
    if len(first) > 1:
        raise ValueError(f"expected one or two layers; got {len(weights)}")
    if not first:
        return last
    pull = x.T @ y
    u = pull / jnp.maximum(jnp.linalg.norm(pull), jnp.finfo(pull.dtype).tiny)
    return jnp.sum((first[0].T @ u + last) ** 2) / 4 * u


@problems.defined
def predictor(weights: Weights) -> Float[Array, "d *m"]:
    """Computes the linear map beta = W_1 ... W_L of a network.

    Multiplication from the right avoids products of two square matrices.

    Args:
      weights: Weight matrices, first layer first.

    Returns:
      The map, `(d,)` or `(d, m)`.
    """
    *square, beta = weights
    for w in reversed(square):
        beta = w @ beta
    return beta


@problems.defined
def pretrain(
    weights: Weights,
    beta_s: Array,
    rate: ArrayLike,
    steps: ArrayLike,
    until: ArrayLike = 0.0,
) -> Trained:
    """Trains all layers on the population loss |beta - beta_s|^2 / 2 of the source task.

    Args:
      weights: Initial weights.
      beta_s: Source task, `(d,)` or `(d, m)`.
      rate: Learning rate.
      steps: The largest number of steps of gradient descent.
      until: The loss at which training stops earlier, from 0.

    Returns:
      The trained network.
    """
    return _descend(_population_loss, weights, (), rate, steps, until, beta_s)


@problems.defined
def fine_tune(
    weights: Weights,
    x: Array,
    y: Array,
    rate: ArrayLike,
    steps: ArrayLike,
    until: ArrayLike = 0.0,
) -> Trained:
    """Trains all layers on the training loss |y - X beta|^2 / (2n).

    From small random weights this is training from scratch.

    Args:
      weights: Initial weights.
      x: Inputs `(n, d)`.
      y: Labels `(n,)` or `(n, m)`.
      rate: Learning rate.
      steps: The largest number of steps of gradient descent.
      until: The loss at which training stops earlier, from 0.

    Returns:
      The trained network.
    """
    return _descend(_training_loss, weights, (), rate, steps, until, x, y)


@problems.defined
def linear_transfer(
    weights: Weights,
    x: Array,
    y: Array,
    rate: ArrayLike,
    steps: ArrayLike,
    until: ArrayLike = 0.0,
) -> Trained:
    """Trains only the last layer on the training loss |y - X beta|^2 / (2n).

    Args:
      weights: Initial weights. Only the last one is trained.
      x: Inputs `(n, d)`.
      y: Labels `(n,)` or `(n, m)`.
      rate: Learning rate.
      steps: The largest number of steps of gradient descent.
      until: The loss at which training stops earlier, from 0.

    Returns:
      The trained network. Its `gradient` is with respect to the last layer only.
    """
    *frozen, last = weights
    trained = _descend(_training_loss, (last,), tuple(frozen), rate, steps, until, x, y)
    return trained._replace(weights=(*frozen, *trained.weights))


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
    until: ArrayLike,
    *data: Array,
) -> Trained:
    evaluate = jax.value_and_grad(lambda weights: loss((*frozen, *weights), *data))

    def step(state: tuple[Array, Array, Weights]) -> tuple[Array, Array, Weights]:
        taken, _, weights = state
        value, gradient = evaluate(weights)
        # The loss is that of the weights before the step. Weights that reach `until` are kept.
        going = value > until  # a NaN ends it, too
        pace = jnp.where(going, rate, 0.0)
        moved = jax.tree.map(lambda w, g: w - (pace * g).astype(w.dtype), weights, gradient)
        return taken + going, going, moved

    # The number of steps is traced, so a single compilation is sufficient.
    start = jnp.zeros((), int), jnp.ones((), bool), weights
    taken, _, weights = jax.lax.while_loop(lambda s: s[1] & (s[0] < steps), step, start)
    value, gradient = evaluate(weights)
    largest = jnp.max(jnp.stack([jnp.abs(g).max() for g in gradient]))
    return Trained(weights, largest, value, taken)
