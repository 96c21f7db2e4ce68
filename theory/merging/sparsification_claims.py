"""Unified merging (arXiv 2601.21690), Corollary 1, on trimming, election and DARE."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import drop, elect, trim
from theory.claims import Estimate, Simulate, compiled, generator, measured
from theory.merging import sparsification_domains as domains
from theory.merging.heterogeneity import dare_heterogeneity, effect, heterogeneity, updates
from theory.merging.quadratic import dare
from theory.merging.tasks import QuadraticTasks
from theory.merging.testbeds import claim

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
N, D, DRAWS = len(WEIGHTS), 50, 200
NORMAL = f"{N} normal task vectors in {D} dimensions, λ={WEIGHTS}"
WORST = f"{NORMAL}; the draw of {DRAWS} in which V falls least"
SHARED, KEPT, RATE = 3.0, 0.2, 0.5  # share of entries that TIES keeps; of those that DARE drops
ORIGINAL, TRIMMED, TIES, ELECTED = range(4)  # stages
CLOSE = np.array([[1.0, 0.9], [0.9, 1.0]])
CONFLICT = np.array([3.0, -1.0, -1.0, -0.01])  # entries of four tasks of equal weights
CONFLICTING = f"Δ = {CONFLICT.tolist()}, equal weights"


def _vectors(d: Array) -> TaskVectors:
    return TaskVectors({"a": d}, {"a": jnp.ones((len(d), 1), d.dtype)})


def _dispersion(d: np.ndarray, weights: np.ndarray) -> float:
    """Computes V = Σλ|Δᵢ-Δ̄|²."""
    return float(weights @ np.sum((d - weights @ d) ** 2, 1))


@jax.jit
@jax.vmap
def _stages(d: Float[Array, "N D"]) -> Float[Array, "stages"]:
    """Computes V of task vectors before and after trimming, after election of the trimmed ones, and
    after election alone.
    """
    trimmed = trim(KEPT)(_vectors(d))
    stages = _vectors(d), trimmed, elect()(trimmed), elect()(_vectors(d))
    return jnp.stack([heterogeneity(updates(vectors), WEIGHTS) for vectors in stages])


def _normal(rng: np.random.Generator, shared: float) -> np.ndarray:
    """Computes V by stages for normal task vectors plus `shared` times a normal one, [draws
    stages].
    """
    x = rng.normal(size=(DRAWS, N + 1, D)).astype(np.float32)
    return np.asarray(_stages(jnp.asarray(x[:, 1:] + shared * x[:, :1])))


@cache
def _independent() -> np.ndarray:
    return _normal(np.random.default_rng(0), 0.0)


def _closest(before: int, after: int) -> tuple[float, Simulate]:
    """Returns V at two stages, in the draw with the largest ratio of later to earlier."""
    stages = _independent()
    worst = stages[(stages[:, after] / stages[:, before]).argmax()]
    return float(worst[before]), measured(lambda: worst[after])


def _squares() -> tuple[np.ndarray, np.ndarray]:
    """Computes the squared distances of the entries of `CONFLICT` from their mean, before and after
    electing a sign.
    """
    elected = np.asarray(updates(elect()(_vectors(jnp.asarray(CONFLICT)[:, None])))["a"])[:, 0]
    return (CONFLICT - CONFLICT.mean()) ** 2, (elected - elected.mean()) ** 2


def _fixed() -> Array:
    return jnp.asarray(np.random.default_rng(6).normal(size=(N, D)))


def _dropped(rescale: bool) -> Simulate:
    def run(key: Array, quick: bool) -> Estimate:
        keys = jax.random.split(key, 200 if quick else 2000)
        vectors = _vectors(_fixed())
        after = jax.jit(
            jax.vmap(lambda k: effect(drop(RATE, k, rescale=rescale), vectors, WEIGHTS).after)
        )
        return Estimate.mean(np.asarray(after(keys)))

    return run


ROWS = CLOSE.tolist()


@claim("C1-trim/printed", "<=", attack=domains.TRIMMED)
def _printed_trim():
    """V = Σλ|Δᵢ-Δ̄|² falls if updates below a threshold are set to 0

    Source: Corollary 1 and its proof (Section IV-B)
    Domain: Δ = {ROWS[0]}, {ROWS[1]}; top half
    """
    equal = np.full(2, 0.5)
    kept = updates(trim(0.5)(_vectors(jnp.asarray(CLOSE, np.float32))))["a"]
    return _dispersion(CLOSE, equal), measured(lambda: _dispersion(np.asarray(kept), equal), 1e-7)


@_printed_trim.beside("corrected", "=")
def _():
    """V(mΔ) = Σλᵢ|mᵢΔᵢ|² - |ΣλᵢmᵢΔᵢ|² may rise

    The tolerance covers float32 rounding.
    """
    return 1.0 - 0.5


@claim("C1-ties/printed", "<=", attack=domains.TIES)
def _():
    """TIES reduces V, here from D(1 - Σλ²) in the mean

    The shared part of experts is trimmed from some of them.

    Source: Corollary 1 and its proof (Section IV-B)
    Domain: {NORMAL}, plus {SHARED:g} times a shared one; top {KEPT:.0%}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        return Estimate.mean(_normal(generator(key), SHARED)[:, TIES])

    return D * (1 - sum(w**2 for w in WEIGHTS)), simulate


