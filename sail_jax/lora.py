"""Low-rank adapters, which are extracted from two checkpoints, added to a base, and merged.

An adapter represents a change B A of a matrix of a model, [out, in] as in PyTorch, with B
[out, rank] and A [rank, in]: y = x W^T becomes y = x W^T + x A^T B^T. With `input_axis=0`, kernels
with layout [in, out] (Flax) are transposed on input and output. Factors have exactly two axes, so
stacked layers require one pair each.

Qwix stores two factors next to each weight, in the same tree and with their own axes. `fold` adds
their product to the weight.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax import linalg
from sail_jax.basis.spaces import Spec
from sail_jax.checks import concrete, integer, nearest, one_of
from sail_jax.lazy import listed
from sail_jax.merging.arithmetic import norm, unit_of
from sail_jax.merging.matrices import matmul, svd
from sail_jax.merging.merge import Merge
from sail_jax.merging.task_vectors import apply, in_float64, task_vectors, task_weights
from sail_jax.trees import factor_of, leaf_paths

__all__ = [
    "OVERSAMPLING",
    "POWERS",
    "Adapter",
    "LowRank",
    "add",
    "approximate",
    "check_energy",
    "check_rank",
    "concatenate",
    "core_space",
    "dense",
    "extract",
    "fold",
    "folded",
    "merge_adapters",
    "refactor",
    "residual",
    "sketched",
    "truncate",
]
__dir__ = listed(__name__)

InputAxis = Literal[-1, 0]

OVERSAMPLING, POWERS = 8, 6
"""How many directions `approximate` draws beyond the rank, and how often it multiplies them by the
matrix and its transpose.
"""
_ROWS = 256  # rows of a matrix that are compared with factors at a time
_FIRST = 16  # the rank that `approximate` tries first for an energy

# The largest number of axes of a weight with qwix factors.
_AXES = 8


class LowRank(NamedTuple):
    """The two factors of a low-rank matrix B A.

    Attributes:
      B: Shape `[out, rank]`.
      A: Shape `[rank, in]`.
    """

    B: Float[Array, "out rank"]
    A: Float[Array, "rank in"]

    @property
    def rank(self) -> int:
        """The number of columns of B and of rows of A."""
        return self.A.shape[0]


Adapter = Mapping[str, LowRank]
"""Factors by the path of their matrix."""


@in_float64("delta")
def truncate(
    delta: Float[ArrayLike, "out in"], rank: int | None = None, energy: float | None = None
) -> tuple[LowRank, Float[Array, ""]]:
    """Finds the best low-rank approximation of a matrix, with its error.

    It is the truncated singular value decomposition, with the singular values shared equally: B = U
    sqrt(S) and A = sqrt(S) V^T. No matrix of that rank is closer (Eckart and Young 1936). With both
    `rank` and `energy`, the smaller rank is used.

    Args:
      delta: The matrix, real and with at least one entry.
      rank: The largest rank, an integer >= 1, static; min(out, in) by default.
      energy: A number in (0, 1]. The rank is the smallest (at least 1) that keeps this fraction of
        the sum of squared singular values. It depends on values, which must not be traced.

    Returns:
      The factors, in float32 (float64 for float64 input), and the Frobenius norm of the error, the
      root of the sum of the discarded S_i^2. Singular values within rounding of 0 count as 0.
      Gradients are finite; they omit rotations of vectors with equal or zero singular values.

    Raises:
      ValueError: For another shape, complex numbers, and a rank or energy outside its range.
      TypeError: For an `energy` with a traced matrix.

    >>> pair, error = truncate(jnp.diag(jnp.array([3.0, 2.0, 1.0])), rank=2)
    >>> pair.rank, float(error)
    (2, 1.0)
    """
    delta = _matrix(delta)
    limit = check_rank(rank, min(delta.shape))
    if energy is not None:
        check_energy(energy)
    U, S, V = svd(delta)
    if energy is not None:
        values = concrete(S)
        if values is None:
            raise TypeError("energy: the rank depends on values, which are traced; give `rank`")
        squares = np.cumsum((values.astype(float) / (values[0] or 1)) ** 2)
        # Slightly less than requested, so that rounding does not require one more value.
        enough = np.searchsorted(squares, energy * squares[-1] * (1 - 1e-12)) + 1
        limit = min(limit, int(enough))
    kept, rest = S[:limit], S[limit:]
    # The square roots have infinite slopes at 0, which would enter gradients.
    root = jnp.where(kept > 0, jnp.sqrt(jnp.where(kept > 0, kept, 1)), 0)
    return LowRank(U[:, :limit] * root, (V[:, :limit] * root).T), norm(rest)


@in_float64("delta")
def approximate(
    delta: Float[ArrayLike, "out in"],
    rank: int | None = None,
    energy: float | None = None,
    *,
    key: Array,
    oversampling: int = OVERSAMPLING,
    powers: int = POWERS,
) -> tuple[LowRank, Float[Array, ""]]:
    """Finds a nearly optimal low-rank approximation of a matrix, faster than `truncate`.

    The matrix D is projected on the span of (D^T D)^j D^T X for j = 0, ..., `powers`, where X has
    rank + `oversampling` random columns (a block Krylov space). The projection is then truncated as
    in `truncate`. If that space has more than half of all dimensions, `truncate` is computed
    instead.

    The expected error is at most 1 + e times the optimum. Here e falls like (log(n) / powers)^2 for
    any singular values, and exponentially if they decay. With the defaults and a matrix of
    independent entries, the worst case, e is about 1e-4. The returned error is the exact error of
    these factors, not an estimate.

    For a given energy, ranks of 16, 64, 256, ... are tried. The singular values of the projection
    do not exceed the matrix's. The resulting rank therefore keeps the energy, and may be larger
    than the smallest possible one.

    Args:
      delta: The matrix; see `truncate`.
      rank: The largest rank; see `truncate`.
      energy: The fraction of squared singular values to keep; see `truncate`.
      key: The PRNG key of the random columns.
      oversampling: The number of columns beyond the rank, an integer >= 0, static.
      powers: The number of times that the columns are multiplied by D^T D, an integer >= 0, static.

    Returns:
      The factors, in float32 (float64 for float64 input), with singular values shared equally; and
      the Frobenius norm of the error. Gradients exist only if the matrix has a higher rank than the
      number of drawn columns. Otherwise they are NaN, while `truncate` has finite gradients.

    Raises:
      ValueError: As `truncate` does, and for a negative `oversampling` or `powers`.
      TypeError: As `truncate` does.

    References:
      Musco and Musco, Randomized Block Krylov Methods for Stronger and Faster Approximate Singular
      Value Decomposition, 2015 (arXiv 1504.05477), Theorem 1; Halko, Martinsson and Tropp, Finding
      Structure with Randomness, 2011 (arXiv 0909.4061).

    >>> import jax
    >>> tall = jnp.outer(jnp.ones(90), jnp.arange(1.0, 61.0))  # a matrix of rank 1
    >>> pair, error = approximate(tall, rank=1, key=jax.random.key(0), powers=1)
    >>> pair.B.shape, bool(error < 1e-5 * jnp.linalg.norm(tall))
    ((90, 1), True)
    """
    delta = _matrix(delta)
    for name, value in (("oversampling", oversampling), ("powers", powers)):
        integer(name, value, 0)
    limit = check_rank(rank, min(delta.shape))
    wanted = 0.0
    if energy is not None:
        check_energy(energy)
        total = concrete(jnp.sum(jnp.square(delta * (1 / unit_of(delta)))))
        if total is None:
            raise TypeError("energy: the rank depends on values, which are traced; give `rank`")
        wanted = energy * float(total)
    tried = limit if energy is None else min(limit, _FIRST)
    rows, columns = delta.shape
    while sketched((rows, columns), tried, oversampling, powers):
        pair, kept = _krylov(delta, tried, key, oversampling, powers)
        if energy is None:
            return pair, residual(delta, pair)
        enough = np.cumsum(np.asarray(kept, float)) >= wanted
        if enough.any() or tried == limit:
            found = int(enough.argmax()) + 1 if enough.any() else tried
            # Arrays of one shape, with zeros beyond the rank: compiled once for all ranks.
            error = residual(delta, LowRank(pair.B * (np.arange(tried) < found), pair.A))
            return LowRank(pair.B[:, :found], pair.A[:found]), error
        tried = min(limit, 4 * tried)
    return truncate(delta, rank, energy)


def sketched(
    shape: tuple[int, int],
    rank: int,
    oversampling: int = OVERSAMPLING,
    powers: int = POWERS,
) -> bool:
    """Checks whether `approximate` draws random columns for a matrix, or computes `truncate`.

    Args:
      shape: The shape of the matrix.
      rank: The rank of the approximation.
      oversampling: See `approximate`.
      powers: See `approximate`.

    Returns:
      Whether the space that it projects on has at most half as many dimensions as the matrix.
    """
    return 2 * (powers + 1) * (rank + oversampling) <= min(shape)


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def _krylov(
    delta: Array, rank: int, key: Array, oversampling: int, powers: int
) -> tuple[LowRank, Array]:
    """Finds the best approximation within a block Krylov space, and its squared singular values.

    The latter belong to the matrix over its unit (`unit_of`).
    """
    if delta.shape[0] < delta.shape[1]:
        pair, kept = _krylov(delta.T, rank, key, oversampling, powers)
        return LowRank(pair.A.T, pair.B.T), kept
    unit = unit_of(delta)  # keeps products with D^T D in range
    delta = delta * (1 / unit)
    # The space lies on the shorter side, where orthogonalisation is cheaper.
    columns = jax.random.normal(key, (delta.shape[0], rank + oversampling), delta.dtype)
    block = linalg.qr(matmul(delta.T, columns))[0]
    blocks = [block]
    for _ in range(powers):
        # The columns are orthogonalised in each step; otherwise all of them would converge to the
        # first vector.
        block = linalg.qr(matmul(delta.T, matmul(delta, block)))[0]
        blocks.append(block)
    basis = linalg.qr(jnp.concatenate(blocks, 1))[0]
    left, small = linalg.qr(matmul(delta, basis))
    U, S, Vt = linalg.svd(small, full_matrices=False)
    root = jnp.sqrt(unit * S[:rank])
    pair = LowRank(matmul(left, U[:, :rank]) * root, root[:, None] * matmul(Vt[:rank], basis.T))
    return pair, jnp.square(S[:rank])


@jax.jit
def residual(delta: Float[ArrayLike, "out in"], pair: LowRank) -> Float[Array, ""]:
    """Measures the distance of factors from a matrix.

    Args:
      delta: The matrix, real.
      pair: The factors B and A.

    Returns:
      The Frobenius norm of delta - B A, summed over blocks of rows; B A is never formed as a whole.

    >>> float(residual(jnp.eye(2), LowRank(jnp.zeros((2, 1)), jnp.zeros((1, 2)))) ** 2).__round__(4)
    2.0
    """
    matrix = _matrix(delta)
    B, A = (x.astype(matrix.dtype) for x in pair)
    # Squares are summed after division by about the largest entry of delta or B A.
    unit = jnp.maximum(unit_of(matrix), unit_of(B) * unit_of(A))
    matrix, B = matrix * (1 / unit), B * (1 / unit)
    rows = matrix.shape[0]
    height = min(rows, _ROWS)

    def add(k: Array, total: Array) -> Array:
        # The last block starts earlier to have full height; its first rows were already counted.
        begin = jnp.minimum(k * height, rows - height)
        own, left = (lax.dynamic_slice_in_dim(x, begin, height) for x in (matrix, B))
        counted = begin + jnp.arange(height) < k * height
        return total + jnp.sum(jnp.where(counted, 0, jnp.sum(jnp.square(own - matmul(left, A)), 1)))

    zero = jnp.zeros((), matrix.dtype)
    return unit * jnp.sqrt(lax.fori_loop(0, -(-rows // height), add, zero))


@in_float64("model", "base")
def extract(
    model: PyTree,
    base: PyTree,
    rank: int | None = None,
    energy: float | None = None,
    *,
    input_axis: InputAxis = -1,
    matrices: Callable[[str], bool] | None = None,
) -> tuple[dict[str, LowRank], dict[str, Array]]:
    """Extracts an adapter from the difference between a model and its base.

    Deltas of leaves with exactly two axes, both longer than 1, are factored by `truncate`. Zero
    deltas are omitted. (Under a transformation the values are unknown, and all deltas are kept.)

    Args:
      model: A pytree with the leaf paths and shapes of the base.
      base: The model before fine-tuning.
      rank: The largest rank; see `truncate`.
      energy: The fraction of squared singular values to keep; see `truncate`.
      input_axis: -1 for matrices [out, in] (PyTorch), 0 for [in, out] (Flax).
      matrices: A predicate of leaf paths that selects matrices; all by default.

    Returns:
      The adapter, factors by path, and the deltas of all other changed leaves, by path, in float32
      (float64 for float64 input).

    Raises:
      ValueError: For another `input_axis`, and as `task_vectors` and `truncate` do.
      TypeError: As `task_vectors` and `truncate` do.

    >>> base = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(3)}
    >>> adapter, rest = extract({"w": jnp.ones((3, 2)), "b": jnp.ones(3)}, base, rank=1)
    >>> adapter["w"].rank, list(rest)
    (1, ['b'])
    """
    one_of("input_axis", input_axis, (-1, 0))
    deltas = task_vectors([model], base).delta
    adapter: dict[str, LowRank] = {}
    rest: dict[str, Array] = {}
    for path, stack in zip(leaf_paths(deltas), jax.tree.leaves(deltas), strict=True):
        delta = stack[0]
        values = concrete(delta)
        if values is not None and not values.any():
            continue
        if delta.ndim == 2 and min(delta.shape) > 1 and (matrices is None or matrices(path)):
            adapter[path], _ = truncate(delta.T if input_axis == 0 else delta, rank, energy)
        else:
            rest[path] = delta
    return adapter, rest


@in_float64("adapter")
def dense(adapter: Adapter, input_axis: InputAxis = -1) -> dict[str, Float[Array, "..."]]:
    """Multiplies out the factors of an adapter.

    Args:
      adapter: Factors by path.
      input_axis: -1 gives matrices [out, in] (PyTorch), 0 gives [in, out] (Flax).

    Returns:
      B A by path, or its transpose, in float32 at least.

    Raises:
      ValueError: For inconsistent factors, and for another `input_axis`.

    >>> dense({"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 3)))}, input_axis=0)["w"].shape
    (3, 2)
    """
    one_of("input_axis", input_axis, (-1, 0))
    return {path: _product(_pair(path, pair), input_axis) for path, pair in adapter.items()}


def add(
    base: PyTree, adapter: Adapter, scale: Float[ArrayLike, ""] = 1.0, *, input_axis: InputAxis = -1
) -> PyTree:
    """Adds an adapter to a model.

    Each leaf in the adapter becomes base + scale * B A, rounded once to the base's dtype. Other
    leaves stay unchanged.

    Args:
      base: The model.
      adapter: Factors by the path of the leaf.
      scale: The factor on the change; a finite number.
      input_axis: -1 for matrices [out, in] (PyTorch), 0 for [in, out] (Flax).

    Returns:
      A pytree with the structure and dtypes of the base.

    Raises:
      ValueError: For a path that is not in the base (the message suggests similar paths),
        inconsistent shapes, and as `dense` does.

    >>> pair = LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))
    >>> add({"w": jnp.zeros((2, 2))}, {"w": pair}, 0.5)["w"].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    paths, (leaves, treedef) = leaf_paths(base), jax.tree.flatten(base)
    products = dense(adapter, input_axis)
    for path, product in products.items():
        if path not in paths:
            raise ValueError(f"adapter: {path!r} is not a leaf of the base{nearest(path, paths)}")
        shape = np.shape(leaves[paths.index(path)])
        if shape != product.shape:
            raise ValueError(
                f"adapter, {path!r}: expected B A of shape {shape}, got {product.shape}"
            )
    return apply(base, treedef.unflatten(products.get(path) for path in paths), scale)


