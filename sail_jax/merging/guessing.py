"""Thresholds that are guessed from a few entries, and proven by one count of all of them.

Checkpoints hold numbers of few digits. So the differences of two models in bfloat16 take few
values: of 2^20 of them some thousands, and a tenth of them may be equal to the threshold. Then a
sample shows which value it is. Whether it is, all entries decide. A key is that of rank k if

    (number of keys above it)  <  k  <=  (number of keys above it or equal to it)

and of no other key this is true. So a guess is either the threshold that the search for digits
(`ranking`) finds, or it is refused. The count takes one pass instead of the two for digits, and has
the number of equal keys in each piece as well, for which there would be a third. It is also cheaper
than a pass for digits: two comparisons of each key instead of an addition to one of 65,536 bins.

A guess that is refused shows by how much it is off, and is corrected. Where a sample repeats no
value, as in models in float32, nothing is guessed.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt

from sail_jax.merging import counting
from sail_jax.merging.arithmetic import per_task
from sail_jax.merging.counting import Wide
from sail_jax.merging.steps import Kernel, Piece, Visit, kernel

GUESSES = 4
"""How often a guess is counted before the search for digits takes over."""
DRAWN = 1 << 14
"""The number of keys that are taken of a piece for the sample."""
FOLDS = 8, 16
"""Of how many flags, and of how many of these sums, the sum fits half a byte, and a byte."""

Found = tuple[list[np.ndarray], list[Wide], tuple[Wide, ...]]


def guess(visit: Visit, keys: Kernel, ranks: Sequence[Wide]) -> Found | None:
    """Finds the keys of some ranks from a sample and a count.

    Args:
      visit: The walk over all pieces.
      keys: Kernel `(piece, delta, weight) -> [task, ...]`, unsigned integers.
      ranks: The ranks, each `[task]`, counted from 1 for the largest key.

    Returns:
      For each rank the keys, `[task]`, and their ranks among the keys that are equal to them; then
      the number of equal keys in each piece, as `Visit.keep` has it. None if nothing was guessed,
      or not well enough.
    """
    if (drawn := visit.sample(kernel(_drawn, keys))) is None:
        return None
    sample, share = drawn
    # Ascending: the place of rank k is counted from the end.
    sample = np.sort(sample, axis=1)
    wanted = np.array([(np.int64(rank.hi) << 16) + rank.lo for rank in ranks])  # [rank, task]
    top = np.iinfo(sample.dtype).max
    place = _places(sample, wanted * share)
    found = np.where(wanted > 0, np.take_along_axis(sample, place.T, 1).T, top)
    if not _repeats(sample, found, wanted).all():
        return None
    for _ in range(GUESSES):
        count = kernel(_count, keys, tuple(found))
        (above, equal), own = visit.keep(count, counting.add)
        above, equal = (np.array([(np.int64(n.hi) << 16) + n.lo for n in x]) for x in (above, equal))
        larger, smaller = wanted <= above, wanted > above + equal
        # Above all keys, as the key of rank 0 is.
        larger &= wanted > 0
        if not (larger | smaller).any():
            return list(found), [counting.wide(n) for n in wanted - above], own
        # The sample's own number of larger keys shows by how much it is off here.
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


def _places(sample: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The places in ascending samples of ranks in the sample, which need not be whole numbers."""
    size = sample.shape[1]
    return np.clip(size - np.ceil(rank).astype(int), 0, size - 1)


def _ranks(sample: np.ndarray, found: np.ndarray, side: str) -> np.ndarray:
    """How many keys of the sample of each task are smaller than a key ("left"), or at most it."""
    return np.array([
        [np.searchsorted(row, key, side) for row, key in zip(sample, keys, strict=True)]
        for keys in found
    ])  # fmt: skip


def _repeats(sample: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether a sample repeats keys so often that it shows which one it is."""
    first, last = (_ranks(sample, found, side) for side in ("left", "right"))
    size = sample.shape[1]
    # The number of larger keys in a sample has a deviation of at most this.
    spread = np.sqrt(first * (1 - first / size))
    return (last - first >= 1 + spread / 2) | (wanted == 0)


def _drawn(keys: Kernel, piece: Piece, delta: Array, weight: Array) -> UInt[Array, "task drawn"]:
    """Takes about `DRAWN` keys of a piece."""
    values = keys(piece, delta, weight)
    values = values.reshape(len(values), -1)
    # Odd, so that not all of them are of a few columns.
    return values[:, :: max(1, values.shape[1] // DRAWN) | 1]


def _count(
    keys: Kernel, found: tuple[Array, ...], piece: Piece, delta: Array, weight: Array
) -> tuple[tuple[tuple[Wide, ...], tuple[Wide, ...]], tuple[Wide, ...]]:
    """Counts the keys of a piece above some keys, and those equal to them."""
    values, inside = keys(piece, delta, weight), piece.inside(delta.shape[1:])
    counts = [_above_and_equal(values, key, inside) for key in found]
    above, equal = (tuple(each) for each in zip(*counts, strict=True))
    return (above, equal), equal


def _above_and_equal(
    keys: UInt[Array, "task ..."], of: UInt[Array, "task"], inside: Bool[Array, "..."] | None
) -> tuple[Wide, Wide]:
    """Counts the keys above one for each task, and those equal to it."""
    counting.check_size(keys)
    above, equal = (per_task(holds, keys, of) for holds in (jnp.greater, jnp.equal))
    if inside is not None:
        above, equal = above & inside, equal & inside
    size = math.prod(keys.shape[1:])
    if size % math.prod(FOLDS):
        return counting.occurrences(above), counting.occurrences(equal)
    # Both in one byte, which is faster than to count one after the other.
    flags = per_task(lambda a, b: jnp.where(b, jnp.uint8(16), a.astype(jnp.uint8)), above, equal)
    sums = [_folded(task.reshape(-1), FOLDS[0]) for task in flags]
    halves = ([half(task) for task in sums] for half in (lambda x: x & 15, lambda x: x >> 4))
    totals = (
        jnp.stack([_folded(task, FOLDS[1]).sum(dtype=jnp.uint32) for task in half])
        for half in halves
    )
    above, equal = map(counting.narrow_to_wide, totals)
    return above, equal


def _folded(x: UInt[Array, "n"], rows: int) -> UInt[Array, "m"]:
    """Adds up the rows of a vector, which is fast on CPUs."""
    return x.reshape(rows, -1).sum(0, dtype=jnp.uint8)
