"""How often a pre-trained model is nearer the target than a random one: Theorem 1 of SAIL, exactly.

X = |theta_i - theta*|^2 = spread chi^2_rank, the tight case of the paper's assumptions: an isometry
of features whose means are normal about the target's. Y = |theta_rand - theta*|^2 for theta_rand ~
N(0, I_dim), independent of X: chi^2_dim, noncentral by |theta*|^2 = `squared_length`.
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc, gammainc, gammaln, xlogy
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems

NODES = 96  # of Gauss-Legendre quadrature on [0, 1]
TERMS = 512  # of Poisson mixtures: 12 standard deviations above the largest mean allowed
LONGEST = 600.0


def mean_distance(dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """E Y = dim + |theta*|^2."""
    _check(dim, squared_length)
    return dim + jnp.asarray(squared_length, float)


@problems.in_float64
def mean_inverse_distance(dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """E[1 / Y] = int_0^1 v^(dim - 3) exp(-|theta*|^2 (1 - v^2) / 2) dv, at most 1 / (dim - 2);
    infinite for dim < 3.

    >>> round(float(mean_inverse_distance(7)), 6)
    0.2
    """
    _check(dim, squared_length)
    m = jnp.asarray(squared_length, float)
    if dim < 3:
        return jnp.full_like(m, jnp.inf)
    v, dv = np.polynomial.legendre.leggauss(NODES)
    v, dv = jnp.asarray((v + 1) / 2, float), jnp.asarray(dv / 2, float)
    return jnp.exp(-m[..., None] * (1 - v**2) / 2) * v ** (dim - 3) @ dv


@problems.in_float64
def distance_cdf(y: ArrayLike, dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """P(Y <= y), y >= 0."""
    _check(dim, squared_length)
    problems.check("y", y, lambda y: y >= 0, ">= 0")
    j, weights = _poisson(squared_length)
    return jnp.sum(gammainc(dim / 2 + j, jnp.asarray(y, float)[..., None] / 2) * weights, -1)


@problems.in_float64
def tail(
    ratio: ArrayLike, dim: int, squared_length: ArrayLike = 0.0, *, rank: int = 1
) -> Float[Array, ""]:
    """P(X >= alpha Y), with ratio = spread / alpha: a Poisson mixture of beta functions, of
    order ratio^(dim / 2) as ratio -> 0.

    With alpha = mu r / L this bounds P(J(theta_i) - J* >= r (J(theta_rand) - J*)) of losses with
    curvatures in [mu, L]; for mu = L it is that probability.

    >>> round(float(tail(1.0, 1)), 4)  # two standard normals: either is larger as often
    0.5
    """
    _check(dim, squared_length)
    problems.check("ratio", ratio, lambda u: u >= 0, ">= 0")
    problems.check("rank", rank, lambda p: p >= 1, "a number of features >= 1")
    u = jnp.asarray(ratio, float)[..., None]
    j, weights = _poisson(squared_length)
    share = jnp.where(jnp.isinf(u), 1.0, u / (1 + u))
    return jnp.sum(betainc(dim / 2 + j, rank / 2, share) * weights, -1)


def tail_bound(ratio: ArrayLike, dim: int, squared_length: ArrayLike = 0.0) -> Float[Array, ""]:
    """P(X >= alpha Y) <= E[X] E[1 / Y] / alpha: Markov's inequality for X / Y, independent. ratio =
    E[X] / alpha, E[X] <= L^2 (tau^2 + beta) under the paper's assumptions; finite for dim >= 3.

    The paper divides by E[Y] instead, which Markov does not allow and dim = 1 refutes.
    """
    problems.check("ratio", ratio, lambda u: u >= 0, ">= 0")
    ratio = jnp.asarray(ratio, float)
    # 0 inf = 0: with no spread X is 0
    return jnp.where(ratio == 0, 0.0, ratio * mean_inverse_distance(dim, squared_length))


def _poisson(squared_length: ArrayLike) -> tuple[Array, Array]:
    half = jnp.asarray(squared_length, float)[..., None] / 2
    j = jnp.arange(TERMS, dtype=float)
    return j, jnp.exp(xlogy(j, half) - half - gammaln(j + 1))


def _check(dim: int, squared_length: ArrayLike) -> None:
    problems.check("dim", dim, lambda d: d >= 1, "a number of parameters >= 1")
    allowed = f"in [0, {LONGEST:g}]"
    problems.check("squared_length", squared_length, lambda m: (m >= 0) & (m <= LONGEST), allowed)
