"""Makes embeddings for new tokens of a network from the embeddings of its other tokens.

Two networks share some tokens. A *donor* has further tokens that are missing in the *base*. Each
new embedding of the donor is written as a combination of the donor's embeddings of shared tokens,
the *anchors*. The same combination of the base's embeddings of these tokens is the new embedding of
the base.

Let the base's shared embeddings be a linear image of the donor's, b = a M. Let r be the residual of
the combination for the donor's embedding. The error of the new embedding is then r M. It is 0 up to
rounding if r is 0, for example if the number of independent anchors equals the donor's width.
"""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from sail_jax import linalg
from sail_jax.checks import integer, one_of
from sail_jax.lazy import listed
from sail_jax.merging.arithmetic import unit_of
from sail_jax.merging.matrices import matmul
from sail_jax.merging.task_vectors import in_float64

__all__ = ["Combination", "Method", "neighbours", "pursue", "transplant"]
__dir__ = listed(__name__)

Method = Literal["omp", "nearest"]
"""The combination of anchors for a row; see `pursue` and `neighbours`."""

_NEAR = 1e-6  # relative to the largest entry; the smallest distance that counts


class Combination(NamedTuple):
    """Rows as linear combinations of anchors.

    Attributes:
      indices: The anchors of each row, `[row, k]`.
      coefficients: The coefficient of each anchor, `[row, k]`; 0 for an unused anchor.
    """

    indices: Int[Array, "row k"]
    coefficients: Float[Array, "row k"]

    def of(self, anchors: Float[Array, "anchor width"]) -> Float[Array, "row width"]:
        """Computes the same combinations of other anchors."""
        picked = anchors[self.indices]
        return jnp.einsum("bk,bkd->bd", self.coefficients, picked, precision=lax.Precision.HIGHEST)


@in_float64("targets", "anchors")
def pursue(
    targets: Float[ArrayLike, "row width"], anchors: Float[ArrayLike, "anchor width"], k: int = 64
) -> Combination:
    """Writes each row as a combination of k anchors, by orthogonal matching pursuit.

    Anchors are chosen one after another. The next anchor has the largest inner product with the
    residual of the row. After each choice, the coefficients of all chosen anchors are the least
    squares solution. Anchors are not normalised, as in mergekit.

    The least squares problem uses a QR factorisation that grows column by column, with each column
    orthogonalised twice. An anchor gets the coefficient 0 if it depends on earlier anchors, or if
    the residual is only rounding.

    Args:
      targets: The rows.
      anchors: The anchors, at least one.
      k: The largest number of anchors per row, an integer >= 1, static.

    Returns:
      The anchors and coefficients, with min(k, number of anchors) for each row.

    Raises:
      ValueError: If shapes are inconsistent, or k is not an integer >= 1.

    References:
      Pati, Rezaiifar and Krishnaprasad, Orthogonal Matching Pursuit, 1993; Goddard and Fernandes
      Neto, Training-Free Tokenizer Transplantation via Orthogonal Matching Pursuit, 2025 (arXiv
      2506.06607).

    >>> found = pursue(jnp.array([[0.0, 6.0]]), jnp.array([[1.0, 1.0], [0.0, 2.0], [0.0, 2.0]]), 2)
    >>> found.indices[0, 0].item(), found.coefficients.tolist()
    (1, [[3.0, 0.0]])
    """
    return _pursue(*_checked(targets, anchors, k))


@in_float64("targets", "anchors")
def neighbours(
    targets: Float[ArrayLike, "row width"], anchors: Float[ArrayLike, "anchor width"], k: int = 64
) -> Combination:
    """Writes each row as a mean of its k nearest anchors, with inverse distances as weights.

    The weights of a row sum to 1. With k = 1 the result is the nearest anchor.

    Args:
      targets: The rows.
      anchors: The anchors, at least one.
      k: The largest number of anchors per row, an integer >= 1, static.

    Returns:
      The anchors and weights, with min(k, number of anchors) for each row.

    Raises:
      ValueError: If shapes are inconsistent, or k is not an integer >= 1.

    >>> neighbours(jnp.array([[0.0]]), jnp.array([[1.0], [-3.0], [9.0]]), 2).coefficients.tolist()
    [[0.75, 0.25]]
    """
    return _neighbours(*_checked(targets, anchors, k))


@in_float64("targets", "anchors", "own")
def transplant(
    targets: Float[ArrayLike, "row theirs"],
    anchors: Float[ArrayLike, "anchor theirs"],
    own: Float[ArrayLike, "anchor width"],
    method: Method = "omp",
    k: int = 64,
) -> Float[Array, "row width"]:
    """Makes embeddings of new tokens from embeddings of shared tokens.

    Rows are independent and may come in batches of any size.

    Args:
      targets: The donor's rows of the new tokens.
      anchors: The donor's rows of the shared tokens, at least one.
      own: The base's rows of the shared tokens, in the same order.
      method: "omp" for `pursue`, "nearest" for `neighbours`.
      k: The largest number of anchors per row, an integer >= 1, static.

    Returns:
      The base's rows of the new tokens.

    Raises:
      ValueError: If shapes are inconsistent, or an argument is invalid.

    >>> donor, base = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[2.0], [5.0]])
    >>> transplant(jnp.array([[3.0, 1.0]]), donor, base).tolist()
    [[11.0]]
    """
    one_of("method", method, get_args(Method))
    targets, anchors, k = _checked(targets, anchors, k)
    own = _matrix("own", own)
    if len(own) != len(anchors):
        raise ValueError(f"own: expected {len(anchors)} rows, one for each anchor; got {len(own)}")
    return combined(targets, anchors, own, method, k)


