"""Unified merging (arXiv 2601.21690), step sizes (Theorem 3, eq. 14), and Remark 5 with
Section V-B and Appendix A-A1: the laws in n, b, K, η and N."""

from functools import partial

import numpy as np
import optax
from jaxtyping import Array
from scipy.optimize import root_scalar

from theory.claims import Claim, Estimate, beside, generator, measured
from theory.merging import inequality_domains, stability_domains
from theory.merging.bounds import Constants, excess_risk_bound, surrogate_gradient
from theory.merging.effective_steps import adam_steps, effective_steps, simulate_movement
from theory.merging.tasks import QuadraticTasks, Training
from theory.merging.testbeds import PAPER, drawn, expected

ALL = np.inf  # samples in a batch
PROXIMAL, LOCAL_STEPS = 0.1, (5, 20)  # α and K
RATE, EPS = 1e-3, 1e-8  # of Adam
CONSTANT = np.array([1.0, 2.0, 3.0])  # a gradient that stays the same
SIZES = (0.3, 0.1)  # |g_i| of every coordinate, of two tasks
FEW, LONG, TASKS = 10, 1000, 8  # K, and N
SIZE, WIDE = 100, 10  # n and b of the tasks with tied step sizes
SPREAD = 0.5  # of the centres of two tasks


def _few(samples: int = 10, batch: float = 1, steps: int = 20, rate: float = 0.05):
    """Two tasks whose experts converge slowly."""
    return QuadraticTasks([1.0], [[SPREAD], [-SPREAD]], 1.0, samples, steps, batch, rate)


def _meeting(tasks: int, steps: int) -> float:
    """The smoothness at which √(N/K) is the rate 1/(8KL), by search."""

    def gap(smoothness: float) -> float:
        return (tasks / steps) ** 0.5 - 1 / (8 * steps * smoothness)

    return root_scalar(gap, bracket=(1e-6, 1.0), xtol=1e-14).root


def _proximal_weight() -> float:
    """The share of task 1 in the movement of the merged model under the proximal updates
    x <- x - η(g_i + μ(x - x_0)), gradients orthonormal and constant, ημ = α."""
    rate, moved = 0.5, []
    for steps in LOCAL_STEPS:
        x = 0.0
        for _ in range(steps):
            x -= rate * (1.0 + PROXIMAL / rate * x)
        moved.append(x)
    return moved[0] / sum(moved)


def _adams_movement(gradients: np.ndarray) -> np.ndarray:
    return np.asarray(simulate_movement(optax.adam(RATE, eps=EPS), gradients))


def _outside() -> float:
    """The share of Adam's squared movement that no weighting of its gradients explains."""
    gradients = np.tile(CONSTANT, (LOCAL_STEPS[0], 1))
    moved = _adams_movement(gradients)
    left = moved - gradients.T @ np.linalg.lstsq(gradients.T, moved)[0]
    return float(left @ left / (moved @ moved))


def _outside_by_signs() -> float:
    """The same share in closed form: all gradients are g, and Adam moves along g / (|g| + ε)."""
    along = CONSTANT / (np.abs(CONSTANT) + EPS)
    return float(1 - (along @ CONSTANT) ** 2 / ((along @ along) * (CONSTANT @ CONSTANT)))


def _drawn_gradients() -> np.ndarray:
    return np.random.default_rng(0).normal(CONSTANT, 1.0, (LOCAL_STEPS[1], CONSTANT.size))


def _orthogonal(i: int) -> np.ndarray:
    """The gradient of task i: of one size in both coordinates, orthogonal to the other task's."""
    return SIZES[i] * np.array([1.0, (-1.0) ** i])


def _adams_weight() -> float:
    """The weight of task 1 in the movement of the average of two experts by Adam."""
    moved = [
        _adams_movement(np.tile(_orthogonal(i), (steps, 1))) for i, steps in enumerate(LOCAL_STEPS)
    ]
    directions = np.stack([_orthogonal(i) for i in range(2)], 1)
    first, second = np.linalg.solve(directions, np.mean(moved, 0))
    return float(first / (first + second))


def _adams_weight_by_steps() -> float:
    steps = [
        adam_steps(np.tile(_orthogonal(i), (k, 1)), eps=EPS) for i, k in enumerate(LOCAL_STEPS)
    ]
    return float(effective_steps(steps).weights[0, 0])


