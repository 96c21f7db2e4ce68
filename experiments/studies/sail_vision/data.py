"""The images of `sail_vision`: training images, divided by class for the two sources."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from experiments.data import digits
from experiments.data.files import DataError
from experiments.data.image_tasks import split
from experiments.data.registry import OFFLINE
from experiments.studies.sail_vision.config import Config
from experiments.studies.shared.checking import must
from sail_jax.proximal import pair_weight

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel


class Examples(NamedTuple):
    """Images and their labels.

    Attributes:
      images: Bytes, or pixels in [0, 1], `(n, height, width, channel)`.
      labels: Classes, `(n,)`.
    """

    images: Num[np.ndarray, "n height width channel"]
    labels: Int[np.ndarray, " n"]

    def where(self, index: np.ndarray) -> "Examples":
        """Selects some of the images."""
        return Examples(self.images[index], self.labels[index])


class Data(NamedTuple):
    """The images of one seed.

    Attributes:
      learn: Training images of the large network.
      parts: Training images of the first and of the second source.
      test: Test images.
      classes: Number of classes.
    """

    learn: Examples
    parts: tuple[Examples, Examples]
    test: Examples
    classes: int


def load(config: Config) -> list[Data]:
    """Reads the images and divides them for every seed.

    Each seed splits the digits differently. Other data have the publisher's split, the same for all
    seeds.
    """
    if config.data.name == OFFLINE:
        examples, n = Examples(*digits.load()), digits.EXAMPLES - config.held_out
        sizes = {"train": n, "validation": config.held_out}
        index = split(config.seed, config.replicates, examples=digits.EXAMPLES, **sizes)
        pairs = zip(index.train, index.validation, strict=True)
        return [_data(config, examples.where(a), examples.where(b), 10) for a, b in pairs]
    learn, test = (config.data.read(split) for split in ("train", "test"))
    if len(learn.names) != len(test.names):
        raise DataError(
            f"{config.data.folder}: {len(learn.names)} classes to learn, {len(test.names)} to test"
        )
    shared = _data(config, Examples(*learn[:2]), Examples(*test[:2]), len(learn.names))
    return [shared] * config.replicates


def _data(config: Config, learn: Examples, test: Examples, classes: int) -> Data:
    """Divides the training images by class, and checks that there are enough."""
    first = learn.labels < first_classes(classes, config.share)
    parts = learn.where(first), learn.where(~first)
    most = min(len(part.labels) for part in parts)
    for field, value, bound in (
        ("budget.batch", config.budget.batch, most),
        ("probe.neighbours", config.probe.neighbours, most),
        ("statistics", config.statistics, len(learn.labels)),
    ):
        few = f"because there are {len(learn.labels)} images, {most} for a source"
        must(config, field, value <= bound, f"be at most {bound}, {few}")
    return Data(learn, parts, test, classes)


def scale(images: Num[np.ndarray, "n height width channel"]) -> Scale:
    """Computes the mean and the standard deviation of each channel, with pixels in [0, 1].

    Only the first 10 000 images are used.

    - `images`: bytes, or pixels in [0, 1].

    It returns the means and the deviations, as tuples that can be static arguments under `jit`;
    deviations are at least 1e-6.
    """
    sample = images[:10_000].astype(np.float64) / (255 if images.dtype == np.uint8 else 1)
    mean, std = sample.mean((0, 1, 2)), sample.std((0, 1, 2))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1e-6).tolist())


def first_classes(classes: int, share: float) -> int:
    """Computes how many classes the first source learns.

    >>> first_classes(10, 0.7), first_classes(10, 0.99)
    (7, 9)
    """
    return min(max(round(share * classes), 1), classes - 1)


def weights(data: Data) -> Float[np.ndarray, "2"]:
    """Computes SAIL's weights of the two sources from total variation distances.

    The distances are between distributions of labels. They could not be estimated between images:
    no two images are equal, so every estimate would be 1. The parts have no common class and
    together form the whole, so the weights equal their fractions of the images.

    It returns the weights of the first and the second source, with sum 1, `(2,)`.

    References:
      SAIL (Structured-Initialization Learning), Theorem 3, eq. 11.
    """
    target, *parts = (
        np.bincount(part.labels, minlength=data.classes) / len(part.labels)
        for part in (data.learn, *data.parts)
    )
    tv = lambda p, q: 0.5 * float(np.abs(p - q).sum())  # noqa: E731
    first = float(pair_weight(tv(parts[0], target), tv(parts[1], target), tv(*parts)))
    return np.array([first, 1 - first])
