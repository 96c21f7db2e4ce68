"""A merge is votes, rules, and one count.

Each model votes for a change of the base at every entry of every leaf, with a weight that says
how much it counts there. A rule edits votes, a count sums them up, and `apply` adds the outcome
to the base. Values (finiteness, equality of integer leaves) are checked wherever arrays are
concrete and taken on trust while they are traced; structure, shapes and dtypes always are checked.
"""

import fnmatch
import functools
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree, UInt

from sail_jax.checks import concrete
from sail_jax.trees import leaf_paths

__all__ = [
    "Chain",
    "Count",
    "Each",
    "Fold",
    "Grain",
    "Kernel",
    "Leafwise",
    "Masked",
    "Piece",
    "Place",
    "Rule",
    "TaskVectors",
    "Weights",
    "apply",
    "by_task",
    "chain",
    "check_scalar",
    "everybody",
    "masked",
    "origin",
    "sums",
    "tally",
    "task_vectors",
    "task_weights",
    "whole",
]


class TaskVectors(NamedTuple):
    """The votes of M models on every leaf; entries with weight 0 abstain.

    delta: what each model proposes, theta_k - base, [task, ...], float32 (float64 if a model is).
    weight: how much it counts there, broadcastable to delta; [task, 1, ...] to begin with.
    Leaves that are not floating are None in both trees, so that no rule sees them.
    """

    delta: PyTree
    weight: PyTree


Rule = Callable[[TaskVectors], TaskVectors]
Count = Callable[[TaskVectors], PyTree]  # the only place where the task axis disappears
Weights = Float[ArrayLike, "task"] | Sequence[float] | None
Grain = Literal["entry", "row", "leaf"]
Piece = tuple[str, int]  # a path, and the index of the first entry


class Place(NamedTuple):
    """Where the entries lie that a kernel sees: a whole leaf, or a run of its rows or entries.

    name: crc32 of the leaf's path. start: row-major index of the first entry in its leaf.
    size: how many of the entries belong to the leaf; what follows is padding, of zero deltas.
    """

    name: ArrayLike
    start: ArrayLike
    size: ArrayLike

    def index(self, shape: Sequence[int]) -> UInt[Array, "..."]:
        """The row-major indices in their leaf of entries of this shape."""
        flat = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return flat + jnp.asarray(self.start, jnp.uint32)

    def inside(self, shape: Sequence[int]) -> Bool[Array, "..."] | None:
        """Which entries are no padding; None for all, where that is known beforehand."""
        n = math.prod(shape)
        if isinstance(self.size, int) and self.size == n:
            return None
        return (lax.iota(jnp.uint32, n) < jnp.asarray(self.size, jnp.uint32)).reshape(shape)


def whole(path: str, delta: Array) -> Place:
    """All of a leaf."""
    return Place(np.uint32(zlib.crc32(path.encode())), np.uint32(0), math.prod(delta.shape[1:]))


Kernel = Callable[..., Any]


def _entrywise(a: Any, b: Any) -> Any:
    return jax.tree.map(operator.add, a, b)


def _votes(vectors: TaskVectors) -> list[tuple[str, Array, Array]]:
    delta, treedef = jax.tree.flatten(vectors.delta)
    weight = treedef.flatten_up_to(vectors.weight)
    return list(zip(leaf_paths(vectors.delta), delta, weight, strict=True))


@dataclass(frozen=True)
class Leafwise:
    """A rule or a count that needs one leaf at a time, or less.

    kernel: `(place, delta, weight) -> (delta, weight)` in a rule, `-> update` in a count. A
        `jax.tree_util.Partial` of a function that lives as long as the process, so that it is
        compiled once whatever its arrays hold.
    local: further first arguments for it, piece by piece.
    grain: what it needs to see at once: single entries, rows (all entries along the last axis), or
        the leaf. Leaves may be cut into pieces of that grain.
    """

    kernel: Kernel
    local: Mapping[Piece, tuple] | None = None
    grain: Grain = "entry"

    def at(self, piece: Piece) -> Kernel:
        """The kernel with what is local to a piece."""
        if self.local is None:
            return self.kernel
        function, args = self.kernel, ()
        if isinstance(function, Partial):
            function, args = function.func, function.args
        return Partial(function, *args, *self.local[piece])

    def __call__(self, vectors: TaskVectors) -> Any:
        treedef = jax.tree.structure(vectors.delta)
        new = [self.at((p, 0))(whole(p, d), d, w) for p, d, w in _votes(vectors)]
        if not new or isinstance(new[0], tuple):
            return TaskVectors(*(treedef.unflatten(part[i] for part in new) for i in range(2)))
        return treedef.unflatten(new)


