"""The versions and the device of a computation, for records of results."""

import functools
import platform
from typing import Any


def versions() -> dict[str, str]:
    """Lists the versions of packages in this process, without importing them.

    Returns:
      The versions of Python, sail-jax, jax, jaxlib and numpy by name.
    """
    packages = ("sail-jax", "jax", "jaxlib", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


@functools.cache
def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def provenance() -> dict[str, Any]:
    """Lists the versions of packages and the devices of this process.

    Returns:
      A dictionary with "versions" (as from `versions`) and "device" (the platform, kind and count
      of JAX's devices).
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
