"""Data sets with names in studies, and groups of config fields that choose one.

`IMAGES`, `TEXTS` and `LATENTS` collect the loaders' declarations under these names. `ImageData`,
`ImagePool`, `TextData` and `LatentData` are groups of fields: a name, and the location of the
files. The default of every kind is a data set that requires no files.
"""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from experiments import data
from experiments.data import digits, image_folders, latents, text, tokens
from experiments.data.files import DataError, DataSet, Images, Pool, Source
from experiments.data.latents import FOLDERS, Latents
from experiments.data.tokens import Tokens
from experiments.lab.config import Different, Natural, config
from sail_jax.checks import argument, nearest

OFFLINE, OFFLINE_TEXT = digits.NAME, text.NAME
SAME = "same"
SIDE = 256  # of images that are not encoded yet
# More classes than any network has.
_MANY = 1 << 30


def _declared(kind: str) -> Mapping[str, DataSet]:
    """Collects the declarations of this folder's modules, bundled data sets first.

    Only modules that assign the name of the kind are imported.
    """
    found: dict[str, DataSet] = {}
    for folder in data.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            declares = re.search(rf"^{kind} = ", file.read_text(encoding="utf-8"), re.M)
            if declares:
                module = importlib.import_module(f"{data.__name__}.{file.stem}")
                found |= getattr(module, kind)
    return dict(sorted(found.items(), key=lambda item: bool(item[1].files)))


IMAGES, TEXTS, LATENTS = map(_declared, ("IMAGES", "TEXTS", "LATENTS"))


def _check(data: Any, entries: Mapping[str, Any], offline: str, none: str, *files: str) -> None:
    """Checks that the name is known, and that no files are given for bundled data."""
    if data.name not in entries:
        raise ValueError(f"name: {none} called '{data.name}'{nearest(data.name, entries)}")
    for field in files:
        if data.name == offline and (value := getattr(data, field)) is not None:
            raise ValueError(f"{field} must not be given for {offline}; got {value}")


def _unsaid(field: str, source: Source, offline: str, group: str = "data") -> DataError:
    """Creates the error for a data set without a folder or file."""
    return DataError(
        f"{argument(f'{group}.{field}')} must be the place of {source.name} (published at "
        f"{source.home}); the default, {group}.name = {offline}, needs no files"
    )


@config
class ImageData:
    """Images with labels, by name.

    ValueError is raised if the name is unknown, or a folder is given for the digits.
    """

    name: str = OFFLINE
    """A data set of images that `sail-jax data` lists; all but the digits need a folder."""
    folder: str | None = None
    """The folder with the publisher's files of the data set."""

    def __post_init__(self) -> None:
        _check(self, IMAGES, OFFLINE, "no images are", "folder")

    @property
    def classes(self) -> int:
        """The number of classes."""
        count = IMAGES[self.name].count
        assert count is not None, f"{self.name} does not state its classes"
        return count

    def read(self, split: str) -> Images:
        """Reads one part of the images from the folder.

        Use it for data sets that have files. The digits have none (see `ImagePool.pool`).

        Args:
          split: "train" or "test".

        Returns:
          The images, their labels, and the names of the classes.

        Raises:
          DataError: If `folder` is not set, or a file in it is missing or damaged. The message
            contains the publisher of the data set, and the data that require no download.
        """
        entry = IMAGES[self.name]
        assert entry.read is not None, f"{self.name} has no files"
        if self.folder is None:
            raise _unsaid("folder", entry.source, OFFLINE)
        return entry.read(self.folder, split=split)

    def described(self) -> str:
        """Describes the data, after reading all of them.

        Returns:
          The numbers of images and of classes, and the size of the images, as text.

        Raises:
          DataError: As `read` does.
        """
        if self.name == OFFLINE:
            return f"{digits.EXAMPLES} images of {digits.SIDE} x {digits.SIDE}, 10 classes"
        learn, test = (self.read(split) for split in ("train", "test"))
        side = " x ".join(map(str, learn.images.shape[1:]))
        return (
            f"{len(learn.images)} images of {side} to learn from, {len(test.images)} to test on, "
            f"{len(learn.names)} classes"
        )


