"""Finds exact thresholds, the k-th largest entry of a tensor or of a whole model, without sorting.

The definition is short. For the sizes of n entries, in order of (path, index),

    order = argsort(-sizes, kind="stable")      # the largest first; ties in order of position
    threshold = sizes[order[k - 1]]             # the k-th largest: rank k
    kept = order[:k]                            # exactly k entries

A model cannot be sorted like this. It may be larger than memory, and be divided into pieces or over
several devices. XLA also sorts slowly: 2^20 numbers take 200 ms on one core. A threshold estimated
from a sample or a sketch would depend on the division of the model, and would keep k entries only
approximately.

Entries are therefore counted. The bits of a float >= 0, read as an unsigned integer, have the same
order. This integer is the key of the entry. The key of rank k is found from its highest digit down,
like a word in a dictionary. For example, let four entries have the keys 0110, 1001, 0110 and 0101
(6, 9, 6 and 5), let digits have two bits, and let k = 2:

    first digit       00 01 10 11
    keys with it       0  3  1  0     1 key has a larger digit than 01, so 01 is the first digit.
                                      The key is the 2 - 1 = 1st among those that begin with 01.
    second digit      00 01 10 11
    of these keys      0  1  2  0     0 keys have a larger digit than 10, so the key is 0110.
                                      1 of the keys equal to it is needed.
    kept               9, and the first 6

A piece contributes the number of its keys with each digit. These numbers add up over pieces in any
order, so each digit needs one pass over the model. One more pass counts the keys equal to the
threshold in each piece. A piece then keeps as many of them as earlier pieces leave.

The width of digits depends on the location of the keys (`Pieces.bits`). Two digits of 16 bits,
counted into 65,536 bins, read a file only twice. They take 0.6 ms for 2^20 keys on one core. Four
digits of 8 bits are cheaper for small leaves.

In a traced program, digits have one bit. Bins would cost too much there, so a comparison and a sum
count the keys. One loop covers all leaves and compiles to a few instructions on every device.
Devices exchange counts and no keys. The same loop finds the position of the last entry. The
position adds further bits below the key's bits: first the leaf in order of paths, then the index.
Most searches end earlier, when a cut keeps exactly the wanted number of entries.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass
from jaxtyping import Array, Bool, Float, Int, UInt

from sail_jax.merging import counting
from sail_jax.merging.arithmetic import automatic, is_manual, per_task
from sail_jax.merging.counting import Numbers, Wide, numpy_of, row_sums
from sail_jax.merging.guessing import Ties, guess, rows_of
from sail_jax.merging.steps import STATIC, Kernel, Leaves, Piece, Pieces, Statistic, Visit, kernel

SPARE = 1 << 10
"""The number of bins for keys that do not count."""
BLOCK = 1 << 7
"""The number of entries that a search adds up at a time."""

ALL = np.uint32(0xFFFFFFFF)
"""An index after all entries of a leaf."""

Keys = UInt[Array, "task ..."]
"""Unsigned integers in the order of the ranking, for each task."""


# --- keys


def _key_bits() -> int:
    return 8 * _key_dtype().itemsize


def _key_dtype() -> np.dtype:
    """Returns the dtype of keys, as wide as the default float for float32 and float64 leaves."""
    return np.dtype(f"uint{8 * jnp.dtype(jnp.result_type(float)).itemsize}")


def magnitude(
    delta: Float[Array, "task ..."], weight: Float[Array, "task ..."]
) -> UInt[Array, "task ..."]:
    """Computes the keys of magnitudes, |delta| as unsigned integers in the same order.

    Args:
      delta: Shape `[task, ...]`.
      weight: Broadcasts with `delta`. Entries of weight 0 are masked and have the key 0.

    Returns:
      Keys, shape `[task, ...]`: uint32, or uint64 if JAX has 64 bits enabled. Gradients do not flow
      through them.
    """

    def as_key(d: Array, w: Array) -> Array:
        # Masked entries rank last, with the key of 0. The gradient is stopped before the cast to
        # bits, which JAX cannot differentiate.
        size = lax.stop_gradient(jnp.where(w != 0, jnp.abs(d), 0))
        return lax.bitcast_convert_type(_widened(size), _key_dtype())

    return per_task(as_key, delta, weight)


def _widened(size: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes magnitudes in JAX's default float dtype, including subnormal float32 numbers."""
    wide = size.astype(jnp.result_type(float))
    if size.dtype != jnp.float32 or wide.dtype == size.dtype:
        return wide
    # XLA would treat subnormal numbers as 0. Such a number is its bits times the smallest number.
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    return jnp.where(bits < 1 << 23, bits.astype(wide.dtype) * 2.0**-149, wide)


