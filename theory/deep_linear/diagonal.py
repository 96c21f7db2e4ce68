"""Fine-tuning of diagonal networks beta = u v at any scale, from rich to lazy.

Gradient flow conserves u_i^2 - v_i^2 in every entry. Its absolute value is the entry's `scale` s_i.
Training from (u, v) = (sqrt(s), 0) keeps the scale s. The flow is

    dbeta_i/dt = -sqrt(4 beta_i^2 + s_i^2) (gradient of the loss)_i,

therefore asinh(2 beta_i / s_i) moves along X^T residual. Fine-tuning from `start` ends at the
interpolator that is closest to it in the divergence of

    q(beta) = sum_i [beta_i asinh(2 beta_i / s_i) - sqrt(beta_i^2 + s_i^2 / 4)] / 2.

Large scales are lazy: the limit is the closest interpolator in L2. Small scales are rich: entries
that pre-training has learned move freely if they keep their sign, and all others cost their
absolute value.

The risks are deterministic equivalents, that is, limits of large n and d for isotropic inputs. They
are solved numerically for two scalars, with integrals over a normal variable on a grid.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from scipy import optimize, special

from sail_jax import linalg
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear.estimators import check_data

Entries = Sequence[float] | ArrayLike

NEWTON = 200  # most steps on one data set; 10 to 40 are usual
# Nodes of the trapezoidal rule for means over a normal variable. For functions as smooth as these
# its error is only rounding.
NODES = np.linspace(-8.5, 8.5, 1201)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.exp(-(NODES**2) / 2).sum()


@problems.in_float64
def diagonal_limit(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    start: Float[Array, " d"],
    scale: ArrayLike,
) -> Array:
    """Computes the limit of gradient flow of a diagonal network, from any start and scale.

        beta_i = (s_i / 2) sinh(asinh(2 start_i / s_i) + 2 (X^T nu)_i),  X beta = y

    with n numbers nu that minimise a convex function. Newton's method has the steps
    log(1 + M) / M, which cannot overshoot, because M is the largest change of an exponent. Labels
    outside the range of X are replaced by their projection.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      start: Predictor at the start `(d,)`: 0 for training from scratch.
      scale: |u^2 - v^2| at the start, > 0 and finite, one number or `(d,)`.

    Returns:
      The fitted weight vector `(d,)`.

    Raises:
      ValueError: If shapes do not conform, or a value is not finite or out of range.

    References:
      Woodworth et al., Kernel and rich regimes in overparametrized models, 2020 (arXiv
      2002.09277), for starts at 0; Azulay et al., On the implicit bias of initialization shape,
      2021 (arXiv 2102.09769).

    >>> x, y = jnp.array([[1.0, 0.5]]), jnp.array([2.0])
    >>> for scale in (1e-6, 1e6):
    ...     print([round(float(b), 3) for b in diagonal_limit(x, y, jnp.zeros(2), scale)])
    [2.0, 0.001]
    [1.6, 0.8]
    """
    check_data(x, y)
    if start.shape != x.shape[1:]:
        raise ValueError(f"start must have shape {x.shape[1:]} to match x; got {start.shape}")
    if jnp.shape(scale) not in ((), start.shape):
        raise ValueError(f"scale must be a number or `{start.shape}`; got {jnp.shape(scale)}")
    problems.check_squares("start", start)
    _check_scale(scale)
    given = (jnp.asarray(v, dtype=float) for v in (x, y, start, scale))
    return _interpolator(*given)


@jax.jit
def _interpolator(x: Array, y: Array, start: Array, scale: Array) -> Array:
    u, s, vt = linalg.svd(x, full_matrices=False)
    seen = s > max(x.shape) * jnp.finfo(s.dtype).eps * s[0]
    rows = jnp.where(seen[:, None], vt, 0.0)
    fitted = jnp.where(seen, u.T @ y / jnp.where(seen, s, 1.0), 0.0)
    idle, begin = jnp.diag(jnp.where(seen, 0.0, 1.0)), jnp.arcsinh(2 * start / scale)
    noise = 64 * jnp.finfo(s.dtype).eps

    def at(dual: Array) -> tuple[Array, Array]:
        exponent = begin + 2 * dual @ rows
        return scale / 2 * jnp.sinh(exponent), scale * jnp.cosh(exponent)

    def going(state: tuple[Array, Array, Array]) -> Array:
        dual, reach, steps = state
        beta, _ = at(dual)
        left = jnp.abs(rows @ beta - fitted).max()
        return (left > noise * jnp.abs(beta).sum()) & (reach > noise) & (steps < NEWTON)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dual, _, steps = state
        beta, moves = at(dual)
        # The factor of the curvature rows diag(moves) rows^T without its square: moves are as far
        # apart as scale and start.
        tall = jnp.concatenate([jnp.sqrt(moves)[:, None] * rows.T, idle])
        r = linalg.qr(tall, mode="r")
        change = linalg.cho_solve(r.T, fitted - rows @ beta)
        reach = 2 * jnp.abs(change @ rows).max()
        pace = jnp.where(reach > 0, jnp.log1p(reach) / jnp.where(reach > 0, reach, 1.0), 1.0)
        return dual + pace * change, reach, steps + 1

    begun = jnp.zeros_like(fitted), jnp.asarray(jnp.inf), jnp.zeros((), int)
    return at(jax.lax.while_loop(going, step, begun)[0])[0]


@renamed("load", "sigma", "scale", until="0.4", gamma="load")
@problems.in_float64
def diagonal_risk(
    share: Entries, start: Entries, target: Entries, *, load: float, sigma: float, scale: Entries
) -> Array:
    """Computes the limiting risk of a diagonal network, for entries of a few kinds.

    With tau^2 = (sigma^2 + R) / load and g ~ N(0, 1), an entry ends as if only b = target + tau g
    had been observed, with the estimate

        h(b) = argmin_beta (beta - b)^2 / (2 kappa) + D(beta, start),

    where D is the divergence of q, E h'(b) = load decides kappa, and R = E (h(b) - target)^2. The
    means are also over the kinds.

    Args:
      share: The fraction of the d entries of each kind, `(k,)`, with sum 1.
      start: Entries of the start times sqrt(d), `(k,)`: 0 for training from scratch.
      target: Entries of the target times sqrt(d), `(k,)`.
      load: Load n / d, in (0, 1), one number.
      sigma: Standard deviation of the label noise, >= 0, one number.
      scale: |u^2 - v^2| times sqrt(d), > 0, one number or `(k,)`.

    Returns:
      The limiting risk |beta - beta_t|^2.

    Raises:
      ValueError: If shapes do not conform or an argument is out of range.

    References:
      Thrampoulidis, Abbasi and Hassibi, Precise error analysis of regularized M-estimators in high
      dimensions, 2018 (arXiv 1601.06233), for separable convex penalties. This is the limit of no
      penalty.

    >>> share, source, target = [0.1, 0.1, 0.8], [2.0, 0.0, 0.0], [2.0, 1.0, 0.0]
    >>> for scale in (1e-6, 1e3):
    ...     risk = diagonal_risk(share, source, target, load=0.5, sigma=0.0, scale=scale)
    ...     print(round(float(risk), 3))
    0.0
    0.05
    """
    kinds = [np.asarray(v, dtype=float) for v in (share, start, target)]
    if kinds[0].ndim != 1 or len({v.shape for v in kinds}) > 1:
        shapes = ", ".join(str(v.shape) for v in kinds)
        raise ValueError(f"share, start and target must be vectors of one length; got {shapes}")
    if np.shape(scale) not in ((), kinds[0].shape):
        raise ValueError(f"scale must be a number or `{kinds[0].shape}`; got {np.shape(scale)}")
    problems.check("share", kinds[0], lambda p: p >= 0, ">= 0")
    problems.check("the sum of share", kinds[0].sum(), lambda p: abs(p - 1) < 1e-6, "1")
    problems.check_squares("start", kinds[1])
    problems.check_squares("target", kinds[2])
    problems.check("load", load, lambda g: (g > 0) & (g < 1), "a load in (0, 1)")
    problems.check_sigma(sigma)
    _check_scale(scale)
    scales = np.broadcast_to(np.asarray(scale, dtype=float), kinds[0].shape)
    # In units of the largest entry or of the noise. Everything that follows is homogeneous in them.
    size = max(abs(kinds[1]).max(), abs(kinds[2]).max(), float(sigma))
    if size == 0 or (sigma == 0 and (kinds[1] == kinds[2]).all()):
        return jnp.zeros(())
    columns = (kinds[0], kinds[1] / size, kinds[2] / size, scales / size)
    given = (v[:, None] for v in columns)
    return jnp.asarray(
        size**2 * _solved(*given, load=float(load), noise=float((sigma / size) ** 2))
    )


def _solved(
    share: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    scale: np.ndarray,
    *,
    load: float,
    noise: float,
) -> float:
    """Solves the two equations for columns of kinds; `noise` is sigma^2."""
    weights = share * WEIGHTS
    ends = np.log(scale.min()) - 40, np.log(scale.max() + 1) + 40

    def risk(log_tau: float) -> float:
        seen = target + np.exp(log_tau) * NODES

        def excess(log_kappa: float) -> float:
            slope = _nearest(seen, start, scale, np.exp(log_kappa))[1]
            return float(np.sum(weights * slope)) - load

        estimate, _ = _nearest(seen, start, scale, np.exp(_root(excess, *ends)))
        return float(np.sum(weights * (estimate - target) ** 2))

    def gap(log_tau: float) -> float:
        return np.log(load) + 2 * log_tau - np.log(noise + risk(log_tau))

    low, high = -25.0, 1.0
    while gap(high) < 0:
        high += 2.0
        if high > 50:
            raise ArithmeticError("no solution within float64, with load as close to 1")
    # Below the smallest tau, the target is recovered to more digits than float64 has.
    return risk(low if gap(low) > 0 else _root(gap, low, high))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.root_scalar(function, bracket=(low, high), xtol=1e-11).root)


def _nearest(
    seen: np.ndarray, start: np.ndarray, scale: np.ndarray, kappa: float
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises (beta - seen)^2 / (2 kappa) + D(beta, start), and differentiates by `seen`.

    The unknown is z = asinh(2 beta / scale), with scale/2 sinh z + kappa/2 z = b. For b > 0 both
    terms are convex, so Newton's method from above never overshoots. At the start it is off by at
    most a factor of 2.
    """
    b = seen + kappa / 2 * np.arcsinh(2 * start / scale)
    size = np.abs(b)
    z = np.minimum(np.arcsinh(2 * size / scale), 2 * size / kappa)
    for _ in range(7):
        z -= (scale * np.sinh(z) + kappa * z - 2 * size) / (scale * np.cosh(z) + kappa)
    moves = scale * np.cosh(z)
    return np.sign(b) * scale / 2 * np.sinh(z), moves / (moves + kappa)


