"""Models rounding to b bits after pre-training as noise on the weights, in closed form.

Rounding a weight to multiples of a step has an error of at most half a step. If the errors of
all weights are independent and uniform, their standard deviation is step / sqrt(12). The loss is of
degree two in each weight, so only this matters. `perturbation.perturbed_loss` and `best_time` then
hold exactly, with `rounding_noise` for gamma. A random shift of the grid for each weight (dither)
gives such errors.

Rounding to nearest is deterministic. It acts as uniform noise when entries are spread over several
steps, at the end of training, but not while few modes are learned: entries are then products of few
numbers, and their errors depend on one another. If W_2 = W_1^T, as for a start e^{-tau} I and a
symmetric target, both layers have the same errors, and `mirrored_loss` computes the mean.

Measurements are in `docs/explanation/overtraining_further.md`.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.two_layer.perturbation import check_gamma


@problems.in_float64
def rounding_noise(bits: ArrayLike, span: ArrayLike) -> Array:
    """Computes the standard deviation of the error of rounding to b bits, span 2^-b / sqrt(12).

    Args:
      bits: Bits of a weight, finite and >= 0.
      span: The range that 2^b steps divide, > 0. Weights of an aligned network are at most
        sqrt(sigma_1), so 2 sqrt(sigma_1) is sufficient.

    Returns:
      The standard deviation, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(rounding_noise(4, 2.0)), 4)
    0.0361
    """
    problems.check("bits", bits, lambda b: (b >= 0) & (b < np.inf), "finite and >= 0")
    _check_span(span)
    return jnp.asarray(span, float) * 2.0 ** -jnp.asarray(bits, float) / jnp.sqrt(12.0)


@problems.in_float64
def worthwhile_bits(sigma: ArrayLike, d: ArrayLike, span: ArrayLike) -> Array:
    """Computes the number of bits above which a mode is worth learning.

    It is log2(d span^2 / (6 sigma)) / 2. With fewer bits, rounding of the learned mode adds more to
    the loss than learning it removes. Each additional bit divides the smallest mode worth learning
    by 4.

    Args:
      sigma: Singular value of the mode, > 0.
      d: Width of the square layers, >= 1.
      span: The range that 2^b steps divide, > 0.

    Returns:
      The number of bits, a real number, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(worthwhile_bits(0.25, 8, 2.0)), 2)
    2.21
    """
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
    problems.check("d", d, lambda n: (n >= 1) & (n < np.inf), "finite and >= 1")
    _check_span(span)
    sigma, d, span = (jnp.asarray(x, float) for x in (sigma, d, span))
    return (jnp.log2(d) + 2 * jnp.log2(span) - jnp.log2(6 * sigma)) / 2


@problems.defined
def mirrored_loss(
    w1: Float[Array, "o h"], target: Float[ArrayLike, "o o"], gamma: ArrayLike
) -> Array:
    """Computes the mean loss for W_2 = W_1^T with the same uniform errors E in both layers.

        E|(W + E)(W + E)^T - A|^2 = |W W^T - A|^2 + 2 (o + 1) gamma^2 |W|^2
            + 2 h gamma^2 tr(W W^T - A) + gamma^4 o h (o + h - 1/5)

    On average, the errors shift the map by h gamma^2 I. With o = h = d, a learned mode then adds
    (4d + 2) gamma^2 sigma instead of 2d gamma^2 sigma. The smallest mode worth learning doubles.

    Args:
      w1: Weights W_1 `(o, h)`. W_2 is their transpose.
      target: Target map A `(o, o)`.
      gamma: Standard deviation of an error, finite and >= 0.

    Returns:
      The mean loss.

    Raises:
      ValueError: If gamma is out of range.
    """
    check_gamma(gamma)
    o, h = w1.shape
    off, gamma2 = w1 @ w1.T - target, jnp.asarray(gamma, dtype=float) ** 2
    first = 2 * (o + 1) * jnp.sum(w1**2) + 2 * h * jnp.trace(off)
    # The fourth moment of a uniform error is 9/5 gamma^4.
    return jnp.sum(off**2) + gamma2 * first + gamma2**2 * (o * h * (o + h - 0.2))


def _check_span(span: ArrayLike) -> None:
    problems.check("span", span, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
