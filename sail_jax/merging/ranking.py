"""The k largest of many entries, exactly, by counting instead of sorting.

The bit pattern of a non-negative float is an integer in the same order. Its 16-bit digits are found
from the top by histograms: the k-th largest key has the largest digit that k entries reach. What
one leaf contributes is a histogram, and histograms add up, so a threshold over a whole model costs
one visit to each leaf per digit, in any order. Keys equal to the threshold are taken by position.
Every array has a leading task axis, and each task has a threshold of its own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, auto_axes
from jaxtyping import Array, Bool, Float, UInt

from sail_jax.merging.task_vectors import by_task

__all__ = [
    "Cut",
    "Wide",
    "add",
    "cut",
    "equal",
    "histogram",
    "less",
    "locate",
    "magnitude",
    "occurrences",
    "start",
    "subtract",
    "take",
    "wide",
]

BINS, SPARE = 1 << 16, 1 << 10
COLUMNS = 1 << 14  # of the rows that a vector is seen as


class Wide(NamedTuple):
    """A count hi * 2**16 + lo in two uint32, lo < 2**16: models outgrow 32 bits, JAX's default."""

    hi: UInt[Array, "..."]
    lo: UInt[Array, "..."]


class Cut(NamedTuple):
    """A place in a leaf, of each task: a row, and how many of its candidates come before."""

    row: UInt[Array, "task"]
    ties: UInt[Array, "task"]


def _carry(hi: Array, lo: Array) -> Wide:
    return Wide(hi + (lo >> 16), lo & (BINS - 1))


def wide(n: int | np.ndarray) -> Wide:
    """Known counts < 2**48 as a Wide."""
    return Wide(*(jnp.asarray(part, jnp.uint32) for part in (n >> 16, n % BINS)))


def add(a: Wide, b: Wide) -> Wide:
    return _carry(a.hi + b.hi, a.lo + b.lo)


def subtract(a: Wide, b: Wide) -> Wide:
    """a - b for a >= b."""
    return _carry(a.hi - b.hi - 1, a.lo - b.lo + BINS)


def less(a: Wide, b: Wide) -> Bool[Array, "..."]:
    return (a.hi < b.hi) | ((a.hi == b.hi) & (a.lo < b.lo))


def cut(counts: UInt[Array, "task row"], left: Wide) -> tuple[Cut, Wide]:
    """Where the next candidates, so many in each row, are as many as are `left` to be taken; and
    how many are left after them."""
    space = _space(counts)
    running = counts.cumsum(1, dtype=np.uint32)
    total = _carry(space.uint32(0), running[:, -1])
    some, wanted = less(left, total), (left.hi << 16 | left.lo)[:, None]
    row = (running < wanted).sum(1, dtype=np.uint32)
    at = space.minimum(row, counts.shape[1] - 1)[:, None]
    before = space.take_along_axis(running - counts, at.astype(np.int32), 1)[:, 0]
    here = Cut(
        space.where(some, row, np.uint32(counts.shape[1])),
        space.where(some, wanted[:, 0] - before, np.uint32(0)),
    )
    return here, Wide(*(space.where(some, np.uint32(0), part) for part in subtract(left, total)))


def _space(x: Array | np.ndarray) -> Any:
    """The module for arrays like `x`: on the host nothing has to be compiled."""
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def occurrences(mask: Bool[Array, "..."], axis: Sequence[int] | None = None) -> Wide:
    """How often `mask` is True along `axis`, of fewer than 2**32 entries."""
    if axis is not None and mask.ndim == 2 and not jax.typeof(mask).sharding.spec[1]:
        return _carry(jnp.uint32(0), _row_sums(mask))
    return _carry(jnp.uint32(0), mask.sum(axis, dtype=jnp.uint32))