@in_float64("adapters")
def concatenate(
    adapters: Sequence[Adapter], weights: Sequence[float] | Array | None = None
) -> dict[str, LowRank]:
    """Adds adapters exactly, by concatenating their factors.

    The result represents sum_k w_k B_k A_k, with the factors [w_1 B_1 ... w_M B_M] and
    [A_1; ...; A_M]. Ranks add up; `refactor` reduces them.

    Args:
      adapters: At least one adapter. An adapter without a path adds nothing there.
      weights: One per adapter, finite; 1 by default.

    Returns:
      The sum as one adapter.

    Raises:
      ValueError: For missing adapters, invalid weights, and factors with products of different
        shapes.

    >>> one = {"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> both = concatenate([one, one], weights=[1.0, -0.5])
    >>> both["w"].rank, dense(both)["w"].tolist()
    (2, [[0.5, 0.5], [0.5, 0.5]])
    """
    w = task_weights(weights, len(_adapters(adapters)))
    adapter: dict[str, LowRank] = {}
    for path in _paths(adapters):
        pairs = [(w[k], _pair(path, a[path])) for k, a in enumerate(adapters) if path in a]
        shapes = {(pair.B.shape[0], pair.A.shape[1]) for _, pair in pairs}
        if len(shapes) > 1:
            raise ValueError(f"adapters, {path!r}: expected one shape of B A, got {sorted(shapes)}")
        # The weight multiplies only one factor, because on both it would be squared.
        B = jnp.concatenate([weight * pair.B for weight, pair in pairs], 1)
        adapter[path] = LowRank(B, jnp.concatenate([pair.A for _, pair in pairs], 0))
    return adapter


