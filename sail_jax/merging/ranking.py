"""Exact order statistics of tensors and trees, by counting instead of sorting.

The bit pattern of a non-negative float, read as an unsigned integer, is in the same order: it is
the key of the float. The k-th largest key is found digit by digit from the top: its first digit is
the largest one such that at least k keys have this first digit or a larger one. A piece of a leaf
contributes how many of its keys have which digit. Such counts add up, so a threshold over a whole
model takes one pass over the leaves for each digit, in any order and in any pieces. Keys equal to
the threshold are taken in order of (path, row-major index).

How wide a digit is depends on where the keys are (`Visit.bits`). Two digits of 16 bits, counted
into 65,536 bins, are fast on CPUs and read a file only twice. Four of 8 bits cost less where leaves
are small. Digits of one bit need no bins: one comparison and one sum for each, in a loop that
compiles to a few instructions on every device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.buffer_callback import buffer_callback
from jax.tree_util import register_dataclass
from jaxtyping import Array, Bool, Float, UInt

from sail_jax.merging.arithmetic import automatic, per_task
from sail_jax.merging.counting import (
    HALF,
    Numbers,
    Wide,
    add,
    carry,
    check_size,
    choose,
    less,
    narrow_to_wide,
    numpy_of,
    occurrences,
    row_sums,
    subtract,
)
from sail_jax.merging.steps import STATIC, Kernel, Piece, Visit, kernel

__all__ = [
    "MAGNITUDES",
    "Found",
    "Order",
    "float_of_key",
    "key_of_float",
    "magnitude",
    "row_ranks",
    "take",
]

SPARE = 1 << 10
"""The number of bins for keys that do not count."""
COLUMNS = 1 << 14
"""The number of columns of the rows into which a vector is divided."""
LONG = 1 << 8
"""The number of columns from which the counts of rows are kept."""
BLOCK = 1 << 7
"""The number of entries that are added up at a time in a search for one of many."""


# --- keys


def _key_bits() -> int:
    return 8 * _key_dtype().itemsize


def _key_dtype() -> np.dtype:
    """Keys are as wide as floats are, so that float32 and float64 leaves share one scale."""
    return np.dtype(f"uint{8 * jnp.dtype(jnp.result_type(float)).itemsize}")


def magnitude(
    delta: Float[Array, "task ..."], weight: Float[Array, "task ..."]
) -> UInt[Array, "task ..."]:
    """Computes keys of magnitudes: |delta| as unsigned integers in the same order.

    Args:
      delta: Shape `[task, ...]`.
      weight: Broadcasts with `delta`; entries of weight 0 are masked and have the key 0.

    Returns:
      Keys, shape `[task, ...]`: uint32, or uint64 if JAX computes in 64 bits. No gradient flows
      through them.
    """

    def as_key(d: Array, w: Array) -> Array:
        # What is masked ranks last, with the key of 0. Keys are integers and have no gradient: it
        # is stopped before the cast to bits, which JAX cannot differentiate.
        size = lax.stop_gradient(jnp.where(w != 0, jnp.abs(d), 0))
        return lax.bitcast_convert_type(_widened(size), _key_dtype())

    return per_task(as_key, delta, weight)


def _widened(size: Float[Array, "..."]) -> Float[Array, "..."]:
    """Magnitudes in JAX's default float dtype, those below its normal numbers in float32, too."""
    wide = size.astype(jnp.result_type(float))
    if size.dtype != jnp.float32 or wide.dtype == size.dtype:
        return wide
    # XLA would take them for 0. Such a number is its bits times the smallest one.
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    return jnp.where(bits < 1 << 23, bits.astype(wide.dtype) * 2.0**-149, wide)


def _magnitudes(piece: Piece, delta: Array, weight: Array) -> UInt[Array, "task ..."]:
    return magnitude(delta, weight)


MAGNITUDES = kernel(_magnitudes)
"""The kernel of `magnitude`, for `Order.keys`."""


