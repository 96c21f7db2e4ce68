"""Unified merging (arXiv 2601.21690), step sizes (Theorem 3, eq. 14), and the laws in n, b, K, η
and N of Remark 5, Section V-B and Appendix A-A1.
"""

from functools import partial

import numpy as np
import optax
from jaxtyping import Array
from scipy.optimize import root_scalar

from theory.claims import Estimate, generator, measured
from theory.merging import inequality_domains, stability_domains
from theory.merging.bounds import Constants, excess_risk_bound, surrogate_gradient
from theory.merging.effective_steps import adam_steps, effective_steps, simulate_movement
from theory.merging.tasks import QuadraticTasks, Training
from theory.merging.testbeds import claim, drawn, expected

ALL = np.inf  # samples in a batch
LOCAL_STEPS = (5, 20)  # K
RATE, EPS = 1e-3, 1e-8  # of Adam
CONSTANT = np.array([1.0, 2.0, 3.0])  # a gradient that stays the same
SIZES = (0.3, 0.1)  # |g_i| of every coordinate, of two tasks
FEW, LONG, TASKS = 10, 1000, 8  # K, and N
SIZE, WIDE = 100, 10  # n and b of the tasks with tied step sizes
SPREAD = 0.5  # of the centres of two tasks


def _few(samples: int = 10, batch: float = 1, steps: int = 20, rate: float = 0.05):
    """Returns two tasks with slowly converging experts."""
    return QuadraticTasks([1.0], [[SPREAD], [-SPREAD]], 1.0, samples, steps, batch, rate)


# --- step sizes, and effective steps and weights --------------------------------------------------


@claim("step-sizes/ours")
def _(tasks=2, steps=10):
    """η=√(N/K̄) satisfies η ≤ 1/(8KL) iff L√(NK) ≤ 1/8. The largest L is compared

    Source: Theorem 2 (Section IV-A) with Lemma 3 (Appendix A-A)
    Domain: N={tasks}, K={steps}
    """

    def gap(smoothness: float) -> float:
        return (tasks / steps) ** 0.5 - 1 / (8 * steps * smoothness)

    found = root_scalar(gap, bracket=(1e-6, 1.0), xtol=1e-14).root
    return 1 / (8 * (tasks * steps) ** 0.5), measured(lambda: found)


@claim("eq14-proximal/printed")
def _printed_proximal(proximal=0.1, steps=LOCAL_STEPS, rate=0.5):
    """λᵢ = (1 - (1-α)^Kᵢ/N) / (Σ[1 - (1-α)^Kᵢ]/N)

    They do not sum to one.

    Source: after eq. (20), by eq. (14) (Appendix A-A)
    Domain: α={proximal}, K={steps}, constant gradients, i=1
    """

    def share() -> float:
        """Measures task 1's weight in the movement of the merged model under the proximal updates x
        <- x - η(g_i + μ(x - x_0)), with orthonormal constant gradients and ημ = α.
        """
        moved = []
        for count in steps:
            x = 0.0
            for _ in range(count):
                x -= rate * (1.0 + proximal / rate * x)
            moved.append(x)
        return moved[0] / sum(moved)

    left = [(1 - proximal) ** k for k in steps]
    return (1 - left[0] / 2) / (sum(1 - x for x in left) / 2), measured(share)


@_printed_proximal.beside("corrected")
def _(proximal, steps):
    """λᵢ = (1 - (1-α)^Kᵢ) / Σ[1 - (1-α)^Kᵢ]"""
    left = [(1 - proximal) ** k for k in steps]
    return (1 - left[0]) / sum(1 - x for x in left)


def _adams_movement(gradients: np.ndarray) -> np.ndarray:
    return np.asarray(simulate_movement(optax.adam(RATE, eps=EPS), gradients))


def _orthogonal(i: int) -> np.ndarray:
    """Returns the gradient of task i, of equal size in both coordinates and orthogonal to the other
    task's.
    """
    return SIZES[i] * np.array([1.0, (-1.0) ** i])