@in_float64("adapter")
def refactor(
    adapter: Adapter, rank: int | None = None, energy: float | None = None
) -> dict[str, LowRank]:
    """Reduces the rank of an adapter's factors, with the smallest error.

    Each B A becomes the best approximation, as in `truncate`, without forming B A: by a QR
    decomposition of both factors, then the singular values of a matrix [rank, rank]. Gradients are
    NaN if a factor has a lower rank than its shape allows, as for QR decompositions in general.

    Args:
      adapter: Factors by path.
      rank: The largest rank; see `truncate`.
      energy: The fraction of squared singular values to keep; see `truncate`.

    Returns:
      An adapter with the same paths.

    Raises:
      ValueError: For inconsistent factors, and as `truncate` does.
      TypeError: As `truncate` does.

    >>> one = {"w": LowRank(jnp.ones((3, 2)), jnp.ones((2, 3)))}  # a matrix of rank 1
    >>> small = refactor(one, rank=1)
    >>> small["w"].rank, dense(small)["w"].round(4)[0].tolist()
    (1, [2.0, 2.0, 2.0])
    """

    def truncated(path: str, pair: LowRank) -> LowRank:
        B, A = _pair(path, pair)
        # B A = Q (R L^T) P^T with orthonormal Q and P: its singular values are the small matrix's.
        Q, R = linalg.qr(B)
        P, L = linalg.qr(A.T)
        small, _ = truncate(matmul(R, L.T), rank, energy)
        return LowRank(matmul(Q, small.B), matmul(small.A, P.T))

    return {path: truncated(path, pair) for path, pair in adapter.items()}


