"""Bounds on the risk of one task from samples of another (SAIL, Lemma 1 and Theorem 4).

They are tested on thresholds, predictors with an exactly known complexity. A threshold predicts y =
1 if one feature x > t, with the 0-1 loss. In the bounds, losses are in [0, C].
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from theory import problems


@problems.defined
def rademacher_bound(
    risk: ArrayLike, complexity: ArrayLike, n: ArrayLike, delta: ArrayLike, *, C: ArrayLike = 1.0
) -> Float[Array, ""]:
    """Computes the Rademacher bound on the true risk from the empirical one.

        risk + 2 complexity + 3 C sqrt(ln(2 / delta) / (2 n))

    With probability 1 - delta it holds for all predictors simultaneously.

    Args:
      risk: Empirical risk on the sample.
      complexity: Empirical Rademacher complexity of the losses, >= 0. (The conclusion of Theorem 4
        has the complexity of the predictors.)
      n: Number of points, >= 1.
      delta: Probability that the bound fails, in (0, 1).
      C: Largest loss, > 0.

    Returns:
      The bound, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      SAIL, Lemma 1.

    >>> round(float(rademacher_bound(0.1, 0.05, 1000, 0.05)), 4)
    0.3288
    """
    problems.check("delta", delta, lambda p: (p > 0) & (p < 1), "a probability in (0, 1)")
    problems.check("n", n, lambda n: n >= 1, "a number of points >= 1")
    problems.check("C", C, lambda c: c > 0, "a bound of the loss > 0")
    problems.check("complexity", complexity, lambda r: r >= 0, ">= 0")
    return (
        jnp.asarray(risk, float)
        + 2 * jnp.asarray(complexity)
        + 3
        * jnp.asarray(C)
        * jnp.sqrt(jnp.log(2 / jnp.asarray(delta, float)) / (2 * jnp.asarray(n)))
    )


@problems.defined
def transfer_bound(
    risk: ArrayLike,
    total_variation: ArrayLike,
    complexity: ArrayLike,
    n: ArrayLike,
    delta: ArrayLike,
    *,
    C: ArrayLike = 1.0,
) -> Float[Array, ""]:
    """Computes a bound on the target risk from a sample of another task.

    It is `rademacher_bound` + C TV(D_i, D*), with the total variation distance between the laws of
    the two tasks. Theorem 4 has 2 C times the total variation of the samples instead. For
    continuous data this is 1, so the right side exceeds 2 C. The factor C is sufficient, without
    delta / 2 and without the smallest combined risk.

    Args:
      risk: Empirical risk on the sample of the other task.
      total_variation: Total variation distance between the tasks, in [0, 1].
      complexity: Empirical Rademacher complexity of the losses, >= 0.
      n: Number of points, >= 1.
      delta: Probability that the bound fails, in (0, 1).
      C: Largest loss, > 0.

    Returns:
      The bound, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Corrects SAIL, Theorem 4.

    >>> more = transfer_bound(0.1, 0.2, 0.05, 1000, 0.05) - rademacher_bound(0.1, 0.05, 1000, 0.05)
    >>> round(float(more), 4)
    0.2
    """
    problems.check("total_variation", total_variation, lambda t: (t >= 0) & (t <= 1), "in [0, 1]")
    base = rademacher_bound(risk, complexity, n, delta, C=C)
    return base + jnp.asarray(C) * jnp.asarray(total_variation)


@problems.defined
def threshold_complexity(n: int) -> float:
    """Computes the empirical Rademacher complexity of thresholds' losses on n distinct points.

    It is the same for all points and labels, namely E max_{k <= n} S_k / n of a simple random walk
    S. By reflection this is (E|S_n| - P(S_n > 0)) / n. For large n it tends to sqrt(2 / (pi n)).

    Args:
      n: Number of points, >= 1.

    Returns:
      The complexity.

    Raises:
      ValueError: If n < 1.

    >>> round(threshold_complexity(1), 6), round(threshold_complexity(2), 6)
    (0.5, 0.375)
    """
    problems.check("n", n, lambda n: n >= 1, "a number of points >= 1")
    m = (n + 1) // 2
    # E|S_n| of a simple random walk, which is the same for n = 2m - 1 and n = 2m, and P(S_n = 0).
    size = 2 * m * problems.wallis(m)
    still = 0.0 if n % 2 else problems.wallis(m)
    return (size - (1 - still) / 2) / n


@problems.in_float64
def empirical_total_variation(
    p: Float[ArrayLike, " cells"], q: Float[ArrayLike, " cells"], n: int, m: int
) -> Float[Array, ""]:
    """Computes the mean total variation distance between the empirical laws of two samples.

    The samples have n points of p and m points of q, on finitely many cells, with binomial counts
    B. The mean is

        sum_k E|B(n, p_k) / n - B(m, q_k) / m| / 2

    It is at least TV(p, q), and 1 for infinitely fine cells.

    Args:
      p: First law, probabilities `(cells,)`.
      q: Second law, probabilities `(cells,)`.
      n: Number of points from p, >= 1.
      m: Number of points from q, >= 1.

    Returns:
      The mean distance, a scalar.

    Raises:
      ValueError: If p and q are not laws on the same cells, or a count is below 1.

    >>> p = jnp.array([0.5, 0.5])
    >>> round(float(empirical_total_variation(p, p, 1, 1)), 4)
    0.5
    """
    p, q = (_probabilities(name, value) for name, value in (("p", p), ("q", q)))
    if p.shape != q.shape:
        raise ValueError(f"p and q must be laws on the same cells; got {p.shape}, {q.shape}")
    problems.check("n", jnp.array([n, m]), lambda n: n >= 1, "a number of points >= 1")
    i, j = jnp.arange(n + 1.0), jnp.arange(m + 1.0)
    # [n + 1, m + 1]: the difference of shares for every pair of counts.
    apart = jnp.abs(i[:, None] / n - j / m)
    return jnp.einsum("ki,ij,kj->", _binomial(i, n, p), apart, _binomial(j, m, q)) / 2


@problems.defined
def threshold_risk(t: ArrayLike, means: Float[ArrayLike, " 2"]) -> Float[Array, "..."]:
    """Computes the true risk of a threshold t.

    The task is x | y ~ N(mean_y, 1) with equal probabilities of y = 1 and y = -1.

    Args:
      t: Thresholds, of any shape; infinite ones are allowed.
      means: Class means `(2,)`, with the mean of y = 1 first.

    Returns:
      The risks, with the shape of `t`.

    Raises:
      ValueError: If `means` are not two.

    >>> round(float(threshold_risk(0.0, jnp.array([1.0, -1.0]))), 4)
    0.1587
    """
    t, means = jnp.asarray(t, float), jnp.asarray(means)
    if means.shape != (2,):
        raise ValueError(f"means must be two, (2,); got {means.shape}")
    return (norm.cdf(t - means[0]) + norm.sf(t - means[1])) / 2


@problems.defined
def empirical_risks(y: Real[ArrayLike, " n"]) -> Float[Array, " n_plus_1"]:
    """Computes the empirical risks of all n + 1 thresholds on n points.

    Args:
      y: Labels 1 or -1 of the points in ascending order of x, `(n,)`.

    Returns:
      The risks `(n + 1,)`, starting with the threshold below all points.

    Raises:
      ValueError: If `y` is empty.

    >>> empirical_risks(jnp.array([-1, 1])).tolist()
    [0.5, 0.0, 0.5]
    """
    y = jnp.asarray(y)
    if y.ndim != 1 or not y.size:
        raise ValueError(f"y must be labels of at least one point, (n,); got {y.shape}")
    # Labels are in the order of their points. Threshold k is above the first k of them.
    missed = jnp.concatenate([jnp.zeros(1), jnp.cumsum(y > 0)])  # y = 1 at or below t
    false = jnp.sum(y < 0) - jnp.concatenate([jnp.zeros(1), jnp.cumsum(y < 0)])
    return (missed + false) / len(y)


@problems.defined
def worst_gap(
    x: Float[ArrayLike, " n"], y: Real[ArrayLike, " n"], means: Float[ArrayLike, " 2"]
) -> Float[Array, ""]:
    """Computes the largest true risk minus empirical risk over all thresholds.

    Args:
      x: Points `(n,)`, ascending.
      y: Labels 1 or -1, `(n,)`.
      means: Class means `(2,)` of the task of the true risk, with the mean of y = 1 first and
        means[0] >= means[1].

    Returns:
      The largest gap, a scalar.

    >>> x, y = jnp.array([-1.0, 1.0]), jnp.array([-1, 1])
    >>> round(float(worst_gap(x, y, jnp.array([1.0, -1.0]))), 4)
    0.2614
    """
    # Between neighbouring points, the empirical risk is constant. The true risk has its maximum at
    # an end if means[0] >= means[1]. The ends of the intervals are therefore sufficient.
    ends = threshold_risk(jnp.concatenate([jnp.array([-jnp.inf]), x, jnp.array([jnp.inf])]), means)
    return jnp.max(jnp.maximum(ends[:-1], ends[1:]) - empirical_risks(y))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _binomial(i: Array, n: int, p: Array) -> Float[Array, "cells counts"]:
    log_choose = jnp.array([_log_choose(n, k) for k in range(n + 1)])
    p = p[:, None]
    misses, log_miss = n - i, problems.log1p(-jnp.minimum(p, 1.0))
    # In logarithms, because the factors overflow and underflow. At p = 1, zero misses contribute a
    # factor of 1.
    return jnp.exp(log_choose + xlogy(i, p) + jnp.where(misses > 0, misses * log_miss, 0.0))


def _probabilities(name: str, p: ArrayLike) -> Array:
    p = jnp.asarray(p, float)
    if p.ndim != 1:
        raise ValueError(f"{name} must be a vector of probabilities; got shape {p.shape}")
    problems.check(name, p, lambda p: p >= 0, "probabilities >= 0")
    slack = 16 * len(p) * float(np.finfo(p.dtype).eps)
    problems.check(f"the sum of {name}", p.sum(), lambda s: abs(s - 1) <= slack, "1")
    return p
