"""Fine-tuning of rank k, beyond features-are-fate, in random subspaces and ordered directions.

The simulator draws data and subspaces and solves least squares in the coordinates of the subspace.
"""

from functools import partial
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory import claims
from theory.claims import Estimate, Simulate, generator
from theory.deep_linear import ranks, sources_domains
from theory.deep_linear.regressions import PAPER, extrapolate, pseudoinverse
from theory.deep_linear.several import in_first, in_random

claim = partial(claims.claim, PAPER)
BEYOND = f"beyond {PAPER}: Thm 3.9, L=1, in a subspace of rank k"


def _random(n: int, d: int, k: int, sigma: float, draws: int) -> Simulate:
    """Simulates the mean risk of fine-tuning at a distance of 1, in a new subspace for each data
    set.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        count = draws // 10 if quick else draws
        return Estimate.mean(in_random(generator(key), np.eye(d)[0], k, n, sigma, count))

    return simulate


@claim("rank-k-random-{side}/ours", each=(("under", 6), ("over", 20)))
def _(side, k, n=12, d=24, sigma=0.5):
    """In a random subspace E R = |δ|²(1-k/d + (k/d)(1-n/k)₊) + (|δ|²(1-k/d) + σ²)
    min(n,k)/(|n-k|-1)

    Source: {BEYOND}
    Domain: n={n}, d={d}, k={k}, |β_t - b_0|=1, σ={sigma}
    """
    law = ranks.random_rank_risk(n=n, d=d, distance=1.0, sigma=sigma, rank=k)
    return law, _random(n, d, k, sigma, 20_000)


@claim("rank-k-flat/ours")
def _(n=19, d=12, k=4, noise2=0.5):
    """For n - 1 = d(1 + σ²/|δ|²), E R = |δ|² at every rank

    Source: {BEYOND}
    Domain: d={d}, k={k}, σ²={noise2}, |β_t - b_0|=1, n=1+d(1+σ²)={n}
    """
    return 1.0, _random(n, d, k, sqrt(noise2), 20_000)


@claim("rank-k-ends/ours", ">=", attack=sources_domains.ENDS)
def _(n=19, d=12, k=8, noise2=0.5):
    """In a random subspace E R is at least the smaller of E R with all directions and with none

    It is attained here, where all ranks are equal. A subspace of rank 0 < k < d is never the best.

    Source: {BEYOND}
    Domain: d={d}, k={k}, σ²={noise2}, |β_t - b_0|=1, n=1+d(1+σ²)={n}
    """
    best = ranks.best_random_rank(n=n, d=d, distance=1.0, sigma=sqrt(noise2))
    return best.risk, _random(n, d, k, sqrt(noise2), 20_000)


# --- directions in an order -----------------------------------------------------------------------

EIGENVALUES = np.array([1.0, 0.5, 0.25, 0.125])


@claim("rank-k-first-under/ours")
def _(n=12, k=4, sigma=0.5):
    """In the first k ≤ n-2 eigendirections E R = m + (m + σ²) k/(n-k-1) exactly, with m = Σ_{{i>k}}
    s_i δ_i²

    Source: {BEYOND}
    Domain: eigenvalues 1, 1/2, 1/4, 1/8, each twice; n={n}, k={k}, σ={sigma}
    """
    s, offset = np.repeat(EIGENVALUES, 2), np.ones(8) / sqrt(8)

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 1_500 if quick else 15_000
        return Estimate.mean(*in_first(rng, s, offset, [k], n, sigma, draws))

    return ranks.rank_risks(jnp.asarray(s), jnp.asarray(offset), n=n, sigma=sigma)[k], simulate


@claim("rank-k-first-over/ours")
def _(sigma=0.3):
    """In the first k ≥ n+2 eigendirections E R → m + the risk in k dimensions with noise σ² + m

    Source: {BEYOND}
    Domain: eigenvalues 1, 1/2, 1/4, 1/8; n=3d/8, k=3d/4, σ={sigma}, d=16 and 48 extrapolated
    """

    def problem(d: int) -> tuple[np.ndarray, np.ndarray]:
        return np.repeat(EIGENVALUES, d // 4), np.ones(d) / sqrt(d)

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 500 if quick else 5_000
        means = [
            Estimate.mean(*in_first(rng, *problem(d), [3 * d // 4], 3 * d // 8, sigma, draws))
            for d in (16, 48)
        ]
        return extrapolate(*means, times=3)

    s, offset = map(jnp.asarray, problem(16))
    return ranks.rank_risks(s, offset, n=6, sigma=sigma)[12], simulate


@claim("rank-k-threshold/ours", effect=0.01)
def _(n=12, k=3, sigma=0.5):
    """The next direction lowers E R iff s δ² > (m + σ²)/(n-k-1). At the threshold E R does not
    change

    The difference is taken on the same data. The test detects .01 of a risk of .5.

    Source: {BEYOND}
    Domain: eigenvalues 1, 1/2, ..., 1/6, n={n}, k={k}, σ={sigma}; δ_4² at the threshold
    """
    s, rest = 1 / np.arange(1.0, 7.0), 0.2
    # m = t + rest and t = (m + σ²)/(n-k-1), where t is the square of the next direction.
    after = float(ranks.rank_threshold(missed=rest, n=n, sigma=sigma, rank=k + 1))
    offset = np.sqrt(np.array([0.3, 0.2, 0.1, after, rest / 2, rest / 2]) / s)

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 2_000 if quick else 20_000
        with_it, without = in_first(rng, s, offset, [k + 1, k], n, sigma, draws)
        return Estimate.mean(with_it - without)

    return 0.0, simulate


# --- directions that sources show -----------------------------------------------------------------

PARTS, OUTSIDE, DIMENSIONS = (0.7, 0.5), 0.4, 2


def _shown(d: int, strengths: tuple[float, ...], n: int, sigma: float, key: Array, draws: int):
    """Simulates the mean risk in the leading singular vectors of sources of rank 2 with errors N(0,
    1).
    """
    rng, m, k, values = generator(key), d // DIMENSIONS, len(strengths), []
    truth = np.zeros((d, m))
    np.fill_diagonal(truth[:k], np.sqrt(np.array(strengths) * m))
    offset = np.append([*PARTS, OUTSIDE], np.zeros(d - 3))
    for _ in range(10):
        sources = truth + rng.standard_normal((draws // 10, d, m))
        _, vectors = np.linalg.eigh(sources.swapaxes(1, 2) @ sources)
        basis, _ = np.linalg.qr(sources @ vectors[..., -k:])
        x = rng.standard_normal((draws // 10, n, d))
        y = x @ offset + sigma * rng.standard_normal((draws // 10, n))
        fit = (basis @ pseudoinverse(x @ basis, y[..., None]))[..., 0]
        values.append(np.sum((fit - offset) ** 2, -1))
    return Estimate.mean(np.concatenate(values))


@claim(
    "rank-k-sources-{name}/ours", effect=0.04, each=(("found", (6.0, 3.0)), ("lost", (6.0, 0.2)))
)
def _(name, strengths, n=12, sigma=0.3):
    """In the 2 leading singular vectors of m sources E R → m + (m + σ²) 2/(n-3). The share (1 -
    c/x²)/(1 + c/x) of each part is recovered where x > √c, with c = d/m

    The sources are a matrix of rank 2 and errors N(0, v), with x = (singular value)²/mv. The test
    detects .04.

    Source: {BEYOND}
    Domain: strengths {strengths}, d/m=2, parts .7 and .5, .4 outside, n={n}, σ={sigma}, d=24 and 96
      extrapolated
    """
    law = ranks.source_rank_risks(
        jnp.array(PARTS), OUTSIDE, jnp.array(strengths), d_over_m=2.0, n=n, sigma=sigma
    )

    def simulate(key: Array, quick: bool) -> Estimate:
        keys, draws = jax.random.split(key), 250 if quick else 2_500
        means = [
            _shown(d, strengths, n, sigma, k, draws) for d, k in zip((24, 96), keys, strict=True)
        ]
        return extrapolate(*means, times=4)

    return law[2], simulate
