"""Guesses thresholds from a few entries, and proves them by one count of all entries.

Checkpoints contain numbers of few digits. The differences of two bfloat16 models therefore take few
values: thousands among 2^20 differences, and a tenth of the differences may equal the threshold. A
sample then contains the value of the threshold. A count of all entries proves it, because a key has
rank k if and only if

    (number of keys above it)  <  k  <=  (number of keys above it or equal to it)

A guess is therefore either the threshold that the search for digits (`ranking`) finds, or it is
rejected. The search takes two passes for digits, and a third pass for the number of equal keys in
each piece. The count finds all of this in one pass. It is also cheaper: two comparisons of each key
instead of an addition to one of 65,536 bins.

The count of a rejected guess determines its error, which is used to correct the guess. If no value
is repeated in a sample, as in float32 models, nothing is guessed.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt

from sail_jax.merging import counting
from sail_jax.merging.counting import Wide
from sail_jax.merging.steps import Kernel, Piece, Pieces, kernel

GUESSES = 4
"""The number of guesses to count before the search for digits takes over."""
DRAWN = 61, 256
"""The number of runs in the sample of a piece, and the number of keys in each."""
COLUMNS = 1 << 14
"""The number of columns when a vector is divided into rows."""
FOLDS = 8, 16
"""The number of flags that add up to at most half a byte, and of such sums that fit a byte."""


class Ties(NamedTuple):
    """The number of keys equal to a threshold, for each task.

    Attributes:
      count: The number in a piece, or in all pieces before it; shape `[task]`.
      rows: The number in each row of the piece (`rows_of`), `[task, row]`.
    """

    count: Wide
    rows: UInt[Array, "task rows"]


def rows_of(keys: Array) -> tuple[int, int]:
    """Returns the numbers of rows and columns of the entries of a task.

    A matrix keeps its rows. A vector is divided into rows of `COLUMNS` entries if its length
    allows.

    Args:
      keys: Shape `[task, ...]`.

    Returns:
      The two numbers.
    """
    *rows, columns = keys.shape[1:] or (1,)
    if not rows and columns % COLUMNS == 0:
        return columns // COLUMNS, COLUMNS
    return math.prod(rows), columns


Side = Literal["left", "right"]
Found = tuple[list[np.ndarray], list[Wide], Any]


def guess(visit: Pieces, keys: Kernel, ranks: Sequence[Wide]) -> Found | None:
    """Finds the keys with given ranks from a sample and a count.

    Args:
      visit: The traversal of all pieces.
      keys: Kernel `(piece, delta, weight) -> [task, ...]`, unsigned integers.
      ranks: The ranks, each `[task]`; the largest key has rank 1.

    Returns:
      The keys of each rank, `[task]`, their ranks among equal keys, and the number of equal keys in
      each piece, as from `Visit.keep`. None if no guess succeeded.
    """
    if (drawn := visit.sample(kernel(_drawn, keys))) is None:
        return None
    sample, share = drawn
    # The sample is in ascending order; rank k counts from the end.
    sample = np.sort(sample, axis=1)
    wanted = _numbers(ranks)
    top = np.iinfo(sample.dtype).max
    place = _places(sample, wanted * share)
    found = np.where(wanted > 0, np.take_along_axis(sample, place.T, 1).T, top)
    if not _repeats(sample, found, wanted).all():
        return None
    for _ in range(GUESSES):
        count = kernel(_count, keys, tuple(found))
        (above, equal), own = visit.keep(count, counting.add)
        above, equal = _numbers(above), _numbers(equal)
        larger, smaller = wanted <= above, wanted > above + equal
        # The key of rank 0 is above all keys.
        larger &= wanted > 0
        if not (larger | smaller).any():
            return list(found), [counting.wide(n) for n in wanted - above], own
        # The comparison with the number of larger keys in the sample determines the error of the
        # sample here.
        last = _ranks(sample, found, "right")
        off = above * share - (sample.shape[1] - last)
        place = _places(sample, wanted * share - off)
        first = _ranks(sample, found, "left")
        place = np.where(larger, np.maximum(place, last), np.minimum(place, first - 1))
        if ((place < 0) | (place >= sample.shape[1]))[larger | smaller].any():
            return None
        place = np.clip(place, 0, sample.shape[1] - 1)
        better = np.take_along_axis(sample, place.T, 1).T
        found = np.where(larger | smaller, better, found)
    return None


def _numbers(counts: Sequence[Wide]) -> np.ndarray:
    """Converts counts to integers, `[rank, task]`."""
    return np.array([counting.integers(n) for n in counts])


def _places(sample: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Converts ranks, possibly fractional, to positions in ascending samples."""
    size = sample.shape[1]
    return np.clip(size - np.ceil(rank).astype(int), 0, size - 1)


