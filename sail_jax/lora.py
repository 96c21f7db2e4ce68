"""Low-rank adapters, delta = B A: found in the difference of two checkpoints, and merged.

A factor pair stands for one matrix of a model, [out, in] as in PyTorch: B [out, rank] and
A [rank, in], so that y = x W^T gains x A^T B^T. Kernels laid out [in, out] (Flax) are transposed on
the way in and out by `input_axis=0`. Stacks of layers are leading axes of neither: one pair each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete, nearest
from sail_jax.merging.merge import Merge
from sail_jax.merging.task_vectors import apply, task_vectors, task_weights
from sail_jax.trees import leaf_paths

__all__ = [
    "Adapter",
    "LowRank",
    "add",
    "concatenate",
    "dense",
    "extract",
    "merge_adapters",
    "refactor",
    "truncate",
]

InputAxis = Literal[-1, 0]


class LowRank(NamedTuple):
    """B [out, rank] and A [rank, in]; the matrix is B A."""

    B: Float[Array, "out rank"]
    A: Float[Array, "rank in"]

    @property
    def rank(self) -> int:
        return self.A.shape[0]


Adapter = Mapping[str, LowRank]
"""Factors by the path of the matrix that they change."""


def _mm(*factors: Array) -> Array:
    product = factors[0]
    for factor in factors[1:]:
        product = jnp.matmul(product, factor, precision=lax.Precision.HIGHEST)
    return product


def truncate(
    delta: Float[ArrayLike, "out in"], rank: int | None = None, energy: float | None = None
) -> tuple[LowRank, Float[Array, ""]]:
    """The best approximation of a matrix by one of a rank, and its Frobenius error.

    The truncated SVD, with the singular values shared equally: B = U sqrt(S), A = sqrt(S) V^T. By
    Eckart and Young (1936) no other is nearer; the error is the root of the sum of the discarded
    S_i^2, and 0 up to rounding where delta has that rank.

    rank: at most this one (static), min(out, in) by default. energy: the least rank, at least 1,
    whose S_i^2 are at least this fraction of all (needs concrete values); the smaller of the two
    where both are given. ValueError for other shapes and values, TypeError for a traced `energy`.

    >>> pair, error = truncate(jnp.diag(jnp.array([3.0, 2.0, 1.0])), rank=2)
    >>> pair.rank, float(error)
    (2, 1.0)
    """
    delta = _real("delta", delta)
    if delta.ndim != 2 or 0 in delta.shape:
        raise ValueError(f"delta: expected a matrix with entries, got shape {delta.shape}")
    delta = delta.astype(jnp.promote_types(delta.dtype, jnp.float32))
    limit = _rank(rank, min(delta.shape))
    if energy is not None:
        _fraction(energy)
    U, S, Vt = jnp.linalg.svd(delta, full_matrices=False)
    if energy is not None:
        values = concrete(S)
        if values is None:
            raise TypeError("energy: the rank depends on values, which are traced; give `rank`")
        squares = np.cumsum(values.astype(float) ** 2)
        enough = np.searchsorted(squares, energy * squares[-1] * (1 - 1e-12)) + 1
        limit = min(limit, int(enough))
    root = jnp.sqrt(S[:limit])
    return LowRank(U[:, :limit] * root, root[:, None] * Vt[:limit]), jnp.linalg.norm(S[limit:])


def extract(
    model: PyTree,
    base: PyTree,
    rank: int | None = None,
    energy: float | None = None,
    *,
    input_axis: InputAxis = -1,
    matrices: Callable[[str], bool] | None = None,
) -> tuple[dict[str, LowRank], dict[str, Array]]:
    """An adapter of model - base by `truncate`, and the deltas of the leaves that it leaves out.

    Leaves with two axes longer than 1, or those among them that `matrices` chooses by path, become
    factors in float32 (float64 if given), at most of rank `rank` and as far as `energy` asks.
    Deltas of 0 are in neither result (under a transformation, where values are unknown, all are).
    Raises as `task_vectors` does for trees that do not fit, and as `truncate`.

    >>> base = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(3)}
    >>> adapter, rest = extract({"w": jnp.ones((3, 2)), "b": jnp.ones(3)}, base, rank=1)
    >>> adapter["w"].rank, list(rest)
    (1, ['b'])
    """
    _check_axis(input_axis)
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


def dense(adapter: Adapter, input_axis: InputAxis = -1) -> dict[str, Float[Array, "..."]]:
    """The products B A by path, transposed for input_axis=0; float32 at least."""
    _check_axis(input_axis)
    return {path: _product(_pair(path, pair), input_axis) for path, pair in adapter.items()}


def add(
    base: PyTree, adapter: Adapter, scale: Float[ArrayLike, ""] = 1.0, *, input_axis: InputAxis = -1
) -> PyTree:
    """base + scale * B A in the leaves that the adapter names, rounded once to the base's dtype.

    ValueError for a path that is no leaf of `base`, with the nearest ones, and for shapes that do
    not fit.

    >>> pair = LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))
    >>> add({"w": jnp.zeros((2, 2))}, {"w": pair}, 0.5)["w"].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    paths, (leaves, treedef) = leaf_paths(base), jax.tree.flatten(base)
    products = dense(adapter, input_axis)
    for path, product in products.items():
        if path not in paths:
            raise ValueError(f"adapter: {path!r} is no leaf of the base{nearest(path, paths)}")
        shape = np.shape(leaves[paths.index(path)])
        if shape != product.shape:
            raise ValueError(
                f"adapter, {path!r}: expected B A of shape {shape}, got {product.shape}"
            )
    return apply(base, treedef.unflatten(products.get(path) for path in paths), scale)


