"""How a command compiles: programs are kept for the next one, and short ones are not optimised."""

import contextlib
import hashlib
import itertools
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from sail_jax import disk

# XLA ends a process whose flags it does not know: only versions that were tried are given these.
# For every program, however small, the emitters that are turned off set up a compiler of their own.
# Compiled in one part, a program does without what is done anew for each part; else there are as
# many as processors.
SMALL_PROGRAMS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
TRIED = ("0.10.",)  # 0.12 no longer knows the first

# Bytes of inputs up to which optimised programs save less time than it takes to optimise them.
FEW = 1 << 20
# How many folders of an input are looked into.
FOLDERS = 10_000

# The most bytes of programs that are kept. One has some 15 kB, and the whole test suite some 4,000.
MOST = 256 << 20


def remember_kernels() -> None:
    """Makes JAX keep what it compiles, for the next command: most of a small command is
    compilation.

    Programs are kept in $XDG_CACHE_HOME/sail-jax/kernels (~/.cache without that variable), each for
    one version of JAX and kind of processor. They have at most `MOST` bytes in all. Nothing is done
    if JAX_COMPILATION_CACHE_DIR names another folder, or if the folder cannot be written.
    """
    import jax
    from jax._src import compilation_cache

    kept = None if os.environ.get("JAX_COMPILATION_CACHE_DIR") else disk.cache("kernels", MOST)
    # JAX's own files are cut short where it is killed, or the disk is full, and it has no bound on
    # them without another package. This is where it makes what reads and writes them.
    if kept is not None and hasattr(compilation_cache, "get_file_cache"):
        programs = _Programs(kept)
        compilation_cache.get_file_cache = lambda path: (programs, path)  # pyright: ignore
        jax.config.update("jax_compilation_cache_dir", str(kept.folder))
        # By default JAX keeps only what took a second to compile: here, next to nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _Programs:
    """What JAX reads compiled programs from, and writes them to: the entries of a cache."""

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
        """Keeps a program."""
        self._kept.put(f"{key}-{self._kind}", value)


def _small_programs() -> str:
    return SMALL_PROGRAMS if version("jaxlib").startswith(TRIED) else ""


def quick_flags() -> str:
    """Names the flags of XLA with which a process compiles without optimising from start to end."""
    unoptimised = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return f"{unoptimised} {_small_programs()}"


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Makes JAX compile without optimising while the block lasts, on a CPU.

    This is for commands most of whose programs run once: compiling without optimisations takes
    about half of the time, and what a program then loses is less than that. XLA reads its flags
    when JAX first computes, which should not have happened yet; flags that the user has set are
    left alone.

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
def compiled_for(inputs: Iterable[str | Path], *, offline: bool = False) -> Iterator[None]:
    """Makes JAX compile without optimising while the block lasts, if the inputs are small.

    Values may then differ by their rounding from those that the same inputs would have in a larger
    checkpoint. The same inputs are always compiled for alike.

    Args:
      inputs: Files, folders of files, and models on the Hub, which are downloaded if need be. What
        cannot be looked at counts nothing: whoever opens it says why.
      offline: Whether models on the Hub are not downloaded.

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
    """Yields a path that is no folder, and all files below one that is."""
    from sail_jax.checkpoint.formats import hub

    if (model := hub.resolved(path, offline=offline)) is not None:
        path = model.folder
    if not os.path.isdir(path):
        yield path
        return
    # No checkpoint has so many: something else was named, such as "/".
    for folder, _, names in itertools.islice(os.walk(path), FOLDERS):
        yield from (Path(folder, name) for name in names)
