"""The run of `overtraining_lora`: closed forms, and training of networks and adapters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.overtraining_lora.config import Config
from experiments.studies.shared.linear_overtraining import pre_trained, tuned_losses
from sail_jax import linalg
from theory.two_layer import fine_tuning, low_rank, modes, networks
from theory.two_layer.layers import Layers, identity_start, loss, theta

FULL = "full"
PLACES = FULL, "layer", "map"
GROWN = 4000  # steps of Runge-Kutta from small initial weights to the end
TINY = 1e-3  # entries of B and A in the search for a mode
WATCHED, BETWEEN = 800, 4  # number of observation times, and steps between two


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes all panels.

    Returns the dataset. `tuned` is the fine-tuned part: "full" or a rank.
    - `lost_theory` and `left_theory`, `(tuned, time)`: the pre-training and the fine-tuning loss;
      `lost` and `left`, `(seed, tuned, cell_time)`, for networks.
    - `end_theory`, `(tuned, learned)`, and `end`, `(seed, tuned, learned)`: the pre-training loss
      at the end of fine-tuning, by the number of learned modes before it.
    - `half_theory`, `(place, share)`, and `half`, `(place, cell_share)`: the time until half of the
      change of one mode, which was pre-trained to a fraction of its fine-tuning target.
    """
    theory = stage("closed forms", partial(closed_forms, config))
    networks_ = stage("networks", partial(over_time, config))
    ends = stage("ends", partial(at_ends, config))
    searches = stage("searches", partial(halfway, config))
    sigma = config.tasks.spectrum()
    data: dict[str, Any] = {f"{k}_theory": (("tuned", "time"), theory[k]) for k in ("lost", "left")}
    data |= {k: (("seed", "tuned", "cell_time"), networks_[k]) for k in ("lost", "left")}
    data["end_theory"] = ("tuned", "learned"), theory["end"]
    data["end"] = ("seed", "tuned", "learned"), ends["end"]
    data["half_theory"] = ("place", "share"), theory["half"]
    data["half"] = ("place", "cell_share"), searches["half"]
    coords = {
        "tuned": [FULL, *map(str, config.adapter.ranks)],
        "time": ("time", config.tasks.times(sigma, config.points)),
        "cell_time": ("cell_time", config.tasks.times(sigma, config.networks.times)),
        "learned": np.arange(config.tasks.d + 1),
        "place": list(PLACES),
        "share": ("share", _shares(config.points)),
        "cell_share": ("cell_share", _shares(config.networks.shares)),
    }
    about = ("adapter.time", "adapter.start", "tasks.ratio", "networks.seeds")
    return xr.Dataset(data, coords, picked(config, *about))


def _shares(points: int) -> np.ndarray:
    """Returns how far a mode was pre-trained, as fractions of its fine-tuning target."""
    return np.linspace(0.05, 0.9, points)


def closed_forms(config: Config) -> dict[str, np.ndarray]:
    """Evaluates the theory, in float64: "lost", "left", "end" and "half" as in `run`."""
    sigma, adapter = config.tasks.spectrum(), config.adapter
    target = config.tasks.target(sigma)
    with jax.enable_x64(True):
        y = pre_trained(config.tasks, sigma, config.tasks.times(sigma, config.points))
        pairs = [tuned_losses(y, sigma, target, adapter.time)]
        ends = [fine_tuning.pretraining_losses(sigma, target)]
        for rank in adapter.ranks:
            a = adapter.start * (np.arange(config.tasks.d) < rank)
            moved = low_rank.displacement(
                adapter.time, target - y, adapter.scale * jnp.sqrt(y), b=0.0, a=a
            )
            lost, left = (jnp.sum((y + moved - s) ** 2, -1) for s in (sigma, target))
            pairs.append((lost, left))
            ends.append(low_rank.losses(sigma, target, rank)[1])
        lost, left = (np.stack([np.asarray(p[k]) for p in pairs]) for k in (0, 1))
        share, f = _shares(config.points), target[0]
        rho, small = f * (1 - share), adapter.scale * TINY**2
        half = [modes.crossing_time(f * (1 + share) / 2, f * share, f)]
        for carried in (np.sqrt(f * share), np.ones_like(share)):
            start = small * carried
            half.append(modes.crossing_time(rho / 2, start, rho) / (adapter.scale * carried))
        return {
            "lost": lost,
            "left": left,
            "end": np.stack([np.asarray(e) for e in ends]),
            "half": np.stack([np.asarray(h) for h in half]),
        }


def over_time(config: Config) -> dict[str, np.ndarray]:
    """Pre-trains networks by SGD and fine-tunes them or adapters in between: "lost" and "left"."""
    sigma = config.tasks.spectrum()
    legs = np.diff(config.tasks.times(sigma, config.networks.times), prepend=0.0)
    steps = int(np.ceil(legs.max() / config.networks.rate))
    keys = jax.random.split(jax.random.key(config.seed), config.networks.seeds)
    found = jax.jit(jax.vmap(partial(_network, config, steps), (0, None)))(keys, jnp.asarray(legs))
    return {k: np.asarray(v, np.float64) for k, v in found.items()}


