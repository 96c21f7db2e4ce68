"""Splits trees into the leaves that are merged and the other leaves, and joins them again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import PyTree

from sail_jax.checks import one_of
from sail_jax.merging.selection import Select, check_weights, selection
from sail_jax.trees import leaf_paths, some_paths

Rest = Literal["last", "first", "error"]
"""The source of leaves that are not selected: the "last" model, or the base or else the "first"
model. "error" refuses trees with such leaves."""


class Parted(NamedTuple):
    """The selected leaves of several trees.

    Attributes:
      trees: The selected leaves of each tree, by path.
      whole: A function that makes a whole tree from the selected leaves.
    """

    trees: list[dict[str, Any]]
    whole: Callable[[Mapping[str, Any]], PyTree]


def part(models: Sequence[PyTree], like: PyTree, select: Select, rest: Rest) -> Parted | None:
    """Splits trees into the leaves that are merged and the other leaves.

    Args:
      models: The trees that are merged.
      like: The tree with the structure of the result.
      select: The leaves to merge; see `selection`.
      rest: The source of the other leaves.

    Returns:
      The selected leaves of the models, and of `like`; None if all leaves are selected.

    Raises:
      ValueError: If an optimiser state is selected, nothing is selected, other leaves exist under
        "error", or one of them is missing in the last model.
    """
    one_of("rest", rest, Rest)
    leaves = _by_path(like)
    selected = selection(leaves, select)
    check_weights(selected)
    if not selected.rest:
        return None
    if rest == "error":
        raise ValueError(f"{some_paths(selected.rest)} are not selected, and rest is 'error'")
    left_out = set(selected.rest)
    each = [_by_path(tree) for tree in (*models, like)]
    donor = each[-2] if rest == "last" else leaves
    for path in selected.rest:
        if path not in donor:
            raise ValueError(f"rest: the leaf {path!r} is missing in the last model")

    def whole(merged: Mapping[str, Any]) -> PyTree:
        out = [donor[path] if path in left_out else merged[path] for path in leaves]
        return jax.tree.structure(like).unflatten(out)

    # Leaves that occur in only one tree are kept, and the merge rejects them.
    chosen = [{p: x for p, x in tree.items() if p not in left_out} for tree in each]
    return Parted(chosen, whole)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
