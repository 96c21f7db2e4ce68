"""What makes many small programs of JAX cheaper, in the tests and in processes that they start."""

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
    """What is made in the block stays to the end, so the garbage collector does not look through
    it, neither now nor in later rounds, of which there are fewer than usual: in each, JAX looks
    through its arrays, too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        gc.enable()
