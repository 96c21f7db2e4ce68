"""Moments of experts on quadratic tasks, step by step, and the stated bounds, in NumPy.

Searches confirm their findings with this code, which is independent of `quadratic` and `bounds`.
"""

from typing import Any

import numpy as np

from theory.merging.tasks import QuadraticTasks


class Followed:
    """First and second moments of experts, followed step by step.

    An expert is kept * start + pull * (mean of its data) + noise.

    Args:
      tasks: The testbed.
    """

    def __init__(self, tasks: QuadraticTasks):
        names = ("curvature", "centres", "noise", "samples", "steps", "batch", "weights", "start")
        values = (np.asarray(getattr(tasks, name), float) for name in names)
        self.h, self.c, s, self.n, self.k, self.b, self.w, self.start = values
        self.s2, self.rate, self.tasks = s**2, float(tasks.rate), len(self.n)
        u = self.rate * self.h
        shape = self.c.shape
        self.kept, self.pull = np.ones(shape), np.zeros(shape)
        self.memory, self.noise = np.zeros(shape), np.zeros(shape)
        for i in range(self.tasks):
            drawn = self.s2 * (1 - 1 / self.n[i]) / self.b[i]  # variance of a batch
            for _ in range(int(self.k[i])):
                self.kept[i] *= 1 - u
                self.pull[i] = (1 - u) * self.pull[i] + u
                self.memory[i] = (1 - u) ** 2 * self.memory[i] + u**2
                self.noise[i] = (1 - u) ** 2 * self.noise[i] + u**2 * drawn

    # --- what is measured

    def square(self, start: Any, data: Any, noise: Any) -> Any:
        """Computes the mean square of a combination of start, means of the data and noises.

        Args:
          start: Coefficient of the start, `(d,)` or a number.
          data: Coefficients of the means of the data, `(N, d)` or `(N, 1)`.
          noise: Coefficients of the noises, likewise.

        Returns:
          The mean squares `(d,)`.
        """
        mean = start * self.start + np.sum(data * self.c, 0)
        data2 = np.broadcast_to(np.square(data), self.c.shape)
        own = data2 * (self.s2 / self.n)[:, None] + np.square(noise) * self.noise
        return mean**2 + own.sum(0)

    def merged(self, less: Any = 0.0) -> Any:
        """Computes the mean square of the merged model minus a combination of means of the data.

        Args:
          less: The combination, one number per task.

        Returns:
          The mean squares `(d,)`.
        """
        w = self.w[:, None]
        less = np.reshape(np.broadcast_to(less, self.tasks), (-1, 1))
        return self.square((w * self.kept).sum(0), w * self.pull - less, w)

    @property
    def even(self) -> np.ndarray:
        """Returns 1/N for each task."""
        return np.full(self.tasks, 1 / self.tasks)

    def empirical(self, squares: Any) -> float:
        """Computes f from the mean squares of the distances to the means of the data."""
        inner = self.s2 * (1 - 1 / self.n)[:, None]
        return float(np.mean(np.sum(self.h * (squares + inner), 1)) / 2)

    @property
    def risk(self) -> float:
        """Computes F at the merged model."""
        total = 0.0
        for centre in self.c:
            mean = (self.w[:, None] * (self.kept * self.start + self.pull * self.c)).sum(0) - centre
            w2 = self.w[:, None] ** 2
            own = (w2 * (self.pull**2 * (self.s2 / self.n)[:, None] + self.noise)).sum(0)
            total += float(np.sum(self.h * (mean**2 + own + self.s2))) / 2
        return total / self.tasks

    @property
    def generalisation(self) -> float:
        """Computes F - f at the merged model."""
        return self.risk - self.empirical([self.merged(e) for e in np.eye(self.tasks)])

    @property
    def excess(self) -> float:
        """Computes F at the merged model minus the minimum of f."""
        units = np.eye(self.tasks)[:, :, None]
        best = [self.square(0.0, self.even[:, None] - e, 0.0) for e in units]
        return self.risk - self.empirical(best)

    @property
    def gradient(self) -> float:
        """Computes |grad f|^2 at the merged model."""
        return float(np.sum(self.h**2 * self.merged(self.even)))

    @property
    def surrogate(self) -> float:
        """Computes |grad f~|^2 at the merged model."""
        return float(np.sum(self.h**2 * self.merged(self.w)))

    @property
    def sample_gradient(self) -> float:
        """Averages |grad l|^2 over all samples, at the merged model."""
        inner = self.s2 * (1 - 1 / self.n)
        each = [np.sum(self.h**2 * self.merged(e)) for e in np.eye(self.tasks)]
        return float(np.mean(np.array(each) + inner * np.sum(self.h**2)))

    @property
    def start_gradient(self) -> float:
        """Computes |grad f~|^2 at the start."""
        return float(np.sum(self.h**2 * self.square(1.0, -self.w[:, None], 0.0)))

    @property
    def gap(self) -> float:
        """Computes f~ at the start minus its minimum."""
        return float(np.sum(self.h * self.square(1.0, -self.w[:, None], 0.0))) / 2

    @property
    def local(self) -> np.ndarray:
        """Computes an expert's change if one sample is replaced. The sample has a weight c / b in
        each step, with c binomial (b, 1/n).
        """
        n, b = self.n[:, None], self.b[:, None]
        return 2 * self.s2 * (self.pull**2 / n**2 + self.memory * (1 - 1 / n) / (n * b)).sum(1)

    @property
    def stability(self) -> float:
        """Computes the merged model's change, as a mean over the tasks."""
        return float(np.mean(self.w**2 * self.local))

    # --- the constants and the bounds

    @property
    def smoothness(self) -> float:
        """L."""
        return float(self.h.max())

    @property
    def pl(self) -> float:
        """C."""
        return float(1 / (2 * self.h.min()))

    @property
    def variance(self) -> np.ndarray:
        """sigma_i^2."""
        return self.s2 * (1 - 1 / self.n) * np.sum(self.h**2)

    @property
    def zeta2(self) -> np.ndarray:
        """zeta_i^2."""
        units = np.eye(self.tasks)[:, :, None]
        apart = [self.square(0.0, e - self.even[:, None], 0.0) for e in units]
        return np.sum(self.h**2 * np.array(apart), 1)

    @property
    def weighted_zeta2(self) -> float:
        """sum_i w_i zeta_i^2."""
        return float(self.w @ self.zeta2)

    @property
    def local_bound(self) -> np.ndarray:
        """Computes the corrected bound of `local`."""
        first = (self.rate * self.k) ** 2 / (self.n * (self.n - 1))
        return 2 * self.variance * (first + self.rate**2 * self.k / (self.b * self.n))

    @property
    def local_printed(self) -> np.ndarray:
        """Computes the printed bound of `local`."""
        each = self.variance / self.n + 3 * self.b * self.zeta2 / self.n
        return 16 * self.k * self.rate**2 * each

    @property
    def stability_bound(self) -> float:
        """Computes the corrected bound of `stability`."""
        return float(np.mean(self.w**2 * self.local_bound))

    @property
    def surrogate_bound(self) -> float:
        """Computes the corrected bound of `surrogate`."""
        left = (1 - self.rate * self.h.min()) ** (2 * self.k.min())
        noise = self.rate * self.smoothness * float(np.sum(self.w**2 * self.variance / self.b))
        return float(left * (2 * self.smoothness * self.gap + self.weighted_zeta2) + noise)

    def surrogate_printed(self, coefficient: float) -> float:
        """Computes eps_sgd as printed.

        Args:
          coefficient: The coefficient of its last term.

        Returns:
          The bound.
        """
        noise = self.variance.max() / self.b.min()
        given = self.smoothness, self.gap, noise, self.zeta2.max()
        return epsilon_sgd(*given, self.k, self.w, coefficient)

    @property
    def excess_bound(self) -> float:
        """Computes the corrected bound of `excess`, at the best gamma."""
        chi2 = np.sum(self.even**2 / self.w) - 1
        gradient = 2 * self.surrogate_bound + 2 * chi2 * self.weighted_zeta2
        sample, S = gradient + np.mean(self.zeta2 + self.variance), self.stability_bound
        return float(self.smoothness / 2 * S + np.sqrt(S * sample) + self.pl * gradient)

    @property
    def excess_printed(self) -> float:
        """Computes the printed bound of `excess`."""
        chi = np.sum((self.even - self.w) ** 2 / self.w**2)
        B = chi * self.weighted_zeta2 + (chi + 1) * self.surrogate_printed(5.0)
        S = float(self.w @ self.local_printed) / (16 * self.rate**2)
        return float(8 * (self.smoothness + 1) * self.rate**2 * S + (2 * self.pl + 1) * B)

    def lemma_1(self, square: float, of_optimisation: bool) -> float:
        """Computes the right side of Lemma 1, or of eq. (5), at the best gamma."""
        rest = self.pl * self.gradient if of_optimisation else 0.0
        return float(self.smoothness / 2 * self.stability + np.sqrt(square * self.stability) + rest)


def epsilon_sgd(
    smoothness: float,
    gap: float,
    noise: float,
    zeta2: float,
    steps: np.ndarray,
    weights: np.ndarray,
    coefficient: float = 5.0,
) -> float:
    """Computes eps_sgd of eq. (6) as printed.

    Args:
      smoothness: L.
      gap: f~ at the start minus its minimum.
      noise: sigma^2 / b.
      zeta2: zeta^2.
      steps: K_i of each task.
      weights: w_i of each task.
      coefficient: The coefficient of the last term.

    Returns:
      The bound.
    """
    N, mean = len(steps), steps.mean()
    root = np.sqrt(N * mean)
    terms = (
        4 * gap / root,
        4 * smoothness * noise * N * np.sum(mean / steps * weights**2) / root,
        6 * N * smoothness**2 * noise * np.sum(weights * (steps - 1)) / mean,
        coefficient * N * smoothness**2 * zeta2 * np.max(steps * (steps - 1)) / mean,
    )
    return float(sum(terms))
