"""Gradient descent on quadratics: an exact form of Theorem 2 and Appendix C of the SAIL paper.

In the eigenbasis of the Hessian, J(theta) - J* = sum_h curvature_h error_h^2 / 2 with
error = theta - theta*. L and mu are the largest and the smallest curvature.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems


@problems.defined
def excess(
    curvature: Float[ArrayLike, " d"],
    error: Float[ArrayLike, "*b d"],
    rate: ArrayLike,
    steps: ArrayLike,
) -> Float[Array, "*b"]:
    """Computes the excess J(theta_T) - J* after T steps of gradient descent, exactly.

        sum_h h (1 - rate h)^(2 T) error_h^2 / 2

    Args:
      curvature: Eigenvalues h of the Hessian `(d,)`, > 0.
      error: theta - theta* at the start, in the eigenbasis, `(..., d)`.
      rate: Learning rate, > 0.
      steps: Number of steps T, >= 0.

    Returns:
      The excess, one per start.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(excess(jnp.array([2.0]), jnp.array([1.0]), 0.25, 1)), 4)
    0.25
    """
    _check(curvature, rate, steps)
    left = jnp.exp(_log_left(curvature, rate, steps))
    return jnp.sum(jnp.asarray(curvature, float) * left * jnp.asarray(error) ** 2, -1) / 2


@problems.defined
def contraction(mu: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> Float[Array, ""]:
    """Computes (1 - rate mu)^T, a bound on the fraction of the excess that remains after T steps.

    It holds for rate <= 1 / L and any strongly convex J. Quadratics contract by its square,
    `contraction(mu, rate, 2 * steps)`, which is attained along the flattest direction.

    Args:
      mu: Smallest curvature, > 0.
      rate: Learning rate, in (0, 1 / mu].
      steps: Number of steps T, >= 0.

    Returns:
      The factor, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      SAIL, Theorem 2, eq. (6).

    >>> round(float(contraction(1.0, 0.5, 2)), 4)
    0.25
    """
    _check(mu, rate, steps)
    problems.check("rate", jnp.asarray(rate) * mu, lambda x: x <= 1, "at most 1 / mu")
    return jnp.exp(_power(jnp.asarray(steps, float), -jnp.asarray(rate, float) * mu))


@problems.defined
def excess_bound(L: ArrayLike, distance: ArrayLike) -> Float[Array, ""]:
    """Computes the bound L |theta - theta*|^2 / 2 on the excess J(theta) - J*.

    Args:
      L: Largest curvature, finite and > 0.
      distance: |theta - theta*|, finite.

    Returns:
      The bound, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      SAIL, Theorem 2, eq. (7).

    >>> float(excess_bound(2.0, 3.0))
    9.0
    """
    problems.check("L", L, lambda h: (h > 0) & (h < np.inf), "a curvature > 0 and finite")
    problems.check("distance", distance, np.isfinite, "finite")
    # In this order, because the square can overflow.
    return jnp.asarray(L, float) * distance * distance / 2


@problems.defined
def excess_ratio(
    curvature: Float[ArrayLike, " d"],
    error: Float[ArrayLike, "*b d"],
    other: Float[ArrayLike, "*b d"],
    rate: ArrayLike,
    steps: ArrayLike,
) -> Float[Array, "*b"]:
    """Computes the ratio of the excesses of two starts after T steps.

    At T = 0 this is rho of Appendix C. A closer start does not help for long: as T grows, only the
    slowest mode matters, and rho -> (error_mu / other_mu)^2 for any distances.

    Args:
      curvature: Eigenvalues h of the Hessian `(d,)`, > 0.
      error: theta - theta* at the first start, in the eigenbasis, `(..., d)`.
      other: theta - theta* at the second start, in the eigenbasis, `(..., d)`, nonzero.
      rate: Learning rate, > 0.
      steps: Number of steps T, >= 0.

    Returns:
      The ratios, one per pair of starts.

    Raises:
      ValueError: If an argument is out of range, or the excess from the second start is 0.

    References:
      SAIL, Appendix C.

    >>> float(excess_ratio(jnp.array([1.0]), jnp.array([1.0]), jnp.array([2.0]), 0.5, 10))
    0.25
    """
    _check(curvature, rate, steps)
    log_left = _log_left(curvature, rate, steps)
    # Relative to the slowest mode, because both excesses underflow after many steps.
    slowest = log_left.max(-1, keepdims=True)
    left = jnp.exp(log_left - jnp.where(jnp.isinf(slowest), 0.0, slowest))
    weight = jnp.asarray(curvature, float) * left
    first, second = (jnp.sum(weight * jnp.asarray(e, float) ** 2, -1) for e in (error, other))
    problems.check("the excess from other", second, lambda x: x > 0, "> 0")
    return first / second


@problems.defined
@jax.jit
def descend(
    curvature: Float[ArrayLike, " d"],
    start: Float[ArrayLike, " d"],
    rate: ArrayLike,
    steps: ArrayLike,
) -> Float[Array, " d"]:
    """Simulates T steps of gradient descent on the quadratic, with gradients by autodiff.

    `excess` is compared with this simulator, which is deterministic.

    Args:
      curvature: Eigenvalues of the Hessian `(d,)`.
      start: theta - theta* at the start, in the eigenbasis, `(d,)`.
      rate: Learning rate.
      steps: Number of steps T.

    Returns:
      theta - theta* after the steps, `(d,)`.

    >>> descend(jnp.array([2.0]), jnp.array([1.0]), 0.25, 1).tolist()
    [0.5]
    """

    def loss(error: Array) -> Array:
        return jnp.sum(curvature * error**2) / 2

    return jax.lax.fori_loop(0, steps, lambda _, e: e - rate * jax.grad(loss)(e), start)


def _log_left(curvature: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> Float[Array, " d"]:
    """Computes log of (1 - rate h)^(2 T) from 1 + (-x) or 1 + (x - 2) with x = rate h.

    In this form, x is not lost to rounding.
    """
    x = jnp.asarray(rate, float) * jnp.asarray(curvature, float)
    return _power(2 * jnp.asarray(steps, float), jnp.where(x < 1, -x, x - 2))


def _power(steps: Array, x: Array) -> Array:
    """Computes log (1 + x)^steps. It is 0 for no steps, even at x = -1."""
    return jnp.where(steps > 0, steps * problems.log1p(x), 0.0)


def _check(curvature: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> None:
    strong = "> 0 (strong convexity) and finite"
    problems.check("curvature", curvature, lambda h: (h > 0) & (h < np.inf), strong)
    problems.check("rate", rate, lambda r: (r > 0) & (r < np.inf), "> 0 and finite")
    problems.check("steps", steps, lambda T: (T >= 0) & (np.inf > T), "a finite number >= 0")
