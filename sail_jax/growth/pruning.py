"""Structured pruning, which keeps the units with the highest scores in each space.

Removing a unit removes its slice of every leaf that writes, reads or multiplies it. A spec lists
these leaves. Heads are therefore removed with their group of queries, and fused leaves block by
block.

Removing two kinds of units does not change the function. A dead unit is always zero or never read.
It has score 0. Units with equal writers are copies, as growth makes them. The score of the first
copy uses the readers of all copies, and the others have score 0. When copies are removed, a
remaining copy takes over their readers. For example, three equal units that are each read with
weight 1/3 become one unit that is read with weight 1.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, PyTree

from sail_jax.basis.axes import Axis, Factor
from sail_jax.basis.change_basis import unfused
from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, concrete
from sail_jax.growth.basic import prune
from sail_jax.trees import leaf_paths

Read = Callable[[str], np.ndarray]
"""A function that reads the values of a leaf of the spec, by its path."""

_NORMS = {"layernorm", "rmsnorm"}
# The result depends on the number of units. `fit` compensates for this only for "dot".
_SHARED = {"softmax", "dot"}
# A unit that is zero stays zero. "elementwise" may be any function, such as a sigmoid.
_ZERO_KEPT = {"linear", "rmsnorm", "relu", "odd", "gated", "dot"}
# The number of entries that are squared at a time, in float64.
_CHUNK = 1 << 22


class Pruned(NamedTuple):
    """The result of `prune_units`.

    Attributes:
      maps: The map of each space.
      lost: The loss in each space, from the axes and the values; "" for no loss.
    """

    maps: dict[str, SpaceMap]
    lost: dict[str, str]


class _Units(NamedTuple):
    """The units of a space: their scores, whether they are dead, and their first copies."""

    scores: np.ndarray
    dead: np.ndarray
    first: np.ndarray


def unit_scores(
    params: PyTree, spec: Spec, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
    """Scores the units of spaces by the magnitude of the weights that write and read them.

    For each leaf that contains the space, a unit is scored by the fraction of its slice in the
    leaf's sum of squares. The score is the sum of these fractions. All leaves therefore count
    equally, regardless of their scale, and each block of a fused leaf counts as a leaf. Leaves with
    one axis, such as biases and gains, count only if no other leaf has the space.

    A dead unit has score 0. So does a copy of an earlier unit. The score of the earlier unit uses
    the readers of all its copies (see the module's docstring).

    Args:
      params: The parameters of the network, by path or as a pytree.
      spec: The spaces of the parameters.
      names: The names of the spaces; None for all.

    Returns:
      The score of each unit, in float64, by the name of the space.

    Raises:
      ValueError: If a space is unknown to the spec, or a leaf of a space is missing, traced, or has
        NaN or infinite entries.

    References:
      Li et al., Pruning Filters for Efficient ConvNets, 2017 (arXiv 1608.08710).
      Fang et al., DepGraph: Towards Any Structural Pruning, 2023 (arXiv 2301.12900).

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": np.array([[3.0, 1.0]]), "out": np.array([[1.0], [1.0]])}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> unit_scores(net, s, ["h"])["h"].round(3).tolist()
    [1.4, 0.6]
    """
    chosen = [s.name for s in spec.spaces] if names is None else list(names)
    return {name: unit.scores for name, unit in _units(_reader(params), spec, chosen).items()}


def magnitude(
    params: PyTree,
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    scores: Mapping[str, ArrayLike] | None = None,
) -> dict[str, SpaceMap]:
    """Makes maps that keep the units with the highest scores, in their original order.

    Apply the maps with `change_basis`. If the architecture allows it, the new network computes the
    same function as the old network with the removed units set to zero. An RMSNorm averages over
    fewer units, so the map of its space is scaled by the root of new / old. It is not scaled if the
    space has a tied leaf or a further nonlinearity. A LayerNorm cannot be compensated.

    Args:
      params: The parameters of the network, by path or as a pytree.
      spec: The spaces of the parameters.
      sizes: The new size of each space that shrinks, by name.
      scores: Other scores of the units, by the name of the space, such as the mean squares of
        activations. By default `unit_scores`.

    Returns:
      A map for each space of `sizes`. It is in index form unless copies are removed. A map that
      removes only dead units and copies preserves the function.

    Raises:
      ValueError: If a space is unknown to the spec, a new size is not between 1 and the old size,
        or scores are not finite or have another shape. As in `unit_scores`.

    References:
      Li et al., Pruning Filters for Efficient ConvNets, 2017 (arXiv 1608.08710).
      Fang et al., DepGraph: Towards Any Structural Pruning, 2023 (arXiv 2301.12900).

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": np.array([[3.0, 1.0]]), "out": np.array([[1.0], [1.0]])}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> magnitude(net, s, {"h": 1})["h"].index.tolist()
    [0]
    """
    return prune_units(_reader(params), spec, sizes, scores).maps


def prune_units(
    read: Read, spec: Spec, sizes: Mapping[str, int], scores: Mapping[str, ArrayLike] | None = None
) -> Pruned:
    """Chooses the units to keep, reading one leaf at a time.

    Args:
      read: A function that reads the values of a leaf of the spec, by its path.
      spec: The spaces of the parameters.
      sizes: As for `magnitude`.
      scores: As for `magnitude`.

    Returns:
      The maps and their losses.

    Raises:
      ValueError: As in `magnitude`.
    """
    for name, new in sizes.items():
        old = spec.space(name).size
        if not 0 < new <= old:
            raise ValueError(
                f"space {name!r} has {old} units: expected to keep 1 to {old}, not {new}"
            )
    given = {name: _given(name, x, spec) for name, x in (scores or {}).items()}
    found = _units(read, spec, list(sizes))
    out = Pruned({}, {})
    for name, new in sizes.items():
        units = found[name]
        units = units._replace(scores=given.get(name, units.scores))
        out.maps[name], out.lost[name] = _kept(spec, name, new, units)
    return out


def _kept(spec: Spec, name: str, new: int, units: _Units) -> tuple[SpaceMap, str]:
    """Makes the map that keeps the units with the highest scores, and computes its loss."""
    scores, dead, first = units
    old, words = len(scores), set(spec.space(name).nonlinearity.split())
    # For equal scores, the earlier unit is kept.
    keep = np.sort(np.argsort(-scores, kind="stable")[:new])
    place = np.full(old, -1)
    place[keep] = np.arange(new)
    # The first remaining copy of a unit takes over the readers of all copies.
    of_class = np.full(old, -1)
    of_class[first[keep[::-1]]] = place[keep[::-1]]
    at = np.where(place >= 0, place, of_class[first])
    copies = np.bincount(at[at >= 0], minlength=new)[~dead[keep]]
    lost = (at < 0) & ~dead
    tied = any(use.tied for use in spec.uses(name))
    scaled = "rmsnorm" in words and words <= {"rmsnorm", "linear"} and not tied
    # The scale keeps the mean square of the old units, with lost units at zero.
    scale = math.sqrt(copies.mean() * new / old) if scaled and len(copies) else 1.0
    if (copies == 1).all() and (at[place < 0] < 0).all():
        m = prune(keep, old)
        if scale != 1:
            write = np.full(new, scale)
            m = select(keep, old, write=write, read=1 / write, family=Family.POSITIVE_MONOMIAL)
    else:
        write, read = np.zeros((new, old), np.float32), np.zeros((old, new), np.float32)
        write[np.arange(new), keep] = scale
        read[at >= 0, at[at >= 0]] = 1 / scale
        family = Family.SELECTION if scale == 1 else Family.POSITIVE_MONOMIAL
        m = SpaceMap(as_array(write), as_array(read), family)
    if lost.any():
        total = scores.sum()
        share = f", {scores[lost].sum() / total:.1%} of the score" if total > 0 else ""
        return m, f"{np.count_nonzero(lost)} of {old} units are removed{share}"
    norm = _NORMS & words
    if norm and not scaled and new != old and (dead.any() or len(set(copies.tolist())) > 1):
        return m, f"its {norm.pop()} averages over other units"
    if scaled and len(set(copies.tolist())) > 1:
        return m, "its rmsnorm averages over other units"
    return m, ""


def _given(name: str, scores: ArrayLike, spec: Spec) -> np.ndarray:
    """Checks the scores of the user."""
    values, n = concrete(scores), spec.space(name).size
    if values is None or values.shape != (n,) or not np.isfinite(values.astype(float)).all():
        shape = "traced ones" if values is None else f"shape {values.shape}"
        raise ValueError(f"scores[{name!r}] must be {n} finite numbers, one per unit, got {shape}")
    return values.astype(float)


def _reader(params: PyTree) -> Read:
    """Makes a reader of leaves in memory."""
    leaves = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))

    def read(path: str) -> np.ndarray:
        if path not in leaves:
            raise ValueError(f"leaf {path!r} of the spec is not among the parameters")
        return values_of(path, leaves[path])

    return read


def values_of(path: str, leaf: Any) -> np.ndarray:
    """Reads the values of a leaf.

    `path` is its path, for messages. `leaf` is an array, or an object that NumPy converts. Raises a
    ValueError for a shape or a traced array.
    """
    values = concrete(leaf) if hasattr(leaf, "__array__") else None
    if values is None:
        raise ValueError(
            f"the values of leaf {path!r} decide which units stay, got {type(leaf).__name__}: give "
            "the parameters themselves"
        )
    return values


def _units(read: Read, spec: Spec, names: list[str]) -> dict[str, _Units]:
    """Finds the units of spaces. Leaves are read one at a time, twice if there are copies."""
    words = {name: set(spec.space(name).nonlinearity.split()) for name in names}
    sizes = {name: spec.space(name).size for name in names}
    # Copies stay equal under nonlinearities that allow duplication. With a tied leaf, readers
    # cannot move.
    merging = {
        name
        for name in names
        if words[name]
        and (
            words[name] == {"dot"}
            or all(NONLINEARITIES[w] in Family.EVEN_DUPLICATION for w in words[name])
        )
        and not any(use.tied for use in spec.uses(name))
    }
    digests = {name: [b""] * sizes[name] for name in merging}
    for factor, rows, _ in _slices(read, spec, merging):
        if factor.role != "read":
            hashed = digests[factor.space]
            for k, row in enumerate(rows.view(np.uint8)):
                digest = hashlib.blake2b(hashed[k], digest_size=16)
                digest.update(row)
                hashed[k] = digest.digest()
    first = {name: np.arange(sizes[name]) for name in names}
    for name, hashed in digests.items():
        if any(use.role == "write" for use in spec.uses(name)):
            seen: dict[bytes, int] = {}
            for k, digest in enumerate(hashed):
                first[name][k] = seen.setdefault(digest, k)
    matrices = {name: np.zeros(n) for name, n in sizes.items()}
    vectors = {name: np.zeros(n) for name, n in sizes.items()}
    silent: dict[tuple[str, str], np.ndarray] = {}
    for factor, rows, ndim in _slices(read, spec, set(names)):
        name, role = factor.space, factor.role
        squares = _squares(rows, first[name], role == "read")
        if not np.isfinite(squares).all():
            raise ValueError(f"a leaf of space {name!r} has NaN or infinite entries")
        if role != "gain":
            for side in ("write", "read") if factor.tied else (role,):
                silent[name, side] = silent.get((name, side), True) & (squares == 0)
        if squares.any():
            kind = vectors if ndim == 1 else matrices
            kind[name] += squares / squares.sum()
    out = {}
    for name, n in sizes.items():
        dead = np.zeros(n, bool)
        unread, unwritten = silent.get((name, "read")), silent.get((name, "write"))
        if words[name] == {"dot"} or (words[name] and not _SHARED & words[name]):
            # A norm also depends on units that are not read.
            if unread is not None and not _NORMS & words[name]:
                dead |= unread
            if unwritten is not None and words[name] <= _ZERO_KEPT:
                dead |= unwritten
        # The first of several copies represents all of them.
        dead = dead[first[name]]
        scores = matrices[name] if matrices[name].any() else vectors[name]
        scores = np.where(dead | (first[name] < np.arange(n)), 0.0, scores)
        out[name] = _Units(scores, dead, first[name])
    return out


def _slices(read: Read, spec: Spec, names: set[str]) -> Iterator[tuple[Factor, np.ndarray, int]]:
    """Yields each use of these spaces, with the entries of each unit and the axes of the leaf."""
    alone, places = unfused(spec)
    path, x = None, np.zeros(0)
    for leaf in alone.leaves:
        if not any(f.space in names for axis in leaf.axes for f in axis):
            continue
        # The blocks of a fused leaf follow one another, so it is read once.
        if places[leaf.path].path != path:
            path = places[leaf.path].path
            x = read(path)
        for factor, rows in _rows(places[leaf.path].of(x), leaf.axes, spec, names):
            yield factor, rows, len(leaf.axes)


def _rows(
    x: np.ndarray, axes: tuple[Axis, ...], spec: Spec, names: set[str]
) -> Iterator[tuple[Factor, np.ndarray]]:
    """Lists the uses of these spaces in an unfused leaf."""
    factors = [(k, f) for k, axis in enumerate(axes) for f in axis or (None,)]
    x = x.reshape([x.shape[k] if f is None else spec.space(f.space).size for k, f in factors])
    for k, (_, f) in enumerate(factors):
        if f is not None and f.space in names:
            yield f, np.ascontiguousarray(np.moveaxis(x, k, 0)).reshape(x.shape[k], -1)


def _squares(rows: np.ndarray, first: np.ndarray, summed: bool) -> np.ndarray:
    """Computes the sum of squares of each row, 0 for copies of an earlier unit.

    With `summed`, the first of several copies gets the sum of their rows.
    """
    out = np.zeros(len(rows))
    firsts, of = np.unique(first, return_inverse=True)
    order, step = np.argsort(of, kind="stable"), max(1, _CHUNK // len(rows))
    starts = np.searchsorted(of[order], np.arange(len(firsts)))
    for k in range(0, rows.shape[1], step):
        part = rows[:, k : k + step].astype(np.float64)
        if summed and len(firsts) < len(rows):
            part = np.add.reduceat(part[order], starts, axis=0)
        else:
            part = part[firsts]
        out[firsts] += np.einsum("ij,ij->i", part, part)
    return out
