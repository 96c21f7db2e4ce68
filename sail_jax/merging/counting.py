"""Counts beyond 32 bits, the widest integers of JAX by default.

A count is a pair of words. They are JAX arrays in a program, and NumPy arrays between the programs
that read files.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree, UInt

from sail_jax.merging.placement import divided
from sail_jax.merging.steps import Kernel, kernel

HALF = 1 << 16
"""The base of a `Wide`: 16 bits."""
MANY = 1 << 15
"""Above this number of comparisons, counting them in bytes first is faster on CPUs."""
Numbers = Array | np.ndarray
"""Counts: JAX arrays in a program, NumPy arrays between the programs that read files."""
Counts = TypeVar("Counts")


class Wide(NamedTuple):
    """A count hi * 2**16 + lo, because models have more than 2**32 entries.

    Attributes:
      hi: uint32.
      lo: uint32 below 2**16, of the same shape.
    """

    hi: UInt[Numbers, "..."]
    lo: UInt[Numbers, "..."]


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Flattens a pytree in which each `Wide` is one leaf; returns the leaves and the structure."""
    return jax.tree.flatten(tree, is_leaf=_is_wide)


def _is_wide(x: Any) -> bool:
    return isinstance(x, Wide)


def carry(hi: Any, lo: Any) -> Wide:
    """Makes counts from two words, arrays or NumPy scalars. The lower word may exceed 16 bits."""
    return Wide(hi + (lo >> 16), lo & (HALF - 1))


def wide(n: int | np.integer | np.ndarray) -> Wide:
    """Converts known counts to a `Wide` of NumPy arrays.

    Args:
      n: Counts in [0, 2**48), of any shape.

    Returns:
      The same counts, of the same shape.
    """
    parts: Any = (np.uint32(np.asarray(n) >> 16), np.uint32(np.asarray(n) % HALF))
    return Wide(*parts)


def integers(count: Wide) -> np.ndarray:
    """Converts known counts to 64-bit integers; the inverse of `wide`.

    >>> integers(wide(np.array([3, 1 << 40]))).tolist()
    [3, 1099511627776]
    """
    return (np.asarray(count.hi, np.int64) << 16) + count.lo


def add(a: Counts, b: Counts) -> Counts:
    """Adds counts; for `Fold.add`.

    Args:
      a: A `Wide`, or a pytree of them.
      b: Counts with the same structure that broadcast with `a`.

    Returns:
      a + b.
    """

    def both(a: Wide, b: Wide) -> Wide:
        return carry(a.hi + b.hi, a.lo + b.lo)

    return jax.tree.map(both, a, b, is_leaf=_is_wide)


@np.errstate(over="ignore")
def subtract(a: Wide, b: Wide) -> Wide:
    """Subtracts counts."""
    # Borrowing first keeps the lower word from becoming negative.
    return carry(a.hi - b.hi - 1, a.lo - b.lo + HALF)


def less(a: Wide, b: Wide) -> Bool[Numbers, "..."]:
    """Compares counts."""
    first = (a.hi < b.hi) | ((a.hi == b.hi) & (a.lo < b.lo))
    # NumPy turns arrays without axes into scalars.
    return np.asarray(first) if isinstance(first, np.generic) else first


def smaller(a: Wide, b: Wide, larger: bool = False) -> Wide:
    """Takes the smaller of two counts, entry by entry, or the larger count."""
    first = less(b, a) if larger else less(a, b)
    where = numpy_of(first).where
    return Wide(where(first, a.hi, b.hi), where(first, a.lo, b.lo))


def narrow_to_wide(n: UInt[Array, "..."]) -> Wide:
    """Converts 32-bit counts to a `Wide`."""
    return carry(jnp.uint32(0), n)


def numpy_of(x: Any) -> Any:
    """Returns the module of an array: NumPy for its arrays, JAX's NumPy for all others.

    Counts of files are small NumPy arrays. Compiling for them would take much longer than
    computing.
    """
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def rest(count: Wide, taken: Wide) -> UInt[Array, "..."]:
    """Computes max(count - taken, 0), limited to 32 bits."""
    left = subtract(count, taken)
    narrow = jnp.where(left.hi < HALF, left.hi << 16 | left.lo, np.uint32(0xFFFFFFFF))
    return jnp.where(less(taken, count), narrow, 0)


def pick(counts: Wide, index: Numbers) -> Wide:
    """Picks one entry along axis 1 for each entry of axis 0."""
    take = numpy_of(counts.lo).take_along_axis
    at = index.reshape(-1, *(1,) * (counts.lo.ndim - 1))
    return Wide(take(counts.hi, at, 1)[:, 0], take(counts.lo, at, 1)[:, 0])


def for_each(tasks: int, count: Wide) -> Wide:
    """Repeats a count for each task, unless each task already has one."""
    spread = numpy_of(count.lo).broadcast_to
    return Wide(spread(count.hi, (tasks,)), spread(count.lo, (tasks,)))


