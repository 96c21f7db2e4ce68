"""Access to the bytes of checkpoint files, shared by the readers of all formats.

`File` reads at any offset straight into the caller's buffer. `StoredTensor` and `LoadedTensor` are
the two kinds of tensors that readers return. The other functions check what a file states about
itself before they allocate memory, and convert all errors to `CheckpointError`.
"""

import contextlib
import errno
import math
import os
import pickle
import re
import stat
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sail_jax import disk
from sail_jax.checks import argument, shortened
from sail_jax.merging.tensors import OnDemand, Shape, bytes_of, check_read

# The most bytes of any description that is parsed. It is the limit of safetensors itself.
MAX_HEADER = 100_000_000
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# The dtypes that are read, by NumPy's names. ml_dtypes has bfloat16 and the float8 types, which
# NumPy lacks; the others are NumPy's own.
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", *_FLOAT8),
    )
}


class CheckpointError(disk.StoreError, ValueError):
    """Raised when a checkpoint cannot be read, written or trusted.

    It is a `ValueError`. Its message is one line and contains the file, tensor or option at fault.
    """

    code = 2


@contextlib.contextmanager
def explained(doing: str, path: Path, *, kept: bool = False) -> Iterator[None]:
    """Turns an `OSError` inside a `with` statement into a one-line `CheckpointError`.

    The message contains the action, the path, the reason given by the operating system, and advice.
    Errors of `sail_jax.disk` become `CheckpointError` as well, with the same message.

    Args:
      doing: The verb for the message, such as "write" for "cannot write ...".
      path: The file or folder that the message names.
      kept: Whether unfinished work stays in its place, for a later run to resume.

    Yields:
      Nothing.

    Raises:
      CheckpointError: If the body of the `with` statement raises `OSError` or `StoreError`.
    """
    try:
        yield
    except disk.StoreError as exc:
        raise exc if isinstance(exc, CheckpointError) else CheckpointError(str(exc)) from exc
    except OSError as exc:
        # After a full disk, and no other failure, it makes sense to resume the work done so far.
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        again = "free some space and run again"
        if kept:
            again = f"finished tensors are kept: {again} with {argument('resume', 'True')}"
        advice = again if full else "repair this place or choose another"
        raise CheckpointError(f"cannot {doing} {path}: {disk.reason(exc)}; {advice}") from exc


