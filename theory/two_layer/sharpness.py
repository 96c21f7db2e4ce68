"""Curvature of the loss along training, as a predictor of the sensitivity to weight noise.

The loss is quadratic in each layer, so E L(W + gamma Z) = L + gamma^2 tr(H)/2 + gamma^4 o h i. The
quadratic prediction (Springer et al. 2025, arXiv 2503.19206, Proposition D.1) omits only the last
term, so it is always too low.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory.problems import defined
from theory.two_layer.layers import Layers, theta
from theory.two_layer.perturbation import check_gamma


@defined
def hessian(layers: Layers, target: Float[ArrayLike, "o i"]) -> Float[Array, "p p"]:
    """Computes the Hessian H of |W_1 W_2 - A|^2 in closed form.

        v^T H v / 2 = |V_1 W_2 + W_1 V_2|^2 + 2 <theta - A, V_1 V_2>

    `networks.hessian` computes the same by autodiff.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.

    Returns:
      H `(p, p)`, p = o h + h i, entries of W_1 first, both in row-major order.
    """
    (o, h), i = layers.w1.shape, layers.w2.shape[1]
    residual = theta(layers) - target
    eye = [jnp.eye(n, dtype=residual.dtype) for n in (o, h, i)]
    # The two diagonal blocks come only from |V_1 W_2|^2 and |W_1 V_2|^2, because the loss is
    # quadratic in each layer.
    first = jnp.einsum("ac,kl->akcl", eye[0], layers.w2 @ layers.w2.T)
    second = jnp.einsum("kl,bc->kblc", layers.w1.T @ layers.w1, eye[2])
    # Indices: W_1 [a, k], W_2 [l, b]. The block of W_1 against W_2 has one part from the product of
    # first derivatives and one, below, from the residual.
    cross = jnp.einsum("al,kb->aklb", layers.w1, layers.w2)
    cross = cross + jnp.einsum("kl,ab->aklb", eye[1], residual)
    p, q = o * h, h * i
    cross = cross.reshape(p, q)
    return 2 * jnp.block([[first.reshape(p, p), cross], [cross.T, second.reshape(q, q)]])


@defined
def trace(layers: Layers) -> Float[Array, "*b"]:
    """Computes the trace of the Hessian, tr H = 2 (i |W_1|^2 + o |W_2|^2).

    It does not depend on the target and grows with the weights.

    Args:
      layers: The weights.

    Returns:
      The traces, one per network.
    """
    o, i = layers.w1.shape[-2], layers.w2.shape[-1]
    return 2 * (i * jnp.sum(layers.w1**2, (-2, -1)) + o * jnp.sum(layers.w2**2, (-2, -1)))


@defined
def sharpness(layers: Layers, target: Float[ArrayLike, "o i"]) -> Array:
    """Computes the largest eigenvalue of the Hessian.

    It is within 2 |theta - A|_op of 2 (|W_1|_op^2 + |W_2|_op^2).

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.

    Returns:
      The eigenvalue, a scalar.
    """
    return linalg.eigvalsh(hessian(layers, target))[-1]


@defined
def mode_sharpness(
    y: Float[ArrayLike, "*b d"], sigma: Float[ArrayLike, " d"]
) -> Float[Array, "*b"]:
    """Computes the largest eigenvalue of the Hessian of an aligned square network with modes y.

    It is 4 sigma_1 at the end of training. The Hessian is block diagonal, over pairs of modes (a,
    b) and signs s: twice [[y_b + s r_a, g], [g, y_a + s r_b]] with r = y - sigma and g = sqrt(y_a
    y_b).

    Args:
      y: Modes of the network, `(..., d)` (see `modes`).
      sigma: Singular values of the target, `(d,)`.

    Returns:
      The eigenvalues, one per network.
    """
    y, sigma = jnp.asarray(y, dtype=float), jnp.asarray(sigma, dtype=float)
    r = y - sigma
    top = []
    for sign in (1.0, -1.0):
        p = y[..., None, :] + sign * r[..., :, None]
        q = p.mT
        cross = y[..., None, :] * y[..., :, None]
        # Twice the larger eigenvalue of [[p, g], [g, q]]. A mode paired with itself has only one
        # eigenvalue for each sign, `own`.
        pair = p + q + jnp.sqrt((p - q) ** 2 + 4 * cross)
        same = jnp.eye(y.shape[-1], dtype=bool)
        own = 2 * (2 * y + r) if sign > 0 else -2 * r
        top.append(jnp.where(same, own[..., None], pair).max((-2, -1)))
    return jnp.maximum(*top)


@defined
def sensitivity(layers: Layers, gamma: ArrayLike) -> Float[Array, "*b"]:
    """Computes E L(W + gamma Z) - L(W), the mean increase of the loss by weight noise, exactly.

    It is gamma^2 tr(H)/2 + gamma^4 o h i. The first term is the quadratic prediction. The second
    one exceeds it for gamma^2 > (|W_1|^2/o + |W_2|^2/i)/h.

    Args:
      layers: The weights.
      gamma: Standard deviation of the noise, finite and >= 0.

    Returns:
      The rises, one per network.

    Raises:
      ValueError: If gamma is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Proposition D.1, has the first term.
    """
    check_gamma(gamma)
    o, h = layers.w1.shape[-2:]
    gamma2 = jnp.asarray(gamma, dtype=float) ** 2
    return gamma2 * trace(layers) / 2 + gamma2**2 * (o * h * layers.w2.shape[-1])
