"""Linear transfer of frozen ReLU features, compared with training from scratch.

The setting is Features are fate (arXiv 2410.08194), Section 4, with noiseless labels. Risks are
exact for each sample. The mean of a squared difference of two networks is a quadratic form in Gram
matrices (`networks.risk`), so test sets are not needed. The paper has no theory of the scratch risk
R_sc. It fits R_sc = A n^-nu and defines the boundary as the n where this equals |P_perp f|^2.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from sail_jax import linalg
from theory import problems
from theory.student_teacher import networks
from theory.student_teacher.projection import CUTOFF, check_cutoff, floor


class Interval(NamedTuple):
    """A mean over independent teachers, with Student's confidence limits.

    Attributes:
      mean: The means.
      low: The lower limits.
      high: The upper limits.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class PowerLaw(NamedTuple):
    """The fit R = A n^-nu for each of several teachers, and means over them.

    Attributes:
      log_scales: log A of each teacher, `(teachers,)`.
      exponents: nu of each teacher, `(teachers,)`.
      exponent: Mean of nu over teachers, with confidence limits.
      curvature: Mean coefficient of (log n)^2 / 2 in a parabola through log R, with confidence
        limits. It is 0 for a power law.
    """

    log_scales: Float[np.ndarray, " teachers"]
    exponents: Float[np.ndarray, " teachers"]
    exponent: Interval
    curvature: Interval

    def __call__(self, n: np.ndarray) -> np.ndarray:
        """Computes the geometric mean over teachers of A n^-nu.

        Args:
          n: Numbers of samples, of any shape.

        Returns:
          The means, with the shape of `n`.
        """
        return np.exp(self.log_scales.mean() - self.exponents.mean() * np.log(n))


@problems.defined
def linear_transfer(
    w: Float[Array, "m d"],
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    cutoff: ArrayLike = CUTOFF,
) -> networks.Network:
    """Refits the output weights by minimum-norm least squares, with the hidden weights frozen.

    As cutoff -> 0 this is the limit of gradient descent from zero.

    Args:
      w: Frozen hidden vectors `(m, d)`.
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      cutoff: Fraction in [0, 1). Eigenvalues of the kernel matrix below this fraction of the
        largest are dropped, as in `projection.project`.

    Returns:
      The network with refitted output weights.

    Raises:
      ValueError: If the cut-off is out of range.

    >>> network = linear_transfer(jnp.eye(2), jnp.eye(2), jnp.array([1.0, 2.0]))
    >>> [round(float(c), 3) for c in network.c]
    [2.0, 4.0]
    """
    check_cutoff(cutoff)
    return _linear_transfer(w, x, y, cutoff)


@problems.defined
def descended_transfer(
    w: Float[Array, "m d"],
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    rate: ArrayLike,
    steps: ArrayLike,
    tolerance: ArrayLike,
) -> tuple[networks.Network, Int[Array, ""]]:
    """Fits the output weights by full-batch descent from zero, with the hidden weights frozen.

    Descent on |y - f(X)|^2 / (2n) and its stopping rule are as in `networks.scratch`. All steps are
    computed at once, as powers in the kernel's eigenvectors.

    Args:
      w: Frozen hidden vectors `(m, d)`.
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      rate: Learning rate > 0; it is multiplied by the width.
      steps: Largest number of steps, >= 0.
      tolerance: Loss at which training stops, >= 0.

    Returns:
      The network with fitted output weights, and the number of steps.

    Raises:
      ValueError: If rate, steps or tolerance are out of range.

    >>> fit, steps = descended_transfer(jnp.eye(2), jnp.eye(2), jnp.array([1.0, 2.0]), 0.5, 1, 0)
    >>> [round(float(c), 3) for c in fit.c], int(steps)  # 0.5 / 2 of the labels
    ([0.25, 0.5], 1)
    """
    networks.check_descent(rate, steps, tolerance)
    return _descended_transfer(w, x, y, rate, steps, tolerance)


