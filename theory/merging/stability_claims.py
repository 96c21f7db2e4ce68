"""Unified merging (arXiv 2601.21690), Lemmas 1 and 3, equation 5, Theorem 1."""

from functools import partial
from math import exp, sqrt

import jax
import jax.numpy as jnp
import numpy as np

from theory.claims import Claim, Estimate
from theory.merging.bounds import Form, local_stability
from theory.merging.quadratic import constants, exact
from theory.merging.testbeds import (
    PAPER,
    Bed,
    bound,
    drawn,
    expected,
    generator,
    long,
    measured,
    minimiser,
    mixed,
)

BEDS: dict[str, tuple[Bed, str]] = {
    "minimisers": (partial(minimiser, 2, 10), "empirical minimisers of N=2 tasks, n=10"),
}
MANY = 80_000  # runs, where draws of a quantity vary by many times its mean
EXCESS = 0.23  # of MIXED, to two digits
MIXED = "3 tasks of different n, K, b, λ"


def lemma_1(bed: Bed, gradient: str, of_optimisation: bool = False) -> float:
    """Computes the right side of Lemma 1 at the best γ, in closed form.

    Args:
      bed: Builds the tasks.
      gradient: Which squared gradient the bound has: a field of `Quantities`.
      of_optimisation: Whether to add C|∇f|², as equation 5 does.

    Returns:
      The bound.
    """
    consts, quantities = constants(bed()), exact(bed())
    square = float(getattr(quantities, gradient))
    stability = float(quantities.stability)
    rest = float(jnp.asarray(consts.pl) * quantities.gradient) if of_optimisation else 0.0
    return float(jnp.asarray(consts.smoothness)) / 2 * stability + sqrt(square * stability) + rest


def _generalisation() -> list[Claim]:
    claims = []
    for name, source, field, statement in (
        ("L1", "Lemma 1 (= Lemma 2)", "generalisation", "E_G ≤ {}/2γ + (L+γ)/2 stability"),
        ("eq5", "eq. (5)", "excess", "excess ≤ (L+γ)/2 stability + {}/2γ + C|∇f|²"),
    ):
        own = field == "excess"
        for key, (bed, domain) in (*BEDS.items(), ("mixed", (mixed, MIXED))):
            if key != "mixed":
                claims.append(
                    Claim(
                        f"{PAPER}/{name}-{key}/printed",
                        statement.format("|∇f|²"),
                        f"{PAPER} {source}",
                        f"{domain}; best γ",
                        partial(lemma_1, bed, "gradient", own),
                        drawn(bed, field, MANY),
                        relation="<=",
                        note="(1/N)Σ∇ℓ(x;z̃ᵢ) is not ∇f(x), which is 0 here",
                    )
                )
            claims.append(
                Claim(
                    f"{PAPER}/{name}-{key}/corrected",
                    statement.format("mean|∇ℓ(x;zᵢ)|²"),
                    f"{PAPER} {source}",
                    f"{domain}; best γ",
                    partial(lemma_1, bed, "sample_gradient", own),
                    drawn(bed, field, MANY),
                    relation="<=",
                )
            )
    claims += [
        Claim(
            f"{PAPER}/{field}/ours",
            statement,
            f"{PAPER} eq. (3)",
            MIXED,
            expected(mixed, field),
            drawn(mixed, field, 10_000),
            note=f"seen: 5 % of the excess, {EXCESS}",
            effect=0.05 * EXCESS,
        )
        for field, statement in (
            ("generalisation", "E_G = (1/N)Σᵢ Σ_h h λᵢ(1-ρᵢ) s²/nᵢ"),
            ("optimisation", "E_O = ½ Σ_h h E(x_avg - x̂)²"),
            ("excess", "E F(x_avg) - E f(x̂) = E_G + E_O"),
        )
    ]
    return claims


def _growth() -> float:
    """(1 + 4ηL)^K - 1 at ηL = 1/(8K), K = 1000."""
    return (1 + 4 / 8000) ** 1000 - 1


def _one_step(coupled: bool) -> float:
    """The additive term of a step in units of 4η²: case 1 and case 2 by their probabilities."""
    n, b, variance, zeta2 = 20.0, 4.0, 1.0, 0.5
    first = 0.0 if coupled else variance / b
    return (1 - b / n) * first + b / n * (variance / b + 3 * zeta2)