def _row_sums(mask: Bool[Array, "... n"]) -> UInt[Array, "..."]:
    """How many are True on the last axis; on CPUs it pays to add eight in a byte first."""
    n = mask.shape[-1]
    if n % 8 == 0:
        mask = mask.reshape(*mask.shape[:-1], 8, n // 8).sum(-2, dtype=jnp.uint8)
    return mask.sum(-1, dtype=jnp.uint32)


@jax.jit
def magnitude(
    delta: Float[Array, "task ..."], weight: Float[Array, "task ..."]
) -> UInt[Array, "task ..."]:
    """|delta| as integers in the same order; those who abstain are worth 0.

    In float64 where JAX has it, so that float32 and float64 leaves share one scale.
    """
    dtype = jnp.result_type(float)

    def one(d: Array, w: Array) -> Array:
        size = lax.stop_gradient(jnp.where(w != 0, jnp.abs(d), 0)).astype(dtype)
        return lax.bitcast_convert_type(size, _unsigned(dtype))

    return by_task(one, delta, weight)


def start() -> tuple[UInt[Array, ""], int]:
    """The empty prefix of a magnitude, and the position in bits of its first digit."""
    dtype = _unsigned(jnp.result_type(float))
    return jnp.zeros((), dtype), 8 * dtype.itemsize - 16


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


@functools.partial(jax.jit, static_argnames="shift")
def histogram(
    keys: UInt[Array, "task ..."],
    prefix: UInt[Array, "#task"],
    shift: int,
    inside: Bool[Array, "..."] | None = None,
) -> Wide:
    """How many keys that begin with `prefix` have which 16-bit digit at bit `shift`, [task, 65536].

    `inside` says which keys count, all by default. ValueError for leaves of 2**32 entries and more,
    and for a rule made in one precision and applied in another.
    """
    if keys.dtype != prefix.dtype:
        bits = 8 * prefix.dtype.itemsize
        raise ValueError(
            f"this rule counts digits of {bits} bits, as jax_enable_x64 was when it was made, and "
            f"is applied to {8 * keys.dtype.itemsize}: make it under the setting it is applied in"
        )
    if math.prod(keys.shape[1:]) >= 1 << 32:
        raise ValueError(f"cannot count a leaf of shape {keys.shape[1:]}: expected < 2**32 entries")

    def one(pair: tuple[Array, Array]) -> Array:
        key, head = pair
        rest = key >> shift
        counts = rest >> 16 == head if inside is None else (rest >> 16 == head) & inside
        # on CPUs dropping what does not count is twice as slow as counting it in spare bins, and
        # adding to one bin again and again is slow: neighbours have two counters in turn
        place = lax.iota(jnp.int32, key.size).reshape(key.shape)
        digit = jnp.where(counts, (rest & (BINS - 1)).astype(jnp.int32), BINS + place % SPARE)
        bins = jnp.zeros(2 * (BINS + SPARE), jnp.uint32)
        bins = bins.at[2 * digit + place % 2].add(jnp.uint32(1), mode="promise_in_bounds")
        return bins.reshape(-1, 2).sum(1, dtype=jnp.uint32)[:BINS]

    def each(*pairs: Array) -> Array:  # not vmap: a batched scatter is several times slower on CPUs
        if len(pairs[0]) > 8:
            return lax.map(one, pairs)
        return jnp.stack([one(pair) for pair in zip(*pairs, strict=True)])

    heads = jnp.broadcast_to(prefix, keys.shape[:1])
    counts = _automatic(each, _everywhere(keys))(keys, heads)
    return _carry(jnp.uint32(0), counts)


def locate(counts: Wide, prefix: UInt[Array, "#task"], rank: Wide) -> tuple[Array, Wide]:
    """The prefix longer by the digit of the rank-th largest key, and that key's rank under it.

    Rank 0 has no key: its digits are all ones, above every key that occurs. On arrays of NumPy it
    is computed there.
    """
    if isinstance(counts.lo, np.ndarray):
        return _locate_on_host(counts, *jax.tree.map(np.asarray, (prefix, rank)))
    return _locate(counts, prefix, rank)


@jax.jit
def _locate(counts: Wide, prefix: UInt[Array, "#task"], rank: Wide) -> tuple[Array, Wide]:
    rank = Wide(*(jnp.broadcast_to(part, counts.lo.shape[:1])[:, None] for part in rank))
    reach = _carry(*(jnp.cumsum(part[:, ::-1], 1)[:, ::-1] for part in counts))
    digit = (~less(reach, rank)).sum(1, keepdims=True) - 1
    at, inside = (Wide(*(jnp.take_along_axis(c, digit, 1) for c in n)) for n in (reach, counts))
    rank = subtract(rank, subtract(at, inside))
    return prefix << 16 | digit[:, 0].astype(prefix.dtype), Wide(rank.hi[:, 0], rank.lo[:, 0])


def _locate_on_host(counts: Wide, prefix: np.ndarray, rank: Wide) -> tuple[Any, Wide]:
    """The same, where 64 bits are to be had: by blocks of bins, then by bins."""
    many = (counts.hi.astype(np.int64) << 16) + counts.lo
    tasks = np.arange(len(many))
    wanted = np.broadcast_to((rank.hi.astype(np.int64) << 16) + rank.lo, tasks.shape)
    digit = np.zeros_like(tasks)
    for bins in (many.reshape(len(many), -1, 256).sum(2), None):
        if bins is None:
            bins = many.reshape(len(many), -1, 256)[tasks, digit]
        reach = bins[:, ::-1].cumsum(1)[:, ::-1]
        at = (reach >= wanted[:, None]).sum(1) - 1
        wanted = wanted - (reach - bins)[tasks, at]
        digit = digit * 256 + at
    found = [part.astype(np.uint32) for part in (wanted >> 16, wanted & (BINS - 1))]
    return prefix << 16 | digit.astype(prefix.dtype), Wide(*cast(list[Array], found))


@jax.jit
def equal(
    keys: UInt[Array, "task ..."],
    threshold: UInt[Array, "task"],
    inside: Bool[Array, "..."] | None = None,
) -> UInt[Array, "task row"]:
    """How many keys of each task, those inside, equal its threshold, row by row of its leaf."""
    if keys.size == 0:
        return jnp.zeros((len(keys), 1), jnp.uint32)

    def each(keys: Array, threshold: Array) -> Array:
        found = keys == _beside(threshold, keys)
        found = found if inside is None else found & inside
        return _row_sums(found.reshape(len(keys), *_rows(keys)))

    return _automatic(each, _everywhere(keys))(keys, threshold)


@jax.jit
def take(
    keys: UInt[Array, "task ..."], threshold: UInt[Array, "task"], here: Cut
) -> Bool[Array, "task ..."]:
    """Keys above `threshold`, and those equal to it that come before a cut in row-major order."""
    if keys.size == 0:
        return keys > 0
    like = jax.typeof(keys).sharding
    return _automatic(_take, like)(keys, threshold, here)


def _take(keys: Array, threshold: Array, here: Cut) -> Array:
    rows, columns = _rows(keys)
    index = lax.iota(jnp.uint32, rows * columns).reshape(keys.shape[1:])

    def one(key: Array, least: Array, row: Array, ties: Array) -> Array:
        at = jnp.minimum(row, rows - 1).astype(jnp.int32)
        equal = lax.dynamic_index_in_dim(key.reshape(rows, columns), at, 0, False) == least
        column = (equal.cumsum(dtype=jnp.uint32) < ties).sum(dtype=jnp.uint32)
        end = row * columns + jnp.where(ties > 0, column + 1, 0)
        return (key > least) | ((key == least) & (index < end))

    return by_task(one, keys, threshold, *here)


def _rows(keys: Array) -> tuple[int, int]:
    """Rows and columns of the entries of a task: those of its leaf, a vector's are made up."""
    *rows, columns = keys.shape[1:] or (1,)
    if not rows and columns % COLUMNS == 0:
        return columns // COLUMNS, COLUMNS
    return math.prod(rows), columns


def _everywhere(x: Array) -> Sharding:
    """A whole copy on each device of `x`."""
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())


def _automatic(f: Callable[..., Array], out: Sharding) -> Callable[..., Array]:
    """`f` with its shardings left to the compiler, also on a mesh of explicit axes."""
    return cast(Callable[..., Array], auto_axes(f, out_sharding=out))


def _beside(per_task: Array, leaf: Array) -> Array:
    return per_task.reshape(-1, *(1,) * (leaf.ndim - 1))
