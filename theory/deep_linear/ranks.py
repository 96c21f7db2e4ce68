"""Fine-tuning of rank k, in which the weights move only in a subspace of k directions.

The fit is b_0 + U c with U `(d, k)` orthonormal. c is the fit of minimum norm to the residuals of n
labels at the start b_0. The part of the target outside the span acts as noise. `subspace` has the
same law, with the offset beta_t - b_0 in place of the target. This module describes the dependence
of the risk on k.

A random subspace. On average, a fraction k / d of the offset's square is inside. The risk is then

    k <= n - 2:  [(1 - k/d) distance^2 (n - 1) + sigma^2 k] / (n - k - 1)
    k >= n + 2:  distance^2 (1 - n/d) + [(1 - k/d) distance^2 + sigma^2] n / (k - n - 1).

It peaks at k = n, the second peak of double descent. The second line decreases in k. The first is a
ratio of two linear functions and therefore monotone; it increases in k if n - 1 < d (1 + sigma^2 /
distance^2). The smallest risk is therefore always at an end, with all directions or with none
(`best_random_rank`). A random subspace of a rank in between is never better than both.

Ordered directions, best first. Here ranks between the ends can be best. Let m be the square of the
part that rank k does not cover. The next direction lowers the risk if its square is larger than

    (m + sigma^2) / (n - k - 1)   (`rank_threshold`),

the noise, including missed directions, per remaining degree of freedom.

An example: d = 100, n = 50, distance 1, sigma = 0.5, and the squares of the offset decrease as
i^-2. The square of direction 6 is 0.017, and 0.105 are missed without it. The threshold is (0.105 +
0.25) / 44 = 0.0081, so direction 6 lowers the risk. Direction 9 has 0.0075, below the threshold of
0.0077. Rank 8 is therefore best, with a risk of 0.127. The risk is 0.76 with all directions and 1
with none.

Directions from sources. m noisy sources span a subspace close to that of their true tasks. Its
first directions are the leading singular vectors of the sources. The noise determines how much of
each is recovered (`recovered_share`). Nothing is recovered below a strength of sqrt(d / m). The
vector is then a random direction, which never lowers the risk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear import covariance, subspace

Spectrum = Float[Array, " d"]


class Rank(NamedTuple):
    """The best rank of fine-tuning.

    Attributes:
      rank: The number of directions.
      risk: The risk with this rank.
    """

    rank: Array
    risk: Array


@renamed("n", "d", "distance", "sigma", "rank", until="0.4")
@problems.in_float64
def random_rank_risk(
    *,
    n: ArrayLike,
    d: ArrayLike,
    distance: ArrayLike,
    sigma: ArrayLike,
    rank: ArrayLike,
    allow_infinite: bool = False,
) -> Array:
    """Computes the risk of fine-tuning in a random subspace, exactly, for isotropic inputs.

    It is the mean over subspaces of `subspace.linear_transfer_risk` for the offset.

    Args:
      n: Number of samples, >= 0.
      d: Dimension, >= 1.
      distance: |beta_t - b_0|, >= 0.
      sigma: Standard deviation of the label noise, >= 0.
      rank: Number of directions k, from 0 to d.
      allow_infinite: Whether to return inf where the mean is infinite.

    Returns:
      The expected risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or the mean is infinite (rank within 1 of n) and
        `allow_infinite` is False.

    References:
      Belkin, Hsu and Xu, Two models of double descent for weak features, 2020 (arXiv 1903.07571),
      has this from scratch, where the offset is the target.

    >>> rank = jnp.array([0, 25, 75, 100])
    >>> risks = random_rank_risk(n=50, d=100, distance=1.0, sigma=0.5, rank=rank)
    >>> [round(float(risk), 3) for risk in risks]
    [1.0, 1.792, 1.542, 0.755]
    """
    problems.check("n", n, lambda n: (n >= 0) & (n < np.inf), "a finite number of samples >= 0")
    problems.check("d", d, lambda d: (d >= 1) & (d < np.inf), "a finite dimension >= 1")
    problems.check("distance", distance, lambda v: (v >= 0) & (v < np.inf), "finite and >= 0")
    problems.check_sigma(sigma)
    known = concrete(d)
    most = np.inf if known is None else known
    problems.check("rank", rank, lambda k: (k >= 0) & (k <= most), "a number of directions 0 to d")
    n, d, distance, sigma, k = (jnp.asarray(v, float) for v in (n, d, distance, sigma, rank))
    # In this form, rank d misses exactly nothing.
    of = subspace.Overlap(k / d * distance**2, (d - k) / d * distance**2, jnp.maximum(k, 1.0), 1)
    moved = subspace.linear_transfer_risk(
        n=jnp.where(k > 0, n, 4.0), of=of, sigma=sigma, allow_infinite=allow_infinite
    )
    return jnp.where(k > 0, moved, distance**2)


@renamed("n", "d", "distance", "sigma", until="0.4")
@problems.in_float64
def best_random_rank(*, n: ArrayLike, d: ArrayLike, distance: ArrayLike, sigma: ArrayLike) -> Rank:
    """Finds the rank with the smallest risk in a random subspace, for isotropic inputs: d or 0.

    All directions are better than none where

        sigma^2 < distance^2 (d - n - 1) / d  for n <= d - 2,
        sigma^2 < distance^2 (n - d - 1) / d  for n >= d + 2.

    Args:
      n: Number of samples, >= 0.
      d: Dimension, >= 1.
      distance: |beta_t - b_0|, >= 0.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The rank and its risk, with the broadcast shape of the arguments. The rank is 0 if both are
      equally good.

    Raises:
      ValueError: If an argument is out of range.
    """
    full = random_rank_risk(n=n, d=d, distance=distance, sigma=sigma, rank=d, allow_infinite=True)
    still = jnp.asarray(distance, dtype=float) ** 2
    moves = full < still
    return Rank(jnp.where(moves, jnp.asarray(d, dtype=float), 0.0), jnp.where(moves, full, still))


@renamed("missed", "n", "sigma", "rank", until="0.4")
@problems.defined
def rank_threshold(*, missed: ArrayLike, n: ArrayLike, sigma: ArrayLike, rank: ArrayLike) -> Array:
    """Computes the square that the next direction must have to lower the risk.

        (missed + sigma^2) / (n - rank - 1)

    It is exact for Gaussian inputs with eigenvectors of their covariance as directions.

    Args:
      missed: The mean square that the directions so far miss, >= 0. It is s_i (beta_t - b_0)_i^2,
        summed over the others.
      n: Number of samples, > rank + 2.
      sigma: Standard deviation of the label noise, >= 0.
      rank: Number of directions so far, >= 0.

    Returns:
      The threshold of s_i (beta_t - b_0)_i^2, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      The risk behind it is in Breiman and Freedman, How many variables should be entered in a
      regression equation?, 1983.

    >>> float(rank_threshold(missed=0.75, n=18, sigma=0.5, rank=1))
    0.0625
    """
    problems.check("missed", missed, lambda m: (m >= 0) & (m < np.inf), "finite and >= 0")
    problems.check_sigma(sigma)
    problems.check("rank", rank, lambda k: (k >= 0) & (k < np.inf), "a number of directions >= 0")
    known = concrete(rank)
    least = 2 if known is None else known + 2
    problems.check("n", n, lambda n: (n > least) & (n < np.inf), "a number of samples > rank + 2")
    missed, n, sigma, rank = (jnp.asarray(v, dtype=float) for v in (missed, n, sigma, rank))
    return (missed + sigma**2) / (n - rank - 1)


@renamed("n", "sigma", until="0.4")
@problems.in_float64
def rank_risks(
    eigenvalues: Spectrum, offset: Spectrum, *, n: ArrayLike, sigma: ArrayLike
) -> Float[Array, " rank"]:
    """Computes the risk of fine-tuning in the first k directions of the inputs, for every k.

    With m_k the sum of s_i offset_i^2 over i > k, it is m_k plus the risk of regression in k
    dimensions with the noise sigma^2 + m_k. For k <= n - 2 that is exactly

        m_k + (m_k + sigma^2) k / (n - k - 1);

    for k >= n + 2 it is `covariance.scratch_risk`, in the limit of large n and k.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0, in the order in which directions
        are added.
      offset: beta_t - b_0 in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.

    Returns:
      The risks of k = 0, ..., d; inf if k is within 1 of n and there is noise.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    s = covariance.check_spectrum(eigenvalues)
    covariance.check_vectors(s, offset=offset)
    problems.check_sigma(sigma)
    problems.check("n", n, lambda n: (n > 0) & (n < np.inf), "a finite number of samples > 0")
    offset2 = jnp.asarray(offset, dtype=float) ** 2
    return _rank_risks(s, offset2, jnp.asarray(n, dtype=float), jnp.asarray(sigma, dtype=float))


