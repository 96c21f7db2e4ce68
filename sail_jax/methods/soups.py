"""Greedy soups, to which models are added one by one if they improve the score of the mean.

The uniform soup is `methods.linear`, and the learned soup is `methods.learned_soup`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from sail_jax.checks import callable_with, described
from sail_jax.merging.task_vectors import as_given
from sail_jax.methods.sparse import linear


class Soup(NamedTuple):
    """A greedy soup and the record of its trials.

    Attributes:
      params: The mean of the models in the soup.
      taken: Indices of these models, in the order in which they joined.
      scores: The score of each single model.
      trials: A pair (model, score of the soup with it) for each tried model, in order.
    """

    params: PyTree
    taken: tuple[int, ...]
    scores: tuple[float, ...]
    trials: tuple[tuple[int, float], ...]


def greedy_soup(
    models: Sequence[PyTree],
    score: Callable[[PyTree], float],
    *,
    scores: Sequence[float] | None = None,
    strict: bool = True,
) -> Soup:
    """Averages the models that improve the mean's score, from best to worst (greedy soup).

    The best model is the first soup. Each further model joins if the mean with it scores higher
    than the soup without it. Models with equal scores are tried in their order in `models`.

    Args:
      models: At least one pytree. A sequence may load its entries lazily, in which case one entry
        and a running mean in float32 (float64 if the best model is float64) are in memory.
      score: `score(params)` on held-out data. Higher is better, and NaN is worse than any number.
      scores: The scores of the models, if they are already computed.
      strict: Whether the score must rise, as in the authors' code. With `strict=False` an equal
        score is sufficient, as in their Recipe 1.

    Returns:
      The soup in the dtypes of the best model, with the record of its trials.

    Raises:
      ValueError: If `models` is empty, `scores` has another length, or every score is NaN. As in
        `linear` for models with different leaves.
      TypeError: As in `linear`, and if `score` is not a function that returns one number.

    References:
      Wortsman et al., Model soups, 2022 (arXiv 2203.05482), Recipe 1.

    >>> score = lambda params: -abs(float(params["a"]) - 2.0)
    >>> greedy_soup([{"a": 1.0}, {"a": 9.0}, {"a": 2.5}, {"a": 1.25}], score)
    Soup(params={'a': Array(1.875, dtype=float32)}, taken=(2, 3), scores=(-1.0, -7.0, -0.5, -0.75),
         trials=((2, -0.5), (3, -0.125), (0, -0.41...), (1, -2.25)))
    """
    callable_with("score", score, "params")
    if not len(models):
        raise ValueError("models: expected at least one, got none")
    if scores is None:
        scores = [_scored(score, models[i]) for i in range(len(models))]
    scores = tuple(float(value) for value in scores)
    if len(scores) != len(models):
        raise ValueError(f"scores: expected one per model, {len(models)}, got {len(scores)}")
    if all(map(math.isnan, scores)):
        raise ValueError("score: expected a number for one model at least, got NaN for all")
    # NaN cannot be ordered. Models with score NaN come last, in their order.
    order = sorted(range(len(models)), key=lambda i: (math.isnan(scores[i]), -_finite(scores[i])))
    first, *rest = order
    like = jax.tree.map(as_given, models[first])
    # The running mean stays wide. Only the scored copy is cast, so rounding does not accumulate.
    mean, best, taken = _wide(like), scores[first], [first]
    trials = [(first, best)]
    for i in rest:
        # The weight of the mean so far is the number of models in it.
        wider = linear()([mean, models[i]], weights=[len(taken), 1])
        value = _scored(score, _cast(wider, like))
        trials.append((i, value))
        if value > best or (not strict and value == best):
            mean, best = wider, value
            taken.append(i)
    return Soup(_cast(mean, like), tuple(taken), scores, tuple(trials))


def _scored(score: Callable[[PyTree], float], params: PyTree) -> float:
    value = score(params)
    if np.shape(value) != () or isinstance(value, str | None):
        raise TypeError(f"score: expected one number, got {described(value)}")
    return float(value)


def _finite(value: float) -> float:
    """Returns the value, or 0 for NaN, which ranks last by the first entry of the sort key."""
    return 0.0 if math.isnan(value) else value


def _wide(tree: PyTree) -> PyTree:
    """Casts floating leaves to float32 (float64 stays), for a mean over many models."""

    def wide(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(wide, tree)


def _cast(tree: PyTree, like: PyTree) -> PyTree:
    """Casts the leaves to the dtypes of another tree."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
