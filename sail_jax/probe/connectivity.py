"""Linear mode connectivity: the rise of the loss between models."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import callable_with, concrete, described
from sail_jax.probe.combinations import line, mixer, points, stack, sweep
from sail_jax.probe.estimates import check_finite, check_size, examples, mean

Loss = Callable[[PyTree, Any], Float[Array, ""]]  # the mean over the examples of a batch


class Barrier(NamedTuple):
    """The losses of combinations of models, and their excess over the models' losses.

    Attributes:
      height: The largest excess, at least 0 (the excess at the models themselves).
      weights: The weights of the models at that point, `(model,)`.
      losses: The loss at each point, `(point,)`.
      excess: The loss minus the weighted mean of the models' losses, `(point,)`.
      endpoints: The loss of each model, `(model,)`.
    """

    height: Float[Array, ""]
    weights: Float[Array, "model"]
    losses: Float[Array, "point"]
    excess: Float[Array, "point"]
    endpoints: Float[Array, "model"]


def barrier(
    loss: Loss,
    params_a: PyTree,
    params_b: PyTree,
    data: PyTree,
    alphas: Float[ArrayLike, "point"] | Sequence[float] | None = None,
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Barrier:
    """Measures the loss barrier on the line between two models.

        max over alpha of L(theta_alpha) - alpha L(theta_a) - (1 - alpha) L(theta_b)
        with theta_alpha = alpha theta_a + (1 - alpha) theta_b

    This is the barrier of Entezari et al. and of Git Re-Basin. Frankle et al., and Definition 1 of
    cross-task linearity, subtract the mean of both losses instead. The two are equal for models of
    equal loss.

    Args:
      loss: A function `(params, batch) -> scalar`, the mean over the examples of a batch.
      params_a: The parameters of the first model.
      params_b: The parameters of the second model.
      data: A tree of arrays `(n, ...)`.
      alphas: The weights of the first model, `(point,)`. None: 11 points from 0 to 1.
      batch_size: The number of examples in memory at a time, which changes the results only by
        rounding. None: all.
      chunk_size: The number of points that are evaluated in parallel.

    Returns:
      The height of the barrier, its position, and the losses along the line.

    Raises:
      ValueError: As `simplex_barrier` does.
      TypeError: As `simplex_barrier` does.

    References:
      Entezari et al., The Role of Permutation Invariance in Linear Mode Connectivity of Neural
      Networks, 2022 (arXiv 2110.06296). Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836).
      Frankle et al., Linear Mode Connectivity and the Lottery Ticket Hypothesis, 2020
      (arXiv 1912.05671). Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660).

    >>> height = barrier(lambda w, x: jnp.mean((w**2 - x) ** 2), 1.0, -1.0, jnp.ones(3)).height
    >>> float(height)
    1.0
    """
    callable_with("loss", loss, "params", "batch")
    alphas = np.linspace(0, 1, 11) if alphas is None else alphas
    return simplex_barrier(
        loss,
        [params_a, params_b],
        data,
        line(alphas),
        batch_size=batch_size,
        chunk_size=chunk_size,
    )


def simplex_barrier(
    loss: Loss,
    models: Sequence[PyTree],
    data: PyTree,
    weights: Float[ArrayLike, "point model"],
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Barrier:
    """Measures the loss barrier among several models.

        max over w of L(sum_i w_i theta_i) - sum_i w_i L(theta_i)

    A copy of all models and `chunk_size` combinations of them are in memory.

    Args:
      loss: A function `(params, batch) -> scalar`, the mean over the examples of a batch.
      models: The parameters of the models.
      data: A tree of arrays `(n, ...)`.
      weights: The points w, `(point, model)`, rows that sum to 1, as from `simplex_grid` or a
        Dirichlet distribution.
      batch_size: The number of examples in memory at a time, which changes the results only by
        rounding. None: all.
      chunk_size: The number of points that are evaluated in parallel.

    Returns:
      The height of the barrier, its position, and the losses at all points.

    Raises:
      ValueError: For models that differ in structure (with the name of the leaf), for invalid
        weights, data or sizes, and for losses that are NaN or (of the models) infinite.
      TypeError: For leaves with dtypes that cannot be combined, such as complex ones, and if `loss`
        is not a function that returns one number.

    >>> loss = lambda w, x: jnp.mean(x * (1 - w @ w))
    >>> weights = jnp.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    >>> found = simplex_barrier(loss, list(jnp.eye(3)), jnp.ones(2), weights)
    >>> found.losses.tolist(), found.weights.tolist()
    ([0.5, 0.625], [0.5, 0.25, 0.25])
    """
    stacked = stack(models)
    w = points(weights, len(models))
    examples(data)
    check_size(batch_size=batch_size, chunk_size=chunk_size)
    check_loss(loss, models[0], data)
    measured = _barrier(loss, models[0], stacked, data, w, batch_size, chunk_size)
    check_finite("loss of the models", measured.endpoints)
    losses = concrete(measured.losses)
    if losses is not None and np.isnan(losses).any():
        raise ValueError(f"loss: NaN at weights {np.asarray(w)[np.isnan(losses)][0]}")
    return measured


def check_loss(loss: Loss, first: PyTree, data: PyTree) -> None:
    """Checks that a loss is a function of two arguments that returns one float.

    It is traced once, for its shapes. `first` contains the parameters or, for a loss of outputs,
    the outputs.
    """
    callable_with("loss", loss, "params", "batch")
    out = jax.eval_shape(loss, first, data)
    shapes = [x.shape for x in jax.tree.leaves(out)]
    if shapes != [()] or not jnp.issubdtype(out.dtype, jnp.floating):
        got = f"shape {shapes[0]}" if len(shapes) == 1 and shapes[0] else described(out)
        raise TypeError(
            f"loss: expected one number, the mean over the examples of a batch; got {got}"
        )


@partial(jax.jit, static_argnames=("loss", "batch_size", "chunk_size"))
def _barrier(
    loss: Loss,
    like: PyTree,
    stacked: PyTree,
    data: PyTree,
    w: Float[Array, "point model"],
    batch_size: int | None,
    chunk_size: int,
) -> Barrier:
    w, k = jnp.asarray(w, jnp.result_type(float)), w.shape[1]
    # The models are also points, whose weights, the rows of the identity, come first.
    losses = _losses(
        loss, like, stacked, data, jnp.concatenate([jnp.eye(k), w]), batch_size, chunk_size
    )
    ends, losses = losses[:k], losses[k:]
    excess = losses - jnp.sum(w * ends, 1)
    # The models themselves are also points, with excess 0 by definition. The height is therefore
    # never negative.
    everywhere = jnp.concatenate([jnp.zeros(k), excess])
    at = jnp.argmax(everywhere)
    where = jnp.concatenate([jnp.eye(k), w])[at]
    return Barrier(everywhere[at], where, losses, excess, ends)


def _losses(
    loss: Loss, like: PyTree, stacked: PyTree, data: PyTree, w: Array,
    batch_size: int | None, chunk_size: int,
) -> Float[Array, "point"]:  # fmt: skip
    mix = mixer(like, stacked)

    def at(w: Array) -> Array:
        params = mix(w)
        return mean(lambda batch: loss(params, batch), data, batch_size)

    return sweep(at, w, chunk_size)