@functools.partial(jax.jit, static_argnames=("method", "k"))
def combined(
    targets: Float[Array, "row theirs"],
    anchors: Float[Array, "anchor theirs"],
    own: Float[Array, "anchor width"],
    method: Method,
    k: int,
) -> Float[Array, "row width"]:
    """Computes `transplant` for checked arguments, as one program.

    Args:
      targets: The donor's rows of the new tokens.
      anchors: The donor's rows of the shared tokens.
      own: The base's rows of the shared tokens.
      method: "omp" or "nearest".
      k: The number of anchors per row, at most the number of anchors.

    Returns:
      The base's rows of the new tokens.
    """
    find = {"omp": _pursue, "nearest": _neighbours}[method]
    return find(targets, anchors, k).of(own)


@functools.partial(jax.jit, static_argnames="k")
def _pursue(targets: Array, anchors: Array, k: int) -> Combination:
    # The units are powers of two. Division by them is exact, and prevents overflow of squares and
    # sums.
    unit, units = unit_of(anchors), unit_of(targets, [1])[:, None]
    anchors, targets = anchors / unit, targets / units
    (batch, width), eps = targets.shape, jnp.finfo(targets.dtype).eps
    size = jnp.linalg.norm(targets, axis=1)
    rows = jnp.arange(batch)[:, None]
    # Columns of Q and R beyond the t-th are 0, so products with all columns use only the first t.
    start = (
        targets,
        jnp.full((batch, k), len(anchors)),  # not an index of an anchor
        jnp.zeros((batch, k, width), targets.dtype),
        jnp.broadcast_to(jnp.eye(k, dtype=targets.dtype), (batch, k, k)),
        jnp.zeros((batch, k), targets.dtype),
    )

    def step(t: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        left, indices, Q, R, z = state
        products = jnp.abs(matmul(left, anchors.T))
        chosen = products.at[rows, indices].set(-1, mode="drop").argmax(1)
        anchor = anchors[chosen]
        new, along = anchor, jnp.zeros_like(z)
        # One pass leaves rounding errors of the columns. The second pass removes them.
        for _ in range(2):
            part = jnp.einsum("bkd,bd->bk", Q, new, precision=lax.Precision.HIGHEST)
            new = new - jnp.einsum("bkd,bk->bd", Q, part, precision=lax.Precision.HIGHEST)
            along = along + part
        length = jnp.linalg.norm(new, axis=1)
        counts = length > max(width, k) * eps * jnp.linalg.norm(anchor, axis=1)
        counts &= jnp.linalg.norm(left, axis=1) > 4 * width**0.5 * eps * size
        q = jnp.where(counts[:, None], new / jnp.where(counts, length, 1)[:, None], 0)
        share = (q * left).sum(1)
        column = jnp.where(counts[:, None], along.at[:, t].set(length), R[:, :, t])
        return (
            left - share[:, None] * q,
            indices.at[:, t].set(chosen),
            Q.at[:, t].set(q),
            R.at[:, :, t].set(column),
            z.at[:, t].set(share),
        )

    _, indices, _, R, z = lax.fori_loop(0, k, step, start)
    coefficients = linalg.solve_triangular(R, z[..., None])
    return Combination(indices, coefficients[..., 0] * (units / unit))


@functools.partial(jax.jit, static_argnames="k")
def _neighbours(targets: Array, anchors: Array, k: int) -> Combination:
    unit = unit_of(anchors)
    anchors, targets = anchors / unit, targets / unit
    # Half the squared distance, up to terms that are equal for all anchors.
    _, indices = lax.top_k(matmul(targets, anchors.T) - (anchors**2).sum(1) / 2, k)
    # Differences of rows are used, because differences of squares would lose the digits of small
    # distances.
    apart = jnp.linalg.norm(anchors[indices] - targets[:, None], axis=2)
    weights = 1 / jnp.maximum(apart, _NEAR)
    return Combination(indices, weights / weights.sum(1, keepdims=True))


def _checked(targets: ArrayLike, anchors: ArrayLike, k: int) -> tuple[Array, Array, int]:
    """Checks the arguments; returns arrays of one dtype, and k limited to the number of anchors."""
    integer("k", k)
    targets, anchors = _matrix("targets", targets), _matrix("anchors", anchors)
    if targets.shape[1] != anchors.shape[1]:
        raise ValueError(
            f"anchors: expected rows of {targets.shape[1]} entries, as in targets; "
            f"got {anchors.shape[1]}"
        )
    if not len(anchors):
        raise ValueError("anchors: expected at least one row, got none")
    dtype = jnp.promote_types(targets.dtype, anchors.dtype)
    return targets.astype(dtype), anchors.astype(dtype), min(int(k), len(anchors))


def _matrix(name: str, x: ArrayLike) -> Array:
    """Converts a matrix to float32 or wider; raises a ValueError for anything else."""
    x = jnp.asarray(x)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a matrix of floats, got {x.dtype}{list(x.shape)}")
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
