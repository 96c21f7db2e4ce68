"""Loaders of images in folders: Tiny-ImageNet's layout, and one plain folder for each class.

References:
  Le and Yang, Tiny ImageNet visual recognition challenge, 2015.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt8

from experiments.data.files import (
    MAX_BYTES,
    DataError,
    DataSet,
    Images,
    Source,
    inside,
    lines,
    missing,
    opened,
    reading,
)

TINY = Source(
    "Tiny-ImageNet",
    "Stanford's course CS231n (cs231n.stanford.edu)",
    "scikit-learn's digits (experiments.data.digits)",
)
PLAIN = Source("a folder of images for each class", "the data set's publisher", TINY.offline)
# The maximum number of bytes of an image file.
MAX_FILE = 1 << 25
# The maximum number of pixels of an image before it is resized.
MAX_PIXELS = 1 << 26
# Up to this many bytes, images are decoded once; beyond it, at each use.
HELD = 1 << 31
ENDINGS = (".jpeg", ".jpg", ".png")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def decode(
    path: str | Path, side: int, *, crop: bool = False, source: Source = PLAIN
) -> UInt8[np.ndarray, "side side 3"]:
    """Decodes a JPEG or PNG file into red, green and blue.

    The size of the file and of its image is checked before any pixel is decoded.

    Args:
      path: The file.
      side: The height and width of the result, in pixels.
      crop: Whether the central square is resized to `side`. If not, the image must have that size.
      source: The data set of the file, for the message if it is missing.

    Returns:
      The pixels, uint8 `(side, side, 3)`.

    Raises:
      DataError: If the file is missing, truncated, too large, not a JPEG or PNG of 8 bits per
        colour, or, without `crop`, has a different size. It is a `ValueError`.
    """
    with warnings.catch_warnings():
        # Pillow warns about large sizes, which are checked here, and about unusual metadata, which
        # is not used.
        warnings.simplefilter("ignore")
        return _decode(Path(path), side, crop, source)


def _decode(path: Path, side: int, crop: bool, source: Source) -> UInt8[np.ndarray, "side side 3"]:
    """Decodes as `decode`, with all warnings visible; the caller filters them."""
    from PIL import Image

    with opened(path, source) as (file, size):
        if not 0 < size <= MAX_FILE:
            raise DataError(f"{path} has {size} bytes; expected an image of 1 to {MAX_FILE}")
        try:
            image = Image.open(file, formats=("JPEG", "PNG"))
        except Image.DecompressionBombError:
            raise DataError(f"{path} would have more than {MAX_PIXELS} pixels") from None
        except Image.UnidentifiedImageError:
            raise DataError(f"{path} is neither a JPEG nor a PNG, or damaged") from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise DataError(f"{path} would have {width}x{height}, more than {MAX_PIXELS} pixels")
        if not crop and (width, height) != (side, side):
            raise DataError(f"{path} has {width}x{height} pixels; expected {side}x{side}")
        if image.mode not in _MODES:
            raise DataError(f"{path} has pixels of mode {image.mode}; expected 8 bits per colour")
        image = image.convert("RGB")
        if (width, height) != (side, side):
            short = min(width, height)
            left, top = (width - short) / 2, (height - short) / 2
            box = (left, top, left + short, top + short)
            # Cropped and resized in one step, because a separate crop would round the box to whole
            # pixels.
            image = image.resize((side, side), Image.Resampling.BICUBIC, box)
        return np.asarray(image, np.uint8)


def _listed(folder: Path, source: Source, *, folders: bool) -> list[str]:
    """Returns the sorted names of a folder's images, or of its folders; links out are rejected."""
    with reading(folder):
        if not folder.is_dir():
            raise missing(folder, source)
        with os.scandir(folder) as entries:
            names = []
            for entry in entries:
                if entry.is_symlink() or not entry.name.isprintable():
                    inside(folder, entry.name)
                kind = entry.is_dir() if folders else entry.name.lower().endswith(ENDINGS)
                if kind and not entry.name.startswith("."):
                    names.append(entry.name)
        return sorted(names)