@jax.jit
def _descended_transfer(
    w: Array, x: Array, y: Array, rate: ArrayLike, steps: ArrayLike, tolerance: ArrayLike
) -> tuple[networks.Network, Array]:
    (m, _), n = w.shape, len(y)
    phi = networks.features(w, x) / m
    # In these coordinates a step multiplies the error of component i by 1 - rate m s_i^2 / n.
    u, s, vt = linalg.svd(phi, full_matrices=False)
    b = u.T @ y
    # The fraction of an eigenvector's error that a step removes.
    shrink = rate * m / n * s**2
    # The residual that the features cannot fit. With n <= m it is only rounding.
    rest = jnp.maximum(y @ y - b @ b, 0.0) * (n > m)

    def loss(t: Array) -> Array:
        return (rest + jnp.sum((1 - shrink) ** (2.0 * t) * b**2)) / (2 * n)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) // 2
        enough = loss(middle) <= tolerance
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    # The smallest sufficient number of steps, or all. 32 bisections are sufficient.
    ends = jnp.zeros((), int), jnp.asarray(steps, int)
    t = jnp.minimum(jax.lax.fori_loop(0, 32, halve, ends)[0], steps)
    slow = shrink < 0.5
    # 1 - (1 - shrink)^t loses digits where shrink is small, and log1p needs shrink < 1. Slow
    # components therefore use one form, and fast ones the other.
    small = jnp.expm1(t * problems.log1p(-jnp.where(slow, shrink, 0.0)))
    learned = jnp.where(slow, -small, 1 - (1 - shrink) ** (1.0 * t))
    coefficient = jnp.where(s > 0, learned / jnp.where(s > 0, s, 1.0), 0.0)
    return networks.Network(vt.T @ (coefficient * b), w), t


@jax.jit
def _linear_transfer(w: Array, x: Array, y: Array, cutoff: ArrayLike) -> networks.Network:
    phi = networks.features(w, x) / w.shape[0]
    # The smaller of the two Gram matrices has the same nonzero eigenvalues and costs less.
    wide = phi.shape[0] < phi.shape[1]
    values, z = linalg.eigh(phi @ phi.T if wide else phi.T @ phi)
    kept = values > floor(values, cutoff)
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)

    def solve(b: Array) -> Array:
        return z @ (inverse * (z.T @ b))

    return networks.Network(phi.T @ solve(y) if wide else solve(phi.T @ y), w)


@problems.defined
def fit_power_law(
    n: Sequence[float] | np.ndarray, risks: Float[np.ndarray, "teachers n"], level: float = 0.95
) -> PowerLaw:
    """Fits R = A n^-nu to the risks of several teachers, by least squares of log risk on log n.

    The confidence intervals come from the spread over teachers. They assume that the teachers'
    exponents are independent and normal. Errors along n may be correlated within a teacher.

    Args:
      n: Numbers of samples `(n,)`, at least 3 different ones, > 0.
      risks: Risks `(teachers, n)` of at least 2 teachers, > 0.
      level: Confidence level in (0, 1).

    Returns:
      The fit.

    Raises:
      ValueError: If there are fewer than 3 sizes or 2 teachers, shapes do not conform, or a risk is
        not positive and finite.

    >>> n = np.array([10.0, 20.0, 40.0])
    >>> round(float(fit_power_law(n, np.stack([2 / n, 3 / n])).exponent.mean), 4)
    1.0
    """
    n, risks = np.asarray(n, dtype=float), np.asarray(risks, dtype=float)
    if n.ndim != 1 or np.unique(n).size < max(n.size, 3) or not (n > 0).all():
        raise ValueError(f"n must be at least 3 different sizes > 0; got {n.tolist()}")
    if risks.ndim != 2 or risks.shape[0] < 2 or risks.shape[1] != n.size:
        raise ValueError(
            f"risks must have shape [teachers >= 2, {n.size}], one column per n; got {risks.shape}"
        )
    if not (risks > 0).all() or not np.isfinite(risks).all():
        raise ValueError("risks must be finite and positive: their logarithm is fitted")
    log_n, log_risk = np.log(n), np.log(risks)
    # One column for each teacher, so that all are fitted at once.
    slopes, scales = np.polyfit(log_n, log_risk.T, 1)
    # The second derivative in log n, which is 0 for a power law.
    curvature = 2 * np.polyfit(log_n, log_risk.T, 2)[0]
    return PowerLaw(scales, -slopes, interval(-slopes, level), interval(curvature, level))


