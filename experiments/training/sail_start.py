"""SAIL's initialisation of a training: a weighted sum of trained networks of the same shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from sail_jax.growth import networks
from sail_jax.methods.sparse import linear


def brought(
    models: Sequence[tuple[PyTree, Mapping[str, Any]]],
    target: Mapping[str, Any],
    method: str,
    key: PRNGKeyArray,
    **options: Any,
) -> list[PyTree]:
    """Converts networks to the shape of a target.

    A network with the target's configuration is returned unchanged. Others grow or shrink.

    Args:
      models: The networks, each with its variables and its configuration.
      target: The configuration of the target.
      method: The growth method.
      key: The key of the method's random draws.
      **options: Further options of `sail_jax.growth.networks.grow`.

    Returns:
      The variables of each network in the target's shape.

    Raises:
      ValueError: As `sail_jax.growth.networks.grow`.
      TypeError: As `sail_jax.growth.networks.grow`.
    """
    keys = jax.random.split(key, len(models))
    return [
        variables
        if dict(config) == dict(target)
        else networks.grow(variables, config, target, method, key=k, **options)[0]
        for (variables, config), k in zip(models, keys, strict=True)
    ]


def merged(models: Sequence[PyTree], weights: ArrayLike) -> PyTree:
    """Computes the weighted sum of networks: sum_i weights_i models_i.

    Args:
      models: The networks, pytrees of one structure.
      weights: The weight of each. Weights may have any sign, and are not divided by their sum.

    Returns:
      The sum, a pytree of the same structure.

    References:
      SAIL (Structured-Initialization Learning), eq. 4.

    >>> float(merged([{"w": 1.0}, {"w": 3.0}], [-0.5, 1.5])["w"])
    4.0
    """
    return linear(normalize=False)(models, weights=weights)


def mean(models: Sequence[PyTree]) -> PyTree:
    """Computes the mean of networks, as for a soup.

    Args:
      models: The networks, pytrees of one structure.

    Returns:
      The mean.
    """
    return merged(models, np.full(len(models), 1 / len(models)))


def between(pair: Sequence[PyTree], gamma: float) -> PyTree:
    """Computes a point on the line through two networks.

    Args:
      pair: The two networks.
      gamma: The weight of the first network. The second has 1 - gamma.

    Returns:
      The point.
    """
    return merged(pair, np.array([gamma, 1 - gamma]))
