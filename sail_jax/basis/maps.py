"""Maps that re-express one feature space, in dense and in index form.

A `SpaceMap` sends an activation x of a space to `write @ x`, and a reader of x to a reader of the
result: `W -> W @ read`. Linear readers give the same result if and only if `read @ write == I`. A
network gives the same result if its nonlinearity also commutes with `write`. A `Family` records
this property.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from sail_jax.basis.families import Family
from sail_jax.checks import as_array, concrete


@partial(jax.tree_util.register_dataclass, data_fields=("index", "scale"), meta_fields=("old",))
@dataclass(frozen=True, eq=False)
class Selection:
    """The matrix [new, old] with `scale[j]` at (j, `index[j]`), kept as a gather.

    Attributes:
      index: The old unit for each new unit: integers [new] in range(old), after optional batch
        axes.
      scale: The factor of each new unit, shaped like `index`; None stands for ones, without a
        multiplication.
      old: The number of old units.
    """

    # JAX inserts its own placeholders for the arrays, which a narrower type would reject.
    index: Any
    scale: Any
    old: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: (new, old), after the index's batch axes."""
        return (*self.index.shape, self.old)

    @jax.jit
    def dense(self) -> Float[Array, "*batch new old"]:
        """Builds the matrix itself.

        Returns:
          The matrix [new, old], in the dtype of `scale`, or the default float dtype without one.
        """
        rows = jax.nn.one_hot(self.index, self.old)
        return rows if self.scale is None else rows.astype(self.scale.dtype) * self.scale[..., None]


