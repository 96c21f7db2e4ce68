"""One shared vector and a mask per task: EMR-merging, TALL masks, consensus."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.merging.arithmetic import PerModel, beside, per_task, sums, task_sum
from sail_jax.merging.combining import Reduction, Transform, chain, reduce
from sail_jax.merging.merge import Merge, method
from sail_jax.merging.steps import Piece, kernel
from sail_jax.merging.task_vectors import Weights, apply, check_scalar, task_vectors
from sail_jax.merging.transforms import check_per_model, elect, one_of, trim

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
    """EMR-merging: elect, mask, rescale; one model per task, without tuning.

    Elect: the sign s of sum_k delta_k, and shared = s max |delta_k| over the k of that sign. Mask:
    where delta_k has that sign. Rescale: by ||delta_k||_1 / ||mask_k shared||_1, over the tree.

    Where the sum is exactly 0 nothing is elected and shared is 0 (the authors' code elects -).
    Norms are sums over all entries, as in the paper; the authors' code and fusion_bench add up the
    means of tensors. A task without change has scale 1 (NaN in fusion_bench). A single model is
    given back.

    Args:
      models: M pytrees; see `task_vectors`.
      base: The pytree they were tuned from.

    Raises:
      ValueError, TypeError: As `task_vectors` does.

    References:
      Huang et al., EMR-Merging, 2024 (arXiv 2405.17461), Sec. 3.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 1.0])}], jnp.zeros(2)
    >>> merged = emr(models, {"a": base})
    >>> merged.shared["a"].tolist(), merged.model({"a": base}, 1)["a"].tolist()
    ([3.0, -2.0], [4.0, 0.0])
    """
    parts = _localized(reduce(kernel(_emr)), models, base)
    norms = [part["norms"] for part in parts.leaves]
    before, after = sum(norms[1:], norms[0]) if norms else jnp.ones((2, len(models)))
    exists = after > 0
    scales = jnp.where(exists, before / jnp.where(exists, after, 1), 1)
    return Localized(parts.tree("shared"), parts.tree("mask"), scales)


def _emr(piece: Piece, delta: Array, weight: Array) -> dict[str, Array]:
    sign = jnp.sign(task_sum(delta))
    highest = sign * delta[0]
    for k in range(1, len(delta)):
        highest = jnp.maximum(highest, sign * delta[k])
    shared = sign * highest
    mask = per_task(lambda d: d * jnp.sign(shared) > 0, delta)

    def lengths(k: int) -> Array:
        # up to a common factor that keeps sums of 2**32 terms finite
        used = jnp.where(mask[k], shared, 0)
        return jnp.stack(sums(*(jnp.abs(x) * 2.0**-32 for x in (delta[k], used))))

    norms = jnp.stack([lengths(k) for k in range(len(delta))], 1)
    return {"shared": shared, "mask": mask, "norms": norms}


class _Parts(NamedTuple):
    """What a reduction makes of each leaf: a dictionary."""

    treedef: Any
    leaves: list[dict[str, Array]]

    def tree(self, name: str) -> PyTree:
        return self.treedef.unflatten(leaf[name] for leaf in self.leaves)


def _localized(
    reduction: Reduction,
    models: Sequence[PyTree],
    base: PyTree,
    transform: Transform = Transform(),  # noqa: B008 - immutable
    weights: Weights = None,
) -> _Parts:
    vectors = transform(task_vectors(models, base, weights))
    treedef = jax.tree.structure(vectors.delta)
    return _Parts(treedef, treedef.flatten_up_to(reduction(vectors)))


def tall_masks(
    models: Sequence[PyTree],
    base: PyTree,
    threshold: PerModel = 0.4,
    *,
    multitask: Multitask = "sum",
    density: float = 0.2,
    weights: Weights = None,
) -> Localized:
    """TALL masks: which entries of one multi-task vector a task needs.

    The mask of task k is |delta_k| > threshold |shared - delta_k|, entry by entry. What a task did
    not change is not in its mask. A single model is given back. fusion_bench measures distances
    from the base's own values instead of from 0, so that nearly all is kept.

    Args:
      models: M pytrees; see `task_vectors`.
      base: The pytree they were tuned from.
      threshold: Not negative, one number or one per task. The authors choose it for each task out
        of 0.2 to 0.6 on held-out data (`best_thresholds`); 0.4 is the middle.
      multitask: shared = sum_k w_k delta_k ("sum"), or TIES without its average ("ties"): each
        delta_k trimmed to `density` over the tree, those of the elected sign summed up.
      density: Of "ties".
      weights: One per model.

    Raises:
      ValueError: For another threshold, and as `task_vectors` does.

    References:
      Wang et al., Localizing Task Information, 2024 (arXiv 2405.07813), Eq. 4.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 0.0])}], jnp.zeros(2)
    >>> tall_masks(models, {"a": base}).masks["a"].tolist()
    [[False, True], [True, False]]
    """
    masks = reduce(kernel(_tall_masks, _threshold(threshold)))
    parts = _localized(masks, models, base, _multitask(multitask, density), weights)
    return Localized(parts.tree("shared"), parts.tree("mask"), jnp.ones(len(models)))


def _tall_masks(threshold: Array, piece: Piece, delta: Array, weight: Array) -> dict[str, Array]:
    shared = task_sum(per_task(jnp.multiply, weight, delta))
    return {"shared": shared, "mask": _needed(threshold, delta, shared)}


def best_thresholds(
    score: Callable[[int, PyTree], float],
    models: Sequence[PyTree],
    base: PyTree,
    candidates: Sequence[float] = (0.2, 0.3, 0.4, 0.5, 0.6),
    *,
    multitask: Multitask = "sum",
    density: float = 0.2,
) -> list[float]:
    """The threshold of `tall_masks` for each task that scores best.

    Args:
      score: (task, model) -> number, higher is better.
      models: See `tall_masks`.
      base: See `tall_masks`.
      candidates: The first of the best is taken; their models are built and scored one at a time.
      multitask: See `tall_masks`.
      density: See `tall_masks`.

    Raises:
      ValueError: Without candidates.
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
    threshold: PerModel = 0.4,
    agree: int = 2,
    multitask: Multitask = "sum",
    density: float = 0.2,
    scale: Scalar = 1.0,
) -> Merge:
    """Consensus merging: the multi-task vector where at least `agree` tasks need it.

    base + scale * [agree <= sum_k mask_k] * shared, with shared and mask_k of `tall_masks`.

    Args:
      threshold: See `tall_masks`.
      agree: 1 drops only what no task needs, 2 also what a single one does, 0 drops nothing: task
        arithmetic, or TIES summed up. More than there are models gives the base (so does 2 for a
        single model).
      multitask: See `tall_masks`.
      density: See `tall_masks`.
      scale: What multiplies the update.

    References:
      Wang et al., Localizing Task Information, 2024 (arXiv 2405.07813), Sec. 4.

    >>> models = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([1.0, 0.0])}]
    >>> consensus()(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 0.0]
    """
    check_scalar("agree", agree, lambda k: k >= 0 and k == int(k), "a whole number >= 0")
    reduction = reduce(kernel(_agreed, _threshold(threshold), np.asarray(agree, np.int32)))
    return Merge(_multitask(multitask, density), reduction, scale=scale)


def _multitask(kind: Multitask, density: float) -> Transform:
    one_of("multitask", kind, Multitask)
    return Transform() if kind == "sum" else chain(trim(density), elect())


def _threshold(threshold: PerModel) -> Any:
    values = check_per_model("threshold", threshold, lambda t: t >= 0, "not negative")
    return jnp.asarray(threshold, jnp.float32) if values is None else values.astype(np.float32)


def _needed(threshold: Array, delta: Array, shared: Array) -> Array:
    return jnp.abs(delta) > beside(threshold, delta) * jnp.abs(shared - delta)


def _agreed(threshold: Array, agree: Array, piece: Piece, delta: Array, weight: Array) -> Array:
    shared = task_sum(weight * delta)
    count = task_sum(_needed(threshold, delta, shared).astype(jnp.int32))
    return jnp.where(count >= agree, shared, 0)
