"""Keeps compiled programs between commands, in the user's cache folder."""

import hashlib
import os
import platform
from pathlib import Path

__all__ = ["remember_kernels"]


def remember_kernels() -> None:
    """Makes JAX keep what it compiles, for the next command: most of a small command is
    compilation.

    Programs are kept in $XDG_CACHE_HOME/sail-jax/kernels (~/.cache without that variable), in a
    folder of their own for each version of JAX and kind of processor. Nothing is done if
    JAX_COMPILATION_CACHE_DIR names another folder, or if the folder cannot be written.
    """
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    about = Path("/proc/cpuinfo").read_bytes() if Path("/proc/cpuinfo").exists() else b""
    lines = {line for line in about.splitlines() if line.startswith((b"flags", b"Features"))}
    kind = repr([jax.__version__, platform.machine(), sorted(lines)])
    name = hashlib.sha256(kind.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "sail-jax" / "kernels" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return
    # What is in the folder will be executed, so it must be the user's own.
    if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # By default JAX keeps only what took a second to compile: here, next to nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
