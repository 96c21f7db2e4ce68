"""Describes what is done to tensors, one `Work` for each, and the pieces in which it is done.

A piece is a run of entries, of rows, or all of a tensor, whatever the steps of the merge need. Runs
of entries are padded to one of four lengths, so that compilation does not grow with the number of
shapes. The pieces do not depend on memory, threads or devices.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float

from sail_jax.merging.combining import Reduction, Transform
from sail_jax.merging.leafwise import digit_bits
from sail_jax.merging.reductions import weighted_sum
from sail_jax.merging.steps import NEEDS, Needs, Step
from sail_jax.merging.tensors import Shape, Tensor

ENTRIES, SOME, FEW, TINY = 1 << 20, 1 << 18, 1 << 14, 1 << 9
"""The lengths to which runs of entries are padded. Small tensors that are merged together have
about SOME entries in all.
"""
CROWD = 1 << 8
"""The number of tensors of up to TINY entries above which they have programs of their own."""

PieceOf = tuple[str, int]
"""The name of a work, and the index of one of its pieces."""


@dataclass(frozen=True, eq=False)
class Program:
    """What is done to tensors, whoever they belong to: scale * reduction(transform(task vectors)).

    A `Merge` is a program with what it expects of its inputs.

    Attributes:
      transform: What is done to the task vectors.
      reduction: How they become one update.
      scale: A finite number by which the update is multiplied; may be traced.
      remedy: What an error says of an outcome that holds NaN, with advice. By default it says that
        the values do not fit.
    """

    transform: Transform = Transform()  # noqa: RUF009 - immutable
    reduction: Reduction = weighted_sum
    scale: Float[ArrayLike, ""] = 1.0
    remedy: str = field(default="", kw_only=True)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, those of the transform first; the last one reduces."""
        return (*self.transform.steps, *self.reduction.steps)

    @functools.cached_property
    def needs(self) -> Needs:
        """What has to be seen of a tensor at once: single entries, rows, or all of it."""
        return NEEDS[max(NEEDS.index(step.needs) for step in self.steps)]

    @functools.cached_property
    def over_tree(self) -> bool:
        """Whether tensors depend on one another through a statistic of the whole tree."""
        return any(step.over_tree for step in self.steps)


