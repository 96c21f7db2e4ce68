"""Trees parted into the leaves that are merged and the others, and put together again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import PyTree

from sail_jax.checks import one_of
from sail_jax.merging.selection import Select, check_weights, selection
from sail_jax.trees import leaf_paths, some_paths

Rest = Literal["last", "first", "error"]
"""Whose leaves are taken that are not selected: those of the last model, or those of the base or
else the first model. "error" makes it an error that there are any."""


class Parted(NamedTuple):
    """Several trees of which some leaves are selected.

    Attributes:
      trees: The selected leaves of each tree, by path.
      whole: Makes a tree of all leaves from the selected ones.
    """

    trees: list[dict[str, Any]]
    whole: Callable[[Mapping[str, Any]], PyTree]


def part(models: Sequence[PyTree], like: PyTree, select: Select, rest: Rest) -> Parted | None:
    """Parts trees into the leaves that are merged and the others.

    Args:
      models: The trees that are merged.
      like: The tree whose structure the outcome has.
      select: Which leaves are merged; see `selection`.
      rest: Whose other leaves the outcome has.

    Returns:
      The selected leaves of the models, and of `like`; None if all leaves are selected.

    Raises:
      ValueError: If the state of an optimiser is selected, nothing is, there are others under
        "error", or the last model lacks one of them.
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
            raise ValueError(f"rest: the last model lacks the leaf {path!r}")

    def whole(merged: Mapping[str, Any]) -> PyTree:
        out = [donor[path] if path in left_out else merged[path] for path in leaves]
        return jax.tree.structure(like).unflatten(out)

    # What no other tree has is kept here, for the merge to refuse it.
    chosen = [{p: x for p, x in tree.items() if p not in left_out} for tree in each]
    return Parted(chosen, whole)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
