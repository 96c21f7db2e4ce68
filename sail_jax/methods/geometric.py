"""Interpolation on spheres, and means of directions: slerp, nuslerp, Karcher, Model Stock.

Each result is a linear combination of task vectors. The coefficients depend only on the lengths of
the vectors and the angles between them (`reductions.combination`). Rotating all inputs therefore
rotates the result. A tensor of any size requires two passes and constant memory.
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
"""Below this 1 + cosine (0.3 degrees from opposite), float32 cannot determine the great circle."""
CUT = 1e-3
"""Below this 1 + cosine (2.6 degrees from opposite), a direction does not pull the mean."""


@method
def slerp(
    *, t: Annotated[Float[ArrayLike, ""] | None, Range(0.0, 1.0)] = None, compat: Compat = "paper"
) -> Merge:
    r"""Interpolates two models along the arc between their directions, tensor by tensor (slerp).

    The two tensors are vectors a and b with the angle :math:`\phi` between them. The direction and
    the length of the result are

    .. math::

        \frac{\sin((1 - t) \phi) \, a / |a| + \sin(t \phi) \, b / |b|}{\sin \phi},
        \qquad (1 - t) |a| + t |b|

    t = 0 gives the first model and t = 1 the second. The result is (1 - t) a + t b where no arc
    exists: if a or b is 0, or if they point in opposite directions. (Within 0.3 degrees of opposite
    directions, float32 cannot determine the arc.) Near :math:`\phi = 0` the limit of the formula is
    used, without a threshold.

    Args:
      t: The position on the arc. By default :math:`w_2 / (w_1 + w_2)`, so equal weights give 0.5.
        If `t` is given, weights are ignored. Numbers outside [0, 1] extrapolate along the great
        circle.
      compat: "mergekit" multiplies a and b by the two ratios of sines instead of multiplying their
        directions. Where their lengths differ, its path is not an arc and its middle is too long or
        too short. It interpolates linearly where the cosine of the angle exceeds 0.9995 in
        magnitude. It assumes a right angle if a tensor is 0 (0.707 b at t = 1/2). Its first model
        is the base model.

    Returns:
      A merge of exactly two models. A base is optional and only determines the output's dtypes.

    Raises:
      ValueError: Unless `t` is None or a finite number, or for an unknown `compat`.

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
    r"""Interpolates two models, or their task vectors if a base is given, along an arc (nuslerp).

    With the angle :math:`\phi` between the vectors a and b, the result is

    .. math::

        \frac{\sin((1 - t) \phi) \, a + \sin(t \phi) \, b}{\sin \phi},
        \qquad t = \frac{w_2}{w_1 + w_2}

    t is 1/2 where the weights sum to 0. Unlike `slerp`, this formula combines the vectors and not
    their directions. Where a vector is 0, or the two point in opposite directions, the result is (1
    - t) a + t b, as in `slerp`.

    Args:
      flatten: Whether a vector is a whole tensor. If not, a vector runs along the last axis.
      row_wise: With `flatten=False`, whether a vector instead consists of all entries with the same
        index on the last axis. In mergekit's layout [out, in] a vector then runs along the first
        axis, which is equal for matrices. For Flax kernels [in, out], `flatten=False,
        row_wise=True` makes the input weights of one unit a vector.
      compat: "mergekit" assumes a right angle if a vector is 0. (For opposite vectors, mergekit
        itself divides by a sine of about 1e-7.)

    Returns:
      A merge of exactly two models. A base is optional.

    Raises:
      ValueError: For an unknown `compat`.

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
    """Computes the weighted spherical mean of the task vectors, or of the models without a base.

    The method is `karcher` on task vectors, with optional normalisation. For two models it is
    `slerp` at :math:`t = w_2 / (w_1 + w_2)`.

    Args:
      normalize: Whether weights are divided by their sum. If not, the length of the result is
        multiplied by that sum. The direction stays the same.
      eps: A number that mergekit adds to lengths before dividing by them, 1e-8 by default. It
        requires `compat="mergekit"`. Vectors of about this length count less in the direction. A
        mean direction shorter than eps counts as 0. The result is multiplied by cos(eps).
      compat: "mergekit" computes the normalised weighted mean of directions, times the weighted
        mean of lengths. Its further step along a tangent has length 0, because the step starts from
        this mean. At t = 1/4 and a right angle the result is 3.4 degrees off the arc. With more
        than two models mergekit fails where the mean of directions is 0, for instance on a frozen
        tensor. Here the result is the weighted mean of the vectors. A single model is returned
        unchanged, for any weight.

    Returns:
      A merge of one or more models. A base is optional.

    Raises:
      ValueError: Unless `eps` is None or a finite number >= 0, for an `eps` with `compat="paper"`,
        or for an unknown `compat`. When the merge is applied with `normalize`, for weights that sum
        to 0.

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
        raise ValueError(f'eps: expected None unless compat="mergekit", got {eps!r}')
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
    r"""Computes the weighted Karcher mean of the models' directions, times their mean length.

    For each tensor the direction is the unit vector

    .. math:: u = \arg\min_{|u| = 1} \sum_k w_k \angle(u, \theta_k)^2

    The iteration :math:`u \leftarrow \exp_u(\sum_k w_k \log_u \theta_k)` finds it, starting from
    the normalised mean of directions. The length is the weighted mean of the models' lengths. The
    steps work on the coefficients of u and cost almost nothing.

    The mean is unique if all models lie within a right angle of some direction. It then does not
    depend on the order of the models. Special cases:

    - The direction of a tensor of 0 is undefined. Only its length counts.
    - A tensor within 2.6 degrees of the direction opposite to u does not pull u.
    - Where the directions cancel (their mean is shorter than 1e-3), no starting direction exists.
      The result is the weighted mean of the vectors.

    Args:
      max_iterations: The largest number of steps, 60 by default.
      tolerance: The iteration stops when an upper bound of the step length is below this, 1e-7 by
        default, static.
      compat: "mergekit" ignores the weights and uses 10 steps and a tolerance of 1e-5. Tensors
        shorter than the tolerance count as 0. Where directions cancel, it starts from the first
        model. (mergekit also averages a given base as one more model. List the base as a model to
        do the same.)

    Returns:
      A merge of one or more models. The weights must not sum to 0. A base is optional and only
      determines the output's dtypes.

    Raises:
      ValueError: Unless `max_iterations` is an integer >= 0 and `tolerance` a number >= 0, or for
        an unknown `compat`.
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
    r"""Moves from the base towards the mean model, as far as the models agree (Model Stock).

    For N models with the average cosine c between their task vectors, each tensor becomes

    .. math:: \theta = \theta_0 + t \, \bar\delta, \qquad t = \frac{N c}{1 + (N - 1) c}

    :math:`\bar\delta` is the weighted mean of the task vectors. If they are copies, their whole
    mean is kept. If they are at right angles, nothing is kept. A tensor that did not change counts
    as orthogonal to every other. t is 0 for c < 0, a case that the authors do not consider, in
    which the models disagree. This also covers the pole at c = -1/(N - 1), the smallest possible c.

    Args:
      filter_wise: Whether a vector consists of the input weights of one unit instead of a whole
        tensor.
      input_axis: With `filter_wise`, the axes of a unit's input weights. -1 is the last axis, for
        weights [out, in] (PyTorch, the default). 0 is all axes but the last, for Flax's [in, out]
        and [height, width, in, out].
      average: The quantity that is averaged over pairs of models: "cosine", or "angle" as in
        fusion_bench.
      compat: "mergekit" divides by max(|delta_j| |delta_k|, 1e-6). Tensors with deltas shorter than
        1e-3 then count as orthogonal even if they are copies. Its t is negative for c < 0, without
        bound. Where mergekit returns infinity at the pole, t is 0 here.

    Returns:
      A merge of two or more models. It requires a base.

    Raises:
      ValueError: For an unknown `average`, `input_axis` or `compat`.

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
"""The default limits of `karcher`: the number of steps, and the length below which it stops."""


