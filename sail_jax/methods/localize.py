"""One shared vector and one mask per task: EMR-merging, TALL masks, consensus.

`emr` and `tall_masks` give each task its own model, and require little more memory than one model.
`consensus` combines the masks into one model.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import one_of, scalar
from sail_jax.merging.arithmetic import (
    PerModel,
    add_norms,
    beside,
    l1_norms,
    number,
    per_task,
    task_sum,
)
from sail_jax.merging.combining import Reduction, Transform, chain, reduce
from sail_jax.merging.merge import Merge
from sail_jax.merging.steps import Piece, kernel
from sail_jax.merging.task_vectors import (
    Weights,
    apply,
    in_float64,
    task_vectors,
)
from sail_jax.merging.transforms import check_per_model, elect, trim
from sail_jax.methods.registry import DENSITY, Range, Scale, method

Multitask = Literal["sum", "ties"]
Scalar = Float[ArrayLike, ""]


class Localized(NamedTuple):
    """M models as one shared vector and one mask per model, a bit per parameter; a pytree.

    Attributes:
      shared: A change of the base that all models share, float32 (float64 if a model is float64).
        None at leaves that are not floating.
      masks: The entries of `shared` that each model uses, bool `[task, ...]`.
      scales: The factor of each model, `[task]`.
    """

    shared: PyTree
    masks: PyTree
    scales: Float[Array, "task"]

    @in_float64("self", "base")
    def model(self, base: PyTree, task: int) -> PyTree:
        """Returns the model of one task, base + scales[task] * masks[task] * shared.

        Args:
          base: The pytree that the models were fine-tuned from.
          task: The index of the task, from 0. Negative numbers count from the end.

        Returns:
          A pytree with the structure and dtypes of the base.

        Raises:
          IndexError: For a task out of range.
          ValueError: If values overflow the dtype of their leaf.
        """
        tasks = self.scales.shape[0]
        if not -tasks <= task < tasks:
            raise IndexError(f"task: expected one of {tasks}, got {task}")
        update = jax.tree.map(lambda v, m: jnp.where(m[task], v, 0), self.shared, self.masks)
        return apply(base, update, self.scales[task])


@in_float64("models", "base")
def emr(models: Sequence[PyTree], base: PyTree) -> Localized:
    r"""Merges models into one shared vector, with a mask and a factor per model (EMR-merging).

    1. Elect. For each entry, s is the sign of :math:`\sum_k \delta_k`. The shared vector is
       :math:`v = s \max_k |\delta_k|`, over the models with that sign.
    2. Mask. The mask :math:`m_k` of task k selects the entries where :math:`\delta_k` has that
       sign.
    3. Rescale. The factor of task k is :math:`\|\delta_k\|_1 / \|m_k v\|_1`, over the whole tree.

    The method works without hyperparameters. Where the sum is exactly 0, the shared vector is 0
    (the authors' code elects -). Norms are sums over all entries, as in the paper. The authors'
    code and fusion_bench add up the means of tensors. A task without any change has the factor 1
    (NaN in fusion_bench). A single model is returned unchanged.

    Args:
      models: M pytrees; see `task_vectors`.
      base: The pytree that they were fine-tuned from.

    Returns:
      The models as one shared vector, masks and factors.

    Raises:
      ValueError, TypeError: As in `task_vectors`.

    References:
      Huang et al., EMR-Merging, 2024 (arXiv 2405.17461), Sec. 3.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 1.0])}], jnp.zeros(2)
    >>> merged = emr(models, {"a": base})
    >>> merged.shared["a"].tolist(), merged.model({"a": base}, 1)["a"].tolist()
    ([3.0, -2.0], [4.0, 0.0])
    """
    parts = _localized(reduce(kernel(_emr)), models, base)
    norms = [part["norms"] for part in parts.leaves if "norms" in part]
    scales = functools.reduce(add_norms, norms).ratio if norms else jnp.ones(len(models))
    return Localized(parts.tree("shared"), parts.tree("mask"), scales)


def _emr(piece: Piece, delta: Array, weight: Array) -> dict[str, Any]:
    """Computes the shared vector of a leaf, its masks, and L1 norms before and after masking."""
    sign = jnp.sign(task_sum(delta))
    # Models of the other sign have sign * delta < 0. At least one model has an elected sign, so the
    # maximum comes from a model that agrees.
    highest = sign * delta[0]
    for k in range(1, len(delta)):
        highest = jnp.maximum(highest, sign * delta[k])
    shared = sign * highest
    # The comparison is strict. A task that did not change an entry does not use it.
    mask = per_task(lambda d: d * jnp.sign(shared) > 0, delta)
    tasks = range(len(delta))
    norms = l1_norms([delta[k] for k in tasks], [jnp.where(mask[k], shared, 0) for k in tasks])
    return {"shared": shared, "mask": mask, "norms": norms}


class _Parts(NamedTuple):
    """The output of a reduction, a dictionary for each leaf."""

    treedef: Any
    leaves: list[dict[str, Any]]

    def tree(self, name: str) -> PyTree:
        return self.treedef.unflatten(leaf[name] for leaf in self.leaves)


def _localized(
    reduction: Reduction,
    models: Sequence[PyTree],
    base: PyTree,
    transform: Transform = Transform(),  # noqa: B008 - immutable
    weights: Weights = None,
) -> _Parts:
    """Applies a transform and a reduction to the task vectors of the models."""
    vectors = transform(task_vectors(models, base, weights))
    deltas, treedef = jax.tree.flatten(vectors.delta)
    found = treedef.flatten_up_to(reduction(vectors))
    # A reduction is not applied to leaves without entries.
    parts = [
        part if delta.size else {"shared": part, "mask": jnp.zeros(delta.shape, bool)}
        for part, delta in zip(found, deltas, strict=True)
    ]
    return _Parts(treedef, parts)


@in_float64("models", "base")
def tall_masks(
    models: Sequence[PyTree],
    base: PyTree,
    threshold: PerModel = 0.4,
    *,
    multitask: Multitask = "sum",
    density: float = 0.2,
    weights: Weights = None,
) -> Localized:
    r"""Finds the entries of one multi-task vector that each task needs (TALL masks).

    With the shared multi-task vector v and the threshold :math:`\tau`, the mask of task k is, entry
    by entry,

    .. math:: |\delta_k| > \tau \, |v - \delta_k|

    The mask of a task excludes all entries that the task did not change. A single model is
    returned unchanged. (fusion_bench measures distances from the base's values instead of from 0,
    and then keeps nearly all entries.)

    Args:
      models: M pytrees; see `task_vectors`.
      base: The pytree that they were fine-tuned from.
      threshold: The threshold :math:`\tau`, at least 0, one number or one per task. The authors
        choose it for each task from 0.2 to 0.6 on held-out data (`best_thresholds`). 0.4 is the
        middle.
      multitask: The shared vector. "sum" is sum_k w_k delta_k. "ties" trims each delta_k to
        `density` over the tree and adds up the changes with the elected sign (TIES without the
        mean).
      density: The fraction of entries that "ties" keeps, in (0, 1].
      weights: One per model; 1 by default.

    Returns:
      The models as one shared vector and masks, with factors of 1.

    Raises:
      ValueError: For an invalid threshold or `multitask`, and as in `task_vectors`.
      TypeError: As in `task_vectors`.

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
    """Computes the shared vector of one leaf, and its masks."""
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
    """Chooses, for each task, the threshold of `tall_masks` with the best score.

    Args:
      score: `score(task, model)` returns a number for the model of that task; higher is better.
      models: M pytrees; see `task_vectors`.
      base: The pytree that they were fine-tuned from.
      candidates: Thresholds to try. The first wins ties. Models are built and scored one at a time.
      multitask: The kind of shared vector; see `tall_masks`.
      density: The fraction of entries that "ties" keeps; see `tall_masks`.

    Returns:
      One threshold for each task.

    Raises:
      ValueError: If `candidates` is empty, and as in `tall_masks`.

    >>> models, base = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([3.0, 0.0])}], jnp.zeros(2)
    >>> score = lambda task, model: -float(jnp.abs(model["a"] - models[task]["a"]).sum())
    >>> best_thresholds(score, models, {"a": base}, candidates=(0.2, 0.4))
    [0.4, 0.2]
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
    threshold: Annotated[PerModel, Range(0.1, 0.9)] = 0.4,
    agree: int = 2,
    multitask: Multitask = "sum",
    density: Annotated[float, DENSITY] = 0.2,
    scale: Scale = 1.0,
) -> Merge:
    r"""Keeps the entries of the multi-task vector that several tasks need (consensus merging).

    With the shared vector v and the masks :math:`m_k` of `tall_masks`, the result is

    .. math:: \theta = \theta_0 + \lambda \, \Big[ \sum_k m_k \ge a \Big] \, v

    Args:
      threshold: The threshold of the masks, >= 0, one number or one per task; see `tall_masks`.
      agree: The number of tasks a that must need an entry. 1 drops entries that no task needs. 2
        also drops entries that a single task needs. 0 drops nothing and gives task arithmetic, or
        the sum of TIES. A number above M gives the base. (For a single model, 2 already does.)
      multitask: The kind of shared vector; see `tall_masks`.
      density: The fraction of entries that "ties" keeps; see `tall_masks`.
      scale: The factor :math:`\lambda` on the merged task vector.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For an invalid threshold, `multitask` or density, unless `agree` is a whole number
        >= 0, and unless `scale` is finite.

    References:
      Wang et al., Localizing Task Information, 2024 (arXiv 2405.07813), Sec. 4.

    >>> models = [{"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([1.0, 0.0])}]
    >>> consensus()(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 0.0]
    """
    scalar("agree", agree, lambda k: k >= 0 and k == int(k), "a whole number >= 0")
    reduction = reduce(kernel(_agreed, _threshold(threshold), np.asarray(agree, np.int32)))
    return Merge(_multitask(multitask, density), reduction, scale=scale)


def _multitask(kind: Multitask, density: float) -> Transform:
    """Makes a transform such that the weighted sum of its output is the shared vector."""
    one_of("multitask", kind, Multitask)
    return Transform() if kind == "sum" else chain(trim(density), elect())


def _threshold(threshold: PerModel) -> Array | np.ndarray:
    """Checks the threshold, and converts it to an array."""
    check_per_model("threshold", threshold, lambda t: t >= 0, "not negative")
    return number(threshold)


def _needed(threshold: Array, delta: Array, shared: Array) -> Array:
    """Computes the masks of `tall_masks`."""
    return jnp.abs(delta) > beside(threshold, delta) * jnp.abs(shared - delta)


def _agreed(threshold: Array, agree: Array, piece: Piece, delta: Array, weight: Array) -> Array:
    """Returns the shared vector where enough tasks need it, 0 elsewhere."""
    shared = task_sum(weight * delta)
    count = task_sum(_needed(threshold, delta, shared).astype(jnp.int32))
    return jnp.where(count >= agree, shared, 0)
