"""The trained networks of `transfer_phase`: gradient descent on the paper's losses.

Each network is compared with theory on the same data sets; `compared` describes the kinds.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PyTree

from experiments.lab.progress import Stage
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.transfer_phase.compared import KINDS
from experiments.studies.transfer_phase.config import Config
from sail_jax import linalg
from theory import deep_linear as dl
from theory import problems
from theory.claims import optimised
from theory.deep_linear import directions, networks

STARTS = ("normal", "orthogonal")  # initial weights of networks that train from scratch
# The number of draws between two points at which a run can be resumed; larger with several devices.
DRAWS = 1
# The largest part of a two-layer predictor that may be lost by training only in the directions in
# which it moves.
NEGLIGIBLE = 1e-6


def trained(config: Config, stage: Stage) -> xr.Dataset:
    """Trains networks at some points of the phase diagram, and compares them with theory.

    The networks of all loads, angles and noises of one draw are trained at once.

    Args:
      config: The config.
      stage: The stage function, which computes or restores the parts of the run.

    Returns:
      A dataset over network (a draw of data and of initial weights), kind, way, cell_load,
      cell_theta and sigma: the `risk` of every kind, the `steps` of the networks and their final
      `loss`, the same for pretraining, and `cell_theory`, the closed form of transferability. The
      flow and the narrow descent from scratch are NaN for more than two layers. With
      `networks.orthogonal` also `orthogonal_risk`, the risk of networks from orthogonal layers, and
      the `invariant` of each kind of initial weights in units of alpha^2. Eq. (22) requires a
      positive invariant.
    """
    # This key differs from that of the simulation, so that the two do not share their draws.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    keys = jax.random.split(key, config.networks.draws)
    train = partial(_trained, keys=keys, train=over_devices(partial(_train, config)))
    found = sweep(train, np.arange(len(keys)), stage, "networks", chunk=DRAWS)
    theory = stage("closed forms of the networks", partial(_closed_forms, config))
    n, cells = config.trained_counts(), ("cell_load", "cell_theta", "sigma")
    data = {
        "risk": (("network", "kind", "way", *cells), found["risk"]),
        "steps": (("network", "way", *cells), found["steps"]),
        "loss": (("network", "way", *cells), found["loss"]),
        "pretraining_steps": ("network", found["pretraining_steps"]),
        "pretraining_loss": ("network", found["pretraining_loss"]),
        "cell_theory": (("mode", *cells), np.stack([theory[mode] for mode in config.modes])),
        "cell_n": ("cell_load", n, {"long_name": "target samples"}),
    }
    line = {}
    if "linear" in config.modes:
        # The line of linear transfer is computed for these networks' own dimension.
        with jax.enable_x64(True):
            load, angle = regions.zero(
                "linear", config.networks.d, np.array(config.sigmas), most=config.load_max
            )
        data["cell_linear_zero"] = (("cell_line", "sigma"), angle)
        line = {"cell_line": ("cell_line", load, {"long_name": "load n/d"})}
    if config.networks.orthogonal:
        data["orthogonal_risk"] = (("network", "way", *cells), found["orthogonal_risk"])
        data["invariant"] = (("network", "start"), found["invariant"])
    coords = {
        **({"start": list(STARTS)} if config.networks.orthogonal else {}),
        "kind": list(KINDS),
        "way": list(_ways(config)),
        "mode": list(config.modes),
        "cell_load": ("cell_load", n / config.networks.d, {"long_name": "load n/d"}),
        "cell_theta": ("cell_theta", _angles(config), {"units": "rad"}),
        "sigma": list(config.sigmas),
        **line,
    }
    about = ("d", "layers", "alpha", "rate", "steps")
    return xr.Dataset(data, coords, {f"trained_{k}": getattr(config.networks, k) for k in about})


def _ways(config: Config) -> tuple[str, ...]:
    return "scratch", *config.modes


def _angles(config: Config) -> np.ndarray:
    return config.angles(config.networks.cells[1])


def _closed_forms(config: Config) -> dict[str, np.ndarray]:
    """Computes transferability `[cell_load, cell_theta, sigma]` of each mode, in closed form."""
    with jax.enable_x64(True):
        n = config.trained_counts()[:, None, None]
        theta, sigma = _angles(config)[:, None], np.array(config.sigmas)
        d, depth = config.networks.d, config.networks.layers
        closed = jax.jit(partial(dl.transferability, depth=depth), static_argnums=0)
        return {
            mode: np.asarray(closed(mode, n=n, d=d, theta=theta, sigma=sigma))
            for mode in config.modes
        }


@optimised()
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
    key_x, key_noise, key_source, key_target = jax.random.split(key, 4)
    x = jax.random.normal(key_x, (ns[-1], d))
    noise = jax.random.normal(key_noise, (ns[-1],))
    small = networks.gaussian_weights(key_target, d, depth, options.alpha)
    source = networks.gaussian_weights(key_source, d, depth, options.alpha)
    cells = _cells(config, x, noise)
    pretrained, pretraining_steps, pretraining_loss = _pretrained(config, source)
    budget = options.steps, options.loss
    betas, steps, loss = _descended(config, lambda x, y: small, pretrained, cells, *budget)
    growing, learned = _narrow(config, small, networks.predictor(pretrained))
    # As many steps as the network took, so that only the size of its weights differs.
    walked, *_ = _descended(config, growing, learned, cells, steps)
    flow = _flows(config, growing, learned, cells, steps)
    risks = problems.risk(jnp.stack([flow, walked, betas]), cells.beta_t)
    limits = _limits(config, dl.nested_overlaps(x, noise, jnp.eye(d, 2), ns.tolist()))
    found = {"risk": jnp.concatenate([limits[None], risks]), "steps": steps, "loss": loss}
    if options.orthogonal:
        # With the norm of alpha times normal entries: |W_L| = alpha sqrt(d).
        orthogonal, orthogonal_source = (
            networks.small_weights(jax.random.fold_in(k, 1), d, depth, options.alpha * np.sqrt(d))
            for k in (key_target, key_source)
        )
        again, *_ = _pretrained(config, orthogonal_source)
        betas, *_ = _descended(config, lambda x, y: orthogonal, again, cells, *budget)
        found["orthogonal_risk"] = problems.risk(betas, cells.beta_t)
        least = jnp.stack([networks.least_invariant(w) for w in (small, orthogonal)])
        found["invariant"] = least / options.alpha**2
    return {
        **found,
        "pretraining_steps": pretraining_steps,
        "pretraining_loss": pretraining_loss,
    }


class _Cells(NamedTuple):
    """The data sets of one draw, by load, angle and noise.

    Attributes:
      x: Condensed inputs `[load, k, d]`.
      y: Condensed labels `[load, angle, noise, k]`.
      beta_t: Target tasks `[angle, 1, d]`.
      problem: The same losses in their own coordinates; basis and scale are those of a load.
    """

    x: Array
    y: Array
    beta_t: Array
    problem: directions.Problem


def _cells(config: Config, x: Array, noise: Array) -> _Cells:
    """Lays out the data sets of one draw."""
    rows, kept = jax.vmap(partial(_condensed, x, noise))(jnp.asarray(config.trained_counts()))
    beta_t = jnp.stack([problems.tasks(config.networks.d, theta)[1] for theta in _angles(config)])
    clean = jnp.einsum("lkd,td->ltk", rows, beta_t)
    sigma = jnp.asarray(config.sigmas, float)
    y = clean[:, :, None] + sigma[:, None] * kept[:, None, None]
    return _Cells(rows, y, beta_t[:, None], _problems(rows, y))


def _problems(x: Array, y: Array) -> directions.Problem:
    """Makes the loss of each cell; basis and scale have only the load's axes."""
    shared = directions.Problem(None, None, 0, 0)  # type: ignore[arg-type]
    of_samples = jax.vmap(jax.vmap(directions.of_samples, (None, 0), shared), (None, 0), shared)
    return jax.vmap(of_samples)(x, y)


