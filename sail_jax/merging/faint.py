"""Numbers that XLA may lose because they are too near 0: looked for by their bits.

On CPUs, XLA's programs take a number below the smallest normal one (2^-126 in float32 and bfloat16)
for 0, both where they read it and where they would write it. That changes an outcome by more than
its rounding only if the outcome itself is near 0. So outcomes are looked at first, which are fewer
than inputs; then, where there are such outcomes, the inputs.
"""

import numpy as np

__all__ = ["FAINT", "has_faint", "has_faint_or_zero"]

FAINT = 2.0**-90
"""Numbers of a magnitude below this are called faint.

It leaves 36 binary digits above the smallest normal number. What is lost of a larger outcome is
then below its rounding as long as weights are below 2^11, and the product of a larger input, or of
the difference of two, and a weight is a normal number if the weight is above 2^-13.
"""
AT_ONCE = 1 << 16
"""The number of entries of which copies are made at a time, which stay in a core's cache."""


def _below(dtype: np.dtype) -> int:
    """Returns the bits of `FAINT` in a dtype; 0 if all its numbers but 0 are larger."""
    return int(np.array(FAINT).astype(dtype).view(f"u{dtype.itemsize}"))


def has_faint_or_zero(x: np.ndarray) -> bool:
    """Checks whether an array has an entry of a magnitude below `FAINT`.

    It takes two integer minima over the bits, without further memory.

    Args:
      x: Any float dtype, also of `ml_dtypes`.

    Returns:
      True if there is a faint entry, or a 0.
    """
    size = x.dtype.itemsize
    bound, lowest = _below(x.dtype), -1 << 8 * size - 1
    # As unsigned integers positive numbers are the smallest, as signed ones negative numbers are;
    # and both are in order of their magnitudes.
    positive, negative = (x.view(f"{kind}{size}") for kind in "ui")
    return x.size > 0 and (int(positive.min()) < bound or int(negative.min()) < lowest + bound)


def has_faint(x: np.ndarray) -> bool:
    """Checks whether an array has an entry that is not 0 and of a magnitude below `FAINT`.

    Args:
      x: Any float dtype with a sign, also of `ml_dtypes`; contiguous.

    Returns:
      True if there is such an entry.
    """
    bound = _below(x.dtype)
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    doubled, one = np.empty(min(AT_ONCE, bits.size), bits.dtype), bits.dtype.type(1)
    for start in range(0, bits.size if bound else 0, AT_ONCE):
        part = bits[start : start + AT_ONCE]
        own = np.add(part, part, out=doubled[: part.size])  # no sign any more
        # Unsigned integers wrap: 0 becomes the largest of them, the others stay in order.
        if int(np.subtract(own, one, out=own).min()) < 2 * bound - 1:
            return True
    return False