def _adam() -> list[Claim]:
    gradients = _drawn_gradients()
    return [
        *beside(
            f"{PAPER}/eq14-adam",
            "Remark 6 (Section IV-B), with aᵢ and eq. (14) (Appendix A-A)",
            f"K={LOCAL_STEPS[0]}, constant gradient {CONSTANT}, rate {RATE}, ε={EPS}",
            measured(_outside),
            printed=(
                "aᵢ has one entry per step: none of Adam's movement leaves the gradients' span",
                lambda: 0.0,
                "the share of its square; it moves along g/(|g| + ε), coordinate by coordinate",
            ),
            corrected=(
                "it has one per coordinate, too: 1 - (u·g)²/(|u|²|g|²) leaves it, u = g/(|g| + ε)",
                _outside_by_signs,
            ),
        ),
        *beside(
            f"{PAPER}/eq14-adam-steps",
            "Remark 6 (Section IV-B), with aᵢ and eq. (14) (Appendix A-A)",
            f"K={LOCAL_STEPS[1]}, gradients normal about {CONSTANT}, the sum of coordinates",
            measured(lambda: _adams_movement(_drawn_gradients()).sum()),
            ours=(
                "x_K - x₀ = -ηΣₜ aₜ⊙gₜ, aₜ = Σ_{s≥t} (1-β₁)β₁^(s-t)/((1-β₁^(s+1))(√v̂ₛ + ε))",
                lambda: (
                    -RATE * float(np.sum(np.asarray(adam_steps(gradients, eps=EPS)) * gradients))
                ),
            ),
        ),
        *beside(
            f"{PAPER}/eq14-adam-weights",
            "eq. (14) (Appendix A-A), for Adam",
            f"K={LOCAL_STEPS}, constant orthogonal gradients of sizes {SIZES}, i=1",
            measured(_adams_weight),
            ours=(
                "λᵢ = [Kᵢ/(|gᵢ| + ε)] / Σⱼ[Kⱼ/(|gⱼ| + ε)]: tasks of small gradients count more",
                _adams_weight_by_steps,
            ),
        ),
    ]


def _step_sizes() -> list[Claim]:
    tasks, steps = 2, 10
    left = [(1 - PROXIMAL) ** k for k in LOCAL_STEPS]
    total = sum(1 - x for x in left)
    return [
        *beside(
            f"{PAPER}/step-sizes",
            "Theorem 2 (Section IV-A) with Lemma 3 (Appendix A-A)",
            f"N={tasks}, K={steps}",
            measured(partial(_meeting, tasks, steps)),
            ours=(
                "η=√(N/K̄) meets η ≤ 1/(8KL) iff L√(NK) ≤ 1/8: the largest L",
                lambda: 1 / (8 * (tasks * steps) ** 0.5),
            ),
        ),
        *beside(
            f"{PAPER}/eq14-proximal",
            "after eq. (20), by eq. (14) (Appendix A-A)",
            f"α={PROXIMAL}, K={LOCAL_STEPS}, constant gradients, i=1",
            measured(_proximal_weight),
            printed=(
                "λᵢ = (1 - (1-α)^Kᵢ/N) / (Σ[1 - (1-α)^Kᵢ]/N)",
                lambda: (1 - left[0] / 2) / (total / 2),
                "they do not sum to one",
            ),
            corrected=("λᵢ = (1 - (1-α)^Kᵢ) / Σ[1 - (1-α)^Kᵢ]", lambda: (1 - left[0]) / total),
        ),
    ]


def _samples_and_batch() -> list[Claim]:
    full, single = partial(_few, batch=ALL), _few
    bed = "N=2, n=10, K=20, η=.05"
    return [
        *beside(
            f"{PAPER}/law-samples",
            "Section V-B4, which has n in the stability term alone",
            f"{bed}, all samples in every batch",
            drawn(full, "optimisation", 80_000),
            ours=(
                "E_O falls with n, too: ½Σ_h h{(mean)² + Σᵢ((1-ρᵢ)λᵢ-1/N)² s²/nᵢ + Σλᵢ²νᵢ}",
                expected(full, "optimisation"),
            ),
        ),
        *beside(
            f"{PAPER}/law-batch",
            "Section V-B2 and Appendix A-A1, item 2",
            f"{bed}; all samples in every batch, against b=1",
            drawn(full, "stability", 20_000),
            relation={"printed": ">=", "corrected": "="},
            attack={"printed": stability_domains.SMALL_BATCHES},
            printed=(
                "a large b makes the algorithm more sensitive to data perturbations",
                expected(single, "stability"),
                "the bound rises with b, by 3bζ²/n; what it bounds does not",
            ),
            corrected=(
                "stability falls with b, by the term (ηh)²a(1-1/n)/(bn)",
                expected(full, "stability"),
            ),
        ),
    ]


def _tied(steps: float) -> tuple[Constants, Training]:
    """L=1, σ²=ζ²=gap=1, and the rate √(N/K) of Theorem 2."""
    training = Training.of(SIZE, steps, WIDE, (TASKS / steps) ** 0.5, tasks=TASKS)
    return Constants(1.0, 0.5, 1.0, 1.0, 1.0), training


