"""On which devices the arrays of a program lie, where the compiler would choose badly.

Mostly it chooses well: what is entry by entry stays where it is, and sums send one number. But a
row that is sorted, and a matrix that is factorised, have to lie on one device.
"""

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def divided(x: Array) -> bool:
    """Checks whether an array may be divided among devices.

    What reshapes an array to compute faster on one device asks this first: the new shape may cut
    across the parts, and then each device would have to receive those of the others.

    Args:
      x: The array, which may be traced.

    Returns:
      True if an axis of it is divided, and wherever the compiler divides arrays as it likes: that
      is on meshes with automatic axes.
    """
    return bool(_automatic(x)) or any(jax.typeof(x).sharding.spec)


def _automatic(x: Array) -> tuple[str, ...]:
    """The names of the mesh's axes along which the compiler may divide an array."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, n, kind in axes if n > 1 and kind == AxisType.Auto)


def whole(x: Array) -> Array:
    """Lets every device have all of an array, where the compiler may divide it.

    Args:
      x: The array, which is traced.

    Returns:
      The same array.
    """
    return _placed(x, PartitionSpec())


def in_parts(x: Array, axis: int) -> Array:
    """Divides an array along one axis alone, where the compiler may divide it.

    Args:
      x: The array, which is traced.
      axis: The axis, counted from the end if it is negative.

    Returns:
      The same array. Where the devices do not divide the axis, every device has all of it.
    """
    names = _automatic(x)
    parts = 1
    for name in names:
        parts *= jax.typeof(x).sharding.mesh.shape[name]
    if x.shape[axis] % parts:
        return whole(x)
    spec: list[tuple[str, ...] | None] = [None] * x.ndim
    spec[axis] = names
    return _placed(x, PartitionSpec(*spec))


def _placed(x: Array, spec: PartitionSpec) -> Array:
    """Gives an array a sharding, if the compiler would choose one."""
    if not _automatic(x):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))
