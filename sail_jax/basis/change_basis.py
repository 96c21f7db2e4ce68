"""The primitive: re-express the spaces of a network, with one contraction per axis.

`change_basis` applies maps (`sail_jax.basis.maps`) to parameters with a `Spec`
(`sail_jax.basis.spaces`). `unfuse` and its relatives split fused matrices into their blocks, for
code that processes one space at a time.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Axis, Role, blocks, format_axes, parts
from sail_jax.basis.certificate import exactness
from sail_jax.basis.families import Family
from sail_jax.basis.maps import Operator, SpaceMap, along
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.checks import as_array
from sail_jax.trees import path_str

Kind = Literal["params", "gradients", "second_moments"]


def change_basis(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    *,
    kind: Kind = "params",
    require_exact: bool = False,
) -> PyTree:
    """Re-expresses each space of a tree of parameters by its map.

    A plain axis is contracted with `write`, a starred one with `read.T`. The rule depends on the
    content of the leaves (`kind`):

    - "params": parameters, task vectors, averages of parameters. A gain g becomes the diagonal
      operator that is closest to commuting with `write`, g'_j = sum_i write_ji^2 g_i / sum_i
      write_ji^2. This is a gather for index forms, and exact for dense maps if g is constant.
    - "gradients": gradients, and Adam's first moments. They are dual: `read.T` on plain axes,
      `write` on starred ones. If the map is exact (and reads evenly in front of a norm), they are
      the gradients of the re-expressed network.
    - "second_moments": Adam's `nu`. Squares of the factors for gradients, for index forms only. A
      dense map mixes entries, and then needs covariances that `nu` does not store.

    The function is pure, for use under jit (`spec`, `kind` and `require_exact` static), grad and
    vmap. It is differentiable in `params` and in the maps.

    Args:
      params: All or some of the leaves of `spec`, by the same paths.
      spec: The spaces of the leaves before the change.
      maps: A map for each space that changes, by name.
      kind: The content of the leaves.
      require_exact: Whether to refuse maps with a loss according to `exactness`. For traced maps it
        uses only the family.

    Returns:
      A tree of the same structure. Leaves keep their dtype: sums use float32 at least (HIGHEST
      precision) and are cast once. Leaves without a mapped space are returned unchanged. The spec
      of the result is `spec.resized(maps)`.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`, or a leaf with a mapped space is not
        floating.
      ValueError: If `kind` is unknown. If a map is for an unknown space, has another size or is
        batched. If a leaf is unknown to the spec or has another shape. If a map is dense and `kind`
        is "second_moments". With `require_exact`, also if a map has a loss, with the reasons.

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
        lost = exactness(spec, maps).lost
        if lost:
            raise ValueError(f"the change of basis is not exact: {lost}")
    if kind == "second_moments":
        for name, m in maps.items():
            if m.index is None:
                raise ValueError(
                    f"second moments cannot change basis by the dense map of {name!r}: it mixes "
                    "entries, and their covariances are not stored; restart the moments at zero"
                )
    # This follows from the spec alone, so unchanged leaves are returned as the same arrays.
    maps = {name: m for name, m in maps.items() if Family.IDENTITY not in m.family}
    return jax.tree.map_with_path(
        lambda path, leaf: _move(path_str(path), leaf, spec, maps, kind), params
    )


class Block(NamedTuple):
    """The position of a leaf of an unfused spec in the fused tree.

    Attributes:
      path: The path of the leaf that contains it.
      index: One entry per axis of that leaf: a slice, or the positions of a block within a product,
        whose entries are not contiguous.
    """

    path: str
    index: tuple[slice | np.ndarray, ...]

    def of(self, x: Any) -> Any:
        """Takes the block out of its leaf.

        Args:
          x: The leaf, an array or an object that can be indexed.

        Returns:
          The entries of the block.
        """
        # Two arrays in one index would be paired entry by entry.
        for k, at in enumerate(self.index):
            if isinstance(at, np.ndarray) or at != slice(None):
                x = x[(slice(None),) * k + (at,)]
        return x


@lru_cache(maxsize=64)
def unfused(spec: Spec) -> tuple[Spec, dict[str, Block]]:
    """Splits the fused leaves of a spec into one leaf per block.

    Block k of leaf `path` is the leaf `path[k]` (`path[k,l]` if two axes are fused). Spaces keep
    their names, so maps for the unfused spec are also valid for the fused one. The result is
    cached: do not change the dictionary.

    Args:
      spec: The spec to split.

    Returns:
      The spec with one leaf per block, and the position of each of its leaves, by its path.
    """
    places: dict[str, Block] = {}
    leaves = []
    for path, axes in spec.leaves:
        for number, index, of in _blocks(axes, spec):
            name = f"{path}[{','.join(map(str, number))}]" if number else path
            places[name] = Block(path, index)
            leaves.append(Leaf(name, of))
    return replace(spec, leaves=tuple(leaves)), places


def unfuse(params: PyTree, spec: Spec) -> tuple[dict[str, Any], Spec]:
    """Splits the fused leaves of a parameter tree into one array per block.

    For code that processes parameters space by space; `unfused` does the same for the spec alone.

    Args:
      params: All or some of the leaves of `spec`.
      spec: The spaces of the leaves.

    Returns:
      The arrays by path, a fused leaf as one array per block (block k of leaf `path` is `path[k]`),
      and the spec of these arrays.

    Raises:
      ValueError: If a leaf is unknown to the spec or has another shape.

    >>> from sail_jax.basis.spaces import spec
    >>> fused = {"qv": jnp.array([[1.0, 2.0, 3.0]])}
    >>> s = spec(fused, {"qv": "x* (q + v)"}, spaces={"{x,q,v}": "outer"}, sizes={"q": 2})
    >>> arrays, split = unfuse(fused, s)
    >>> {path: x.tolist() for path, x in arrays.items()}
    {'qv[0]': [[1.0, 2.0]], 'qv[1]': [[3.0]]}
    """
    new, places = unfused(spec)
    leaves = {path_str(key): x for key, x in jax.tree.leaves_with_path(params)}
    for path, x in leaves.items():
        _check(path, x, spec, spec.axes(path))
    arrays = {}
    for name, place in places.items():
        if place.path in leaves:
            arrays[name] = place.of(leaves[place.path])
    return arrays, replace(new, leaves=tuple(leaf for leaf in new.leaves if leaf.path in arrays))


def by_block(
    x: Array,
    axes: tuple[Axis, ...],
    spec: Spec,
    f: Callable[[Array, tuple[Axis, ...]], Array],
    new: Spec | None = None,
) -> Array:
    """Applies a function to each block of a fused array and joins the results.

    Args:
      x: An array, of shape [extent of each axis].
      axes: The factors of each of its axes.
      spec: The spec with the sizes of the spaces.
      f: Called with each block and its unfused axes, in the order of `unfused`.
      new: The spec with the sizes of the results; None if `f` preserves shapes.

    Returns:
      The joined results; `f(x, axes)` if no axis is fused.
    """
    new = new or spec
    for k, axis in enumerate(axes):
        lead, inner = parts(axis)
        if inner:
            # Blocks within a product lie end to end along the second of two axes.
            before, after = spec.extent(lead), new.extent(lead)
            ends = np.cumsum([spec.extent(block) for block in inner])
            wide = x.reshape(*x.shape[:k], before, ends[-1], *x.shape[k + 1 :])
            done = []
            for block, piece in zip(inner, jnp.split(wide, ends[:-1], axis=k + 1), strict=True):
                y = piece.reshape(*x.shape[:k], -1, *x.shape[k + 1 :])
                y = by_block(y, (*axes[:k], lead + block, *axes[k + 1 :]), spec, f, new)
                done.append(y.reshape(*y.shape[:k], after, -1, *y.shape[k + 1 :]))
            y = jnp.concatenate(done, axis=k + 1)
            return y.reshape(*y.shape[:k], -1, *y.shape[k + 2 :])
    return f(x, axes)


def _move(path: str, x: Array, spec: Spec, maps: Mapping[str, SpaceMap], kind: Kind) -> Array:
    """Re-expresses one leaf; returns the leaf itself if none of its spaces has a map."""
    axes = spec.axes(path)
    _check(path, x, spec, axes)
    if not any(f.space in maps for axis in axes for f in axis):
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"leaf {path!r} is {x.dtype}: only floating leaves can change basis")

    def block(y: Array, of: tuple[Axis, ...]) -> Array:
        return _contract(y, of, spec, maps, kind)

    return by_block(as_array(x), axes, spec, block, spec.resized(maps))


def _blocks(
    axes: tuple[Axis, ...], spec: Spec
) -> Iterator[tuple[tuple[int, ...], tuple[slice | np.ndarray, ...], tuple[Axis, ...]]]:
    """Lists the number of each block of a leaf, its position, and its axes.

    The number has one entry per fused axis, and none for a leaf that is not fused.
    """
    for at in itertools.product(*(list(enumerate(_split(axis, spec))) for axis in axes)):
        fused = (len(blocks(axis)) > 1 for axis in axes)
        number = tuple(k for (k, _), is_fused in zip(at, fused, strict=True) if is_fused)
        yield number, tuple(where for _, (where, _) in at), tuple(block for _, (_, block) in at)


def _split(axis: Axis, spec: Spec) -> list[tuple[slice | np.ndarray, Axis]]:
    """Lists the position and the factors of each block of an axis; a full slice if not fused."""
    every = blocks(axis)
    if len(every) < 2:
        return [(slice(None), axis)]
    found = []
    for at, block in zip(_positions(axis, spec), every, strict=True):
        first = int(at[0]) if len(at) else 0
        together = np.array_equal(at, np.arange(first, first + len(at)))
        found.append((slice(first, first + len(at)) if together else at, block))
    return found


def _positions(axis: Axis, spec: Spec) -> list[np.ndarray]:
    """Returns the positions of each block along an axis."""
    lead, inner = parts(axis)
    at = np.arange(spec.extent(axis)).reshape(spec.extent(lead), -1)
    if not inner:
        return [at.ravel()]
    found, start = [], 0
    for block in inner:
        found += [at[:, start + own].ravel() for own in _positions(block, spec)]
        start += spec.extent(block)
    return found


def _contract(
    x: Array, axes: tuple[Axis, ...], spec: Spec, maps: Mapping[str, SpaceMap], kind: Kind
) -> Array:
    """Contracts each axis of an unfused array with the operator of its map."""
    # An axis that is a product of spaces is split into one axis per factor, since each factor has a
    # map; the axes are merged again at the end.
    factors = [(k, f) for k, axis in enumerate(axes) for f in axis or (None,)]
    moved = [(k, f) for k, (_, f) in enumerate(factors) if f is not None and f.space in maps]
    used = [maps[f.space] for _, f in moved]
    # Gathers are exact. A program of dense maps could round differently from its single steps.
    exact = all(m.index is not None for m in used)
    return (_compiled if exact else _contracted)(
        x,
        used,
        tuple((k, f.role) for k, f in moved),
        tuple((k, x.shape[k] if f is None else spec.space(f.space).size) for k, f in factors),
        kind,
    )


def _contracted(
    x: Array,
    maps: list[SpaceMap],
    moved: tuple[tuple[int, Role], ...],
    factors: tuple[tuple[int, int], ...],
    kind: Kind,
) -> Array:
    """Contracts the factors of an array with the operators of their maps.

    `moved` has the number and the role of the factor of each map, `factors` the axis and the size
    of each factor. They hold no names, so one program serves all leaves of equal shapes and roles.
    """
    operators = {k: _operator(m, role, kind) for (k, role), m in zip(moved, maps, strict=True)}
    y = x
    # A gather without scales does not round, so its leaf stays in its own dtype.
    if scales := [leaf for leaf in jax.tree.leaves(operators) if _is_floating(leaf)]:
        y = y.astype(jnp.result_type(y, jnp.float32, *scales))
    y = y.reshape([size for _, size in factors])
    # Axes that shrink go first. The remaining work is then done on fewer numbers.
    for k, op in sorted(operators.items(), key=lambda item: item[1].shape[0] / item[1].shape[1]):
        y = along(op, y, k)
    shape = [1] * x.ndim
    for n, (k, _) in zip(y.shape, factors, strict=True):
        shape[k] *= n
    return y.reshape(shape).astype(x.dtype)


_compiled = jax.jit(_contracted, static_argnums=(2, 3, 4))


def _operator(m: SpaceMap, role: Role, kind: Kind) -> Operator:
    """Returns the operator [new, old] that is contracted with an axis in this role."""
    write, read = m.entries
    # None stands for ones throughout: index forms without scales
    if kind == "params":
        return m.operator({"write": write, "read": read, "gain": _gain(m)}[role])
    gain = write if read is None else read if write is None else write * read
    dual = {"write": read, "read": write, "gain": gain}[role]
    return m.operator(dual if kind == "gradients" or dual is None else dual**2)


def _gain(m: SpaceMap) -> Array | None:
    """Returns the operator on gains: rows of `write` squared, over their sum; zero rows stay 0."""
    write, _ = m.entries
    if write is None or m.index is not None:
        # A gather: gains get neither scale nor sign, and a zero unit gets gain zero.
        return None if write is None else (write != 0).astype(write.dtype)
    total = jnp.sum(write**2, axis=1, keepdims=True)
    return jnp.where(total > 0, write**2 / jnp.where(total > 0, total, 1), 0)


def _check(path: str, x: Any, spec: Spec, axes: tuple[Axis, ...]) -> None:
    """Raises a ValueError unless the leaf has the shape in the spec."""
    sizes = spec.shape(path)
    shape = tuple(x.shape) if hasattr(x, "shape") else jnp.shape(x)
    fits = len(shape) == len(sizes) and all(
        m in (n, None) for n, m in zip(shape, sizes, strict=True)
    )
    if not fits:
        expected = ", ".join("_" if n is None else str(n) for n in sizes)
        raise ValueError(
            f"leaf {path!r} has shape {list(shape)}, but the spec has [{expected}] "
            f"({format_axes(axes) or 'a scalar'}); after a change of basis the spec is "
            "spec.resized(maps), and under a leading axis use jax.vmap"
        )


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
