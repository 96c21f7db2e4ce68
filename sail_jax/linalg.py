"""Matrix decompositions and solves that LAPACK computes, one matrix at a time on a CPU.

`jax.numpy.linalg` gives LAPACK a whole batch. JAX 0.10.0 to 0.11.0 split that batch over XLA's pool
of threads, and a thread of the pool waits for the parts. A program with two such calls, or two
programs in two threads, can occupy all threads of the pool: then each part waits for a thread, and
each thread for a part, for ever. docs/decisions/lapack.md has the experiment.

The functions below are those of `jax.numpy.linalg` and `jax.scipy.linalg`, with the same arguments
and the same values. With these versions of JAX, on a CPU, leading axes and `vmap` become a loop
over matrices, so no call has anything to split. With all other versions they are JAX's own.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike

SPLITS = (0, 10, 0) <= jax.__version_info__ < (0, 11, 1)
"""Whether this version of JAX splits batches of LAPACK over the pool that runs programs."""

Results = list[Array]
OfOneMatrix = Callable[..., Results]
"""A hashable function of the arrays of one matrix, such as the matrix and a right-hand side."""


# --- a primitive: a function of one matrix, which `vmap` turns into a loop

_one = Primitive("one_matrix")
_one.multiple_results = True


@functools.partial(jax.jit, static_argnames="function")
def _alone(*arrays: Array, function: OfOneMatrix) -> Results:
    return function(*arrays)


@functools.partial(jax.jit, static_argnames=("function", "mapped"))
def _looped(*arrays: Array, function: OfOneMatrix, mapped: tuple[bool, ...]) -> Results:
    """Calls the function for each entry along the first axis of the mapped arrays."""

    def one(entries: Sequence[Array]) -> Results:
        rest = iter(entries)
        return _one.bind(
            *(next(rest) if m else x for x, m in zip(arrays, mapped, strict=True)),
            function=function,
        )

    def loop(*arrays: Array) -> Results:
        return lax.map(one, [x for x, m in zip(arrays, mapped, strict=True) if m])

    # Other devices have no such pool, and compute a batch at once.
    together = jax.vmap(function, [0 if m else None for m in mapped])
    return lax.platform_dependent(*arrays, cpu=loop, default=together)


@dataclass(frozen=True)
class _Call:
    """A function of JAX with its options, as a function from arrays to a list of arrays."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *arrays: Array) -> Results:
        return jax.tree.leaves(self.function(*arrays, **dict(self.options)))


@dataclass(frozen=True)
class _Tangents:
    """The derivative of a function of `count` arrays along the arrays at `moving`."""

    function: OfOneMatrix
    count: int
    moving: tuple[int, ...]

    def __call__(self, *arrays: Array) -> Results:
        at, along = arrays[: self.count], dict(zip(self.moving, arrays[self.count :], strict=True))
        tangents = tuple(along.get(i, jnp.zeros_like(x)) for i, x in enumerate(at))
        return jax.jvp(self.function, at, tangents)[1]


