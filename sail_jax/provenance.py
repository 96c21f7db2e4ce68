"""What a record says of how it came about: versions and device."""

import platform
from typing import Any

__all__ = ["provenance"]


def provenance() -> dict[str, Any]:
    """What this process computes with: versions and device."""
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
