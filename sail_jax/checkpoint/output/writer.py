"""Writes checkpoints. A writer receives tensors in any order, from any thread, and can be resumed.

An output is written atomically. Unfinished work is in the folder `.<name>.partial` next to it:

- `journal`: the identity of the output, and its complete tensors.
- `data/`: the output, every file at its full size from the start.
- `stage/`: the tensors until the end, only if a library writes the whole output at once.
- `extras/`: the plain files without tensors.
- `errors`: the errors of weights in codes, a line for each; see `coding`.
- `measured`: measurements of tensors, a line for each.
- `threads`: the stack of each thread, if the run made no progress for a minute.
- `parts/`: the work of several processes, each with its own journal and lines; see `parts`.
- `old/`: an output that is replaced, while the new one is being renamed.

At the end everything is flushed to the disk and `data` is renamed to the output.
"""

import contextlib
import errno
import math
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats import files, rewritten, written
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError, checked_shape, explained
from sail_jax.checkpoint.formats.folders import Flusher, hold, pwrite, reserve, taken
from sail_jax.checkpoint.formats.layout import Layout, Wanted
from sail_jax.checkpoint.formats.open import Checkpoint, open_checkpoint
from sail_jax.checkpoint.formats.table import (
    FORMATS,
    Format,
    check_written,
    of_output,
)
from sail_jax.checkpoint.output import parts
from sail_jax.checkpoint.output.journal import Journal, Piece, digest, gap
from sail_jax.checkpoint.output.parts import Part
from sail_jax.checks import argument, as_path, described, storage
from sail_jax.merging.tensors import Shape

# The number of bytes of a tensor that share one digest.
_PIECE = 1 << 22
ERRORS = "errors"
"""The file with the errors of weights in codes, within the folder of unfinished work."""
MEASURED = "measured"
"""The file with measurements of tensors, within the folder of unfinished work."""
THREADS = "threads"
"""The file with the stack of each thread of a run without progress, in the same folder."""
_OURS = {"journal", "data", "stage", "extras", "old", ERRORS, MEASURED, THREADS}
_OF_A_PART = {"journal", ERRORS, MEASURED, THREADS, parts.ALIVE, parts.STATISTICS}


def laid_out(
    out: Path,
    tensors: Mapping[str, tuple[Any, Shape]],
    format: str | None,
    file: str | None,
    shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Format, Layout]:
    """Computes the layout of an output; see `Writer`.

    Args:
      out: The path of the output.
      tensors: The dtype and shape of each tensor by name, in the order of the output.
      format: The name of the format.
      file: The name of the one file in a folder.
      shard_bytes: The largest number of bytes in a file of a folder of safetensors.
      metadata: Text by key that the format stores.

    Returns:
      The format and the layout.

    Raises:
      CheckpointError: If no output can have this format, or the format does not support the
        tensors.
    """
    check_written(format)
    own = of_output(out)
    chosen = FORMATS[format] if format else own or FORMATS["safetensors"]
    if own and own is not chosen:
        raise CheckpointError(f"{out}: a {out.suffix} file cannot hold the format {format}")
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    most = None if own or file else shard_bytes
    name = out.name if own else file or chosen.file
    # A format is checked, and an output's suffix is that of a written format.
    assert chosen.layout is not None
    return chosen, chosen.layout(tensors, name, dict(metadata or {}), most)


def _checked(tensors: Mapping[str, tuple[Any, Shape]]) -> Wanted:
    """Checks names, dtypes and shapes, and returns them in their plain forms."""
    wanted = {}
    for name, (dtype, shape) in tensors.items():
        try:
            name.encode()
            dtype = np.dtype(dtype)
        except (TypeError, UnicodeError, AttributeError) as exc:
            raise CheckpointError(f"{name!r}: expected a name and a dtype ({exc})") from exc
        if not name or "\0" in name:
            raise CheckpointError(f"{name!r} is not a valid name of a tensor")
        if DTYPES.get(dtype.name) != dtype:
            raise CheckpointError(f"'{name}': no checkpoint holds {dtype}")
        wanted[name] = (dtype, checked_shape(tuple(shape), dtype.itemsize, f"'{name}'"))
    return wanted


