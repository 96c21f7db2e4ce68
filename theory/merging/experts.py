"""Computes the risk of merged experts that are fitted to data, and of training on pooled data.

Task t has a teacher beta_t, inputs N(0, Sigma_t), and n_t samples with labels x.beta_t + sigma_t
noise. Its risk is |b - beta_t|^2 in the norm of Sigma_t, so Sigma_t is the curvature of its loss.
Curvatures are any matrices, without a common eigenbasis. Expert t minimises

    |y_t - X_t b|^2 / n_t + ridge_t |b|^2.

A merge is sum_t W_t b_t, with a number or a matrix W_t for each task. Pooled training minimises
|y - X b|^2 / N + ridge |b|^2 over all N samples. The risk of one model for all tasks is the mean of
their risks. It is a floor plus the excess |b - best|^2 in the norm of the mean curvature, with

    best = (sum_t Sigma_t)^-1 sum_t Sigma_t beta_t.

With weights W_t proportional to X_t^T X_t + n_t ridge_t the merge is pooled training, for all data:
both solve sum_t (X_t^T X_t + n_t ridge_t) b = sum_t X_t^T y_t. `sail_jax.methods.regmean` computes
this merge. Weights that do not depend on the experts' data are compared with it here.
docs/explanation/merging_experts.md has the derivations.

An example in numbers: d = 10, four tasks of 40 samples each, one curvature, sigma = 1. An expert
has the risk 10 / 29 = .345 on its task. Averaged experts have the excess .345 / 4 = .086, and
pooled training .067 if all teachers are equal. Averaging is better than pooled training if the
spread of the teachers exceeds .350 (`spread_boundary`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.deep_linear import covariance, sources

STEPS = 1000  # of the solver; Newton's method takes about ten
ROUNDING = 1e-9  # of df1 / n, where a penalty is 0


@dataclass(frozen=True, eq=False)
class RegressionTasks:
    """Linear regressions, each with its own teacher, curvature and data.

    Raises a ValueError if shapes do not conform or numbers are out of range.

    Attributes:
      curvatures: The covariance of each task's inputs `(T, d, d)`, positive definite.
      teachers: The teacher of each task, `(T, d)`.
      samples: The number of samples of each task `(T,)`, or one number for all; whole, >= 1.
      sigma: The standard deviation of each task's label noise `(T,)`, or one for all; >= 0.

    >>> tasks = RegressionTasks([np.eye(2), np.diag([1.0, 3.0])], [[1.0, 0.0], [1.0, 4.0]], 9, 0.5)
    >>> tasks.best.tolist(), tasks.floor
    ([1.0, 3.0], 6.0)
    """

    curvatures: Any
    teachers: Any
    samples: Any
    sigma: Any

    def __post_init__(self) -> None:
        teachers = np.asarray(self.teachers, float)
        if teachers.ndim != 2 or not teachers.size:
            raise ValueError(f"teachers must be (tasks, d); got {teachers.shape}")
        tasks, d = teachers.shape
        shapes = {"curvatures": (tasks, d, d), "teachers": (tasks, d)}
        for name in ("samples", "sigma"):
            shapes[name] = (tasks,) if np.ndim(getattr(self, name)) else ()
        for name, shape in shapes.items():
            value = np.asarray(getattr(self, name), float)
            if value.shape != shape:
                raise ValueError(f"{name} must have shape {shape}; got {value.shape}")
            problems.check_squares(name, value)
            full = np.broadcast_to(value, (tasks,)) if len(shape) < 2 else value
            object.__setattr__(self, name, full)
        whole = lambda n: (n >= 1) & (n == np.round(n))  # noqa: E731
        problems.check("samples", self.samples, whole, "whole numbers >= 1")
        problems.check_sigma(self.sigma)
        for t, curvature in enumerate(self.curvatures):
            values = np.linalg.eigvalsh(curvature)
            if np.abs(curvature - curvature.T).max() > 1e-6 * values[-1] or values[0] <= 0:
                raise ValueError(
                    f"curvatures[{t}] must be symmetric and positive definite; its eigenvalues run "
                    f"from {values[0]:g} to {values[-1]:g}"
                )

    @property
    def curvature(self) -> np.ndarray:
        """The mean curvature `(d, d)`."""
        return self.curvatures.mean(0)

    @property
    def best(self) -> np.ndarray:
        """The model `(d,)` with the smallest mean risk."""
        pulls = np.einsum("tij,tj->i", self.curvatures, self.teachers)
        return np.linalg.solve(self.curvatures.sum(0), pulls)

    @property
    def floor(self) -> float:
        """The mean risk of the best model."""
        return float(_squares(self.best - self.teachers, self.curvatures).mean())

    @property
    def common(self) -> bool:
        """Whether all curvatures are equal."""
        return bool(np.allclose(self.curvatures, self.curvatures[0], rtol=1e-6, atol=0))


@problems.in_float64
def expert_fits(
    tasks: RegressionTasks, ridge: Float[ArrayLike, " T"] | float | None = None
) -> list[sources.Fit]:
    """Computes the mean and the covariance of each expert over its data.

    Args:
      tasks: The tasks.
      ridge: The penalty of each expert, or one for all, >= 0; the moments are then the limits of
        large n and d (`sources.ridge_fit`). None is least squares without a penalty, whose moments
        are exact, for n_t >= d + 2.

    Returns:
      The moments, one for each task.

    Raises:
      ValueError: If a penalty is negative, or it is None and a task has fewer samples.
    """
    rows = zip(tasks.curvatures, tasks.teachers, tasks.samples, tasks.sigma, strict=True)
    if ridge is None:
        least = tasks.teachers.shape[1] + 2
        problems.check("samples", tasks.samples, lambda n: n >= least, f">= d + 2 = {least}")
        return [
            sources.wishart_fit(jnp.asarray(b), n=int(n), sigma=s, inputs=jnp.asarray(c))
            for c, b, n, s in rows
        ]
    ridges = np.broadcast_to(np.asarray(ridge, float), tasks.samples.shape)
    return [
        sources.ridge_fit(jnp.asarray(c), jnp.asarray(b), n=n, sigma=s, ridge=r)
        for (c, b, n, s), r in zip(rows, ridges, strict=True)
    ]


@problems.defined
def curvature_weights(tasks: RegressionTasks) -> Float[np.ndarray, "T d d"]:
    """Computes the weights (sum_s Sigma_s)^-1 Sigma_t of the tasks' own curvatures.

    They are the only weights with which unbiased experts have no bias for all teachers. RegMean
    has these weights if its Gram matrices come from many samples that no expert was fitted to.

    Args:
      tasks: The tasks.

    Returns:
      The weights, which sum to the identity.
    """
    return np.linalg.solve(tasks.curvatures.sum(0), tasks.curvatures)


@problems.in_float64
def merge_excess(
    tasks: RegressionTasks, fits: Sequence[sources.Fit], weights: Float[ArrayLike, "T ..."]
) -> Array:
    """Computes the mean excess risk of a merge whose weights do not depend on the experts' data.

        |sum_t W_t m_t - best|^2 + sum_t tr(H W_t C_t W_t^T)

    in the norm of the mean curvature H, for experts of mean m_t and covariance C_t.

    Args:
      tasks: The tasks.
      fits: The moments of the experts, as from `expert_fits`.
      weights: A number `(T,)` or a matrix `(T, d, d)` for each task. 1/T is the average, and
        scale is task arithmetic.

    Returns:
      The excess.

    Raises:
      ValueError: If shapes do not conform.

    >>> tasks = RegressionTasks([np.eye(10)] * 4, np.zeros((4, 10)), samples=40, sigma=1.0)
    >>> round(float(merge_excess(tasks, expert_fits(tasks), np.full(4, 0.25))), 3)
    0.086
    """
    a, d = np.asarray(weights, float), tasks.teachers.shape[1]
    count = len(tasks.teachers)
    if a.shape not in ((count,), (count, d, d)) or len(fits) != count:
        raise ValueError(
            f"weights must be {(count,)} or {(count, d, d)}, with as many fits; got {a.shape} and "
            f"{len(fits)} fits"
        )
    full = a[:, None, None] * np.eye(d) if a.ndim == 1 else a
    mean = sum(w @ np.asarray(fit.mean) for w, fit in zip(full, fits, strict=True))
    left = [w @ np.asarray(fit.covariance) @ w.T for w, fit in zip(full, fits, strict=True)]
    return jnp.asarray(
        _squares(mean - tasks.best, tasks.curvature) + np.sum(tasks.curvature * sum(left))
    )


@problems.in_float64
def pooled_excess(tasks: RegressionTasks, ridge: float = 0.0) -> Array:
    """Computes the mean excess risk of training on the pooled data, for large n and d.

    Let Q = (sum_t n_t Sigma_t / mu_t + N ridge)^-1, where mu_t = 1 + tr(Sigma_t Q). The mean of the
    fit is m = Q sum_t n_t Sigma_t beta_t / mu_t. It varies as if each task had the noise of its own
    error on new data, R_t + sigma_t^2. The risks R_t therefore solve the linear equations

        R_t = |m - beta_t|^2_t + sum_s n_s / mu_s^2 tr(Sigma_t Q Sigma_s Q) (R_s + sigma_s^2).

    Args:
      tasks: The tasks.
      ridge: The penalty, >= 0; positive unless N > d.

    Returns:
      The excess of the mean of the R_t.

    Raises:
      ValueError: If the penalty is negative, or 0 with N <= d.
    """
    problems.check_ridge(ridge)
    count, d = tasks.teachers.shape
    total = tasks.samples.sum()
    if ridge == 0 and total <= d:
        raise ValueError(f"ridge must be > 0 where N <= d; got N = {total:g}, d = {d}")
    penalty = total * ridge * np.eye(d)
    mu, (_, Q, spread) = _solved(tasks, penalty)
    pulls = np.einsum("t,tij,tj->i", tasks.samples / mu, tasks.curvatures, tasks.teachers)
    missed = _squares(Q @ pulls - tasks.teachers, tasks.curvatures)
    risks = np.linalg.solve(np.eye(count) - spread, missed + spread @ tasks.sigma**2)
    return jnp.asarray(risks.mean() - tasks.floor)


@problems.in_float64
def pooled_least_squares(tasks: RegressionTasks) -> Array:
    """Computes the mean excess risk of pooled least squares for one curvature, exactly.

    Let delta_t = beta_t - best, N = sum_t n_t >= d + 2, and <., .> be the product of the curvature.
    With n = (n_1, ..., n_T), D = diag(n) and k = 2 + (N d - 2) / (N - d - 1), the excess is

        sum_st [k (N D - n n^T) / (N + 2) + n n^T - D]_st <delta_s, delta_t> / (N (N - 1))
            + sum_t sigma_t^2 n_t d / (N (N - d - 1)).

    Args:
      tasks: The tasks, with one curvature.

    Returns:
      The excess.

    Raises:
      ValueError: If curvatures differ, or N < d + 2.

    >>> tasks = RegressionTasks([np.eye(10)] * 4, np.zeros((4, 10)), samples=40, sigma=1.0)
    >>> round(float(pooled_least_squares(tasks)), 3)
    0.067
    """
    if not tasks.common:
        raise ValueError("curvatures must be equal; `pooled_excess` has the limit for others")
    n, d = tasks.samples, tasks.teachers.shape[1]
    total = n.sum()
    problems.check("N", total, lambda m: m >= d + 2, f"at least d + 2 = {d + 2} samples")
    delta = tasks.teachers - tasks.best
    products = delta @ tasks.curvatures[0] @ delta.T
    outer, diagonal = np.outer(n, n), np.diag(n)
    # E U B U of a matrix-variate beta U, and E tr G tr G^-1 of the Gram matrix G.
    factor = 2 + (total * d - 2) / (total - d - 1)
    seen = factor * (total * diagonal - outer) / (total + 2) + outer - diagonal
    noise = np.sum(tasks.sigma**2 * n) * d / (total * (total - d - 1))
    return jnp.asarray(np.sum(seen * products) / (total * (total - 1)) + noise)


@problems.in_float64
def spread_boundary(*, n: ArrayLike, d: ArrayLike, tasks: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the spread of teachers above which averaging is better than pooled training.

    Both are least squares, with one curvature and n samples for each task. The spread is the
    variance of the teachers, sum_t |beta_t - mean|^2 / (T - 1) in the norm of the curvature. With
    N = T n, the boundary is

        sigma^2 d / (n - d - 1) / (1 - 2 [(d + 3) N - 2 (d + 1)] / [(d + 1) (N - 1) (N + 2)]).

    The first factor is the risk of an expert on its own task. The second tends to 1 as N grows.

    Args:
      n: Number of samples of each task, >= d + 2.
      d: Dimension, >= 1.
      tasks: Number of tasks T, >= 2.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The boundary, with the broadcast shape of the arguments. It is exact.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(spread_boundary(n=40, d=10, tasks=4, sigma=1.0)), 3)
    0.35
    """
    problems.check("d", d, lambda x: (x >= 1) & (x < np.inf), "a finite dimension >= 1")
    problems.check("n", n, lambda x: x >= np.asarray(d) + 2, ">= d + 2")
    problems.check("n", n, lambda x: x < np.inf, "finite")
    problems.check("tasks", tasks, lambda x: (x >= 2) & (x < np.inf), "a finite number >= 2")
    problems.check_sigma(sigma)
    n, d, tasks, sigma = (jnp.asarray(v, float) for v in (n, d, tasks, sigma))
    total = tasks * n
    loss = 2 * ((d + 3) * total - 2 * (d + 1)) / ((d + 1) * (total - 1) * (total + 2))
    return sigma**2 * d / (n - d - 1) / (1 - loss)