def concatenate(
    adapters: Sequence[Adapter], weights: Sequence[float] | Array | None = None
) -> dict[str, LowRank]:
    """The adapter of sum_k w_k B_k A_k, exactly: [w_1 B_1 ... w_M B_M] and [A_1; ...; A_M].

    Ranks add up (`refactor` cuts them down). An adapter without a path adds nothing to it.
    """
    w = task_weights(weights, len(_adapters(adapters)))
    adapter: dict[str, LowRank] = {}
    for path in _paths(adapters):
        pairs = [(w[k], _pair(path, a[path])) for k, a in enumerate(adapters) if path in a]
        shapes = {(pair.B.shape[0], pair.A.shape[1]) for _, pair in pairs}
        if len(shapes) > 1:
            raise ValueError(f"adapters, {path!r}: expected one shape of B A, got {sorted(shapes)}")
        B = jnp.concatenate([weight * pair.B for weight, pair in pairs], 1)
        adapter[path] = LowRank(B, jnp.concatenate([pair.A for _, pair in pairs], 0))
    return adapter


def refactor(
    adapter: Adapter, rank: int | None = None, energy: float | None = None
) -> dict[str, LowRank]:
    """Each B A by the best approximation of a rank, as `truncate` finds it, without forming B A:
    QR of both factors, then the SVD of a matrix [rank, rank]."""

    def truncated(path: str, pair: LowRank) -> LowRank:
        B, A = _pair(path, pair)
        Q, R = jnp.linalg.qr(B)
        P, L = jnp.linalg.qr(A.T)
        small, _ = truncate(_mm(R, L.T), rank, energy)
        return LowRank(_mm(Q, small.B), _mm(small.A, P.T))

    return {path: truncated(path, pair) for path, pair in adapter.items()}


def merge_adapters(
    merge: Merge,
    adapters: Sequence[Adapter],
    rank: int | None = None,
    energy: float | None = None,
    *,
    weights: Sequence[float] | Array | None = None,
) -> dict[str, LowRank]:
    """Any merge of the products B A as deltas from 0, factored again by `truncate`.

    One matrix at a time is dense, so a merge's statistics are of one matrix (`scope="tensor"`).
    Averaging A and B by themselves, as is sometimes done, is not averaging what they stand for.

    Args:
      merge: For instance `methods.ties(density=0.2)`.
      adapters: One without a path has delta 0 there.
      rank: Of the outcome; the largest among the adapters' by default.
      energy: See `truncate`.
      weights: One per adapter, 1 by default.

    >>> from sail_jax import methods
    >>> one = {"w": LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> dense(merge_adapters(methods.linear(), [one, one]))["w"].round(4).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    _adapters(adapters)
    adapter = {}
    for path in _paths(adapters):
        pairs = {k: _pair(path, a[path]) for k, a in enumerate(adapters) if path in a}
        zero = jnp.zeros_like(_product(next(iter(pairs.values()))))
        deltas = [_product(pairs[k]) if k in pairs else zero for k in range(len(adapters))]
        merged = merge([{path: d} for d in deltas], {path: zero}, weights=weights)
        most = max(pair.rank for pair in pairs.values()) if rank is None else rank
        adapter[path], _ = truncate(merged[path], most, energy)
    return adapter


def _pair(path: str, pair: LowRank) -> LowRank:
    """The factors in float32 at least; ValueError unless they fit."""
    B, A = (_real(f"adapter, {path!r}", x) for x in pair)
    if B.ndim != 2 or A.ndim != 2 or B.shape[1] != A.shape[0] or not B.shape[1]:
        raise ValueError(
            f"adapter, {path!r}: expected B [out, rank] and A [rank, in], got {B.shape}, {A.shape}"
        )
    dtype = jnp.promote_types(jnp.promote_types(A.dtype, B.dtype), jnp.float32)
    return LowRank(B.astype(dtype), A.astype(dtype))


def _real(name: str, x: ArrayLike) -> Array:
    array = jnp.asarray(x)
    if jnp.iscomplexobj(array):
        raise ValueError(f"{name}: expected real numbers, got {array.dtype}")
    return array


def _product(pair: LowRank, input_axis: InputAxis = -1) -> Array:
    product = _mm(pair.B, pair.A)
    return product.T if input_axis == 0 else product


def _adapters(adapters: Sequence[Adapter]) -> Sequence[Adapter]:
    if isinstance(adapters, Mapping) or not isinstance(adapters, Sequence) or not adapters:
        raise ValueError(f"adapters: expected at least one, in a sequence, got {adapters!r:.80}")
    return adapters


def _paths(adapters: Sequence[Adapter]) -> list[str]:
    return list(dict.fromkeys(path for adapter in adapters for path in adapter))


def _check_axis(input_axis: int) -> None:
    if input_axis not in (-1, 0):
        raise ValueError(f"input_axis: expected -1 or 0, got {input_axis!r}")


def _rank(rank: int | None, most: int | None = None) -> int:
    if rank is None and most is not None:
        return most
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank: expected an integer >= 1, got {rank!r}")
    return rank if most is None else min(rank, most)


def _fraction(energy: float) -> None:
    if isinstance(energy, bool) or not isinstance(energy, int | float) or not 0 < energy <= 1:
        raise ValueError(f"energy: expected a number in (0, 1], got {energy!r}")