def _each(fn: Callable[..., Any], of_load: PyTree, of_cell: PyTree) -> PyTree:
    """Applies a function to each cell; the cells of a load share the load's arguments."""
    return jax.vmap(jax.vmap(jax.vmap(fn, (None, 0)), (None, 0)))(of_load, of_cell)


# Makes the initial weights of training from scratch, from x and y.
Start = Callable[[Array, Array], networks.Weights]


def _narrow(
    config: Config, small: networks.Weights, beta_0: Array
) -> tuple[Start, networks.Weights]:
    """Returns the rank-one networks that grow like small weights, and those after pretraining."""
    depth = config.networks.layers

    def growing(x: Array, y: Array) -> networks.Weights:
        # For more than two small layers, the beginning of growth is not known.
        known = depth <= 2
        beta = networks.start_of_growth(small, x, y) if known else jnp.full_like(beta_0, jnp.nan)
        return networks.narrow_weights(beta, depth)

    return growing, networks.narrow_weights(beta_0, depth)


def _hidden(
    config: Config, weights: networks.Weights, problem: directions.Problem
) -> Float[Array, "k h"]:
    """Finds the hidden directions in which two layers are trained."""
    # The square of |N(0)| in `directions`: the order of the part that two directions lose.
    lost = 4 * config.networks.alpha**2 * config.networks.d
    if lost > NEGLIGIBLE:
        return jnp.eye(weights[1].size)
    return directions.moving(weights, problem)


