"""The distribution of a risk over data sets, exactly at finite n and d.

For Gaussian X and unit tasks (the setting of Features are fate, Section 3) the laws are

    scratch, n < d:   Beta((d - n)/2, n/2) + sigma^2 chi^2_n / chi^2_{d-n+1}, independent
    scratch, n >= d:  sigma^2 chi^2_d / chi^2_{n-d+1}
    linear transfer:  sin^2 + (sigma^2 + sin^2) F_{1,n} / n

All three have the form shift + Beta + scale * chi^2_a / chi^2_b, which is a `RiskLaw`. Fine-tuning
has no such form, but an exact sampler (`laws`). Its law is a `SampledLaw`, an empirical
distribution with a known error band. `risks` contains the means.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc, betaln
from jax.typing import ArrayLike
from jaxtyping import Array

from sail_jax.deprecated import former, renamed
from theory import problems
from theory.deep_linear.laws import overlaps_law

__getattr__ = former(__name__, {"fine_tune_law": "fine_tuning_law"}, until="0.4")


class RiskLaw(NamedTuple):
    """The law of shift + Beta(missed / 2, seen / 2) + scale * chi^2_top / chi^2_bottom.

    The two random terms are independent. All fields broadcast, and methods return arrays of the
    broadcast shape.

    Attributes:
      shift: Constant part of the risk.
      missed: Twice the first parameter of the Beta. Where it is 0, the Beta is 0.
      seen: Twice the second parameter of the Beta.
      scale: Factor of the ratio of chi-squares.
      top: Degrees of freedom of the numerator.
      bottom: Degrees of freedom of the denominator.
    """

    shift: Array
    missed: Array
    seen: Array
    scale: Array
    top: Array
    bottom: Array

    def mean(self) -> Array:
        """Computes the mean; it is inf if the noise term has none (bottom <= 2)."""
        ratio = _finite(self.bottom > 2, lambda m: self.top / (m - 2), self.bottom)
        return self.shift + self._beta_mean() + self._scaled(self.scale, ratio)

    def variance(self) -> Array:
        """Computes the variance; it is inf if the noise term has none (bottom <= 4).

        Returns:
          The variances.
        """
        a, b = self.missed / 2, self.seen / 2
        beta = a * b / ((a + b) ** 2 * (a + b + 1))
        n = self.top
        ratio = _finite(
            self.bottom > 4,
            lambda m: 2 * n * (n + m - 2) / ((m - 2) ** 2 * (m - 4)),
            self.bottom,
        )
        return beta + self._scaled(self.scale**2, ratio)

    def cdf(self, risk: ArrayLike) -> Array:
        """Computes the probability that the risk is at most a given value.

        Incomplete beta functions give both terms. They are combined by 128 nodes of Gauss-Legendre
        quadrature over phi, where Beta = sin^2 phi, because the density is smooth in phi.
        """
        return _cdf(self, jnp.asarray(risk, dtype=float))

    def quantile(self, probability: ArrayLike) -> Array:
        """Computes the risk that is not exceeded with a given probability, by bisection of `cdf`.

        Args:
          probability: Probabilities strictly between 0 and 1; they broadcast against the fields.

        Returns:
          The quantiles.

        Raises:
          ValueError: If a probability is not strictly between 0 and 1.
        """
        problems.check(
            "probability", probability, lambda p: (p > 0) & (p < 1), "strictly between 0 and 1"
        )
        p, *_ = jnp.broadcast_arrays(jnp.asarray(probability, dtype=float), self.shift, self.scale)
        return _quantile(self, p)

    def sample(self, key: Array, draws: int) -> Array:
        """Draws independent risks.

        Args:
          key: Random key.
          draws: Number of draws.

        Returns:
          The risks `(draws, ...)`, followed by the broadcast shape of the fields.
        """
        shape = (draws, *jnp.broadcast_shapes(*(jnp.shape(v) for v in self)))
        first, second, third, fourth = jax.random.split(key, 4)
        noise = jax.random.chisquare(first, self.top, shape) / jax.random.chisquare(
            second, self.bottom, shape
        )
        missed = 2 * jax.random.gamma(third, jnp.where(self.missed > 0, self.missed, 1) / 2, shape)
        seen = 2 * jax.random.gamma(fourth, self.seen / 2, shape)
        beta = jnp.where(self.missed > 0, missed / (missed + seen), 0.0)
        return self.shift + beta + self.scale * noise

    def _beta_mean(self) -> Array:
        return self.missed / (self.missed + self.seen)

    def _scaled(self, scale: Array, moment: Array) -> Array:
        scaled = jnp.where(jnp.isinf(moment), jnp.inf, scale * moment)
        # Without noise, the moments of the ratio are irrelevant, even if they are infinite.
        return jnp.where(self.scale > 0, scaled, 0.0)


@jax.jit
def _cdf(law: RiskLaw, risk: Array) -> Array:
    rest = risk - law.shift
    noisy = law.scale > 0
    scale = jnp.where(noisy, law.scale, 1.0)
    m, n = law.bottom, law.top

    def below(x: Array, scale: Array, n: Array, m: Array) -> Array:
        x = jnp.maximum(x, 0) / scale
        # chi^2_n / chi^2_m is B / (1 - B) of a Beta(n/2, m/2).
        return betainc(n / 2, m / 2, x / (1 + x))

    # Without noise the law is the single point `shift`.
    plain = jnp.where(noisy, below(rest, scale, n, m), (rest >= 0).astype(scale.dtype))
    has_beta = law.missed > 0
    # Without a Beta, a placeholder keeps the unused branch finite.
    a, b = jnp.where(has_beta, law.missed, 1.0) / 2, law.seen / 2
    alone = betainc(a, b, jnp.clip(rest, 0, 1))
    nodes, weights = (jnp.asarray(v, scale.dtype) for v in np.polynomial.legendre.leggauss(128))
    end = jnp.arcsin(jnp.sqrt(jnp.clip(rest, 0, 1)))[..., None]
    phi, w = end * (nodes + 1) / 2, end * weights / 2
    a, b, scale, n, m = (jnp.expand_dims(v, -1) for v in (a, b, scale, n, m))
    sine, cosine = jnp.sin(phi), jnp.cos(phi)
    # In logarithms, because the powers and the beta function underflow at large counts.
    density = 2 * jnp.exp(
        (2 * a - 1) * jnp.log(sine) + (2 * b - 1) * jnp.log(cosine) - betaln(a, b)
    )
    mixed = jnp.sum(w * density * below(rest[..., None] - sine**2, scale, n, m), axis=-1)
    return jnp.where(has_beta, jnp.where(noisy, mixed, alone), plain)


@jax.jit
def _quantile(law: RiskLaw, p: Array) -> Array:
    # The bisection is in y = log(risk - shift). The tail of chi^2 / chi^2_1 is heavy, hence the
    # wide bracket.
    low, high = jnp.full_like(p, -80.0), jnp.full_like(p, 80.0)

    def halve(_, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        small = _cdf(law, law.shift + jnp.exp(middle)) < p
        return jnp.where(small, middle, low), jnp.where(small, high, middle)

    low, high = jax.lax.fori_loop(0, 60, halve, (low, high))
    return law.shift + jnp.exp((low + high) / 2)


@renamed("n", "d", "sigma", until="0.4")
@problems.in_float64
def scratch_law(*, n: ArrayLike, d: ArrayLike, sigma: ArrayLike) -> RiskLaw:
    """Returns the law of the risk of training from scratch on n Gaussian samples.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The law; its fields have the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(scratch_law(n=50, d=100, sigma=0.0).mean()), 4)
    0.5
    """
    _check_counts("n", n)
    _check_counts("d", d)
    problems.check_sigma(sigma)
    n, d, sigma = jnp.broadcast_arrays(*(jnp.asarray(v, dtype=float) for v in (n, d, sigma)))
    missed = jnp.maximum(d - n, 0.0)
    # If all of the target is seen (n >= d), the Beta is 0, and the noise has chi^2_d in the
    # numerator.
    return RiskLaw(jnp.zeros_like(n), missed, n, sigma**2, jnp.minimum(n, d), jnp.abs(n - d) + 1)


@renamed("n", "theta", "sigma", until="0.4")
@problems.defined
def linear_transfer_law(*, n: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> RiskLaw:
    """Returns the law of the risk of refitting only the last layer on n Gaussian samples.

    Args:
      n: Number of samples, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The law; its fields have the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(linear_transfer_law(n=8, theta=jnp.pi / 4, sigma=0.5).mean()), 4)
    0.625
    """
    _check_counts("n", n)
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    n, theta, sigma = jnp.broadcast_arrays(
        *(jnp.asarray(v, dtype=float) for v in (n, theta, sigma))
    )
    missed2 = jnp.sin(theta) ** 2
    zero, one = jnp.zeros_like(n), jnp.ones_like(n)
    return RiskLaw(missed2, zero, one, missed2 + sigma**2, one, n)


class SampledLaw(NamedTuple):
    """A law that is represented by exact samples.

    The true distribution function lies within `band` of the empirical one.

    Attributes:
      draws: The draws `(..., draws)`, ascending along the last axis.
      degrees: Moments of order >= degrees / 2 are infinite; inf if all moments are finite.
    """

    draws: Array
    degrees: Array

    def mean(self) -> Array:
        """Computes the mean of the draws, or inf where the true mean is infinite.

        Its standard error is sqrt(variance / draws).
        """
        return jnp.where(self.degrees > 2, self.draws.mean(-1), jnp.inf)

    def variance(self) -> Array:
        """Computes the variance of the draws, or inf where the true variance is infinite."""
        return jnp.where(self.degrees > 4, self.draws.var(-1, ddof=1), jnp.inf)

    def cdf(self, risk: ArrayLike) -> Array:
        """Computes the fraction of draws that are at most a given value."""
        risk = jnp.asarray(risk, dtype=float)
        return jnp.searchsorted(self.draws, risk, side="right") / self.draws.shape[-1]

    def quantile(self, probability: ArrayLike) -> Array:
        """Computes empirical quantiles.

        Args:
          probability: Probabilities strictly between 0 and 1, a scalar or a vector.

        Returns:
          The quantiles; the axis of a vector of probabilities comes first.

        Raises:
          ValueError: If a probability is not strictly between 0 and 1.
        """
        problems.check(
            "probability", probability, lambda p: (p > 0) & (p < 1), "strictly between 0 and 1"
        )
        return jnp.quantile(self.draws, jnp.asarray(probability, dtype=float), axis=-1)

    def band(self, confidence: float = 0.99) -> float:
        """Bounds the distance between the empirical and the true distribution function.

        This is the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart, P(distance > e) <= 2
        exp(-2 draws e^2).

        Args:
          confidence: Probability that the bound holds, strictly between 0 and 1.

        Returns:
          The largest distance anywhere, with this confidence.

        Raises:
          ValueError: If the confidence is not strictly between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be strictly between 0 and 1; got {confidence}")
        return float(np.sqrt(np.log(2 / (1 - confidence)) / (2 * self.draws.shape[-1])))


