"""The run of `overtraining_linear`: closed forms on a fine grid, networks on a coarse one."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.typing import ArrayLike

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices
from experiments.studies.overtraining_linear.config import ROWS, Config
from experiments.studies.shared.linear_overtraining import inflection, pre_trained, tuned_losses
from sail_jax import linalg
from theory.two_layer import fine_tuning, networks, perturbation, sharpness
from theory.two_layer.layers import Layers, identity_start, loss

# The number of draws of Gaussian noise for each simulated network.
NOISES = 64
DECAYS = (0.0, 1.2)  # of the diagram "misalignment"
LEGS = 16  # number of pre-training times for the least loss in "misalignment"


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes one diagram by theory and by simulation.

    Returns the dataset. Closed forms are on a fine grid, `(row, x)`, and simulations on a coarse
    one, `(cell_row, cell_x)`. x is the pre-training time, or the decay in "misalignment".
    - `loss_theory` and `tuned_theory`: the pre-training loss and the fine-tuning loss afterwards.
      In "misalignment" both are costs instead: how much the last part of pre-training adds to each
      loss, in units of |A|^2. In "sensitivity" they are the increase of the loss by noise, and its
      quadratic prediction.
    - `loss_mean`, `loss_std`, `tuned_mean` and `tuned_std`: means and standard deviations of the
      same over simulated networks.
    - `trace_*` and `sharpness_*`, along x: the trace and the largest eigenvalue of the Hessian,
      in "sensitivity".
    - `inflection`, `(row,)`: the time after which more pre-training hurts, NaN without such a time;
      not in "misalignment" and "sensitivity".
    - `fixed`, `(fixed_rate, kind, x)`: the losses at fixed learning rates, pre-training's first, in
      "trade_off".
    """
    theory = stage("closed forms", partial(closed_forms, config))
    key = jax.random.key(config.seed)
    simulated = (
        [
            stage(f"networks {i + 1}/{config.networks.cells[1]}", partial(_column, config, key, i))
            for i in range(config.networks.cells[1])
        ]
        if config.diagram == "misalignment"
        else [stage("networks", partial(simulate, config, key, config.tasks.spectrum()))]
    )
    x, rows = _axis(config, config.points), _rows(config, config.points)
    data: dict[str, Any] = {}
    for name in ("loss", "tuned"):
        values = np.concatenate([f[name] for f in simulated], axis=-1)  # [seed, row, x]
        data[f"{name}_theory"] = (("row", "x"), theory[name])
        data[f"{name}_mean"] = (("cell_row", "cell_x"), values.mean(0))
        data[f"{name}_std"] = (("cell_row", "cell_x"), values.std(0, ddof=1))
    if "inflection" in theory:
        data["inflection"] = ("row", theory["inflection"])
    if config.diagram == "trade_off":
        data["fixed"] = (("fixed_rate", "kind", "x"), theory["fixed"])
    for name in ("trace", "sharpness"):
        if name in theory:
            values = simulated[0][name]
            data[f"{name}_theory"] = ("x", theory[name])
            data[f"{name}_mean"] = ("cell_x", values.mean(0))
            data[f"{name}_std"] = ("cell_x", values.std(0, ddof=1))
    label = "decay of the spectrum" if config.diagram == "misalignment" else "pre-training time"
    coords = {
        "x": ("x", x, {"long_name": label}),
        "row": ("row", rows, {"long_name": ROWS[config.diagram]}),
        "cell_x": ("cell_x", _axis(config, config.networks.cells[1])),
        "cell_row": ("cell_row", _rows(config, config.networks.cells[0])),
    }
    about = ("diagram", "tasks.d", "networks.seeds", "tuning.steps", "tasks.ratio", "tuning.rate")
    return xr.Dataset(data, coords, picked(config, *about))


def _axis(config: Config, points: int) -> np.ndarray:
    """Lists the values along x: decays in "misalignment", else pre-training times."""
    if config.diagram == "misalignment":
        return np.linspace(*DECAYS, points)
    return config.tasks.times(config.tasks.spectrum(), points)


def _rows(config: Config, points: int) -> np.ndarray:
    """Lists the values along the other axis; "trade_off" has three, the panels of Figure 7."""
    return np.linspace(*config.rows, 3 if config.diagram == "trade_off" else points)


def _fall(config: Config, time: np.ndarray, power: np.ndarray) -> np.ndarray:
    """Computes the rate of "trade_off" at a pre-training time: rate max(time, 1)^-power."""
    return config.tuning.rate * np.maximum(time, 1.0) ** -power