@dataclass(frozen=True)
class Fold:
    """A rule or a count that needs a statistic of all leaves: summarise, add up, go on as `then`.

    summary: a kernel, `(place, delta, weight) ->` what a piece contributes, a pytree.
    then: `(sum, size) -> rule or count`, a `Leafwise` at last; size is how many entries a model
        has in all. Runs once, between two visits to the leaves.
    add: an associative and commutative sum, entrywise by default, so that pieces may be visited in
        any order, on any device, one at a time. None keeps them apart: `then` gets them by `Piece`.
    visits: how often all leaves are visited before what it becomes is a `Leafwise`.
    keeps: bytes for every vote that what it finds takes until then; 0 if that is a few numbers.
    A tree without leaves is left alone.
    """

    summary: Kernel
    then: Callable[[Any, int], Any]
    add: Callable[[Any, Any], Any] | None = _entrywise
    grain: Grain = "entry"
    visits: int = 1
    keeps: float = 0

    def __call__(self, vectors: TaskVectors) -> Any:
        votes = _votes(vectors)
        if not votes:
            return vectors
        parts = {(p, 0): self.summary(whole(p, d), d, w) for p, d, w in votes}
        size = sum(math.prod(d.shape[1:]) for _, d, _ in votes)
        total = parts if self.add is None else functools.reduce(self.add, parts.values())
        return self.then(total, size)(vectors)


@dataclass(frozen=True)
class Each:
    """A rule or a count applied to every leaf as if it were alone: statistics of one tensor."""

    rule: Callable[[TaskVectors], Any]

    def __call__(self, vectors: TaskVectors) -> Any:
        treedef = jax.tree.structure(vectors.delta)
        new = [self._alone(*vote) for vote in _votes(vectors)]
        if not new or isinstance(new[0], TaskVectors):
            new = [(*n.delta.values(), *n.weight.values()) for n in new]
            return TaskVectors(*(treedef.unflatten(part[i] for part in new) for i in range(2)))
        return treedef.unflatten(part for n in new for part in n.values())

    def _alone(self, path: str, delta: Array, weight: Array) -> Any:
        try:
            return self.rule(TaskVectors({path: delta}, {path: weight}))
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise ValueError(f"leaf {path!r}: {error}") from error


@dataclass(frozen=True)
class Chain:
    """Rules applied from left to right; the last may be a count."""

    rules: tuple[Callable[[Any], Any], ...]

    def __call__(self, vectors: TaskVectors) -> Any:
        return functools.reduce(lambda votes, rule: rule(votes), self.rules, vectors)


@dataclass(frozen=True)
class Masked:
    """A rule confined to the leaves whose path is chosen, which are all it sees."""

    rule: Rule
    chosen: Callable[[str], bool]

    def __call__(self, vectors: TaskVectors) -> TaskVectors:
        paths = leaf_paths(vectors.delta)
        picks = [self.chosen(path) for path in paths]
        if not any(picks):
            raise ValueError(f"masked: the predicate chooses none of the leaves {_some(paths)}")

        def select(tree: PyTree) -> PyTree:
            leaves, treedef = jax.tree.flatten(tree)
            pairs = zip(leaves, picks, strict=True)
            return treedef.unflatten(leaf if pick else None for leaf, pick in pairs)

        edited = self.rule(TaskVectors(*map(select, vectors)))
        return jax.tree.map(
            lambda new, old: old if new is None else new, edited, vectors, is_leaf=_is_none
        )


def chain(*rules: Callable[[Any], Any]) -> Rule:
    """The rule that applies `rules` from left to right; `chain()` changes nothing."""
    return Chain(rules)


everybody = chain()
"""The rule by which all votes stand."""


def masked(rule: Rule, predicate: str | Callable[[str], bool]) -> Rule:
    """`rule` applied to the leaves whose path satisfies `predicate`; the others keep their votes.

    A string is a glob pattern, matched with case; `*` crosses "/". A tree-scope rule takes its
    statistic over the chosen leaves. Choosing no leaf at all is a ValueError on application.
    """
    if isinstance(predicate, str):
        return Masked(rule, functools.partial(_glob, predicate))
    return Masked(rule, predicate)


def _glob(pattern: str, path: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern)


