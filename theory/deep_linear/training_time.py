"""Mean risks of linear models over training time, for inputs of any covariance.

The flow db/dt = -(C b - X^T y/n), C = X^T X/n, leaves e^{-tC} of the initial error. With
e^{-tC} = sum_j w_j (z_j + tC)^{-1} over a contour around the negative axis, the mean risk requires
only resolvents of C, which have deterministic equivalents. With l = kappa (1 - df1(kappa)/n) solved
for complex l,

  l (C + l)^{-1}                        ~  kappa (Sigma + kappa)^{-1}
  l l' (C + l)^{-1} Sigma (C + l')^{-1} ~  kappa kappa' (Sigma + kappa)^{-1} Sigma
                                           (Sigma + kappa')^{-1} / (1 - T/n),
  T = tr[Sigma^2 (Sigma + kappa)^{-1} (Sigma + kappa')^{-1}].

This holds for n and d large together, with relative errors O(1/n). The limit t -> inf is in
`covariance`. `flow` has predictors of networks of any depth on one data set.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Complex, Float

from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear.covariance import Spectrum, check_spectrum, check_vectors

# The cotangent contour of Trefethen, Weideman and Schmelzer (2006): with 24 nodes the exponential
# is accurate to 1e-14.
NODES = 24


def _contour() -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes z_j and weights w_j with sum_j w_j / (z_j + x) = e^{-x} for x >= 0."""
    angle = np.pi * np.arange(1 - NODES, NODES, 2) / NODES
    slope = 0.6407
    z = NODES * (-0.6122 + 0.5017 * angle / np.tan(slope * angle) + 0.2645j * angle)
    rise = 1 / np.tan(slope * angle) - slope * angle / np.sin(slope * angle) ** 2
    return z, np.exp(z) * (0.5017 * rise + 0.2645j) / 1j


