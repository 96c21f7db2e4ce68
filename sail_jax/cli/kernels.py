"""Compilation for commands: programs are cached, and short commands skip optimisation."""

import contextlib
import hashlib
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

from sail_jax import disk

# XLA aborts a process that passes unknown flags, so only tested versions get these flags. Fusion
# emitters set up a separate compiler for every program, however small; the first flag disables
# them. Parallel code generation splits a program into as many parts as there are processors and
# repeats some work for each part; the second flag sets one part.
SMALL_PROGRAMS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
TRIED = ("0.10.",)  # 0.12 rejects the first flag

# For inputs up to this many bytes, optimising programs takes more time than it saves.
FEW = 1 << 20
# The number of folders of an input that are searched.
FOLDERS = 10_000

# The largest size of the cache in bytes. A program has about 15 kB; the test suite has about 4,000.
MOST = 256 << 20


def remember_kernels() -> None:
    """Makes JAX cache compiled programs for the next command, because small commands mostly
    compile.

    Programs are kept in $XDG_CACHE_HOME/sail-jax/kernels (~/.cache without that variable), each for
    one version of JAX and kind of processor. The folder contains at most `MOST` bytes. The function
    does nothing if JAX_COMPILATION_CACHE_DIR is set, or if the folder cannot be written.
    """
    import jax

    from sail_jax import jax_internals

    kept = None if os.environ.get("JAX_COMPILATION_CACHE_DIR") else disk.cache("kernels", MOST)
    # JAX's own cache truncates files when the process is killed or the disk is full, and requires
    # another package to bound its size. This hook replaces the cache that JAX would create.
    if kept is not None and jax_internals.keep_programs(_Programs(kept)):
        jax.config.update("jax_compilation_cache_dir", str(kept.folder))
        # By default JAX caches only programs that took a second to compile, which are almost none
        # here.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _Programs:
    """The cache through which JAX reads and writes compiled programs."""

    def __init__(self, kept: disk.Cache) -> None:
        import jax

        self._kept, self._path = kept, kept.folder
        about = Path("/proc/cpuinfo").read_bytes() if Path("/proc/cpuinfo").exists() else b""
        lines = {line for line in about.splitlines() if line.startswith((b"flags", b"Features"))}
        kind = repr([jax.__version__, platform.machine(), sorted(lines)])
        self._kind = hashlib.sha256(kind.encode()).hexdigest()[:16]

    def get(self, key: str) -> bytes | None:
        """Reads a program."""
        return self._kept.get(f"{key}-{self._kind}")

    def put(self, key: str, value: bytes) -> None:
        """Stores a program."""
        self._kept.put(f"{key}-{self._kind}", value)


def _small_programs() -> str:
    return SMALL_PROGRAMS if version("jaxlib").startswith(TRIED) else ""


def quick_flags() -> str:
    """Returns the XLA flags that disable optimisation in a process."""
    unoptimised = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return f"{unoptimised} {_small_programs()}"


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Makes JAX compile without optimisation during the block, on a CPU.

    Use it for commands that run most of their programs once. Compilation then takes about half the
    time, and the programs slow down by less than that. XLA reads its flags when JAX first computes,
    so the block must begin earlier. Flags that the user has set are kept.

    Yields:
      Nothing.
    """
    own = "XLA_FLAGS" not in os.environ
    if own:
        os.environ["XLA_FLAGS"] = _small_programs()
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    try:
        jax.config.update(name, before or jax.default_backend() == "cpu")
        yield
    finally:
        jax.config.update(name, before)
        if own:
            del os.environ["XLA_FLAGS"]


@contextlib.contextmanager
def as_here(compiled: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Compiles the programs of a task as its command does, so that the results are the same.

    Args:
      compiled: The context of the command, such as `compiled_quickly`.

    Yields:
      Nothing.
    """
    remember_kernels()
    with compiled():
        yield


@contextlib.contextmanager
def compiled_for(inputs: Iterable[str | Path], *, offline: bool = False) -> Iterator[None]:
    """Makes JAX compile without optimisation during the block, if the inputs are small.

    Values may then differ by rounding from the values that the same tensors would have in a larger
    checkpoint. Equal inputs are always compiled in the same way.

    Args:
      inputs: Files, folders of files, and models on the Hub, which are downloaded if necessary. An
        input that cannot be read counts as 0 bytes; opening it later raises the error.
      offline: Whether downloads from the Hub are disabled.

    Yields:
      Nothing.
    """
    size = 0
    for file in (file for path in inputs for file in _files(path, offline)):
        with contextlib.suppress(OSError, ValueError):
            size += os.path.getsize(file)
        if size > FEW:
            break
    with compiled_quickly() if size <= FEW else contextlib.nullcontext():
        yield


def _files(path: str | Path, offline: bool) -> Iterator[str | Path]:
    """Yields the path itself if it is a file, otherwise all files below it."""
    from sail_jax.checkpoint.formats import hub

    if (model := hub.resolved(path, offline=offline)) is not None:
        path = model.folder
    if not os.path.isdir(path):
        yield path
        return
    # No checkpoint has this many folders, so the user passed something else, such as "/".
    for folder, _, names in itertools.islice(os.walk(path), FOLDERS):
        yield from (Path(folder, name) for name in names)
