"""Functions that apply steps to one leaf, all of it at once or piece by piece.

Both evaluators (`evaluate` and `streaming`) are written with these functions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from sail_jax.merging import counting
from sail_jax.merging.steps import Kernel, Piece, Step, kernel, resolve
from sail_jax.trees import some_paths

SMALL, LARGE = 1 << 15, 1 << 16
"""Numbers of entries above which a leaf, on a CPU, is searched by counting its keys in bins, and
above which digits of 16 bits pay.
"""


@runtime_checkable
class Source(Protocol):
    """The arrays of one leaf, a pytree, from which its task vectors are computed."""

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
      source: The arrays from which its task vectors are computed.
    """

    path: str
    size: int
    source: Its


class Data(NamedTuple):
    """The arrays that belong to one leaf.

    Attributes:
      source: The arrays from which its task vectors are computed.
      local: For each step the arrays that `Step.local` has for the leaf, or None.
    """

    source: Source
    local: tuple[PyTree, ...]


Add = Callable[[PyTree, PyTree], PyTree]
"""The sum of two parts of a statistic."""
Known = Sequence[Kernel | None]
"""The kernels of the first steps for a piece; None where a step does not apply to the leaf."""


def local_of(steps: Sequence[Step], path: str) -> tuple[PyTree, ...]:
    """Collects what each step has for a leaf alone (`Step.local`)."""
    return tuple([None if step.local is None else step.local(path) for step in steps])


def barrier(steps: Sequence[Step]) -> int:
    """Counts the steps that have to be resolved before any leaf can be finished."""
    return max((i + 1 for i, step in enumerate(steps) if step.over_tree), default=0)


def check_paths(steps: Sequence[Step], paths: Sequence[str]) -> None:
    """Checks that the leaves to which steps are confined exist.

    Args:
      steps: The steps.
      paths: The paths of all leaves to be merged.

    Raises:
      ValueError: If a step is confined to leaves of which there are none, or has arrays for other
        leaves than there are.
    """
    for step in steps:
        if (check := getattr(step.local, "check", None)) is not None:
            check(paths)
        if step.where is not None:
            check_chosen(step.where, paths)


def check_chosen(where: Callable[[str], bool], paths: Sequence[str]) -> None:
    """Checks that a predicate chooses at least one leaf.

    Args:
      where: Predicate on the paths of leaves: which are chosen.
      paths: The paths of all leaves to be merged.

    Raises:
      ValueError: If no leaf is chosen.
    """
    if not any(map(where, paths)):
        listed = some_paths(paths)
        raise ValueError(f"masked: the predicate chooses none of the leaves {listed}")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Makes a context that puts the path of a leaf in front of the message of a ValueError.

    Errors of subclasses pass unchanged.

    Args:
      path: The path of the leaf.

    Yields:
      Nothing.

    Raises:
      ValueError: The error raised in the context, with the path in front.
    """
    try:
        yield
    except ValueError as error:
        # A subclass carries more than a message (`NotFiniteError.tensor`), which would be lost.
        if type(error) is not ValueError:
            raise
        raise ValueError(f"leaf {path!r}: {error}") from error


def digit_bits(size: int, leaves: int) -> int:
    """Chooses how many bits of a key a search on a CPU should find in one pass; see `ranking`."""
    # A histogram of 16-bit digits has 65,536 bins for each leaf, which have to be cleared and added
    # up: that is not worth it for leaves with fewer entries than bins.
    return 16 if size > LARGE * leaves else 8


def through(kernels: Known, data: Data, piece: Piece) -> PyTree:
    """Computes the task vectors of a piece and applies the first steps to them.

    Args:
      kernels: The kernels of the first steps, as many as are to be applied.
      data: The arrays of the piece.
      piece: Which entries of the leaf they are.

    Returns:
      (delta, weight), or the update of the piece if the last of the steps reduces.
    """
    value: Any = data.source.vectors()
    # Not strict: there are as many kernels as steps are resolved so far, and `local` of all steps.
    for step, local in zip(kernels, data.local, strict=False):
        if step is not None:
            # After a transform this is (delta, weight), after the reduction the update.
            value = step(piece.beside(local), *value)
    return value


def summarise(kernels: Known, summary: Kernel, data: Data, piece: Piece) -> PyTree:
    """Computes what a piece contributes to a statistic of the next step."""
    local = piece.beside(data.local[len(kernels)])
    return summary(local, *through(kernels, data, piece))


def alone(step: Step) -> Kernel:
    """Makes a kernel that finds the statistics of a step by itself, in a leaf that is one piece."""
    return kernel(_alone, step.compiled())


def _alone(
    step: Step, prepared: tuple[PyTree, ...], piece: Piece, delta: Array, weight: Array
) -> Any:
    """Finds the statistics of a step in a whole leaf and applies its kernel."""
    bound, own = resolve(step, Whole(piece, delta, weight), prepared)
    return bound(*own, piece, delta, weight)


class Traced:
    """The methods common to visits that are part of a compiled program."""

    def run(self, function: Kernel, *args: Any) -> PyTree:
        """Calls a kernel; see `Visit.run`."""
        return function(*args)

    def sample(self, summary: Kernel) -> None:
        """Has none; see `Visit.sample`."""

    def repeat(self, times: int, body: Callable[[Any, PyTree], PyTree], state: PyTree) -> PyTree:
        """Repeats a function of a state in a loop of the program; see `Visit.repeat`."""
        return lax.fori_loop(0, times, body, state)


class Whole(Traced):
    """The visit (`steps.Visit`) of one leaf that is a single piece.

    Args:
      piece: The piece.
      delta: Shape `[task, ...]`.
      weight: Broadcasts with `delta`.
    """

    def __init__(self, piece: Piece, delta: Array, weight: Array):
        self.piece, self.delta, self.weight = piece, delta, weight
        self.tasks = len(delta)
        # Bins pay only on CPUs, and there only for many entries.
        self.bits = 16 if piece.on_host and delta[0].size > SMALL else 1

    def fold(self, summary: Kernel, add: Add) -> PyTree:
        return summary(self.piece, self.delta, self.weight)

    def keep(self, summary: Kernel, add: Add) -> tuple[PyTree, PyTree]:
        return summary(self.piece, self.delta, self.weight)

    def before(self, own: PyTree) -> PyTree:
        # Nothing lies before the only piece.
        return jax.tree.map(jnp.zeros_like, own)


def map_counts(function: Callable[..., Any], *trees: Any) -> Any:
    """Applies a function to every `counting.Wide` in some trees of the same structure."""
    return jax.tree.map(function, *trees, is_leaf=lambda x: isinstance(x, counting.Wide))
