"""Simulates several sources and a target in NumPy, for claims about weights, covariances and ranks.

Data sets are drawn, and least squares is solved on each. The weights are also found by least
squares, by a regression of the target on the fits of the sources over all draws. No moment, mean or
limit is used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from theory.claims import Estimate
from theory.deep_linear.regressions import pseudoinverse


class Inputs(NamedTuple):
    """Inputs N(0, Sigma), by eigenvalues and eigenvectors.

    Attributes:
      eigenvalues: Eigenvalues of Sigma, each with the same multiplicity.
      angle: The angle by which the eigenvectors are rotated. The first coordinate of the first half
        is rotated towards the first one of the second half, and so on.
    """

    eigenvalues: tuple[float, ...] = (1.0,)
    angle: float = 0.0

    def root(self, d: int) -> np.ndarray:
        """Makes a matrix A `[d d]` with A^T A = Sigma, by which normal vectors are multiplied.

        Args:
          d: The dimension, a multiple of the number of eigenvalues, and even if the angle is not 0.

        Returns:
          The matrix.
        """
        s = np.repeat(self.eigenvalues, d // len(self.eigenvalues))
        turn = np.eye(d)
        if self.angle:
            half = np.eye(d // 2)
            c, sine = np.cos(self.angle) * half, np.sin(self.angle) * half
            turn = np.block([[c, -sine], [sine, c]])
        return np.sqrt(s)[:, None] * turn.T

    def covariance(self, d: int) -> np.ndarray:
        """Returns Sigma `[d d]`."""
        root = self.root(d)
        return root.T @ root


class Samples(NamedTuple):
    """A source with its samples and its fit.

    Attributes:
      load: Samples per dimension.
      sigma: Standard deviation of the label noise.
      theta: Angle of the source's task to the target's, both of norm 1.
      way: The index of the direction in `Several.tasks` towards which the source's task is rotated.
      inputs: The source's inputs.
      ridge: Its ridge penalty. 0 is least squares of minimum norm.
    """

    load: float
    sigma: float
    theta: float
    way: int = 0
    inputs: Inputs = Inputs()
    ridge: float = 0.0

    def fit(self, rng: np.random.Generator, task: np.ndarray, draws: int) -> np.ndarray:
        """Draws data sets and solves them.

        Args:
          rng: Random generator.
          task: The source's task `[d]`.
          draws: The number of data sets.

        Returns:
          The fits `[draws d]`.
        """
        n = self.count(task.size)
        x = rng.standard_normal((draws, n, task.size)) @ self.inputs.root(task.size)
        y = (x @ task + self.sigma * rng.standard_normal((draws, n)))[..., None]
        if not self.ridge:
            return pseudoinverse(x, y)[..., 0]
        xt = x.swapaxes(1, 2)
        penalty = n * self.ridge * np.eye(task.size)
        return np.linalg.solve(xt @ x + penalty, xt @ y)[..., 0]

    def count(self, d: int) -> int:
        """Returns the number of samples in d dimensions."""
        return round(self.load * d)


class Missed(NamedTuple):
    """The parts of the target's risk on many draws, in coordinates where the risk is a squared
    norm.

    With weights a the risk of a draw is |rest - sum_s a_s parts_s|^2.

    Attributes:
      rest: The error if all weights are 0, `[draws d]`.
      parts: The contribution of each source, `[draws source d]`.
    """

    rest: np.ndarray
    parts: np.ndarray

    def risks(self, weights: Sequence[float] | np.ndarray) -> np.ndarray:
        """Computes the risks `[draws]` of some weights, one per source."""
        return np.sum((self.rest - np.asarray(weights) @ self.parts) ** 2, -1)

    def best(self, *, affine: bool = False) -> tuple[list[Estimate], Estimate]:
        """Finds the weights with the smallest mean risk by least squares over all draws.

        Args:
          affine: Whether the weights must sum to 1.

        Returns:
          The weights, with the standard errors of a root of mean slopes, and the risk there.
        """
        if affine:
            last = self.parts[:, -1:]
            first, _ = free = Missed(self.rest - last[:, 0], self.parts[:, :-1] - last).best()
            weights = np.array([w.value for w in first])
            other = Estimate(1 - weights.sum(), stderr=0.0)  # its error is not asked for
            return [*first, other], free[1]
        parts = self.parts.swapaxes(1, 2)
        shape = -1, parts.shape[-1]
        weights = np.linalg.lstsq(parts.reshape(shape), self.rest.ravel())[0]
        slopes = np.einsum("ids,id->is", parts, self.rest - parts @ weights)
        bend = np.einsum("ids,idt->st", parts, parts) / len(parts)
        errors = np.std(slopes @ np.linalg.inv(bend), axis=0, ddof=1) / np.sqrt(len(parts))
        found = [Estimate(float(w), stderr=float(e)) for w, e in zip(weights, errors, strict=True)]
        return found, Estimate.mean(self.risks(weights))


class Several(NamedTuple):
    """Several sources and a target, in any dimension.

    Attributes:
      sources: The sources.
      load: Target samples per dimension, 0 for none.
      sigma: Standard deviation of their label noise.
      inputs: The target's inputs.
    """

    sources: tuple[Samples, ...]
    load: float = 0.0
    sigma: float = 0.0
    inputs: Inputs = Inputs()

    def target(self, d: int) -> np.ndarray:
        """Returns beta_t `[d]`, with equal parts in all directions."""
        return np.ones(d) / np.sqrt(d)

    def tasks(self, d: int) -> list[np.ndarray]:
        """Makes the tasks of the sources.

        Args:
          d: The dimension, a multiple of 8.

        Returns:
          A task `[d]` of norm 1 for each source.
        """
        signs = [[1, -1], [1, 1, -1, -1], [1, -1, -1, 1, -1, 1, 1, -1]]
        ways = [np.repeat(way, d // len(way)) / np.sqrt(d) for way in signs]
        return [
            np.cos(s.theta) * self.target(d) + np.sin(s.theta) * ways[s.way] for s in self.sources
        ]

    def draw(
        self, rng: np.random.Generator, d: int, draws: int, batch: int = 2_000
    ) -> tuple[Missed, Missed]:
        """Fits the sources, and fine-tunes each on the target's samples.

        Args:
          rng: Random generator.
          d: The dimension.
          draws: The number of sources and data sets.
          batch: The number of problems solved at a time.

        Returns:
          The errors before and after fine-tuning. They are equal without target samples.
        """
        counts = [min(batch, draws - start) for start in range(0, draws, batch)]
        both = zip(*(self._draw(rng, d, count) for count in counts), strict=True)
        before, after = (Missed(*map(np.concatenate, zip(*parts, strict=True))) for parts in both)
        return before, after

    def _draw(self, rng: np.random.Generator, d: int, draws: int) -> tuple[Missed, Missed]:
        target, root = self.target(d), self.inputs.root(d)
        fits = np.stack(
            [s.fit(rng, b, draws) for s, b in zip(self.sources, self.tasks(d), strict=True)], 1
        )
        rest = np.broadcast_to(target, (draws, d))
        before = Missed(rest @ root.T, fits @ root.T)
        n = round(self.load * d)
        if not n:
            return before, before
        x = rng.standard_normal((draws, n, d)) @ root
        y = x @ target + self.sigma * rng.standard_normal((draws, n))
        # Least squares from a start is the start plus the fit to its residuals.
        seen = x @ fits.swapaxes(1, 2)
        solved = pseudoinverse(x, np.concatenate([y[..., None], seen], -1)).swapaxes(1, 2)
        return before, Missed((rest - solved[:, 0]) @ root.T, (fits - solved[:, 1:]) @ root.T)


def in_random(
    rng: np.random.Generator, offset: np.ndarray, k: int, n: int, sigma: float, draws: int
) -> np.ndarray:
    """Fine-tunes in a new random subspace for each data set, with inputs N(0, I).

    Args:
      rng: Random generator.
      offset: beta_t - b_0 `[d]`.
      k: Dimension of the subspaces.
      n: Number of samples.
      sigma: Standard deviation of the label noise.
      draws: The number of data sets.

    Returns:
      The risks `[draws]`.
    """
    basis, _ = np.linalg.qr(rng.standard_normal((draws, offset.size, k)))
    x = rng.standard_normal((draws, n, offset.size))
    y = x @ offset + sigma * rng.standard_normal((draws, n))
    fit = (basis @ pseudoinverse(x @ basis, y[..., None]))[..., 0]
    return np.sum((fit - offset) ** 2, -1)


def in_first(
    rng: np.random.Generator,
    s: np.ndarray,
    offset: np.ndarray,
    counts: Sequence[int],
    n: int,
    sigma: float,
    draws: int,
) -> list[np.ndarray]:
    """Fine-tunes in the first directions of the inputs, on the same data for all counts.

    Args:
      rng: Random generator.
      s: Eigenvalues of the covariance of the inputs `[d]`.
      offset: beta_t - b_0 in its eigenbasis `[d]`.
      counts: Numbers of directions, at least 1.
      n: Number of samples.
      sigma: Standard deviation of the label noise.
      draws: The number of data sets.

    Returns:
      The risks `[draws]` for each of the numbers.
    """
    x = rng.standard_normal((draws, n, s.size)) * np.sqrt(s)
    y = (x @ offset + sigma * rng.standard_normal((draws, n)))[..., None]
    found = []
    for k in counts:
        fit = np.zeros((draws, s.size))
        fit[:, :k] = pseudoinverse(x[..., :k], y)[..., 0]
        found.append(np.sum(s * (fit - offset) ** 2, -1))
    return found
