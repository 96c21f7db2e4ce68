"""A cache of compiled functions for the tensors that share them."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.merging.arithmetic import in_64_bits
from sail_jax.merging.tensors import Like

Function = Callable[..., Array]


def in_own_width(tensors: Iterable[Like]) -> contextlib.AbstractContextManager[None]:
    """Keeps JAX from converting tensors of float64 to float32; without any, changes no setting."""
    return in_64_bits(any(x.dtype == np.float64 for x in tensors))


class Programs:
    """A cache of compiled functions, by function and shapes of its arguments.

    The layers of a network share functions and shapes, so they share a program. It may be used from
    several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[tuple[Hashable, ...], jax.stages.Compiled] = {}

    def __call__(
        self, function: Function, operands: Any, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> jax.stages.Compiled:
        """Returns a compiled function, to be called as `program(operands, *arrays)`.

        Args:
          function: The function, hashable.
          operands: Its first argument, a pytree of arrays.
          shapes: The shapes and dtypes of the other arguments.

        Returns:
          The compiled function.
        """
        leaves, structure = jax.tree.flatten(operands)
        key = function, structure, *map(jax.typeof, leaves), *shapes
        # Programs are compiled under the lock, so threads that require the same program wait for
        # one compilation.
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = jax.jit(function).lower(operands, *shapes).compile()
            return self._compiled[key]
