"""The parts of transforms and reductions: kernels, statistics and steps.

A step consists of a kernel and statistics. The kernel sees one piece of a leaf at a time. The
statistics describe the other entries of the tensor or the whole tree. A piece is a run of the
leaf's entries, a run of its rows, or the whole leaf. Steps are only descriptions. `evaluate` runs
them in one program, and `streaming` piece by piece, with the same kernels.
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
"""The part of a leaf that a kernel needs at once; see `Step`."""
NEEDS: tuple[Needs, ...] = ("entry", "row", "tensor")
"""All values of `Needs`, from the smallest part to the largest."""
Scope = Literal["tree", "tensor"]
"""The extent of statistics: the whole tree, or each tensor."""

Workspace = Callable[[int, tuple[int, ...]], int]
"""The number of values that a kernel holds, from the number of models and the shape of the leaf."""

T = TypeVar("T")
STATIC = MappingProxyType({"static": True})
"""The metadata of a static field: compiled code is specialised for its value."""


def brief(x: object) -> str:
    """Formats a value in one line without addresses, for `repr`.

    Args:
      x: Any value.

    Returns:
      A number unchanged, a larger array as its dtype and shape, a function as its name.

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
    """Formats a call of a function, for `repr`.

    Args:
      function: The function.
      args: Its positional arguments.
      options: Its keyword arguments.

    Returns:
      One line, such as "trim(density=0.2)".
    """
    named = [f"{name}={brief(value)}" for name, value in options.items()]
    return f"{brief(function)}({', '.join([*map(brief, args), *named])})"


