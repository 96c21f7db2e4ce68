"""Where the arrays of a training lie: on one device, or shared out over a row of devices."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import ArrayLike, PyTree

AXIS = "data"
Shard = Literal["no", "data", "full"]


class Layout(NamedTuple):
    """Where the arrays of a training lie on devices.

    Attributes:
      mesh: The devices; None for one device.
      shard: "data": every device has the whole state, and its share of each batch. "full": the
        state is shared out, too. "no" is for one device.
    """

    mesh: Mesh | None
    shard: Shard

    def check(self, **batches: int) -> None:
        """Checks that the devices can share batches evenly."""
        for field, size in batches.items():
            if self.mesh is not None and size % self.mesh.size:
                raise ValueError(
                    f"{field} must be a multiple of the {self.mesh.size} devices (or shard 'no'); "
                    f"got {size}"
                )

    def shardings(self, state: PyTree) -> PyTree | None:
        """Says how the arrays of a state are laid out, for `make_step`.

        It returns a sharding for each array; None on one device.
        """
        if self.mesh is None:
            return None
        return (fully_sharded if self.shard == "full" else replicated)(self.mesh, state)

    def lay(self, state: PyTree) -> PyTree:
        """Lays out a state where the step expects it."""
        return state if self.mesh is None else place(state, self.shardings(state))

    def place(self, batch: PyTree) -> PyTree:
        """Puts a batch where the step expects it."""
        return jax.device_put(batch) if self.mesh is None else split(self.mesh, batch)


def layout(shard: Shard) -> Layout:
    """Makes the layout of a training over all devices.

    Args:
      shard: How the state is laid out; "no" uses one device.

    Returns:
      The layout. It is that of one device if there is only one, or `shard` is "no".
    """
    return Layout(mesh() if shard != "no" and jax.device_count() > 1 else None, shard)


def mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a row.

    Args:
      devices: The devices; None for all of them.

    Returns:
      A mesh with the one axis "data".
    """
    used = jax.devices() if devices is None else devices
    return jax.make_mesh((len(used),), (AXIS,), (AxisType.Auto,), devices=used)


def replicated(mesh: Mesh, tree: PyTree) -> PyTree:
    """Lays out every array as a whole on every device, for data-parallel training.

    Args:
      mesh: The devices.
      tree: The arrays, or their shapes.

    Returns:
      A sharding for each array.
    """
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)


def fully_sharded(mesh: Mesh, tree: PyTree, *, least: int = 1 << 16) -> PyTree:
    """Splits large arrays over the devices, as ZeRO does.

    An array is split along its longest axis whose length the devices divide evenly, the first of
    equals. Moments and averages of a parameter have its shape, so they lie as it does.

    Args:
      mesh: The devices.
      tree: The arrays, or their shapes.
      least: Arrays of fewer elements stay whole, on every device. So do those without such an axis.

    Returns:
      A sharding for each array.

    References:
      Rajbhandari et al., ZeRO, 2020 (arXiv 1910.02054).
    """
    devices = mesh.shape[AXIS]

    def rule(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        splits = [i for i, length in enumerate(x.shape) if length % devices == 0]
        if not splits or x.size < least:
            return NamedSharding(mesh, P())
        longest = max(splits, key=lambda i: x.shape[i])
        return NamedSharding(mesh, P(*[None] * longest, AXIS))

    return jax.tree.map(rule, tree)


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Copies arrays to the devices.

    Args:
      tree: The arrays, which every process has as a whole.
      shardings: How they are to be laid out.

    Returns:
      The arrays in new buffers: to donate them leaves `tree` valid.
    """
    # `device_put` may return the buffers that it is given, and a step that donates would spoil them
    # for the caller.
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
    return copied(tree)


def split(mesh: Mesh, batch: PyTree) -> PyTree:
    """Shares a batch out over the devices, along its first axis.

    Args:
      mesh: The devices.
      batch: The batch, which every process has as a whole.

    Returns:
      The batch on the devices.

    Raises:
      ValueError: If the devices do not divide an array evenly. The message names the array.
    """
    devices, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(AXIS))

    def placed(path: KeyPath, x: ArrayLike) -> jax.Array:
        x = np.asarray(x)
        if x.ndim < 1 or x.shape[0] % devices:
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
            raise ValueError(
                f"{where}: {x.shape[0] if x.ndim else 1} examples cannot be shared evenly by "
                f"{devices} devices"
            )
        # Every process has the whole batch and hands its own devices their part of it.
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map_with_path(placed, batch)


def gathered(tree: PyTree) -> PyTree:
    """Collects arrays as a whole in every process.

    Args:
      tree: The arrays, on devices of any process. All processes must call this with the same ones.

    Returns:
      The arrays as NumPy's.
    """

    def fetched(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(fetched, tree)
