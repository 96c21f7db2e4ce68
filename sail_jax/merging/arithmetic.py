"""Arithmetic on arrays with a leading task axis, which runs over models.

The kernels of transforms and reductions use these functions. Each function computes the same as a
plain NumPy expression, in an order that XLA compiles into few passes over memory.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import auto_axes
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Num, PyTree

from sail_jax.checks import concrete
from sail_jax.merging.counting import numpy_of
from sail_jax.merging.placement import divided

PerModel = Float[ArrayLike, ""] | Float[ArrayLike, "task"] | Sequence[float]
"""One number for all models, or one number for each model."""

FOLDED = 4
"""The number of rows into which `sums` folds a vector. XLA adds them up in registers. More rows are
far slower.
"""
FEWEST = 2.0**-60
"""Sums at scale 1 between this and its inverse are not affected by underflow; see `settled`."""
PARTS = 64
"""The number of parts in which a large array is summed, on any number of cores."""


def in_64_bits(wide: bool) -> contextlib.AbstractContextManager[None]:
    """Makes a context in which JAX computes in 64 bits, in the thread that enters it.

    Args:
      wide: Whether to; if not, the context changes no setting.

    Returns:
      The context manager.
    """
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def per_task(f: Callable[..., Array], *arrays: Array) -> Array:
    """Applies a function to the arrays of one task after another, and stacks the results.

    XLA computes this in a single pass over memory. An expression of whole stacks would be
    recomputed, or written to memory, for each task that is read later.

    Args:
      f: A function of as many arrays as `arrays`, without their task axes.
      *arrays: Shape `[task, ...]`, or `[1, ...]` for an array that all tasks share.

    Returns:
      The stacked results, shape `[task, ...]`.
    """
    tasks = max(map(len, arrays))
    # An array with one task stands for all tasks. It is repeated instead of broadcast, to avoid a
    # copy for each task.
    rows = [jnp.unstack(x) * (tasks if len(x) == 1 else 1) for x in arrays]
    return jnp.stack([f(*row) for row in zip(*rows, strict=True)])


def task_sum(x: Num[Array, "task ..."]) -> Num[Array, "..."]:
    """Sums an array over its leading task axis.

    Tasks are added one after another, because XLA reduces a short leading axis far slower on CPUs.

    Args:
      x: Shape `[task, ...]`, of at least one task.

    Returns:
      The sum, shape `[...]`.
    """
    return functools.reduce(jnp.add, jnp.unstack(x))


def beside(value: PerModel, delta: Float[Array, "task ..."]) -> Float[Array, "#task ..."]:
    """Reshapes a hyperparameter to broadcast with task vectors.

    Args:
      value: One number, or one for each model, shape `[task]`.
      delta: Shape `[task, ...]`. The result has its dtype.

    Returns:
      Shape `[1, 1, ...]` for one number and `[task, 1, ...]` for one number per model, with as many
      axes as `delta`.
    """
    value = jnp.asarray(value, delta.dtype)
    return value.reshape(-1, *(1,) * (delta.ndim - 1))


def sums(*arrays: Float[Array, "..."]) -> tuple[Float[Array, ""], ...]:
    """Sums each of several arrays of one shape.

    All vectors are summed in one pass over their common inputs. On CPUs this is several times
    faster than one sum after another. The result is as accurate as XLA's own sums, which are tree
    reductions: the error is a few eps times the sum of the magnitudes.
    """
    return _sums(arrays) if _folds(arrays) else tuple(map(total, arrays))


def _folds(arrays: Sequence[Array]) -> bool:
    """Checks whether vectors can be folded into `FOLDED` rows each."""
    first = arrays[0]
    # Folding is a reshape. It needs whole rows, and axes that are not split over devices.
    whole = not any(map(divided, arrays))
    return first.ndim == 1 and bool(first.size) and first.size % FOLDED == 0 and whole


@jax.custom_jvp
def total(x: Num[Array, "..."]) -> Num[Array, ""]:
    """Sums an array in the same order on any number of cores.

    XLA divides a full sum of a large array by the number of cores of a CPU. The rounding then
    depends on the machine. It does not divide the sum of a row.

    Args:
      x: Any shape.

    Returns:
      The sum, with the dtype of `x`.
    """
    if x.size < PARTS**2 or divided(x):
        return x.sum()
    whole, rest = jnp.split(x.reshape(-1), [x.size // PARTS * PARTS])
    # Without the barrier, XLA makes one full sum of both again.
    rows = lax.optimization_barrier(whole.reshape(PARTS, -1).sum(1))
    return rows.sum() + rest.sum()


@total.defjvp
def _total_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # A sum is linear. The barrier is never differentiated.
    return total(*primals), tangents[0].sum()


@jax.custom_jvp
def _sums(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sums vectors with lengths that are multiples of `FOLDED`, in one reduction."""
    return tuple(map(total, _joined(arrays, lax.add)))


