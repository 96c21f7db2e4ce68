"""Rules that thin votes out by their rank: breadcrumbs and DELLA."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import auto_axes
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, UInt

from sail_jax.merging import random_bits
from sail_jax.merging import ranking as selection
from sail_jax.merging.order import Found, magnitudes, order_statistics, placed
from sail_jax.merging.task_vectors import Each, Fold, Kernel, Leafwise, Piece, Place, Rule, by_task
from sail_jax.merging.transforms import (
    PerModel,
    Scope,
    check_per_model,
    drawn,
    lengths,
    once,
    per_model,
    scoped,
    standing,
)

__all__ = [
    "RankBy",
    "fraction",
    "magprune",
    "outliers",
    "row_ranks",
]

RankBy = Literal["rank", "magnitude"]
Votes = tuple[Array, Array]


def outliers(
    density: float | Sequence[float],
    gamma: float | Sequence[float],
    scope: Scope = "tensor",
    *,
    floor: bool = False,
) -> Rule:
    """Of each model the largest and the smallest |delta| abstain (Davari & Belilovsky 2023).

    k = max(1, round(density * n)) of n entries still vote: those next in magnitude to the
    min(round(gamma * n), n - k) largest. n counts a tensor ("per layer", as in the paper), or the
    tree. Exactly k are kept, whatever is equal: equals rank by (path, row-major index), as in
    `trim`. `floor` rounds down instead of half up.

    density, gamma: one number or one per model, static. ValueError for a density outside (0, 1], a
    gamma outside [0, 1), or another scope.

    >>> from sail_jax.merging.task_vectors import TaskVectors
    >>> votes = TaskVectors({"a": jnp.array([[1.0, -9.0, 2.0, 0.0]])}, {"a": jnp.ones((1, 1))})
    >>> outliers(0.5, 0.25)(votes).weight["a"].tolist()
    [[1.0, 0.0, 1.0, 0.0]]
    """
    some = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    most = check_per_model("gamma", gamma, lambda g: (g >= 0) & (g < 1), "in [0, 1)")
    if some is None or most is None:
        raise TypeError("density, gamma: expected static numbers, got traced ones")
    half = 0.0 if floor else 0.5

    def ranks(size: int) -> list[selection.Wide]:
        kept = np.clip(np.floor(some * size + half).astype(int), min(1, size), size)
        above = np.minimum(np.floor(most * size + half).astype(int), size - kept)
        return [selection.wide(above), selection.wide(above + kept)]

    def between(found: list[Found], size: int) -> Rule:
        kernel = Partial(_between, tuple(threshold for threshold, _ in found))
        return placed(keys, found, lambda cuts: Leafwise(kernel, cuts))

    keys = Partial(magnitudes)
    return scoped(scope, order_statistics(keys, ranks, between, after=1))


def _between(
    thresholds: Sequence[Array],
    above: selection.Cut,
    within: selection.Cut,
    place: Place,
    delta: Array,
    weight: Array,
) -> Votes:
    keys = selection.magnitude(delta, weight)
    largest, kept = map(selection.take, (keys, keys), thresholds, (above, within))
    stays = by_task(lambda a, b: a & ~b, kept, largest)
    return delta, standing(stays, weight)


def magprune(
    density: PerModel,
    epsilon: PerModel,
    key: Array | None,
    rank_by: RankBy = "rank",
    *,
    rescale: Literal["probability", "l1"] | None = "probability",
) -> Rule:
    """DELLA's MAGPRUNE (Deep et al. 2024): an entry votes with a probability that grows with its
    magnitude, p = density - epsilon + 2 epsilon x, and then with delta / p.

    x in [0, 1] is the place of the entry in its row (the last axis; a vector is one row):
    rank_by "rank": (r - 1) / (n - 1), r = 1 the smallest |delta| of the n, equals in order of
    position; "magnitude": (|delta| - least) / (greatest - least). Where x is 0 / 0 (rows of length
    1, or of equal magnitudes for "magnitude") p is the density. The mean of p over a row is the
    density for "rank", and the expected vote is delta for both.

    Where density + epsilon > 1, the window [density - epsilon, density + epsilon] shrinks to what
    fits around the density; so density 1 keeps everything. Draws depend on what those of `drop`
    depend on, and rows are ranked alone.

    rescale "l1" takes the place of delta / p: every vote of a model times the ratio of its L1 norms
    over the tensor before and after (mergekit). None leaves delta as it is.

    density, epsilon: one number or one per model. ValueError unless 0 <= epsilon < density <= 1,
    TypeError without a key.
    """
    some = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    half = check_per_model("epsilon", epsilon, lambda e: e >= 0, "not negative")
    if some is not None and half is not None and not (half < some).all():
        raise ValueError(f"epsilon: expected less than the density {density!r}, got {epsilon!r}")
    if rank_by not in ("rank", "magnitude"):
        raise ValueError(f"rank_by: expected 'rank' or 'magnitude', got {rank_by!r}")
    random_bits.check_key(key, "the masks of DELLA")
    args = jnp.asarray(density, jnp.float32), jnp.asarray(epsilon, jnp.float32), key
    if rescale != "l1":
        return Leafwise(Partial(_magprune(rank_by, rescale is not None), *args), grain="row")
    return Each(Fold(Partial(_sample(rank_by), *args), _restore, None, "row", keeps=1 / 8))


@functools.cache
def _magprune(rank_by: RankBy, rescale: bool) -> Kernel:
    place_in_row = _by_rank if rank_by == "rank" else _by_magnitude

    def kernel(
        density: Array, epsilon: Array, key: Array, place: Place, delta: Array, weight: Array
    ) -> Votes:
        p = _probability(place_in_row, density, epsilon, delta, weight)
        kept = once(lambda: drawn(jnp.less, key, place, delta, p), weight)
        divisor = jnp.where(p > 0, p, 1) if rescale else 1
        return delta / divisor, standing(kept, weight)

    return kernel


def _probability(
    place_in_row: Callable[[Array], Array],
    density: Array,
    epsilon: Array,
    delta: Array,
    weight: Array,
) -> Float[Array, "task ..."]:
    density, epsilon = per_model(density, delta), per_model(epsilon, delta)
    epsilon = jnp.minimum(epsilon, jnp.minimum(density, 1 - density))
    size = jnp.where(weight != 0, jnp.abs(delta), 0)
    return density + epsilon * place_in_row(size)


def _by_rank(size: Float[Array, "task ..."]) -> Float[Array, "task ..."]:
    """From -1 for the smallest of a row to 1 for the largest."""
    n = size.shape[-1] if size.ndim > 1 else 1
    if n == 1 or size.size == 0:
        return jnp.zeros_like(size)
    return row_ranks(size).astype(jnp.int32).astype(size.dtype) * (2 / (n - 1)) - 1


def _by_magnitude(size: Float[Array, "task ..."]) -> Float[Array, "task ..."]:
    if size.ndim == 1 or size.size == 0:
        return jnp.zeros_like(size)
    least, most = size.min(-1, keepdims=True), size.max(-1, keepdims=True)
    differ = most > least
    return jnp.where(differ, 2 * (size - least) / jnp.where(differ, most - least, 1) - 1, 0)


WORD = 32


@functools.cache
def _sample(rank_by: RankBy) -> Kernel:
    """L1 norms of the votes before and after, [task], and the mask, a bit per vote: ranking costs
    far more than remembering it."""
    place_in_row = _by_rank if rank_by == "rank" else _by_magnitude

    def summary(
        density: Array, epsilon: Array, key: Array, place: Place, delta: Array, weight: Array
    ) -> tuple[Array, Array, Array]:
        p = _probability(place_in_row, density, epsilon, delta, weight)
        kept = drawn(jnp.less, key, place, delta, p)
        return *lengths(delta, weight, delta, standing(kept, weight)), _pack(kept)

    return summary


def _restore(parts: Mapping[Piece, tuple[Array, Array, Array]], size: int) -> Leafwise:
    before, after = (sum(part[i] for part in parts.values()) for i in range(2))
    exists = (before > 0) & (after > 0)
    factor = jnp.where(exists, before / jnp.where(exists, after, 1), 1)
    masks = {piece: (part[2],) for piece, part in parts.items()}
    return Leafwise(Partial(_masked, factor), masks, "row")


def _masked(factor: Array, mask: Array, place: Place, delta: Array, weight: Array) -> Votes:
    kept = once(lambda: _unpack(mask, delta.shape), weight)
    return by_task(jnp.multiply, per_model(factor, delta), delta), standing(kept, weight)


def _pack(mask: Bool[Array, "task ..."]) -> UInt[Array, "task words"]:
    flat = mask.reshape(len(mask), -1)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % WORD))).reshape(len(mask), WORD, -1)
    bits = flat.astype(jnp.uint32)
    return functools.reduce(lax.bitwise_or, [bits[:, i] << i for i in range(WORD)])


def _unpack(words: UInt[Array, "task words"], shape: Sequence[int]) -> Bool[Array, "task ..."]:
    bits = (words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[:, None]) & 1
    size = math.prod(shape[1:])
    return bits.reshape(shape[0], -1)[:, :size].reshape(shape) != 0


@jax.jit
def row_ranks(size: Float[Array, "... n"]) -> UInt[Array, "... n"]:
    """How many entries of its row (the last axis) come before each in order of `size`, which is not
    negative; equals in order of position. Less than 2**31 entries in a row.

    XLA sorts some hundred times slower than NumPy on CPUs, where this calls NumPy (on several CPU
    devices, the first ranks all rows); elsewhere it sorts in place.
    """
    if size.size == 0:
        return jnp.zeros(size.shape, jnp.uint32)
    dtype = jnp.dtype(f"uint{8 * size.dtype.itemsize}")
    keys = lax.bitcast_convert_type(lax.stop_gradient(size), dtype)
    rank = cast(Callable[..., Array], auto_axes(_rank, out_sharding=jax.typeof(keys).sharding))
    return rank(keys)


def _rank(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    return lax.platform_dependent(keys, cpu=_rank_by_numpy, default=_rank_by_xla)


def _rank_dtype(n: int) -> type[np.unsignedinteger]:
    return np.uint16 if n <= 1 << 16 else np.uint32


def _rank_by_xla(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    index = lax.broadcasted_iota(jnp.uint32, keys.shape, keys.ndim - 1)
    _, order = lax.sort((keys, index), num_keys=1, is_stable=True)
    _, rank = lax.sort((order, index), num_keys=1)
    return rank.astype(_rank_dtype(keys.shape[-1]))


def _rank_by_numpy(keys: UInt[Array, "... n"]) -> UInt[Array, "... n"]:
    out = jax.ShapeDtypeStruct(keys.shape, _rank_dtype(keys.shape[-1]))
    return buffer_callback(_ranked, out, vmap_method="expand_dims")(keys)


def _ranked(_: Any, out: Any, keys: Any) -> None:
    np.asarray(out)[...] = _host_ranks(np.asarray(keys))


BLOCK = 1 << 15  # entries sorted at a time, in cache


def _host_ranks(keys: Any) -> np.ndarray:
    """Ranks by NumPy alone: a vectorised sort of (key, position) in 64 bits, then its inverse."""
    shape, n = keys.shape, keys.shape[-1]
    rows = np.asarray(keys).reshape(-1, n)
    ranks = np.empty(rows.shape, _rank_dtype(n))
    if rows.dtype != np.uint32:
        order = np.argsort(rows, axis=1, kind="stable")
        np.put_along_axis(ranks, order, np.arange(n, dtype=ranks.dtype)[None], 1)
        return ranks.reshape(shape)
    step = max(1, BLOCK // n)
    pairs = np.empty((step, n), np.uint64)
    position = np.arange(step * n, dtype=np.uint64).reshape(step, n)
    rank = np.broadcast_to(np.arange(n, dtype=ranks.dtype), (step, n))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        some = pairs[: len(block)]
        np.left_shift(block, np.uint64(32), out=some, dtype=np.uint64)
        np.bitwise_or(some, position[: len(block)], out=some)
        some.sort(axis=1)
        np.bitwise_and(some, np.uint64(0xFFFFFFFF), out=some)
        out = ranks[start : start + step].reshape(-1)
        out[some.view(np.int64).reshape(-1)] = rank[: len(block)].reshape(-1)
    return ranks.reshape(shape)


def fraction(part: float, count: selection.Wide) -> selection.Wide:
    """floor(part * count) for counts < 2**32 and a static part in [0, 1), a decimal taken as
    written (0.7 of 10 is 7, though the nearest double is less): in 48 binary places, rounded up."""
    places = min(math.ceil(part * 2.0**48), (1 << 48) - 1)
    columns = [jnp.uint32(0)] * 6
    for i, digit in enumerate((count.lo, count.hi)):
        for j in range(3):
            product = digit * jnp.uint32(places >> 16 * j & 0xFFFF)
            columns[i + j] = columns[i + j] + (product & 0xFFFF)
            columns[i + j + 1] = columns[i + j + 1] + (product >> 16)
    for i in range(5):
        columns[i + 1] = columns[i + 1] + (columns[i] >> 16)
    return selection.Wide(columns[4] & 0xFFFF, columns[3] & 0xFFFF)
