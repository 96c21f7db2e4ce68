"""Counts the floating-point operations of a computation."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree


def flops(fn: Callable[..., Any], *args: PyTree) -> float:
    """Counts the floating-point operations of `fn(*args)`, as XLA counts them.

    The count is for the program before optimisation. The body of a loop counts once.

    Args:
      fn: A function that can be compiled.
      *args: Its arguments: arrays, or their shapes. Nothing is computed.

    Returns:
      The number of operations.

    >>> import jax.numpy as jnp
    >>> flops(jnp.dot, jax.ShapeDtypeStruct((3, 4), "float32"), jnp.ones((4, 5)))
    120.0
    """
    cost = jax.jit(fn).lower(*args).cost_analysis()
    return float(cost["flops"])  # type: ignore[index]
