"""Experts, inputs and random numbers that the claims of this package share.

There are few sizes, so that claims share their compilations. Keys are fixed, so that both sides of
a claim use the same models.
"""

from collections.abc import Callable
from functools import partial
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory import claims
from theory.claims import Simulate, measured
from theory.linearity import bounds, identities, networks
from theory.linearity.networks import network

PAPER = "cross-task-linearity"
claim = partial(claims.claim, PAPER)

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
PAIR = (0.3, 0.7)
K, POINTS = 4, 12
SHALLOW, DEEP, TANH = (3, 4, 2), (3, 4, 3, 2), (3, 4, 2)
STEPS, RATE = 200, 0.05
EXPERTS = f"{K} experts of one checkpoint, weights {WEIGHTS}"
HALVES = (0.5, 0.5)
SLOPE = 0.05  # the slope between steps s and s / 2 is off by O(s), s = 0.02
ORDER = "log2 of the ratio of remainders at steps .02 and .01 is compared, up to O(step)."

tanh_network = partial(network, activation=jnp.tanh)

# Compiled as one program, because compilation operation by operation takes ten times as long.
init = jax.jit(networks.init, static_argnums=1)
gap = jax.jit(networks.gap, static_argnums=0)
mean = jax.jit(identities.mean)
product_gap = jax.jit(identities.product_gap)
second_derivative = jax.jit(bounds.second_derivative, static_argnums=0)
second_order_gap = jax.jit(bounds.second_order_gap, static_argnums=0)
integral_gap = jax.jit(bounds.integral_gap, static_argnums=0)
supremum_bound = jax.jit(bounds.supremum_bound, static_argnums=0)
curvature = jax.jit(bounds.curvature, static_argnums=0)
outputs = jax.jit(jax.vmap(tanh_network, (0, None)))


@jax.jit
def inputs() -> Float[Array, "n i"]:
    """Returns the fixed inputs, standard normal."""
    return jax.random.normal(jax.random.key(1), (POINTS, 3))


@jax.jit
def labels() -> Float[Array, "tasks n o"]:
    """Returns the labels of a pre-training task and of K tasks close to it, from linear teachers.

    Returns:
      The labels `(1 + K, 12, 2)`, with the pre-training task first.
    """
    common, own = jax.random.split(jax.random.key(2))
    first = jax.random.normal(common, (1, 2, 3))
    teachers = first + 0.7 * jax.random.normal(own, (K + 1, 2, 3)).at[0].set(0.0)
    return jnp.einsum("ni,koi->kno", inputs(), teachers)


def pretrained(f: networks.Model, sizes: tuple[int, ...]) -> Any:
    """Trains a network on the pre-training task."""
    start = init(jax.random.key(3), sizes)
    return networks.train(f, start, inputs(), labels()[0], RATE, STEPS)


def fine_tuned(f: networks.Model, sizes: tuple[int, ...]) -> Any:
    """Fine-tunes K experts from one checkpoint."""
    start = pretrained(f, sizes)
    return networks.experts(f, start, inputs(), labels()[1:], RATE, STEPS)


def tanh_experts() -> Any:
    """Returns K experts with tanh activations, from one checkpoint."""
    return fine_tuned(tanh_network, TANH)


def task_vectors(f: networks.Model, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns a checkpoint and the task vectors of its K experts.

    Args:
      f: Model f(theta, x).
      sizes: Widths of input, hidden layers and output.

    Returns:
      The parameters of the checkpoint, and the differences of the experts from it, stacked.
    """
    start = pretrained(f, sizes)
    experts = fine_tuned(f, sizes)
    return start, jax.tree.map(lambda t, s: t - s, experts, start)


def pick(stacked: Any, n: int | slice) -> Any:
    """Selects models from a stacked pytree."""
    return jax.tree.map(lambda t: t[n], stacked)


def first_two(stacked: Any) -> Any:
    """Selects the first two of stacked models."""
    return jax.tree.map(lambda t: t[:2], stacked)


@jax.jit
def tanh_loss(layers: Any) -> Float[Array, ""]:
    """Computes the loss of the first expert's task, a scalar as in Appendix B.2 of the paper."""
    return networks.mean_squared_error(tanh_network, layers, inputs(), labels()[1])


def size(x: Any) -> float:
    """Computes the Euclidean norm of an array."""
    return float(jnp.linalg.norm(jnp.ravel(x)))


def order(
    edit: Callable[[float], tuple[Any, Any]], at: Callable[[], Any] = lambda: None
) -> Simulate:
    """Makes a simulation that measures the order of the second-order gap's error.

    The models are tanh networks, and the measure is log2 of the ratio of the errors at steps 0.02
    and 0.01.

    Args:
      edit: Maps a step to stacked models and their weights.
      at: Returns the point of the second derivative, or None for the mean of the models.

    Returns:
      The simulation.
    """

    def left(step: float) -> float:
        thetas, a = edit(step)
        rest = gap(tanh_network, thetas, a, inputs())
        return size(rest - second_order_gap(tanh_network, thetas, a, inputs(), at=at()))

    return measured(lambda: log2(left(0.02) / left(0.01)), SLOPE)


def shrunk(weights: tuple[float, ...]) -> Callable[[float], tuple[Any, Any]]:
    """Returns a function that moves experts to a fraction of the way from their checkpoint.

    Args:
      weights: Weights of the first experts, one per expert to use.

    Returns:
      A function that maps a step, the fraction, to stacked models and their weights.
    """

    def edit(step: float) -> tuple[Any, Any]:
        start, tasks = task_vectors(tanh_network, TANH)
        tasks = pick(tasks, slice(len(weights)))
        return jax.tree.map(lambda s, t: s + step * t, start, tasks), weights

    return edit
