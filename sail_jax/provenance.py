"""What a record of results says about how it was computed: versions and device."""

import platform
from typing import Any


def versions() -> dict[str, str]:
    """Lists the versions with which this process computes; nothing is imported for it.

    Returns:
      The versions of Python, sail-jax, jax, jaxlib and numpy by name.
    """
    from importlib.metadata import version

    packages = ("sail-jax", "jax", "jaxlib", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def provenance() -> dict[str, Any]:
    """Says with which versions and on which device this process computes.

    Returns:
      {"versions": ..., "device": ...}: what `versions` lists, and the platform, kind and count of
      JAX's devices.
    """
    import jax

    devices = jax.devices()
    return {
        "versions": versions(),
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
    }
