"""What an output needs of the file system: a folder of its own, room on the disk, whole writes."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from sail_jax import disk
from sail_jax.checkpoint.formats import written
from sail_jax.checkpoint.formats.files import CheckpointError, explained
from sail_jax.checks import argument


def is_empty_folder(path: Path) -> bool:
    """Tells whether a path is an empty folder, which a rename may replace.

    Args:
      path: The path, which need not exist.

    Returns:
      True for an empty folder; False for a link to one.
    """
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def admit(
    out: Path,
    inputs: Iterable[str | os.PathLike[str]],
    resume: bool = False,
    force: bool = False,
    names: Collection[str] = (),
) -> None:
    """Checks that an output can be written at a path, before any work is done for it.

    Args:
      out: Where the output is to go.
      inputs: The checkpoints that are read.
      resume: Whether an output that is there already is admitted. Whether it is the right one is
        for the writer to say.
      force: Whether an output that an operation wrote there is admitted, to be replaced.
      names: The names of the outputs that the path is to hold, if it is a folder of several.

    Raises:
      CheckpointError: If the path cannot be a file name, something stands there already (an empty
        folder may), it lies within an input, or it is to be replaced and an input lies within it.
    """
    try:
        named = bool(out.name.encode()) and str(out).encode()
    except UnicodeEncodeError:
        named = False
    if not named:
        raise CheckpointError(f"{out}: expected a name for the output, in UTF-8")
    # `lexists` sees a link that leads nowhere as well: it exists for a rename, but is no output.
    there = os.path.lexists(out) and not is_empty_folder(out)
    if there and force:
        written.check_own(out, names)
    elif there and not (resume and os.path.exists(out)):
        more = ""
        with contextlib.suppress(CheckpointError):
            written.check_own(out, names)
            more = f", or {argument('force', 'True')} replaces it"
        raise CheckpointError(f"{out} exists already; choose another place for the output{more}")
    with explained("write", out), contextlib.suppress(FileNotFoundError):
        os.lstat(written.unfinished(out))  # raises where no name can stand
    inputs = list(inputs)
    # Path.resolve would raise for a link that leads to itself.
    real = Path(os.path.realpath(out))
    for path in inputs:
        read = Path(os.path.realpath(path))
        if read in (real, *real.parents):
            raise CheckpointError(f"{out} lies in {path}, which is read: choose another place")
        if there and force and not names and real in read.parents:
            raise CheckpointError(f"{path}, which is read, lies in {out}: choose another place")
    for name in names:
        admit(out / name, inputs, resume, force)


def hold(partial: Path, out: Path | str, *, shared: bool = False) -> int | None:
    """Makes the folder of unfinished work, if need be, and locks it for this process.

    What is there already is taken only if no one else can have put it there: whoever resumed it
    would write through its links, and would take its tensors for their own. Nothing guards the
    folder above it: whoever can write there can replace the output as well.

    Args:
      partial: The folder of unfinished work.
      out: The output that it is for, as messages name it.
      shared: Whether others may hold it at the same time who share it as well.

    Returns:
      An open file descriptor: the lock lasts until it is closed. None if the system or the file
      system has no locks.

    Raises:
      CheckpointError: If another process holds the lock, or the folder or something in it is a
        link, or another user's.
      OSError: If the folder cannot be made or opened.
    """
    # Whoever finishes removes the folder, so that the lock may be of a folder that is no longer
    # there. Then it is tried again; ten times in a row mean that others are busy with it.
    for _ in range(10):
        try:
            # For this user alone: what is renamed to the output lies in it, with rights of its own.
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
                # Whoever held it before may have removed or renamed the folder meanwhile.
                if not os.path.samestat(os.lstat(partial), os.fstat(fd)):
                    continue
            if not made and (what := disk.stranger(partial)):
                raise _planted(what, partial)
            undo.pop_all()
            return fd
    raise CheckpointError(f"{out} is being written by another process")


def _planted(what: str, partial: Path) -> CheckpointError:
    """The error for what no run leaves in a folder of unfinished work."""
    return CheckpointError(f"{what}, which no run leaves there; remove {partial}")


def reserve(fd: int, size: int) -> None:
    """Reserves room on the disk for a file, where the file system can promise it.

    Args:
      fd: The file, open for writing.
      size: Bytes that the file will have, at least 1.

    Raises:
      OSError: If there is not enough room.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    # Systems without the function, and file systems that cannot promise room, are let pass.
    except (AttributeError, OSError) as exc:
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
        if isinstance(exc, OSError) and exc.errno not in unsupported:
            raise


AT_ONCE = 1 << 17
"""Bytes that are written in one call. Linux takes pages of the size of a call where it can, and to
find and clear large ones costs several times as much as to write (measured on ext4: 1.6 CPU-seconds
for each GB in calls of 2 MiB, .1 to .2 in calls of 128 KiB).
"""


def pwrite(fd: int, view: memoryview, offset: int) -> None:
    """Writes a whole buffer to a file, in as many calls as the system needs.

    Args:
      fd: The file, open for writing.
      view: The bytes to write.
      offset: The place in the file of the first byte.

    Raises:
      OSError: If the system cannot write.
    """
    while len(view):
        wrote = os.pwrite(fd, view[:AT_ONCE], offset)
        view, offset = view[wrote:], offset + wrote


# How many bytes are written to a file before it is flushed.
FLUSH = 64 << 20


class Flusher:
    """Flushes written data to the disk in the background, so that the end need not wait for all.

    A thread flushes each file whenever 64 MiB were written to it. If the disk refuses data, the
    system reports that once only, here in the thread; `close` therefore raises it again.
    """

    def __init__(self, use: Callable[[str], AbstractContextManager[int]]) -> None:
        """Counts nothing yet.

        Args:
          use: Lends the descriptor of a file. It may be another each time: what is flushed is the
            file, whichever descriptor wrote to it.
        """
        self._use = use
        self._changed = threading.Condition()
        self._dirty: dict[str, int] = {}
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def wrote(self, file: str, count: int) -> None:
        """Counts bytes that were written to a file, and wakes the thread when there are enough.

        Args:
          file: The file, as `use` takes it.
          count: How many bytes were written.
        """
        with self._changed:
            self._dirty[file] = self._dirty.get(file, 0) + count
            if self._dirty[file] >= FLUSH:
                self._changed.notify()
                # Outputs that are smaller than this need no thread.
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
                # Cleared before the flush: what is written during it counts towards the next.
                for file in full:
                    self._dirty[file] = 0
            try:
                for file in full:
                    with self._use(file) as fd:
                        _flush(fd)
            except (OSError, disk.StoreError) as failure:
                self._failure = failure
                return

    def _full(self) -> list[str]:
        """The files with enough unflushed bytes."""
        return [file for file, count in self._dirty.items() if count >= FLUSH]

    def close(self) -> None:
        """Waits for flushes that are under way and ends the thread; further calls do nothing.

        Raises:
          OSError: If any flush failed.
          StoreError: If a file could not be opened again for it.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


# macOS and Windows have only the latter.
_flush = getattr(os, "fdatasync", os.fsync)
