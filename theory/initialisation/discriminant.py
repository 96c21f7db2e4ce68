"""Linear discriminants of two Gaussian classes, as in Lemma 2 of the SAIL paper.

A task is x | y ~ N(mean_y, covariance) with y in {1, -1}. The first row of `means` `(2, d)` is the
mean of y = 1. A covariance is a matrix `(d, d)`, or a variance s^2, which means s^2 I.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.distances import gaussian_separation, total_variation_gaussian
from theory import problems


@problems.defined
def lda_parameters(
    means: Float[ArrayLike, "*b 2 d"], covariance: ArrayLike = 1.0, prior: ArrayLike = 0.5
) -> tuple[Float[Array, "*b d"], Float[Array, "*b"]]:
    """Computes the parameters (theta, b) of the optimal linear discriminant.

    The log odds of y = 1 against y = -1 are theta.x + b with, for covariance S,

        theta = S^-1 (m_1 - m_-1),  b = -(m_1 + m_-1).theta / 2 + log(prior / (1 - prior)).

    Args:
      means: Class means `(..., 2, d)`, with the mean of y = 1 first.
      covariance: Common covariance `(d, d)`, positive definite, or a variance.
      prior: Probability of y = 1, in (0, 1).

    Returns:
      theta `(..., d)` and b `(...)`.

    Raises:
      ValueError: If shapes do not conform, the covariance is not positive definite or the prior is
        out of range.

    References:
      SAIL, Appendix E.

    >>> theta, b = lda_parameters(jnp.array([[1.0, 0.0], [-1.0, 0.0]]))
    >>> float(theta[0]), abs(float(b))
    (2.0, 0.0)
    """
    means = _check_means("means", means)
    problems.check("prior", prior, lambda p: (p > 0) & (p < 1), "a probability in (0, 1)")
    theta = _solve(covariance, means[..., 0, :] - means[..., 1, :])
    prior = jnp.asarray(prior, float)
    # log(1 - prior) keeps its digits for small priors.
    odds = jnp.log(prior) - problems.log1p(-prior)
    return theta, odds - jnp.sum(means.sum(-2) * theta, -1) / 2


@problems.defined
def lda_total_variation(
    means: Float[ArrayLike, "*b 2 d"],
    others: Float[ArrayLike, "*b 2 d"],
    covariance: ArrayLike = 1.0,
    prior: ArrayLike = 0.5,
) -> Float[Array, "*b"]:
    """Computes the total variation distance between two tasks as laws of (x, y).

    Both share a covariance and a prior. For class means at the Mahalanobis distance Delta it is 2
    Phi(Delta / 2) - 1, averaged over the two classes. The paper's Delta / 2 of the difference of
    class means can exceed 1, and ignores a shift of both classes.

    Args:
      means: Class means of the first task, `(..., 2, d)`.
      others: Class means of the second task, `(..., 2, d)`.
      covariance: Common covariance `(d, d)`, positive definite, or a variance.
      prior: Probability of y = 1, in [0, 1].

    Returns:
      The distances in [0, 1], one per pair of tasks.

    Raises:
      ValueError: If the means are not `(..., 2, d)`, or the covariance or the prior is out of
        range.

    References:
      Corrects SAIL, Lemma 2.

    >>> means = jnp.array([[1.0], [-1.0]])
    >>> round(float(lda_total_variation(means, means + 1.0)), 4)
    0.3829
    """
    gap = _check_means("others", others) - _check_means("means", means)
    problems.check("prior", prior, lambda p: (p >= 0) & (p <= 1), "a probability in [0, 1]")
    # Labels are observed, so the distance between the joint laws is the mean of the distances of
    # the classes.
    first, second = (total_variation_gaussian(gap[..., c, :], covariance) for c in (0, 1))
    prior = jnp.asarray(prior, float)
    return prior * first + (1 - prior) * second


@problems.defined
def lda_constant(gap: Float[ArrayLike, "*b d"], covariance: ArrayLike = 1.0) -> Float[Array, "*b"]:
    """Computes Lemma 2's constant C along a difference of means.

        C = 2 sqrt(gap.S^-2 gap / gap.S^-1 gap)

    It is between 2 / sqrt(largest) and 2 / sqrt(smallest eigenvalue of S). It is the same in all
    directions only for S = s^2 I, where it is 2 / s.

    Args:
      gap: Difference of means `(..., d)`, nonzero.
      covariance: Covariance S `(d, d)`, positive definite, or a variance.

    Returns:
      The constants, one per difference.

    Raises:
      ValueError: If a difference is 0 or not finite, or the covariance is out of range.

    References:
      SAIL, Lemma 2.

    >>> round(float(lda_constant(jnp.array([3.0, 1.0]), 4.0)), 4)
    1.0
    """
    gap = jnp.asarray(gap, float)
    largest = jnp.abs(gap).max(-1, keepdims=True)
    problems.check("the largest entry of gap", largest, lambda x: (x > 0) & (x < np.inf), "> 0")
    # The difference is normalised, because C does not depend on its norm and squares of its entries
    # can overflow.
    gap = gap / largest
    white = _solve(covariance, gap)
    return 2 * jnp.sqrt(jnp.sum(white**2, -1) / jnp.sum(white * gap, -1))


@problems.defined
def lda_distance(total_variation: ArrayLike, constant: ArrayLike) -> Float[Array, ""]:
    """Computes the distance |theta_i - theta*| between two tasks' parameters from their total
    variation.

    The tasks have classes +-m_i and +-m*. By the corrected Lemma 2 the distance is 2 C Phi^-1((1 +
    TV) / 2) with C = `lda_constant(m_i - m*, covariance)`.

    Args:
      total_variation: Total variation distance TV of the tasks, in [0, 1]. At 1 the result is inf.
      constant: The constant C, finite and > 0.

    Returns:
      The distance, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Corrects SAIL, Lemma 2.

    >>> round(float(lda_distance(0.38292492, constant=2.0)), 4)  # means one apart, S = I
    2.0
    """
    problems.check("constant", constant, lambda c: (c > 0) & (c < np.inf), "> 0 and finite")
    return jnp.asarray(constant) * gaussian_separation(total_variation)


@problems.defined
def symmetric(mean: Float[ArrayLike, "*b d"]) -> Float[Array, "*b 2 d"]:
    """Returns the means of a task with classes at `mean` and at -`mean`.

    Args:
      mean: Mean of y = 1, `(..., d)`.

    Returns:
      The class means `(..., 2, d)`.

    >>> symmetric(jnp.array([1.0, 2.0])).tolist()
    [[1.0, 2.0], [-1.0, -2.0]]
    """
    return jnp.stack([mean, -jnp.asarray(mean)], -2)


def _solve(covariance: ArrayLike, gap: Array) -> Array:
    S = jnp.asarray(covariance, float)
    if S.ndim == 0:
        problems.check("covariance", S, lambda s: s > 0, "a variance > 0")
        return gap / S
    if S.shape != (gap.shape[-1],) * 2:
        raise ValueError(f"covariance must be a variance or [d d], d = {gap.shape[-1]}; {S.shape}")
    problems.check("covariance", linalg.eigvalsh(S), lambda h: h > 0, "positive definite")
    return linalg.solve(S, gap[..., None])[..., 0]


def _check_means(name: str, means: ArrayLike) -> Array:
    means = jnp.asarray(means, float)
    if means.ndim < 2 or means.shape[-2] != 2:
        raise ValueError(f"{name} must be [... 2 d], a mean for each class; got {means.shape}")
    return means
