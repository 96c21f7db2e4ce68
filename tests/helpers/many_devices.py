"""Simulates several devices on one machine, for programs that tests start."""

import os


def environment(count: int) -> dict[str, str]:
    """Returns the environment of a process whose CPU appears as several devices, and which compiles
    like this one.
    """
    devices = f"--xla_force_host_platform_device_count={count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
