"""Functions that the explorer's page computes, composed from `theory` for its two sections.

`javascript` translates these functions for the page. The page's "copy as Python" calls them here.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import advice
from theory.two_layer import fine_tuning, modes, perturbation

# The paper's four come first.
# Early stopping is never best for the isotropic inputs of the page.
LEFT_OUT = (*advice.PAPER, "early stopping")
WAYS = (*advice.PAPER, *(way for way in advice.METHODS if way not in LEFT_OUT))
WIDTH = 12  # of all layers, in pre-training
LARGEST = 2.0  # singular value of the pre-training task
TIMES = 2401  # points of a curve; the smallest loss is one of them

# The claims of the ledger that support each strategy's numbers, and their range: "" everywhere,
# below or beyond n = d, with a source of finitely many samples, or with early stopping.
TRANSFER_ROWS: tuple[tuple[str, str, str], ...] = (
    ("scratch", "below", "features-are-fate/T3.6-under/ours"),
    ("scratch", "beyond", "features-are-fate/T3.6-over/ours"),
    ("scratch", "stopped", "features-are-fate/covariance-time/ours"),
    ("linear transfer", "", "features-are-fate/T3.7/exact"),
    ("linear transfer", "", "features-are-fate/eq13/ours"),
    ("linear transfer", "source", "features-are-fate/finite-source-linear/ours"),
    ("ridge transfer", "", "features-are-fate/T3.8/exact"),
    ("ridge transfer", "", "features-are-fate/T3.8-monotone/ours"),
    ("fine-tuning", "", "features-are-fate/T3.9-estimator-L2/corrected"),
    ("fine-tuning", "below", "features-are-fate/eq17-L2/corrected"),
    ("fine-tuning", "below", "features-are-fate/eq17-boundary/corrected"),
    ("fine-tuning", "beyond", "features-are-fate/T3.9-over/exact"),
    ("fine-tuning", "source", "features-are-fate/finite-source-fine-tune/ours"),
    ("fine-tuning", "stopped", "features-are-fate/covariance-time/ours"),
    ("ridge from scratch", "", "features-are-fate/ridge-finite-few/ours"),
    ("L2-SP", "source", "features-are-fate/L2-SP-finite/ours"),
    ("scaled L2-SP", "source", "features-are-fate/source-distance-scaled/ours"),
    ("free direction", "", "features-are-fate/direction-finite-few/ours"),
)
# The claims that support the two curves of pre-training.
PRETRAINING_ROWS: tuple[tuple[str, str, str], ...] = tuple(
    (curve, "", f"overtrained/{row}")
    for curve, rows in {
        "perturbation": ("A.1-sigmoid/ours", "P4.3-anytime/ours", "T4.4-continuous/ours",
                         "D4.2/corrected"),
        "fine-tuning": ("A.7-flow/ours", "T4.6/exact", "T4.7-threshold/ours",
                        "T4.7-inflection/ours"),
    }.items()
    for row in rows
)  # fmt: skip


@problems.unchecked_in_float64
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
    """Computes the risk of each strategy that uses a source, and its gain over training from
    scratch.

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between the tasks in radians, in [0, pi].
      sigma: Standard deviation of the label noise, for the target and the source.
      depth: Number of layers of the fine-tuned network, >= 1, inf allowed.
      source: Samples of pre-training over d, > 0; inf is the population.
      ridge: Penalty of ridge transfer; None for the best one.
      time: Time at which scratch training, linear transfer and fine-tuning stop; None for training
        to convergence. Only a linear model has such a closed form, so depth must be 1. Ridge
        transfer is then NaN.

    Returns:
      Risks by the names in `WAYS`, gains by "gain of ...". A risk is inf if a mean is infinite. A
      gain is NaN if it is a difference of two infinite means.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(transfer(250, 500, 1.0, 0.2)["scratch"])
    0.54...
    """
    seen = dl.source_limit(load=source, theta=theta, sigma=sigma)
    # One number for many angles, because the size does not depend on the angle.
    size = dl.source_limit(load=source, theta=0.0, sigma=sigma).size
    # With noise and as many source samples as dimensions, the norm of the source is infinite.
    endless = jnp.isinf(size)
    size = jnp.where(endless, 1e6, size)
    risks = dl.transfer_risks(n=n, d=d, theta=seen.theta, sigma=sigma, depth=depth, size=size)
    gain = dl.transferability(
        "fine_tuning", n=n, d=d, theta=seen.theta, sigma=sigma, depth=depth, size=size
    )
    if ridge is not None:
        risks["ridge transfer"] = dl.linear_transfer_risk(
            n=n, theta=seen.theta, sigma=sigma, ridge=ridge, allow_infinite=True
        )
    if time is not None:
        if depth != 1:
            raise ValueError(f"depth must be 1 where time is given; got {depth}")
        # With equal eigenvalues, the flow depends only on n/d.
        load, one = jnp.asarray(n, float) / d, jnp.ones(1)
        bias, variance = (
            dl.flow_risk(one, start * one, n=load, sigma=noise, times=jnp.reshape(time, 1))[..., 0]
            for start, noise in ((1.0, 0.0), (0.0, 1.0))
        )
        apart2 = 1 + size**2 - 2 * size * jnp.cos(seen.theta)
        risks |= {
            "scratch": bias + sigma**2 * variance,
            "linear transfer": dl.linear_transfer_flow_risk(
                n=n, theta=seen.theta, sigma=sigma, times=time
            ),
            "ridge transfer": jnp.nan * apart2,
            "fine-tuning": apart2 * bias + sigma**2 * variance,
        }
    # For n >= d, training forgets the source. At infinite depth only its direction matters.
    kept = (jnp.asarray(n) < d) & jnp.isfinite(depth)
    lost = endless & (kept if time is None else True)
    risks["fine-tuning"] = jnp.where(lost, jnp.inf, risks["fine-tuning"])
    risks["L2-SP"] = jnp.where(endless & (jnp.asarray(n) <= d), jnp.inf, risks["L2-SP"])
    gains = {f"gain of {way}": risks["scratch"] - risks[way] for way in WAYS[1:]}
    if time is None:  # at n = d both means are infinite, but their difference is finite
        gains["gain of fine-tuning"] = jnp.where(lost, -jnp.inf, gain)
    found = {way: risks[way] for way in WAYS} | gains
    shape = jnp.broadcast_shapes(*(jnp.shape(v) for v in found.values()))
    # JAX sorts the keys of other dictionaries.
    return OrderedDict((name, jnp.broadcast_to(value, shape)) for name, value in found.items())


@problems.unchecked_in_float64
def pretraining(
    gamma: ArrayLike,
    decay: ArrayLike,
    tau: ArrayLike,
    ratio: ArrayLike,
    anchor: ArrayLike,
    duration: ArrayLike,
) -> dict[str, Array]:
    """Computes the losses of a two-layer network during pre-training, and when they are smallest.

    The singular values of its task are `LARGEST` i^-decay, i = 1, ..., `WIDTH`.

    Args:
      gamma: Standard deviation of the noise on the weights.
      decay: Exponent of the decay of the singular values, >= 0.
      tau: The initial weights are e^-tau I.
      ratio: Singular values of the fine-tuning task over the pre-training task's.
      anchor: Strength lambda of the anchor in fine-tuning.
      duration: Time of fine-tuning.

    Returns:
      Along "time", `(TIMES,)`: the losses "not perturbed" and "perturbed", and after fine-tuning
      "old task" and "new task". As numbers: "turn of perturbed", the time of that loss's minimum,
      and "least perturbed", its value; the same for "old task". They are NaN if the loss never
      increases again. "learned" is the number of modes after which learning one more increases the
      perturbed loss (Definition 4.2).

    Raises:
      ValueError: If an argument is out of range.
    """
    sigma, at, y = path(decay, tau)
    after = fine_tuning.mode(duration, y, ratio * sigma, anchor)
    losses = {
        "not perturbed": perturbation.perturbed_mode_loss(y, sigma, 0.0),
        "perturbed": perturbation.perturbed_mode_loss(y, sigma, gamma),
        "old task": jnp.sum((after - sigma) ** 2, -1),
        "new task": jnp.sum((after - ratio * sigma) ** 2, -1),
    }
    found = {"time": at(jnp.arange(TIMES, dtype=float)), **losses}
    for name in ("perturbed", "old task"):
        found[f"turn of {name}"], found[f"least {name}"] = turn(losses[name], at)
    found["learned"] = jnp.argmin(perturbation.plateau_losses(sigma, gamma))
    return found


def path(decay: ArrayLike, tau: ArrayLike) -> tuple[Array, Callable[[Array], Array], Array]:
    """Computes the modes of a two-layer network during pre-training, as for `pretraining`.

    Args:
      decay: Exponent of the decay of the singular values, >= 0.
      tau: The initial weights are e^-tau I.

    Returns:
      The singular values `(WIDTH,)`, the time at each position from 0 to `TIMES` - 1, and the modes
      `(TIMES, WIDTH)`.
    """
    sigma = LARGEST * jnp.arange(1.0, WIDTH + 1) ** -jnp.asarray(decay, float)
    # From before the first mode is learned to after the last, evenly spaced in the logarithm.
    first, last = 0.25 * tau / sigma[0], 1.5 * tau / sigma[-1]

    def at(place: Array) -> Array:
        return jnp.asarray(first * (last / first) ** (place / (TIMES - 1)))

    time = at(jnp.arange(TIMES, dtype=float))
    return sigma, at, modes.mode(time[:, None], jnp.exp(-2 * jnp.asarray(tau, float)), sigma)


def turn(loss: Array, at: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Finds the time at which a loss is smallest, if it increases again.

    Args:
      loss: Losses along a path.
      at: The time at each position.

    Returns:
      The time and the smallest loss; NaN if the loss does not visibly increase again.
    """
    least = jnp.min(loss)
    rises = loss[-1] - least > 1e-6 * loss[0]
    place = at(jnp.argmin(loss).astype(float))
    return jnp.where(rises, place, jnp.nan), jnp.where(rises, least, jnp.nan)
