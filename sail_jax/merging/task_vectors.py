"""Task vectors: each model's change of a base, and its weight.

Models are matched to their base by the paths of leaves. Structure, shapes and dtypes are always
checked. Values (finite numbers, equal leaves that are not floating) are checked where arrays are
concrete, and not while they are traced.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from sail_jax.checks import concrete, scalar
from sail_jax.merging.evaluate import Leaf, evaluate, is_traced
from sail_jax.merging.integers import (
    Integers,
    check_integers,
    differ,
    is_complex,
    remedy,
    rule_for,
    taken,
)
from sail_jax.merging.steps import STATIC, kernel
from sail_jax.trees import factor_of, leaf_paths, path_str, some_paths, static_difference

Weights = Float[ArrayLike, "task"] | Sequence[float] | None
"""One weight for each model, or None for 1 each."""
Prefix = Mapping[str, Any]
"""Weights by the names of a pytree: each entry is `Weights` for all leaves below its path."""
Checked = Float[Array | np.ndarray, "task"]
"""Checked weights: NumPy arrays if their values are known."""
Kind = Literal["float", "number", "key", "other"]
"""The content of a leaf: floats, which are merged; other numbers; random keys; anything else."""
P = ParamSpec("P")
T = TypeVar("T")


class TaskVectors(NamedTuple):
    """The task vectors of M models, leaf by leaf.

    Both fields are pytrees with the structure of the base, and None at leaves that are not
    floating.

    Attributes:
      delta: The change theta_k - base of each model, `[task, ...]`. float32, or float64 if a model
        is float64 (see `in_float64`).
      weight: The weight of each entry, broadcastable to delta; 0 where an entry is masked. Shape
        `[task, 1, ...]` before any transform.
    """

    delta: PyTree
    weight: PyTree


@register_dataclass
@dataclass(frozen=True, eq=False)
class Proposal:
    """The arrays of one leaf in a base and in its fine-tuned models; a `leafwise.Source`.

    Attributes:
      start: The array of the base, None for zeros.
      models: One array for each model, or all of them stacked, `[task, ...]`.
      weights: Shape `[task]`; `[tensor, task]` for several leaves stacked.
      dtype: The dtype of the result.
    """

    start: Array | None
    models: Sequence[Array] | Array
    weights: Float[Array | np.ndarray, "*tensors task"]
    dtype: str = field(metadata=STATIC)

    @property
    def tasks(self) -> int:
        """The number of models."""
        return len(self.models)

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the models, then the array of the base, if given."""
        models = [self.models] if isinstance(self.models, jax.Array) else [*self.models]
        return models if self.start is None else [*models, self.start]

    @property
    def wide(self) -> bool:
        """Whether an array is float64."""
        return np.dtype(np.float64) in {x.dtype for x in self.arrays}

    def vectors(self) -> tuple[Array, Array | np.ndarray]:
        """Computes the task vectors in float32, or in float64 if an array is float64.

        Returns:
          The delta, shape `[task, ...]`, and the weight, shape `[task, 1, ...]`, in the same dtype.
        """
        dtype = jnp.float64 if self.wide else jnp.float32
        start = None if self.start is None else self.start.astype(dtype)

        def relative(x: Array) -> Array:
            # The difference is computed in the wide dtype. Models in bfloat16 lie close to their
            # base, and a difference in bfloat16 would keep few digits.
            return x.astype(dtype) if start is None else x.astype(dtype) - start

        # Pieces of files arrive stacked, pytrees as one array for each model. The latter are
        # stacked after the difference, because XLA then skips the stack where it knows which entry
        # is read.
        if isinstance(self.models, jax.Array):
            delta = relative(self.models)
        else:
            delta = jnp.stack([relative(x) for x in self.models])
        return delta, self.weights.astype(dtype).reshape(-1, *(1,) * (delta.ndim - 1))


