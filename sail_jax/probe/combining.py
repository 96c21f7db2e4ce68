"""Models combined in parameters, in outputs, and at a layer in between."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import nearest
from sail_jax.probe.combinations import mixer, points, stack, sweep, weighted
from sail_jax.probe.estimates import Estimate, check_finite, check_size, examples, over_examples
from sail_jax.probe.networks import (
    OUTPUT,
    Apply,
    Names,
    accepts_override,
    features,
    layers,
    outputs,
)

__all__ = ["Averaging", "Metric", "Stitching", "averaging", "stitching"]

Metric = Callable[[Any, Any], Float[Array, "example"]]  # (outputs, batch): a loss, or correctness


class Averaging(NamedTuple):
    """The metric of the averaged model, of the ensemble (each [point]) and of the members
    ([model]); agreement: [point], how often the first two predict the same class."""

    average: Estimate
    ensemble: Estimate
    members: Estimate
    agreement: Estimate


class Stitching(NamedTuple):
    """The metric of the stitched network, [layer], and of the upper one as it is."""

    layers: Names
    stitched: Estimate
    upper: Estimate


def averaging(
    apply: Apply,
    models: Sequence[PyTree],
    data: PyTree,
    metric: Metric,
    weights: Float[ArrayLike, "point model"] | None = None,
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Averaging:
    """Model averaging f(sum_i w_i theta_i) beside the ensemble of logits sum_i w_i f(theta_i)
    (cross-task linearity, Figure 4).

    apply(params, batch): logits [example, ..., class]. metric(outputs, batch): a value for every
    example, such as its loss, or whether the class is right. weights: rows that sum to 1, by
    default one of equal ones. data: leaves [n, ...] with n >= 2. k + points passes forward.

    Raises ValueError for models, data, weights, outputs or values of the metric that do not fit or
    are not finite.
    """
    stacked, w = stack(models), points(weights, len(models))
    examples(data, least=2)
    check_size(batch_size=batch_size, chunk_size=chunk_size)
    scores = _averaging(apply, models[0], stacked, data, metric, w, batch_size, chunk_size)
    check_finite("metric", jnp.concatenate([x.value for x in scores]))
    return scores


@partial(jax.jit, static_argnames=("apply", "metric", "batch_size", "chunk_size"))
def _averaging(
    apply: Apply, like: PyTree, stacked: PyTree, data: PyTree, metric: Metric, w: Array,
    batch_size: int | None, chunk_size: int,
) -> Averaging:  # fmt: skip
    mix, k = mixer(like, stacked), w.shape[1]
    w = jnp.asarray(w, jnp.result_type(float))

    def values(batch: PyTree) -> tuple[Array, ...]:
        n = examples(batch)

        def logits(w: Array) -> Array:
            out = outputs(apply, mix(w), batch)
            if getattr(out, "ndim", 0) < 2 or len(out) != n:
                raise ValueError(f"apply: expected logits [{n}, ..., class], got {_shape(out)}")
            return out

        member_logits = sweep(logits, jnp.eye(k), chunk_size)
        members = jnp.stack([_scored(metric, member_logits[i], batch) for i in range(k)], -1)

        def at(w: Array) -> tuple[Array, ...]:
            average, ensemble = logits(w), weighted(w, member_logits)
            same = average.argmax(-1) == ensemble.argmax(-1)
            agreement = same.reshape(n, -1).mean(1, dtype=w.dtype)
            return _scored(metric, average, batch), _scored(metric, ensemble, batch), agreement

        swept = sweep(at, w, chunk_size)
        average, ensemble, agreement = (x.T for x in swept)
        return average, ensemble, members, agreement

    return Averaging(*over_examples(values, data, batch_size))


def stitching(
    apply: Apply,
    models: Sequence[PyTree],
    upper: PyTree,
    data: PyTree,
    metric: Metric,
    weights: Sequence[float] | None = None,
    *,
    layers: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> Stitching:
    """Features of lower networks put into an upper one: at each layer l the metric of
    f^(L <- l+1)(upper; sum_i w_i f^(l)(theta_i)), of cross-task linearity's Section 4.3.

    One model, by default: plain stitching, without a layer trained in between. Equal weights, the
    default, and the pre-trained network as upper: addition (Figure 9). weights (2, -1) of the
    pre-trained network and theta + s tau: negation in features (Figure 10). They need not sum to 1.

    apply takes a third argument (`sail_jax.probe.networks`, which has them made of plain functions
    and Flax modules). layers: those to stitch at, by default all. k passes forward, and one from
    each layer on.

    Raises TypeError for networks that take no features, and ValueError for layers they do not
    have, and models, data, weights or values of the metric that do not fit or are not finite.
    """
    if not accepts_override(apply):
        raise TypeError(
            "apply: expected apply(params, batch, override), where override maps layers to features"
        )
    # the last is the upper one
    stacked = stack([*models, upper])
    w = points(None if weights is None else [list(weights)], len(models), sum_to_one=False)[0]
    examples(data, least=2)
    check_size(batch_size=batch_size)
    chosen = None if layers is None else tuple(layers)
    scores = _stitching(apply, upper, stacked, data, metric, w, chosen, batch_size)
    check_finite("metric", jnp.append(scores.stitched.value, scores.upper.value))
    return scores


@partial(jax.jit, static_argnames=("apply", "metric", "chosen", "batch_size"))
def _stitching(
    apply: Apply, upper: PyTree, stacked: PyTree, data: PyTree, metric: Metric, w: Array,
    chosen: tuple[str, ...] | None, batch_size: int | None,
) -> Stitching:  # fmt: skip
    names = [name for name in layers(apply, upper, data) if name != OUTPUT]
    if not names:
        raise ValueError("apply: expected features of some layer, got outputs alone")
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"layers: the network has no {name!r}{nearest(name, names)}")
    names, mix = Names(names if chosen is None else chosen), mixer(upper, stacked)

    def values(batch: PyTree) -> tuple[Array, Array]:
        def lower(w: Array) -> list[Array]:
            by_layer = features(apply, mix(w), batch)
            return [by_layer[name] for name in names]

        lower_features = lax.map(lower, jnp.eye(len(w), len(w) + 1))
        out = [
            outputs(apply, upper, batch, {name: weighted(w, x)})
            for name, x in zip(names, lower_features, strict=True)
        ]
        scores = [_scored(metric, x, batch) for x in out]
        return jnp.stack(scores, -1), _scored(metric, outputs(apply, upper, batch), batch)

    return Stitching(names, *over_examples(values, data, batch_size))


def _scored(metric: Metric, out: Any, batch: PyTree) -> Float[Array, "example"]:
    score, n = jnp.asarray(metric(out, batch)), examples(batch)
    if score.shape != (n,):
        raise ValueError(f"metric: expected a value for each of {n} examples, got {score.shape}")
    return score.astype(jnp.promote_types(score.dtype, jnp.float32))


def _shape(x: Any) -> Any:
    return getattr(x, "shape", jax.tree.structure(x))
