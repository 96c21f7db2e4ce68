"""Functions that apply steps to one leaf, whole or piece by piece.

Both evaluators (`evaluate` and `streaming`) use these functions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from sail_jax.merging.arithmetic import is_manual
from sail_jax.merging.steps import Kernel, Piece, Step, kernel, resolve
from sail_jax.trees import some_paths

SMALL, LARGE = 1 << 15, 1 << 16
"""On a CPU, a leaf with more entries than SMALL is searched by counting its keys in bins. With more
than LARGE, 16-bit digits pay.
"""


@runtime_checkable
class Source(Protocol):
    """A pytree of the arrays of one leaf; they determine its task vectors."""

    @property
    def tasks(self) -> int:
        """The number of models."""
        ...

    def vectors(self) -> tuple[Array, Array | np.ndarray]:
        """Computes the task vectors of the leaf."""
        ...


Its = TypeVar("Its", bound=Source)


@dataclass(frozen=True)
class Leaf(Generic[Its]):
    """A leaf to be merged.

    Attributes:
      path: The path of the leaf in its pytree.
      size: The number of its entries.
      source: The arrays that determine its task vectors.
    """

    path: str
    size: int
    source: Its


class Data(NamedTuple):
    """The arrays of one leaf.

    Attributes:
      source: The arrays that determine its task vectors.
      local: For each step the arrays of `Step.local` for the leaf, or None.
    """

    source: Source
    local: tuple[PyTree, ...]


Add = Callable[[PyTree, PyTree], PyTree]
"""The sum of two parts of a statistic."""
Known = Sequence[Kernel | None]
"""The kernels of the first steps for a piece; None where a step does not apply to the leaf."""


def local_of(steps: Sequence[Step], path: str) -> tuple[PyTree, ...]:
    """Collects the arrays of each step for one leaf (`Step.local`)."""
    return tuple([None if step.local is None else step.local(path) for step in steps])


def barrier(steps: Sequence[Step]) -> int:
    """Counts the steps that must be resolved before any leaf can be finished."""
    return max((i + 1 for i, step in enumerate(steps) if step.over_tree), default=0)


def check_paths(steps: Sequence[Step], paths: Sequence[str]) -> None:
    """Checks that the leaves that steps are restricted to exist.

    Args:
      steps: The steps.
      paths: The paths of all leaves to be merged.

    Raises:
      ValueError: If a step is restricted to missing leaves, or has arrays for missing leaves.
    """
    for step in steps:
        if (check := getattr(step.local, "check", None)) is not None:
            check(paths)
        if step.where is not None:
            check_chosen(step.where, paths)


def check_chosen(where: Callable[[str], bool], paths: Sequence[str]) -> None:
    """Checks that a predicate selects at least one leaf.

    Args:
      where: A predicate on the paths of leaves.
      paths: The paths of all leaves to be merged.

    Raises:
      ValueError: If no leaf is selected.
    """
    if not any(map(where, paths)):
        listed = some_paths(paths)
        raise ValueError(f"masked: the predicate chooses none of the leaves {listed}")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Makes a context that prefixes the message of a ValueError with the path of a leaf.

    Errors of subclasses pass unchanged.

    Args:
      path: The path of the leaf.

    Yields:
      Nothing.

    Raises:
      ValueError: The error raised in the context, with the path as a prefix.
    """
    try:
        yield
    except ValueError as error:
        # A subclass contains more than its message (`NotFiniteError.tensor`), which would be lost.
        if type(error) is not ValueError:
            raise
        raise ValueError(f"leaf {path!r}: {error}") from error


def digit_bits(size: int, leaves: int) -> int:
    """Chooses the number of bits of a key that a CPU search finds in one pass; see `ranking`."""
    # A histogram of 16-bit digits has 65,536 bins for each leaf. Clearing and adding them is not
    # worthwhile for leaves with fewer entries than bins.
    return 16 if size > LARGE * leaves else 8


def through(kernels: Known, data: Data, piece: Piece) -> PyTree:
    """Computes the task vectors of a piece and applies the first steps to them.

    Args:
      kernels: The kernels of the steps to apply.
      data: The arrays of the piece.
      piece: The position of the entries in the leaf.

    Returns:
      (delta, weight), or the update of the piece if the last of the steps reduces.
    """
    value: Any = data.source.vectors()
    # `zip` is not strict, because kernels exist only for resolved steps, and `local` for all steps.
    for step, local in zip(kernels, data.local, strict=False):
        if step is not None:
            # The value is (delta, weight) after a transform and the update after the reduction.
            value = step(piece.beside(local), *value)
    return value


def summarise(kernels: Known, summary: Kernel, data: Data, piece: Piece) -> PyTree:
    """Computes the contribution of a piece to a statistic of the next step."""
    local = piece.beside(data.local[len(kernels)])
    return summary(local, *through(kernels, data, piece))


def alone(step: Step) -> Kernel:
    """Makes a kernel that also finds the statistics of a step, for a leaf that is one piece."""
    return kernel(_alone, step.compiled())


def _alone(
    step: Step, prepared: tuple[PyTree, ...], piece: Piece, delta: Array, weight: Array
) -> Any:
    """Finds the statistics of a step in a whole leaf and applies its kernel."""
    # Bins are worthwhile only on CPUs, and only for many entries.
    binned = piece.on_host and delta[0].size > SMALL
    visit = (Binned if binned else Whole)(piece, delta, weight)
    bound, own = resolve(step, visit, prepared)
    return bound(*own, piece, delta, weight)


class _One:
    """A visit of one leaf that is a single piece, as part of a compiled program.

    Args:
      piece: The piece.
      delta: Shape `[task, ...]`.
      weight: Broadcasts with `delta`.
    """

    def __init__(self, piece: Piece, delta: Array, weight: Array):
        self.piece, self.delta, self.weight = piece, delta, weight
        self.tasks = len(delta)

    def run(self, function: Kernel, *args: Any) -> PyTree:
        return function(*args)

    def fold(self, summary: Kernel, add: Add) -> PyTree:
        return summary(self.piece, self.delta, self.weight)

    def keep(self, summary: Kernel, add: Add) -> tuple[PyTree, PyTree]:
        return summary(self.piece, self.delta, self.weight)


class Whole(_One):
    """The visit (`steps.Leaves`) of one leaf."""

    def __init__(self, piece: Piece, delta: Array, weight: Array):
        super().__init__(replace(piece, place=0), delta, weight)
        self.leaves, self.largest = 1, delta[0].size

    def each(self, function: Kernel) -> PyTree:
        return function(self.piece)


class Binned(_One):
    """The visit (`steps.Pieces`) of one leaf of many entries on a CPU."""

    bits = 16

    def sample(self, summary: Kernel) -> None:
        """Returns no sample, because counting one piece is just as fast."""

    def repeat(self, times: int, body: Callable[[Any, PyTree], PyTree], state: PyTree) -> PyTree:
        done = int(is_manual())
        # Under `shard_map` the first step makes the state vary with the device.
        return lax.fori_loop(done, times, body, body(0, state) if done else state)

    def before(self, own: PyTree) -> PyTree:
        # No entries precede the only piece.
        return jax.tree.map(jnp.zeros_like, own)
