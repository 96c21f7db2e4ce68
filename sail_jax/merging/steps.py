"""The parts of transforms and reductions: kernels, statistics and steps.

A step is a kernel, which sees a piece of one leaf at a time, and the statistics that it needs about
the other entries of its tensor or of the whole tree. A piece is a run of the leaf's entries, of its
rows, or all of it. Steps are descriptions: `evaluate` carries them out in one program, `streaming`
piece by piece, with the same kernels.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass
from jaxtyping import Array, ArrayLike, Bool, UInt

from sail_jax.checks import nearest
from sail_jax.trees import some_paths

Needs = Literal["entry", "row", "tensor"]
"""What a kernel has to see of a leaf at once; see `Step`."""
NEEDS: tuple[Needs, ...] = ("entry", "row", "tensor")
"""All values of `Needs`, from the least to the most."""
Scope = Literal["tree", "tensor"]
"""What statistics are taken over: the whole tree, or each tensor alone."""

Workspace = Callable[[int, tuple[int, ...]], int]
"""How many numbers a kernel holds, by the number of models and the shape of the leaf."""

T = TypeVar("T")
STATIC = MappingProxyType({"static": True})
"""The metadata of a field for whose value compiled code is specialised."""


def brief(x: object) -> str:
    """Writes a value in one line and without addresses, for `repr`.

    Args:
      x: Any value.

    Returns:
      A number as it is, a larger array by its dtype and shape, a function by its name.

    >>> brief((np.float32(0.5), np.zeros((2, 3)), brief, "tree"))
    "(0.5, float64[2,3], brief, 'tree')"
    """
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        known = isinstance(x, np.ndarray | np.generic) and not x.ndim
        return str(x) if known else f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, list | tuple):
        left, right = "[]" if isinstance(x, list) else "()"
        return left + ", ".join(map(brief, x)) + "," * (right == ")" and len(x) == 1) + right
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{brief(key)}: {brief(value)}" for key, value in x.items()) + "}"
    if isinstance(x, functools.partial):
        return called(x.func, x.args, x.keywords)
    if name := getattr(x, "__qualname__", ""):
        return name.rpartition("<locals>.")[2]
    text = repr(x)
    return type(x).__name__ if " at 0x" in text or "\n" in text else text


def called(function: object, args: Sequence[object], options: Mapping[str, object]) -> str:
    """Writes a call of a function, for `repr`.

    Args:
      function: The function.
      args: Its arguments by position.
      options: Its arguments by name.

    Returns:
      One line, such as "trim(density=0.2)".
    """
    named = [f"{name}={brief(value)}" for name, value in options.items()]
    return f"{brief(function)}({', '.join([*map(brief, args), *named])})"


def _described(x: Any) -> str:
    """Writes a dataclass without the fields that have their defaults, for `repr`."""
    given = {f: getattr(x, f.name) for f in fields(x) if getattr(x, f.name) is not f.default}
    first = [value for f, value in given.items() if f.default is MISSING]
    named = {f.name: value for f, value in given.items() if f.default is not MISSING}
    return called(type(x), first, named)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Kernel:
    """A function with its first arguments, as data.

    Unlike a closure it has a structure that `jax.jit` can compare. Two kernels of one function
    share what is compiled for them, whatever numbers their arrays hold.

    Attributes:
      function: Called as `function(*arrays, *args, **options)`. It should live as long as the
        process: a new function is compiled again.
      arrays: The first arguments, pytrees of arrays.
      options: Keyword arguments by name, hashable; compiled code is specialised to them.
    """

    function: Callable[..., Any] = field(metadata=STATIC)
    arrays: tuple[Any, ...] = ()
    options: tuple[tuple[str, Hashable], ...] = field(default=(), metadata=STATIC)

    def __repr__(self) -> str:
        plain = not (self.arrays or self.options)
        return (
            brief(self.function)
            if plain
            else called(self.function, self.arrays, dict(self.options))
        )

    def __call__(self, *args: Any) -> Any:
        """Calls the function with its first arguments, further ones, and the options.

        Args:
          *args: The further arguments.

        Returns:
          What the function returns.
        """
        return self.function(*self.arrays, *args, **dict(self.options))

    def bind(self, *more: Any) -> "Kernel":
        """Adds further first arguments after those that the kernel has.

        Args:
          *more: Pytrees of arrays.

        Returns:
          The kernel with these arguments.
        """
        return replace(self, arrays=(*self.arrays, *more)) if more else self


def kernel(function: Callable[..., Any], /, *arrays: Any, **options: Hashable) -> Kernel:
    """Makes a `Kernel`, for which the order of the options does not matter.

    Args:
      function: The function to call.
      *arrays: Its first arguments, pytrees of arrays.
      **options: Its keyword arguments, hashable.

    Returns:
      The kernel.
    """
    return Kernel(function, arrays, tuple(sorted(options.items())))


def fingerprint(path: str) -> UInt[np.ndarray, "4"]:
    """Computes a stable hash of a leaf's path.

    Random masks follow from it. It has 128 bits, so that no two leaves share masks by accident.

    Args:
      path: The path of the leaf.

    Returns:
      Four uint32 words, the same in every process.

    >>> [f"{word:08x}" for word in fingerprint("block/kernel")]
    ['a68f0c1e', '1b3c1f51', 'bddf1842', 'a40d8174']
    """
    digest = hashlib.blake2b(path.encode(), digest_size=16).digest()
    # little-endian on every machine, then in the machine's own order
    return np.frombuffer(digest, "<u4").astype(np.uint32)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Piece:
    """Which entries of a leaf a kernel sees: all of it, or a run of its rows or entries.

    Attributes:
      name: The `fingerprint` of the leaf's path, four words.
      start: The row-major index in the leaf of the first entry.
      size: The number of entries that belong to the leaf; padding, of zero deltas, follows them.
        None if there is no padding.
      on_host: Whether the kernel is compiled for the CPU of this process and called there by the
        evaluator itself, and not under the caller's `jit`.
      place: How many leaves come before this one in order of paths, if it is a whole leaf in the
        visit of `Leaves`.
      local: The arrays that `Step.local` has for this leaf, or the ranks of `Step.ranked`; None
        without.
    """

    name: UInt[Any, "*tensors 4"]
    start: ArrayLike = 0
    size: ArrayLike | None = None
    on_host: bool = field(default=False, metadata=STATIC)
    local: Any = None
    place: ArrayLike | None = None

    def beside(self, local: Any) -> "Piece":
        """Returns the piece as a step sees it that has arrays of its own for this leaf.

        Args:
          local: The arrays, a pytree; None changes nothing.

        Returns:
          The piece.
        """
        return self if local is None else replace(self, local=local)

    def index(self, shape: tuple[int, ...]) -> UInt[Array, "..."]:
        """Computes the row-major indices of the piece's entries in the leaf.

        Args:
          shape: The shape of the piece, without tasks.

        Returns:
          uint32, of this shape; indices from 2**32 on wrap around.
        """
        flat = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        # Within the leaf, not the piece: random draws must not depend on how a leaf is cut.
        return flat + jnp.asarray(self.start, jnp.uint32)

    def inside(self, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Computes which entries belong to the leaf.

        Args:
          shape: The shape of the piece, without tasks.

        Returns:
          A mask of this shape, False at padding; None if there is no padding.
        """
        if self.size is None:
            return None
        flat = lax.iota(jnp.uint32, math.prod(shape))
        return (flat < jnp.asarray(self.size, jnp.uint32)).reshape(shape)


