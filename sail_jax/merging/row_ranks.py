"""Ranks every entry in its row, for methods that require more than a threshold.

Ranks come from sorting a row and inverting the order. XLA sorts slowly on CPUs. If an evaluator can
compute ranks before a program requires them, NumPy computes them (`Step.ranked`). Key and position
then share one 64-bit integer. Sorting these is vectorised, and equal keys stay in the order of
their positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from sail_jax.merging.arithmetic import automatic
from sail_jax.merging.placement import in_parts

IN_CACHE = 1 << 15
"""The number of entries that are sorted at a time."""


def row_ranks(size: Float[Array, "... n"]) -> UInt[Array, "... n"]:
    """Ranks the entries of each row in ascending order, from 0.

    Args:
      size: Values >= 0. Rows run along the last axis and have fewer than 2**31 entries.

    Returns:
      Ranks in the shape of `size`, uint16 or uint32. Equal entries rank by position.
    """
    if size.size == 0:
        return jnp.zeros(size.shape, jnp.uint32)
    dtype = jnp.dtype(f"uint{8 * size.dtype.itemsize}")
    # Sizes are at least 0, so their bit patterns have the same order.
    keys = lax.bitcast_convert_type(lax.stop_gradient(size), dtype)
    return automatic(_rank_by_xla, keys)(keys)


def _rank_dtype(n: int) -> type[np.unsignedinteger]:
    """Returns the narrowest dtype for the ranks of a row of `n` entries."""
    return np.uint16 if n <= 1 << 16 else np.uint32


def _rank_by_xla(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    """Ranks by sorting twice: the ranks are the inverse of the sorting permutation."""
    keys = in_parts(keys, -2)  # a divided row would be gathered for each sort
    index = lax.broadcasted_iota(jnp.uint32, keys.shape, keys.ndim - 1)
    # Stable: equal magnitudes rank in row-major order.
    _, order = lax.sort((keys, index), num_keys=1, is_stable=True)
    _, rank = lax.sort((order, index), num_keys=1)
    return in_parts(rank.astype(_rank_dtype(keys.shape[-1])), -2)


def host_ranks(size: Float[np.ndarray, "... n"]) -> UInt[np.ndarray, "... n"]:
    """Computes `row_ranks` with NumPy, which is about ten times faster on CPUs.

    It sorts (key, position) in 64 bits, vectorised, and inverts the order.

    Args:
      size: See `row_ranks`.

    Returns:
      See `row_ranks`.
    """
    keys = size.view(f"u{size.dtype.itemsize}")
    shape, n = keys.shape, keys.shape[-1]
    rows = keys.reshape(-1, n)
    ranks = np.empty(rows.shape, _rank_dtype(n))
    if rows.dtype != np.uint32:  # wider keys do not fit into 64 bits together with the position
        order = np.argsort(rows, axis=1, kind="stable")
        np.put_along_axis(ranks, order, np.arange(n, dtype=ranks.dtype)[None], 1)
        return ranks.reshape(shape)
    # Rows are sorted in blocks that fit into the cache.
    step = max(1, IN_CACHE // n)
    pairs = np.empty((step, n), np.uint64)
    position = np.arange(step * n, dtype=np.uint64).reshape(step, n)
    rank = np.broadcast_to(np.arange(n, dtype=ranks.dtype), (step, n))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        packed = pairs[: len(block)]
        # The key takes the upper bits and the position the lower bits. One sort of integers then
        # gives the order, and equal keys stay in the order of their positions.
        np.left_shift(block, np.uint64(32), out=packed, dtype=np.uint64)
        np.bitwise_or(packed, position[: len(block)], out=packed)
        packed.sort(axis=1)
        np.bitwise_and(packed, np.uint64(0xFFFFFFFF), out=packed)
        out = ranks[start : start + step].reshape(-1)
        # Positions count over the whole block. One assignment then inverts the permutations of all
        # rows.
        out[packed.view(np.int64).reshape(-1)] = rank[: len(block)].reshape(-1)
    return ranks.reshape(shape)
