"""What transforms and reductions are made of: kernels, statistics, and steps.

A step is a kernel, which sees some entries of one leaf at a time, and the statistics it needs of
the other entries of its tensor or of the whole tree. Steps are descriptions. `evaluate` carries
them out on pytrees and `sail_jax.checkpoint` on files, with the same code.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass
from jaxtyping import Array, ArrayLike, Bool, UInt

from sail_jax.checks import nearest
from sail_jax.trees import some_paths

__all__ = [
    "NEEDS",
    "STATIC",
    "Fold",
    "Kernel",
    "Needs",
    "PerLeaf",
    "Piece",
    "Scope",
    "Statistic",
    "Step",
    "Visit",
    "fingerprint",
    "kernel",
    "resolve",
]

Needs = Literal["entry", "row", "tensor"]
NEEDS: tuple[Needs, ...] = ("entry", "row", "tensor")
Scope = Literal["tree", "tensor"]


STATIC = MappingProxyType({"static": True})
"""The metadata of a field that compiled code is specialised to."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class Kernel:
    """A function and its first arguments, as data.

    Unlike a closure it has a structure that `jax.jit` can compare. Two kernels of one function
    share what is compiled for them, whatever numbers their arrays hold.

    Attributes:
      function: Called as `function(*arrays, *args, **options)`. It should live as long as the
        process: a new function is compiled anew.
      arrays: A tuple of pytrees of arrays.
      options: Static keyword arguments, hashable.
    """

    function: Callable[..., Any] = field(metadata=STATIC)
    arrays: tuple[Any, ...] = ()
    options: tuple[tuple[str, Hashable], ...] = field(default=(), metadata=STATIC)

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.arrays, *args, **dict(self.options))

    def bind(self, *more: Any) -> "Kernel":
        """The kernel with further first arguments."""
        return replace(self, arrays=(*self.arrays, *more)) if more else self


def kernel(function: Callable[..., Any], /, *arrays: Any, **options: Hashable) -> Kernel:
    """A `Kernel`; the order of the options does not matter."""
    return Kernel(function, arrays, tuple(sorted(options.items())))