def _described(x: Any) -> str:
    """Formats a dataclass without fields at their defaults, for `repr`."""
    given = {f: getattr(x, f.name) for f in fields(x) if getattr(x, f.name) is not f.default}
    first = [value for f, value in given.items() if f.default is MISSING]
    named = {f.name: value for f, value in given.items() if f.default is not MISSING}
    return called(type(x), first, named)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Kernel:
    """A function with its first arguments, as data.

    Unlike a closure, it has a structure that `jax.jit` can compare. Two kernels of the same
    function share compiled code, for any values of their arrays.

    Attributes:
      function: Called as `function(*arrays, *args, **options)`. It should exist as long as the
        process, because a new function is compiled again.
      arrays: The first arguments, pytrees of arrays.
      options: Keyword arguments by name, hashable. Compiled code is specialised for them.
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
          The function's result.
        """
        return self.function(*self.arrays, *args, **dict(self.options))

    def bind(self, *more: Any) -> "Kernel":
        """Adds arguments after the first arguments of the kernel.

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

    Random masks depend on it. It has 128 bits, so two leaves do not share masks by accident.

    Args:
      path: The path of the leaf.

    Returns:
      Four uint32 words, the same in every process.

    >>> [f"{word:08x}" for word in fingerprint("block/kernel")]
    ['a68f0c1e', '1b3c1f51', 'bddf1842', 'a40d8174']
    """
    digest = hashlib.blake2b(path.encode(), digest_size=16).digest()
    # Little-endian on every machine, then converted to the machine's own order.
    return np.frombuffer(digest, "<u4").astype(np.uint32)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Piece:
    """The position of a kernel's entries in a leaf: the whole leaf, or a run of rows or entries.

    Attributes:
      name: The `fingerprint` of the leaf's path, four words.
      start: The row-major index in the leaf of the first entry.
      size: The number of entries of the leaf in the piece. Padding with zero deltas follows them.
        None without padding.
      on_host: Whether the evaluator compiles the kernel for this process's CPU and calls it there,
        instead of under the caller's `jit`.
      at_scale_1: Whether sums may over- and underflow, because the evaluator checks them
        (`arithmetic.settled`) and calls the kernel again.
      place: The position of the leaf in the order of paths, if it is a whole leaf in a visit of
        `Leaves`.
      local: The arrays of `Step.local` for this leaf, or the ranks of `Step.ranked`; otherwise
        None.
    """

    name: UInt[Any, "*tensors 4"]
    start: ArrayLike = 0
    size: ArrayLike | None = None
    on_host: bool = field(default=False, metadata=STATIC)
    at_scale_1: bool = field(default=False, metadata=STATIC)
    local: Any = None
    place: ArrayLike | None = None

    def beside(self, local: Any) -> "Piece":
        """Returns the piece with a step's own arrays for this leaf.

        Args:
          local: A pytree of arrays. None changes nothing.

        Returns:
          The piece.
        """
        return self if local is None else replace(self, local=local)

    def index(self, shape: tuple[int, ...]) -> UInt[Array, "..."]:
        """Computes the row-major indices of the piece's entries in the leaf.

        Args:
          shape: The shape of the piece, without tasks.

        Returns:
          uint32, of this shape. Indices from 2**32 on wrap around.
        """
        flat = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        # Indices refer to the leaf, because random draws must not depend on its division into
        # pieces.
        return flat + jnp.asarray(self.start, jnp.uint32)

    def inside(self, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Computes a mask of the entries that belong to the leaf.

        Args:
          shape: The shape of the piece, without tasks.

        Returns:
          A mask of this shape, False at padding; None without padding.
        """
        if self.size is None:
            return None
        flat = lax.iota(jnp.uint32, math.prod(shape))
        return (flat < jnp.asarray(self.size, jnp.uint32)).reshape(shape)


@runtime_checkable
class Visit(Protocol):
    """A traversal of all pieces of a tensor or a tree that computes a statistic.

    Summaries are kernels `(piece, delta, weight) -> part`. Their task vectors have gone through all
    earlier steps. Values kept by pieces ("own") have one entry for each piece, in a structure
    private to the visit.

    Attributes:
      tasks: The number of models.
    """

    tasks: int

    def fold(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> Any:
        """Adds up the contributions of all pieces."""
        ...

    def keep(self, summary: Kernel, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """Adds up the contributions of all pieces, and keeps a value for each piece."""
        ...

    def run(self, function: Kernel, *args: Any) -> Any:
        """Calls a kernel on results, compiled if this is worthwhile."""
        ...


@runtime_checkable
class Leaves(Visit, Protocol):
    """A visit of whole leaves in a traced program.

    Attributes:
      leaves: The number of leaves that `Piece.place` counts.
      largest: The number of entries of the largest visited leaf.
    """

    leaves: int
    largest: int

    def each(self, function: Kernel) -> Any:
        """Computes `function(piece)` for each piece, from its position only."""
        ...


@runtime_checkable
class Pieces(Visit, Protocol):
    """A visit of pieces, in which bins are cheap and passes are expensive.

    Attributes:
      bits: The number of bits of a key that one pass should find (see `ranking`).
    """

    bits: int

    def sample(self, summary: Kernel) -> tuple[np.ndarray, float] | None:
        """Computes `[task, ...]` for a few pieces, and its share of all entries, for a guess.

        None if a pass over all pieces is as cheap as a pass over a few.
        """
        ...

    def before(self, own: Any) -> Any:
        """Adds up, for each piece, the counts kept by the pieces before it."""
        ...

    def repeat(self, times: int, body: Callable[[Any, T], T], state: T) -> T:
        """Applies a function to a state repeatedly."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Statistic:
    """A summary of the other entries of a tensor or a tree that a kernel requires.

    `Fold` is a sum over entries. `ranking.Order` finds entries of given ranks.

    Attributes:
      sized: Kernel `(*arrays, size)` for values that depend only on the number of entries; None by
        default.
    """

    sized: Kernel | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return _described(self)

    def prepare(self, size: int) -> Any:
        """Computes the values that depend only on the number of entries.

        Args:
          size: The number of entries of the tensor or the tree.

        Returns:
          The result of `sized`, or an empty tuple.
        """
        return () if self.sized is None else self.sized(size)

    def compiled(self) -> "Statistic":
        """Drops the parts that only `prepare` needs.

        Returns:
          The statistic that compiled code is specialised for.
        """
        return replace(self, sized=None)

    def find(
        self, visit: Visit, found: tuple[Any, ...], prepared: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Finds the statistic.

        Args:
          visit: The traversal of all pieces.
          found: The results of earlier statistics of the step.
          prepared: The result of `prepare`.

        Returns:
          The result, and the values kept by pieces: at most one further argument for the kernel.
        """
        raise NotImplementedError

    def passes(self, bits: int) -> int:
        """Counts the visits of all pieces by `find`.

        Args:
          bits: The number of bits of a key that one visit finds.

        Returns:
          The number of visits.
        """
        return 1

    def kept_bytes(self) -> float:
        """Estimates the memory of values that pieces keep until the tensor is merged.

        Returns:
          Bytes for each entry and model.
        """
        return 0

    def visiting_bytes(self, size: int) -> int:
        """Estimates the extra memory for a visit of a piece.

        Args:
          size: The number of entries of the tensor.

        Returns:
          Bytes for each entry of a piece and model.
        """
        return 0


class PerLeaf:
    """Arrays for leaves by path, for `Step.local`.

    Args:
      name: The name of the arrays in messages.
      arrays: A pytree of arrays for each path.
      complete: Whether every leaf must have arrays.
    """

    def __init__(self, name: str, arrays: Mapping[str, Any], complete: bool = False):
        self.name, self.arrays, self.complete = name, arrays, complete

    def __call__(self, path: str) -> Any:
        """Returns the arrays of the leaf at `path`, or None."""
        return self.arrays.get(path)

    def check(self, paths: Sequence[str]) -> None:
        """Checks that the arrays belong to leaves of a merge.

        Args:
          paths: The paths of all leaves to be merged.

        Raises:
          ValueError: For arrays of a missing leaf, and for leaves without arrays if `complete`.
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
    """Returns the sum of the parts unchanged."""
    return total


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Fold(Statistic):
    """A statistic that is a sum over pieces.

    Attributes:
      summary: Kernel `(*found, piece, delta, weight) -> part`, the contribution of a piece.
      finish: Kernel `(prepared, total) -> result`, called once. By default the result is the total.
      add: An associative and commutative sum of two parts, entry by entry by default. Zeros must be
        its identity.
      kept: If not 0, summaries return `(part, own)`. `own` takes this number of bytes for each
        entry and model until the tensor is merged.
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
            # `keep` stores the results of all pieces until the tensor is merged, so it is used only
            # if necessary.
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
      kernel: `(*found, *own, piece, delta, weight) -> (delta, weight)`. `found` are the results of
        the statistics, and `own` the values that the piece keeps. A reducing step returns the
        update of the leaf instead.
      statistics: The statistics of other entries that the kernel requires, in the order of its
        arguments.
      needs: The part of a tensor that the kernel requires at once: single entries ("entry"), rows
        along the last axis ("row"), or the whole "tensor".
      scope: Whether statistics are taken over each "tensor" or over the whole "tree".
      where: A predicate on paths that selects the leaves for the step and its statistics. None for
        all leaves.
      local: A function from a path to a pytree of arrays for the leaf, or None. The kernel and the
        summaries get them as `Piece.local`.
      propagates_nonfinite: Whether NaN or infinity in any input of a tensor always makes some entry
        of its result NaN or infinite, for any weights. The inputs of a merge with only such steps
        need not be checked.
      ranked: Kernel `(piece, delta, weight) -> [task, ...]` for sizes. The summaries (or the
        kernel, without summaries) need the ranks of these sizes in their rows (`row_ranks`). If
        NumPy can find the ranks first, they are `Piece.local`. If that is None, the ranks are
        unknown.
      workspace: The number of values that the kernel keeps in memory at once, beyond four for each
        entry and model; see `Workspace`.
      call: The call that made the step for `repr`, such as "trim(density=0.2)"; see
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
        """Whether the step has a statistic of the whole tree, for which all leaves must wait."""
        return self.scope == "tree" and bool(self.statistics)

    def applies(self, path: str) -> bool:
        """Checks whether the step applies to a leaf.

        Args:
          path: The path of the leaf.

        Returns:
          True if the step applies.
        """
        return self.where is None or self.where(path)

    def compiled(self) -> "Step":
        """Returns the step without the parts that depend only on paths and sizes.

        Returns:
          The step that compiled code is specialised for.
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
        """Computes the values that the statistics derive from the number of entries.

        Args:
          size: The number of entries of the tensor or the tree.

        Returns:
          One value for each statistic (`Statistic.prepare`).
        """
        return tuple(statistic.prepare(size) for statistic in self.statistics)

    def passes(self, bits: int) -> int:
        """Counts the visits of all entries by the statistics.

        Args:
          bits: The number of bits of a key that one pass finds.

        Returns:
          The number of passes.
        """
        return sum(statistic.passes(bits) for statistic in self.statistics)


def resolve(step: Step, visit: Visit, prepared: tuple[Any, ...]) -> tuple[Kernel, tuple[Any, ...]]:
    """Finds the statistics of a step.

    Args:
      step: The step.
      visit: The traversal of all pieces.
      prepared: The result of `step.prepare`.

    Returns:
      The kernel of the step with the results as its first arguments, and the values kept by pieces:
      one further argument for each entry of the tuple.
    """
    values, own = [], []
    for statistic, setup in zip(step.statistics, prepared, strict=True):
        # A statistic may use the results of earlier statistics.
        value, of_pieces = statistic.find(visit, tuple(values), setup)
        values.append(value)
        own += of_pieces
    return step.kernel.bind(*values), tuple(own)
