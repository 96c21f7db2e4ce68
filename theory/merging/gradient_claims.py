"""Unified merging (arXiv 2601.21690), Theorems 2-4, Corollary 2, Lemma 4, eqs. 7, 15-24."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Simulate, measured
from theory.merging import gradient_domains, inequality_domains
from theory.merging.bounds import chi_square, excess_risk_bound
from theory.merging.quadratic import constants
from theory.merging.tasks import QuadraticTasks
from theory.merging.testbeds import admissible, bound, bounds, claim, drawn, edge, expected, mixed

MIXED = "3 tasks of different n, K, b, λ, η=.4/L"
EDGE = "N=3, K=300, η=√(N/K)=.1=1.9999/L, one centre, s=1e-4"
BOTH = "L√(NK)=1/8, η=√(N/K)=1/(8KL), N=3, K=12"
RUNS = 10_000
DRAWS = 20_000  # of gradients and weights


for _number, _place, _coefficient in (
    ("T2", "Theorem 2, eq. (6) (Section IV-A)", 5.0),
    ("C2", "Theorem 4, eq. (19), and Corollary 2, eq. (21) (Appendix A-A)", 12.0),
):

    @claim(
        "{name}/printed",
        "<=",
        attack=gradient_domains.surrogate_printed(_coefficient, restricted=False),
        each=((_number, _coefficient),),
    )
    def _(name, coefficient):
        """At η=√(N/K̄), E|∇f̃(x_avg)|² ≤ 4gap/√(NK̄) + 4Lσ²A₁/(b√(NK̄)) + 6NL²σ²A₂/(bK̄) +
        {coefficient:g}NL²ζ²A₃/K̄

        There is no condition on ηL. The cited result is about the best of all rounds.

        Source: {_place}
        Domain: {EDGE}
        """
        predicted = bound(edge, "surrogate", coefficient=coefficient)
        return predicted, drawn(edge, "surrogate_gradient")

    @claim(
        "{name}/corrected",
        "<=",
        attack=gradient_domains.SURROGATE,
        each=((_number,),),
        overlooks="tightened",
    )
    def _(name):
        """E|∇f̃(x_avg)|² ≤ (1-η/2C)^{{2 min K}}(2L gap + Σλζ²) + ηLΣλ²σ²/b

        Source: {_place}
        Domain: {MIXED}; quadratics, ηL ≤ 1
        """
        predicted = bound(mixed, "surrogate", "corrected")
        return predicted, drawn(mixed, "surrogate_gradient", RUNS)

    @claim(
        "{name}-admissible/reading",
        "<=",
        attack=gradient_domains.surrogate_printed(_coefficient, restricted=True),
        each=((_number, _coefficient),),
        overlooks="tightened",
        sharper="T2-few/ours",
    )
    def _(name, coefficient):
        """At η=√(N/K̄), E|∇f̃(x_avg)|² ≤ 4gap/√(NK̄) + 4Lσ²A₁/(b√(NK̄)) + 6NL²σ²A₂/(bK̄) +
        {coefficient:g}NL²ζ²A₃/K̄

        The search finds that the terms in σ² and ζ² never matter.

        Source: {_place}, with the step size of Lemma 3
        Domain: {BOTH}
        """
        predicted = bound(admissible, "surrogate", coefficient=coefficient)
        return predicted, drawn(admissible, "surrogate_gradient")


@claim("T2-few/ours", "<=", attack=gradient_domains.FEW_STEPS, overlooks="tightened")
def _():
    """E|∇f̃(x_avg)|² ≤ (√(2L gap) + ½ηL(max K - min K)√Σλζ²)² + (ηL)²Σλ²Kσ²/b

    With both step sizes it is at most 1/16 of Theorem 2's bound.

    Source: Theorem 2, eq. (6) (Section IV-A), sharpened
    Domain: {BOTH}; quadratics, ηL ≤ 1
    """
    return float(gradient_domains.few_steps(admissible())), drawn(admissible, "surrogate_gradient")


@claim("T2-vacuous/ours", "<=", attack=gradient_domains.VACUOUS_SURROGATE, overlooks="tightened")
def _():
    """16|∇f̃(x₀)|² ≤ ε_sgd where both step sizes hold, which is weaker than no training

    E|∇f̃(x₀)|² and ε_sgd/16 are compared. Its terms in σ² and ζ² never matter.

    Source: Theorem 2, eq. (6) (Section IV-A), with the step size of Lemma 3
    Domain: {BOTH}
    """

    def untrained() -> QuadraticTasks:
        """Simulates experts that hardly leave their start."""
        return replace(admissible(), rate=jnp.array(1e-12))

    return bound(admissible, "surrogate") / 16, drawn(untrained, "surrogate_gradient")


@claim("surrogate-gradient/ours")
def _():
    """E|∇f̃(x_avg)|² = Σ_h h²[E(Σλᵢρᵢ(x₀-z̄ᵢ))² + Σλᵢ²νᵢ]

    Source: Theorem 2, exact for quadratics
    Domain: {MIXED}
    """
    predicted = expected(mixed, "surrogate_gradient")
    return predicted, drawn(mixed, "surrogate_gradient", RUNS)


class _Squares(NamedTuple):
    """Computes |∇f|², |∇f̃|², Σλ|∇fᵢ|², Σλ|∇fᵢ-∇f|², Σλ|∇fᵢ-∇f̃|² and both chi-squares of drawn
    gradients.
    """

    plain: np.ndarray
    weighted: np.ndarray
    each: np.ndarray
    zeta2: np.ndarray
    dispersion: np.ndarray
    printed: np.ndarray
    divergence: np.ndarray


@cache
def _squares() -> _Squares:
    """Draws gradients of 4 tasks in 3 dimensions and weights, and returns their squares."""
    rng = np.random.default_rng(0)
    g, w = rng.normal(size=(DRAWS, 4, 3)), rng.dirichlet(np.ones(4), DRAWS)
    plain, weighted = g.mean(1), np.einsum("rn,rnd->rd", w, g)
    each, zeta2, dispersion = (
        np.einsum("rn,rnd->r", w, (g - centre[:, None]) ** 2)
        for centre in (0 * plain, plain, weighted)
    )
    away = (1 / w.shape[1] - w) ** 2
    squares = np.sum(plain**2, 1), np.sum(weighted**2, 1)
    chi = np.sum(away / w**2, 1), np.sum(away / w, 1)
    return _Squares(*squares, each, zeta2, dispersion, *chi)


SQUARED = "eqs. (7), (20), (22) (Section IV-A, Appendix A-A)"
CLOSEST = f"4 gradients and weights; the draw of {DRAWS} with the closest sides"


def _closest(left: np.ndarray, right: np.ndarray) -> tuple[float, Simulate]:
    """Returns both sides in the draw with the largest ratio of left to right."""
    worst = (left / right).argmax()
    return float(right[worst]), measured(lambda: left[worst])


@claim("chi-square/printed")
def _printed_divergence(weights=(0.9, 0.1)):
    """Σ(1/N-λ)²/λ² is the chi-square divergence of λ and p = 1/N

    The bounds still hold, as it is larger.

    Source: {SQUARED}
    Domain: λ={weights}: Σ(1/N)²/λ - 1
    """
    found = measured(lambda: sum(1 / 4 / w for w in weights) - 1)
    return chi_square(weights, form="printed"), found


@_printed_divergence.beside("corrected")
def _(weights):
    """Σ(1/N-λ)²/λ is the chi-square divergence"""
    return chi_square(weights)


@claim("eq7/exact", "<=", attack=inequality_domains.EQ_7, overlooks="tightened")
def _():
    """|∇f|² ≤ 2(χ²+1)|∇f̃|² + 2χ²Σλζ² with the printed χ²

    The search finds that 2χ²|∇f̃|² never matters.

    Source: {SQUARED}
    Domain: {CLOSEST}
    """
    s = _squares()
    return _closest(s.plain, 2 * (s.printed + 1) * s.weighted + 2 * s.printed * s.zeta2)


@claim("eq7-tight/ours", "<=", attack=inequality_domains.EQ_7_TIGHT, overlooks="tightened")
def _():
    """|∇f|² ≤ 2|∇f̃|² + 2χ²Σλζ² with the chi-square divergence

    Source: eq. (7) (Section IV-A), sharpened
    Domain: {CLOSEST}
    """
    s = _squares()
    return _closest(s.plain, 2 * s.weighted + 2 * s.divergence * s.zeta2)


@claim("L4/exact", "<=", attack=inequality_domains.LEMMA_4)
def _():
    """Σλ|∇fᵢ|² ≤ |∇f̃|² + Σλζ²

    Assumption 6's κ² = Σλζ² ≤ 1 does not follow from it.

    Source: Lemma 4 and eq. (18) (Appendix A-A)
    Domain: {CLOSEST}
    """
    s = _squares()
    return _closest(s.each, s.weighted + s.zeta2)


@claim("eq17/exact")
def _():
    """Σλ|∇fᵢ|² = |Σλ∇fᵢ|² + Σλ|∇fᵢ - Σλ∇fᵢ|²

    The proof writes f for Σλfᵢ, but in Assumption 3 f is (1/N)Σfᵢ.

    Source: eqs. (15)-(17) (Appendix A-A)
    Domain: {CLOSEST}
    """
    s = _squares()
    return _closest(s.each, s.weighted + s.dispersion)


@cache
def _best_gamma() -> tuple[float, float]:
    """Searches the γ of least eq. (23) over log γ, and returns it with the value."""
    from scipy.optimize import minimize_scalar

    tasks = mixed()
    consts, training = constants(tasks), tasks.training

    @jax.jit
    def at(log: Array) -> Array:
        return jnp.log(excess_risk_bound(consts, training, gamma=jnp.exp(log)).excess)

    optimum: Any = minimize_scalar(lambda x: float(at(x)), bracket=(-1.0, 6.0), tol=1e-9)
    return float(np.exp(optimum.x)), float(np.exp(optimum.fun))


@claim("T3-gamma/exact")
def _():
    """γ* = √(B/8η²S) minimises 8(L+γ)η²S + (1/γ+2C)B

    The tolerance is 1e-5, for a search of a flat minimum.

    Source: eq. (23) and after it (Appendix A-A, step 4)
    Domain: {MIXED}
    """
    return bounds(mixed).gamma, measured(lambda: _best_gamma()[0], 1e-5)


@claim("T3-least/exact")
def _():
    """The least of eq. (23) over γ is 8Lη²S + 2CB + 4√2 η√(SB)

    The tolerance is 1e-5, for a search.

    Source: eq. (23) and after it (Appendix A-A, step 4)
    Domain: {MIXED}
    """
    return bounds(mixed).least, measured(lambda: _best_gamma()[1], 1e-5)


@claim("T3-relaxed/exact", "<=", attack=inequality_domains.RELAXED, overlooks="tightened")
def _():
    """The least of eq. (23) over γ is at most 8(L+1)η²S + (2C+1)B

    This is eq. (23) at γ = 1. Theorem 3 does not use γ*.

    Source: eq. (24) (Appendix A-A, step 4)
    Domain: {MIXED}
    """
    return bounds(mixed).excess, measured(lambda: _best_gamma()[1], 1e-5)


@claim("T3/printed", "<=", attack=gradient_domains.excess_printed(restricted=False))
def _():
    """At η=√(N/K̄), excess ≤ 8(L+1)η²S + (2C+1)B with S = ΣλK(σ²+3bζ²)/n and B = χ²Σλζ² +
    (χ²+1)ε_sgd

    It has the conditions of Theorems 1 and 2, which state no other one on η.

    Source: Theorem 3 (Section IV-A)
    Domain: {EDGE}
    """
    return bound(edge, "excess"), drawn(edge, "excess")


@claim("T3/corrected", "<=", attack=gradient_domains.EXCESS, overlooks="tightened")
def _():
    """excess ≤ (L/2)S + √(S(B + mean(ζ²+σ²))) + CB with corrected S and B

    The search finds that (L/2)S never matters.

    Source: Theorem 3 (Section IV-A)
    Domain: {MIXED}; quadratics, ηL ≤ 1
    """
    return bound(mixed, "least", "corrected"), drawn(mixed, "excess", RUNS)


@claim(
    "T3-admissible/reading",
    "<=",
    attack=gradient_domains.excess_printed(restricted=True),
    overlooks="tightened",
    sharper="T3-few/ours",
)
def _():
    """excess ≤ 8(L+1)η²S + (2C+1)B, S = ΣλK(σ²+3bζ²)/n, B = χ²Σλζ² + (χ²+1)ε_sgd

    The search finds that 8(L+1)η²S never matters.

    Source: Theorem 3 (Section IV-A), with the step size of Lemma 3
    Domain: {BOTH}
    """
    return bound(admissible, "excess"), drawn(admissible, "excess")


@claim("T3-few/ours", "<=", attack=gradient_domains.FEW_STEPS_EXCESS, overlooks="tightened")
def _():
    """excess ≤ (L/2)S + √(S(B + mean(ζ²+σ²))) + CB with the corrected S and with
    √B = √(bound of T2-few/ours) + √(χ²Σλζ²), where χ² is the chi-square divergence

    Source: Theorem 3 (Section IV-A), sharpened
    Domain: {BOTH}; quadratics, ηL ≤ 1
    """
    return float(gradient_domains.few_steps_excess(admissible())), drawn(admissible, "excess")


@claim("T3-vacuous/ours", "<=", attack=gradient_domains.VACUOUS_EXCESS, overlooks="tightened")
def _():
    """At that step size Theorem 3's bound is at least 32 (f̃(x₀) - inf f̃)

    f̃(x₀) - inf f̃ and 1/32 of the bound are compared. 8(L+1)η²S never matters.

    Source: Theorem 3 (Section IV-A), with the step size of Lemma 3
    Domain: {BOTH}
    """
    return float(bounds(admissible).excess) / 32, drawn(admissible, "gap")