def _images(
    paths: list[Path],
    labels: Iterable[int],
    names: list[str],
    side: int,
    crop: bool,
    source: Source,
) -> Images:
    """Decodes the files into one array."""
    if side < 1:
        raise ValueError(f"side must be at least 1; got {side}")
    if (need := len(paths) * side * side * 3) > MAX_BYTES:
        raise DataError(
            f"{paths[0].parent}: {len(paths)} images of side {side} need {need} bytes, more than "
            f"{MAX_BYTES}"
        )
    out = np.empty((len(paths), side, side, 3), np.uint8)
    # Images are decoded one at a time, so that only the result is completely in memory.
    for k, path in enumerate(paths):
        out[k] = decode(path, side, crop=crop, source=source)
    return Images(out, np.fromiter(labels, np.int32, len(paths)), tuple(names))


class Listing(NamedTuple):
    """Images in one folder for each class, not yet decoded.

    Attributes:
      paths: The files.
      labels: The class of each, counted from 0, int32 `(n,)`.
      names: The names of the folders.
    """

    paths: list[Path]
    labels: Int32[np.ndarray, " n"]
    names: tuple[str, ...]


def listed(folder: str | Path, source: Source = PLAIN) -> Listing:
    """Lists images in one folder for each class, as `load` reads them.

    Args:
      folder: The folder with the classes' folders.
      source: The data set, for the message if it is missing.

    Returns:
      The files, their labels, and the names of the folders.

    Raises:
      DataError: If a folder is missing or empty. It is a `ValueError`.
    """
    folder = Path(folder)
    names = _listed(folder, source, folders=True)
    if not names:
        raise DataError(f"{folder} is empty; expected a folder of images for each class")
    paths, labels = [], []
    for label, name in enumerate(names):
        home = inside(folder, name)
        files = _listed(home, source, folders=False)
        if not files:
            raise DataError(f"{home} is empty; expected images (.jpeg, .jpg or .png) of a class")
        paths += [home / file for file in files]
        labels += [label] * len(files)
    return Listing(paths, np.array(labels, np.int32), tuple(names))


