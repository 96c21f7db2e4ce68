"""Memory settings of a command's process: the garbage collector and the C library's allocator."""

import atexit
import ctypes
import gc
import os

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_REUSED = 32 << 20
"""The largest block, in bytes, that is taken from freed memory: glibc's maximum."""
KEPT = 2 * LARGEST_REUSED
"""The bytes of freed memory above which a thread returns it to the system."""


def collect_rarely() -> None:
    """Makes the garbage collector run less often than by default.

    Imports and traces create many objects but little garbage, and one collection takes a tenth of a
    second. A merge creates about 250,000 objects.
    """
    gc.set_threshold(1_000_000, 50, 100)
    # This also avoids the two collections at exit.
    atexit.register(gc.freeze)


def reuse_freed_memory() -> None:
    """Makes glibc keep freed blocks and reuse them for the next allocations.

    XLA allocates a new block of some MB for every result. By default glibc takes such blocks from
    the system and returns them, so each block consists of fresh pages. This ends when a block of 32
    MB happens to be freed: glibc then raises its thresholds. Setting them at the start saves two
    thirds of the page faults of a linear merge and 8 % of its CPU time. Lower thresholds are worse
    than the defaults, because glibc no longer adjusts them: 16 MB made TIES take 1.7 times as long.

    The function does nothing if the C library does not have these options (macOS, musl), or if the
    user has set some in the environment.
    """
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = None if own or os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(M_TRIM_THRESHOLD, KEPT)
