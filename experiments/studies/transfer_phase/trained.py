"""The trained networks of `transfer_phase`: gradient descent on the paper's losses.

Beside each network stands what theory says of the very same data sets; `compared` names the kinds.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import pi
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.lab.progress import Stage
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.transfer_phase.compared import KINDS
from experiments.studies.transfer_phase.config import Config
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import networks

if TYPE_CHECKING:
    import xarray as xr

STARTS = ("normal", "orthogonal")  # weights of networks that begin from scratch
# How many draws lie between two points at which a run can be resumed; more where there are several
# devices.
DRAWS = 1


def trained(config: Config, stage: Stage) -> "xr.Dataset":
    """Trains networks at some points of the phase diagram, and compares them with theory.

    The networks of all loads, angles and noises of one draw are trained at once.

    Args:
      config: The config.
      stage: What computes or restores the parts of the run.

    Returns:
      A dataset over network (a draw of data and of initial weights), kind, way, cell_gamma,
      cell_theta and sigma: the `risk` of every kind, the `steps` that networks took and the `loss`
      that is left, the same of pretraining, and `cell_theory`, the closed form of transferability.
      The flow and the narrow descent of more than two layers from scratch are NaN. With
      `networks.orthogonal` also `orthogonal_risk`, that of networks from orthogonal layers, and the
      `invariant` of each start, which eq. (22) wants above 0, in units of alpha^2.
    """
    import xarray as xr

    # This key is not the simulation's, so that the two do not share their draws.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    keys = jax.random.split(key, config.networks.draws)
    train = partial(_trained, keys=keys, train=over_devices(partial(_train, config)))
    found = sweep(train, np.arange(len(keys)), stage, "networks", chunk=DRAWS)
    theory = stage("closed forms of the networks", partial(_closed_forms, config))
    n, cells = config.trained_counts(), ("cell_gamma", "cell_theta", "sigma")
    data = {
        "risk": (("network", "kind", "way", *cells), found["risk"]),
        "steps": (("network", "way", *cells), found["steps"]),
        "loss": (("network", "way", *cells), found["loss"]),
        "pretraining_steps": ("network", found["pretraining_steps"]),
        "pretraining_loss": ("network", found["pretraining_loss"]),
        "cell_theory": (("mode", *cells), np.stack([theory[mode] for mode in config.modes])),
        "cell_n": ("cell_gamma", n, {"long_name": "target samples"}),
    }
    if config.networks.orthogonal:
        data["orthogonal_risk"] = (("network", "way", *cells), found["orthogonal_risk"])
        data["invariant"] = (("network", "start"), found["invariant"])
    coords = {
        **({"start": list(STARTS)} if config.networks.orthogonal else {}),
        "kind": list(KINDS),
        "way": list(_ways(config)),
        "mode": list(config.modes),
        "cell_gamma": ("cell_gamma", n / config.networks.d, {"long_name": "load n/d"}),
        "cell_theta": ("cell_theta", _angles(config), {"units": "rad"}),
        "sigma": list(config.sigmas),
    }
    about = ("d", "layers", "alpha", "rate", "steps")
    return xr.Dataset(data, coords, {f"trained_{k}": getattr(config.networks, k) for k in about})


def _ways(config: Config) -> tuple[str, ...]:
    return "scratch", *config.modes


def _angles(config: Config) -> np.ndarray:
    return np.linspace(0, pi / 2, config.networks.cells[1])


def _closed_forms(config: Config) -> dict[str, np.ndarray]:
    """Computes transferability `[cell_gamma, cell_theta, sigma]` of each mode, in closed form."""
    with jax.enable_x64(True):
        n = config.trained_counts()[:, None, None]
        theta, sigma = _angles(config)[:, None], np.array(config.sigmas)
        d, depth = config.networks.d, config.networks.layers
        closed = jax.jit(partial(dl.transferability, depth=depth), static_argnums=0)
        return {mode: np.asarray(closed(mode, n, d, theta, sigma)) for mode in config.modes}


def _trained(
    index: np.ndarray, *, keys: jax.Array, train: Callable[[jax.Array], Any]
) -> dict[str, np.ndarray]:
    """Trains the networks of some draws."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, train(keys[index]))


@partial(jax.jit, static_argnums=0)
def _train(config: Config, keys: jax.Array) -> dict[str, jax.Array]:
    """Trains the networks of one draw for each key."""
    return jax.lax.map(partial(_draw, config), keys)


