"""Reduces the cost of many small JAX programs, in tests and in processes that they start."""

import contextlib
import functools
import gc
from collections.abc import Callable

FORGET: list[Callable[[], None]] = []
"""What gives the memory back that kept programs take."""


def one_context() -> None:
    """Lets JAX lower all programs in one context.

    It makes one for each program, which takes 3 ms. The function is private, and where it is gone
    tests only take longer.
    """
    import jax

    FORGET.append(jax.clear_caches)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir

        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
        FORGET.append(mlir.make_ir_context.cache_clear)


@contextlib.contextmanager
def kept():
    """Objects created in the block live until the end, so the garbage collector ignores them now
    and later. It also runs less often than usual, because JAX goes through its arrays in each run.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        gc.enable()
