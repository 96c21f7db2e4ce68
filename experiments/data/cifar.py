"""Loader of the binary versions of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009).

A file is a sequence of records: one byte for each kind of label, then the red, the green and the
blue plane of an image of 32 x 32 pixels.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
    lines,
    opened,
)

# Bytes of an image: its red plane, its green one and its blue one.
PIXELS = 3 * 32 * 32
_HOME = "Alex Krizhevsky's page at the University of Toronto"
_OFFLINE = "scikit-learn's digits (experiments.data.digits)"


class Version(NamedTuple):
    """The names and the contents of a data set's files.

    Attributes:
      source: The publisher of the data set.
      train: The names of the training files, in order.
      test: The names of the test files.
      columns: The number of classes for each kind of label, in the order before an image.
      names: For each kind of label, the file with the names of its classes.
    """

    source: Source
    train: Sequence[str]
    test: Sequence[str]
    columns: dict[str, int]
    names: dict[str, str]


VERSIONS = {
    "cifar-10": Version(
        Source("CIFAR-10 (binary version)", _HOME, _OFFLINE),
        [f"data_batch_{k}.bin" for k in range(1, 6)],
        ["test_batch.bin"],
        {"fine": 10},
        {"fine": "batches.meta.txt"},
    ),
    "cifar-100": Version(
        Source("CIFAR-100 (binary version)", _HOME, _OFFLINE),
        ["train.bin"],
        ["test.bin"],
        {"coarse": 20, "fine": 100},
        {"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"},
    ),
}


def read(path: str | Path, name: str = "cifar-10") -> UInt8[np.ndarray, "n record"]:
    """Reads the records of one file, without splitting them.

    Args:
      path: The file.
      name: The data set, a key of `VERSIONS`.

    Returns:
      The records, uint8 `(n, record)`: one label per column of that version, then 3072 pixels.

    Raises:
      DataError: If the file is missing, empty or truncated, or a label is not a class of the data
        set. It is a `ValueError`.
    """
    path, version = Path(path), VERSIONS[name]
    record = len(version.columns) + PIXELS
    with opened(path, version.source) as (file, size):
        if not size:
            raise DataError(f"{path} is empty; expected records of {record} bytes")
        if size % record:
            others = [
                v.source.name for v in VERSIONS.values() if not size % (len(v.columns) + PIXELS)
            ]
            hint = f" (it fits records of {others[0]})" if others else ""
            raise DataError(
                f"{path} is truncated or not {version.source.name}: its {size} bytes are not a "
                f"multiple of {record}, the size of a record{hint}"
            )
        records = fill(file, (size // record, record), path)
    for column, (kind, classes) in enumerate(version.columns.items()):
        if (worst := records[:, column].max()) >= classes:
            raise DataError(
                f"{path} has the {kind} label {worst}; expected 0 to {classes - 1}: it is damaged "
                f"or not {version.source.name}"
            )
    return records


def load(
    folder: str | Path, name: str = "cifar-10", split: str = "train", labels: str = "fine"
) -> Images:
    """Loads the images of CIFAR-10 or CIFAR-100 from the folder with the publisher's files.

    Args:
      folder: The folder with the files.
      name: "cifar-10" or "cifar-100".
      split: "train" or "test".
      labels: "fine", or "coarse" for CIFAR-100 only.

    Returns:
      The images `(n, 32, 32, 3)`, their labels, and the names of the classes. Names are numbers if
      the file of names is missing.

    Raises:
      ValueError: If `name`, `split` or `labels` is unknown.
      DataError: If a file is missing, truncated or mislabelled, such as a fine class of CIFAR-100
        in two coarse ones. The message contains the file. It is a `ValueError`.
    """
    if name not in VERSIONS or split not in ("train", "test"):
        raise ValueError(
            f"name, split: expected {' or '.join(VERSIONS)} and train or test; got {name!r} and "
            f"{split!r}"
        )
    version, folder = VERSIONS[name], Path(folder)
    if labels not in version.columns:
        raise ValueError(f"labels: {name} has {' and '.join(version.columns)}; got {labels!r}")
    paths = [inside(folder, file) for file in (version.train if split == "train" else version.test)]
    # The last file may be missing, which is reported before the first one is read.
    for path in paths:
        with opened(path, version.source):
            pass
    records = np.concatenate([read(path, name) for path in paths])
    # Each fine class of CIFAR-100 is part of one coarse class. In mislabelled files it may be in
    # two.
    if len(version.columns) == 2:
        pairs = np.unique(records[:, :2], axis=0)
        fine, first, count = np.unique(pairs[:, 1], return_index=True, return_counts=True)
        if np.any(count > 1):
            k = int(np.argmax(count > 1))
            raise DataError(
                f"{paths[0]} is mislabelled: the fine class {fine[k]} lies in {count[k]} coarse "
                f"ones, first in {pairs[first[k], 0]}; expected one"
            )
    column, classes = list(version.columns).index(labels), version.columns[labels]
    chosen = checked_labels(records[:, column], classes, paths[0])
    # The planes of colours become the last axis, as Flax's convolutions expect.
    images = records[:, len(version.columns) :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images), chosen, _names(folder, version, labels))


def _names(folder: Path, version: Version, labels: str) -> tuple[str, ...]:
    """Reads the names of the classes; if the file is missing, they are numbers."""
    path, classes = inside(folder, version.names[labels]), version.columns[labels]
    if not path.exists():
        return tuple(map(str, range(classes)))
    names = lines(path, version.source)
    if len(set(names)) != len(names) or len(names) != classes:
        raise DataError(
            f"{path} names {len(set(names))} classes in {len(names)} lines; expected {classes}"
        )
    return tuple(names)


IMAGES = {
    name: DataSet(
        version.source,
        version.columns["fine"],
        ", ".join((*version.train, *version.test)),
        partial(load, name=name),
    )
    for name, version in VERSIONS.items()
}
