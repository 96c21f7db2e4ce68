"""Ranks every entry in its row, for methods that require more than a threshold.

Ranks come from sorting a row and inverting the order. XLA sorts slowly on CPUs. If an evaluator can
compute ranks before a program requires them, NumPy computes them (`Step.ranked`).
"""

import functools
import timeit
from collections.abc import Callable

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

    Args:
      size: See `row_ranks`.

    Returns:
      See `row_ranks`.
    """
    keys = size.view(f"u{size.dtype.itemsize}")
    n = keys.shape[-1]
    rows = keys.reshape(-1, n)
    ranks = np.empty(rows.shape, _rank_dtype(n))
    ordered = _by_digits if n <= IN_CACHE and _digits_are_faster() else _by_comparison
    # Rows are sorted in blocks that fit into the cache.
    step = max(1, min(len(rows), IN_CACHE // n))
    for start in range(0, len(rows), step):
        block, own = rows[start : start + step], ranks[start : start + step]
        # Places count over the whole block. One assignment then inverts all permutations.
        order = ordered(block).reshape(-1)
        own.reshape(-1)[order] = np.tile(np.arange(n, dtype=ranks.dtype), len(block))
    return ranks.reshape(keys.shape)


Places = Int[np.ndarray, "row n"]
"""The places of the sorted entries of each row in the flat array; equal entries by position."""


def _by_comparison(keys: UInt[np.ndarray, "row n"]) -> Places:
    """Sorts rows of integers that consist of a key and its place. They are all different, so the
    fastest sort of NumPy, which is not stable, orders them."""
    if keys.itemsize > 4:
        return np.argsort(keys, axis=1, kind="stable") + _first(keys)
    both = keys.astype(np.uint64)
    both <<= 32
    both |= np.arange(keys.size, dtype=np.uint32).reshape(keys.shape)
    both.sort(axis=1)
    both &= 0xFFFFFFFF
    return both.view(np.int64)


def _by_digits(keys: UInt[np.ndarray, "row n"]) -> Places:
    """Sorts rows by codes of 16 bits, for which NumPy has a stable radix sort. Rows in which the
    codes of different keys are equal are sorted again, if their order is wrong."""
    order = np.argsort(_codes(keys), axis=1, kind="stable") + _first(keys)
    ordered = keys.take(order)
    wrong = (ordered[:, 1:] < ordered[:, :-1]).any(1)
    if wrong.any():
        again = _by_comparison(keys[wrong])
        order[wrong] = again - _first(again) + _first(keys)[wrong]
    return order


def _first(keys: np.ndarray) -> Int[np.ndarray, "row 1"]:
    """Returns the place of the first entry of each row."""
    return np.arange(0, keys.size, keys.shape[1])[:, None]


def _codes(keys: UInt[np.ndarray, "row n"]) -> UInt16[np.ndarray, "row n"]:
    """Maps keys to integers below 2**16 that never descend where keys ascend.

    Differences of bfloat16 numbers have few digits, so their codes are nearly always different.
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


@functools.cache
def _digits_are_faster() -> bool:
    """Compares both sorts on this processor, which takes some milliseconds.

    NumPy compares many integers in one instruction. An EPYC of the generation Zen 5 sorts more than
    twice as fast this way as by digits. On an older one digits are faster.
    """
    numbers = np.random.default_rng(0).integers(1 << 15, size=(32, IN_CACHE // 32), dtype=np.uint32)

    def seconds(sort: Callable[[np.ndarray], Places]) -> float:
        return min(timeit.repeat(lambda: sort(numbers), number=1, repeat=5))

    return seconds(_by_digits) < seconds(_by_comparison)