def _joined(arrays: Sequence[Array], join: Callable[..., Array]) -> tuple[Array, ...]:
    """Joins the rows of folded vectors, entry by entry, in one reduction that starts at 0."""

    def joined(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(join(x, y) for x, y in zip(a, b, strict=True))

    # Shapes here: n -> [FOLDED, n / FOLDED]. Reducing axis 0 joins whole rows, which vectorises.
    # One `lax.reduce` takes all arrays together and reads their common inputs once.
    rows = tuple(x.reshape(FOLDED, -1) for x in arrays)
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return tuple(lax.reduce(rows, zeros, joined, (0,)))


@_sums.defjvp
def _sums_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # A sum is linear, so tangents are summed. `lax.reduce` itself is never differentiated.
    return _sums(*primals), tuple(t.sum() for t in tangents[0])


def gram(delta: Float[Array, "task ..."], axis: Sequence[int] | None = None) -> Float[Array, "..."]:
    """Computes the inner products of all pairs of models, G[j, k] = <delta_j, delta_k>.

    Inner products of vectors share one reduction; other inner products have one reduction each. On
    CPUs both are several times faster than a matrix product with so few rows. They are as accurate
    as XLA's sums, with an error of a few eps |delta_j| |delta_k|.

    Args:
      delta: Shape `[task, ...]`.
      axis: The axes of `delta` to sum over, without the first axis. By default all other axes.

    Returns:
      Shape `[..., task, task]`. The leading axes are the remaining axes of `delta`.
    """
    pairs = [(j, k) for j in range(len(delta)) for k in range(j + 1)]
    if axis is None:
        products = sums(*(delta[j] * delta[k] for j, k in pairs))
    else:
        over = tuple(a - 1 for a in axis)
        products = tuple(jnp.sum(delta[j] * delta[k], over) for j, k in pairs)
    # A Gram matrix is symmetric, so only its lower half was computed.
    half = dict(zip(pairs, products, strict=True))
    tasks = range(len(delta))
    return jnp.stack(
        [jnp.stack([half[max(j, k), min(j, k)] for k in tasks], -1) for j in tasks], -2
    )


def unit_of(x: Float[Array, "..."], axis: Sequence[int] | None = None) -> Float[Array, "..."]:
    """Computes a power of two that scales numbers before they are squared or summed.

    It is the largest power of two that does not exceed the largest magnitude. Its range is limited
    to the smallest normal number and its inverse. Dividing by it is exact. The squares of the
    quotients do not overflow, and their sum loses nothing to underflow.

    Args:
      x: Any float dtype of 32 or 64 bits.
      axis: The axes that share one unit; all by default.

    Returns:
      Powers of two, in the shape of `x` without these axes. Gradients do not flow through them.

    >>> unit_of(jnp.array([[-6.0, 1.0], [0.0, 3.0]]), [1]).tolist()
    [4.0, 2.0]
    """
    if axis is None:
        return units_of([x])[0]
    return _power_of_two(_magnitude_bits(x).max(tuple(axis), initial=0), x.dtype)


def units_of(arrays: Sequence[Float[Array, "..."]]) -> Float[Array, "arrays"]:
    """Computes `unit_of` for several arrays of one shape, together.

    Args:
      arrays: At least one array.

    Returns:
      One power of two for each array.
    """
    bits = tuple(map(_magnitude_bits, arrays))
    most = [x.max(initial=0) for x in (_joined(bits, lax.max) if _folds(bits) else bits)]
    return _power_of_two(jnp.stack(most), arrays[0].dtype)


def _magnitude_bits(x: Array) -> Array:
    """Returns the bits of |x|, integers in the same order, whose maximum XLA finds faster."""
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), dtype)
    return bits & np.array(np.iinfo(dtype).max >> 1, dtype)


