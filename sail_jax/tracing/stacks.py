"""Stacks taken apart: experts or layers that lie on one axis of a leaf, as leaves of their own."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax.checks import nearest
from sail_jax.trees import path_str

__all__ = ["Stack", "stack", "unstack"]


@jax.tree_util.register_pytree_with_keys_class
class Stack:
    """A leaf that was taken apart. To JAX it is a node, its slices are the leaves.

    Attributes:
      slices: The slices, in order.
      axis: The axis along which they lay.
    """

    def __init__(self, slices: Any, axis: int) -> None:
        self.slices = tuple(slices)
        self.axis = axis

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], int]:
        """Lists the slices with their numbers, for JAX.

        Returns:
          The slices, each with its key, and the axis.
        """
        return [(jax.tree_util.SequenceKey(k), x) for k, x in enumerate(self.slices)], self.axis

    @classmethod
    def tree_unflatten(cls, axis: int, slices: Any) -> "Stack":
        """Makes a stack of what JAX gives back.

        Args:
          axis: The axis.
          slices: The slices, of any type.

        Returns:
          The stack.
        """
        return cls(slices, axis)

    def __repr__(self) -> str:
        return f"Stack({self.slices}, axis={self.axis})"


def unstack(params: Any, each: Mapping[str, int]) -> Any:
    """Takes leaves apart along an axis: experts or layers become leaves of their own.

    `spec_of` of `lambda parts, *inputs: apply(stack(parts), *inputs)` then finds the spaces of each
    expert or layer. All that takes parameters and a spec takes the parts.

    Args:
      params: Any pytree of arrays or ShapeDtypeStructs.
      each: The axis by the path of a leaf, or by a pattern of paths such as "layers/*".

    Returns:
      The same tree with slices in place of these leaves. Their paths end in their number:
      "layers/up/0".

    Raises:
      ValueError: If a pattern matches no leaf, or a leaf has no such axis.

    >>> parts = unstack({"up": jnp.zeros((2, 3, 4)), "in": jnp.zeros((5, 3))}, {"up": 0})
    >>> jax.tree.map(jnp.shape, parts["up"].slices, is_leaf=lambda x: hasattr(x, "shape"))
    ((3, 4), (3, 4))
    >>> stack(parts)["up"].shape
    (2, 3, 4)
    """
    paths = [path_str(path) for path, _ in jax.tree.leaves_with_path(params)]
    for pattern in each:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"each[{pattern!r}] matches no leaf{nearest(pattern, paths)}")

    def apart(path: Any, x: Any) -> Any:
        name = path_str(path)
        axis = next((k for pattern, k in each.items() if fnmatchcase(name, pattern)), None)
        if axis is None:
            return x
        if not -len(x.shape) <= axis < len(x.shape):
            raise ValueError(
                f"leaf {name!r} must have an axis {axis} to be taken apart, got shape "
                f"{tuple(x.shape)}"
            )
        axis %= len(x.shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            rest = x.shape[:axis] + x.shape[axis + 1 :]
            return Stack([jax.ShapeDtypeStruct(rest, x.dtype)] * x.shape[axis], axis)
        return Stack([x[(slice(None),) * axis + (k,)] for k in range(x.shape[axis])], axis)

    return jax.tree_util.tree_map_with_path(apart, params)


def stack(parts: Any) -> Any:
    """Puts together what `unstack` took apart.

    Args:
      parts: A tree with stacks. Their slices may have changed, if they have one shape.

    Returns:
      The same tree with arrays in place of the stacks.

    Raises:
      ValueError: If the slices of a stack differ in shape.
    """

    def together(path: Any, x: Any) -> Any:
        if not isinstance(x, Stack):
            return x
        shapes = {np.shape(one) for one in x.slices}
        if len(shapes) > 1:
            raise ValueError(
                f"the slices of {path_str(path)!r} must have one shape to be stacked, got "
                + " and ".join(map(str, sorted(shapes)))
            )
        return jnp.stack([jnp.asarray(one) for one in x.slices], axis=x.axis)

    return jax.tree_util.tree_map_with_path(together, parts, is_leaf=lambda x: isinstance(x, Stack))
