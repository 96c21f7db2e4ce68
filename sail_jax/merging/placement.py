"""What a program can find out about the devices on which its arrays lie."""

import jax
from jax.sharding import AxisType
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
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    automatic = [n for n, kind in kinds if kind == AxisType.Auto]
    return any(n > 1 for n in automatic) or any(sharding.spec)
