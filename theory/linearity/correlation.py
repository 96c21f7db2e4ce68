"""The R^2 of predictors of the gap in Theorem 1, in closed form for independent factors.

This is the comparison of Appendix B.2 of Zhou et al., 2024 (arXiv 2402.03660), solved for
independent curvature, distance and direction. The gap of two models is

    delta = a (1 - a) / 2 * L * S * U,  U = |D^2 f[d, d]| / (L S),

where L is the norm of the Hessian, S the squared distance, and U in [0, 1] the factor of the
direction. Each R^2 is the squared correlation of delta with a factor. They depend only on the three
squared coefficients of variation, cv2 = variance / mean^2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems


class RSquared(NamedTuple):
    """The R^2 of linear regressions of the gap on three predictors.

    Attributes:
      joint: The R^2 on L S, the main term of Theorem 1.
      distance: The R^2 on S alone.
      curvature: The R^2 on L alone.
    """

    joint: Array
    distance: Array
    curvature: Array


@problems.in_float64
def r_squared(curvature: ArrayLike, distance: ArrayLike, direction: ArrayLike) -> RSquared:
    """Computes the R^2 of three predictors of the gap from the variation of its factors.

        joint     ((1 + curvature) (1 + distance) - 1) / V
        distance  distance / V
        curvature curvature / V

    with V = (1 + curvature) (1 + distance) (1 + direction) - 1. joint >= distance + curvature
    always. The printed values .782 and .839 sum to more than one, so they require dependent
    factors. joint is 1 only if directions do not matter. Distance is a better predictor than
    curvature if it varies more.

    Args:
      curvature: cv2 of L, >= 0.
      distance: cv2 of S, >= 0.
      direction: cv2 of U, >= 0.

    Returns:
      The three R^2, each with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is negative or infinite, or all are 0.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Appendix B.2, has the measured values.

    >>> [round(float(r), 3) for r in r_squared(0.1, 0.4, 0.0)]
    [1.0, 0.741, 0.185]
    """
    for name, cv2 in (("curvature", curvature), ("distance", distance), ("direction", direction)):
        allowed = "a squared coefficient of variation >= 0, and finite"
        problems.check(name, cv2, lambda v: (v >= 0) & (v < np.inf), allowed)
    a, b, c = (jnp.asarray(v, dtype=float) for v in (curvature, distance, direction))
    product = a + b + a * b
    # (1 + a)(1 + b)(1 + c) - 1 as a sum of terms >= 0, without cancellation.
    total = product + c + product * c
    problems.check("the largest of the three", total, lambda v: v > 0, "> 0: something must vary")
    return RSquared(product / total, b / total, a / total)


@problems.in_float64
def direction_cv2(h: int, i: int) -> Float[Array, ""]:
    """Computes the cv2 of U for two-layer linear networks f = w.(W x) with random differences.

    Differences (dw, dW) are uniform on the sphere. Then U = 2 |dw.dW x| / (|x| |d|^2) for all
    models and x. With p = h (i + 1) parameters,

        E U^2 = 4 h / (p (p + 2)),  E U = 4 Gamma((h+1)/2) / (sqrt(pi) Gamma(h/2) p).

    Args:
      h: Hidden width, >= 1.
      i: Number of inputs, >= 1.

    Returns:
      The cv2, a scalar.

    Raises:
      ValueError: If h < 1 or i < 1.

    >>> round(float(direction_cv2(1, 1)), 4)
    0.2337
    """
    problems.check("h", h, lambda h: h >= 1, "a width >= 1")
    problems.check("i", i, lambda i: i >= 1, "a number of inputs >= 1")
    p = h * (i + 1)
    k = h // 2
    # sqrt(pi) Gamma((h+1)/2) / Gamma(h/2) from Wallis' ratio, which keeps its digits, for odd and
    # for even h.
    ratio = 1 / problems.wallis(k) if h % 2 else np.pi * k * problems.wallis(k)
    first = 4 / p * ratio / np.pi
    return jnp.asarray(4 * h / (p * (p + 2)) / first**2 - 1)


@problems.defined
def regression(x: Float[Array, "*b n"], y: Float[Array, "*b n"]) -> Float[Array, "*b"]:
    """Computes the R^2 of a linear regression, with intercept, of y on x.

    Args:
      x: Predictors `(..., n)`.
      y: Responses `(..., n)`.

    Returns:
      The R^2, without the last axis.
    """
    x, y = (v - v.mean(-1, keepdims=True) for v in (x, y))
    return jnp.sum(x * y, -1) ** 2 / (jnp.sum(x**2, -1) * jnp.sum(y**2, -1))


@problems.defined
def random_differences(
    key: Array, n: int, h: int, i: int
) -> tuple[Float[Array, "n h"], Float[Array, "n h i"]]:
    """Draws differences of two-layer networks, uniform on the unit sphere of all parameters.

    Args:
      key: Random key.
      n: Number of draws.
      h: Hidden width.
      i: Number of inputs.

    Returns:
      The differences dw `(n, h)` and dW `(n, h, i)`.
    """
    flat = jax.random.normal(key, (n, h * (i + 1)))
    flat = flat / jnp.linalg.norm(flat, axis=1, keepdims=True)
    return flat[:, :h], flat[:, h:].reshape(n, h, i)