@dataclass(frozen=True)
class _Transposed:
    """The transpose of a function of arrays like `likes`, linear in the arrays at `linear`."""

    function: OfOneMatrix
    linear: tuple[int, ...]
    likes: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, *arrays: Array) -> Results:
        others = [i for i in range(len(self.likes)) if i not in self.linear]
        fixed = dict(zip(others, arrays[: len(others)], strict=True))

        def of_linear(*given: Array) -> Results:
            every = fixed | dict(zip(self.linear, given, strict=True))
            return self.function(*(every[i] for i in range(len(self.likes))))

        transpose = jax.linear_transpose(of_linear, *(self.likes[i] for i in self.linear))
        return list(transpose([*arrays[len(others) :]]))


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@_one.def_abstract_eval
def _types(*arrays: Any, function: OfOneMatrix) -> list[Any]:
    # Under `shard_map`, a type names the axes of the mesh along which the value varies.
    results = jax.eval_shape(function, *map(_like, arrays))
    return [arrays[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in results]


def _batched(
    arrays: Sequence[Array], axes: Sequence[int | None], *, function: OfOneMatrix
) -> tuple[Results, list[int]]:
    mapped = tuple(axis is not None for axis in axes)
    first = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    results = _looped(*first, function=function, mapped=mapped)
    return results, [0] * len(results)


def _differentiated(
    primals: Sequence[Array], tangents: Sequence[Any], *, function: OfOneMatrix
) -> tuple[Results, Results]:
    moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    derivative = _Tangents(function, len(primals), moving)
    along = [tangents[i] for i in moving]
    return (
        _one.bind(*primals, function=function),
        _one.bind(*primals, *along, function=derivative),
    )


def _transposed(
    cotangents: Sequence[Any], *arrays: Any, function: OfOneMatrix
) -> list[Array | None]:
    linear = tuple(i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
    likes = tuple(_like(x.aval if i in linear else x) for i, x in enumerate(arrays))
    fixed = [x for i, x in enumerate(arrays) if i not in linear]
    given = [ad.instantiate_zeros(x) for x in cotangents]
    found = _one.bind(*fixed, *given, function=_Transposed(function, linear, likes))
    back = dict(zip(linear, found, strict=True))
    return [back.get(i) for i in range(len(arrays))]


_one.def_impl(_alone)
mlir.register_lowering(
    _one, mlir.lower_fun(lambda *arrays, function: function(*arrays), multiple_results=True)
)
batching.primitive_batchers[_one] = _batched
ad.primitive_jvps[_one] = _differentiated
ad.primitive_transposes[_one] = _transposed


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of matrices call LAPACK with one matrix at a time.

    Use it for a call that this module does not have, in networks and scores that `vmap` maps.

    Args:
      function: A function of arrays with leading axes, of two dimensions each after these axes (or
        of any, if no array has leading axes). Options are keyword arguments, and hashable.

    Returns:
      A function with the same arguments and values. Leading axes of arrays are broadcast. With
      versions of JAX that do not split batches, it is `function` itself.

    >>> one_at_a_time(jnp.linalg.matrix_power)(2 * jnp.eye(2), n=3).tolist()
    [[8.0, 0.0], [0.0, 8.0]]
    """
    if not SPLITS:
        return function

    @functools.wraps(function)
    def wrapped(*args: ArrayLike, **options: Any) -> Any:
        arrays = [jnp.asarray(x) for x in args]
        arrays = [x.astype(jnp.result_type(x, 1.0)) for x in arrays]
        call = _Call(function, tuple(sorted(options.items())))
        batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))
        if not batch:
            results = _one.bind(*arrays, function=call)
        else:
            full = [jnp.broadcast_to(x, batch + x.shape[-2:]) for x in arrays]
            flat = [x.reshape(-1, *x.shape[-2:]) for x in full]
            results = jax.vmap(functools.partial(_one.bind, function=call))(*flat)
            results = [x.reshape(*batch, *x.shape[1:]) for x in results]
        of_one = jax.eval_shape(
            functools.partial(function, **options),
            *(jax.ShapeDtypeStruct(x.shape[-2:], x.dtype) for x in arrays),
        )
        return jax.tree.unflatten(jax.tree.structure(of_one), results)

    return wrapped


cholesky = one_at_a_time(jnp.linalg.cholesky)
det = one_at_a_time(jnp.linalg.det)
eigh = one_at_a_time(jnp.linalg.eigh)
eigvalsh = one_at_a_time(jnp.linalg.eigvalsh)
inv = one_at_a_time(jnp.linalg.inv)
pinv = one_at_a_time(jnp.linalg.pinv)
qr = one_at_a_time(jnp.linalg.qr)
solve = one_at_a_time(jnp.linalg.solve)
solve_triangular = one_at_a_time(jax.scipy.linalg.solve_triangular)
svd = one_at_a_time(jnp.linalg.svd)


@one_at_a_time
def cho_solve(factor: Array, right: Array) -> Array:
    """Solves L L^T x = b.

    Args:
      factor: L, lower triangular, `[..., n, n]`.
      right: b, `[..., n, k]`.

    Returns:
      x, `[..., n, k]`.
    """
    return jax.scipy.linalg.cho_solve((factor, True), right)


@one_at_a_time
def spectral_norm(A: Array) -> Array:
    """Computes the largest singular value.

    Args:
      A: Matrices, `[..., m, n]`.

    Returns:
      The norms, `[...]`.
    """
    return jnp.linalg.norm(A, 2)


def orthogonal(key: Array, n: int) -> Array:
    """Draws an orthogonal matrix uniformly, with the values of `jax.random.orthogonal`.

    Args:
      key: PRNG key.
      n: The number of rows and columns.

    Returns:
      The matrix, `[n, n]`.
    """
    Q, R = qr(jax.random.normal(key, (n, n)))
    return Q * jnp.sign(jnp.diagonal(R))