@in_float64("adapters")
def merge_adapters(
    merge: Merge,
    adapters: Sequence[Adapter],
    rank: int | None = None,
    energy: float | None = None,
    *,
    weights: Sequence[float] | Array | None = None,
) -> dict[str, LowRank]:
    """Merges adapters by any merge of their products B A.

    The products B A are task vectors of a zero base. Their merge is factored again by `truncate`.
    Only one matrix at a time is dense, so a merge's statistics cover one matrix (`scope="tensor"`).
    (Averaging A and B separately, as is sometimes done, does not average the products.)

    Args:
      merge: For instance `methods.ties(density=0.2)`.
      adapters: At least one adapter. An adapter without a path has delta 0 there.
      rank: The largest rank of the result; by default, for each path, the largest rank of the
        adapters.
      energy: The fraction of squared singular values to keep; see `truncate`.
      weights: One per adapter; 1 by default.

    Returns:
      The merge as one adapter.

    Raises:
      ValueError: For missing adapters, inconsistent factors, and as `merge` and `truncate` do.
      TypeError: As `merge` and `truncate` do.

    >>> from sail_jax import methods
    >>> one = {"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> dense(merge_adapters(methods.linear(), [one, one]))["w"].round(4).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    _adapters(adapters)
    adapter = {}
    for path in _paths(adapters):
        pairs = {k: _pair(path, a[path]) for k, a in enumerate(adapters) if path in a}
        # An adapter without this matrix proposes no change of it, but keeps its weight.
        zero = jnp.zeros_like(_product(next(iter(pairs.values()))))
        deltas = [_product(pairs[k]) if k in pairs else zero for k in range(len(adapters))]
        merged = merge([{path: d} for d in deltas], {path: zero}, weights=weights)
        most = max(pair.rank for pair in pairs.values()) if rank is None else rank
        adapter[path], _ = truncate(merged[path], most, energy)
    return adapter


@in_float64("adapters")
def core_space(
    merge: Merge,
    adapters: Sequence[Adapter],
    rank: int | None = None,
    energy: float | None = None,
    *,
    weights: Sequence[float] | Array | None = None,
) -> dict[str, LowRank]:
    """Merges adapters by any merge of their core matrices, without forming a dense matrix.

    Let U be an orthonormal basis of the columns of all B_k, and V one of the rows of all A_k. Then
    B_k A_k = U M_k V^T, with the core matrix M_k = U^T B_k A_k V. The bases are the singular
    vectors of [B_1 ... B_M] and of [A_1; ...; A_M], with ranks at most the sum of the adapters'
    ranks. The M_k are merged as task vectors of a zero base, and U merge(M_1, ..., M_M) V^T is
    factored again by `truncate`.

    A merge that commutes with rotations, such as `methods.task_arithmetic` or `methods.tsv`, gives
    the result of `merge_adapters`. An elementwise merge, such as `methods.ties`, uses the entries
    of M_k. (KnOTS uses entries in the basis V only.) Gradients are NaN if the factors have a lower
    rank than their shapes allow, as in `refactor`.

    Args:
      merge: For instance `methods.ties(density=0.2)`.
      adapters: At least one adapter. An adapter without a path has delta 0 there.
      rank: The largest rank of the result; by default the rank of the merged core matrix.
      energy: The fraction of squared singular values to keep; see `truncate`.
      weights: One per adapter; 1 by default.

    Returns:
      The merge as one adapter.

    Raises:
      ValueError: For missing adapters, inconsistent factors, and as `merge` and `truncate` do.
      TypeError: As `merge` and `truncate` do.

    References:
      Panariello et al., Accurate and Efficient Low-Rank Model Merging in Core Space, 2025 (arXiv
      2509.17786); Stoica et al., Model Merging with SVD to Tie the Knots, 2024 (arXiv 2410.19735).

    >>> from sail_jax import methods
    >>> one = {"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> two = {"w": LowRank(jnp.ones((2, 1)), jnp.array([[2.0, 0.0]]))}
    >>> dense(core_space(methods.linear(), [one, two]))["w"].round(4).tolist()
    [[1.5, 0.5], [1.5, 0.5]]
    """
    adapter = {}
    stacked = concatenate(adapters)
    for path in _paths(adapters):
        B, A = stacked[path]
        U, V = _span(B), _span(A.T)
        # An adapter without this matrix proposes no change of it, but keeps its weight.
        zero = jnp.zeros((U.shape[1], V.shape[1]), B.dtype)
        pairs = [_pair(path, a[path]) if path in a else None for a in adapters]
        cores = [zero if p is None else matmul(matmul(U.T, p.B), matmul(p.A, V)) for p in pairs]
        merged = merge([{path: core} for core in cores], {path: zero}, weights=weights)
        small, _ = truncate(merged[path], rank, energy)
        adapter[path] = LowRank(matmul(U, small.B), matmul(small.A, V.T))
    return adapter


def _span(columns: Array) -> Array:
    """Returns an orthonormal basis of a matrix's columns: its left singular vectors."""
    Q, R = linalg.qr(columns)
    return matmul(Q, linalg.svd(R, full_matrices=False)[0])


def fold(params: PyTree, alpha: float, *, spec: Spec | None = None) -> PyTree:
    """Adds the factors that qwix stores next to weights to these weights, and removes them.

    A weight w with `w_lora_a` and `w_lora_b` becomes w + alpha / rank * a b, rounded once. Factor a
    has the contracted axes of w followed by the rank, and b has the rank followed by the other
    axes. Either group of axes may be joined to one axis. Both factors may be stacked on one of
    their first two axes, like w.

    Average runs after folding: the product of averages is not the average of products.

    Args:
      params: Nested mappings, such as the parameters of a Linen module or an `nnx.State`.
      alpha: The alpha of qwix's `LoraRule`, a finite number. The tree does not contain it.
      spec: The spaces of the weights. The axes that read a space are contracted. Required only if
        shapes are ambiguous.

    Returns:
      The parameters without factors, in mappings of the same types.

    Raises:
      ValueError: If there are no factors, one of a pair or its weight is missing, shapes are
        inconsistent or leave the contracted axes ambiguous, or `alpha` is not finite. The message
        contains the leaf.

    >>> layer = {"kernel": jnp.zeros((3, 2)), "kernel_lora_a": jnp.ones((3, 1))}
    >>> layer["kernel_lora_b"] = jnp.array([[1.0, 2.0]])
    >>> fold({"layer": layer}, alpha=0.5)["layer"]["kernel"][0].tolist()
    [0.5, 1.0]
    """
    flat, treedef = jax.tree.flatten(params)
    leaves = dict(zip(leaf_paths(params), flat, strict=True))
    pairs = factors(leaves)
    if not pairs:
        raise ValueError("params: expected leaves such as 'kernel_lora_a' of qwix, got none")
    for path, (a, b) in pairs.items():
        reads = None if spec is None else _reading(spec, path)
        leaves[path] = folded(leaves[path], leaves[a], leaves[b], alpha, path, reads)
    return _without_factors(treedef.unflatten(leaves.values()))


def factors(paths: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Pairs the factors that qwix stores next to weights.

    Args:
      paths: The leaves of a tree by path; their values are ignored.

    Returns:
      The paths of the factors a and b, by the path of the weight.

    Raises:
      ValueError: If a factor of a pair or its weight is missing.

    >>> factors({"w": 0, "w_lora_a": 1, "w_lora_b": 2})
    {'w': ('w_lora_a', 'w_lora_b')}
    """
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        if factor := factor_of(path):
            found.setdefault(factor[0], {})[factor[1]] = path
    for weight, pair in found.items():
        if len(pair) < 2:
            (one,) = pair.values()
            raise ValueError(f"{one!r}: the other factor of {weight!r} is missing")
        if weight not in paths:
            raise ValueError(
                f"{pair['a']!r}: its weight {weight!r} is missing; dequantise quantised weights "
                "first, and put separately saved factors next to their weights"
            )
    return {weight: (pair["a"], pair["b"]) for weight, pair in found.items()}


def _reading(spec: Spec, path: str) -> tuple[int, ...]:
    """Returns the axes of a leaf that read a space."""
    axes = enumerate(spec.axes(path))
    return tuple(i for i, axis in axes if any(f.role == "read" for f in axis))


def folded(
    weight: Array, a: Array, b: Array, alpha: float, path: str, reads: Sequence[int] | None = None
) -> Array:
    """Adds the product of qwix's factors to their weight.

    Args:
      weight: The weight.
      a: The factor with the contracted axes.
      b: The factor with the other axes.
      alpha: The alpha of the rule.
      path: The path of the weight, for messages.
      reads: The contracted axes. None: found from the shapes.

    Returns:
      The weight + alpha / rank * a b, in its dtype.

    Raises:
      ValueError: As `fold` does.
    """
    if not math.isfinite(alpha):
        raise ValueError(f"alpha: expected a finite number, got {alpha}")
    stack, chosen = _contracted(weight.shape, a.shape, b.shape, path, reads)

    def delta(shape: tuple[int, ...], a: Array, b: Array) -> Array:
        others = [i for i in range(len(shape)) if i not in chosen]
        left = a.reshape(-1, a.shape[-1])
        product = matmul(left, b.reshape(b.shape[0], -1))
        product = product.reshape([shape[i] for i in (*chosen, *others)])
        return product.transpose(np.argsort([*chosen, *others]))

    wide = jnp.promote_types(jnp.result_type(weight, a, b), jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    if stack is None:
        out = delta(weight.shape, a, b)
    else:
        shape = weight.shape[:stack] + weight.shape[stack + 1 :]
        at = min(stack, a.ndim - 1), min(stack, b.ndim - 1)
        out = jax.vmap(lambda a, b: delta(shape, a, b), at, stack)(a, b)
    rank = np.delete(a.shape, [] if stack is None else min(stack, a.ndim - 1))[-1]
    return (weight.astype(wide) + alpha / float(rank) * out).astype(weight.dtype)


def _contracted(
    w: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    path: str,
    reads: Sequence[int] | None,
) -> tuple[int | None, tuple[int, ...]]:
    """Finds the axis of a stack, and the contracted axes of the weight inside it."""

    def fitting(
        w: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        found = []
        # The number of choices doubles with each axis.
        for n in range(1, len(w) if len(w) <= _AXES else 0):
            for axes in itertools.combinations(range(len(w)), n):
                left = tuple(w[i] for i in axes)
                right = tuple(x for i, x in enumerate(w) if i not in axes)
                if len(a) < 2 or len(b) < 2 or a[-1] != b[0]:
                    continue
                if a[:-1] in (left, (math.prod(left),)) and b[1:] in (right, (math.prod(right),)):
                    found.append(axes)
        return found

    stacks: list[tuple[int | None, list[tuple[int, ...]]]] = [(None, fitting(w, a, b))]
    for t in (0, 1):
        at = [min(t, len(x) - 1) for x in (w, a, b)]
        if min(map(len, (w, a, b))) > 2 and w[at[0]] == a[at[1]] == b[at[2]]:
            cut = [x[:i] + x[i + 1 :] for x, i in zip((w, a, b), at, strict=True)]
            stacks.append((t, fitting(cut[0], cut[1], cut[2])))
    found = [(t, axes) for t, choices in stacks for axes in choices]
    if reads is not None:
        # Axes of the weight are counted including the stack.
        found = [
            (t, axes)
            for t, axes in found
            if {i + (t is not None and i >= t) for i in axes} == set(reads)
        ]
    elif len(w) == 2 and (None, (0,)) in found:
        # For a square matrix: Flax contracts the first axis.
        found = [(None, (0,))]
    if not found:
        raise ValueError(f"{path!r} of shape {w}: factors of shapes {a} and {b} do not fit it")
    if len(found) > 1:
        raise ValueError(
            f"{path!r} of shape {w}, with factors {a} and {b}: the contracted axes are ambiguous "
            f"({' or '.join(str(axes) for _, axes in found)}); give `spec`, the spaces of the axes"
        )
    return found[0]


def _without_factors(tree: PyTree) -> PyTree:
    """Copies nested mappings without the leaves that are factors."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {k: _without_factors(v) for k, v in tree.items() if factor_of(f"/{k}") is None}
    return type(tree)(kept)  # type: ignore[call-arg]


def _matrix(delta: ArrayLike) -> Array:
    """Converts to a matrix in float32 at least, checked to be real and non-empty."""
    matrix = _real("delta", delta)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"delta: expected a matrix with entries, got shape {matrix.shape}")
    # Decompositions do not support 16-bit matrices.
    return matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))


