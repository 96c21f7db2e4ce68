"""Several devices on one machine, for programs that tests start."""

import os


def environment(count: int) -> dict[str, str]:
    """Of a process that sees its CPU as so many devices, and compiles as this one does."""
    devices = f"--xla_force_host_platform_device_count={count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
