"""Least squares with the best penalty on the distance from a starting point.

The objective is

    |y - X b|^2 / (2n) + penalty |b - start|^2 / 2.

With start = 0 it is ridge regression from scratch. With start = beta_s it is L2-SP, and the penalty
pulls towards the source. Both are the same problem, because b - start is ridge regression of the
offset beta_t - start. The best penalty has the smallest expected risk. Like `risks.optimal_ridge`,
it depends on the noise and on the length of the offset.

For isotropic inputs the best penalty is exact at any n and d. The risks are deterministic
equivalents, that is, limits of large n and d. At finite n and d the mean is larger, by at most
|offset|^2 / (4d) to first order (`best_risk`). `wishart` computes it exactly. The equivalents are
in `covariance`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear import covariance

Spectrum = Float[Array, " d"]

POINTS = 256  # penalties that are tried at once
ROUNDS = 4  # each narrows the interval around the best of them by POINTS / 2


@renamed("n", "d", "distance", "sigma", until="0.4")
@problems.in_float64
def best_penalty(*, n: ArrayLike, d: ArrayLike, distance: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the penalty with the smallest expected risk for isotropic inputs, exactly.

        sigma^2 d / (n distance^2)

    By rotation invariance, the risk equals its mean over offsets of this length in all directions.
    The mean depends only on the offsets' second moment, and a Gaussian prior has the same second
    moment. The posterior mean under this prior has the penalty above.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      distance: |beta_t - start|, >= 0.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The penalty, with the broadcast shape of the arguments. It is inf if start equals the target,
      and 0 without noise.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Dobriban and Wager, High-dimensional asymptotics of prediction, 2018 (arXiv 1507.03003),
      Thm 2.1. That limit is the best also at finite n and d, by the argument above.

    >>> round(float(best_penalty(n=98, d=100, distance=1.0, sigma=0.2)), 4)
    0.0408
    """
    n, d, distance, sigma = _checked(n, d, distance, sigma)
    still = distance == 0
    penalty = sigma**2 * d / (n * jnp.where(still, 1.0, distance) ** 2)
    return jnp.where(sigma == 0, 0.0, jnp.where(still, jnp.inf, penalty))


