"""Distances between two linear tasks as laws of (x, y): KL, total variation, Wasserstein, Dudley.

The setting is Section 2.1 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194). Inputs are x
~ N(0, I_d), and y = beta.x + sigma noise with beta = beta_s or beta_t of any norm. There are closed
forms where they exist, and two-sided bounds elsewhere. Vectors are `(..., d)`; leading axes
broadcast with each other and with sigma. Everything is computed in float64, regardless of the
caller's precision.

Three dimensions are sufficient. Outside the plane of the tasks, x is independent of the rest and
has the same law for both. It can be coupled identically, and projecting it away is 1-Lipschitz. In
the plane, take u along delta = beta_s - beta_t and v orthogonal to it. The laws of (u, v, y) are
Gaussian. Under the source y = s u + v0 v + sigma noise, under the target y = t u + v0 v + sigma
noise, and s
- t = |delta|.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from theory import problems

Vector = Float[ArrayLike, "*b d"]


class Bounds(NamedTuple):
    """A lower and an upper bound of a distance.

    Attributes:
      lower: A lower bound.
      upper: An upper bound.
    """

    lower: Array
    upper: Array


class _Tasks(NamedTuple):
    """Slopes of y in (u, v), all `(...)`: (s, v0) for the source and (t, v0) for the target.

    `gap` is s - t = |delta|.
    """

    gap: Array
    s: Array
    t: Array
    v0: Array
    sigma: Array


@problems.in_float64
def kl(
    beta_s: Vector, beta_t: Vector, sigma: ArrayLike, *, allow_infinite: bool = False
) -> Float[Array, "*b"]:
    """Computes the Kullback-Leibler divergence between the laws of two tasks.

    D_KL(p_s || p_t) = |beta_s - beta_t|^2 / (2 sigma^2), which is symmetric.

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.
      allow_infinite: Whether sigma = 0 is allowed; it gives inf, or 0 between equal tasks.

    Returns:
      The divergences.

    Raises:
      ValueError: If sigma = 0 and `allow_infinite` is False, sigma is out of range, a task is not
        finite, or shapes do not conform.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (33), (34).

    >>> float(kl(jnp.array([1.0, 0.0]), jnp.array([-1.0, 0.0]), 0.5))
    8.0
    """
    tasks = _tasks(beta_s, beta_t, sigma)
    if not allow_infinite:
        allowed = "positive (at 0 the divergence is infinite; allow_infinite=True returns inf)"
        problems.check("sigma", sigma, lambda s: s > 0, allowed)
    gap2 = tasks.gap**2
    noisy = tasks.sigma > 0
    finite = gap2 / (2 * jnp.where(noisy, tasks.sigma, 1.0) ** 2)
    return jnp.where(noisy, finite, jnp.where(gap2 > 0, jnp.inf, 0.0))


@problems.in_float64
def total_variation(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Float[Array, "*b"]:
    """Computes the total variation distance between the laws of two tasks.

    It is the largest p_s(A) - p_t(A) over events A, which equals (2/pi) arctan(|delta| / (2
    sigma)). Given x, the laws of y are two normals with means delta.x apart. The formula is the
    mean over delta.x ~ N(0, |delta|^2).

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The distances, in [0, 1].

    Raises:
      ValueError: If sigma is out of range, a task is not finite, or shapes do not conform.
    """
    return _total_variation(_tasks(beta_s, beta_t, sigma))


def _total_variation(tasks: _Tasks) -> Array:
    return 2 / jnp.pi * jnp.arctan2(tasks.gap, 2 * tasks.sigma)


@problems.in_float64
def wasserstein2(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Float[Array, "*b"]:
    """Computes the Wasserstein-2 (Bures) distance between the laws of two tasks.

    Formulated as a Procrustes problem, it stays accurate for small distances.

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The distances, Euclidean in (x, y).

    Raises:
      ValueError: If sigma is out of range, a task is not finite, or shapes do not conform.
    """
    return jnp.linalg.norm(_displacement(_tasks(beta_s, beta_t, sigma)), axis=(-2, -1))


@problems.in_float64
def wasserstein1_bounds(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Bounds:
    """Bounds the Wasserstein-1 distance between the laws of two tasks, Euclidean in (x, y).

    The upper bound is the smaller mean displacement of two couplings. One shares x and the noise,
    with mean displacement sqrt(2/pi) |delta|. The other is optimal for W_2. The lower bound is the
    best 1-Lipschitz witness of the form (|(w + w').z| - |(w - w').z|) / 2 with |w|, |w'| <= 1. w
    lies in the plane of (u, y), and w' in the plane of (v, y). One of these witnesses is |y|, by
    which W_1 is unbounded (Features are fate, Thm 2.2). At sigma = 0 and beta_t = -beta_s of norm 1
    both bounds are 2 sqrt(2/pi).

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      Lower and upper bounds.

    Raises:
      ValueError: If sigma is out of range, a task is not finite, or shapes do not conform.
    """
    return _wasserstein1_bounds(_tasks(beta_s, beta_t, sigma))


@jax.jit
def _wasserstein1_bounds(tasks: _Tasks) -> Bounds:
    angles = jnp.linspace(-jnp.pi / 2, jnp.pi / 2, 49)
    y, across = jnp.sin(angles), jnp.cos(angles)
    w = jnp.stack([across, jnp.zeros_like(y), y], -1)[:, None]
    w_ = jnp.stack([jnp.zeros_like(y), across, y], -1)[None, :]
    # E|a.z| = sqrt(2/pi) sd(a.z), so each witness is a difference of two spreads, source minus
    # target.
    gains = _spread_gain(tasks, (w + w_) / 2) - _spread_gain(tasks, (w - w_) / 2)
    lower = jnp.sqrt(2 / jnp.pi) * jnp.abs(gains).max((-2, -1))
    shared = jnp.sqrt(2 / jnp.pi) * tasks.gap
    return Bounds(lower, jnp.minimum(shared, _mean_length(_displacement(tasks))))


@problems.in_float64
def cosine_gap(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Float[Array, "*b"]:
    """Computes |E_s h - E_t h| of the witness h = cos(y)/2, a lower bound of the Dudley metric.

        exp(-sigma^2/2) |exp(-|beta_s|^2/2) - exp(-|beta_t|^2/2)| / 2

    The paper's eq. (28) continues with the wrong sign. cos a + a^2 >= cos b - b^2 gives cos a - cos
    b >= -(a^2 + b^2), not a^2 + b^2.

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The lower bounds.

    Raises:
      ValueError: If sigma is out of range, a task is not finite, or shapes do not conform.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (27).
    """
    tasks = _tasks(beta_s, beta_t, sigma)
    s2, t2 = tasks.s**2 + tasks.v0**2, tasks.t**2 + tasks.v0**2
    # exp(-a) - exp(-b) is computed from the smaller exponent and their difference, |s^2 -
    # t^2| = gap |s + t|, which is exact here.
    smaller, apart = jnp.minimum(s2, t2), tasks.gap * jnp.abs(tasks.s + tasks.t)
    return -0.5 * jnp.exp(-(tasks.sigma**2 + smaller) / 2) * jnp.expm1(-apart / 2)


@problems.in_float64
def dudley_bounds(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Bounds:
    """Bounds the Dudley metric, sup |E_s h - E_t h| over |h|_Lipschitz + |h|_inf <= 1.

    Write L = |h|_Lipschitz and M = 1 - L. The upper bound is the smaller of two. The coupling
    that shares x and the noise gives the largest E min(L |delta.x|, 2 M) over L. A witness is at
    most min(L W_1, 2 M TV), which gives 2 W_1 TV / (W_1 + 2 TV). Both are below 2 for all tasks, so
    the Dudley half of Thm 2.2 cannot hold for delta >= 2. The lower bound is the best over L of two
    kinds of witness. M - min(L |a.z|, 2 M), with a in the plane of (u, y), tends to 2 as the tasks
    grow apart. The other is min(L |u|, L |w.z|, M) with the sign of u w.z, with w in the plane of
    (v, y).

    Args:
      beta_s: Source tasks `(..., d)`.
      beta_t: Target tasks `(..., d)`.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      Lower and upper bounds.

    Raises:
      ValueError: If sigma is out of range, a task is not finite, or shapes do not conform.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (23), (24) and Thm 2.2.
    """
    return _dudley_bounds(_tasks(beta_s, beta_t, sigma))


@jax.jit
def _dudley_bounds(tasks: _Tasks) -> Bounds:
    angles = jnp.linspace(-jnp.pi / 2, jnp.pi / 2, 49)
    y, across, zero = jnp.sin(angles), jnp.cos(angles), jnp.zeros_like(angles)
    # Tasks far apart require an L near the inverse of their gap, so a part of the grid is
    # logarithmic.
    L = jnp.concatenate([jnp.geomspace(1e-6, 0.05, 30), jnp.linspace(0.1, 0.9, 25)])
    clip = (1 - L) / L
    along, target = _spreads(tasks, jnp.stack([across, zero, y], -1)[:, None])
    # min(L |a.z|, 2 M) = L min(|a.z|, 2 M / L), with M / L = `clip`.
    fall = _clipped_mean(along, 2 * clip) - _clipped_mean(target, 2 * clip)
    spreads = _spreads(tasks, jnp.stack([zero, across, y], -1)[:, None])
    s, t = tasks.s[..., None, None], tasks.t[..., None, None]
    means = [
        _clipped_joint_mean(spread, slope * y[:, None], clip[-25:])
        for spread, slope in zip(spreads, (s, t), strict=True)
    ]
    lower = jnp.maximum(
        (L * jnp.abs(fall)).max((-2, -1)), (L[-25:] * jnp.abs(means[0] - means[1])).max((-2, -1))
    )
    w1, tv = _wasserstein1_bounds(tasks).upper, _total_variation(tasks)
    apart = tasks.gap > 0
    mixed = jnp.where(apart, 2 * w1 * tv / jnp.where(apart, w1 + 2 * tv, 1.0), 0.0)
    return Bounds(lower, jnp.minimum(mixed, _truncated_displacement(tasks.gap)))


@problems.defined
def coupled_samples(
    key: Array,
    n: int,
    beta_s: Float[ArrayLike, " d"],
    beta_t: Float[ArrayLike, " d"],
    sigma: ArrayLike,
) -> tuple[Float[Array, "n 3"], Float[Array, "n 3"]]:
    """Draws samples of both laws in three dimensions, which preserve W_1 and the Dudley metric.

    Points are independent within a law. Between the laws they have the W_2-optimal coupling.
    Distances are convex, so samples are on average at least as far apart as the laws. With this
    coupling the sampled W_1 is on average at most W_2, and 0 at beta_s = beta_t, where the error of
    independent samples is largest.

    Args:
      key: Random key.
      n: Number of points of either law, at least 1.
      beta_s: Source task `(d,)`.
      beta_t: Target task `(d,)`.
      sigma: Standard deviation of the label noise, >= 0, a scalar.

    Returns:
      Points (u, v, y) of the source and of the target, each `(n, 3)`.

    Raises:
      ValueError: If n < 1, there is more than one pair of tasks, sigma is out of range, a task is
        not finite, or shapes do not conform.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1; got {n}")
    tasks = _tasks(beta_s, beta_t, sigma)
    if tasks.gap.ndim:
        raise ValueError(
            "coupled_samples takes one pair of tasks, beta_s [d] and beta_t [d], and one sigma; "
            f"got leading axes {tasks.gap.shape}"
        )
    return _coupled_samples(key, n, tasks)


