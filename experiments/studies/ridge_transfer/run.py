"""The run of `ridge_transfer`: its stages, and the resulting dataset."""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.ridge_transfer.config import Config
from theory import deep_linear as dl
from theory import problems


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes the risk of linear transfer against the ridge strength, exactly and by simulation.

    Returns a dataset over (case, step), where a step is one ridge strength: the `exact` mean risk,
    its `limit` for n -> inf, and `mean` and `std` of the simulated risks. `added` is the increase
    of each draw's risk by the best ridge and by the largest.
    """
    with jax.enable_x64(True):
        cases = [stage(f"case {i + 1}/2", partial(_case, config, i)) for i in range(2)]

    def stacked(name: str) -> np.ndarray:
        return np.stack([case[name] for case in cases])

    grid = ("case", "step")
    return xr.Dataset(
        {
            "ridge": (grid, stacked("ridge"), {"long_name": "ridge strength", "units": "1"}),
            "exact": (grid, stacked("exact")),
            "limit": (grid, stacked("limit")),
            "mean": (grid, stacked("mean")),
            "std": (grid, stacked("std")),
            "added": (("case", "strength", "draw"), stacked("added"), {"long_name": "risk added"}),
            "best_ridge": ("case", stacked("best_ridge")),
            "best_risk": ("case", stacked("best_risk")),
        },
        {
            "n": ("case", list(config.ns), {"long_name": "target samples"}),
            "theta": ("case", list(config.thetas), {"units": "rad"}),
            "strength": ["best", "largest"],
        },
        {"sigma": config.sigma, "draws": config.draws, "d": config.d},
    )


def _case(config: Config, i: int) -> Mapping[str, np.ndarray]:
    """Computes one case, exactly and by simulation."""
    n, theta = config.ns[i], config.thetas[i]
    ridge = np.linspace(0, config.ridge_max[i], config.ridges)
    key = jax.random.fold_in(jax.random.key(config.seed), i)
    best = np.asarray(dl.optimal_ridge(n=n, theta=theta, sigma=config.sigma))
    # The best ridge comes last. It uses the same data sets as the others.
    ridges = np.append(ridge, best)
    exact, limit = map(np.asarray, _closed_forms(n, theta, config.sigma, ridges))
    drawn = _simulate(key, n, config.d, theta, config.sigma, ridges, config.draws)
    risks = np.asarray(drawn)
    return {
        "ridge": ridge,
        "exact": exact[:-1],
        "limit": limit[:-1],
        "mean": risks[:, :-1].mean(0),
        "std": risks[:, :-1].std(0, ddof=1),
        # The best ridge and the largest, minus the first, which is 0.
        "added": (risks[:, [-1, -2]] - risks[:, :1]).T,
        "best_ridge": best,
        "best_risk": exact[-1],
    }


@jax.jit
def _closed_forms(n, theta, sigma, ridge: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the exact mean risk, and its limit for n -> inf."""
    return dl.linear_transfer_risk(
        n=n, theta=theta, sigma=sigma, ridge=ridge
    ), dl.linear_transfer_limit(theta=theta, ridge=ridge)


@partial(jax.jit, static_argnums=(1, 2, 6))
def _simulate(key, n: int, d: int, theta, sigma, ridge: jax.Array, draws: int) -> jax.Array:
    """Simulates risks `(draw, ridge)`. Every ridge uses the same data sets."""

    def of_draw(key: jax.Array) -> jax.Array:
        sample = problems.draw(key, n, d, theta, sigma)

        def at(ridge: jax.Array) -> jax.Array:
            fit = dl.linear_transfer_fit(sample.x, sample.y, sample.beta_s, ridge)
            return problems.risk(fit, sample.beta_t)

        return jax.vmap(at)(ridge)

    return jax.lax.map(of_draw, jax.random.split(key, draws))