@dataclass(frozen=True, eq=False)
class Work:
    """The merge of one tensor: its inputs, their weights, and what is done with them.

    Attributes:
      name: The path of the tensor.
      shape: The shape of all of its inputs.
      dtype: The dtype of the outcome.
      models: The tensor in each model.
      start: The tensor that task vectors are relative to, None for 0.
      weights: One for each model, shape `[model]`, normalised if the merge does so.
      merge: What is done; None if the only model is copied.
      steps: The steps of the merge; none of a copy.
      needs: What has to be seen of the tensor at once.
      inputs: All tensors that are read: the start, if there is one, then the models.
      size: The number of entries.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    models: tuple[Tensor, ...]
    start: Tensor | None
    weights: np.ndarray
    merge: Program | None
    steps: tuple[Step, ...] = field(init=False)
    needs: Needs = field(init=False)
    inputs: tuple[Tensor, ...] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        start = () if self.start is None else (self.start,)
        vars(self).update(
            steps=self.merge.steps if self.merge else (),
            needs=self.merge.needs if self.merge else "entry",
            inputs=(*start, *self.models),
            size=math.prod(self.shape),
        )

    @property
    def reads(self) -> int:
        """The bytes of one pass over all inputs."""
        return sum(self.size * tensor.dtype.itemsize for tensor in self.inputs)


def copy(name: str, dtype: np.dtype, tensor: Tensor) -> Work:
    """Describes a tensor that is copied.

    Args:
      name: The path that it gets.
      dtype: The dtype that it gets.
      tensor: What is copied.

    Returns:
      What `Engine` carries out.
    """
    return Work(name, tensor.shape, dtype, (tensor,), None, np.ones(1), None)


class Run(NamedTuple):
    """A run of consecutive entries of a tensor.

    Attributes:
      start: The row-major index of the first entry.
      count: The number of entries.
      shape: The shape into which they are read; it has room for more where they are padded.
    """

    start: int
    count: int
    shape: Shape


def pieces(shape: Shape, needs: Needs, crowded: bool = False) -> list[Run]:
    """Divides a tensor into runs.

    Args:
      shape: The shape of the tensor.
      needs: What has to be seen at once: entries, rows along the last axis, or the whole tensor.
      crowded: Whether there are many tiny tensors (`is_crowd`), which are then padded less.

    Returns:
      The runs in order; none for a tensor without entries.
    """
    n = math.prod(shape)
    if not n:
        return []
    if needs == "tensor" or (needs == "row" and len(shape) < 2):
        return [Run(0, n, shape)]
    if needs == "row":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        # Steps on rows take more memory for each entry, and fresh memory is slow: smaller pieces.
        step = min(rows, max(1, SOME // columns))
        cut = (step * columns, (step, columns))
        return [Run(s, min(cut[0], n - s), cut[1]) for s in range(0, n, cut[0])]
    if crowded and n <= TINY:
        return [Run(0, n, (TINY,))]
    runs, start = [], 0
    while start < n:  # what is left after the last full piece goes into smaller ones: less padding
        left = n - start
        size = ENTRIES if left >= ENTRIES else FEW if left <= FEW else SOME
        runs.append(Run(start, min(size, left), (size,)))
        start += size
    return runs


def passes(work: Work, bits: int = 16) -> int:
    """Counts how often the entries of a tensor are read, unless they are kept in memory.

    Args:
      work: What is done.
      bits: How many bits of a key one pass over the whole tree finds.

    Returns:
      One pass for the outcome, and those of the statistics. A statistic of a tensor that is one
      piece takes no pass. Where a threshold is guessed (`guessing`) there are fewer.
    """
    in_one_piece = len(pieces(work.shape, work.needs)) <= 1
    # A tensor of one piece finds its statistics in the program that merges it.
    alone = 0 if in_one_piece else sum(step.passes(16) for step in work.steps if not step.over_tree)
    return 1 + alone + sum(step.passes(bits) for step in work.steps if step.over_tree)


def kept_bytes(work: Work) -> float:
    """Returns the memory of what statistics keep until the tensor is merged.

    Args:
      work: What is done.

    Returns:
      Bytes for each entry and model.
    """
    return sum(s.kept_bytes() for step in work.steps for s in step.statistics)


def visiting_bytes(work: Work) -> int:
    """Returns the memory that statistics take while they look at a piece.

    Args:
      work: What is done.

    Returns:
      Bytes for each entry of a piece and model.
    """
    return sum(s.visiting_bytes(work.size) for step in work.steps for s in step.statistics)


def workspace(work: Work) -> int:
    """Returns how many numbers kernels hold at once, besides what all of them do.

    Args:
      work: What is done.

    Returns:
      The most of any step.
    """
    held = [s.workspace for s in work.steps if s.workspace is not None and s.applies(work.name)]
    return max((count(len(work.models), work.shape) for count in held), default=0)


def read_as(work: Work) -> np.dtype:
    """Chooses the dtype that the inputs of a tensor are read as.

    Args:
      work: What is done.

    Returns:
      The dtype of the inputs if they share one; else float64 if any input has it, and float32 if
      not. float8_e8m0fnu is read as float32: it has no zero to pad with.
    """
    dtypes = {tensor.dtype for tensor in work.inputs}
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))).name != "float8_e8m0fnu":
        return dtype
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def at_a_time(work: Work, crowded: bool = False) -> int:
    """Chooses how many tensors of one kind are merged at a time.

    Args:
      work: The work of one of them.
      crowded: Whether there are many tiny tensors (`is_crowd`).

    Returns:
      The room in a batch; 1 for a tensor that is not small, or for which a step has arrays of its
      own.
    """
    if work.size > FEW or [step for step in work.steps if step.local is not None]:
        return 1
    return SOME // (TINY if crowded and work.size <= TINY else FEW)


def is_crowd(works: Sequence[Work]) -> bool:
    """Checks whether so many tiny tensors are merged that they deserve programs of their own."""
    tiny = [work for work in works if 0 < work.size <= TINY and work.merge is not None]
    return len(tiny) > CROWD


def tree_bits(works: Sequence[Work]) -> int:
    """Chooses how many bits of a key one pass over all tensors of a merge should find.

    Args:
      works: All works of the merge.

    Returns:
      16 if tensors are large on average, 8 otherwise.
    """
    return digit_bits(sum([work.size for work in works]), len(works))
