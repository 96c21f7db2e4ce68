"""features-are-fate (arXiv 2410.08194), Appendices A and B: the steps of the proofs, one by one.

Expectations are Monte Carlo over Gaussian data; what concerns networks is gradient descent.
"""

from collections.abc import Callable
from functools import reduce
from math import cos, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory import problems
from theory.claims import Claim, Estimate, Simulate
from theory.deep_linear import distributions, networks
from theory.deep_linear.grid import simulate_overlaps
from theory.deep_linear.sparsification_claims import conserved

PAPER = "features-are-fate"
N, D = 10, 20
RATE = 0.02


def _over_designs(of: Callable[[Array], Array], n: int = N) -> Simulate:
    """Mean of a function of the Gram matrix of X^+ [X beta_s, X nu, noise], see `Overlaps`."""

    def simulate(key: Array, quick: bool) -> Estimate:
        keys = jax.random.split(key, 2_000 if quick else 20_000)
        return Estimate.mean(of(simulate_overlaps(keys, [n], D).gram[:, 0]))

    return simulate


def _trace_limit(key: Array, quick: bool) -> Estimate:
    """E tr X^+T X^+ as d -> inf at n = d/2, from d = 40 and 80: 2 f(80) - f(40) leaves O(1/d^2)."""
    keys = jax.random.split(key, 2_000 if quick else 20_000)
    small, large = (
        np.asarray(simulate_overlaps(keys, [d // 2], d).gram[:, 0, 2, 2]) for d in (40, 80)
    )
    return Estimate.mean(2 * large - small)


def _over_chi2(n: int, of: Callable[[Array], Array]) -> Simulate:
    """Mean of a function of |z|^2, z Gaussian in n dimensions."""

    def simulate(key: Array, quick: bool) -> Estimate:
        draws = 25_000 if quick else 100_000
        return Estimate.mean(of(jax.random.chisquare(key, n, (draws,))))

    return simulate


def _source_fit(key: Array, quick: bool) -> Estimate:
    """Mean of b = beta_s.X^T y / |X beta_s|^2 at theta = 1, sigma = 0.5 (eqs. 108, 109)."""
    source = simulate_overlaps(jax.random.split(key, 2_000 if quick else 20_000), [N], D).source
    uu, uv, ue = jnp.moveaxis(source[:, 0], -1, 0)
    return Estimate.mean((uu * jnp.cos(1.0) + uv * jnp.sin(1.0) + 0.5 * ue) / uu)


def _kolmogorov(key: Array, quick: bool) -> Estimate:
    """sqrt(draws) times the largest distance between simulated and exact cdf of the risk."""
    draws = 1_000 if quick else 4_000
    risks = simulate_overlaps(jax.random.split(key, draws), [N], D).scratch(0.0, 1.0)
    ranked = np.sort(risks[:, 0])
    nodes = np.quantile(ranked, np.linspace(0, 1, 101))
    # Between these the cdf is interpolated: an error of the order of 1e-4, hence the tolerance.
    exact = np.interp(ranked, nodes, distributions.scratch_law(N, D, 1.0).cdf(nodes))
    step = np.arange(draws) / draws
    gap = np.maximum(np.abs(exact - step), np.abs(exact - step - 1 / draws)).max()
    return Estimate(float(gap) * sqrt(draws), tolerance=0.01)


def _smallest(matrices: list[Array]) -> float:
    return float(min(jnp.linalg.eigvalsh(m)[0] for m in matrices))


def _assumption(gaussian: bool) -> Simulate:
    """The largest lambda for which (22) holds, L = 2: N(0, 1) entries, or `small_weights`."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        if gaussian:
            first, last = jax.random.split(key)
            weights = (jax.random.normal(first, (D, D)), jax.random.normal(last, (D,)))
        else:
            weights = networks.small_weights(key, D, 2, 1.0)
        return Estimate(_smallest(conserved(weights)), tolerance=1e-9)

    return simulate


def _not_monotone(key: Array, quick: bool) -> Estimate:
    """lambda_min of (A + D)^2 - A^2 for positive semidefinite 2 x 2 A and D, least of 1000."""
    del quick
    roots = jax.random.normal(key, (2, 1000, 2, 2))
    a, d = roots @ roots.mT
    gap = (a + d) @ (a + d) - a @ a
    return Estimate(float(jnp.linalg.eigvalsh(gap)[:, 0].min()), tolerance=1e-9)


def _product_floor(key: Array, quick: bool) -> Estimate:
    """sigma_min(AB) - sigma_min(A) sigma_min(B) of square matrices, least of 1000."""
    del quick
    a, b = jax.random.normal(key, (2, 1000, 3, 3))
    least = lambda m: jnp.linalg.svd(m, compute_uv=False)[:, -1]  # noqa: E731
    return Estimate(float((least(a @ b) - least(a) * least(b)).min()), tolerance=1e-9)


def _gain(key: Array, quick: bool) -> Estimate:
    """Least of lambda_min(Phi^T Phi) / alpha^{2(L-1)} along pretraining, L = 4, Phi = W_1..W_3."""
    del quick
    alpha, depth = 0.5, 4
    beta_s, _ = problems.tasks(D, 0.0)
    weights = networks.small_weights(key, D, depth, alpha)
    least = []
    for _ in range(20):
        phi = reduce(jnp.matmul, weights[:-1])
        least.append(jnp.linalg.svd(phi, compute_uv=False)[-1] ** 2 / alpha ** (2 * (depth - 1)))
        weights = networks.pretrain(weights, beta_s, RATE, 50).weights
    return Estimate(float(min(least)), tolerance=1e-3)


def _feature_norm(key: Array, quick: bool) -> Estimate:
    """|v| with Phi = beta_s v^T for |beta_s| = 2, L = 3, extrapolated in the step size."""
    del quick
    alpha = 1e-3
    beta_s = 2 * problems.tasks(D, 0.0)[0]
    start = networks.small_weights(key, D, 3, alpha)

    def norm(rate: float) -> Array:
        weights = networks.pretrain(start, beta_s, rate, round(600 / rate)).weights
        return jnp.linalg.norm(beta_s @ weights[0] @ weights[1]) / 4

    return Estimate(float(2 * norm(RATE / 4) - norm(RATE / 2)), tolerance=1e-4)


def _frozen(key: Array, quick: bool) -> Estimate:
    """Largest change of an entry of (I - P) W_1 in training from scratch, L = 3."""
    del quick
    key_weights, key_data = jax.random.split(key)
    sample = problems.draw(key_data, N, D, 0.8, 0.5)
    start = networks.small_weights(key_weights, D, 3, 0.1)
    trained = networks.fine_tune(start, sample.x, sample.y, RATE, 5_000).weights
    _, _, rows = jnp.linalg.svd(sample.x, full_matrices=False)
    change = trained[0] - start[0]
    return Estimate(float(jnp.abs(change - rows.T @ (rows @ change)).max()), tolerance=1e-12)


def _alignment_bound(key: Array, quick: bool) -> Estimate:
    """Largest (1 - (v_l.u_{l+1})^2) / (alpha^2 C_l / s_{l+1}^2) over layers, C_l of (70)."""
    del quick
    alpha = 0.05
    beta_s, _ = problems.tasks(D, 0.0)
    start = networks.small_weights(key, D, 3, alpha)
    trained = networks.pretrain(start, beta_s, RATE, round(400 / RATE)).weights
    bars = [w / alpha for w in (*start[:-1], start[-1][:, None])]
    layers = [*trained[:-1], trained[-1][:, None]]
    ratios = []
    for l, gap in enumerate(conserved(tuple(w / alpha for w in start))):
        v = jnp.linalg.svd(layers[l])[2][0]
        u, s, _ = jnp.linalg.svd(layers[l + 1], full_matrices=False)
        top = [jnp.linalg.norm(bars[i], 2) ** 2 for i in (l, -1)]
        frobenius = [jnp.sum(bars[i] ** 2) for i in (l, -1)]
        constant = 2 * jnp.linalg.norm(gap, 2) + frobenius[0] - frobenius[1] + top[0] - top[1]
        ratios.append((1 - (v @ u[:, 0]) ** 2) * s[0] ** 2 / (alpha**2 * constant))
    return Estimate(float(max(ratios)), tolerance=1e-6)


def row(
    name: str,
    statement: str,
    source: str,
    domain: str,
    predicted: float,
    simulate: Simulate,
    **more: Any,
) -> Claim:
    """Builds a claim of this paper whose prediction is a number.

    Args:
      name: The claim's id after the paper's.
      statement: What is claimed.
      source: Where it stands in the paper.
      domain: The numbers at which both sides are evaluated.
      predicted: The prediction.
      simulate: The simulator.
      **more: Other fields of `Claim`.

    Returns:
      The claim.
    """
    at = f"{PAPER} {source}"
    return Claim(f"{PAPER}/{name}", statement, at, domain, lambda: predicted, simulate, **more)


_RIDGE, _LARGE = 0.3, 100_000
_AT = f"n={N}, d={D}"

CLAIMS: tuple[Claim, ...] = (
    row(
        "eq22-gaussian/ours",
        "the Gaussian initialisation of App. D.1 misses (22): largest λ is negative",
        "eq. (22), App. D.1, pp. 15, 27",
        f"d={D}, L=2",
        0.0,
        _assumption(True),
        relation="<=",
        note="so the theorems do not apply to the paper's networks",
    ),
    row(
        "eq22-orthogonal/ours",
        "W_l = √(L-l+1) · orthogonal, |W_L| = 1 satisfies (22): largest λ",
        "eq. (22), p. 15",
        f"d={D}, L=2",
        1.0,
        _assumption(False),
    ),
    row(
        "eq44/printed",
        "A ≽ 0, D ≽ 0 ⇒ (A+D)² ≽ A²: least eigenvalue of the difference is ≥ 0",
        "eqs. (43), (44), p. 17",
        "2 x 2, least of 1000 draws",
        0.0,
        _not_monotone,
        relation=">=",
        note="squaring is not monotone; (46) holds all the same",
    ),
    row(
        "eq44/corrected",
        "σ_min(AB) ≥ σ_min(A) σ_min(B) for square A, B, which gives (46) from (45) without (44)",
        "eqs. (43), (44), p. 17, corrected",
        "3 x 3, least of 1000 draws",
        0.0,
        _product_floor,
        relation=">=",
    ),
    row(
        "eq46/exact",
        "λ_min(ΦᵀΦ) ≥ (α²λ)^(L-1) along training, Φ = W_1…W_(L-1): least ratio",
        "eqs. (42)-(46), p. 17",
        f"d={D}, L=4, α=0.5, 20 times",
        1.0,
        _gain,
        relation=">=",
        note="tolerance: drift of D_l, O(rate²)",
    ),
    row(
        "T3.4-norm/ours",
        "Φ → β_s vᵀ with |v| = |β_s|^((L-1)/L - 1)",
        "Thm 3.4, eqs. (73)-(77), p. 19",
        f"d={D}, L=3, |β_s|=2, α=0.001, step size extrapolated to 0",
        2 ** (-1 / 3),
        _feature_norm,
    ),
    row(
        "eq69/corrected",
        "1 - (v_l·u_(l+1))² ≤ α² C_l / s_(l+1)²: largest ratio",
        "Lemma B.1, eqs. (69), (70), p. 19",
        f"d={D}, L=3, α=0.05",
        1.0,
        _alignment_bound,
        relation="<=",
        note="with operator norms where (70) prints their squares",
    ),
    row(
        "eq90/exact",
        "what the data cannot see of W_1 stays as it was: largest change of (I-P) W_1",
        "eqs. (82), (90), pp. 20-21",
        f"{_AT}, L=3, gradient descent",
        0.0,
        _frozen,
        note="tolerance: float64 rounding",
    ),
    row(
        "eq96/exact",
        "E|Pβ|² = n/d",
        "eq. (96), p. 21",
        _AT,
        N / D,
        _over_designs(lambda gram: gram[:, 0, 0]),
    ),
    row(
        "eq102/limit",
        "E tr X⁺ᵀX⁺ → γ/(1-γ)",
        "eqs. (97)-(102), pp. 21-22",
        "γ=1/2, d=40 and 80 extrapolated",
        1.0,
        _trace_limit,
    ),
    row(
        "eq102/ours",
        "E tr X⁺ᵀX⁺ = n/(d-n-1)",
        "eqs. (97)-(102), pp. 21-22, sharpened",
        _AT,
        N / (D - N - 1),
        _over_designs(lambda gram: gram[:, 2, 2]),
    ),
    row(
        "eq113/exact",
        "E b = cos θ: the refitted scale of β_s is unbiased",
        "eqs. (112), (113), p. 23",
        f"{_AT}, θ=1, σ=0.5",
        cos(1.0),
        _source_fit,
    ),
    row(
        "eq120/exact",
        "E 1/|z|² = 1/(n-2), z ~ N(0, I_n)",
        "eqs. (115)-(120), p. 23",
        f"n={N}",
        1 / (N - 2),
        _over_chi2(N, lambda u: 1 / u),
        note="(117) lacks a minus sign in the exponent",
    ),
    row(
        "eq138/limit",
        "I₁(n, λ) = E[|z|²/(|z|²+nλ)²] → 1/(n(1+λ)²): their ratio",
        "eqs. (129), (138), p. 24",
        f"n={_LARGE}, λ={_RIDGE}",
        1.0,
        _over_chi2(_LARGE, lambda u: _LARGE * (1 + _RIDGE) ** 2 * u / (u + _LARGE * _RIDGE) ** 2),
    ),
    row(
        "eq139/limit",
        "I₁(n+2, λ) = E[|z|⁴/(|z|²+nλ)²] → 1/(1+λ)²",
        "eqs. (129), (139), p. 24",
        f"n={_LARGE}, λ={_RIDGE}",
        1 / (1 + _RIDGE) ** 2,
        _over_chi2(_LARGE, lambda u: (u / (u + _LARGE * _RIDGE)) ** 2),
    ),
    row(
        "eq140/limit",
        "I₂(n, λ) = E[|z|²/(|z|²+nλ)] → 1/(1+λ)",
        "eqs. (130), (140), p. 24",
        f"n={_LARGE}, λ={_RIDGE}",
        1 / (1 + _RIDGE),
        _over_chi2(_LARGE, lambda u: u / (u + _LARGE * _RIDGE)),
    ),
    row(
        "eq144/exact",
        "E⟨ν, (I-P)β_s⟩ = 0",
        "eqs. (143), (144), p. 25",
        _AT,
        0.0,
        _over_designs(lambda gram: -gram[:, 0, 1]),
        note="the sum in (143) runs to d-n, not n-d",
    ),
    row(
        "T3.6-law/ours",
        "R_sc = Beta((d-n)/2, n/2) + σ² χ²_n/χ²_(d-n+1): √draws · sup|F - F̂| ≤ 1.95",
        "Thm 3.6, p. 6, the whole law",
        f"{_AT}, σ=1",
        1.95,
        _kolmogorov,
        relation="<=",
        note="Kolmogorov-Smirnov: exceeded with probability 1e-3 if the law is exact",
    ),
)
