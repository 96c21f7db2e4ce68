"""The average of the checkpoints of one run, oldest first."""

import jax.numpy as jnp
from jaxtyping import Array

from sail_jax.merging.combining import reduce
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import mean_where_any
from sail_jax.merging.steps import Piece, kernel
from sail_jax.methods.registry import method
from sail_jax.trajectory import shapes
from sail_jax.trajectory.shapes import Shape


@method
def trajectory(*, shape: Shape = "uniform", decay: float | None = None) -> Merge:
    r"""Averages the checkpoints of one run with the weights of a learning-rate decay (WSM).

    The models are the checkpoints at equal distances, oldest first. With the weights :math:`c_j` of
    the shape (`sail_jax.trajectory.weights`), the result is

    .. math:: \theta = \frac{\sum_j w_j c_j \theta_j}{\sum_j w_j c_j}

    The same updates reach this point when they are multiplied by the decay of that shape.

    Args:
      shape: "uniform" or "linear" (1/n each), "cosine", "1-sqrt", "1-square", "ema" (exponential,
        without bias) or "wma" (1, 2, ..., n).
      decay: The factor of "ema", between 0 and 1.

    Returns:
      A merge of one or more models. A base is optional and only determines the output's dtypes.

    Raises:
      ValueError: For an unknown shape, or a `decay` that is invalid for the shape.

    References:
      Tian et al., WSM: Decay-free learning rate schedule via checkpoint merging, 2025 (arXiv
      2507.17634).

    >>> trajectory(shape="wma")([{"a": 0.0}, {"a": 3.0}])
    {'a': Array(2., dtype=float32)}
    """
    shapes.check_decay(shape, decay)
    step = kernel(_averaged, shape=shape, decay=decay)
    return Merge(reduction=reduce(step), normalize=True, base="unused", positive_weights=True)


def ema(decay: float) -> Merge:
    """Averages the checkpoints of one run exponentially: `trajectory(shape="ema", decay=decay)`.

    Args:
      decay: The factor between one checkpoint and the next, between 0 and 1.

    Returns:
      A merge of one or more models, oldest first.

    Raises:
      ValueError: For a `decay` outside (0, 1).

    >>> ema(0.5)([{"a": 0.0}, {"a": 3.0}])
    {'a': Array(2., dtype=float32)}
    """
    return trajectory(shape="ema", decay=decay)


def _averaged(piece: Piece, delta: Array, weight: Array, *, shape: Shape, decay: float | None):
    """Averages the models, with their weights times the weights of the shape."""
    c = jnp.asarray(shapes.weights(shape, len(delta), decay=decay), delta.dtype)
    return mean_where_any(delta, weight * c.reshape(-1, *(1,) * (weight.ndim - 1)))
