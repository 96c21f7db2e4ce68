"""The mean loss under Gaussian noise on the weights, in closed form at any time.

The terms of (W_1 + gamma Z_1)(W_2 + gamma Z_2) are uncorrelated, so the mean loss is exact for any
network and time. The inequality of Proposition 4.3 of Springer et al., 2025 (arXiv 2503.19206), is
therefore an equality. `networks.perturbed_losses` simulates the same quantity.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.two_layer import modes
from theory.two_layer.layers import Layers, check_shapes, check_spectrum, loss


@problems.defined
def perturbed_loss(
    w1: Float[Array, "*b o h"],
    w2: Float[Array, "*b h i"],
    target: Float[ArrayLike, "o i"],
    gamma: ArrayLike,
) -> Float[Array, "*b"]:
    """Computes the mean loss of a network with Gaussian noise on its weights.

        E|(W_1 + gamma Z_1)(W_2 + gamma Z_2) - A|_F^2
        = |theta - A|^2 + gamma^2 (i |W_1|^2 + o |W_2|^2) + gamma^4 o h i

    with Z_1 and Z_2 standard normal.

    Args:
      w1: Weights W_1 `(..., o, h)`.
      w2: Weights W_2 `(..., h, i)`.
      target: Target map A `(o, i)`.
      gamma: Standard deviation of the noise, finite and >= 0.

    Returns:
      The mean losses, one per network.

    Raises:
      ValueError: If shapes do not conform, a value is not finite or gamma is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Proposition 4.3 and Lemmas A.4, A.5, have the case
      of square layers.

    >>> one = jnp.ones((1, 1))
    >>> float(perturbed_loss(one, one, one, 1.0))
    3.0
    """
    check_gamma(gamma)
    layers = Layers(jnp.asarray(w1), jnp.asarray(w2))
    # All networks of a batch have the shapes of the first.
    check_shapes(Layers(*(w[(0,) * (w.ndim - 2)] for w in layers)), target)
    o, h = layers.w1.shape[-2:]
    i = layers.w2.shape[-1]
    gamma2 = jnp.asarray(gamma, dtype=float) ** 2
    # E|W_1 Z_2|^2 = i |W_1|^2, E|Z_1 W_2|^2 = o |W_2|^2 and E|Z_1 Z_2|^2 = o h i. The cross terms
    # have mean 0, because Z_1 and Z_2 are independent.
    sizes = i * jnp.sum(layers.w1**2, (-2, -1)) + o * jnp.sum(layers.w2**2, (-2, -1))
    return loss(layers, target) + gamma2 * sizes + gamma2**2 * (o * h * i)


@problems.defined
def perturbed_mode_loss(
    y: Float[ArrayLike, "*b d"], sigma: Float[ArrayLike, " d"], gamma: ArrayLike
) -> Float[Array, "*b"]:
    """Computes the mean loss under noise of an aligned square network with modes y.

        sum_i (y_i - sigma_i)^2 + 2 d gamma^2 sum_i y_i + d^3 gamma^4

    Args:
      y: Modes of the network, `(..., d)` (see `modes`).
      sigma: Singular values of the target, `(d,)`.
      gamma: Standard deviation of the noise, finite and >= 0.

    Returns:
      The mean losses, one per network.

    Raises:
      ValueError: If gamma is out of range.
    """
    check_gamma(gamma)
    y, sigma = jnp.asarray(y, dtype=float), jnp.asarray(sigma, dtype=float)
    d = sigma.shape[-1]
    gamma2 = jnp.asarray(gamma, dtype=float) ** 2
    apart, size = jnp.sum((y - sigma) ** 2, -1), jnp.sum(y, -1)
    return apart + 2 * d * gamma2 * size + d**3 * gamma2**2


@problems.defined
def plateau_losses(sigma: Float[ArrayLike, " d"], gamma: ArrayLike) -> Float[Array, " stages"]:
    """Computes the mean loss under noise with exactly the first n modes learned, n = 0, ..., d.

    Its increments are (2 d gamma^2 - sigma_n) sigma_n. Therefore eqs. (2) and (14) hold with
    equality, even for n = 1.

    Args:
      sigma: Singular values of the target, `(d,)`.
      gamma: Standard deviation of the noise, finite and >= 0.

    Returns:
      The mean losses `(d + 1,)`.

    Raises:
      ValueError: If gamma is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eqs. (2), (14).
    """
    sigma = jnp.asarray(sigma, dtype=float)
    # Row n has ones for the first n modes.
    learned = jnp.tril(jnp.ones((sigma.size + 1, sigma.size)), -1)
    return perturbed_mode_loss(learned * sigma, sigma, gamma)


@problems.defined
def inflection_index(
    singular_values: Sequence[float] | Float[ArrayLike, " modes"],
    d: int,
    gamma: float,
    *,
    first: int = 1,
) -> int | None:
    """Returns the number of modes after which more pre-training increases the perturbed loss.

    It is r, one less than the smallest n > first with 2 d gamma^2 > sigma_n. (The text after
    Proposition 4.3 calls this n the inflection point.) The r of `first=0` locates the best time of
    continuous training. For r >= 1 it is within the stage that learns mode r, when y_r = sigma_r -
    d gamma^2 (`turning_times`). For r = 0 no stage decreases the loss.

    Args:
      singular_values: Singular values of the target, descending, at most d of them.
      d: Width of the square layers.
      gamma: Standard deviation of the noise, finite and >= 0.
      first: The smallest r considered, 1 as in Definition 4.2. With 0, the untrained network is
        included.

    Returns:
      r, or None if the loss never increases from there on.

    Raises:
      ValueError: If an argument is out of range or the singular values are not descending.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Definition 4.2.

    >>> inflection_index([2.0, 1.0, 0.5], 3, 0.5)
    1
    """
    check_gamma(gamma)
    sigma = check_spectrum("singular_values", singular_values)
    if not d >= sigma.size:
        raise ValueError(f"d must be at least the number of modes, {sigma.size}; got {d}")
    # The increment of stage n, (2 d gamma^2 - sigma_n) sigma_n, is positive from here on.
    rising = first + np.flatnonzero(2 * d * gamma * gamma > sigma[first:])
    return int(rising[0]) if rising.size else None


@problems.in_float64
def turning_times(
    sigma: Float[ArrayLike, " d"], gamma: ArrayLike, start: ArrayLike
) -> Float[Array, " d"]:
    """Computes the times at which each mode's part of the perturbed loss starts to increase.

    Mode i turns at y_i = sigma_i - d gamma^2. Its part decreases by (sigma_i - d gamma^2)^2 before
    (from y_i = 0) and increases by (d gamma^2)^2 after.

    Args:
      sigma: Singular values of the target, `(d,)`.
      gamma: Standard deviation of the noise, finite and >= 0.
      start: Initial value of the modes, > 0.

    Returns:
      Times `(d,)` of gradient flow. They are 0 for modes whose part increases throughout, and inf
      without noise.

    Raises:
      ValueError: If gamma or start are out of range.
    """
    check_gamma(gamma)
    problems.check("start", start, lambda y: (y > 0) & (y < np.inf), "finite and > 0")
    sigma, start = jnp.asarray(sigma, dtype=float), jnp.asarray(start, dtype=float)
    lacking = sigma.shape[-1] * jnp.asarray(gamma, dtype=float) ** 2
    level = sigma - lacking
    inside = level > start
    # A placeholder mode that crosses, if none does.
    level, start, sigma = (jnp.where(inside, x, 1.0) for x in (level, start, sigma))
    time = modes.crossing(level, lacking, start, sigma)
    return jnp.where(inside, time, 0.0)


def check_gamma(gamma: ArrayLike) -> None:
    """Raises an error unless gamma is finite and >= 0.

    Args:
      gamma: Standard deviations of weight noise.

    Raises:
      ValueError: If a value is negative, infinite or NaN.
    """
    problems.check("gamma", gamma, lambda g: (g >= 0) & (g < np.inf), "finite and >= 0")