class Pictures:
    """Labelled images in files, decoded at each access: `pictures[index]`.

    Args:
      listing: The files and their labels.
      side: Height and width of a decoded image in pixels. The central square is resized to them.
      order: The files to use, and their order; None for all of them as listed.

    Attributes:
      paths: The files, in that order.
      side: Height and width in pixels.
      labels: The labels, `(n,)`.
    """

    def __init__(
        self, listing: Listing, side: int, order: Int[np.ndarray, " n"] | None = None
    ) -> None:
        order = np.arange(len(listing.paths)) if order is None else order
        self.paths, self.side = [listing.paths[i] for i in order], side
        self.labels = listing.labels[order]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the array of all images, `(n, side, side, 3)`."""
        return len(self.paths), self.side, self.side, 3

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Int[np.ndarray, "*any"]) -> UInt8[np.ndarray, "*any side side 3"]:
        out = np.empty((index.size, *self.shape[1:]), np.uint8)

        def fill(k: int, i: int) -> None:
            out[k] = _decode(self.paths[i], self.side, True, PLAIN)

        # Decoding releases the lock for other threads. Warnings are caught here, once, because
        # threads share their filters.
        with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as threads:
            warnings.simplefilter("ignore")
            list(threads.map(fill, range(index.size), index.flat))
        return out.reshape(*index.shape, *self.shape[1:])

    def reader(
        self, count: int | None = None
    ) -> Callable[[Int[np.ndarray, "*any"]], UInt8[np.ndarray, "*any side side 3"]]:
        """Creates a function that looks up images, in memory if there are few.

        Args:
          count: The number of images, from the first, that may be looked up; None for all.

        Returns:
          A function of indices that returns the images.
        """
        count = len(self) if count is None else count
        if count * self.side * self.side * 3 > HELD:
            return self.__getitem__
        return self[np.arange(count)].__getitem__


def load(folder: str | Path, side: int) -> Images:
    """Loads images from one folder for each class.

    Each image is cropped to its central square and resized. Classes are the folders in sorted
    order. Files other than .jpeg, .jpg and .png are ignored, and so are names that begin with a
    dot.
    """
    paths, labels, names = listed(folder)
    return _images(paths, labels, list(names), side, True, PLAIN)


def tiny_imagenet(folder: str | Path, split: str = "train", side: int = 64) -> Images:
    """Loads the images of Tiny-ImageNet from the unpacked archive of its publisher.

    Classes are the WordNet identifiers of wnids.txt, in sorted order.

    Args:
      folder: The folder with wnids.txt, train and val.
      split: "train", or "val", which serves as the test set: the images of "test" have no labels.
      side: The required height and width of the images, in pixels.

    Returns:
      The images `(n, side, side, 3)`, their labels, and the identifiers of the classes.

    Raises:
      ValueError: If `split` is unknown or `side` is below 1.
      DataError: If something is missing, truncated or mislabelled: folders that differ from
        wnids.txt, an image with another class in its name, or an image without exactly one
        annotation. It is a `ValueError`.
    """
    if split not in ("train", "val"):
        raise ValueError(
            f"split: expected train or val, because the test images have no labels; got {split!r}"
        )
    folder = Path(folder)
    path = inside(folder, "wnids.txt")
    names = sorted(lines(path, TINY))
    if not names or len(set(names)) != len(names):
        raise DataError(f"{path} has {len(names)} classes, {len(set(names))} of them distinct")
    part = inside(folder, split)
    labelled = _train(part, names, path) if split == "train" else _val(part, names)
    paths, labels = zip(*labelled, strict=True)
    return _images(list(paths), labels, names, side, False, TINY)


def _train(part: Path, names: list[str], wnids: Path) -> list[tuple[Path, int]]:
    """Returns the training images and their labels, from the classes' folders."""
    held = _listed(part, TINY, folders=True)
    if odd := sorted(set(held) ^ set(names)):
        raise DataError(
            f"{part} has {len(held)} classes, {wnids} names {len(names)}; {odd[0]!r} is only in "
            f"{'the folder' if odd[0] in held else 'the list'}"
        )
    labelled = []
    for label, name in enumerate(names):
        inside(part, name)
        home = inside(part, name, "images")
        files = _listed(home, TINY, folders=False)
        if not files:
            raise DataError(f"{home} is empty; expected the images of its class")
        for file in files:
            if file.split("_")[0] != name:
                raise DataError(f"{home / file} is mislabelled: expected a name like {name}_0.JPEG")
            labelled.append((home / file, label))
    return labelled


def _val(part: Path, names: list[str]) -> list[tuple[Path, int]]:
    """Returns the validation images and their labels, from the list of annotations."""
    path, home = inside(part, "val_annotations.txt"), inside(part, "images")
    label, labelled = {name: k for k, name in enumerate(names)}, {}
    for number, line in enumerate(lines(path, TINY), 1):
        file, *rest = line.split("\t")
        if not rest or rest[0] not in label:
            raise DataError(
                f"{path}, line {number}: expected an image and one of {len(names)} classes between "
                f"tabs, got {line[:99]!r}"
            )
        if file in labelled:
            raise DataError(f"{path}, line {number}: {file[:99]!r} is labelled twice")
        labelled[file] = label[rest[0]]
    held = _listed(home, TINY, folders=False)
    if odd := sorted(set(held) ^ labelled.keys()):
        where = f"is not labelled in {path}" if odd[0] in held else "is labelled but not there"
        raise DataError(f"{home}: {odd[0][:99]!r} {where}")
    if not labelled:
        raise DataError(f"{path} is empty; expected a line for every image")
    return [(home / file, labelled[file]) for file in held]


def _tiny(folder: str | Path, split: str) -> Images:
    return tiny_imagenet(folder, "train" if split == "train" else "val")


IMAGES = {
    "tiny-imagenet": DataSet(TINY, 200, "wnids.txt, train/, val/, as in its archive", _tiny),
}