# The errors that parsers (of the standard library, NumPy and this package) raise for damaged bytes.
# RecursionError is one of them, because a file may be nested to any depth.
_PARSING = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AssertionError, SyntaxError),
    *(RecursionError, NotImplementedError, EOFError, AttributeError, RuntimeError),
    *(struct.error, zipfile.BadZipFile, zlib.error, tokenize.TokenError, pickle.UnpicklingError),
)


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Converts all errors of a parser inside a `with` statement to `CheckpointError`.

    An `OSError` becomes "cannot read ...", a `MemoryError` "... does not fit into memory", and any
    other error that parsers raise "... is damaged". `StoreError` and its subclass `CheckpointError`
    pass unchanged.

    Args:
      what: What is being read, for the message (usually its path).

    Yields:
      Nothing.

    Raises:
      CheckpointError: If the body of the `with` statement raises an error of reading or parsing.
    """
    try:
        yield
    except disk.StoreError:
        raise
    except OSError as exc:
        raise CheckpointError(f"cannot read {what}: {disk.reason(exc)}") from exc
    except MemoryError as exc:
        why = f": {exc}" if str(exc) else ""
        raise CheckpointError(f"{what} does not fit into memory{why}") from exc
    except _PARSING as exc:
        # Messages of parsers may have many lines, and may quote long parts of the file.
        why = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise CheckpointError(f"{what} is damaged: {why}") from exc


def changed(path: str | Path) -> CheckpointError:
    """Makes the error for a file that was changed while it was read, for the caller to raise.

    Args:
        path: The file.

    Returns:
        The error.
    """
    return CheckpointError(
        f"{path} was changed while it was read; run again when nothing writes to it"
    )


BLOCK, BLOCKS = 1 << 12, 1 << 8
"""Bytes of a sample of a file, and how many samples there are (and the last one)."""


def sample(path: Path, size: int) -> int:
    """Computes a checksum of blocks of a file at equal distances, and of the last block.

    A file of up to 1 MiB is covered completely.

    Args:
      path: The file.
      size: Its size in bytes.

    Returns:
      The CRC-32.

    Raises:
      CheckpointError: If the file cannot be read.
    """
    step = max(BLOCK, -(-size // BLOCKS))
    checksum = 0
    with reading(path), path.open("rb", buffering=0) as file:
        for start in (*range(0, size, step), max(0, size - BLOCK)):
            # CRC-32 detects accidents, not attacks. Reading whole checkpoints for a digest would
            # take as long as a merge.
            checksum = zlib.crc32(os.pread(file.fileno(), BLOCK, start), checksum)
    return checksum


def strict_json(data: bytes, what: object) -> dict[str, Any]:
    """Parses a JSON object, and rejects everything that JSON parsers interpret differently.

    Args:
      data: The bytes of the object, in UTF-8.
      what: What the bytes are, for messages; usually a path.

    Returns:
      The object as a dictionary.

    Raises:
      CheckpointError: If the bytes are not a JSON object in UTF-8, or `disk.parsed` rejects them.
    """
    with reading(what):
        record = disk.parsed(data.decode(), strict=True)
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        return record


def checked_shape(shape: object, itemsize: int, what: str) -> Shape:
    """Checks that a shape is valid for an array, and returns it as a tuple.

    Args:
      shape: The shape that a file states, of any type.
      itemsize: Bytes of one entry.
      what: The file and the tensor, for messages.

    Returns:
      The shape.

    Raises:
      CheckpointError: If it is not a list or tuple of non-negative integers, has more than 32 axes,
        or describes 2^62 bytes or more.
    """
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{what}: expected a shape of non-negative integers, got {shape!r}")
    # Axes of length 0 make no difference: NumPy also rejects (0, 2**62, 8) as too large.
    if len(shape) > 32 or math.prod(filter(None, shape)) * itemsize >= 2**62:
        raise CheckpointError(f"{what}: no array can have the shape {shortened(repr(shape), 99)}")
    return tuple(shape)


def contained(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder, after checking that it does lie in that folder.

    A symbolic link may point to another place within the folder. In a Hugging Face cache, a link
    in `snapshots/<revision>/` may also point to the model's `blobs` folder, and a link there to a
    blob that several models share.

    Args:
      folder: The folder of the checkpoint.
      name: A plain file name, without separators. It may come from an untrusted index.

    Returns:
      `folder / name`, with links not resolved.

    Raises:
      CheckpointError: If the name is not a plain file name, no such file exists, or it is a link
        that leads out of the folder.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    path, home = folder / name, folder.resolve()
    with reading(path):
        real = path.resolve(strict=True)
    # Tools that download from the Hub store a file once, in `blobs`, and link to it from every
    # snapshot. Any other link may be an attempt to have another file read in its place.
    model = next((above.parent for above in home.parents if above.name == "snapshots"), None)
    homes = [home] if model is None else [home, model / "blobs"]
    if not any(real.is_relative_to(home) for home in homes) and not _shared(real, model):
        raise CheckpointError(f"{path} is a link that leads out of the checkpoint's folder")
    return path


_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


def _shared(real: Path, model: Path | None) -> bool:
    """Checks whether a file is a blob that models in a Hugging Face cache share."""
    if model is None or not model.name.startswith("models--"):
        return False
    shared = model.parent / "blobs"
    return real.is_relative_to(shared) and bool(
        _BLOB.fullmatch(real.relative_to(shared).as_posix())
    )


class Pool:
    """A pool of descriptors of open files. The least recently used ones are closed first.

    A checkpoint may have 20,000 shards, and a process may have 1,024 files open by default. Any
    number of threads may use them.
    """

    def __init__(self, most: int) -> None:
        """Creates an empty pool.

        Args:
          most: The number of files that stay open. More are open only while more are being read.
        """
        self._most, self._lock = most, threading.Lock()
        self._free: dict[Hashable, int] = {}  # the least recently used first
        self._used: dict[Hashable, list[int]] = {}  # the descriptor, and how many use it

    @contextlib.contextmanager
    def use(self, key: Hashable, opening: Callable[[], int]) -> Iterator[int]:
        """Yields the descriptor of a file, and opens the file if necessary.

        Args:
          key: The key of the file in the pool.
          opening: Opens the file.

        Yields:
          The descriptor.

        Raises:
          OSError: If the file cannot be opened.
        """
        with self._lock:
            if key not in self._used:
                fd = self._free.pop(key, -1)
                self._used[key] = [self._opened(opening) if fd < 0 else fd, 0]
            self._used[key][1] += 1
            fd = self._used[key][0]
        try:
            yield fd
        finally:
            with self._lock:
                self._used[key][1] -= 1
                if not self._used[key][1]:
                    self._free[key] = self._used.pop(key)[0]
                while self._free and len(self._free) + len(self._used) > self._most:
                    os.close(self._free.pop(next(iter(self._free))))

    def _opened(self, opening: Callable[[], int]) -> int:
        try:
            return opening()
        except OSError as exc:
            if exc.errno != errno.EMFILE or not self._free:
                raise
        # The limit of this process is lower, or other files have exhausted it.
        while self._free:
            os.close(self._free.popitem()[1])
        return opening()

    def forget(self, key: Hashable) -> None:
        """Closes a file if it is open and not in use.

        Args:
          key: The key of the file in the pool.
        """
        with self._lock:
            fd = self._free.pop(key, -1)
        if fd >= 0:
            os.close(fd)


# The default limit of a process is 1,024, and libraries also open files.
OPEN = Pool(256)
"""The files of all checkpoints that are read and written."""


class File:
    """A plain file, open for reading at any offset by any number of threads.

    While many other files are read, it may be closed for a while. If the file changed meanwhile,
    opening it again raises an error.

    Attributes:
      path: The path of the file.
      called: The file's name in records.
      about: The file's status (`os.fstat`) before anything was read.
      size: The size in bytes at that time.
    """

    def __init__(self, path: Path, called: str = "") -> None:
        """Opens a file.

        Args:
          path: The path of the file.
          called: The file's name in records, by default the path.

        Raises:
          CheckpointError: If it cannot be opened, or is a pipe, a device or a folder.
        """
        self.path, self.called, self._closed = path, called or str(path), False
        with reading(path), OPEN.use(self, self._opened) as fd:
            self.about = os.fstat(fd)
        if not stat.S_ISREG(self.about.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a plain file")
        self.size = self.about.st_size

    def _opened(self) -> int:
        # O_NONBLOCK: without it, opening a pipe would wait for its writer.
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))

    def _again(self) -> int:
        """Opens the file again. Raises a CheckpointError if it has been replaced."""
        fd = self._opened()
        if not os.path.samestat(os.fstat(fd), self.about):
            os.close(fd)
            raise changed(self.path)
        return fd

    def close(self) -> None:
        """Closes the file; closing it again does nothing."""
        self._closed = True
        OPEN.forget(self)

    def fill(self, view: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes of the file, starting at an offset.

        Args:
          view: The buffer, a writable view of single bytes.
          offset: The position of the first byte in the file.

        Raises:
          CheckpointError: If the file ends before the buffer is full, was closed, or cannot be
            read.
        """
        if self._closed:
            raise CheckpointError(f"{self.path} was closed")
        with reading(self.path), OPEN.use(self, self._again) as fd:
            while len(view):
                # pread writes into the caller's memory and uses no shared file position, so threads
                # can share the descriptor. It may return fewer bytes than requested.
                got = os.preadv(fd, [view], offset)
                if not got:
                    raise CheckpointError(f"{self.path} is truncated: it ends at byte {offset}")
                view, offset = view[got:], offset + got

    def array_at(self, offset: int, count: int) -> np.ndarray:
        """Reads bytes into a new array, without allocating more than the file contains.

        Args:
          offset: The position of the first byte in the file.
          count: The number of bytes.

        Returns:
          The bytes, a uint8 array of shape `(count,)`.

        Raises:
          CheckpointError: If the file does not have that many bytes from `offset` on.
        """
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: expected bytes {offset} to "
                f"{offset + count}, but the file has {self.size}"
            )
        data = np.empty(count, np.uint8)
        self.fill(data.data, offset)
        return data

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Reads bytes, as `array_at` does.

        Args:
          offset: The position of the first byte in the file.
          count: The number of bytes.

        Returns:
          The bytes.
        """
        return self.array_at(offset, count).tobytes()


class StoredTensor:
    """A tensor that is stored uncompressed in a file, in one or several runs of bytes.

    Any range of entries can be read without the others. It is a `sail_jax.merging.tensors.Tensor`.

    Attributes:
      name: The tensor's name in the checkpoint.
      dtype: The type of its entries, in native byte order.
      shape: Its shape.
      source: The file, for messages and records.
      path: The path of the file.
      runs: The (offset, length) in bytes of each run of entries in the file.
      swap: Whether the bytes of each entry are stored in the other order.
      place: An identifier of the data: tensors with the same place and shape have the same entries.
    """

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        shape: Shape,
        file: File,
        runs: Sequence[tuple[int, int]],
        swap: bool = False,
    ) -> None:
        """Stores the description of a tensor, without reading it.

        Args:
          name: The tensor's name in the checkpoint.
          dtype: The type of its entries, in native byte order.
          shape: Its shape.
          file: The file that contains it, which must stay open.
          runs: The (offset, length) in bytes of each run, in the order of the entries.
          swap: Whether the bytes of each entry are stored in the other order (big-endian).

        Raises:
          CheckpointError: If the runs are not as long as the tensor, or reach beyond the file.
        """
        self.name, self.dtype, self.shape, self._file = name, dtype, shape, file
        self.source, self.path = file.called, file.path
        self.runs, self.swap = tuple(runs), swap
        self.place: Hashable = (file, self.runs, swap, dtype)
        size = math.prod(shape) * dtype.itemsize
        # Checked here once for all formats: no read below can reach beyond its tensor.
        if (found := sum(length for _, length in self.runs)) != size:
            raise CheckpointError(
                f"{file.path}: '{name}' has {found} bytes, but its shape {list(shape)} and dtype "
                f"{dtype} need {size}"
            )
        for offset, length in self.runs:
            if offset < 0 or offset + length > file.size:
                raise CheckpointError(
                    f"{file.path} is truncated or damaged: '{name}' lies at bytes {offset} to "
                    f"{offset + length}, but the file ends at {file.size}"
                )

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Fills a buffer with entries of the tensor, in row-major order.

        Args:
          out: A flat, contiguous array of the tensor's dtype.
          start: The index of the first entry that is read.

        Raises:
          ValueError: If the buffer has another dtype or layout, or reaches beyond the tensor.
          CheckpointError: If the file is shorter than it was when it was opened.
        """
        check_read(self, out, start)
        view = out.view(np.uint8).data
        # Bytes before `start` that remain to be skipped, in this run and the next ones.
        skip = start * self.dtype.itemsize
        for offset, length in self.runs:
            count = min(length - skip, len(view))
            if count > 0:
                self._file.fill(view[:count], offset + skip)
                view = view[count:]
            skip = max(0, skip - length)
        if self.swap:
            out.byteswap(inplace=True)


