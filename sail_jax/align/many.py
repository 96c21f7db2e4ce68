"""Aligns many networks with one another, and averages them.

This is MergeMany of Git Re-Basin (Ainsworth et al. 2023, algorithm 3). It uses `match_weights` of
each model with the mean of the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from sail_jax.align.matching import families as chosen_families
from sail_jax.align.matching import match_weights
from sail_jax.align.problem import EPS, apart, arrays, square
from sail_jax.basis.change_basis import change_basis, unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, identity, invert
from sail_jax.basis.spaces import Spec
from sail_jax.checks import one_key
from sail_jax.methods.sparse import linear


class Common(NamedTuple):
    """Maps that move several models into one set of coordinates, and the progress of the search.

    Attributes:
      maps: One dictionary of maps by space for each model. The first model's maps are identities.
      distance: sum_k sum_t w_t |moved_kt - mean_t|^2, after the first pass and after each round
        that lowered it.
      converged: Whether the last round no longer lowered it, within `max_rounds`.
    """

    maps: tuple[dict[str, SpaceMap], ...]
    distance: tuple[float, ...]
    converged: bool


def match_many(
    models: Sequence[PyTree],
    spec: Spec,
    *,
    normalize: bool = True,
    key: PRNGKeyArray | None = None,
    max_rounds: int = 100,
    **options: Any,
) -> Common:
    """Finds maps that move all models into the coordinates of the first.

    A first pass matches each model to the mean of the models before it. It is undone if it does not
    bring the models closer to their mean. Then, in rounds, each model is matched to the mean of all
    others, until a round no longer lowers the distance beyond rounding.

    Args:
      models: At least two parameter trees with the leaves and shapes of `spec`.
      spec: Their spec.
      normalize: Whether the weight of tensor t in the distance is M / sum_k |theta_kt|^2, for M
        models. If not, it is 1.
      key: A PRNG key for random orders of the models, a new order in each round. None keeps the
        given order.
      max_rounds: The largest number of rounds.
      **options: Arguments of `match_weights`, except `init`, `weights` and `within`. Families must
        be isometric, since a scale would shrink all models onto a small mean.

    Returns:
      The maps of each model, the distances, and whether they converged.

    Raises:
      ValueError: For fewer than two models, an unknown option, or a family that is not isometric;
        and as `match_weights` does.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), algorithm 3.

    >>> import jax.numpy as jnp
    >>> from sail_jax.basis.spaces import spec
    >>> a = {"in": jnp.array([[1.0, 2.0]]), "out": jnp.array([[3.0], [4.0]])}
    >>> b = {"in": jnp.array([[2.0, 1.0]]), "out": jnp.array([[4.0], [3.0]])}
    >>> s = spec(a, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> [maps["h"].index.tolist() for maps in match_many([a, b], s).maps]
    [[0, 1], [1, 0]]
    """
    one_key(key, optional=True)
    if len(models) < 2:
        raise ValueError(f"match_many needs at least two models, got {len(models)}")
    if odd := {"init", "weights", "within"} & options.keys():
        raise ValueError(f"match_many does not take {', '.join(sorted(odd))}")
    models = [apart(f"models[{k}]", model, spec) for k, model in enumerate(models)]
    spec, _ = unfused(spec)
    chosen = chosen_families(spec, options.get("family"), options.get("spaces"))
    for name, family in chosen.items():
        if Family.ISOMETRIC not in family:
            raise ValueError(
                f"many models can only be matched by isometric maps, not by {family!s} maps of "
                f"{name!r}: fix the scales of each model first"
            )
    paths = list(dict.fromkeys(use.path for name in chosen for use in spec.uses(name)))
    hosts = [arrays(f"models[{k}]", model, spec, paths) for k, model in enumerate(models)]
    weights = dict.fromkeys(paths, 1.0)
    if normalize:
        for path in paths:
            total = sum(square(h[path]) for h in hosts)
            # The weight is fixed for all models and rounds, so each step lowers the same distance.
            weights[path] = len(models) / total if total else 0.0
    start = {name: identity(spec.space(name).size) for name in chosen}
    maps: list[dict[str, SpaceMap]] = [dict(start) for _ in models]
    moved = list(models)
    before = _spread(moved, spec, paths, weights)
    history = [before]

    def improve(k: int, others: Sequence[PyTree], init: Mapping[str, SpaceMap] | None) -> None:
        update = match_weights(
            # The sum over models of |model - mean|^2 falls if model k moves nearer to the mean of
            # the others.
            linear()(list(others)),
            moved[k],
            spec,
            weights=weights,
            init=init,
            **options,
        ).maps
        # The composed maps are applied to the given model. Moving the moved model again would
        # accumulate rounding.
        maps[k] = {name: compose(update[name], maps[k][name]) for name in maps[k]}
        moved[k] = change_basis(models[k], spec, maps[k])

    for k in range(1, len(models)):
        improve(k, moved[:k], None)
    # In the first pass a model is matched only to earlier models, which may not reduce the distance
    # of all models.
    if not _spread(moved, spec, paths, weights) < before:
        maps, moved = [dict(start) for _ in models], list(models)
    history[0] = _spread(moved, spec, paths, weights)
    converged = False
    for turn in range(max_rounds):
        order = range(len(models))
        if key is not None:
            order = np.asarray(jax.random.permutation(jax.random.fold_in(key, turn), len(models)))
        for k in order:
            # An empty `init` (not None) skips the first visit, which would discard the maps so
            # far.
            improve(int(k), [m for j, m in enumerate(moved) if j != k], {})
        spread = _spread(moved, spec, paths, weights)
        # Smaller changes may be float32 rounding.
        if not spread < history[-1] * (1 - 8 * EPS):
            converged = True
            break
        history.append(spread)
    # The first model has moved, too. All models are transformed back into its original coordinates.
    back = {name: invert(m) for name, m in maps[0].items()}
    out = [{name: compose(back[name], m[name]) for name in m} for m in maps[1:]]
    return Common((start, *out), tuple(history), converged)


def merge_many(models: Sequence[PyTree], spec: Spec, **options: Any) -> PyTree:
    """Averages all models in the coordinates of the first.

    Args:
      models: As in `match_many`.
      spec: As in `match_many`.
      **options: Arguments of `match_many`.

    Returns:
      The mean of the moved models, from `methods.linear` with equal weights.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), algorithm 3.

    >>> import jax.numpy as jnp
    >>> from sail_jax.basis.spaces import spec
    >>> a = {"in": jnp.array([[1.0, 2.0]]), "out": jnp.array([[3.0], [4.0]])}
    >>> b = {"in": jnp.array([[2.0, 1.0]]), "out": jnp.array([[4.0], [3.0]])}
    >>> s = spec(a, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> merge_many([a, b], s)["in"].tolist()
    [[1.0, 2.0]]
    """
    common = match_many(models, spec, **options)
    moved = [change_basis(m, spec, maps) for m, maps in zip(models, common.maps, strict=True)]
    return linear()(moved)


def _spread(
    models: Sequence[PyTree], spec: Spec, paths: Sequence[str], weights: Mapping[str, float]
) -> float:
    """Computes the weighted sum of squared distances of all models from their mean, in float64."""
    hosts = [arrays(f"models[{k}]", model, spec, paths) for k, model in enumerate(models)]
    total = 0.0
    for path in paths:
        stack = np.stack([np.asarray(h[path], np.float64) for h in hosts])
        total += weights[path] * float(((stack - stack.mean(0)) ** 2).sum())
    return total