@config
class ImagePool(ImageData):
    """Images with labels, by name. The study splits them itself.

    ValueError is raised as by `ImageData`.
    """

    examples: Natural | None = None
    """The number of images to use, drawn once for all repetitions; None for all of them."""

    @property
    def size(self) -> int | None:
        """The number of images, or None if it is only known from the files."""
        return self.examples or (digits.EXAMPLES if self.name == OFFLINE else None)

    def published(self) -> tuple[Pool, int]:
        """Reads all images, the publisher's training images before its test images.

        Returns the images, with pixels in [0, 1], and their labels; and the number of training
        images.

        Raises `DataError` as `read` does.
        """
        parts = [self.read(split) for split in ("train", "test")]
        images = np.concatenate([part.images for part in parts]) / np.float32(255)
        labels = np.concatenate([part.labels for part in parts])
        return Pool(images, labels), len(parts[0].labels)

    def pool(self, seed: int) -> Pool:
        """Reads all images, or draws `examples` of them.

        The publisher's training and test images are joined.

        Returns the images, with pixels in [0, 1], and their labels.

        Raises `DataError` if there are fewer images than `examples`, or as `read` does.
        """
        if self.name == OFFLINE:
            images, labels = digits.load()
        else:
            (images, labels), _ = self.published()
        if self.examples is not None:
            if self.examples > len(labels):
                raise DataError(f"data.examples must be at most {len(labels)}; got {self.examples}")
            # A separate stream, because the study draws its splits with the same seed.
            drawn = np.random.default_rng((seed, 1)).permutation(len(labels))[: self.examples]
            images, labels = images[drawn], labels[drawn]
        return Pool(images, labels)


@config
class ImageTasks:
    """Tasks of images in folders: DIR/TASK/train/CLASS/ and DIR/TASK/test/CLASS/, .jpeg or .png."""

    folder: str | None = None
    """The folder with one folder for each task."""
    names: Different[str] = ("cifar10", "svhn")
    """The tasks, by the names of their folders."""
    side: Natural = 224
    """Height and width in pixels. The central square of each image is resized to them."""
    test: Natural | None = None
    """Maximum number of test images of a task, drawn at random; None for all of them."""

    def listed(self, name: str, split: str, group: str) -> image_folders.Listing:
        """Lists the images of one part of a task.

        Args:
          group: The name of the config's field with this group, for messages.
          name: The task.
          split: "train" or "test".

        Returns:
          The files, their labels, and the names of the classes.

        Raises:
          DataError: If `folder` is not set, or a folder is missing or empty.
        """
        home = (
            "their publishers; of each a folder, in it train and test, in these one for each class"
        )
        source = Source(f"images of {len(self.names)} tasks", home, "the digits")
        if self.folder is None:
            raise DataError(
                f"{argument(f'{group}.folder')} must be the place of images of "
                f"{', '.join(self.names)} (published by {home})"
            )
        return image_folders.listed(Path(self.folder) / name / split, source)


@config
class TextData:
    """A text in tokens, by name.

    ValueError is raised if the name is unknown, or a folder or a vocabulary is given for 'python'.
    """

    name: str = OFFLINE_TEXT
    """A text that `sail-jax data` lists; all but 'python', the source of Python's standard library
    in characters, need a folder. 'tokens' is any text."""
    folder: str | None = None
    """The folder with its tokens as nanoGPT prepares them: train and val, .bin or .npy."""
    vocab: Natural | None = None
    """The size of its vocabulary, if neither its name nor the folder gives it."""
    offline: ClassVar[str] = OFFLINE_TEXT
    """The default name, which needs no files."""

    def __post_init__(self) -> None:
        _check(self, TEXTS, OFFLINE_TEXT, "no text is", "folder", "vocab")

    @property
    def source(self) -> Source:
        """The publisher of the text."""
        return TEXTS[self.name].source

    @property
    def known_vocab(self) -> int | None:
        """The size of the vocabulary, or None if it is only known from the files."""
        return self.vocab or TEXTS[self.name].count

    def read(self, group: str = "data") -> Tokens:
        """Reads the text.

        Args:
          group: The name of the config's field with this group, for messages.

        Returns:
          The tokens to learn from, those held out, and the size of the vocabulary.

        Raises:
          DataError: If `folder` is required but not set, or a file in it is missing or damaged. The
            message contains the publisher of the text, and the text that requires no download.
        """
        if self.name == OFFLINE_TEXT:
            return Tokens(*text.load(), text.VOCAB)
        if self.folder is None:
            raise _unsaid("folder", self.source, self.offline, group)
        return tokens.load(self.folder, self.known_vocab)

    def described(self) -> str:
        """Describes the text, after reading all of it.

        Returns:
          The numbers of tokens and the size of the vocabulary, as text.

        Raises:
          DataError: As `read` does.
        """
        corpus = self.read()
        return (
            f"{len(corpus.train)} tokens to learn from, {len(corpus.held_out)} held out, of a "
            f"vocabulary of {corpus.vocab}"
        )


