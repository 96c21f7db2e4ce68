"""How far apart two linear tasks are as laws of (x, y): KL, total variation, Wasserstein, Dudley.

The subject of features-are-fate (arXiv 2410.08194), Section 2.1: x ~ N(0, I_d),
y = beta.x + sigma noise, with beta = beta_s or beta_t of any norm (f and g in the paper). Closed
forms where they exist, and otherwise two-sided bounds. Vectors are `[..., d]`; leading axes
broadcast with each other and with sigma. Computed in float64 whatever the caller's precision.

Everything happens in three dimensions: outside the plane of the tasks x is independent of the rest
and the same under both laws, so that it can be coupled identically, and projecting it away is
1-Lipschitz. In the plane take u along delta = beta_s - beta_t and v across it. The laws of (u, v,
y) are Gaussian with y = s u + v0 v + sigma noise and y = t u + v0 v + sigma noise, s - t = |delta|.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory import problems

Vector = Float[ArrayLike, "*b d"]


class Bounds(NamedTuple):
    """lower <= distance <= upper."""

    lower: Array
    upper: Array


class _Tasks(NamedTuple):
    """Slopes of y in (u, v): (s, v0) and (t, v0), s - t = gap = |delta| (all `[*b]`)."""

    gap: Array
    s: Array
    t: Array
    v0: Array
    sigma: Array


@problems.in_float64
def kl(
    beta_s: Vector, beta_t: Vector, sigma: ArrayLike, *, allow_infinite: bool = False
) -> Float[Array, "*b"]:
    """D_KL(p_s || p_t) = |beta_s - beta_t|^2 / (2 sigma^2), eqs. (33), (34); symmetric.

    Infinite at sigma = 0 (and 0 between equal tasks): refused unless `allow_infinite`.

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
    """sup over events of p_s(A) - p_t(A) = (2/pi) arctan(|delta| / (2 sigma)), in [0, 1].

    Given x the laws of y are two normals delta.x apart; the rest is E over delta.x ~ N(0,
    |delta|^2).
    """
    return _total_variation(_tasks(beta_s, beta_t, sigma))


def _total_variation(tasks: _Tasks) -> Array:
    return 2 / jnp.pi * jnp.arctan2(tasks.gap, 2 * tasks.sigma)


