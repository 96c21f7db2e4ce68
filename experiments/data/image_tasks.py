"""Makes tasks from one set of labelled images: all of them rotated, or only some classes.

A config describes a task by text, such as "rotate 45" or "classes 0-4" (`parse`). `of` makes it
from the images, `split` distributes the images over the parts of a study, and `pick` takes one part
of every task.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator

from experiments.data.files import Pool
from experiments.lab.config import Different

# Configs do not require JAX, which is slow to import.
if TYPE_CHECKING:
    import jax

    Array = jax.Array | np.ndarray


class Task(NamedTuple):
    """Labelled images, each as one row of pixels, and a mask of the images in a task.

    Attributes:
      images: Pixels `(..., example, pixel)`.
      labels: The class of each image `(..., example)`.
      member: Whether the image belongs to the task `(..., example)`.
    """

    images: "Float[Array, '*any example pixel']"
    labels: "Int[Array, '*any example']"
    member: "Bool[Array, '*any example']"


class Split(NamedTuple):
    """Indices of the images in the three parts of a study, for each repetition.

    Attributes:
      train: The images to train on `(replicate, train)`.
      validation: The images to choose hyperparameters with `(replicate, validation)`.
      test: The images to report on `(replicate, test)`.
    """

    train: Int[np.ndarray, "replicate train"]
    validation: Int[np.ndarray, "replicate validation"]
    test: Int[np.ndarray, "replicate test"]


NAMES = "'upright', 'rotate <degrees>' or 'classes <first>-<last>'"


def parse(task: str) -> tuple[float, range | None]:
    """Reads the name of a task.

    Args:
      task: "upright", "rotate <degrees>" or "classes <first>-<last>".

    Returns:
      The rotation in degrees, anticlockwise, and the range of classes, or None for all of them.

    Raises:
      ValueError: If the name does not have this form, or the first class is not below the last.

    >>> parse("upright"), parse("rotate -22.5"), parse("classes 0-4")
    ((0.0, None), (-22.5, None), (0.0, range(0, 5)))
    """
    if task == "upright":
        return 0.0, None
    if match := re.fullmatch(r"rotate ([+-]?\d{1,3}(\.\d{1,3})?)", task):
        return float(match[1]), None
    if match := re.fullmatch(r"classes (\d{1,4})-(\d{1,4})", task):
        first, last = int(match[1]), int(match[2])
        if first < last:
            return 0.0, range(first, last + 1)
    raise ValueError(f"unknown task '{task}': expected {NAMES}")


def _parsed(task: str) -> str:
    """Checks a task's name, for a field of a config."""
    try:
        parse(task)
    except ValueError:
        raise ValueError(f"must be {NAMES}") from None
    return task


Tasks = Annotated[Different[Annotated[str, AfterValidator(_parsed)]], MinLen(2)]
"""The type of a config's field for two or more tasks, all different."""


def check_classes(field: str, tasks: Sequence[str], classes: int) -> None:
    """Checks that the classes of the tasks exist in the images.

    Args:
      field: The name of the config's field with the tasks, for the message.
      tasks: The names of the tasks.
      classes: The number of classes that the images have.

    Raises:
      ValueError: If a task has an unknown class or an unknown form.
    """
    for task in tasks:
        _, own = parse(task)
        if own is not None and own[-1] >= classes:
            raise ValueError(
                f"{field} must be of the classes 0 to {classes - 1} of the images; got '{task}'"
            )


def check_left(
    field: str, value: int, taken: int, examples: int | None, why: str = "for the test"
) -> None:
    """Checks that a part of the images leaves some of them for the other parts.

    Args:
      field: The name of the config's field with the part's size, for the message.
      value: The number of images in the part.
      taken: The number of images that are already in other parts.
      examples: The number of all images; None if it is only known from the files; the check is then
        skipped.
      why: The use of the remaining images, for the message.

    Raises:
      ValueError: If no image is left.
    """
    if examples is not None and value >= (room := examples - taken):
        raise ValueError(f"{field} must be below {room}, to leave images {why}; got {value}")


def of(pool: Pool, task: str = "upright") -> Task:
    """Makes a task from all images of a pool.

    The k-th example is the same image in every task, so that one `split` can be used for all tasks.

    Args:
      pool: The images, with pixels in [0, 1].
      task: The name of the task, in the form that `parse` accepts.

    Returns:
      All images under the task's rotation `(example, pixel)`, their labels, and a mask of the
      images in the task's classes.

    Raises:
      ValueError: If the name of the task does not have a known form.
    """
    angle, classes = parse(task)
    images, labels = turned(pool.images, angle), pool.labels
    member = np.full(len(labels), True) if classes is None else np.isin(labels, classes)
    return Task(images.reshape(len(images), -1), labels, member)


def turned(
    images: Float[np.ndarray, "n height width channel"], angle: float
) -> Float[np.ndarray, "n height width channel"]:
    """Rotates images about their centres.

    Pixels are interpolated linearly. Pixels from outside the image are 0.

    Args:
      images: Images `(n, height, width, channel)`.
      angle: The rotation in degrees, anticlockwise.

    Returns:
      The rotated images, in the same shape.
    """
    from scipy.ndimage import rotate  # slow to import

    # The order of the axes makes positive angles anticlockwise, because rows are counted downwards.
    return rotate(images, angle, axes=(2, 1), reshape=False, order=1) if angle else images


def split(seed: int, replicates: int, *, examples: int, train: int, validation: int) -> Split:
    """Splits examples into training, validation and test, independently for each repetition.

    Args:
      seed: Seed of the shuffles.
      replicates: The number of independent shuffles.
      examples: The number of examples.
      train: The number of examples to learn from.
      validation: The number of examples to choose with.

    Returns:
      The indices of the parts. All examples outside the first two parts are the test set.

    >>> [part.shape for part in split(0, 2, examples=10, train=5, validation=3)]
    [(2, 5), (2, 3), (2, 2)]
    """
    rng = np.random.default_rng(seed)
    # Each repetition shuffles all examples independently. The parts are disjoint slices of that
    # order.
    order = rng.permuted(np.tile(np.arange(examples), (replicates, 1)), axis=1)
    return Split(*np.split(order, [train, train + validation], axis=1))


def pick(tasks: Sequence[Task], index: Int[np.ndarray, "replicate example"]) -> Task:
    """Selects the same examples of every task.

    Args:
      tasks: The tasks, all of the same images.
      index: The examples of each repetition `(replicate, example)`.

    Returns:
      The examples under every task: arrays `(replicate, task, example, ...)`.

    Raises:
      ValueError: If a repetition has no example that belongs to one of the tasks.
    """
    leaves = (np.stack(leaf)[:, index].swapaxes(0, 1) for leaf in zip(*tasks, strict=True))
    picked = Task(*leaves)
    if not np.all(picked.member.any(-1)):
        raise ValueError("tasks: a split has no images of one task; give each part more images")
    return picked
