"""Products and factorisations of matrices with finite derivatives everywhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.merging.arithmetic import unit_of
from sail_jax.merging.placement import whole

Matrix = Float[Array, "a b"]


def matmul(*factors: Array) -> Array:
    """Multiplies matrices in full float32 precision on every device.

    Args:
      *factors: One matrix or more.

    Returns:
      Their product, from left to right.
    """
    return functools.reduce(functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST), factors)


def rounding(x: Matrix, size: Float[Array, ""]) -> Float[Array, ""]:
    """Computes the usual threshold of a numerical rank, as in `numpy.linalg.matrix_rank`.

    Args:
      x: The matrix. Only its shape and dtype matter.
      size: Its largest singular value.

    Returns:
      The typical error of singular values.
    """
    return max(x.shape) * jnp.finfo(x.dtype).eps * size


@jax.custom_jvp
def svd(
    x: Matrix, size: Float[Array, ""] | None = None
) -> tuple[Float[Array, "a r"], Float[Array, "r"], Float[Array, "b r"]]:
    """Computes the singular value decomposition U diag(S) V^T of a matrix.

    Vectors for singular values of 0 are arbitrary, and vectors for equal singular values are unique
    only up to a rotation. JAX's own derivative is NaN in both cases. Here the former vectors are 0.
    Gradients are finite, because they omit the rotation of such vectors.

    Args:
      x: The matrix.
      size: Singular values within the rounding of this number count as 0. By default the largest
        singular value.

    Returns:
      U, S in descending order, and V; r = min(a, b). All are 0 where S is within `rounding`.

    >>> U, S, V = svd(jnp.ones((2, 2)))
    >>> S.round(3).tolist(), (U[:, 1] + V[:, 1]).tolist()
    ([2.0, 0.0], [0.0, 0.0])
    >>> jax.grad(lambda x: svd(x)[1].sum())(jnp.eye(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    unit = unit_of(x)  # the same digits at any scale
    U, S, Vt = linalg.svd(whole(x * (1 / unit)), full_matrices=False)
    S = unit * S
    real = rounding(x, S[0] if size is None else size) < S
    found = jnp.where(real, U, 0), jnp.where(real, S, 0), jnp.where(real, Vt.T, 0)
    return whole(found[0]), found[1], whole(found[2])


@svd.defjvp
def _svd_jvp(primals: tuple[Matrix, Any], tangents: tuple[Matrix, Any]) -> tuple[Any, Any]:
    # JAX's own derivative divides by singular values, and by differences of their squares. Here
    # infinite terms are replaced by 0: vectors of 0 stay 0, and vectors of equal singular values do
    # not rotate into each other. `polar` depends on this rotation, and has its own derivative.
    (x, size), (dx, _) = primals, tangents
    U, S, V = outcome = svd(x, size)
    unit = unit_of(x)
    S, dx = S * (1 / unit), dx * (1 / unit)
    gaps = S**2 - S[:, None] ** 2
    differ = jnp.abs(S - S[:, None]) > rounding(x, S[0])
    turn = jnp.where(differ, 1 / jnp.where(differ, gaps, 1), 0)
    divided = jnp.where(S > 0, 1 / jnp.where(S > 0, S, 1), 0)
    A = matmul(U.T, dx, V)
    # The first term rotates vectors inside the spaces of U and V. The second term leaves these
    # spaces.
    dU = matmul(U, turn * (A * S + (S * A).T)) + (matmul(dx, V) - matmul(U, A)) * divided
    dV = matmul(V, turn * (S[:, None] * A + A.T * S)) + (matmul(dx.T, U) - matmul(V, A.T)) * divided
    return outcome, (dU, unit * jnp.diagonal(A), dV)


@jax.custom_jvp
def polar(x: Matrix) -> Matrix:
    """Computes the polar factor U V^T of a matrix.

    Args:
      x: The matrix, with the singular value decomposition U diag(S) V^T.

    Returns:
      The nearest matrix with all singular values 1, or 0 where the singular values of `x` are 0.

    >>> polar(jnp.diag(jnp.array([3.0, 0.0]))).round(3).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    U, _, V = svd(x)
    return whole(matmul(U, V.T))


@polar.defjvp
def _polar_jvp(primals: tuple[Matrix], tangents: tuple[Matrix]) -> tuple[Matrix, Matrix]:
    # The derivative of the SVD divides by differences of singular values, which are often equal
    # here. The derivative of U V^T divides only by their sums.
    (x,), (dx,) = primals, tangents
    U, S, V = svd(x)
    pairs, single = S[:, None] + S, S[None, :]
    inverse = jnp.where(pairs > 0, 1 / jnp.where(pairs > 0, pairs, 1), 0)
    divided = jnp.where(single > 0, 1 / jnp.where(single > 0, single, 1), 0)
    # d(U V^T) = U ((A - A^T) / (s_i + s_j)) V^T inside the spaces of U and V. The parts of dx
    # beyond them, `left` and `right`, are divided by one singular value each.
    A = matmul(U.T, dx, V)
    left, right = matmul(dx, V) - matmul(U, A), matmul(U.T, dx) - matmul(A, V.T)
    tangent = matmul(U, inverse * (A - A.T), V.T) + matmul(left * divided, V.T)
    return matmul(U, V.T), tangent + matmul(U, divided.T * right)
