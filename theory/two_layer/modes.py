"""Aligned modes: sigmoids in time, and the staircase by which a small start learns a spectrum.

When W_1 = U diag(sqrt y) R and W_2 = R^T diag(sqrt y) V^T share the singular vectors of A, each
y_i obeys its own law, dy/dt = 4 y (sigma - y). This is the special case of `riccati.flow` that the
theorems of overtrained are about; a start e^{-tau} I is aligned iff U = V.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory import problems


def mode(time: ArrayLike, start: ArrayLike, sigma: ArrayLike) -> Array:
    """y(t) = sigma / (1 + (sigma/y_0 - 1) e^{-4 sigma t}) from y_0 >= 0, in a form that also holds
    at y_0 = 0, sigma = 0 and sigma < 0 (where y dies out), and in float32 at any time, inf too.

    >>> [round(float(mode(t, 1e-3, 1.0)), 4) for t in (0.0, 1.0, 2.0, 1e4)]
    [0.001, 0.0518, 0.749, 1.0]
    """
    time, start, sigma = (jnp.asarray(x, dtype=float) for x in (time, start, sigma))
    problems.check("time", time, lambda t: t >= 0, ">= 0")
    problems.check("start", start, lambda y: (y >= 0) & (y < np.inf), "finite and >= 0")
    problems.check("sigma", sigma, np.isfinite, "finite")
    size = jnp.abs(sigma)
    flat = size == 0
    z = jnp.where(flat, 0.0, 4 * jnp.where(flat, 1.0, size) * time)  # 0 inf = 0
    # int_0^t 4 e^{-4 |sigma| s} ds, also where 4 |sigma| t is too small for a float
    early, still = z < 1, z < jnp.finfo(z.dtype).tiny
    mean = jnp.where(still, 1.0, -jnp.expm1(-z) / jnp.where(still, 1.0, z))
    share = jnp.where(early, 4 * time * mean, -jnp.expm1(-z) / jnp.where(early, 1.0, size))
    grown, left = jnp.where(sigma < 0, jnp.exp(-z), 1.0), jnp.where(sigma < 0, 1.0, jnp.exp(-z))
    empty = start == 0
    return jnp.where(empty, 0.0, grown / (left / jnp.where(empty, 1.0, start) + share))


@problems.in_float64
def crossing_time(level: ArrayLike, start: ArrayLike, sigma: ArrayLike) -> Array:
    """When a mode that starts at y_0 in (0, sigma) reaches a level in [y_0, sigma); inf for sigma
    itself."""
    level, start, sigma = (jnp.asarray(x, dtype=float) for x in (level, start, sigma))
    problems.check("start", start, lambda y: (y > 0) & (y < np.inf), "finite and > 0")
    if (least := concrete(start)) is not None:
        problems.check("sigma", sigma, lambda s: (s > least) & (s < np.inf), "finite and > start")
        problems.check("level", level, lambda y: y >= least, "at least start")
    if (most := concrete(sigma)) is not None:
        problems.check("level", level, lambda y: y <= most, "at most sigma")
    return crossing(level, sigma - level, start, sigma)


def crossing(level: Array, lacking: Array, start: Array, sigma: Array) -> Array:
    """`crossing_time` where sigma - level may be too little for the level to tell."""
    return (jnp.log(level / start) + jnp.log((sigma - start) / lacking)) / (4 * sigma)


def plateau_times(sigma: Float[ArrayLike, " d"], tau: ArrayLike) -> Float[Array, " d"]:
    """t_i = tau / (sigma_i + sigma_{i+1}) (sigma_{d+1} = 0): from W = e^{-tau} I, theta(t_i) is the
    rank-i truncation of A up to an error of order e^{-C_i tau}, C_i = `plateau_rates`.

    This is the time at which what mode i still lacks equals what mode i+1 has already learned;
    Theorem 4.1 of overtrained asserts that such times exist.
    """
    upper, lower = _neighbours(sigma)
    return jnp.asarray(tau) / (upper + lower)


def plateau_rates(sigma: Float[ArrayLike, " d"]) -> Float[Array, " d"]:
    """C_i = 2 (sigma_i - sigma_{i+1}) / (sigma_i + sigma_{i+1}): the exponents in Theorem 4.1."""
    upper, lower = _neighbours(sigma)
    return 2 * (upper - lower) / (upper + lower)


def _neighbours(sigma: ArrayLike) -> tuple[Array, Array]:
    sigma = jnp.asarray(sigma, dtype=float)
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and positive")
    problems.check("-diff(sigma)", -jnp.diff(sigma), lambda s: s >= 0, ">= 0: sorted downwards")
    return sigma, jnp.append(sigma[1:], 0.0)


def learned_modes(target: Float[ArrayLike, "d d"]) -> np.ndarray:
    """Which singular modes of A are ever learned from W_1 = W_2 = e^{-tau} I: bool [d].

    Mode i starts with (u_i + v_i)^T. It is learned iff that row is independent of the rows of all
    larger modes; otherwise the flow ends at a saddle, with the loss sum of sigma_i^2 over the modes
    left out. If det A < 0, at least one mode (generically the last) is never learned: det theta
    keeps the sign it starts with. Rounding lets go of the saddle after a time of order
    log(1/eps) / (2 sigma_i).

    >>> learned_modes(jnp.array([[2.0, 0.0], [0.0, -1.0]])).tolist()
    [True, False]
    """
    a = np.asarray(target)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not np.isfinite(a).all():
        raise ValueError(f"target must be a finite square matrix; got shape {a.shape}")
    u, s, vt = np.linalg.svd(a)
    rows, basis, learned = u.T + vt, np.zeros((0, s.size)), []
    tolerance = s.size * 100 * np.finfo(s.dtype).eps
    for row, value in zip(rows, s, strict=True):
        rest = row - (row @ basis.T) @ basis
        rest = rest - (rest @ basis.T) @ basis
        new = np.linalg.norm(rest) > tolerance and value > 0
        learned.append(new)
        if new:
            basis = np.vstack([basis, rest / np.linalg.norm(rest)])
    return np.array(learned)


def inflection(losses: Float[Array | np.ndarray, " stages"]) -> int | None:
    """Overtrained Definition 4.2: the smallest r with L(r) < L(r + 1), for losses at 0, 1, ..., d
    learned modes; None if the loss never rises."""
    rising = np.flatnonzero(np.diff(np.asarray(losses)) > 0)
    return int(rising[0]) if rising.size else None


def monotone_from(losses: Float[Array | np.ndarray, " stages"]) -> int | None:
    """Overtrained Theorem A.25: the smallest r such that L(n - 1) < L(n) for every n > r; None if
    the last stage does not rise."""
    falling = np.flatnonzero(~(np.diff(np.asarray(losses)) > 0))
    last = int(falling[-1]) + 1 if falling.size else 0
    return last if last < np.size(losses) - 1 else None
