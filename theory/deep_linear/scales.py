"""Fine-tuning of two layers of unequal size, from fixed features to kernel regression.

A network W_1 w_2 with one output conserves D = W_1^T W_1 - w_2 w_2^T under gradient flow. Its
imbalance is the number r for which, in units of |beta_s|, one of these is true:

    D = r I                      a first layer of full rank (r >= 0)
    |w_2|^2 - |W_1|^2 = r        a network of rank one, as after pre-training from small weights

The predictor b obeys the same flow in both:

    db/dt = -[a g + (2a - r) unit (unit.g)],  a = (r + sqrt(r^2 + 4 |b|^2)) / 2,  unit = b/|b|

with the factor a where the gradient g is orthogonal to b, and a + (a - r) = 2a - r along b. At r =
0 this is the network of the paper, which starts at small weights. As r -> inf, a is constant, and
the network is linear regression. As r -> -inf, b turns more and more slowly relative to its growth.

At r < 0 the output weight w_2 of the second network may pass through 0 and change its sign. Its
root sqrt(a) then has the opposite sign, and so has the part of the source outside the row space of
the data. The limit of the flow is known in closed form up to this sign. No closed form of the sign
is known, but two facts make it cheap to compute:

    The loss decreases along the flow, and w_2 = 0 has the loss of the predictor 0. Therefore w_2
    changes its sign at most once, and never after the loss is below that of the predictor 0. |P
    W_1|^2 = w_2^2 - r - |(I - P) W_1|^2 must be >= 0 where w_2 = 0, so w_2 never changes its sign
    if a_s (a_s - r) q >= -r a_s, which is a_s^2 >= 1 - q.

The flow is therefore followed until its loss is that of the predictor 0, which takes a few steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear.estimators import check_data, scratch_fit

NODES = 8  # of the Marchenko-Pastur law; with 16 no crossing angle moved by 1e-4 degrees
STEP = 0.5  # over a bound on the Hessian's norm; crossing angles err by 0.003 degrees
STEPS = 48  # of the flow in the limit; 59 found a crossing angle to 1e-10
DATA_STEPS = 1000  # the same, for data of any spectrum
HALVINGS = 24  # of the interval of a crossing angle


@problems.in_float64
def unbalanced_scale(p: ArrayLike, q: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the absolute factor by which fine-tuning rescales the part outside the row space.

    Gradient flow moves b / sqrt(a) along X^T residual, so it conserves (I - P) b / sqrt(a). The
    factor is c = sqrt(a / a_s), and a solves a (a - r) = |b|^2 = p + q c^2, a quadratic equation:

        a = (B + sqrt(B^2 + 4 p)) / 2,  B = (1 - q) r + q a_s,  a_s = (r + sqrt(r^2 + 4)) / 2.

    It is `overlaps.null_scale` for depth 2 at r = 0, for depth 1 as r -> inf, and for infinite
    depth as r -> -inf. The factor itself is -c if the output weight changes its sign, which is
    possible only at r < 0; `unbalanced_limit` includes the sign.

    Args:
      p: |X^+ y|^2 / |beta_s|^2, >= 0.
      q: |(I - P) beta_s|^2 / |beta_s|^2 in [0, 1]; rounding beyond is cut off.
      imbalance: r, of either sign, finite.

    Returns:
      The factors c, with the broadcast shape of the arguments.

    Raises:
      ValueError: If p is negative or a value is not finite.

    References:
      Azulay et al., On the implicit bias of initialization shape, 2021 (arXiv 2102.09769), have
      potentials of this kind for training from small and from unbalanced starts.

    >>> [round(float(c), 3) for c in unbalanced_scale(2.0, 0.5, jnp.array([-1e3, 0.0, 1e3]))]
    [2.0, 1.299, 1.0]
    """
    problems.check("p", p, lambda p: (p >= 0) & (p < np.inf), "finite and >= 0")
    problems.check("imbalance", imbalance, lambda r: abs(r) < np.inf, "finite")
    q = jnp.clip(jnp.asarray(q, dtype=float), 0.0, 1.0)
    return _scale(jnp.asarray(p, dtype=float), 1 - q, q, jnp.asarray(imbalance, dtype=float))


