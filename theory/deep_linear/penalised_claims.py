"""Ridge regression from scratch and L2-SP at their best penalty, solved on random data.

The simulator minimises twice. It solves the penalised least squares problem of every data set, and
searches for the penalty with the smallest mean risk. It uses no formula for either. All penalties
are tried on the same data sets, so differences between them have little noise.
"""

from collections.abc import Callable
from functools import partial
from math import cos, pi, sin, sqrt
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import optimize

from theory import claims
from theory.claims import Estimate, generator, once
from theory.deep_linear import penalised
from theory.deep_linear.regressions import PAPER, extrapolate

SMALL, TIMES = 16, 3  # limits are extrapolated from d = 16 and 48
RANGE = 1e-4, 1e3  # of the penalties that are searched
BATCH = 2_000  # data sets that are factorised at a time


class Ridges(NamedTuple):
    """Penalised least squares on many data sets, in the eigenbasis of X X^T.

    Attributes:
      eigenvalues: Of X X^T / n, `[draws n]`.
      labels: The residuals of the labels at the start, `[draws n]`.
      kernel: X Sigma X^T / n, `[draws n n]`.
      seen: X Sigma (beta_t - start) / sqrt(n), `[draws n]`.
      still: The risk of the start.
    """

    eigenvalues: np.ndarray
    labels: np.ndarray
    kernel: np.ndarray
    seen: np.ndarray
    still: float

    def risk(self, penalty: float) -> np.ndarray:
        """Solves all problems at one penalty.

        Args:
          penalty: The penalty.

        Returns:
          Their risks `[draws]`.
        """
        dual = self.labels / (self.eigenvalues + penalty)
        learned = np.einsum("in,inm,im->i", dual, self.kernel, dual, optimize=True)
        return learned - 2 * np.sum(dual * self.seen, -1) + self.still

    def slope(self, penalty: float) -> np.ndarray:
        """Differentiates the risks by the penalty's logarithm.

        Args:
          penalty: The penalty.

        Returns:
          The slopes `[draws]`, by a central difference.
        """
        step = 1e-4
        up, down = (self.risk(penalty * np.exp(sign * step)) for sign in (1, -1))
        return (up - down) / (2 * step)

    def best(self) -> tuple[Estimate, Estimate]:
        """Searches for the penalty with the smallest mean risk.

        Returns:
          The penalty, with the standard error of the root of a mean slope, and the risk there.
        """

        def slopes(log: float) -> np.ndarray:
            return self.slope(np.exp(log))

        ends = tuple(np.log(RANGE))
        log = optimize.root_scalar(lambda at: slopes(at).mean(), bracket=ends, xtol=1e-6).root
        bend = (slopes(log + 0.01) - slopes(log - 0.01)).mean() / 0.02
        penalty, error = float(np.exp(log)), Estimate.mean(slopes(log)).stderr or 0.0
        return Estimate(penalty, stderr=penalty * error / bend), Estimate.mean(self.risk(penalty))


def ridges(
    rng: np.random.Generator, s: np.ndarray, offset: np.ndarray, n: int, sigma: float, draws: int
) -> Ridges:
    """Draws data sets and makes `Ridges` of penalised least squares on them.

    Args:
      rng: Random generator.
      s: Eigenvalues of the covariance of the inputs `[d]`.
      offset: beta_t - start `[d]`, in its eigenbasis.
      n: Number of samples.
      sigma: Standard deviation of the label noise.
      draws: The number of data sets.

    Returns:
      The problems.
    """
    parts = []
    for start in range(0, draws, BATCH):
        count = min(BATCH, draws - start)
        x = rng.standard_normal((count, n, s.size)) * np.sqrt(s) / sqrt(n)
        y = x @ offset + sigma / sqrt(n) * rng.standard_normal((count, n))
        values, basis = np.linalg.eigh(x @ x.swapaxes(1, 2))
        turned = basis.swapaxes(1, 2) @ x
        kernel = (turned * s) @ turned.swapaxes(1, 2)
        parts.append((values, np.einsum("inm,in->im", basis, y), kernel, turned @ (s * offset)))
    whole = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return Ridges(whole[0], whole[1], whole[2], whole[3], float(np.sum(s * offset**2)))


