"""Samples of a SiT: its velocity integrated from noise, at time 1, to data, at time 0.

x_t = (1 - t) x + t e has the velocity E[e - x | x_t] (SiT, Ma et al. 2024, with the linear
interpolant, in REPA's direction of time).
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
    """x_t and the velocity e - x that is to be predicted there."""
    at = t.reshape(-1, *[1] * (x.ndim - 1))
    return (1 - at) * x + at * noise, noise - x


@config
class Sampler:
    """How samples are made: the velocity is integrated from noise to data."""

    method: Method = "heun"
    """'euler' or 'heun' along the flow, or 'sde', Euler-Maruyama steps of the reverse diffusion."""
    steps: Natural = 12
    """Steps of equal length; 'heun' evaluates the velocity twice in each."""
    guidance: NotNegative = 1.0
    """Classifier-free guidance g: v + (g - 1) (v - v of no class) is followed (Ho and Salimans
    2022), and 1 is v itself."""


def integrate(
    velocity: Velocity,
    noise: Float[Array, "n *example"],
    sampler: Sampler,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "n *example"]:
    """Data from noise; `velocity(x, t)` takes t as a number.

    The diffusion adds noise of variance 2 t dt in a step, and half of that times the score to the
    drift, which is -(x + (1 - t) v) / t: all but the last step, which goes to the mean.
    """
    dt = 1 / sampler.steps

    def euler(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        return x - dt * velocity(x, t)

    def heun(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        v = velocity(x, t)
        return x - dt * (v + velocity(x - dt * v, t - dt)) / 2

    def sde(x: Array, t: Array, key: PRNGKeyArray) -> Array:
        v = velocity(x, t)
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
    """One sample of `shape` for each label, by the SiT `net`."""
    first, later = jax.random.split(key)
    none = jnp.full_like(labels, net.classes)  # type: ignore[attr-defined]

    def velocity(x: Array, t: Array) -> Array:
        times = jnp.full(len(x), t)
        v: Array = net.apply({"params": params}, x, times, labels)  # type: ignore[assignment]
        if sampler.guidance == 1:
            return v
        return v + (sampler.guidance - 1) * (v - net.apply({"params": params}, x, times, none))  # type: ignore[operator]

    return integrate(velocity, jax.random.normal(first, (len(labels), *shape)), sampler, later)
