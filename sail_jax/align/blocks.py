"""Spaces inside blocks: one map per head, or per layer of a stack.

A `SpaceMap` of the space `qk` moves the units of every head alike. The network allows more: each
head may have its own. `within = {"qk": "head", "v": "head"}` says so; with grouped queries
`{"qk": "kv", "v": "kv", "group": "kv"}`, with layers on one axis `{"hidden": "layer"}`. The map of
such a space has a leading axis with one map for each unit of the block, numbered as they are
after the block's own map.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Axis, Factor, Role
from sail_jax.basis.certificate import Report, exactness
from sail_jax.basis.change_basis import by_block, change_basis, unfused
from sail_jax.basis.maps import SpaceMap, along, invert
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array
from sail_jax.trees import path_str

__all__ = ["block_exactness", "change_blocks", "factors", "invert_blocks", "nested"]


def change_blocks(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]
) -> PyTree:
    """`change_basis` where the maps of the spaces in `within` have a leading axis: one per block.

    The others are applied first. Index forms move gains without their scale, as `change_basis`
    does; dense maps of a space with gains are refused. Pure, for use under jit and grad. Raises
    ValueError as `check_within`, and for a map whose leading axis is not the size of its block.
    """
    check_within(spec, within)
    shared = {name: m for name, m in maps.items() if name not in within}
    inner = {name: m for name, m in maps.items() if name in within}
    new = change_basis(params, spec, shared)
    if not inner:
        return new
    resized = spec.resized(shared)
    check_blocks(resized, inner, within)

    def block(x: Array, axes: tuple[Axis, ...]) -> Array:
        flat = [f for axis in axes for f in axis or (None,)]
        inner_factors = [f for f in flat if f is not None and f.space in inner]
        if not inner_factors:
            return x
        y = jnp.reshape(x, factor_shape(resized, axes, x.shape))
        y = y.astype(jnp.promote_types(x.dtype, jnp.float32))
        for f in inner_factors:
            k, at = _position(flat, f.space), _position(flat, within[f.space])
            y = along_block(inner[f.space], y, k, at, f.role)
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


def invert_blocks(maps: Mapping[str, SpaceMap], within: Mapping[str, str]) -> dict[str, SpaceMap]:
    """The maps that undo `change_blocks`, all of them invertible, for use with it again."""
    out = {name: invert(m) for name, m in maps.items() if name not in within}
    for name in within.keys() & maps.keys():
        inverse = jax.vmap(invert)(maps[name])
        if (block := out.get(within[name])) is not None:
            # numbered as the blocks are after their own map, which is undone first
            if block.index is None:
                raise ValueError(f"the map of the block {within[name]!r} must be a permutation")
            inverse = jax.tree.map(lambda x, index=block.index: x[index], inverse)
        out[name] = inverse
    return out


@partial(jax.jit, static_argnums=(2, 3, 4))
def along_block(m: SpaceMap, x: Array, axis: int, block: int | None, role: Role) -> Array:
    """One factor axis of x re-expressed by m, or by one map for each index of the block axis."""
    if block is None:
        return along(operator(m, role), x, axis)
    x = jnp.moveaxis(x, block, 0)
    axis += axis < block
    y = jax.vmap(lambda m, x: along(operator(m, role), x, axis - 1))(m, x)
    return jnp.moveaxis(y, 0, block)


def operator(m: SpaceMap, role: Role) -> Any:
    """What an axis of that role is contracted with, [new, old]."""
    write, read = m.entries
    if role != "gain":
        return m.operator(write if role == "write" else read)
    if m.index is None:
        raise ValueError("a dense map mixes units under a gain: fold the gain first")
    return m.operator(None)


def check_within(spec: Spec, within: Mapping[str, str]) -> None:
    """ValueError, naming the leaf, unless each leaf with the space has its block, used once."""
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
                    f"leaf {use.path!r} has {name!r} but not {block!r}, so that all units of "
                    f"{block!r} share its map: leave {name!r} out of within"
                )


def check_blocks(spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]) -> None:
    """ValueError unless each map has one map of its space for each unit of its block."""
    for name, m in maps.items():
        n, blocks = spec.space(name).size, spec.space(within[name]).size
        if m.write.shape != (blocks, m.new, n):
            raise ValueError(
                f"the map of {name!r} must have one [new, {n}] map per unit of {within[name]!r}, "
                f"[{blocks}, new, {n}] in all, got {list(m.write.shape)}"
            )


def factors(spec: Spec, path: str, x: Array) -> Array:
    """A leaf with one axis per factor of its axes, groups being split."""
    return jnp.reshape(x, factor_shape(spec, spec.axes(path), jnp.shape(x)))


def factor_shape(spec: Spec, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> list[int]:
    """The shape of an array with those axes, one entry per factor."""
    out: list[int] = []
    for n, axis in zip(shape, axes, strict=True):
        out += [spec.space(f.space).size for f in axis] or [n]
    return out


def nested(spec: Spec) -> dict[str, str]:
    """The widest `within` that the axes allow: which spaces may have a map of their own per block.

    A space lies within another if every leaf that has it has the other as well, once each, and
    the other only counts copies of it there: on the same array axis, in the same role, or always
    written (what is stacked, heads of queries and keys, experts). Of two that always come
    together, the one that stands first is the block; of several blocks, the outermost.

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
        options = [
            block
            for block in options
            if name not in candidates.get(block, ()) or order.index(block) < order.index(name)
        ]
        outermost = [block for block in options if not set(candidates.get(block, ())) - {name}]
        if outermost:
            out[name] = outermost[0]
    return out


def block_exactness(spec: Spec, maps: Mapping[str, SpaceMap], within: Mapping[str, str]) -> Report:
    """`exactness` of `change_blocks`: a space within blocks has the worst of its maps' entries."""
    rows = []
    for name, m in maps.items():
        per_block = [m]
        if name in within:
            count = spec.space(within[name]).size
            per_block = [jax.tree.map(lambda x, k=k: x[k], m) for k in range(count)]
        block_rows = [exactness(spec, {name: block_map}).spaces[0] for block_map in per_block]
        rows.append(max(block_rows, key=lambda row: (not row.exact, row.defect or 0.0)))
    return Report(tuple(rows))


def _counts(name: str, block: str, leaves: list[list[tuple[int, Factor]]]) -> bool:
    """Whether `block` numbers copies of `name` in each of the leaves."""
    alike, written = True, True
    for leaf in leaves:
        own = [(k, f.role) for k, f in leaf if f.space == name]
        its = [(k, f.role) for k, f in leaf if f.space == block]
        if len(own) != 1 or len(its) != 1:
            return False
        alike &= own[0][0] == its[0][0] or own[0][1] == its[0][1]
        written &= its[0][1] == "write"
    return alike or written


def _position(flat: list[Factor | None], name: str) -> int:
    return next(k for k, f in enumerate(flat) if f is not None and f.space == name)