@config
class OtherText(TextData):
    """A second text in tokens, by name, or none.

    ValueError is raised as by `TextData`.
    """

    name: str = SAME
    """'same' for the first text, or the name of another text that `sail-jax data` lists."""
    offline: ClassVar[str] = SAME

    def __post_init__(self) -> None:
        if self.name != SAME:
            super().__post_init__()
        elif self.folder is not None or self.vocab is not None:
            given = self.vocab if self.folder is None else self.folder
            raise ValueError(
                f"name must be another text's, because files were given; got 'same', {given}"
            )


@config
class LatentData:
    """Images or latents of images with labels, by name.

    ValueError is raised if the name is unknown, or files are given for the digits, or of one kind
    for the other.
    """

    name: str = OFFLINE
    """'digits' (each image is its own latent), 'latents' (read from files), or 'image-folders'
    (images that are encoded during training)."""
    file: str | None = None
    """The latents [n, channel, side, side], a .npy, or a .npz that also holds their labels."""
    labels: str | None = None
    """The classes of the latents, a .npy; None for `labels.npy` in their folder."""
    features: str | None = None
    """An encoder's features [n, patch, d] of the same images, a .npy; None without features."""
    folder: str | None = None
    """The folder of images, with one folder for each class."""
    side: Natural | None = None
    """Height and width in pixels, to which the images' central squares are resized; None for
    256."""

    def __post_init__(self) -> None:
        stored, pictured = ("file", "labels", "features"), ("folder", "side")
        _check(self, LATENTS, OFFLINE, "no latents are", *stored, *pictured)
        _check(self, LATENTS, FOLDERS, "no latents are", *stored)
        _check(self, LATENTS, "latents", "no latents are", *pictured)

    def read(self, classes: int) -> Latents:
        """Reads the latents, their labels, and their features if there are any.

        The digits are their own latents, scaled to [-1, 1] for the model. Images of folders are not
        encoded yet.

        Args:
          classes: The number of classes of the network.

        Returns:
          The latents, labels and features.

        Raises:
          DataError: If the digits are requested with a number of classes other than 10, `file` or
            `folder` is required but not set, or a file is missing or damaged. The message contains
            the publishers, and the data that require no download.
        """
        if self.name == OFFLINE:
            if classes != (own := IMAGES[OFFLINE].count):
                other = latents.SOURCE
                raise DataError(
                    f"data.name: the digits have {own} classes, the network {classes}; 'latents' "
                    f"are such as {other.name} ({other.home})"
                )
            images, labels = digits.load()
            return Latents(images.transpose(0, 3, 1, 2), labels, scale=2.0, bias=-1.0)
        if self.name == FOLDERS:
            if self.folder is None:
                raise _unsaid("folder", LATENTS[self.name].source, OFFLINE)
            return latents.load_images(self.folder, self.side or SIDE, classes=classes)
        if self.file is None:
            raise _unsaid("file", LATENTS[self.name].source, OFFLINE)
        loaded = latents.load(self.file, self.labels, classes=classes)
        if self.features is None:
            return loaded
        return loaded._replace(features=latents.features(self.features, len(loaded.labels)))

    def described(self) -> str:
        """Describes the data, after reading all of them.

        Returns:
          The number of latents, their shape, the number of classes and the shape of features, as
          text.

        Raises:
          DataError: As `read` does.
        """
        loaded = self.read(10 if self.name == OFFLINE else _MANY)
        count, *shape = loaded.latents.shape
        kind = "images" if self.name == FOLDERS else "latents"
        said = f"{count} {kind} of {' x '.join(map(str, shape))}"
        said += f", {int(loaded.labels.max()) + 1} classes"
        if loaded.features is None:
            return said
        return f"{said}, features of {' x '.join(map(str, loaded.features.shape[1:]))}"


class Kind(NamedTuple):
    """A kind of data.

    Attributes:
      group: The group of config fields that chooses one.
      sets: The data sets by name.
      unit: The unit of the count.
      uncounted: The text if the count is only known from the files.
    """

    group: type[ImageData] | type[TextData] | type[LatentData]
    sets: Mapping[str, DataSet]
    unit: str
    uncounted: str

    def size(self, name: str) -> str:
        """Returns the size of a data set of this kind as text."""
        count = self.sets[name].count
        return self.uncounted if count is None else f"{count} {self.unit}"


KINDS: Mapping[str, Kind] = {
    "images": Kind(ImageData, IMAGES, "classes", "any classes"),
    "texts": Kind(TextData, TEXTS, "tokens", "any vocabulary"),
    "latents": Kind(LatentData, LATENTS, "classes", "as many classes as the network"),
}