@partial(jax.jit, static_argnums=1)
def _coupled_samples(key: Array, n: int, tasks: _Tasks) -> tuple[Array, Array]:
    normal = jax.random.normal(key, (n, 3), tasks.gap.dtype)
    source, target = _factors(tasks)
    return normal @ source.T, normal @ (target @ _rotation(source, target)).T


def _tasks(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> _Tasks:
    """Checks two tasks and projects them on the plane that they span."""
    for name, beta in (("beta_s", beta_s), ("beta_t", beta_t)):
        if (values := concrete(beta)) is not None and not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite")
    problems.check_sigma(sigma)
    beta_s, beta_t = (jnp.asarray(b, dtype=float) for b in (beta_s, beta_t))
    if not beta_s.ndim or not beta_t.ndim or beta_s.shape[-1] != beta_t.shape[-1]:
        raise ValueError(
            "beta_s and beta_t must be vectors [..., d] of one d; got shapes "
            f"{beta_s.shape} and {beta_t.shape}"
        )
    return _plane(beta_s, beta_t, jnp.asarray(sigma, dtype=float))


@jax.jit
def _plane(beta_s: Array, beta_t: Array, sigma: Array) -> _Tasks:
    """Computes the slopes of y along and across delta, in coordinates where s - t is exact."""
    delta = beta_s - beta_t
    gap = jnp.linalg.norm(delta, axis=-1)
    u = delta / jnp.where(gap > 0, gap, 1.0)[..., None]
    middle = (beta_s + beta_t) / 2
    along = jnp.sum(middle * u, -1)
    v0 = jnp.linalg.norm(middle - along[..., None] * u, axis=-1)
    gap, along, v0, sigma = jnp.broadcast_arrays(gap, along, v0, sigma)
    # From the middle and half of the gap, because a difference of two slopes would cancel for close
    # tasks.
    return _Tasks(gap, along + gap / 2, along - gap / 2, v0, sigma)


def _factors(tasks: _Tasks) -> tuple[Array, Array]:
    """Returns F `(..., 3, 3)` with (u, v, y) = F z, z ~ N(0, I_3), for source and target."""
    zero, one = jnp.zeros_like(tasks.gap), jnp.ones_like(tasks.gap)

    def factor(slope: Array) -> Array:
        rows = [[one, zero, zero], [zero, one, zero], [slope, tasks.v0, tasks.sigma]]
        return jnp.stack([jnp.stack(row, -1) for row in rows], -2)

    return factor(tasks.s), factor(tasks.t)


def _rotation(source: Array, target: Array) -> Array:
    """Returns the orthogonal Q that minimises |source - target Q|_F."""
    left, _, right = linalg.svd(jnp.swapaxes(target, -1, -2) @ source)
    return left @ right


def _displacement(tasks: _Tasks) -> Float[Array, "*b 3 3"]:
    """Returns M such that M z is the source point minus its W_2-optimal partner in the target."""
    source, target = _factors(tasks)
    return source - target @ _rotation(source, target)


def _mean_length(matrix: Float[Array, "*b 3 3"]) -> Float[Array, "*b"]:
    """Computes E|M z| for z ~ N(0, I).

    It integrates E sqrt(X) = int_0^inf (1 - E exp(-r^2 X)) dr / (r^2 sqrt(pi)). With r = e^x /
    |M|_F the integrand falls like e^{-|x|} and is analytic in |Im x| < pi/4. The trapezoidal rule
    therefore converges exponentially.
    """
    size = jnp.linalg.norm(matrix, axis=(-2, -1))
    unit = matrix / jnp.where(size > 0, size, 1.0)[..., None, None]
    # |M z|^2 is a sum of independent chi-squares, times these.
    power = linalg.svd(unit, compute_uv=False)[..., None, :] ** 2
    reach, step = -float(np.log(jnp.finfo(size.dtype).eps)), 0.1
    x = jnp.arange(-reach, reach, step, size.dtype)
    missing = -jnp.expm1(-0.5 * jnp.log1p(2 * jnp.exp(2 * x)[:, None] * power).sum(-1))
    return size * step * jnp.sum(missing * jnp.exp(-x), -1) / jnp.sqrt(jnp.pi)


def _spreads(tasks: _Tasks, a: Float[Array, "j k 3"]) -> tuple[Array, Array]:
    """Returns standard deviations of a.z under source and target, each `(..., j, k)`."""
    _, s, t, v0, sigma = (p[..., None, None] for p in tasks)
    u, v, y = a[..., 0], a[..., 1], a[..., 2]
    common = (v + v0 * y) ** 2 + (sigma * y) ** 2
    return jnp.sqrt((u + s * y) ** 2 + common), jnp.sqrt((u + t * y) ** 2 + common)


def _spread_gain(tasks: _Tasks, a: Float[Array, "j k 3"]) -> Array:
    """Returns the difference of `_spreads`, without cancellation for close tasks."""
    source, target = _spreads(tasks, a)
    gap, s, t, *_ = (p[..., None, None] for p in tasks)
    u, y = a[..., 0], a[..., 2]
    total = source + target
    return gap * y * (2 * u + (s + t) * y) / jnp.where(total > 0, total, 1.0)


def _clipped_mean(spread: Array, clip: Array) -> Array:
    """Computes E min(|Y|, clip) for Y ~ N(0, spread^2)."""
    ratio = clip / (jnp.sqrt(2.0) * jnp.where(spread > 0, spread, 1.0))
    inner = jnp.sqrt(2 / jnp.pi) * spread * -jnp.expm1(-(ratio**2))
    return jnp.where(spread > 0, clip * jax.scipy.special.erfc(ratio) + inner, 0.0)


def _truncated_displacement(gap: Array) -> Array:
    """Computes max over L of E min(L |Y|, 2 (1 - L)) for Y ~ N(0, gap^2), which is concave in L.

    The kink |Y| = 2 (1 - L)/L is kept as sqrt(2) gap r, and its r found by bisection.
    """

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        r = (low + high) / 2
        below = jnp.sqrt(2 / jnp.pi) * gap * -jnp.expm1(-(r**2))
        # This is the sign of the objective's derivative in L. As r increases, L decreases.
        falling = below > 2 * jax.scipy.special.erfc(r)
        return jnp.where(falling, low, r), jnp.where(falling, r, high)

    ends = jnp.zeros_like(gap), jnp.full_like(gap, 26.0)  # erfc(26) is 1e-295
    r = jax.lax.fori_loop(0, 60, halve, ends)[0]
    clip = jnp.sqrt(2.0) * gap * r
    return 2 / (2 + clip) * _clipped_mean(gap, clip)


def _clipped_joint_mean(spread: Array, covariance: Array, clip: Array) -> Array:
    """Computes E sgn(A B) min(|A|, |B|, clip) for A ~ N(0, 1), B ~ N(0, spread^2), correlated.

    It is 2 int_0^clip P(A > x, B > x) - P(A > x, B < -x) dx. The derivative of P(A > x, B > x) in
    the correlation r is the density (Plackett), and its integral over x is an erf. The remaining
    integral over r = sin(phi) from -r to r is smooth, and Gauss-Legendre quadrature computes it.
    """
    nodes, weights = (jnp.asarray(v, spread.dtype) for v in np.polynomial.legendre.leggauss(16))
    b = jnp.where(spread > 0, spread, 1.0)[..., None]
    reach = jnp.arcsin(jnp.clip(covariance / b[..., 0], -1.0, 1.0))[..., None]
    phi = reach * nodes
    root, product = jnp.sqrt(1 + b**2 - 2 * b * jnp.sin(phi)), b * jnp.cos(phi)
    seen = jax.scipy.special.erf(root / product * clip[..., None] / jnp.sqrt(2.0))
    total = jnp.sum(weights * reach * product / root * seen, -1)
    return jnp.where(spread > 0, total / jnp.sqrt(2 * jnp.pi), 0.0)
