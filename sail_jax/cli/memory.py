"""How the process of a command handles memory: the garbage collector and the C library's allocator."""

import atexit
import ctypes
import gc
import os

__all__ = ["collect_rarely", "reuse_freed_memory"]

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_REUSED = 32 << 20
"""The largest block, in bytes, that is taken from freed memory: the most that glibc allows."""
KEPT = 64 << 20
"""The bytes of freed memory above which it goes back to the system."""


def collect_rarely() -> None:
    """Makes the garbage collector look for garbage less often than by default.

    What is imported and traced makes many objects and little garbage: to look for it among them
    even once takes a tenth of a second. A merge makes about 250,000 objects.
    """
    gc.set_threshold(1_000_000, 50, 100)
    # Nor when it all goes: an exit looks through them twice.
    atexit.register(gc.freeze)


def reuse_freed_memory() -> None:
    """Makes glibc keep the blocks that are freed, for those that are asked for next.

    XLA allocates every outcome anew, blocks of some MB. By default glibc takes them from the system
    and gives them back at once, so that each is made of fresh pages: a third to two thirds of all
    page faults of a merge, and a fifth of its time in the system. Threads share one arena, as each
    would keep blocks of its own.

    Nothing is done where the C library has no such options (macOS, musl), or where the user has set
    some in the environment.
    """
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = None if own or os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(M_TRIM_THRESHOLD, KEPT)
