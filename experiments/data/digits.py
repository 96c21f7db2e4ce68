"""scikit-learn's bundled handwritten digits (Alpaydin and Kaynak, 1998), and tasks made of them."""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import numpy as np
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator

from experiments.lab.config import Different

Array = jax.Array | np.ndarray


class Task(NamedTuple):
    """Images with labels, of which only the `member` ones belong to the task."""

    images: Float[Array, "*any example 64"]
    labels: Int[Array, "*any example"]
    member: Bool[Array, "*any example"]


class Split(NamedTuple):
    """Indices of the examples to learn from, to choose with, and to report on."""

    train: Int[np.ndarray, "replicate train"]
    validation: Int[np.ndarray, "replicate validation"]
    test: Int[np.ndarray, "replicate test"]


EXAMPLES = 1797
SIDE = 8  # pixels of an image
NAMES = "'upright', 'rotate <degrees>' or 'digits <first>-<last>'"


def parse(task: str) -> tuple[float, range]:
    """The rotation in degrees (anticlockwise) and the classes that a task's name stands for.

    >>> parse("upright"), parse("rotate -40"), parse("digits 0-4")
    ((0.0, range(0, 10)), (-40.0, range(0, 10)), (0.0, range(0, 5)))
    """
    if task == "upright":
        return 0.0, range(10)
    if match := re.fullmatch(r"rotate ([+-]?\d{1,3})", task):
        return float(match[1]), range(10)
    if match := re.fullmatch(r"digits (\d)-(\d)", task):
        first, last = int(match[1]), int(match[2])
        if first < last:
            return 0.0, range(first, last + 1)
    raise ValueError(f"unknown task '{task}': expected {NAMES}")


def _parsed(task: str) -> str:
    try:
        parse(task)
    except ValueError:
        raise ValueError(f"must be {NAMES}") from None
    return task


Tasks = Annotated[Different[Annotated[str, AfterValidator(_parsed)]], MinLen(2)]
"""Two tasks or more, all different, as a field of a config names them."""


def load(task: str = "upright") -> Task:
    """All 1797 images under the task's rotation, pixels in [0, 1], and who is in its classes.

    The k-th example is the same handwritten digit in every task, so one `split` serves all.
    """
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits  # slow to import

    angle, classes = parse(task)
    pixels, target = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8) / 16
    if angle:
        images = rotate(images, angle, axes=(2, 1), reshape=False, order=1)
    labels = np.asarray(target, np.int32)
    return Task(images.reshape(len(images), -1), labels, np.isin(labels, classes))


def split(seed: int, replicates: int, *, train: int, validation: int) -> Split:
    """Independent shuffles of the examples, one per replicate; the rest is the test set."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(EXAMPLES), (replicates, 1)), axis=1)
    return Split(*np.split(order, [train, train + validation], axis=1))


def pick(tasks: Sequence[Task], index: Int[np.ndarray, "replicate example"]) -> Task:
    """The same examples under every task: leaves `[replicate, task, example, ...]`.

    Raises `ValueError` if a replicate has no member of a task.
    """
    leaves = (np.stack(leaf)[:, index].swapaxes(0, 1) for leaf in zip(*tasks, strict=True))
    picked = Task(*leaves)
    if not np.all(picked.member.any(-1)):
        raise ValueError("tasks: one has no digits in a split; leave more of them to each part")
    return picked
