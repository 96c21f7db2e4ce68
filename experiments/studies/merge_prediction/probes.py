"""Measures the results of each merge of `merge_prediction`, and their predictors.

Every predictor is oriented: a larger value should mean a worse merge. `ranking` compares predictors
with results.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from experiments.studies.merge_prediction import tasks
from experiments.studies.merge_prediction.tasks import Family
from sail_jax import distances, methods, probe
from theory import linearity, merging

# The number of held-out examples of each task for the probes. Results use other examples.
PROBED = 32
# The number of training examples of each task for the constants of the bounds.
BOUND = 12
DRAWS, PRODUCTS, STARTS = 4, 8, 2  # noise; Lanczos' products from so many starts
# The forward passes that a product with the Hessian costs, because it requires two gradients.
HVP = 6


class Predictor(NamedTuple):
    """A measurement that may predict the result of a merge.

    Attributes:
      label: Its name in figures and tables.
      kind: The input of its computation: "weights", "data", "CTL" (features and outputs),
        "curvature", "bound", or "outcome" (the merge itself).
      cost: Forward passes over the probed examples of all tasks, as (constant, per model). A
        gradient counts as 3, a product with the Hessian as 6.
    """

    label: str
    kind: str
    cost: tuple[float, float] = (0, 0)

    def passes(self, models: int) -> float:
        """Counts the forward passes for a merge."""
        return self.cost[0] + self.cost[1] * models


_SPECTRUM = (STARTS * PRODUCTS * HVP, 0)
_CONSTANTS = (0, 2 * (3 + 3))  # at two points, the mean gradient and the examples', for each task
PREDICTORS = {
    "sign_conflict": Predictor("sign conflict", "weights"),
    "task_cosine": Predictor("1 - cosine of task vectors", "weights"),
    "overlap": Predictor("1 - subspace overlap", "weights"),
    "norm": Predictor("task vectors' norm / base's", "weights"),
    "heterogeneity": Predictor("heterogeneity / base's norm²", "weights"),
    "weight_cosine": Predictor("1 - cosine of weights", "weights"),
    "mmd": Predictor("tasks' distance (MMD²)", "data"),
    "sliced": Predictor("tasks' distance (sliced W₂)", "data"),
    "ctl_cosine": Predictor("CTL, 1 - cosine inside", "CTL", (1, 1)),
    "ctl_gap": Predictor("CTL, gap inside", "CTL", (1, 1)),
    "ctl_output": Predictor("CTL, gap of the outputs", "CTL", (1, 1)),
    "ensemble": Predictor("ensemble's loss - experts'", "CTL", (0, 1)),
    "members": Predictor("Lemma 1, exactly linear", "bound", (0, 1)),
    "lemma": Predictor("Lemma 1 with the gap", "bound", (1, 1)),
    "top": Predictor("Hessian's top eigenvalue", "curvature", _SPECTRUM),
    "trace": Predictor("Hessian's trace", "curvature", _SPECTRUM),
    "main_term": Predictor("Theorem 1: λ spread / 2", "bound", _SPECTRUM),
    "quadratic": Predictor("d·Hd / 2 at the experts", "curvature", (HVP, 0)),
    "taylor": Predictor("g·d + d·Hd / 2 at the experts", "curvature", (HVP + 3, 0)),
    "noise": Predictor("noise of the distance's size", "curvature", (1 + 2 * DRAWS, 0)),
    "gradients": Predictor("ζ², spread of gradients", "bound", _CONSTANTS),
    "bound": Predictor("Theorem 3 as printed", "bound", _CONSTANTS),
    "bound_corrected": Predictor("Theorem 3 corrected", "bound", _CONSTANTS),
    "sample": Predictor("the merge itself, few examples", "outcome", (1, 1)),
}
METHODS = ("averaging", "task arithmetic", "TIES")
Models = Sequence[PyTree]
Batches = Sequence[tasks.Batch]
SCALE, DENSITY = 0.7, 0.2  # the scale of task arithmetic's sum, and the density of TIES


class Merges(NamedTuple):
    """Several merges of k experts each, in arrays with an entry for each merge.

    Attributes:
      expert: The merged experts, as indices into the stacked experts.
      task: The tasks of their fine-tuning.
      base: The base model of the first expert, which is used as the merge's base.
      rate: The learning rate of fine-tuning.
      steps: The number of steps of fine-tuning.
    """

    expert: Int[np.ndarray, "merge k"]
    task: Int[np.ndarray, "merge k"]
    base: Int[np.ndarray, "merge"]
    rate: Float[np.ndarray, "merge"]
    steps: Int[np.ndarray, "merge"]


def at(stacked: PyTree, i: Any) -> PyTree:
    """Returns one entry, or a slice, of every leaf."""
    return jax.tree.map(lambda x: x[i], stacked)


def measure(
    family: Family,
    bases: PyTree,
    experts: PyTree,
    data: tasks.Data,
    merges: Merges,
    key: PRNGKeyArray,
) -> dict[str, Any]:
    """Measures each merge's results, and every predictor except the distances between tasks.

    Predictors and results are measured on different held-out examples. `apart` computes the
    distances between tasks.

    - `bases`: the base models, in leaves of shape (base, ...).
    - `experts`: the experts, in leaves of shape (expert, ...).

    It returns arrays with a leading axis over merges. `predictor` contains the predictors by name.
    `own`, `base` and `merged` each contain `loss` and `accuracy`, means over the merge's tasks: for
    each expert on its own task, for the base model, and for the merges by each method of `METHODS`,
    which have a second axis.
    """

    def of_merge(i: int) -> dict[str, Any]:
        merge = at(merges, i)
        base, models = at(bases, merge.base), [at(experts, j) for j in merge.expert]
        # Probes and results use different examples, because shared ones would share their noise.
        few = [at(data.held_out, (t, slice(PROBED))) for t in merge.task]
        exams = [at(data.held_out, (t, slice(PROBED, None))) for t in merge.task]
        learnt = [at(data.learn, (t, slice(BOUND))) for t in merge.task]
        merged = _merged(base, models)
        predictors = {
            **_weights(base, models),
            **_curvature(family, models, merged[0], few, key),
            **_linearity(family, models, merged[0], few),
            **_bounds(family, base, merged[0], learnt, merge, data.learn.labels.shape[1], key),
        }
        return {"predictor": predictors, **_outcome(family, base, models, merged, exams)}

    # The first call compiles. The others run in parallel, because each of these networks uses only
    # one core.
    results = [jax.tree.map(np.asarray, of_merge(0))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results += pool.map(of_merge, range(1, len(merges.base)))
    return jax.tree.map(lambda *x: np.stack(x), *results)


@jax.jit
def _merged(base: PyTree, models: Models) -> list[PyTree]:
    """Returns the models merged by the methods of `METHODS`, in order."""
    return [
        methods.linear()(models),
        methods.task_arithmetic(scale=SCALE)(models, base),
        methods.ties(density=DENSITY)(models, base),
    ]


@partial(jax.jit, static_argnums=0)
def _graded(family: Family, params: PyTree, batch: tasks.Batch) -> Float[Array, "2"]:
    """Computes the loss and the accuracy of a model on a batch."""
    return jnp.stack([tasks.loss_of(family)(params, batch), tasks.accuracy(family, params, batch)])


def _outcome(
    family: Family, base: PyTree, models: Models, merged: Models, exams: Batches
) -> dict[str, Any]:
    """Computes losses and accuracies of experts, base model and merges, as for `measure`."""

    def everywhere(params: PyTree) -> np.ndarray:
        return np.mean([_graded(family, params, batch) for batch in exams], 0)

    own = np.mean([_graded(family, *pair) for pair in zip(models, exams, strict=True)], 0)
    after, before = np.stack([everywhere(x) for x in merged], 1), everywhere(base)
    sides = {"own": own, "base": before, "merged": after}
    return {k: dict(zip(("loss", "accuracy"), x, strict=True)) for k, x in sides.items()}


@jax.jit
def _weights(base: PyTree, models: Models) -> dict[str, Array]:
    """Computes the predictors that only use the weights."""
    clash = probe.interference(base, models)
    cosines = probe.interference(jax.tree.map(jnp.zeros_like, base), models).total.cosines
    size = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(base)))
    return {
        "sign_conflict": clash.total.sign_conflict,
        "task_cosine": 1 - _pairs(clash.total.cosines),
        "overlap": 1 - jnp.mean(jax.vmap(jax.vmap(_pairs))(clash.overlap)),
        "norm": clash.total.norms.mean() / size,
        "heterogeneity": clash.total.heterogeneity / size**2,
        "weight_cosine": 1 - _pairs(cosines),
    }


def _curvature(
    family: Family, models: Models, mean: PyTree, few: Batches, key: PRNGKeyArray
) -> dict[str, Any]:
    """Computes the predictors from derivatives of the loss, at the average and at the experts."""
    pooled, stacked = (jax.tree.map(lambda *x: np.stack(x), *side) for side in (few, models))
    pooled = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pooled)
    loss, w = tasks.loss_of(family), np.full(len(models), 1 / len(models))
    spectrum = probe.hessian_spectrum(loss, mean, pooled, key, steps=PRODUCTS, probes=STARTS)
    # The noise moves an expert as far as averaging, in a random direction.
    std = np.sqrt(_spread(stacked, w) / sum(x.size for x in jax.tree.leaves(mean)))
    moved = [_moved(family, m, mean, b, std, key) for m, b in zip(models, few, strict=True)]
    top = spectrum.largest[0]
    return {
        "top": top,
        "trace": spectrum.trace.value,
        "main_term": top * _spread(stacked, w) / 2,
        **dict(zip(("quadratic", "taylor", "noise"), np.mean(moved, 0), strict=True)),
    }


_spread = jax.jit(linearity.spread)


@partial(jax.jit, static_argnums=0)
def _moved(
    family: Family,
    model: PyTree,
    mean: PyTree,
    batch: tasks.Batch,
    std: Array,
    key: PRNGKeyArray,
) -> Float[Array, "3"]:
    """Predicts how moving one expert to the average changes the loss on its task.

    Returns the second-order term, the Taylor polynomial of order two, and the increase by noise of
    the same size.
    """
    loss = tasks.loss_of(family)
    away = probe.fine_tuning_sensitivity(loss, model, mean, batch, [1.0])
    noise = probe.gaussian_sensitivity(
        loss, model, batch, key, [1.0], deviation=std, draws=DRAWS
    ).increase.value[0]
    return jnp.stack([away.curvature / 2, away.predicted[0], noise])


_logits = jax.jit(tasks.logits, static_argnums=0)
_loss_of = jax.jit(tasks.of_logits)


def _linearity(family: Family, models: Models, mean: PyTree, few: Batches) -> dict[str, Any]:
    """Computes the predictors from features and outputs, including cross-task linearity's."""
    network, k = tasks.network_of(family), len(models)
    pooled = jax.tree.map(lambda *x: np.concatenate(x), *few)
    ctl = probe.k_model_linearity(network, models, pooled)
    inside = np.array([name != "output" for name in ctl.layers])
    cosine, gap = np.asarray(ctl.cosine.value), np.asarray(ctl.gap)

    # [model, task, example, ...]: the experts', then the average's
    logits = np.array([[_logits(family, m, batch) for batch in few] for m in (*models, mean)])
    losses = np.array(
        [[_loss_of(x, b.labels) for x, b in zip(row, few, strict=True)] for row in logits]
    )
    ensemble = logits[:k].mean(0)
    together = np.mean([_loss_of(x, b.labels) for x, b in zip(ensemble, few, strict=True)])
    own, members = np.diagonal(losses).mean(), jnp.asarray(losses[:k].mean(1))
    w, apart = np.full(k, 1 / k), np.linalg.norm(ensemble - logits[k], axis=-1).mean()
    return {
        "ctl_cosine": 1 - cosine[inside, 0].mean(),
        "ctl_gap": gap[inside, 0].mean(),
        "ctl_output": gap[~inside, 0].mean(),
        "ensemble": together - own,
        "members": linearity.loss_bound(members, w) - own,
        "lemma": linearity.loss_bound(members, w, apart, np.sqrt(2)) - own,
        "sample": losses[k].mean() - own,
    }


