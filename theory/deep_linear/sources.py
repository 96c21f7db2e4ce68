"""Computes the best weights of several sources, and the risk of fine-tuning from their sum.

Source s is a fit b_s to n_s samples of its own. Its inputs are N(0, Sigma_s), and its labels are
x.beta_s + sigma_s noise. Task and covariance may differ from the target's. Training on the target
starts at

    b_0 = sum_s a_s b_s,

and ends at the fit to n target samples closest to b_0 (one layer, gradient flow).

Because of three facts, everything is quadratic in the weights a.

1. A fit enters only through its mean m_s and its covariance C_s (`Fit`), because sources are
   independent of one another. The error beta_t - b_0 of the start has the second moments

       D(a) = (beta_t - sum_s a_s m_s)(...)^T + sum_s a_s^2 C_s.

2. Any risk that is a mean of (beta_t - b_0)^T Q (beta_t - b_0) is tr(Q D(a)). The best weights
   solve G a = g with G_st = m_s.Q m_t + [s = t] tr(Q C_s) and g_s = m_s.Q beta_t (`best_weights`).
3. The risk after fine-tuning is such a mean plus a noise term that does not depend on the weights.
   Before fine-tuning Q is Sigma. After it, Q is kappa^2 Sigma (Sigma + kappa)^-2 / (1 - df2 / n) by
   `covariance` (`tuned_metric`). Directions that the target's samples determine have less weight.
   For isotropic inputs both are multiples of the identity, and the best weights are the same.

With weights of sum 1 the same minimum is SAIL's eq. (12) at expected squared distances
(`expected_distances`). If all sources overlap equally with the target, g_s = c, then the best
weights are SAIL's times one number. For unbiased sources of the target's own task they are
proportional to 1 / tr(Q C_s), the inverse of the squared distance from the target.

An example in numbers: d = 20, Sigma = 1, |beta_t| = 1, sigma = 0.5, and two sources of the target's
task, fitted to 30 and to 60 samples. tr C_s = 20 * 0.25 / (n_s - 21) is 0.556 and 0.128. SAIL's
weights are 0.188 and 0.812, with the risk 0.104. The best weights are 0.170 and 0.736, with the
risk 0.094.

`wishart_fit` computes the exact moments of least squares. `ridge_fit` computes the moments of ridge
regression for any covariance, for large n_s and d.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear import covariance

Vector = Float[Array, " d"]
Matrix = Float[Array, "d d"]


class Fit(NamedTuple):
    """The first two moments of a fit over its random data.

    Attributes:
      mean: E b `(d,)`.
      covariance: E b b^T - E b E b^T `(d, d)`.
    """

    mean: Vector
    covariance: Matrix


class Mixture(NamedTuple):
    """Weights of several sources.

    Attributes:
      weights: One per source, `(source,)`.
      risk: The mean of (beta_t - b_0)^T Q (beta_t - b_0) at these weights.
    """

    weights: Float[Array, " source"]
    risk: Array


@renamed("n", "sigma", "inputs", until="0.4")
@problems.in_float64
def wishart_fit(beta_s: Vector, *, n: int, sigma: ArrayLike, inputs: Matrix | None = None) -> Fit:
    """Computes the moments of least squares of minimum norm, exactly at any n and d.

    For n >= d + 2 the mean is beta_s and the covariance sigma^2 Sigma^-1 / (n - d - 1). For n <= d
    - 2 inputs must be isotropic, and the row space is uniform. With u = n (d - n) / (d (d + 2) (d -
    1)) the moments are

        E b = (n / d) beta_s
        E b b^T = (n / d - u d) beta_s beta_s^T + [u |beta_s|^2 + sigma^2 n / (d (d - n - 1))] I.

    Args:
      beta_s: The source's task `(d,)`.
      n: Number of source samples, >= 1.
      sigma: Standard deviation of the label noise, >= 0; one number.
      inputs: Covariance of the inputs `(d, d)`, positive definite; None for the identity.

    Returns:
      The moments.

    Raises:
      ValueError: If an argument is out of range, the mean is infinite (n within 1 of d with noise),
        or n < d with a covariance of the inputs.

    >>> found = wishart_fit(jnp.eye(20)[0], n=30, sigma=0.5)
    >>> float(found.mean[0]), round(float(jnp.trace(found.covariance)), 4)
    (1.0, 0.5556)
    """
    beta_s, sigma = jnp.asarray(beta_s, dtype=float), jnp.asarray(sigma, dtype=float)
    _check_vector("beta_s", beta_s)
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), "a finite number of samples >= 1")
    problems.check_sigma(sigma)
    d, noisy = beta_s.size, bool(np.any(concrete(sigma) != 0))
    if noisy and abs(n - d) <= 1:
        raise ValueError(
            f"n must be at most d-2 or at least d+2 where sigma > 0 (the mean is infinite); got "
            f"n={n}, d={d}"
        )
    identity = jnp.eye(d)
    if n >= d:
        inverse = identity if inputs is None else linalg.inv(_covariance(inputs, beta_s))
        return Fit(beta_s, (sigma**2 / (n - d - 1) if noisy else 0.0) * inverse)
    if inputs is not None:
        raise ValueError(
            f"n must be at least d+2 where inputs is given (`ridge_fit` has the limit below); got "
            f"n={n}, d={d}"
        )
    share, outer = n / d, jnp.outer(beta_s, beta_s)
    even = share * (d - n) / ((d + 2) * (d - 1))
    noise = sigma**2 * share / (d - n - 1) if noisy else 0.0
    spread = (share * (1 - share) - even * d) * outer
    return Fit(share * beta_s, spread + (even * (beta_s @ beta_s) + noise) * identity)


@renamed("n", "sigma", "ridge", until="0.4")
@problems.in_float64
def ridge_fit(
    inputs: Matrix, beta_s: Vector, *, n: ArrayLike, sigma: ArrayLike, ridge: ArrayLike = 0.0
) -> Fit:
    """Computes the moments of ridge regression for any covariance, in the limit of large n and d.

    They equal `covariance.Equivalent.moments`, in the given basis.

    Args:
      inputs: Covariance of the source's inputs `(d, d)`, positive semidefinite.
      beta_s: The source's task `(d,)`.
      n: Number of source samples, > 0; one number.
      sigma: Standard deviation of the label noise, >= 0; one number.
      ridge: Ridge penalty, >= 0; one number. 0 is the fit of minimum norm.

    Returns:
      The moments.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    beta_s = jnp.asarray(beta_s, dtype=float)
    problems.check_sigma(sigma)
    eigenvalues, basis = covariance.eigenbasis(_covariance(inputs, beta_s))
    at = covariance.equivalent(eigenvalues, n, ridge)
    mean, variance = at.moments(basis.T @ beta_s, sigma)
    return Fit(basis @ mean, (basis * variance) @ basis.T)


