"""The primitive: re-express the spaces of a network, one contraction per axis that names one."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Axis, Role, blocks, format_axes
from sail_jax.basis.certificate import exactness
from sail_jax.basis.families import Family
from sail_jax.basis.maps import Operator, SpaceMap, along
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.checks import as_array
from sail_jax.trees import path_str

__all__ = ["by_block", "change_basis", "unfuse", "unfused"]

Kind = Literal["params", "gradients", "second_moments"]


def change_basis(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    *,
    kind: Kind = "params",
    require_exact: bool = False,
) -> PyTree:
    """Re-express each named space by its map: `write` on plain axes, `read.T` on starred ones.

    `params` holds all or some of the leaves of `spec`; leaves without a mapped space are
    returned as they are. What a leaf holds decides how it moves (`kind`):

    - "params": parameters, task vectors, averages of parameters. A gain g goes to the diagonal
      operator that is closest to commuting, `sum_i write_ji^2 g_i / sum_i write_ji^2`: a gather
      for index forms, exact for dense ones where g is constant.
    - "gradients": also Adam's first moments. Dually: `read.T` on plain axes, `write` on
      starred ones. Where the map is exact (and reads evenly in front of a norm) they are the
      gradients of the re-expressed network.
    - "second_moments": Adam's `nu`. Squares of the factors for gradients, index forms only:
      a dense map mixes entries, whose second moments need covariances that `nu` does not keep.

    Leaves keep their dtype: sums run in float32 at least (HIGHEST precision) and are cast once.
    Pure, for use under jit (`spec`, `kind`, `require_exact` static), grad and vmap; differentiable
    in `params` and in the maps. `require_exact` raises ValueError with the sentences of
    `exactness` unless that reports exact; of traced maps, only the family is judged.

    Raises ValueError, naming space and leaf, for a map of no space or the wrong size, a leaf
    that is not the spec's, or a dense map for second moments.

    >>> from sail_jax.growth import permute
    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.array([[1.0, 2.0]]), "out": jnp.array([[3.0], [4.0]])}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> jax.tree.map(lambda w: w.tolist(), change_basis(net, s, {"h": permute(jnp.array([1, 0]))}))
    {'in': [[2.0, 1.0]], 'out': [[4.0], [3.0]]}
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    spec.check(maps)
    if require_exact:
        report = exactness(spec, maps)
        if not report.exact:
            sentences = (f"{s.space!r}: {s.reason}" for s in report.spaces if not s.exact)
            raise ValueError("the change of basis is not exact; " + "; ".join(sentences))
    if kind == "second_moments":
        for name, m in maps.items():
            if m.index is None:
                raise ValueError(
                    f"second moments cannot change basis by the dense map of {name!r}: it mixes "
                    "entries, whose covariances they do not hold; restart them at zero"
                )
    # statically nothing to do
    maps = {name: m for name, m in maps.items() if Family.IDENTITY not in m.family}
    return jax.tree.map_with_path(
        lambda path, leaf: _move(path_str(path), leaf, spec, maps, kind), params
    )


class Block(NamedTuple):
    """Where the leaf of an unfused spec lies: `index` of leaf `path`."""

    path: str
    index: tuple[slice, ...]


@lru_cache(maxsize=64)
def unfused(spec: Spec) -> tuple[Spec, dict[str, Block]]:
    """The spec with one leaf per block of fused axes, and where each lies.

    Block k of leaf `path` is the leaf `path[k]` (`path[k,l]` where two axes are fused); spaces
    keep their names, so maps found for the unfused spec hold for the fused one.
    """
    places: dict[str, Block] = {}
    leaves = []
    for path, axes in spec.leaves:
        for number, index, of in _blocks(axes, spec):
            name = f"{path}[{','.join(map(str, number))}]" if number else path
            places[name] = Block(path, index)
            leaves.append(Leaf(name, of))
    return replace(spec, leaves=tuple(leaves)), places


def unfuse(params: PyTree, spec: Spec) -> tuple[dict[str, Array], Spec]:
    """The leaves by path, fused ones as one leaf per block, and the spec of those.

    For what looks at parameters space by space; `unfused` is the same of the spec alone.
    """
    new, places = unfused(spec)
    leaves = {path_str(key): x for key, x in jax.tree.leaves_with_path(params)}
    for path, x in leaves.items():
        _check(path, x, spec, spec.axes(path))
    arrays = {}
    for name, (path, index) in places.items():
        if path in leaves:
            arrays[name] = leaves[path] if name == path else leaves[path][index]
    return arrays, replace(new, leaves=tuple(leaf for leaf in new.leaves if leaf.path in arrays))