def task_vectors(
    models: Sequence[PyTree],
    base: PyTree | None,
    weights: Weights = None,
    normalize: bool = False,
) -> TaskVectors:
    """The votes theta_k - base, stacked on a leading task axis in float32 (float64 where given).

    models: pytrees with the leaf paths and shapes of `base` (containers may differ, as may
    floating dtypes). Integer and bool leaves take no part and must equal the base's.
    weights, normalize: as in `task_weights`.

    Raises ValueError for no models, other leaves, shapes or weights than expected, non-finite
    values and unequal integer leaves; TypeError for dtypes that cannot be merged and for a
    missing base. Messages name the model and the leaf.
    """
    if isinstance(models, str) or not isinstance(models, Sequence):
        raise TypeError(f"models: expected a sequence of pytrees, got {type(models).__name__}")
    if not models:
        raise ValueError("models: expected at least one, got none")
    if base is None:
        raise TypeError("base: expected the pytree that the models were tuned from, got None")
    paths, treedef = leaf_paths(base), jax.tree.structure(base)
    named = {**{f"model {k}": model for k, model in enumerate(models)}, "base": base}
    columns = {name: _column(name, tree, paths) for name, tree in named.items()}
    for name, column in columns.items():
        _check_like(name, column, columns["base"], paths)
    w = task_weights(weights, len(models), normalize)

    def vote(*leaves: Array) -> tuple[Array | None, Array | None]:
        if not _floating(leaves[-1]):
            return None, None
        dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in leaves) else jnp.float32
        *tuned, start = (x.astype(dtype) for x in leaves)
        return jnp.stack(tuned) - start, w.astype(dtype).reshape(-1, *(1,) * start.ndim)

    votes = [vote(*leaves) for leaves in zip(*columns.values(), strict=True)]
    return TaskVectors(*(treedef.unflatten(pair[i] for pair in votes) for i in range(2)))


def apply(base: PyTree, update: PyTree, scale: Float[ArrayLike, ""] = 1.0) -> PyTree:
    """base + scale * update, computed in the update's dtype and cast once to the base's.

    Leaves without an update (None) are the base's. ValueError unless `scale` is a finite scalar,
    and for values that do not fit a 16-bit float, naming the leaf.
    """
    check_scalar("scale", scale, np.isfinite, "a finite number")

    def step(change: Array | None, leaf: Any) -> Any:
        if change is None:
            return leaf if leaf is None else jnp.asarray(leaf)
        leaf = jnp.asarray(leaf)
        return (leaf.astype(change.dtype) + scale * change).astype(leaf.dtype)

    merged = jax.tree.map(step, update, base, is_leaf=_is_none)
    narrow = [
        (path, leaf)
        for path, leaf in zip(leaf_paths(merged), jax.tree.leaves(merged), strict=True)
        if _floating(leaf) and leaf.dtype.itemsize == 2
    ]
    finite = concrete(_finite([leaf for _, leaf in narrow])) if narrow else None
    if finite is not None and not finite.all():
        path, leaf = narrow[int(np.argmin(finite))]
        largest = float(jnp.finfo(leaf.dtype).max)
        raise ValueError(
            f"leaf {path!r}: the merged values do not fit {leaf.dtype}, whose largest is "
            f"{largest:.4g}; give the base, or the models, in a wider dtype"
        )
    return merged


def origin(tree: PyTree) -> PyTree:
    """Zero in every floating leaf of `tree`, the other leaves as they are."""

    def zero(leaf: Any) -> Any:
        return jnp.zeros_like(leaf) if _floating(leaf) else leaf

    return jax.tree.map(zero, tree)


def task_weights(weights: Weights, tasks: int, normalize: bool = False) -> Float[Array, "task"]:
    """One finite weight per model (1 by default), divided by their sum under `normalize`.

    ValueError for another number of weights, values that are not finite, and under `normalize`
    for a sum within rounding of 0.
    """
    try:
        known = concrete(np.ones(tasks) if weights is None else weights)
        if known is not None and known.dtype.kind not in "fiub":
            raise TypeError(known.dtype)
        # what is known is computed with here, in float64
        w = jnp.asarray(weights, jnp.result_type(float)) if known is None else known.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"weights: expected {tasks} numbers, got {weights!r}") from error
    if w.shape != (tasks,):
        raise ValueError(f"weights: expected one per model, shape ({tasks},), got shape {w.shape}")
    if known is not None and not np.isfinite(w).all():
        raise ValueError(f"weights: expected finite values, got {w.tolist()}")
    if normalize and known is not None:
        rounding = 10 * jnp.finfo(jnp.result_type(float)).eps
        if abs(w.sum()) <= rounding * abs(w).sum():
            raise ValueError(f"weights: {w.tolist()} sum to 0 and cannot be normalised")
    return jnp.asarray(w / w.sum() if normalize else w, jnp.result_type(float))