@claim("C1-ties/corrected", "<=", attack=domains.TIES_ELECTED)
def _():
    """The election in TIES does not raise V of trimmed updates

    Source: Corollary 1 and its proof (Section IV-B)
    Domain: {WORST}, top {KEPT:.0%}
    """
    return _closest(TRIMMED, TIES)


@claim("C1-elect/exact", "<=", attack=domains.ELECTED, overlooks="tightened")
def _():
    """Sign consensus reduces V, as the entrywise Δ → max(±Δ, 0) is a contraction

    V is equal where all signs agree, so δᵢ > 0 is not general.

    Source: Corollary 1 and its proof (Section IV-B)
    Domain: {WORST}
    """
    return _closest(ORIGINAL, ELECTED)


@claim("eq10/printed", "<=", attack=domains.CONFLICTING)
def _():
    """An entry of conflicting sign comes closer to the mean, as (0-Δ̄')² < (Δᵢ-Δ̄)²

    The mean moves away.

    Source: eq. (10) and before it (Section IV-B)
    Domain: {CONFLICTING}; the last
    """
    before, after = _squares()
    return before[-1], measured(lambda: after[-1])


@claim("eq10/corrected", "<=", attack=domains.IN_THE_MEAN, overlooks="tightened")
def _():
    """On average over tasks it comes closer, as V' ≤ V

    Source: eq. (10) (Section IV-B)
    Domain: {CONFLICTING}
    """
    before, after = _squares()
    return before.mean(), measured(after.mean)


@claim("C1-dare/printed", "<=", attack=domains.DROPPED)
def _printed_dare():
    """DARE reduces V

    Source: Corollary 1 and its proof (Section IV-B), with Remark 4
    Domain: {NORMAL}, p={RATE}
    """
    return _dispersion(np.asarray(_fixed()), np.array(WEIGHTS)), _dropped(rescale=True)


@_printed_dare.beside("corrected", "=")
def _():
    """E V' = V + p/(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²"""
    return compiled(dare_heterogeneity, _fixed(), np.array(WEIGHTS), RATE)


@claim("C1-dare-unscaled/ours")
def _():
    """Without rescaling E V' = (1-p)²V + p(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²

    Source: Corollary 1 and its proof (Section IV-B), beyond
    Domain: {NORMAL}, p={RATE}
    """
    predicted = dare_heterogeneity(_fixed(), WEIGHTS, RATE, rescale=False)
    return predicted, _dropped(rescale=False)


@claim("eq9/ours")
def _():
    """DARE raises the excess itself by ½ p/(1-p) Σλᵢ² E|Δᵢ|²_H

    Source: eq. (9) (Section IV-B), which says of a bound that it falls
    Domain: DARE p={RATE}, 3 converged experts, H=I
    """
    # Experts are at their centres, after one full step without noise.
    centres = np.random.default_rng(7).normal(size=(3, 2))
    tasks = QuadraticTasks([1.0, 1.0], centres, 0.0, 1, 1, 1, 1.0, (0.5, 0.3, 0.2))

    def excess(key: Array) -> Array:
        sparse = updates(drop(RATE, key)(_vectors(tasks.centres - tasks.start)))["a"]
        merged = tasks.start + tasks.weights @ sparse
        return jnp.sum((merged - tasks.centres.mean(0)) ** 2) / 2

    def simulate(key: Array, quick: bool) -> Estimate:
        keys = jax.random.split(key, 2_500 if quick else 25_000)
        return Estimate.mean(jax.jit(jax.vmap(excess))(keys))

    return dare(tasks, RATE).excess, simulate