def _ranks(sample: np.ndarray, found: np.ndarray, side: Side) -> np.ndarray:
    """Counts the sampled keys of each task that are < a key ("left") or <= a key ("right")."""
    return np.array([
        [np.searchsorted(row, key, side) for row, key in zip(sample, keys, strict=True)]
        for keys in found
    ])  # fmt: skip


def _repeats(sample: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Checks whether a key is repeated so often in a sample that the guess is reliable."""
    first, last = _ranks(sample, found, "left"), _ranks(sample, found, "right")
    size = sample.shape[1]
    # The standard deviation of the number of larger keys in a sample is at most this.
    spread = np.sqrt(first * (1 - first / size))
    return (last - first >= 1 + spread / 2) | (wanted == 0)


def _drawn(keys: Kernel, piece: Piece, delta: Array, weight: Array) -> UInt[Array, "task drawn"]:
    """Samples some runs of the keys of a piece."""
    runs, length = DRAWN
    values = keys(piece, delta, weight)
    every = math.prod(values.shape[1:]) // runs
    # The number of runs is prime. Otherwise all runs might come from a few columns.
    drawn = [
        task.reshape(-1)[: runs * every].reshape(runs, every)[:, :length].reshape(-1)
        for task in values
    ]
    return jnp.stack(drawn)


def _count(
    keys: Kernel, found: tuple[Array, ...], piece: Piece, delta: Array, weight: Array
) -> tuple[tuple[tuple[Wide, ...], tuple[Wide, ...]], tuple[Ties, ...]]:
    """Counts the keys of a piece above given keys, and equal to them."""
    values, inside = keys(piece, delta, weight), piece.inside(delta.shape[1:])
    counts = [_above_and_equal(values, key, inside) for key in found]
    above, equal = (tuple(each) for each in zip(*counts, strict=True))
    return (above, tuple(ties.count for ties in equal)), equal


def _above_and_equal(
    keys: UInt[Array, "task ..."], of: UInt[Array, "task"], inside: Bool[Array, "..."] | None
) -> tuple[Wide, Ties]:
    """Counts, for each task, the keys above a given key and equal to it."""
    counting.check_size(keys.shape[1:])
    counts = [_in_rows(task, key, inside) for task, key in zip(keys, of, strict=True)]
    above, equal = map(jnp.stack, zip(*counts, strict=True))
    larger, same = (counting.narrow_to_wide(x.sum(1, dtype=jnp.uint32)) for x in (above, equal))
    return larger, Ties(same, equal)


def _in_rows(
    keys: UInt[Array, "..."], of: UInt[Array, ""], inside: Bool[Array, "..."] | None
) -> tuple[UInt[Array, "rows"], UInt[Array, "rows"]]:
    """Counts, in each row of a task, the keys above a given key and equal to it."""
    above, equal = keys > of, keys == of
    if inside is not None:
        above, equal = above & inside, equal & inside
    shape = rows_of(keys[None])
    if shape[1] % math.prod(FOLDS):
        larger, same = (counting.row_sums(x.reshape(shape)) for x in (above, equal))
        return larger, same
    # Counting both in one byte is faster than counting one after another.
    flags = jnp.where(equal, jnp.uint8(16), above.astype(jnp.uint8)).reshape(shape)
    sums = _folded(flags, FOLDS[0])
    larger, same = (
        _folded(half, FOLDS[1]).sum(1, dtype=jnp.uint32) for half in (sums & 15, sums >> 4)
    )
    return larger, same


def _folded(x: UInt[Array, "rows n"], times: int) -> UInt[Array, "rows m"]:
    """Adds up parts of each row in bytes, which is fast on CPUs."""
    return x.reshape(len(x), times, -1).sum(1, dtype=jnp.uint8)