def _inverse(x: Array) -> Array:
    """Computes 1/x, and 0 at 0."""
    return jnp.where(x != 0, 1 / jnp.where(x != 0, x, 1), 0)


def _squared_angle(cosine: Array) -> Array:
    """Computes arccos(cosine)^2, continued smoothly beyond 1 to negative numbers.

    For u = 1 - cosine < 0.01 this uses the series 2u + u^2/3 + 4u^3/45 + u^4/35 + 16u^5/1575. Its
    error is 1e-13.
    """
    u = 1 - cosine
    series = u * (2 + u * (1 / 3 + u * (4 / 45 + u * (1 / 35 + u * 16 / 1575))))
    # arccos has an infinite slope at 1, where nearly parallel vectors lie. The series is smooth.
    far = u > 0.01
    return jnp.where(far, jnp.arccos(jnp.where(far, jnp.maximum(cosine, -1), 0)) ** 2, series)


def _wave(function: Callable[[Array], Array], first: int) -> Callable[[Array], Array]:
    """Computes f(sqrt(q)) for an even f, for q < 0.1 by the alternating series with error 1e-18."""

    def even(q: Array) -> Array:
        # Ratios of consecutive terms. `first` is 1 for cos, with 1/(1*2), 1/(3*4), and 2 for
        # sin(x)/x, with 1/(2*3), 1/(4*5). Python numbers do not change the dtype of q.
        ratios = [-1 / ((2 * k + first) * (2 * k + first + 1)) for k in range(6)]
        terms = np.cumprod([1.0, *ratios]).tolist()
        far = q > 0.1
        series = functools.reduce(lambda total, term: total * q + term, terms[::-1])
        return jnp.where(far, function(jnp.sqrt(jnp.where(far, q, 1))), series)

    return even


