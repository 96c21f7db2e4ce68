"""Merging matrices by their singular vectors: TSV-M, Iso-C, Iso-CTS, WUDI, OPCM.

What they do to a matrix they do to every leaf with two axes longer than 1, or to those among them
that `matrices` chooses, a glob pattern or predicate of paths (the authors leave out embeddings);
other leaves get the weighted mean of deltas, save in OPCM. Weights multiply the deltas, 1 by
default.

Singular vectors for singular values that are 0 up to rounding (eps * longer side * the largest) are
whatever the library returns. They are left out everywhere here, so that results depend on the
deltas only, and a rotation of all inputs rotates the result. Where the published programs let them
in (tensors that did not move, deltas of low rank, copies), they add noise to what they return.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete
from sail_jax.merging.merge import Expression, method
from sail_jax.merging.reductions import average
from sail_jax.merging.task_vectors import (
    Count,
    Fold,
    Leafwise,
    Place,
    Rule,
    chain,
    check_scalar,
    everybody,
    masked,
    tally,
)
from sail_jax.merging.transforms import Scope, one_of, scoped

__all__ = ["iso_c", "iso_cts", "opcm", "tsv_m", "wudi"]

Scalar = Float[ArrayLike, ""]
Matrices = str | Callable[[str], bool] | None
Matrix = Float[Array, "a b"]
Votes = tuple[Array, Array]


@method
def tsv_m(
    *,
    key: Array | None = None,
    ratio: float | None = None,
    scale: Scalar = 1.0,
    matrices: Matrices = None,
) -> Expression:
    """Task singular vectors, merged (Gargiulo et al. 2024): each delta_m cut down to its k largest
    singular triplets (U_m, S_m, V_m), [U_1 ... U_M] and [V_1 ... V_M] replaced by the nearest
    matrices with orthonormal columns (or rows), and multiplied out:
    base + scale * polar(U) diag(S_1 ... S_M) polar(V)^T.

    k = max(1, floor(ratio * min(a, b))), for ratio = 1/M by default, so that M k columns fit. (The
    authors' code computes int(r * (1/M)), which is 0 for r = M = 49, and for M > r.) Copies of one
    model give its best approximation of rank k; the order of models does not matter.

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> tsv_m([one, one], base)["a"].round(4) + 0.0
    Array([[3., 0.],
           [0., 0.]], dtype=float32)
    """
    if ratio is not None:
        _check_static("ratio", ratio, lambda x: 0 < x <= 1, "a number in (0, 1]")
    kernel = _on_matrices(_tsv(None if ratio is None else float(ratio)))
    return _expression(Leafwise(Partial(kernel), grain="leaf"), matrices, scale)


@method
def iso_c(
    *, key: Array | None = None, scale: Scalar = 1.0, matrices: Matrices = None
) -> Expression:
    """Isotropic merging (Marczak et al. 2025): the sum of deltas with all its singular values made
    equal to their mean, base + scale * mean(S) U V^T.

    The mean is over min(a, b) values; directions in which nobody moved stay where they are.

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> iso_c([one], base)["a"].round(4) + 0.0
    Array([[2., 0.],
           [0., 2.]], dtype=float32)
    """
    return _expression(Leafwise(Partial(_on_matrices(_iso_c)), grain="leaf"), matrices, scale)


@method
def iso_cts(
    *,
    key: Array | None = None,
    common_fraction: float = 0.8,
    input_axis: Literal[-1, 0] = -1,
    scale: Scalar = 1.0,
    matrices: Matrices = None,
) -> Expression:
    """Isotropic merging in common and task-specific subspaces (Marczak et al. 2025).

    Of the sum of deltas the largest c singular triplets are common; from each delta_m what lies in
    their output space is taken away, U U^T delta_m, and its n largest triplets are specific. All
    c + M n = min(a, b) of them are made orthonormal together as in `tsv_m`, with equal singular
    values, the mean of theirs. n = round((min(a, b) - floor(common_fraction * min(a, b))) / M), at
    most min(a, b) // M (the authors' code rounds up past that, to a negative c).

    input_axis: -1 for weights [out, in] (PyTorch), 0 for [in, out] (Flax).

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> iso_cts([one], base)["a"].round(4) + 0.0
    Array([[2., 0.],
           [0., 2.]], dtype=float32)
    """
    _check_static("common_fraction", common_fraction, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    kernel = _on_matrices(_iso_cts(float(common_fraction)), _check_axis(input_axis))
    return _expression(Leafwise(Partial(kernel), grain="leaf"), matrices, scale)


@method
def wudi(
    *,
    key: Array | None = None,
    solution: Literal["adam", "exact"] = "adam",
    steps: int = 300,
    rate: Scalar = 1e-5,
    damping: Scalar = 1e-6,
    input_axis: Literal[-1, 0] = -1,
    scale: Scalar = 1.0,
    matrices: Matrices = None,
) -> Expression:
    """WUDI (Cheng et al. 2025): base + scale * x where x disturbs the deltas least, the minimum of
    L(x) = sum_m |(x - delta_m) delta_m^T|^2 / |delta_m|^2 (Frobenius norms, delta [out, in]).

    solution "adam", as published: `steps` of Adam (Kingma & Ba 2015) at `rate` from
    x = sum_m delta_m. Each step moves an entry by about `rate`, whatever the size of the deltas, so
    that 300 steps at 1e-5 move none by more than about 3e-3.
    solution "exact": the objective is a quadratic, so its minimum solves
    x sum_m G_m = sum_m delta_m G_m with G_m = delta_m^T delta_m / |delta_m|^2, [in, in]; with
    `damping` * M * |x - sum_m delta_m|^2 added to the objective, which decides in the directions
    where no delta is large. It commutes with scaling and rotating the deltas.

    Weights multiply the deltas, but are no part of the objective's weighing. A delta of 0 asks for
    nothing (0/0 in the published code). input_axis: -1 for weights [out, in] (PyTorch), 0 for
    [in, out] (Flax). One model is returned as it is.

    >>> base = {"a": jnp.zeros((2, 2))}
    >>> models = [{"a": jnp.diag(jnp.array([1.0, 0.0]))}, {"a": jnp.diag(jnp.array([3.0, 2.0]))}]
    >>> x = wudi(models, base, solution="exact")["a"]
    >>> ((x[0, 0] * (1 + 9 / 13) - (1 + 27 / 13)) ** 2 < 1e-8).item()  # x a = b on the diagonal
    True
    """
    one_of("solution", solution, Literal["adam", "exact"])
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps: expected an integer >= 0, got {steps!r}")
    check_scalar("rate", rate, lambda x: 0 <= x < np.inf, "a finite number >= 0")
    check_scalar("damping", damping, lambda x: 0 < x < np.inf, "a finite number > 0")
    transform = _wudi_exact if solution == "exact" else _wudi_adam(steps)
    number = jnp.asarray(damping if solution == "exact" else rate, jnp.result_type(float))
    kernel = _on_matrices(transform, _check_axis(input_axis))
    return _expression(Leafwise(Partial(kernel, number), grain="leaf"), matrices, scale)


@method
def opcm(
    *,
    key: Array | None = None,
    alpha: Scalar = 0.5,
    scope: Scope = "tree",
    scale: Scalar = 1.0,
    matrices: Matrices = None,
) -> Expression:
    """Orthogonal projection-based continual merging (Tang et al. 2025): one model after the other,
    in the given order, which matters.

    The sum starts as delta_1. To it is added of each further delta_m what the sum so far, U S V^T,
    has no say in: U^T delta_m V without its diagonal and without the block of the r leading
    directions on both sides, those whose singular values add up to at most `alpha` of the total.
    Leaves that are no matrices are summed. In the end the sum is rescaled to the mean norm of the
    deltas, over all leaves; or each leaf on its own, `scope="tensor"`. (The authors rescale after
    each model, and multiply by what they divided by before the next: the same.)

    Copies of one model give the model if all leaves are matrices, or with scope="tensor"; else the
    sums of other leaves take their share of the norm, as they do in the authors' code.

    >>> base = {"a": jnp.zeros((2, 2))}
    >>> one = {"a": jnp.array([[3.0, 0.0], [0.0, 0.0]])}
    >>> other = {"a": jnp.array([[1.0, 4.0], [0.0, 0.0]])}
    >>> x = opcm([one, other], base, scope="tensor")["a"]  # the 4 is new, the 1 is not
    >>> (x / x[0, 0] * 3).round(2).astype(int).tolist()
    [[3, 4], [0, 0]]
    """
    check_scalar("alpha", alpha, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    rule = Leafwise(
        Partial(_on_matrices(_opcm), jnp.asarray(alpha, jnp.result_type(float))), grain="leaf"
    )

    def measured(squares: Array, size: int) -> Count:
        def then(square: Array, size: int) -> Count:
            return Leafwise(Partial(_resize, squares, square))

        return chain(
            rule if matrices is None else masked(rule, matrices), Fold(Partial(_square), then)
        )

    count = Fold(Partial(_squares), measured, visits=2)
    return Expression(scoped(scope, count), everybody, scale=scale)


def _expression(rule: Rule, matrices: Matrices, scale: Scalar) -> Expression:
    rule = rule if matrices is None else masked(rule, matrices)
    return Expression(average, rule, scale=scale)


def _check_axis(input_axis: int) -> bool:
    """Whether matrices have to be transposed to be [out, in]."""
    if input_axis not in (-1, 0):
        raise ValueError(f"input_axis: expected -1 or 0, got {input_axis!r}")
    return input_axis == 0


def _check_static(name: str, value: Any, holds: Callable[[Any], Any], expected: str) -> None:
    check_scalar(name, value, holds, expected)
    if concrete(value) is None:
        raise TypeError(f"{name}: expected a static number, got a traced one")


@functools.cache
def _on_matrices(
    transform: Callable[..., Matrix], transposed: bool = False
) -> Callable[..., Votes]:
    """A rule by which the models agree on `transform(*args, weight * delta)` where a leaf is a
    matrix: the first proposes it, and nobody else votes."""

    def kernel(*rest: Any) -> Votes:
        *args, _, delta, weight = rest
        if delta.ndim != 3 or min(delta.shape[1:]) < 2:
            return delta, weight
        votes = jnp.swapaxes(weight * delta, 1, 2) if transposed else weight * delta
        update = transform(*args, votes)
        update = update.T if transposed else update
        first = jnp.zeros((len(delta), 1, 1), delta.dtype).at[0].set(1)
        return first * update, first

    return jax.jit(kernel)


def _mm(*factors: Array) -> Array:
    return functools.reduce(functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST), factors)


def _svd(x: Matrix, size: Array | None = None) -> tuple[Array, Array, Array]:
    """U [a, r], S [r], V [b, r], all 0 where S is up to the rounding of x, or of `size`."""
    U, S, Vt = jnp.linalg.svd(x, full_matrices=False)
    rounding = max(x.shape) * jnp.finfo(x.dtype).eps * (S[0] if size is None else size)
    real = rounding < S
    return jnp.where(real, U, 0), jnp.where(real, S, 0), jnp.where(real, Vt.T, 0)


@jax.custom_jvp
def _polar(x: Matrix) -> Matrix:
    """U V^T: the nearest matrix whose singular values are all 1, or 0 where they are."""
    U, _, V = _svd(x)
    return _mm(U, V.T)


@_polar.defjvp
def _polar_jvp(primals: tuple[Matrix], tangents: tuple[Matrix]) -> tuple[Matrix, Matrix]:
    # equal singular values, usual here, would be poles of the derivative of the SVD
    (x,), (dx,) = primals, tangents
    U, S, V = _svd(x)
    pairs, single = S[:, None] + S, S[None, :]
    inverse = jnp.where(pairs > 0, 1 / jnp.where(pairs > 0, pairs, 1), 0)
    divided = jnp.where(single > 0, 1 / jnp.where(single > 0, single, 1), 0)
    A = _mm(U.T, dx, V)
    left, right = _mm(dx, V) - _mm(U, A), _mm(U.T, dx) - _mm(A, V.T)
    tangent = _mm(U, inverse * (A - A.T), V.T) + _mm(left * divided, V.T)
    return _mm(U, V.T), tangent + _mm(U, divided.T * right)


def _orthonormal(U: Float[Array, "a n"], V: Float[Array, "b n"]) -> tuple[Array, Array]:
    """Both polar factors one after the other (rows of 0 added to the shorter): factorisations that
    run at once wait for each other's threads on CPUs."""
    rows = max(len(U), len(V))
    pair = jnp.stack([jnp.pad(x, ((0, rows - len(x)), (0, 0))) for x in (U, V)])
    first, second = lax.map(_polar, pair)
    return first[: len(U)], second[: len(V)]


def _beside(x: Float[Array, "task a k"]) -> Float[Array, "a task*k"]:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def _floor(x: float) -> int:
    """The floor of a product of numbers written in decimals: 0.29 * 100 is 29."""
    return math.floor(x * (1 + 1e-12))


@functools.cache
def _tsv(ratio: float | None) -> Callable[[Array], Matrix]:
    def transform(votes: Float[Array, "task a b"]) -> Matrix:
        r = min(votes.shape[1:])
        k = max(1, r // len(votes) if ratio is None else _floor(ratio * r))
        U, S, V = lax.map(lambda x: tuple(part[..., :k] for part in _svd(x)), votes)
        U, V = _orthonormal(_beside(U), _beside(V))
        return _mm(U * S.reshape(-1), V.T)

    return transform


def _iso_c(votes: Float[Array, "task a b"]) -> Matrix:
    x = tally(votes)
    polar = _polar(x)
    return (polar * x).sum() / min(x.shape) * polar  # <U V^T, x> is the sum of singular values


@functools.cache
def _iso_cts(common_fraction: float) -> Callable[[Array], Matrix]:
    def transform(votes: Float[Array, "task a b"]) -> Matrix:
        r, tasks = min(votes.shape[1:]), len(votes)
        n = min(round((r - _floor(common_fraction * r)) / tasks), r // tasks)
        common = r - n * tasks
        U, S, V = (part[..., :common] for part in _svd(tally(votes)))

        def specific(x: Matrix) -> tuple[Array, Array, Array]:
            rest = _svd(x - _mm(U, U.T, x), jnp.linalg.norm(x))
            return tuple(part[..., :n] for part in rest)  # type: ignore[return-value]

        if n:
            own = lax.map(specific, votes)
            U = jnp.concatenate([U, _beside(own[0])], 1)
            S = jnp.concatenate([S, own[1].reshape(-1)])
            V = jnp.concatenate([V, _beside(own[2])], 1)
        U, V = _orthonormal(U, V)
        return S.mean() * _mm(U, V.T)

    return transform


def _quadratic(votes: Float[Array, "task a b"]) -> tuple[Matrix, Matrix, Matrix]:
    """s = sum_m delta_m, A and C such that the gradient of L at s + y is 2 (y A + C); deltas of 0
    take no part. No difference of large numbers: one model has C = 0 exactly."""
    squares = jnp.sum(votes**2, (1, 2))
    inverse = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0)
    grams = [scale * _mm(x.T, x) for scale, x in zip(inverse, votes, strict=True)]
    start = tally(votes)
    pulls = [_mm(start - x, gram) for x, gram in zip(votes, grams, strict=True)]
    return start, tally(jnp.stack(grams)), tally(jnp.stack(pulls))


def _wudi_exact(damping: Array, votes: Float[Array, "task a b"]) -> Matrix:
    start, A, C = _quadratic(votes)
    pull = damping.astype(A.dtype) * len(votes)
    values, Q = jnp.linalg.eigh(A)
    # where A is 0 up to rounding, so is C, and dividing would turn its rounding into a change
    real = values > len(A) * jnp.finfo(A.dtype).eps * values[-1]
    inverse = jnp.where(real, 1 / jnp.where(real, values + pull, 1), 0)
    return start - _mm(_mm(C, Q) * inverse, Q.T)


@functools.cache
def _wudi_adam(steps: int) -> Callable[[Array, Array], Matrix]:
    def transform(rate: Array, votes: Float[Array, "task a b"]) -> Matrix:
        start, A, C = _quadratic(votes)

        def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            y, mean, square = state
            gradient = 2 * (_mm(y, A) + C)
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            t = jnp.asarray(i + 1, y.dtype)
            first, second = mean / (1 - 0.9**t), square / (1 - 0.999**t)
            root = jnp.where(second > 0, jnp.sqrt(jnp.where(second > 0, second, 1)), 0)
            return y - rate.astype(y.dtype) * first / (root + 1e-8), mean, square

        zero = jnp.zeros_like(start)
        return start + lax.fori_loop(0, steps, step, (zero, zero, zero))[0]

    return transform


def _opcm(alpha: Array, votes: Float[Array, "task a b"]) -> Matrix:
    def add(merged: Matrix, x: Matrix) -> tuple[Matrix, None]:
        U, S, V = _svd(merged)
        mass = jnp.cumsum(S)
        leading = mass <= alpha * mass[-1]
        index = jnp.arange(len(S))
        said = (leading[:, None] & leading) | (index[:, None] == index)
        return merged + x - _mm(U, jnp.where(said, _mm(U.T, x, V), 0), V.T), None

    return lax.scan(add, votes[0], votes[1:])[0]


@jax.jit
def _squares(place: Place, delta: Array, weight: Array) -> Float[Array, "task"]:
    return jnp.sum((weight * delta) ** 2, range(1, delta.ndim))


@jax.jit
def _square(place: Place, delta: Array, weight: Array) -> Float[Array, ""]:
    return jnp.sum(tally(weight * delta) ** 2)


@jax.jit
def _resize(squares: Array, square: Array, place: Place, delta: Array, weight: Array) -> Array:
    moved = squares > 0
    mean = jnp.where(moved, jnp.sqrt(jnp.where(moved, squares, 1)), 0).mean()
    factor = jnp.where(square > 0, mean * lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    return factor.astype(delta.dtype) * tally(weight * delta)
