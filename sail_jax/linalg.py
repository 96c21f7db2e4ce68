"""Matrix decompositions and solves that LAPACK computes, one matrix at a time on a CPU.

`jax.numpy.linalg` gives LAPACK a whole batch. JAX 0.10.0 to 0.11.0 split that batch over XLA's pool
of threads, and a thread of the pool waits for the parts. A program with two such calls, or two
programs in two threads, can occupy all threads of the pool. Each part then waits for a thread, and
each thread for a part, which is a deadlock. docs/decisions/lapack.md describes the experiment.

The functions below are those of `jax.numpy.linalg` and `jax.scipy.linalg`, with the same arguments
and the same values. With these versions of JAX, on a CPU, leading axes and `vmap` become a loop
over matrices, so no call can be split. With all other versions they are JAX's own functions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike

from sail_jax.jax_internals import Rules, primitive

SPLITS = (0, 10, 0) <= jax.__version_info__ < (0, 11, 1)
"""Whether this version of JAX splits batches of LAPACK over the pool that runs programs."""

Results = list[Array]
OfOneMatrix = Callable[..., Results]
"""A hashable function of the arrays of one matrix, such as the matrix and a right-hand side."""


# --- a primitive: a function of one matrix, which `vmap` turns into a loop


@functools.partial(jax.jit, static_argnames=("function", "mapped"))
def _looped(*arrays: Array, function: OfOneMatrix, mapped: tuple[bool, ...]) -> Results:
    """Calls the function for each entry along the first axis of the mapped arrays."""

    def one(entries: Sequence[Array]) -> Results:
        rest = iter(entries)
        at = (next(rest) if m else x for x, m in zip(arrays, mapped, strict=True))
        return _one.bind(*at, function=function)

    def loop(*arrays: Array) -> Results:
        return lax.map(one, [x for x, m in zip(arrays, mapped, strict=True) if m])

    # Other devices have no such pool, and compute the whole batch at once.
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
    """The derivative of a function of `count` arrays with respect to the arrays at `moving`."""

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


def _computed(*arrays: Array, function: OfOneMatrix) -> Results:
    return function(*arrays)


def _types(*arrays: Any, function: OfOneMatrix) -> list[Any]:
    # Under `shard_map`, a type names the axes of the mesh along which the value varies.
    results = jax.eval_shape(function, *map(_like, arrays))
    return [arrays[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in results]


def _batched(
    arrays: Sequence[Array], mapped: tuple[bool, ...], *, function: OfOneMatrix
) -> Results:
    return _looped(*arrays, function=function, mapped=mapped)


def _tangents(
    at: Sequence[Array], moving: tuple[int, ...], along: Sequence[Array], *, function: OfOneMatrix
) -> Results:
    return _one.bind(*at, *along, function=_Tangents(function, len(at), moving))


def _transposed(
    linear: tuple[int, ...],
    types: Sequence[Any],
    fixed: Sequence[Array],
    given: Sequence[Array],
    *,
    function: OfOneMatrix,
) -> Results:
    transpose = _Transposed(function, linear, tuple(map(_like, types)))
    return _one.bind(*fixed, *given, function=transpose)


_RULES = Rules(_computed, _types, _batched, _tangents, _transposed)
_one: Any = primitive("one_matrix", _RULES, ("function",)) if SPLITS else None


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of matrices call LAPACK with one matrix at a time.

    Use it for calls that are missing in this module, in networks and scores that `vmap` maps.

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
    return jnp.linalg.norm(A, 2, axis=(-2, -1))


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
