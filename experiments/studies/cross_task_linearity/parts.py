"""The measurements of each part of `cross_task_linearity`, with `sail_jax.probe`.

`runs` trains the networks and calls these functions. Models are stacked, `(replicate, model, ...)`,
and so are their test sets. Results are dictionaries of arrays `(replicate, ...)`. In interpolations
of two models, alpha is the weight of the first.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from experiments.models.mlp import MLP
from experiments.studies.cross_task_linearity.models import (
    Batch,
    Key,
    Model,
    accuracy,
    correct,
    each,
    loss,
    network,
    repeated,
    stack,
    union,
)
from sail_jax import probe
from theory.linearity import gap, main_term, second_order_gap

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HALF = (0.5, 0.5)
FEW = 10  # the largest number of models for which all sets are averaged
Arrays = dict[str, Any]
Weights = Sequence[float] | None


def pairs(models: int) -> np.ndarray:
    """Lists all pairs i < j of models."""
    return np.array(list(itertools.combinations(range(models), 2)))


def subsets(models: int) -> Float[np.ndarray, "subset model"]:
    """Lists equal weights on sets of models.

    - `models`: number of models, >= 2.

    It returns weights `(subset, model)`: 1 / k for the k members of a set, 0 for the others. It
    contains all sets of two or more models. For more than `FEW` models, it contains the sets of
    two, of three and of all.
    """
    if models <= FEW:
        members = np.array([s for s in itertools.product((0.0, 1.0), repeat=models) if sum(s) >= 2])
    else:
        sets = [s for k in (2, 3, models) for s in itertools.combinations(range(models), k)]
        members = np.array([np.isin(range(models), s) for s in sets], float)
    return members / members.sum(1, keepdims=True)


def flat(tree: PyTree) -> PyTree:
    """Merges the two leading axes of all leaves."""
    return jax.tree.map(lambda x: np.reshape(x, (-1, *x.shape[2:])), tree)


def of_each(fn: Callable[..., PyTree], *stacked: PyTree) -> PyTree:
    """Applies a function to every entry of the two leading axes, one after another."""
    return each(partial(each, fn), *stacked)


def paired(stacked: PyTree) -> tuple[PyTree, PyTree]:
    """Gathers both members of every pair along the second axis."""
    index = pairs(jax.tree.leaves(stacked)[0].shape[1])
    return tuple(jax.tree.map(lambda x, i=i: x[:, index[:, i]], stacked) for i in (0, 1))


def moved(base: PyTree, params: PyTree, scale: ArrayLike) -> PyTree:
    """Computes base + scale (params - base)."""
    return jax.tree.map(lambda b, p: b + scale * (p - b), base, params)


def angles(found: probe.Linearity) -> Arrays:
    """Renames the results of a probe, and replaces each cosine by 1 - cosine.

    On a logarithmic axis the distance from 1 separates cosines of nearly 1.

    It returns "turn" (1 - cosine), "coefficient" and "gap" (relative), each `(layer, point)`. It
    also returns "baseline", 1 - the cosine between the features of the first two models:
    `(layer,)`, or `(layer, point)` if these models differ between points.
    """
    return {
        "turn": 1 - found.cosine.value,
        "coefficient": found.coefficient.value,
        "gap": found.gap,
        "baseline": 1 - found.baseline.value[..., 0, 1],
    }


def linearity(
    model: Model, normalise: str, alphas: Sequence[float], a: PyTree, b: PyTree, batch: Batch
) -> Arrays:
    """Measures how linear a network is on the line between two models."""
    return angles(probe.cross_task_linearity(network(model, normalise), a, b, batch, alphas))


def between(
    model: Model, normalise: str, alphas: Sequence[float], a: PyTree, b: PyTree, batch: Batch
) -> Arrays:
    """Measures linearity on the line between two models, and its spread over images half way."""
    return {
        "line": linearity(model, normalise, alphas, a, b, batch),
        "spread": distribution(model, normalise, 0.5, a, b, batch),
    }


@partial(jax.jit, static_argnames=("model", "normalise"))
def distribution(
    model: Model, normalise: str, alpha: float, a: PyTree, b: PyTree, batch: Batch
) -> Arrays:
    """Measures how cosines and coefficients spread over the images.

    It returns `QUANTILES` over the images, each `(layer, quantile)`: "turn" (1 - cosine between
    features of interpolated weights and interpolated features), "coefficient", and "baseline" (1 -
    the cosine between the features of the two models). For zero vectors, cosine and coefficient are
    defined as 0.
    """
    # Not by the probe, which returns means over images: quantiles require the values of each image.
    net = network(model, normalise)
    mixed, first, second = (
        list(probe.features(net, p, batch).values()) for p in (moved(b, a, alpha), a, b)
    )

    def layer(x: Array, y: Array, z: Array) -> list[Array]:
        x, y, z = (v.reshape(len(v), -1) for v in (x, y, z))
        sides = alpha * y + (1 - alpha) * z
        cosine, between = _cosine(x, sides), _cosine(y, z)
        length = jnp.linalg.norm(sides, axis=1)
        ratio = cosine * jnp.linalg.norm(x, axis=1) / jnp.where(length > 0, length, 1)
        return [1 - cosine, jnp.where(length > 0, ratio, 0), 1 - between]

    layers = [layer(*x) for x in zip(mixed, first, second, strict=True)]
    q = jnp.quantile(jnp.asarray(layers), jnp.array(QUANTILES), axis=-1)  # [quantile, layer, kind]
    return dict(zip(("turn", "coefficient", "baseline"), q.transpose(2, 1, 0), strict=True))


def _cosine(x: Array, y: Array) -> Array:
    """Computes the cosine between corresponding rows of x and y; 0 if either row is 0."""
    norms = jnp.linalg.norm(x, axis=1) * jnp.linalg.norm(y, axis=1)
    return jnp.where(norms > 0, jnp.sum(x * y, 1) / jnp.where(norms > 0, norms, 1), 0)


def rotated(model: MLP, experts: PyTree, tests: Batch, alphas: Sequence[float]) -> Arrays:
    """Measures linearity and linear mode connectivity between MLPs fine-tuned on rotated images.

    Linearity is measured on the union of the test sets of both tasks, the losses on the test set of
    the first.

    - `experts`: variables of one model per rotation, `(replicate, task, ...)`.
    - `tests`: their test sets, `(replicate, task, ...)`.

    It returns measurements of each pair, `(replicate, pair, ...)`:
    - "line": the arrays of `linearity`.
    - "spread": the arrays of `distribution` at 0.5.
    - "barrier": the height of the loss barrier on the line, in nats.
    - "own_loss" and "other_loss": the losses of the first and of the second model.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Figures 2 and 3.
    """

    def of_pair(a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        line = probe.barrier(loss(model), a, b, own)
        return {
            **between(model, "", alphas, a, b, union(own, other)),
            "barrier": line.height,
            "own_loss": line.endpoints[0],
            "other_loss": line.endpoints[1],
        }

    return of_each(of_pair, *paired(experts), *paired(tests))


def split_classes(model: Model, experts: PyTree, tests: Batch, alphas: Sequence[float]) -> Arrays:
    """Measures linearity between ResNets fine-tuned on different classes.

    BatchNorm's running statistics are either interpolated with the weights, or replaced by the
    statistics of the probed images.

    - `experts`: variables of one model per task, `(replicate, task, ...)`.
    - `tests`: their test sets, `(replicate, task, ...)`.

    It returns for each of "interpolated" and "batch": "line" and "spread", as in `rotated`.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Figures 2 and 3.
    """

    def of_pair(normalise: str, a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        return between(model, normalise, alphas, a, b, union(own, other))

    arguments = (*paired(experts), *paired(tests))
    return {how: of_each(partial(of_pair, how), *arguments) for how in ("interpolated", "batch")}


def halfway(model: Model, normalise: str, a: PyTree, b: PyTree, batch: Batch) -> Arrays:
    """Measures linearity, the loss barrier and accuracies half way between two models.

    The parts "scratch" and "random_labels" use it, for one pair of models at a time.

    It returns measurements of the pair:
    - "turn", "coefficient", "gap" and "baseline" of `angles`, each `(layer,)`.
    - "barrier": the height of the loss barrier on the line, in nats.
    - "middle": the accuracy half way.
    - "ends": the mean accuracy of the two models.
    """
    line = linearity(model, normalise, (0.5,), a, b, batch)
    ends = [accuracy(model, p, batch, normalise) for p in (a, b)]
    return {
        **{name: line[name][:, 0] for name in ("turn", "coefficient", "gap")},
        "baseline": line["baseline"],
        "barrier": probe.barrier(loss(model, normalise), a, b, batch).height,
        "middle": accuracy(model, moved(b, a, 0.5), batch, normalise),
        "ends": (ends[0] + ends[1]) / 2,
    }


def averaging(model: MLP, tuned: PyTree, tests: Batch) -> Arrays:
    """Compares averaged weights with averaged logits, on all sets of models for one task.

    - `tuned`: variables of the models, `(replicate, model, ...)`.
    - `tests`: the test set of their task, `(replicate, ...)`.

    It returns measurements of each set, in the order of `subsets`, and of each model:
    - "average": the accuracy of averaged weights, `(replicate, subset)`.
    - "ensemble": the accuracy of averaged logits, `(replicate, subset)`.
    - "agreement": the fraction of images for which both predict the same class, `(replicate,
      subset)`.
    - "gap": the relative gap of features, `(replicate, layer, subset)`.
    - "members": the accuracy of each model, `(replicate, model)`.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Figure 4.
    """
    weights = subsets(jax.tree.leaves(tuned)[0].shape[1])

    def of_task(stacked: PyTree, batch: Batch) -> Arrays:
        models = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(weights.shape[1])]
        measured = probe.averaging(network(model), models, batch, correct, weights)
        linear = probe.k_model_linearity(network(model), models, batch, weights)
        return {
            "average": measured.average.value,
            "ensemble": measured.ensemble.value,
            "members": measured.members.value,
            "agreement": measured.agreement.value,
            "gap": linear.gap,
        }

    return each(of_task, tuned, tests)


def along_the_line(
    model: MLP, experts: PyTree, tests: Batch, alphas: Sequence[float] | np.ndarray
) -> Arrays:
    """Measures accuracies along the line between models of two tasks, on both tasks together.

    - `experts`: variables of one model per task, `(replicate, task, ...)`.
    - `tests`: their test sets, `(replicate, task, ...)`.

    It returns accuracies `(replicate, pair, alpha)`:
    - "average": of interpolated weights.
    - "ensemble": of interpolated logits.
    - "chord": the interpolated accuracies of the two models.
    """
    weights = np.stack([alphas, 1 - np.asarray(alphas)], 1)

    def of_pair(a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        batch = union(own, other)
        measured = probe.averaging(network(model), [a, b], batch, correct, weights)
        return {
            "average": measured.average.value,
            "ensemble": measured.ensemble.value,
            "chord": weights @ measured.members.value,
        }

    return of_each(of_pair, *paired(experts), *paired(tests))


def arithmetic(
    model: MLP, base: PyTree, experts: PyTree, tests: Batch, scales: Sequence[float]
) -> Arrays:
    """Measures how well features follow sums and negatives of task vectors.

    - `base`: variables of the pre-trained model, `(replicate, ...)`.
    - `experts`: variables of one model per task, `(replicate, task, ...)`.
    - `tests`: their test sets, `(replicate, task, ...)`.

    It returns the arrays of `angles` with a point for each scale:
    - "addition" (eq. 2): for every pair, on the union of its test sets, `(replicate, pair, ...)`.
    - "midpoint" (eq. 3) and "reflection" (eq. 4): for every task, on its test set,
      `(replicate, task, ...)`.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), eqs. 2 to 4, Figures 7 and 8.
    """
    net = network(model)

    def add(base: PyTree, a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        return angles(probe.addition(net, base, [a, b], union(own, other), scales))

    def negate(base: PyTree, a: PyTree, own: Batch) -> Arrays:
        forms = ("midpoint", "reflection")
        return {f: angles(probe.negation(net, base, a, own, scales, form=f)) for f in forms}

    first, second = paired(experts)
    added = of_each(add, repeated(base, first), first, second, *paired(tests))
    return {"addition": added, **of_each(negate, repeated(base, experts), experts, tests)}


def stitching(
    model: MLP, base: PyTree, experts: PyTree, tests: Batch, upright: Batch, scales: Sequence[float]
) -> Arrays:
    """Measures accuracies of features that replace the input of a model's upper layers.

    Features are inserted after each hidden layer. All task vectors are relative to the base, the
    pre-trained model.

    - `base`: variables of the base, `(replicate, ...)`.
    - `experts`: variables of one model per task, `(replicate, task, ...)`.
    - `tests`: their test sets, `(replicate, task, ...)`.
    - `upright`: the test set of the base's own task, `(replicate, ...)`.

    It returns four groups of accuracies. Layers are those after which features are inserted:
    - "plain", `(replicate, pair, ...)`, on the task of the first model: "stitched", its features
      in the second model, by layer; "own" and "upper", the unchanged first and second model.
    - "addition", `(replicate, pair, scale, layer)`, in the base, mean of both tasks: "features",
      the mean of both models' features; "weights", the features of their mean weights; "single",
      the features of one model, mean of both.
    - "negation", `(replicate, task, scale, layer)`, in the base: "features_task", twice the base's
      features minus the features of base + s tau, on the task; "weights_task", the features of base
      - s tau; and the same on the base's own task, "features_upright" and "weights_upright".
    - "base", `(replicate, task)`: the unchanged base, on the "task" and on its own, "upright".

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Figures 9 and 10.
    """
    net = network(model)
    hidden = [f"hidden_{i}" for i in range(len(model.widths))]

    def stitched(lower: list[PyTree], upper: PyTree, batch: Batch, w: Weights = None) -> Array:
        measured = probe.stitching(net, lower, upper, batch, correct, w, layers=hidden)
        return measured.stitched.value

    def plain(a: PyTree, b: PyTree, own: Batch) -> Arrays:
        ends = {"own": accuracy(model, a, own), "upper": accuracy(model, b, own)}
        return {"stitched": stitched([a], b, own), **ends}

    def add(base: PyTree, a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        def at(s: float) -> Arrays:
            moved_a, moved_b = moved(base, a, s), moved(base, b, s)
            mean = jax.tree.map(lambda x, y: (x + y) / 2, moved_a, moved_b)

            def on_both(lower: list[PyTree]) -> Array:
                return (stitched(lower, base, own) + stitched(lower, base, other)) / 2

            # With several lower models, the mean of their features is inserted.
            accuracies = {"features": on_both([moved_a, moved_b]), "weights": on_both([mean])}
            return accuracies | {"single": (on_both([moved_a]) + on_both([moved_b])) / 2}

        return stack([at(s) for s in scales])

    def negate(base: PyTree, a: PyTree, own: Batch, upright: Batch) -> Arrays:
        def at(s: float) -> Arrays:
            ahead, behind = moved(base, a, s), moved(base, a, -s)
            return {
                f"{kind}_{name}": stitched(lower, base, batch, w)
                for name, batch in (("task", own), ("upright", upright))
                for kind, lower, w in (
                    ("features", [base, ahead], (2.0, -1.0)),
                    ("weights", [behind], None),
                )
            }

        return stack([at(s) for s in scales])

    def of_base(base: PyTree, own: Batch, upright: Batch) -> Arrays:
        batches = (("task", own), ("upright", upright))
        return {name: accuracy(model, base, batch) for name, batch in batches}

    first, second = paired(experts)
    exams, other_exams = paired(tests)
    bases, uprights = repeated(base, experts), repeated(upright, experts)
    return {
        "plain": of_each(plain, first, second, exams),
        "addition": of_each(add, repeated(base, first), first, second, exams, other_exams),
        "negation": of_each(negate, bases, experts, tests, uprights),
        "base": of_each(of_base, bases, tests, uprights),
    }


def spectral_norm(
    model: Model, steps: int, params: PyTree, batch: Batch, key: Key
) -> Float[Array, ""]:
    """Estimates the spectral norm of the Hessian of the loss by Lanczos' iteration.

    - `steps`: steps of the iteration, at most the number of parameters.
    """
    # Two initial vectors (probes), the minimum for the estimate.
    spectrum = probe.hessian_spectrum(
        loss(model, "batch"), params, batch, jax.random.wrap_key_data(key), steps=steps, probes=2
    )
    return jnp.maximum(abs(spectrum.largest[0]), abs(spectrum.smallest[0]))


def theorem(
    model: Model, base: PyTree, tuned: PyTree, tests: Batch, keys: np.ndarray, steps: int
) -> Arrays:
    """Measures the gap of the loss half way between models, and its predictors.

        gap = |L((a + b) / 2) - (L(a) + L(b)) / 2|

    - `base`: variables of the checkpoints, `(checkpoint, ...)`.
    - `tuned`: variables of the models fine-tuned from each, `(checkpoint, model, ...)`.
    - `tests`: images for the loss, `(checkpoint, ...)`.
    - `keys`: data of random keys, `(checkpoint, 2)`.

    It returns arrays `(checkpoint, pair)`:
    - "gap": as above, in nats.
    - "main_term": the main term of Theorem 1, norm |a - b|^2 / 8.
    - "distance" and "norm": its factors |a - b|^2 and the spectral norm of the Hessian at the
      checkpoint.
    - "norm_on_segment": the main term with the largest norm at a, b and their mean.
    - "along_at_base" and "along_in_middle": the gap to second order, by second derivatives along
      a - b at the checkpoint and half way.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Theorem 1 and Appendix B.2.
    """
    at = partial(spectral_norm, model, steps)
    norm = each(at, base, tests, keys)
    first, second = paired(tuned)
    middles = jax.tree.map(lambda x, y: (x + y) / 2, first, second)
    ends = of_each(at, tuned, repeated(tests, tuned), repeated(keys, tuned))
    middle = of_each(at, middles, repeated(tests, first), repeated(keys, first))
    # The largest norm of three points approximates the largest on the segment.
    largest = np.maximum(middle, np.maximum(*paired(ends)))
    at_checkpoint = (repeated(x, first) for x in (base, tests, norm))
    return of_each(partial(_theorem, model), first, second, *at_checkpoint, largest)


@partial(jax.jit, static_argnames="model")
def _theorem(
    model: Model, a: PyTree, b: PyTree, base: PyTree, batch: Batch, norm: Array, most: Array
) -> Arrays:
    """Computes the gap and its predictors for one pair of models.

    `norm` is the Hessian's at the checkpoint, `most` the largest one on the segment.
    """
    thetas = jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b)
    f, w = loss(model, "batch"), jnp.asarray(HALF)
    return {
        "gap": abs(gap(f, thetas, w, batch)),
        "main_term": main_term(norm, thetas, w),
        "distance": main_term(8.0, thetas, w),  # |a - b|^2
        "norm": norm,
        "norm_on_segment": main_term(most, thetas, w),
        "along_at_base": abs(second_order_gap(f, thetas, w, batch, at=base)),
        "along_in_middle": abs(second_order_gap(f, thetas, w, batch)),
    }