@renamed("n", "d", "theta", "sigma", "depth", until="0.4")
@problems.defined
def fine_tuning_law(
    key: Array,
    *,
    n: int,
    d: int,
    theta: ArrayLike,
    sigma: float,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
    draws: int = 100000,
) -> SampledLaw:
    """Returns the law of the risk of fine-tuning all layers on n Gaussian samples, by exact draws.

    All elements of array arguments share the same draws. A moment is finite if the same moment of
    scratch training is finite, because the factor c of `null_scale` grows more slowly than |X^+ y|.

    Args:
      key: Random key.
      n: Number of samples, at least 1.
      d: Dimension, at least 2.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0; one number.
      depth: Number of weight matrices, >= 1, inf allowed.
      size: Norm of the pretrained predictor; the target has norm 1.
      draws: Number of draws.

    Returns:
      The law; theta, depth and size broadcast to its leading axes.

    Raises:
      ValueError: If an argument is out of range.
    """
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    problems.check_depth(depth)
    theta, depth, size = (
        jnp.asarray(v, dtype=float)[..., None] for v in jnp.broadcast_arrays(theta, depth, size)
    )
    # [..., draws]: the arguments give the leading axes and share the draws.
    risks = overlaps_law(key, n=n, d=d, draws=draws).fine_tune(theta, sigma, depth, size)
    degrees = jnp.where(jnp.asarray(sigma) > 0, abs(n - d) + 1.0, jnp.inf)
    return SampledLaw(jnp.sort(risks, axis=-1), degrees)


def _check_counts(name: str, value: ArrayLike) -> None:
    problems.check(name, value, lambda v: (v >= 1) & (v < np.inf), "a finite count >= 1")


def _finite(exists: Array, moment, degrees: Array) -> Array:
    """Computes `moment(degrees)` where it exists, else inf; 10 replaces degrees without one."""
    return jnp.where(exists, moment(jnp.where(exists, degrees, 10.0)), jnp.inf)