def key_of_float(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Computes keys of floats of both signs: unsigned integers in the same order.

    Args:
      x: Floats, in an array of any shape.

    Returns:
      Keys of the same shape: uint32, or uint64 if JAX computes in 64 bits.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.result_type(float)), _key_dtype())
    sign = jnp.asarray(1 << 8 * bits.dtype.itemsize - 1, bits.dtype)
    # The patterns of negative floats ascend as the floats descend: all their bits are flipped.
    return jnp.where(bits >= sign, ~bits, bits | sign)


def float_of_key(key: UInt[Array, "..."], signed: bool = False) -> Float[Array, "..."]:
    """Converts keys back to floats.

    Args:
      key: Keys of any shape.
      signed: Whether they are keys of `key_of_float`, or else of `magnitude`.

    Returns:
      Floats of the same shape, float32 or float64 as the keys are wide.
    """
    if signed:
        sign = jnp.asarray(1 << 8 * key.dtype.itemsize - 1, key.dtype)
        key = jnp.where(key >= sign, key ^ sign, ~key)
    return lax.bitcast_convert_type(key, jnp.result_type(float))


# --- order statistics


class Found(NamedTuple):
    """The result of a search: for each task the key of some rank.

    During the search it holds the digits found so far, and the rank among the keys that begin with
    them.

    Attributes:
      key: The key, shape `[task]`.
      rank: The rank among the keys equal to it, counted from 1: how many of them are needed. Shape
        `[task]`.
    """

    key: UInt[Array, "task"]
    rank: Wide


