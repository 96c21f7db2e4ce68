"""Maps of spaces inside blocks: a separate map for each head, or for each layer of a stack.

A `SpaceMap` of a space such as `qk` (the units of one head) moves the units of every head in the
same way. The network allows more freedom: each head may have its own map. The argument `within`
lists such spaces: `{"qk": "head", "v": "head"}`. With grouped queries it is
`{"qk": "kv", "v": "kv", "group": "kv"}`, with layers stacked on one axis `{"hidden": "layer"}`.
The map of such a space has a leading axis, with one map for each unit of the block. If the block
itself is also permuted, this axis numbers its units after the permutation.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Axis, Factor, Role
from sail_jax.basis.certificate import Report, exactness
from sail_jax.basis.change_basis import by_block, change_basis, unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, along
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array
from sail_jax.trees import path_str

Values: TypeAlias = Array | np.ndarray
"""The values of a leaf: a NumPy array if it is small, for which no program is compiled."""
OneKind = TypeVar("OneKind", Array, np.ndarray)


def change_blocks(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]
) -> PyTree:
    """Applies `change_basis` with maps that may differ from block to block.

    Maps of spaces outside `within` are applied first. Gains are gathered by index, without sign or
    scale, as in `change_basis`. The function is pure and works under `jit` and `grad`.

    Args:
      params: The parameters, or some leaves of them.
      spec: The spec of `params`.
      maps: One map for each moved space. For a space in `within`, the leaves of its map have a
        leading axis with one entry for each unit of the block.
      within: The block of each space that has a map per block. Entries without a map are ignored.

    Returns:
      The moved parameters, in their own dtypes. Sums use float32 or wider.

    Raises:
      ValueError: If the spec does not allow `within` (`check_within`), the leading axis of a map
        differs from the size of its block, or a space with gains has a dense map.

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"v": jnp.array([[1.0, 2.0, 3.0, 4.0]]), "o": jnp.ones((4, 1))}
    >>> s = spec(net, {"v": "x* (head v)", "o": "(head v)* y"},
    ...          spaces={"{x,y}": "outer", "head": "odd", "v": "linear"}, sizes={"v": 2})
    >>> stay, swap = jnp.eye(2), jnp.eye(2)[::-1]
    >>> per_head = jnp.stack([stay, swap])  # each is its own inverse
    >>> change_blocks(net, s, {"v": SpaceMap(per_head, per_head)}, {"v": "head"})["v"].tolist()
    [[1.0, 2.0, 4.0, 3.0]]
    """
    check_within(spec, within)
    shared = {name: m for name, m in maps.items() if name not in within}
    inner = {name: m for name, m in maps.items() if name in within}
    new = change_basis(params, spec, shared)
    if not inner:
        return new
    # Maps of inner spaces number the blocks after the shared maps.
    resized = spec.resized(shared)
    check_blocks(resized, inner, within)

    def block(x: Array, axes: tuple[Axis, ...]) -> Array:
        flat = [f for axis in axes for f in axis or (None,)]
        inner_factors = [f for f in flat if f is not None and f.space in inner]
        if not inner_factors:
            return x
        # Each factor gets its own axis, so a map applies to one axis. They are grouped again below.
        y = jnp.reshape(x, factor_shape(resized, axes, x.shape))
        y = y.astype(jnp.promote_types(x.dtype, jnp.float32))
        for f in inner_factors:
            k, at = _position(flat, f.space), _position(flat, within[f.space])
            y = _compiled_along(inner[f.space], y, k, at, f.role)
        shape, k = [], 0
        for axis in axes:
            width = max(len(axis), 1)
            shape.append(math.prod(y.shape[k : k + width]))
            k += width
        return y.reshape(shape).astype(x.dtype)

    def move(path: tuple[Any, ...], x: Array) -> Array:
        axes = spec.axes(path_str(path))
        if not any(f.space in inner for axis in axes for f in axis):
            return x
        return by_block(as_array(x), axes, resized, block)

    return jax.tree.map_with_path(move, new)


def along_block(m: SpaceMap, x: Values, axis: int, block: int | None, role: Role) -> Values:
    """Re-expresses one axis of an array by one map, or by one map for each index of a block axis.

    Args:
      m: A map. With `block`, maps stacked on a leading axis, one for each index of that axis.
      x: An array with one axis per factor of a leaf (see `factors`).
      axis: The axis of the space.
      block: The axis that numbers the blocks; None for a single map.
      role: The leaf's role for the space: "write", "read" or "gain".

    Returns:
      The array with that axis re-expressed, of the new size. A NumPy array remains one.
    """
    if not isinstance(x, np.ndarray):
        return _compiled_along(m, x, axis, block, role)
    if m.index is None:
        return np.asarray(_compiled_along(m, x, axis, block, role))
    # NumPy gathers small arrays without a program for each shape.
    selection = operator(jax.tree.map(np.asarray, m), role)
    where = (axis,) if block is None else (block, axis)
    x = np.take_along_axis(x, _on_axes(selection.index, where, x.ndim), axis)
    return x if selection.scale is None else x * _on_axes(selection.scale, where, x.ndim)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _compiled_along(m: SpaceMap, x: Array, axis: int, block: int | None, role: Role) -> Array:
    if block is None:
        return along(operator(m, role), x, axis)
    x = jnp.moveaxis(x, block, 0)
    # The block axis is now in front. This shifts the axes before it back by one.
    axis += axis < block
    y = jax.vmap(lambda m, x: along(operator(m, role), x, axis - 1))(m, x)
    return jnp.moveaxis(y, 0, block)


def _on_axes(units: np.ndarray, where: tuple[int, ...], ndim: int) -> np.ndarray:
    """Puts the axes of an array at the given places of `ndim` axes, for broadcasting."""
    shape = [1] * ndim
    for k, n in zip(where, units.shape, strict=True):
        shape[k] = n
    return (units if list(where) == sorted(where) else units.T).reshape(shape)


def along_all(
    x: Values,
    axes: Sequence[Factor | None],
    maps: Mapping[str, SpaceMap],
    within: Mapping[str, str],
) -> Values:
    """Re-expresses the axes of an array by the maps of their spaces.

    Args:
      x: An array with one axis per factor of a leaf (see `factors`).
      axes: The factors; None for an axis without a space.
      maps: A map for each moved space.
      within: The spaces with one map per unit of a block, and the block of each.

    Returns:
      The array, in the wider of its dtype and the maps' dtypes.
    """
    found = [(k, f) for k, f in enumerate(axes) if f is not None and f.space in maps]
    # Maps of inner spaces number the blocks after the blocks' own map, so blocks come first.
    for k, f in sorted(found, key=lambda at: at[1].space in within):
        m = maps[f.space]
        if Family.IDENTITY not in m.family:
            block = _position(axes, within[f.space]) if f.space in within else None
            x = along_block(m, x, k, block, f.role)
    return x


def operator(m: SpaceMap, role: Role) -> Any:
    """Returns the matrix that is contracted with an axis, given its role.

    The role "write" gives `write`, "read" the transpose of `read`, "gain" a gather. The result is
    an array or a `Selection`, `(new, old)`. Raises a ValueError for a gain with a dense map, which
    would mix units that have separate gains.
    """
    write, read = m.entries
    if role != "gain":
        return m.operator(write if role == "write" else read)
    if m.index is None:
        raise ValueError(
            "a dense map would mix units that have separate gains: fold the gain first"
        )
    return m.operator(None)


def check_within(spec: Spec, within: Mapping[str, str]) -> None:
    """Checks that each space in `within` occurs only together with its block.

    Args:
      spec: The spec of the network.
      within: The block of each space.

    Raises:
      ValueError: If a space or block is unknown, a block lies within another space, or a leaf
        contains the space without its block, or either of them twice. Messages contain the path of
        the leaf.
    """
    spec, _ = unfused(spec)
    for name, block in within.items():
        spec.space(name)
        spec.space(block)
        if block in within:
            raise ValueError(
                f"within[{name!r}] is {block!r}, which is itself within {within[block]!r}: write "
                f"within[{name!r}] = {within[block]!r}"
            )
        for use in spec.uses(name):
            flat = [f.space for axis in spec.axes(use.path) for f in axis]
            if flat.count(name) + flat.count(block) > 2:
                raise ValueError(f"leaf {use.path!r} has {name!r} or {block!r} twice")
            if block not in flat:
                raise ValueError(
                    f"leaf {use.path!r} has {name!r} but not {block!r}. All units of {block!r} "
                    f"therefore share its map: leave {name!r} out of within"
                )


def check_blocks(spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]) -> None:
    """Checks that each map contains one map of its space for each unit of its block.

    `spec` is the spec of the network, with the sizes. `maps` are maps of spaces in `within`,
    stacked on a leading axis. Raises a ValueError if the shape of a map is not `(blocks, new,
    size)`.
    """
    for name, m in maps.items():
        n, blocks = spec.space(name).size, spec.space(within[name]).size
        if m.write.shape != (blocks, m.new, n):
            raise ValueError(
                f"the map of {name!r} must have one [new, {n}] map per unit of {within[name]!r}, "
                f"[{blocks}, new, {n}] in all, got {list(m.write.shape)}"
            )


def factors(spec: Spec, path: str, x: OneKind) -> OneKind:
    """Reshapes a leaf to have one axis per factor of its grouped axes.

    Args:
      spec: The spec of the network, without fused axes.
      path: The path of the leaf.
      x: The leaf, or a part of it with fewer entries along a first axis with one factor.

    Returns:
      The same entries with one axis per factor, in row-major order.
    """
    axes, shape = spec.axes(path), jnp.shape(x)
    sizes = factor_shape(spec, axes, shape)
    if axes and len(axes[0]) <= 1:
        sizes[0] = shape[0]
    return x.reshape(sizes)


def factor_shape(spec: Spec, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> list[int]:
    """Returns the shape of an array after its grouped axes are split into factors.

    `spec` gives the sizes of the spaces. `shape` is the shape of the array; it gives the size of an
    axis without a space. Returns the sizes, one for each factor.
    """
    out: list[int] = []
    for n, axis in zip(shape, axes, strict=True):
        out += [spec.space(f.space).size for f in axis] or [n]
    return out


def nested(spec: Spec) -> dict[str, str]:
    """Finds the spaces that may have a separate map in each block of another space.

    A space lies within a block under two conditions. Every leaf with the space also has the block,
    each of them once. And the block only numbers copies of the space there: both are on one array
    axis, have the same role, or the block is always written (stacked layers, heads of queries and
    keys, experts). If two spaces always occur together, the first one is the block. If a space has
    several blocks, the outermost is used.

    Args:
      spec: The spec of the network.

    Returns:
      The block of each space that has one, in the form of `within` of `match_weights` and
      `change_blocks`.

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"v": jnp.ones((3, 8)), "o": jnp.ones((8, 3))}
    >>> s = spec(net, {"v": "x* (head v)", "o": "(head v)* y"},
    ...          spaces={"{x,y}": "outer", "head": "odd", "v": "linear"}, sizes={"v": 4})
    >>> nested(s)
    {'v': 'head'}
    """
    spec, _ = unfused(spec)
    flat = {
        path: [(k, f) for k, axis in enumerate(axes) for f in axis] for path, axes in spec.leaves
    }
    candidates: dict[str, list[str]] = {}
    for name, _, words in spec.spaces:
        paths = list(dict.fromkeys(use.path for use in spec.uses(name)))
        if {"outer", "stack"} & set(words.split()):
            continue
        others = [f.space for _, f in flat[paths[0]] if f.space != name] if paths else []
        candidates[name] = [
            block for block in others if _counts(name, block, [flat[p] for p in paths])
        ]
    out: dict[str, str] = {}
    for name, options in candidates.items():
        order = [f.space for _, f in flat[spec.uses(name)[0].path]] if options else []
        # Each of two spaces may number copies of the other. The first one is then the block.
        options = [
            block
            for block in options
            if name not in candidates.get(block, ()) or order.index(block) < order.index(name)
        ]
        # A block within further blocks is not the outermost.
        outermost = [block for block in options if not set(candidates.get(block, ())) - {name}]
        if outermost:
            out[name] = outermost[0]
    return out


def block_exactness(spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]) -> Report:
    """Reports for each space the loss of `change_blocks` that follows from the axes.

    Args:
      spec: The spec of the network.
      maps: The `maps` of `change_blocks`.
      within: The `within` of `change_blocks`.

    Returns:
      The report of `exactness`, one entry for each map. For a space with a map per block it is the
      entry of the worst map.

    >>> from sail_jax.basis.maps import identity
    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.ones((1, 2)), "out": jnp.ones((2, 1))}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"{x,y}": "outer"})
    >>> block_exactness(s, {"h": identity(2)}, {}).lost
    ''
    """
    rows = []
    for name, m in maps.items():
        per_block = [m]
        if name in within:
            count = spec.space(within[name]).size
            per_block = [jax.tree.map(lambda x, k=k: x[k], m) for k in range(count)]
        block_rows = [exactness(spec, {name: block_map}).spaces[0] for block_map in per_block]
        # A map with a loss is worse than any map without; otherwise the larger defect decides.
        rows.append(max(block_rows, key=lambda row: (bool(row.lost), row.defect or 0.0)))
    return Report(tuple(rows))


def _counts(name: str, block: str, leaves: list[list[tuple[int, Factor]]]) -> bool:
    """Checks whether `block` numbers copies of `name` in each of the leaves."""
    alike, written = True, True
    for leaf in leaves:
        own = [(k, f.role) for k, f in leaf if f.space == name]
        its = [(k, f.role) for k, f in leaf if f.space == block]
        if len(own) != 1 or len(its) != 1:
            return False
        # If both are on one array axis, the block only numbers the groups of units.
        alike &= own[0][0] == its[0][0] or own[0][1] == its[0][1]
        written &= its[0][1] == "write"
    return alike or written


def _position(flat: Sequence[Factor | None], name: str) -> int:
    """Returns the index of the factor axis with this space."""
    return next(k for k, f in enumerate(flat) if f is not None and f.space == name)
