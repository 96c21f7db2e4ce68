"""Stable names for the leaves of a pytree, for messages, files and random masks."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


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


def with_layers(tree: Any, before: str, order: Sequence[int]) -> Any:
    """Repeats, removes or reorders the layers that a tree lists.

    Args:
      tree: Any pytree. The layers are the elements of a list or tuple, or entries of a mapping with
        their number in the key.
      before: The text before the number in the paths of the layers, such as "blocks/".
      order: The number of the old layer for each new layer.

    Returns:
      The tree with these layers, numbered from 0. Other nodes do not change.

    Raises:
      ValueError: If a container of another type holds the layers.

    >>> with_layers({"blocks": [{"w": 1}, {"w": 2}], "head": 3}, "blocks/", [0, 1, 1])
    {'blocks': [{'w': 1}, {'w': 2}, {'w': 2}], 'head': 3}
    """
    number = re.compile(rf"{re.escape(before)}(\d+)(?=[/.]|$)")
    return _with_layers(tree, "", before, number, order)


def _with_layers(
    node: Any, prefix: str, before: str, number: re.Pattern[str], order: Sequence[int]
) -> Any:
    keyed, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    children = {prefix + path_str(keys): child for keys, child in keyed}
    found = {name: match for name in children if (match := number.match(name))}
    if not found:
        inner = [
            _with_layers(child, f"{name}/", before, number, order)
            if before.startswith(f"{name}/")
            else child
            for name, child in children.items()
        ]
        return jax.tree.unflatten(structure, inner)
    if type(node) in (list, tuple):
        elements = list(children.values())
        repeated = [elements[old] for old in order]
        return repeated if isinstance(node, list) else tuple(repeated)
    if not isinstance(node, Mapping):
        raise ValueError(
            f"the layers {before + '*'!r} are in a {type(node).__name__}, which holds no other "
            "number of them: expected a list, tuple or mapping"
        )
    out = {}
    for (keys, child), name in zip(keyed, children, strict=True):
        key = keys[0].key
        if name not in found:
            out[key] = child
            continue
        start, stop = found[name].span(1)
        for new, old in enumerate(order):
            if old == int(found[name][1]):
                text = f"{name[len(prefix) : start]}{new}{name[stop:]}"
                out[new if isinstance(key, int) else text] = child
    make: Any = type(node)
    return make(out)


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


def static_difference(one: Any, other: Any) -> str:
    """Finds custom nodes of two trees that differ in their static data.

    Functions count as equal if they have the same name, because each training state has its own.

    Args:
      one: A tree.
      other: A tree with the same leaves.

    Returns:
      The node's type, its first leaf, and the first values that differ; "" if no node differs.

    >>> import dataclasses
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass
    ... class Layer:
    ...     w: float
    ...     act: str = dataclasses.field(metadata={"static": True})
    >>> static_difference({"a": Layer(1.0, "tanh")}, {"a": Layer(2.0, "relu")})
    "static data of Layer with the leaf 'a/w': 'tanh' and 'relu'"
    """
    found = _differing(jax.tree.structure(one), jax.tree.structure(other), 0)
    if found is None:
        return ""
    at, kind, first, second = found
    paths = leaf_paths(one)
    leaf = f" with the leaf {paths[at]!r}" if at < len(paths) else ""
    first, second = _known(first), _known(second)
    while isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        first, second = next((a, b) for a, b in zip(first, second, strict=True) if a != b)
    texts = (repr(x) for x in (first, second))
    shown = " and ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
    return f"static data of {kind.__name__}{leaf}: {shown}"


def _differing(one: Any, other: Any, at: int) -> tuple[int, type, Any, Any] | None:
    """Finds the first node that differs: the path of its first leaf, its type, and both data."""
    if one == other or one.node_data() is None or other.node_data() is None:
        return None
    (kind, first), (other_kind, second) = one.node_data(), other.node_data()
    parts, others = one.children(), other.children()
    if kind is not other_kind or len(parts) != len(others):
        return None
    plain = issubclass(kind, dict | list | tuple)
    if not plain and _known(first) != _known(second):
        return at, kind, first, second
    for part, like in zip(parts, others, strict=True):
        found = _differing(part, like, at)
        if found is not None:
            return found
        at += part.num_leaves
    return None


def _known(x: Any) -> Any:
    """Returns static data as plain values, with functions and other objects by name."""
    if isinstance(x, dict):
        return {repr(key): _known(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_known(value) for value in x]
    if isinstance(x, functools.partial):
        return _known([x.func, x.args, x.keywords])
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | np.dtype):
        return x
    named = x if hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"