def _magnitudes(piece: Piece, delta: Array, weight: Array) -> UInt[Array, "task ..."]:
    return magnitude(delta, weight)


MAGNITUDES = kernel(_magnitudes)
"""The kernel of `magnitude`, for `Order.keys`."""


def key_of_float(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Computes the keys of floats of both signs, unsigned integers in the same order.

    Args:
      x: Floats, in an array of any shape.

    Returns:
      Keys of the same shape: uint32, or uint64 if JAX has 64 bits enabled.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.result_type(float)), _key_dtype())
    sign = jnp.asarray(1 << 8 * bits.dtype.itemsize - 1, bits.dtype)
    # The bit patterns of negative floats ascend as the floats descend, so all their bits are
    # flipped.
    return jnp.where(bits >= sign, ~bits, bits | sign)


def float_of_key(key: UInt[Numbers, "..."], signed: bool = False) -> Float[Array, "..."]:
    """Converts keys back to floats.

    Args:
      key: Keys of any shape.
      signed: Whether the keys are from `key_of_float`; if not, from `magnitude`.

    Returns:
      Floats of the same shape and width.
    """
    if signed:
        sign = jnp.asarray(1 << 8 * key.dtype.itemsize - 1, key.dtype)
        key = jnp.where(key >= sign, key ^ sign, ~key)
    return lax.bitcast_convert_type(jnp.asarray(key), jnp.result_type(float))


# --- the search


class Threshold(NamedTuple):
    """The key of a given rank, for each task.

    During the search it contains the digits found so far, and the rank among the keys that begin
    with them.

    Attributes:
      key: The key, shape `[task]`.
      rank: The number of keys equal to it that are needed, at least 1. Shape `[task]`.
    """

    key: UInt[Numbers, "task"]
    rank: Wide


class Cut(NamedTuple):
    """The cut of a ranking of whole leaves, for each task; the counterpart of `Threshold`.

    Attributes:
      key: Larger keys are kept. Shape `[task]`.
      ends: Keys equal to `key` are kept before this row-major index of each leaf, uint32. Shape
        `[leaf, task]`, with leaves in the order of `Piece.place`.
    """

    key: UInt[Array, "task"]
    ends: UInt[Array, "leaf task"]


