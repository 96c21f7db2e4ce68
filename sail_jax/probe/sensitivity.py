"""The rise of a loss when its parameters change: by Gaussian noise, and by fine-tuning.

Both are measured and compared with the prediction from second derivatives. The measures are from
Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv 2503.19206).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete, one_key
from sail_jax.probe.combinations import numbers, stack
from sail_jax.probe.connectivity import Loss, check_loss
from sail_jax.probe.curvature import dot, flatten, product
from sail_jax.probe.estimates import Estimate, check_finite, check_size, estimate, examples, mean
from sail_jax.trees import leaf_paths


class Sensitivity(NamedTuple):
    """The rise of a loss under Gaussian noise.

    Attributes:
      loss: The loss at the original parameters, a scalar.
      increase: The measured increase for each scale, `(scale,)`. It is not finite if the loss
        overflows.
      predicted: The increase s^2 tr(H Sigma) / 2 from second derivatives, with the same draws,
        `(scale,)`.
    """

    loss: Float[Array, ""]
    increase: Estimate
    predicted: Estimate


class TuningSensitivity(NamedTuple):
    """The change of a loss on the line through a model and its fine-tuned version.

    Attributes:
      loss: The loss at the original parameters, a scalar.
      increase: The measured increase for each scale, `(scale,)`.
      predicted: s slope + s^2 curvature / 2 for each scale, `(scale,)`.
      slope: The first derivative g . tau along the task vector, a scalar.
      curvature: The second derivative tau . H tau along the task vector, a scalar.
    """

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
    """Measures the mean rise of a loss when Gaussian noise is added to the parameters.

        E L(theta + s epsilon) - L(theta),  epsilon ~ N(0, Sigma)

    Draws come in pairs +epsilon and -epsilon, which cancels the gradient. For a quadratic loss the
    measured and the predicted increase, s^2 tr(H Sigma) / 2, then agree draw by draw.

    Each draw requires one product with the Hessian and two losses for each scale. Draws run one
    after another, with memory for a few copies of the parameters and for one product.

    Args:
      loss: A function `(params, batch) -> scalar`, the mean over the examples of a batch.
      params: The parameters theta.
      data: A tree of arrays `(n, ...)`.
      key: A PRNG key for the draws.
      scales: The scales s, `(scale,)`.
      deviation: Standard deviations, the square roots of a diagonal Sigma. One number for all
        parameters, or a tree like `params` with leaves that broadcast to theirs. An example is the
        deviations of the initialisation.
      draws: The number of pairs to average over, at least 2 for standard errors.
      batch_size: The number of examples in memory at a time. None: all.

    Returns:
      The loss, and the measured and the predicted increase for each scale, with standard errors
      over the pairs.

    Raises:
      ValueError: For an invalid deviation (with the name of the leaf), invalid scales, data or
        sizes, fewer than 2 draws, and a non-finite loss or second derivatives.

    References:
      Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv 2503.19206),
      eq. 1 and Proposition D.1.

    >>> loss = lambda w, x: jnp.mean(x) * jnp.sum(w**2) / 2
    >>> found = gaussian_sensitivity(loss, jnp.ones(3), jnp.ones(1), jax.random.key(0), [0.5])
    >>> bool(jnp.allclose(found.increase.value, found.predicted.value, rtol=1e-4))
    True
    """
    one_key(key)
    examples(data)
    stack([params])
    check_size(draws=draws, batch_size=batch_size)
    if draws < 2:
        raise ValueError("draws: expected at least 2, for standard errors, got 1")
    s = numbers("scales", scales)
    std = _deviation(deviation, params)
    check_loss(loss, params, data)
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
    """Measures the change of a loss along the task vector of a fine-tuned model.

        L(theta + s tau) - L(theta),  tau = tuned - theta

    s = 1 is the fine-tuned model. The result includes the second-order Taylor polynomial.

    Args:
      loss: A function `(params, batch) -> scalar`, the mean over the examples of a batch.
      params: The parameters theta.
      tuned: The parameters of the fine-tuned model, with the same structure.
      data: A tree of arrays `(n, ...)`.
      scales: The scales s, `(scale,)`.
      batch_size: The number of examples in memory at a time. None: all.

    Returns:
      The loss, and the measured and the predicted increase for each scale.

    Raises:
      ValueError: For models that differ in structure, for invalid scales, data or sizes, and for a
        non-finite loss or derivatives.

    References:
      Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv 2503.19206),
      Figure 10.

    >>> found = fine_tuning_sensitivity(
    ...     lambda w, x: jnp.mean(x * w**3), 1.0, 2.0, jnp.ones(2), [1.0])
    >>> found.increase.item(), found.predicted.item()  # 8 - 1, 3 + 6 / 2
    (7.0, 6.0)
    """
    examples(data)
    check_size(batch_size=batch_size)
    stack([params, tuned])
    check_loss(loss, params, data)
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
    # It uses the same data as all points, so their common sampling error cancels in the difference.
    start = at(theta)

    def draw(key: Array) -> tuple[Array, Array]:
        noise = std * jax.random.normal(key, (size,), theta.dtype)
        # Odd orders of the expansion, including the gradient, cancel in the mean over both signs.
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
    # Only the derivative along tau is needed: one forward pass instead of a gradient.
    start, slope = jax.jvp(at, (theta,), (tau,))
    curvature = dot(tau, multiply(tau))
    increase = lax.map(lambda t: at(theta + t * tau), s) - start
    return TuningSensitivity(start, increase, s * slope + s**2 * curvature / 2, slope, curvature)


def _at(
    loss: Loss, params: PyTree, data: PyTree, batch_size: int | None
) -> Callable[[Array], Array]:
    """Makes the loss over all data a function of the flattened parameters."""
    back = flatten(params)[1]

    def at(theta: Array) -> Array:
        # The barrier prevents XLA from computing the moved parameters again in every consumer.
        moved = lax.optimization_barrier(back(theta))
        return mean(lambda batch: loss(moved, batch), data, batch_size)

    return at


def _deviation(deviation: PyTree, params: PyTree) -> Float[Array, "p"]:
    """Returns the standard deviation of each entry of the floating leaves, as one vector."""
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
