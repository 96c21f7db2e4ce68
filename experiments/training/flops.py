"""What a computation costs, counted rather than estimated."""

from collections.abc import Callable
from typing import Any

import jax


def flops(fn: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of `fn(*args)`, as XLA counts them in the program before it is
    optimised; arrays or their shapes do. The body of a loop counts once.

    >>> import jax.numpy as jnp
    >>> flops(jnp.dot, jax.ShapeDtypeStruct((3, 4), "float32"), jnp.ones((4, 5)))
    120.0
    """
    cost = jax.jit(fn).lower(*args).cost_analysis()
    return float(cost["flops"])  # type: ignore[index]
