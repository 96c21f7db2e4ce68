"""Makes samples of a SiT by integrating its velocity from noise, at time 1, to data, at time 0.

The interpolant x_t = (1 - t) x + t e has the velocity E[e - x | x_t]. This is SiT (Ma et al. 2024)
with the linear interpolant, in REPA's direction of time.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from experiments.lab.config import Natural, NotNegative, config

Method = Literal["euler", "heun", "sde"]
Velocity = Callable[[Array, Array], Array]


def interpolate(
    x: Float[Array, "n *example"], noise: Float[Array, "n *example"], t: Float[Array, " n"]
) -> tuple[Array, Array]:
    """Mixes data with noise, and returns the velocity to predict there."""
    at = t.reshape(-1, *[1] * (x.ndim - 1))
    return (1 - at) * x + at * noise, noise - x


@config
class Sampler:
    """The method that makes samples: it integrates the velocity from noise to data."""

    method: Method = "heun"
    """'euler' or 'heun' along the flow, or 'sde', Euler-Maruyama steps of the reverse diffusion."""
    steps: Natural = 12
    """Steps of equal length; 'heun' evaluates the velocity twice in each."""
    guidance: NotNegative = 1.0
    """Classifier-free guidance g: the velocity is v + (g - 1) (v - v without class) (Ho and
    Salimans 2022); 1 gives v itself."""


def integrate(
    velocity: Velocity,
    noise: Float[Array, "n *example"],
    sampler: Sampler,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "n *example"]:
    """Integrates a velocity from noise to data.

    The method 'sde' follows the reverse diffusion with noise of variance 2 t per unit of time. Its
    drift is v - t * score, with score = -(x + (1 - t) v) / t. The last step adds no noise and goes
    to the mean of the data given x_t.

    - `key`: the key of the noise that 'sde' adds; the other methods do not use it. None means
      `jax.random.key(0)`.
    """
    dt = 1 / sampler.steps

    def euler(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        return x - dt * velocity(x, t)

    def heun(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        v = velocity(x, t)
        return x - dt * (v + velocity(x - dt * v, t - dt)) / 2

    def sde(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        v = velocity(x, t)
        # The last step starts at t = dt; half a step of slack allows for rounding.
        last = t < 1.5 * dt
        drift = jnp.where(last, v, x + (2 - t) * v)
        spread = jnp.where(last, 0.0, jnp.sqrt(2 * t * dt))
        return x - dt * drift + spread * jax.random.normal(key, x.shape)

    step = {"euler": euler, "heun": heun, "sde": sde}[sampler.method]
    keys = jax.random.split(jax.random.key(0) if key is None else key, sampler.steps)
    times = 1 - dt * jnp.arange(sampler.steps)
    return jax.lax.scan(lambda x, at: (step(x, *at), None), noise, (times, keys))[0]


@partial(jax.jit, static_argnames=("net", "shape", "sampler"))
def sample(
    net: nn.Module,
    params: PyTree,
    labels: Int[Array, " n"],
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    sampler: Sampler,
) -> Float[Array, "n *shape"]:
    """Generates one example for each label with a SiT.

    - `net`: the SiT (static under jit).
    - `labels`: the class of each example; `net.classes` means no class.
    - `shape`: the shape of one example, (side, side, channel) (static).
    - `sampler`: the method, its steps and the guidance (static).
    """
    first, later = jax.random.split(key)
    none = jnp.full_like(labels, net.classes)  # type: ignore[attr-defined]

    def velocity(x: Array, t: Array) -> Array:
        times = jnp.full(len(x), t)
        v: Array = net.apply({"params": params}, x, times, labels)  # type: ignore[assignment]
        if sampler.guidance == 1:
            return v
        return v + (sampler.guidance - 1) * (v - net.apply({"params": params}, x, times, none))  # type: ignore[operator]

    return integrate(velocity, jax.random.normal(first, (len(labels), *shape)), sampler, later)