@problems.in_float64
def wasserstein2(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Float[Array, "*b"]:
    """The Wasserstein-2 (Bures) distance, as a Procrustes problem: small gaps stay accurate."""
    return jnp.linalg.norm(_displacement(_tasks(beta_s, beta_t, sigma)), axis=(-2, -1))


@problems.in_float64
def wasserstein1_bounds(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Bounds:
    """Bounds of the Wasserstein-1 (Monge-Kantorovich) distance, Euclidean in (x, y).

    Upper: the mean displacement of two couplings of Gaussians, the one that shares x and the noise,
    sqrt(2/pi) |delta|, and the one optimal for W_2. Lower: the best of the 1-Lipschitz witnesses
    (|(w + w').z| - |(w - w').z|) / 2, |w|, |w'| <= 1, with w in the plane of (u, y) and w' in that
    of (v, y); among them |y|, by which W_1 is unbounded (Thm 2.2). At sigma = 0 and beta_t =
    -beta_s of length 1 both are 2 sqrt(2/pi).
    """
    return _wasserstein1_bounds(_tasks(beta_s, beta_t, sigma))


@jax.jit
def _wasserstein1_bounds(tasks: _Tasks) -> Bounds:
    angles = jnp.linspace(-jnp.pi / 2, jnp.pi / 2, 49)
    y, across = jnp.sin(angles), jnp.cos(angles)
    w = jnp.stack([across, jnp.zeros_like(y), y], -1)[:, None]
    w_ = jnp.stack([jnp.zeros_like(y), across, y], -1)[None, :]
    gains = _spread_gain(tasks, (w + w_) / 2) - _spread_gain(tasks, (w - w_) / 2)
    lower = jnp.sqrt(2 / jnp.pi) * jnp.abs(gains).max((-2, -1))
    shared = jnp.sqrt(2 / jnp.pi) * tasks.gap
    return Bounds(lower, jnp.minimum(shared, _mean_length(_displacement(tasks))))


@problems.in_float64
def cosine_gap(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Float[Array, "*b"]:
    """|E h - E h| of the witness h = cos(y)/2, a lower bound of the Dudley metric: eq. (27).

    exp(-sigma^2/2) |exp(-|beta_s|^2/2) - exp(-|beta_t|^2/2)| / 2. From here eq. (28) goes on with
    the wrong sign: cos a + a^2 >= cos b - b^2 gives cos a - cos b >= -(a^2 + b^2), not a^2 + b^2.
    """
    tasks = _tasks(beta_s, beta_t, sigma)
    s2, t2 = tasks.s**2 + tasks.v0**2, tasks.t**2 + tasks.v0**2
    # exp(-a) - exp(-b) through the smaller exponent and the difference, which is exact here
    smaller, apart = jnp.minimum(s2, t2), tasks.gap * jnp.abs(tasks.s + tasks.t)
    return -0.5 * jnp.exp(-(tasks.sigma**2 + smaller) / 2) * jnp.expm1(-apart / 2)


@problems.in_float64
def dudley_bounds(beta_s: Vector, beta_t: Vector, sigma: ArrayLike) -> Bounds:
    """Bounds of the Dudley metric, sup |E_s h - E_t h| over |h|_L + |h|_inf <= 1 (eqs. 23, 24).

    With L = |h|_L and M = 1 - L. Upper: sharing x and the noise, the largest E min(L |delta.x|,
    2 M) over L; and, since no h exceeds min(L W_1, 2 M TV), 2 W_1 TV / (W_1 + 2 TV). Both are less
    than 2 whatever the tasks: Thm 2.2 cannot hold for delta >= 2. Lower: the best over L of two
    kinds of witness: M - min(L |a.z|, 2 M), a in the plane of (u, y), which reach 2 as the tasks
    grow apart; and min(L |u|, L |w.z|, M) with the sign of u w.z, w in the plane of (v, y).
    """
    return _dudley_bounds(_tasks(beta_s, beta_t, sigma))


@jax.jit
def _dudley_bounds(tasks: _Tasks) -> Bounds:
    angles = jnp.linspace(-jnp.pi / 2, jnp.pi / 2, 49)
    y, across, zero = jnp.sin(angles), jnp.cos(angles), jnp.zeros_like(angles)
    # L of about the inverse gap for tasks far apart
    L = jnp.concatenate([jnp.geomspace(1e-6, 0.05, 30), jnp.linspace(0.1, 0.9, 25)])
    clip = (1 - L) / L
    along, target = _spreads(tasks, jnp.stack([across, zero, y], -1)[:, None])
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


def coupled_samples(
    key: Array,
    n: int,
    beta_s: Float[ArrayLike, " d"],
    beta_t: Float[ArrayLike, " d"],
    sigma: ArrayLike,
) -> tuple[Float[Array, "n 3"], Float[Array, "n 3"]]:
    """n points (u, v, y) of either law: three dimensions in which W_1 and Dudley are those of d.

    Points are independent within a law; between the laws they are coupled, the W_2-optimal way.
    Distances of samples are on average at least those of the laws (they are convex). Coupled, W_1
    is on average at most W_2 and 0 at beta_s = beta_t, where independent samples err most.
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
    delta = beta_s - beta_t
    gap = jnp.linalg.norm(delta, axis=-1)
    u = delta / jnp.where(gap > 0, gap, 1.0)[..., None]
    middle = (beta_s + beta_t) / 2
    along = jnp.sum(middle * u, -1)
    v0 = jnp.linalg.norm(middle - along[..., None] * u, axis=-1)
    gap, along, v0, sigma = jnp.broadcast_arrays(gap, along, v0, sigma)
    return _Tasks(gap, along + gap / 2, along - gap / 2, v0, sigma)


def _factors(tasks: _Tasks) -> tuple[Array, Array]:
    """F [*b, 3, 3] with (u, v, y) = F z, z ~ N(0, I_3), for source and target."""
    zero, one = jnp.zeros_like(tasks.gap), jnp.ones_like(tasks.gap)

    def factor(slope: Array) -> Array:
        rows = [[one, zero, zero], [zero, one, zero], [slope, tasks.v0, tasks.sigma]]
        return jnp.stack([jnp.stack(row, -1) for row in rows], -2)

    return factor(tasks.s), factor(tasks.t)


def _rotation(source: Array, target: Array) -> Array:
    """The orthogonal Q that minimises |source - target Q|_F."""
    left, _, right = jnp.linalg.svd(jnp.swapaxes(target, -1, -2) @ source)
    return left @ right


def _displacement(tasks: _Tasks) -> Float[Array, "*b 3 3"]:
    """M with M z = point of the source - point of the target it is coupled to, W_2-optimally."""
    source, target = _factors(tasks)
    return source - target @ _rotation(source, target)


def _mean_length(matrix: Float[Array, "*b 3 3"]) -> Float[Array, "*b"]:
    """E|M z|, z ~ N(0, I), from E sqrt(X) = int_0^inf (1 - E exp(-r^2 X)) dr / (r^2 sqrt(pi)).

    With r = e^x / |M|_F the integrand falls like e^{-|x|} and is analytic in |Im x| < pi/4, so that
    the trapezoidal rule converges exponentially.
    """
    size = jnp.linalg.norm(matrix, axis=(-2, -1))
    unit = matrix / jnp.where(size > 0, size, 1.0)[..., None, None]
    power = jnp.linalg.svd(unit, compute_uv=False)[..., None, :] ** 2
    reach, step = -float(np.log(jnp.finfo(size.dtype).eps)), 0.1
    x = jnp.arange(-reach, reach, step, size.dtype)
    missing = -jnp.expm1(-0.5 * jnp.log1p(2 * jnp.exp(2 * x)[:, None] * power).sum(-1))
    return size * step * jnp.sum(missing * jnp.exp(-x), -1) / jnp.sqrt(jnp.pi)


def _spreads(tasks: _Tasks, a: Float[Array, "j k 3"]) -> tuple[Array, Array]:
    """Standard deviations of a.z under source and target, `[*b, j, k]`."""
    _, s, t, v0, sigma = (p[..., None, None] for p in tasks)
    u, v, y = a[..., 0], a[..., 1], a[..., 2]
    common = (v + v0 * y) ** 2 + (sigma * y) ** 2
    return jnp.sqrt((u + s * y) ** 2 + common), jnp.sqrt((u + t * y) ** 2 + common)


def _spread_gain(tasks: _Tasks, a: Float[Array, "j k 3"]) -> Array:
    """The difference of `_spreads`, from that of the squares: nothing cancels for close tasks."""
    source, target = _spreads(tasks, a)
    gap, s, t, *_ = (p[..., None, None] for p in tasks)
    u, y = a[..., 0], a[..., 2]
    total = source + target
    return gap * y * (2 * u + (s + t) * y) / jnp.where(total > 0, total, 1.0)


def _clipped_mean(spread: Array, clip: Array) -> Array:
    """E min(|Y|, clip), Y ~ N(0, spread^2)."""
    ratio = clip / (jnp.sqrt(2.0) * jnp.where(spread > 0, spread, 1.0))
    inner = jnp.sqrt(2 / jnp.pi) * spread * -jnp.expm1(-(ratio**2))
    return jnp.where(spread > 0, clip * jax.scipy.special.erfc(ratio) + inner, 0.0)


def _truncated_displacement(gap: Array) -> Array:
    """max over L of E min(L |Y|, 2 (1 - L)), Y ~ N(0, gap^2), concave in L.

    The kink |Y| = 2 (1 - L)/L is kept as sqrt(2) gap r, and its r found by bisection.
    """

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        r = (low + high) / 2
        below = jnp.sqrt(2 / jnp.pi) * gap * -jnp.expm1(-(r**2))
        falling = below > 2 * jax.scipy.special.erfc(r)  # as r grows, L falls
        return jnp.where(falling, low, r), jnp.where(falling, r, high)

    ends = jnp.zeros_like(gap), jnp.full_like(gap, 26.0)  # erfc(26) is 1e-295
    r = jax.lax.fori_loop(0, 60, halve, ends)[0]
    clip = jnp.sqrt(2.0) * gap * r
    return 2 / (2 + clip) * _clipped_mean(gap, clip)


def _clipped_joint_mean(spread: Array, covariance: Array, clip: Array) -> Array:
    """E sgn(A B) min(|A|, |B|, clip) for A ~ N(0, 1), B ~ N(0, spread^2) and their covariance.

    2 int_0^clip P(A > x, B > x) - P(A > x, B < -x) dx; the derivative of P(A > x, B > x) in the
    correlation r is the density (Plackett), whose integral over x is an erf. What is left runs
    over r = sin(phi) from -r to r and is smooth: Gauss and Legendre.
    """
    nodes, weights = (jnp.asarray(v, spread.dtype) for v in np.polynomial.legendre.leggauss(16))
    b = jnp.where(spread > 0, spread, 1.0)[..., None]
    reach = jnp.arcsin(jnp.clip(covariance / b[..., 0], -1.0, 1.0))[..., None]
    phi = reach * nodes
    root, product = jnp.sqrt(1 + b**2 - 2 * b * jnp.sin(phi)), b * jnp.cos(phi)
    seen = jax.scipy.special.erf(root / product * clip[..., None] / jnp.sqrt(2.0))
    total = jnp.sum(weights * reach * product / root * seen, -1)
    return jnp.where(spread > 0, total / jnp.sqrt(2 * jnp.pi), 0.0)