@problems.in_float64
def best_weights(fits: Sequence[Fit], beta_t: Vector, metric: Matrix | None = None) -> Mixture:
    """Finds the weights a that minimise the mean of (beta_t - b_0)^T Q (beta_t - b_0).

    They solve G a = g with G_st = m_s.Q m_t + [s = t] tr(Q C_s) and g_s = m_s.Q beta_t.

    Args:
      fits: The moments of each source, independent of one another.
      beta_t: The target's task `(d,)`.
      metric: Q `(d, d)`; None for the identity. The covariance of the target's inputs gives the
        start with the smallest risk, and `tuned_metric` the start from which fine-tuning reaches
        the smallest risk.

    Returns:
      The weights, and the mean at them.

    Raises:
      ValueError: If shapes do not conform, or the weights are not unique. This happens if two
        sources without noise have the same mean, or the metric is 0 because the target's samples
        determine everything.

    >>> fits = [wishart_fit(jnp.eye(20)[0], n=n, sigma=0.5) for n in (30, 60)]
    >>> found = best_weights(fits, jnp.eye(20)[0])
    >>> [round(float(a), 3) for a in found.weights], round(float(found.risk), 3)
    ([0.17, 0.736], 0.094)
    """
    found, values = _best(_stacked(fits, beta_t, metric))
    spread, slack = concrete(values), 10 * len(fits) * jnp.finfo(values.dtype).eps
    if spread is not None and not spread[0] > slack * spread[-1]:
        raise ValueError(
            "fits must have weights that are unique; the eigenvalues of their mean products are "
            f"{spread[0]:.3g} to {spread[-1]:.3g}"
        )
    return found


