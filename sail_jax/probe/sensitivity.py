"""How much a loss rises when its parameters move: Gaussian noise, and fine-tuning (overtrained,
Springer et al. 2025), beside what its second derivatives predict."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete
from sail_jax.probe.combinations import numbers, stack
from sail_jax.probe.connectivity import Loss
from sail_jax.probe.curvature import dot, flatten, product
from sail_jax.probe.estimates import Estimate, check_finite, check_size, estimate, examples, mean
from sail_jax.trees import leaf_paths

__all__ = ["Sensitivity", "TuningSensitivity", "fine_tuning_sensitivity", "gaussian_sensitivity"]


class Sensitivity(NamedTuple):
    """loss: unperturbed. increase, predicted: [scale], by measurement and s^2 tr(H Sigma) / 2; both
    from the same draws. An increase that is not finite is one of a loss that overflows."""

    loss: Float[Array, ""]
    increase: Estimate
    predicted: Estimate


class TuningSensitivity(NamedTuple):
    """loss: unperturbed. increase: [scale]. slope, curvature: g.tau and tau.H tau, of which
    `predicted`, [scale], is s g.tau + s^2 tau.H tau / 2."""

    loss: Float[Array, ""]
    increase: Float[Array, "scale"]
    predicted: Float[Array, "scale"]
    slope: Float[Array, ""]
    curvature: Float[Array, ""]


def gaussian_sensitivity(
    loss: Loss,
    params: PyTree,
    data: PyTree,
    key: Array,
    scales: Float[ArrayLike, "scale"] | Sequence[float],
    *,
    deviation: PyTree = 1.0,
    draws: int = 8,
    batch_size: int | None = None,
) -> Sensitivity:
    """E L(theta + s epsilon) - L(theta) with epsilon ~ N(0, Sigma), eq. 1 of overtrained.

    loss(params, batch): the mean over the examples of a batch. deviation: standard deviations, the
    roots of a diagonal Sigma: a tree like params whose leaves broadcast to theirs, such as those of
    the initialisation, or one number for all. Draws come in pairs +epsilon and -epsilon, by which
    the gradient drops out: for a quadratic loss both estimates agree draw by draw (Proposition
    D.1, s^2 tr(H Sigma) / 2). Standard errors are over the pairs, at least 2.

    One product with the Hessian and two losses per scale for each of `draws`, one after the other:
    memory of a few copies of the parameters and one product's.

    Raises ValueError for a deviation, scales, data or sizes that do not fit, naming the leaf, for
    values that are not finite, and for fewer than 2 draws.
    """
    examples(data)
    stack([params])
    check_size(draws=draws, batch_size=batch_size)
    if draws < 2:
        raise ValueError("draws: expected at least 2, for standard errors, got 1")
    s = numbers("scales", scales)
    std = _deviation(deviation, params)
    sensitivity = _gaussian(loss, params, data, key, s, std, draws, batch_size)
    check_finite("loss", sensitivity.loss)
    check_finite("loss: its second derivatives", sensitivity.predicted.value)
    return sensitivity


def fine_tuning_sensitivity(
    loss: Loss,
    params: PyTree,
    tuned: PyTree,
    data: PyTree,
    scales: Float[ArrayLike, "scale"] | Sequence[float],
    *,
    batch_size: int | None = None,
) -> TuningSensitivity:
    """L(theta + s tau) - L(theta) with the task vector tau = tuned - theta, so that s = 1 is the
    tuned model (Figure 10 of overtrained), beside its Taylor polynomial of second order.

    Arguments and errors otherwise as in `gaussian_sensitivity`.

    >>> found = fine_tuning_sensitivity(
    ...     lambda w, x: jnp.mean(x * w**3), 1.0, 2.0, jnp.ones(2), [1.0])
    >>> found.increase.item(), found.predicted.item()  # 8 - 1, 3 + 6 / 2
    (7.0, 6.0)
    """
    examples(data)
    check_size(batch_size=batch_size)
    stack([params, tuned])
    sensitivity = _fine_tuning(loss, params, tuned, data, numbers("scales", scales), batch_size)
    check_finite("loss", sensitivity.loss)
    check_finite("loss: its derivatives", jnp.stack([sensitivity.slope, sensitivity.curvature]))
    return sensitivity


@partial(jax.jit, static_argnames=("loss", "draws", "batch_size"))
def _gaussian(
    loss: Loss, params: PyTree, data: PyTree, key: Array, s: Array, std: Array, draws: int,
    batch_size: int | None,
) -> Sensitivity:  # fmt: skip
    theta, _ = flatten(params)
    at = _at(loss, params, data, batch_size)
    size, multiply = product(loss, params, data, batch_size)
    start = at(theta)

    def draw(key: Array) -> tuple[Array, Array]:
        noise = std * jax.random.normal(key, (size,), theta.dtype)
        pairs = lax.map(lambda t: (at(theta + t * noise) + at(theta - t * noise)) / 2, s)
        return pairs - start, s**2 * dot(noise, multiply(noise)) / 2

    increase, predicted = lax.map(draw, jax.random.split(key, draws))
    return Sensitivity(start, estimate(increase), estimate(predicted))


@partial(jax.jit, static_argnames=("loss", "batch_size"))
def _fine_tuning(
    loss: Loss, params: PyTree, tuned: PyTree, data: PyTree, s: Array, batch_size: int | None
) -> TuningSensitivity:
    theta, _ = flatten(params)
    tau = flatten(tuned)[0] - theta
    at = _at(loss, params, data, batch_size)
    multiply = product(loss, params, data, batch_size)[1]
    start, slope = jax.jvp(at, (theta,), (tau,))
    curvature = dot(tau, multiply(tau))
    increase = lax.map(lambda t: at(theta + t * tau), s) - start
    return TuningSensitivity(start, increase, s * slope + s**2 * curvature / 2, slope, curvature)


def _at(
    loss: Loss, params: PyTree, data: PyTree, batch_size: int | None
) -> Callable[[Array], Array]:
    back = flatten(params)[1]

    def at(theta: Array) -> Array:
        moved = lax.optimization_barrier(back(theta))
        return mean(lambda batch: loss(moved, batch), data, batch_size)

    return at


def _deviation(deviation: PyTree, params: PyTree) -> Float[Array, "p"]:
    """Standard deviations, entry by entry of the floating leaves."""
    paths, leaves = leaf_paths(params), jax.tree.leaves(params)
    if jax.tree.structure(deviation) == jax.tree.structure(0):
        given = dict.fromkeys(paths, deviation)
    else:
        given = dict(zip(leaf_paths(deviation), jax.tree.leaves(deviation), strict=True))
        if given.keys() != set(paths):
            odd = sorted(given.keys() ^ set(paths))
            raise ValueError(f"deviation: expected a number or the leaves of params; {odd} differ")
    stds = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            continue
        where, std = f"deviation, leaf {path!r}", jnp.asarray(given[path])
        values = concrete(std)
        if values is not None and not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"{where}: expected finite values >= 0")
        try:
            wide = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
            stds.append(jnp.broadcast_to(jnp.asarray(std, wide), np.shape(leaf)))
        except ValueError as error:
            raise ValueError(
                f"{where}: expected a shape that broadcasts to {np.shape(leaf)}, "
                f"got {jnp.shape(std)}"
            ) from error
    return ravel_pytree(stds)[0]
