"""Unified merging (arXiv 2601.21690), Corollary 1: what trimming, election and DARE do."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import drop, elect, trim
from theory.claims import Claim, Estimate, Simulate
from theory.merging.heterogeneity import Effect, dare_heterogeneity, effect, heterogeneity, updates
from theory.merging.quadratic import dare
from theory.merging.tasks import QuadraticTasks
from theory.merging.testbeds import PAPER, generator, measured

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
N, D, DRAWS = 4, 50, 40
SHARED = 3.0


def _vectors(d: Array) -> TaskVectors:
    return TaskVectors({"a": d}, {"a": jnp.ones((len(d), 1), d.dtype)})


@jax.jit
def _trim_pair(d: Array) -> Effect:
    return effect(trim(0.5), _vectors(d), (0.5, 0.5))


def _trimmed(after: bool) -> float:
    return float(_trim_pair(jnp.array([[1.0, 0.9], [0.9, 1.0]], np.float32))[after])


@jax.jit
@jax.vmap
def _ties(d: Float[Array, "N D"]) -> Float[Array, "stages"]:
    """V of task vectors, of them trimmed, of these elected; of election alone."""
    trimmed = trim(0.2)(_vectors(d))
    stages = _vectors(d), trimmed, elect()(trimmed), elect()(_vectors(d))
    return jnp.stack([heterogeneity(updates(vectors), WEIGHTS) for vectors in stages])


def _compared(shared: float, reduce: Callable[[np.ndarray], Estimate]) -> Simulate:
    """Over draws of normal task vectors, plus `shared` times a normal one of all; `reduce` gets
    [stages draws]."""

    def run(key: Array, quick: bool) -> Estimate:
        x = generator(key).normal(size=(DRAWS, N + 1, D)).astype(np.float32)
        return reduce(np.asarray(_ties(jnp.asarray(x[:, 1:] + shared * x[:, :1]))).T)

    return run


def _largest(values: np.ndarray) -> Estimate:
    return Estimate(float(values.max()), tolerance=1e-12)


@jax.jit
def _election(d: Array) -> tuple[Array, Array]:
    """Of every task, of equal weights: the squared distances from the mean before and after."""
    elected, w = updates(elect()(_vectors(d)))["a"], jnp.full(len(d), 1 / len(d))
    return jnp.sum((d - w @ d) ** 2, 1), jnp.sum((elected - w @ elected) ** 2, 1)


def _conflict() -> np.ndarray:
    """After less before, each task."""
    before, after = _election(jnp.array([[3.0], [-1.0], [-1.0], [-0.01]]))
    return np.asarray(after - before)


def _fixed() -> Array:
    return jnp.asarray(np.random.default_rng(6).normal(size=(N, D)))


def _dropped(rescale: bool) -> Simulate:
    def run(key: Array, quick: bool) -> Estimate:
        keys = jax.random.split(key, 200 if quick else 2000)
        vectors = _vectors(_fixed())
        after = jax.jit(
            jax.vmap(lambda k: effect(drop(0.5, k, rescale=rescale), vectors, WEIGHTS).after)
        )
        return Estimate.mean(np.asarray(after(keys)))

    return run


def _converged() -> QuadraticTasks:
    """Experts at their centres: no noise, and one full step."""
    centres = np.random.default_rng(7).normal(size=(3, 2))
    return QuadraticTasks([1.0, 1.0], centres, 0.0, 1, 1, 1, 1.0, (0.5, 0.3, 0.2))


def _dropped_excess(key: Array, quick: bool) -> Estimate:
    tasks = _converged()
    keys = jax.random.split(key, 2_000 if quick else 20_000)

    def excess(k: Array) -> Array:
        sparse = updates(drop(0.5, k)(_vectors(tasks.centres - tasks.start)))["a"]
        merged = tasks.start + tasks.weights @ sparse
        return jnp.sum((merged - tasks.centres.mean(0)) ** 2) / 2

    return Estimate.mean(np.asarray(jax.jit(jax.vmap(excess))(keys)))


def _corollary() -> list[Claim]:
    source = f"{PAPER} Corollary 1"
    normal = f"{N} normal task vectors in {D} dimensions, λ={WEIGHTS}"
    shared = f"{normal}, plus {SHARED:g} times a shared one"
    return [
        Claim(
            f"{PAPER}/C1-trim/printed",
            "trimming reduces V = Σλ|Δᵢ-Δ̄|²",
            source,
            "Δ = (1, .9), (.9, 1); top half",
            partial(_trimmed, False),
            measured(partial(_trimmed, True)),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/C1-trim/corrected",
            "V(mΔ) = Σλᵢ|mᵢΔᵢ|² - |ΣλᵢmᵢΔᵢ|²: .005 becomes .5",
            source,
            "Δ = (1, .9), (.9, 1); top half",
            lambda: 1.0 - 0.5,
            measured(partial(_trimmed, True)),
        ),
        Claim(
            f"{PAPER}/C1-ties/printed",
            "TIES reduces V: E V'/V ≤ 1",
            source,
            f"{shared}; top 20 %",
            lambda: 1.0,
            _compared(SHARED, lambda v: Estimate.mean(v[2] / v[0])),
            relation="<=",
            note="what experts share is trimmed from some",
        ),
        Claim(
            f"{PAPER}/C1-ties/corrected",
            "the election in TIES does not raise V of what trimming left",
            source,
            f"{normal}; top 20 %, largest of {DRAWS} differences",
            lambda: 0.0,
            _compared(0.0, lambda v: _largest(v[2] - v[1])),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/C1-elect/exact",
            "election does not raise V: Δ → max(±Δ, 0) entrywise is a contraction",
            source,
            f"{normal}; largest of {DRAWS} differences",
            lambda: 0.0,
            _compared(0.0, lambda v: _largest(v[3] - v[0])),
            relation="<=",
            note="equal where all signs agree, so δᵢ > 0 is not general",
        ),
        Claim(
            f"{PAPER}/eq10/printed",
            "an entry zeroed by election comes closer to the mean: (0-Δ̄')² ≤ (Δᵢ-Δ̄)²",
            f"{PAPER} eq. (10)",
            "Δ = 3, -1, -1, -.01, equal weights; the last",
            lambda: 0.0,
            measured(lambda: _conflict()[-1]),
            relation="<=",
            note="the mean moves away",
        ),
        Claim(
            f"{PAPER}/eq10/corrected",
            "summed over tasks it does: V' ≤ V",
            f"{PAPER} eq. (10)",
            "Δ = 3, -1, -1, -.01, equal weights",
            lambda: 0.0,
            measured(lambda: _conflict().mean()),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/C1-dare/printed",
            "DARE reduces V",
            source,
            f"{normal}, p=.5",
            lambda: float(heterogeneity(_fixed(), WEIGHTS)),
            _dropped(True),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/C1-dare/corrected",
            "E V' = V + p/(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²",
            source,
            f"{normal}, p=.5",
            lambda: float(dare_heterogeneity(_fixed(), WEIGHTS, 0.5)),
            _dropped(True),
        ),
        Claim(
            f"{PAPER}/C1-dare-unscaled/ours",
            "without rescaling E V' = (1-p)²V + p(1-p) Σλᵢ(1-λᵢ)|Δᵢ|²",
            source,
            f"{normal}, p=.5",
            lambda: float(dare_heterogeneity(_fixed(), WEIGHTS, 0.5, rescale=False)),
            _dropped(False),
        ),
        Claim(
            f"{PAPER}/eq9/ours",
            "after DARE: excess + ½ p/(1-p) Σλᵢ² E|Δᵢ|²_H",
            f"{PAPER} eq. (9)",
            "DARE p=.5, 3 converged experts, H=I",
            lambda: float(dare(_converged(), 0.5).excess),
            _dropped_excess,
        ),
    ]


CLAIMS = tuple(_corollary())
