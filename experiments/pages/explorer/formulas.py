"""What the explorer's page computes: functions of theory, put together for its two sections.

The page evaluates these very functions, translated by `javascript`; its "copy as Python" calls
them here.
"""

import math

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import deep_linear as dl
from theory.two_layer import fine_tuning, modes, perturbation

__all__ = ["WAYS", "WIDTH", "learned", "pretraining", "spectrum", "times", "transfer"]

WAYS = (
    "scratch", "linear transfer", "ridge transfer", "fine-tuning", "ridge from scratch", "L2-SP",
)  # fmt: skip
WIDTH = 12  # of all layers, in pre-training
LARGEST = 2.0  # singular value of the pre-training task


def transfer(
    n: ArrayLike,
    d: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
    source: ArrayLike = math.inf,
    ridge: ArrayLike | None = None,
    time: ArrayLike | None = None,
) -> dict[str, Array]:
    """Computes the risk of every way to use a source, and its gain over training from scratch.

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between the tasks in radians, in [0, pi].
      sigma: Standard deviation of the label noise, of the source's labels, too.
      depth: Number of layers of the network that is fine-tuned, >= 1, inf allowed.
      source: Samples of pre-training over d, > 0; inf is the population.
      ridge: Penalty of ridge transfer; None for the best one.
      time: Time at which scratch training, linear transfer and fine-tuning are stopped; None for
        training to the end. Only a linear model has such a closed form: depth must be 1, and
        ridge transfer has none, NaN.

    Returns:
      Risks by the names in `WAYS`, gains by "gain of ..."; inf where a mean is infinite, NaN where
      the gain is a difference of two infinite means.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(transfer(250, 500, 1.0, 0.2)["scratch"])
    0.54...
    """
    seen = dl.source_limit(source, theta, sigma)
    size = dl.source_limit(source, 0.0, sigma).size  # no angle in it: one number for many angles
    risks = dl.transfer_risks(n, d, seen.theta, sigma, depth=depth, size=size)
    gain = dl.transferability("fine_tune", n, d, seen.theta, sigma, depth=depth, size=size)
    if ridge is not None:
        risks["ridge transfer"] = dl.linear_transfer_risk(
            n, seen.theta, sigma, ridge, allow_infinite=True
        )
    if time is not None:
        if depth != 1:
            raise ValueError(f"depth must be 1 where time is given; got {depth}")
        # With equal eigenvalues the flow depends on n/d alone, and is linear in what it starts from.
        load, one = jnp.asarray(n, float) / d, jnp.ones(1)
        bias, variance = (
            dl.flow_risk(one, start * one, load, noise, jnp.reshape(time, 1))[..., 0]
            for start, noise in ((1.0, 0.0), (0.0, 1.0))
        )
        apart2 = 1 + size**2 - 2 * size * jnp.cos(seen.theta)
        gain = (1 - apart2) * bias
        risks |= {
            "scratch": bias + sigma**2 * variance,
            "linear transfer": dl.linear_transfer_flow_risk(n, seen.theta, sigma, time),
            "ridge transfer": jnp.nan * apart2,
            "fine-tuning": apart2 * bias + sigma**2 * variance,
        }
    gains = {f"gain of {way}": risks["scratch"] - risks[way] for way in WAYS[1:]}
    # Where both means are infinite, at n = d, the difference is not.
    found = {way: risks[way] for way in WAYS} | gains | {"gain of fine-tuning": gain}
    shape = jnp.broadcast_shapes(*(jnp.shape(v) for v in found.values()))
    return {name: jnp.broadcast_to(value, shape) for name, value in found.items()}


def spectrum(decay: ArrayLike) -> Float[Array, " d"]:
    """Computes the singular values of the pre-training task, LARGEST i^-decay.

    Args:
      decay: Exponent by which they fall, >= 0.

    Returns:
      The values, `(WIDTH,)`, the largest first.
    """
    return LARGEST * jnp.arange(1.0, WIDTH + 1) ** -jnp.asarray(decay, float)


def times(decay: ArrayLike, tau: ArrayLike, count: int) -> Float[Array, " count"]:
    """Computes pre-training times, from before the first mode is learned to after the last.

    Args:
      decay: As in `spectrum`.
      tau: The initial weights are e^-tau I.
      count: How many.

    Returns:
      The times, evenly spaced in their logarithm.
    """
    sigma = spectrum(decay)
    ends = jnp.log(0.25 * tau / sigma[0]), jnp.log(1.5 * tau / sigma[-1])
    return jnp.exp(jnp.linspace(*ends, count))


def pretraining(
    time: ArrayLike,
    gamma: ArrayLike,
    decay: ArrayLike,
    tau: ArrayLike,
    ratio: ArrayLike,
    anchor: ArrayLike,
    duration: ArrayLike,
) -> dict[str, Array]:
    """Computes the losses of a two-layer network that was pre-trained for some time.

    Args:
      time: Times of pre-training, `(...)`.
      gamma: Standard deviation of the noise on the weights.
      decay: As in `spectrum`.
      tau: The initial weights are e^-tau I.
      ratio: Singular values of the fine-tuning task, as multiples of those of pre-training.
      anchor: Strength lambda of the anchor in fine-tuning.
      duration: Time of fine-tuning.

    Returns:
      The losses, `(...)`: "not perturbed", "perturbed", and after fine-tuning "pre-training task"
      and "new task".

    Raises:
      ValueError: If an argument is out of range.
    """
    sigma = spectrum(decay)
    y = modes.mode(jnp.asarray(time)[..., None], jnp.exp(-2 * jnp.asarray(tau, float)), sigma)
    after = fine_tuning.mode(duration, y, ratio * sigma, anchor)
    return {
        "not perturbed": perturbation.perturbed_mode_loss(y, sigma, 0.0),
        "perturbed": perturbation.perturbed_mode_loss(y, sigma, gamma),
        "pre-training task": jnp.sum((after - sigma) ** 2, -1),
        "new task": jnp.sum((after - ratio * sigma) ** 2, -1),
    }


def learned(gamma: ArrayLike, decay: ArrayLike) -> Array:
    """Counts the modes after which learning one more raises the perturbed loss (Definition 4.2).

    Args:
      gamma: Standard deviation of the noise on the weights.
      decay: As in `spectrum`.

    Returns:
      The number, `WIDTH` if it never rises.
    """
    return jnp.argmin(perturbation.plateau_losses(spectrum(decay), gamma))