class Compared(NamedTuple):
    """Risks at one effective ridge, with its shape.

    Attributes:
      average: The mean excess of averaged experts.
      scaled: The same at the best scale of the average.
      scale: This scale.
      pooled: The mean excess of pooled training.
      expert: The mean risk of experts, each on its own task.
      model: The mean risk of pooled training over all tasks, with the floor.
      share: df2 / N. The average's excess minus the pooled one is share * (expert - model).
    """

    average: Array
    scaled: Array
    scale: Array
    pooled: Array
    expert: Array
    model: Array
    share: Array


@problems.in_float64
def compared(
    eigenvalues: Float[ArrayLike, " d"],
    shared2: Float[ArrayLike, " d"],
    spread2: Float[ArrayLike, " d"],
    *,
    n: float,
    tasks: int,
    sigma: float,
    kappa: ArrayLike,
) -> Compared:
    """Compares averaged experts with pooled training at one effective ridge, for large n and d.

    All tasks have one curvature and n samples. An expert has the effective ridge kappa if its
    penalty is kappa (1 - df1 / n), with df1 = sum_i s_i / (s_i + kappa). For pooled training it is
    kappa (1 - df1 / N). To pooled training, the spread of the teachers is noise.

    Args:
      eigenvalues: Eigenvalues s of the curvature, > 0 where kappa is 0.
      shared2: Squared components of the mean teacher in the eigenbasis.
      spread2: Variances of the teachers' components over the tasks, with T - 1.
      n: Number of samples of each task, > 0.
      tasks: Number of tasks T, >= 1.
      sigma: Standard deviation of the label noise.
      kappa: The effective ridges, >= 0.

    Returns:
      The risks, with the shape of kappa. They are inf where the penalty would be negative.

    Raises:
      ValueError: If an argument is out of range.
    """
    s = covariance.check_spectrum(eigenvalues)
    shared2, spread2, kappa = (jnp.asarray(v, float) for v in (shared2, spread2, kappa))
    covariance.check_vectors(s, shared2=shared2, spread2=spread2)
    problems.check("kappa", kappa, lambda k: (k >= 0) & (k < np.inf), "finite and >= 0")
    problems.check("n", n, lambda x: (x > 0) & (x < np.inf), "a finite number of samples > 0")
    problems.check("tasks", tasks, lambda x: (x >= 1) & (x < np.inf), "a finite number >= 1")
    problems.check_sigma(sigma)
    own2 = (1 - 1 / tasks) * spread2
    floor = jnp.sum(s * own2)
    learned = s / (s + kappa[..., None])
    share = jnp.sum(learned**2, -1) / (tasks * n)

    def risk(count: float, offset2: Array, noise: ArrayLike) -> Array:
        left = 1 - learned.sum(-1) / count
        samples = jnp.broadcast_to(jnp.asarray(count, float), kappa.shape)
        at = covariance.Equivalent(s, samples, kappa, jnp.maximum(kappa * left, 0.0))
        return jnp.where(left >= -ROUNDING, at.risk(offset2, noise), jnp.inf)

    expert = risk(n, shared2 + own2, sigma)
    pooled = risk(tasks * n, shared2, jnp.sqrt(sigma**2 + floor))
    noise = share * (expert + sigma**2)
    average = jnp.sum(s * (1 - learned) ** 2 * shared2, -1) + noise
    product, square = (jnp.sum(s * learned**k * shared2, -1) for k in (1, 2))
    # Without a mean teacher, the best scale is 0.
    scale = jnp.where(product > 0, product / jnp.where(product > 0, square + noise, 1.0), 0.0)
    scaled = jnp.sum(s * shared2) - scale * product
    return Compared(average, scaled, scale, pooled, expert, pooled + floor, share)