@claim("eq14-adam/printed")
def _printed_adam():
    """aᵢ has one entry per step, so Adam's movement stays in the gradients' span

    The share of its square outside is compared. Adam moves along g/(|g| + ε), coordinate by
    coordinate.

    Source: Remark 6 (Section IV-B), with aᵢ and eq. (14) (Appendix A-A)
    Domain: K={LOCAL_STEPS[0]}, constant gradient {CONSTANT}, rate {RATE}, ε={EPS}
    """

    def outside() -> float:
        """Computes the share of Adam's squared movement that no weighting of its gradients
        explains.
        """
        gradients = np.tile(CONSTANT, (LOCAL_STEPS[0], 1))
        moved = _adams_movement(gradients)
        left = moved - gradients.T @ np.linalg.lstsq(gradients.T, moved)[0]
        return float(left @ left / (moved @ moved))

    return 0.0, measured(outside)


@_printed_adam.beside("corrected")
def _():
    """aᵢ also has one entry per coordinate. The share 1 - (u·g)²/(|u|²|g|²) with u = g/(|g| + ε) is
    outside of the span
    """
    along = CONSTANT / (np.abs(CONSTANT) + EPS)
    return 1 - (along @ CONSTANT) ** 2 / ((along @ along) * (CONSTANT @ CONSTANT))


@claim("eq14-adam-steps/ours")
def _():
    """x_K - x₀ = -ηΣₜ aₜ⊙gₜ, aₜ = Σ_{{s≥t}} (1-β₁)β₁^(s-t)/((1-β₁^(s+1))(√v̂ₛ + ε))

    Source: Remark 6 (Section IV-B), with aᵢ and eq. (14) (Appendix A-A)
    Domain: K={LOCAL_STEPS[1]}, gradients normal about {CONSTANT}, the sum of coordinates
    """
    gradients = np.random.default_rng(0).normal(CONSTANT, 1.0, (LOCAL_STEPS[1], CONSTANT.size))
    moved = -RATE * float(np.sum(np.asarray(adam_steps(gradients, eps=EPS)) * gradients))
    return moved, measured(lambda: _adams_movement(gradients).sum())


@claim("eq14-adam-weights/ours")
def _():
    """λᵢ = [Kᵢ/(|gᵢ| + ε)] / Σⱼ[Kⱼ/(|gⱼ| + ε)], so tasks with small gradients count more

    Source: eq. (14) (Appendix A-A), for Adam
    Domain: K={LOCAL_STEPS}, constant orthogonal gradients of sizes {SIZES}, i=1
    """
    gradients = [np.tile(_orthogonal(i), (steps, 1)) for i, steps in enumerate(LOCAL_STEPS)]

    def weight() -> float:
        """Measures task 1's weight in the movement of the average of two experts by Adam."""
        directions = np.stack([_orthogonal(i) for i in range(2)], 1)
        moved = np.mean([_adams_movement(g) for g in gradients], 0)
        first, second = np.linalg.solve(directions, moved)
        return float(first / (first + second))

    steps = effective_steps([adam_steps(g, eps=EPS) for g in gradients])
    return steps.weights[0, 0], measured(weight)


@claim("law-samples/ours")
def _():
    """E_O falls with n, too, as ½Σ_h h{{(mean)² + Σᵢ((1-ρᵢ)λᵢ-1/N)² s²/nᵢ + Σλᵢ²νᵢ}}

    Source: Section V-B4, which has n in the stability term alone
    Domain: N=2, n=10, K=20, η=.05, all samples in every batch
    """
    full = partial(_few, batch=ALL)
    return expected(full, "optimisation"), drawn(full, "optimisation", 80_000)


@claim("law-batch/printed", ">=", attack=stability_domains.SMALL_BATCHES)
def _printed_batch():
    """A large b makes the algorithm more sensitive to data perturbations

    The bound rises with b, by 3bζ²/n. The bounded quantity does not.

    Source: Section V-B2 and Appendix A-A1, item 2
    Domain: N=2, n=10, K=20, η=.05; all samples in every batch, against b=1
    """
    return expected(_few, "stability"), drawn(partial(_few, batch=ALL), "stability", 20_000)


@_printed_batch.beside("corrected", "=")
def _():
    """Stability falls with b, by the term (ηh)²a(1-1/n)/(bn)"""
    return expected(partial(_few, batch=ALL), "stability")


