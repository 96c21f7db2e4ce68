"""Tasks made of one set of labelled images: all of them turned, or only some of the classes."""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import numpy as np
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator

from experiments.data.files import Pool
from experiments.lab.config import Different

Array = jax.Array | np.ndarray


class Task(NamedTuple):
    """Images in rows, with labels, of which only the `member` ones belong to the task."""

    images: Float[Array, "*any example pixel"]
    labels: Int[Array, "*any example"]
    member: Bool[Array, "*any example"]


class Split(NamedTuple):
    """Indices of the examples to learn from, to choose with, and to report on."""

    train: Int[np.ndarray, "replicate train"]
    validation: Int[np.ndarray, "replicate validation"]
    test: Int[np.ndarray, "replicate test"]


NAMES = "'upright', 'rotate <degrees>' or 'classes <first>-<last>'"


def parse(task: str) -> tuple[float, range | None]:
    """The rotation in degrees (anticlockwise) and the classes that a task's name stands for, None
    for all of them.

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
    try:
        parse(task)
    except ValueError:
        raise ValueError(f"must be {NAMES}") from None
    return task


Tasks = Annotated[Different[Annotated[str, AfterValidator(_parsed)]], MinLen(2)]
"""Two tasks or more, all different, as a field of a config names them."""


def check_classes(field: str, tasks: Sequence[str], classes: int) -> None:
    """Raises `ValueError` where a task is of classes that images of so many do not have."""
    for task in tasks:
        _, own = parse(task)
        if own is not None and own[-1] >= classes:
            raise ValueError(
                f"{field} must be of the classes 0 to {classes - 1} of the images; got '{task}'"
            )


def check_left(
    field: str, value: int, taken: int, examples: int | None, why: str = "for the test"
) -> None:
    """Raises `ValueError` where so many images leave none; says nothing while it is not known how
    many examples there are."""
    if examples is not None and value >= (room := examples - taken):
        raise ValueError(f"{field} must be below {room}, to leave images {why}; got {value}")


def of(pool: Pool, task: str = "upright") -> Task:
    """All images of the pool under the task's rotation, and who is in its classes.

    The k-th example is the same image in every task, so one `split` serves all.
    """
    angle, classes = parse(task)
    images, labels = turned(pool.images, angle), pool.labels
    member = np.full(len(labels), True) if classes is None else np.isin(labels, classes)
    return Task(images.reshape(len(images), -1), labels, member)


def turned(
    images: Float[np.ndarray, "n height width channel"], angle: float
) -> Float[np.ndarray, "n height width channel"]:
    """The images rotated anticlockwise by so many degrees; what was outside of them is 0."""
    from scipy.ndimage import rotate  # slow to import

    return rotate(images, angle, axes=(2, 1), reshape=False, order=1) if angle else images


def split(seed: int, replicates: int, *, examples: int, train: int, validation: int) -> Split:
    """Independent shuffles of the examples, one per replicate; the rest is the test set."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(examples), (replicates, 1)), axis=1)
    return Split(*np.split(order, [train, train + validation], axis=1))


def pick(tasks: Sequence[Task], index: Int[np.ndarray, "replicate example"]) -> Task:
    """The same examples under every task: leaves `[replicate, task, example, ...]`.

    Raises `ValueError` if a replicate has no member of a task.
    """
    leaves = (np.stack(leaf)[:, index].swapaxes(0, 1) for leaf in zip(*tasks, strict=True))
    picked = Task(*leaves)
    if not np.all(picked.member.any(-1)):
        raise ValueError("tasks: one has no images in a split; leave more of them to each part")
    return picked
