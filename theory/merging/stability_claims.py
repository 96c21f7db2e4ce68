"""Unified merging (arXiv 2601.21690), Lemmas 1 and 3, equation 5, Theorem 1."""

from functools import partial
from math import exp, sqrt
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, generator, measured
from theory.merging import inequality_domains, stability_domains
from theory.merging.bounds import Form, local_stability
from theory.merging.quadratic import constants, exact
from theory.merging.testbeds import Bed, bound, claim, drawn, expected, long, minimiser, mixed

MIXED = "3 tasks of different n, K, b, λ"
FEW, SOME, MANY, MOST = 10_000, 20_000, 90_000, 160_000  # runs; more for what varies much
EXCESS = 0.23  # of `MIXED`, to two digits


def lemma_1(bed: Bed, gradient: str, of_optimisation: bool = False) -> float:
    """Computes the right side of Lemma 1 at the best γ, in closed form.

    Args:
      bed: Builds the tasks.
      gradient: The squared gradient in the bound, a field of `Quantities`.
      of_optimisation: Whether to add C|∇f|², as in equation 5.

    Returns:
      The bound.
    """
    consts, quantities = constants(bed()), exact(bed())
    square = float(getattr(quantities, gradient))
    stability = float(quantities.stability)
    rest = float(jnp.asarray(consts.pl) * quantities.gradient) if of_optimisation else 0.0
    return float(jnp.asarray(consts.smoothness)) / 2 * stability + sqrt(square * stability) + rest


for _numbers, _place, _own in (
    (("L1", "E_G", "", "generalisation", False), "Lemma 1 (Section IV-A)", False),
    (("eq5", "excess", " + C|∇f|²", "excess", True), "eq. (5) (Section IV-A)", True),
):
    _attacked = partial(stability_domains.lemma_1, of_optimisation=_own)
    _sharp = "" if _own else ", and the bound not sharp: at least {} times too large"

    @claim(
        "{name}-minimisers/printed",
        "<=",
        attack=_attacked("gradient", minimisers=True),
        each=((*_numbers, _sharp.format(1.42)),),
    )
    def _minimisers(name, left, rest, field, own, sharp, tasks=2, samples=10):
        """{left} ≤ (L+γ)/2 stability + |∇f|²/2γ{rest}, γ > 0

        (1/N)Σ∇ℓ(x;z̃ᵢ) differs from ∇f(x), which is 0 here.

        Source: {_place}
        Domain: empirical minimisers of N={tasks} tasks, n={samples}; best γ
        """
        bed = partial(minimiser, tasks, samples)
        return lemma_1(bed, "gradient", own), drawn(bed, field, MANY)

    @_minimisers.beside(
        "corrected", attack=_attacked("sample_gradient", minimisers=True), overlooks="tightened"
    )
    def _(left, rest, own, sharp, tasks, samples):
        """{left} ≤ (L+γ)/2 stability + mean|∇ℓ(x;zᵢ)|²/2γ{rest}, γ > 0

        The search finds that (L/2) stability never matters{sharp}.
        """
        return lemma_1(partial(minimiser, tasks, samples), "sample_gradient", own)

    @claim(
        "{name}-mixed/corrected",
        "<=",
        attack=_attacked("sample_gradient"),
        each=((*_numbers, _sharp.format(1.4)),),
        overlooks="tightened",
    )
    def _(name, left, rest, field, own, sharp):
        """{left} ≤ (L+γ)/2 stability + mean|∇ℓ(x;zᵢ)|²/2γ{rest}, γ > 0

        The search finds that (L/2) stability never matters{sharp}.

        Source: {_place}
        Domain: {MIXED}; best γ
        """
        simulate = drawn(mixed, field, FEW if own else MANY)
        return lemma_1(mixed, "sample_gradient", own), simulate


@claim(
    "{field}/ours",
    effect=0.05 * EXCESS,
    each=(
        ("generalisation", "E_G = (1/N)Σᵢ Σ_h h λᵢ(1-ρᵢ) s²/nᵢ"),
        ("optimisation", "E_O = ½ Σ_h h E(x_avg - x̂)²"),
        ("excess", "E F(x_avg) - E f(x̂) = E_G + E_O"),
    ),
)
def _(field, statement, excess=EXCESS):
    """{statement}

    The test detects 5 % of the excess, {excess}.

    Source: eq. (3), exact for quadratics
    Domain: {MIXED}
    """
    return expected(mixed, field), drawn(mixed, field, FEW)


class _Step(NamedTuple):
    """The sizes of one task's step."""

    samples: float
    batch: float
    variance: float = 1.0
    zeta2: float = 0.5

    def __str__(self) -> str:
        return f"n={self.samples:g}, b={self.batch:g}, σ²={self.variance:g}, ζ²={self.zeta2:g}"

    def cases(self, apart: bool) -> float:
        """Computes the increase in one step, in units of 4η², as a mean over both cases. In the
        first case the batches do not contain the other sample. Batches are drawn separately, or at
        the same positions.
        """
        first = self.variance / self.batch if apart else 0.0
        second = self.variance / self.batch + 3 * self.zeta2
        share = self.batch / self.samples
        return (1 - share) * first + share * second

    def combined(self) -> float:
        """Computes the paper's sum of the cases, in the same units."""
        return self.variance / self.samples + 3 * self.batch * self.zeta2 / self.samples