@problems.defined
def boundary(law: PowerLaw, outside: Float[np.ndarray, "teachers *b"]) -> np.ndarray:
    """Computes the number of samples of each teacher at which A n^-nu = |P_perp f|^2.

    Below it, linear transfer helps, considering only the constant part of its risk.

    Args:
      law: Fitted power law.
      outside: |P_perp f|^2 of each teacher `(teachers, ...)`, finite and >= 0.

    Returns:
      The numbers of samples n*, with the shape of `outside`. They are inf where `outside` is 0.

    Raises:
      ValueError: If `outside` is out of range.

    >>> n = np.array([10.0, 20.0, 40.0])
    >>> law = fit_power_law(n, np.stack([2 / n, 3 / n]))
    >>> boundary(law, np.array([0.1, 0.1])).round(3).tolist()
    [20.0, 30.0]
    """
    outside = np.asarray(outside, dtype=float)
    problems.check("outside", outside, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    shape = (-1,) + (1,) * (outside.ndim - 1)
    scales, exponents = law.log_scales.reshape(shape), law.exponents.reshape(shape)
    with np.errstate(divide="ignore"):
        return np.exp((scales - np.log(outside)) / exponents)


@problems.typed
def crossing(n: Float[np.ndarray, " n"], gain: Float[np.ndarray, " n"]) -> float:
    """Finds the last size at which a gain changes from positive to negative.

    The interpolation is linear in log n.

    Args:
      n: Sizes `(n,)`, ascending.
      gain: Gains `(n,)`.

    Returns:
      The size, or nan if the gain never changes its sign this way.

    Raises:
      ValueError: If there is not one gain for each size.

    >>> round(crossing(np.array([1.0, 100.0]), np.array([1.0, -1.0])), 3)
    10.0
    """
    n, gain = np.asarray(n, dtype=float), np.asarray(gain, dtype=float)
    if n.ndim != 1 or n.shape != gain.shape:
        raise ValueError(f"expected a gain for each size, (n,); got {n.shape} and {gain.shape}")
    turns = np.flatnonzero((gain[:-1] > 0) & (gain[1:] <= 0))
    if turns.size == 0:
        return float("nan")
    i = turns[-1]
    share = gain[i] / (gain[i] - gain[i + 1])
    return float(np.exp((1 - share) * np.log(n[i]) + share * np.log(n[i + 1])))


@problems.defined
def interval(values: Float[np.ndarray, "teachers *b"], level: float = 0.95) -> Interval:
    """Computes Student's confidence interval for the mean over the leading axis.

    Args:
      values: Values `(teachers, ...)`, finite, of at least 2 teachers.
      level: Confidence level in (0, 1).

    Returns:
      The means and the limits, without the leading axis.

    Raises:
      ValueError: If there are fewer than 2 values, one is not finite, or `level` is out of range.

    >>> interval(np.array([1.0, 2.0, 3.0])).high.round(4).item()
    4.4841
    """
    values = np.asarray(values, dtype=float)
    if values.ndim < 1 or len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(f"values must be finite, at least 2 of them; got shape {values.shape}")
    problems.check("level", level, lambda p: (p > 0) & (p < 1), "a probability in (0, 1)")
    count = values.shape[0]
    mean, stderr = values.mean(0), values.std(0, ddof=1) / np.sqrt(count)
    half = _student_quantile(count - 1, level) * stderr
    return Interval(mean, mean - half, mean + half)


@cache
def _student_quantile(freedom: int, level: float) -> float:
    """Finds t with P(|T| < t) = level, by bisection.

    It uses P(|T| > t) = I_x(k/2, 1/2) with x = k / (k + t^2), the incomplete beta function.
    """
    low, high = 0.0, 1.0
    with jax.enable_x64(True):
        for _ in range(50):
            x = (low + high) / 2
            above = float(betainc(freedom / 2, 0.5, x)) > 1 - level
            low, high = (low, x) if above else (x, high)
    return float(np.sqrt(freedom * (1 - x) / x))
