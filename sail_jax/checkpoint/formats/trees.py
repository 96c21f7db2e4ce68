"""Paths "a/b/c" and the nested dictionaries that they spell."""

from collections.abc import Iterable
from typing import Any

from sail_jax.checkpoint.formats.files import CheckpointError

__all__ = ["nested"]


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
