"""The layout of a training's arrays: on one device, or distributed over a row of devices."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import ArrayLike, PyTree

T = TypeVar("T")
AXIS = "data"
Shard = Literal["no", "data", "full"]
Several = Literal[Shard, "members"]


class Layout(NamedTuple):
    """The layout of a training's arrays on devices.

    Attributes:
      mesh: The devices; None for one device.
      shard: "data": every device has the whole state, and a part of each batch. "full": the state
        is also distributed. "members": several networks are trained in parallel, along the leading
        axis of all parameters, and every device has some. If the devices do not divide their
        number, some are trained twice. "no": one device.
    """

    mesh: Mesh | None
    shard: Several

    @property
    def one(self) -> "Layout":
        """Returns the layout of a single training, which has no members to distribute."""
        return self._replace(shard="data") if self.shard == "members" else self

    def check(self, **batches: int) -> None:
        """Checks that the devices divide the batches evenly."""
        for field, size in batches.items():
            if self.mesh is not None and self.shard != "members" and size % self.mesh.size:
                raise ValueError(
                    f"{field} must be a multiple of the {self.mesh.size} devices (or shard 'no'); "
                    f"got {size}"
                )

    def shardings(self, state: PyTree) -> PyTree | None:
        """Returns the layout of a state's arrays, for `make_step`.

        It has a sharding for each array; None on one device.
        """
        if self.mesh is None:
            return None
        if self.shard == "members":
            spread = {k: leading(self.mesh, getattr(state, k)) for k in ("params", "opt_state")}
            return replicated(self.mesh, state)._replace(**spread)
        return (fully_sharded if self.shard == "full" else replicated)(self.mesh, state)

    def lay(self, state: PyTree) -> PyTree:
        """Puts a state on the devices, in the layout that the step expects."""
        return state if self.mesh is None else place(state, self.shardings(state))

    def place(self, batch: PyTree) -> PyTree:
        """Puts a batch on the devices, as `(example, ...)` or `(example, member, ...)`."""
        if self.mesh is None:
            return jax.device_put(batch)
        return split(self.mesh, batch, axis=int(self.shard == "members"))

    def filled(self, some: Sequence[T]) -> list[T]:
        """Repeats members until their number is a multiple of the number of devices."""
        devices = self.mesh.size if self.mesh is not None and self.shard == "members" else 1
        return [some[k % len(some)] for k in range(devices * math.ceil(len(some) / devices))]

    def spread(self, *trees: PyTree) -> tuple[PyTree, ...]:
        """Puts arrays with a leading axis of members, `(member, ...)`, on the devices."""
        if self.mesh is None or self.shard != "members":
            return self.lay(trees)
        return place(trees, leading(self.mesh, trees))


def layout(shard: Several) -> Layout:
    """Creates the layout of a training over all devices.

    Args:
      shard: The layout of the state; "no" uses one device.

    Returns:
      The layout. It uses one device if there is only one, or if `shard` is "no".
    """
    return Layout(mesh() if shard != "no" and jax.device_count() > 1 else None, shard)


def mesh() -> Mesh:
    """Arranges all devices in a row.

    Returns:
      A mesh with the one axis "data".
    """
    return jax.make_mesh((jax.device_count(),), (AXIS,), (AxisType.Auto,), devices=jax.devices())


def replicated(mesh: Mesh, tree: PyTree) -> PyTree:
    """Creates shardings that replicate every array on every device, for data-parallel training.

    Args:
      mesh: The devices.
      tree: The arrays, or their shapes.

    Returns:
      A sharding for each array.
    """
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)


def fully_sharded(mesh: Mesh, tree: PyTree, *, least: int = 1 << 16) -> PyTree:
    """Splits large arrays over the devices, as in ZeRO.

    An array is split along its longest axis among those with a length that the devices divide
    evenly; among equals, the first. Moments and averages of a parameter have its shape, so they
    have its layout too.

    Args:
      mesh: The devices.
      tree: The arrays, or their shapes.
      least: Arrays with fewer elements are replicated on every device, as are arrays without such
        an axis.

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
      tree: The arrays. Every process has the whole arrays.
      shardings: Their layout.

    Returns:
      The arrays in new buffers. Donating these leaves `tree` valid.
    """
    # `device_put` may return its own input buffers, and a step that donates them would destroy the
    # caller's.
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
    return copied(tree)


def leading(mesh: Mesh, tree: PyTree) -> PyTree:
    """Creates shardings that distribute the leading axis of all arrays; scalars are replicated."""
    return jax.tree.map(lambda x: NamedSharding(mesh, P(AXIS) if x.ndim else P()), tree)


def split(mesh: Mesh, batch: PyTree, axis: int = 0) -> PyTree:
    """Distributes a batch over the devices, along its first axis or another one.

    Args:
      mesh: The devices.
      batch: The batch. Every process has the whole batch.
      axis: The axis to distribute.

    Returns:
      The batch on the devices.

    Raises:
      ValueError: If the devices do not divide an array evenly. The message contains its name.
    """
    devices, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(*[None] * axis, AXIS))

    def placed(path: KeyPath, x: ArrayLike) -> jax.Array:
        x = np.asarray(x)
        if x.ndim <= axis or x.shape[axis] % devices:
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
            count = x.shape[axis] if x.ndim > axis else 1
            raise ValueError(
                f"{where}: {count} examples cannot be shared evenly by {devices} devices"
            )
        # Every process has the whole batch and passes its own devices their part.
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map_with_path(placed, batch)


def gathered(tree: PyTree) -> PyTree:
    """Collects whole arrays in every process.

    Args:
      tree: The arrays, on devices of any process. All processes must call this with the same
        arrays.

    Returns:
      The arrays as NumPy arrays.
    """

    def fetched(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(fetched, tree)