def _differing(earlier: object, now: Mapping[str, str]) -> str:
    """Lists the versions in which two runs differ; "" if none do."""
    earlier = earlier if isinstance(earlier, Mapping) else {}
    unlike = [name for name in now if earlier.get(name) != now[name]]
    before = ", ".join(f"{name} {str(earlier[name])[:40]}" for name in unlike if name in earlier)
    if unnoted := [name for name in unlike if name not in earlier]:
        versions = "a version that is" if len(unnoted) == 1 else "versions that are"
        noted = f"{', '.join(unnoted)} of {versions} not noted"
        before = f"{before}, {noted}" if before else noted
    after = ", ".join(f"{name} {now[name]}" for name in unlike)
    return f"{before}, and this is {after}" if unlike else ""


def _holds(path: Path, data: bytes | Path) -> bool:
    """Checks whether a file has this content."""
    with explained("read", path):
        content = data.read_bytes() if isinstance(data, Path) else data
        return path.is_file() and path.read_bytes() == content


def _free(path: Path) -> Path:
    """Returns a path that does not exist: this one, or the first with a number after it."""
    count, free = 1, path
    while os.path.lexists(free):
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


_EXISTS = "exists already; choose another place for the output"


class DiffersError(CheckpointError):
    """Raised if a finished output of an earlier run has different values."""


