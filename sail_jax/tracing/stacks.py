"""Splits stacks: experts or layers on one axis of a leaf become separate leaves."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths, path_str


@jax.tree_util.register_pytree_with_keys_class
class Stack:
    """A split leaf. For JAX it is a node, and its slices are the leaves.

    Attributes:
      slices: The slices, in order.
      axis: The axis of the slices.
    """

    def __init__(self, slices: Iterable[PyTree], axis: int) -> None:
        self.slices = tuple(slices)
        self.axis = axis

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], int]:
        """Lists the slices with their numbers, for JAX.

        Returns:
          The slices, each with its key, and the axis.
        """
        return [(jax.tree_util.SequenceKey(k), x) for k, x in enumerate(self.slices)], self.axis

    @classmethod
    def tree_unflatten(cls, axis: int, slices: Iterable[PyTree]) -> "Stack":
        """Makes a stack from flattened parts.

        Args:
          axis: The axis.
          slices: The slices, of any type.

        Returns:
          The stack.
        """
        return cls(slices, axis)

    def __repr__(self) -> str:
        return f"Stack({self.slices}, axis={self.axis})"


def unstack(params: PyTree, each: Mapping[str, int | Sequence[int]]) -> PyTree:
    """Splits leaves along an axis: experts or layers become separate leaves.

    `spec_of` of `lambda parts, *inputs: apply(stack(parts), *inputs)` then finds the spaces of each
    expert or layer. All functions of parameters and a spec also accept the parts.

    Args:
      params: Any pytree of arrays or ShapeDtypeStructs.
      each: The axis by the path of a leaf, or by a pattern of paths such as "layers/*". With
        several axes, the slices are split again, for example `(0, 1)` for experts in layers. The
        first matching pattern applies.

    Returns:
      The same tree with slices in place of these leaves. Their paths end in their number, such as
      "layers/up/0".

    Raises:
      ValueError: If a pattern matches no leaf, or a leaf does not have the axis.

    >>> parts = unstack({"up": jnp.zeros((2, 3, 4)), "in": jnp.zeros((5, 3))}, {"up": 0})
    >>> [x.shape for x in parts["up"].slices]
    [(3, 4), (3, 4)]
    >>> stack(parts)["up"].shape
    (2, 3, 4)
    """
    paths = leaf_paths(params)
    for pattern in each:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"each[{pattern!r}] matches no leaf{nearest(pattern, paths)}")

    def leaf(path: Any, x: Any) -> Any:
        name = path_str(path)
        found = next((axes for pattern, axes in each.items() if fnmatchcase(name, pattern)), ())
        axes = (found,) if isinstance(found, int) else tuple(found)
        rank = len(x.shape)
        own = [axis % rank for axis in axes if -rank <= axis < rank]
        if len(set(own)) < len(axes):
            raise ValueError(
                f"leaf {name!r} of shape {tuple(x.shape)} must have the axes of `each`, got {found}"
            )
        return _apart(x, own)

    return jax.tree_util.tree_map_with_path(leaf, params)


def _apart(x: Any, axes: Sequence[int]) -> Any:
    if not axes:
        return x
    axis, *later = axes
    rest = [k - (k > axis) for k in later]
    if isinstance(x, jax.ShapeDtypeStruct):
        slices = [jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)]
        slices *= x.shape[axis]
    else:
        slices = [x[(slice(None),) * axis + (k,)] for k in range(x.shape[axis])]
    return Stack([_apart(one, rest) for one in slices], axis)


def stack(parts: PyTree) -> PyTree:
    """Joins the slices of `unstack` again.

    Args:
      parts: A tree with stacks. The slices may have changed, but must have the same shape.

    Returns:
      The same tree with arrays in place of the stacks.

    Raises:
      ValueError: If the slices of a stack differ in shape.
    """

    def together(path: Any, x: Any) -> Any:
        if not isinstance(x, Stack):
            return x
        slices = [together(path, one) for one in x.slices]
        shapes = sorted({np.shape(one) for one in slices})
        if len(shapes) > 1:
            raise ValueError(
                f"the slices of {path_str(path)!r} must have one shape to be stacked, got "
                + " and ".join(map(str, shapes))
            )
        return jnp.stack(slices, axis=x.axis)

    return jax.tree_util.tree_map_with_path(together, parts, is_leaf=lambda x: isinstance(x, Stack))