def _network(config: Config, steps: int, key: jax.Array, legs: jax.Array) -> dict[str, jax.Array]:
    """Trains one network leg by leg, and fine-tunes after each: losses [tuned, time]."""
    d, adapter, batch = config.tasks.d, config.adapter, config.networks.batch
    sigma = config.tasks.spectrum()
    rotation, pre, post = jax.random.split(key, 3)
    U = linalg.orthogonal(rotation, d)
    # Symmetric, so that the initial weights, a multiple of the identity, are aligned with every
    # mode.
    of_pre, of_ft = ((U * s) @ U.T for s in (sigma, config.tasks.target(sigma)))
    batches = jax.random.normal(post, (adapter.steps, batch, d))
    rate = adapter.time / adapter.steps

    def train(layers: Layers, leg: tuple[jax.Array, jax.Array]) -> tuple[Layers, dict]:
        key, time = leg
        x = jax.random.normal(key, (steps, batch, d))
        layers = networks.sgd(layers, of_pre, x, time / steps)
        ends = [networks.sgd(layers, of_ft, batches, rate)]
        for rank in adapter.ranks:
            start = Layers(jnp.zeros((d, rank)), adapter.start * U[:, :rank].T)
            end = networks.adapter_sgd(layers, start, of_ft, batches, rate, scale=adapter.scale)
            ends.append(networks.adapted(layers, end, adapter.scale))
        lost, left = (jnp.stack([loss(end, a) for end in ends]) for a in (of_pre, of_ft))
        return layers, {"lost": lost, "left": left}

    start = identity_start(d, config.tasks.tau)
    _, found = jax.lax.scan(train, start, (jax.random.split(pre, legs.size), legs))
    return {name: values.T for name, values in found.items()}


def at_ends(config: Config) -> dict[str, np.ndarray]:
    """Fine-tunes to the end from n learned modes, adapters from a random A: "end", as in `run`."""
    d, adapter = config.tasks.d, config.adapter
    sigma = config.tasks.spectrum()
    target = jnp.diag(jnp.asarray(config.tasks.target(sigma)))
    times, learned = jnp.array([config.networks.until]), jnp.tril(jnp.ones((d + 1, d)), -1)

    def one(key: jax.Array, learned: jax.Array) -> jax.Array:
        root = jnp.diag(jnp.sqrt(sigma) * learned)
        frozen = Layers(root, root)
        tuned = networks.gradient_flow(frozen, target, times, GROWN)
        ends = [theta(tuned)[0]]
        for rank in adapter.ranks:
            a = adapter.start * jax.random.normal(jax.random.fold_in(key, rank), (rank, d))
            start = Layers(jnp.zeros((d, rank)), a)
            end = networks.adapter_flow(frozen, start, target, times, GROWN, scale=adapter.scale)
            last = Layers(end.w1[0], end.w2[0])
            ends.append(theta(networks.adapted(frozen, last, adapter.scale)))
        return jnp.stack([jnp.sum((end - jnp.diag(jnp.asarray(sigma))) ** 2) for end in ends])

    # These keys differ from those in `over_time`.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    keys = jax.random.split(key, config.networks.seeds)
    over = jax.jit(jax.vmap(jax.vmap(one, (None, 0), -1), (0, None)))
    return {"end": np.asarray(over(keys, learned), np.float64)}


def halfway(config: Config) -> dict[str, np.ndarray]:
    """Trains one mode and waits until it is halfway: "half", as in `run`."""
    share, s = _shares(config.networks.shares), config.adapter.scale
    f = float(config.tasks.target(config.tasks.spectrum())[0])
    with jax.enable_x64(True):
        one = jnp.ones((1, 1))
        expected = closed_forms(config)["half"].max(1)

        def path(place: str, share: jax.Array, times: jax.Array) -> jax.Array:
            y, target = f * share, f * one
            root = one * jnp.sqrt(y)
            if place == FULL:
                return theta(networks.gradient_flow(Layers(root, root), target, times, BETWEEN))
            frozen = Layers(root, root) if place == "layer" else Layers(y * one, one)
            start = Layers(TINY * one, TINY * one)
            found = networks.adapter_flow(frozen, start, target, times, BETWEEN, scale=s)
            return theta(found) * s * frozen.w2 + y

        half = []
        for place, longest in zip(PLACES, expected, strict=True):
            # The closed form only determines the time of observation.
            times = np.linspace(0.0, 1.5 * longest, WATCHED)[1:]
            over = jax.jit(jax.vmap(partial(path, place), (0, None)))
            y = np.asarray(over(jnp.asarray(share), jnp.asarray(times)))[..., 0, 0]
            level = f * (1 + share) / 2
            half.append([np.interp(at, row, times) for at, row in zip(level, y, strict=True)])
    return {"half": np.array(half)}
