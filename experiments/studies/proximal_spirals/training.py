"""Trains and measures in `proximal_spirals`: data, models, distances and weights.

All repetitions are computed at once. `run` calls these functions in its stages.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from experiments.data import spirals
from experiments.data.spirals import Points, Sources
from experiments.models.mlp import MLP
from experiments.studies.proximal_spirals.config import Config
from experiments.studies.shared import gamma_sweep as line
from experiments.training.descent import descend
from sail_jax import distances, proximal
from sail_jax.distances import Distance

CLASSES = 2
# The rate of Adam on gamma.
DESCENT_RATE = 0.02
# Adam's steps are differentiated. Without this number, the root in them has no finite derivative at
# 0.
EPS_ROOT = 1e-12
# The number of cells of the histogram along either axis, for each label.
CELLS = 4
# For each distance: whether it is squared.
DISTANCES = {"mmd": True, "energy": True, "tv": False, "w1": False}
LABELS = {
    "mmd": "MMD",
    "energy": "energy distance",
    "tv": "total variation",
    "w1": "Wasserstein-1",
    "parameters": "parameters (eq. 4)",
    "loss": "loss (eq. 3)",
}


class Data(NamedTuple):
    """The points of every repetition, and the order in which they are used.

    Attributes:
      train: The training points, the target.
      test: New points, for the accuracy and as the target in distances.
      sources: The training points of the two sources.
      order: The points of the target in each step of training, as indices into `train`.
      orders: The points of each source in each step, as indices into the source.
    """

    train: Points
    test: Points
    sources: Int[np.ndarray, "seed 2 count"]
    order: Int[np.ndarray, "seed step batch"]
    orders: Int[np.ndarray, "seed 2 step batch"]


def load(config: Config, how: Sources) -> Data:
    """Draws the points of every repetition and cuts the sources from them.

    The points, and the order of the target's points, are the same for all kinds of sources.

    Args:
      config: The config.
      how: The construction of the sources.

    Returns:
      The data, with a leading axis over repetitions.
    """

    shape, training = config.data, config.training

    def order(rng: np.random.Generator, n: int) -> np.ndarray:
        epochs = [rng.permutation(n).reshape(-1, training.batch) for _ in range(training.epochs)]
        return np.concatenate(epochs)

    def draw(seed: int) -> Data:
        rng = np.random.default_rng((config.seed, seed))
        train, test = (
            spirals.spirals(rng, n, turns=shape.turns, noise=shape.noise)
            for n in (shape.points, shape.test)
        )
        target = order(rng, shape.points)
        sources = np.stack(spirals.sources(rng, train, how, shape.count))
        return Data(
            train, test, sources, target, np.stack([order(rng, shape.count) for _ in sources])
        )

    draws = [draw(seed) for seed in range(config.replicates)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *draws)


def _apply(config: Config, params: PyTree, x: ArrayLike) -> Any:
    """Computes the logits of a model, of shape (..., 2)."""
    return MLP((config.hidden,), CLASSES).apply(params, x)


def loss(config: Config, params: PyTree, points: Points) -> Float[Array, ""]:
    """Computes the mean cross-entropy of a model on some points."""
    logits = _apply(config, params, points.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, points.y).mean()


def _measures(config: Config, params: PyTree, train: Points, test: Points) -> dict[str, Array]:
    """Computes loss and gradient norm on the training points, and accuracy on the test points."""
    value, gradient = jax.value_and_grad(partial(loss, config))(params, train)
    right = _apply(config, params, test.x).argmax(-1) == test.y
    return {
        "loss": value,
        "accuracy": right.mean(dtype=value.dtype),
        "gradient": optax.tree.norm(gradient),
    }


def _trained(
    config: Config,
    params: PyTree,
    points: Points,
    order: Int[ArrayLike, "step batch"],
    measure: Callable[[PyTree], Any],
) -> tuple[PyTree, Any]:
    """Trains a model; returns it, and the measurements before and after every `every` epochs."""
    how = config.training
    # A row for each step of all epochs, because `descend` counts steps.
    feed = jnp.asarray(order).reshape(-1, how.batch)
    end = descend(
        lambda params, _, sample: (loss(config, params, sample), None),
        optax.scale_by_adam(),
        lambda _: how.rate,
        params,
        feed,
        partial(_pick, points),
        measure=lambda params, *_: measure(params),
        every=len(feed) * how.every // how.epochs,
    )
    return end.params, end.measured


def _pick(points: Points, index: ArrayLike) -> Points:
    """Selects points by an index, whose shape is prepended."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], points)


@partial(jax.jit, static_argnums=0)
def initial(config: Config) -> PyTree:
    """Draws initial weights of three models for every repetition.

    Returns the variables, in leaves of shape (seed, 3, ...).
    """
    keys = jax.random.split(jax.random.key(config.seed), (config.replicates, 3))
    init = MLP((config.hidden,), CLASSES).init
    return jax.vmap(jax.vmap(lambda key: init(key, jnp.zeros((1, 2)))))(keys)


@partial(jax.jit, static_argnums=0)
def scratch(config: Config, first: PyTree, data: Data) -> dict[str, Any]:
    """Trains on the target from initial weights.

    Args:
      config: The config; static.
      first: Initial variables, in leaves of shape (seed, ...).
      data: The data.

    Returns:
      `model`, the trained variables in leaves of shape (seed, ...); and `loss`, `accuracy` and
      `gradient` of shape (seed, epoch), as in `sweep`.
    """

    def of_seed(params: PyTree, data: Data) -> dict[str, Any]:
        measure = lambda params: _measures(config, params, data.train, data.test)  # noqa: E731
        model, curves = _trained(config, params, data.train, data.order, measure)
        return {"model": model, **curves}

    return jax.vmap(of_seed)(first, data)


