"""Loader of idx files: MNIST and data sets in the same format.

`FAMILIES` has a row for each data set: MNIST, Fashion-MNIST and the parts of EMNIST. Files may be
packed with gzip.

References:
  LeCun et al., Gradient-based learning applied to document recognition, 1998, for MNIST.
"""

import gzip
import math
import struct
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from jaxtyping import UInt8

from experiments.data.files import (
    DataError,
    DataSet,
    Images,
    Source,
    checked_labels,
    fill,
    inside,
    opened,
    reading,
)

# The maximum number of bytes of an unpacked file. EMNIST's largest has 547 million.
MAX_UNPACKED = 1 << 30
_OFFLINE = "scikit-learn's digits (experiments.data.digits)"


class Family(NamedTuple):
    """The file names of one data set, and its conventions.

    Attributes:
      source: The publisher of the data set.
      prefix: The prefix of its file names.
      classes: The number of classes.
      first: The files' number for the first class.
      transposed: Whether images are stored with rows and columns exchanged, as in EMNIST.
    """

    source: Source
    prefix: str
    classes: int
    first: int = 0
    transposed: bool = False


def _emnist(part: str, classes: int, first: int = 0) -> Family:
    """Returns the row for one part of EMNIST."""
    source = Source(f"EMNIST ({part})", "NIST's 'The EMNIST Dataset'", _OFFLINE)
    return Family(source, f"emnist-{part}-", classes, first, transposed=True)


FAMILIES = {
    "mnist": Family(Source("MNIST", "yann.lecun.com/exdb/mnist", _OFFLINE), "", 10),
    "fashion": Family(
        Source("Fashion-MNIST", "GitHub's zalandoresearch/fashion-mnist", _OFFLINE), "", 10
    ),
    "emnist-byclass": _emnist("byclass", 62),
    "emnist-bymerge": _emnist("bymerge", 47),
    "emnist-balanced": _emnist("balanced", 47),
    "emnist-letters": _emnist("letters", 26, first=1),
    "emnist-digits": _emnist("digits", 10),
    "emnist-mnist": _emnist("mnist", 10),
}


def _read(path: Path, axes: int, source: Source) -> UInt8[np.ndarray, "..."]:
    """Reads an idx file of bytes with the given number of axes: 1 for labels, 3 for images."""
    wanted = {1: "labels", 3: "images"}[axes]
    with opened(path, source) as (raw, size):
        packed = path.suffix == ".gz"
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
        # Deflate compresses at most 1032 to 1, so a larger claim is false, possibly an attack.
        bound = min(1032 * size, MAX_UNPACKED) if packed else size
        head = file.read(4)
        if not head:
            raise DataError(f"{path} is empty; expected {wanted} in an idx file")
        if head[:2] == b"\x1f\x8b":
            raise DataError(f"{path} is compressed; expected idx, or the ending .gz")
        if len(head) < 4 or head[:2] != b"\0\0":
            raise DataError(f"{path} is not an idx file: it begins with {head!r}")
        if head[2] != 8:
            raise DataError(f"{path} holds entries of idx type {head[2]}; expected 8, bytes")
        if head[3] != axes:
            raise DataError(
                f"{path} holds an array of {head[3]} axes where {wanted}, of {axes}, are expected: "
                "are the files of images and labels swapped?"
            )
        if len(rest := file.read(4 * axes)) < 4 * axes:
            raise DataError(f"{path} is truncated: it ends within its header")
        # The format is big-endian on every machine.
        shape = struct.unpack(f">{axes}I", rest)
        need = 4 + 4 * axes + math.prod(shape)
        if not math.prod(shape):
            raise DataError(f"{path} is empty: its header has the shape {list(shape)}")
        if need > bound or (not packed and need != size):
            has = f"of {size} packed bytes {bound}" if packed else f"the file has {size}"
            raise DataError(
                f"{path} is truncated or damaged: its header has the shape {list(shape)}, {need} "
                f"bytes, and {has}{' at most are unpacked' if packed else ''}"
            )
        data = fill(file, shape, path)
        if file.read(1):
            raise DataError(f"{path} is damaged: data follow the {need} bytes of its header")
        return data


def read_images(
    path: str | Path, source: Source = FAMILIES["mnist"].source
) -> UInt8[np.ndarray, "n height width"]:
    """Reads the images of one idx3-ubyte file."""
    return _read(Path(path), 3, source)


def _find(folder: Path, stem: str, axes: int) -> Path:
    """Returns the first of a file's usual spellings that exists, packed or not.

    If none exists, it returns the most usual one, for the message.
    """
    names = [f"{stem}{mark}idx{axes}-ubyte{end}" for end in ("", ".gz") for mark in "-."]
    candidates = (inside(folder, name) for name in names)
    with reading(folder):
        return next((path for path in candidates if path.exists()), folder / names[2])


def load(folder: str | Path, name: str = "mnist", split: str = "train") -> Images:
    """Loads the images and labels of one data set from the folder with the publisher's files.

    EMNIST's images are transposed to be upright.

    Args:
      folder: The folder with the files.
      name: The data set, a key of `FAMILIES`.
      split: "train" or "test".

    Returns:
      The images `(n, height, width, 1)`, their labels, and names of the classes, which are their
      numbers in the files.

    Raises:
      ValueError: If `name` or `split` is unknown.
      DataError: If a file is missing, truncated or mislabelled, or the files of images and labels
        are swapped. The message contains the file. It is a `ValueError`.
    """
    if name not in FAMILIES or split not in ("train", "test"):
        raise ValueError(
            f"name, split: expected one of {', '.join(FAMILIES)} and train or test; got {name!r} "
            f"and {split!r}"
        )
    family, folder = FAMILIES[name], Path(folder)
    part = {"train": "train", "test": "test" if family.prefix else "t10k"}[split]
    stem = family.prefix + part
    path = _find(folder, f"{stem}-labels", 1)
    images = read_images(_find(folder, f"{stem}-images", 3), family.source)
    stored = _read(path, 1, family.source)
    labels = checked_labels(stored, family.classes, path, len(images), family.first)
    if family.transposed:
        images = images.swapaxes(1, 2)
    names = tuple(str(k + family.first) for k in range(family.classes))
    return Images(np.ascontiguousarray(images)[..., None], labels, names)


IMAGES = {
    name: DataSet(
        family.source,
        family.classes,
        f"{family.prefix}train-images-idx3-ubyte and its like (.gz or not)",
        partial(load, name=name),
    )
    for name, family in FAMILIES.items()
}
