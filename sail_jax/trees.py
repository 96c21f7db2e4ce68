"""Stable names for the leaves of a pytree, for messages, files and random masks."""

import re
from collections.abc import Sequence
from typing import Any

import jax


def path_str(path: tuple[Any, ...]) -> str:
    """Formats a JAX key path as names joined by "/".

    Args:
      path: Keys, as from `jax.tree.leaves_with_path`.

    Returns:
      The path; "" for a tree with a single leaf.

    >>> [path_str(p) for p, _ in jax.tree.leaves_with_path({"a": [1, {"kernel": 2}]})]
    ['a/0', 'a/1/kernel']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_paths(tree: Any) -> list[str]:
    """Lists the path of each leaf, in flattening order.

    Args:
      tree: Any pytree.

    Returns:
      One unique path per leaf.

    Raises:
      ValueError: If two leaves share a path. This is possible because a key may contain a "/":
        `{"a": {"b": 0}, "a/b": 1}`.

    >>> leaf_paths({"b": 1, "a": [2, 3]})
    ['a/0', 'a/1', 'b']
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
    """Lists the first few paths for a message.

    Args:
      paths: All paths.
      limit: The number of listed paths.

    Returns:
      The first `limit` paths in quotes, and the number of further paths.

    >>> some_paths(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(map(repr, paths[:limit])) + more


# The names that qwix gives to low-rank factors, next to their weight. NNX variables may have a
# "value" below their name.
_FACTOR = re.compile(r"(.+)_lora_([ab])((?:/value)?)")


def factor_of(path: str) -> tuple[str, str] | None:
    """Checks whether a leaf is a low-rank factor, which qwix stores next to a weight.

    Args:
      path: The path of the leaf.

    Returns:
      The path of the weight and the factor, "a" or "b"; None for any other leaf.

    >>> factor_of("layers/0/attn/q_proj/w_lora_b"), factor_of("layers/0/attn/q_proj/w")
    (('layers/0/attn/q_proj/w', 'b'), None)
    """
    match = _FACTOR.fullmatch(path)
    return match and (match[1] + match[3], match[2])
