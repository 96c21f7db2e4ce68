"""The rank of every entry in its row, for methods that need all of them and not a threshold.

One sorts a row for that, and inverts the order. XLA sorts slowly on CPUs. So where an evaluator can
find ranks before a program needs them, NumPy does (`Step.ranked`): keys and positions share one
integer of 64 bits, whose sort is vectorised, and equal keys stay in the order of their positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from sail_jax.merging.arithmetic import automatic

IN_CACHE = 1 << 15
"""The number of entries that are sorted at a time."""


def row_ranks(size: Float[Array, "... n"]) -> UInt[Array, "... n"]:
    """Ranks the entries of each row: how many come before each, in ascending order.

    Args:
      size: Not negative; rows lie along the last axis and have fewer than 2**31 entries.

    Returns:
      Ranks from 0, of the shape of `size`, uint16 or uint32; equal entries in order of position.
    """
    if size.size == 0:
        return jnp.zeros(size.shape, jnp.uint32)
    dtype = jnp.dtype(f"uint{8 * size.dtype.itemsize}")
    # Sizes are not negative, so that their bit patterns are ordered as they are.
    keys = lax.bitcast_convert_type(lax.stop_gradient(size), dtype)
    return automatic(_rank_by_xla, keys)(keys)


def _rank_dtype(n: int) -> type[np.unsignedinteger]:
    """The narrowest dtype that holds the ranks of a row of `n` entries."""
    return np.uint16 if n <= 1 << 16 else np.uint32


def _rank_by_xla(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    """Ranks by sorting twice: the ranks are the inverse of the permutation that sorts."""
    index = lax.broadcasted_iota(jnp.uint32, keys.shape, keys.ndim - 1)
    # Stable: equal magnitudes rank in row-major order.
    _, order = lax.sort((keys, index), num_keys=1, is_stable=True)
    _, rank = lax.sort((order, index), num_keys=1)
    return rank.astype(_rank_dtype(keys.shape[-1]))


def host_ranks(size: Float[np.ndarray, "... n"]) -> UInt[np.ndarray, "... n"]:
    """Ranks as `row_ranks` does, with NumPy alone, which on CPUs is some ten times faster.

    It is a vectorised sort of (key, position) in 64 bits, then its inverse.

    Args:
      size: See `row_ranks`.

    Returns:
      See `row_ranks`.
    """
    keys = size.view(f"u{size.dtype.itemsize}")
    shape, n = keys.shape, keys.shape[-1]
    rows = keys.reshape(-1, n)
    ranks = np.empty(rows.shape, _rank_dtype(n))
    if rows.dtype != np.uint32:  # wider keys leave no room for the position in 64 bits
        order = np.argsort(rows, axis=1, kind="stable")
        np.put_along_axis(ranks, order, np.arange(n, dtype=ranks.dtype)[None], 1)
        return ranks.reshape(shape)
    # Rows are sorted a cache's worth at a time.
    step = max(1, IN_CACHE // n)
    pairs = np.empty((step, n), np.uint64)
    position = np.arange(step * n, dtype=np.uint64).reshape(step, n)
    rank = np.broadcast_to(np.arange(n, dtype=ranks.dtype), (step, n))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        packed = pairs[: len(block)]
        # Key above, position below: one sort of integers gives the order, and equal keys stay in
        # the order of their positions.
        np.left_shift(block, np.uint64(32), out=packed, dtype=np.uint64)
        np.bitwise_or(packed, position[: len(block)], out=packed)
        packed.sort(axis=1)
        np.bitwise_and(packed, np.uint64(0xFFFFFFFF), out=packed)
        out = ranks[start : start + step].reshape(-1)
        # Positions count over the whole block, so one assignment inverts the permutations of all
        # rows.
        out[packed.view(np.int64).reshape(-1)] = rank[: len(block)].reshape(-1)
    return ranks.reshape(shape)
