"""The data sets that studies know by name: a row for each, and how to read it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from experiments.data import cifar, idx, image_folders
from experiments.data.files import DataError, Images, Source
from experiments.lab.config import config
from sail_jax.checks import nearest

OFFLINE = "digits"


class ImageSet(NamedTuple):
    """Images with labels."""

    source: Source
    classes: int
    files: str
    """What lies in its folder."""
    read: Callable[[str, str], Images] | None = None
    """The images of a folder: the part to learn from ("train"), or the "test" set. None for what
    every installation has."""


def _idx(name: str, family: idx.Family) -> ImageSet:
    files = f"{family.prefix}train-images-idx3-ubyte and its like (.gz or not)"
    return ImageSet(family.source, family.classes, files, partial(_read_idx, name))


def _read_idx(name: str, folder: str, split: str) -> Images:
    return idx.load(folder, name, split)


def _read_cifar(name: str, folder: str, split: str) -> Images:
    return cifar.load(folder, name, split)


def _read_tiny(folder: str, split: str) -> Images:
    return image_folders.tiny_imagenet(folder, "train" if split == "train" else "val")


IMAGES: Mapping[str, ImageSet] = {
    OFFLINE: ImageSet(
        Source("scikit-learn's digits", "scikit-learn", "itself"), 10, "none: it is installed"
    ),
    **{name: _idx(name, family) for name, family in idx.FAMILIES.items()},
    **{
        name: ImageSet(
            version.source,
            version.columns["fine"],
            ", ".join((*version.train, *version.test)),
            partial(_read_cifar, name),
        )
        for name, version in cifar.VERSIONS.items()
    },
    "tiny-imagenet": ImageSet(
        image_folders.TINY, 200, "wnids.txt, train/, val/, as in its archive", _read_tiny
    ),
}


@config
class ImageData:
    """Images with labels, by name."""

    name: str = OFFLINE
    """A data set of images that `sail-jax data` lists; all but the digits need a folder."""
    folder: str | None = None
    """Where the publisher's files of the data set lie."""

    def __post_init__(self) -> None:
        if self.name not in IMAGES:
            raise ValueError(
                f"name: no images are called '{self.name}'{nearest(self.name, IMAGES)}"
            )
        if self.name == OFFLINE and self.folder is not None:
            raise ValueError(f"folder must not be given for {OFFLINE}; got {self.folder}")

    @property
    def classes(self) -> int:
        return IMAGES[self.name].classes

    def read(self, split: str) -> Images:
        """The "train" or the "test" images; `DataError` says where to get what is missing, and
        what needs no download."""
        found = IMAGES[self.name]
        assert found.read is not None, f"{self.name} has no files"
        if self.folder is None:
            raise DataError(
                f"data.folder must name where {found.source.name} lies: it is published at "
                f"{found.source.home}; the default, data.name = {OFFLINE}, needs none"
            )
        return found.read(self.folder, split)
