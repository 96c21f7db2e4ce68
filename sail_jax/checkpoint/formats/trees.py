"""Paths "a/b/c" and the nested dictionaries that they spell."""

from collections.abc import Iterable
from typing import Any

from sail_jax.checkpoint.formats.files import CheckpointError

__all__ = ["joined", "nested"]

_LONGEST = 4096  # characters of a path: deep trees of long keys would fill the memory


def joined(at: str, separator: str, key: str | int) -> str:
    """The path of what lies below `at` (the root: "") under a key."""
    path = f"{at}{separator}{key}" if at else str(key)
    if len(path) > _LONGEST:
        raise CheckpointError(f"a path has more than {_LONGEST} characters: '{path[:60]}...'")
    return path


def nested(paths: Iterable[str]) -> dict[str, Any]:
    """The tree whose leaves are the paths themselves.

    >>> nested(["a/b", "c", "a/d"])
    {'a': {'b': 'a/b', 'd': 'a/d'}, 'c': 'c'}
    """
    tree: dict[str, Any] = {}
    for path in paths:
        *above, last = path.split("/")
        node: Any = tree
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"'{path}' lies below '{node}', which is a tensor")
        if last in node:
            raise CheckpointError(f"'{path}' is a tensor, and others lie below it")
        node[last] = path
    return tree
