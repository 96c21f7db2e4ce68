"""The experts and random numbers of this room's ledger: few sizes, so that claims share their
compilations. Keys are fixed, so that both sides of a claim see the same models."""

from collections.abc import Callable
from functools import partial
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory.claims import Estimate, Simulate
from theory.linearity import bounds, identities, networks
from theory.linearity.networks import network

PAPER = "cross-task-linearity"

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
PAIR = (0.3, 0.7)
K, POINTS = 4, 12
SHALLOW, DEEP, TANH = (3, 4, 2), (3, 4, 3, 2), (3, 4, 2)
STEPS, RATE = 200, 0.05
EXPERTS = f"{K} experts of one checkpoint, weights {WEIGHTS}"
HALVES = (0.5, 0.5)
ROUNDING = 1e-12  # of hundreds of operations on numbers of order one, in float64
SLOPE = 0.05  # the slope between steps s and s / 2 is off by O(s), s = 0.02
ORDER = "log2 of the ratio of remainders at steps .02 and .01; tolerance O(step)"

tanh_network = partial(network, activation=jnp.tanh)

# Compiled whole: operation by operation they take ten times as long to compile.
init = jax.jit(networks.init, static_argnums=1)
gap = jax.jit(networks.gap, static_argnums=0)
mean = jax.jit(identities.mean)
product_gap = jax.jit(identities.product_gap)
second_derivative = jax.jit(bounds.second_derivative, static_argnums=0)
second_order_gap = jax.jit(bounds.second_order_gap, static_argnums=0)
integral_gap = jax.jit(bounds.integral_gap, static_argnums=0)
supremum_bound = jax.jit(bounds.supremum_bound, static_argnums=0)
curvature = jax.jit(bounds.curvature, static_argnums=0)
hessian = jax.jit(networks.hessian, static_argnums=0)
outputs = jax.jit(jax.vmap(tanh_network, (0, None)))


@jax.jit
def inputs() -> Float[Array, "n i"]:
    return jax.random.normal(jax.random.key(1), (POINTS, 3))


@jax.jit
def labels() -> Float[Array, "tasks n o"]:
    """A pre-training task and K near it: the labels of linear teachers."""
    common, own = jax.random.split(jax.random.key(2))
    first = jax.random.normal(common, (1, 2, 3))
    teachers = first + 0.7 * jax.random.normal(own, (K + 1, 2, 3)).at[0].set(0.0)
    return jnp.einsum("ni,koi->kno", inputs(), teachers)


def pretrained(f: networks.Model, sizes: tuple[int, ...]) -> Any:
    start = init(jax.random.key(3), sizes)
    return networks.train(f, start, inputs(), labels()[0], RATE, STEPS)


def fine_tuned(f: networks.Model, sizes: tuple[int, ...]) -> Any:
    """K experts from one checkpoint, stacked."""
    start = pretrained(f, sizes)
    return networks.experts(f, start, inputs(), labels()[1:], RATE, STEPS)


def tanh_experts() -> Any:
    return fine_tuned(tanh_network, TANH)


def task_vectors(f: networks.Model, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The checkpoint and the stacked differences of its experts from it."""
    start = pretrained(f, sizes)
    experts = fine_tuned(f, sizes)
    return start, jax.tree.map(lambda t, s: t - s, experts, start)


def pick(stacked: Any, n: int | slice) -> Any:
    return jax.tree.map(lambda t: t[n], stacked)


def first_two(stacked: Any) -> Any:
    return jax.tree.map(lambda t: t[:2], stacked)


@jax.jit
def tanh_loss(layers: Any) -> Float[Array, ""]:
    """The loss of the first expert's task, a scalar f of the parameters as in Appendix B.2."""
    return networks.mean_squared_error(tanh_network, layers, inputs(), labels()[1])


def size(x: Any) -> float:
    return float(jnp.linalg.norm(jnp.ravel(x)))


def measured(compute: Callable[[], Any], tolerance: float = ROUNDING) -> Simulate:
    """A deterministic simulation: keys and sizes do not matter."""
    return lambda key, quick: Estimate(float(compute()), tolerance=tolerance)


def order(
    edit: Callable[[float], tuple[Any, Any]], at: Callable[[], Any] = lambda: None
) -> Simulate:
    """Of what the second-order gap of tanh networks leaves, in the step."""

    def left(step: float) -> float:
        thetas, a = edit(step)
        rest = gap(tanh_network, thetas, a, inputs())
        return size(rest - second_order_gap(tanh_network, thetas, a, inputs(), at=at()))

    return measured(lambda: log2(left(0.02) / left(0.01)), SLOPE)


def shrunk(weights: tuple[float, ...]) -> Callable[[float], tuple[Any, Any]]:
    """The first experts at a fraction of the way from their checkpoint, with weights."""

    def edit(step: float) -> tuple[Any, Any]:
        start, tasks = task_vectors(tanh_network, TANH)
        tasks = pick(tasks, slice(len(weights)))
        return jax.tree.map(lambda s, t: s + step * t, start, tasks), weights

    return edit