class Offset(NamedTuple):
    """A problem in any dimension, given by the offset of the target from the start.

    Attributes:
      eigenvalues: Of the covariance, each in as many directions.
      start: The start as a multiple of the source, 0 from scratch and 1 for L2-SP.
      theta: The angle between the tasks, both of norm 1.
      sigma: Standard deviation of the label noise.
      load: n / d.
      draws: The numbers of data sets in the smaller and in the larger dimension.
    """

    eigenvalues: tuple[float, ...]
    start: float
    theta: float
    sigma: float
    load: float
    draws: tuple[int, int]

    def at(self, d: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Makes the problem of one dimension.

        Args:
          d: The dimension, a multiple of 4 and of the number of eigenvalues.

        Returns:
          Eigenvalues `[d]`, beta_t - start `[d]`, and the number of samples.
        """
        source, other = np.ones(d), np.repeat([1.0, 1.0, -1.0, -1.0], d // 4)
        offset = (cos(self.theta) - self.start) * source + sin(self.theta) * other
        s = np.repeat(self.eigenvalues, d // len(self.eigenvalues))
        return s, offset / sqrt(d), round(self.load * d)

    @property
    def distance(self) -> float:
        """Computes |beta_t - start|."""
        return float(np.linalg.norm(self.at(SMALL)[1]))

    def __str__(self) -> str:
        return f"load={self.load}, |β_t - start|={self.distance:.4g}, σ={self.sigma}"

    def isotropic(self) -> dict[str, float]:
        """Returns the smaller problem's n, d, distance and noise, by the names of arguments."""
        n = self.at(SMALL)[2]
        return {"n": n, "d": SMALL, "distance": self.distance, "sigma": self.sigma}

    def equivalent(self) -> tuple[Array, Array]:
        """Computes the best penalty and its risk by the equivalent."""
        s, offset, n = self.at(SMALL)
        return penalised.best_risk_of(jnp.asarray(s), jnp.asarray(offset), n=n, sigma=self.sigma)


def _searcher(problem: Offset) -> Callable[[Array, bool], dict[str, Estimate]]:
    """Searches for the best penalty in the smaller dimension, and as d -> inf, with its risk."""

    @once
    def search(key: Array, quick: bool) -> dict[str, Estimate]:
        rng = generator(key)

        def at(d: int, draws: int) -> tuple[Estimate, Estimate]:
            s, offset, n = problem.at(d)
            draws = draws // 10 if quick else draws
            return ridges(rng, s, offset, n, problem.sigma, draws).best()

        penalty, risk = at(SMALL, problem.draws[0])
        larger_penalty, larger_risk = at(TIMES * SMALL, problem.draws[1])
        return {
            "small": penalty,
            "penalty": extrapolate(penalty, larger_penalty, times=TIMES),
            "risk": extrapolate(risk, larger_risk, times=TIMES),
        }

    return search


SOURCE = "Thms 3.6-3.8, beyond: at the best penalty"
SETTING = pi / 4, 0.5, 0.5  # angle, noise and load

for _name, _what, _problem in (
    (
        "penalised-ridge",
        "ridge regression from scratch",
        Offset((1.0,), 0.0, *SETTING, draws=(20_000, 4_000)),
    ),
    ("penalised-L2-SP", "L2-SP", Offset((1.0,), 1.0, *SETTING, draws=(20_000, 4_000))),
):
    _search = _searcher(_problem)
    claim = partial(
        claims.claim, PAPER, draws=f"{PAPER}/{_name}", each=((_name, _what, _problem, _search),)
    )

    @claim("{name}-penalty/ours")
    def _(name, what, problem, search):
        """For {what} the penalty of least E R is σ²d/(n |β_t - start|²), at finite n and d

        Source: {SOURCE}
        Domain: {problem}, d=16
        """
        predicted = penalised.best_penalty(**problem.isotropic())
        return predicted, lambda *how: search(*how)["small"]

    @claim("{name}-risk/ours")
    def _(name, what, problem, search):
        """For {what} the least E R over all penalties tends to R with R² - (|β_t - start|² (1-load)
        - σ²) R = σ² |β_t - start|²

        Source: {SOURCE}
        Domain: {problem}, d=16 and 48 extrapolated
        """
        predicted = penalised.best_risk(**problem.isotropic())
        return predicted, lambda *how: search(*how)["risk"]


ANY = Offset((1.0, 0.5, 0.25, 0.125), 1.0, *SETTING, draws=(20_000, 14_000))
_any = _searcher(ANY)
claim = partial(claims.claim, PAPER, draws=f"{PAPER}/penalised-covariance")
EIGENVALUES = f"eigenvalues {', '.join(map(str, ANY.eigenvalues))}, {ANY}, d=16 and 48 extrapolated"


@claim("penalised-covariance-penalty/ours")
def _():
    """For L2-SP with any covariance the penalty of least E R minimises the equivalent's risk

    Source: {SOURCE}
    Domain: {EIGENVALUES}
    """
    return ANY.equivalent()[0], lambda *how: _any(*how)["penalty"]


@claim("penalised-covariance-risk/ours")
def _():
    """For L2-SP with any covariance the least E R over all penalties tends to the least risk of the
    equivalent

    Source: {SOURCE}
    Domain: {EIGENVALUES}
    """
    return ANY.equivalent()[1], lambda *how: _any(*how)["risk"]
