"""Linear transfer of frozen ReLU features against training from scratch.

Section 4 of features-are-fate. Risks are exact for each sample: E over x of a squared difference of
two networks is a quadratic form in Gram matrices, so no test set is drawn. Labels are noiseless.
The paper has no theory of the scratch risk; it fits R_sc = A n^-nu and puts the boundary where that
equals |P_perp f|^2.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.student_teacher import networks
from theory.student_teacher.projection import CUTOFF, check_cutoff, floor


class Interval(NamedTuple):
    """A mean over independent teachers and its Student confidence limits."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class PowerLaw(NamedTuple):
    """R = A n^-nu for each of several teachers, and what they have in common.

    `curvature` is the mean coefficient of (log n)^2 / 2 in a parabola through log R: zero if the
    law is a power.
    """

    log_scales: Float[np.ndarray, " teachers"]
    exponents: Float[np.ndarray, " teachers"]
    exponent: Interval
    curvature: Interval

    def __call__(self, n: np.ndarray) -> np.ndarray:
        """The geometric mean over teachers of A n^-nu."""
        return np.exp(self.log_scales.mean() - self.exponents.mean() * np.log(n))


def linear_transfer(
    w: Float[Array, "m d"],
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    cutoff: ArrayLike = CUTOFF,
) -> networks.Network:
    """Least squares of the output weights with hidden weights `w` frozen, of least norm.

    Eigenvalues of the kernel matrix below `cutoff` times the largest are dropped, as in
    `projection.project`; for cutoff -> 0, the limit of gradient descent from zero.
    """
    check_cutoff(cutoff)
    return _linear_transfer(w, x, y, cutoff)


@jax.jit
def _linear_transfer(w: Array, x: Array, y: Array, cutoff: ArrayLike) -> networks.Network:
    phi = networks.features(w, x) / w.shape[0]
    wide = phi.shape[0] < phi.shape[1]
    values, z = jnp.linalg.eigh(phi @ phi.T if wide else phi.T @ phi)
    kept = values > floor(values, cutoff)
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)

    def solve(b: Array) -> Array:
        return z @ (inverse * (z.T @ b))

    return networks.Network(phi.T @ solve(y) if wide else solve(phi.T @ y), w)


def fit_power_law(
    n: Sequence[float] | np.ndarray, risks: Float[np.ndarray, "teachers n"], level: float = 0.95
) -> PowerLaw:
    """Least squares of log risk on log n for each teacher; intervals from the spread of teachers.

    Null behind the interval: the teachers' exponents are independent and normal. Errors along n may
    be correlated within a teacher. Raises ValueError for fewer than 3 sizes or 2 teachers, or risks
    that are not positive.
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
    slopes, scales = np.polyfit(log_n, log_risk.T, 1)
    curvature = 2 * np.polyfit(log_n, log_risk.T, 2)[0]
    return PowerLaw(scales, -slopes, interval(-slopes, level), interval(curvature, level))


def boundary(law: PowerLaw, outside: Float[np.ndarray, "teachers *b"]) -> np.ndarray:
    """n* of each teacher, where A n^-nu = |P_perp f|^2: linear transfer helps below, for the
    part of its risk that does not vanish with n; inf where that is 0."""
    outside = np.asarray(outside, dtype=float)
    problems.check("outside", outside, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    shape = (-1,) + (1,) * (outside.ndim - 1)
    scales, exponents = law.log_scales.reshape(shape), law.exponents.reshape(shape)
    with np.errstate(divide="ignore"):
        return np.exp((scales - np.log(outside)) / exponents)


def crossing(n: Float[np.ndarray, " n"], gain: Float[np.ndarray, " n"]) -> float:
    """The size at which `gain` turns from positive to negative for the last time, by interpolation
    in log n; nan if it does not."""
    n, gain = np.asarray(n, dtype=float), np.asarray(gain, dtype=float)
    turns = np.flatnonzero((gain[:-1] > 0) & (gain[1:] <= 0))
    if turns.size == 0:
        return float("nan")
    i = turns[-1]
    share = gain[i] / (gain[i] - gain[i + 1])
    return float(np.exp((1 - share) * np.log(n[i]) + share * np.log(n[i + 1])))


def interval(values: Float[np.ndarray, "teachers *b"], level: float = 0.95) -> Interval:
    """Student's interval for the mean over the leading axis.

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
    """t with P(|T| < t) = level: bisection of P(|T| > t) = I_x(k/2, 1/2), x = k / (k + t^2)."""
    low, high = 0.0, 1.0
    with jax.enable_x64(True):
        for _ in range(50):
            x = (low + high) / 2
            above = float(betainc(freedom / 2, 0.5, x)) > 1 - level
            low, high = (low, x) if above else (x, high)
    return float(np.sqrt(freedom * (1 - x) / x))
