"""Computes exact gaps of cross-task linearity, in closed form.

The gap of k models theta_i with weights a_i is f(sum_i a_i theta_i) - sum_i a_i f(theta_i). Weights
sum to one and may be negative. Models are pytrees stacked along a leading axis of length k, and d_i
is theta_i - mean. A linear network is a tuple of matrices in the order in which they are applied,
f = W_L ... W_1 x, with layer l stacked as `(k, out, in)`. `networks.gap` measures it.

The paper is Zhou et al., 2024 (arXiv 2402.03660).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.problems import check_sum, defined

Weights = Sequence[float] | ArrayLike  # [k]


def check_weights(thetas: Any, weights: Weights) -> Float[Array, " k"]:
    """Checks the weights of stacked models and returns them as a vector.

    Args:
      thetas: Pytree of models stacked along a leading axis.
      weights: One weight per model, of sum 1.

    Returns:
      The weights `(k,)` in the default float precision.

    Raises:
      ValueError: If there is not one weight per model, or known weights do not sum to 1 up to
        rounding.
    """
    a = jnp.asarray(weights, dtype=float)
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(thetas)}
    if a.ndim != 1 or counts != {a.shape}:
        lengths = sorted(n for (n,) in counts if n != a.size) if () not in counts else "a scalar"
        raise ValueError(
            f"thetas must be stacked along a leading axis of one model per weight: "
            f"weights have shape {a.shape}, thetas {lengths}"
        )
    check_sum(a)
    return a


@defined
def mean(thetas: Any, weights: Weights) -> Any:
    """Computes the weighted mean of stacked models, sum_i a_i theta_i.

    Args:
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The mean, a pytree without the leading axis.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> mean(jnp.array([[1.0, 2.0], [3.0, 6.0]]), [0.5, 0.5]).tolist()
    [2.0, 4.0]
    """
    a = check_weights(thetas, weights)
    return jax.tree.map(lambda t: jnp.tensordot(a, t, 1), thetas)


@defined
def deviations(thetas: Any, weights: Weights) -> Any:
    """Computes the deviations theta_i - mean of stacked models.

    Args:
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The deviations, stacked as the models are.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> deviations(jnp.array([1.0, 3.0]), [0.5, 0.5]).tolist()
    [-1.0, 1.0]
    """
    return jax.tree.map(lambda t, m: t - m, thetas, mean(thetas, weights))


@defined
def quadratic_gap(
    H: Float[Array, "*out p p"], thetas: Float[Array, "k p"], weights: Weights
) -> Float[Array, "*out"]:
    """Computes the gap of a quadratic function f = c + g.theta + theta.H.theta / 2.

        -1/4 sum_ij a_i a_j |theta_i - theta_j|_H^2 = -1/2 sum_i a_i |d_i|_H^2

    For two models it is -a (1 - a) |theta_1 - theta_2|_H^2 / 2.

    Args:
      H: Symmetric Hessians `(..., p, p)`, one per output.
      thetas: Models `(k, p)`.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The gap of each output, `(...)`.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> float(quadratic_gap(jnp.eye(2), jnp.eye(2), [0.5, 0.5]))
    -0.25
    """
    d = deviations(thetas, weights)
    return -jnp.einsum("k,kp,...pq,kq->...", jnp.asarray(weights, d.dtype), d, H, d) / 2


@defined
def product_gap(
    layers: Sequence[Float[Array, "k out in"]], weights: Weights
) -> Float[Array, "orders o i"]:
    """Computes the gap of a product of layers W_L ... W_1, by orders in the deviations.

    Replace m of the mean layers in the product by deviations, and sum over all choices of the m
    layers. Order m is minus the mean of this sum over models. The gap is the sum over orders 2,
    ..., L. For two layers it is

        -1/2 sum_ij a_i a_j dW_2 dW_1,  and  -a (1 - a) dW_2 dW_1  for two models,

    with differences dW between models i and j. For two models order m has the factor

        a (1 - a) ((1 - a)^(m-1) + (-1)^m a^(m-1)),

    so odd orders are 0 at the midpoint.

    Args:
      layers: Matrices `(k, out, in)` of each layer, first layer first; at least two layers.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The gap by orders, `(L - 1, o, i)`.

    Raises:
      ValueError: If there is only one layer, or the weights do not conform or do not sum to 1.

    >>> layer = jnp.array([1.0, 3.0]).reshape(2, 1, 1)
    >>> product_gap([layer, layer], [0.5, 0.5]).tolist()
    [[[-1.0]]]
    """
    if len(layers) < 2:
        raise ValueError(f"a product of one layer has no gap; got {len(layers)} layers")
    middle, rest = mean(tuple(layers), weights), deviations(tuple(layers), weights)
    # Coefficients of the polynomial prod_l (W_l + t D_l) in t, for every model.
    eye = jnp.eye(layers[0].shape[-1], dtype=layers[0].dtype)
    terms = [jnp.broadcast_to(eye, (layers[0].shape[0], *eye.shape))]
    for w, d in zip(middle, rest, strict=True):
        # Invariant: terms[m] is the coefficient of t^m of the product so far. One more factor W + t
        # D gives W terms[m] + D terms[m - 1].
        grown = [w @ t for t in terms] + [jnp.zeros((), w.dtype)]
        terms = [term + (d @ terms[m - 1] if m else 0.0) for m, term in enumerate(grown)]
    # Order 0 is the product of the means, and order 1 averages to 0.
    return -jnp.stack([jnp.tensordot(jnp.asarray(weights, t.dtype), t, 1) for t in terms[2:]])


@defined
def ambiguity(outputs: Float[Array, "k *out"], weights: Weights) -> Float[Array, ""]:
    """Computes the variance of the members' outputs about their weighted mean.

        sum_i a_i |f_i - sum_j a_j f_j|^2

    It is the mean squared loss of the members minus the squared loss of the ensemble.

    Args:
      outputs: Outputs of the members, `(k, ...)`.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The ambiguity, a scalar.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    References:
      Krogh and Vedelsby, Neural network ensembles, cross validation, and active learning, 1995.

    >>> float(ambiguity(jnp.array([1.0, 3.0]), [0.5, 0.5]))
    1.0
    """
    d = deviations(outputs, weights)
    return jnp.tensordot(jnp.asarray(weights, d.dtype), jnp.sum(d**2, range(1, d.ndim)), 1)


@defined
def squared_loss(
    outputs: Float[Array, "k *out"],
    target: ArrayLike,
    weights: Weights,
    gap: Float[Array, "*out"] | float = 0.0,
) -> Float[Array, ""]:
    """Computes the squared loss of a merged model from its members' outputs, exactly.

    The loss is |f(mean) - y|^2, which equals

        sum_i a_i |f_i - y|^2 - ambiguity + 2 gap.(sum_i a_i f_i - y) + |gap|^2

    This is Lemma 1 for the squared loss, as an equality.

    Args:
      outputs: Outputs of the members, `(k, ...)`.
      target: Target y, of the shape of one output.
      weights: Weights `(k,)` of sum 1.
      gap: Gap of the merged model, of the shape of one output. It is 0 under exact linearity.

    Returns:
      The loss, a scalar.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Lemma 1.

    >>> float(squared_loss(jnp.array([1.0, 3.0]), 2.0, [0.5, 0.5]))
    0.0
    """
    members = jnp.sum((outputs - target) ** 2, range(1, outputs.ndim))
    rest = mean(outputs, weights) - target
    shift = jnp.sum(2 * gap * rest + jnp.square(gap) * jnp.ones_like(rest))
    return jnp.tensordot(jnp.asarray(weights, members.dtype), members, 1) + (
        shift - ambiguity(outputs, weights)
    )
