"""Models combined in their parameters, in their outputs, and at an intermediate layer."""

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

Metric = Callable[[Any, Any], Float[Array, "example"]]  # (outputs, batch): a loss, or correctness


class Averaging(NamedTuple):
    """The result of `averaging`: means of a metric over examples, with standard errors.

    Attributes:
      average: The metric of the averaged model, `(point,)`.
      ensemble: The metric of the averaged logits, `(point,)`.
      members: The metric of each model, `(model,)`.
      agreement: The fraction of examples to which the averaged model and the ensemble assign the
        same class, `(point,)`.
    """

    average: Estimate
    ensemble: Estimate
    members: Estimate
    agreement: Estimate


class Stitching(NamedTuple):
    """The result of `stitching`: means of a metric over examples, with standard errors.

    Attributes:
      layers: The layers, in the order of the network.
      stitched: The metric with features inserted at each layer, `(layer,)`.
      upper: The metric of the unmodified upper network, a scalar.
    """

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
    """Compares the averaged model f(sum_i w_i theta_i) with the ensemble sum_i w_i f(theta_i).

    It requires k forward passes for the k models and one for each point.

    Args:
      apply: A network (see `sail_jax.probe.networks`) with logits `(example, ..., class)` as
        outputs.
      models: The parameters of k models.
      data: A tree of arrays `(n, ...)` with n >= 2 examples.
      metric: A function `(outputs, batch) -> (example,)`, such as the loss of each example, or
        whether its class is correct.
      weights: `(point, model)`, rows that sum to 1. None: one point of equal weights.
      batch_size: The number of examples in memory at a time. None: all.
      chunk_size: The number of model combinations that are evaluated in parallel.

    Returns:
      The metric of the averages, the ensembles and the models, and the agreement of the first two.

    Raises:
      ValueError: For models, data, weights, sizes, outputs or metric values that are inconsistent
        or not finite.
      TypeError: For leaves of dtypes that cannot be combined, such as complex ones.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Figure 4.

    >>> net = lambda w, x: jnp.stack([x * w, -x * w], -1)
    >>> correct = lambda logits, x: logits.argmax(-1) == 0
    >>> found = averaging(net, [jnp.array(1.0), jnp.array(-0.5)], jnp.array([1.0, 2.0]), correct)
    >>> found.average.value.tolist(), found.members.value.tolist(), found.agreement.value.tolist()
    ([1.0], [1.0, 0.0], [1.0])
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

        # The members are also combinations, with the rows of the identity as weights.
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
    """Inserts features of lower networks into an upper one, at each layer in turn.

    At each layer l it measures the metric of f^(L <- l+1)(upper; sum_i w_i f^(l)(theta_i)), the
    upper network from layer l + 1 on. Special cases:

    - One lower model: plain stitching, without a trained layer in between.
    - Several with equal weights, and the pre-trained network as upper: addition (Figure 9).
    - Weights (2, -1) of the pre-trained network and of theta + s tau: negation (Figure 10).

    It requires k forward passes for the k lower models, and one from each layer on.

    Args:
      apply: A network with a third argument, features that replace its own (see
        `sail_jax.probe.networks`).
      models: The parameters of k lower networks.
      upper: The parameters of the upper network.
      data: A tree of arrays `(n, ...)` with n >= 2 examples.
      metric: A function `(outputs, batch) -> (example,)`.
      weights: One weight for each lower network, with any sum. None: equal weights with sum 1.
      layers: The layers to stitch at. None: all but the outputs.
      batch_size: The number of examples in memory at a time. None: all.

    Returns:
      The metric at each layer, and the metric of the upper network.

    Raises:
      TypeError: If the network does not accept features.
      ValueError: For unknown layers, and for models, data, weights or metric values that are
        inconsistent or not finite.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Sec. 4.3.

    >>> from sail_jax.probe import sequential
    >>> net = sequential({"hidden": lambda p, x: p["a"] * x, "out": lambda p, x: p["b"] * x})
    >>> one, two = ({"a": jnp.array(a), "b": jnp.array(b)} for a, b in ((2.0, 1.0), (3.0, 5.0)))
    >>> found = stitching(net, [one], two, jnp.ones(2), lambda out, x: out, layers=["hidden"])
    >>> found.stitched.value.tolist(), found.upper.value.item()  # 5 * 2, 5 * 3
    ([10.0], 15.0)
    """
    if not accepts_override(apply):
        raise TypeError(
            "apply: expected apply(params, batch, override), where override maps layers to features"
        )
    # The upper network is also stacked, so its structure and values are checked with the others.
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
        raise ValueError("apply: expected features of at least one layer, got only outputs")
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"layers: the network has no {name!r}{nearest(name, names)}")
    names, mix = Names(names if chosen is None else chosen), mixer(upper, stacked)

    def values(batch: PyTree) -> tuple[Array, Array]:
        def lower(w: Array) -> list[Array]:
            by_layer = features(apply, mix(w), batch)
            return [by_layer[name] for name in names]

        # The lower networks run one after another. The upper one is last in the stack, with
        # weight 0.
        lower_features = lax.map(lower, jnp.eye(len(w), len(w) + 1))
        out = [
            outputs(apply, upper, batch, {name: weighted(w, x)})
            for name, x in zip(names, lower_features, strict=True)
        ]
        scores = [_scored(metric, x, batch) for x in out]
        return jnp.stack(scores, -1), _scored(metric, outputs(apply, upper, batch), batch)

    return Stitching(names, *over_examples(values, data, batch_size))


def _scored(metric: Metric, out: PyTree, batch: PyTree) -> Float[Array, "example"]:
    """Evaluates the metric in float32 or wider, and checks that it has one value per example."""
    score, n = jnp.asarray(metric(out, batch)), examples(batch)
    if score.shape != (n,):
        raise ValueError(f"metric: expected a value for each of {n} examples, got {score.shape}")
    return score.astype(jnp.promote_types(score.dtype, jnp.float32))


def _shape(x: Any) -> Any:
    return getattr(x, "shape", jax.tree.structure(x))