STEP = _Step(20, 4)


def _local(bed: Bed, form: Form) -> float:
    tasks = bed()
    return float(np.mean(local_stability(constants(tasks), tasks.training, form=form)))


@claim("L3-bernoulli/printed", "<=", attack=inequality_domains.bernoulli(False))
def _bernoulli(steps=1000, product=0.5):
    """For η ≤ 1/(8KL), (1 + 4ηL)^K - 1 ≤ 4ηLK

    Bernoulli's inequality is the reverse.

    Source: proof of Lemma 3 (Appendix A-A, step 1)
    Domain: K={steps}, ηL=1/(8K)
    """
    return product, measured(lambda: (1 + product / steps) ** steps - 1)


@_bernoulli.beside("corrected", attack=inequality_domains.bernoulli(True))
def _(product):
    """(1 + 4ηL)^K - 1 ≤ 2(√e - 1) 4ηLK = 1.2974 · 4ηLK, which gives 5.19 in place of 16"""
    return 2 * (exp(0.5) - 1) * product


@claim("L3-case1/printed")
def _(step=STEP):
    """For b/n ≤ ½, (1-b/n) 4η²σ²/b + (b/n) 4η²(σ²/b + 3ζ²) = 4η²(σ²/n + 3bζ²/n)

    The left side is 4η²(σ²/b + 3bζ²/n).

    Source: proof of Lemma 3 (Appendix A-A, step 1)
    Domain: {step}
    """
    return step.combined(), measured(lambda: step.cases(apart=True))


@claim("L3-case1/corrected")
def _(step=STEP):
    """(1-b/n) 0 + (b/n) 4η²(σ²/b + 3ζ²) = 4η²(σ²/n + 3bζ²/n)

    Source: proof of Lemma 3 (Appendix A-A, step 1)
    Domain: {step}; both runs see the same places
    """
    return step.combined(), measured(lambda: step.cases(apart=False))


