"""Gradient descent on quadratics: Theorem 2 and Appendix C of SAIL, and what they leave out.

J(theta) - J* = sum_h curvature_h error_h^2 / 2, in the eigenbasis of the Hessian; `error` is
theta - theta* there. L and mu are the largest and the smallest curvature.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems


def excess(
    curvature: Float[ArrayLike, " d"],
    error: Float[ArrayLike, "*b d"],
    rate: ArrayLike,
    steps: ArrayLike,
) -> Float[Array, "*b"]:
    """J(theta_T) - J* after T steps: sum_h h (1 - rate h)^(2 T) error_h^2 / 2."""
    _check(curvature, rate, steps)
    left = jnp.exp(_log_left(curvature, rate, steps))
    return jnp.sum(jnp.asarray(curvature, float) * left * jnp.asarray(error) ** 2, -1) / 2


def contraction(mu: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> Float[Array, ""]:
    """(1 - rate mu)^T, eq. 6: the most that is left of the excess, for rate <= 1 / L and any
    strongly convex J. Quadratics contract by its square, `contraction(mu, rate, 2 * steps)`,
    attained along the flattest direction."""
    _check(mu, rate, steps)
    problems.check("rate", jnp.asarray(rate) * mu, lambda x: x <= 1, "at most 1 / mu")
    return jnp.exp(_power(jnp.asarray(steps, float), -jnp.asarray(rate, float) * mu))


def excess_bound(L: ArrayLike, distance: ArrayLike) -> Float[Array, ""]:
    """J(theta) - J* <= L |theta - theta*|^2 / 2, eq. 7."""
    problems.check("L", L, lambda h: h > 0, "a curvature > 0")
    problems.check("distance", distance, np.isfinite, "finite")
    return jnp.asarray(L, float) * distance * distance / 2  # the square alone can overflow


def excess_ratio(
    curvature: Float[ArrayLike, " d"],
    error: Float[ArrayLike, "*b d"],
    other: Float[ArrayLike, "*b d"],
    rate: ArrayLike,
    steps: ArrayLike,
) -> Float[Array, "*b"]:
    """The excess from one start over that from another, after T steps: Appendix C's rho at T = 0.

    Being nearer does not last: as T grows the share of the slowest mode alone decides, and
    rho -> (error_mu / other_mu)^2, whatever the distances.
    """
    _check(curvature, rate, steps)
    log_left = _log_left(curvature, rate, steps)
    # relative to the slowest mode: after many steps either excess is too small for a float
    slowest = log_left.max(-1, keepdims=True)
    left = jnp.exp(log_left - jnp.where(jnp.isinf(slowest), 0.0, slowest))
    weight = jnp.asarray(curvature, float) * left
    first, second = (jnp.sum(weight * jnp.asarray(e, float) ** 2, -1) for e in (error, other))
    problems.check("the excess from other", second, lambda x: x > 0, "> 0")
    return first / second


@jax.jit
def descend(
    curvature: Float[ArrayLike, " d"], start: Float[ArrayLike, " d"], rate: ArrayLike, steps: int
) -> Float[Array, " d"]:
    """The error after T steps of gradient descent, by autodiff."""

    def loss(error: Array) -> Array:
        return jnp.sum(curvature * error**2) / 2

    return jax.lax.fori_loop(0, steps, lambda _, e: e - rate * jax.grad(loss)(e), start)


def _log_left(curvature: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> Float[Array, " d"]:
    """log of (1 - rate h)^(2 T), through 1 + (-x) or 1 + (x - 2): x = rate h is not rounded off."""
    x = jnp.asarray(rate, float) * jnp.asarray(curvature, float)
    return _power(2 * jnp.asarray(steps, float), jnp.where(x < 1, -x, x - 2))


def _power(steps: Array, x: Array) -> Array:
    """log (1 + x)^steps; 0 for no steps, at x = -1 too."""
    return jnp.where(steps > 0, steps * problems.log1p(x), 0.0)


def _check(curvature: ArrayLike, rate: ArrayLike, steps: ArrayLike) -> None:
    strong = "> 0 (strong convexity) and finite"
    problems.check("curvature", curvature, lambda h: (h > 0) & (h < np.inf), strong)
    problems.check("rate", rate, lambda r: (r > 0) & (r < np.inf), "> 0 and finite")
    problems.check("steps", steps, lambda T: (T >= 0) & (np.inf > T), "a finite number >= 0")
