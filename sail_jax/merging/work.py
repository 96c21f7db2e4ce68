"""Describes the merge of each tensor as a `Work`, and divides tensors into pieces.

A piece is a run of entries, a run of rows, or the whole tensor, as the steps of the merge require.
Runs of entries are padded to one of four lengths, which keeps compilation independent of the number
of shapes. The pieces do not depend on memory, threads or devices.
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
"""The lengths that runs of entries are padded to. Small tensors are merged together in groups of
about SOME entries.
"""
CROWD = 1 << 8
"""With more than this number of tensors of at most TINY entries, they get separate programs."""

PieceOf = tuple[str, int]
"""The name of a work, and the index of one of its pieces."""


@dataclass(frozen=True, eq=False)
class Program:
    """The computation on tensors, scale * reduction(transform(task vectors)).

    A `Merge` is a program with requirements on its inputs.

    Attributes:
      transform: The transform of the task vectors.
      reduction: The reduction of the task vectors to one update.
      scale: The factor on the merged task vector, a finite number. It may be traced.
      remedy: The message about a result that contains NaN, with advice. By default the message
        states that the values overflow.
    """

    transform: Transform = Transform()  # noqa: RUF009 - immutable
    reduction: Reduction = weighted_sum
    scale: Float[ArrayLike, ""] = 1.0
    remedy: str = field(default="", kw_only=True)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, first the transform's; the last step reduces."""
        return (*self.transform.steps, *self.reduction.steps)

    @functools.cached_property
    def needs(self) -> Needs:
        """Part of a tensor that is required at once: entries, rows, or the whole tensor."""
        return NEEDS[max(NEEDS.index(step.needs) for step in self.steps)]

    @functools.cached_property
    def over_tree(self) -> bool:
        """Whether tensors depend on one another through a statistic of the whole tree."""
        return any(step.over_tree for step in self.steps)


@dataclass(frozen=True, eq=False)
class Work:
    """The merge of one tensor: its inputs, their weights, and the program.

    Attributes:
      name: The path of the tensor.
      shape: The shape of all of its inputs.
      dtype: The dtype of the result.
      models: The tensor in each model.
      start: The tensor that task vectors are relative to; None for 0.
      weights: One for each model, shape `[model]`, normalised if the merge normalises.
      merge: The program; None if the only model is copied.
      steps: The steps of the merge; empty for a copy.
      needs: The part of the tensor that is required at once.
      inputs: All tensors that are read: the start, if given, then the models.
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
        return self.size * sum([tensor.dtype.itemsize for tensor in self.inputs])


def copy(name: str, dtype: np.dtype, tensor: Tensor) -> Work:
    """Describes the copy of a tensor.

    Args:
      name: The path of the copy.
      dtype: The dtype of the copy.
      tensor: The tensor to copy.

    Returns:
      The work for `Engine`.
    """
    return Work(name, tensor.shape, dtype, (tensor,), None, np.ones(1), None)


class Run(NamedTuple):
    """A run of consecutive entries of a tensor.

    Attributes:
      start: The row-major index of the first entry.
      count: The number of entries.
      shape: The shape of the buffer, larger than `count` where the run is padded.
    """

    start: int
    count: int
    shape: Shape


def pieces(shape: Shape, needs: Needs, crowded: bool = False) -> list[Run]:
    """Divides a tensor into runs.

    Args:
      shape: The shape of the tensor.
      needs: The part that is required at once: entries, rows along the last axis, or the whole
        tensor.
      crowded: Whether many tiny tensors exist (`is_crowd`), which are then padded less.

    Returns:
      The runs in order; an empty list for a tensor without entries.
    """
    n = math.prod(shape)
    if not n:
        return []
    if needs == "tensor" or (needs == "row" and len(shape) < 2):
        return [Run(0, n, shape)]
    if needs == "row":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        # Steps on rows require more memory for each entry, and fresh memory is slow, so pieces are
        # smaller.
        step = min(rows, max(1, SOME // columns))
        cut = (step * columns, (step, columns))
        return [Run(s, min(cut[0], n - s), cut[1]) for s in range(0, n, cut[0])]
    if crowded and n <= TINY:
        return [Run(0, n, (TINY,))]
    runs, start = [], 0
    while start < n:  # the rest after the last full piece uses smaller pieces, for less padding
        left = n - start
        size = ENTRIES if left >= ENTRIES else FEW if left <= FEW else SOME
        runs.append(Run(start, min(size, left), (size,)))
        start += size
    return runs


def passes(work: Work, bits: int = 16) -> int:
    """Counts the passes over the entries of a tensor that is not kept in memory.

    Args:
      work: The work.
      bits: The number of bits of a key that one pass over the whole tree finds.

    Returns:
      One pass for the result, and the passes of statistics. Statistics of a tensor in one piece
      require no extra pass. Guessed thresholds (`guessing`) require fewer passes.
    """
    in_one_piece = len(pieces(work.shape, work.needs)) <= 1
    # The program that merges a tensor of one piece also finds its statistics.
    alone = 0 if in_one_piece else sum(step.passes(16) for step in work.steps if not step.over_tree)
    return 1 + alone + sum(step.passes(bits) for step in work.steps if step.over_tree)


def kept_bytes(work: Work) -> float:
    """Returns the memory of values that statistics keep until the tensor is merged.

    Args:
      work: The work.

    Returns:
      Bytes for each entry and model.
    """
    return sum(s.kept_bytes() for step in work.steps for s in step.statistics)


def visiting_bytes(work: Work) -> int:
    """Returns the memory that statistics take while they visit a piece.

    Args:
      work: The work.

    Returns:
      Bytes for each entry of a piece and model.
    """
    return sum(s.visiting_bytes(work.size) for step in work.steps for s in step.statistics)


def workspace(work: Work) -> int:
    """Returns the extra number of values that kernels keep in memory at once.

    Args:
      work: The work.

    Returns:
      The largest number of any step.
    """
    held = [s.workspace for s in work.steps if s.workspace is not None and s.applies(work.name)]
    return max((count(len(work.models), work.shape) for count in held), default=0)


def read_as(work: Work) -> np.dtype:
    """Chooses the dtype for reading the inputs of a tensor.

    Args:
      work: The work.

    Returns:
      The dtype of the inputs if all share it. Otherwise float64 if any input is float64, and
      float32 if not. float8_e8m0fnu is read as float32, because it has no zero for padding.
    """
    dtypes = {tensor.dtype for tensor in work.inputs}
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))).name != "float8_e8m0fnu":
        return dtype
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def at_a_time(work: Work, crowded: bool = False) -> int:
    """Chooses the number of tensors of one kind to merge at a time.

    Args:
      work: The work of one of these tensors.
      crowded: Whether many tiny tensors exist (`is_crowd`).

    Returns:
      The capacity of a batch; 1 for a tensor that is not small, or if a step has own arrays for it.
    """
    if work.size > FEW or [step for step in work.steps if step.local is not None]:
        return 1
    return SOME // (TINY if crowded and work.size <= TINY else FEW)


def is_crowd(works: Sequence[Work]) -> bool:
    """Checks whether enough tiny tensors are merged to justify separate programs."""
    tiny = [work for work in works if 0 < work.size <= TINY and work.merge is not None]
    return len(tiny) > CROWD


def tree_bits(works: Sequence[Work]) -> int:
    """Chooses the number of bits of a key for one pass over all tensors of a merge.

    Args:
      works: All works of the merge.

    Returns:
      16 if tensors are large on average, otherwise 8.
    """
    return digit_bits(sum([work.size for work in works]), len(works))