def _combined() -> float:
    n, b, variance, zeta2 = 20.0, 4.0, 1.0, 0.5
    return variance / n + 3 * b / n * zeta2


def _local(bed: Bed, form: Form) -> float:
    tasks = bed()
    return float(np.mean(local_stability(constants(tasks), tasks.training, form=form)))


def _mixture() -> float:
    """Of Step 2, Σλᵢ(nᵢ/n · with the other sample + (1 - nᵢ/n) · without), in units of 16η²."""
    n, weights = np.array([20.0, 60.0]), np.array([0.5, 0.5])
    steps, batch, variance, zeta2 = np.array([5.0, 9.0]), 4.0, 1.0, 0.5
    seen = n / n.sum()
    per_task = seen * (variance + 3 * batch * zeta2) / n + (1 - seen) * variance / n
    return float(np.sum(weights * steps * per_task))


def _mixed_size(total: bool) -> float:
    n, weights = np.array([20.0, 60.0]), np.array([0.5, 0.5])
    steps, batch, variance, zeta2 = np.array([5.0, 9.0]), 4.0, 1.0, 0.5
    per_task = variance / n + 3 * batch * zeta2 / (n.sum() if total else n)
    return float(np.sum(weights * steps * per_task))


def _coupled(key: jax.Array, quick: bool) -> Estimate:
    """|x - x̃|² after a step from one point, of batches of the same places without the other
    sample."""
    rng = generator(key)
    z = rng.normal(size=(1000, 20))
    other = z + np.eye(20)[0] * rng.normal(size=(1000, 1))
    places = rng.integers(1, 20, size=(1000, 4))
    x, twin = (1 - 0.1 * (1 - np.take_along_axis(data, places, 1)).mean(1) for data in (z, other))
    return Estimate(float(((x - twin) ** 2).max()), tolerance=1e-12)


def _lemma_3() -> list[Claim]:
    source = f"{PAPER} Lemma 3"
    rest = "N=2, one centre, η=1/(8KL), n=10, b=1"
    bed, domain = partial(long, 2, 1000), f"{rest}, K=1000"
    small, few = partial(long, 2, 20), f"{rest}, K=20"
    return [
        Claim(
            f"{PAPER}/L3-bernoulli/printed",
            "(1 + 4ηL)^K - 1 ≤ 4ηLK for η ≤ 1/(8KL)",
            source,
            "K=1000, ηL=1/(8K)",
            lambda: 0.5,
            measured(_growth),
            relation="<=",
            note="Bernoulli's inequality is the reverse",
        ),
        Claim(
            f"{PAPER}/L3-bernoulli/corrected",
            "(1 + 4ηL)^K - 1 ≤ 2(√e - 1) 4ηLK, 1.2974 of it: 5.19 in place of 16",
            source,
            "K=1000, ηL=1/(8K)",
            lambda: 2 * (exp(0.5) - 1) * 0.5,
            measured(_growth),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/L3-case1/printed",
            "both cases: (1-b/n) 4η²σ²/b + (b/n) 4η²(σ²/b + 3ζ²) = 4η²(σ²/n + 3bζ²/n)",
            source,
            "n=20, b=4, σ²=1, ζ²=½",
            _combined,
            measured(partial(_one_step, False)),
            note="the left side is 4η²(σ²/b + 3bζ²/n)",
        ),
        Claim(
            f"{PAPER}/L3-case1/corrected",
            "(1-b/n) 0 + (b/n) 4η²(σ²/b + 3ζ²) = 4η²(σ²/n + 3bζ²/n)",
            source,
            "n=20, b=4, σ²=1, ζ²=½; both runs see the same places",
            _combined,
            measured(partial(_one_step, True)),
        ),
        Claim(
            f"{PAPER}/L3-case1-coupled/ours",
            "a batch of the same places without the other sample moves both runs alike",
            source,
            "quadratic, one step from one point, n=20, b=4",
            lambda: 0.0,
            _coupled,
        ),
        Claim(
            f"{PAPER}/L3-cross/printed",
            "step (i): E⟨x - x̃, ∇ℓ(x̃;z) - ∇ℓ(x̃;z̃)⟩ = 0",
            source,
            MIXED,
            lambda: 0.0,
            drawn(mixed, "cross", MANY),
            note="x̃ has seen z̃",
        ),
        Claim(
            f"{PAPER}/L3-cross/corrected",
            "E⟨x - x̃, ∇ℓ(x̃;z) - ∇ℓ(x̃;z̃)⟩ = -2s² Σ_h h(1-ρ)/n",
            source,
            MIXED,
            expected(mixed, "cross"),
            drawn(mixed, "cross", MANY),
        ),
        Claim(
            f"{PAPER}/L3-eq11/printed",
            "E|x - x̃|² ≤ 16Kη²(σ²/n + 3bζ²/n)",
            f"{PAPER} eq. (11)",
            domain,
            partial(_local, bed, "printed"),
            drawn(bed, "local_stability", 20_000),
            relation="<=",
            note="violated from K ≈ 8n on, by K/8n",
        ),
        Claim(
            f"{PAPER}/L3-eq11/ours",
            "E|x - x̃|² = 2s² Σ_h [(1-ρ)²/n² + (ηh)² a (1-1/n)/(bn)]",
            f"{PAPER} eq. (11)",
            domain,
            expected(bed, "local_stability"),
            drawn(bed, "local_stability", 20_000),
        ),
        Claim(
            f"{PAPER}/L3-eq11/corrected",
            "E|x - x̃|² ≤ 2σ²[(ηK)²/(n(n-1)) + η²K/(bn)], convex",
            f"{PAPER} eq. (11)",
            domain,
            partial(_local, bed, "corrected"),
            drawn(bed, "local_stability", 20_000),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/L3-eq11-few-steps/ours",
            "E|x - x̃|² ≤ 16Kη²(σ²/n + 3bζ²/n) while K ≤ 8n",
            f"{PAPER} eq. (11)",
            few,
            partial(_local, small, "printed"),
            drawn(small, "local_stability", 20_000),
            relation="<=",
        ),
    ]