class LoadedTensor(OnDemand):
    """A tensor that can only be loaded as a whole.

    Its bytes are compressed, strided, or in the store of another library.

    Attributes:
      place: An identifier of the data: tensors with the same place and shape have the same entries.
    """

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        shape: Shape,
        source: str,
        load: Callable[[], np.ndarray],
        span: int | None = None,
    ) -> None:
        """Stores the description of a tensor, without loading it.

        Args:
          name: The tensor's name in the checkpoint.
          dtype: The type of its entries.
          shape: Its shape.
          source: The location of the tensor, for messages.
          load: Returns the whole tensor, with this dtype and shape.
          span: Bytes that `load` allocates; by default the tensor's size.
        """
        super().__init__(name, dtype, shape, source)
        self.place: Callable[[], np.ndarray] = load
        self._span = bytes_of(self) if span is None else span

    @property
    def needs(self) -> int:
        """The number of bytes in memory while the tensor is loaded."""
        return self._span

    def form(self) -> np.ndarray:
        with reading(f"{self.source}: '{self.name}'"):
            array = self.place()
        # The description was read at opening; the file may have changed since.
        if array.shape != self.shape or array.dtype != self.dtype:
            raise CheckpointError(
                f"{self.source}: '{self.name}' is described as {self.dtype}{list(self.shape)} "
                f"but holds {array.dtype}{list(array.shape)}"
            )
        return array

    def fill(self, formed: np.ndarray, out: np.ndarray, start: int) -> None:
        out[...] = formed.flat[start : start + out.size]
