"""Interpolation on spheres, and means of directions: slerp and its kin, Karcher, Model Stock.

Each is a linear combination of task vectors whose coefficients depend on their lengths and angles
alone (`reductions.combination`): two passes over tensors of any size, in constant memory. So a
rotation of all inputs rotates the result. Lengths below about 1e-19 (whose squares are 0) count as
0.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete
from sail_jax.merging.arithmetic import number
from sail_jax.merging.merge import Compat, Merge, choose, method
from sail_jax.merging.reductions import Vectors, combination
from sail_jax.merging.task_vectors import check_scalar
from sail_jax.merging.transforms import one_of

__all__ = ["karcher", "model_stock", "multislerp", "nuslerp", "slerp"]

Average = Literal["cosine", "angle"]
Gram = Float[Array, "*vectors task task"]

SQUARES = "the squares of a tensor have to add up to a finite number"
ANTIPODAL = 1e-5
"""Where 1 + cos is below, the great circle is lost in the rounding of float32: 0.3 degrees."""
CUT = 1e-3
"""Where 1 + cos is below, a direction has no side from which it pulls a mean: 2.6 degrees."""


@method
def slerp(*, t: Float[ArrayLike, ""] | None = None, compat: Compat = "paper") -> Merge:
    """Spherical interpolation from the first model (t = 0) to the second (t = 1), per tensor.

    With the angle theta between the two as vectors a and b, the direction is that of
    sin((1 - t) theta) a/|a| + sin(t theta) b/|b|, over sin(theta), and the length
    (1 - t) |a| + t |b|. A base only says the output's dtypes.

    Where there is no direction to follow, (1 - t) a + t b: one of the two is 0, or they are opposed
    (within 0.3 degrees of it, float32 does not know which great circle joins them). Near angle 0
    the formula's limit is taken, without a threshold.

    Args:
      t: w_2 / (w_1 + w_2) by default; with it, weights do not count. Numbers outside [0, 1]
        extrapolate along the great circle.
      compat: "mergekit" weighs a and b themselves by the two ratios, so that at different lengths
        the path is no arc and the middle of it too long or short; interpolates linearly where
        |cos| > 0.9995; and takes a tensor of 0 to be at a right angle (0.707 b at t = 1/2). There
        the order is base model, other model.

    References:
      Shoemake, Animating Rotation with Quaternion Curves, 1985.

    >>> slerp(t=0.5)([{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([0.0, 3.0])}])["a"].round(4)
    Array([1.4142, 1.4142], dtype=float32)
    """
    mergekit = choose(compat)(None, False, True)
    if t is not None:
        check_scalar("t", t, np.isfinite, "a finite number")
    time = () if t is None else (number(t),)
    reduction = combination(_slerp(mergekit), *time)
    return Merge(reduction=reduction, base="unused", models=(2, 2), remedy=SQUARES)


@method
def nuslerp(*, flatten: bool = True, row_wise: bool = False, compat: Compat = "paper") -> Merge:
    """Spherical interpolation of two models at t = w_2 / (w_1 + w_2), of deltas if a base is given.

    (sin((1 - t) theta) a + sin(t theta) b) / sin(theta) with the vectors themselves, not their
    directions, as in mergekit, where the method comes from. Weights that sum to 0 mean t = 1/2.
    (1 - t) a + t b where a vector is 0 or the two are opposed, as in `slerp`.

    Args:
      flatten: Whether a vector is a tensor; otherwise it is one run along the last axis.
      row_wise: Whether it is instead all entries of one place on the last axis (in mergekit, whose
        tensors are [out, in], a run along the first, which for matrices is the same). For Flax
        kernels, [in, out], the weights into one unit are `flatten=False, row_wise=True`.
      compat: mergekit takes a vector of 0 to be at a right angle, which "mergekit" does too, and
        divides by a sine of about 1e-7 at opposed ones.

    References:
      mergekit 0.1.4, method `nuslerp`.

    >>> models = [{"a": jnp.array([[1.0, 0.0]])}, {"a": jnp.array([[0.0, 1.0]])}]
    >>> nuslerp()(models, weights=[1.0, 2.0])["a"].round(4)
    Array([[0.5  , 0.866]], dtype=float32)
    """
    mergekit = choose(compat)(None, False, True)
    scope: Vectors = "tensor" if flatten else "column" if row_wise else "row"
    reduction = combination(_nuslerp(mergekit), scope=scope)
    return Merge(reduction=reduction, base="optional", models=(2, 2), remedy=SQUARES)


@method
def multislerp(*, normalize: bool = True, compat: Compat = "paper") -> Merge:
    """The weighted spherical mean of the deltas, or of the models without a base.

    `karcher` with weights; for two models slerp at t = w_2 / (w_1 + w_2).

    Args:
      normalize: Whether weights are divided by their sum; otherwise the length is multiplied by it,
        and the direction is the same.
      compat: "mergekit" is what the program of this name computes: the normalised weighted mean of
        directions, times the weighted mean of lengths. (It then follows a tangent which is 0, since
        it starts from that very mean: at t = 1/4 and a right angle the result is 3.4 degrees off
        the arc's point.) Where that mean of directions is 0 it stops with an error for more than
        two models, say for a frozen tensor; here the weighted mean of the vectors is taken.

    References:
      mergekit 0.1.4, method `multislerp`.

    >>> models = [{"a": jnp.array([2.0, 0.0])}, {"a": jnp.array([0.0, 2.0])}]
    >>> multislerp()(models, weights=[2.0, 1.0])["a"].round(4)
    Array([1.7321, 1.    ], dtype=float32)
    """
    mergekit = choose(compat)(None, False, True)
    coefficients = _nlerp if mergekit else _karcher(False, *CONVERGED)
    reduction = combination(coefficients)
    return Merge(reduction=reduction, normalize=normalize, base="optional", remedy=SQUARES)


@method
def karcher(
    *,
    max_iterations: int | None = None,
    tolerance: float | None = None,
    compat: Compat = "paper",
) -> Merge:
    """The weighted Karcher mean of directions, times the weighted mean of lengths.

    The u on the sphere of least sum_k w_k angle(u, theta_k)^2, per tensor, by steps of
    u <- exp_u(sum_k w_k log_u(theta_k)) from the normalised mean of directions. The steps work on
    coefficients and cost nothing. Tensors of 0 have no direction, but a length; those opposed to
    the mean (within 2.6 degrees) pull to no side. Unique and independent of the order of models if
    all lie within a right angle of some direction. Where the directions cancel (their mean is
    shorter than 1e-3) there is no mean direction to start from, and the result is the weighted mean
    of the vectors. Weights have to sum to something. A base only says the output's dtypes.

    Args:
      max_iterations: At most so many steps; 60 by default.
      tolerance: Fewer steps once they are surely shorter than this; 1e-7 by default, static.
      compat: "mergekit" has equal weights, whatever is given; 10 steps, tolerance 1e-5; tensors
        shorter than the tolerance count as 0. Where directions cancel it starts from the first
        model, and it averages a base that is given in as one more model: list it, if that is meant.

    References:
      Karcher, Riemannian center of mass and mollifier smoothing, 1977.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([0.0, 1.0])}]
    >>> karcher()(models)["a"].round(4)
    Array([0.7071, 0.7071], dtype=float32)
    """
    default = choose(compat)
    steps = default(max_iterations, CONVERGED[0], 10)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"max_iterations: expected an integer >= 0, got {steps!r}")
    tolerance = default(tolerance, CONVERGED[1], 1e-5)
    check_scalar("tolerance", tolerance, lambda x: 0 <= x < np.inf, "a number >= 0")
    if concrete(tolerance) is None:
        raise TypeError("tolerance: expected a static number, got a traced one")
    coefficients = _karcher(compat == "mergekit", steps, float(tolerance))
    reduction = combination(coefficients)
    return Merge(reduction=reduction, normalize=True, base="unused", remedy=SQUARES)


@method
def model_stock(
    *,
    filter_wise: bool = False,
    input_axis: Literal[-1, 0] = -1,
    average: Average = "cosine",
    compat: Compat = "paper",
) -> Merge:
    """Model Stock: base + t * (weighted mean of deltas), per tensor.

    t = N c / (1 + (N - 1) c) for N models and the average cosine c between their deltas. The closer
    the deltas to one direction, the more of their mean is kept: all of it for copies, nothing at
    right angles. Tensors that did not move are at right angles to everything. c < 0, which the
    authors do not consider, says that the models share nothing, and t is 0; so it is at the pole
    c = -1/(N - 1), which c cannot pass.

    Args:
      filter_wise: Whether vectors are not tensors but the weights into one unit.
      input_axis: Along which they lie: the last axis for weights [out, in] (-1, PyTorch, the
        default), all other axes for Flax's [in, out] and [height, width, in, out] (0).
      average: Over pairs, of the "cosine", or of the "angle" (fusion_bench).
      compat: "mergekit" divides by max(|delta_j| |delta_k|, 1e-6), which makes tensors with deltas
        below 1e-3 orthogonal even if they are copies; lets t be negative for c < 0, without bound;
        its infinity at the pole is here t = 0.

    References:
      Jang et al., Model Stock, 2024 (arXiv 2403.19522), Eq. 5.

    >>> base, one = {"a": jnp.zeros(2)}, {"a": jnp.array([1.0, 0.0])}
    >>> other = {"a": jnp.array([0.6, 0.8])}  # c = 0.6, t = 0.75
    >>> model_stock()([one, other], base)["a"].tolist()
    [0.6000000238418579, 0.30000001192092896]
    """
    one_of("average", average, Average)
    if input_axis not in (-1, 0):
        raise ValueError(f"input_axis: expected -1 or 0, got {input_axis!r}")
    mergekit = choose(compat)(None, False, True)
    scope: Vectors = "tensor" if not filter_wise else "row" if input_axis == -1 else "column"
    reduction = combination(_stock(average, mergekit), scope=scope)
    return Merge(reduction=reduction, normalize=True, models=(2, None), remedy=SQUARES)


CONVERGED = (60, 1e-7)


def _lengths(products: Gram) -> Float[Array, "*vectors task"]:
    """Norms, with the gradient 0 at 0."""
    squares = jnp.diagonal(products, axis1=-2, axis2=-1)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _inverse(x: Array) -> Array:
    """1/x, and 0 at 0."""
    return jnp.where(x != 0, 1 / jnp.where(x != 0, x, 1), 0)


def _cosines(products: Gram) -> tuple[Float[Array, "*vectors task"], Gram]:
    """Lengths, and the inner products of directions; a vector of 0 has the direction 0."""
    lengths = _lengths(products)
    inverse = _inverse(lengths)
    return lengths, products * inverse[..., :, None] * inverse[..., None, :]


def _squared_angle(cosine: Array) -> Array:
    """arccos(cosine)^2, smooth at and beyond 1, where it continues to a negative number.

    For u = 1 - cos < 0.01 the series 2u + u^2/3 + 4u^3/45 + u^4/35 + 16u^5/1575: 1e-13 off.
    """
    u = 1 - cosine
    series = u * (2 + u * (1 / 3 + u * (4 / 45 + u * (1 / 35 + u * 16 / 1575))))
    far = u > 0.01
    return jnp.where(far, jnp.arccos(jnp.where(far, jnp.maximum(cosine, -1), 0)) ** 2, series)


def _wave(function: Callable[[Array], Array], first: int) -> Callable[[Array], Array]:
    """f(sqrt(q)) for an even f, by its alternating series for q < 0.1, 1e-18 off."""

    def even(q: Array) -> Array:
        terms = np.cumprod([1.0] + [-1 / ((2 * k + first) * (2 * k + first + 1)) for k in range(6)])
        far = q > 0.1
        series = functools.reduce(lambda total, term: total * q + term, terms[::-1])
        return jnp.where(far, function(jnp.sqrt(jnp.where(far, q, 1))), series)

    return even


_sinc = _wave(lambda x: jnp.sin(x) / x, 2)
_cos = _wave(jnp.cos, 1)


def _arc(t: Array, square: Array) -> tuple[Array, Array]:
    """sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta), given theta^2."""
    first, second = ((x * _sinc(x**2 * square) / _sinc(square)) for x in (1 - t, t))
    return first, second


def _share(weights: Float[Array, "task"]) -> Array:
    """w_2 / (w_1 + w_2), 1/2 where they cancel."""
    mass, size = weights.sum(), jnp.abs(weights).sum()
    exists = jnp.abs(mass) > 10 * jnp.finfo(weights.dtype).eps * size
    return jnp.where(exists, weights[1] / jnp.where(exists, mass, 1), 0.5)


def _great_circle(t: Array, products: Gram, right: bool) -> tuple[Array, Array, Array]:
    """The lengths, the coefficients along the arc, and whether there is one; with `right`, a vector
    of 0 is at a right angle."""
    lengths, cosines = _cosines(products)
    cosine = cosines[..., 0, 1]
    exists = cosine > ANTIPODAL - 1
    ratios = _arc(t, _squared_angle(jnp.where(exists, cosine, 0)))
    exists = exists if right else exists & (lengths > 0).all(-1)
    return lengths, jnp.stack(ratios, -1), exists[..., None]


def _line(t: Array, like: Array) -> Array:
    return jnp.broadcast_to(jnp.stack([1 - t, t]).astype(like.dtype), like.shape)


@functools.cache
def _slerp(mergekit: bool) -> Callable[..., Array]:
    def coefficients(*args: Array) -> Array:
        *time, products, weights = args
        t = time[0].astype(products.dtype) if time else _share(weights)
        lengths, ratios, exists = _great_circle(t, products, right=mergekit)
        line = _line(t, ratios)
        if mergekit:
            cosine = jnp.abs(_cosines(products)[1][..., 0, 1])[..., None]
            return jnp.where(exists & (cosine <= 0.9995), ratios, line)
        length = (line * lengths).sum(-1, keepdims=True)
        # at t = 0 the length is the first's, to the bit, and the quotient 1
        return jnp.where(exists, ratios * (length / jnp.where(lengths > 0, lengths, 1)), line)

    return coefficients


@functools.cache
def _nuslerp(mergekit: bool) -> Callable[..., Array]:
    def coefficients(products: Gram, weights: Array) -> Array:
        t = _share(weights)
        _, ratios, exists = _great_circle(t, products, right=mergekit)
        return jnp.where(exists, ratios, _line(t, ratios))

    return coefficients


def _direction(cosines: Gram, weights: Array) -> tuple[Array, Array]:
    """Coefficients of the normalised mean of directions, and whether it is longer than 1e-3."""
    square = jnp.einsum("...jk,...j,...k->...", cosines, weights, weights)[..., None]
    exists = square > 1e-6 * jnp.abs(weights).sum(-1, keepdims=True) ** 2
    return weights / jnp.sqrt(jnp.where(exists, square, 1)), exists


def _nlerp(products: Gram, weights: Float[Array, "task"]) -> Array:
    lengths, cosines = _cosines(products)
    mean, exists = _direction(cosines, weights)
    length = (weights * lengths).sum(-1, keepdims=True)
    return jnp.where(exists, length * mean * _inverse(lengths), weights)


@functools.cache
def _karcher(mergekit: bool, steps: int, tolerance: float) -> Callable[..., Array]:
    def coefficients(products: Gram, weights: Float[Array, "task"]) -> Array:
        if mergekit:
            weights = jnp.full_like(weights, 1 / weights.size)
        lengths, cosines = _cosines(products)
        counted = lengths > (tolerance if mergekit else 0)
        present = jnp.where(counted, weights, 0)
        mass = present.sum()
        share = present / jnp.where(mass != 0, jnp.sign(mass), 1) * _inverse(jnp.abs(present).sum())
        mean, exists = _direction(cosines, share)
        if mergekit:
            first = jnp.zeros_like(mean).at[jnp.argmax(counted)].set(1)
            mean = jnp.where(exists, mean, first)
            exists = counted.any(keepdims=True)

        def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            u, done = state
            dots = cosines @ u
            sided = dots > CUT - 1
            pull = jnp.where(sided, share / _sinc(_squared_angle(jnp.where(sided, dots, 0))), 0)
            along = (pull * dots).sum()  # the tangent is sum_k pull_k u_k - along * u
            tangent = pull - along * u
            square = jnp.maximum(tangent @ cosines @ tangent, 0)
            # a bound of the tangent's length, whose square is lost in rounding before it is small
            done = done | (jnp.abs(tangent).sum() < tolerance)
            new = _cos(square) * u + _sinc(square) * tangent
            new = new / jnp.sqrt(jnp.maximum(new @ cosines @ new, ANTIPODAL))
            return jnp.where(done, u, new), done

        u, _ = lax.fori_loop(0, steps, step, (mean, ~exists.all()))
        length = (weights * lengths).sum()
        lengths = jnp.where(counted, lengths, 0)
        return jnp.where(exists, length * u * _inverse(lengths), 0 if mergekit else weights)

    return coefficients


@functools.cache
def _stock(average: Average, mergekit: bool) -> Callable[..., Array]:
    def coefficients(products: Gram, weights: Float[Array, "task"]) -> Array:
        n = len(weights)
        if mergekit:
            lengths = _lengths(products)
            size = lengths[..., :, None] * lengths[..., None, :]
            cosines = products / jnp.maximum(size, 1e-6)
        else:
            _, cosines = _cosines(products)
        pairs = cosines[(..., *np.triu_indices(n, 1))]
        if average == "angle":
            square = _squared_angle(pairs)
            angles = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
            c = jnp.cos(angles.mean(-1, keepdims=True))
        else:
            c = jnp.clip(pairs, -1, 1).mean(-1, keepdims=True)
        c = c if mergekit else jnp.maximum(c, 0)
        size = 1 + (n - 1) * c
        pole = jnp.abs(size) < 1e-6
        t = jnp.where(pole, 0, n * c / jnp.where(pole, 1, size))
        return t * weights

    return coefficients