@jax.jit  # operation by operation it compiles for two seconds
def _rank_risks(s: Array, offset2: Array, n: Array, sigma: Array) -> Array:
    d = s.size
    k = jnp.arange(d + 1)
    missed = jnp.append(jnp.cumsum((s * offset2)[::-1])[::-1], 0.0)
    noise2 = missed + sigma**2
    gap = jnp.where(jnp.abs(n - k) > 1, n - k - 1, 1.0)

    @jax.vmap
    def beyond(k: Array, noise2: Array) -> Array:
        used = jnp.arange(d) < k
        found = covariance.equivalent(jnp.where(used, s, 0.0), n)
        return found.risk(jnp.where(used, offset2, 0.0), jnp.sqrt(noise2))

    # Rank 0 would have an empty spectrum.
    over = jnp.append(0.0, beyond(k[1:], noise2[1:]))
    learned = jnp.where(k > n, over, noise2 * k / gap)
    peak = (jnp.abs(n - k) <= 1) & (k > 0) & (noise2 > 0)
    return missed + jnp.where(peak, jnp.inf, learned)


@renamed("n", "sigma", until="0.4")
@problems.in_float64
def best_rank(eigenvalues: Spectrum, offset: Spectrum, *, n: ArrayLike, sigma: ArrayLike) -> Rank:
    """Finds the number of leading directions with the smallest risk, by `rank_risks`.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, as for `rank_risks`.
      offset: beta_t - b_0 in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.

    Returns:
      The rank and its risk. The smallest of several equally good ranks is returned.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    values = rank_risks(eigenvalues, offset, n=n, sigma=sigma)
    rank = jnp.argmin(values)
    return Rank(rank.astype(float), values[rank])


@problems.in_float64
def recovered_share(strength: ArrayLike, d_over_m: ArrayLike) -> Array:
    """Computes how well a leading singular vector of noisy sources recovers the true one.

    The sources are the columns of a `(d, m)` matrix of finite rank, plus errors of variance v. With
    x = (singular value)^2 / (m v) and c = d / m the squared cosine tends to

        (1 - c / x^2) / (1 + c / x) where x > sqrt(c), else to 0.

    Args:
      strength: x, >= 0.
      d_over_m: c, dimensions per source, > 0.

    Returns:
      The limit of the squared cosine for d, m -> inf, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Benaych-Georges and Nadakuditi, The singular values and vectors of low rank perturbations of
      large rectangular random matrices, 2012 (arXiv 1103.2221).

    >>> [round(float(share), 3) for share in recovered_share(jnp.array([1.0, 2.0, 6.0]), 4.0)]
    [0.0, 0.0, 0.533]
    """
    problems.check("strength", strength, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    problems.check("d_over_m", d_over_m, lambda c: (c > 0) & (c < np.inf), "finite and > 0")
    x, c = jnp.asarray(strength, dtype=float), jnp.asarray(d_over_m, dtype=float)
    some = x > jnp.sqrt(c)
    ratio = c / jnp.where(some, x, 1.0)
    return jnp.where(some, (1 - ratio / jnp.where(some, x, 1.0)) / (1 + ratio), 0.0)


@renamed("d_over_m", "n", "sigma", until="0.4")
@problems.in_float64
def source_rank_risks(
    parts: Float[Array, " r"],
    outside: ArrayLike,
    strengths: Float[Array, " r"],
    *,
    d_over_m: ArrayLike,
    n: ArrayLike,
    sigma: ArrayLike,
) -> Float[Array, " rank"]:
    """Computes the risk of fine-tuning in the leading k singular vectors of noisy sources.

    It is m_k + (m_k + sigma^2) k / (n - k - 1), where m_k is the part of the offset that the k
    vectors miss.

    Args:
      parts: The offset's components along the r true singular vectors, strongest first, `(r,)`.
      outside: The norm of the offset outside their span, >= 0.
      strengths: As for `recovered_share`, one for each of the vectors, descending, `(r,)`.
      d_over_m: Dimensions per source, > 0.
      n: Number of target samples, > r + 1.
      sigma: Standard deviation of the label noise of the target, >= 0.

    Returns:
      The limits of the risk for k = 0, ..., r as d, m -> inf at constant n.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    parts, strengths = jnp.asarray(parts, dtype=float), jnp.asarray(strengths, dtype=float)
    if parts.ndim != 1 or parts.shape != strengths.shape:
        raise ValueError(
            f"parts and strengths must be vectors of one length; got {parts.shape} and "
            f"{strengths.shape}"
        )
    problems.check_squares("parts", parts)
    problems.check("outside", outside, lambda v: (v >= 0) & (v < np.inf), "finite and >= 0")
    problems.check_sigma(sigma)
    least = parts.size + 1
    problems.check("n", n, lambda n: (n > least) & (n < np.inf), "a number of samples > r + 1")
    n, sigma, outside = (jnp.asarray(v, dtype=float) for v in (n, sigma, outside))
    # Each vector takes its share from the remainder of the others, so nothing cancels.
    left = parts**2 * (1 - recovered_share(strengths, d_over_m))
    k = jnp.arange(parts.size + 1)
    taken = jnp.arange(parts.size) < k[:, None]
    missed = jnp.where(taken, left, parts**2).sum(-1) + outside**2
    return missed + (missed + sigma**2) * k / (n - k - 1)
