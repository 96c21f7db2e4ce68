"""Ranks every entry in its row, for methods that require more than a threshold.

Ranks come from sorting a row and inverting the order. XLA sorts slowly on CPUs. If an evaluator can
compute ranks before a program requires them, NumPy computes them (`Step.ranked`). Its radix sort
takes 16 bits at a time, and equal keys stay in the order of their positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt16

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
    if keys.shape[-1] <= 1 << 16:  # one array is sorted five times as fast as two
        rank = lax.sort(order << 16 | index) & 0xFFFF
    else:
        _, rank = lax.sort((order, index), num_keys=1)
    return in_parts(rank.astype(_rank_dtype(keys.shape[-1])), -2)


def host_ranks(size: Float[np.ndarray, "... n"]) -> UInt[np.ndarray, "... n"]:
    """Computes `row_ranks` with NumPy, which is ten to twenty times faster on CPUs.

    Rows are sorted by codes of 16 bits (`_codes`), for which NumPy has a stable radix sort. Rows in
    which the codes of different keys are equal are sorted again by all digits, if their order is
    wrong.

    Args:
      size: See `row_ranks`.

    Returns:
      See `row_ranks`.
    """
    keys = size.view(f"u{size.dtype.itemsize}")
    shape, n = keys.shape, keys.shape[-1]
    rows = keys.reshape(-1, n)
    ranks = np.empty(rows.shape, _rank_dtype(n))
    # Rows are sorted in blocks that fit into the cache.
    step = max(1, min(len(rows), IN_CACHE // n))

    def inverted(order: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Ranks the entries of a block from the places of its sorted entries, into `out`."""
        # Places count over the whole block. One assignment then inverts all permutations. The
        # ranks are made after the sort, which needs the most memory.
        rank = np.tile(np.arange(n, dtype=ranks.dtype), len(order))
        out.reshape(-1)[order.reshape(-1)] = rank
        return out

    for start in range(0, len(rows), step):
        block, own = rows[start : start + step], ranks[start : start + step]
        order = _order(_codes(block), 16)
        inverted(order, own)
        ordered = block.take(order)
        wrong = (ordered[:, 1:] < ordered[:, :-1]).any(1)
        del order, ordered
        if wrong.any():
            again = _order(block[wrong], 8 * keys.itemsize)
            own[wrong] = inverted(again, np.empty(again.shape, ranks.dtype))
    return ranks.reshape(shape)


def _codes(keys: UInt[np.ndarray, "row n"]) -> UInt16[np.ndarray, "row n"]:
    """Maps keys to integers below 2**16 that never descend where keys ascend.

    Differences of bfloat16 numbers have few digits, so their codes are nearly always different.

    Args:
      keys: Unsigned integers.

    Returns:
      The codes, uint16.
    """
    # 0 wraps around, so this is the smallest key above 0.
    most = int(keys.max())
    least = min(int((keys - keys.dtype.type(1)).min()) + 1, most)
    shift = max(0, (most - least).bit_length() - 15)
    base = max(0, (least >> shift) - 1)
    codes = keys >> shift
    np.maximum(codes, base, out=codes)
    codes -= base
    return codes.astype(np.uint16)


def _order(keys: UInt[np.ndarray, "row n"], bits: int) -> Int[np.ndarray, "row n"]:
    """Sorts each row stably by the last bits of the keys.

    Args:
      keys: Unsigned integers.
      bits: The number of bits, a multiple of 16.

    Returns:
      The places of the sorted keys in the flat array.
    """
    first = np.arange(0, keys.size, keys.shape[1])[:, None]
    order = np.argsort(keys.astype(np.uint16, copy=False), axis=1, kind="stable")
    order += first
    # The last digit is sorted first, and each sort keeps the order of equal digits.
    for shift in range(16, bits, 16):
        digits = (keys >> shift).astype(np.uint16).take(order)
        order = order.take(np.argsort(digits, axis=1, kind="stable") + first)
    return order
