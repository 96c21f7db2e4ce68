"""Where compiled programs are kept between commands."""

import hashlib
import os
import platform
from pathlib import Path

__all__ = ["remember_kernels"]


def remember_kernels() -> None:
    """Lets JAX keep what it compiles, for the next time: most of a small command is compilation.

    In the user's cache folder, apart for every version and processor. A folder that JAX was told to
    use stays; one that cannot be written is done without.
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
    if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