def occurrences(masks: Sequence[Bool[Array, "..."]] | Bool[Array, "mask ..."]) -> Wide:
    """Counts the True entries of several masks of one shape.

    Args:
      masks: At least one mask, of fewer than 2**32 entries.

    Returns:
      Counts, shape `[mask]`.

    Raises:
      ValueError: For a leaf with more entries.
    """
    first, *others = masks
    check_size(first.shape)
    if not others or divided(first):
        counts = [row_sums(x) if x.ndim == 1 else x.sum(dtype=jnp.uint32) for x in masks]
    else:
        # Summing all masks together compiles to one loop. On CPUs, XLA rewrites a single sum into
        # two loops. On several devices, joint sums would need more exchanges.
        words = [x.astype(jnp.uint32) for x in masks]
        counts = lax.reduce(words, [jnp.uint32(0)] * len(words), _add_each, range(first.ndim))
    return narrow_to_wide(jnp.stack(counts))


def _add_each(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def check_size(shape: Sequence[int]) -> None:
    """Rejects a leaf with more entries than 32 bits can count."""
    if math.prod(shape) >= 1 << 32:
        raise ValueError(f"cannot count a leaf of shape {tuple(shape)}: expected < 2**32 entries")


def row_sums(mask: Bool[Array, "... n"]) -> UInt[Array, "..."]:
    """Counts the True entries along the last axis.

    Args:
      mask: Shape `[..., n]`, n < 2**32.

    Returns:
      uint32, shape `[...]`.
    """
    n = mask.shape[-1]
    # For large masks on CPUs, adding up eight entries in a byte first is faster.
    if n % 8 == 0 and mask.size > MANY and not divided(mask):
        mask = mask.reshape(*mask.shape[:-1], 8, n // 8).sum(-2, dtype=jnp.uint8)
    return mask.sum(-1, dtype=jnp.uint32)


def fraction(part: float) -> Kernel:
    """Makes the kernel that computes floor(part * count).

    Decimals give the expected result: 0.7 of 10 is 7, although the nearest double lies below 0.7.
    For this, `part` is rounded up to 48 binary places.

    Args:
      part: A number in [0, 1).

    Returns:
      A kernel from one `Wide` of counts below 2**32 to another.
    """
    places = min(math.ceil(part * 2.0**48), (1 << 48) - 1)
    return kernel(_fraction, np.array([places >> 16 * j & 0xFFFF for j in range(3)], np.uint32))


def _fraction(places: UInt[Array, "3"], count: Wide) -> Wide:
    """Multiplies counts by a fraction of 48 binary places."""
    _, _, _, *whole = _long_product(list(places), [count.lo, count.hi])
    return Wide(whole[1], whole[0])


def of_size(part: Numbers, size: int, half: bool = True) -> Wide:
    """Computes a fraction of a number of entries, floor(part * size + 1/2).

    Known fractions and traced float64 fractions are computed in float64. Any other traced fraction
    is a float32 number, and the result is exact for this number. It may differ from the result for
    a known fraction by 1 + 2**-24 * part * size. For example, the float32 number nearest to 0.7
    lies 1.2e-8 below it and gives 3 of 5 entries instead of 4.

    Args:
      part: In [0, 1], any shape. A NumPy array if its values are known.
      size: The number of entries, below 2**48.
      half: Whether the result is rounded to nearest; if not, down.

    Returns:
      Counts in the shape of `part`.
    """
    rounding = 0.5 if half else 0.0
    if isinstance(part, np.ndarray | np.generic):
        # np.round would round halves to the nearest even number.
        return wide(np.floor(part * size + rounding).astype(int))
    part = jnp.clip(lax.stop_gradient(part), 0, 1)
    if part.dtype == jnp.float64:
        count = jnp.floor(part * size + rounding)
        high = jnp.floor(count / HALF)
        return Wide(high.astype(jnp.uint32), (count - high * HALF).astype(jnp.uint32))
    rest, digits = part.astype(jnp.float32), []
    for _ in range(6):  # the digits of 16 bits; each of these operations is exact
        digit = jnp.floor(rest)
        rest = (rest - digit) * HALF
        digits.append(digit.astype(jnp.uint32))
    # The digits after 80 binary places are less than 2**-8 of an entry.
    words = [np.uint32(size >> 16 * j & 0xFFFF) for j in range(3)]
    *_, low, middle, high = _long_product(digits[::-1], words, half=4 if half else None)[:8]
    return Wide(high << 16 | middle, low)


def _long_product(a: Sequence[Array], b: Sequence[Any], half: int | None = None) -> list[Array]:
    """Multiplies numbers of 16-bit digits, ordered from the lowest digit up.

    With `half`, HALF / 2 is added to the digit at this place.
    """
    # The two halves of each 32-bit product go to separate columns. Each column then receives at
    # most twelve numbers below 2**16 and cannot overflow before carries are passed on.
    columns: list[Any] = [np.uint32(0)] * (len(a) + len(b))
    if half is not None:
        columns[half] = np.uint32(HALF // 2)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product = x * y
            columns[i + j] = columns[i + j] + (product & 0xFFFF)
            columns[i + j + 1] = columns[i + j + 1] + (product >> 16)
    for i in range(len(columns) - 1):
        columns[i + 1] = columns[i + 1] + (columns[i] >> 16)
        columns[i] = columns[i] & 0xFFFF
    return columns
