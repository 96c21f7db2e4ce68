"""The run of `several_sources`: its stages, and the resulting dataset."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.several_sources.config import Config
from sail_jax.proximal import affine_weights, gram_from_distances
from theory import deep_linear as dl
from theory.deep_linear import ranks, sources
from theory.deep_linear.several import Inputs, Samples, Several, in_first, in_random

WAYS = ("best", "proximal", "equal", "first", "none")
LOADS = (0.625, 2.0)
"""Samples per dimension of the source, in the second panel."""
DECAY = (1.0, 0.5, 0.25, 0.125)
ORDERS = ("random", "first")
# The decay rate of the components of the third panel's offset.
EXPONENT = 1.0


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes risks in theory and on random data.

    Returns a dataset with the weights and risks of two sources over (noise, way), the risks before
    and after fine-tuning over (angle, source_load, when), and the risks by the number of directions
    over (order, rank). Simulated risks have a last axis `draw`.
    """
    with jax.enable_x64(True):
        parts = {
            name: stage(name, partial(compute, config))
            for name, compute in (("weights", _weights), ("inputs", _inputs), ("ranks", _ranks))
        }
    weights, inputs, by_rank = parts.values()
    turned, moved = ("angle", "source_load", "when"), ("order", "rank")
    data = {
        "weight": (("noise", "way", "source"), weights["weight"]),
        "mixed_theory": (("noise", "way"), weights["theory"]),
        "mixed": (("noise", "way", "draw"), weights["risk"]),
        "turned_theory": (turned, inputs["theory"]),
        "turned": ((*turned, "draw"), inputs["risk"]),
        "ranked_theory": (("order", "every_rank"), by_rank["theory"]),
        "ranked": ((*moved, "draw"), by_rank["risk"]),
    }
    coords = {
        "noise": ("noise", list(config.noises), {"long_name": "noise of the second source"}),
        "way": list(WAYS),
        "angle": ("angle", list(config.angles), {"units": "rad"}),
        "source_load": ("source_load", list(LOADS), {"long_name": "source samples per dimension"}),
        "when": ["before", "after"],
        "order": list(ORDERS),
        "rank": config.ranks(),
        "every_rank": np.arange(1, config.d + 1),
    }
    about = picked(config, "d", "draws", "sigma")
    return xr.Dataset(data, coords, {**about, "n": config.samples()})


def _weights(config: Config) -> Mapping[str, np.ndarray]:
    """Computes, for two sources, the weights by each rule and their risks after fine-tuning."""
    d, found = config.d, {"weight": [], "theory": [], "risk": []}
    for i, noise in enumerate(config.noises):
        # The first source has a different task, and the second has more or less noise.
        of = (Samples(1.5, 0.5, 0.5), Samples(1.5, noise, 0.0))
        problem = Several(of, 0.5, config.sigma)
        n, beta_t = d // 2, jnp.asarray(problem.target(d))
        fits = [
            sources.wishart_fit(jnp.asarray(task), n=source.count(d), sigma=source.sigma)
            for source, task in zip(of, problem.tasks(d), strict=True)
        ]
        distances = map(np.asarray, sources.expected_distances(fits, beta_t))
        weights = {
            "best": np.asarray(sources.best_weights(fits, beta_t).weights),
            "proximal": affine_weights(gram_from_distances(*distances, squared=True)).weights,
            "equal": np.full(2, 0.5),
            "first": np.array([1.0, 0.0]),
            "none": np.zeros(2),
        }
        scratch = float(dl.scratch_risk(n=n, d=d, sigma=config.sigma))
        _, missed = problem.draw(np.random.default_rng([config.seed, 0, i]), d, config.draws, 200)
        for way in WAYS:
            left = float(jnp.trace(sources.start_moments(fits, weights[way], beta_t)))
            # Training from scratch misses 1, the square of the target.
            found["theory"].append(scratch + (1 - n / d) * (left - 1))
            found["risk"].append(missed.risks(weights[way]))
            found["weight"].append(weights[way])
    grid = len(config.noises), len(WAYS)
    return {name: np.reshape(v, (*grid, *np.shape(v)[1:])) for name, v in found.items()}


def _inputs(config: Config) -> Mapping[str, np.ndarray]:
    """Computes risks before and after fine-tuning with a rotated covariance of inputs."""
    d, theory, risk = config.d, [], []
    for i, angle in enumerate(config.angles):
        for j, load in enumerate(LOADS):
            of = Samples(load, 0.5, 0.4, inputs=Inputs(DECAY, angle))
            problem = Several((of,), 0.5, config.sigma, Inputs(DECAY))
            inputs, beta_t = jnp.asarray(problem.inputs.covariance(d)), problem.target(d)
            (task,), own = problem.tasks(d), jnp.asarray(of.inputs.covariance(d))
            fit = sources.ridge_fit(own, jnp.asarray(task), n=of.count(d), sigma=of.sigma)
            left = sources.start_moments([fit], jnp.ones(1), jnp.asarray(beta_t))
            after = sources.tuned_risk(inputs, left, n=d // 2, sigma=config.sigma)
            theory.append([float(jnp.trace(inputs @ left)), float(after)])
            rng = np.random.default_rng([config.seed, 1, i, j])
            risk.append([m.risks([1.0]) for m in problem.draw(rng, d, config.draws, 200)])
    grid = len(config.angles), len(LOADS), 2
    return {"theory": np.reshape(theory, grid), "risk": np.reshape(risk, (*grid, config.draws))}


def _ranks(config: Config) -> Mapping[str, np.ndarray]:
    """Computes risks by the number of directions: at random, and by the size of the offset."""
    d, n, sigma = config.d, config.samples(), config.sigma
    offset = np.arange(1.0, d + 1) ** -EXPONENT
    offset /= np.linalg.norm(offset)
    every = np.arange(1, d + 1)
    law = ranks.random_rank_risk(
        n=n, d=d, distance=1.0, sigma=sigma, rank=every, allow_infinite=True
    )
    ordered = ranks.rank_risks(jnp.ones(d), jnp.asarray(offset), n=n, sigma=sigma)[1:]
    counts, rng = config.ranks(), np.random.default_rng([config.seed, 2])
    drawn = [
        [in_random(rng, offset, k, n, sigma, config.draws) for k in counts],
        in_first(rng, np.ones(d), offset, counts, n, sigma, config.draws),
    ]
    return {"theory": np.stack([np.asarray(law), np.asarray(ordered)]), "risk": np.array(drawn)}
