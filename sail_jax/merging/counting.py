"""Counts beyond 32 bits, the widest integers that JAX has by default.

They are pairs of words: of JAX's arrays in a program, of NumPy's between the programs that read
files.
"""

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt

from sail_jax.merging.placement import divided
from sail_jax.merging.steps import Kernel, kernel

HALF = 1 << 16
"""The base of a `Wide`: 16 bits."""
MANY = 1 << 15
"""The number of comparisons above which it pays on CPUs to count them in bytes first."""
Numbers = Array | np.ndarray
"""Counts: JAX's in a program, NumPy's between the programs that read files."""
Counts = TypeVar("Counts")


class Wide(NamedTuple):
    """A count hi * 2**16 + lo. Models outgrow 32 bits.

    Attributes:
      hi: uint32.
      lo: uint32 below 2**16, of the same shape.
    """

    hi: UInt[Numbers, "..."]
    lo: UInt[Numbers, "..."]


def carry(hi: Numbers, lo: Numbers) -> Wide:
    """Makes counts of two words of which the lower may exceed 16 bits."""
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


def add(a: Counts, b: Counts) -> Counts:
    """Adds counts; for `Fold.add`.

    Args:
      a: A `Wide`, or a pytree of them.
      b: Counts of the same structure, that broadcast with those of `a`.

    Returns:
      a + b.
    """

    def both(a: Wide, b: Wide) -> Wide:
        return carry(a.hi + b.hi, a.lo + b.lo)

    return jax.tree.map(both, a, b, is_leaf=lambda x: isinstance(x, Wide))


def subtract(a: Wide, b: Wide) -> Wide:
    """Subtracts counts."""
    # Borrowed beforehand, so that the lower word is not negative.
    return carry(a.hi - b.hi - 1, a.lo - b.lo + HALF)


def less(a: Wide, b: Wide) -> Bool[Numbers, "..."]:
    """Compares counts."""
    return (a.hi < b.hi) | ((a.hi == b.hi) & (a.lo < b.lo))


def narrow_to_wide(n: UInt[Array, "..."]) -> Wide:
    """Converts 32-bit counts to a `Wide`."""
    return carry(jnp.uint32(0), n)


def running(counts: Wide) -> Wide:
    """Computes for each row the sum of the rows before it."""
    # Fewer than 2**16 words below 2**16 add up to less than 2**32.
    return carry(*(part.cumsum(0, dtype=jnp.uint32) - part for part in counts))


def numpy_of(x: Any) -> Any:
    """Returns the functions that fit an array: NumPy's for its own, JAX's for every other.

    Counts of files come as NumPy arrays. There are few of them, and to compile for them would take
    much longer than to compute.
    """
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def rest(count: Wide, taken: Wide) -> UInt[Array, "..."]:
    """Computes max(count - taken, 0), as far as 32 bits hold it."""
    left = subtract(count, taken)
    narrow = jnp.where(left.hi < HALF, left.hi << 16 | left.lo, np.uint32(0xFFFFFFFF))
    return jnp.where(less(taken, count), narrow, 0)


def pick(counts: Wide, index: Numbers) -> Wide:
    """Picks one entry along axis 1 for each along axis 0."""
    space = numpy_of(counts.lo)
    at = index.reshape(-1, *(1,) * (counts.lo.ndim - 1))
    return Wide(*(space.take_along_axis(part, at, 1)[:, 0] for part in counts))


def for_each(tasks: int, count: Wide) -> Wide:
    """Repeats a count for each of some tasks, unless there is one for each."""
    return Wide(*(numpy_of(part).broadcast_to(part, (tasks,)) for part in count))


def occurrences(mask: Bool[Array, "task ..."]) -> Wide:
    """Counts how often a mask is True for each task.

    Args:
      mask: Shape `[task, ...]`, fewer than 2**32 entries for each task.

    Returns:
      Counts, shape `[task]`.

    Raises:
      ValueError: For a leaf with more entries.
    """
    check_size(mask)
    counts = [row_sums(row) if row.ndim == 1 else row.sum(dtype=jnp.uint32) for row in mask]
    return narrow_to_wide(jnp.stack(counts))


def check_size(keys: Array) -> None:
    """Refuses a leaf with more entries than 32 bits can count."""
    if math.prod(keys.shape[1:]) >= 1 << 32:
        raise ValueError(f"cannot count a leaf of shape {keys.shape[1:]}: expected < 2**32 entries")


def row_sums(mask: Bool[Array, "... n"]) -> UInt[Array, "..."]:
    """Counts how many entries are True along the last axis.

    Args:
      mask: Shape `[..., n]`, n < 2**32.

    Returns:
      uint32, shape `[...]`.
    """
    n = mask.shape[-1]
    # Of many it pays on CPUs to add up eight in a byte first.
    if n % 8 == 0 and mask.size > MANY and not divided(mask):
        mask = mask.reshape(*mask.shape[:-1], 8, n // 8).sum(-2, dtype=jnp.uint8)
    return mask.sum(-1, dtype=jnp.uint32)


def fraction(part: float) -> Kernel:
    """Makes the kernel that computes floor(part * count).

    A decimal is taken as it is written: 0.7 of 10 is 7, though the nearest double lies below 0.7.
    So `part` is rounded up to 48 binary places.

    Args:
      part: A number in [0, 1).

    Returns:
      A kernel from one `Wide` of counts below 2**32 to another.
    """
    places = min(math.ceil(part * 2.0**48), (1 << 48) - 1)
    return kernel(_fraction, np.array([places >> 16 * j & 0xFFFF for j in range(3)], np.uint32))


def _fraction(places: UInt[Array, "3"], count: Wide) -> Wide:
    """Multiplies counts by a fraction, in long multiplication with digits of 16 bits."""
    # Column c is worth 2**(16 * c); both halves of each product of 32 bits go to their own column,
    # so that none overflows before carries are passed on.
    columns = [jnp.uint32(0)] * 6
    for i, digit in enumerate((count.lo, count.hi)):
        for j in range(3):
            product = digit * places[j]
            # Each column receives at most five numbers below 2**16.
            columns[i + j] = columns[i + j] + (product & 0xFFFF)
            columns[i + j + 1] = columns[i + j + 1] + (product >> 16)
    for i in range(5):
        columns[i + 1] = columns[i + 1] + (columns[i] >> 16)
    # Columns 0 to 2 are the 48 binary places.
    return Wide(columns[4] & 0xFFFF, columns[3] & 0xFFFF)