def _solved(tasks: RegressionTasks, penalty: np.ndarray) -> tuple[np.ndarray, tuple]:
    """Solves mu_t = 1 + tr(Sigma_t Q) from below.

    The right side grows with mu and is concave, so repeated substitution converges. Newton's method
    is faster where its step goes further in the same direction; below the root it may not.
    """
    mu = np.ones(len(tasks.samples))
    for _ in range(STEPS):
        found = right, _, slope = _right(tasks, penalty, mu)
        plain = right - mu
        if np.all(abs(plain) <= 1e-14 * mu):
            break
        newton = np.linalg.solve(np.eye(mu.size) - slope, plain)
        further = newton * np.sign(plain) >= abs(plain)
        mu = mu + (newton if further.all() and np.all(mu + newton >= 1) else plain)
    return mu, found


def _right(
    tasks: RegressionTasks, penalty: np.ndarray, mu: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes 1 + tr(Sigma_t Q), Q, and the slopes n_s / mu_s^2 tr(Sigma_t Q Sigma_s Q)."""
    Q = np.linalg.inv(np.einsum("t,tij->ij", tasks.samples / mu, tasks.curvatures) + penalty)
    seen = Q @ tasks.curvatures
    slope = np.einsum("tij,sji->ts", seen, seen) * tasks.samples / mu**2
    return 1 + np.trace(seen, axis1=1, axis2=2), Q, slope


def _squares(vectors: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Computes v.M v for the last axes."""
    return np.einsum("...i,...ij,...j->...", vectors, matrices, vectors)
