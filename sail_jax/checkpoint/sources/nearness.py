"""Measures distances between two checkpoints of one architecture, before and after one is moved."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax.align.blocks import along_all, factors
from sail_jax.align.problem import cuts
from sail_jax.basis.change_basis import unfuse, unfused
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array
from sail_jax.merging.tensors import Tensor, aligned, read_whole


class Match(NamedTuple):
    """A comparison of the tensors that contain a space with those of the reference.

    Attributes:
      space: The name of the space.
      family: The family of its map, such as "permutation".
      units: The number of its units, in all blocks together.
      moved: The number of units that changed position or scale; all, if the map mixes units.
      before: The mean cosine between the tensors that contain the space and those of the reference.
      after: The same with all maps applied.
    """

    space: str
    family: str
    units: int
    moved: int
    before: float
    after: float


Index = tuple[slice | Sequence[int] | np.ndarray, ...]
"""Parts along the first axes: slices, or positions."""


class Unread:
    """A leaf on disk, which is read each time it is converted to an array.

    It has the attributes that `match_weights` uses: a dtype, a shape, and parts by index.

    Attributes:
      dtype: The type of its entries.
      shape: The shape of the part.
    """

    def __init__(self, tensor: Tensor, *indices: Index | slice) -> None:
        """Describes a tensor or a part of one, without reading it.

        Args:
          tensor: The tensor.
          *indices: Indices that are applied one after another, each of slices or positions along
            the first axes; the other axes are whole.
        """
        self._tensor, self._indices = tensor, indices
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        for index in indices:
            parts = (index,) if isinstance(index, slice) else index
            cut = (
                len(range(*part.indices(n)) if isinstance(part, slice) else part)
                for part, n in zip(parts, self.shape, strict=False)
            )
            self.shape = (*cut, *self.shape[len(parts) :])

    def __getitem__(self, index: Index | slice) -> "Unread":
        return type(self)(self._tensor, *self._indices, index)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        indices = self._indices
        rows = indices[0] if indices else None
        if isinstance(rows, slice) and rows.step is None:
            # For a part of the first axis, only that part is read.
            start, stop, _ = rows.indices(self._tensor.shape[0])
            width = math.prod(self._tensor.shape[1:])
            array = aligned((max(stop - start, 0), *self._tensor.shape[1:]), self.dtype)
            self._tensor.read(array.reshape(-1), start * width)
            indices = indices[1:]
        else:
            array = read_whole(self._tensor)
        for index in indices:
            array = array[index]
        return array if dtype is None else array.astype(dtype)


def compared(
    one: Mapping[str, Unread],
    two: Mapping[str, Unread],
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    within: Mapping[str, str],
) -> tuple[tuple[Match, ...], tuple[float, float]]:
    """Compares two networks, a tensor at a time, before and after the second is moved.

    Args:
      one: The leaves of the reference, by path.
      two: The leaves of the other network, by path.
      spec: The spaces of the leaves.
      maps: The map of each matched space.
      within: The spaces with a map for each unit of a block, as `change_blocks` takes them.

    Returns:
      A `Match` for each map, and |one - two| / |one| over all floating-point leaves, (before,
      after).
    """
    flat, _ = unfused(spec)
    cosines: dict[str, tuple[float, float]] = {}
    total, apart = 0.0, np.zeros(2)
    flat_one, flat_two = (unfuse(side, spec)[0] for side in (one, two))
    for path, leaf in flat_one.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        axes = flat.axes(path)
        spaces = [f for axis in axes for f in axis or (None,)]
        sums = np.zeros(7)
        for cut in cuts(leaf.shape, axes, maps):
            a, b = (
                factors(flat, path, as_array(np.asarray(x if cut is None else x[cut])))
                for x in (leaf, flat_two[path])
            )
            m = along_all(b, spaces, maps, within).astype(b.dtype)
            pairs = ((a, a), (b, b), (a, b), (a, m), (m, m))
            sums += [
                *(float(_inner(*pair)) for pair in pairs),
                float(_apart(a, b)),
                float(_apart(a, m)),
            ]
        aa, bb, ab, am, mm, d0, d1 = map(float, sums)
        # Sums over tensors and their pieces are in float64, sums within a piece in float32.
        total += aa
        apart += (d0, d1)
        cosines[path] = (
            (ab / math.sqrt(aa * bb), am / math.sqrt(aa * mm)) if aa * bb * mm else (0, 0)
        )
    rows = []
    for name, m in maps.items():
        paths = dict.fromkeys(use.path for use in flat.uses(name))
        values = np.array([cosines[path] for path in paths if path in cosines] or [(0, 0)])
        # Shape [new, old], or [block, new, old] if each unit of a block has its own map.
        units = math.prod(m.write.shape[:-1])
        index = None if m.index is None else np.asarray(m.index)
        moved = units if index is None else int(np.sum(index != np.arange(m.old)))
        scale = m.entries[0] if index is not None else None
        if index is not None and scale is not None:
            moved = int(np.sum((index != np.arange(m.old)) | (np.asarray(scale) != 1)))
        # The mean cosine over tensors; small and large tensors count equally.
        before, after = values.mean(0)
        rows.append(Match(name, str(m.family), units, moved, float(before), float(after)))
    relative = np.sqrt(apart / total) if total else apart
    return tuple(rows), (float(relative[0]), float(relative[1]))


@jax.jit
def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the inner product of two arrays."""
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32))


@jax.jit
def _apart(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the squared distance of two arrays."""
    return jnp.sum((a.astype(jnp.float32) - b.astype(jnp.float32)) ** 2)
