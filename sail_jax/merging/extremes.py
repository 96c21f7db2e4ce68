"""Checks for numbers at both ends of the range of a dtype, by their bits.

At the upper end these are NaN and infinity. At the lower end they are numbers that XLA may lose. On
CPUs, XLA treats a number below the smallest normal number as 0 (2^-126 in float32 and bfloat16),
both when reading and when writing. This changes a result by more than its rounding only if the
result is near 0. Results are therefore checked first, because there are fewer of them than inputs.
Only the inputs of such results are checked next, which in most models are a few zeros.
"""

from collections.abc import Sequence

import numpy as np

# The bit pattern of infinity, by the size of a float in bytes. Larger patterns are NaN.
_EXPONENT = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}
_BFLOAT16 = 0x7F80
FAINT = 2.0**-90
"""Numbers with a magnitude below this are called faint.

It leaves 36 binary digits above the smallest normal number. The loss in a larger result is then
below its rounding for weights below 2^11. The product of a weight and a larger input (or a
difference of two) is a normal number for weights above 2^-13.
"""
BLOCK = 1 << 14
"""If one result is faint or 0, the inputs of this many entries around it are checked."""
AT_ONCE = 1 << 17
"""The number of entries that are copied at a time, which stay in a core's cache."""


def finite(x: np.ndarray) -> bool:
    """Checks whether a float array contains neither NaN nor infinity.

    It computes two integer maxima of the bits, which is fast and requires no extra memory.

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
    # The largest signed integer covers positive numbers, the largest unsigned integer negative
    # numbers.
    signed, unsigned = flat.view(f"i{size}"), flat.view(f"u{size}")
    return flat.size == 0 or (int(signed.max()) < largest and int(unsigned.max()) < sign + largest)


def lost(outcome: np.ndarray, inputs: Sequence[np.ndarray], entrywise: bool) -> np.ndarray:
    """Finds the tensors in which an XLA program may have lost numbers near 0.

    Args:
      outcome: The results of the program for tensors of one size, `[tensor, entry]`; any float
        dtype, also of `ml_dtypes`.
      inputs: The inputs of the program, each of the same shape. Padding after the last entry of a
        tensor is 0.
      entrywise: Whether an entry of the result depends only on the same entry of each input, and
        statistics. If not, all entries are checked.

    Returns:
      One bool for each tensor. True if the tensor has a result that is faint or 0, and near it (or
      anywhere, if not `entrywise`) a faint input that is not 0.

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
    """Returns the bits of `FAINT` in a dtype; 0 if all its positive numbers are larger."""
    return int(np.array(FAINT).astype(dtype).view(f"u{dtype.itemsize}"))


def _least_is_faint(x: np.ndarray) -> np.ndarray:
    """Checks by two minima of bits whether the smallest magnitude of a row is 0 or faint."""
    size, bound = x.dtype.itemsize, _bound(x.dtype)
    # Positive numbers are the smallest unsigned integers, negative numbers the smallest signed
    # integers. Both are in order of their magnitudes.
    positive, negative = x.view(f"u{size}"), x.view(f"i{size}")
    lowest = -1 << 8 * size - 1
    greatest = (1 << 8 * size) - 1, -1 - lowest
    return (positive.min(-1, initial=greatest[0]) < bound) | (
        negative.min(-1, initial=greatest[1]) < lowest + bound
    )


def _has_faint(x: np.ndarray) -> bool:
    """Checks whether an array contains a faint number that is not 0."""
    bound = _bound(x.dtype)
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    doubled, one = np.empty(min(AT_ONCE, bits.size), bits.dtype), bits.dtype.type(1)
    for start in range(0, bits.size if bound else 0, AT_ONCE):
        part = bits[start : start + AT_ONCE]
        own = np.add(part, part, out=doubled[: part.size])  # drops the sign
        # Unsigned integers wrap around: 0 becomes the largest integer, and the others stay in
        # order.
        if int(np.subtract(own, one, out=own).min()) < 2 * bound - 1:
            return True
    return False
