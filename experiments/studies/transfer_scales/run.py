"""The run of `transfer_scales`: its stages, and the resulting dataset."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.transfer_scales.config import FEATURES, Config
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import diagonal, scales


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes risks of fine-tuning and of training from scratch against the scale of the layers.

    Returns a dataset. For diagonal networks it has theory over (share, fine), `fine_tuning` and
    `scratch`, and single draws over (overlap, scale, draw), `fine_tuned` and `from_scratch`. For
    two layers it has `layers` over (theta, r), single draws `layers_drawn` over (theta, imbalance,
    draw), and the risk `layers_scratch`.
    """
    with jax.enable_x64(True):
        theory = stage("theory", partial(_theory, config))
        drawn = [
            stage(f"scale {s:g}", partial(_diagonal, config, i, s))
            for i, s in enumerate(config.scales)
        ]
        layers = stage("two layers", partial(_layers, config))
    return xr.Dataset(
        {
            "fine_tuning": (("share", "fine"), theory["fine_tuning"], {"long_name": "risk"}),
            "scratch": ("fine", theory["scratch"], {"long_name": "risk"}),
            "fine_tuned": (
                ("overlap", "scale", "draw"),
                np.stack([of["fine_tuned"] for of in drawn], 1),
            ),
            "from_scratch": (("scale", "draw"), np.stack([of["from_scratch"] for of in drawn])),
            "layers": (("theta", "r"), theory["layers"], {"long_name": "risk"}),
            "layers_scratch": theory["layers_scratch"],
            "layers_drawn": (("theta", "imbalance", "draw"), layers["risk"]),
        },
        {
            "share": theory["share"],
            "fine": theory["fine"],
            "overlap": list(config.overlaps),
            "scale": list(config.scales),
            "theta": ("theta", list(config.thetas), {"units": "degree"}),
            "imbalance": list(config.imbalances),
            "r": theory["r"],
        },
        picked(config, "sigma", "layers_sigma", "load", "draws", "d"),
    )


def _theory(config: Config) -> Mapping[str, np.ndarray]:
    shares = np.linspace(config.overlaps[0], config.overlaps[-1], config.points)
    share = np.union1d(shares, config.overlaps)  # also the overlaps of the data sets
    fine = np.geomspace(config.scales[0], config.scales[-1], config.points)
    r = np.linspace(config.imbalances[0], config.imbalances[-1], 10 * config.points + 1)
    entry, feature = FEATURES**0.5, 1 / FEATURES

    def at(overlap: float, scale: float) -> float:
        kept, lost = overlap * feature, (1 - overlap) * feature
        shares = (kept, lost, lost, 1 - kept - 2 * lost)
        source, target = (entry, entry, 0.0, 0.0), (entry, 0.0, entry, 0.0)
        return float(
            diagonal.diagonal_risk(
                shares, source, target, load=config.load, sigma=config.sigma, scale=scale
            )
        )

    def scratch(scale: float) -> float:
        kinds = (feature, 1 - feature), (0.0, 0.0), (entry, 0.0)
        return float(
            diagonal.diagonal_risk(*kinds, load=config.load, sigma=config.sigma, scale=scale)
        )

    angles = np.radians(config.thetas)[:, None]
    of_layers = scales.unbalanced_risk(
        load=config.load, theta=angles, sigma=config.layers_sigma, imbalance=r
    )
    return {
        "share": share,
        "fine": fine,
        "r": r,
        "fine_tuning": np.array([[at(overlap, scale) for scale in fine] for overlap in share]),
        "scratch": np.array([scratch(scale) for scale in fine]),
        "layers": np.asarray(of_layers),
        "layers_scratch": np.asarray(dl.scratch_limit(load=config.load, sigma=config.layers_sigma)),
    }


_ends = jax.jit(jax.vmap(diagonal.diagonal_limit, (0, 0, None, None)))


def _diagonal(config: Config, i: int, scale: float) -> Mapping[str, np.ndarray]:
    """Draws data sets, and computes the limits of fine-tuning and training from scratch on each."""
    d, features = config.d, config.d // FEATURES
    entry, root = features**-0.5, d**-0.5
    target = np.zeros(d)
    target[:features] = entry
    key, noise = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), i))
    n = round(config.load * d)
    x = jax.random.normal(key, (config.draws, n, d))
    beta_t = jnp.asarray(target)
    y = x @ beta_t + config.sigma * jax.random.normal(noise, x.shape[:2])

    def risks(start: np.ndarray) -> np.ndarray:
        return np.asarray(problems.risk(_ends(x, y, jnp.asarray(start), scale * root), beta_t))

    def source(overlap: float) -> np.ndarray:
        """Shares its first features with the target; a fractional overlap is rounded at random."""
        return np.roll(target, features - round(overlap * features))

    return {
        "fine_tuned": np.stack([risks(source(overlap)) for overlap in config.overlaps]),
        "from_scratch": risks(np.zeros(d)),
    }


@partial(jax.jit, static_argnums=(1, 2))
def _layer_risks(key, n: int, d: int, theta, sigma, imbalances: jax.Array) -> jax.Array:
    sample = problems.draw(key, n, d, theta, sigma)

    def at(imbalance: jax.Array) -> jax.Array:
        fit = scales.unbalanced_limit(sample.x, sample.y, sample.beta_s, imbalance)
        return problems.risk(fit, sample.beta_t)

    return jax.vmap(at)(imbalances)


def _layers(config: Config) -> Mapping[str, np.ndarray]:
    """Computes risks `[theta imbalance draw]`; all use the same inputs and noise."""
    keys = jax.random.split(jax.random.key(config.seed), config.draws)
    n, imbalances = round(config.load * config.d), jnp.asarray(config.imbalances)
    risks = [
        [
            _layer_risks(key, n, config.d, np.radians(theta), config.layers_sigma, imbalances)
            for key in keys
        ]
        for theta in config.thetas
    ]
    return {"risk": np.asarray(risks).swapaxes(1, 2)}
