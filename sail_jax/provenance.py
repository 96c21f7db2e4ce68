"""What a record of results says about how it was computed: versions and device."""

import platform
from typing import Any

__all__ = ["provenance"]


def provenance() -> dict[str, Any]:
    """Says with which versions and on which device this process computes.

    Returns:
      {"versions": ..., "device": ...}: the versions of Python, sail-jax, jax, jaxlib and numpy by
      name, and the platform, kind and count of JAX's devices.
    """
    from importlib.metadata import version

    import jax

    devices = jax.devices()
    packages = ("sail-jax", "jax", "jaxlib", "numpy")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
    }
