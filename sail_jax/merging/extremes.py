"""Looks for numbers at both ends of what a dtype holds, by their bits.

At the upper end these are NaN and infinity. At the lower end they are numbers that XLA may lose. On
CPUs, XLA's programs take a number below the smallest normal one (2^-126 in float32 and bfloat16)
for 0, both where they read it and where they would write it. That changes an outcome by more than
its rounding only if the outcome itself is near 0. So outcomes are looked at first, which are fewer
than inputs; then the inputs, where there are such outcomes. In most models these are a few zeros.
"""

from collections.abc import Sequence

import numpy as np

# The bit pattern of infinity, by the bytes of a float; larger patterns are NaN.
_EXPONENT = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}
_BFLOAT16 = 0x7F80
FAINT = 2.0**-90
"""Numbers of a magnitude below this are called faint.

It leaves 36 binary digits above the smallest normal number. What is lost of a larger outcome is
then below its rounding as long as weights are below 2^11, and the product of a larger input, or of
the difference of two, and a weight is a normal number if the weight is above 2^-13.
"""
BLOCK = 1 << 14
"""The number of entries whose inputs are looked at if one of their outcomes is faint or 0."""
AT_ONCE = 1 << 17
"""The number of entries of which copies are made at a time, which stay in a core's cache."""


def finite(x: np.ndarray) -> bool:
    """Checks whether a float array holds neither NaN nor infinity.

    It looks at the bits of the array, in two integer maxima, which is fast and needs no further
    memory.

    Args:
      x: Any float dtype, also of `ml_dtypes`.

    Returns:
      True if all entries are finite.
    """
    name, size = x.dtype.name, x.dtype.itemsize
    if size == 1 or size not in _EXPONENT:
        return bool(np.isfinite(x.astype(np.float32)).all())
    largest = _BFLOAT16 if name == "bfloat16" else _EXPONENT[size]
    sign = 1 << (8 * size - 1)
    flat = x.reshape(-1)
    # Positive ones by the largest signed integer, negative ones by the largest unsigned.
    signed, unsigned = flat.view(f"i{size}"), flat.view(f"u{size}")
    return flat.size == 0 or (int(signed.max()) < largest and int(unsigned.max()) < sign + largest)


def lost(outcome: np.ndarray, inputs: Sequence[np.ndarray], entrywise: bool) -> np.ndarray:
    """Finds out of which tensors a program of XLA's may have lost numbers near 0.

    Args:
      outcome: What it made of some tensors of one size, `[tensor, entry]`; any float dtype, also of
        `ml_dtypes`.
      inputs: What it was made of, each of the same shape. What follows the last entry of a tensor
        is 0.
      entrywise: Whether an entry of the outcome follows from the same entry of each input, apart
        from statistics. If not, all entries are looked at.

    Returns:
      One bool for each tensor: whether it has an outcome below `FAINT`, or a 0, and near it (or
      anywhere) an input that is below `FAINT` and not 0.

    >>> x = np.array([[1, 1e-42], [1, 0]], np.float32)
    >>> lost(np.zeros((2, 2), np.float32), [x], True).tolist()
    [True, False]
    """
    tensors, size = outcome.shape
    blocks = (tensors, -1, BLOCK if entrywise and size % BLOCK == 0 else max(1, size))
    near_0 = _least_is_faint(outcome.reshape(blocks))
    found = np.zeros(tensors, bool)
    for x in inputs if near_0.any() else ():
        x = x.reshape(blocks)
        if _has_faint(x if near_0.all() else x[near_0]):
            found |= [_has_faint(own[at]) for own, at in zip(x, near_0, strict=True)]
    return found


def _bound(dtype: np.dtype) -> int:
    """Returns the bits of `FAINT` in a dtype; 0 if all its numbers but 0 are larger."""
    return int(np.array(FAINT).astype(dtype).view(f"u{dtype.itemsize}"))


def _least_is_faint(x: np.ndarray) -> np.ndarray:
    """Whether the least magnitude along the last axis is 0 or faint, by two minima over bits."""
    size, bound = x.dtype.itemsize, _bound(x.dtype)
    # As unsigned integers positive numbers are the smallest, as signed ones negative numbers are;
    # and both are in order of their magnitudes.
    positive, negative = x.view(f"u{size}"), x.view(f"i{size}")
    lowest = -1 << 8 * size - 1
    greatest = (1 << 8 * size) - 1, -1 - lowest
    return (positive.min(-1, initial=greatest[0]) < bound) | (
        negative.min(-1, initial=greatest[1]) < lowest + bound
    )


def _has_faint(x: np.ndarray) -> bool:
    """Whether an array holds a number that is faint but not 0."""
    bound = _bound(x.dtype)
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    doubled, one = np.empty(min(AT_ONCE, bits.size), bits.dtype), bits.dtype.type(1)
    for start in range(0, bits.size if bound else 0, AT_ONCE):
        part = bits[start : start + AT_ONCE]
        own = np.add(part, part, out=doubled[: part.size])  # no sign any more
        # Unsigned integers wrap: 0 becomes the largest of them, the others stay in order.
        if int(np.subtract(own, one, out=own).min()) < 2 * bound - 1:
            return True
    return False
