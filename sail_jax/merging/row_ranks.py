"""Ranks every entry in its row, for methods that require more than a threshold.

Ranks come from sorting a row and inverting the order. XLA sorts slowly on CPUs. If an evaluator can
compute ranks before a program requires them, NumPy computes them (`Step.ranked`). Key and position
then share one integer. Sorting these is vectorised, and equal keys stay in the order of their
positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

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
    """Computes `row_ranks` with NumPy, which is ten to twenty times faster on CPUs.

    It sorts integers of key and position, vectorised, and inverts the order. Rows with short keys
    (`_shortened`) need 32 bits, and half the time of 64 bits.

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
    step, bits = max(1, min(len(rows), IN_CACHE // n)), (n - 1).bit_length()
    position = np.tile(np.arange(n, dtype=np.uint32), (step, 1))
    first = np.repeat(np.arange(0, step * n, n, dtype=np.uint32), n).reshape(step, n)
    rank = position.astype(ranks.dtype, copy=False)

    def inverted(keys: np.ndarray) -> np.ndarray:
        """Ranks the rows of a block of keys, whose last `bits` bits are 0."""
        # One sort of integers gives the order, and equal keys stay in the order of their positions.
        keys |= position[: len(keys)]
        keys.sort(axis=1)
        # Places count over the whole block. One assignment then inverts all permutations.
        keys &= keys.dtype.type((1 << bits) - 1)
        keys += first[: len(keys)]
        places = keys.astype(np.int64) if keys.itemsize < 8 else keys.view(np.int64)
        out = np.empty(keys.shape, ranks.dtype)
        out.reshape(-1)[places.reshape(-1)] = rank[: len(keys)].reshape(-1)
        return out

    for start in range(0, len(rows), step):
        block, own = rows[start : start + step], ranks[start : start + step]
        free, long = _shortened(block, bits)
        if not long.all():
            own[:] = inverted(free)
        if long.any():
            free = np.left_shift(block[long], bits, dtype=np.uint64)
            own[long] = inverted(free)
    return ranks.reshape(shape)


def _shortened(
    keys: UInt[np.ndarray, "row n"], bits: int
) -> tuple[UInt[np.ndarray, "row n"], Bool[np.ndarray, "row"]]:
    """Maps keys to integers in the same order, with zeros at the end in place of the position.

    Differences of bfloat16 numbers have few digits, so their keys are short.

    Args:
      keys: uint32.
      bits: The number of zeros.

    Returns:
      The integers, and the rows with longer keys. Their integers are 0.
    """
    short = np.subtract(keys, np.uint32(1))
    # The smallest key above 0 becomes 1 << bits or slightly more; 0 wraps around and becomes 0.
    below = np.uint32(max(0, ((int(short.min()) + 1 >> bits) - 1) << bits))
    np.maximum(keys, below, out=short)
    short -= below
    used = np.bitwise_or.reduce(short, axis=1)
    spare = 32 - int(used.max()).bit_length()
    long = used << spare & (1 << bits) - 1 != 0
    short <<= np.uint32(spare)
    short[long] = 0
    return short, long
