"""Inner products of ReLU neurons under x ~ N(0, I), the arc-cosine kernels (Cho and Saul 2009).

Features are fate (arXiv 2410.08194) gives them as eqs. (152), (153), for unit vectors only. Here,
vectors may have any norm.

The computation requires only a matrix product and arrays of the output's shape. The cosine u then
has an error of a few eps, and the angle phi an error of sqrt(eps) where u is near +-1. However, the
derivative of the kernel in u is (pi - phi) / 2 pi, and in its gradient the error of the angle is
multiplied by |w^ cos phi - v^| = sin phi, where w^ and v^ are unit vectors. Both `gram` and its
gradient are therefore accurate to a few eps of |w||v|, even for coinciding and opposite neurons.
`coactivation` is the angle itself and has the error sqrt(eps) there.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.problems import defined


@defined
def relu_mean(w: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """Computes the mean activation of ReLU neurons, E relu(w.x) = |w| / sqrt(2 pi).

    Args:
      w: Hidden vectors `(..., d)`.

    Returns:
      The means, without the last axis.

    >>> round(float(relu_mean(jnp.array([3.0, 4.0]))), 4)
    1.9947
    """
    return _norm(w) / jnp.sqrt(2 * jnp.pi)


@defined
def coactivation(w: Float[Array, "m d"], v: Float[Array, "k d"]) -> Float[Array, "m k"]:
    """Computes the probability that two neurons are both active, P(w_i.x > 0 and v_j.x > 0).

    It is (pi - phi) / 2 pi for neurons at angle phi, and 0 for a zero neuron. Do not differentiate
    it, because the derivative is infinite where neurons coincide.

    Args:
      w: Hidden vectors `(m, d)`.
      v: Hidden vectors `(k, d)`.

    Returns:
      The probabilities `(m, k)`.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (152), (153), have the same
      angle.

    >>> probabilities = coactivation(jnp.eye(2), jnp.array([[1.0, 0.0]]))
    >>> [round(float(p), 4) for p in probabilities[:, 0]]
    [0.5, 0.25]
    """
    alive = (_norm(w) > 0)[:, None] & (_norm(v) > 0)
    return jnp.where(alive, (jnp.pi - _angles(w, v)[0]) / (2 * jnp.pi), 0.0)


@defined
def gram(w: Float[Array, "m d"], v: Float[Array, "k d"]) -> Float[Array, "m k"]:
    """Computes the inner products of ReLU neurons, E[relu(w_i.x) relu(v_j.x)].

        |w||v| (sin phi + (pi - phi) cos phi) / 2 pi

    for neurons at angle phi. It has a first derivative everywhere. The derivative in w is (|v| sin
    phi w^ + (pi - phi) v) / 2 pi with the unit vector w^. At w = 0 it is the mean over opposite
    directions, v / 4.

    Args:
      w: Hidden vectors `(m, d)`.
      v: Hidden vectors `(k, d)`.

    Returns:
      The inner products `(m, k)`.

    References:
      Cho and Saul, Kernel methods for deep learning, 2009. Tahir et al., Features are fate, 2024
      (arXiv 2410.08194), eqs. (152), (153), for unit vectors.

    >>> gram(jnp.array([[3.0, 0.0]]), jnp.array([[3.0, 0.0], [-1.0, 0.0]]))
    Array([[4.5, 0. ]], dtype=float32)
    """
    return _gram(w, v)


@jax.custom_jvp
@jax.jit
def _gram(w: Array, v: Array) -> Array:
    phi, sine, cosine = _angles(w, v)
    # Near phi = pi the two terms cancel to (pi - phi)^3 / 3, which is never below zero.
    unit = jnp.maximum(sine + (jnp.pi - phi) * cosine, 0.0) / (2 * jnp.pi)
    return _norm(w)[:, None] * _norm(v) * unit


@_gram.defjvp
def _gram_jvp(primals, tangents):
    return _gram(*primals), _gram_tangent(*primals, *tangents)


@jax.jit
def _gram_tangent(w: Array, v: Array, dw: Array, dv: Array) -> Array:
    phi, sine, _ = _angles(w, v)
    # The terms in sin phi of the derivatives in w and in v. `turn` has the terms in (pi - phi).
    stretch_w = jnp.sum(_unit(w) * dw, axis=-1)[:, None] * _norm(v)
    stretch_v = jnp.sum(_unit(v) * dv, axis=-1) * _norm(w)[:, None]
    turn = _dot(dw, v) + _dot(w, dv)
    return (sine * (stretch_w + stretch_v) + (jnp.pi - phi) * turn) / (2 * jnp.pi)


def _angles(w: Array, v: Array) -> tuple[Array, Array, Array]:
    """Returns phi, sin phi and cos phi. It is a right angle if a neuron is zero."""
    cosine = jnp.clip(_dot(_unit(w), _unit(v)), -1.0, 1.0)
    # 1 - cosine^2 would round near 1, but each factor is exact there.
    sine = jnp.sqrt((1 - cosine) * (1 + cosine))
    return jnp.arctan2(sine, cosine), sine, cosine


def _dot(w: Array, v: Array) -> Array:
    # Accelerators multiply float32 matrices in reduced precision by default. The cosine would then
    # lose its accuracy of a few eps.
    return jnp.matmul(w, v.T, precision="highest")


def _norm(w: ArrayLike) -> Array:
    return jnp.linalg.norm(jnp.asarray(w), axis=-1)


def _unit(w: Array) -> Array:
    norm = _norm(w)[..., None]
    return jnp.where(norm > 0, w / jnp.where(norm > 0, norm, 1.0), 0.0)
