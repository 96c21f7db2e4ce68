"""What an output needs of the file system: a folder of its own, room, and whole writes."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from sail_jax.checkpoint.formats.files import CheckpointError, explained

try:
    import fcntl
except ImportError:  # not on Windows: there two runs to one output are not noticed
    fcntl = None

__all__ = ["Flusher", "admit", "hold", "is_empty_folder", "pwrite", "reserve"]


def is_empty_folder(path: Path) -> bool:
    """Whether a rename may replace it."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def admit(out: Path, inputs: Iterable[str | os.PathLike[str]], resume: bool = False) -> None:
    """CheckpointError if an output cannot stand there: it does already, or lies in an input.

    To `resume` is to be asked of the writer, which knows what it left.
    """
    try:
        named = bool(out.name.encode()) and str(out).encode()
    except UnicodeEncodeError:
        named = False
    if not named:
        raise CheckpointError(f"{out}: expected a name for the output, in UTF-8")
    there = os.path.lexists(out) and not is_empty_folder(out)
    if there and not (resume and os.path.exists(out)):
        raise CheckpointError(f"{out} exists already; choose another place for the output")
    with explained("write", out), contextlib.suppress(FileNotFoundError):
        os.lstat(out.with_name(f".{out.name}.partial"))  # raises where no name can stand
    # not Path.resolve, which raises for a link that leads to itself
    real = Path(os.path.realpath(out))
    for path in inputs:
        if Path(os.path.realpath(path)) in (real, *real.parents):
            raise CheckpointError(f"{out} lies in {path}, which is read: choose another place")


def hold(partial: Path, out: Path) -> int | None:
    """The folder of unfinished work, made if need be and held by this process alone."""
    for _ in range(10):
        partial.mkdir(exist_ok=True)
        if fcntl is None:
            return None
        fd = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(f"{out} is being written by another process") from None
        except OSError:  # a file system without locks
            os.close(fd)
            return None
        # Whoever held it before may have removed or renamed the folder since we opened it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(partial), os.fstat(fd)):
                return fd
        os.close(fd)
    raise CheckpointError(f"{out} is being written by another process")


def reserve(fd: int, size: int) -> None:
    """Room on the disk for `size` bytes, where the file system can promise it."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as exc:
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
        if isinstance(exc, OSError) and exc.errno not in unsupported:
            raise


def pwrite(fd: int, view: memoryview, offset: int) -> None:
    """All of `view`, however often the system has to be asked."""
    while len(view):
        wrote = os.pwrite(fd, view, offset)
        view, offset = view[wrote:], offset + wrote


FLUSH = 64 << 20  # bytes


class Flusher:
    """Sends what is written on to the disk meanwhile: little is left to wait for at the end.

    What the disk refuses is raised by `close`, since the system says it once only.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._dirty: dict[int, int] = {}
        self._closing = False
        self._failure: OSError | None = None
        self._thread: threading.Thread | None = None

    def wrote(self, fd: int, count: int) -> None:
        with self._changed:
            self._dirty[fd] = self._dirty.get(fd, 0) + count
            if self._dirty[fd] >= FLUSH:
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._full())
                full = self._full()
                if self._closing or not full:
                    return
                for fd in full:
                    self._dirty[fd] = 0
            try:
                for fd in full:
                    _flush(fd)
            except OSError as failure:
                self._failure = failure
                return

    def _full(self) -> list[int]:
        return [fd for fd, count in self._dirty.items() if count >= FLUSH]

    def close(self) -> None:
        """Waits for what is under way; OSError if any of it failed."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


_flush = getattr(os, "fdatasync", os.fsync)  # macOS and Windows have the latter only
