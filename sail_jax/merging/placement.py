"""On which devices the arrays of a program lie, where the compiler would choose badly.

Mostly it chooses well: entries stay where they are, and sums send one number. But each row that is
sorted, and each matrix that is factorised, has to lie on one device.
"""

import math

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def divided(x: Array) -> bool:
    """Checks whether a device may have a part of an array alone; then a reshape may gather it."""
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
      axis: The axis, counted from the end: a negative number.

    Returns:
      The same array. If there is no such axis, or the devices do not divide it, every device has
      all of the array.
    """
    names = _automatic(x)
    parts = math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
    if x.ndim < -axis or x.shape[axis] % parts:
        return whole(x)
    spec: list[tuple[str, ...] | None] = [None] * x.ndim
    spec[axis] = names
    return _placed(x, PartitionSpec(*spec))


def _placed(x: Array, spec: PartitionSpec) -> Array:
    """Gives an array a sharding, if the compiler would choose one."""
    if not _automatic(x):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))
