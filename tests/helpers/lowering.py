"""Programs of one thread are lowered in one context of MLIR. JAX makes a new one for each, which
takes 4 ms, a fifth of what a small program costs; the programs do not depend on it."""

import threading

import jax

contexts = threading.local()


def share_contexts() -> None:
    """From now on; nothing happens with versions of JAX with which this was not tried, since there
    is no public way."""
    if jax.__version_info__[:2] != (0, 10):
        return
    from jax._src.interpreters import mlir

    make = mlir.make_ir_context

    def kept():
        if not hasattr(contexts, "kept"):
            contexts.kept = make()
        return contexts.kept

    mlir.make_ir_context = kept


def forget_contexts() -> None:
    """Those of this thread: constants of programs stay in memory as long as their context does."""
    vars(contexts).clear()
