"""Greedy soups. The uniform soup is `methods.linear`, the learned one `learn.learned_soup`."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from sail_jax.methods.sparse import linear

__all__ = ["Soup", "greedy_soup"]


class Soup(NamedTuple):
    """params: the soup; taken: the models in it, in the order they went in; scores: of each model;
    trials: (model, score of the soup with it), of all that were tried, in order."""

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
    """The greedy soup (Wortsman et al. 2022): models join, best first, while the mean gets better.

    score(params): on held-out data, larger is better; NaN is worse than all. scores: those of the
    models, if they are known. Models are tried from the best score down, equals in the order given;
    one joins if the mean with it scores higher than the soup without (`strict`, as the authors'
    code has it; their Recipe 1 takes equals too: `strict=False`).

    models: any sequence, also one that loads an entry when asked: an entry is held only while it is
    scored or tried, beside a running mean in float32. Dtypes are those of the best model.

    ValueError for no models, a number of scores that differs from theirs, and if no score is a
    number; and as `linear` for models that do not fit.

    >>> score = lambda params: -abs(float(params["a"]) - 2.0)
    >>> greedy_soup([{"a": 1.0}, {"a": 9.0}, {"a": 2.5}, {"a": 1.25}], score)
    Soup(params={'a': Array(1.875, dtype=float32)}, taken=(2, 3), scores=(-1.0, -7.0, -0.5, -0.75),
         trials=((2, -0.5), (3, -0.125), (0, -0.41...), (1, -2.25)))
    """
    if not len(models):
        raise ValueError("models: expected at least one, got none")
    if scores is None:
        scores = [float(score(models[i])) for i in range(len(models))]
    scores = tuple(float(value) for value in scores)
    if len(scores) != len(models):
        raise ValueError(f"scores: expected one per model, {len(models)}, got {len(scores)}")
    if all(map(math.isnan, scores)):
        raise ValueError("score: expected a number for one model at least, got NaN for all")
    order = sorted(range(len(models)), key=lambda i: (math.isnan(scores[i]), -_finite(scores[i])))
    first, *rest = order
    like = jax.tree.map(jnp.asarray, models[first])
    mean, best, taken = _wide(like), scores[first], [first]
    trials = [(first, best)]
    for i in rest:
        wider = linear()([mean, models[i]], weights=[len(taken), 1])
        value = float(score(_cast(wider, like)))
        trials.append((i, value))
        if value > best or (not strict and value == best):
            mean, best = wider, value
            taken.append(i)
    return Soup(_cast(mean, like), tuple(taken), scores, tuple(trials))


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _wide(tree: PyTree) -> PyTree:
    def wide(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(wide, tree)


def _cast(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