@runtime_checkable
class Visit(Protocol):
    """A walk over all pieces of one tensor, or of a tree, to find a statistic.

    Summaries are kernels `(piece, delta, weight) -> part`. The task vectors that they get have gone
    through the steps before. What pieces keep for themselves ("own") has a structure that only the
    visit knows: one entry for each piece.

    Attributes:
      tasks: The number of models.
    """

    tasks: int

    def fold(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> Any:
        """Adds up what all pieces contribute."""
        ...

    def keep(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """Adds up what all pieces contribute, and keeps a value of each piece."""
        ...

    def run(self, function: Kernel, *args: Any) -> Any:
        """Calls a kernel on what was found, compiled where that pays."""
        ...


@runtime_checkable
class Leaves(Visit, Protocol):
    """A visit of whole leaves in a program that is traced.

    Attributes:
      leaves: The number of leaves of which `Piece.place` counts.
      largest: The number of entries of the largest leaf that is visited.
    """

    leaves: int
    largest: int

    def each(self, function: Kernel) -> Any:
        """Computes a value of each piece from where it lies: `function(piece)`."""
        ...


@runtime_checkable
class Pieces(Visit, Protocol):
    """A visit of pieces in which bins are cheap, and passes dear.

    Attributes:
      bits: How many bits of a key one pass should find (see `ranking`).
    """

    bits: int

    def sample(self, summary: Kernel) -> tuple[np.ndarray, float] | None:
        """Computes `[task, ...]` of a few pieces, and its share of all entries, to guess from.

        None where a pass over all pieces costs no more than one over a few.
        """
        ...

    def before(self, own: Any) -> Any:
        """Adds up, for each piece, the counts that the pieces before it keep."""
        ...

    def repeat(self, times: int, body: Callable[[Any, T], T], state: T) -> T:
        """Applies a function to a state a number of times."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Statistic:
    """What a kernel has to know about the other entries of a tensor or a tree.

    There are two: `Fold` adds something up, `ranking.Order` finds entries of some rank.

    Attributes:
      sized: Kernel `(*arrays, size)` of what follows from the number of entries alone; nothing by
        default.
    """

    sized: Kernel | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return _described(self)

    def prepare(self, size: int) -> Any:
        """Computes what follows from the number of entries alone.

        Args:
          size: The number of entries of the tensor or the tree.

        Returns:
          What `sized` returns, or an empty tuple.
        """
        return () if self.sized is None else self.sized(size)

    def compiled(self) -> "Statistic":
        """Drops what only `prepare` needs.

        Returns:
          The statistic for which code is specialised.
        """
        return replace(self, sized=None)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Finds the statistic.

        Args:
          visit: The walk over all pieces.
          found: The results of earlier statistics of the step.
          prepared: The outcome of `prepare`.

        Returns:
          The result, and what pieces keep: one or no further argument for the kernel.
        """
        raise NotImplementedError

    def passes(self, bits: int) -> int:
        """Counts how often `find` visits all pieces.

        Args:
          bits: How many bits of a key one visit finds.

        Returns:
          The number of visits.
        """
        return 1

    def kept_bytes(self) -> float:
        """Estimates the memory of what pieces keep until the tensor is merged.

        Returns:
          Bytes for each entry and model.
        """
        return 0

    def visiting_bytes(self, size: int) -> int:
        """Estimates the memory that a visit of a piece takes beside the piece.

        Args:
          size: The number of entries of the tensor.

        Returns:
          Bytes for each entry of a piece and model.
        """
        return 0


class PerLeaf:
    """Arrays that belong to leaves, by path, for `Step.local`.

    Args:
      name: What messages call the arrays.
      arrays: A pytree of arrays for each path.
      complete: Whether every leaf has to have arrays.
    """

    def __init__(self, name: str, arrays: Mapping[str, Any], complete: bool = False):
        self.name, self.arrays, self.complete = name, arrays, complete

    def __call__(self, path: str) -> Any:
        """Returns the arrays of the leaf at `path`, or None if it has none."""
        return self.arrays.get(path)

    def check(self, paths: Sequence[str]) -> None:
        """Checks that the arrays fit the leaves of a merge.

        Args:
          paths: The paths of all leaves to be merged.

        Raises:
          ValueError: For arrays of a leaf that does not exist, and for leaves without arrays if all
            have to have some.
        """
        existing = set(paths)
        odd = next((path for path in self.arrays if path not in existing), None)
        if odd is not None:
            raise ValueError(f"{self.name}: no such floating leaf {odd!r}{nearest(odd, paths)}")
        missing = [path for path in paths if path not in self.arrays] if self.complete else []
        if missing:
            raise ValueError(f"{self.name}: missing {some_paths(missing)}")


def _add(a: T, b: T) -> T:
    """Adds two parts entry by entry."""
    return jax.tree.map(operator.add, a, b)


def _total(prepared: tuple[()], total: T) -> T:
    """Returns the sum of the parts as it is."""
    return total


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Fold(Statistic):
    """A statistic that is one sum over pieces.

    Attributes:
      summary: Kernel `(*found, piece, delta, weight) -> part`, what a piece contributes.
      finish: Kernel `(prepared, total) -> result`, called once; the total itself by default.
      add: Associative and commutative sum of two parts, entry by entry by default. Zeros have to be
        its identity.
      kept: If not 0, summaries return `(part, own)`, and `own` takes so many bytes for each entry
        and model until the tensor is merged.
    """

    summary: Kernel
    finish: Kernel = Kernel(_total)
    add: Callable[[Any, Any], Any] = field(default=_add, metadata=STATIC)
    kept: float = field(default=0, metadata=STATIC)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Adds up the parts of all pieces; see `Statistic.find`."""
        summary, own = self.summary.bind(*found), ()
        if self.kept:
            # Only then: `keep` holds the results of all pieces until the tensor is merged.
            total, kept = visit.keep(summary, self.add)
            own = (kept,)
        else:
            total = visit.fold(summary, self.add)
        return visit.run(self.finish, prepared, total), own

    def kept_bytes(self) -> float:
        """Returns `kept`."""
        return self.kept


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One change of task vectors, or their reduction.

    Attributes:
      kernel: `(*found, *own, piece, delta, weight) -> (delta, weight)`, where `found` are the
        results of the statistics and `own` is what the piece keeps of them. A step that reduces
        returns the update of the leaf instead.
      statistics: What the kernel has to know about other entries, in the order of its arguments.
      needs: What the kernel has to see at once: single entries ("entry"), rows along the last axis
        ("row"), or the whole "tensor".
      scope: Whether statistics are taken over each "tensor" or over the whole "tree".
      where: Predicate on paths: to which leaves the step applies, and of which it takes statistics.
        None for all leaves.
      local: Function from a path to a pytree of arrays that belong to the leaf, or None. The kernel
        and the summaries find them as `Piece.local`.
      propagates_nonfinite: Whether a NaN or an infinity in any input of a tensor makes some entry
        of its outcome NaN or infinite, whatever the weights are. The inputs of a merge of such
        steps need not be looked at.
      ranked: Kernel `(piece, delta, weight) -> [task, ...]`, sizes whose ranks in their rows
        (`row_ranks`) the summaries need, or the kernel if there are none. Where NumPy can find the
        ranks first, they are `Piece.local`; if that is None, they are not known yet.
      workspace: Function from the number of models and the shape of a leaf to the numbers that the
        kernel holds at once, beyond four for each entry and model; see `Workspace`.
      call: The call that made the step, such as "trim(density=0.2)", for `repr`; see
        `combining.shown`.
    """

    kernel: Kernel
    statistics: tuple[Statistic, ...] = ()
    needs: Needs = field(default="entry", metadata=STATIC)
    scope: Scope = field(default="tensor", metadata=STATIC)
    where: Callable[[str], bool] | None = field(default=None, metadata=STATIC)
    local: Callable[[str], Any] | None = field(default=None, metadata=STATIC)
    propagates_nonfinite: bool = field(default=False, metadata=STATIC)
    ranked: Kernel | None = None
    workspace: Workspace | None = field(default=None, metadata=STATIC)
    call: str = field(default="", metadata=STATIC)

    def __repr__(self) -> str:
        return self.call or _described(self)

    @property
    def over_tree(self) -> bool:
        """Whether the step has a statistic of the whole tree, for which all leaves have to wait."""
        return self.scope == "tree" and bool(self.statistics)

    def applies(self, path: str) -> bool:
        """Checks whether the step applies to a leaf.

        Args:
          path: The path of the leaf.

        Returns:
          True if it does.
        """
        return self.where is None or self.where(path)

    def compiled(self) -> "Step":
        """Returns the step without what depends on paths and sizes alone.

        Returns:
          The step for which code is specialised.
        """
        statistics = tuple(statistic.compiled() for statistic in self.statistics)
        return replace(
            self,
            statistics=statistics,
            where=None,
            local=None,
            ranked=None,
            workspace=None,
            call="",
        )

    def prepare(self, size: int) -> tuple[Any, ...]:
        """Computes what the statistics derive from the number of entries alone.

        Args:
          size: The number of entries of the tensor or the tree.

        Returns:
          One value for each statistic (`Statistic.prepare`).
        """
        return tuple(statistic.prepare(size) for statistic in self.statistics)

    def passes(self, bits: int) -> int:
        """Counts how often the statistics visit all entries.

        Args:
          bits: How many bits of a key one pass finds.

        Returns:
          The number of passes.
        """
        return sum(statistic.passes(bits) for statistic in self.statistics)


def resolve(step: Step, visit: Visit, prepared: tuple[Any, ...]) -> tuple[Kernel, tuple[Any, ...]]:
    """Finds the statistics of a step.

    Args:
      step: The step.
      visit: The walk over all pieces.
      prepared: The outcome of `step.prepare`.

    Returns:
      The kernel of the step with the results as its first arguments, and what pieces keep: one
      further argument for each entry of the tuple.
    """
    values, own = [], []
    for statistic, setup in zip(step.statistics, prepared, strict=True):
        # A statistic may use what those before it found.
        value, of_pieces = statistic.find(visit, tuple(values), setup)
        values.append(value)
        own += of_pieces
    return step.kernel.bind(*values), tuple(own)
