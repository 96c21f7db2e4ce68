"""The images of `sail_vision`: what to learn from, and its parts by class for the sources."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from experiments.data import digits
from experiments.data.files import DataError
from experiments.data.image_tasks import split
from experiments.data.registry import OFFLINE
from experiments.studies.sail_vision.config import Config
from sail_jax.proximal import pair_weight

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel


class Examples(NamedTuple):
    """Images, as bytes or with pixels in [0, 1], and their labels."""

    images: Num[np.ndarray, "n height width channel"]
    labels: Int[np.ndarray, " n"]

    def where(self, index: np.ndarray) -> "Examples":
        return Examples(self.images[index], self.labels[index])


class Data(NamedTuple):
    """The images of one seed: to learn from, the parts that the two sources learn from, to test
    on; and how many classes there are."""

    learn: Examples
    parts: tuple[Examples, Examples]
    test: Examples
    classes: int


def load(config: Config) -> list[Data]:
    """The data of every seed: of digits a split for each, else the same, the publisher's.

    `DataError` (a `ValueError`) says where to get what is missing, and what needs no download.
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
    first = learn.labels < first_classes(classes, config.share)
    parts = learn.where(first), learn.where(~first)
    most = min(len(part.labels) for part in parts)
    for field, value, bound in (
        ("budget.batch", config.budget.batch, most),
        ("probe.neighbours", config.probe.neighbours, most),
        ("statistics", config.statistics, len(learn.labels)),
    ):
        if value > bound:
            raise ValueError(
                f"{field} must be at most {bound}, as there are {len(learn.labels)} images, "
                f"{most} for a source; got {value}"
            )
    return Data(learn, parts, test, classes)


def scale(images: Num[np.ndarray, "n height width channel"]) -> Scale:
    """Mean and deviation of each channel, pixels in [0, 1], over the first 10 000 images."""
    sample = images[:10_000].astype(np.float64) / (255 if images.dtype == np.uint8 else 1)
    mean, std = sample.mean((0, 1, 2)), sample.std((0, 1, 2))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1e-6).tolist())


def first_classes(classes: int, share: float) -> int:
    """How many classes the first source learns: a share of them, and at least one less than all.

    >>> first_classes(10, 0.7), first_classes(10, 0.99)
    (7, 9)
    """
    return min(max(round(share * classes), 1), classes - 1)


def weights(data: Data) -> Float[np.ndarray, "2"]:
    """SAIL's weights of the two sources (Theorem 3, eq. 11) from total variation distances.

    Those are of the labels: of images, no two of which are equal, an estimate is 1 whatever their
    distributions. The parts share no class and make up the whole, so the weights are their sizes.
    """
    target, *parts = (
        np.bincount(part.labels, minlength=data.classes) / len(part.labels)
        for part in (data.learn, *data.parts)
    )
    tv = lambda p, q: 0.5 * float(np.abs(p - q).sum())  # noqa: E731
    first = float(pair_weight(tv(parts[0], target), tv(parts[1], target), tv(*parts)))
    return np.array([first, 1 - first])
