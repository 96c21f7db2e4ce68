"""Interpolation on spheres, and means of directions: slerp and its kin, Karcher, Model Stock.

The result of each is a linear combination of task vectors, whose coefficients depend on their
lengths and angles alone (`reductions.combination`). So a rotation of all inputs rotates the result,
and two passes over a tensor of any size, in constant memory, are enough.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import integer, one_of, scalar, static
from sail_jax.merging.arithmetic import Products, number
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import Extent, combination
from sail_jax.methods.registry import Compat, Range, choose, method

Average = Literal["cosine", "angle"]

ANTIPODAL = 1e-5
"""If 1 + cosine is below this (0.3 degrees from opposite), float32 cannot tell the great circle."""
CUT = 1e-3
"""If 1 + cosine is below this (2.6 degrees from opposite), a direction pulls a mean to no side."""


@method
def slerp(
    *, t: Annotated[Float[ArrayLike, ""] | None, Range(0.0, 1.0)] = None, compat: Compat = "paper"
) -> Merge:
    """Interpolates two models along the arc between their directions, tensor by tensor (slerp).

    The two tensors are vectors a and b with the angle theta between them; t = 0 gives the first
    model, t = 1 the second. The result has

        direction   (sin((1 - t) theta) a/|a| + sin(t theta) b/|b|) / sin(theta)
        length      (1 - t) |a| + t |b|

    The result is (1 - t) a + t b where there is no arc to follow. That is where one of the two is
    0, or where they point in opposite directions (within 0.3 degrees of that, float32 cannot tell
    which arc joins them). Near angle 0 the limit of the formula is taken, without a threshold.

    Args:
      t: Position on the arc; w_2 / (w_1 + w_2) by default. If it is given, weights do not count.
        Numbers outside [0, 1] extrapolate along the great circle.
      compat: "mergekit" multiplies a and b themselves by the two ratios of sines, not their
        directions. Where their lengths differ, its path is no arc, and its middle is too long or
        too short. It interpolates linearly where |cos(theta)| > 0.9995. It takes a tensor of 0 to
        be at a right angle (0.707 b at t = 1/2). In its order the base model is the first, the
        other model the second.

    Returns:
      A merge of exactly two models. It needs no base; one given only decides the output's dtypes.

    Raises:
      ValueError: Unless `t` is None or a finite number, and for another `compat`.

    References:
      Shoemake, Animating Rotation with Quaternion Curves, 1985.

    >>> slerp(t=0.5)([{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([0.0, 3.0])}])["a"].round(4)
    Array([1.4142, 1.4142], dtype=float32)
    """
    mergekit = choose(compat)(None, False, True)
    if t is not None:
        scalar("t", t, np.isfinite, "a finite number")
    time = () if t is None else (number(t),)
    reduction = combination(_slerp(mergekit), *time)
    return Merge(reduction=reduction, base="unused", models=(2, 2))


@method
def nuslerp(*, flatten: bool = True, row_wise: bool = False, compat: Compat = "paper") -> Merge:
    """Interpolates two models, or their task vectors if a base is given, along an arc (nuslerp).

    The result is (sin((1 - t) theta) a + sin(t theta) b) / sin(theta) with t = w_2 / (w_1 + w_2),
    or 1/2 where the weights sum to 0. In contrast to `slerp` it combines the vectors themselves,
    not their directions, as mergekit does, where the method comes from. Where a vector is 0, or the
    two point in opposite directions, it is (1 - t) a + t b, as in `slerp`.

    Args:
      flatten: Whether a vector is a whole tensor. Otherwise it is one run along the last axis.
      row_wise: Whether, with `flatten=False`, a vector instead holds all entries at one place on
        the last axis. (mergekit's tensors are [out, in], and there it is a run along the first
        axis, which is the same for matrices.) For Flax kernels, [in, out], `flatten=False,
        row_wise=True` takes the weights into one unit.
      compat: "mergekit" takes a vector of 0 to be at a right angle, as mergekit does. (For vectors
        in opposite directions, mergekit divides by a sine of about 1e-7.)

    Returns:
      A merge of exactly two models; a base is optional.

    Raises:
      ValueError: For another `compat`.

    References:
      mergekit 0.1.4, method `nuslerp`.

    >>> models = [{"a": jnp.array([[1.0, 0.0]])}, {"a": jnp.array([[0.0, 1.0]])}]
    >>> nuslerp()(models, weights=[1.0, 2.0])["a"].round(4)
    Array([[0.5  , 0.866]], dtype=float32)
    """
    mergekit = choose(compat)(None, False, True)
    scope: Extent = "tensor" if flatten else "column" if row_wise else "row"
    reduction = combination(_nuslerp(mergekit), scope=scope)
    return Merge(reduction=reduction, base="optional", models=(2, 2))


@method
def multislerp(
    *,
    normalize: bool = True,
    eps: Float[ArrayLike, ""] | None = None,
    compat: Compat = "paper",
) -> Merge:
    """Takes the weighted spherical mean of the task vectors, or of the models without a base.

    It is `karcher` with task vectors and optional normalisation. For two models it is `slerp` at
    t = w_2 / (w_1 + w_2).

    Args:
      normalize: Whether weights are divided by their sum. Otherwise the length of the result is
        multiplied by that sum, and the direction is the same.
      eps: What mergekit adds to lengths before it divides by them, 1e-8 by default. Only
        `compat="mergekit"` has it. Vectors of about that length count for less in the direction. A
        mean of directions shorter than it counts as 0, and the result is multiplied by cos(eps).
      compat: "mergekit" computes what the program of this name does: the normalised weighted mean
        of directions, times the weighted mean of lengths. (Its further step along a tangent has
        length 0, because it starts from that very mean. At t = 1/4 and a right angle the result is
        3.4 degrees off the arc.) Where the mean of directions is 0, mergekit stops with an error
        for more than two models, for instance for a frozen tensor. Here the result is the weighted
        mean of the vectors. A single model is returned as it is, whatever its weight.

    Returns:
      A merge of one or more models; a base is optional.

    Raises:
      ValueError: Unless `eps` is None or a finite number >= 0, for an `eps` with
        `compat="paper"`, and for another `compat`; when the merge is applied with `normalize`, for
        weights that sum to 0.

    References:
      mergekit 0.1.4, method `multislerp`.

    >>> models = [{"a": jnp.array([2.0, 0.0])}, {"a": jnp.array([0.0, 2.0])}]
    >>> multislerp()(models, weights=[2.0, 1.0])["a"].round(4)
    Array([1.7321, 1.    ], dtype=float32)
    """
    if choose(compat)(None, False, True):
        eps = 1e-8 if eps is None else eps
        scalar("eps", eps, lambda x: 0 <= x < np.inf, "a finite number >= 0")
        reduction = combination(_nlerp, number(eps))
    elif eps is not None:
        raise ValueError('eps: expected None unless compat="mergekit", which alone has it')
    else:
        reduction = combination(_karcher(False, *CONVERGED))
    return Merge(reduction=reduction, normalize=normalize, base="optional")


@method
def karcher(
    *,
    max_iterations: int | None = None,
    tolerance: float | None = None,
    compat: Compat = "paper",
) -> Merge:
    """Takes the weighted Karcher mean of the models' directions, times their weighted mean length.

    For each tensor the direction is the unit vector u that minimises sum_k w_k angle(u, theta_k)^2.
    It is found by the steps u <- exp_u(sum_k w_k log_u(theta_k)), from the normalised mean of
    directions. The steps work on the coefficients of u and cost next to nothing.

    The mean is unique, and does not depend on the order of the models, if all of them lie within a
    right angle of some direction. Special cases:

    - A tensor of 0 has no direction; only its length counts.
    - A tensor that points away from u (within 2.6 degrees of the opposite direction) does not pull
      u to any side.
    - Where the directions cancel (their mean is shorter than 1e-3) there is no mean direction to
      start from, and the result is the weighted mean of the vectors.

    Args:
      max_iterations: The largest number of steps; 60 by default.
      tolerance: The iteration stops once an upper bound of the step's length is below this; 1e-7 by
        default, static.
      compat: "mergekit" takes equal weights, whatever is given, 10 steps and a tolerance of 1e-5.
        Tensors shorter than the tolerance count as 0. Where directions cancel it starts from the
        first model. (mergekit also averages a base that is given, as one more model: list it as a
        model if that is meant.)

    Returns:
      A merge of one or more models, whose weights may not sum to 0. It needs no base; one given
      only decides the output's dtypes.

    Raises:
      ValueError: Unless `max_iterations` is an integer >= 0 and `tolerance` a number >= 0, and for
        another `compat`.
      TypeError: If `tolerance` is traced.

    References:
      Karcher, Riemannian center of mass and mollifier smoothing, 1977.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([0.0, 1.0])}]
    >>> karcher()(models)["a"].round(4)
    Array([0.7071, 0.7071], dtype=float32)
    """
    default = choose(compat)
    steps = default(max_iterations, CONVERGED[0], 10)
    integer("max_iterations", steps, 0)
    tolerance = default(tolerance, CONVERGED[1], 1e-5)
    tolerance = static("tolerance", tolerance, lambda x: 0 <= x < np.inf, "a number >= 0")
    coefficients = _karcher(compat == "mergekit", steps, tolerance)
    reduction = combination(coefficients)
    return Merge(reduction=reduction, normalize=True, base="unused")


@method
def model_stock(
    *,
    filter_wise: bool = False,
    input_axis: Literal[-1, 0] = -1,
    average: Average = "cosine",
    compat: Compat = "paper",
) -> Merge:
    """Moves from the base towards the mean model, as far as the models agree (Model Stock).

    For each tensor the result is base + t * (weighted mean of deltas). For N models, and the
    average cosine c between their deltas, t = N c / (1 + (N - 1) c). The closer the deltas are to
    one direction, the more of their mean is kept: all of it for copies, none of it for deltas at
    right angles. A tensor that did not move counts as at right angles to every other. The authors
    do not consider c < 0. It says that the models share nothing, so t is 0 there (which also covers
    the pole at c = -1/(N - 1), the least value that c can have).

    Args:
      filter_wise: Whether a vector holds the weights into one unit instead of a whole tensor.
      input_axis: With `filter_wise`, where the weights into one unit lie: along the last axis for
        weights [out, in] (-1, PyTorch, the default), along all other axes for Flax's [in, out] and
        [height, width, in, out] (0).
      average: What is averaged over pairs of models: the "cosine", or the "angle" (fusion_bench).
      compat: "mergekit" divides by max(|delta_j| |delta_k|, 1e-6), under which tensors with deltas
        below 1e-3 count as orthogonal even if they are copies. It lets t be negative for c < 0,
        without bound. Its infinity at the pole is t = 0 here.

    Returns:
      A merge of two or more models, which needs a base.

    Raises:
      ValueError: For another `average`, `input_axis` or `compat`.

    References:
      Jang et al., Model Stock, 2024 (arXiv 2403.19522), Eq. 5.

    >>> base, one = {"a": jnp.zeros(2)}, {"a": jnp.array([1.0, 0.0])}
    >>> other = {"a": jnp.array([0.6, 0.8])}  # c = 0.6, t = 0.75
    >>> model_stock()([one, other], base)["a"].tolist()
    [0.6000000238418579, 0.30000001192092896]
    """
    one_of("average", average, Average)
    one_of("input_axis", input_axis, (-1, 0))
    mergekit = choose(compat)(None, False, True)
    scope: Extent = "tensor" if not filter_wise else "row" if input_axis == -1 else "column"
    reduction = combination(_stock(average, mergekit), scope=scope)
    return Merge(reduction=reduction, normalize=True, models=(2, None))


CONVERGED = (60, 1e-7)
"""The most steps that `karcher` takes, and the length below which it stops, by default."""


def _inverse(x: Array) -> Array:
    """1/x, and 0 at 0."""
    return jnp.where(x != 0, 1 / jnp.where(x != 0, x, 1), 0)


def _squared_angle(cosine: Array) -> Array:
    """arccos(cosine)^2, smooth at 1 and beyond, where it goes on to negative numbers.

    For u = 1 - cosine < 0.01 it is the series 2u + u^2/3 + 4u^3/45 + u^4/35 + 16u^5/1575, which is
    off by 1e-13.
    """
    u = 1 - cosine
    series = u * (2 + u * (1 / 3 + u * (4 / 45 + u * (1 / 35 + u * 16 / 1575))))
    # arccos has an infinite slope at 1, where nearly parallel vectors lie: the series is smooth
    # there.
    far = u > 0.01
    return jnp.where(far, jnp.arccos(jnp.where(far, jnp.maximum(cosine, -1), 0)) ** 2, series)


def _wave(function: Callable[[Array], Array], first: int) -> Callable[[Array], Array]:
    """f(sqrt(q)) for an even f; for q < 0.1 by its alternating series, which is off by 1e-18."""

    def even(q: Array) -> Array:
        # Ratios of consecutive terms: `first` is 1 for cos, with 1/(1*2), 1/(3*4), and 2 for
        # sin(x)/x, with 1/(2*3), 1/(4*5). As Python's numbers, which leave the dtype of q to q.
        ratios = [-1 / ((2 * k + first) * (2 * k + first + 1)) for k in range(6)]
        terms = np.cumprod([1.0, *ratios]).tolist()
        far = q > 0.1
        series = functools.reduce(lambda total, term: total * q + term, terms[::-1])
        return jnp.where(far, function(jnp.sqrt(jnp.where(far, q, 1))), series)

    return even


_sinc = _wave(lambda x: jnp.sin(x) / x, 2)
_cos = _wave(jnp.cos, 1)


def _arc(t: Array, square: Array) -> tuple[Array, Array]:
    """sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta), given theta^2."""
    # sin(x theta) / sin(theta) = x sinc(x theta) / sinc(theta), which is no 0 / 0 at theta = 0.
    first, second = ((x * _sinc(x**2 * square) / _sinc(square)) for x in (1 - t, t))
    return first, second


def _share(weights: Float[Array, "task"]) -> Array:
    """w_2 / (w_1 + w_2), and 1/2 where the weights cancel."""
    mass, size = weights.sum(), jnp.abs(weights).sum()
    # A sum that is only rounding beside its terms counts as 0, as in `weighted_mean`.
    exists = jnp.abs(mass) > 10 * jnp.finfo(weights.dtype).eps * size
    return jnp.where(exists, weights[1] / jnp.where(exists, mass, 1), 0.5)


def _great_circle(t: Array, products: Products, right: bool) -> tuple[Array, Array, Array]:
    """Lengths, coefficients along the arc, and whether there is an arc.

    With `right`, a vector of 0 is taken to be at a right angle, as mergekit does.
    """
    lengths, cosine = products.lengths, products.cosines[..., 0, 1]
    exists = cosine > ANTIPODAL - 1
    ratios = _arc(t, _squared_angle(jnp.where(exists, cosine, 0)))
    exists = exists if right else exists & (lengths > 0).all(-1)
    return lengths, jnp.stack(ratios, -1), exists[..., None]


def _line(t: Array, like: Array) -> Array:
    """The coefficients 1 - t and t of linear interpolation."""
    return jnp.broadcast_to(jnp.stack([1 - t, t]).astype(like.dtype), like.shape)


@functools.cache
def _slerp(mergekit: bool) -> Callable[..., Array]:
    """The coefficients of `slerp`, for `reductions.combination`."""

    def coefficients(*args: Any) -> Array:
        *time, products, weights = args
        t = time[0].astype(products.inner.dtype) if time else _share(weights)
        lengths, ratios, exists = _great_circle(t, products, right=mergekit)
        line = _line(t, ratios)
        if mergekit:
            # mergekit tests |cos|, so it also takes the straight line for opposite vectors.
            cosine = jnp.abs(products.cosines[..., 0, 1])[..., None]
            return jnp.where(exists & (cosine <= 0.9995), ratios, line)
        length = (line * lengths).sum(-1, keepdims=True)
        # At t = 0 the length is the first's, to the bit, and the quotient 1.
        return jnp.where(exists, ratios * (length / jnp.where(lengths > 0, lengths, 1)), line)

    return coefficients


@functools.cache
def _nuslerp(mergekit: bool) -> Callable[..., Array]:
    """The coefficients of `nuslerp`."""

    def coefficients(products: Products, weights: Array) -> Array:
        t = _share(weights)
        _, ratios, exists = _great_circle(t, products, right=mergekit)
        return jnp.where(exists, ratios, _line(t, ratios))

    return coefficients


def _direction(cosines: Array, weights: Array, least: ArrayLike = 0.0) -> tuple[Array, Array]:
    """Coefficients of the normalised mean of directions, and whether it is longer than 1e-3.

    It has to be as long as `least`, too.
    """
    # |sum_k w_k u_k|^2 by the inner products u_j . u_k: the vectors themselves are not needed.
    square = jnp.einsum("...jk,...j,...k->...", cosines, weights, weights)[..., None]
    exists = square > 1e-6 * jnp.abs(weights).sum(-1, keepdims=True) ** 2
    exists &= square >= least**2
    return weights / jnp.sqrt(jnp.where(exists, square, 1)), exists


def _nlerp(eps: Array, products: Products, weights: Float[Array, "task"]) -> Array:
    """The normalised weighted mean of directions, times the weighted mean of lengths."""
    if len(weights) == 1:
        return jnp.ones_like(weights)
    lengths, cosines = products.lengths, products.cosines
    eps = eps.astype(lengths.dtype)
    mean, exists = _direction(
        cosines, weights * lengths * _inverse(lengths + eps / products.top), eps
    )
    length = (weights * lengths).sum(-1, keepdims=True) * jnp.cos(eps)
    return jnp.where(exists, length * mean * _inverse(lengths), weights)


@functools.cache
def _karcher(mergekit: bool, steps: int, tolerance: float) -> Callable[..., Array]:
    """The coefficients of `karcher`."""

    def coefficients(products: Products, weights: Float[Array, "task"]) -> Array:
        if mergekit:
            weights = jnp.full_like(weights, 1 / weights.size)
        lengths, cosines = products.lengths, products.cosines
        # mergekit's tolerance is one of true lengths, which may be too large for a number.
        counted = lengths > (tolerance / products.top if mergekit else 0)
        present = jnp.where(counted, weights, 0)
        mass = present.sum()
        # Divided by the sum of magnitudes, not by the sum, which may be near 0; its sign makes all
        # weights negative equal to all positive.
        share = present / jnp.where(mass != 0, jnp.sign(mass), 1) * _inverse(jnp.abs(present).sum())
        mean, exists = _direction(cosines, share)
        if mergekit:
            # mergekit starts from the first tensor where the mean direction does not exist.
            first = jnp.zeros_like(mean).at[jnp.argmax(counted)].set(1)
            mean = jnp.where(exists, mean, first)
            exists = counted.any(keepdims=True)

        def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            u, done = state
            # u is kept as coefficients of the models' directions: u . u_j = sum_k cosines[j, k]
            # u[k], and the length of u is sqrt(u^T cosines u).
            dots = cosines @ u
            sided = dots > CUT - 1
            # The inner where keeps the gradient finite at directions that the outer one discards.
            pull = jnp.where(sided, share / _sinc(_squared_angle(jnp.where(sided, dots, 0))), 0)
            along = (pull * dots).sum()  # the tangent is sum_k pull_k u_k - along * u
            tangent = pull - along * u
            square = jnp.maximum(tangent @ cosines @ tangent, 0)
            # A bound of the tangent's length, whose square is lost in rounding before it is small.
            done = done | (jnp.abs(tangent).sum() < tolerance)
            # exp_u(v) = cos|v| u + sin|v| / |v| v
            new = _cos(square) * u + _sinc(square) * tangent
            # Back to length 1, from which rounding leads away; the bound keeps the root finite.
            new = new / jnp.sqrt(jnp.maximum(new @ cosines @ new, ANTIPODAL))
            return jnp.where(done, u, new), done

        u, _ = lax.fori_loop(0, steps, step, (mean, ~exists.all()))
        length = (weights * lengths).sum()
        lengths = jnp.where(counted, lengths, 0)
        return jnp.where(exists, length * u * _inverse(lengths), 0 if mergekit else weights)

    return coefficients


@functools.cache
def _stock(average: Average, mergekit: bool) -> Callable[..., Array]:
    """The coefficients of `model_stock`."""

    def coefficients(products: Products, weights: Float[Array, "task"]) -> Array:
        n = len(weights)
        if mergekit:
            lengths = products.lengths
            size = lengths[..., :, None] * lengths[..., None, :]
            ratio = products.unit / products.top
            # mergekit's floor under the product of lengths, which makes short deltas look
            # orthogonal.
            floor = (1e-6 / products.top / products.top)[..., None]
            inner = products.inner * ratio[..., :, None] * ratio[..., None, :]
            cosines = inner / jnp.maximum(size, floor)
        else:
            cosines = products.cosines
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
        # Only mergekit's convention reaches the pole: without it c >= 0 and size >= 1.
        t = jnp.where(pole, 0, n * c / jnp.where(pole, 1, size))
        return t * weights

    return coefficients
