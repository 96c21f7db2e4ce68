"""Operations on 2 x 2 and 1 x 1 matrices that JAX can differentiate."""

from typing import Any

import jax.numpy as jnp


def turn(angle: Any) -> Any:
    """Returns a rotation of the plane."""
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.array([[c, -s], [s, c]])


def top(matrix: Any) -> Any:
    """Computes the operator norm of a matrix. It is smooth except where singular values coincide.

    Args:
      matrix: The matrix.

    Returns:
      The norm.
    """
    if matrix.shape == (1, 1):
        return jnp.abs(matrix[0, 0])
    square = jnp.sum(matrix**2)
    det = matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]
    return jnp.sqrt((square + jnp.sqrt(jnp.maximum(square**2 - 4 * det**2, 1e-30))) / 2)


def within(matrix: Any, radius: float) -> Any:
    """Shrinks a matrix to an operator norm of at most `radius`."""
    return matrix * radius / jnp.maximum(top(matrix), radius)


def symmetric(matrix: Any) -> Any:
    """Scales the symmetric part of a matrix to the operator norm 1."""
    half = matrix + matrix.T
    return half / top(half)