def by_block(
    x: Array, axes: tuple[Axis, ...], spec: Spec, f: Callable[[Array, tuple[Axis, ...]], Array]
) -> Array:
    """f of each block and its axes, laid end to end again."""
    for k, axis in enumerate(axes):
        if len(blocks(axis)) > 1:
            parts = (
                by_block(x[(slice(None),) * k + (at,)], (*axes[:k], block, *axes[k + 1 :]), spec, f)
                for at, block in _split(axis, spec)
            )
            return jnp.concatenate(list(parts), axis=k)
    return f(x, axes)


def _move(path: str, x: Array, spec: Spec, maps: Mapping[str, SpaceMap], kind: Kind) -> Array:
    axes = spec.axes(path)
    _check(path, x, spec, axes)
    if not any(f.space in maps for axis in axes for f in axis):
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"leaf {path!r} is {x.dtype}: only floating leaves can change basis")
    return by_block(as_array(x), axes, spec, lambda y, of: _contract(y, of, spec, maps, kind))


def _blocks(
    axes: tuple[Axis, ...], spec: Spec
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[Axis, ...]]]:
    """The number, the index and the axes of each block."""
    for parts in itertools.product(*(list(enumerate(_split(axis, spec))) for axis in axes)):
        fused = (len(blocks(axis)) > 1 for axis in axes)
        number = tuple(k for (k, _), is_fused in zip(parts, fused, strict=True) if is_fused)
        yield number, tuple(at for _, (at, _) in parts), tuple(block for _, (_, block) in parts)


def _split(axis: Axis, spec: Spec) -> Iterator[tuple[slice, Axis]]:
    """Where each block of an axis lies; all of one that is not fused."""
    if len(blocks(axis)) < 2:
        yield slice(None), axis
        return
    start = 0
    for block in blocks(axis):
        stop = start + spec.extent(block)
        yield slice(start, stop), block
        start = stop


def _contract(
    x: Array, axes: tuple[Axis, ...], spec: Spec, maps: Mapping[str, SpaceMap], kind: Kind
) -> Array:
    # one axis per factor: a group is split, and merged again at the end
    factors = [(k, f) for k, axis in enumerate(axes) for f in axis or (None,)]
    operators = {
        k: _operator(maps[f.space], f.role, kind)
        for k, (_, f) in enumerate(factors)
        if f is not None and f.space in maps
    }
    y = x
    if scales := [leaf for leaf in jax.tree.leaves(operators) if _is_floating(leaf)]:
        y = y.astype(jnp.result_type(y, jnp.float32, *scales))
    y = y.reshape([x.shape[k] if f is None else spec.space(f.space).size for k, f in factors])
    # what shrinks goes first: the rest is then done on fewer numbers
    for k, op in sorted(operators.items(), key=lambda item: item[1].shape[0] / item[1].shape[1]):
        y = along(op, y, k)
    shape = [1] * len(axes)
    for n, (k, _) in zip(y.shape, factors, strict=True):
        shape[k] *= n
    return y.reshape(shape).astype(x.dtype)


def _operator(m: SpaceMap, role: Role, kind: Kind) -> Operator:
    """What one axis is contracted with, [new, old]."""
    write, read = m.entries
    if kind == "params":
        return m.operator({"write": write, "read": read, "gain": _gain(m)}[role])
    gain = write if read is None else read if write is None else write * read
    dual = {"write": read, "read": write, "gain": gain}[role]
    return m.operator(dual if kind == "gradients" or dual is None else dual**2)


def _gain(m: SpaceMap) -> Array | None:
    """Entries of the map of gains: rows of squares of `write` over their sum, empty rows zero."""
    write, _ = m.entries
    if write is None or m.index is not None:
        return None if write is None else (write != 0).astype(write.dtype)
    total = jnp.sum(write**2, axis=1, keepdims=True)
    return jnp.where(total > 0, write**2 / jnp.where(total > 0, total, 1), 0)


def _check(path: str, x: Array, spec: Spec, axes: tuple[Axis, ...]) -> None:
    sizes = spec.shape(path)
    shape = tuple(x.shape) if hasattr(x, "shape") else jnp.shape(x)
    fits = len(shape) == len(sizes) and all(
        m in (n, None) for n, m in zip(shape, sizes, strict=True)
    )
    if not fits:
        expected = ", ".join("_" if n is None else str(n) for n in sizes)
        raise ValueError(
            f"leaf {path!r} has shape {list(shape)}, but the spec says [{expected}] "
            f"({format_axes(axes) or 'a scalar'}); after a change of basis the spec is "
            "spec.resized(maps), and under a leading axis use jax.vmap"
        )


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