@problems.in_float64
def expected_distances(
    fits: Sequence[Fit], beta_t: Vector, metric: Matrix | None = None
) -> tuple[Float[Array, " source"], Float[Array, "source source"]]:
    """Computes mean squared distances: of sources from the target, and between sources.

    `sail_jax.proximal.gram_from_distances` with `squared=True` makes SAIL's H from them. Its
    `affine_weights` have the smallest mean among weights of sum 1.

    Args:
      fits: The moments of each source, independent of one another.
      beta_t: The target's task `(d,)`.
      metric: Q `(d, d)` of the distances; None for the identity.

    Returns:
      E|b_s - beta_t|^2 and E|b_s - b_t|^2, with a diagonal of 0.

    Raises:
      ValueError: If shapes do not conform.
    """
    return _distances(_stacked(fits, beta_t, metric))


@problems.in_float64
def start_moments(
    fits: Sequence[Fit], weights: Float[ArrayLike, " source"], beta_t: Vector
) -> Matrix:
    """Computes D = E (beta_t - b_0)(beta_t - b_0)^T of the start b_0 = sum_s a_s b_s.

    Args:
      fits: The moments of each source, independent of one another.
      weights: a, one per source.
      beta_t: The target's task `(d,)`.

    Returns:
      D `(d, d)`.

    Raises:
      ValueError: If shapes do not conform.
    """
    a, given = jnp.asarray(weights, dtype=float), _stacked(fits, beta_t)
    if a.shape != (len(fits),):
        raise ValueError(f"weights must be one per source, ({len(fits)},); got {a.shape}")
    return _start_moments(given, a)


@problems.in_float64
def tuned_metric(inputs: Matrix, n: ArrayLike) -> Matrix:
    """Computes the Q for which tr(Q D) is the start's contribution to the risk after fine-tuning.

        kappa^2 Sigma (Sigma + kappa)^-2 / (1 - df2 / n),

    in the limit of large n and d.

    Args:
      inputs: Covariance of the target's inputs `(d, d)`, positive semidefinite.
      n: Number of target samples, > 0; one number.

    Returns:
      Q `(d, d)`; 0 if n is at least the rank of the covariance.

    Raises:
      ValueError: If an argument is out of range.
    """
    eigenvalues, basis = covariance.eigenbasis(jnp.asarray(inputs, dtype=float))
    seen = covariance.equivalent(eigenvalues, n).risk(jnp.eye(len(eigenvalues)), 0.0)
    return (basis * seen) @ basis.T