_sinc = _wave(lambda x: jnp.sin(x) / x, 2)
_cos = _wave(jnp.cos, 1)


def _arc(t: Array, square: Array) -> tuple[Array, Array]:
    """Computes sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta) from theta^2."""
    # sin(x theta) / sin(theta) = x sinc(x theta) / sinc(theta). This form avoids 0 / 0 at theta =
    # 0.
    first, second = ((x * _sinc(x**2 * square) / _sinc(square)) for x in (1 - t, t))
    return first, second


def _share(weights: Float[Array, "task"]) -> Array:
    """Computes w_2 / (w_1 + w_2), and 1/2 if the weights cancel."""
    mass, size = weights.sum(), jnp.abs(weights).sum()
    # A sum as small as the rounding of its terms counts as 0, as in `weighted_mean`.
    exists = jnp.abs(mass) > 10 * jnp.finfo(weights.dtype).eps * size
    return jnp.where(exists, weights[1] / jnp.where(exists, mass, 1), 0.5)


def _great_circle(t: Array, products: Products, right: bool) -> tuple[Array, Array, Array]:
    """Computes lengths, coefficients along the arc, and whether an arc exists.

    With `right`, a vector of 0 counts as orthogonal to the other, as in mergekit.
    """
    lengths, cosine = products.lengths, products.cosines[..., 0, 1]
    exists = cosine > ANTIPODAL - 1
    ratios = _arc(t, _squared_angle(jnp.where(exists, cosine, 0)))
    exists = exists if right else exists & (lengths > 0).all(-1)
    return lengths, jnp.stack(ratios, -1), exists[..., None]


def _line(t: Array, like: Array) -> Array:
    """Returns the coefficients 1 - t and t of linear interpolation."""
    return jnp.broadcast_to(jnp.stack([1 - t, t]).astype(like.dtype), like.shape)


@functools.cache
def _slerp(mergekit: bool) -> Callable[..., Array]:
    """Computes the coefficients of `slerp`, for `reductions.combination`."""

    def coefficients(*args: Any) -> Array:
        *time, products, weights = args
        t = time[0].astype(products.inner.dtype) if time else _share(weights)
        lengths, ratios, exists = _great_circle(t, products, right=mergekit)
        line = _line(t, ratios)
        if mergekit:
            # mergekit tests |cos|, so it also interpolates linearly between opposite vectors.
            cosine = jnp.abs(products.cosines[..., 0, 1])[..., None]
            return jnp.where(exists & (cosine <= 0.9995), ratios, line)
        length = (line * lengths).sum(-1, keepdims=True)
        # At t = 0 the length equals the first vector's bit for bit, and the quotient is 1.
        return jnp.where(exists, ratios * (length / jnp.where(lengths > 0, lengths, 1)), line)

    return coefficients


