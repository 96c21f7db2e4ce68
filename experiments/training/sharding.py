"""Where the arrays of a training lie on a mesh of devices with the one axis `data`."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

AXIS = "data"
Shard = Literal["no", "data", "full"]


class Layout(NamedTuple):
    """Where a training lies: on one device (no mesh), or on all, its batches shared out and its
    state whole on each ("data") or shared out, too ("full")."""

    mesh: Mesh | None
    shard: Shard

    def check(self, **batches: int) -> None:
        """`ValueError` for the number of examples, by its field, that devices cannot share."""
        for field, size in batches.items():
            if self.mesh is not None and size % self.mesh.size:
                raise ValueError(
                    f"{field} must be a multiple of the {self.mesh.size} devices (or shard 'no'); "
                    f"got {size}"
                )

    def shardings(self, state: PyTree) -> PyTree | None:
        """Of a state, or its shapes: what `make_step` keeps it in."""
        if self.mesh is None:
            return None
        return (fully_sharded if self.shard == "full" else replicated)(self.mesh, state)

    def lay(self, state: PyTree) -> PyTree:
        """The state where the step expects it."""
        return state if self.mesh is None else place(state, self.shardings(state))

    def place(self, batch: PyTree) -> PyTree:
        """A batch where the step expects it."""
        return jax.device_put(batch) if self.mesh is None else split(self.mesh, batch)


def layout(shard: Shard) -> Layout:
    """Over all devices, unless there is one or `shard` is "no"."""
    return Layout(mesh() if shard != "no" and jax.device_count() > 1 else None, shard)


def mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """All devices in a row, or those given."""
    used = jax.devices() if devices is None else devices
    return jax.make_mesh((len(used),), (AXIS,), (AxisType.Auto,), devices=used)


def replicated(mesh: Mesh, tree: PyTree) -> PyTree:
    """Every array whole on every device: data-parallel training."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)


def fully_sharded(mesh: Mesh, tree: PyTree, *, least: int = 1 << 16) -> PyTree:
    """Every array of at least `least` elements split along its longest axis that the devices divide
    evenly (the first of equals), others whole; optimiser moments and averages lie as their
    parameters do, having their shapes (Rajbhandari et al., 2020, ZeRO)."""
    devices = mesh.shape[AXIS]

    def rule(x: Any) -> NamedSharding:
        splits = [i for i, length in enumerate(x.shape) if length % devices == 0]
        if not splits or x.size < least:
            return NamedSharding(mesh, P())
        longest = max(splits, key=lambda i: x.shape[i])
        return NamedSharding(mesh, P(*[None] * longest, AXIS))

    return jax.tree.map(rule, tree)


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """The tree, which every process has whole, in new buffers laid out so."""
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
    return copied(tree)


def split(mesh: Mesh, batch: PyTree) -> PyTree:
    """A batch, known to every process as a whole, shared out along its first axis.

    `ValueError` names an array that the devices do not divide evenly.
    """
    devices, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(AXIS))

    def placed(path: Any, x: Any) -> jax.Array:
        x = np.asarray(x)
        if x.ndim < 1 or x.shape[0] % devices:
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
            raise ValueError(
                f"{where}: {x.shape[0] if x.ndim else 1} examples cannot be shared evenly by "
                f"{devices} devices"
            )
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map_with_path(placed, batch)


def gathered(tree: PyTree) -> PyTree:
    """The arrays, whole, as NumPy's in every process."""

    def fetched(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(fetched, tree)
