"""Many networks in one frame, and their average (MergeMany, Ainsworth et al. 2023, algorithm 3)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from sail_jax.align.matching import families as chosen_families
from sail_jax.align.matching import match_weights
from sail_jax.align.problem import EPS, apart, arrays
from sail_jax.basis.change_basis import change_basis, unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, identity, invert
from sail_jax.basis.spaces import Spec
from sail_jax.methods.sparse import linear

__all__ = ["Common", "match_many", "merge_many"]


class Common(NamedTuple):
    """One dictionary of maps for each model, that of the first changing nothing.

    distance: sum_k sum_t w_t |moved_kt - mean_t|^2, at the start and after each round; it never
    rises. converged: the last round improved nothing.
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
    """Maps that bring all models to the frame of the first.

    Each in turn is matched to the mean of those before it, then round after round to the mean of
    all others, in order or, with a key, in random orders, until a round brings the models no
    nearer to their mean beyond rounding. `options` are those of `match_weights`, `init`,
    `weights` and `within` excepted; families must be isometric (a scale would shrink all models
    onto a small mean). `normalize` weighs each tensor by M / sum_k |theta_kt|^2.

    Raises ValueError as `match_weights` does, and for fewer than two models.
    """
    if len(models) < 2:
        raise ValueError(f"a common frame is for two models at least, got {len(models)}")
    if odd := {"init", "weights", "within"} & options.keys():
        raise ValueError(f"match_many takes no {', '.join(sorted(odd))}")
    models = [apart(f"models[{k}]", model, spec) for k, model in enumerate(models)]
    spec, _ = unfused(spec)
    chosen = chosen_families(spec, options.get("family"), options.get("spaces"))
    for name, family in chosen.items():
        if Family.ISOMETRIC not in family:
            raise ValueError(
                f"many models can be matched by isometric maps only, not by {family!s} ones of "
                f"{name!r}: fix the scales of each model first"
            )
    paths = list(dict.fromkeys(use.path for name in chosen for use in spec.uses(name)))
    hosts = [arrays(f"models[{k}]", model, spec, paths) for k, model in enumerate(models)]
    weights = dict.fromkeys(paths, 1.0)
    if normalize:
        for path in paths:
            square = sum(float((h[path] ** 2).sum()) for h in hosts)
            weights[path] = len(models) / square if square else 0.0
    start = {name: identity(spec.space(name).size) for name in chosen}
    maps: list[dict[str, SpaceMap]] = [dict(start) for _ in models]
    moved = list(models)
    before = _spread(moved, spec, paths, weights)
    history = [before]

    def improve(k: int, others: Sequence[PyTree], init: Mapping[str, SpaceMap] | None) -> None:
        update = match_weights(
            linear()(list(others)), moved[k], spec, weights=weights, init=init, **options
        ).maps
        maps[k] = {name: compose(update[name], maps[k][name]) for name in maps[k]}
        moved[k] = change_basis(models[k], spec, maps[k])

    for k in range(1, len(models)):
        improve(k, moved[:k], None)
    if not _spread(moved, spec, paths, weights) < before:
        maps, moved = [dict(start) for _ in models], list(models)
    history[0] = _spread(moved, spec, paths, weights)
    converged = False
    for turn in range(max_rounds):
        order = range(len(models))
        if key is not None:
            order = np.asarray(jax.random.permutation(jax.random.fold_in(key, turn), len(models)))
        for k in order:
            improve(int(k), [m for j, m in enumerate(moved) if j != k], {})
        spread = _spread(moved, spec, paths, weights)
        if not spread < history[-1] * (1 - 8 * EPS):
            converged = True
            break
        history.append(spread)
    back = {name: invert(m) for name, m in maps[0].items()}
    out = [{name: compose(back[name], m[name]) for name in m} for m in maps[1:]]
    return Common((start, *out), tuple(history), converged)


def merge_many(models: Sequence[PyTree], spec: Spec, **options: Any) -> PyTree:
    """The mean of all models in the frame of the first: `methods.linear` after `match_many`."""
    common = match_many(models, spec, **options)
    moved = [change_basis(m, spec, maps) for m, maps in zip(models, common.maps, strict=True)]
    return linear()(moved)


def _spread(
    models: Sequence[PyTree], spec: Spec, paths: Sequence[str], weights: Mapping[str, float]
) -> float:
    hosts = [arrays(f"models[{k}]", model, spec, paths) for k, model in enumerate(models)]
    total = 0.0
    for path in paths:
        stack = np.stack([np.asarray(h[path], np.float64) for h in hosts])
        total += weights[path] * float(((stack - stack.mean(0)) ** 2).sum())
    return total
