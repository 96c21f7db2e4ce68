"""Aligned networks, whose modes follow independent sigmoids and learn a spectrum one by one.

If W_1 = U diag(sqrt y) R and W_2 = R^T diag(sqrt y) V^T share the singular vectors of A, each mode
y_i obeys its own equation dy/dt = 4 y (sigma - y). This is the special case of `riccati.flow` in
the theorems of Springer et al., 2025 (arXiv 2503.19206). A start e^{-tau} I is aligned if and only
if U = V.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory import problems


@problems.defined
def mode(time: ArrayLike, start: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes one mode under gradient flow of the loss.

        y(t) = sigma / (1 + (sigma/y_0 - 1) e^{-4 sigma t})

    The form in the code also holds at y_0 = 0, sigma = 0 and sigma < 0 (where y decays), and in
    float32 at any time, including inf.

    Args:
      time: Times >= 0, inf allowed.
      start: Initial values y_0, finite and >= 0.
      sigma: Singular values of the target, finite.

    Returns:
      y(t), with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> [round(float(mode(t, 1e-3, 1.0)), 4) for t in (0.0, 1.0, 2.0, 1e4)]
    [0.001, 0.0518, 0.749, 1.0]
    """
    time, start, sigma = (jnp.asarray(x, dtype=float) for x in (time, start, sigma))
    problems.check("time", time, lambda t: t >= 0, ">= 0")
    problems.check("start", start, lambda y: (y >= 0) & (y < np.inf), "finite and >= 0")
    problems.check("sigma", sigma, np.isfinite, "finite")
    size = jnp.abs(sigma)
    flat = size == 0
    # With sigma = 0 the exponent is 0 also at t = inf, where the product would be NaN.
    z = jnp.where(flat, 0.0, 4 * jnp.where(flat, 1.0, size) * time)
    # `share` is int_0^t 4 e^{-4 |sigma| s} ds, even where 4 |sigma| t underflows.
    early, still = z < 1, z < jnp.finfo(z.dtype).tiny
    mean = jnp.where(still, 1.0, -jnp.expm1(-z) / jnp.where(still, 1.0, z))
    share = jnp.where(early, 4 * time * mean, -jnp.expm1(-z) / jnp.where(early, 1.0, size))
    # Only decaying exponentials for either sign, because e^{4 |sigma| t} would overflow.
    grown, left = jnp.where(sigma < 0, jnp.exp(-z), 1.0), jnp.where(sigma < 0, 1.0, jnp.exp(-z))
    empty = start == 0
    return jnp.where(empty, 0.0, grown / (left / jnp.where(empty, 1.0, start) + share))


