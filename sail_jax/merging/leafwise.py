"""How one leaf goes through steps: all of it at once, or piece by piece."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from sail_jax.merging import ranking
from sail_jax.merging.steps import Kernel, Piece, Step, kernel, resolve
from sail_jax.trees import some_paths

__all__ = [
    "Data",
    "Known",
    "Leaf",
    "Source",
    "Traced",
    "Whole",
    "alone",
    "barrier",
    "check_chosen",
    "check_paths",
    "data_of",
    "digit_bits",
    "map_counts",
    "naming",
    "summarise",
    "through",
]

SMALL, LARGE = 1 << 15, 1 << 16
"""Entries of a leaf from which counting pays on a CPU, and counting 16 bits at a time."""


@runtime_checkable
class Source(Protocol):
    """Arrays of one leaf, a pytree, from which its task vectors are computed."""

    @property
    def tasks(self) -> int:
        """How many models there are."""
        ...

    def vectors(self) -> tuple[Array, Array | np.ndarray]:
        """delta and weight, `[task, ...]`."""
        ...


class Leaf(NamedTuple):
    """A leaf to be merged: its path, how many entries it has, and what they are computed from."""

    path: str
    size: int
    source: Source


class Data(NamedTuple):
    """A source, and what belongs to its leaf of `Step.local`, step by step."""

    source: Source
    local: tuple[Any, ...]


Known = Sequence[Kernel | None]
"""The kernels of the first steps for a piece, None where a step does not apply."""


def data_of(steps: Sequence[Step], leaf: Leaf) -> Data:
    """The arrays of a leaf."""
    local = (None if step.local is None else step.local(leaf.path) for step in steps)
    return Data(leaf.source, tuple(local))


def barrier(steps: Sequence[Step]) -> int:
    """How many steps, from the first, have to be resolved before any leaf can be finished."""
    return max((i + 1 for i, step in enumerate(steps) if step.over_tree), default=0)


def check_paths(steps: Sequence[Step], paths: Sequence[str]) -> None:
    """ValueError for a step that is confined to leaves of which there is none, or has arrays for
    other leaves than there are."""
    for step in steps:
        if (check := getattr(step.local, "check", None)) is not None:
            check(paths)
        if step.where is not None:
            check_chosen(step.where, paths)


def check_chosen(where: Callable[[str], bool], paths: Sequence[str]) -> None:
    """ValueError for a predicate on paths that holds for none of them."""
    if not any(map(where, paths)):
        listed = some_paths(paths)
        raise ValueError(f"masked: the predicate chooses none of the leaves {listed}")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Puts the path of a leaf in front of what a kernel raises of it."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or str(error).startswith("leaf "):
            raise
        raise ValueError(f"leaf {path!r}: {error}") from error


def digit_bits(size: int, leaves: int) -> int:
    """How many bits to count at a time in so many entries of so many leaves on a CPU."""
    return 16 if size > LARGE * leaves else 8


def through(kernels: Known, data: Data, piece: Piece) -> Any:
    """The task vectors of a piece behind the first steps, or its update if the last reduces."""
    value: Any = data.source.vectors()
    for step, local in zip(kernels, data.local, strict=False):
        if step is not None:
            value = step(piece.beside(local), *value)
    return value


def summarise(kernels: Known, summary: Kernel, data: Data, piece: Piece) -> Any:
    """What a piece contributes to a statistic of the step behind `kernels`."""
    local = piece.beside(data.local[len(kernels)])
    return summary(local, *through(kernels, data, piece))


def alone(step: Step) -> Kernel:
    """A kernel that finds the statistics of a step itself, in a leaf that is one piece.

    Its first argument is what the statistics know of the size of the leaf (`Step.prepare`).
    """
    return kernel(_alone, step.compiled())


def _alone(step: Step, prepared: tuple[Any, ...], piece: Piece, delta: Array, weight: Array) -> Any:
    bound, own = resolve(step, Whole(piece, delta, weight), prepared)
    return bound(*own, piece, delta, weight)


class Traced:
    """What visits share that are part of a program."""

    def run(self, function: Kernel, *args: Any) -> Any:
        return function(*args)

    def repeat(self, times: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        return lax.fori_loop(0, times, body, state)


class Whole(Traced):
    """The visit of one leaf that is a single piece."""

    def __init__(self, piece: Piece, delta: Array, weight: Array):
        self.piece, self.delta, self.weight = piece, delta, weight
        self.tasks = len(delta)
        self.bits = 16 if piece.on_host and delta[0].size > SMALL else 1

    def fold(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> Any:
        return summary(self.piece, self.delta, self.weight)

    def keep(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        return summary(self.piece, self.delta, self.weight)

    def each(self, function: Callable[..., Any], *own: Any) -> Any:
        return function(*own)

    def before(self, own: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, own)

    def sizes(self) -> ranking.Wide:
        size = self.delta[0].size if self.piece.size is None else self.piece.size
        return ranking.narrow_to_wide(jnp.asarray(size, jnp.uint32))


def map_counts(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of the `Wide` counts in some trees."""
    return jax.tree.map(function, *trees, is_leaf=lambda x: isinstance(x, ranking.Wide))
