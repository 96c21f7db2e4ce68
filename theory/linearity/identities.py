"""Exact gaps of cross-task linearity (CTL, arXiv 2402.03660).

The gap of k models theta_i with weights a_i that sum to one (negative ones allowed) is
f(sum_i a_i theta_i) - sum_i a_i f(theta_i). Models are pytrees stacked along a leading axis of
length k; d_i = theta_i - mean. A linear network is a tuple of matrices in the order in which they
are applied: f = W_L ... W_1 x, layer l stacked as [k out in].
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete

Weights = Sequence[float] | ArrayLike  # [k]


def check_weights(thetas: Any, weights: Weights) -> Float[Array, " k"]:
    """The weights as a vector; ValueError unless there is one for each model and they sum to 1."""
    a = jnp.asarray(weights, dtype=float)
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(thetas)}
    if a.ndim != 1 or counts != {a.shape}:
        lengths = sorted(n for (n,) in counts if n != a.size) if () not in counts else "a scalar"
        raise ValueError(
            f"thetas must be stacked along a leading axis of one model per weight: "
            f"weights have shape {a.shape}, thetas {lengths}"
        )
    total = concrete(a.sum())
    slack = 4 * a.size * float(jnp.finfo(a.dtype).eps)
    if total is not None and not abs(total - 1) <= slack * (1 + np.abs(a).sum()):
        raise ValueError(f"weights must sum to 1; got {total:g}")
    return a


def mean(thetas: Any, weights: Weights) -> Any:
    """sum_i a_i theta_i of stacked pytrees."""
    a = check_weights(thetas, weights)
    return jax.tree.map(lambda t: jnp.tensordot(a, t, 1), thetas)


def deviations(thetas: Any, weights: Weights) -> Any:
    """theta_i - mean, stacked."""
    return jax.tree.map(lambda t, m: t - m, thetas, mean(thetas, weights))


def quadratic_gap(
    H: Float[Array, "*out p p"], thetas: Float[Array, "k p"], weights: Weights
) -> Float[Array, "*out"]:
    """-1/4 sum_ij a_i a_j |theta_i - theta_j|_H^2 = -1/2 sum_i a_i |d_i|_H^2, the gap of
    f = c + g.theta + theta.H.theta / 2.

    Two models: -a (1 - a) |theta_1 - theta_2|_H^2 / 2.

    >>> float(quadratic_gap(jnp.eye(2), jnp.eye(2), [0.5, 0.5]))
    -0.25
    """
    d = deviations(thetas, weights)
    return -jnp.einsum("k,kp,...pq,kq->...", jnp.asarray(weights, d.dtype), d, H, d) / 2


def product_gap(
    layers: Sequence[Float[Array, "k out in"]], weights: Weights
) -> Float[Array, "orders o i"]:
    """The gap of a product W_L ... W_1 by orders 2, ..., L in the deviations; it is their sum.

    Order m is minus the mean over models of the sum over all ways to put m deviations D_l into the
    product of the mean layers. Two layers: -1/2 sum_ij a_i a_j dW_2 dW_1, for two models
    -a (1 - a) dW_2 dW_1. For two models order m has the factor
    a (1 - a) ((1 - a)^(m-1) + (-1)^m a^(m-1)): at the midpoint odd orders vanish.
    """
    if len(layers) < 2:
        raise ValueError(f"a product of one layer has no gap; got {len(layers)} layers")
    middle, rest = mean(tuple(layers), weights), deviations(tuple(layers), weights)
    # Coefficients of the polynomial prod_l (W_l + t D_l) in t, for every model.
    eye = jnp.eye(layers[0].shape[-1], dtype=layers[0].dtype)
    terms = [jnp.broadcast_to(eye, (layers[0].shape[0], *eye.shape))]
    for w, d in zip(middle, rest, strict=True):
        grown = [w @ t for t in terms] + [jnp.zeros((), w.dtype)]
        terms = [term + (d @ terms[m - 1] if m else 0.0) for m, term in enumerate(grown)]
    return -jnp.stack([jnp.tensordot(jnp.asarray(weights, t.dtype), t, 1) for t in terms[2:]])


def ambiguity(outputs: Float[Array, "k *out"], weights: Weights) -> Float[Array, ""]:
    """sum_i a_i |f_i - sum_j a_j f_j|^2, by which an ensemble's squared loss is below the mean of
    its members' (Krogh and Vedelsby 1995)."""
    d = deviations(outputs, weights)
    return jnp.tensordot(jnp.asarray(weights, d.dtype), jnp.sum(d**2, range(1, d.ndim)), 1)


def squared_loss(
    outputs: Float[Array, "k *out"],
    target: ArrayLike,
    weights: Weights,
    gap: Float[Array, "*out"] | float = 0.0,
) -> Float[Array, ""]:
    """|f(mean) - y|^2 of the merged model from its members' outputs and the gap, exactly:
    sum_i a_i |f_i - y|^2 - ambiguity + 2 gap.(sum_i a_i f_i - y) + |gap|^2.

    The squared-loss case of Lemma 1 as an equality.
    """
    members = jnp.sum((outputs - target) ** 2, range(1, outputs.ndim))
    rest = mean(outputs, weights) - target
    shift = jnp.sum(2 * gap * rest + jnp.square(gap) * jnp.ones_like(rest))
    return jnp.tensordot(jnp.asarray(weights, members.dtype), members, 1) + (
        shift - ambiguity(outputs, weights)
    )