def fingerprint(path: str) -> UInt[np.ndarray, "4"]:
    """A stable hash of a leaf's path, of 128 bits.

    Random masks follow from it. It is wide, so that no two leaves share their masks by accident.

    >>> [f"{word:08x}" for word in fingerprint("block/kernel")]
    ['a68f0c1e', '1b3c1f51', 'bddf1842', 'a40d8174']
    """
    digest = hashlib.blake2b(path.encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Piece:
    """Which entries of a leaf a kernel sees: all of it, or a run of its rows or entries.

    Attributes:
      name: The `fingerprint` of the leaf's path.
      start: Row-major index in the leaf of the first entry.
      size: How many of the entries belong to the leaf; behind them is padding, of zero deltas.
        None if all of them do.
      on_host: Whether the kernel is compiled for the CPU of this process and called there by the
        evaluator itself. Then it may use NumPy. It may not under the caller's `jit`.
      local: What belongs to this leaf of `Step.local`.
    """

    name: UInt[Any, "*tensors 4"]
    start: ArrayLike = 0
    size: ArrayLike | None = None
    on_host: bool = field(default=False, metadata=STATIC)
    local: Any = None

    def beside(self, local: Any) -> "Piece":
        """The piece as a step sees it that has arrays of its own for this leaf."""
        return self if local is None else replace(self, local=local)

    def index(self, shape: tuple[int, ...]) -> UInt[Array, "..."]:
        """Row-major indices in the leaf of entries of this shape."""
        flat = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return flat + jnp.asarray(self.start, jnp.uint32)

    def inside(self, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Which entries are no padding, or None if all of them are."""
        if self.size is None:
            return None
        flat = lax.iota(jnp.uint32, math.prod(shape))
        return (flat < jnp.asarray(self.size, jnp.uint32)).reshape(shape)


@runtime_checkable
class Visit(Protocol):
    """A walk over all pieces of one tensor, or of a tree.

    Summaries are kernels `(piece, delta, weight) -> part`. The task vectors they get have gone
    through the steps before.

    Attributes:
      tasks: How many models there are.
      bits: How many bits of a key one visit should tell apart (see `ranking`): many where visits
        cost more than counting does.
    """

    tasks: int
    bits: int

    def fold(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> Any:
        """The sum of the parts of all pieces."""
        ...

    def keep(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """The same for summaries that return `(part, own)`, and what each piece keeps as its own:
        kernels get it as a further argument."""
        ...

    def each(self, function: Callable[..., Any], *own: Any) -> Any:
        """A function of what each piece keeps, for every piece."""
        ...

    def before(self, own: Any) -> Any:
        """For each piece the sum of the counts (`ranking.Wide`) that the pieces before it keep, in
        order of (path, index)."""
        ...

    def sizes(self) -> Any:
        """How many entries each piece has, as a `ranking.Wide`."""
        ...

    def run(self, function: Kernel, *args: Any) -> Any:
        """A function of what was found, compiled where that pays."""
        ...

    def repeat(self, times: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """The last of `state = body(i, state)` for i in 0, ..., times - 1."""
        ...


@runtime_checkable
class Statistic(Protocol):
    """Something that a kernel has to know about other entries."""

    def prepare(self, size: int) -> Any:
        """What follows from the number of entries alone, as NumPy arrays."""
        ...

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What was found, given what the statistics before found, and what pieces keep: both are
        further arguments of the kernel."""
        ...

    def passes(self, bits: int) -> int:
        """How often `find` visits all pieces."""
        ...

    def kept_bytes(self) -> float:
        """What pieces keep, in bytes for each entry and model."""
        ...

    def visiting_bytes(self, size: int) -> int:
        """What a visit of a piece takes beside it, in bytes for each entry and model, for a tensor
        of that many entries."""
        ...

    def compiled(self) -> "Statistic":
        """The statistic without what only `prepare` needs: code is not specialised to that."""
        ...


class PerLeaf:
    """Arrays that belong to leaves, for `Step.local`.

    Args:
      name: What messages call them.
      arrays: A pytree of arrays for each path.
      complete: Whether every leaf has to have some.
    """

    def __init__(self, name: str, arrays: Mapping[str, Any], complete: bool = False):
        self.name, self.arrays, self.complete = name, arrays, complete

    def __call__(self, path: str) -> Any:
        return self.arrays.get(path)

    def check(self, paths: Sequence[str]) -> None:
        """ValueError for arrays of leaves that there are not, and for leaves without arrays."""
        existing = set(paths)
        odd = next((path for path in self.arrays if path not in existing), None)
        if odd is not None:
            raise ValueError(f"{self.name}: no such floating leaf {odd!r}{nearest(odd, paths)}")
        missing = [path for path in paths if path not in self.arrays] if self.complete else []
        if missing:
            raise ValueError(f"{self.name}: missing {some_paths(missing)}")


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(operator.add, a, b)


def _total(prepared: Any, total: Any) -> Any:
    return total


@register_dataclass
@dataclass(frozen=True, eq=False)
class Fold:
    """A statistic that is one sum over pieces.

    Attributes:
      summary: What a piece contributes: `(*found, piece, delta, weight) -> part`.
      finish: `(prepared, total) -> result`, run once.
      add: An associative, commutative sum of parts; entrywise by default. Zeros are its identity.
      kept: If not 0, summaries return `(part, own)`, where `own` takes so many bytes for each
        entry and model until the tensor is merged.
      sized: `prepared`, as a function of how many entries there are.
    """

    summary: Kernel
    finish: Kernel = Kernel(_total)
    add: Callable[[Any, Any], Any] = field(default=_add, metadata=STATIC)
    kept: float = field(default=0, metadata=STATIC)
    sized: Callable[[int], Any] | None = field(default=None, metadata=STATIC)

    def prepare(self, size: int) -> Any:
        return () if self.sized is None else self.sized(size)

    def compiled(self) -> "Fold":
        return replace(self, sized=None)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        summary = self.summary.bind(*found)
        total, own = (
            visit.keep(summary, self.add) if self.kept else (visit.fold(summary, self.add), None)
        )
        return (visit.run(self.finish, prepared, total),), (own,) if self.kept else ()

    def passes(self, bits: int) -> int:
        return 1

    def kept_bytes(self) -> float:
        return self.kept

    def visiting_bytes(self, size: int) -> int:
        return 0


@register_dataclass
@dataclass(frozen=True, eq=False)
class Step:
    """One change of task vectors, or their reduction.

    Attributes:
      kernel: `(*found, *own, piece, delta, weight) -> (delta, weight)`; a step that reduces
        returns the update of the leaf instead.
      statistics: What it has to know, in the order of its arguments.
      needs: What a kernel has to see at once: single entries, rows (all entries along the last
        axis), or the whole tensor.
      scope: Whether a statistic is one of each tensor or of the whole tree.
      where: The paths of the leaves that it applies to, and takes statistics of. None for all.
      local: Path -> a pytree of arrays that belong to the leaf, which the kernel and the summaries
        find as `Piece.local`; None for a leaf without.
    """

    kernel: Kernel
    statistics: tuple[Any, ...] = ()
    needs: Needs = field(default="entry", metadata=STATIC)
    scope: Scope = field(default="tensor", metadata=STATIC)
    where: Callable[[str], bool] | None = field(default=None, metadata=STATIC)
    local: Callable[[str], Any] | None = field(default=None, metadata=STATIC)

    @property
    def over_tree(self) -> bool:
        """Whether leaves cannot be merged one by one."""
        return self.scope == "tree" and bool(self.statistics)

    def applies(self, path: str) -> bool:
        """Whether the leaf at `path` takes part."""
        return self.where is None or self.where(path)

    def compiled(self) -> "Step":
        """The step without what only depends on paths and sizes: code is not specialised to it."""
        statistics = tuple(statistic.compiled() for statistic in self.statistics)
        return replace(self, statistics=statistics, where=None, local=None)

    def prepare(self, size: int) -> tuple[Any, ...]:
        """What its statistics know of that many entries."""
        return tuple(statistic.prepare(size) for statistic in self.statistics)

    def passes(self, bits: int) -> int:
        """How often its statistics visit all entries."""
        return sum(statistic.passes(bits) for statistic in self.statistics)


def resolve(step: Step, visit: Visit, prepared: tuple[Any, ...]) -> tuple[Kernel, tuple[Any, ...]]:
    """Finds the statistics of a step.

    Returns:
      Its kernel with what they found, and what each piece keeps: further arguments.
    """
    values: tuple[Any, ...] = ()
    own: tuple[Any, ...] = ()
    for statistic, setup in zip(step.statistics, prepared, strict=True):
        more, of_pieces = statistic.find(visit, values, setup)
        values, own = (*values, *more), (*own, *of_pieces)
    return step.kernel.bind(*values), own