@renamed("n", "sigma", until="0.4")
@problems.in_float64
def tuned_risk(inputs: Matrix, moments: Matrix, *, n: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the risk of fine-tuning from a random start, in the limit of large n and d.

    It is `covariance.Equivalent.risk` with the mean squares of the start's error.

    Args:
      inputs: Covariance of the target's inputs `(d, d)`, positive semidefinite.
      moments: D of `start_moments`, `(d, d)`.
      n: Number of target samples, > 0.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The risk in the norm of the covariance, with the broadcast shape of n and sigma.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    inputs, moments = jnp.asarray(inputs, dtype=float), jnp.asarray(moments, dtype=float)
    problems.check_sigma(sigma)
    eigenvalues, basis = covariance.eigenbasis(inputs)
    if moments.shape != inputs.shape:
        raise ValueError(f"moments must have shape {inputs.shape}, as inputs; got {moments.shape}")
    missed2 = jnp.sum(basis * (moments @ basis), 0)
    return covariance.equivalent(eigenvalues, n).risk(missed2, sigma)


class _Sources(NamedTuple):
    """Moments of all sources, the target and the metric, as arrays."""

    means: Float[Array, "source d"]
    covariances: Float[Array, "source d d"]
    beta_t: Vector
    metric: Matrix


def _stacked(fits: Sequence[Fit], beta_t: ArrayLike, metric: Matrix | None = None) -> _Sources:
    """Raises an error with the argument's name unless moments, target and metric conform."""
    beta_t = jnp.asarray(beta_t, dtype=float)
    _check_vector("beta_t", beta_t)
    if not len(fits):
        raise ValueError("fits must have at least one source; got none")
    d = beta_t.size
    for i, fit in enumerate(fits):
        shapes = jnp.shape(fit.mean), jnp.shape(fit.covariance)
        if shapes != ((d,), (d, d)):
            raise ValueError(f"fits[{i}] must have shapes {(d,)} and {(d, d)}; got {shapes}")
    if metric is not None and jnp.shape(metric) != (d, d):
        raise ValueError(f"metric must have shape {(d, d)}; got {jnp.shape(metric)}")
    return _Sources(
        jnp.stack([jnp.asarray(fit.mean, dtype=float) for fit in fits]),
        jnp.stack([jnp.asarray(fit.covariance, dtype=float) for fit in fits]),
        beta_t,
        jnp.eye(d) if metric is None else jnp.asarray(metric, dtype=float),
    )


# Compiled as one program, because compilation operation by operation takes seconds.
@jax.jit
def _best(given: _Sources) -> tuple[Mixture, Array]:
    """Computes `best_weights` and the eigenvalues of G."""
    seen = given.means @ given.metric
    G = seen @ given.means.T + jnp.diag(_spread(given))
    weights = linalg.solve(G, seen @ given.beta_t)
    risk = jnp.sum(given.metric * _start_moments(given, weights))
    return Mixture(weights, risk), linalg.eigvalsh(G)


@jax.jit
def _distances(given: _Sources) -> tuple[Array, Array]:
    """Computes `expected_distances`."""
    # Differences are taken before squares, because sources are close to the target relative to its
    # norm.
    off, spread = given.means - given.beta_t, _spread(given)
    apart = off[:, None] - off
    to_target = jnp.sum(off * (off @ given.metric), -1) + spread
    between = jnp.sum(apart * (apart @ given.metric), -1) + spread[:, None] + spread
    return to_target, jnp.where(jnp.eye(len(off), dtype=bool), 0.0, between)


@jax.jit
def _start_moments(given: _Sources, weights: Array) -> Array:
    """Computes `start_moments`."""
    off = given.beta_t - weights @ given.means
    return jnp.outer(off, off) + jnp.tensordot(weights**2, given.covariances, 1)


def _spread(given: _Sources) -> Array:
    """Computes tr(Q C) of each source."""
    return jnp.sum(given.metric * given.covariances, (-2, -1))


def _covariance(inputs: ArrayLike, beta: Array) -> Array:
    inputs = jnp.asarray(inputs, dtype=float)
    if inputs.shape != (beta.size, beta.size):
        raise ValueError(
            f"inputs must have shape {(beta.size, beta.size)}, as beta_s; got {inputs.shape}"
        )
    return inputs


def _check_vector(name: str, vector: Array) -> None:
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"{name} must be a vector; got shape {vector.shape}")
    problems.check_squares(name, vector)
