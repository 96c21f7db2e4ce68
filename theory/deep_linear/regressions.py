"""Regressions on Gaussian data in NumPy: the simulators of claims about means over data sets.

Inputs are N(0, I). The source is beta_s = e_1, and the target is at the angle theta to it; both
have norm 1. Fits solve normal equations. No mean, law or limit is used.
"""

from collections.abc import Callable
from functools import cache, partial
from math import cos, degrees, sin
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from theory import claims
from theory.claims import Estimate, Simulate, generator

PAPER = "features-are-fate"
claim = partial(claims.claim, PAPER)
# The domain of a claim that averages an estimator in closed form. The claim tests the average.
# Other claims test that networks converge to this estimator.
AVERAGED = "estimator, averaged over data"
# x [draws n d], y [draws n labels] -> [draws labels d]
Fit = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Setting(NamedTuple):
    """Sizes and tasks of a data set.

    Attributes:
      n: Number of samples.
      d: Dimension.
      theta: Angle between the tasks in radians.
      sigma: Standard deviation of the label noise.
    """

    n: int
    d: int
    theta: float
    sigma: float

    def __str__(self) -> str:
        return f"n={self.n}, d={self.d}, θ={degrees(self.theta):.4g}°, σ={self.sigma:g}"

    def target(self) -> np.ndarray:
        """Returns the target task.

        Returns:
          beta_t `[d]`.
        """
        beta = np.zeros(self.d)
        beta[:2] = cos(self.theta), sin(self.theta)
        return beta

    def samples(self, rng: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws independent data sets."""
        x, y = self.labelled(rng, draws, 1)
        return x, y[..., 0]

    def labelled(
        self, rng: np.random.Generator, draws: int, labels: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws independent inputs, each with several labels.

        Args:
          rng: Random generator.
          draws: The number of inputs.
          labels: The number of labels. If it is larger than one, their noise comes in pairs of
            opposite sign.

        Returns:
          Inputs `[draws n d]` and labels `[draws n labels]`.
        """
        x = rng.standard_normal((draws, self.n, self.d))
        noise = rng.standard_normal((draws, self.n, max(1, labels // 2)))
        if labels > 1:
            noise = np.concatenate([noise, -noise], -1)
        return x, (x @ self.target())[..., None] + self.sigma * noise


@cache
def one_sample(at: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Draws a data set that is the same for both sides of a claim."""
    x, y = at.samples(np.random.default_rng(0), 1)
    return x[0], y[0]


class Limit(NamedTuple):
    """A sequence of settings with n = load d samples. Those at d and 2 d are extrapolated.

    Attributes:
      load: The load n / d.
      d: The smaller dimension.
      theta: As in `Setting`.
      sigma: As in `Setting`.
    """

    load: float
    d: int
    theta: float
    sigma: float

    def __str__(self) -> str:
        tasks = f"load={self.load:.4g}, θ={degrees(self.theta):.4g}°, σ={self.sigma:g}"
        return f"{tasks}, d={self.d} and {2 * self.d} extrapolated"

    def at(self, d: int) -> Setting:
        """Returns the setting of one dimension."""
        return Setting(round(self.load * d), d, self.theta, self.sigma)


def pseudoinverse(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Applies X^+ of Gaussian designs, which have full rank.

    Args:
      x: Designs `[draws n d]`.
      v: Vectors `[draws n k]`.

    Returns:
      X^+ v, `[draws d k]`.
    """
    xt = x.swapaxes(-1, -2)
    wide = x.shape[-2] <= x.shape[-1]
    return xt @ np.linalg.solve(x @ xt, v) if wide else np.linalg.solve(xt @ x, xt @ v)


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Fits X^+ y, the limit of training from small weights (Theorem 3.5)."""
    return pseudoinverse(x, y).swapaxes(-1, -2)


def transferred(ridge: float = 0.0) -> Fit:
    """Returns linear transfer, eqs. (107), (108) and (126): beta_s times a refitted scale.

    Args:
      ridge: The ridge lambda.

    Returns:
      The fit.
    """

    def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        z = x[..., :1]
        scale = np.sum(z * y, -2) / (np.sum(z**2, -2) + ridge * z.shape[-2])
        return scale[..., None] * np.eye(x.shape[-1])[0]

    return fit


def rescaled(
    fitted: np.ndarray, unseen: np.ndarray, size: float | np.ndarray, depth: float
) -> np.ndarray:
    """Adds the part of the source that fine-tuning keeps to a fit, fitted + c unseen.

    c = (N / size)^(1 - 1/L), where N is the norm of the result. One layer has c = 1. Eq. (142) has
    c = 1 for any number of layers.

    Args:
      fitted: X^+ y, `[... d]`.
      unseen: (I - P) beta_s, `[... d]`, orthogonal to `fitted`.
      size: |beta_s|, a number or `[...]`.
      depth: Number of layers L, from 1 to inf.

    Returns:
      The limit of fine-tuning, `[... d]`.
    """
    seen2, unseen2 = np.sum(fitted**2, -1), np.sum(unseen**2, -1)
    scale2 = np.ones_like(seen2 + unseen2)
    for _ in range(100):  # a contraction
        scale2 = ((seen2 + scale2 * unseen2) / size**2) ** (1 - 1 / depth)
    return fitted + np.sqrt(scale2)[..., None] * unseen


def fine_tuned(depth: float) -> Fit:
    """Returns the limit of fine-tuning in closed form. `flow_claims` trains networks.

    Args:
      depth: As in `rescaled`.

    Returns:
      The fit.
    """

    def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        both = least_squares(x, np.concatenate([y, x[..., :1]], -1))
        return rescaled(both[..., :-1, :], np.eye(x.shape[-1])[0] - both[..., -1:, :], 1.0, depth)

    return fit


def risks(
    fit: Fit,
    at: Setting,
    rng: np.random.Generator,
    draws: int,
    baseline: Fit | None = None,
    labels: int = 1,
) -> np.ndarray:
    """Draws risks |beta - beta_t|^2, or differences of the risks of two fits to the same data.

    Args:
      fit: The fit.
      at: Sizes and tasks.
      rng: Random generator.
      draws: The number of data sets.
      baseline: A fit for the difference (risk of baseline) - (risk of fit). None for the risk of
        `fit`.
      labels: The number of labels of the same inputs that each risk averages over. This averages
        noise at little cost, because the inputs are factorised once.

    Returns:
      The risks `[draws]`.
    """
    values, target = [], at.target()
    # 16 MB of float64 inputs at a time.
    batch = max(1, 2_000_000 // (at.n * at.d))
    for start in range(0, draws, batch):
        x, y = at.labelled(rng, min(batch, draws - start), labels)
        found = np.sum((fit(x, y) - target) ** 2, -1)
        if baseline is not None:
            # Paired on the same data, so that the shared part cancels in the error of the
            # difference.
            found = np.sum((baseline(x, y) - target) ** 2, -1) - found
        values.append(found.mean(-1))
    return np.concatenate(values)


def mean_risk(
    fit: Fit, at: Setting, draws: int, baseline: Fit | None = None, labels: int = 1
) -> Simulate:
    """Builds the simulator of a mean risk E R, or of a paired difference E[R_baseline - R].

    Args:
      fit: The fit.
      at: Sizes and tasks; |n - d| >= 4 (n > 4 in linear transfer) has a finite variance.
      draws: Number of independent data sets; a tenth of them if quick.
      baseline: As in `risks`.
      labels: As in `risks`.

    Returns:
      The simulator.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        count = draws // 10 if quick else draws
        return Estimate.mean(risks(fit, at, generator(key), count, baseline, labels))

    return simulate


def extrapolate(small: Estimate, large: Estimate, *, times: float = 2) -> Estimate:
    """Extrapolates means at d and k d to d = inf: (k R(kd) - R(d)) / (k - 1).

    The term of order 1/d cancels. The remainder is O(1/d^2), below the standard error at these
    sizes.

    Args:
      small: The mean at d.
      large: The mean at k d.
      times: k, > 1.

    Returns:
      The mean at infinity, with the standard error of both.
    """
    error = np.hypot(times * (large.stderr or 0), small.stderr or 0) / (times - 1)
    return Estimate((times * large.value - small.value) / (times - 1), stderr=float(error))


def limit_risk(
    fit: Fit, at: Limit, draws: int, baseline: Fit | None = None, labels: int = 1
) -> Simulate:
    """Builds the simulator of the limit n, d -> inf of `mean_risk`, from two sizes.

    Args:
      fit: The fit.
      at: Load and tasks.
      draws: Number of data sets at the larger size, half of them at the smaller.
      baseline: As in `risks`.
      labels: As in `risks`.

    Returns:
      The simulator.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        means = [
            mean_risk(fit, at.at(size), count, baseline, labels)(
                jax.random.fold_in(key, size), quick
            )
            for size, count in ((at.d, draws // 2), (2 * at.d, draws))
        ]
        return extrapolate(*means)

    return simulate