def closed_forms(config: Config) -> Mapping[str, np.ndarray]:
    """Evaluates the theory on the fine grid, in float64.

    Args:
      config: The diagram and its settings.

    Returns:
      Arrays as in `run`:
      - "loss" and "tuned", `(row, x)`.
      - "trace" and "sharpness" of the Hessian, `(x,)`, in "sensitivity".
      - "inflection", `(row,)`, the time with the smallest loss, NaN if this is the last time; not
        in "misalignment" and "sensitivity".
      - "fixed", `(rate, kind, x)`, in "trade_off".
    """
    x, rows = _axis(config, config.points), _rows(config, config.points)
    with jax.enable_x64(True):
        if config.diagram == "misalignment":
            costs = [_cost(config, decay, rows) for decay in x]
            loss, tuned = (np.stack(c, axis=-1) for c in zip(*costs, strict=True))
            return {"loss": loss, "tuned": tuned}
        sigma = config.tasks.spectrum()
        y = pre_trained(config.tasks, sigma, x)
        loss, tuned = _after(config, y, sigma, rows[:, None], x)
        curves: dict[str, ArrayLike] = {"loss": loss, "tuned": tuned}
        if config.diagram == "sensitivity":
            curves["trace"] = 4 * config.tasks.d * y.sum(-1)
            curves["sharpness"] = sharpness.mode_sharpness(y, sigma)
        else:
            curves["inflection"] = inflection(x, loss)
        if config.diagram == "trade_off":
            # The final rates of the three schedules, held fixed.
            few = np.array([_fall(config, x[-1], p) for p in rows])[:, None]
            curves["fixed"] = np.stack(_noisy(config, y, sigma, few), axis=1)
        return {name: np.asarray(value) for name, value in curves.items()}


def _after(
    config: Config, y: jax.Array, sigma: np.ndarray, row: np.ndarray, time: np.ndarray
) -> tuple[ArrayLike, ArrayLike]:
    """Computes the losses on both tasks, [row, x], of networks with modes y [x, d].

    The first is the pre-training loss. In "sensitivity" the two are the increase of the loss and
    its quadratic prediction instead.
    """
    ft = config.tasks.target(sigma)
    if config.diagram == "sensitivity":
        calm = perturbation.perturbed_mode_loss(y, sigma, 0.0)
        noisy = perturbation.perturbed_mode_loss(y, sigma, row)
        return noisy - calm, 2 * config.tasks.d * row**2 * jnp.sum(y, -1)
    if config.diagram == "perturbation":
        noisy = perturbation.perturbed_mode_loss(y, sigma, row)
        return noisy, perturbation.perturbed_mode_loss(y, ft, row)
    if config.diagram == "trade_off":
        return _noisy(config, y, sigma, _fall(config, time, row))
    row = row[..., None]
    if config.diagram == "learning_rate":
        return tuned_losses(y, sigma, ft, row * config.tuning.steps)
    return tuned_losses(y, sigma, ft, config.tuning.rate * config.tuning.steps, row)


def _noisy(
    config: Config, y: jax.Array, sigma: np.ndarray, rate: np.ndarray
) -> tuple[ArrayLike, ArrayLike]:
    """Computes the losses on both tasks if fine-tuning also adds Gaussian noise.

    The variance of the noise is nu times the learning rate. `rate` and the losses are [rate, x].
    """
    ft, gamma = config.tasks.target(sigma), np.sqrt(config.tuning.nu * rate)
    after = fine_tuning.mode((rate * config.tuning.steps)[..., None], y, ft)
    loss, tuned = (perturbation.perturbed_mode_loss(after, s, gamma) for s in (sigma, ft))
    return loss, tuned