def by_task(f: Callable[..., Array], *arrays: Array) -> Array:
    """f of the entries of one task after another, stacked again; arrays of one task are for all.

    XLA computes what is written so in one pass. An expression of whole stacks it computes anew, or
    writes to memory, for every task that is read of it later.
    """
    tasks = max(map(len, arrays))
    return jnp.stack([f(*(x[k if len(x) > 1 else 0] for x in arrays)) for k in range(tasks)])


FOLDED = 4  # rows that a reduction of several arrays adds up in registers; more are far slower


def sums(*arrays: Float[Array, "..."]) -> tuple[Float[Array, ""], ...]:
    """The sum of each of some arrays of one shape: of vectors in one pass over what they are
    computed from, several times faster on CPUs than one by one. As accurate as XLA's sums, which
    are trees: an error of a few eps times the sum of the magnitudes."""
    one = arrays[0]
    spread = any(any(jax.typeof(x).sharding.spec) for x in arrays)
    if one.ndim == 1 and one.size and one.size % FOLDED == 0 and not spread:
        return _sums(arrays)
    return tuple(x.sum() for x in arrays)


@jax.custom_jvp
def _sums(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    rows = tuple(x.reshape(FOLDED, -1) for x in arrays)
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return tuple(part.sum() for part in lax.reduce(rows, zeros, add, (0,)))


@_sums.defjvp
def _sums_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return _sums(*primals), tuple(t.sum() for t in tangents[0])


def tally(votes: Float[Array, "task ..."]) -> Float[Array, "..."]:
    """The sum over models, one by one: XLA reduces a short leading axis far slower on CPUs."""
    return functools.reduce(jnp.add, [votes[k] for k in range(votes.shape[0])])


def check_scalar(name: str, x: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """ValueError unless `x` is one real number and, when its value is known, `holds` of it."""
    value = concrete(x)
    fits = np.shape(x) == () and (value is None or (_real(value.dtype) and bool(holds(value))))
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {x!r}")


def _real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool))


def _is_none(x: Any) -> bool:
    return x is None


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype, jnp.floating)


def _some(paths: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(map(repr, paths[:limit])) + more


def _column(name: str, tree: PyTree, paths: Sequence[str]) -> list[Array]:
    """The leaves of `tree` as arrays in the order of `paths`, found by path."""
    leaves = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    missing = [path for path in paths if path not in leaves]
    extra = list(leaves.keys() - set(paths))
    if missing or extra:
        faults = [("missing", missing), ("unexpected", sorted(extra))]
        listed = "; ".join(f"{fault} {_some(found)}" for fault, found in faults if found)
        raise ValueError(f"{name} has other leaves than expected: {listed}")
    return [_array(f"{name}, leaf {path!r}", leaves[path]) for path in paths]


def _array(where: str, leaf: Any) -> Array:
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}") from error
    if not _real(array.dtype):
        raise TypeError(f"{where}: expected real numbers, integers or bools, got {array.dtype}")
    return array


def _check_like(
    name: str, column: Sequence[Array], base: Sequence[Array], paths: Sequence[str]
) -> None:
    for path, leaf, like in zip(paths, column, base, strict=True):
        where = f"{name}, leaf {path!r}"
        if leaf.shape != like.shape:
            raise ValueError(f"{where}: expected shape {like.shape}, got {leaf.shape}")
        if _floating(leaf) != _floating(like):
            raise TypeError(f"{where}: expected dtype {like.dtype}, got {leaf.dtype}")
        if not _floating(leaf):
            value, expected = concrete(leaf), concrete(like)
            if value is not None and expected is not None and not np.array_equal(value, expected):
                raise ValueError(
                    f"{where}: {leaf.dtype} values differ from the base's; "
                    "leaves that are not floating are copied, so they have to agree"
                )
    floats = [i for i, leaf in enumerate(column) if _floating(leaf)]
    finite = concrete(_finite([column[i] for i in floats]))
    if finite is not None and not finite.all():
        path = paths[floats[int(np.argmin(finite))]]
        raise ValueError(f"{name}, leaf {path!r}: expected finite values, got NaN or infinity")


@jax.jit
def _finite(leaves: list[Array]) -> Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in leaves], bool)
