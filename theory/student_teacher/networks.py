"""Two-layer ReLU networks in the mean-field scaling, and their training.

features-are-fate, Sec. 4: f(x) = (1/m) sum_i c_i relu(w_i.x), x ~ N(0, I_d) (eq. 18). Hidden
vectors are kept on the unit sphere by Riemannian gradient descent: the gradient loses its radial
part, and each step is followed by normalisation. Losses are E(f - f*)^2 / 2 and
|y - f(X)|^2 / (2n); the learning rate is multiplied by m, so that time does not depend on the
width. `risk` is the full E(f - f*)^2.

A population loss is a difference of numbers of order |f*|^2: float32 loses it below 1e-8 or so.
Run in float64 (`with jax.enable_x64(True)`) where that matters; everything follows its input.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.student_teacher import arc_cosine

SMALL = 1e-7  # output weights at initialisation (features-are-fate, App. D.2)


class Network(NamedTuple):
    """f(x) = (1/m) sum_i c_i relu(w_i.x)."""

    c: Float[Array, " m"]
    w: Float[Array, "m d"]


class Descent(NamedTuple):
    """A network, its loss, and the steps taken so far: where descent stopped, and can go on."""

    network: Network
    loss: Float[Array, ""]
    steps: Array


def sphere(key: Array, m: int, d: int) -> Float[Array, "m d"]:
    """m independent uniform unit vectors."""
    if m < 1 or d < 1:
        raise ValueError(f"need m >= 1 and d >= 1; got m={m}, d={d}")
    w = jax.random.normal(key, (m, d))
    return w / jnp.linalg.norm(w, axis=1, keepdims=True)


def teacher(key: Array, m: int, d: int) -> Network:
    """m neurons of weight c = 1. The paper does not give its c*; of c = 1 and c = +-1, only this
    has the |P_perp f|^2 of its Fig. 4(d)."""
    return Network(jnp.ones(m), sphere(key, m, d))


def student(key: Array, m: int, d: int) -> Network:
    """m neurons before training: f is zero up to 1e-7."""
    return Network(jnp.full(m, SMALL), sphere(key, m, d))


def ablate(key: Array, target: Network, mu: ArrayLike) -> Network:
    """The source of eq. (19): `target` without a random fraction `mu` of its neurons.

    Removed neurons stay as zeros, so that the shape does not depend on mu. One key gives nested
    sources: what a small mu removes, a larger one removes too.
    """
    m = target.c.size
    problems.check(
        "mu",
        mu,
        lambda mu: (mu >= 0) & (mu < 1) & (abs(mu * m - np.round(mu * m)) < 1e-6 * m),
        f"a fraction in [0, 1) that removes a whole number of the {m} neurons",
    )
    removed = jnp.round(jnp.asarray(mu) * m)
    kept = jax.random.permutation(key, m) >= removed
    c = jnp.where(kept, target.c * (m / (m - removed)), 0.0)
    return Network(c.astype(target.c.dtype), jnp.where(kept[:, None], target.w, 0.0))


def features(w: Float[Array, "m d"], x: Float[Array, "n d"]) -> Float[Array, "n m"]:
    """relu(w_i.x): what linear transfer keeps of a network."""
    return jax.nn.relu(x @ w.T)


def predict(network: Network, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return features(network.w, x) @ network.c / network.c.size


def kernel(w: Float[Array, "m d"], x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """k(x, x'): the mean of relu(w_i.x) relu(w_i.x') over nonzero neurons, whatever the output
    weights."""
    phi, alive = features(w, x), jnp.sum(jnp.any(w != 0, axis=1))
    problems.check("the number of nonzero neurons", alive, lambda m: m >= 1, "at least 1")
    return phi @ phi.T / alive


def inner(f: Network, g: Network) -> Float[Array, ""]:
    """E f(x) g(x)."""
    return (f.c @ arc_cosine.gram(f.w, g.w) @ g.c) / (f.c.size * g.c.size)


@jax.jit
def risk(f: Network, g: Network) -> Float[Array, ""]:
    """E (f(x) - g(x))^2, exactly; rounding leaves about eps (|f|^2 + |g|^2)."""
    return inner(f, f) - 2 * inner(f, g) + inner(g, g)


@jax.jit
def variance(f: Network) -> Float[Array, ""]:
    """Var f(x)."""
    return inner(f, f) - (arc_cosine.relu_mean(f.w) @ f.c / f.c.size) ** 2


def pretrain(
    start: Network | Descent, source: Network, rate: ArrayLike, steps: int, tolerance: ArrayLike
) -> Descent:
    """Descent on E(f - source)^2 / 2, in closed form, until the loss is below `tolerance` or
    `steps` more steps are taken. Give the result back to go on."""
    _check(rate, steps, tolerance)
    return _descend(_population_loss, start, rate, steps, tolerance, source, inner(source, source))


def scratch(
    start: Network | Descent, x: Array, y: Array, rate: ArrayLike, steps: int, tolerance: ArrayLike
) -> Descent:
    """Full-batch descent on |y - f(X)|^2 / (2n), stopped like `pretrain`."""
    _check(rate, steps, tolerance)
    return _descend(_training_loss, start, rate, steps, tolerance, x, y)


def _check(rate: ArrayLike, steps: int, tolerance: ArrayLike) -> None:
    problems.check("rate", rate, lambda r: (r > 0) & (r < np.inf), "a finite learning rate > 0")
    problems.check("steps", steps, lambda s: s >= 0, "a number of steps >= 0")
    problems.check("tolerance", tolerance, lambda t: t >= 0, "a loss >= 0")


def _population_loss(network: Network, source: Network, norm: Array) -> Array:
    return 0.5 * (inner(network, network) - 2 * inner(network, source) + norm)


def _training_loss(network: Network, x: Array, y: Array) -> Array:
    return 0.5 * jnp.mean((y - predict(network, x)) ** 2)


@partial(jax.jit, static_argnums=0)
def _descend(
    loss: Callable[..., Array],
    start: Network | Descent,
    rate: ArrayLike,
    steps: ArrayLike,
    tolerance: ArrayLike,
    *data,
) -> Descent:
    network = start.network if isinstance(start, Descent) else start
    taken = start.steps if isinstance(start, Descent) else jnp.zeros((), int)
    rate, limit = rate * network.c.size, taken + steps
    measure = jax.value_and_grad(loss)

    # One gradient per turn, and none outside the loop: a resumed run repeats the same instructions,
    # so it ends on the same bits.
    def turn(state):
        (c, w), _, step, _ = state
        value, gradient = measure(Network(c, w), *data)
        going = (value > tolerance) & (step < limit)
        radial = jnp.sum(gradient.w * w, axis=1, keepdims=True)
        ahead = w - rate * (gradient.w - radial * w)
        moved = Network(
            c - rate * gradient.c, ahead / jnp.linalg.norm(ahead, axis=1, keepdims=True)
        )
        network = jax.tree.map(lambda new, old: jnp.where(going, new, old), moved, Network(c, w))
        return network, value, step + going, going

    start_loss = jnp.full((), jnp.inf, network.c.dtype)
    network, value, step, _ = jax.lax.while_loop(
        lambda state: state[3], turn, (network, start_loss, taken, jnp.array(True))
    )
    return Descent(network, value, step)
