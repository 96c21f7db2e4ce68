"""What each part of `cross_task_linearity` measures, with `sail_jax.probe`, of trained networks.

Models come stacked, [replicate, model, ...], and so do test sets. All results are dictionaries of
arrays, [replicate, ...]. Of two models the first has the weight alpha.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

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
    stack,
    union,
)
from sail_jax import probe
from theory.linearity import gap, main_term, second_order_gap

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HALF = (0.5, 0.5)
FEW = 10  # models, all sets of which can be averaged
Arrays = dict[str, Any]


def pairs(models: int) -> np.ndarray:
    """All pairs i < j: [pair, 2]."""
    return np.array(list(itertools.combinations(range(models), 2)))


def subsets(models: int) -> Float[np.ndarray, "subset model"]:
    """Equal weights on every set of two or more models; of more than `FEW` models on the sets of
    two, of three and of all."""
    if models <= FEW:
        members = np.array([s for s in itertools.product((0.0, 1.0), repeat=models) if sum(s) >= 2])
    else:
        sets = [s for k in (2, 3, models) for s in itertools.combinations(range(models), k)]
        members = np.array([np.isin(range(models), s) for s in sets], float)
    return members / members.sum(1, keepdims=True)


def flat(tree: PyTree) -> PyTree:
    """[replicate, some, ...] to [replicate x some, ...]."""
    return jax.tree.map(lambda x: np.reshape(x, (-1, *x.shape[2:])), tree)


def of_each(fn: Any, *stacked: PyTree) -> PyTree:
    """`fn` of every entry of the two leading axes."""
    return each(partial(each, fn), *stacked)


def paired(stacked: PyTree) -> tuple[PyTree, PyTree]:
    """The first and the second of all pairs along the second axis."""
    index = pairs(jax.tree.leaves(stacked)[0].shape[1])
    return tuple(jax.tree.map(lambda x, i=i: x[:, index[:, i]], stacked) for i in (0, 1))


def moved(base: PyTree, params: PyTree, scale: Any) -> PyTree:
    """base + scale (params - base)."""
    return jax.tree.map(lambda b, p: b + scale * (p - b), base, params)


def angles(found: probe.Linearity) -> Arrays:
    """1 - cosine, of which a cosine near 1 shows nothing; coefficient; relative gap: [layer,
    point]; and 1 - the cosine of the first two models ([layer], or [layer, point])."""
    return {
        "turn": 1 - found.cosine.value,
        "coefficient": found.coefficient.value,
        "gap": found.gap,
        "baseline": 1 - found.baseline.value[..., 0, 1],
    }


def linearity(
    model: Model, normalise: str, alphas: Sequence[float], a: PyTree, b: PyTree, batch: Batch
) -> Arrays:
    return angles(probe.cross_task_linearity(network(model, normalise), a, b, batch, alphas))


@partial(jax.jit, static_argnames=("model", "normalise"))
def distribution(
    model: Model, normalise: str, alpha: float, a: PyTree, b: PyTree, batch: Batch
) -> Arrays:
    """Quantiles over the images, [layer, quantile], of 1 - cosine, the coefficient, and 1 - the
    cosine between both models."""
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
    norms = jnp.linalg.norm(x, axis=1) * jnp.linalg.norm(y, axis=1)
    return jnp.where(norms > 0, jnp.sum(x * y, 1) / jnp.where(norms > 0, norms, 1), 0)


def rotated(model: MLP, experts: PyTree, tests: Batch, alphas: Sequence[float]) -> Arrays:
    """(a) Linearity of every pair on the union of its tasks, how it spreads over the images, and
    the loss on the first one's task along the line: does linear mode connectivity hold?"""

    def of_pair(a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        batch = union(own, other)
        line = probe.barrier(loss(model), a, b, own)
        return {
            "line": linearity(model, "", alphas, a, b, batch),
            "spread": distribution(model, "", 0.5, a, b, batch),
            "barrier": line.height,
            "own_loss": line.endpoints[0],
            "other_loss": line.endpoints[1],
        }

    return of_each(of_pair, *paired(experts), *paired(tests))


def split_classes(model: Model, experts: PyTree, tests: Batch, alphas: Sequence[float]) -> Arrays:
    """(b) The same of networks with BatchNorm, whose running statistics are interpolated with the
    weights, or replaced by those of the digits."""

    def of_pair(normalise: str, a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        batch = union(own, other)
        return {
            "line": linearity(model, normalise, alphas, a, b, batch),
            "spread": distribution(model, normalise, 0.5, a, b, batch),
        }

    arguments = (*paired(experts), *paired(tests))
    return {how: of_each(partial(of_pair, how), *arguments) for how in ("interpolated", "batch")}


def halfway(model: Model, normalise: str, a: PyTree, b: PyTree, batch: Batch) -> Arrays:
    """(c, d) Linearity in the middle, the barrier, and accuracies there and of the models."""
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
    """(e) All sets of models fine-tuned on one task: weights averaged, logits averaged; how far
    from linear they are, by how many there are."""
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
    """(e) Accuracy on the union of two tasks of interpolated weights, of interpolated logits, and
    interpolated itself."""
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
    """(f) Both sides of equation 2 for every pair, of equations 3 and 4 for every task."""
    net = network(model)

    def add(base: PyTree, a: PyTree, b: PyTree, own: Batch, other: Batch) -> Arrays:
        return angles(probe.addition(net, base, [a, b], union(own, other), scales))

    def negate(base: PyTree, a: PyTree, own: Batch) -> Arrays:
        forms = ("midpoint", "reflection")
        return {f: angles(probe.negation(net, base, a, own, scales, form=f)) for f in forms}

    count = len(pairs(jax.tree.leaves(experts)[0].shape[1]))
    added = of_each(add, _repeated(base, count), *paired(experts), *paired(tests))
    tasks = jax.tree.leaves(experts)[0].shape[1]
    return {
        "addition": added,
        **of_each(negate, _repeated(base, tasks), experts, tests),
    }


def _repeated(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: np.broadcast_to(x[:, None], (len(x), count, *x.shape[1:])), tree)


def stitching(
    model: MLP, base: PyTree, experts: PyTree, tests: Batch, upright: Batch, scales: Sequence[float]
) -> Arrays:
    """(g) Accuracy of features put into upper layers: of model i in model j on the task of i; of
    two models' mean, and of one, in the base on both tasks (Figure 9); of the base's less what
    fine-tuning adds, and of the base less the task vector, in the base (Figure 10)."""
    net = network(model)
    hidden = [f"hidden_{i}" for i in range(len(model.widths))]

    def stitched(lower: list[PyTree], upper: PyTree, batch: Batch, w: Any = None) -> Array:
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

    tasks = jax.tree.leaves(experts)[0].shape[1]
    first, second = paired(experts)
    exams, other_exams = paired(tests)
    count = len(pairs(tasks))
    bases, uprights = _repeated(base, tasks), _repeated(upright, tasks)
    return {
        "plain": of_each(plain, first, second, exams),
        "addition": of_each(add, _repeated(base, count), first, second, exams, other_exams),
        "negation": of_each(negate, bases, experts, tests, uprights),
        "base": of_each(of_base, bases, tests, uprights),
    }


def spectral_norm(
    model: Model, steps: int, params: PyTree, batch: Batch, key: Key
) -> Float[Array, ""]:
    """Of the Hessian of the loss, by Lanczos' iteration."""
    spectrum = probe.hessian_spectrum(
        loss(model, "batch"), params, batch, jax.random.wrap_key_data(key), steps=steps, probes=2
    )
    return jnp.maximum(abs(spectrum.largest[0]), abs(spectrum.smallest[0]))


def theorem(
    model: Model, base: PyTree, tuned: PyTree, tests: Batch, keys: Any, steps: int
) -> Arrays:
    """(h) The gap of the loss in the middle of every pair, [checkpoint, pair], and what is to
    predict it: Theorem 1's main term, its factors; the same with the Hessian's norm on the segment
    in place of the checkpoint's; and D^2 f along the line itself, there and in the middle. A ResNet
    normalises by the test images."""
    at = partial(spectral_norm, model, steps)
    norm = each(at, base, tests, keys)
    first, second = paired(tuned)
    middles = jax.tree.map(lambda x, y: (x + y) / 2, first, second)
    count, models = (jax.tree.leaves(t)[0].shape[1] for t in (first, tuned))
    ends = of_each(at, tuned, _repeated(tests, models), _repeated(keys, models))
    middle = of_each(at, middles, _repeated(tests, count), _repeated(keys, count))
    sides = [ends[:, pairs(models)[:, i]] for i in (0, 1)]
    largest = np.maximum(middle, np.maximum(*sides))

    return of_each(
        partial(_theorem, model), first, second, _repeated(base, count), _repeated(tests, count),
        _repeated(norm, count), largest,
    )  # fmt: skip


@partial(jax.jit, static_argnames="model")
def _theorem(
    model: Model, a: PyTree, b: PyTree, base: PyTree, batch: Batch, norm: Array, most: Array
) -> Arrays:
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
