"""Makers for a "stack" space, the layers of a network, and the way between listed and stacked ones.

A change of the number of layers preserves no function by itself. It does if the new layers are
then made to do nothing: `overwrite` zeroes what writes their output (LLaMA-Pro), or makes of them
identities (Net2DeeperNet).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax.basis.axes import path_pattern
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap
from sail_jax.checks import as_array, concrete, nearest
from sail_jax.growth.basic import check_growth, duplicate
from sail_jax.trees import leaf_paths, path_str

__all__ = [
    "deepen",
    "depth_up_scale",
    "inserted",
    "interleave",
    "mix_layers",
    "overwrite",
    "stack_layers",
    "unstack_layers",
]

STACK = "stack"


def deepen(
    old: int,
    new: int,
    how: Literal["stack", "stack_top", "interpolate"] = "stack",
    *,
    matrix: Float[ArrayLike, "new old"] | None = None,
) -> SpaceMap:
    """Make `new` layers of `old`, for a "stack" space; this preserves no function in general.

    "stack" repeats the whole stack, layer k being old layer `k % old` (StackBERT, Gong et al.
    2019; G_stack, Du et al. 2024, for `new` a multiple of `old`); "stack_top" likewise, but a
    remainder repeats the topmost layers (bert2BERT, Chen et al. 2022); "interpolate" repeats each
    layer in place, `k * old // new`. SELECTION. Or `matrix` D gives layer k as
    `sum_i D[k, i] * layer i` (SAIL's depth transformation, LiGO), rows summing to one, `read`
    being its pseudo-inverse. LINEAR.

    Raises ValueError if `new < old`, `how` is none of these, or the matrix has another shape or
    rows that do not sum to one.

    >>> [deepen(3, 5, how).index.tolist() for how in ("stack", "stack_top", "interpolate")]
    [[0, 1, 2, 0, 1], [0, 1, 2, 1, 2], [0, 0, 1, 1, 2]]
    """
    if matrix is not None:
        D = as_array(matrix)
        if D.shape != (new, old):
            raise ValueError(f"matrix must have shape {(new, old)}, got {D.shape}")
        values = concrete(D)
        # sums of `old` rounded terms
        tolerance = 4 * old**0.5 * float(jnp.finfo(jnp.result_type(D, float)).eps)
        if values is not None:
            sums = values.astype(float).sum(axis=1)
            if not np.all(np.abs(sums - 1) <= tolerance * (1 + np.abs(values).sum(axis=1))):
                raise ValueError(f"the rows of matrix must sum to one, got {sums}")
        return SpaceMap(D, jnp.linalg.pinv(D))
    check_growth(old, new)
    layer = np.arange(new)
    if how == "stack":
        return duplicate(layer % old, old, Family.SELECTION)
    if how == "stack_top":
        end = new - new % old
        index = np.where(layer < end, layer % old, layer - end + old - new % old)
        return duplicate(index, old, Family.SELECTION)
    if how == "interpolate":
        return duplicate(layer * old // new, old, Family.SELECTION)
    raise ValueError(f"how must be 'stack', 'stack_top' or 'interpolate', got {how!r}")


def mix_layers(logits: Float[ArrayLike, "new old"]) -> SpaceMap:
    """Layer k is `sum_i softmax(logits[k])_i * layer i` (SAIL, App. F.2). LINEAR.

    Raises ValueError unless `logits` is a matrix.
    """
    logits = jnp.asarray(logits, float)
    if logits.ndim != 2:
        raise ValueError(f"logits must be a matrix [new, old], got shape {logits.shape}")
    new, old = logits.shape
    return deepen(old, new, matrix=jax.nn.softmax(logits, axis=-1))


def depth_up_scale(old: int, drop: int) -> SpaceMap:
    """The first `old - drop` layers, then the last: `2 * (old - drop)` in all (SOLAR, Kim et al.
    2023, has old=32, drop=8). SELECTION; preserves no function.

    Raises ValueError unless `0 <= drop <= old / 2`, which keeps every layer.

    >>> depth_up_scale(4, 1).index.tolist()
    [0, 1, 2, 1, 2, 3]
    """
    if not 0 <= 2 * drop <= old:
        raise ValueError(f"drop must lie between 0 and old / 2, got old={old}, drop={drop}")
    layer = np.arange(old)
    index = np.concatenate([layer[: old - drop], layer[drop:]])
    return duplicate(index, old, Family.SELECTION)


def interleave(old: int, after: ArrayLike) -> SpaceMap:
    """A copy of layer i directly after it, for each i of `after` (repeats insert several).

    LLaMA-Pro (Wu et al. 2024): then `overwrite(params, rules, inserted(m))` with zeros for what
    writes the residual stream, which is function-preserving. SELECTION.

    Raises ValueError unless `after` holds layers of range(old).

    >>> m = interleave(4, jnp.array([1, 3]))
    >>> m.index.tolist(), inserted(m).tolist()
    ([0, 1, 1, 2, 3, 3], [2, 5])
    """
    values = concrete(after)
    if values is None:
        raise TypeError("after decides the number of layers, so it cannot be traced")
    values = values.reshape(-1)
    if values.size and (
        not np.issubdtype(values.dtype, np.integer) or not 0 <= values.min() <= values.max() < old
    ):
        raise ValueError(f"after must hold layers of range({old}), got {values.tolist()}")
    index = np.sort(np.concatenate([np.arange(old), values.astype(int)]))
    return duplicate(index, old, Family.SELECTION)


def inserted(m: SpaceMap) -> Int[Array, "n"]:
    """The layers that repeat an earlier one; ValueError for a dense map or a traced one."""
    index = None if m.index is None else concrete(m.index)
    if index is None:
        raise ValueError("inserted layers are those of a concrete map in index form")
    first = np.unique(index, return_index=True)[1]
    return jnp.asarray(np.setdiff1d(np.arange(m.new), first))


Fill = Literal["zeros", "ones", "identity"]


def _identity(shape: tuple[int, ...]) -> Array:
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"must end in a square matrix to be made an identity, got {list(shape)}")
    return jnp.broadcast_to(jnp.eye(shape[-1]), shape)


FILLS: dict[str, Callable[[tuple[int, ...]], Array]] = {
    "zeros": jnp.zeros,
    "ones": jnp.ones,
    "identity": _identity,
}


def overwrite(
    params: PyTree, rules: Mapping[str, Fill], layers: Int[ArrayLike, "n"], *, axis: int = 0
) -> PyTree:
    """Layers `layers` of stacked leaves set to "zeros", "ones" or "identity".

    `rules` are keyed by patterns of paths (see `sail_jax.basis.axes`); `axis` is the layer axis.
    With zeros for the output projections of residual blocks, or identities for kernels and zeros
    for biases between idempotent nonlinearities (f(f(x)) == f(x): ReLU), those layers do nothing.

    Raises ValueError for a fill that is none of these, a pattern that matches no leaf, a layer out
    of range, or a leaf that cannot be an identity.
    """
    paths = leaf_paths(params)
    layers = jnp.asarray(layers, int)
    fills = {}
    for pattern, word in rules.items():
        if word not in FILLS:
            raise ValueError(f"rules[{pattern!r}] must be one of {', '.join(FILLS)}, got {word!r}")
        compiled = path_pattern(pattern)
        hits = [path for path in paths if compiled.fullmatch(path)]
        if not hits:
            raise ValueError(f"rules[{pattern!r}] matches no leaf{nearest(pattern, paths)}")
        fills |= dict.fromkeys(hits, word)
    numbers = concrete(layers)

    def fill(key_path: Any, x: Array) -> Array:
        path = path_str(key_path)
        if path not in fills:
            return x
        x = jnp.moveaxis(jnp.asarray(x), axis, 0)
        if numbers is not None and not np.isin(numbers, np.arange(len(x))).all():
            raise ValueError(f"layers must lie in range({len(x)}) of leaf {path!r}, got {numbers}")
        try:
            value = FILLS[fills[path]](x.shape[1:])
        except ValueError as error:
            raise ValueError(f"leaf {path!r}, a layer of it: {error}") from None
        return jnp.moveaxis(x.at[layers].set(value.astype(x.dtype)), 0, axis)

    return jax.tree.map_with_path(fill, params)


def stack_layers(params: PyTree, name: str) -> dict[str, Any]:
    """Listed layers as one: leaves whose path starts with `name`, such as "layers/{i}",
    "layer_{i}" or "model.layers.{i}", {i} being a number from 0, are stacked on a leading axis.

    Returns dicts in which "stack" stands for the number: nested, as the tree is (a list becomes a
    dict), or flat if `params` is a flat dict of arrays. `unstack_layers` is the inverse.

    Raises ValueError if no leaf matches, or layers are missing or differ in leaves or shapes.

    >>> listed = {"layers": [{"w": jnp.zeros((2, 3))}, {"w": jnp.ones((2, 3))}]}
    >>> stacked = stack_layers(listed, "layers/{i}")
    >>> jax.tree.map(jnp.shape, stacked)
    {'layers': {'stack': {'w': (2, 2, 3)}}}
    """
    pattern = _numbered(name)
    flat = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    out: dict[str, Any] = {}
    groups: dict[str, dict[int, Any]] = {}
    for path, leaf in flat.items():
        match = pattern.match(path)
        if match is None:
            out[path] = leaf
            continue
        key = path[: match.start(1)] + STACK + path[match.end(1) :]
        groups.setdefault(key, {})[int(match[1])] = leaf
    if not groups:
        raise ValueError(f"no leaf starts with {name!r}{nearest(name, flat)}")
    count = 1 + max(max(group) for group in groups.values())
    for key, group in groups.items():
        if missing := sorted(set(range(count)) - set(group)):
            raise ValueError(f"{key!r} lacks layers {missing} of the {count} of {name!r}")
        shapes = {jnp.shape(x) for x in group.values()}
        if len(shapes) > 1:
            raise ValueError(f"the layers of {key!r} differ in shape: {sorted(shapes)}")
        if key in out:
            raise ValueError(f"the tree already has a leaf {key!r}")
        out[key] = jnp.stack([group[k] for k in range(count)])
    return out if _is_flat(params) else _nested(out)


def unstack_layers(
    params: Mapping[str, Any], name: str, *, container: type[dict] | type[list] = dict
) -> dict[str, Any]:
    """The inverse of `stack_layers`; `container` says what held the layers where it was a list.

    Raises ValueError if no leaf is stacked under `name`, or stacks differ in length.
    """
    prefix = name.replace("{i}", STACK)
    pattern = _numbered(name, STACK)
    flat = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    stacks = {path: leaf for path, leaf in flat.items() if pattern.match(path)}
    if not stacks:
        raise ValueError(f"no leaf starts with {prefix!r}{nearest(prefix, flat)}")
    lengths = {jnp.shape(x)[:1] for x in stacks.values()}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(f"the stacks under {prefix!r} differ in length: {sorted(lengths)}")
    ((count,),) = lengths
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        match = pattern.match(path)
        if match is None:
            out[path] = leaf
            continue
        for k in range(count):
            out[path[: match.start(1)] + str(k) + path[match.end(1) :]] = leaf[k]
    if _is_flat(params):
        return out
    tree = _nested(out)
    if container is list:
        *parents, last = name.split("/")
        if last != "{i}" or not parents:
            raise ValueError(f"only layers under 'parent/{{i}}' can be a list, got {name!r}")
        node = tree
        for key in parents[:-1]:
            node = node[key]
        node[parents[-1]] = [node[parents[-1]][str(k)] for k in range(count)]
    return tree


def _numbered(name: str, number: str = r"\d+") -> re.Pattern[str]:
    before, placeholder, after = name.partition("{i}")
    if not placeholder or "{i}" in after:
        raise ValueError(f"name must hold {{i}} once, such as 'layers/{{i}}', got {name!r}")
    return re.compile(f"{re.escape(before)}({number}){re.escape(after)}(?=[/.]|$)")


def _is_flat(params: Any) -> bool:
    return isinstance(params, Mapping) and all(hasattr(x, "shape") for x in params.values())


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