@renamed("n", "sigma", "times", until="0.4")
@problems.defined
def flow_risk(
    eigenvalues: Float[ArrayLike, " d"],
    offset: Float[ArrayLike, " d"],
    *,
    n: ArrayLike,
    sigma: ArrayLike,
    times: Float[ArrayLike, " times"],
) -> Float[Array, "*b times"]:
    """Computes the mean risk |b(t) - beta_t|^2_Sigma of a linear model over training time.

    It is computed in float64 regardless of the caller's precision, with rounding errors of order
    1e-16 t max(s) sigma^2. The result is also in float64.

    Args:
      eigenvalues: Eigenvalues s of Sigma `(d,)`, >= 0, not all 0.
      offset: beta_t - beta_0 in the eigenbasis of Sigma, `(d,)`. It is beta_t for training from
        scratch and beta_t - beta_s for fine-tuning a linear model.
      n: Number of samples, > 0.
      sigma: Standard deviation of the label noise, >= 0; it broadcasts with n.
      times: Times `(times,)`, finite and >= 0, in units of gradient flow on |y - X b|^2 / (2n).

    Returns:
      The risks `(..., times)` in the large n, d limit. n and sigma give the leading axes.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    check_spectrum(eigenvalues)
    check_vectors(eigenvalues, offset=offset)
    problems.check("n", n, lambda n: (n > 0) & (n < np.inf), "a finite number of samples > 0")
    problems.check_sigma(sigma)
    check_times(times)
    with jax.enable_x64(True):
        s, offset, times = (jnp.asarray(v, dtype=float) for v in (eigenvalues, offset, times))
        shape = jnp.broadcast_shapes(jnp.shape(n), jnp.shape(sigma))
        n, sigma = (jnp.broadcast_to(jnp.asarray(v, dtype=float), shape) for v in (n, sigma))
        at = jax.vmap(partial(_risks, s, offset**2), (0, 0, None))
        return at(n.ravel(), sigma.ravel(), times).reshape(*shape, times.size)


@jax.jit
def _risks(s: Array, offset2: Array, n: Array, sigma: Array, times: Array) -> Array:
    """Computes `flow_risk` at one n and sigma, for all times."""
    z, w = (jnp.asarray(v) for v in _contour())

    def kappa(t: Array) -> Array:
        """Solves for kappa at all nodes. Half of them are conjugates of the others."""
        half = complex_ridge(s, n, z[NODES // 2 :] / t)
        return jnp.concatenate([half[::-1].conj(), half])

    def bias(kappa: Array) -> Array:
        left = 1 / (s + kappa[:, None])  # [node, d]
        scale = w * kappa / z
        # [node, node']: the deterministic equivalent of a product of two resolvents at different
        # points.
        crowding = 1 - (left * s**2) @ left.T / n
        overlap = (left * s * offset2) @ left.T
        return jnp.real(jnp.sum(scale[:, None] * scale * overlap / crowding))

    def trace_phi(kappa: Array) -> Array:
        """E tr[Sigma phi(tC)], phi(x) = (1 - e^{-x})/x = sum_j w_j / (z_j (z_j + x))."""
        df1 = (s / (s + kappa[:, None])).sum(-1)
        return jnp.real(jnp.sum(w / z**2 * kappa * df1))

    def risk(t: Array) -> Array:
        now, later = kappa(t), kappa(2 * t)
        # E tr[Sigma (1 - e^{-tC})^2 C^{-1}] / n, by (1 - e^{-x})^2 / x = 2 phi(x) - 2 phi(2x)
        return bias(now) + sigma**2 * 2 * t / n * (trace_phi(now) - trace_phi(later))

    # At earlier times nothing has changed, up to errors of order 1e-12.
    start = 1e-12 / s.max()
    return jax.lax.map(risk, jnp.maximum(times, start), batch_size=32)


@problems.defined
def complex_ridge(
    eigenvalues: Spectrum, n: ArrayLike, ridge: Complex[Array, " nodes"]
) -> Complex[Array, " nodes"]:
    """Solves ridge = kappa (1 - df1(kappa) / n) for ridges off the negative axis.

    The branch is the one that tends to ridge + tr(Sigma) / n at infinity. It is followed inwards
    from there in steps of at most a factor 2, with Newton's method at each step.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`.
      n: Number of samples, a scalar.
      ridge: Complex ridges `(nodes,)`.

    Returns:
      kappa at each ridge, `(nodes,)`.
    """
    s = eigenvalues
    far = 1e3 * s.max() * jnp.maximum(1.0, s.size / n)
    steps = 64
    # Where, where the branch is known, to the ridge in `steps` equal steps of the logarithm.
    ratio = jnp.minimum((jnp.abs(ridge) / far) ** (1 / steps), 1.0)

    def newton(kappa: Array, target: Array) -> Array:
        share = s / (s + kappa[:, None])
        value = kappa * (1 - share.sum(-1) / n) - target
        return kappa - value / (1 - (share**2).sum(-1) / n)

    def follow(k: Array, kappa: Array) -> Array:
        target = ridge * ratio ** (k - steps)
        # Far out, kappa is approximately proportional to the ridge, which gives the initial guess
        # for Newton's method.
        kappa = kappa * ratio
        for _ in range(3):
            kappa = newton(kappa, target)
        return kappa

    start = ridge * ratio**-steps
    kappa = jax.lax.fori_loop(1, steps + 1, follow, start + s.sum() / n)
    return newton(newton(kappa, ridge), ridge)


@renamed("n", "theta", "sigma", "times", until="0.4")
@problems.in_float64
def linear_transfer_flow_risk(
    *, n: ArrayLike, theta: ArrayLike, sigma: ArrayLike, times: ArrayLike
) -> Array:
    """Computes the mean risk when only the scale of a unit beta_s is trained, from 0, for time t.

    It is exact at finite n. With u ~ chi^2_n,

        sin^2 + cos^2 E e^{-2tu/n} + (sigma^2 + sin^2) E[(1 - e^{-tu/n})^2 / u].

    The limit t -> inf is `risks.linear_transfer_risk`. The infinite mean of n <= 2 appears only in
    that limit.

    Args:
      n: Number of samples, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.
      times: Times, finite and >= 0, in units of gradient flow on |y - X b|^2 / (2n).

    Returns:
      The mean risk, with the broadcast shape of all arguments.

    Raises:
      ValueError: If an argument is out of range.
    """
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), "a number of samples >= 1")
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    problems.check("times", times, lambda t: (t >= 0) & (t < np.inf), "finite and >= 0")
    cos, sin = problems.cos_sin(theta)
    n, sigma, t = (jnp.asarray(v, dtype=float) for v in (n, sigma, times))
    missed2 = sin**2
    once, twice = jnp.log1p(2 * t / n), jnp.log1p(4 * t / n)  # E e^{-au} = (1 + 2a)^{-n/2}

    def integral(log: Array) -> Array:
        """int_0^a E e^{-su} ds = (1 - (1 + 2a)^{1 - n/2})/(n - 2), = E[(1 - e^{-au})/u]."""
        power = 1 - n / 2
        flat = jnp.abs(power) < 1e-6
        return jnp.where(flat, log / 2, jnp.expm1(power * log) / jnp.where(flat, 1, 2 * power))

    # For small t this cancels, and Gauss-Legendre quadrature computes int_0^{t/n} E e^{-su} - E
    # e^{-(s + t/n)u} ds.
    nodes, weights = (jnp.asarray(v, float) for v in np.polynomial.legendre.leggauss(16))
    a = (jnp.minimum(t, 1.0) / n)[..., None]
    s = a * (nodes + 1) / 2
    start, fall = (-n[..., None] / 2 * jnp.log1p(2 * x) for x in (s, a / (1 + 2 * s)))
    early = jnp.sum(a * weights / 2 * jnp.exp(start) * -jnp.expm1(fall), -1)
    overfit = jnp.where(t < 1, early, 2 * integral(once) - integral(twice))
    return missed2 + cos**2 * jnp.exp(-n / 2 * twice) + (sigma**2 + missed2) * overfit


def check_times(times: ArrayLike) -> None:
    """Raises an error unless times are a non-empty vector of finite values >= 0, in any order.

    Args:
      times: Values that must be `(times,)`.

    Raises:
      ValueError: If they are anything else.
    """
    if np.ndim(times) != 1 or np.size(times) == 0:
        raise ValueError(f"times must be a non-empty vector; got shape {np.shape(times)}")
    problems.check("times", times, lambda t: (t >= 0) & (t < np.inf), "finite and >= 0")
