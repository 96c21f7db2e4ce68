"""Reads data files from other sources, within bounds, with errors that contain the publisher.

Loaders of downloaded files use these functions, so that a missing or damaged file always raises a
one-line `DataError`. The return types of loaders (`Images`, `Pool`) are also defined here.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Num, UInt8

from sail_jax import disk
from sail_jax.checkpoint.formats import files
from sail_jax.checkpoint.formats.npz_files import npy_header

# The maximum number of bytes of an array in memory. A small packed file can claim any size.
MAX_BYTES = 1 << 32
# The maximum number of bytes of a list of names.
MAX_TEXT = 1 << 26


class DataError(disk.StoreError, ValueError):
    """Raised when data are missing or damaged, or do not have the expected form.

    It is also a `ValueError`. Its message is one line, with the invalid file or option.
    """

    code = 2


class Source(NamedTuple):
    """The source of a data set.

    Attributes:
      name: The name of the data set in messages.
      home: Its publisher, or the address of its page.
      offline: The data that studies use if it is missing.
    """

    name: str
    home: str
    offline: str


class DataSet(NamedTuple):
    """A data set with a name in studies' configs.

    Modules of this folder that read data declare them by name in a mapping `IMAGES`, `TEXTS` or
    `LATENTS`; `registry` collects these mappings.

    Attributes:
      source: Its publisher.
      count: The number of classes, or of tokens in the vocabulary; None if it is only known from
        the files.
      files: The required content of its folder, for the list of data sets; empty for data that are
        part of every installation.
      read: `read(folder, split=...)` returns the images of "train" or "test", for images in files.
    """

    source: Source
    count: int | None = None
    files: str = ""
    read: "Callable[..., Images] | None" = None


class Images(NamedTuple):
    """Labelled images in their stored form.

    Attributes:
      images: Pixels from 0 to 255, uint8 `(n, height, width, channel)`.
      labels: The class of each image, counted from 0, int32 `(n,)`.
      names: One name for each class.
    """

    images: UInt8[np.ndarray, "n height width channel"]
    labels: Int32[np.ndarray, " n"]
    names: tuple[str, ...]


class Pool(NamedTuple):
    """Labelled images that a study splits into parts itself.

    Attributes:
      images: Pixels in [0, 1], floating point `(n, height, width, channel)`.
      labels: The class of each image, counted from 0, int32 `(n,)`.
    """

    images: Float[np.ndarray, "n height width channel"]
    labels: Int32[np.ndarray, " n"]


def missing(path: Path, source: Source) -> DataError:
    """Creates the error for a missing file.

    Returns an error without raising it. It contains the publisher of the data set and the offline
    data.
    """
    return DataError(
        f"{path} is missing: {source.name} is published at {source.home}; put it there, or use the "
        f"offline default, {source.offline}"
    )


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turns a `ValueError` inside a `with` statement into a `DataError`.

    Use it for conditions that the data, checkpoints or devices of a run do not satisfy: the command
    line prints a `DataError` as one line, without a traceback. `StoreError` passes unchanged.

    Yields:
      Nothing.

    Raises:
      DataError: If the body of the `with` statement raises `ValueError`.
    """
    try:
        yield
    except disk.StoreError:
        raise
    except ValueError as exc:
        raise DataError(" ".join(str(exc).split())) from exc


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
    """Turns any error of a parser inside a `with` statement into a `DataError`.

    Args:
      path: The source of the data for the message; usually a path.

    Yields:
      Nothing.

    Raises:
      DataError: If the body of the `with` statement raises an error of reading or parsing.
    """
    try:
        with files.reading(path):
            yield
    except DataError:
        raise
    # The readers of checkpoints raise their own errors. Callers here catch only `DataError`, which
    # therefore copies the message.
    except disk.StoreError as exc:
        raise DataError(" ".join(str(exc).splitlines())) from exc