def _cost(config: Config, decay: float, ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the increase of both losses by the end of pre-training, in units of |A|^2, [row].

    The row is the ratio of singular values. Each loss at the end is compared with its smallest
    value before.
    """
    sigma = config.tasks.spectrum(decay)
    times = config.tasks.times(sigma, LEGS)
    y = pre_trained(config.tasks, sigma, times)
    ft = np.stack([config.tasks.target(sigma, ratio) for ratio in ratios])[:, None]
    losses = tuned_losses(y, sigma, ft, config.tuning.rate * config.tuning.steps)
    pre, post = ((v[:, -1] - v.min(1)) / np.sum(sigma**2) for v in map(np.asarray, losses))
    return pre, post


def _column(config: Config, key: jax.Array, i: int) -> dict[str, np.ndarray]:
    """Simulates the costs of `_cost` at the i-th decay; returns arrays [seed, row, 1]."""
    sigma = config.tasks.spectrum(float(_axis(config, config.networks.cells[1])[i]))
    losses = simulate(config, jax.random.fold_in(key, i), sigma)
    size = np.sum(sigma**2)
    return {k: (v[..., -1:] - v.min(-1, keepdims=True)) / size for k, v in losses.items()}


def simulate(config: Config, key: jax.Array, sigma: np.ndarray) -> dict[str, np.ndarray]:
    """Trains networks by stochastic gradient descent, and perturbs or fine-tunes them in between.

    Args:
      config: The diagram and its settings.
      key: A random key.
      sigma: Singular values of the pre-training task, `(d,)`.

    Returns:
      "loss" and "tuned", `(seed, row, time)`, as in `run` before costs are computed. In
      "sensitivity" also "trace" and "sharpness" of the Hessian, `(seed, time)`.
    """
    cells = config.networks.cells
    times = config.tasks.times(sigma, LEGS if config.diagram == "misalignment" else cells[1])
    legs = np.diff(times, prepend=0.0)
    rows = _rows(config, cells[0])
    # Every leg has the same number of steps, so that one compiled program is sufficient. The
    # longest leg then has about the learning rate `networks.rate`, and shorter ones a smaller rate.
    network = partial(_network, config, int(np.ceil(legs.max() / config.networks.rate)))
    keys = jax.random.split(key, config.networks.seeds)
    targets = np.stack([config.tasks.target(sigma, ratio) for ratio in _ratios(config, rows)])
    grid = (sigma, targets, _rates(config, rows[:, None], times), rows, legs)
    losses = over_devices(jax.jit(jax.vmap(network, (0, None))))(
        keys, jax.tree.map(jnp.asarray, grid)
    )
    return {k: np.asarray(v, np.float64) for k, v in losses.items()}


def _ratios(config: Config, rows: np.ndarray) -> np.ndarray:
    """Lists the ratio of singular values in each row."""
    return rows if config.diagram == "misalignment" else np.full(rows.shape, config.tasks.ratio)


def _rates(config: Config, rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Computes the learning rates of fine-tuning, [row, time]."""
    if config.diagram == "learning_rate":
        return np.broadcast_to(rows, (rows.size, times.size))
    if config.diagram == "trade_off":
        return _fall(config, times, rows)
    return np.full((rows.size, times.size), config.tuning.rate)


def _network(config: Config, steps: int, key: jax.Array, grid: tuple) -> dict[str, jax.Array]:
    """Trains one network leg by leg, and perturbs or fine-tunes it from the end of each leg.

    `grid` contains the singular values, the fine-tuning targets [row, d], learning rates [row,
    time], rows and the lengths of the legs. Returns both losses, [row, time].
    """
    sigma, targets, rates, rows, legs = grid
    rotation, pre, post, noise = jax.random.split(key, 4)
    U = linalg.orthogonal(rotation, config.tasks.d)
    # Symmetric, so that the initial weights, a multiple of the identity, are aligned with every
    # mode.
    task = (U * sigma) @ U.T

    def train(layers: Layers, leg: tuple[jax.Array, jax.Array]):
        key, time = leg
        x = jax.random.normal(key, (steps, config.networks.batch, config.tasks.d))
        layers = networks.sgd(layers, task, x, time / steps)
        return layers, layers

    start = identity_start(config.tasks.d, config.tasks.tau)
    _, path = jax.lax.scan(train, start, (jax.random.split(pre, legs.size), legs))
    batches = jax.random.normal(post, (config.tuning.steps, config.networks.batch, config.tasks.d))

    def tune(layers: Layers, target, rate, row):
        """Computes the losses of one pre-trained network in one row."""
        ft = (U * target) @ U.T
        still = config.diagram in ("perturbation", "sensitivity")  # not fine-tuned
        gamma = row if still else 0.0
        if not still:
            anchor = row if config.diagram == "anchor" else 0.0
            layers = networks.sgd(layers, ft, batches, rate, anchor=anchor)
        if config.diagram == "trade_off":
            gamma = jnp.sqrt(config.tuning.nu * rate)
        if still or config.diagram == "trade_off":
            shape = (NOISES, config.tasks.d, config.tasks.d)
            z = Layers(*(jax.random.normal(k, shape) for k in jax.random.split(noise)))
            kinds = [networks.perturbed_losses(layers, a, gamma, z).mean() for a in (task, ft)]
        else:
            kinds = [loss(layers, a) for a in (task, ft)]
        return {"loss": kinds[0], "tuned": kinds[1]}

    # [row, time]: all rows continue from the same path
    over_times = jax.vmap(tune, (0, None, 0, None))
    measured = jax.vmap(over_times, (None, 0, 0, 0))(path, targets, rates, rows)
    if config.diagram == "sensitivity":
        # One at a time: each Hessian has (2 d^2)^2 entries.
        H = jax.lax.map(lambda layers: networks.hessian(layers, task), path)
        measured["trace"] = jnp.trace(H, axis1=1, axis2=2)
        measured["sharpness"] = jax.lax.map(lambda h: linalg.eigvalsh(h)[-1], H)
        measured["loss"] -= jax.vmap(lambda layers: loss(layers, task))(path)
        measured["tuned"] = rows[:, None] ** 2 / 2 * measured["trace"]
    return measured