def _power_of_two(bits: Array, dtype: DTypeLike) -> Array:
    """Returns the largest power of two with at most these bits, in the range of `unit_of`."""
    about = jnp.finfo(dtype)
    # In the smallest normal number, only the last bit of the exponent is set. The bits of a power
    # of two and of its inverse add up to twice the bits of 1.
    least = 1 << about.nmant
    most = 2 * ((1 << (about.nexp - 1)) - 1 << about.nmant) - least
    exponent = bits & np.array(((1 << about.nexp) - 1) << about.nmant, bits.dtype)
    limits = (np.array(limit, bits.dtype) for limit in (least, most))
    return lax.bitcast_convert_type(jnp.clip(exponent, *limits), dtype)


def at_unit_scale(update: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a function with f(c x) = c f(x) compute at a scale at which squares do not overflow.

    Args:
      update: `(*args, x) -> result` of arrays.

    Returns:
      The same function, which divides x by its `unit_of` and multiplies the result by it. Both
      steps are exact.
    """

    @functools.wraps(update)
    def scaled(*args: Array, **options: Hashable) -> Array:
        *first, x = args
        unit = unit_of(x)
        return unit * update(*first, x * (1 / unit), **options)

    return scaled


class Products(NamedTuple):
    """The inner products of vectors of any size, <x_j, x_k> = unit_j * unit_k * inner_jk.

    In float32, the plain product of two vectors is 0 below about 1e-19 and infinite above 1e19.

    Attributes:
      unit: A power of two for each vector (`unit_of`), `[..., vector]`.
      inner: The inner products of the vectors divided by their units, `[..., vector, vector]`.
    """

    unit: Float[Array, "... vector"]
    inner: Float[Array, "... vector vector"]

    @property
    def sums(self) -> Float[Array, "... vector"]:
        """The squared norms of the vectors divided by their units."""
        return self.inner.diagonal(0, -2, -1)

    @property
    def plain(self) -> Float[np.ndarray, "... vector vector"]:
        """The inner products in NumPy's float64, because float32 may overflow."""
        unit, inner = (np.asarray(x, np.float64) for x in self)
        return unit[..., :, None] * unit[..., None, :] * inner

    @property
    def top(self) -> Float[Array, "... 1"]:
        """The largest unit."""
        return self.unit.max(-1, keepdims=True)

    @property
    def lengths(self) -> Float[Array, "... vector"]:
        """The norms of the vectors divided by the largest unit, with gradient 0 at 0."""
        return self.unit / self.top * self._norms

    @property
    def cosines(self) -> Float[Array, "... vector vector"]:
        """The inner products of directions; the direction of a vector of 0 is 0."""
        norms = self._norms
        inverse = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
        return self.inner * inverse[..., :, None] * inverse[..., None, :]

    @property
    def _norms(self) -> Float[Array, "... vector"]:
        """The norms of the vectors divided by their own units."""
        squares = self.sums
        return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def products(
    delta: Float[Array, "vector ..."], axis: Sequence[int] | None = None, at_scale_1: bool = False
) -> Products:
    """Computes the inner products of all pairs of vectors, at a scale at which squares do not
    overflow.

    Args:
      delta: Shape `[vector, ...]`.
      axis: The axes to sum over; see `gram`.
      at_scale_1: Whether all units are 1, without `axis`; see `settled`.

    Returns:
      The products. Their leading axes are the remaining axes of `delta`.

    >>> got = products(jnp.array([[3e-25, 4e-25], [2.0, 0.0]]))
    >>> f"{got.cosines[0, 1]:.3f}, {got.lengths * got.top}"
    '0.600, [5.e-25 2.e+00]'
    """
    if axis is None:
        unit = _units(jnp.unstack(delta), at_scale_1)
        wide = unit.reshape(-1, *(1,) * (delta.ndim - 1))
    else:
        wide = jnp.stack([unit_of(d, [a - 1 for a in axis]) for d in jnp.unstack(delta)])
        unit = jnp.moveaxis(wide, 0, -1)
        wide = jnp.expand_dims(wide, tuple(axis))
    return Products(unit, gram(delta * (1 / wide), axis))


def norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Computes the Euclidean norm of an array, at a scale at which squares do not overflow.

    Args:
      x: Any shape.

    Returns:
      The norm, with gradient 0 at 0.

    >>> float(norm(jnp.array([3.0, 4.0]) * 2.0**-100)) == 5 * 2.0**-100
    True
    """
    found = products(x[None])
    return (found.top * found.lengths)[0]


def common_unit(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Finds a common unit for adding two scaled sums.

    Args:
      a: The units of the first sums, at least 0.
      b: The units of the second sums, of the same shape.

    Returns:
      The larger unit, and the factors on the first and the second sum.
    """
    space = numpy_of(a)
    unit = space.maximum(a, b)
    safe = space.where(unit > 0, unit, 1)
    return unit, a / safe, b / safe


def add_products(a: Products, b: Products) -> Products:
    """Adds the inner products of two parts of the same vectors; for `Fold.add`.

    Args:
      a: The products of one part.
      b: The products of another part.

    Returns:
      The products of both.
    """
    unit, *ratios = common_unit(a.unit, b.unit)
    first, second = (
        r[..., :, None] * r[..., None, :] * x.inner for r, x in zip(ratios, (a, b), strict=True)
    )
    return Products(unit, first + second)


def total_products(parts: Products) -> Products:
    """Adds up the inner products of several parts of the same vectors.

    Args:
      parts: The products of all parts, stacked on a leading axis.

    Returns:
      The products of all parts together, without the leading axis.
    """
    unit = parts.unit.max(0)
    ratio = parts.unit / unit
    return Products(unit, (ratio[..., :, None] * ratio[..., None, :] * parts.inner).sum(0))


class Norms(NamedTuple):
    """L1 norms of task vectors before and after a change. Only their ratio matters.

    Attributes:
      unit: The common divisor of both norms, a power of two for each model (`unit_of`), `[task]`.
      before: The norms before, `[task]`.
      after: The norms after.
    """

    unit: Float[Array, "task"]
    before: Float[Array, "task"]
    after: Float[Array, "task"]

    @property
    def sums(self) -> Float[Array, "2 task"]:
        """Both norms divided by their unit."""
        return numpy_of(self.before).stack([self.before, self.after])

    @property
    def ratio(self) -> Float[Array, "task"]:
        """The ratio of the norms; 1 where either norm is 0."""
        exists = (self.before > 0) & (self.after > 0)
        return jnp.where(exists, self.before / jnp.where(exists, self.after, 1), 1)


def l1_norms(before: Sequence[Array], after: Sequence[Array], at_scale_1: bool = False) -> Norms:
    """Computes L1 norms at a scale without over- or underflow.

    Entries are added in row-major order of any shape (`sums`), so the shape changes no bit.

    Args:
      before: The entries of each model before the change.
      after: The entries of each model after the change.
      at_scale_1: Whether all units are 1; see `settled`.

    Returns:
      The norms.
    """
    if not any(map(divided, (*before, *after))):
        before, after = ([x.reshape(-1) for x in arrays] for arrays in (before, after))
    units = _units(before, at_scale_1)
    pairs = [
        sums(jnp.abs(x) * (1 / unit), jnp.abs(y) * (1 / unit))
        for x, y, unit in zip(before, after, units, strict=True)
    ]
    return Norms(units, *(jnp.stack(norms) for norms in zip(*pairs, strict=True)))


def add_norms(a: Norms, b: Norms) -> Norms:
    """Adds the norms of two parts of the same task vectors; for `Fold.add`.

    Args:
      a: The norms of one part.
      b: The norms of another part.

    Returns:
      The norms of both.
    """
    unit, first, second = common_unit(a.unit, b.unit)
    return Norms(unit, first * a.before + second * b.before, first * a.after + second * b.after)


def _units(arrays: Sequence[Array], at_scale_1: bool) -> Float[Array, "arrays"]:
    """Returns the units of sums. Units other than 1 take a pass of their own over the arrays."""
    return jnp.ones(len(arrays), arrays[0].dtype) if at_scale_1 else units_of(arrays)


def settled(part: PyTree) -> bool:
    """Checks whether sums at scale 1 have the bits of sums at a scale without over- or underflow.

    A square that underflows is below 2^-126. In a sum of 2^32 entries, underflow then changes less
    than 2^-94, which is below the rounding of a sum of at least `FEWEST`.

    Args:
      part: A pytree with known values. Only `Products` and `Norms` are checked.

    Returns:
      False if a sum with unit 1 is below `FEWEST`, above 1 / `FEWEST`, or not finite.
    """

    def is_sum(x: Any) -> bool:
        return isinstance(x, Products | Norms)

    found = [x for x in jax.tree.leaves(part, is_leaf=is_sum) if is_sum(x)]
    return all(
        bool(((x.unit != 1) | ((x.sums >= FEWEST) & (x.sums <= 1 / FEWEST))).all()) for x in found
    )


def computed_once(compute: Callable[[], Array], like: Array) -> Array:
    """Evaluates a function such that XLA computes and stores its result once.

    Under `jit`, XLA would repeat the computation for every entry that reads its result. On CPUs
    this was measured to be twenty times slower. XLA does not fuse across the branches of a
    conditional, so the function is put into a branch that is always taken.

    Args:
      compute: A function without arguments that returns one array.
      like: Any array without infinity. Its first entry selects the branch, which the compiler
        therefore cannot predict. If `like` is empty, and under `shard_map`, `compute` is called
        without a branch.

    Returns:
      The result of `compute`.
    """
    if like.size == 0 or is_manual():
        return compute()
    compute = jax.jit(compute)  # traced once, for the shape and the branch
    shape = jax.eval_shape(compute)
    first = like.reshape(-1)[0]
    # The condition must depend on data. XLA would remove a constant condition and its branch.
    return lax.cond(first != jnp.inf, compute, lambda: jnp.zeros_like(shape))


def is_manual() -> bool:
    """Checks whether a program is traced under `shard_map`, where each device computes a shard."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def automatic(f: Callable[..., Array], like: Array) -> Callable[..., Array]:
    """Lets the compiler choose the shardings inside a function, even if axes are explicit.

    Args:
      f: A function of arrays that returns one array.
      like: An array with the sharding and the number of axes of the result.

    Returns:
      The same function. Under `shard_map` it is unchanged, because it computes on one device.
    """
    if is_manual():
        return f
    out: Any = auto_axes(f, out_sharding=jax.typeof(like).sharding)
    return out


def number(x: ArrayLike | Sequence[float]) -> Any:
    """Converts a number to an array without compiling a program.

    Args:
      x: A scalar or an array of numbers. It may be traced.

    Returns:
      A float64 NumPy array if the value is known, which avoids early rounding. A JAX array of the
      default float dtype if the value is traced.
    """
    value = concrete(x)
    return jnp.asarray(x, float) if value is None else value.astype(np.float64)
