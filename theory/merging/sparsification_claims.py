"""Unified merging (arXiv 2601.21690), Corollary 1: what trimming, election and DARE do."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import drop, elect, trim
from theory.claims import Claim, Estimate, Simulate, beside, compiled, generator, measured
from theory.merging import sparsification_domains as domains
from theory.merging.heterogeneity import dare_heterogeneity, effect, heterogeneity, updates
from theory.merging.quadratic import dare
from theory.merging.tasks import QuadraticTasks
from theory.merging.testbeds import PAPER

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
N, D, DRAWS = len(WEIGHTS), 50, 200
SHARED, KEPT, RATE = 3.0, 0.2, 0.5  # share of entries that TIES keeps; of those that DARE drops
ORIGINAL, TRIMMED, TIES, ELECTED = range(4)  # stages
CLOSE = np.array([[1.0, 0.9], [0.9, 1.0]])
CONFLICT = np.array([3.0, -1.0, -1.0, -0.01])  # entries of four tasks of equal weights


def _vectors(d: Array) -> TaskVectors:
    return TaskVectors({"a": d}, {"a": jnp.ones((len(d), 1), d.dtype)})


def _dispersion(d: np.ndarray, weights: np.ndarray) -> float:
    """V = Σλ|Δᵢ-Δ̄|²."""
    return float(weights @ np.sum((d - weights @ d) ** 2, 1))


def _trimmed() -> float:
    """V of `CLOSE` vectors of equal weights, their top half kept."""
    kept = updates(trim(0.5)(_vectors(jnp.asarray(CLOSE, np.float32))))["a"]
    return _dispersion(np.asarray(kept), np.full(2, 0.5))


@jax.jit
@jax.vmap
def _stages(d: Float[Array, "N D"]) -> Float[Array, "stages"]:
    """V of task vectors, of them trimmed, of these elected; of election alone."""
    trimmed = trim(KEPT)(_vectors(d))
    stages = _vectors(d), trimmed, elect()(trimmed), elect()(_vectors(d))
    return jnp.stack([heterogeneity(updates(vectors), WEIGHTS) for vectors in stages])


def _normal(rng: np.random.Generator, shared: float) -> np.ndarray:
    """V by stages of normal task vectors plus `shared` times a normal one, [draws stages]."""
    x = rng.normal(size=(DRAWS, N + 1, D)).astype(np.float32)
    return np.asarray(_stages(jnp.asarray(x[:, 1:] + shared * x[:, :1])))


def _ties(key: Array, quick: bool) -> Estimate:
    del quick
    return Estimate.mean(_normal(generator(key), SHARED)[:, TIES])


@cache
def _independent() -> np.ndarray:
    return _normal(np.random.default_rng(0), 0.0)


def _closest(before: int, after: int, stage: int) -> float:
    """V at one of two stages, in the draw in which the later is the largest part of the earlier."""
    stages = _independent()
    return float(stages[(stages[:, after] / stages[:, before]).argmax(), stage])


def _squares() -> tuple[np.ndarray, np.ndarray]:
    """The squared distance of each task's entry of `CONFLICT` from their mean, before electing a
    sign and after."""
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


def _converged() -> QuadraticTasks:
    """Experts at their centres: no noise, and one full step."""
    centres = np.random.default_rng(7).normal(size=(3, 2))
    return QuadraticTasks([1.0, 1.0], centres, 0.0, 1, 1, 1, 1.0, (0.5, 0.3, 0.2))


def _dropped_excess(key: Array, quick: bool) -> Estimate:
    tasks = _converged()
    keys = jax.random.split(key, 2_500 if quick else 25_000)

    def excess(k: Array) -> Array:
        sparse = updates(drop(RATE, k)(_vectors(tasks.centres - tasks.start)))["a"]
        merged = tasks.start + tasks.weights @ sparse
        return jnp.sum((merged - tasks.centres.mean(0)) ** 2) / 2

    return Estimate.mean(np.asarray(jax.jit(jax.vmap(excess))(keys)))


def _corollary() -> list[Claim]:
    corollary, mean = "Corollary 1 and its proof (Section IV-B)", 1 - sum(w**2 for w in WEIGHTS)
    normal = f"{N} normal task vectors in {D} dimensions, λ={WEIGHTS}"
    worst = f"{normal}; that of {DRAWS} draws in which V falls least"
    conflict = f"Δ = {CONFLICT.tolist()}, equal weights"
    dropped = f"{normal}, p={RATE}"
    return [
        *beside(
            f"{PAPER}/C1-trim",
            corollary,
            f"Δ = {', '.join(map(str, CLOSE.tolist()))}; top half",
            measured(_trimmed, 1e-7),
            relation={"printed": "<=", "corrected": "="},
            attack={"printed": domains.TRIMMED},
            printed=(
                "updates below a threshold set to 0: V = Σλ|Δᵢ-Δ̄|² falls",
                lambda: _dispersion(CLOSE, np.full(2, 0.5)),
            ),
            corrected=(
                "V(mΔ) = Σλᵢ|mᵢΔᵢ|² - |ΣλᵢmᵢΔᵢ|²: it may rise",
                lambda: 1.0 - 0.5,
                "tolerance: float32",
            ),
        ),
        *beside(
            f"{PAPER}/C1-ties",
            corollary,
            f"{normal}, plus {SHARED:g} times a shared one; top {KEPT:.0%}",
            _ties,
            relation="<=",
            attack={"printed": domains.TIES},
            printed=(
                "TIES reduces V, here from D(1 - Σλ²) in the mean",
                lambda: D * mean,
                "what experts share is trimmed from some",
            ),
        ),
        *beside(
            f"{PAPER}/C1-ties",
            corollary,
            f"{worst}, top {KEPT:.0%}",
            measured(partial(_closest, TRIMMED, TIES, TIES)),
            relation="<=",
            attack={"corrected": domains.TIES_ELECTED},
            corrected=(
                "the election in TIES does not raise V of what trimming left",
                partial(_closest, TRIMMED, TIES, TRIMMED),
            ),
        ),
        *beside(
            f"{PAPER}/C1-elect",
            corollary,
            worst,
            measured(partial(_closest, ORIGINAL, ELECTED, ELECTED)),
            relation="<=",
            attack={"exact": domains.ELECTED},
            exact=(
                "sign consensus reduces V: Δ → max(±Δ, 0) entrywise is a contraction",
                partial(_closest, ORIGINAL, ELECTED, ORIGINAL),
                "equal where all signs agree, so δᵢ > 0 is not general",
            ),
        ),
        *beside(
            f"{PAPER}/eq10",
            "eq. (10) and before it (Section IV-B)",
            f"{conflict}; the last",
            measured(lambda: _squares()[1][-1]),
            relation="<=",
            attack={"printed": domains.CONFLICTING},
            printed=(
                "an entry of conflicting sign comes closer to the mean: (0-Δ̄')² < (Δᵢ-Δ̄)²",
                lambda: _squares()[0][-1],
                "the mean moves away",
            ),
        ),
        *beside(
            f"{PAPER}/eq10",
            "eq. (10) (Section IV-B)",
            conflict,
            measured(lambda: _squares()[1].mean()),
            relation="<=",
            attack={"corrected": domains.IN_THE_MEAN},
            corrected=("in the mean over tasks it does: V' ≤ V", lambda: _squares()[0].mean()),
        ),
        *beside(
            f"{PAPER}/C1-dare",
            f"{corollary}, with Remark 4",
            dropped,
            _dropped(True),
            relation={"printed": "<=", "corrected": "="},
            attack={"printed": domains.DROPPED},
            printed=(
                "DARE reduces V",
                lambda: _dispersion(np.asarray(_fixed()), np.array(WEIGHTS)),
            ),
            corrected=(
                "E V' = V + p/(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²",
                lambda: compiled(dare_heterogeneity, _fixed(), np.array(WEIGHTS), RATE),
            ),
        ),
        *beside(
            f"{PAPER}/C1-dare-unscaled",
            f"{corollary}, beyond",
            dropped,
            _dropped(False),
            ours=(
                "without rescaling E V' = (1-p)²V + p(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²",
                lambda: float(dare_heterogeneity(_fixed(), WEIGHTS, RATE, rescale=False)),
            ),
        ),
        *beside(
            f"{PAPER}/eq9",
            "eq. (9) (Section IV-B), which says of a bound that it falls",
            f"DARE p={RATE}, 3 converged experts, H=I",
            _dropped_excess,
            ours=(
                "the excess itself rises: after DARE by ½ p/(1-p) Σλᵢ² E|Δᵢ|²_H",
                lambda: float(dare(_converged(), RATE).excess),
            ),
        ),
    ]


CLAIMS = tuple(_corollary())