@problems.in_float64
def crossing_time(level: ArrayLike, start: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the time at which a mode reaches a given level.

    Args:
      level: Levels in [start, sigma].
      start: Initial values, in (0, sigma).
      sigma: Singular values of the target.

    Returns:
      The times, with the broadcast shape of the arguments. They are inf if level = sigma.

    Raises:
      ValueError: If an argument is out of range.
    """
    level, start, sigma = (jnp.asarray(x, dtype=float) for x in (level, start, sigma))
    problems.check("start", start, lambda y: (y > 0) & (y < np.inf), "finite and > 0")
    if (least := concrete(start)) is not None:
        problems.check("sigma", sigma, lambda s: (s > least) & (s < np.inf), "finite and > start")
        problems.check("level", level, lambda y: y >= least, "at least start")
    if (most := concrete(sigma)) is not None:
        problems.check("level", level, lambda y: y <= most, "at most sigma")
    return crossing(level, sigma - level, start, sigma)


@problems.defined
def crossing(level: Array, lacking: Array, start: Array, sigma: Array) -> Array:
    """Computes `crossing_time` from sigma - level, for levels that round to sigma.

    Args:
      level: Levels in [start, sigma].
      lacking: sigma - level, accurately.
      start: Initial values, in (0, sigma).
      sigma: Singular values of the target.

    Returns:
      log(level (sigma - start) / (start lacking)) / (4 sigma), without checks.
    """
    # The sigmoid solved for t. Its odds y / (sigma - y) grow as e^{4 sigma t}.
    return (jnp.log(level / start) + jnp.log((sigma - start) / lacking)) / (4 * sigma)


@problems.defined
def plateau_times(sigma: Float[ArrayLike, " d"], tau: ArrayLike) -> Float[Array, " d"]:
    """Computes the times at which a network with a small start has learned only the first i modes.

    t_i = tau / (sigma_i + sigma_{i+1}), with sigma_{d+1} = 0. From W = e^{-tau} I, theta(t_i) is
    the rank-i truncation of A up to an error of order e^{-C_i tau}, C_i = `plateau_rates`. At this
    time the missing part of mode i equals the learned part of mode i+1. Theorem 4.1 asserts that
    such times exist.

    Args:
      sigma: Singular values of the target `(d,)`, positive and descending.
      tau: Negative logarithm of the initial scale.

    Returns:
      The times `(d,)`.

    Raises:
      ValueError: If the singular values are not positive, finite and descending.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Theorem 4.1.

    >>> plateau_times(jnp.array([3.0, 1.0]), 8.0).tolist()
    [2.0, 8.0]
    """
    upper, lower = _neighbours(sigma)
    return jnp.asarray(tau) / (upper + lower)


@problems.defined
def plateau_rates(sigma: Float[ArrayLike, " d"]) -> Float[Array, " d"]:
    """Computes the exponents C_i of the errors at `plateau_times`.

        C_i = 2 (sigma_i - sigma_{i+1}) / (sigma_i + sigma_{i+1})

    Args:
      sigma: Singular values of the target `(d,)`, positive and descending.

    Returns:
      The exponents `(d,)`.

    Raises:
      ValueError: If the singular values are not positive, finite and descending.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Theorem 4.1.

    >>> plateau_rates(jnp.array([3.0, 1.0])).tolist()
    [1.0, 2.0]
    """
    upper, lower = _neighbours(sigma)
    return 2 * (upper - lower) / (upper + lower)


def _neighbours(sigma: ArrayLike) -> tuple[Array, Array]:
    """Returns each singular value and the next smaller one, 0 for the last."""
    sigma = jnp.asarray(sigma, dtype=float)
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and positive")
    problems.check("-diff(sigma)", -jnp.diff(sigma), lambda s: s >= 0, ">= 0: sorted downwards")
    return sigma, jnp.append(sigma[1:], 0.0)


@problems.defined
def learned_modes(target: Float[ArrayLike, "d d"]) -> np.ndarray:
    """Determines which singular modes of A are ever learned from W_1 = W_2 = e^{-tau} I.

    Mode i starts with (u_i + v_i)^T. It is learned if and only if this row is independent of the
    rows of all larger modes. Otherwise, the flow ends at a saddle whose loss is the sum of
    sigma_i^2 over the unlearned modes. If det A < 0, at least one mode (generically the last) is
    never learned, because det theta keeps its initial sign. Rounding errors leave the saddle after
    a time of order log(1/eps) / (2 sigma_i).

    Args:
      target: Target map A `(d, d)`, with known values.

    Returns:
      Booleans `(d,)`, largest singular value first.

    Raises:
      ValueError: If the target is not a finite square matrix.

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
        # Gram-Schmidt. The residual of the row is new, and larger modes have learned the rest.
        rest = row - (row @ basis.T) @ basis
        # A second projection removes the rounding errors of the first.
        rest = rest - (rest @ basis.T) @ basis
        new = np.linalg.norm(rest) > tolerance and value > 0
        learned.append(new)
        if new:
            basis = np.vstack([basis, rest / np.linalg.norm(rest)])
    return np.array(learned)


@problems.defined
def inflection(losses: Float[Array | np.ndarray, " stages"], *, first: int = 1) -> int | None:
    """Returns the smallest r >= first with L(r) < L(r + 1), where the loss starts to increase.

    Definition 4.2 runs over r = 1, ..., d. With `first=0`, the untrained network is included. r = 0
    means that even the first mode increases the loss.

    Args:
      losses: Losses at 0, 1, ..., d learned modes.
      first: The smallest r considered, 0 or 1.

    Returns:
      r, or None if the loss never increases from there on.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Definition 4.2.
    """
    rising = first + np.flatnonzero(np.diff(np.asarray(losses)[first:]) > 0)
    return int(rising[0]) if rising.size else None


@problems.defined
def monotone_from(losses: Float[Array | np.ndarray, " stages"]) -> int | None:
    """Returns the smallest r after which the loss always increases, L(n - 1) < L(n) for n > r.

    Args:
      losses: Losses at 0, 1, ..., d learned modes.

    Returns:
      r, or None if the loss does not increase in the last stage.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Theorem A.25.
    """
    falling = np.flatnonzero(~(np.diff(np.asarray(losses)) > 0))
    last = int(falling[-1]) + 1 if falling.size else 0
    return last if last < np.size(losses) - 1 else None