@register_dataclass
@dataclass(frozen=True, eq=False)
class Order:
    """A statistic: the keys of some ranks, counted from 1 for the largest key.

    It finds a tuple with one `Found` for each rank. With `ties` a kernel gets two further
    arguments, each a tuple with one entry for each rank: how many equal keys lie before its piece,
    and how many lie in each row of it (None if that was not kept).

    Attributes:
      keys: Kernel `(*found, piece, delta, weight) -> [task, ...]`, unsigned integers.
      sized: The ranks as a function of the number of entries; `Wide` scalars or `[task]`. The key
        of rank 0 is above all that occur.
      ranks: Kernel `(*found) -> ranks`, where they follow from earlier statistics instead.
      tasks: The number of rows of keys, if it is not that of the models.
      ties: Whether each piece is to know how many equal keys lie before it, and in its rows. With
        that `take` finds those of equal keys that come first in (path, row-major index).
    """

    keys: Kernel
    sized: Callable[[int], tuple[Wide, ...]] | None = field(default=None, metadata=STATIC)
    ranks: Kernel | None = None
    tasks: int | None = field(default=None, metadata=STATIC)
    ties: bool = field(default=False, metadata=STATIC)

    def prepare(self, size: int) -> tuple[Wide, ...]:
        """Computes the ranks that follow from the number of entries; see `Statistic.prepare`.

        Args:
          size: The number of entries of the tensor or the tree.

        Returns:
          One `Wide` for each rank; empty if ranks follow from other statistics.
        """
        return () if self.sized is None else self.sized(size)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: tuple[Wide, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Searches for the keys of all ranks together; see `Statistic.find`.

        Args:
          visit: The walk over all pieces.
          found: The results of earlier statistics of the step.
          prepared: The ranks, from `prepare`.

        Returns:
          The found keys, and with `ties` what each piece keeps, as in `Order`.
        """
        ranks = prepared if self.ranks is None else visit.run(self.ranks, *found)
        tasks = self.tasks or visit.tasks
        # No digit is known yet, so every key begins with the empty head.
        none: Any = np.zeros(tasks, _key_dtype())
        state = tuple(Found(none, _for_each(tasks, rank)) for rank in ranks)
        search = _by_bits if visit.bits == 1 else _by_digits
        state, equal, in_rows = search(visit, self.keys.bind(*found), state, self.ties)
        return (state,), (visit.before(equal), in_rows) if self.ties else ()

    def passes(self, bits: int) -> int:
        """Counts the passes of a search; see `Statistic.passes`.

        Args:
          bits: How many bits of a key one pass finds.

        Returns:
          One pass for each digit, and one more for the equal keys, which a search bit by bit counts
          along.
        """
        return _key_bits() // bits + (self.ties and bits > 1)

    def kept_bytes(self) -> float:
        """Returns what pieces keep; see `Statistic.kept_bytes`.

        Returns:
          0: counts of rows of fewer than `LONG` columns are not kept, and those of longer rows are
          small.
        """
        return 0

    def visiting_bytes(self, size: int) -> int:
        """Returns the memory that counting takes; see `Statistic.visiting_bytes`.

        Args:
          size: The number of entries of the tensor.

        Returns:
          24 bytes for each rank after the first, as was measured.
        """
        # measured: the keys below each further rank are counted beside those below the first
        return 24 * max(0, len(self.prepare(size)) - 1)

    def compiled(self) -> "Order":
        """Returns the statistic without `sized`; see `Statistic.compiled`.

        Returns:
          The statistic for which code is specialised.
        """
        return replace(self, sized=None)


def _by_digits(
    visit: Visit, keys: Kernel, state: tuple[Found, ...], ties: bool
) -> tuple[tuple[Found, ...], Any, Any]:
    """Searches by digits of many bits, which are counted into bins.

    Returns the found keys, and the numbers of equal keys in each piece and in each of its rows
    (None without `ties`).
    """
    digits = _key_bits() // visit.bits

    def narrow(digit: Any, state: tuple[Found, ...]) -> tuple[Found, ...]:
        # No digit is known before the first: all ranks share one count, which is worth a program of
        # its own where there is much to count.
        first = visit.bits == 16 and isinstance(digit, int) and digit == 0
        heads = tuple(search.key for search in (state[:1] if first else state))
        left: Any = np.asarray(digits - 1) - digit
        # How far to the right the digit is that is looked for now: the top one first.
        shift = (left * visit.bits).astype(_key_dtype())
        count = kernel(_count_digits, keys, heads, shift, bits=visit.bits)
        # Invariant: `key` holds the digits of the threshold that are known, and `rank` the rank of
        # the threshold among the keys that begin with them.
        return _next_digits(state, visit.fold(count, _add_each))

    state = visit.repeat(digits, narrow, state)
    if not ties:
        return state, None, None
    equal = kernel(_count_equal, keys, tuple(search.key for search in state))
    own = visit.keep(equal, _add_each)[1]
    return state, *(visit.each(lambda pair, i=i: pair[i], own) for i in range(2))


def _by_bits(
    visit: Visit, keys: Kernel, state: tuple[Found, ...], ties: bool
) -> tuple[tuple[Found, ...], Any, Any]:
    """Searches bit by bit, with comparisons alone.

    Each piece counts its keys that begin with the bits found so far. When the last bit is found
    these are its keys equal to the threshold, which thus need no pass of their own.
    """
    digits = _key_bits()

    def narrow(digit: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, begun = carry
        shift = (digits - 1 - digit).astype(_key_dtype())
        count = kernel(_count_ones, keys, tuple(search.key for search in state), shift, ties=ties)
        counts, ones = visit.keep(count, _add_each)
        # If fewer keys go on with a 1 than the rank asks for, the next bit of the threshold is 0.
        ahead = tuple(less(n, search.rank) for n, search in zip(counts, state, strict=True))

        def go_on(ones: tuple[Wide, ...], begun: tuple[Wide, ...]) -> tuple[Wide, ...]:
            triples = zip(ahead, ones, begun, strict=True)
            # Of the keys that began alike, those with the bit that was chosen still do.
            return tuple(choose(zero, subtract(n, hit), hit) for zero, hit, n in triples)

        return _next_digits(state, counts), visit.each(go_on, ones, begun) if ties else None

    def everything(size: Wide) -> tuple[Wide, ...]:
        shape = (*size.lo.shape, len(state[0].key))
        all_keys = Wide(*(jnp.broadcast_to(part[..., None], shape) for part in size))
        return (all_keys,) * len(state)

    begun = visit.each(everything, visit.sizes()) if ties else None
    state, begun = visit.repeat(digits, narrow, (state, begun))
    unknown = (None,) * len(state)
    return state, begun, visit.each(lambda _: unknown, begun) if ties else None


def _for_each(tasks: int, rank: Wide) -> Wide:
    """Repeats a rank for each of some tasks, with NumPy if it is NumPy's."""
    return Wide(*(numpy_of(part).broadcast_to(part, (tasks,)) for part in rank))


def _add_each(a: Sequence[Wide], b: Sequence[Wide]) -> tuple[Wide, ...]:
    """Adds counts rank by rank."""
    return tuple(map(add, a, b))


def _count_digits(
    keys: Kernel, heads: tuple[Array, ...], shift: Array, *args: Any, bits: int
) -> tuple[Wide, ...]:
    """Counts for each head the keys that begin with it, by their next digit.

    The counts have the shape `[task, 2**bits]`. `args` is (piece, delta, weight), as in the
    functions below.
    """
    values, inside = _keys_inside(keys, *args)
    return tuple(histogram(values, head, shift, inside, bits) for head in heads)


def _count_ones(
    keys: Kernel, heads: tuple[Array, ...], shift: Array, *args: Any, ties: bool
) -> tuple[tuple[Wide, ...], Any]:
    """Counts for each head the keys that begin with it and have a 1 as their next bit, `[task]`."""
    prefixes = tuple(head << 1 | 1 for head in heads)
    counts = _count_where(lambda key, p: key >> shift == p, prefixes, *_keys_inside(keys, *args))
    return counts, counts if ties else ()


def _count_equal(
    keys: Kernel, thresholds: tuple[Array, ...], *args: Any
) -> tuple[tuple[()], tuple[tuple[Wide, ...], tuple[Array | None, ...]]]:
    """Counts the keys equal to each threshold, in a piece and in each of its rows."""
    values, inside = _keys_inside(keys, *args)
    check_size(values)
    in_rows = tuple(_equal_in_rows(values, least, inside) for least in thresholds)
    totals = tuple(narrow_to_wide(rows.sum(1, dtype=jnp.uint32)) for rows in in_rows)
    # Counts of short rows, kept for all pieces of a model, would be as large as the model.
    return (), (totals, in_rows if _rows(values)[1] >= LONG else (None,) * len(in_rows))


def _equal_in_rows(
    keys: UInt[Array, "task ..."], thresholds: UInt[Array, "task"], inside: Array | None = None
) -> UInt[Array, "task rows"]:
    """Counts the keys of each row that are equal to the threshold of their task."""
    shape = _rows(keys)

    def count(key: Array, least: Array) -> Array:
        equal = key == least if inside is None else (key == least) & inside
        return row_sums(equal.reshape(shape))

    return per_task(count, keys, thresholds)


def _keys_inside(
    keys: Kernel, piece: Piece, delta: Array, weight: Array
) -> tuple[UInt[Array, "task ..."], Bool[Array, "..."] | None]:
    """Computes the keys of a piece, and which of them are no padding (None if all are)."""
    return keys(piece, delta, weight), piece.inside(delta.shape[1:])


def _count_where(
    holds: Callable[[Array, Array], Array],
    values: tuple[Array, ...],
    keys: Array,
    inside: Array | None,
) -> tuple[Wide, ...]:
    """Counts for each value the keys for which a predicate holds."""

    def count(value: Array) -> Wide:
        hits = per_task(holds, keys, value)
        return occurrences(hits if inside is None else hits & inside)

    return tuple(map(count, values))


def _next_digits(state: tuple[Found, ...], counts: tuple[Wide, ...]) -> tuple[Found, ...]:
    """Appends one digit to every key that is searched for."""
    counts = counts * len(state) if len(counts) < len(state) else counts
    return tuple(map(_next_digit, state, counts))


def _next_digit(search: Found, counts: Wide) -> Found:
    """Chooses the next digit of one search from the counts of keys that have each digit."""
    if counts.lo.ndim == 1:
        zero = less(counts, search.rank)
        rank = choose(zero, subtract(search.rank, counts), search.rank)
        # For a 0, all keys with a 1 are larger than the threshold, and their number leaves the
        # rank.
        return Found(search.key << 1 | (~zero).astype(search.key.dtype), rank)
    if counts.lo.shape[1] == 256:
        digit, rank = _reached(counts, search.rank)
        return Found(search.key << 8 | digit.astype(search.key.dtype), rank)
    # In two steps, of the digit's upper and lower byte.
    blocks = Wide(*(part.reshape(len(part), 256, 256) for part in counts))
    high, rank = _reached(carry(*(part.sum(2, dtype=np.uint32) for part in blocks)), search.rank)
    take_along_axis = numpy_of(high).take_along_axis
    block = Wide(*(take_along_axis(p, high[:, None, None], 1)[:, 0] for p in blocks))
    low, rank = _reached(block, rank)
    digit = (high << 8 | low).astype(search.key.dtype)
    return Found(search.key << 16 | digit, rank)


def _reached(counts: Wide, rank: Wide) -> tuple[Numbers, Wide]:
    """Finds the largest of 256 digits that is reached by `rank` keys.

    Also returns the rank among the keys that have this digit. Rank 0 is reached by the last digit.
    """
    space = numpy_of(counts.lo)
    digit = np.arange(256)
    # `reaches[d]` is the number of keys whose digit is d or a larger one. It is a masked sum, since
    # XLA compiles running sums slowly.
    from_here = digit[:, None] <= digit  # [digit, digit]

    def reach(part: Numbers) -> Any:
        return space.where(from_here, part[:, None], 0).sum(-1, dtype=np.uint32)

    reaches = carry(*map(reach, counts))
    beside = Wide(rank.hi[:, None], rank.lo[:, None])
    # `reaches` falls with the digit, so counting where it is large enough finds the last such
    # digit.
    last = (~less(reaches, beside)).sum(-1, dtype=np.int32) - 1
    at, inside = (
        Wide(*(space.take_along_axis(part, last[:, None], 1)[:, 0] for part in parts))
        for parts in (reaches, counts)
    )
    # `at - inside` keys have a larger digit, and come before all that have this one.
    return last, subtract(rank, subtract(at, inside))


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
      head: What the bits above the digit have to be, shape `[task]`.
      shift: The number of bits below the digit.
      inside: Which entries count, of the shape of `keys` without the tasks; all by default.
      bits: The number of bits of the digit.

    Returns:
      Counts, shape `[task, 2**bits]`.

    Raises:
      ValueError: For a leaf with more entries.
    """
    check_size(keys)

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

    # The branch is chosen where the program is lowered: `jit` may not know the device before.
    counts = lax.platform_dependent(keys, head, cpu=by_scatter, default=by_sort)
    return carry(jnp.uint32(0), counts)


def _each_task(function: Callable[..., Array], *arrays: Array) -> Array:
    # Not vmap: a batched scatter is several times slower on CPUs.
    if len(arrays[0]) > 8:
        return lax.map(lambda pair: function(*pair), arrays)
    return jnp.stack([function(*pair) for pair in zip(*arrays, strict=True)])


def _scattered(digit: Array, counts: Array, bins: int) -> UInt[Array, "bins"]:
    """Counts digits into bins by additions at indices; fast on CPUs."""
    # On CPUs dropping what does not count is twice as slow as counting it in spare bins, and
    # adding to one bin again and again is slow: neighbours have two counters in turn.
    place = lax.iota(jnp.int32, digit.size)
    digit = jnp.where(counts, digit, bins + place % SPARE)
    counters = jnp.zeros(2 * (bins + SPARE), jnp.uint32)
    counters = counters.at[2 * digit + place % 2].add(jnp.uint32(1), mode="promise_in_bounds")
    return counters.reshape(-1, 2).sum(1, dtype=jnp.uint32)[:bins]


def _sorted_counts(digit: Array, counts: Array, bins: int) -> UInt[Array, "bins"]:
    """Counts digits by sorting them: accelerators sort fast, and add to equal places slowly."""
    ordered = jnp.sort(jnp.where(counts, digit, bins))
    # What does not count is sorted behind the last bin, where the difference below ignores it.
    ends = jnp.searchsorted(ordered, jnp.arange(bins + 1), side="left")
    return jnp.diff(ends).astype(jnp.uint32)


def take(
    keys: UInt[Array, "task ..."],
    found: Found,
    before: Wide,
    in_rows: UInt[Array, "task rows"] | None = None,
) -> Bool[Array, "task ..."]:
    """Selects the keys that have a rank that was found, or a better one.

    These are all keys above the threshold, and of those equal to it the first in row-major order
    that earlier pieces leave to be taken. So over all pieces exactly as many are taken as the rank
    says.

    Args:
      keys: The keys of a piece, shape `[task, ...]`.
      found: The threshold, and how many keys equal to it are taken in all.
      before: How many keys equal to it lie in earlier pieces, shape `[task]`.
      in_rows: How many lie in each row of this piece, shape `[task, rows]`; counted here if None.

    Returns:
      A mask of the shape of `keys`.
    """
    if keys.size == 0:
        return keys > 0
    # max(rank - before, 0): how many equal keys are left for this piece and those after it.
    left = subtract(choose(less(before, found.rank), found.rank, before), before)
    # A piece has fewer than 2**32 entries: whatever is more means all of them.
    left = jnp.where(left.hi < HALF, left.hi << 16 | left.lo, np.uint32(0xFFFFFFFF))
    return automatic(_take, keys)(keys, found.key, left, in_rows)


def _take(keys: Array, thresholds: Array, left: Array, in_rows: Array | None) -> Array:
    """Takes keys as `take` does; `left` is how many equal ones the earlier pieces leave."""
    rows, columns = _rows(keys)
    in_rows = _equal_in_rows(keys, thresholds) if in_rows is None else in_rows
    row, left, row_keys = _descend(in_rows, left, keys)
    column = _first_reaching((row_keys == thresholds[:, None]).astype(jnp.uint32), left)
    # After the last equal key that is taken; the row's own start if none of it is.
    end = row * columns + jnp.where(left > 0, column + 1, 0)
    # The comparison with `end` is what takes ties in row-major order, without a running count.
    index = lax.iota(jnp.uint32, rows * columns).reshape(keys.shape[1:])
    return per_task(
        lambda key, least, end: (key > least) | ((key == least) & (index < end)),
        keys, thresholds, end,
    )  # fmt: skip


def _first_reaching(
    counts: UInt[Array, "task n"], wanted: UInt[Array, "task"]
) -> UInt[Array, "task"]:
    """Finds the first entry with which a running sum reaches what is wanted.

    It is the largest i for which the sum of counts[:i] is less than what is wanted: n if all of it
    is less, 0 if nothing is wanted. The search is by bisection, since XLA compiles running sums
    slowly. Many counts are first added up in blocks.
    """
    tasks, n = counts.shape
    if n % BLOCK == 0 and n > BLOCK * BLOCK // 4:
        # Two searches, among blocks and then in one block, replace a bisection that adds up all
        # counts in each of its rounds.
        sums = counts.reshape(tasks, n // BLOCK, BLOCK).sum(2, dtype=jnp.uint32)
        block, left, block_counts = _descend(sums, wanted, counts)
        return jnp.minimum(block * BLOCK + _first_reaching(block_counts, left), n)
    place = lax.iota(jnp.uint32, n)

    def halve(k: Array, at: Array) -> Array:
        # The answer is built from its highest bit down: a bit stays if the sum before it is too
        # small.
        further = at | jnp.uint32(1) << (n.bit_length() - 1 - k).astype(jnp.uint32)
        passed = jnp.where(place < further[:, None], counts, 0).sum(1, dtype=jnp.uint32)
        return jnp.where((further <= n) & (passed < wanted), further, at)

    return lax.fori_loop(0, n.bit_length(), halve, jnp.zeros_like(wanted))


def _descend(
    sums: UInt[Array, "task rows"], wanted: UInt[Array, "task"], entries: UInt[Array, "task ..."]
) -> tuple[Array, Array, Array]:
    """Finds the first row with which the sums of rows reach what is wanted.

    Returns the row, what is left to be reached in it, and its entries (those of the last row if no
    row reaches it).
    """
    rows = sums.shape[1]
    row = _first_reaching(sums, wanted)
    before = jnp.where(lax.iota(jnp.uint32, rows) < row[:, None], sums, 0)

    def pick(table: Array, at: Array) -> Array:
        # Reshaped task by task: XLA would write a stack of keys to memory that it sees reshaped.
        return lax.dynamic_index_in_dim(table.reshape(rows, -1), at, 0, False)

    picked = per_task(pick, entries, jnp.minimum(row, rows - 1).astype(jnp.int32))
    return row, wanted - before.sum(1, dtype=jnp.uint32), picked


def _rows(keys: Array) -> tuple[int, int]:
    """Returns the numbers of rows and columns of the entries of a task.

    They are those of the leaf. A vector is divided into rows of `COLUMNS` entries if its length
    allows.
    """
    *rows, columns = keys.shape[1:] or (1,)
    if not rows and columns % COLUMNS == 0:
        return columns // COLUMNS, COLUMNS
    return math.prod(rows), columns


# --- ranks within rows


def row_ranks(size: Float[Array, "... n"], on_host: bool = False) -> UInt[Array, "... n"]:
    """Ranks the entries of each row: how many come before each, in ascending order.

    Args:
      size: Not negative; rows lie along the last axis and have fewer than 2**31 entries.
      on_host: Whether NumPy may sort (see `Piece.on_host`), which on CPUs is some hundred times
        faster than XLA.

    Returns:
      Ranks from 0, of the shape of `size`, uint16 or uint32; equal entries in order of position.
    """
    if size.size == 0:
        return jnp.zeros(size.shape, jnp.uint32)
    dtype = jnp.dtype(f"uint{8 * size.dtype.itemsize}")
    # Sizes are not negative, so that their bit patterns are ordered as they are.
    keys = lax.bitcast_convert_type(lax.stop_gradient(size), dtype)
    ranks = _rank_by_numpy if on_host else _rank_by_xla
    return automatic(ranks, keys)(keys)


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


def _rank_by_numpy(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    """Ranks on the host, in a callback."""
    out = jax.ShapeDtypeStruct(keys.shape, _rank_dtype(keys.shape[-1]))
    return buffer_callback(_ranked, out, vmap_method="expand_dims")(keys)


def _ranked(_: Any, out: Any, keys: Any) -> None:
    """Writes ranks into the output buffer of the callback."""
    np.asarray(out)[...] = _host_ranks(np.asarray(keys))


IN_CACHE = 1 << 15
"""The number of entries that are sorted at a time."""


def _host_ranks(keys: Any) -> np.ndarray:
    """Ranks with NumPy alone: a vectorised sort of (key, position) in 64 bits, then its inverse."""
    shape, n = keys.shape, keys.shape[-1]
    rows = np.asarray(keys).reshape(-1, n)
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