def _epsilon(steps: float) -> float:
    return float(surrogate_gradient(*_tied(steps), coefficient=12.0))


def _stability(steps: float) -> float:
    return float(excess_risk_bound(*_tied(steps)).stability)


def _steps() -> list[Claim]:
    place = "Section V-B1 and Appendix A-A1, item 1"
    tied = f"η=√(N/K), N={TASKS}, L=σ²=ζ²=gap=1, n={SIZE}, b={WIDE}, K={LONG}"
    return [
        *beside(
            f"{PAPER}/law-steps-optimisation",
            place,
            f"{tied}, against K={FEW}",
            measured(partial(_epsilon, LONG), 10.0),
            relation={"printed": "<=", "corrected": "="},
            attack={"printed": inequality_domains.MORE_STEPS},
            printed=("ε_sgd decreases with K̄, typically as 1/√K̄ or 1/K̄", partial(_epsilon, FEW)),
            corrected=(
                "ε_sgd grows as its last term, 12NL²ζ²(K-1)",
                lambda: 12.0 * TASKS * (LONG - 1),
                "tolerance for the other terms, which fall",
            ),
        ),
        *beside(
            f"{PAPER}/law-steps-stability",
            place,
            tied,
            measured(partial(_stability, LONG)),
            printed=(
                f"the stability component grows linearly with K: {LONG // FEW} times K={FEW}'s",
                lambda: LONG / FEW * _stability(FEW),
                "with Theorem 3's η, which falls with K",
            ),
            corrected=(
                "16η²ΣλK(σ²+3bζ²)/n = 16N(σ²+3bζ²)/n whatever K",
                lambda: 16 * TASKS * (1 + 3 * WIDE) / SIZE,
            ),
        ),
    ]


def _rate() -> list[Claim]:
    small, large, steps, samples = 2e-4, 0.5, 20, 10
    place = "Section V-B3 and Appendix A-A1, item 4, of the bound"
    return [
        *beside(
            f"{PAPER}/law-rate-small",
            place,
            f"N=2, n={samples}, K={steps}, b=1, η={small:g}",
            drawn(partial(_few, samples, 1, steps, small), "stability", 80_000),
            ours=(
                "stability grows as η² while ηhK is small: (1/N)Σλ²2s²(ηh)²[K²/n² + K(1-1/n)/n]",
                lambda: (small / samples) ** 2 / 2 * (steps**2 + steps * (samples - 1)),
            ),
        ),
        *beside(
            f"{PAPER}/law-rate",
            place,
            f"N=2, n={samples}, K={steps}, b=1, η={large}",
            drawn(partial(_few, samples, 1, steps, large), "stability", 200_000),
            ours=(
                "stability saturates for large ηhK: (1-ρ)² ≤ 1, (ηh)²a ≤ ηh/(2-ηh)",
                expected(partial(_few, samples, 1, steps, large), "stability"),
                "converged experts forget",
            ),
        ),
    ]


MANY, SOME, SAMPLES = 32, 8, 10  # tasks, and their samples


def _drawn_heterogeneity(key: Array, quick: bool) -> Estimate:
    """Σλζ² of tasks whose centres are standard normal."""
    rng, draws = generator(key), 200 if quick else 2000
    means = rng.normal(size=(draws, MANY)) + rng.normal(size=(draws, MANY)) / SAMPLES**0.5
    return Estimate.mean(means.var(1))


def _tasks() -> list[Claim]:
    def limit(tasks: int) -> float:
        return (1 + 1 / SAMPLES) * (1 - 1 / tasks)

    return [
        *beside(
            f"{PAPER}/law-tasks",
            "Section V-B5 and Appendix A-A1, item 5",
            f"centres normal, s=1, n={SAMPLES}, h=1, equal weights, N={MANY}, against {SOME}",
            _drawn_heterogeneity,
            relation={"printed": ">=", "corrected": "="},
            attack={"printed": inequality_domains.MORE_TASKS},
            printed=(
                f"Σλζ² accumulates at least linearly with N: {MANY // SOME} times that at N={SOME}",
                lambda: MANY / SOME * limit(SOME),
                "a mean, at most max ζ²; linear in N are the terms in A₂ and A₃",
            ),
            corrected=(
                "E Σλζ² = h²(τ² + s²/n)(1-1/N), τ² the variance of centres: it saturates",
                lambda: limit(MANY),
            ),
        )
    ]


CLAIMS = (*_step_sizes(), *_adam(), *_samples_and_batch(), *_steps(), *_rate(), *_tasks())