Bound = Threshold | Cut
"""The end of a ranking: for pieces, or for whole leaves."""
Earlier = Wide | Ties | Int[Array, ""]
"""A further argument of `take`: the equal keys before a piece, or the place of a leaf."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Order(Statistic):
    """A statistic: the keys of given ranks. The largest key has rank 1.

    It finds a tuple with one `Threshold` for each rank. The ranks come from the number of entries
    (`sized`: one `Wide` for each rank, a scalar or `[task]`), or from earlier statistics. The key
    of rank 0 is above all keys.

    Attributes:
      keys: Kernel `(*found, piece, delta, weight) -> [task, ...]`, unsigned integers.
      ranks: Kernel `(*found) -> ranks` if the ranks depend on earlier statistics.
      tasks: The number of rows of keys, if it differs from the number of models.
      ties: Whether a kernel receives one more argument for `take`, the number of equal keys before
        its piece for each rank. Keys are in order of (path, row-major index).
    """

    keys: Kernel
    ranks: Kernel | None = None
    tasks: int | None = field(default=None, metadata=STATIC)
    ties: bool = field(default=False, metadata=STATIC)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: tuple[Wide, ...]
    ) -> tuple[tuple[Threshold, ...] | tuple[Cut, ...], tuple[Any, ...]]:
        """Searches for the keys of all ranks together; see `Statistic.find`."""
        keys = self.keys.bind(*found)
        ranks = prepared if self.ranks is None else visit.run(self.ranks, *found)
        tasks = self.tasks or visit.tasks
        if isinstance(visit, Leaves):
            return _cut(visit, keys, tasks, ranks, self.ties)
        assert isinstance(visit, Pieces)
        digits = _key_bits() // visit.bits
        # No digit is known yet, and every key begins with the empty head.
        head = np.zeros(tasks, _key_dtype())
        start = tuple(Threshold(head, counting.for_each(tasks, rank)) for rank in ranks)
        if (guessed := guess(visit, keys, [threshold.rank for threshold in start])) is not None:
            keys_found, left, equal = guessed
            own = (visit.before(equal),) if self.ties else ()
            return tuple(map(Threshold, keys_found, left)), own

        def narrow(i: int | Array, thresholds: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
            # All ranks share the count of the first digit, under the empty head. This requires a
            # separate program, which is worthwhile for large counts.
            share = visit.bits == 16 and isinstance(i, int) and i == 0
            heads = tuple(threshold.key for threshold in (thresholds[:1] if share else thresholds))
            left = np.asarray(digits - 1) - i
            shift = (left * visit.bits).astype(_key_dtype())
            count = kernel(_count_digits, keys, heads, shift, bits=visit.bits)
            counts = visit.fold(count, counting.add)
            return tuple(map(_next_digit, thresholds, counts * len(ranks) if share else counts))

        thresholds = visit.repeat(digits, narrow, start)
        if not self.ties:
            return thresholds, ()
        equal = kernel(_count_equal, keys, tuple(threshold.key for threshold in thresholds))
        return thresholds, (visit.before(visit.keep(equal, counting.add)[1]),)

    def passes(self, bits: int) -> int:
        """Counts the passes: one for each digit, and one for equal keys."""
        return _key_bits() // bits + self.ties

    def visiting_bytes(self, size: int) -> int:
        """Returns the memory for counting; see `Statistic.visiting_bytes`."""
        # measured: each further rank adds this memory for its counts
        return 40 * max(0, len(self.prepare(size)) - 1)


def _cut(
    visit: Leaves, keys: Kernel, tasks: int, ranks: Sequence[Wide], ties: bool
) -> tuple[tuple[Cut, ...], tuple[Any, ...]]:
    """Searches for the cuts after given ranks by bisection, in a loop of the program.

    With `ties`, a cut lies between two entries, and the place of each leaf is returned for `take`.
    Without `ties`, the keys of the cuts are the keys of the ranks.
    """
    parts = zip(*ranks, strict=True)
    wanted = Wide(*(jnp.stack(jnp.broadcast_arrays(*x)).reshape(len(ranks), -1) for x in parts))
    # Each entry has a unique (key, place of the leaf, index). A cut consists of three such words;
    # the last two count from the end. Their bits are found from the highest down.
    leaves, largest = (visit.leaves, visit.largest) if ties else (1, 1)
    bits = [_key_bits(), (leaves - 1).bit_length(), (largest - 1).bit_length()]
    dtype = _key_dtype()
    step = np.zeros((sum(bits), len(bits), 1, 1), dtype)
    for word, n in enumerate(bits):
        step[sum(bits[:word]) :][:n, word, 0, 0] = [1 << i for i in reversed(range(n))]

    def at(words: Array) -> Cut:
        key, leaf, index = words
        ends = (largest - jnp.minimum(index, largest)).astype(jnp.uint32)[None]
        if leaves > 1:
            place = np.arange(leaves, dtype=np.int32)[:, None, None]
            last = leaves - 1 - leaf.astype(jnp.int32)
            ends = jnp.where(place < last, ALL, jnp.where(place == last, ends, 0))
        return Cut(key, ends)

    def going(state: Any) -> Array:
        i, _, found = state
        return (i < sum(bits)) & ~found.all()

    def halve(state: Any) -> Any:
        i, words, found = state
        more = words | jnp.asarray(step)[i]
        count = kernel(_count_kept, keys, at(more), ties=ties)
        # Up to 2**16 leaves add up before a carry is needed.
        kept = counting.carry(*visit.fold(count, functools.partial(jax.tree.map, operator.add)))
        enough = ~counting.less(kept, wanted)
        # This cut keeps exactly the wanted number of entries, so the remaining bits do not matter.
        exact = enough & ~counting.less(wanted, kept)
        return i + 1, jnp.where(enough, more, words), found | exact if ties else found

    shape = len(ranks), tasks
    start = jnp.int32(0), np.zeros((len(bits), *shape), dtype), np.zeros(shape, bool)
    if is_manual():
        # Each device searches its own shard. The first step, which always runs, makes the state
        # vary with the device, as a loop requires.
        start = halve(start)
    cut = at(lax.while_loop(going, halve, start)[1])
    cuts = tuple(Cut(key, cut.ends[:, i]) for i, key in enumerate(cut.key))
    return cuts, (visit.each(kernel(_places, count=len(cuts))),) if ties else ()


def _count_kept(keys: Kernel, cuts: Cut, *of: Any, ties: bool) -> Wide:
    """Counts the entries that each cut keeps, `[rank, task]`."""
    values, inside = _keys_inside(keys, *of)
    kept: list[Array] = []
    for key, end in zip(cuts.key, cuts.ends[of[0].place], strict=True):
        # Without ties, keys may be the largest integer.
        kept.extend(_until(values, key, end) if ties else per_task(jnp.greater_equal, values, key))
    counts = counting.occurrences(kept if inside is None else [x & inside for x in kept])
    return Wide(*(part.reshape(cuts.key.shape) for part in counts))


def _places(piece: Piece, *, count: int) -> tuple[Any, ...]:
    """Returns the place of a leaf, once for each cut."""
    return (jnp.asarray(piece.place, jnp.int32),) * count


def _next_digit(threshold: Threshold, counts: Wide) -> Threshold:
    """Appends a digit to a threshold, given the number of keys with each digit, `[task, digit]`."""
    tasks, digits = counts.lo.shape
    if digits <= 256:
        digit, rank = _reached(counts, threshold.rank)
    else:
        # Two steps find the digit's upper and lower byte.
        blocks = Wide(*(part.reshape(tasks, -1, 256) for part in counts))
        totals = counting.carry(*(part.sum(2, dtype=np.uint32) for part in blocks))
        high, rank = _reached(totals, threshold.rank)
        low, rank = _reached(counting.pick(blocks, high), rank)
        digit = high << 8 | low
    bits = digits.bit_length() - 1
    return Threshold(threshold.key << bits | digit.astype(threshold.key.dtype), rank)


def _reached(counts: Wide, rank: Wide) -> tuple[Numbers, Wide]:
    """Finds the smallest digit for which fewer than `rank` keys have a larger digit.

    Also returns the rank among the keys with this digit. The number of keys with digit 0 does not
    matter. Rank 0 gives the last digit.
    """
    space = numpy_of(counts.lo)
    digit = np.arange(counts.lo.shape[1])
    # A masked sum, since XLA compiles running sums slowly.
    above = digit[:, None] < digit  # [digit, digit]
    sums = [space.where(above, part[:, None], 0).sum(-1, dtype=np.uint32) for part in counts]
    larger = counting.carry(*sums)
    # `larger` falls with the digit, so the number of digits that are too small is the answer.
    small = ~counting.less(larger, Wide(rank.hi[:, None], rank.lo[:, None]))
    reached = space.minimum(small.sum(-1, dtype=np.int32), len(digit) - 1)
    return reached, counting.subtract(rank, counting.pick(larger, reached))


def _count_digits(
    keys: Kernel, heads: tuple[Array, ...], shift: Array, *of: Any, bits: int
) -> tuple[Wide, ...]:
    """Counts, for each head, the keys that begin with it by their next digit, `[task, 2**bits]`.

    `of` is (piece, delta, weight).
    """
    values, inside = _keys_inside(keys, *of)
    return tuple(histogram(values, head, shift, inside, bits) for head in heads)


def _count_equal(
    keys: Kernel, thresholds: tuple[Array, ...], *of: Any
) -> tuple[tuple[()], tuple[Wide, ...]]:
    """Counts the keys equal to each threshold."""
    values, inside = _keys_inside(keys, *of)

    def count(threshold: Array) -> Wide:
        hits = per_task(jnp.equal, values, threshold)
        return counting.occurrences(hits if inside is None else hits & inside)

    return (), tuple(map(count, thresholds))


def _keys_inside(
    keys: Kernel, piece: Piece, delta: Array, weight: Array
) -> tuple[Keys, Bool[Array, "..."] | None]:
    """Computes the keys of a piece, and a mask without padding (None if nothing is padded)."""
    return keys(piece, delta, weight), piece.inside(delta.shape[1:])


def histogram(
    keys: UInt[Array, "task ..."],
    head: UInt[Array, "task"],
    shift: UInt[Array, ""],
    inside: Bool[Array, "..."] | None = None,
    bits: int = 16,
) -> Wide:
    """Counts the keys that begin with a head, by their next digit.

    Args:
      keys: Shape `[task, ...]`, fewer than 2**32 for each task.
      head: The required bits above the digit, shape `[task]`.
      shift: The number of bits below the digit.
      inside: A mask of the entries to count, in the shape of `keys` without the tasks. By default
        all entries count.
      bits: The number of bits of the digit.

    Returns:
      Counts, shape `[task, 2**bits]`.

    Raises:
      ValueError: For a leaf with more entries.
    """
    counting.check_size(keys.shape[1:])

    def digits(key: Array, head: Array) -> tuple[Array, Array]:
        rest = key >> shift
        counts = rest >> bits == head if inside is None else (rest >> bits == head) & inside
        return (rest & ((1 << bits) - 1)).astype(jnp.int32).reshape(-1), counts.reshape(-1)

    def by_scatter(keys: Array, heads: Array) -> Array:
        return _each_task(lambda key, head: _scattered(*digits(key, head), 1 << bits), keys, heads)

    def by_sort(keys: Array, heads: Array) -> Array:
        return _each_task(
            lambda key, head: _sorted_counts(*digits(key, head), 1 << bits), keys, heads
        )

    # Lowering selects the branch, because `jit` may not know the device earlier.
    counts = lax.platform_dependent(keys, head, cpu=by_scatter, default=by_sort)
    return counting.narrow_to_wide(counts)


def _each_task(function: Callable[..., Array], *arrays: Array) -> Array:
    # A batched scatter (vmap) is several times slower on CPUs.
    if len(arrays[0]) > 8:
        return lax.map(lambda pair: function(*pair), arrays)
    return jnp.stack([function(*pair) for pair in zip(*arrays, strict=True)])


def _scattered(digit: Array, counts: Array, bins: int) -> UInt[Array, "bins"]:
    """Counts digits into bins by scatter-add, which is fast on CPUs."""
    # On CPUs, dropping masked digits is twice as slow as counting them in spare bins. Repeated
    # additions to one bin are slow too, so neighbours alternate between two counters.
    place = lax.iota(jnp.int32, digit.size)
    digit = jnp.where(counts, digit, bins + place % SPARE)
    counters = jnp.zeros(2 * (bins + SPARE), jnp.uint32)
    counters = counters.at[2 * digit + place % 2].add(jnp.uint32(1), mode="promise_in_bounds")
    return counters.reshape(-1, 2).sum(1, dtype=jnp.uint32)[:bins]


def _sorted_counts(digit: Array, counts: Array, bins: int) -> UInt[Array, "bins"]:
    """Counts digits by sorting: accelerators sort fast but scatter to equal places slowly."""
    ordered = jnp.sort(jnp.where(counts, digit, bins))
    # Masked digits are sorted after the last bin, and the difference below ignores them.
    ends = jnp.searchsorted(ordered, jnp.arange(bins + 1), side="left")
    return jnp.diff(ends).astype(jnp.uint32)


# --- which entries are kept


def take(keys: Keys, threshold: Bound, before: Earlier) -> Bool[Array, "task ..."]:
    """Selects the keys of a piece with the rank of a threshold, or a better rank.

    All keys above the threshold are selected. Of the keys equal to it, the first ones in row-major
    order are selected, up to the number that earlier pieces leave. Over all pieces, the number of
    selected keys is exactly the rank.

    Args:
      keys: The keys of a piece, shape `[task, ...]`. The largest integer must not occur.
      threshold: The threshold, and the total number of equal keys to select.
      before: The number of equal keys in earlier pieces, shape `[task]`, optionally with the number
        in each row of this piece. For a `Cut`, the place of this leaf.

    Returns:
      A mask of the shape of `keys`.
    """
    if keys.size == 0:
        return keys > 0
    if isinstance(threshold, Cut):
        return automatic(_until, keys)(keys, threshold.key, threshold.ends[before])
    count, *rows = before if isinstance(before, Ties) else (before,)
    assert isinstance(count, Wide)
    left = counting.rest(threshold.rank, count)
    return automatic(_take, keys)(keys, threshold.key, left, *rows)


def _until(keys: Array, thresholds: Array, ends: Array) -> Array:
    """Selects the keys above a threshold, and the keys equal to it before an index."""
    index = lax.iota(jnp.uint32, math.prod(keys.shape[1:])).reshape(keys.shape[1:])
    # This takes fewer operations than two comparisons. Ranked keys are small enough to add 1.
    return per_task(
        lambda key, least, end: key + (index < end).astype(key.dtype) > least,
        keys, thresholds, ends,
    )  # fmt: skip


def _take(
    keys: Array, thresholds: Array, left: Array, in_rows: Array | None = None
) -> Bool[Array, "task ..."]:
    """Selects keys as `take` does; `left` is the number of equal keys that earlier pieces leave.

    By definition these keys have a running count of at most `left`. XLA computes running counts
    slowly. Instead a search finds the last of these keys, first its row and then its place in the
    row. Equal keys up to this place are selected.
    """
    rows, columns = rows_of(keys)
    if in_rows is None:
        in_rows = per_task(
            lambda key, least: row_sums((key == least).reshape(rows, columns)), keys, thresholds
        )
    row, left, row_keys = _descend(in_rows, left, keys)
    column = _first_reaching((row_keys == thresholds[:, None]).astype(jnp.uint32), left)
    # The end lies after the last selected key, or at the start of the row if none is selected.
    end = row * columns + jnp.where(left > 0, column + 1, 0)
    return _until(keys, thresholds, end)


def _first_reaching(
    counts: UInt[Array, "task n"], wanted: UInt[Array, "task"]
) -> UInt[Array, "task"]:
    """Finds the first entry at which a running sum reaches the wanted number.

    It is the largest i with sum(counts[:i]) < wanted: n if the total is less, and 0 if `wanted` is
    0. The search uses bisection, because XLA compiles running sums slowly. Many counts are first
    added up in blocks.
    """
    tasks, n = counts.shape
    if n % BLOCK == 0 and n > BLOCK * BLOCK // 4:
        # A search among blocks and a search in one block replace a bisection that would sum all
        # counts in each round.
        sums = counts.reshape(tasks, n // BLOCK, BLOCK).sum(2, dtype=jnp.uint32)
        block, left, block_counts = _descend(sums, wanted, counts)
        return jnp.minimum(block * BLOCK + _first_reaching(block_counts, left), n)
    place = lax.iota(jnp.uint32, n)

    def halve(k: Array, at: Array) -> Array:
        # The answer is built from its highest bit down. A bit stays if the sum before it is too
        # small.
        further = at | jnp.uint32(1) << (n.bit_length() - 1 - k).astype(jnp.uint32)
        passed = jnp.where(place < further[:, None], counts, 0).sum(1, dtype=jnp.uint32)
        return jnp.where((further <= n) & (passed < wanted), further, at)

    start = jnp.zeros_like(wanted)
    if is_manual() and n:
        # Counts, wanted numbers and results vary with the device, and the state of a loop must have
        # the same type at its start and end.
        start = wanted & 0 | counts[:, 0] & 0
    return lax.fori_loop(0, n.bit_length(), halve, start)


def _descend(
    sums: UInt[Array, "task rows"], wanted: UInt[Array, "task"], entries: UInt[Array, "task ..."]
) -> tuple[Array, Array, Array]:
    """Finds the first row at which the running sum of rows reaches the wanted number.

    Returns the row, the number left to reach in it, and its entries. If no row reaches the number,
    the entries are those in the last row.
    """
    rows = sums.shape[1]
    row = _first_reaching(sums, wanted)
    before = jnp.where(lax.iota(jnp.uint32, rows) < row[:, None], sums, 0)

    def pick(table: Array, at: Array) -> Array:
        # Each task is reshaped separately. XLA would write a reshaped stack of keys to memory.
        return lax.dynamic_index_in_dim(table.reshape(rows, -1), at, 0, False)

    picked = per_task(pick, entries, jnp.minimum(row, rows - 1).astype(jnp.int32))
    return row, wanted - before.sum(1, dtype=jnp.uint32), picked