def _scale(p: Array, seen: Array, q: Array, r: Array) -> Array:
    """Takes both seen and q = 1 - seen, because the larger one does not resolve a tiny one."""
    # The product of a and a - r is 1. The one without cancellation gives the other.
    larger = (abs(r) + jnp.hypot(r, 2.0)) / 2
    grows = r >= 0
    start = jnp.where(grows, larger, 1 / larger)
    b = seen * r + q * start
    root = jnp.hypot(b, 2 * jnp.sqrt(p))
    falls = b < 0
    a = jnp.where(falls, 2 * p / jnp.where(falls, root - b, 1.0), (b + root) / 2)
    return jnp.sqrt(jnp.where(grows, a / larger, a * larger))


@problems.defined
def unbalanced_limit(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    beta_s: Float[Array, " d"],
    imbalance: ArrayLike,
) -> Float[Array, " d"]:
    """Computes X^+ y + c (I - P) beta_s, the limit of fine-tuning an unbalanced network.

    The size of c is `unbalanced_scale`. Its sign is that of the output weight at the end. It is
    found by following the flow of one neuron until its loss is below that of the predictor 0.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Predictor of the pre-trained network `(d,)`, nonzero.
      imbalance: r in units of |beta_s|, as in `unbalanced_scale`; one number.

    Returns:
      The fitted weight vector `(d,)`.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, or beta_s is 0.

    >>> x, y = jnp.array([[2.0, 0.0]]), jnp.array([4.0])
    >>> [round(float(b), 3) for b in unbalanced_limit(x, y, jnp.array([0.0, 3.0]), 1e9)]
    [2.0, 3.0]
    >>> x, y = jnp.array([[1.0, 1.0]]), jnp.array([-2.0])  # the output weight changes its sign
    >>> [round(float(b), 3) for b in unbalanced_limit(x, y, jnp.array([1.0, 0.0]), -2.0)]
    [-1.804, -0.196]
    """
    check_data(x, y, beta_s)
    fitted, seen = scratch_fit(x, y), scratch_fit(x, x @ beta_s)
    unseen, size2 = beta_s - seen, beta_s @ beta_s
    c = unbalanced_scale(fitted @ fitted / size2, unseen @ unseen / size2, imbalance)
    modes = _modes_of_data(x, y / jnp.sqrt(size2), beta_s / jnp.sqrt(size2))
    turned = _changes_sign(modes, jnp.asarray(imbalance, dtype=float), DATA_STEPS)
    # In one dimension there is no path around the saddle at 0, which balanced layers cannot pass.
    stuck = (x.shape[1] == 1) & (jnp.asarray(imbalance) == 0) & (fitted @ beta_s < 0)
    return jnp.where(stuck, 0.0, fitted + jnp.where(turned, -c, c) * unseen)


class _Modes(NamedTuple):
    """Directions in the row space of the data, for a source of norm 1 and in any unit of time.

    Attributes:
      curvature: Eigenvalue of X^T X of each mode, `[..., modes]`.
      source: Coefficient of the source.
      pull: Coefficient of X^T y.
    """

    curvature: Array
    source: Array
    pull: Array


def _modes_of_data(x: Array, y: Array, source: Array) -> _Modes:
    """Computes the modes of a data set, in the unit in which the largest curvature is 1."""
    # A sign has no derivative, and an SVD has none if singular values coincide.
    x, y, source = (jax.lax.stop_gradient(v) for v in (x, y, source))
    left, values, right = linalg.svd(x, full_matrices=False)
    unit = values / jnp.where(values[0] > 0, values[0], 1.0)
    return _Modes(unit**2, right @ source, unit * (y @ left) / jnp.maximum(values[0], 1e-30))


def _modes_of_limit(load: Array, cos: Array, sin: Array, sigma: Array) -> _Modes:
    """Computes the modes of infinitely many Gaussian samples, grouped by their curvature.

    The curvatures have the Marchenko-Pastur law. At each, X^T y has a part along the source and a
    random orthogonal part. Its quadrature is exact for polynomials up to degree 2 NODES - 1,
    divided by the curvature.
    """
    load, cos, sin, sigma = (v[..., None] for v in jnp.broadcast_arrays(load, cos, sin, sigma))
    at = jnp.pi * jnp.arange(1, NODES + 1) / (NODES + 1)
    curvature = 1 + load + 2 * jnp.sqrt(load) * jnp.cos(at)
    mass = jnp.sqrt(2 * load / (NODES + 1) / curvature) * jnp.sin(at)
    across = jnp.sqrt(curvature * (curvature * sin**2 + sigma**2))
    return _Modes(
        jnp.concatenate([curvature, curvature], -1),
        jnp.concatenate([mass, jnp.zeros_like(mass)], -1),
        jnp.concatenate([mass * curvature * cos, mass * across], -1),
    )