@renamed("n", "d", "distance", "sigma", until="0.4")
@problems.in_float64
def best_risk(*, n: ArrayLike, d: ArrayLike, distance: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the risk at `best_penalty`, for isotropic inputs, in the limit of large n and d.

    It is the root R >= 0 of

        R^2 - b R - distance^2 sigma^2 = 0,  b = distance^2 (1 - n/d) - sigma^2,

    which is the deterministic equivalent `covariance.scratch_risk` at this penalty. The peak at n =
    d disappears. With a distance of 1 and little noise the risk is about sigma there.

    At finite n and d the mean is larger. To first order in 1/d the difference is

        sigma^2 / 4 (1 / sqrt(A + c) - 1 / sqrt(B + c))^2 <= distance^2 / (4d)

    with A, B = (sqrt(n) -+ sqrt(d))^2 and c = d sigma^2 / distance^2, by the central limit theorem
    for linear statistics of Wishart matrices. It matters where sigma < 1/d and n is close to d.
    `wishart.ridge_risk` at this penalty is exact.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      distance: |beta_t - start|, >= 0: 1 from scratch, where the target has norm 1.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Dobriban and Wager, High-dimensional asymptotics of prediction, 2018 (arXiv 1507.03003),
      Thm 2.1. Li et al., Explicit inductive bias for transfer learning, 2018 (arXiv 1802.01483),
      has L2-SP. Bai and Silverstein, CLT for linear spectral statistics of large-dimensional sample
      covariance matrices, 2004, Thm 1.1, has the first order of the difference.

    >>> float(best_risk(n=98, d=100, distance=1.0, sigma=0.2))
    0.1902...
    """
    n, d, distance, sigma = _checked(n, d, distance, sigma)
    # In this form, sigma = 0 gives exactly distance^2 (1 - n/d), as for scratch training.
    b = distance**2 * ((d - n) / d) - sigma**2
    root = jnp.hypot(b, 2 * distance * sigma)
    falls = b < 0
    # For b < 0 the other root does not cancel. The product of both is distance^2 sigma^2.
    other = jnp.where(falls, root - b, 1.0)
    return jnp.where(falls, 2 * (distance * sigma) ** 2 / other, (b + root) / 2)


@renamed("n", "d", "risk", "sigma", until="0.4")
@problems.in_float64
def distance2_of(*, n: ArrayLike, d: ArrayLike, risk: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the square of the distance at which `best_risk` is a given risk.

        R (R + sigma^2) / (R (1 - n/d) + sigma^2)

    With this, every comparison with a regularised learner gives a boundary in closed form.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      risk: The risk R, >= 0.
      sigma: Standard deviation of the label noise, > 0.

    Returns:
      The square of the distance, with the broadcast shape of the arguments; inf where the risk is
      lower at any distance.

    Raises:
      ValueError: If an argument is out of range.

    >>> risk = best_risk(n=98, d=100, distance=0.7, sigma=0.2)
    >>> round(float(distance2_of(n=98, d=100, risk=risk, sigma=0.2)), 4)
    0.49
    """
    problems.check("risk", risk, lambda r: (r >= 0) & (r < np.inf), "finite and >= 0")
    problems.check("sigma", sigma, lambda s: s > 0, "positive")
    n, d, risk, sigma = _checked(n, d, risk, sigma)
    left = risk * ((d - n) / d) + sigma**2
    # With n > d the risk stays below sigma^2 / (n/d - 1).
    found = left > 0
    return jnp.where(found, risk * (risk + sigma**2) / jnp.where(found, left, 1.0), jnp.inf)


@renamed("n", "sigma", until="0.4")
@problems.in_float64
def best_risk_of(
    eigenvalues: Spectrum, offset: Spectrum, *, n: ArrayLike, sigma: ArrayLike
) -> tuple[Array, Array]:
    """Finds the best penalty >= 0 and its risk, for inputs of any covariance.

    The risk is the deterministic equivalent from `covariance`, in the norm of Sigma. The search
    runs over kappa on a grid that is refined, and also tries penalties 0 and inf.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      offset: beta_t - start in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.

    Returns:
      The penalty and the limiting risk. The penalty is inf if it is best not to learn.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.

    References:
      Hastie et al., Surprises in high-dimensional ridgeless least squares interpolation, 2022
      (arXiv 1903.08560), has the risk at a given penalty.

    >>> penalty, risk = best_risk_of(jnp.ones(100), jnp.eye(100)[0], n=98, sigma=0.2)
    >>> round(float(penalty), 4), round(float(risk), 4)
    (0.0408, 0.1902)
    """
    covariance.check_vectors(eigenvalues, offset=offset)
    offset2 = jnp.asarray(offset, dtype=float) ** 2
    still = jnp.sum(jnp.asarray(eigenvalues, dtype=float) * offset2)
    return _search(eigenvalues, n, sigma, Partial(_risk, offset2), still)


@problems.in_float64
def best_scaled_risk_of(
    eigenvalues: Spectrum,
    beta_s: Spectrum,
    beta_t: Spectrum,
    *,
    n: ArrayLike,
    sigma: ArrayLike,
) -> tuple[Array, Array, Array]:
    """Finds the best penalty and the best multiple of the source for L2-SP, together.

    At a given penalty the risk is a parabola in the multiple, so only the penalty is searched.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      beta_s: Source in the eigenbasis of Sigma, `(d,)`.
      beta_t: Target in the same basis, `(d,)`.
      n: Number of samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.

    Returns:
      The penalty, the multiple, and the limiting risk. It is at most `best_risk_of` at the offsets
      beta_t and beta_t - beta_s.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.

    >>> source, target = jnp.eye(9)[0], 3 * jnp.eye(9)[0]
    >>> found = best_scaled_risk_of(jnp.ones(9), source, target, n=4, sigma=0.2)
    >>> [round(float(v), 4) for v in found[1:]]
    [3.0, 0.0]
    """
    covariance.check_vectors(eigenvalues, beta_s=beta_s, beta_t=beta_t)
    source, target = (jnp.asarray(v, dtype=float) for v in (beta_s, beta_t))
    s = jnp.asarray(eigenvalues, dtype=float)
    unlearned = _ratio(s @ (source * target), s @ source**2)
    still = s @ (target - unlearned * source) ** 2
    penalty, found = _search(eigenvalues, n, sigma, Partial(_scaled_risk, source, target), still)
    finite = jnp.isfinite(penalty)
    at = covariance.equivalent(eigenvalues, n, jnp.where(finite, penalty, 0.0))
    return penalty, jnp.where(finite, _best_scale(source, target, at), unlearned), found


def _ratio(products: Array, squares: Array) -> Array:
    """Divides, and returns 0 where the divisor is not positive."""
    return jnp.where(squares > 0, products / jnp.where(squares > 0, squares, 1.0), 0.0)


def _best_scale(source: Array, target: Array, at: covariance.Equivalent) -> Array:
    """Computes the best multiple of the source at given penalties."""
    # Without noise, the risk is linear in the squares of the offset.
    return _ratio(at.risk(source * target, 0.0), at.risk(source**2, 0.0))


def _scaled_risk(source: Array, target: Array, at: covariance.Equivalent, sigma: Array) -> Array:
    """Computes the risk at the best multiple of the source."""
    scale = _best_scale(source, target, at)
    return at.risk((target - scale[..., None] * source) ** 2, sigma)


@problems.in_float64
def best_fixed_risk_of(
    eigenvalues: Spectrum,
    beta_s: Spectrum,
    beta_t: Spectrum,
    *,
    n: ArrayLike,
    sigma: ArrayLike,
) -> tuple[Array, Array, Array]:
    """Finds the best penalty and multiple for ridge regression across the source.

    The component along the source is fixed at the multiple, and its penalty is infinite. Let e be
    the distance to the target along the source. The inputs across it predict a part of the inputs
    along it. The rest, of variance v, acts as noise of variance v e^2. As for
    `best_scaled_risk_of`, the risk at a given penalty is a parabola in the multiple.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      beta_s: Source in the eigenbasis of Sigma, `(d,)`, nonzero.
      beta_t: Target in the same basis, `(d,)`.
      n: Number of samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.

    Returns:
      The penalty, the multiple, and the limiting risk.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.

    >>> source, target = jnp.eye(100)[0], 3 * jnp.eye(100)[0] + jnp.eye(100)[1]
    >>> found = best_fixed_risk_of(jnp.ones(100), source, target, n=98, sigma=0.2)
    >>> [round(float(v), 4) for v in found]
    [0.0404, 3.0, 0.1856]
    """
    covariance.check_vectors(eigenvalues, beta_s=beta_s, beta_t=beta_t)
    source, target = (jnp.asarray(v, dtype=float) for v in (beta_s, beta_t))
    s, size = jnp.asarray(eigenvalues, dtype=float), jnp.linalg.norm(source)
    problems.check("|beta_s|", size, lambda v: v > 0, "positive")
    if s.size == 1:
        return jnp.asarray(jnp.inf), target[0] / source[0], jnp.zeros(())
    basis = linalg.qr(source[:, None], mode="complete")[0][:, 1:]
    # The eigenvalues across the source cannot be negative in this form.
    left, roots, rows = linalg.svd(jnp.sqrt(s)[:, None] * basis, full_matrices=False)
    along = left.T @ (jnp.sqrt(s) * source / size)
    seen = roots > 1e-12 * roots[0]
    slope = jnp.where(seen, along / jnp.where(seen, roots, 1.0), 0.0)
    variance = jnp.maximum(
        s @ (source / size) ** 2 - jnp.sum(jnp.where(seen, along, 0.0) ** 2), 0.0
    )
    across = rows @ (basis.T @ target)

    unlearned = s @ (source * target) / (s @ source**2)
    still = s @ (target - unlearned * source) ** 2
    split = slope, variance, across
    penalty, found = _search(roots**2, n, sigma, Partial(_risk_across, split), still)
    finite = jnp.isfinite(penalty)
    at = covariance.equivalent(roots**2, n, jnp.where(finite, penalty, 0.0))
    scale = (source @ target / size - _left_along(split, at)) / size
    return penalty, jnp.where(finite, scale, unlearned), found


Split = tuple[Array, Array, Array]
"""The slopes of the inputs along the source on those across it, the variance of the rest, and the
target across the source."""


def _left_along(split: Split, at: covariance.Equivalent) -> Array:
    """Computes the best distance to the target along the source at given penalties."""
    slope, variance, across = split
    square = at.risk(slope**2, 0.0) + variance * (1 + at.risk(0 * slope, 1.0))
    some = jnp.isfinite(square) & (square > 0)
    return jnp.where(some, -at.risk(across * slope, 0.0) / jnp.where(some, square, 1.0), 0.0)


def _risk_across(split: Split, at: covariance.Equivalent, sigma: Array) -> Array:
    """Computes the risk at the best distance to the target along the source."""
    slope, variance, across = split
    e = _left_along(split, at)
    noise2 = variance * e**2
    return at.risk((across + slope * e[..., None]) ** 2, jnp.sqrt(sigma**2 + noise2)) + noise2


def _risk(offset2: Array, at: covariance.Equivalent, sigma: Array) -> Array:
    """Computes the risk at given penalties."""
    return at.risk(offset2, sigma)


def _search(
    eigenvalues: Spectrum, n: ArrayLike, sigma: ArrayLike, risk: Partial, still: Array
) -> tuple[Array, Array]:
    """Finds the penalty with the smallest risk, and this risk, on a grid that is refined.

    `risk` is a function of the equivalents and of sigma, and `still` the risk at an infinite
    penalty.
    """
    problems.check_sigma(sigma)
    free = covariance.equivalent(eigenvalues, n)  # no penalty
    return _refined(free, jnp.asarray(sigma, dtype=float), risk, still)


@jax.jit
def _refined(
    free: covariance.Equivalent, sigma: Array, risk: Partial, still: Array
) -> tuple[Array, Array]:
    """Searches, beginning at the equivalents without a penalty."""
    s, n = free.eigenvalues, free.n
    least = jnp.min(jnp.where(s > 0, s, jnp.inf))
    # Below the first end the risk equals the risk without a penalty to 1e-8, and above the second
    # end the risk with an infinite one.
    ends = jnp.where(free.kappa > 0, free.kappa, 1e-8 * least), 1e8 * s.max()

    def at(kappa: Array) -> covariance.Equivalent:
        share = s / (s + kappa[:, None])
        ridge = jnp.maximum(kappa * (1 - share.sum(-1) / n), 0.0)
        return covariance.Equivalent(s, n, kappa, ridge)

    def narrower(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        kappa = jnp.geomspace(*ends, POINTS)
        i = jnp.argmin(risk(at(kappa), sigma))
        return kappa[jnp.maximum(i - 1, 0)], kappa[jnp.minimum(i + 1, POINTS - 1)]

    ends = jax.lax.fori_loop(0, ROUNDS, narrower, ends)
    found = at(jnp.sqrt(ends[0] * ends[1])[None])
    penalties = jnp.stack([jnp.zeros(()), jnp.asarray(jnp.inf), found.ridge[0]])
    values = jnp.stack([risk(free, sigma), still, risk(found, sigma)[0]])
    i = jnp.argmin(values)
    return penalties[i], values[i]


def _checked(
    n: ArrayLike, d: ArrayLike, distance: ArrayLike, sigma: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    """Checks the arguments of the isotropic forms, and returns them as arrays."""
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), "a finite number of samples >= 1")
    problems.check("d", d, lambda d: (d >= 1) & (d < np.inf), "a finite dimension >= 1")
    problems.check("distance", distance, lambda v: (v >= 0) & (v < np.inf), "finite and >= 0")
    problems.check_sigma(sigma)
    n, d, distance, sigma = (jnp.asarray(v, dtype=float) for v in (n, d, distance, sigma))
    return n, d, distance, sigma