class Matched(NamedTuple):
    """The leaves of several models and their base, matched by path.

    Attributes:
      paths: The path of each leaf, in the order in which the base flattens.
      start: The leaves of the base.
      models: The leaves of each model, in the same order.
      floating: Whether each leaf is merged; the others are copied.
      merged: The indices of the floating leaves with entries.
      treedef: The structure of the base.
      traced: Whether any leaf is traced.
    """

    paths: list[str]
    start: list[Any]
    models: list[list[Any]]
    floating: list[bool]
    merged: list[int]
    treedef: Any
    traced: bool

    def narrow(self) -> "Matched":
        """Converts NumPy's 64-bit leaves as JAX does, for traced programs.

        Returns:
          The same leaves with only JAX arrays.
        """

        def read(leaves: Sequence[Any]) -> list[Any]:
            return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]

        return self._replace(start=read(self.start), models=[*map(read, self.models)])

    def leaves(self, weights: Sequence[Checked], relative: bool) -> list[Leaf[Proposal]]:
        """Collects the arrays of the merged leaves.

        Args:
          weights: For each of these leaves, weights of shape `[task]`.
          relative: Whether task vectors are relative to the base, or to 0.

        Returns:
          Leaves for `evaluate`; their sources are `Proposal`s.
        """
        leaves = []
        for i, w in zip(self.merged, weights, strict=True):
            start, models = self.start[i], tuple([column[i] for column in self.models])
            source = Proposal(start if relative else None, models, w, str(start.dtype))
            leaves.append(Leaf(self.paths[i], start.size, source))
        return leaves

    def refuse(self, flags: Sequence[Bool[np.ndarray, "..."]]) -> None:
        """Raises an error for the first leaf that is not finite.

        The models are checked in order, then the base.

        Args:
          flags: For each merged leaf, whether all values are finite: one bool for each model, and
            one more if the base takes part.

        Raises:
          ValueError: If a flag is False. The message contains the model or the base, and the leaf.
        """
        names = [*(f"model {k}" for k in range(len(self.models))), "base"]
        for k, name in enumerate(names):
            for i, finite in zip(self.merged, flags, strict=True):
                if k < len(finite) and not finite[k]:
                    raise ValueError(
                        f"{name}, leaf {self.paths[i]!r}: expected finite values, "
                        "got NaN or infinity"
                    )


def match(models: Sequence[PyTree], base: PyTree, integers: Integers | None = None) -> Matched:
    """Matches the leaves of models to the leaves of their base, and checks that they are
    compatible.

    Args:
      models: Pytrees with the leaf paths and shapes of `base`. Containers, floating dtypes, and the
        values of integers, bools and random keys may differ. Complex numbers must not differ.
      base: The pytree that determines the structure.
      integers: The source of integers, bools and keys where they differ. By default the base, with
        a warning (without a warning for traced values).

    Returns:
      The matched leaves. Leaves of `start` that are not floating come from the source that
      `integers` chooses. NumPy's 64-bit arrays stay unchanged if the dtype is disabled in JAX,
      unless a leaf is traced. All other arrays are JAX arrays.

    Raises:
      ValueError: If `models` is empty, leaves or shapes differ from the base, complex numbers
        differ, or, under "refuse", integers differ.
      TypeError: For traced complex numbers, for anything but a sequence of models, for a missing
        base, and for dtypes that cannot be merged. Messages contain the model and the leaf.
    """
    if isinstance(models, str) or not isinstance(models, Sequence):
        raise TypeError(f"models: expected a sequence of pytrees, got {type(models).__name__}")
    if not models:
        raise ValueError("models: expected at least one, got none")
    if base is None:
        raise TypeError("base: expected the pytree that the models were fine-tuned from, got None")
    paths, treedef = leaf_paths(base), jax.tree.structure(base)
    if factor := next(filter(factor_of, paths), None):
        raise ValueError(
            f"leaf {factor!r} is a low-rank factor. The product of averages is not the average "
            "of products: fold the factors into their weights first, with "
            "sail_jax.lora.fold(params, alpha)"
        )
    traced = is_traced(models, base)
    # Without a base, the first model takes its place.
    given = "model 0" if base is models[0] else "the base"
    start, kinds = _column(given.removeprefix("the "), base, paths, treedef, traced)
    columns = []
    for k, model in enumerate(models):
        column, own = _column(f"model {k}", model, paths, treedef, traced)
        if model is not base and (differing := static_difference(base, model)):
            said = f"{given} and model {k} differ in {differing}"
            if integers == "refuse":
                raise ValueError(f"{said}; integers='first' takes that of {given}")
            warnings.warn(f"{said}; using that of {given}", stacklevel=4)
        for path, leaf, like, kind, expected in zip(paths, column, start, own, kinds, strict=True):
            fits = kind == expected and kind in ("float", "number") and leaf.shape == like.shape
            if not fits:
                _check_like(f"model {k}, leaf {path!r}", leaf, like, given)
        columns.append(column)
    for i, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
        if kind in ("number", "key"):
            start[i] = _taken(path, [start[i], *[c[i] for c in columns]], integers, given)
    floating = [kind == "float" for kind in kinds]
    merged = [i for i, x in enumerate(start) if floating[i] and x.size]
    return Matched(paths, start, columns, floating, merged, treedef, traced)