@partial(jax.jit, static_argnums=0)
def sweep(config: Config, first: PyTree, data: Data) -> dict[str, Any]:
    """Trains on the sources, and then on the target from every point of the line between the
    models.

    Args:
      config: The config; static.
      first: Initial variables of the two models, in leaves of shape (seed, 2, ...).
      data: The data.

    Returns:
      `models`, the models of the sources in leaves of shape (seed, 2, ...); and of shape (seed,
      gamma, epoch), the training `loss`, the test `accuracy`, and `gradient`, the norm of the
      training loss's gradient.
    """

    def learn(params: PyTree, points: Points, order: ArrayLike) -> PyTree:
        return _trained(config, params, points, order, lambda _: {})[0]

    def of_seed(first: PyTree, data: Data) -> dict[str, Any]:
        measure = lambda params: _measures(config, params, data.train, data.test)  # noqa: E731
        models = jax.vmap(learn)(first, _pick(data.train, data.sources), data.orders)
        a, b = (jax.tree.map(lambda leaf, i=i: leaf[i], models) for i in range(2))

        def at(gamma: Array) -> dict[str, Array]:
            params = line.on_line(a, b, gamma)
            return _trained(config, params, data.train, data.order, measure)[1]

        return {"models": models, **jax.vmap(at)(jnp.asarray(config.gamma.values(), jnp.float32))}

    return jax.vmap(of_seed)(first, data)


def apart(config: Config, data: Data) -> dict[str, np.ndarray]:
    """Measures distances between sources and target, and predicts gamma from each.

    Points are compared with their labels as a third coordinate.

    Returns `value` and `error`, the distances and their standard errors (NaN if there is none), of
    shape (seed, distance, pair); and `weight`, the weight of theta_1 by eq. 11, of shape (seed,
    distance). It is NaN if the sources cannot be distinguished.
    """
    edges = np.linspace(-1, 1, CELLS + 1)[1:-1]
    bins = [edges, edges, np.array([0.5])]
    measures: dict[str, Callable[..., Distance]] = {
        "energy": distances.energy,
        "tv": partial(distances.total_variation_histogram, bins=bins),
        # Matched point by point: no standard error.
        "w1": lambda x, y: Distance(distances.wasserstein1(x, y), np.nan),
    }
    # The target's points are new, because the sources are part of its training points.
    learn, fresh = (
        np.concatenate([points.x, points.y[..., None]], -1) for points in (data.train, data.test)
    )
    value = np.zeros((config.replicates, len(DISTANCES), len(line.PAIRS)))
    error = np.zeros_like(value)
    weight = np.zeros(value.shape[:2])
    for seed in range(config.replicates):
        first, second = learn[seed][data.sources[seed]]
        # One kernel, hence one bandwidth, for the three pairs.
        width = distances.median_distance(learn[seed], fresh[seed])
        measures["mmd"] = partial(distances.mmd, bandwidth=width)
        for i, (name, squared) in enumerate(DISTANCES.items()):
            target = fresh[seed][: config.data.count] if name == "w1" else fresh[seed]
            by_pair = line.distances(measures[name], first, second, target)
            value[seed, i] = [float(by_pair[pair].value) for pair in line.PAIRS]
            error[seed, i] = [float(by_pair[pair].stderr) for pair in line.PAIRS]
            weight[seed, i] = line.weight(by_pair, squared=squared)
    return {"value": value, "error": error, "weight": weight}


def weights(config: Config, data: Data, models: PyTree, target: PyTree) -> dict[str, np.ndarray]:
    """Predicts gamma from the models: by their parameters (eq. 4) and by the loss (eq. 3)."""
    by_parameters = line.weights_by_parameters(models, target)
    return {"parameters": by_parameters, "loss": np.asarray(gamma_by_loss(config, data, models))}


@partial(jax.jit, static_argnums=0)
def gamma_by_loss(config: Config, data: Data, models: PyTree) -> Float[Array, " seed"]:
    """Finds gamma by gradient descent on the loss after training (eq. 3).

    The descent starts from 1/2 and follows the gradient through `config.loss_epochs` epochs of
    training. It is equivalent to `proximal.from_loss`, for all seeds at once.

    Args:
      config: The config; static.
      data: The data.
      models: The models of the sources, in leaves of shape (seed, 2, ...).

    Returns:
      The weight of theta_1 for each seed.
    """
    descent = optax.adam(DESCENT_RATE)

    def of_seed(data: Data, models: PyTree) -> Array:
        steps = config.loss_epochs * config.data.points // config.training.batch
        after = proximal.after_training(
            [jax.tree.map(lambda leaf, i=i: leaf[i], models) for i in range(2)],
            partial(loss, config),
            _pick(data.train, data.order[:steps]),
            data.train,
            optimizer=optax.adam(config.training.rate, eps_root=EPS_ROOT),
        )
        slope = jax.grad(lambda gamma: after(jnp.stack([gamma, 1 - gamma])))

        def step(state: tuple, _: None) -> tuple[tuple, None]:
            update, memory = descent.update(slope(state[0]), state[1])
            return (state[0] + update, memory), None

        start = jnp.asarray(0.5)
        (gamma, _), _ = jax.lax.scan(step, (start, descent.init(start)), length=config.loss_steps)
        return gamma

    return jax.vmap(of_seed)(data, models)