@claim("L3-case1-coupled/ours")
def _(n=20, b=4):
    """A batch at the same places without the other sample moves both runs alike, so |x - x̃|² = 0

    Source: proof of Lemma 3 (Appendix A-A, step 1)
    Domain: quadratic, one step from one point, n={n}, b={b}; largest of 1000 draws
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        rng = generator(key)
        z = rng.normal(size=(1000, n))
        other = z + np.eye(n)[0] * rng.normal(size=(1000, 1))
        places = rng.integers(1, n, size=(1000, b))
        seen = (np.take_along_axis(data, places, 1) for data in (z, other))
        x, twin = (1 - 0.1 * (1 - batch).mean(1) for batch in seen)
        return Estimate(float(((x - twin) ** 2).max()), tolerance=1e-12)

    return 0.0, simulate


@claim("L3-cross/printed")
def _printed_cross():
    """E[∇ℓ(x̃;z) - ∇ℓ(x̃;z̃)] = 0, so E⟨x - x̃, ∇ℓ(x̃;z) - ∇ℓ(x̃;z̃)⟩ = 0

    x̃ depends on z̃.

    Source: proof of Lemma 3 (Appendix A-A, step 1), (i)
    Domain: {MIXED}
    """
    return 0.0, drawn(mixed, "cross", MANY)


@_printed_cross.beside("corrected")
def _():
    """E⟨x - x̃, ∇ℓ(x̃;z) - ∇ℓ(x̃;z̃)⟩ = -2s² Σ_h h(1-ρ)/n, for quadratics"""
    return expected(mixed, "cross")


@claim("L3-eq11/printed", "<=", attack=stability_domains.STABILITY_PRINTED)
def _printed_stability(steps=1000):
    """For η=Θ(1/KL), E|x - x̃|² ≤ 16Kη²(σ²/n + 3bζ²/n)

    It is violated from K ≈ 8n on, by a factor of K/8n.

    Source: Lemma 3, eq. (11) (Appendix A-A, step 1)
    Domain: N=2, one centre, η=1/(8KL), n=10, b=1, K={steps}
    """
    bed = partial(long, 2, steps)
    return _local(bed, "printed"), drawn(bed, "local_stability", SOME)


@_printed_stability.beside("corrected", attack=stability_domains.STABILITY, overlooks="tightened")
def _(steps):
    """For convex losses E|x - x̃|² ≤ 2σ²[(ηK)²/(n(n-1)) + η²K/(bn)]"""
    return _local(partial(long, 2, steps), "corrected")


@_printed_stability.beside("ours", "=")
def _(steps):
    """For quadratics E|x - x̃|² = 2s² Σ_h [(1-ρ)²/n² + (ηh)² a (1-1/n)/(bn)]"""
    return expected(partial(long, 2, steps), "local_stability")


@claim(
    "L3-eq11-few-steps/ours", "<=", attack=stability_domains.STABILITY_FEW, overlooks="tightened"
)
def _(steps=20):
    """E|x - x̃|² ≤ 16Kη²(σ²/n + 3bζ²/n) while K ≤ (8 - 1/b)(n - 1), for the σ² of one sample within
    the n samples

    The σ² of the distribution behind the samples is n/(n - 1) times as large in the mean. With it
    the bound holds while K ≤ 8n - (n - 1)/b, which is also below 8n. n=2, K=8n=16, b=1 break it by
    a factor of 1.2. 3bζ²/n never matters.

    Source: Lemma 3, eq. (11) (Appendix A-A, step 1), restricted
    Domain: N=2, one centre, η=1/(8KL), n=10, b=1, K={steps}
    """
    bed = partial(long, 2, steps)
    return _local(bed, "printed"), drawn(bed, "local_stability", SOME)


class _Tasks(NamedTuple):
    """The sizes of the tasks in the mixture of step 2."""

    samples: tuple[float, ...] = (20.0, 60.0)
    steps: tuple[float, ...] = (5.0, 9.0)
    weights: tuple[float, ...] = (0.5, 0.5)
    batch: float = 4.0
    variance: float = 1.0
    zeta2: float = 0.5

    def __str__(self) -> str:
        sizes = ", ".join(f"{n:g}" for n in self.samples)
        return (
            f"n=({sizes}), K={self.steps}, b={self.batch:g}, σ²={self.variance:g}, ζ²={self.zeta2}"
        )

    def mixture(self) -> float:
        """Computes Σλᵢ(nᵢ/n · with the other sample + (1 - nᵢ/n) · without), in units of 16η²."""
        total = 0.0
        for n, k, weight in zip(self.samples, self.steps, self.weights, strict=True):
            seen = n / sum(self.samples)
            with_it = self.variance / n + 3 * self.batch * self.zeta2 / n
            total += weight * k * (seen * with_it + (1 - seen) * self.variance / n)
        return total

    def size(self, together: bool) -> float:
        """Computes ΣλᵢKᵢ(σ²/nᵢ + 3bζ²/n), where n is all samples or the samples of the task."""
        n = np.array(self.samples)
        per_task = self.variance / n + 3 * self.batch * self.zeta2 / (n.sum() if together else n)
        return float(np.sum(np.multiply(self.weights, self.steps) * per_task))


TASKS = _Tasks()


@claim("T1/printed", "<=", attack=stability_domains.MERGED_PRINTED)
def _printed_merged(steps=2000):
    """E|x_avg - x̃_avg|² ≤ 16η²ΣλᵢKᵢ(σᵢ²/nᵢ + 3bᵢζᵢ²/nᵢ)

    Elsewhere it is loose by N², since only one task is perturbed, with weight λᵢ².

    Source: Theorem 1 (Section IV-A)
    Domain: N=2, one centre, η=1/(8KL), n=10, K={steps}, b=1
    """
    bed = partial(long, 2, steps)
    return bound(bed, "stability"), drawn(bed, "stability", SOME)


@_printed_merged.beside("corrected", attack=stability_domains.MERGED, overlooks="tightened")
def _(steps):
    """E|x_avg - x̃_avg|² ≤ (1/N)Σλᵢ² 2σᵢ²[(ηKᵢ)²/(nᵢ(nᵢ-1)) + η²Kᵢ/(bᵢnᵢ)]"""
    return bound(partial(long, 2, steps), "stability", "corrected")


@claim("T1-mixed/corrected", "<=", attack=stability_domains.MERGED, overlooks="tightened")
def _():
    """E|x_avg - x̃_avg|² ≤ (1/N)Σλᵢ² 2σᵢ²[(ηKᵢ)²/(nᵢ(nᵢ-1)) + η²Kᵢ/(bᵢnᵢ)]

    Source: Theorem 1 (Section IV-A)
    Domain: {MIXED}
    """
    return bound(mixed, "stability", "corrected"), drawn(mixed, "stability", SOME)


@claim("T1/ours")
def _():
    """E|x_avg - x̃_avg|² = (1/N)Σλᵢ² E|xᵢ - x̃ᵢ|²

    Source: Definition 2, eq. (4), exact for quadratics
    Domain: {MIXED}
    """
    return expected(mixed, "stability"), drawn(mixed, "stability", MOST)


@claim("T1-mixture/exact", "<=", attack=inequality_domains.MIXTURE, overlooks="tightened")
def _mixture(tasks=TASKS):
    """The mixture over the perturbed task is ≤ 16η²ΣλᵢKᵢ(σᵢ²/nᵢ + 3bᵢζᵢ²/nᵢ)

    Both sides are divided by 16η².

    Source: eq. (13) and before it (Appendix A-A, step 2)
    Domain: {tasks}
    """
    return tasks.size(together=False), measured(tasks.mixture)


@_mixture.beside("ours", "=")
def _(tasks):
    """The mixture over the perturbed task is 16η²ΣλᵢKᵢ(σᵢ²/nᵢ + 3bᵢζᵢ²/n) with n = Σnᵢ

    Both sides are divided by 16η².
    """
    return tasks.size(together=True)