def _theorem_1() -> list[Claim]:
    source = f"{PAPER} Theorem 1"
    bed, domain = partial(long, 2, 4000), "N=2, one centre, η=1/(8KL), n=10, K=4000, b=1"
    return [
        Claim(
            f"{PAPER}/T1/printed",
            "E|x_avg - x̃_avg|² ≤ 16η²ΣλᵢKᵢ(σᵢ²/nᵢ + 3bᵢζᵢ²/nᵢ)",
            source,
            domain,
            bound(bed, "stability"),
            drawn(bed, "stability", 20_000),
            relation="<=",
            note="else loose by N²: one task is perturbed, with weight λᵢ²",
        ),
        Claim(
            f"{PAPER}/T1/corrected",
            "E|x_avg - x̃_avg|² ≤ (1/N)Σλᵢ² 2σᵢ²[(ηKᵢ)²/(nᵢ(nᵢ-1)) + η²Kᵢ/(bᵢnᵢ)]",
            source,
            domain,
            bound(bed, "stability", "corrected"),
            drawn(bed, "stability", 20_000),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/T1-mixed/corrected",
            "E|x_avg - x̃_avg|² ≤ (1/N)Σλᵢ² 2σᵢ²[(ηKᵢ)²/(nᵢ(nᵢ-1)) + η²Kᵢ/(bᵢnᵢ)]",
            source,
            MIXED,
            bound(mixed, "stability", "corrected"),
            drawn(mixed, "stability", 160_000),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/T1/ours",
            "E|x_avg - x̃_avg|² = (1/N)Σλᵢ² E|xᵢ - x̃ᵢ|²",
            f"{PAPER} Definition 2",
            MIXED,
            expected(mixed, "stability"),
            drawn(mixed, "stability", 160_000),
        ),
        Claim(
            f"{PAPER}/T1-mixture/ours",
            "Step 2's mixture over the perturbed task = ΣλᵢKᵢ(σᵢ²/nᵢ + 3bᵢζᵢ²/n), n = Σnᵢ",
            f"{PAPER} eq. (13)",
            "N=2, n=(20, 60), b=4",
            partial(_mixed_size, True),
            measured(_mixture),
        ),
    ]


CLAIMS = (*_generalisation(), *_lemma_3(), *_theorem_1())
