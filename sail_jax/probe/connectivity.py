"""Linear mode connectivity: what the loss does between models."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete
from sail_jax.probe.combinations import line, mixer, points, stack, sweep
from sail_jax.probe.estimates import check_finite, check_size, examples, mean

__all__ = ["Barrier", "Loss", "barrier", "simplex_barrier"]

Loss = Callable[[PyTree, Any], Float[Array, ""]]  # the mean over the examples of a batch


class Barrier(NamedTuple):
    """height: the largest excess, at least 0, which the models themselves have. weights: where.

    excess: losses less what the losses of the models, `endpoints`, interpolate to there.
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
    """The loss barrier on the line alpha theta_a + (1 - alpha) theta_b, at 11 points by default:
    max over alpha of L(theta_alpha) - alpha L(theta_a) - (1 - alpha) L(theta_b) (Entezari et al.
    2022, Git Re-Basin). Frankle et al. 2020 subtract the mean of both losses instead, as does
    LMC as cross-task linearity's Definition 1 states it: the same for models of equal loss.

    Arguments and errors otherwise as in `simplex_barrier`.

    >>> height = barrier(lambda w, x: jnp.mean((w**2 - x) ** 2), 1.0, -1.0, jnp.ones(3)).height
    >>> float(height)
    1.0
    """
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
    """The barrier among k models: the largest L(sum_i w_i theta_i) - sum_i w_i L(theta_i).

    loss(params, batch): the mean over the examples of a batch. data: leaves [n, ...], taken
    `batch_size` at a time, which changes memory alone. weights: rows that sum to 1, as from
    `simplex_grid` or a Dirichlet distribution; `chunk_size` of them are evaluated side by side
    and held at once beside a copy of all models.

    Raises ValueError for models that do not share structure, naming the leaf, for weights, data
    and sizes that do not fit, and for losses of the models that are not finite, or NaN elsewhere.
    """
    stacked = stack(models)
    w = points(weights, len(models))
    examples(data)
    check_size(batch_size=batch_size, chunk_size=chunk_size)
    measured = _barrier(loss, models[0], stacked, data, w, batch_size, chunk_size)
    check_finite("loss of the models", measured.endpoints)
    losses = concrete(measured.losses)
    if losses is not None and np.isnan(losses).any():
        raise ValueError(f"loss: NaN at weights {np.asarray(w)[np.isnan(losses)][0]}")
    return measured


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
    losses = _losses(
        loss, like, stacked, data, jnp.concatenate([jnp.eye(k), w]), batch_size, chunk_size
    )
    ends, losses = losses[:k], losses[k:]
    excess = losses - jnp.sum(w * ends, 1)
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
