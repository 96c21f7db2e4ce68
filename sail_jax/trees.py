"""Stable names for the leaves of a pytree."""

from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["leaf_paths", "path_str", "some_paths"]


def path_str(path: tuple[Any, ...]) -> str:
    """A JAX key path as "/"-joined names; a bare leaf has the empty path.

    >>> [path_str(p) for p, _ in jax.tree.leaves_with_path({"a": [1, {"kernel": 2}]})]
    ['a/0', 'a/1/kernel']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf in flattening order; ValueError if two leaves share one.

    Two can, since keys may hold a "/": `{"a": {"b": 0}, "a/b": 1}`.
    """
    paths = [path_str(path) for path, _ in jax.tree.leaves_with_path(tree)]
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ValueError(
                f"two leaves of the tree have the path {path!r}; "
                'rename a key (keys are joined with "/")'
            )
        seen.add(path)
    return paths


def some_paths(paths: Sequence[str], limit: int = 5) -> str:
    """The first few paths, for a message."""
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(map(repr, paths[:limit])) + more
