"""Files of data that others wrote: opened within bounds, and where to get missing ones."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Num, UInt8

from sail_jax import disk
from sail_jax.checkpoint.formats import files

MAX_BYTES = 1 << 32  # of an array that is held in memory, which a packed file can only claim
MAX_TEXT = 1 << 26  # bytes of a list of names


class DataError(disk.StoreError, ValueError):
    """Data are missing, damaged or not what they are said to be; names the file, in one line."""


class Source(NamedTuple):
    """A data set by name, its home page, and what the experiments use where it is missing."""

    name: str
    home: str
    offline: str


class Images(NamedTuple):
    """Images as stored (0 to 255), their labels, and one name per class."""

    images: UInt8[np.ndarray, "n height width channel"]
    labels: Int32[np.ndarray, " n"]
    names: tuple[str, ...]


class Pool(NamedTuple):
    """Images that a study splits itself, pixels in [0, 1], and their labels."""

    images: Float[np.ndarray, "n height width channel"]
    labels: Int32[np.ndarray, " n"]


def missing(path: Path, source: Source) -> DataError:
    """The error for a file that is not there: what it is, who publishes it, what else to use."""
    return DataError(
        f"{path} is missing: {source.name} is published at {source.home}; put it there, or use the "
        f"offline default, {source.offline}"
    )


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What the data, checkpoints or devices of a run cannot give becomes a `DataError`, which the
    command line tells in one line."""
    try:
        yield
    except disk.StoreError:
        raise
    except ValueError as exc:
        raise DataError(" ".join(str(exc).split())) from exc


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
    """Whatever a parser stumbles over becomes a `DataError` that names `path`."""
    try:
        with files.reading(path):
            yield
    except DataError:
        raise
    except disk.StoreError as exc:
        raise DataError(" ".join(str(exc).splitlines())) from exc


@contextlib.contextmanager
def opened(path: Path, source: Source) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file and its size in bytes."""
    with reading(path):
        if not path.exists():
            raise missing(path, source)
        if not path.is_file():  # opening a pipe would wait for its writer
            raise DataError(f"{path} is not a plain file")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size


def inside(folder: Path, *parts: str) -> Path:
    """The path below `folder`, refused if a name or a link leads out of it."""
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\\" in part or not part.isprintable():
            raise DataError(f"{folder}: {part[:99]!r} is not a plain file name")
    path = folder.joinpath(*parts)
    with reading(path):
        real, home = path.resolve(), folder.resolve()
    if not real.is_relative_to(home):
        raise DataError(f"{path} is a link that leads out of {folder}")
    return path


def lines(path: Path, source: Source) -> list[str]:
    """The lines of a small UTF-8 file that are not blank."""
    with opened(path, source):
        text = disk.read_bytes(path, MAX_TEXT).decode()
    stripped = [line.strip() for line in text.split("\n")]
    return [line for line in stripped if line]


def fill(file: BinaryIO, shape: tuple[int, ...], path: Path) -> UInt8[np.ndarray, "..."]:
    """The next bytes as an array of this shape. Check the shape against the file's size before."""
    if (count := math.prod(shape)) > MAX_BYTES:
        raise DataError(f"{path}: {list(shape)} needs {count} bytes, more than {MAX_BYTES}")
    array = np.empty(shape, np.uint8)
    view, got = array.reshape(-1).data, 0
    while got < count:
        if not (more := file.readinto(view[got : got + (1 << 24)])):  # type: ignore[attr-defined]
            raise DataError(f"{path} is truncated: it holds {got} of {count} bytes of data")
        got += more
    return array


def open_npy(path: Path, source: Source) -> Num[np.ndarray, "..."]:
    """The numbers of a .npy, mapped and read only; never objects, which would be unpickled."""
    with opened(path, source) as (file, size):
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise DataError(f"{path}: a .npy of version {version} holds no plain numbers")
        if dtype.kind not in "iuf":
            raise DataError(f"{path} holds {dtype}; expected integers or real numbers")
        shape = files.checked_shape(shape, dtype.itemsize, str(path))
        first = file.tell()
        if (need := first + math.prod(shape) * dtype.itemsize) != size:
            raise DataError(
                f"{path} is truncated or damaged: {dtype}{list(shape)} needs {need} bytes, the "
                f"file has {size}"
            )
        if not math.prod(shape):
            raise DataError(f"{path} is empty: its shape is {list(shape)}")
        array = np.memmap(path, dtype, "r", first, shape, "F" if fortran else "C")
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def checked_labels(
    labels: np.ndarray, classes: int, path: Path, examples: int | None = None, first: int = 0
) -> Int32[np.ndarray, " n"]:
    """The labels as int32 from 0 on, if they are one per example and classes from `first` on."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {labels.dtype}{list(labels.shape)} where labels, a row of integers, are "
            "expected: are the files of examples and labels swapped?"
        )
    if examples is not None and len(labels) != examples:
        raise DataError(f"{path} holds {len(labels)} labels for {examples} examples")
    for worst in (int(labels.min()), int(labels.max())) if len(labels) else ():
        if not first <= worst < first + classes:
            raise DataError(
                f"{path} has the label {worst}; expected {first} to {first + classes - 1}, of "
                f"{classes} classes"
            )
    return labels.astype(np.int32) - np.int32(first)