class Writer:
    """An unfinished output, to be written in any order.

    If the name of `out` ends in the suffix of a written format, such as .npz, the output is one
    file; otherwise it is a folder. Call `write` and `done` for each tensor, then `commit`.

    It is a context manager. If it ends before `commit`, the unfinished work is kept, for a later
    run to resume. Tensors may be written by several threads.

    Attributes:
      out: The path of the output.
      partial: The folder of unfinished work, or the part's folder within it.
      folder: Whether the output is a folder. A single file has no extras.
      finished: The names of the tensors that an earlier run completed; all tensors when parts are
        joined.
      owners: The index of its part, from 0, for each tensor; empty without parts.
      head: The first line of the journal, which identifies the output.
      resumable: Whether unfinished work stays after an error.
      unchanged: Whether an earlier run had finished the output. Then nothing is written: `write`
        compares its argument with the existing values.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/model.npz"
    >>> with Writer(path, {"w": (np.float32, (4,))}, fingerprint="an example") as writer:
    ...     writer.write("w", np.ones(2, np.float32), start=2)
    ...     writer.write("w", np.zeros(2, np.float32))
    ...     writer.done("w")
    ...     writer.commit()
    >>> np.load(path)["w"]
    array([0., 0., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        out: str | Path,
        tensors: Mapping[str, tuple[Any, Shape]],
        *,
        fingerprint: str,
        versions: Mapping[str, str] = MappingProxyType({}),
        format: str | None = None,
        file: str | None = None,
        shard_bytes: int = 5_000_000_000,
        metadata: Mapping[str, str] | None = None,
        resume: bool = False,
        sync: bool = True,
        rewrites: Checkpoint | None = None,
        record: bool = False,
        force: bool = False,
        keep_old: bool = False,
        part: Part | None = None,
        join: bool = False,
        belongs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Reserves the path of the output, and reads the state of an earlier run.

        Args:
          out: The path of the output.
          tensors: The dtype and shape of each tensor by name, in the order of the output.
          fingerprint: A text that identifies the work. Unfinished work is resumed only if its
            fingerprint is equal.
          versions: The versions of the programs that compute the tensors, by name. Work of other
            versions is not resumed, because their results may differ.
          format: The name of the format. The default is the suffix's format, or safetensors for a
            folder.
          file: The name of the single file in a folder, which then has no shards. The default is
            the format's usual name.
          shard_bytes: The largest number of bytes in a file of a folder of safetensors; a larger
            tensor gets its own file.
          metadata: Text by key that the format stores; orbax and msgpack cannot store any.
          resume: Whether unfinished work with the same fingerprint and tensors is continued. A
            finished output with these tensors is compared with the new values.
          sync: Whether everything is flushed to the disk before the output is renamed. False is for
            measurements only: a crash of the machine may then lose data.
          rewrites: A checkpoint to copy. The output is this checkpoint with new values for
            `tensors`. A folder is copied into the output under its own name. `format` and
            `metadata` are ignored.
          record: Whether a folder gets the record by which `force` recognises it later.
          force: Whether an unchanged output with such a record is replaced. It is kept until the
            new one is complete.
          keep_old: Whether a replaced output is kept, as `NAME.old`; then as `NAME.old-2`, and so
            on.
          part: Which part of the output is written; see `parts`. None for all of it.
          join: Whether all parts have been written, and `commit` joins them.
          belongs: Tensors that must be in the same part as another one, by name.

        Raises:
          CheckpointError: If `out` exists or is in use, there is not enough space on the disk, or
            the format does not support the tensors; or if a part to be joined is missing,
            unfinished, or belongs to another output. These checks come before any computation.
        """
        self.out = out = Path(out)
        wanted, folder = _checked(tensors), of_output(out) is None
        if rewrites is None:
            self._format, layout = laid_out(out, wanted, format, file, shard_bytes, metadata)
        else:
            layout = rewritten.layout(rewrites, wanted)
            folder = folder or rewrites.path.is_dir()
            names = (rewrites.path.resolve().name,)
            self._format = Format(name=rewrites.format, files=names)
        self.folder, self._wanted, self._layout = folder, wanted, layout
        self.partial = partial = written.unfinished(out)
        self._root = self.partial / ("stage" if layout.convert else "data")
        self._payload = self.partial / "data" / ("" if folder else out.name)
        self._sync, self._record, self._force = sync, record, force
        self._keep_old = keep_old
        self._part, self._join = part, join
        self._old = self.partial / "old"
        self._file = self._format.file if folder else out.name
        self._pieces: dict[str, dict[int, Piece]] = {name: {} for name in wanted}
        self._done: set[str] = set()
        self._mutex = threading.Lock()
        # The files of the output, by name; any of them may be closed for a while.
        self._inodes: dict[str, os.stat_result] = {}
        self._journal: Journal | None = None
        self._flusher = Flusher(self._use)
        self._there: Checkpoint | None = None
        self.unchanged, self.resumable = False, True
        self.finished: frozenset[str] = frozenset()
        about = repr(
            [sorted(layout.sizes.items()), [(n, str(d), s) for n, (d, s) in wanted.items()]]
        )
        fixed = b"".join(data for _, _, data in layout.fixed)
        head = {
            "format": 1,
            "fingerprint": fingerprint,
            "layout": disk.sha256(about.encode() + fixed),
            "versions": dict(versions),
        }
        self.owners: Mapping[str, int] = {}
        self._living, self._allocated = contextlib.ExitStack(), False
        if part is not None:
            self.owners = parts.owners(layout, out, part.count, belongs)
            mine = {n for n in wanted if self.owners[n] == part.number - 1}
            self._wanted = {n: about for n, about in wanted.items() if n in mine}
            self._layout = parts.narrowed(layout, mine)
            self.partial = parts.place(partial, part.number)
            head["part"] = list(part)
        self.head: Mapping[str, Any] = head
        if join and (partial / parts.FOLDER).is_dir() and (partial / "data").is_dir():
            # While a part is written, its folder is locked; this file marks it as unfinished.
            parts.check_joined(partial, out, head, layout)
        with explained("write", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            # The lock comes before any check: a second process that writes to the same output is
            # refused here. Parts of one output may be written at the same time.
            self._locks = [hold(partial, out, shared=part is not None)]
        try:
            if part is not None:
                self._in(partial, part)
            (self._joins if join else self._claim)(head, resume)
        except BaseException:
            self.close()
            raise

    def _in(self, partial: Path, part: Part) -> None:
        """Reserves the folder of a part within the folder of unfinished work."""
        with explained("write", partial):
            names = {path.name for path in partial.iterdir() if not path.name.endswith(".part")}
            if strange := names - {"data", parts.FOLDER}:
                why = (
                    f"is being joined; continue with {argument('join', 'True')}"
                    if parts.FOLDER in names
                    else f"holds the work of a run without {argument('part')}; finish it"
                )
                raise CheckpointError(f"{partial} {why}, or remove it ({min(strange)})")
            (partial / parts.FOLDER).mkdir(exist_ok=True)
            self._locks.append(hold(self.partial, f"{part} of {self.out}"))

    def _joins(self, head: dict[str, Any], resume: bool) -> None:
        """Adopts the finished parts, or detects that an earlier call has joined them."""
        partial, layout = self.partial, self._layout
        self._put_back()
        self._done, self.finished = set(self._wanted), frozenset(self._wanted)
        with explained("read", partial):
            inode = self.out.stat().st_ino if taken(self.out) else None
        try:
            if (partial / "journal").exists() and not self._payload.exists():
                # The run was killed between renaming and cleaning up, or the output was removed
                # since.
                if inode is None or Journal.read(partial / "journal")[2] != inode:
                    raise CheckpointError(f"{partial} has lost its parts' files; remove it")
                self.unchanged = True
                return
            parts.check_joined(partial, self.out, head, layout)
            if taken(self.out):
                self._check_replaced(_EXISTS)
            self._journal = Journal(partial / "journal", head)
            self._layout = parts.narrowed(layout, ())
            self._allocate()
            self._layout = layout
        except BaseException:
            with contextlib.suppress(OSError):
                partial.rmdir()
            raise

    def lines(self, file: str) -> Iterator[bytes]:
        """Reads a file of unfinished work line by line; when joining, the files of all parts.

        Args:
          file: The name of the file, `ERRORS` or `MEASURED`.

        Yields:
          The lines. The last line of a killed run may be incomplete.
        """
        folders = sorted((self.partial / parts.FOLDER).glob("*")) if self._join else [self.partial]
        for folder in folders:
            with explained("read", folder):
                if (folder / file).is_file():
                    yield from (folder / file).read_bytes().splitlines()

    def note(self, file: str, line: bytes) -> None:
        """Adds a line to a file of unfinished work, unless the output was finished before.

        Args:
          file: The name of the file, `ERRORS` or `MEASURED`.
          line: The line, without its end.

        Raises:
          CheckpointError: If writing fails.
        """
        if not self.unchanged:
            path = self.partial / file
            with explained("write", path, kept=self.resumable), open(path, "ab") as opened:
                opened.write(line + b"\n")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files and releases the lock; unfinished work is kept and can be resumed."""
        with contextlib.suppress(OSError, disk.StoreError):  # commit raises it
            self._flusher.close()
        with contextlib.suppress(disk.StoreError):  # the next run does it
            self._put_back()
        # An interrupt may come between any two lines, and `with` then calls `close` again.
        # Attributes are therefore cleared first: the number may belong to another file by then.
        self._close_files()
        if self._journal:
            self._journal.close()
            self._journal = None
        if self._there is not None:
            self._there.close()
            self._there = None
            with contextlib.suppress(OSError):
                self.partial.rmdir()
        self._living.close()
        while self._locks:
            if (lock := self._locks.pop()) is not None:
                os.close(lock)

    def _close_files(self) -> None:
        while self._inodes:
            files.OPEN.forget((self, self._inodes.popitem()[0]))

    def _use(self, file: str) -> AbstractContextManager[int]:
        """Yields the descriptor of an allocated file of the output."""
        return files.OPEN.use((self, file), lambda: self._again(file))

    def _opened(self, file: str) -> int:
        """Opens a file of the output for the first time."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._root / file, flags, 0o666)

    def _again(self, file: str) -> int:
        """Opens a closed file of the output again; CheckpointError if it was replaced."""
        if file not in self._inodes:
            raise CheckpointError(f"{self.out}: the writer was closed")
        path = self._root / file
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not os.path.samestat(os.fstat(fd), self._inodes[file]):
            os.close(fd)
            raise CheckpointError(f"{path} was replaced meanwhile; remove {self.partial}")
        return fd

    def _claim(self, head: dict[str, Any], resume: bool) -> None:
        """Starts anew, resumes, or detects a finished output; refuses everything else."""
        path = self.partial / "journal"
        ours = _OURS if self._part is None else _OF_A_PART
        self._put_back()
        with explained("read", self.partial):
            names = {p.name for p in self.partial.iterdir() if not p.name.endswith(".part")}
            exists = taken(self.out)
        if self._part is not None and "journal" not in names:
            # Of a comparison that has not ended. Statistics of another output are not read.
            names.discard(parts.STATISTICS)
        pieces: dict[str, list[Piece]] = {}
        previous: dict[str, Any] = {}
        old = False
        if "journal" in names:
            previous, pieces, inode = Journal.read(path)
            old = previous == head
            if inode is not None and not self._payload.exists():
                # The run was killed between renaming and cleaning up, or the output was removed
                # since.
                with contextlib.suppress(OSError):
                    if old and resume and exists and self.out.stat().st_ino == inode:
                        self._done, self.finished = set(self._wanted), frozenset(self._wanted)
                        self.unchanged = True
                        return
                self._clear()
                pieces, names, old = {}, set(), False
        # An existing output may be the result of this very work. Then `write` compares it, entry by
        # entry. Any other existing output is accepted only if it is to be replaced.
        if exists:
            try:
                if self._force:
                    written.check_own(self.out)
                # Otherwise only some parts would compare the output that is to be replaced.
                compared = resume and not (self._force and self._part)
                if not names and compared and self._is_there():
                    self.unchanged = True
                    return
                if not self._force:
                    raise CheckpointError(f"{self.out} {_EXISTS}")
            except CheckpointError:
                if not names:
                    self._remove()
                raise
        # A library that was converting the stage may have been killed while writing its output.
        strangers = {name for name in names - ours if not name.startswith("data.")}
        if parts.FOLDER in strangers:
            raise CheckpointError(
                f"{self.partial} holds parts of an output; join them with "
                f"{argument('join', 'True')}, or remove it"
            )
        if strangers or (names and "journal" not in names):
            raise CheckpointError(
                f"{self.partial} holds a file that no run leaves ({min(names - {'journal'})}); "
                "remove it or choose another place for the output"
            )
        if names and not old:
            if others := _differing(previous.get("versions"), head["versions"]):
                raise CheckpointError(
                    f"{self.partial} was begun with {others}; values may differ between them, so "
                    "remove it, or finish it with the earlier versions"
                )
            raise CheckpointError(
                f"{self.partial} holds the unfinished work of another run to {self.out.name}, or "
                "an input has changed since; remove it or choose another place for the output"
            )
        if names and not resume:
            raise CheckpointError(
                f"{self.partial} holds unfinished work of the same run; continue it with "
                f"{argument('resume', 'True')}, or remove it"
            )
        try:
            if not names:
                self._journal = Journal(path, head)
            if self._part is not None:
                # This check comes after writing the journal: of two conflicting parts, one then
                # detects the other.
                above = self.partial.parents[1]
                for number in parts.others(above, self._part):
                    parts.check_beside(above, number, self._part, head)
                self._living.enter_context(parts.alive(self.partial))
            # Files come first, because the digests of the journal are compared with their bytes.
            self._allocate(kept=bool(names))
            valid = {n: p for n, p in pieces.items() if n in self._wanted and self._verified(n, p)}
            if names:
                lines = [{"name": name, "pieces": p} for name, p in valid.items()]
                self._journal = Journal(path, head, lines)
        except BaseException:
            # Nothing was computed yet, so no files are left. Removing the folder requires a
            # descriptor.
            self._close_files()
            if not names:
                self._remove()
            raise
        self._done, self.finished = set(valid), frozenset(valid)

    def _check_replaced(self, why: str) -> None:
        """Raises CheckpointError unless the existing output may be replaced."""
        if not self._force:
            raise CheckpointError(f"{self.out} {why}")
        written.check_own(self.out)

    def _is_there(self) -> bool:
        """Opens an existing output; False if its files or tensors are different."""
        sizes = {} if self._layout.convert else self._layout.sizes
        try:
            for file, size in sizes.items():
                if os.path.getsize(self.out / file if self.folder else self.out) != size:
                    return False
            there = open_checkpoint(self.out)
        except (OSError, CheckpointError):
            return False
        among = self._wanted if self._layout.whole or self._part else there.tensors
        tensors = {n: (x.dtype, x.shape) for n, x in there.tensors.items() if n in among}
        if tensors != self._wanted or there.format != self._format.name:
            there.close()
            return False
        self._there = there
        return True

    def _allocate(self, kept: bool = False) -> None:
        """Makes every file at its full size, to detect a full disk before any work."""
        self._allocated = True
        with explained("write", self._root, kept=kept):
            self._root.mkdir(exist_ok=True)
            if self._part is None:
                (self.partial / "extras").mkdir(exist_ok=True)
            have, missing = os.statvfs(self._root), 0
            for file, size in self._layout.sizes.items():
                with files.OPEN.use((self, file), lambda file=file: self._opened(file)) as fd:
                    about = self._inodes[file] = os.fstat(fd)
                if about.st_nlink > 1:
                    raise CheckpointError(
                        f"{self._root / file} has a second name (a hard link); remove "
                        f"{self.partial}"
                    )
                # Blocks that an earlier run filled or reserved do not count again.
                missing += max(0, size - about.st_blocks * 512)
            # The stage and the output exist together at the end, so both need space.
            if self._layout.convert:
                missing += self._layout.whole or sum(self._layout.sizes.values())
            free = have.f_bavail * have.f_frsize
            if missing > free > 0:
                lacks = storage(missing - free)
                why = f"it needs {storage(missing)} more, {lacks} more than are free"
                raise OSError(errno.ENOSPC, f"No space left on device ({why})")
            for file, size in self._layout.sizes.items():
                with self._use(file) as fd:
                    os.ftruncate(fd, size)
                    if size:
                        reserve(fd, size)
            for file, offset, data in self._layout.fixed:
                with self._use(file) as fd:
                    pwrite(fd, memoryview(data), offset)

    def _runs(
        self, name: str, start: int, view: memoryview
    ) -> Iterator[tuple[str, int, memoryview]]:
        """Returns the positions of a tensor's bytes from `start`: file, offset, part of `view`."""
        for file, offset, length in self._layout.regions[name]:
            count = min(length - start, len(view))
            if count > 0:
                yield file, offset + start, view[:count]
                view, start = view[count:], 0
            else:
                start -= length

    def _verified(self, name: str, pieces: list[Piece]) -> bool:
        """Checks whether the bytes of a tensor still match the journal."""
        dtype, shape = self._wanted[name]
        if gap(pieces, math.prod(shape)) or any(p.count * dtype.itemsize > _PIECE for p in pieces):
            return False
        for piece in pieces:
            data = np.empty(piece.count * dtype.itemsize, np.uint8)
            with explained("read", self._root):
                for file, offset, part in self._runs(name, piece.start * dtype.itemsize, data.data):
                    with self._use(file) as fd:
                        if os.preadv(fd, [part], offset) != len(part):
                            return False
            if digest(data) != piece.digest:
                return False
        return True

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None:
        """Writes entries of a tensor, from any thread and in any order.

        Args:
          name: The tensor.
          array: The entries in row-major order, in the tensor's dtype.
          start: The index of the first of them in the flat tensor.

        Raises:
          CheckpointError: If the tensor is unknown, has another dtype, is already finished, or is
            shorter than the entries, or if writing fails. `DiffersError` if the output is already
            finished and has different values.
        """
        if name not in self._wanted:
            raise CheckpointError(f"'{name}' is not a tensor of {self.out}")
        dtype, shape = self._wanted[name]
        if array.dtype != dtype:
            raise CheckpointError(f"'{name}': expected {dtype}, got {array.dtype}")
        if name in self._done:
            raise CheckpointError(f"'{name}' is finished already")
        if start < 0 or start + array.size > math.prod(shape):
            raise CheckpointError(
                f"'{name}': entries {start} to {start + array.size} of {math.prod(shape)}"
            )
        # From here on only bytes matter: pieces and digests do not depend on the dtype.
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # Pieces have a fixed size, so a later run can verify them with little memory.
        step = _PIECE // dtype.itemsize * dtype.itemsize
        for at in range(0, data.size, step):
            part = data[at : at + step]
            first = start + at // dtype.itemsize
            if self._there is None:
                self._put(name, first, part)
            else:
                self._compare(self._there, name, first, part)
            piece = Piece(first, part.size // dtype.itemsize, digest(part))
            with self._mutex:
                self._pieces[name][first] = piece

    def _put(self, name: str, first: int, data: np.ndarray) -> None:
        """Writes bytes of a tensor to their position."""
        with explained(f"write '{name}' to", self._root, kept=self.resumable):
            at = first * self._wanted[name][0].itemsize
            for file, offset, view in self._runs(name, at, data.data):
                with self._use(file) as fd:
                    pwrite(fd, view, offset)
                if self._sync:
                    self._flusher.wrote(file, len(view))

    def _compare(self, there: Checkpoint, name: str, first: int, data: np.ndarray) -> None:
        """Raises a DiffersError if the finished output has other bytes at this position."""
        dtype = self._wanted[name][0]
        same = np.empty(data.size // dtype.itemsize, dtype)
        there.tensors[name].read(same, first)
        if not np.array_equal(same.view(np.uint8), data):
            raise self._differs(name)

    def _differs(self, name: str) -> DiffersError:
        """Returns the error for a tensor or a file that differs in the finished output."""
        return DiffersError(
            f"{self.out} exists already with a different '{name}'; choose another place for the "
            "output"
        )

    def done(self, name: str) -> None:
        """Records in the journal that every entry of a tensor is written.

        Args:
          name: The tensor; nothing happens if it was finished already.

        Raises:
          CheckpointError: If entries are missing or pieces overlap, or the journal cannot be
            written.
        """
        if name in self._done:
            return
        pieces = sorted(self._pieces.get(name, {}).values())
        if name not in self._wanted or (missing := gap(pieces, math.prod(self._wanted[name][1]))):
            where = missing if name in self._wanted else "it is not a tensor of this output"
            raise CheckpointError(f"'{name}' is not whole: {where}")
        with self._mutex:
            if self._journal is not None:
                self._journal.tensor(name, pieces)
            elif self._there is None:
                raise CheckpointError(f"{self.out}: the writer was closed")
            self._done.add(name)
            del self._pieces[name]

    def extra(self, filename: str, data: bytes | Path) -> None:
        """Adds a plain file to the output: config.json, a tokenizer, a model card.

        Args:
          filename: Its name in the output.
          data: Its content, or a file to copy.

        Raises:
          CheckpointError: If the output is a single file, the name is not a plain file name or
            belongs to a file of tensors, or the file cannot be written. `DiffersError` if a
            finished output contains another file of this name.
        """
        if not self.folder:
            raise CheckpointError(f"{self.out} is one file and cannot contain '{filename}'")
        # The earlier run added it when it committed.
        if self.unchanged:
            if self._force and not _holds(self.out / filename, data):
                raise self._differs(filename)
            return
        if not filename or filename.startswith(".") or set(filename) & set("/\\\0"):
            raise CheckpointError(f"{filename!r} is not a plain file name")
        if filename in (self._file, *self._layout.sizes):
            raise CheckpointError(f"'{filename}' is the name of a file of tensors")
        path = self.partial / "extras" / filename
        with explained("write", path, kept=self.resumable), open(disk.create(path), "wb") as file:
            if isinstance(data, Path):
                with open(data, "rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                file.write(data)

    def commit(self) -> None:
        """Flushes everything to disk, and renames it to the output; a part is not renamed.

        Raises:
          CheckpointError: If tensors are unfinished, `out` was created meanwhile, or
            writing fails.
        """
        if missing := [name for name in self._wanted if name not in self._done]:
            names = ", ".join(map(repr, missing[:3])) + ", ..." * (len(missing) > 3)
            raise CheckpointError(f"{self.out}: {len(missing)} tensors are unfinished: {names}")
        if not self.unchanged:
            if self._journal is None:
                raise CheckpointError(f"{self.out}: the writer was closed")
            with explained("write", self.out, kept=self.resumable):
                if self._part is not None:
                    self._flush()
                    # The run that joins the parts treats this part as complete.
                    self._journal.commit(0)
                else:
                    self._finish(self._journal)
        # Other parts may still need this part's statistics, for their comparison.
        needed = self._part is not None and (self.partial / parts.STATISTICS).exists()
        if (self._part is None or self.unchanged) and not needed:
            self._remove()
        self.close()

    def _flush(self) -> None:
        """Flushes the files of a part to the disk."""
        if self._sync:
            self._flusher.close()
            for path in (*(self._root / file for file in self._layout.sizes), self._root):
                disk.sync(path)

    def _finish(self, journal: Journal) -> None:
        """Completes the folder `data`, flushes it, and renames it."""
        data = self.partial / "data"
        if self._layout.convert:
            for leftover in self.partial.glob("data*"):  # of a conversion that was killed
                shutil.rmtree(leftover)
            if self._file:
                data.mkdir()
            self._layout.convert(self._root, data / self._file)
        for extra in sorted((self.partial / "extras").iterdir()):
            if (data / extra.name).is_dir():
                raise CheckpointError(f"'{extra.name}' is the name of a folder of the output")
            shutil.copyfile(extra, data / extra.name)
        if self._record and self.folder:
            written.seal(data)
        if self._sync:
            self._flusher.close()
            for above, _, names in os.walk(data):
                for name in (*names, ""):
                    # The files are flushed first, then the folder that lists them (the empty name).
                    disk.sync(Path(above) / name)
        if there := taken(self.out):
            again = f"{argument('resume', 'True')} continues"
            self._check_replaced(f"has appeared meanwhile; move it away, then {again}")
        # This is recorded before renaming: if the run is killed right after it, a later run
        # recognises the output.
        journal.commit(self._payload.stat().st_ino)
        if not self.folder and self.out.is_dir():
            self.out.rmdir()
        if there:
            os.rename(self.out, self._old)
        # This is the only step that is visible to other processes; everything before it is already
        # on disk.
        os.rename(self._payload, self.out)
        if self._sync:
            disk.sync(self.out.parent)

    def _put_back(self) -> None:
        """Restores the name of an output that was to be replaced, if the new one failed."""
        if self._part is not None:
            return
        if os.path.lexists(self._old) and not os.path.lexists(self.out):
            with explained("write", self.out):
                os.rename(self._old, self.out)

    def abandon(self) -> None:
        """Removes the unfinished work and closes the writer."""
        self._remove()
        self.close()

    def _clear(self) -> None:
        """Empties the folder of unfinished work.

        The journal is removed last: without it, the remaining files would seem to belong to another
        program.
        """
        if self._keep_old and os.path.lexists(self._old):
            with explained("keep the old output of", self.out):
                os.rename(self._old, _free(self.out.with_name(f"{self.out.name}.old")))
        with explained("remove", self.partial):
            for path in sorted(self.partial.iterdir(), key=lambda path: path.name == "journal"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _remove(self) -> None:
        """Removes the folder of unfinished work, or the files of this part only."""
        self._clear()
        with explained("remove", self.partial):
            self.partial.rmdir()
        if self._part is not None:
            # Files that it has not opened may belong to another part.
            for file in self._layout.sizes if self._allocated else ():
                with contextlib.suppress(OSError):
                    (self._root / file).unlink()
            for folder in (self._root, self.partial.parent, self._root.parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()


create = Writer
"""Opens an output for the tensors of a checkpoint."""


def _named(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Lists the arrays of a tree with their names; imports JAX only for trees."""
    if all(map(_is_array, tensors.values())):
        yield from ((name, np.asarray(array)) for name, array in tensors.items())
        return
    import jax

    from sail_jax.trees import leaf_paths

    tree = jax.tree.map(np.asarray, dict(tensors), is_leaf=_is_array)
    yield from zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)


def _is_array(x: object) -> bool:
    """Checks whether `numpy.asarray` makes an array of numbers from it; other lists are trees."""
    if isinstance(x, list | tuple):
        return all(map(_is_number, x))
    return _is_number(x) or hasattr(x, "__array__")


def _is_number(x: object) -> bool:
    return isinstance(x, bool | int | float | complex | np.generic)


def save_checkpoint(
    out: str | Path,
    tensors: Mapping[str, Any],
    *,
    extras: Mapping[str, bytes | Path] | None = None,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = 5_000_000_000,
    format: str | None = None,
) -> None:
    """Writes arrays as a checkpoint, atomically.

    Args:
      out: The path of the checkpoint. It is a file or a folder, depending on its suffix as in
        `Writer`.
      tensors: Arrays by name (anything that `numpy.asarray` takes); or a tree of them, such as the
        parameters of a Flax module. The name of a leaf is its path, with "/" between keys.
      extras: Plain files for a folder, such as config.json: contents, or paths to copy, by file
        name.
      metadata: As `Writer` takes it.
      shard_bytes: As `Writer` takes it.
      format: As `Writer` takes it.

    Raises:
      CheckpointError: As `Writer` and `Writer.extra` do. No unfinished work is left.
      ValueError: If two leaves of a tree have the same path.
      TypeError: If `out` is not a path, or `tensors` is not a mapping or tree with names.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/model.npz"
    >>> save_checkpoint(path, {"w": np.arange(3, dtype=np.float32)})
    >>> np.load(path)["w"]
    array([0., 1., 2.], dtype=float32)
    >>> path = f"{tempfile.mkdtemp()}/nested.npz"
    >>> save_checkpoint(path, {"dense": {"kernel": np.ones((2, 2)), "bias": np.zeros(2)}})
    >>> sorted(np.load(path))
    ['dense/bias', 'dense/kernel']
    """
    out = as_path("out", out)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: expected arrays by name, got {described(tensors)}")
    arrays = dict(_named(tensors))
    wanted = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with Writer(
        *(out, wanted),
        # Arrays in memory are never resumed, so their fingerprint is unique.
        fingerprint=uuid.uuid4().hex,
        format=format,
        shard_bytes=shard_bytes,
        metadata=metadata,
    ) as writer:
        writer.resumable = False
        try:
            for name, array in arrays.items():
                writer.write(name, array)
                writer.done(name)
            for name, data in (extras or {}).items():
                writer.extra(name, data)
            writer.commit()
        except BaseException:
            with contextlib.suppress(disk.StoreError):
                writer.abandon()
            raise