def _pairs(x: Float[Array, "k k"]) -> Float[Array, ""]:
    """Computes the mean over all pairs of different models."""
    return jnp.mean(x[np.triu_indices(len(x), 1)])


def _bounds(
    family: Family, base: PyTree, mean: PyTree, batches: Batches, merge: Merges, n: int,
    key: PRNGKeyArray,
) -> dict[str, Any]:  # fmt: skip
    """Computes the quantities of Theorem 3 of unified merging.

    Its constants are measured at the base model and at the average, on some of the n examples of
    the experts' fine-tuning. The corrected form holds only for learning rates up to 1 / L. For a
    larger rate, the bound is evaluated just below 1 / L.
    """
    constants = merging.measure_constants(
        tasks.loss_of(family), batches, [base, mean], key, examples=2, iterations=PRODUCTS
    ).worst()
    train = partial(
        merging.Training.of, samples=n, steps=int(merge.steps),
        batch=tasks.BATCH, tasks=len(merge.task),
    )  # fmt: skip
    safe = min(float(merge.rate), 0.999 / float(np.asarray(constants.smoothness)))
    printed = merging.excess_risk_bound(constants, train(rate=float(merge.rate))).excess
    corrected = merging.excess_risk_bound(constants, train(rate=safe), form="corrected").least
    values = np.mean(constants.heterogeneity), printed, corrected
    names = "gradients", "bound", "bound_corrected"
    return dict(zip(names, map(np.float32, values), strict=True))


def apart(points: Float[np.ndarray, "task n dim"], key: PRNGKeyArray) -> dict[str, np.ndarray]:
    """Computes the distances between all pairs of tasks.

    It returns `mmd` (squared maximum mean discrepancy) and `sliced` (sliced Wasserstein distance),
    symmetric, of shape (task, task), with zeros on the diagonal.
    """
    T = len(points)
    pairwise = {name: np.zeros((T, T), np.float32) for name in ("mmd", "sliced")}
    for i, j in zip(*np.triu_indices(T, 1), strict=True):
        pair = points[i], points[j]
        sides = distances.mmd(*pair).value, distances.sliced_wasserstein(key, *pair).value
        for name, value in zip(pairwise, sides, strict=True):
            pairwise[name][i, j] = pairwise[name][j, i] = float(value)
    return pairwise


def over_pairs(table: np.ndarray, task: Int[np.ndarray, "merge k"]) -> Float[np.ndarray, "merge"]:
    """Averages a table of pairs of tasks over the pairs of each merge."""
    i, j = np.triu_indices(task.shape[1], 1)
    return table[task[:, i], task[:, j]].mean(-1)
