"""Linear discriminants of two Gaussian classes: Lemma 2 of SAIL, all parameters known.

A task is x | y ~ N(mean_y, covariance), y in {1, -1}; `means` [2 d] has that of y = 1 first. A
covariance is [d d], or a variance s^2 that stands for s^2 I.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.distances import gaussian_separation, total_variation_gaussian
from theory import problems


def lda_parameters(
    means: Float[ArrayLike, "*b 2 d"], covariance: ArrayLike = 1.0, prior: ArrayLike = 0.5
) -> tuple[Float[Array, "*b d"], Float[Array, "*b"]]:
    """The log odds of y = 1 against -1 are theta.x + b (Appendix E): (theta, b); prior = P(y = 1).

    theta = S^-1 (m_1 - m_-1), b = -(m_1 + m_-1).theta / 2 + log(prior / (1 - prior)).
    """
    means = _check_means("means", means)
    problems.check("prior", prior, lambda p: (p > 0) & (p < 1), "a probability in (0, 1)")
    theta = _solve(covariance, means[..., 0, :] - means[..., 1, :])
    prior = jnp.asarray(prior, float)
    odds = jnp.log(prior) - jnp.log1p(-prior)
    return theta, odds - jnp.sum(means.sum(-2) * theta, -1) / 2


def lda_total_variation(
    means: Float[ArrayLike, "*b 2 d"],
    others: Float[ArrayLike, "*b 2 d"],
    covariance: ArrayLike = 1.0,
    prior: ArrayLike = 0.5,
) -> Float[Array, "*b"]:
    """Total variation of two tasks, as laws of (x, y), with one covariance and prior: the classes'
    2 Phi(Delta / 2) - 1, averaged. The paper has Delta / 2 of the difference of the class means,
    which exceeds 1, and does not see a shift of both classes."""
    gap = _check_means("others", others) - _check_means("means", means)
    first, second = (total_variation_gaussian(gap[..., c, :], covariance) for c in (0, 1))
    prior = jnp.asarray(prior, float)
    return prior * first + (1 - prior) * second


def lda_constant(gap: Float[ArrayLike, "*b d"], covariance: ArrayLike = 1.0) -> Float[Array, "*b"]:
    """Lemma 2's C = 2 sqrt(gap.S^-2 gap / gap.S^-1 gap) along a difference of means, nonzero. It is
    in [2 / sqrt(largest), 2 / sqrt(smallest eigenvalue)], constant only for S = s^2 I, 2 / s."""
    gap = jnp.asarray(gap, float)
    largest = jnp.abs(gap).max(-1, keepdims=True)
    problems.check("the largest entry of gap", largest, lambda x: (x > 0) & (x < np.inf), "> 0")
    gap = gap / largest  # C does not depend on its length, squares can overflow
    white = _solve(covariance, gap)
    return 2 * jnp.sqrt(jnp.sum(white**2, -1) / jnp.sum(white * gap, -1))


def lda_distance(total_variation: ArrayLike, constant: ArrayLike) -> Float[Array, ""]:
    """|theta_i - theta*| of tasks of classes +-m_i and +-m*, from their total variation: Lemma 2 as
    true, C 2 Phi^-1((1 + TV) / 2) with C = `lda_constant(m_i - m*, covariance)`.

    >>> round(float(lda_distance(0.38292492, constant=2.0)), 4)  # means one apart, S = I
    2.0
    """
    problems.check("constant", constant, lambda c: c > 0, "> 0")
    return jnp.asarray(constant) * gaussian_separation(total_variation)


def symmetric(mean: Float[ArrayLike, "*b d"]) -> Float[Array, "*b 2 d"]:
    """Classes at mean and -mean."""
    return jnp.stack([mean, -jnp.asarray(mean)], -2)


def _solve(covariance: ArrayLike, gap: Array) -> Array:
    S = jnp.asarray(covariance, float)
    if S.ndim == 0:
        problems.check("covariance", S, lambda s: s > 0, "a variance > 0")
        return gap / S
    if S.shape != (gap.shape[-1],) * 2:
        raise ValueError(f"covariance must be a variance or [d d], d = {gap.shape[-1]}; {S.shape}")
    problems.check("covariance", jnp.linalg.eigvalsh(S), lambda h: h > 0, "positive definite")
    return jnp.linalg.solve(S, gap[..., None])[..., 0]


def _check_means(name: str, means: ArrayLike) -> Array:
    means = jnp.asarray(means, float)
    if means.ndim < 2 or means.shape[-2] != 2:
        raise ValueError(f"{name} must be [... 2 d], a mean for each class; got {means.shape}")
    return means