@functools.cache
def _nuslerp(mergekit: bool) -> Callable[..., Array]:
    """Computes the coefficients of `nuslerp`."""

    def coefficients(products: Products, weights: Array) -> Array:
        t = _share(weights)
        _, ratios, exists = _great_circle(t, products, right=mergekit)
        return jnp.where(exists, ratios, _line(t, ratios))

    return coefficients


def _direction(cosines: Array, weights: Array, least: ArrayLike = 0.0) -> tuple[Array, Array]:
    """Computes coefficients of the normalised mean of directions, and whether the mean exists.

    The mean exists if it is longer than 1e-3 and at least as long as `least`.
    """
    # |sum_k w_k u_k|^2 follows from the inner products u_j . u_k. The vectors are not needed.
    square = jnp.einsum("...jk,...j,...k->...", cosines, weights, weights)[..., None]
    exists = square > 1e-6 * jnp.abs(weights).sum(-1, keepdims=True) ** 2
    exists &= square >= least**2
    return weights / jnp.sqrt(jnp.where(exists, square, 1)), exists


def _nlerp(eps: Array, products: Products, weights: Float[Array, "task"]) -> Array:
    """Computes the normalised weighted mean of directions, times the weighted mean of lengths."""
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
    """Computes the coefficients of `karcher`."""

    def coefficients(products: Products, weights: Float[Array, "task"]) -> Array:
        if mergekit:
            weights = jnp.full_like(weights, 1 / weights.size)
        lengths, cosines = products.lengths, products.cosines
        # mergekit's tolerance refers to true lengths, which may overflow.
        counted = lengths > (tolerance / products.top if mergekit else 0)
        present = jnp.where(counted, weights, 0)
        mass = present.sum()
        # Dividing by the sum of magnitudes is safe where the sum is near 0. The sign of the sum
        # makes all-negative weights equal to all-positive weights.
        share = present / jnp.where(mass != 0, jnp.sign(mass), 1) * _inverse(jnp.abs(present).sum())
        mean, exists = _direction(cosines, share)
        if mergekit:
            # Without a mean direction, mergekit starts from the first tensor.
            first = jnp.zeros_like(mean).at[jnp.argmax(counted)].set(1)
            mean = jnp.where(exists, mean, first)
            exists = counted.any(keepdims=True)

        def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            u, done = state
            # u contains coefficients of the models' directions. Hence u . u_j = sum_k cosines[j, k]
            # u[k], and the length of u is sqrt(u^T cosines u).
            dots = cosines @ u
            sided = dots > CUT - 1
            # The inner where keeps the gradient finite at directions that the outer one discards.
            pull = jnp.where(sided, share / _sinc(_squared_angle(jnp.where(sided, dots, 0))), 0)
            along = (pull * dots).sum()  # the tangent is sum_k pull_k u_k - along * u
            tangent = pull - along * u
            square = jnp.maximum(tangent @ cosines @ tangent, 0)
            # An upper bound of the tangent's length. The exact square is lost to rounding before it
            # is small.
            done = done | (jnp.abs(tangent).sum() < tolerance)
            # exp_u(v) = cos|v| u + sin|v| / |v| v
            new = _cos(square) * u + _sinc(square) * tangent
            # Restores length 1, because rounding changes it. The lower bound keeps the root finite.
            new = new / jnp.sqrt(jnp.maximum(new @ cosines @ new, ANTIPODAL))
            return jnp.where(done, u, new), done

        u, _ = lax.fori_loop(0, steps, step, (mean, ~exists.all()))
        length = (weights * lengths).sum()
        lengths = jnp.where(counted, lengths, 0)
        return jnp.where(exists, length * u * _inverse(lengths), 0 if mergekit else weights)

    return coefficients


@functools.cache
def _stock(average: Average, mergekit: bool) -> Callable[..., Array]:
    """Computes the coefficients of `model_stock`."""

    def coefficients(products: Products, weights: Float[Array, "task"]) -> Array:
        n = len(weights)
        if mergekit:
            lengths = products.lengths
            size = lengths[..., :, None] * lengths[..., None, :]
            ratio = products.unit / products.top
            # mergekit's lower bound on the product of lengths. It makes short deltas look
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
        # Only mergekit's convention reaches the pole. Otherwise c >= 0 and size >= 1.
        t = jnp.where(pole, 0, n * c / jnp.where(pole, 1, size))
        return t * weights

    return coefficients