Operator = Array | Selection
"""A matrix [new, old], as an array or as a `Selection`."""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class SpaceMap:
    """A re-expression of one space of `old` units in `new` units.

    It has one of two forms. The dense form contains two arrays, `write` [new, old] and `read` [old,
    new]. The index form contains two `Selection`s with the same index, each a gather onto the new
    units: new unit j is `write.scale[j]` times old unit `index[j]`, and is read with weight
    `read.scale[j]`. Here `read` stands for the transpose of its selection. `dense()` converts the
    index form to the dense form, and so defines it.

    A map is a pytree with differentiable arrays; leading batch axes are for use under vmap. The
    constructor raises a ValueError if `write` and `read` have different forms, shapes that are not
    each other's transpose, or different indices. For complex arrays it raises a TypeError.

    Attributes:
      write: The operator on activations.
      read: The compensating operator on readers.
      family: The family that the map claims to belong to; it survives jit. Arrays of unknown origin
        are LINEAR, which claims nothing (see `classify`).

    >>> m = SpaceMap(jnp.array([[1.0], [1.0]]), jnp.array([[0.5, 0.5]]))
    >>> m.old, m.new, float(defect(m))
    (1, 2, 0.0)
    """

    write: Operator
    read: Operator
    family: Family = Family.LINEAR

    def __post_init__(self) -> None:
        write, read = self.write, self.read
        if isinstance(write, Selection) != isinstance(read, Selection):
            raise ValueError("write and read must both be arrays or both be Selections")
        if isinstance(write, Selection) and isinstance(read, Selection):
            if write.index is not read.index:
                a, b = concrete(write.index), concrete(read.index)
                if a is None or b is None or not np.array_equal(a, b):
                    raise ValueError("the Selections of write and read must share one index")
            if write.old != read.old:
                raise ValueError(f"write selects from {write.old} units, read from {read.old}")
        else:
            write, read = _floating(write), _floating(read)
            transposed = read.shape[:-2] + read.shape[-2:][::-1]
            if write.ndim < 2 or write.shape != transposed:
                raise ValueError(
                    "write [new, old] and read [old, new] must have transposed shapes, "
                    f"got {write.shape} and {read.shape}"
                )
            object.__setattr__(self, "write", write)
            object.__setattr__(self, "read", read)

    @property
    def new(self) -> int:
        """The number of units after the map."""
        return self.write.shape[-2]

    @property
    def old(self) -> int:
        """The number of units before the map."""
        return self.write.shape[-1]

    @property
    def index(self) -> Int[Array | np.ndarray, "*batch new"] | None:
        """The index of the index form, [new]; None for a dense map."""
        return self.write.index if isinstance(self.write, Selection) else None

    @property
    def entries(self) -> tuple[Any, Any]:
        """The entries of `write` and of `read.T`: [new, old] if dense, else [new] (None: ones)."""
        write, read = self.write, self.read
        if isinstance(write, Selection) or isinstance(read, Selection):
            return cast(Selection, write).scale, cast(Selection, read).scale
        return write, jnp.swapaxes(read, -1, -2)

    def operator(self, entries: Array | np.ndarray | None) -> Operator:
        """Converts entries to an operator in the form of this map.

        Args:
          entries: Entries in the layout of `SpaceMap.entries`.

        Returns:
          The operator [new, old] with these entries, for `along`: a `Selection` with this map's
          index, or the entries themselves if the map is dense.
        """
        if isinstance(self.write, Selection):
            return Selection(self.write.index, entries, self.old)
        return cast(Array, entries)

    def dense(self) -> "SpaceMap":
        """Converts the map to dense form.

        Returns:
          The same map as two arrays, with the same family.
        """
        if not isinstance(self.write, Selection):
            return self
        write, read_t = (cast(Selection, self.operator(e)).dense() for e in self.entries)
        return SpaceMap(write, jnp.swapaxes(read_t, -1, -2), self.family)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Lists the arrays of the map, as JAX requires of a pytree.

        Returns:
          The arrays with their keys, and the static part: the family and, for index forms, `old`.
        """
        write, read = self.write, self.read
        key = jax.tree_util.GetAttrKey
        if isinstance(write, Selection) and isinstance(read, Selection):
            # One copy of the index keeps the two fields consistent.
            fields = {"index": write.index, "write": write.scale, "read": read.scale}
            return [(key(k), v) for k, v in fields.items()], (self.family, write.old)
        return [(key("write"), write), (key("read"), read)], (self.family, None)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "SpaceMap":
        """Builds a map from the output of `tree_flatten_with_keys`.

        Args:
          static: The family and, for index forms, `old`.
          leaves: The arrays, or JAX's placeholders for them.

        Returns:
          The map, without checks.
        """
        family, old = static
        if old is not None:
            index, write, read = leaves
            leaves = (Selection(index, write, old), Selection(index, read, old))
        # JAX may insert placeholders for leaves, so nothing is checked here.
        new = object.__new__(cls)
        for name, value in zip(("write", "read", "family"), (*leaves, family), strict=True):
            object.__setattr__(new, name, value)
        return new


def select(
    index: ArrayLike,
    old: int,
    *,
    write: ArrayLike | None = None,
    read: ArrayLike | None = None,
    family: Family = Family.LINEAR,
) -> SpaceMap:
    """Builds a map in index form: new unit j is `write[j]` times old unit `index[j]`.

    Args:
      index: Integers in range(old), of shape (new,).
      old: The number of old units.
      write: The factor of each new unit, of shape (new,); None for ones.
      read: The weight with which each new unit is read, of shape (new,); None for ones.
      family: The family that the map claims; it is not checked.

    Returns:
      The map of `old` units to `new` units.

    Raises:
      TypeError: If `index` does not contain integers, or `write` or `read` is complex.
      ValueError: If `index` is not a vector or exceeds range(old) (unless it is traced), or `write`
        or `read` has another shape.

    >>> m = select(jnp.array([0, 1, 0]), 2, read=jnp.array([0.5, 1.0, 0.5]))
    >>> m.dense().read.tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    given = {"write": write, "read": read}
    index = as_array(index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"index must contain integers, got {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"index must be a vector, got shape {index.shape}")
    values = concrete(index)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < old:
        bad = values[(values < 0) | (values >= old)][0]
        raise ValueError(f"index must lie in range({old}), got {bad}")
    scales = {name: None if s is None else _floating(s) for name, s in given.items()}
    for name, scale in scales.items():
        if scale is not None and scale.shape != index.shape:
            raise ValueError(f"{name} must have the shape {index.shape}, got {scale.shape}")
    return _indexed(index, scales["write"], scales["read"], old, family)


def identity(n: int) -> SpaceMap:
    """Builds the identity map.

    Args:
      n: The number of units.

    Returns:
      The map in index form, of family IDENTITY.

    >>> identity(2).dense().write.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return select(np.arange(n), n, family=Family.IDENTITY)


def along(operator: Operator, x: Array, axis: int) -> Array:
    """Contracts one axis of an array with an operator.

    Args:
      operator: A matrix [new, old], or a `Selection`.
      x: An array with `old` entries along the axis.
      axis: The number of the axis, counted from 0.

    Returns:
      The array with `new` entries along the axis, in the wider of the two dtypes.
    """
    if isinstance(operator, Selection):
        # The axes before it are indexed as well, by their own numbers. With a single index, XLA on
        # a CPU would put the gathered axis first and then transpose the result.
        iota = partial(jax.lax.broadcasted_iota, jnp.int32, dimension=0)
        before = (iota(shape=(n, *[1] * (axis - k))) for k, n in enumerate(x.shape[:axis]))
        at = x.at[(*before, operator.index)]
        x = at.get(mode="clip", wrap_negative_indices=False)
        if operator.scale is None:
            return x
        column = [1] * x.ndim
        column[axis] = -1
        return x * operator.scale.reshape(column)
    # By default, accelerators may multiply float32 in lower precision.
    y = jnp.tensordot(operator, x, axes=(1, axis), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(y, 0, axis)


def compose(second: SpaceMap, first: SpaceMap) -> SpaceMap:
    """Composes two maps: first `first`, then `second`.

    write = second.write @ first.write and read = first.read @ second.read.

    Args:
      second: The map that is applied last.
      first: The map that is applied first.

    Returns:
      The composition, in index form if both are. Its family is the smallest that contains both.

    Raises:
      ValueError: If the number of old units of `second` differs from `first`'s number of new units.

    >>> str(compose(identity(3), identity(3)).family)
    'identity'
    """
    if second.old != first.new:
        raise ValueError(
            f"cannot compose: first has {first.new} new units, but second takes {second.old}"
        )
    family = second.family & first.family
    # Two gathers in a row are one gather, so the composition stays in index form.
    if first.index is not None and second.index is not None:
        # New unit j selects the intermediate unit second.index[j], which first.index maps to an old
        # unit.
        take = partial(jnp.take, indices=second.index, axis=0, mode="clip")
        write, read = (
            b if a is None else _product(b, take(a))
            for a, b in zip(first.entries, second.entries, strict=True)
        )
        return _indexed(take(first.index), write, read, first.old, family)
    dense = first.dense()
    write, read = (second.operator(e) for e in second.entries)
    return SpaceMap(
        along(write, cast(Array, dense.write), 0), along(read, cast(Array, dense.read), 1), family
    )


def invert(m: SpaceMap) -> SpaceMap:
    """Swaps `write` and `read`: the inverse on the units that the map keeps.

    Args:
      m: The map from `old` to `new` units.

    Returns:
      The map from `new` to `old` units. If `m` is INVERTIBLE, the result has the form and family of
      `m`. Otherwise it is dense and LINEAR: for example, an average undoes a duplication.

    >>> invert(select(jnp.array([2, 0, 1]), 3, family=Family.PERMUTATION)).index.tolist()
    [1, 2, 0]
    """
    if Family.INVERTIBLE not in m.family:
        m = m.dense()
        return SpaceMap(m.read, m.write)
    if m.index is None:
        return SpaceMap(m.read, m.write, m.family)
    inverse = jnp.argsort(m.index)  # an invertible index form is a scaled permutation
    # The inverse scales of a scaled permutation are the scales of `read`: the two are swapped.
    read, write = (None if e is None else e[inverse] for e in m.entries)
    return _indexed(inverse, write, read, m.new, m.family)


def defect(m: SpaceMap) -> Float[Array, ""]:
    """Measures the loss of a linear reader, max |read @ write - I|.

    Args:
      m: The map, which may be traced.

    Returns:
      The largest deviation, a scalar; 0 if and only if the map is lossless for linear readers.

    >>> float(defect(identity(3))), float(defect(select(jnp.array([0]), 2)))  # drops a unit
    (0.0, 1.0)
    """
    write, read = m.entries
    if m.index is not None or write is None:
        # `read @ write` is diagonal: each new unit returns its share of its old unit.
        weight = _product(write, read)
        diagonal = jnp.zeros(m.old).at[m.index].add(1.0 if weight is None else weight)
        return jnp.max(jnp.abs(diagonal - 1), initial=0)
    dtype = jnp.promote_types(write.dtype, jnp.float32)
    read = cast(Array, m.read).astype(dtype)
    product = jnp.matmul(read, write.astype(dtype), precision=jax.lax.Precision.HIGHEST)
    return jnp.max(jnp.abs(product - jnp.eye(m.old)), initial=0)


def measure(m: SpaceMap) -> tuple[float, float] | None:
    """Measures the defect of a map, and the part of it that rounding alone can explain.

    The bound on rounding is 4 eps sqrt(new) max(|read| @ |write|): four standard deviations of a
    dot product of length `new` with independent relative errors of eps. Both are computed in
    float64 on the host.

    Args:
      m: The map.

    Returns:
      The defect and the bound on rounding, or None if the map is traced.
    """
    host = _host(m)
    if host is None:
        return None
    write, read = host
    lost = np.abs(_kept(m, write, read) - _one(m)).max(initial=0)
    dtypes = [x.dtype for x in jax.tree.leaves(m) if jnp.issubdtype(x.dtype, jnp.inexact)]
    eps = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    size = _kept(m, np.abs(write), np.abs(read)).max(initial=0)
    return float(lost), float(4 * eps * m.new**0.5 * size)


def classify(m: SpaceMap) -> Family:
    """Finds the smallest family that contains a map.

    Zeros, ones and signs must be exact; products must be correct up to rounding (`measure`). Use it
    to establish the family of arrays: `SpaceMap(write, read, classify(SpaceMap(write, read)))`.

    Args:
      m: The map; its claimed family is ignored.

    Returns:
      The smallest family that contains the map.

    Raises:
      ValueError: If the map is traced.

    >>> turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])
    >>> str(classify(SpaceMap(turn, turn.T)))
    'signed permutation'
    """
    host, measured = _host(m), measure(m)
    if host is None or measured is None:
        raise ValueError("a traced map cannot be classified: give its family")
    (w, r), (lost, tolerance) = host, measured
    n, eye = m.old, _one(m)
    # For index forms the entries alone are not sufficient: the index of an identity must also count
    # from 0, as in `_one`.
    index = np.arange(n) if m.index is None else np.asarray(m.index)
    if all(map(np.array_equal, (w, r, index), (eye, eye, np.arange(n)))):
        return Family.IDENTITY
    rows = w if m.index is None else w[:, None]
    monomial = bool((np.count_nonzero(rows, axis=1) <= 1).all() and not r[~rows.any(axis=1)].any())
    # A map is isometric if write^T write is a multiple of the identity, new / old for an even
    # duplication.
    spread = np.abs(_kept(m, w, w) * n / m.new - eye).max(initial=0)
    facts = {
        Family.MONOMIAL: monomial,
        Family.NONNEGATIVE: bool((w >= 0).all()),
        Family.UNIT: monomial and bool(np.isin(w, (-1, 0, 1)).all()),
        Family.ISOMETRIC: bool(spread <= tolerance),
        # `read` of a map onto more units is only a left inverse.
        Family.INVERTIBLE: m.new == n and lost <= tolerance,
    }
    properties = Family.LINEAR
    for family, holds in facts.items():
        properties |= family if holds else Family.LINEAR
    return properties


def _host(m: SpaceMap) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the entries of a map as float64 on the host, ones for None; None if it is traced."""
    leaves = [concrete(leaf) for leaf in jax.tree.leaves(m)]
    if any(leaf is None for leaf in leaves):
        return None
    # The map is rebuilt from host arrays. `m.entries` would transpose `read` in JAX, which gives a
    # tracer under jit even if the map itself is constant.
    m = jax.tree.unflatten(jax.tree.structure(m), leaves)
    write, read = (m.write, m.read) if m.index is None else m.entries
    ones = np.ones(m.new)
    w, r = (ones if e is None else np.asarray(e).astype(np.float64) for e in (write, read))
    return w, r if m.index is not None else r.T


def _one(m: SpaceMap) -> np.ndarray:
    """Returns the identity on the old units, in the layout of `_kept`."""
    return np.eye(m.old) if m.index is None else np.ones(m.old)


def _kept(m: SpaceMap, write: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Computes `read @ write` for entries in the layout of m; for index forms, its diagonal."""
    if m.index is None:
        return read.T @ write
    return np.bincount(np.asarray(m.index), write * read, m.old)


def _indexed(
    index: Array, write: Array | None, read: Array | None, old: int, family: Family
) -> SpaceMap:
    """Makes the index form of entries without checks."""
    return SpaceMap(Selection(index, write, old), Selection(index, read, old), family)


def _floating(x: Any) -> Array:
    """Converts x to a real floating array."""
    x = as_array(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"a map must be real, got {x.dtype}")
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)


def _product(a: Array | None, b: Array | None) -> Array | None:
    """Multiplies scales; None stands for ones."""
    return b if a is None else a if b is None else a * b