def _tied(steps: float) -> tuple[Constants, Training]:
    """Computes ε_sgd for L=1, σ²=ζ²=gap=1 and the rate √(N/K) of Theorem 2."""
    training = Training.of(SIZE, steps, WIDE, (TASKS / steps) ** 0.5, tasks=TASKS)
    return Constants(1.0, 0.5, 1.0, 1.0, 1.0), training


TIED = f"η=√(N/K), N={TASKS}, L=σ²=ζ²=gap=1, n={SIZE}, b={WIDE}, K={LONG}"


@claim("law-steps-optimisation/printed", "<=", attack=inequality_domains.MORE_STEPS)
def _printed_optimisation():
    """ε_sgd decreases with K̄, typically as 1/√K̄ or 1/K̄

    Source: Section V-B1 and Appendix A-A1, item 1
    Domain: {TIED}, against K={FEW}
    """
    few, long = (surrogate_gradient(*_tied(steps), coefficient=12.0) for steps in (FEW, LONG))
    return few, measured(lambda: long, 10.0)


@_printed_optimisation.beside("corrected", "=")
def _():
    """ε_sgd grows as its last term, 12NL²ζ²(K-1)

    The tolerance covers the other terms, which fall.
    """
    return 12.0 * TASKS * (LONG - 1)


@claim("law-steps-stability/printed")
def _printed_component(long=LONG, few=FEW):
    """The stability component grows linearly with K, to 100 times its value at K={few}

    This is with Theorem 3's η, which falls with K.

    Source: Section V-B1 and Appendix A-A1, item 1
    Domain: {TIED}
    """
    early, late = (float(excess_risk_bound(*_tied(steps)).stability) for steps in (few, long))
    return long / few * early, measured(lambda: late)


@_printed_component.beside("corrected")
def _():
    """16η²ΣλK(σ²+3bζ²)/n = 16N(σ²+3bζ²)/n for every K"""
    return 16 * TASKS * (1 + 3 * WIDE) / SIZE


@claim("law-rate-small/ours")
def _(n=10, steps=20, rate=2e-4):
    """Stability grows as η² while ηhK is small, as (1/N)Σλ²2s²(ηh)²[K²/n² + K(1-1/n)/n]

    Source: Section V-B3 and Appendix A-A1, item 4, of the bound
    Domain: N=2, n={n}, K={steps}, b=1, η={rate:g}
    """
    predicted = (rate / n) ** 2 / 2 * (steps**2 + steps * (n - 1))
    return predicted, drawn(partial(_few, n, 1, steps, rate), "stability", 80_000)


@claim("law-rate/ours")
def _(n=10, steps=20, rate=0.5):
    """Stability saturates for large ηhK, as (1-ρ)² ≤ 1 and (ηh)²a ≤ ηh/(2-ηh)

    Converged experts forget their start.

    Source: Section V-B3 and Appendix A-A1, item 4, of the bound
    Domain: N=2, n={n}, K={steps}, b=1, η={rate}
    """
    bed = partial(_few, n, 1, steps, rate)
    return expected(bed, "stability"), drawn(bed, "stability", 200_000)


@claim("law-tasks/printed", ">=", attack=inequality_domains.MORE_TASKS)
def _printed_heterogeneity(n=10, many=32, some=8):
    """Σλζ² accumulates at least linearly with N, to 4 times its value at N={some}

    It is a mean, at most max ζ². The terms in A₂ and A₃ are linear in N.

    Source: Section V-B5 and Appendix A-A1, item 5
    Domain: centres normal, s=1, n={n}, h=1, equal weights, N={many}, against {some}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes Σλζ² of tasks with standard normal centres."""
        rng, draws = generator(key), 200 if quick else 2000
        means = rng.normal(size=(draws, many)) + rng.normal(size=(draws, many)) / n**0.5
        return Estimate.mean(means.var(1))

    return many / some * ((1 + 1 / n) * (1 - 1 / some)), simulate


@_printed_heterogeneity.beside("corrected", "=")
def _(n, many):
    """E Σλζ² = h²(τ² + s²/n)(1-1/N) saturates, where τ² is the variance of centres"""
    return (1 + 1 / n) * (1 - 1 / many)
