"""The run of `divergences`: its stages, and the resulting dataset."""

from collections.abc import Mapping
from functools import partial
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import sweep
from experiments.studies.divergences.config import MODES, NORMS, Config
from sail_jax import distances
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import divergences

FINE = 181  # angles of a closed-form curve
DEPTH = 2  # of the fine-tuned network


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes transferability and every distance between source and target, over angles.

    Returns a dataset over mode, load (n/d) and theta (the angle). Transferability is `theory` on a
    fine grid of angles, and `gain` for each draw with its mean and standard deviation. Distances
    are `kl` and the bounds of W_1 and the Dudley metric on the fine grid, estimates of the last two
    from coupled samples, and `sampled_w1` from independent samples of (x, y).
    """
    keys = jax.random.split(jax.random.key(config.seed), 3)

    def over(fn, index: int, number: int, name: str, chunk: int) -> dict[str, np.ndarray]:
        subkeys = jax.random.split(keys[index], number)
        chunks = partial(fn, config=config, keys=subkeys)
        return sweep(chunks, np.arange(number), stage, name, chunk=chunk)

    closed = stage("closed forms", partial(_closed_forms, config))
    gains = over(_gains, 0, config.draws, "data sets", 10)
    matched = over(_matched, 1, config.matchings, "matching in 3 dimensions", 1)
    sampled = over(_sampled, 2, config.samplings, f"samples in {config.d} dimensions", 2)

    grid, curve = ("mode", "load", "theta"), ("mode", "load", "fine_theta")
    variables = {
        "theory": (curve, closed["theory"], {"long_name": "transferability", "units": "1"}),
        "gain": (("draw", *grid), gains["gain"], {"long_name": "transferability", "units": "1"}),
        "gain_mean": (grid, gains["gain"].mean(0)),
        "gain_std": (grid, gains["gain"].std(0, ddof=1)),
        "sampled_w1": (("sampling", "norm", "theta"), sampled["w1"]),
        "kl": ("fine_theta", closed["kl"], {"long_name": "KL divergence", "units": "nat"}),
    }
    for name, label in (("w1", "Wasserstein-1 distance"), ("dudley", "Dudley metric")):
        bounds = ("bound", "fine_theta"), closed[name], {"long_name": label}
        variables[f"{name}_bounds"] = bounds
        variables[f"{name}_mean"] = "theta", matched[name].mean(0)
        variables[f"{name}_std"] = "theta", matched[name].std(0, ddof=1)
    return xr.Dataset(
        variables,
        {
            "theta": ("theta", config.angles(), {"units": "rad"}),
            "fine_theta": ("fine_theta", np.linspace(0, pi, FINE), {"units": "rad"}),
            "load": ("load", list(config.loads), {"long_name": "load n/d"}),
            "mode": list(MODES),
            "norm": list(NORMS),
            "bound": ["lower", "upper"],
        },
        {
            "d": config.d,
            "n": config.counts(),
            **picked(config, "sigma", "draws", "points", "matchings"),
        },
    )


def _closed_forms(config: Config) -> Mapping[str, np.ndarray]:
    """Computes transferability [mode, load, angle] and distances on a fine grid of angles."""

    @jax.jit
    def at(theta: jax.Array) -> dict[str, jax.Array]:
        source, target = _pairs(theta)
        theory = [
            [
                dl.transferability(
                    mode, n=n, d=config.d, theta=theta, sigma=config.sigma, depth=DEPTH
                )
                for n in config.counts()
            ]
            for mode in ("linear", "fine_tuning")
        ]
        w1 = divergences.wasserstein1_bounds(source, target, config.sigma)
        dudley = divergences.dudley_bounds(source, target, config.sigma)
        return {
            "theory": jnp.array(theory),
            "kl": divergences.kl(source, target, config.sigma),
            "w1": jnp.stack(w1),
            "dudley": jnp.stack(dudley),
        }

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, at(np.linspace(0, pi, FINE)))


@jax.jit
def _pairs(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns source and target at each angle, in the plane that they span: `(angle, 2)` each."""
    return jax.vmap(lambda angle: problems.tasks(2, angle))(theta)


def _gains(index: np.ndarray, *, config: Config, keys: jax.Array) -> dict[str, np.ndarray]:
    """Simulates the transferability of some draws."""
    with jax.enable_x64(True):
        at = dl.simulate_overlaps(keys[index], config.counts(), config.d)
        return {"gain": np.asarray(_differences(at, config.angles(), config.sigma))}


@jax.jit
def _differences(at: dl.Overlaps, theta: jax.Array, sigma: jax.Array) -> jax.Array:
    """Computes R_scratch - R_transfer of each draw: [draw, mode, load, angle]."""

    def difference(theta: jax.Array) -> jax.Array:
        risks = [at.linear_transfer(theta, sigma), at.fine_tune(theta, sigma, DEPTH)]
        return at.scratch(theta, sigma)[:, None] - jnp.stack(risks, axis=1)

    return jax.vmap(difference, out_axes=-1)(theta)


def _matched(index: np.ndarray, *, config: Config, keys: jax.Array) -> dict[str, np.ndarray]:
    """Estimates W_1 and the Dudley metric in 3 dimensions: [repetition, angle]."""
    with jax.enable_x64(True):
        pairs = list(zip(*map(np.asarray, _pairs(config.angles())), strict=True))

    def estimate(key: jax.Array, pair: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
        with jax.enable_x64(True):
            xy = divergences.coupled_samples(key, config.points, *pair, config.sigma)
            x, y = (np.asarray(v) for v in xy)
        return distances.wasserstein1(x, y), distances.dudley(x, y).value

    values = np.array([[estimate(keys[i], pair) for pair in pairs] for i in index])
    return {"w1": values[..., 0], "dudley": values[..., 1]}


def _sampled(index: np.ndarray, *, config: Config, keys: jax.Array) -> dict[str, np.ndarray]:
    """Estimates W_1 from independent samples in d + 1 dimensions: [repetition, norm, angle]."""
    theta = config.angles()

    @jax.jit
    def points(key: jax.Array, theta: jax.Array) -> jax.Array:
        def point(key: jax.Array, theta: jax.Array) -> jax.Array:
            sample = problems.draw(key, config.counts()[0], config.d, theta, config.sigma)
            return jnp.concatenate([sample.x, sample.y[:, None]], axis=1)

        return jax.vmap(point)(jax.random.split(key, len(theta)), theta)

    def estimates(key: jax.Array) -> list[list[float]]:
        source, target = jax.random.split(key)
        # At angle 0 the target equals the source, so these are samples of the source's law.
        pairs = list(zip(points(source, 0 * theta), points(target, theta), strict=True))
        return [
            [distances.wasserstein1(x, y, norm=norm) for x, y in pairs] for norm in NORMS.values()
        ]

    return {"w1": np.array([estimates(keys[i]) for i in index])}
