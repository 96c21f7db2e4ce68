"""Splits a target network into parts inside and outside the span of frozen ReLU features.

The feature space of a network is the span of its neurons relu(w_i.x) in L2 of N(0, I). With
G = E[relu(Wx) relu(Wx)^T] and h = E[relu(Wx) f(x)], the projection of f has |Pf|^2 = h^T G^+ h
(Features are fate, arXiv 2410.08194, App. C, eqs. 158 and 159, with K = G / m).

G is numerically singular after training has moved neurons to the same position. Eigenvalues below
`cutoff` times the largest are dropped. This choice matters for finite data, so the number of kept
directions is reported.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory import problems
from theory.student_teacher import arc_cosine, networks

CUTOFF = 1e-10  # relative, on eigenvalues of a Gram matrix


class Projection(NamedTuple):
    """The sizes of a target's parts inside and outside a feature space.

    Attributes:
      inside: |P f|^2, a scalar.
      outside: |P_perp f|^2, a scalar.
      rank: Dimension of the feature space, above the cut-off.
    """

    inside: Float[Array, ""]
    outside: Float[Array, ""]
    rank: Array


class Mercer(NamedTuple):
    """Eigenfunctions of the operator with kernel (1/m) sum_i relu(w_i.x) relu(w_i.x').

    psi_l(x) = sum_i coefficients[i, l] relu(w_i.x). They are orthonormal in L2 of N(0, I).

    Attributes:
      eigenvalues: Eigenvalues `(m,)`, ascending, and 0 below the cut-off.
      coefficients: Coefficients `(m, m)`, one column for each eigenfunction, and 0 below the
        cut-off.
    """

    eigenvalues: Float[Array, " m"]
    coefficients: Float[Array, "m m"]


@problems.defined
def mercer(w: Float[Array, "m d"], cutoff: ArrayLike = CUTOFF) -> Mercer:
    """Computes the eigenfunctions of the kernel operator of a network's features.

    With K z_l = lambda_l z_l the coefficients are z_l / sqrt(m lambda_l). lambda_l is the
    eigenvalue of the operator. The paper calls it lambda_l^2.

    Args:
      w: Hidden vectors `(m, d)`.
      cutoff: Eigenvalues below this fraction of the largest count as 0, in [0, 1).

    Returns:
      Eigenvalues and coefficients.

    Raises:
      ValueError: If the cut-off is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (157), in which the sum runs
      over neurons.

    >>> round(float(mercer(jnp.array([[1.0, 0.0]])).eigenvalues[0]), 4)
    0.5
    """
    check_cutoff(cutoff)
    return _mercer(w, cutoff)


@jax.jit
def _mercer(w: Array, cutoff: ArrayLike) -> Mercer:
    m = w.shape[0]
    values, z = linalg.eigh(arc_cosine.gram(w, w) / m)
    kept = values > floor(values, cutoff)
    scale = jnp.where(kept, 1 / jnp.sqrt(m * jnp.where(kept, values, 1.0)), 0.0)
    return Mercer(jnp.where(kept, values, 0.0), z * scale)


@problems.defined
def project(
    w: Float[Array, "m d"], target: networks.Network, cutoff: ArrayLike = CUTOFF
) -> Projection:
    """Splits a target network into its parts inside and outside the span of given neurons.

    |P_perp f|^2 is exact to about eps |f|^2. With the source teacher's neurons as `w` this is the
    result for perfectly learned features.

    Args:
      w: Hidden vectors `(m, d)`.
      target: The target network.
      cutoff: Eigenvalues below this fraction of the largest count as 0, in [0, 1).

    Returns:
      The sizes of both parts, and the dimension of the feature space.

    Raises:
      ValueError: If the cut-off is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (158), (159).

    >>> neuron = jnp.array([[1.0, 0.0]])
    >>> round(float(project(neuron, networks.Network(jnp.ones(1), neuron)).inside), 4)
    0.5
    """
    check_cutoff(cutoff)
    return _project(w, target, cutoff)


@jax.jit
def _project(w: Array, target: networks.Network, cutoff: ArrayLike) -> Projection:
    eigenvalues, psi = _mercer(w, cutoff)
    overlap = arc_cosine.gram(w, target.w) @ target.c / target.c.size
    # Parseval: psi are orthonormal, and psi.T @ overlap are the coefficients <psi_l, f>.
    inside = jnp.sum((psi.T @ overlap) ** 2)
    norm = networks.inner(target, target)
    return Projection(inside, norm - inside, jnp.sum(eigenvalues > 0))


def check_cutoff(cutoff: ArrayLike) -> None:
    """Raises an error unless the cut-off is a fraction in [0, 1).

    Args:
      cutoff: The cut-off.

    Raises:
      ValueError: If it is out of range.
    """
    problems.check("cutoff", cutoff, lambda c: (c >= 0) & (c < 1), "a fraction in [0, 1)")


@problems.defined
def floor(eigenvalues: Float[Array, " m"], cutoff: ArrayLike) -> Array:
    """Returns the smallest eigenvalue above the cut-off and the rounding errors of `eigh`.

    Args:
      eigenvalues: Eigenvalues `(m,)`.
      cutoff: Fraction of the largest.

    Returns:
      The larger of both, a scalar.
    """
    rounding = eigenvalues.size * jnp.finfo(eigenvalues.dtype).eps
    return jnp.maximum(cutoff, rounding) * jnp.max(eigenvalues)


@problems.defined
def operator(w: Float[Array, "m d"], psi: Array) -> Array:
    """Applies the kernel operator T to functions in the span of the neurons.

    The coefficients of T psi are (1/m) G psi, exactly.

    Args:
      w: Hidden vectors `(m, d)`.
      psi: Coefficients of the functions, `(m,)` or `(m, k)`.

    Returns:
      Coefficients of their images, with the shape of `psi`.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (149).
    """
    return jax.lax.dot(arc_cosine.gram(w, w), psi, precision="highest") / w.shape[0]
