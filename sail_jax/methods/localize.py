"""One shared vector and a mask per task: EMR-merging, TALL masks, consensus."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.merging.merge import Expression, method
from sail_jax.merging.reductions import total
from sail_jax.merging.task_vectors import (
    Leafwise,
    Place,
    Rule,
    Weights,
    apply,
    chain,
    check_scalar,
    everybody,
    tally,
    task_vectors,
)
from sail_jax.merging.transforms import PerModel, check_per_model, elect, one_of, per_model, trim

__all__ = ["Localized", "best_thresholds", "consensus", "emr", "tall_masks"]

Multitask = Literal["sum", "ties"]
Scalar = Float[ArrayLike, ""]


class Localized(NamedTuple):
    """M models as one shared vector and a mask each, a bit per parameter: a pytree.

    shared: a change of the base, float32 (float64); None where leaves are not floating.
    masks: who uses which entry of it, bool [task, ...]. scales: the factor of each task, [task].
    """

    shared: PyTree
    masks: PyTree
    scales: Float[Array, "task"]

    def model(self, base: PyTree, task: int) -> PyTree:
        """base + scales[task] * masks[task] * shared, in the base's dtypes.

        IndexError for a task that does not exist.
        """
        tasks = self.scales.shape[0]
        if not -tasks <= task < tasks:
            raise IndexError(f"task: expected one of {tasks}, got {task}")
        update = jax.tree.map(lambda v, m: jnp.where(m[task], v, 0), self.shared, self.masks)
        return apply(base, update, self.scales[task])


def emr(models: Sequence[PyTree], base: PyTree) -> Localized:
    """EMR-merging (Huang et al. 2024): elect, mask, rescale; one model per task, without tuning.

    Elect: the sign s of sum_k delta_k, and shared = s max |delta_k| over the k of that sign. Mask:
    where delta_k has that sign. Rescale: by ||delta_k||_1 / ||mask_k shared||_1, over the tree.

    Where the sum is exactly 0 nothing is elected and shared is 0 (the authors' code elects -).
    Norms are sums over all entries, as in the paper; the authors' code and fusion_bench add up the
    means of tensors. A task without change has scale 1 (NaN in fusion_bench). A single model is
    given back. Raises as `task_vectors` does.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 1.0])}], jnp.zeros(2)
    >>> merged = emr(models, {"a": base})
    >>> merged.shared["a"].tolist(), merged.model({"a": base}, 1)["a"].tolist()
    ([3.0, -2.0], [4.0, 0.0])
    """
    delta = task_vectors(models, base).delta

    def elected(delta: Array) -> Array:
        sign = jnp.sign(tally(delta))
        return sign * functools.reduce(jnp.maximum, [sign * d for d in delta])

    shared = jax.tree.map(elected, delta)
    masks = jax.tree.map(lambda d, v: d * jnp.sign(v) > 0, delta, shared)
    used = jax.tree.map(lambda m, v: jnp.where(m, v, 0), masks, shared)
    before, after = _norms(delta, len(models)), _norms(used, len(models))
    exists = after > 0
    return Localized(shared, masks, jnp.where(exists, before / jnp.where(exists, after, 1), 1))


def _norms(votes: PyTree, tasks: int) -> Float[Array, "task"]:
    """L1 norms per task, up to a common factor that keeps sums of 2**32 terms finite."""
    flat = [jnp.abs(v.reshape(tasks, -1)) * 2.0**-32 for v in jax.tree.leaves(votes)]
    return sum((v.sum(1) for v in flat), jnp.zeros(tasks))


def tall_masks(
    models: Sequence[PyTree],
    base: PyTree,
    threshold: PerModel = 0.4,
    *,
    multitask: Multitask = "sum",
    density: float = 0.2,
    weights: Weights = None,
) -> Localized:
    """TALL masks (Wang et al. 2024): which entries of one multi-task vector a task needs.

    shared = sum_k w_k delta_k ("sum") or TIES without its average ("ties": each delta_k trimmed to
    `density` over the tree, those of the elected sign summed up); the mask of task k is
    |delta_k| > threshold |shared - delta_k|, entry by entry.

    threshold: one number or one per task, >= 0; the authors choose it for each task out of 0.2 to
    0.6 on held-out data (`best_thresholds`), 0.4 is the middle. What a task did not change is not
    in its mask. A single model is given back. fusion_bench measures distances from the base's own
    values instead of from 0, so that nearly all is kept. ValueError for another threshold; raises
    as `task_vectors` does.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 0.0])}], jnp.zeros(2)
    >>> tall_masks(models, {"a": base}).masks["a"].tolist()
    [[False, True], [True, False]]
    """
    rule = _multitask(multitask, density)
    votes = rule(task_vectors(models, base, weights))
    threshold = _threshold(threshold)
    shared = total(votes)
    masks = jax.tree.map(lambda d, v: _needed(threshold, d, v), votes.delta, shared)
    return Localized(shared, masks, jnp.ones(len(models)))


def best_thresholds(
    score: Callable[[int, PyTree], float],
    models: Sequence[PyTree],
    base: PyTree,
    candidates: Sequence[float] = (0.2, 0.3, 0.4, 0.5, 0.6),
    *,
    multitask: Multitask = "sum",
    density: float = 0.2,
) -> list[float]:
    """The threshold of `tall_masks` for each task by `score(task, model)`, higher is better.

    The first of the best candidates; their models are built and scored one at a time.
    """
    if not len(candidates):
        raise ValueError("candidates: expected at least one, got none")
    best: list[tuple[float, float]] = []
    for value in candidates:
        merged = tall_masks(models, base, value, multitask=multitask, density=density)
        new = [(float(score(k, merged.model(base, k))), value) for k in range(len(models))]
        best = [max(pair, key=lambda p: p[0]) for pair in zip(best or new, new, strict=True)]
    return [value for _, value in best]


@method
def consensus(
    *,
    key: Array | None = None,
    threshold: PerModel = 0.4,
    agree: int = 2,
    multitask: Multitask = "sum",
    density: float = 0.2,
    scale: Scalar = 1.0,
) -> Expression:
    """Consensus merging (Wang et al. 2024): the multi-task vector where at least `agree` tasks need
    it, base + scale * [agree <= sum_k mask_k] * shared.

    shared and mask_k are those of `tall_masks`. agree 1 drops only what no task needs, 2 also what
    a single one does, 0 drops nothing: task arithmetic, or TIES summed up. More than there are
    models gives the base (so does 2 for a single model). ValueError for another agree.

    >>> models = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([1.0, 0.0])}]
    >>> consensus(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 0.0]
    """
    check_scalar("agree", agree, lambda k: k >= 0 and k == int(k), "a whole number >= 0")
    kernel = Partial(_agreed, _threshold(threshold), jnp.asarray(agree, jnp.int32))
    return Expression(Leafwise(kernel), _multitask(multitask, density), scale=scale)


def _multitask(kind: Multitask, density: float) -> Rule:
    one_of("multitask", kind, Multitask)
    return everybody if kind == "sum" else chain(trim(density), elect())


def _threshold(threshold: PerModel) -> Array:
    check_per_model("threshold", threshold, lambda t: t >= 0, "not negative")
    return jnp.asarray(threshold, jnp.float32)


def _needed(threshold: Array, delta: Array, shared: Array) -> Array:
    return jnp.abs(delta) > per_model(threshold, delta) * jnp.abs(shared - delta)


def _agreed(threshold: Array, agree: Array, place: Place, delta: Array, weight: Array) -> Array:
    shared = tally(weight * delta)
    return jnp.where(tally(_needed(threshold, delta, shared).astype(jnp.int32)) >= agree, shared, 0)
