"""features-are-fate (arXiv 2410.08194), Appendices B.5 to B.8: the expectations of the proofs.

Each is a mean over Gaussian data in NumPy.
"""

from collections.abc import Callable
from functools import partial
from math import cos, sin, sqrt

import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate, Simulate, generator
from theory.deep_linear import distributions
from theory.deep_linear.regressions import (
    Limit,
    Setting,
    extrapolate,
    least_squares,
    pseudoinverse,
    risks,
    row,
)

AT = Setting(10, 20, 1.0, 0.5)
SIZES = f"n={AT.n}, d={AT.d}"
# √draws times the Kolmogorov-Smirnov statistic exceeds it with probability 1e-3 if laws agree.
KOLMOGOROV = 1.95


def _over_designs(
    of: Callable[[np.ndarray], np.ndarray],
    at: Setting = AT,
    draws: int = 20_000,
    noises: int = 1,
) -> Simulate:
    """Mean of a function of X^+ [X beta_s, X nu, noises], `[draws d 2+noises]`."""

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
    """Mean of |X^+ noise|² over the noises; that over all noise is tr X^+T X^+."""
    return np.sum(fits[..., 2:] ** 2, -2).mean(-1)


def _trace_limit(at: Limit) -> Simulate:
    def simulate(key: Array, quick: bool) -> Estimate:
        of = partial(_over_designs, _noise, draws=4_000, noises=16)
        sizes = (of(at.at(d))(key, quick) for d in (at.d, 2 * at.d))
        return extrapolate(*sizes)

    return simulate


def _over_chi2(n: int, of: Callable[[np.ndarray], np.ndarray]) -> Simulate:
    """Mean of a function of |z|², z Gaussian in n dimensions."""

    def simulate(key: Array, quick: bool) -> Estimate:
        return Estimate.mean(of(generator(key).chisquare(n, 25_000 if quick else 100_000)))

    return simulate


def _source_fit(key: Array, quick: bool) -> Estimate:
    """Mean of b = beta_s.X^T y / |X beta_s|² (eqs. 108, 109)."""
    x, y = AT.samples(generator(key), 2_000 if quick else 20_000)
    z = x[..., 0]
    return Estimate.mean(np.sum(z * y, -1) / np.sum(z**2, -1))


def _kolmogorov(key: Array, quick: bool) -> Estimate:
    """√draws times the largest distance between simulated and exact cdf of the risk."""
    draws = 1_000 if quick else 4_000
    ranked = np.sort(risks(least_squares, AT, generator(key), draws))
    nodes = np.quantile(ranked, np.linspace(0, 1, 101))
    # Between these the cdf is interpolated: an error of the order of 1e-4, hence the tolerance.
    law = distributions.scratch_law(AT.n, AT.d, AT.sigma)
    exact = np.interp(ranked, nodes, law.cdf(nodes))
    step = np.arange(draws) / draws
    gap = np.maximum(np.abs(exact - step), np.abs(exact - step - 1 / draws)).max()
    return Estimate(float(gap) * sqrt(draws), tolerance=0.01)


def _ridge_integrals() -> list[Claim]:
    n, ridge = 1_000_000, 0.3
    shrunk = 1 + ridge
    return [
        row(
            f"eq{number}/limit",
            statement,
            f"eqs. ({definition}), ({number}), p. 24",
            f"n={n}, λ={ridge}",
            predict,
            _over_chi2(n, of),
        )
        for number, statement, definition, predict, of in (
            (
                138,
                "I₁(n, λ) = E[|z|²/(|z|²+nλ)²] → 1/(n(1+λ)²)",
                129,
                1 / (n * shrunk**2),
                lambda u: u / (u + n * ridge) ** 2,
            ),
            (
                139,
                "I₁(n+2, λ) = E[|z|⁴/(|z|²+nλ)²] → 1/(1+λ)²",
                129,
                1 / shrunk**2,
                lambda u: (u / (u + n * ridge)) ** 2,
            ),
            (
                140,
                "I₂(n, λ) = E[|z|²/(|z|²+nλ)] → 1/(1+λ)",
                130,
                1 / shrunk,
                lambda u: u / (u + n * ridge),
            ),
        )
    ]


def _claims() -> list[Claim]:
    half = Limit(0.25, 40, 0.0, 0.0)
    return [
        row(
            "eq96/exact",
            "E|P β|² = γ, here |P(β_s cos θ + ν sin θ)|² at n/d",
            "eq. (96), p. 21",
            f"{SIZES}, θ=57.3°",
            AT.n / AT.d,
            _over_designs(
                lambda fits: np.sum((fits[..., :2] @ [cos(AT.theta), sin(AT.theta)]) ** 2, -1)
            ),
        ),
        row(
            "eq102/limit",
            "γ < 1: E tr X⁺ᵀX⁺ → γ/(1-γ)",
            "eqs. (97)-(102), pp. 21-22",
            half,
            half.load / (1 - half.load),
            _trace_limit(half),
        ),
        row(
            "eq102/ours",
            "n ≤ d-2: E tr X⁺ᵀX⁺ = n/(d-n-1)",
            "eqs. (97)-(102), pp. 21-22, at finite n and d",
            SIZES,
            AT.n / (AT.d - AT.n - 1),
            _over_designs(_noise),
        ),
        row(
            "eq113/exact",
            "E b = cos θ: the refitted scale of β_s is unbiased",
            "eqs. (112), (113), p. 23",
            AT,
            cos(AT.theta),
            _source_fit,
        ),
        row(
            "eq120/exact",
            "E 1/|z|² = 1/(n-2), z ~ N(0, I_n); finite for n > 2",
            "eqs. (115)-(120), p. 23",
            f"n={AT.n}",
            1 / (AT.n - 2),
            _over_chi2(AT.n, lambda u: 1 / u),
            note="(117) lacks a minus sign in the exponent",
        ),
        *_ridge_integrals(),
        row(
            "eq144/exact",
            "E⟨ν, (I-P)β_s⟩ = 0 for ν ⊥ β_s",
            "eqs. (143), (144), p. 25",
            SIZES,
            0.0,
            _over_designs(lambda fits: -fits[..., 1, 0]),
            note="the sum in (143) runs to d-n, not n-d",
        ),
        row(
            "T3.6-law/ours",
            "R_sc = Beta((d-n)/2, n/2) + σ² χ²_n/χ²_(d-n+1): √draws · sup|F - F̂| ≤ 1.95",
            "Thm 3.6, p. 6, the whole law",
            AT,
            KOLMOGOROV,
            _kolmogorov,
            relation="<=",
            note="Kolmogorov-Smirnov: exceeded with probability 1e-3 if the law is exact",
            attack="a statistical test of a whole law: its bound is exceeded by chance",
        ),
    ]


CLAIMS: tuple[Claim, ...] = tuple(_claims())
