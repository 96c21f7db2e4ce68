"""features-are-fate (arXiv 2410.08194), Appendices B.5 to B.8, the expectations of the proofs.

Each is a mean over Gaussian data in NumPy.
"""

from collections.abc import Callable
from functools import partial
from math import cos, sin, sqrt

import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, Simulate, generator
from theory.deep_linear import distributions
from theory.deep_linear.regressions import (
    Limit,
    Setting,
    claim,
    extrapolate,
    least_squares,
    pseudoinverse,
    risks,
)

AT = Setting(10, 20, 1.0, 0.5)
SIZES = f"n={AT.n}, d={AT.d}"
# If the laws agree, √draws times the Kolmogorov-Smirnov statistic exceeds it with probability 1e-3.
KOLMOGOROV = 1.95


def _over_designs(
    of: Callable[[np.ndarray], np.ndarray],
    at: Setting = AT,
    draws: int = 20_000,
    noises: int = 1,
) -> Simulate:
    """Averages a function of X^+ [X beta_s, X nu, noises], `[draws d 2+noises]`."""

    def simulate(key: Array, quick: bool) -> Estimate:
        count, rng = draws // 100 if quick else draws // 10, generator(key)
        values = []
        for _ in range(10):
            x = rng.standard_normal((count, at.n, at.d))
            noise = rng.standard_normal((count, at.n, noises))
            values.append(of(pseudoinverse(x, np.concatenate([x[..., :2], noise], -1))))
        return Estimate.mean(np.concatenate(values))

    return simulate


def _noise(fits: np.ndarray) -> np.ndarray:
    """Averages |X^+ noise|² over the noises. The mean over all noise is tr X^+T X^+."""
    return np.sum(fits[..., 2:] ** 2, -2).mean(-1)


def _over_chi2(n: int, of: Callable[[np.ndarray], np.ndarray]) -> Simulate:
    """Averages a function of |z|² for Gaussian z in n dimensions."""

    def simulate(key: Array, quick: bool) -> Estimate:
        return Estimate.mean(of(generator(key).chisquare(n, 25_000 if quick else 100_000)))

    return simulate


@claim("eq96/exact")
def _():
    """E|P β|² = load, here for |P(β_s cos θ + ν sin θ)|² at load n/d

    Source: eq. (96), p. 21
    Domain: {SIZES}, θ=57.3°
    """
    task = [cos(AT.theta), sin(AT.theta)]
    return AT.n / AT.d, _over_designs(lambda fits: np.sum((fits[..., :2] @ task) ** 2, -1))


@claim("eq102/limit")
def _(at=Limit(0.25, 40, 0.0, 0.0)):
    """For load < 1, E tr X⁺ᵀX⁺ → load/(1-load)

    Source: eqs. (97)-(102), pp. 21-22
    Domain: {at}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        of = partial(_over_designs, _noise, draws=4_000, noises=16)
        return extrapolate(*(of(at.at(d))(key, quick) for d in (at.d, 2 * at.d)))

    return at.load / (1 - at.load), simulate


@claim("eq102/ours")
def _():
    """For n ≤ d-2, E tr X⁺ᵀX⁺ = n/(d-n-1)

    Source: eqs. (97)-(102), pp. 21-22, at finite n and d
    Domain: {SIZES}
    """
    return AT.n / (AT.d - AT.n - 1), _over_designs(_noise)


@claim("eq113/exact")
def _():
    """E b = cos θ, so the refitted scale of β_s is unbiased

    Source: eqs. (112), (113), p. 23
    Domain: {AT}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Averages b = beta_s.X^T y / |X beta_s|² (eqs. 108, 109)."""
        x, y = AT.samples(generator(key), 2_000 if quick else 20_000)
        z = x[..., 0]
        return Estimate.mean(np.sum(z * y, -1) / np.sum(z**2, -1))

    return cos(AT.theta), simulate


@claim("eq120/exact")
def _(n=AT.n):
    """E 1/|z|² = 1/(n-2) for z ~ N(0, I_n). It is finite for n > 2

    (117) lacks a minus sign in the exponent...

    Source: eqs. (115)-(120), p. 23
    Domain: n={n}
    """
    return 1 / (n - 2), _over_chi2(n, lambda u: 1 / u)


@claim("eq138/limit")
def _(n=1_000_000, ridge=0.3):
    """I₁(n, λ) = E[|z|²/(|z|²+nλ)²] → 1/(n(1+λ)²)

    Source: eqs. (129), (138), p. 24
    Domain: n={n}, λ={ridge}
    """
    return 1 / (n * (1 + ridge) ** 2), _over_chi2(n, lambda u: u / (u + n * ridge) ** 2)


@claim("eq139/limit")
def _(n=1_000_000, ridge=0.3):
    """I₁(n+2, λ) = E[|z|⁴/(|z|²+nλ)²] → 1/(1+λ)²

    Source: eqs. (129), (139), p. 24
    Domain: n={n}, λ={ridge}
    """
    return 1 / (1 + ridge) ** 2, _over_chi2(n, lambda u: (u / (u + n * ridge)) ** 2)


@claim("eq140/limit")
def _(n=1_000_000, ridge=0.3):
    """I₂(n, λ) = E[|z|²/(|z|²+nλ)] → 1/(1+λ)

    Source: eqs. (130), (140), p. 24
    Domain: n={n}, λ={ridge}
    """
    return 1 / (1 + ridge), _over_chi2(n, lambda u: u / (u + n * ridge))


@claim("eq144/exact")
def _():
    """E⟨ν, (I-P)β_s⟩ = 0 for ν ⊥ β_s

    The sum in (143) runs to d-n, not n-d.

    Source: eqs. (143), (144), p. 25
    Domain: {SIZES}
    """
    return 0.0, _over_designs(lambda fits: -fits[..., 1, 0])


@claim(
    "T3.6-law/ours",
    "<=",
    attack="a statistical test of a whole law: its bound is exceeded by chance",
    overlooks="tightened",
)
def _():
    """R_sc has the law of Beta((d-n)/2, n/2) + σ² χ²_n/χ²_(d-n+1), by √draws · sup|F - F̂| ≤ 1.95

    This is the Kolmogorov-Smirnov test. If the law is exact, the bound is exceeded with probability
    1e-3.

    Source: Thm 3.6, p. 6, the whole law
    Domain: {AT}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes √draws times the largest distance between the simulated and the exact cdf."""
        draws = 1_000 if quick else 4_000
        ranked = np.sort(risks(least_squares, AT, generator(key), draws))
        nodes = np.quantile(ranked, np.linspace(0, 1, 101))
        # Between these the cdf is interpolated, with an error of order 1e-4. Hence the tolerance.
        law = distributions.scratch_law(n=AT.n, d=AT.d, sigma=AT.sigma)
        exact = np.interp(ranked, nodes, law.cdf(nodes))
        step = np.arange(draws) / draws
        gap = np.maximum(np.abs(exact - step), np.abs(exact - step - 1 / draws)).max()
        return Estimate(float(gap) * sqrt(draws), tolerance=0.01)

    return KOLMOGOROV, simulate
