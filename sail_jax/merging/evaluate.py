"""Steps carried out on pytrees.

A leaf goes through the steps one after another. Steps whose statistics are of the whole tree hold
all leaves up: every leaf is visited for the statistic, then all go on. Behind the last of them
each leaf is finished on its own. There are two ways to do so, of the same description:

* In pieces (`engine`, `streaming`): files, and arrays of one CPU. Kernels are compiled for pieces
  of a few sizes and kept.
* In one program (`loops`): whatever is traced (under `jit`, `grad`, `vmap`), and arrays on
  accelerators or several devices. Leaves of one shape share one loop, so that the program grows
  with the shapes and not with the leaves.
"""

from collections.abc import Sequence
from typing import Any

import jax

from sail_jax.merging.leafwise import Leaf, data_of
from sail_jax.merging.loops import in_loops
from sail_jax.merging.steps import Kernel, Step

__all__ = ["Leaf", "evaluate", "is_traced", "on_one_cpu", "will_be_traced"]


def is_traced(*trees: Any) -> bool:
    """Whether any leaf stands for a value that is not known yet."""

    def traced(x: Any) -> bool:
        try:
            return isinstance(x, jax.Array) and not x.devices()
        except jax.errors.ConcretizationTypeError:
            return True

    return any(map(traced, jax.tree.leaves(trees)))


def will_be_traced(steps: Sequence[Step], leaves: Sequence[Leaf], *more: Any) -> bool:
    """Whether `evaluate` will see values that are not known yet: then none can be checked."""
    return is_traced(steps, [data_of(steps, leaf) for leaf in leaves], more)


def on_one_cpu(*trees: Any) -> bool:
    """Whether all arrays are where NumPy sees them, and where JAX would put the outcome."""
    arrays = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    devices = {jax.devices()[0], *(device for x in arrays for device in x.devices())}
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def evaluate(steps: Sequence[Step], leaves: Sequence[Leaf], tail: Kernel) -> list[Any]:
    """Takes leaves through steps, in one program.

    Args:
      steps: In order; the last may reduce.
      leaves: Of at least one entry each, all with the same models.
      tail: `(source, value) -> outcome` of a leaf, where the value is what the last step made.

    Returns:
      The outcome of each leaf.

    Raises:
      ValueError: What kernels raise, with the path of a leaf.
    """
    if not leaves:
        return []
    return in_loops(steps, leaves, tail)
