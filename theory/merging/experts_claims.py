"""Experts fitted to data: which merges are pooled training, and when averaging is better.

The simulators draw samples, fit experts and pooled models by normal equations, and measure mean
risks (`experts_simulation`). Curvatures have no common eigenbasis unless a claim says so.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax import methods
from theory.claims import Estimate, Simulate, generator, measured, once
from theory.deep_linear.regressions import extrapolate
from theory.deep_linear.several import Inputs
from theory.merging import experts
from theory.merging.experts import RegressionTasks
from theory.merging.experts_simulation import FittedExperts, fit_experts, least_risk, mean_risks
from theory.merging.testbeds import claim

SOURCE = "Theorem 3 (Section IV), beyond: experts fitted to data, against pooled training"
BLOCKS, SMALL, TIMES = 4, 16, 3  # limits are extrapolated from d = 16 and 48


class Problem(NamedTuple):
    """Three tasks in any dimension d, a multiple of 4.

    Each curvature has four eigenvalues. From task to task, eigenvectors are rotated at random
    ("rotated"), not at all ("one"), or by 60 degrees in planes ("turned").

    Attributes:
      loads: Samples per dimension of each task.
      sigma: Standard deviations of the label noise.
      own: Size of a teacher's own part. The part that all teachers share has the norm 1.
      curvatures: How curvatures differ.
    """

    loads: tuple[float, ...]
    sigma: tuple[float, ...]
    own: float
    curvatures: Literal["rotated", "one", "turned"] = "rotated"

    def tasks(self, d: int) -> RegressionTasks:
        """Makes the tasks.

        Args:
          d: The dimension.

        Returns:
          The tasks.
        """
        rng, curvatures, teachers = np.random.default_rng(5), [], []
        for _ in self.loads:
            turn = np.linalg.qr(rng.standard_normal((BLOCKS, BLOCKS)))[0]
            curvatures.append(turn * [2.0, 1.0, 0.5, 0.1] @ turn.T)
            part = rng.standard_normal(BLOCKS)
            teachers.append(0.5 + self.own * part / np.linalg.norm(part))
        if self.curvatures == "one":
            curvatures = curvatures[:1] * len(self.loads)
        elif self.curvatures == "turned":
            turns = np.pi / 3 * np.arange(len(self.loads))
            curvatures = [Inputs((2.0, 1.0, 0.5, 0.1), turn).covariance(BLOCKS) for turn in turns]
        # Entries that belong to one block are equal, so norms do not depend on d.
        size = d // BLOCKS
        full = np.kron(np.stack(curvatures), np.eye(size))
        spread = np.repeat(teachers, size, 1) / np.sqrt(size)
        samples = np.round(np.array(self.loads) * d)
        return RegressionTasks(full, spread, samples, self.sigma)


# --- what is pooled training ----------------------------------------------------------------------


def _apart(ridge: float, samples: tuple[int, ...], d: int = 5) -> float:
    """Merges experts of one data set by RegMean, and returns the distance to pooled training."""
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((n, d)) @ rng.standard_normal((d, d)), n) for n in samples]
    data = [(x, x @ rng.standard_normal(d) + rng.standard_normal(n)) for x, n in data]

    def fit(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
        """Solves for the fit, of least norm without a penalty."""
        whole = np.concatenate([x, np.sqrt(penalty) * np.eye(d)])
        return np.linalg.pinv(whole) @ np.concatenate([y, np.zeros(d)])

    models = [{"w": fit(x, y, len(y) * ridge)[:, None]} for x, y in data]
    grams = [{"w": jnp.asarray(x.T @ x + len(y) * ridge * np.eye(d))} for x, y in data]
    merge = methods.regmean(grams=grams, off_diagonal=1.0, damping=1e-14)
    inputs, labels = (np.concatenate(part) for part in zip(*data, strict=True))
    pooled = fit(inputs, labels, sum(samples) * ridge)
    return float(np.abs(np.asarray(merge(models)["w"])[:, 0] - pooled).max())


@claim(
    "experts-regmean-{name}/ours",
    each=(
        ("ridge", "With ridge experts, RegMean with the Gram matrices X_tᵀX_t + n_t ridge", 0.3),
        ("least-norm", "With experts of least norm, RegMean with the Gram matrices X_tᵀX_t", 0.0),
    ),
)
def _(name, text, ridge, samples=(3, 4, 9)):
    """{text} is pooled training, for all data

    Both solve Σ(X_tᵀX_t + n_t ridge) b = Σ X_tᵀy_t. RegMean's damping is 1e-14, which sets the
    tolerance.

    Source: {SOURCE}
    Domain: one data set, d=5, n_t={samples}, ridge {ridge:g}; the merge by sail_jax.methods
    """
    return 0.0, measured(lambda: _apart(ridge, samples), 1e-9)


# --- merges with weights that are fixed, exactly --------------------------------------------------

FIXED = Problem((3.0, 4.0, 5.0), (0.5, 1.0, 0.7), 0.8)
FEW = 8


@once
def _fixed(key: Array, quick: bool) -> FittedExperts:
    return fit_experts(key, FIXED.tasks(FEW), 3_000 if quick else 30_000)


def _merged(tasks: RegressionTasks, weights: np.ndarray, fitted: FittedExperts) -> np.ndarray:
    """Measures the excess of a merge on each draw."""
    models = fitted.experts
    if weights.ndim == 1:
        merged = np.einsum("t,ntd->nd", weights, models)
    else:
        merged = np.einsum("tij,ntj->ni", weights, models)
    return mean_risks(tasks, merged) - least_risk(tasks)


@claim(
    "experts-merge-{name}/ours",
    draws="unified-merging/experts-merge",
    each=(
        ("average", "the average", lambda tasks: np.full(3, 1 / 3)),
        ("arithmetic", "task arithmetic of scale .5", lambda tasks: np.full(3, 0.5)),
        ("curvature", "weights (ΣΣ_s)⁻¹Σ_t", experts.curvature_weights),
    ),
)
def _(name, text, weights):
    """The mean excess of {text} is |Σ W_t β_t - β*|²_H + Σ σ_t² tr(H W_t Σ_t⁻¹ W_tᵀ)/(n_t - d - 1)

    Experts are least squares. H is the mean curvature, and β* the best single model.

    Source: {SOURCE}
    Domain: three curvatures without a common eigenbasis, d={FEW}; n_t=24, 32, 40; σ_t=.5, 1, .7
    """
    tasks = FIXED.tasks(FEW)
    at = np.asarray(weights(tasks))
    predicted = experts.merge_excess(tasks, experts.expert_fits(tasks), at)
    return predicted, lambda *how: Estimate.mean(_merged(tasks, at, _fixed(*how)))


EQUAL = Problem((4.0,) * 3, (0.8,) * 3, 0.8)


@claim("experts-curvature-any/ours")
def _(d=FEW):
    """With weights (ΣΣ_s)⁻¹Σ_t, equal n and σ, the mean excess is σ²d/(T(n - d - 1)), whatever the
    curvatures and teachers

    Source: {SOURCE}
    Domain: three curvatures without a common eigenbasis, d={d}, n=32, σ=.8
    """
    tasks = EQUAL.tasks(d)
    n, sigma = tasks.samples[0], tasks.sigma[0]

    def simulate(key: Array, quick: bool) -> Estimate:
        fitted = fit_experts(key, tasks, 3_000 if quick else 30_000)
        return Estimate.mean(_merged(tasks, experts.curvature_weights(tasks), fitted))

    return sigma**2 * d / (3 * (n - d - 1)), simulate


@claim("experts-curvature-loss/ours")
def _(d=FEW, spread=0.7):
    """For teachers with own parts of covariance Δ, their average has the mean excess
    Σ tr((Σ_t - H) H⁻¹ (Σ_t - H) Δ)/T², however many samples there are

    Δ is not diagonal.

    Source: {SOURCE}
    Domain: three curvatures without a common eigenbasis, d={d}; the teachers themselves are merged
    """
    tasks = FIXED.tasks(d)
    root = spread * (np.eye(d) + np.ones((d, d)) / d)
    off = tasks.curvatures - tasks.curvature
    seen = off @ np.linalg.solve(tasks.curvature, off)

    def simulate(key: Array, quick: bool) -> Estimate:
        """Solves for the best model of each draw, and compares the risk of the average."""
        rng, draws = generator(key), 2_000 if quick else 20_000
        teachers = rng.standard_normal((draws, 1, d)) + rng.standard_normal((draws, 3, d)) @ root.T
        rows = np.linalg.cholesky(tasks.curvatures).swapaxes(1, 2)
        design, targets = np.concatenate(rows), np.einsum("tij,ntj->tin", rows, teachers)
        targets = targets.reshape(-1, draws)
        best = np.linalg.lstsq(design, targets)[0]
        average, least = (
            np.sum((design @ models - targets) ** 2, 0) / 3 for models in (teachers.mean(1).T, best)
        )
        return Estimate.mean(average - least)

    return np.einsum("tij,ji->", seen, root @ root.T) / 9, simulate


# --- averaging or pooled training, exactly for one curvature --------------------------------------

UNEQUAL = Problem((0.5, 1.0, 2.5), (0.5, 1.0, 0.7), 1.0, "one")


@claim("experts-pooled/ours")
def _(d=4):
    """For one curvature the mean excess of pooled least squares is a quadratic form in the
    differences of teachers, plus Σ σ_t² n_t d/(N(N - d - 1))

    The form has the second moments of matrix-variate beta variables.

    Source: {SOURCE}
    Domain: one curvature, d={d}; n_t=2, 4, 10; σ_t=.5, 1, .7
    """
    tasks = UNEQUAL.tasks(d)

    def simulate(key: Array, quick: bool) -> Estimate:
        pooled = fit_experts(key, tasks, 8_000 if quick else 80_000, ridge=1.0).pooled
        return Estimate.mean(mean_risks(tasks, pooled) - least_risk(tasks))

    return experts.pooled_least_squares(tasks), simulate


@claim("experts-boundary-{T}/ours", each=((2,), (5,)))
def _(T, n=11, d=4, sigma=0.8):
    """Averages of {T} experts and pooled least squares have the same risk if the teachers' spread
    is σ²d/(n - d - 1) / (1 - 2[(d+3)N - 2(d+1)]/[(d+1)(N-1)(N+2)])

    The difference is a share of the average's excess. The test detects .05.

    Source: {SOURCE}
    Domain: one curvature, d={d}, n={n}, σ={sigma}
    """
    rng = np.random.default_rng(7)
    root, parts = rng.standard_normal((2 * d, d)), rng.standard_normal((T, d))
    curvature = root.T @ root / (2 * d)
    unit = RegressionTasks([curvature] * T, parts, n, sigma)
    spread = float(unit.floor) * T / (T - 1)
    size = np.sqrt(float(experts.spread_boundary(n=n, d=d, tasks=T, sigma=sigma)) / spread)
    tasks = RegressionTasks([curvature] * T, size * parts, n, sigma)

    def simulate(key: Array, quick: bool) -> Estimate:
        fitted = fit_experts(key, tasks, 4_000 if quick else 40_000)
        average = mean_risks(tasks, fitted.experts.mean(1))
        unit = sigma**2 * d / (T * (n - d - 1))
        return Estimate.mean((mean_risks(tasks, fitted.pooled) - average) / unit)

    return 0.0, simulate


# --- limits ---------------------------------------------------------------------------------------


def _extrapolated(
    problem: Problem, measure: Callable[[RegressionTasks, FittedExperts], np.ndarray], **ridges: Any
) -> Simulate:
    """Measures a quantity of fits at two sizes. Quick checks have a tenth of the draws."""

    def simulate(key: Array, quick: bool) -> Estimate:
        means = []
        for d, draws in ((SMALL, 8_000), (TIMES * SMALL, 5_000)):
            tasks = problem.tasks(d)
            fitted = fit_experts(key, tasks, draws // 10 if quick else draws, **ridges)
            means.append(Estimate.mean(measure(tasks, fitted)))
        return extrapolate(*means, times=TIMES)

    return simulate


RIDGED = Problem((1.0, 1.5, 2.0), (0.5, 0.8, 0.6), 0.6)
SIZES = f"d={SMALL} and {TIMES * SMALL} extrapolated"


@claim("experts-average-ridge/ours")
def _(ridge=0.15):
    """The mean excess of averaged ridge experts tends to |Σ A_t β_t/T - β*|²_H + Σ tr(H C_t)/T²
    with A_t = Σ_t(Σ_t + κ_t)⁻¹, C_t = A_t²Σ_t⁻¹(R_t + σ_t²)/n_t

    Source: {SOURCE}
    Domain: three curvatures without a common eigenbasis, n_t=1, 1.5, 2 d, ridge {ridge:g}; {SIZES}
    """
    tasks = RIDGED.tasks(SMALL)
    predicted = experts.merge_excess(tasks, experts.expert_fits(tasks, ridge), np.full(3, 1 / 3))

    def measure(tasks: RegressionTasks, fitted: FittedExperts) -> np.ndarray:
        return _merged(tasks, np.full(3, 1 / 3), fitted)

    return predicted, _extrapolated(RIDGED, measure, ridge=ridge, pooled_ridge=ridge)


@claim("experts-pooled-ridge/ours")
def _(ridge=0.05):
    """The mean excess of pooled ridge regression for different curvatures follows from
    R_t = |m - β_t|²_t + Σ n_s/μ_s² tr(Σ_tQΣ_sQ)(R_s + σ_s²)

    Q = (Σ n_tΣ_t/μ_t + N ridge)⁻¹, μ_t = 1 + tr Σ_tQ, m = QΣ n_tΣ_tβ_t/μ_t.

    Source: {SOURCE}
    Domain: three curvatures without a common eigenbasis, n_t=1, 1.5, 2 d, ridge {ridge:g}; {SIZES}
    """

    def measure(tasks: RegressionTasks, fitted: FittedExperts) -> np.ndarray:
        return mean_risks(tasks, fitted.pooled) - least_risk(tasks)

    predicted = experts.pooled_excess(RIDGED.tasks(SMALL), ridge)
    return predicted, _extrapolated(RIDGED, measure, ridge=ridge, pooled_ridge=ridge)


@claim(
    "experts-exchange-{name}/ours",
    effect=0.1,
    each=(("noisy", 1.0, 0.0, 0.2), ("different", 0.3, 1.5, 0.3)),
)
def _(name, sigma, own, kappa):
    """At one effective ridge κ, averaged experts have (R_expert - R_pooled) df₂/N more risk than
    pooled training

    R_expert is the risk of experts on their own tasks, and R_pooled the mean risk of pooled
    training. Averaging is better exactly where experts are better on their own tasks. The test
    detects 10 % of the difference.

    Source: {SOURCE}
    Domain: one curvature, T=3, n=1.5 d, σ={sigma}, own parts {own}, κ={kappa}; {SIZES}
    """
    alike = Problem((1.5,) * 3, (sigma,) * 3, own, "one")
    tasks = alike.tasks(SMALL)
    n, total = tasks.samples[0], tasks.samples.sum()
    s, basis = np.linalg.eigh(tasks.curvature)
    parts = tasks.teachers @ basis
    about = parts.mean(0) ** 2, parts.var(0, ddof=1)
    at = experts.compared(s, *about, n=n, tasks=3, sigma=sigma, kappa=kappa)
    df1 = np.sum(s / (s + kappa))

    def measure(tasks: RegressionTasks, fitted: FittedExperts) -> np.ndarray:
        return mean_risks(tasks, fitted.experts.mean(1)) - mean_risks(tasks, fitted.pooled)

    ridges = {"ridge": kappa * (1 - df1 / n), "pooled_ridge": kappa * (1 - df1 / total)}
    return at.share * (at.expert - at.model), _extrapolated(alike, measure, **ridges)


@claim("experts-exchange-curvature/ours", effect=0.1)
def _(sigma=0.4, own=1.5):
    """If tr H⁻¹Σ_t = d for all t, least squares merged with weights (ΣΣ_s)⁻¹Σ_t have
    (R_expert - R_pooled) d/N more risk than pooled training

    Rotations by 60° permute these curvatures, so they have this property. The test detects 10 % of
    the difference.

    Source: {SOURCE}
    Domain: three curvatures turned by 60°, n=2 d, σ={sigma}, own parts {own}; {SIZES}
    """
    turned = Problem((2.0,) * 3, (sigma,) * 3, own, "turned")
    tasks = turned.tasks(SMALL)
    n = tasks.samples[0]
    model = experts.pooled_excess(tasks) + tasks.floor

    def measure(tasks: RegressionTasks, fitted: FittedExperts) -> np.ndarray:
        merged = _merged(tasks, experts.curvature_weights(tasks), fitted)
        return merged + least_risk(tasks) - mean_risks(tasks, fitted.pooled)

    expert = sigma**2 * SMALL / (n - SMALL)
    return (expert - model) * SMALL / (3 * n), _extrapolated(turned, measure)
