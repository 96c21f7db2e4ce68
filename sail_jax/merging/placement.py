"""Places the arrays of a program on devices where the compiler would make a bad choice.

Its choice is usually good: entries stay on their device, and sums send one number. But each row
that is sorted, and each matrix that is factorised, must be on one device.
"""

import math

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def divided(x: Array) -> bool:
    """Checks whether an array may be divided among devices. A reshape may then gather it."""
    return bool(_automatic(x)) or any(jax.typeof(x).sharding.spec)


def _automatic(x: Array) -> tuple[str, ...]:
    """Returns the mesh axes along which the compiler may divide an array."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, n, kind in axes if n > 1 and kind == AxisType.Auto)


def whole(x: Array) -> Array:
    """Replicates an array on every device, if the compiler may divide it.

    Args:
      x: The array, traced.

    Returns:
      The same array.
    """
    return _placed(x, PartitionSpec())


def in_parts(x: Array, axis: int) -> Array:
    """Divides an array along only one axis, if the compiler may divide it.

    Args:
      x: The array, traced.
      axis: The axis as a negative number.

    Returns:
      The same array. If the axis is missing, or the number of devices does not divide its length,
      every device has the whole array.
    """
    names = _automatic(x)
    parts = math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
    if x.ndim < -axis or x.shape[axis] % parts:
        return whole(x)
    spec: list[tuple[str, ...] | None] = [None] * x.ndim
    spec[axis] = names
    return _placed(x, PartitionSpec(*spec))


def _placed(x: Array, spec: PartitionSpec) -> Array:
    """Sets the sharding of an array, if the compiler would choose one."""
    if not _automatic(x):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))
