"""The probability that a pre-trained model is closer to the target than a random one.

This is SAIL's Theorem 1. X = |theta_i - theta*|^2 is the squared distance of a pre-trained model.
Its law is spread chi^2_rank, the tight case of the paper's assumptions, in which features are
mapped isometrically and their means are normal about the target's. Y = |theta_rand - theta*|^2 is
the squared distance of a random model theta_rand ~ N(0, I_dim), independent of X. Its law is
chi^2_dim with noncentrality |theta*|^2 = `squared_length`. All results are exact up to quadrature.
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc, gammainc, gammaln, xlogy
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems

NODES = 96  # of Gauss-Legendre quadrature on [0, 1]
# Terms of a Poisson mixture. They reach 12 standard deviations above the largest allowed mean.
TERMS = 512
LONGEST = 600.0


@problems.defined
def mean_distance(dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """Computes the mean squared distance of a random model, E Y = dim + |theta*|^2.

    Args:
      dim: Number of parameters, >= 1.
      squared_length: |theta*|^2, in [0, 600].

    Returns:
      The mean, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(mean_distance(7, 2.0))
    9.0
    """
    _check(dim, squared_length)
    return dim + jnp.asarray(squared_length, float)


@problems.in_float64
def mean_inverse_distance(dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """Computes E[1 / Y], the mean inverse squared distance of a random model.

        int_0^1 v^(dim - 3) exp(-|theta*|^2 (1 - v^2) / 2) dv <= 1 / (dim - 2)

    Args:
      dim: Number of parameters, >= 1.
      squared_length: |theta*|^2, in [0, 600].

    Returns:
      The means, with the shape of `squared_length`; inf for dim < 3.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(mean_inverse_distance(7)), 6)
    0.2
    """
    _check(dim, squared_length)
    m = jnp.asarray(squared_length, float)
    if dim < 3:
        return jnp.full_like(m, jnp.inf)
    v, dv = np.polynomial.legendre.leggauss(NODES)
    v, dv = jnp.asarray((v + 1) / 2, float), jnp.asarray(dv / 2, float)
    # E[1/Y] = int_0^inf E e^{-tY} dt, in the variable v = (1 + 2t)^{-1/2}, which maps it to [0, 1].
    return jnp.exp(-m[..., None] * (1 - v**2) / 2) * v ** (dim - 3) @ dv


@problems.in_float64
def distance_cdf(y: ArrayLike, dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """Computes P(Y <= y), the probability that a random model is within a squared distance.

    Args:
      y: Squared distances, >= 0.
      dim: Number of parameters, >= 1.
      squared_length: |theta*|^2, in [0, 600].

    Returns:
      The probabilities, with the broadcast shape of y and `squared_length`.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(distance_cdf(1.0, 1)), 4)  # a standard normal within one standard deviation
    0.6827
    """
    _check(dim, squared_length)
    problems.check("y", y, lambda y: y >= 0, ">= 0")
    # A noncentral chi^2 is a mixture of central ones with dim + 2 j degrees, with Poisson weights.
    j, weights = _poisson(squared_length)
    return jnp.sum(gammainc(dim / 2 + j, jnp.asarray(y, float)[..., None] / 2) * weights, -1)


@problems.in_float64
def tail(
    ratio: ArrayLike, dim: int, squared_length: ArrayLike = 0.0, *, rank: int = 1
) -> Float[Array, ""]:
    """Computes P(X >= alpha Y), the probability that a pre-trained model is not closer.

    alpha is the factor by which its squared distance should be smaller than a random model's.

    It is a Poisson mixture of beta functions, of order ratio^(dim / 2) as ratio -> 0. With alpha =
    mu r / L it bounds P(J(theta_i) - J* >= r (J(theta_rand) - J*)) for losses with curvatures in
    [mu, L]. For mu = L it equals that probability.

    Args:
      ratio: spread / alpha, >= 0, inf allowed.
      dim: Number of parameters, >= 1.
      squared_length: |theta*|^2, in [0, 600].
      rank: Number of features, the degrees of freedom of X, >= 1.

    Returns:
      The probabilities, with the broadcast shape of `ratio` and `squared_length`.

    Raises:
      ValueError: If an argument is out of range.

    References:
      SAIL, Theorem 1, bounds this probability.

    >>> round(float(tail(1.0, 1)), 4)  # two standard normals: either is larger as often
    0.5
    """
    _check(dim, squared_length)
    problems.check("ratio", ratio, lambda u: u >= 0, ">= 0")
    problems.check("rank", rank, lambda p: p >= 1, "a number of features >= 1")
    u = jnp.asarray(ratio, float)[..., None]
    j, weights = _poisson(squared_length)
    # X >= alpha Y for chi-squares of p and d degrees is an event of a Beta(d / 2, p / 2) variable.
    share = jnp.where(jnp.isinf(u), 1.0, u / (1 + u))
    return jnp.sum(betainc(dim / 2 + j, rank / 2, share) * weights, -1)


@problems.defined
def tail_bound(ratio: ArrayLike, dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """Computes the bound E[X] E[1 / Y] / alpha on P(X >= alpha Y).

    It is Markov's inequality for X / Y with independent X and Y. The paper divides by E[Y] instead,
    which Markov's inequality does not justify and which is wrong for dim = 1.

    Args:
      ratio: E[X] / alpha, >= 0. Under the paper's assumptions E[X] <= L^2 (tau^2 + beta).
      dim: Number of parameters, >= 1; the bound is finite for dim >= 3.
      squared_length: |theta*|^2, in [0, 600].

    Returns:
      The bounds, with the broadcast shape of `ratio` and `squared_length`.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Corrects SAIL, Theorem 1, eq. (5).

    >>> round(float(tail_bound(0.5, 7)), 4)
    0.1
    """
    problems.check("ratio", ratio, lambda u: u >= 0, ">= 0")
    ratio = jnp.asarray(ratio, float)
    # With spread 0, X is 0, and so is the bound, even if E[1/Y] is infinite.
    return jnp.where(ratio == 0, 0.0, ratio * mean_inverse_distance(dim, squared_length))


def _poisson(squared_length: ArrayLike) -> tuple[Array, Array]:
    """Returns the numbers j = 0, 1, ... and their Poisson weights of mean squared_length / 2."""
    half = jnp.asarray(squared_length, float)[..., None] / 2
    j = jnp.arange(TERMS, dtype=float)
    return j, jnp.exp(xlogy(j, half) - half - gammaln(j + 1))


def _check(dim: int, squared_length: ArrayLike) -> None:
    problems.check("dim", dim, lambda d: d >= 1, "a number of parameters >= 1")
    allowed = f"in [0, {LONGEST:g}]"
    problems.check("squared_length", squared_length, lambda m: (m >= 0) & (m <= LONGEST), allowed)
