"""File system operations for an output: its own folder, disk space, and complete writes."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from sail_jax import disk
from sail_jax.checkpoint.formats import written
from sail_jax.checkpoint.formats.files import CheckpointError, explained
from sail_jax.checks import argument


def taken(out: Path) -> bool:
    """Checks whether a path contains something that a rename cannot replace.

    Args:
      out: The path.

    Returns:
      False if the path does not exist or is an empty folder. True for a link, even a dangling one.
    """
    empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    return os.path.lexists(out) and not empty


def admit(
    out: Path,
    inputs: Iterable[str | os.PathLike[str]],
    resume: bool = False,
    force: bool = False,
    names: Collection[str] = (),
) -> None:
    """Checks that an output can be written at a path, before any work is done for it.

    Args:
      out: The path of the output.
      inputs: The checkpoints that are read.
      resume: Whether an existing output is accepted. The writer checks that it is the right one.
      force: Whether an existing output of sail-jax is accepted and then replaced.
      names: The names of the outputs in the folder, if the path is a folder of several.

    Raises:
      CheckpointError: If the path cannot be a file name, is taken by anything but an empty folder,
        or lies within an input. Also if an input lies within the output to be replaced.
    """
    try:
        named = bool(out.name.encode()) and str(out).encode()
    except UnicodeEncodeError:
        named = False
    if not named:
        raise CheckpointError(f"{out}: expected a name for the output, in UTF-8")
    if (there := taken(out)) and force:
        written.check_own(out, names)
    elif there and not (resume and os.path.exists(out)):
        more = ""
        with contextlib.suppress(CheckpointError):
            written.check_own(out, names)
            more = f", or {argument('force', 'True')} replaces it"
        raise CheckpointError(f"{out} exists already; choose another place for the output{more}")
    with explained("write", out), contextlib.suppress(FileNotFoundError):
        os.lstat(written.unfinished(out))  # raises for an invalid name
    inputs = list(inputs)
    # Path.resolve would raise for a link that leads to itself.
    real = Path(os.path.realpath(out))
    for path in inputs:
        read = Path(os.path.realpath(path))
        if read in (real, *real.parents):
            raise CheckpointError(f"{out} lies in the input {path}; choose another output path")
        if there and force and not names and real in read.parents:
            raise CheckpointError(f"the input {path} lies in {out}; choose another output path")
    for name in names:
        admit(out / name, inputs, resume, force)


class HeldError(CheckpointError):
    """Raised if another process is writing an output."""


def hold(partial: Path, out: Path | str, *, shared: bool = False) -> int | None:
    """Makes the folder of unfinished work, if necessary, and locks it for this process.

    An existing folder is accepted only if no other user can have written to it. Otherwise a resumed
    run could follow planted links and use planted tensors. The parent folder is not checked:
    whoever can write there can replace the output as well.

    Args:
      partial: The folder of unfinished work.
      out: The output, for messages.
      shared: Whether several processes may lock the folder at once, all of them with `shared`.

    Returns:
      An open file descriptor; the lock lasts until it is closed. None if the system or the file
      system does not support locks.

    Raises:
      HeldError: If another process holds the lock.
      CheckpointError: If the folder or something in it is a link, or another user's.
      OSError: If the folder cannot be made or opened.
    """
    # The process that finishes removes the folder, so this lock may belong to a removed folder.
    # Then try again. Ten failures in a row mean that other processes are busy with the folder.
    for _ in range(10):
        try:
            # Readable by this user only: the output inside it has its own permissions.
            os.mkdir(partial, 0o700)
            made = True
        except FileExistsError:
            made = False
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            if not made and (why := disk.foreign(partial)):
                raise _planted(f"{partial} {why}", partial)
            try:
                fd = disk.lock(partial, shared=shared)
            except disk.BusyError:
                break
            if fd is not None:
                undo.callback(os.close, fd)
                # The previous holder may have removed or renamed the folder meanwhile.
                if not os.path.samestat(os.lstat(partial), os.fstat(fd)):
                    continue
            if not made and (what := disk.stranger(partial)):
                raise _planted(what, partial)
            undo.pop_all()
            return fd
    raise HeldError(f"{out} is being written by another process")


def _planted(what: str, partial: Path) -> CheckpointError:
    """Makes the error for something in a folder of unfinished work that no run creates."""
    return CheckpointError(f"{what}, which no run leaves there; remove {partial}")


def reserve(fd: int, size: int) -> None:
    """Reserves disk space for a file, if the file system supports it.

    Args:
      fd: The file, open for writing.
      size: The number of bytes of the file, at least 1.

    Raises:
      OSError: If there is not enough space.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    # Systems without the function, and file systems without reservations, are ignored.
    except (AttributeError, OSError) as exc:
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
        if isinstance(exc, OSError) and exc.errno not in unsupported:
            raise


AT_ONCE = 1 << 17
"""Bytes that are written in one call. Linux allocates pages as large as a call where it can, and
finding and clearing large pages takes several times as long as writing (measured on ext4: 1.6
CPU-seconds for each GB in calls of 2 MiB, .1 to .2 in calls of 128 KiB).
"""


def pwrite(fd: int, view: memoryview, offset: int) -> None:
    """Writes a whole buffer to a file, in as many calls as the system requires.

    Args:
      fd: The file, open for writing.
      view: The bytes to write.
      offset: The position of the first byte in the file.

    Raises:
      OSError: If the system cannot write.
    """
    while len(view):
        wrote = os.pwrite(fd, view[:AT_ONCE], offset)
        view, offset = view[wrote:], offset + wrote


# The number of bytes that are written to a file before it is flushed.
FLUSH = 64 << 20


class Flusher:
    """Flushes written data to the disk in the background, so little is left at the end.

    A thread flushes each file after every 64 MiB written to it. If the disk rejects data, the
    system reports the error only once, here in the thread. `close` raises it again.
    """

    def __init__(self, use: Callable[[str], AbstractContextManager[int]]) -> None:
        """Creates a flusher that has counted nothing yet.

        Args:
          use: Lends a descriptor of a file. Each call may lend a different one, because a flush
            covers the file regardless of the descriptor that wrote to it.
        """
        self._use = use
        self._lock = threading.Lock()
        self._dirty: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "flush")
        self._flushes: list[Future[None]] = []

    def wrote(self, file: str, count: int) -> None:
        """Counts bytes that were written to a file, and flushes the file after enough of them.

        Args:
          file: The file, as an argument of `use`.
          count: The number of bytes written.
        """
        with self._lock:
            self._dirty[file] = self._dirty.get(file, 0) + count
            # A waiting flush covers everything that is written before it starts.
            if self._dirty[file] >= FLUSH:
                self._dirty[file] = 0
                self._flushes.append(self._thread.submit(self._flush, file))

    def _flush(self, file: str) -> None:
        with self._use(file) as fd:
            _flush(fd)

    def close(self) -> None:
        """Waits for pending flushes and ends the thread; further calls do nothing.

        Raises:
          OSError: If any flush failed.
          StoreError: If a file could not be opened again to flush it.
        """
        self._thread.shutdown(cancel_futures=True)
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            if not flush.cancelled():
                flush.result()


# macOS and Windows have only the latter.
_flush = getattr(os, "fdatasync", os.fsync)
