"""The loss under Gaussian noise on the weights, in closed form at every pre-training time.

(W_1 + gamma Z_1)(W_2 + gamma Z_2) has independent parts, so that the mean loss is exact for any
network and time, and the inequality of overtrained Proposition 4.3 is an equality.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.two_layer import modes
from theory.two_layer.layers import Layers, check_shapes, check_spectrum, loss


def perturbed_loss(
    w1: Float[Array, "*b o h"],
    w2: Float[Array, "*b h i"],
    target: Float[ArrayLike, "o i"],
    gamma: ArrayLike,
) -> Float[Array, "*b"]:
    """E|(W_1 + gamma Z_1)(W_2 + gamma Z_2) - A|_F^2
    = |theta - A|^2 + gamma^2 (i |W_1|^2 + o |W_2|^2) + gamma^4 o h i, Z_1 and Z_2 standard normal.
    """
    check_gamma(gamma)
    layers = Layers(jnp.asarray(w1), jnp.asarray(w2))
    check_shapes(Layers(*(w[(0,) * (w.ndim - 2)] for w in layers)), target)
    o, h = layers.w1.shape[-2:]
    i = layers.w2.shape[-1]
    gamma2 = jnp.asarray(gamma, dtype=float) ** 2
    sizes = i * jnp.sum(layers.w1**2, (-2, -1)) + o * jnp.sum(layers.w2**2, (-2, -1))
    return loss(layers, target) + gamma2 * sizes + gamma2**2 * (o * h * i)


def perturbed_mode_loss(
    y: Float[ArrayLike, "*b d"], sigma: Float[ArrayLike, " d"], gamma: ArrayLike
) -> Float[Array, "*b"]:
    """The same for aligned square networks with modes y: sum (y - sigma)^2 + 2 d gamma^2 sum y +
    d^3 gamma^4."""
    check_gamma(gamma)
    y, sigma = jnp.asarray(y, dtype=float), jnp.asarray(sigma, dtype=float)
    d = sigma.shape[-1]
    gamma2 = jnp.asarray(gamma, dtype=float) ** 2
    apart, size = jnp.sum((y - sigma) ** 2, -1), jnp.sum(y, -1)
    return apart + 2 * d * gamma2 * size + d**3 * gamma2**2


def plateau_losses(sigma: Float[ArrayLike, " d"], gamma: ArrayLike) -> Float[Array, " stages"]:
    """The loss with the first n modes learned and no others, n = 0, ..., d: its increments are
    (2 d gamma^2 - sigma_n) sigma_n (overtrained eqs. 2, 14, with equality, and for n = 1 too)."""
    sigma = jnp.asarray(sigma, dtype=float)
    learned = jnp.tril(jnp.ones((sigma.size + 1, sigma.size)), -1)
    return perturbed_mode_loss(learned * sigma, sigma, gamma)


def inflection_index(
    singular_values: Sequence[float] | Float[ArrayLike, " modes"], d: int, gamma: float
) -> int | None:
    """The number r of learned modes after which more pre-training raises the perturbed loss, for
    square layers of width d: Definition 4.2. None if it never does.

    One less than the smallest n with 2 d gamma^2 > sigma_n (singular values descending), which the
    text after Proposition 4.3 calls the inflection point.

    The same r bounds the best moment of continuous training: with r >= 1 it lies within the stage
    that learns mode r, when y_r = sigma_r - d gamma^2 (`turning_times`).

    >>> inflection_index([2.0, 1.0, 0.5], 3, 0.5)
    1
    """
    check_gamma(gamma)
    sigma = check_spectrum("singular_values", singular_values)
    if not d >= sigma.size:
        raise ValueError(f"d must be at least the number of modes, {sigma.size}; got {d}")
    rising = np.flatnonzero(2 * d * gamma**2 > sigma)
    return int(rising[0]) if rising.size else None


@problems.in_float64
def turning_times(
    sigma: Float[ArrayLike, " d"], gamma: ArrayLike, start: ArrayLike
) -> Float[Array, " d"]:
    """When each mode's share of the loss turns from falling to rising, y_i = sigma_i - d gamma^2,
    from modes at `start`. It falls by (sigma_i - d gamma^2)^2 before (from y_i = 0) and rises by
    (d gamma^2)^2 after; 0 for modes that only make it rise, inf without noise."""
    check_gamma(gamma)
    problems.check("start", start, lambda y: (y > 0) & (y < np.inf), "finite and > 0")
    sigma, start = jnp.asarray(sigma, dtype=float), jnp.asarray(start, dtype=float)
    lacking = sigma.shape[-1] * jnp.asarray(gamma, dtype=float) ** 2
    level = sigma - lacking
    inside = level > start
    # any mode that crosses, where none does
    level, start, sigma = (jnp.where(inside, x, 1.0) for x in (level, start, sigma))
    time = modes.crossing(level, lacking, start, sigma)
    return jnp.where(inside, time, 0.0)


def check_gamma(gamma: ArrayLike) -> None:
    problems.check("gamma", gamma, lambda g: (g >= 0) & (g < np.inf), "finite and >= 0")