@problems.in_float64
def recovery_load(kept: ArrayLike, dropped: ArrayLike, flipped: ArrayLike, new: ArrayLike) -> Array:
    """Computes the load n / d beyond which rich fine-tuning finds the target, without noise.

    As the scale goes to 0, fine-tuning minimises sum |beta_i| over entries that are missing in the
    source, plus 2 |beta_i| over entries that have the opposite sign in the source. The load is the
    statistical dimension of this function's descent cone, divided by d:

        min_t  kept + new (1 + t^2) + flipped (1 + 4 t^2) + dropped (1/2 + S(2t)) + 2 absent S(t)

    with S(t) = E (g - t)_+^2 = (1 + t^2) Phi(-t) - t phi(t), and absent = 1 less the others. From
    scratch, all features of the target are `new`.

    Args:
      kept: Fraction of the entries that source and target share, with the same sign.
      dropped: Fraction in the source only.
      flipped: Fraction in both, with opposite signs.
      new: Fraction in the target only. The sum of the four is at most 1.

    Returns:
      The load, with the broadcast shape of the arguments.

    Raises:
      ValueError: If a share is negative, or the sum is above 1.

    References:
      Amelunxen, Lotz, McCoy and Tropp, Living on the edge, 2014 (arXiv 1303.6672), Thm II and
      Prop 4.1: sharp as d -> inf. With dropped = flipped = kept = 0 it is the threshold of
      basis pursuit.

    >>> round(float(recovery_load(0.0, 0.0, 0.0, 0.1)), 4)  # from scratch
    0.3288
    >>> round(float(recovery_load(0.05, 0.05, 0.0, 0.05)), 4)  # from a source that has half of it
    0.2727
    """
    shares = [np.asarray(v, dtype=float) for v in (kept, dropped, flipped, new)]
    for name, value in zip(("kept", "dropped", "flipped", "new"), shares, strict=True):
        problems.check(name, value, lambda p: p >= 0, ">= 0")
    total = np.asarray(sum(shares))
    problems.check("the sum of all shares", total, lambda p: p <= 1 + 1e-9, "at most 1")
    every = np.broadcast_arrays(*shares, np.maximum(1 - total, 0.0))
    return jnp.asarray(np.vectorize(_least)(*every))


def _least(kept: float, dropped: float, flipped: float, new: float, absent: float) -> float:
    """Computes the minimum over t of a convex function, at the root of its derivative."""
    grows = new + 4 * flipped

    def slope(t: float) -> float:
        return 2 * t * grows - 4 * dropped * _mean_above(2 * t) - 4 * absent * _mean_above(t)

    if grows == 0:
        return kept + dropped / 2
    t = _root(slope, 0.0, 40.0) if slope(0.0) < 0 else 0.0
    costs = kept + new + flipped + t**2 * grows
    return costs + dropped * (0.5 + _square_above(2 * t)) + 2 * absent * _square_above(t)


def _mean_above(t: float) -> float:
    """Computes E (g - t)_+ for a normal g."""
    return float(np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi) - t * special.ndtr(-t))


def _square_above(t: float) -> float:
    """Computes E (g - t)_+^2 for a normal g."""
    return float(special.ndtr(-t)) - t * _mean_above(t)


def _check_scale(scale: Entries) -> None:
    allowed = "positive and finite, from 1e-100 to 1e100"
    problems.check("scale", scale, lambda s: (s >= 1e-100) & (s <= 1e100), allowed)
