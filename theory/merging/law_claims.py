"""Unified merging (arXiv 2601.21690), step sizes (Theorem 3, eq. 14), and Remark 5 with
Appendix A-A1: the laws in n, b, K, η and N."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate
from theory.merging.bounds import Constants, excess_risk_bound, surrogate_gradient
from theory.merging.quadratic import exact
from theory.merging.tasks import QuadraticTasks, Training
from theory.merging.testbeds import PAPER, bound, drawn, expected, measured

SOURCE = f"{PAPER} Remark 5, Appendix A-A1"


def _rates(smoothness: float, tasks: int, steps: int) -> tuple[float, float]:
    return (tasks / steps) ** 0.5, 1 / (8 * steps * smoothness)


def _proximal_weight() -> float:
    """The share of task 1 in the movement of the merged model under the proximal updates
    x <- x - η(g_i + μ(x - x_0)), gradients orthonormal and constant, αη = ημ = .1."""
    rate, mu, steps = 0.5, 0.2, (5, 20)
    moved = []
    for k in steps:
        x = 0.0
        for _ in range(k):
            x -= rate * (1.0 + mu * x)
        moved.append(x)
    return moved[0] / sum(moved)


def _step_sizes() -> list[Claim]:
    at = 1 / (8 * 20**0.5)
    decay = [1 - 0.9**k for k in (5, 20)]
    return [
        Claim(
            f"{PAPER}/step-sizes/ours",
            "√(N/K) ≤ 1/(8KL) iff L√(NK) ≤ 1/8; equal at L√(NK) = 1/8",
            f"{PAPER} Theorem 3",
            "N=2, K=10",
            lambda: _rates(at, 2, 10)[1],
            measured(lambda: _rates(at, 2, 10)[0]),
        ),
        Claim(
            f"{PAPER}/eq14-proximal/printed",
            "λᵢ = (1 - (1-α)^Kᵢ/N) / Σ(1 - (1-α)^Kᵢ)/N",
            f"{PAPER} after eq. (20)",
            "α=.1, K=(5, 20), constant gradients",
            lambda: (1 - 0.9**5 / 2) / (sum(decay) / 2),
            measured(_proximal_weight),
            note="they do not sum to one",
        ),
        Claim(
            f"{PAPER}/eq14-proximal/corrected",
            "λᵢ = (1 - (1-α)^Kᵢ) / Σ(1 - (1-α)^Kᵢ)",
            f"{PAPER} eq. (14)",
            "α=.1, K=(5, 20), constant gradients",
            lambda: decay[0] / sum(decay),
            measured(_proximal_weight),
        ),
    ]


def _few(samples: int = 10, batch: float = 1, steps: int = 20, rate: float = 0.05):
    """Two tasks whose experts converge slowly."""
    return QuadraticTasks([1.0], [[0.5], [-0.5]], 1.0, samples, steps, batch, rate)


def _samples() -> list[Claim]:
    few = partial(_few, 10, np.inf)
    return [
        Claim(
            f"{PAPER}/law-samples/ours",
            "E_O = ½Σ_h h{(mean)² + Σᵢ((1-ρᵢ)λᵢ-1/N)² s²/nᵢ + Σλᵢ²νᵢ}",
            SOURCE,
            "N=2, n=10, all samples in every batch",
            expected(few, "optimisation"),
            drawn(few, "optimisation", 40_000),
        ),
    ]


def _batch() -> list[Claim]:
    single, full = partial(_few, 10, 1), partial(_few, 10, np.inf)
    return [
        Claim(
            f"{PAPER}/law-batch/printed",
            "a larger batch harms stability: with all samples it is at least that at b=1",
            SOURCE,
            "N=2, n=10, K=20",
            expected(single, "stability"),
            drawn(full, "stability", 20_000),
            relation=">=",
        ),
        Claim(
            f"{PAPER}/law-batch/corrected",
            "stability falls with b, by the term (ηh)²a(1-1/n)/(bn)",
            SOURCE,
            "N=2, n=10, K=20, all samples in every batch",
            expected(full, "stability"),
            drawn(full, "stability", 20_000),
        ),
        Claim(
            f"{PAPER}/law-batch-bound/exact",
            "while the bound rises with b, from b=1 to 64",
            SOURCE,
            "N=2, n=10, K=20",
            bound(single, "stability"),
            measured(bound(partial(_few, 10, 64), "stability")),
            relation=">=",
        ),
    ]


def _tied(steps: float, tasks: int = 8) -> tuple[Constants, Training]:
    """L=1, σ²=ζ²=gap=1, and the rate √(N/K) of Theorem 2."""
    consts = Constants(1.0, 0.5, 1.0, 1.0, 1.0)
    rate = (tasks / steps) ** 0.5
    return consts, Training.of(100, steps, 10, rate, tasks=tasks)


def _epsilon(steps: float) -> float:
    return float(surrogate_gradient(*_tied(steps), coefficient=12.0))


def _tied_stability(steps: float) -> float:
    return float(excess_risk_bound(*_tied(steps)).stability)


def _steps() -> list[Claim]:
    tied = "η=√(N/K), N=8, L=σ²=ζ²=gap=1, n=100, b=10"
    return [
        Claim(
            f"{PAPER}/law-steps-optimisation/printed",
            "ε_sgd falls with K",
            SOURCE,
            f"{tied}; K=1000 and 10",
            partial(_epsilon, 10),
            measured(partial(_epsilon, 1000)),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/law-steps-optimisation/corrected",
            "its last term is 12 N L²ζ²(K-1)",
            SOURCE,
            f"{tied}; from K=1000 to 1001",
            lambda: 12.0 * 8,
            measured(lambda: _epsilon(1001) - _epsilon(1000), 1e-2),
            note="tolerance for the other terms, which fall",
        ),
        Claim(
            f"{PAPER}/law-steps-stability/printed",
            "the stability bound grows as K",
            SOURCE,
            f"{tied}; K=1000 over K=10",
            lambda: 100.0,
            measured(lambda: _tied_stability(1000) / _tied_stability(10)),
        ),
        Claim(
            f"{PAPER}/law-steps-stability/corrected",
            "16η²K = 16N whatever K",
            SOURCE,
            f"{tied}; K=1000 over K=10",
            lambda: 1.0,
            measured(lambda: _tied_stability(1000) / _tied_stability(10)),
        ),
    ]


def _stability_ratio(rate: float, factor: float) -> float:
    stabilities = (exact(_few(rate=eta, steps=100)).stability for eta in (factor * rate, rate))
    return float(np.divide(*stabilities))


def _rate() -> list[Claim]:
    return [
        Claim(
            f"{PAPER}/law-rate-small/ours",
            "stability grows as η² while ηhK is small",
            SOURCE,
            "N=2, n=10, K=100, b=1, η=1e-6 and 2e-6",
            lambda: 4.0,
            measured(lambda: _stability_ratio(1e-6, 2.0), 4 * 2 * 1e-4),
            note="tolerance 2ηhK of 4",
        ),
        Claim(
            f"{PAPER}/law-rate/ours",
            "stability at η=.5, saturated",
            SOURCE,
            "N=2, n=10, K=100, b=1",
            expected(partial(_few, 10, 1, 100, 0.5), "stability"),
            drawn(partial(_few, 10, 1, 100, 0.5), "stability", 200_000),
        ),
    ]


def _drawn_heterogeneity(key: Array, quick: bool) -> Estimate:
    """Σλζ² of 32 tasks whose centres are standard normal, 10 samples each."""
    base = QuadraticTasks([1.0], jnp.zeros((32, 1)), 1.0, 10, 20, 1, 0.05)
    centres = jax.random.normal(key, (200 if quick else 2000, 32, 1))

    def mean_heterogeneity(c: Array) -> Array:
        return jnp.mean(exact(replace(base, centres=c)).heterogeneity)

    return Estimate.mean(np.asarray(jax.jit(jax.vmap(mean_heterogeneity))(centres)))


def _tasks() -> list[Claim]:
    normal = "centres normal, s=1, n=10, h=1, equal weights, N=32"
    return [
        Claim(
            f"{PAPER}/law-tasks/printed",
            "Σλζ² grows linearly in N: at N=32 it is 4 times that at N=8",
            SOURCE,
            normal,
            lambda: 4 * (1 + 0.1) * (1 - 1 / 8),
            _drawn_heterogeneity,
            relation=">=",
        ),
        Claim(
            f"{PAPER}/law-tasks/corrected",
            "E Σλζ² = h²(τ² + s²/n)(1-1/N), τ² the variance of centres: it saturates",
            SOURCE,
            normal,
            lambda: (1 + 0.1) * (1 - 1 / 32),
            _drawn_heterogeneity,
            note="Σλζ² ≤ max ζ²; linear in N are the terms in A₂ and A₃",
        ),
    ]


CLAIMS = (*_step_sizes(), *_samples(), *_batch(), *_steps(), *_rate(), *_tasks())
