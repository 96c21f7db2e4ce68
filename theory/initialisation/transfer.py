"""The risk on a target task from samples of another: Lemma 1 and Theorem 4 of SAIL, with a class of
predictors whose complexity is known exactly.

Losses are in [0, C]. Thresholds are the predictors y = 1 where x > t, of one feature; their loss is
0 or 1.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlog1py, xlogy
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems


def rademacher_bound(
    risk: ArrayLike, complexity: ArrayLike, n: ArrayLike, delta: ArrayLike, *, C: ArrayLike = 1.0
) -> Float[Array, ""]:
    """Lemma 1: with probability 1 - delta, for all predictors at once, the true risk is at most
    empirical risk + 2 complexity + 3 C sqrt(ln(2 / delta) / 2 n). The complexity is the empirical
    one of the losses, not of the predictors (Theorem 4's conclusion has those)."""
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


def transfer_bound(
    risk: ArrayLike,
    total_variation: ArrayLike,
    complexity: ArrayLike,
    n: ArrayLike,
    delta: ArrayLike,
    *,
    C: ArrayLike = 1.0,
) -> Float[Array, ""]:
    """Theorem 4 as true: `rademacher_bound` + C TV(D_i, D*), of the laws.

    The paper's has 2 C times the total variation of the *samples*, which is 1 for continuous data,
    so that its right side exceeds 2 C; C alone suffices, and neither delta / 2 nor the least
    combined risk is needed.
    """
    problems.check("total_variation", total_variation, lambda t: (t >= 0) & (t <= 1), "in [0, 1]")
    base = rademacher_bound(risk, complexity, n, delta, C=C)
    return base + jnp.asarray(C) * jnp.asarray(total_variation)


def threshold_complexity(n: int) -> float:
    """The empirical Rademacher complexity of the losses of thresholds on n distinct points,
    whatever the points and labels: E max_{k <= n} S_k / n of a simple random walk, which by
    reflection is (E|S_n| - P(S_n > 0)) / n; sqrt(2 / pi n) for large n.

    >>> round(threshold_complexity(1), 6), round(threshold_complexity(2), 6)
    (0.5, 0.375)
    """
    problems.check("n", n, lambda n: n >= 1, "a number of points >= 1")
    m = (n + 1) // 2
    size = 2 * m * problems.wallis(m)  # E|S_n|
    still = 0.0 if n % 2 else problems.wallis(m)
    return (size - (1 - still) / 2) / n


@problems.in_float64
def empirical_total_variation(
    p: Float[ArrayLike, " cells"], q: Float[ArrayLike, " cells"], n: int, m: int
) -> Float[Array, ""]:
    """The mean total variation of the empirical laws of n points of p and m of q, on finitely many
    cells: sum E|B(n, p_k) / n - B(m, q_k) / m| / 2. At least TV(p, q), and 1 for fine cells."""
    p, q = (_probabilities(name, value) for name, value in (("p", p), ("q", q)))
    if p.shape != q.shape:
        raise ValueError(f"p and q must be laws on the same cells; got {p.shape}, {q.shape}")
    problems.check("n", jnp.array([n, m]), lambda n: n >= 1, "a number of points >= 1")
    i, j = jnp.arange(n + 1.0), jnp.arange(m + 1.0)
    apart = jnp.abs(i[:, None] / n - j / m)
    return jnp.einsum("ki,ij,kj->", _binomial(i, n, p), apart, _binomial(j, m, q)) / 2


def threshold_risk(t: ArrayLike, means: Float[ArrayLike, " 2"]) -> Float[Array, "..."]:
    """The risk of threshold t where x | y ~ N(mean_y, 1), y = 1, -1 equally often; means as in
    `lda_parameters`."""
    t, means = jnp.asarray(t, float), jnp.asarray(means)
    return (norm.cdf(t - means[0]) + norm.sf(t - means[1])) / 2


def empirical_risks(y: Float[ArrayLike, " n"]) -> Float[Array, " n_plus_1"]:
    """Those of all n + 1 thresholds on n points in the order of x, from that below all of them."""
    y = jnp.asarray(y)
    missed = jnp.concatenate([jnp.zeros(1), jnp.cumsum(y > 0)])  # y = 1 at or below t
    false = jnp.sum(y < 0) - jnp.concatenate([jnp.zeros(1), jnp.cumsum(y < 0)])
    return (missed + false) / len(y)


def worst_gap(
    x: Float[ArrayLike, " n"], y: Float[ArrayLike, " n"], means: Float[ArrayLike, " 2"]
) -> Float[Array, ""]:
    """sup_t of risk on a task less empirical risk on a sample in the order of x. Between points the
    risk of a task with means[0] >= means[1] has no interior maximum: ends of intervals suffice."""
    ends = threshold_risk(jnp.concatenate([jnp.array([-jnp.inf]), x, jnp.array([jnp.inf])]), means)
    return jnp.max(jnp.maximum(ends[:-1], ends[1:]) - empirical_risks(y))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _binomial(i: Array, n: int, p: Array) -> Float[Array, "cells counts"]:
    log_choose = jnp.array([_log_choose(n, k) for k in range(n + 1)])
    p = p[:, None]
    return jnp.exp(log_choose + xlogy(i, p) + xlog1py(n - i, -p))


def _probabilities(name: str, p: ArrayLike) -> Array:
    p = jnp.asarray(p, float)
    if p.ndim != 1:
        raise ValueError(f"{name} must be a vector of probabilities; got shape {p.shape}")
    problems.check(name, p, lambda p: p >= 0, "probabilities >= 0")
    slack = 16 * len(p) * float(np.finfo(p.dtype).eps)
    problems.check(f"the sum of {name}", p.sum(), lambda s: abs(s - 1) <= slack, "1")
    return p
