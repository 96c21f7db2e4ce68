"""Where SAIL starts a training: a weighted sum of trained networks, each brought to one shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from sail_jax.growth import networks
from sail_jax.methods.sparse import linear

__all__ = ["brought", "merged"]


def brought(
    models: Sequence[tuple[PyTree, Mapping[str, Any]]],
    target: Mapping[str, Any],
    method: str,
    key: PRNGKeyArray,
    **options: Any,
) -> list[PyTree]:
    """Networks, each given by its variables and its configuration, in the shape of `target`.

    One that has it passes through; others grow or shrink by `method` and `options`, as
    `sail_jax.growth.networks.grow` takes them, and raise what that raises.
    """
    keys = jax.random.split(key, len(models))
    return [
        variables
        if dict(config) == dict(target)
        else networks.grow(variables, config, target, method, key=k, **options)[0]
        for (variables, config), k in zip(models, keys, strict=True)
    ]


def merged(models: Sequence[PyTree], weights: ArrayLike) -> PyTree:
    """sum_i weights_i models_i (SAIL, eq. 4), the weights taken as they are.

    >>> float(merged([{"w": 1.0}, {"w": 3.0}], [-0.5, 1.5])["w"])
    4.0
    """
    return linear(normalize=False)(models, weights=weights)