def _taken(path: str, values: Sequence[Any], integers: Integers | None, given: str) -> Any:
    """Returns the values of an unmerged leaf, with an error or a warning if they differ."""
    dtype = next((x.dtype for x in values if is_complex(x.dtype)), values[0].dtype)
    rule = rule_for(dtype, check_integers(integers))
    if is_complex(dtype) and is_traced(*values):
        raise TypeError(
            f"leaf {path!r}: expected real numbers, integers or bools, got {dtype}, which is traced"
        )
    if rule == "max" and (_kind(values[0]) == "key" or any(x.dtype.kind in "OSU" for x in values)):
        what = "random keys" if _kind(values[0]) == "key" else "text or objects"
        raise ValueError(f"integers: leaf {path!r} holds {what}, which cannot be ordered")
    if (rule == "refuse" or integers is None) and not is_traced(*values) and differ(values):
        said = f"leaf {path!r}: {dtype} values differ between models"
        if rule == "refuse":
            others = remedy(dtype, "integers='first', 'last' or 'max' chooses one")
            raise ValueError(f"{said}; {others}")
        warnings.warn(
            f"{said}; using the values of {given} (change this with integers=)", stacklevel=5
        )
    return taken(values, rule)


def in_float64(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function compute in 64 bits if an argument has NumPy's float64.

    If JAX has 64 bits disabled and a floating leaf is NumPy's float64, the whole function runs with
    64 bits enabled. Its 64-bit results are then NumPy arrays. While any argument is traced, the
    function is called unchanged, because JAX determines the precision.

    Args:
      *names: The parameters (pytrees) to search for such leaves.

    Returns:
      A decorator.

    >>> double = in_float64("tree")(lambda tree: jax.tree.map(lambda x: 2 * jnp.asarray(x), tree))
    >>> double({"a": np.array([1e300])}), double({"a": np.float32(3)})
    ({'a': array([2.e+300])}, {'a': Array(6., dtype=float32)})
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def computed(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the function's own message is better
                return function(*args, **kwargs)
            trees = [given[name] for name in names if name in given]
            wide = any(too_wide(x) and _floating(x) for x in jax.tree.leaves(trees))
            # Inside any traced program the zero is traced, even if these arguments are not.
            if not wide or is_traced(args, kwargs, jnp.zeros(())):
                return function(*args, **kwargs)
            with jax.enable_x64(True):
                result = function(*args, **kwargs)
            return jax.tree.map(_on_host, result)

        return computed

    return decorate


def _on_host(x: Any) -> Any:
    """Converts an array with known 64-bit values to NumPy."""
    ours = isinstance(x, jax.Array) and _kind(x) != "key"
    return np.asarray(x) if ours and x.dtype.itemsize == 8 and not is_traced(x) else x


@in_float64("models", "base")
def task_vectors(
    models: Sequence[PyTree],
    base: PyTree | None,
    weights: Weights = None,
    normalize: bool = False,
) -> TaskVectors:
    """Computes the task vectors of models: theta_k - base, stacked over models.

    Task vectors are the argument of a `Transform` or a `Reduction`. A `Merge` computes them itself.

    Args:
      models: Pytrees with the leaf paths and shapes of `base`; see `match`.
      base: The pytree that the models were fine-tuned from.
      weights: One finite number for each model; 1 by default.
      normalize: Whether weights are divided by their sum.

    Returns:
      Task vectors with the structure of the base, and None at leaves that are not floating. Task
      vectors from NumPy's float64 are NumPy arrays unless JAX has 64 bits enabled.

    Raises:
      ValueError: For inconsistent models or weights, and for values that are not finite.
      TypeError: For dtypes that cannot be merged, and for a missing base.

    >>> vectors = task_vectors([{"a": jnp.ones(2)}, {"a": jnp.zeros(2)}], {"a": jnp.ones(2)})
    >>> vectors.delta["a"].tolist(), vectors.weight["a"].tolist()
    ([[0.0, 0.0], [-1.0, -1.0]], [[1.0], [1.0]])
    """
    matched = match(models, base, "first").narrow()
    w = task_weights(weights, len(models), normalize)
    leaves = matched.leaves([w] * len(matched.merged), relative=True)
    vectors = dict(zip(matched.merged, evaluate((), leaves, kernel(_as_they_are)), strict=True))
    matched.refuse(known_finite(leaves))

    def pair(i: int) -> tuple[Any, Any]:
        if not matched.floating[i]:
            return None, None
        if i in vectors:
            return vectors[i]
        leaf = matched.start[i]  # an empty leaf: nothing to compute
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        ones = (1,) * leaf.ndim
        return (
            jnp.zeros((len(models), *leaf.shape), dtype),
            jnp.asarray(w, dtype).reshape(-1, *ones),
        )

    pairs = [pair(i) for i in range(len(matched.paths))]
    return TaskVectors(*(matched.treedef.unflatten(p[side] for p in pairs) for side in range(2)))


def _as_they_are(source: Proposal, value: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the task vectors of a leaf unchanged."""
    return value


def known_finite(leaves: Sequence[Leaf[Proposal]]) -> list[Bool[np.ndarray, "..."]]:
    """Checks which arrays of each leaf are finite, if their values are known.

    Args:
      leaves: The leaves (`Matched.leaves`).

    Returns:
      For each leaf one bool for each model, and one more for the base if it takes part. True for
      traced arrays.
    """
    # Known arrays are checked now, even under `jit`, and not in the program.
    with jax.ensure_compile_time_eval():
        flags = [
            [True if is_traced(x) else _finite(x) for x in leaf.source.arrays] for leaf in leaves
        ]
    return [np.array(finite) for finite in jax.device_get(flags)]


_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def written(scale: Array, source: Proposal, update: Array) -> tuple[Array, Array]:
    """Computes the result of one leaf in the dtype of the update, and casts it once.

    Args:
      scale: A scalar array.
      source: The arrays of the leaf.
      update: The output of the reduction for its task vectors, shape `[...]`.

    Returns:
      The change scale * update, and start + change in the dtype of the result.
    """
    change = scale.astype(update.dtype) * update
    # The only rounding to the dtype of the file, after the sum.
    out = change if source.start is None else source.start.astype(change.dtype) + change
    return change, out.astype(source.dtype)


def outcome(
    scale: Array, source: Proposal, update: Array, *, check: bool
) -> Array | tuple[Array, Array]:
    """Computes the result of one leaf, start + scale * update.

    Args:
      scale: A scalar array.
      source: The arrays of the leaf.
      update: The output of the reduction for its task vectors, shape `[...]`.
      check: Whether to look for NaN and infinity.

    Returns:
      The result. With `check` also bools: whether each model, the start (if given), and the result
      are finite.
    """
    _, out = written(scale, source, update)
    if not check:
        return out
    return out, jnp.stack([jnp.isfinite(x).all() for x in (*source.arrays, out)])


@in_float64("base", "update")
def apply(base: PyTree, update: PyTree, scale: Float[ArrayLike, ""] = 1.0) -> PyTree:
    """Adds an update to a base: base + scale * update.

    The sum is computed in the dtype of the update and cast once to the dtype of the base.

    Args:
      base: The pytree to change.
      update: A pytree of the same structure; None keeps the leaf of the base.
      scale: One finite number. It may be traced.

    Returns:
      A pytree with the structure and dtypes of `base`. NumPy's float64 leaves stay NumPy arrays
      unless JAX has 64 bits enabled.

    Raises:
      ValueError: If `scale` is not one finite number, and for values that overflow the dtype of
        their leaf. The message contains the leaf.

    >>> apply({"a": jnp.array([1.0, 2.0]), "n": 3}, {"a": jnp.array([2.0, 0.0]), "n": None}, 0.5)
    {'a': Array([2., 2.], dtype=float32), 'n': 3}
    """
    scalar("scale", scale, np.isfinite, "a finite number")

    def step(change: Array | None, leaf: Any) -> Any:
        if change is None:
            return leaf
        leaf, change = jnp.asarray(leaf), jnp.asarray(change)
        # As in `written`, the sum is computed in the wide dtype and cast once.
        return (leaf.astype(change.dtype) + scale * change).astype(leaf.dtype)

    merged = jax.tree.map(step, update, base, is_leaf=_is_none)
    for path, leaf in zip(leaf_paths(merged), jax.tree.leaves(merged), strict=True):
        if _floating(leaf) and not is_traced(leaf) and not _finite(leaf):
            raise ValueError(overflow(path, leaf.dtype))
    return merged


def overflow(path: str, dtype: DTypeLike) -> str:
    """Makes the message about a leaf with a result that is not finite.

    Args:
      path: The path of the leaf.
      dtype: The dtype of the result, a float.

    Returns:
      The message.
    """
    return (
        f"leaf {path!r}: the merged values do not fit {dtype}, whose largest is "
        f"{float(jnp.finfo(dtype).max):.4g}; give the base, or the models, in a wider dtype, or "
        "scale them down"
    )


def origin(tree: PyTree) -> PyTree:
    """Replaces every floating leaf of a tree by zeros; other leaves stay unchanged.

    Args:
      tree: A pytree of anything.

    Returns:
      A pytree with the same structure, shapes and dtypes.
    """

    def zero(leaf: Any) -> Any:
        if not _floating(leaf):
            return leaf
        return np.zeros_like(leaf) if too_wide(leaf) else jnp.zeros_like(leaf)

    return jax.tree.map(zero, tree)


def task_weights(weights: Weights, tasks: int, normalize: bool = False) -> Checked:
    """Checks weights and fills in their default.

    Args:
      weights: One number for each model; 1 by default.
      tasks: The number of models.
      normalize: Whether the weights are divided by their sum.

    Returns:
      Shape `[task]`, in the default float dtype; a NumPy array if the values are known.

    Raises:
      ValueError: Unless the weights are `tasks` finite numbers, and under `normalize` if their sum
        is 0 up to rounding. Values of traced weights are not checked.
    """
    try:
        values = concrete(np.ones(tasks) if weights is None else weights)
        if values is not None and values.dtype.kind not in "fiub":
            raise TypeError(values.dtype)
        # Known weights are computed here in float64.
        w: Any = jnp.asarray(weights, jnp.result_type(float)) if values is None else values
    except (TypeError, ValueError) as error:
        raise ValueError(f"weights: expected {tasks} numbers, got {weights!r}") from error
    if w.shape != (tasks,):
        raise ValueError(f"weights: expected one per model, shape ({tasks},), got shape {w.shape}")
    if values is None:
        return w / w.sum() if normalize else w
    w = w.astype(float)
    if not np.isfinite(w).all():
        raise ValueError(f"weights: expected finite values, got {w.tolist()}")
    if normalize:
        rounding = 10 * jnp.finfo(jnp.result_type(float)).eps
        # If the sum is only rounding error of its terms, division would multiply the weights by 1 /
        # eps.
        if abs(w.sum()) <= rounding * abs(w).sum():
            raise ValueError(f"weights: {w.tolist()} sum to 0 and cannot be normalised")
        w = w / w.sum()
    return w.astype(jnp.result_type(float))


def by_leaf(prefix: Mapping[str, Any], paths: Sequence[str], of: Callable[[Any], T]) -> list[T]:
    """Finds, for each leaf, its entry in a prefix of the tree.

    Args:
      prefix: Entries by name, in mappings that can be nested.
      paths: The paths of the leaves.
      of: A function that converts an entry; it is called once for each entry.

    Returns:
      For each leaf, the converted entry at its path or at a node above it.

    Raises:
      ValueError: If there is a leaf without an entry, or an entry without a leaf. The message
        contains the path.

    >>> by_leaf({"encoder": {"w": 1}, "head": 2}, ["encoder/w", "head/bias", "head/kernel"], str)
    ['1', '2', '2']
    """
    entries = {
        path_str(path): of(entry)
        for path, entry in jax.tree.leaves_with_path(
            dict(prefix), is_leaf=lambda x: not isinstance(x, Mapping)
        )
    }
    at = [next((above for above in _upwards(path) if above in entries), None) for path in paths]
    if None in at:
        raise ValueError(f"weights: no entry for the leaf {paths[at.index(None)]!r}")
    if unused := sorted(entries.keys() - {*at}):
        raise ValueError(f"weights: no merged leaf lies at {some_paths(unused)}")
    return [entries[above] for above in at if above is not None]


def _upwards(path: str) -> Iterator[str]:
    """Yields a path and the paths of its parent nodes, from the leaf up."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _is_none(x: Any) -> bool:
    return x is None


def _floating(x: Any) -> bool:
    """Checks whether a leaf is a float or an array of floats."""
    arrays = jax.Array | np.ndarray | np.generic
    return isinstance(x, float) or (isinstance(x, arrays) and _kind_of(x.dtype) == "float")


def _column(
    name: str, tree: PyTree, paths: Sequence[str], treedef: Any, traced: bool
) -> tuple[list[Any], list[Kind]]:
    """Returns the leaves of `tree` in the order of `paths`, and the kind of each.

    Raises a ValueError if it has other leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    if structure != treedef:  # other containers may have the same paths
        by_path = dict(zip(leaf_paths(tree), leaves, strict=True))
        missing = [path for path in paths if path not in by_path]
        extra = list(by_path.keys() - set(paths))
        if missing or extra:
            faults = [("missing", missing), ("unexpected", sorted(extra))]
            listed = "; ".join(f"{fault} {some_paths(odd)}" for fault, odd in faults if odd)
            raise ValueError(f"{name} has other leaves than expected: {listed}")
        leaves = [by_path[path] for path in paths]
    kinds: list[Kind] = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        leaves[i], kind = _leaf(f"{name}, leaf {path!r}", leaf, traced)
        kinds.append(kind)
    return leaves, kinds


def too_wide(x: Any) -> bool:
    """Checks whether a leaf is a NumPy array with a dtype that JAX would narrow.

    Args:
      x: Anything.

    Returns:
      True for NumPy's float64, complex128 and 64-bit integers, unless JAX has 64 bits enabled.
    """
    return (
        isinstance(x, np.ndarray | np.generic)
        and x.dtype.kind in "fciu"
        and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype
    )


def as_given(x: Any) -> Any:
    """Converts numbers to a JAX array, or to a NumPy array if JAX would narrow them.

    Args:
      x: Any argument of `jnp.asarray`.

    Returns:
      The array.
    """
    return np.asarray(x) if too_wide(x) else jnp.asarray(x)


def narrowed(x: Any) -> Any:
    """Rounds floats to float32 where JAX would; values that overflow become infinite.

    Args:
      x: Anything.

    Returns:
      A float32 NumPy array for NumPy's float64, unless JAX has 64 bits enabled; else `x`.
    """
    if not (too_wide(x) and _floating(x)):
        return x
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32)


def _leaf(where: str, leaf: Any, traced: bool) -> tuple[Any, Kind]:
    """Converts a number to an array; returns the leaf and its kind.

    All other leaves stay unchanged.
    """
    if isinstance(leaf, jax.Array):
        array: Any = leaf
    elif not traced and too_wide(leaf):
        array = np.asarray(leaf)
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        try:
            array = jnp.asarray(leaf)
        except TypeError:  # strings, objects
            return leaf, _kind(leaf)
    else:
        return leaf, "other"
    kind = _kind_of(array.dtype)
    if kind == "other":
        raise TypeError(f"{where}: expected real numbers, integers or bools, got {array.dtype}")
    return array, kind


@functools.cache
def _kind_of(dtype: Any) -> Kind:
    """Returns the kind of arrays of a dtype; "other" unless they contain numbers or random keys."""
    numbers = (jnp.integer, jnp.bool, jnp.complexfloating)
    if jnp.issubdtype(dtype, jnp.floating):
        return "float"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    return "number" if any(jnp.issubdtype(dtype, kind) for kind in numbers) else "other"


def _kind(x: Any) -> Kind:
    """Returns the kind of a leaf of a matched tree. Arrays of text count as unmerged numbers."""
    if not isinstance(x, jax.Array | np.ndarray):
        return "other"
    kind = _kind_of(x.dtype)
    return "number" if kind == "other" else kind


def _check_like(where: str, leaf: Any, like: Any, given: str) -> None:
    """Checks one leaf of a model against the base's leaf; messages call the base `given`."""
    kind, expected = _kind(leaf), _kind(like)
    if kind == expected == "key" and (leaf.dtype, leaf.shape) == (like.dtype, like.shape):
        return
    if expected in ("key", "other"):
        if not _same(leaf, like):
            raise ValueError(
                f"{where}: expected the value of {given}, because only numbers can be merged: "
                f"{_shown(like)}; got {_shown(leaf)}. Merge the parameters alone: of a Flax module "
                "nnx.state(module, nnx.Param), of an Equinox module eqx.filter(module, "
                "eqx.is_inexact_array)"
            )
        return
    if kind in ("key", "other"):
        raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}")
    if leaf.shape != like.shape:
        raise ValueError(f"{where}: expected shape {like.shape}, got {leaf.shape}")
    if kind != expected:
        raise TypeError(f"{where}: expected dtype {like.dtype}, got {leaf.dtype}")


def _same(a: Any, b: Any) -> bool:
    """Checks whether two leaves are equal that are not numbers, such as functions or strings."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):
        return False


def _shown(x: Any) -> str:
    """Shortens the `repr` of a value to one line of a message."""
    return " ".join(repr(x).split())[:60]