def _pretrained(config: Config, source: networks.Weights) -> tuple[networks.Weights, Array, Array]:
    """Trains the network of the source task: its weights, steps and loss."""
    options = config.networks
    budget = options.rate, options.steps, options.loss
    beta_s, _ = problems.tasks(options.d, 0.0)
    if options.layers != 2:
        network = networks.pretrain(source, beta_s, *budget)
        return network.weights, network.steps, network.loss
    problem = directions.of_task(beta_s)
    hidden = _hidden(config, source, problem)
    ended = directions.descend(*directions.reduced(source, problem, hidden), problem, *budget)
    return directions.restored(source, problem, hidden, ended), ended.steps, ended.loss


def _descended(
    config: Config,
    scratch: Start,
    learned: networks.Weights,
    cells: _Cells,
    steps: Array | int,
    until: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Trains networks by each strategy in each cell; predictors, steps, losses `[way, load, ...]`.

    All cells of a strategy are trained in one loop.
    """
    rate = config.networks.rate

    def last_alone(steps: Array) -> tuple[Array, Array, Array]:
        """Trains one layer on the others' features, each coordinate separately."""
        *frozen, last = learned
        features = reduce(jnp.matmul, frozen)
        problem = _problems(cells.x @ features, cells.y)
        spread = _spread(problem)
        start = (spread.basis @ last)[..., None, :]
        unit = jnp.ones(1)
        ended = directions.descend(start, unit, spread, rate, steps, until, True)
        betas = directions.predictor(spread, ended) @ features.T
        return betas, ended.steps, ended.loss

    def two_layers(start: Start, steps: Array) -> tuple[Array, Array, Array]:
        """Trains all of two layers, in the directions in which they move."""

        def at(of_load: tuple[Array, ...], of_cell: tuple[Array, ...]) -> tuple[Array, Array]:
            (x, *shared), (y, *own) = of_load, of_cell
            here, weights = directions.Problem(*shared, *own), start(x, y)
            return directions.reduced(weights, here, _hidden(config, weights, here))

        of_load, of_cell = (cells.x, *cells.problem[:2]), (cells.y, *cells.problem[2:])
        spread = _spread(cells.problem)
        first, last = _each(at, of_load, of_cell)
        ended = directions.descend(first, last, spread, rate, steps, until)
        return directions.predictor(spread, ended), ended.steps, ended.loss

    def all_layers(start: Start, steps: Array) -> tuple[Array, Array, Array]:
        """Trains all of any other number of layers, by the plain loop."""

        def at(x: Array, of_cell: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            y, most = of_cell
            network = networks.fine_tune(start(x, y), x, y, rate, most, until)
            return networks.predictor(network.weights), network.steps, network.loss

        return _each(at, cells.x, (cells.y, steps))

    def train(way: str, steps: Array) -> tuple[Array, Array, Array]:
        if way == "linear":
            return last_alone(steps)
        start = scratch if way == "scratch" else lambda x, y: learned
        return (two_layers if config.networks.layers == 2 else all_layers)(start, steps)

    ways = _ways(config)
    steps = jnp.broadcast_to(steps, (len(ways), *cells.y.shape[:-1]))
    parts = map(train, ways, steps)
    return jax.tree.map(lambda *by_way: jnp.stack(by_way), *parts)


def _spread(problem: directions.Problem) -> directions.Problem:
    """Adds axes for the angle and the noise to the arrays of a load."""
    basis, scale = (part[:, None, None] for part in problem[:2])
    return problem._replace(basis=basis, scale=scale)


def _flows(
    config: Config, scratch: Start, learned: networks.Weights, cells: _Cells, steps: Array
) -> Array:
    """Computes the gradient flow of networks of rank one `[way, load, ...]`, at the same time."""

    def flow(way: str, steps: Array) -> Array:
        solve = _linear_flow if way == "linear" else _flow

        def at(x: Array, of_cell: tuple[Array, Array]) -> Array:
            y, taken = of_cell
            weights = scratch(x, y) if way == "scratch" else learned
            return solve(weights, x, y, (taken * config.networks.rate)[None])

        return _each(at, cells.x, (cells.y, steps))

    return jnp.stack([flow(*each) for each in zip(_ways(config), steps, strict=True)])


def _limits(config: Config, overlaps: dl.Overlaps) -> Array:
    """Computes the risks `[way, load, angle, noise]` of estimators, the limits of training."""
    depth = config.networks.layers

    def at(overlaps: dl.Overlaps, theta: Array, sigma: Array) -> Array:
        by_way = {
            "scratch": overlaps.scratch,
            "linear": overlaps.linear_transfer,
            "fine_tuning": partial(overlaps.fine_tune, depth=depth),
        }
        return jnp.stack([by_way[way](theta, sigma) for way in _ways(config)])

    over_sigma = jax.vmap(at, (None, None, 0), -1)
    over_theta = jax.vmap(over_sigma, (None, 0, None), -2)
    over_loads = jax.vmap(over_theta, (0, None, None), -3)
    return over_loads(overlaps, jnp.asarray(_angles(config)), jnp.asarray(config.sigmas, float))


def _condensed(
    x: Float[Array, "m d"], noise: Float[Array, " m"], n: Array
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    """Condenses the first n samples into a number of rows that does not depend on n.

    The rows are the triangular factor of [X, noise]. They have the same loss |y - X beta|^2 / (2n)
    for labels from any task, so that data of every load have the same shape.
    """
    kept = jnp.where(jnp.arange(len(x)) < n, 1 / jnp.sqrt(n), 0.0)
    rows = linalg.qr(kept[:, None] * jnp.column_stack([x, noise]), mode="r")
    # The losses divide by the number of rows, which is undone here.
    rows *= np.sqrt(len(rows))
    return rows[:, :-1], rows[:, -1]


def _flow(narrow: networks.Weights, x: Array, y: Array, time: Array) -> Array:
    """Computes gradient flow of all layers from balanced weights of rank one, at one time."""
    start = networks.predictor(narrow)
    if len(narrow) == 1:
        return dl.linear_flow(x, y, start, time)[0]
    return dl.fine_tuning_flow(x, y, start, time, len(narrow))[0]


def _linear_flow(weights: networks.Weights, x: Array, y: Array, time: Array) -> Array:
    """Computes gradient flow of the last layer alone, at one time; it is exact for any weights."""
    *frozen, last = weights
    features = reduce(jnp.matmul, frozen)
    return features @ dl.linear_flow(x @ features, y, last, time)[0]
