"""Mean risks of ridge regression on isotropic inputs, exactly at any n and d.

The objective is |y - X b|^2 / (2n) + penalty |b|^2 / 2. With k = n penalty and W = X^T X, the mean
risk is a mean over the eigenvalues x of W:

    E R = distance^2 E tr[k^2 (W + k)^-2] / d + sigma^2 E tr[W (W + k)^-2].

It requires only the mean density of these eigenvalues, which `spectrum` computes. The limits of
large n and d are in `penalised` and `covariance`.

The density is found as follows. A Wishart matrix has eigenvalues x_1, ..., x_m with m = min(n, d).
Their joint density is prod_i w(x_i) prod_{i<j} |x_i - x_j| with w(x) = x^((|n - d| - 1)/2)
e^(-x/2). For functions phi_j = p_j w, j = 0, ..., m-1, with p_j a polynomial of degree j, let

    F_k(x) = int sign(y - x) phi_k(y) dy,   M_jk = int phi_j F_k.

For even m the integral of the density is proportional to the Pfaffian of M, by a formula of de
Bruijn (On some multiple integrals involving determinants, 1955). Replace w by w (1 + t f) and
differentiate the logarithm by t at 0. One side is E sum_i f(x_i), and the other is (1/2) tr(M^-1
dM/dt). The mean density is therefore

    rho(x) = sum_jk phi_j(x) (M^-1)_kj F_k(x).

For odd m the constant function is added to the F_k, and M has an additional row and column of the
int phi_j. Here p_j are Laguerre polynomials, orthonormal for the weight x^|n-d| e^(-x). M stays
well conditioned with them (about 4 m), and integrals are sums of Gauss-Legendre rules in the square
root of x.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array
from numpy.polynomial import legendre
from scipy.special import gammaln

from sail_jax.deprecated import renamed
from theory import problems

NODES = 16  # of each rule
LARGEST = 1000.0  # eigenvalue, about: e^(-x/2) must be far from the smallest float


class Learned(NamedTuple):
    """The mean overlap and size of a fit, in units of the norm of its task.

    Attributes:
      overlap: E w.beta for the fit w of a task beta.
      size2: E |w|^2.
    """

    overlap: Array
    size2: Array


@problems.in_float64
def spectrum(n: int, d: int) -> tuple[Array, Array]:
    """Computes the mean density of the nonzero eigenvalues of X^T X, as a quadrature rule.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.

    Returns:
      Points `(points,)`, and weights `(points,)` with the sum min(n, d). The sum of weights times f
      at the points is E sum_i f(x_i), for smooth functions f.

    Raises:
      ValueError: If n or d is out of range, or so large that densities leave the range of floats.

    >>> x, weights = spectrum(3, 5)
    >>> round(float((weights * x).sum()), 4)  # E tr X^T X = n d
    15.0
    """
    x, weights = _spectrum(*_checked(n, d))
    return jnp.asarray(x), jnp.asarray(weights)


@renamed("n", "d", "distance", "sigma", "penalty", until="0.4")
@problems.in_float64
def ridge_risk(
    *, n: int, d: int, distance: ArrayLike, sigma: ArrayLike, penalty: ArrayLike
) -> Array:
    """Computes the expected risk of ridge regression, or of L2-SP, exactly.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      distance: |beta_t - start|, >= 0. From scratch it is 1 for a target of norm 1. For a random
        start it is the root of the mean square.
      sigma: Standard deviation of the label noise, >= 0.
      penalty: The penalty, >= 0; inf leaves the start unchanged.

    Returns:
      The expected risk, with the broadcast shape of distance, sigma and penalty. It is inf without
      a penalty if n is within 1 of d and there is noise.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(ridge_risk(n=5, d=8, distance=1.0, sigma=0.5, penalty=0.4)), 4)
    0.5782
    """
    problems.check("distance", distance, lambda v: (v >= 0) & (v < np.inf), "finite and >= 0")
    means = _means(n, d, penalty)
    return jnp.asarray(np.asarray(distance, float) ** 2 * means.missed + _noise(means, sigma))


@renamed("n", "d", "sigma", "penalty", until="0.4")
@problems.in_float64
def learned(*, n: int, d: int, sigma: ArrayLike, penalty: ArrayLike = 0.0) -> Learned:
    """Computes the mean overlap and size of a ridge fit to a task of norm 1, exactly.

    At the penalty sigma^2 d / n, which minimises the risk, both numbers equal 1 minus the risk,
    because the fit is then a posterior mean.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      sigma: Standard deviation of the label noise, >= 0.
      penalty: The penalty, >= 0. 0 gives the fit of minimum norm, the limit of training from small
        weights.

    Returns:
      The overlap with the task, and the mean square of the norm; inf without a penalty if n is
      within 1 of d and there is noise.

    Raises:
      ValueError: If an argument is out of range.
    """
    means = _means(n, d, penalty)
    size2 = means.size2 + _noise(means, sigma)
    overlap = np.broadcast_to(means.overlap, size2.shape)
    return Learned(jnp.asarray(overlap), jnp.asarray(size2))


class _Means(NamedTuple):
    """Means over data sets at k = n penalty.

    Attributes:
      missed: E tr k^2 (W + k)^-2 / d.
      overlap: E tr W (W + k)^-1 / d.
      size2: E tr W^2 (W + k)^-2 / d.
      noise: E tr W (W + k)^-2.
    """

    missed: np.ndarray
    overlap: np.ndarray
    size2: np.ndarray
    noise: np.ndarray


def _means(n: int, d: int, penalty: ArrayLike) -> _Means:
    """Computes the four means at each penalty."""
    n, d = _checked(n, d)
    problems.check("penalty", penalty, lambda v: v >= 0, ">= 0")
    rank, gap = min(n, d), abs(n - d) - 1
    x, weights = _spectrum(n, d)
    k = n * np.asarray(penalty, float)[..., None]
    with np.errstate(divide="ignore", over="ignore"):
        rest, share = 1 / (1 + x / k), 1 / (1 + k / x)  # also at k = 0 and inf
    # Finite sums cannot show that the mean of 1/x is infinite.
    plain = rank / gap if gap > 0 else np.inf
    noise = np.where(k[..., 0] == 0, plain, (share**2 / x) @ weights)
    missed = ((rest**2) @ weights + d - rank) / d
    return _Means(missed, share @ weights / d, share**2 @ weights / d, noise)


def _noise(means: _Means, sigma: ArrayLike) -> np.ndarray:
    """Computes the noise term. Without noise it is 0, even where its mean would be infinite."""
    problems.check_sigma(sigma)
    sigma = np.asarray(sigma, float)
    some = sigma > 0
    return np.where(some, sigma**2 * np.where(some, means.noise, 0.0), 0.0)


def _checked(n: int, d: int) -> tuple[int, int]:
    """Checks the sizes, and returns them as integers."""
    for name, value in (("n", n), ("d", d)):
        problems.check(name, value, lambda v: (v >= 1) & (v == np.floor(v)), "a whole number >= 1")
    problems.check(
        "(sqrt(n) + sqrt(d))^2",
        (float(n) ** 0.5 + float(d) ** 0.5) ** 2,
        lambda v: v <= LARGEST,
        f"at most {LARGEST:g}: beyond, the limits of `penalised` are as good",
    )
    return int(n), int(d)


@functools.lru_cache(maxsize=64)
def _spectrum(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes `spectrum` for checked sizes."""
    m, gap = min(n, d), abs(n - d)
    # Beyond the last end the density is below 1e-16. The first ends resolve functions that vary
    # near x = 0.
    end = n**0.5 + d**0.5 + 9
    panels = 32 + m // 2
    ends = np.concatenate(
        [[0.0], end / panels * 2.0 ** -np.arange(36, 0, -1.0), np.linspace(0, end, panels + 1)[1:]]
    )
    nodes, rule = legendre.leggauss(NODES)
    # From values at the nodes to the integral from the first end to each node.
    series = np.stack(
        [legendre.legval(nodes, legendre.legint(row, lbnd=-1)) for row in np.eye(NODES)], 1
    )
    running = series @ np.linalg.inv(legendre.legvander(nodes, NODES - 1))
    half = np.diff(ends)[:, None] / 2
    t = (ends[1:, None] + ends[:-1, None]) / 2 + half * nodes
    rule, x = half * rule, t**2
    # phi_j dx/dt for x = t^2, by the recurrence of orthonormal polynomials.
    phi = np.zeros((m, *t.shape))
    phi[0] = np.exp(np.log(2) + gap * np.log(t) - x / 2 - gammaln(gap + 1) / 2)
    for j in range(1, m):
        before = ((j - 1) * (j - 1 + gap)) ** 0.5 * phi[j - 2] if j > 1 else 0.0
        phi[j] = ((2 * j - 1 + gap - x) * phi[j - 1] - before) / (j * (j + gap)) ** 0.5
    whole = (phi * rule).sum(-1)
    start = np.concatenate([np.zeros((m, 1)), whole.cumsum(-1)], -1)
    signed = start[:, -1:, None] - 2 * (start[:, :-1, None] + (phi @ running.T) * half)
    matrix = np.einsum("jpa,kpa,pa->jk", phi, signed, rule, optimize=True)
    if m % 2:
        signed = np.concatenate([signed, np.ones((1, *t.shape))])
        border = start[:, -1:]
        matrix = np.block([[matrix, border], [-border.T, np.zeros((1, 1))]])
    inverse = np.linalg.inv((matrix - matrix.T) / 2)[:, :m]
    density = np.einsum("jpa,kj,kpa->pa", phi, inverse, signed, optimize=True)
    return x.ravel(), (density * rule).ravel()