def _pair(path: str, pair: LowRank) -> LowRank:
    """Returns the factors in float32 at least, checked to be consistent."""
    B, A = (_real(f"adapter, {path!r}", x) for x in pair)
    if B.ndim != 2 or A.ndim != 2 or B.shape[1] != A.shape[0] or not B.shape[1]:
        raise ValueError(
            f"adapter, {path!r}: expected B [out, rank] and A [rank, in], got {B.shape}, {A.shape}"
        )
    dtype = jnp.promote_types(jnp.promote_types(A.dtype, B.dtype), jnp.float32)
    return LowRank(B.astype(dtype), A.astype(dtype))


def _real(name: str, x: ArrayLike) -> Array:
    """Converts x to an array, checked not to be complex."""
    array = jnp.asarray(x)
    if jnp.iscomplexobj(array):
        raise ValueError(f"{name}: expected real numbers, got {array.dtype}")
    return array


def _product(pair: LowRank, input_axis: InputAxis = -1) -> Array:
    """Computes B A, or its transpose for `input_axis=0`."""
    product = matmul(pair.B, pair.A)
    return product.T if input_axis == 0 else product


def _adapters(adapters: Sequence[Adapter]) -> Sequence[Adapter]:
    """Returns the adapters, checked to be a non-empty sequence."""
    if isinstance(adapters, Mapping) or not isinstance(adapters, Sequence) or not adapters:
        raise ValueError(f"adapters: expected at least one, in a sequence, got {adapters!r:.80}")
    return adapters


def _paths(adapters: Sequence[Adapter]) -> list[str]:
    """Lists the paths of all adapters, each once, in order."""
    return list(dict.fromkeys(path for adapter in adapters for path in adapter))


def check_rank(rank: int | None, most: int | None = None) -> int:
    """Checks a rank.

    Args:
      rank: The rank; None for `most`.
      most: The upper limit; None for no limit.

    Returns:
      The rank.

    Raises:
      ValueError: Unless it is an integer >= 1.
    """
    if rank is None and most is not None:
        return most
    rank = integer("rank", rank)
    return rank if most is None else min(rank, most)


def check_energy(energy: float) -> None:
    """Checks a fraction of squared singular values.

    Args:
      energy: The fraction.

    Raises:
      ValueError: Unless it is a number in (0, 1].
    """
    if isinstance(energy, bool) or not isinstance(energy, int | float) or not 0 < energy <= 1:
        raise ValueError(f"energy: expected a number in (0, 1], got {energy!r}")