@contextlib.contextmanager
def opened(path: Path, source: Source) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a plain file for a `with` statement.

    Args:
      path: The file.
      source: The data set of the file, for the message if it is missing.

    Yields:
      The file, open for reading bytes, and its size in bytes.

    Raises:
      DataError: If the path is missing or not a plain file, or the body of the `with` statement
        raises an error of reading or parsing.
    """
    with reading(path):
        if not path.exists():
            raise missing(path, source)
        # Opening a pipe would wait for its writer, possibly forever.
        if not path.is_file():
            raise DataError(f"{path} is not a plain file")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size


def inside(folder: Path, *parts: str) -> Path:
    """Joins a path below a folder, and rejects one that leads out of it.

    Names read from files are not trusted, and could lead to any file.

    Args:
      folder: The folder.
      *parts: Plain names of files or folders, one per level.

    Returns:
      The path, which may not exist.

    Raises:
      DataError: If a part is not a plain file name, or a link in the path leads out of the folder.
    """
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
    """Reads the lines of a small text file, such as a list of names.

    Args:
      path: The file, in UTF-8, of at most 64 MiB.
      source: The data set of the file, for the message if it is missing.

    Returns:
      The lines that are not blank, without white space at their ends.

    Raises:
      DataError: If the file is missing, too long or not UTF-8.
    """
    with opened(path, source):
        text = disk.read_bytes(path, MAX_TEXT).decode()
    stripped = [line.strip() for line in text.split("\n")]
    return [line for line in stripped if line]


def json_lines(path: Path, source: Source, longest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads the objects of a file of JSON lines, one at a time; blank lines are skipped.

    Args:
      path: The file.
      source: The data set of the file, for the message if it is missing.
      longest: The maximum number of bytes of a line.

    Yields:
      For messages, the file and number of the line; and its object.

    Raises:
      DataError: If the file is missing, or a line is too long or not an object.
    """
    with opened(path, source) as (file, _):
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            what = f"{path}, line {number}"
            # One byte more than the limit is read, so a line that is too long is noticed without
            # reading its end.
            if len(line) > longest:
                raise DataError(f"{what}: longer than {longest} bytes")
            if line.strip():
                yield what, files.strict_json(line, what)


def fill(file: BinaryIO, shape: tuple[int, ...], path: Path) -> UInt8[np.ndarray, "..."]:
    """Reads the next bytes of a file into an array.

    Compare the shape with the file's size first: memory is allocated before it is filled.

    Args:
      file: The open file.
      shape: The shape of the array.
      path: The path of the file, for messages.

    Returns:
      The bytes, uint8 of that shape.

    Raises:
      DataError: If the array would have more than 4 GiB, or the file ends too early.
    """
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
    """Maps the numbers of a .npy file into memory, read only.

    The header is compared with the size of the file. Arrays of objects are rejected, because they
    are pickles, and reading one would run code from the file.

    Args:
      path: The file.
      source: The data set of the file, for the message if it is missing.

    Returns:
      The array. It remains on disk, unless its byte order must be changed.

    Raises:
      DataError: If the file is missing, damaged, truncated or empty, or does not contain integers
        or real numbers.
    """
    with opened(path, source) as (file, size):
        shape, fortran, dtype = npy_header(file)
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
    """Checks the labels of a file, and counts their classes from 0.

    Args:
      labels: The labels of the file: integers `(n,)`.
      classes: The number of classes.
      path: Their file, for messages.
      examples: The expected number of labels; None if it is not known.
      first: The file's number for the first class.

    Returns:
      The labels from 0 to `classes - 1`, int32 `(n,)`.

    Raises:
      DataError: If the labels are not one axis of integers, are not one per example, or one of them
        is not a class.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {labels.dtype}{list(labels.shape)} where labels, a row of integers, are "
            "expected: are the files of examples and labels swapped?"
        )
    if examples is not None and len(labels) != examples:
        raise DataError(f"{path} holds {len(labels)} labels for {examples} examples")
    # If the smallest and the largest label are valid, so are all labels between them.
    for worst in (int(labels.min()), int(labels.max())) if len(labels) else ():
        if not first <= worst < first + classes:
            raise DataError(
                f"{path} has the label {worst}; expected {first} to {first + classes - 1}, of "
                f"{classes} classes"
            )
    return labels.astype(np.int32) - np.int32(first)