def _draw(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Trains all networks of one draw of data and of initial weights."""
    options, ns = config.networks, config.trained_counts()
    d, depth = options.d, options.layers
    budget = options.rate, options.steps, options.loss
    key_x, key_noise, key_source, key_target = jax.random.split(key, 4)
    x = jax.random.normal(key_x, (ns[-1], d))
    noise = jax.random.normal(key_noise, (ns[-1],))
    small = networks.gaussian_weights(key_target, d, depth, options.alpha)
    source = networks.gaussian_weights(key_source, d, depth, options.alpha)
    beta_s, _ = problems.tasks(d, 0.0)
    pretrained = networks.pretrain(source, beta_s, *budget)
    beta_0 = networks.predictor(pretrained.weights)
    if options.orthogonal:
        # Of the norm that alpha times normal entries have: |W_L| = alpha sqrt(d).
        orthogonal, orthogonal_source = (
            networks.small_weights(jax.random.fold_in(k, 1), d, depth, options.alpha * np.sqrt(d))
            for k in (key_target, key_source)
        )
        again = networks.pretrain(orthogonal_source, beta_s, *budget)

    def point(overlaps: dl.Overlaps, data: tuple[Array, Array], theta: Array, sigma: Array):
        (x, noise), beta_t = data, problems.tasks(d, theta)[1]
        y = x @ beta_t + sigma * noise
        estimated = {
            "scratch": overlaps.scratch,
            "linear": overlaps.linear_transfer,
            "fine_tune": partial(overlaps.fine_tune, depth=depth),
        }

        def way(name: str) -> tuple[Array, Array, Array]:
            descend = networks.linear_transfer if name == "linear" else networks.fine_tune
            weights = small if name == "scratch" else pretrained.weights
            network = descend(weights, x, y, *budget)
            # The first two are flow and narrow descent, and stay NaN where no flow is known.
            fits = [jnp.full((2, d), jnp.nan), networks.predictor(network.weights)[None]]
            if name != "scratch" or depth <= 2:
                start = beta_0 if name != "scratch" else networks.start_of_growth(small, x, y)
                narrow = networks.narrow_weights(start, depth)
                # As many steps as the network took, so that only the size of its weights differs.
                walked = descend(narrow, x, y, options.rate, network.steps)
                time = (network.steps * options.rate)[None]
                flow = _linear_flow if name == "linear" else _flow
                fits[0] = jnp.stack([flow(narrow, x, y, time), networks.predictor(walked.weights)])
            risks = problems.risk(jnp.concatenate(fits), beta_t)
            limit = estimated[name](theta, sigma)
            return jnp.concatenate([limit[None], risks]), network.steps, network.loss

        results = [way(name) for name in _ways(config)]
        risk, steps, loss = (jnp.stack(parts, axis=-1) for parts in zip(*results, strict=True))
        found = {"risk": risk, "steps": steps, "loss": loss}
        if options.orthogonal:
            ended = [
                (networks.linear_transfer if name == "linear" else networks.fine_tune)(
                    orthogonal if name == "scratch" else again.weights, x, y, *budget
                )
                for name in _ways(config)
            ]
            betas = jnp.stack([networks.predictor(network.weights) for network in ended])
            found["orthogonal_risk"] = problems.risk(betas, beta_t)
        return found

    overlaps = dl.nested_overlaps(x, noise, jnp.eye(d, 2), ns.tolist())
    data = jax.vmap(partial(_condensed, x, noise))(jnp.asarray(ns))
    # Data outermost, so that angles and noises share them: products with X are of matrices.
    over_sigma = jax.vmap(point, (None, None, None, 0), -1)
    over_theta = jax.vmap(over_sigma, (None, None, 0, None), -2)
    over_loads = jax.vmap(over_theta, (0, 0, None, None), -3)
    theta, sigma = jnp.asarray(_angles(config)), jnp.asarray(config.sigmas, float)
    starts = {}
    if options.orthogonal:
        least = jnp.stack([networks.least_invariant(w) for w in (small, orthogonal)])
        starts["invariant"] = least / options.alpha**2
    return {
        **starts,
        **over_loads(overlaps, data, theta, sigma),
        "pretraining_steps": pretrained.steps,
        "pretraining_loss": pretrained.loss,
    }


def _condensed(
    x: Float[Array, "m d"], noise: Float[Array, " m"], n: Array
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    """Condenses the first n samples into a number of rows that does not depend on n.

    The rows are the triangular factor of [X, noise]. They have the same loss |y - X beta|^2 / (2n),
    with labels from any task, so that data of every load have one shape.
    """
    kept = jnp.where(jnp.arange(len(x)) < n, 1 / jnp.sqrt(n), 0.0)
    rows = jnp.linalg.qr(kept[:, None] * jnp.column_stack([x, noise]), mode="r")
    # The losses divide by the number of rows, which this undoes.
    rows *= np.sqrt(len(rows))
    return rows[:, :-1], rows[:, -1]


def _flow(narrow: networks.Weights, x: Array, y: Array, time: Array) -> Array:
    """Computes gradient flow of all layers from balanced weights of rank one, at one time."""
    start = networks.predictor(narrow)
    if len(narrow) == 1:
        return dl.linear_flow(x, y, start, time)[0]
    return dl.fine_tune_flow(x, y, start, time, len(narrow))[0]


def _linear_flow(weights: networks.Weights, x: Array, y: Array, time: Array) -> Array:
    """Computes gradient flow of the last layer alone, at one time; it is exact for any weights."""
    *frozen, last = weights
    features = reduce(jnp.matmul, frozen)
    return features @ dl.linear_flow(x @ features, y, last, time)[0]
