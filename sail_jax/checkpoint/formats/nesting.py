"""Conversion between paths such as "a/b/c" and the nested dictionaries that they describe.

Some formats store a tree of arrays, but a checkpoint here has one flat name for each tensor.
"""

from collections.abc import Iterable
from typing import Any

from sail_jax.checkpoint.formats.files import CheckpointError

# The largest number of characters in a path. Deep trees with long keys could exhaust the memory.
_LONGEST = 4096


def joined(at: str, separator: str, key: str | int) -> str:
    """Returns the path of a key below a node of a tree.

    Args:
      at: The path of the node, "" for the root.
      separator: The text between the keys of a path, "/" or ".".
      key: The key below the node.

    Returns:
      The path, such as "a/b" for "b" below "a".

    Raises:
      CheckpointError: If the path has more than 4096 characters.
    """
    path = f"{at}{separator}{key}" if at else str(key)
    if len(path) > _LONGEST:
        raise CheckpointError(f"a path has more than {_LONGEST} characters: '{path[:60]}...'")
    return path


def nested(paths: Iterable[str]) -> dict[str, Any]:
    """Builds nested dictionaries from the paths of their leaves.

    Args:
      paths: Paths with "/" between their keys.

    Returns:
      The nested dictionaries. Each leaf is its own full path.

    Raises:
      CheckpointError: If a path occurs twice, or lies below another one.

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