def _changes_sign(modes: _Modes, r: Array, steps: int) -> Array:
    """Follows one neuron, by Runge and Kutta's method, until the sign of its last weight is known.

    Args:
      modes: The problem.
      r: Imbalance.
      steps: The largest number of steps. It is too small only next to the boundary between both
        limits.

    Returns:
      Whether the last weight changes its sign.
    """
    curvature, source, pull = modes
    top = curvature.max(-1)
    larger = (abs(r) + jnp.hypot(r, 2.0)) / 2
    last = 1 / jnp.sqrt(larger)  # at r < 0, where it may change its sign

    def speed(first: Array, last: Array) -> tuple[Array, Array]:
        gradient = last[..., None] * curvature * first - pull
        return -last[..., None] * gradient, -(first * gradient).sum(-1)

    def stepped(_: ArrayLike, at: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = at
        bent, along = (curvature * first**2).sum(-1), (pull * first).sum(-1)
        # The loss of the predictor 0, minus the loss.
        gained = last * along - last**2 * bent / 2
        # A bound on the norm of the Hessian.
        mixed = jnp.linalg.norm(pull, axis=-1)
        mixed += 2 * abs(last) * jnp.linalg.norm(curvature * first, axis=-1)
        h = STEP / (last**2 * top + bent + mixed)
        a = speed(first, last)
        b = speed(*_moved(at, a, h / 2))
        c = speed(*_moved(at, b, h / 2))
        d = speed(*_moved(at, c, h))
        mean = tuple((i + 2 * j + 2 * k + m) / 6 for i, j, k, m in zip(a, b, c, d, strict=True))
        moved, going = _moved(at, mean, h), (gained <= 0) & (last > 0)
        return jnp.where(going[..., None], moved[0], first), jnp.where(going, moved[1], last)

    start = source * jnp.sqrt(larger)[..., None]
    shape = jnp.broadcast_shapes(start.shape, pull.shape)
    at = jnp.broadcast_to(start, shape), jnp.broadcast_to(last, shape[:-1])
    return (jax.lax.fori_loop(0, steps, stepped, at)[1] < 0) & (r < 0)


def _moved(at: tuple, speed: tuple, h: Array) -> tuple[Array, Array]:
    """Moves both layers for a time h."""
    return at[0] + h[..., None] * speed[0], at[1] + h * speed[1]


@renamed("load", "theta", "sigma", "imbalance", until="0.4", gamma="load")
@problems.in_float64
def unbalanced_risk(
    *, load: ArrayLike, theta: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike
) -> Array:
    """Computes the limiting risk of fine-tuning an unbalanced network, as n, d -> inf.

        (1 - load)(1 - 2 c cos + c^2) + load sigma^2 / (1 - load)

    with c of `unbalanced_scale` at p = load (1 + sigma^2/(1 - load)), q = 1 - load, and -c beyond
    `crossing_angle`. As imbalance -> inf it is eq. (16) of the paper, which has c = 1.

    Args:
      load: Load n / d, in [0, 1).
      theta: Angle between source and target in radians, in [0, pi]; both have norm 1.
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Generalises Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.9.

    >>> risk = unbalanced_risk(load=0.5, theta=0.0, sigma=0.0, imbalance=-3.0)  # no noise
    >>> round(float(risk), 4)  # the same task
    0.0
    >>> risk = unbalanced_risk(load=0.5, theta=jnp.pi, sigma=0.0, imbalance=-3.0)
    >>> round(float(risk), 4)  # the opposite task: all weights change their sign
    0.0
    """
    problems.check_theta(theta)
    c = _limit_scale(load, sigma, imbalance)
    load, sigma, r = (jnp.asarray(v, dtype=float) for v in (load, sigma, imbalance))
    cos, sin = problems.cos_sin(theta)
    c = jnp.where(_limit_changes_sign(load, cos, sin, sigma, r), -c, c)
    return (1 - load) * ((c - cos) ** 2 + sin**2) + load * sigma**2 / (1 - load)


@renamed("load", "sigma", "imbalance", until="0.4", gamma="load")
@problems.in_float64
def unbalanced_boundary(*, load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the angle up to which fine-tuning helps, arccos(c / 2), in the limit.

    Beyond this angle fine-tuning hurts, but it helps again beyond `opposite_boundary`.

    Args:
      load: Load n / d, in [0, 1).
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      Angles in radians; 0 where fine-tuning always hurts.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(unbalanced_boundary(load=0.5, sigma=0.5, imbalance=1e6) / jnp.pi), 4)
    0.3333
    """
    c = _limit_scale(load, sigma, imbalance)
    return jnp.arccos(jnp.minimum(c / 2, 1.0))


@problems.in_float64
def crossing_angle(*, load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the angle beyond which fine-tuning of one neuron changes the sign of its output
    weight, in the limit.

    The risk jumps there. The angle is above 60 degrees, and tends to 90 degrees as imbalance ->
    -inf. It is the boundary between the basins of the two limits of the flow, found by bisection.

    Args:
      load: Load n / d, in [0, 1).
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      Angles in radians; pi if no angle changes the sign.

    Raises:
      ValueError: If an argument is out of range.

    >>> r = jnp.array([0.0, -2.0, -30.0])
    >>> angles = crossing_angle(load=0.4, sigma=0.3, imbalance=r)
    >>> [round(float(angle) * 180 / jnp.pi, 1) for angle in angles]
    [180.0, 127.4, 90.2]
    """
    _check_limit(load, sigma, imbalance)
    given = (jnp.asarray(v, dtype=float) for v in (load, sigma, imbalance))
    load, sigma, r = jnp.broadcast_arrays(*given)

    def halved(_: ArrayLike, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        turned = _limit_changes_sign(load, jnp.cos(middle), jnp.sin(middle), sigma, r)
        return jnp.where(turned, ends[0], middle), jnp.where(turned, middle, ends[1])

    ends = jnp.full_like(r, jnp.pi / 3), jnp.full_like(r, jnp.pi)
    return jax.lax.fori_loop(0, HALVINGS, halved, ends)[1]


@problems.in_float64
def opposite_boundary(*, load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the angle beyond which fine-tuning helps again, because the output weight changes
    its sign, in the limit.

    It is the larger of `crossing_angle` and pi - arccos(c / 2).

    Args:
      load: Load n / d, in [0, 1).
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      Angles in radians; pi if fine-tuning helps at no angle beyond `unbalanced_boundary`.

    Raises:
      ValueError: If an argument is out of range.

    >>> angle = opposite_boundary(load=0.4, sigma=0.3, imbalance=-2.0)
    >>> round(float(angle) * 180 / jnp.pi, 1)
    127.4
    """
    mirrored = jnp.pi - unbalanced_boundary(load=load, sigma=sigma, imbalance=imbalance)
    return jnp.maximum(mirrored, crossing_angle(load=load, sigma=sigma, imbalance=imbalance))


def _limit_changes_sign(load: Array, cos: Array, sin: Array, sigma: Array, r: Array) -> Array:
    """Checks whether the output weight changes its sign, in the limit of large n and d."""
    cos, sin, r = jnp.broadcast_arrays(cos, sin, r)
    return _changes_sign(_modes_of_limit(load, cos, sin, sigma), r, STEPS)


def _check_limit(load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> None:
    """Checks the arguments of limits of large n and d."""
    allowed = "a load in [0, 1): from n = d on fine-tuning equals scratch training"
    problems.check("load", load, lambda g: (g >= 0) & (g < 1), allowed)
    problems.check_sigma(sigma)
    problems.check("imbalance", imbalance, lambda r: abs(r) < np.inf, "finite")


def _limit_scale(load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes |c| in the limit of large n and d, for tasks of norm 1."""
    _check_limit(load, sigma, imbalance)
    load, sigma, r = (jnp.asarray(v, dtype=float) for v in (load, sigma, imbalance))
    return _scale(load * (1 + sigma**2 / (1 - load)), load, 1 - load, r)
