"""Bytes on disk: read at an offset straight into the caller's buffer, checked before believed."""

import contextlib
import errno
import json
import math
import os
import pickle
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sail_jax import disk
from sail_jax.merging.tensors import OnDemand, Shape, check_read

__all__ = [
    "DTYPES",
    "MAX_HEADER",
    "CheckpointError",
    "File",
    "LoadedTensor",
    "StoredTensor",
    "checked_shape",
    "contained",
    "explained",
    "reading",
    "strict_json",
]

MAX_HEADER = 100_000_000  # bytes, of any description that is parsed: safetensors' own limit
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", *_FLOAT8),
    )
}


class CheckpointError(disk.StoreError, ValueError):
    """A checkpoint cannot be read, written or believed; the message names it, in one line."""


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` into one line: what failed, where, and what to do about it."""
    try:
        yield
    except disk.StoreError as exc:
        raise exc if isinstance(exc, CheckpointError) else CheckpointError(str(exc)) from exc
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        then = "finished tensors are kept: free some space and run again with resume=True"
        why = exc.strerror or str(exc) or type(exc).__name__
        advice = then if full else "repair this place or choose another"
        raise CheckpointError(f"cannot {doing} {path}: {why}; {advice}") from exc


_PARSING = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AssertionError, SyntaxError),
    *(RecursionError, NotImplementedError, EOFError, AttributeError, MemoryError, RuntimeError),
    *(struct.error, zipfile.BadZipFile, zlib.error, tokenize.TokenError, pickle.UnpicklingError),
)


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Whatever a parser stumbles over becomes a `CheckpointError` that names `what`."""
    try:
        yield
    except disk.StoreError:
        raise
    except OSError as exc:
        why = exc.strerror or str(exc) or type(exc).__name__
        raise CheckpointError(f"cannot read {what}: {why}") from exc
    except _PARSING as exc:
        why = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise CheckpointError(f"{what} is damaged: {why}") from exc


def strict_json(data: bytes, what: object) -> dict[str, Any]:
    """A JSON object without repeated keys, NaN or text that is not Unicode."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            seen = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {again!r} is repeated")
        for text in (*mapping, *mapping.values()):
            if isinstance(text, str):
                text.encode()
        return mapping

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    with reading(what):
        record = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        return record


def checked_shape(shape: Any, itemsize: int, what: str) -> Shape:
    """The shape as a tuple, if an array can have it."""
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{what}: expected a shape of non-negative integers, got {shape!r}")
    if len(shape) > 32 or math.prod(filter(None, shape)) * itemsize >= 2**62:
        raise CheckpointError(f"{what}: no array can have the shape {_short(shape)}")
    return tuple(shape)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:97] + "..."


def contained(folder: Path, name: str) -> Path:
    """The file `name` of `folder`, refused if it lies elsewhere.

    A link may lead within the folder, or from a hub cache's `snapshots/<revision>/` to the
    `blobs/` beside it.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    path, home = folder / name, folder.resolve()
    with reading(path):
        real = path.resolve(strict=True)
    homes = [home]
    homes += [above.parent / "blobs" for above in home.parents if above.name == "snapshots"][:1]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path} is a link that leads out of the checkpoint's folder")
    return path


class File:
    """A plain file, open for reading at any offset by any thread; `about` is what the system said
    of it before anything was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            # Opening a pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
            self.about = os.fstat(self._fd)
        if not stat.S_ISREG(self.about.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a plain file")
        self.size = self.about.st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fill(self, view: memoryview, offset: int) -> None:
        """Fills a byte view from `offset` on; `CheckpointError` if the file ends before."""
        if self._fd < 0:
            raise CheckpointError(f"{self.path} was closed")
        with reading(self.path):
            while len(view):
                got = os.preadv(self._fd, [view], offset)
                if not got:
                    raise CheckpointError(f"{self.path} is truncated: it ends at byte {offset}")
                view, offset = view[got:], offset + got

    def array_at(self, offset: int, count: int) -> np.ndarray:
        """`count` bytes from `offset` on; nothing is allocated beyond the file's own size."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: bytes {offset} to {offset + count} of "
                f"{self.size} are wanted"
            )
        data = np.empty(count, np.uint8)
        self.fill(data.data, offset)
        return data

    def bytes_at(self, offset: int, count: int) -> bytes:
        return self.array_at(offset, count).tobytes()


class StoredTensor:
    """A tensor whose bytes lie in a file as they are in memory, in one run or several."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        shape: Shape,
        file: File,
        runs: Sequence[tuple[int, int]],
        swap: bool = False,
    ) -> None:
        """`runs` holds the offset and length of each run of bytes; `swap` if big-endian."""
        self.name, self.dtype, self.shape = name, dtype, shape
        self._file, self._runs, self._swap = file, tuple(runs), swap
        size = math.prod(shape) * dtype.itemsize
        if sum(length for _, length in self._runs) != size:
            raise CheckpointError(
                f"{file.path}: '{name}' has {sum(n for _, n in self._runs)} bytes, its shape "
                f"{list(shape)} and type {dtype} need {size}"
            )
        for offset, length in self._runs:
            if offset < 0 or offset + length > file.size:
                raise CheckpointError(
                    f"{file.path}: '{name}' lies at bytes {offset} to {offset + length}, the file "
                    f"ends at {file.size}: truncated or damaged"
                )

    @property
    def source(self) -> str:
        return str(self._file.path)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        check_read(self, out, start)
        view = out.view(np.uint8).data
        skip = start * self.dtype.itemsize
        for offset, length in self._runs:
            count = min(length - skip, len(view))
            if count > 0:
                self._file.fill(view[:count], offset + skip)
                view = view[count:]
            skip = max(0, skip - length)
        if self._swap:
            out.byteswap(inplace=True)


class LoadedTensor(OnDemand):
    """A tensor that cannot be read in part (compressed, strided): it is loaded whole."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        shape: Shape,
        source: str,
        load: Callable[[], np.ndarray],
        span: int | None = None,
    ) -> None:
        """`span`: the bytes that `load` takes, if not those of the tensor."""
        super().__init__(name, dtype, shape, source)
        self._load = load
        self._span = math.prod(shape) * dtype.itemsize if span is None else span

    @property
    def needs(self) -> int:
        """Bytes of what is loaded."""
        return self._span

    def form(self) -> np.ndarray:
        with reading(f"{self.source}: '{self.name}'"):
            array = self._load()
        if array.shape != self.shape or array.dtype != self.dtype:
            raise CheckpointError(
                f"{self.source}: '{self.name}' was {self.dtype}{list(self.shape)} in the "
                f"description and is {array.dtype}{list(array.shape)}"
            )
        return array

    def fill(self, formed: np.ndarray, out: np.ndarray, start: int) -> None:
        out[...] = formed.flat[start : start + out.size]
