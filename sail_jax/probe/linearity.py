"""Cross-task linearity (arXiv 2402.03660): are networks linear in their parameters, layer by layer?

All identities of the paper have one form: features of a combination of models beside the same
combination of the features of those models,

    f(sum_m s_m theta_m)  and  sum_m s_m f(theta_m),

with the cosine between the two and the coefficient |f| cos / |sum_m s_m f_m|. Layerwise linear
feature connectivity (LLFC, Zhou et al. 2023) asks for cosines near 1, cross-task linearity (CTL)
for coefficients near 1 as well.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.probe.combinations import (
    Numbers,
    line,
    mixer,
    numbers,
    points,
    stack,
    sweep,
    weighted,
)
from sail_jax.probe.estimates import Estimate, check_finite, check_size, examples, over_examples
from sail_jax.probe.networks import Apply, Names, features, layers

__all__ = ["Linearity", "addition", "cross_task_linearity", "k_model_linearity", "negation"]

Combinations = Float[ArrayLike, "point member model"]
Shares = Float[ArrayLike, "point share member"]


class Linearity(NamedTuple):
    """Estimates over examples, each flattened to one vector per layer.

    layers: names, in order, the outputs last. cosine, coefficient: [layer, point].
    gap: [layer, point], the root mean square of the difference of both sides relative to that of
    the second, which resolves what a cosine of nearly 1 cannot.
    baseline: cosines between the features of the models themselves, [layer, model, model] (the
    paper's baseline); [layer, point, model, model] where they differ from point to point.

    Where both sides are 0 they agree, with cosine and coefficient 1; where only one is, both
    are 0.
    """

    layers: Names
    cosine: Estimate
    coefficient: Estimate
    gap: Float[Array, "layer point"]
    baseline: Estimate


def cross_task_linearity(
    apply: Apply,
    params_a: PyTree,
    params_b: PyTree,
    batch: PyTree,
    alphas: Float[ArrayLike, "point"] | Sequence[float] = (0.25, 0.5, 0.75),
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Linearity:
    """f(alpha theta_a + (1 - alpha) theta_b) beside alpha f(theta_a) + (1 - alpha) f(theta_b).

    apply: a network that shows its features (`sail_jax.probe.networks`); one that does not is
    probed at its outputs. Other arguments, memory and errors as in `k_model_linearity`.

    >>> net = lambda w, x: (x @ w @ w, {"first": x @ w})
    >>> found = cross_task_linearity(net, jnp.eye(2), 3 * jnp.eye(2), jnp.eye(2), jnp.array([0.5]))
    >>> found.layers, found.coefficient.value[:, 0].tolist()  # 2, 2 and 4, (1 + 9) / 2
    (('first', 'output'), [1.0, 0.800000011920929])
    """
    return k_model_linearity(
        apply,
        [params_a, params_b],
        batch,
        line(alphas),
        batch_size=batch_size,
        chunk_size=chunk_size,
    )


def k_model_linearity(
    apply: Apply,
    models: Sequence[PyTree],
    batch: PyTree,
    weights: Float[ArrayLike, "point model"] | None = None,
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Linearity:
    """f(sum_i w_i theta_i) beside sum_i w_i f(theta_i), eq. 1 and Lemma 2 of the paper.

    weights: rows that sum to 1, by default one of equal ones. batch: leaves [n, ...] with n >= 2,
    `batch_size` at a time. Memory beside a copy of the models: the features of a batch for all
    of them and for `chunk_size` combinations. k + points passes forward.

    Raises ValueError for models that do not share structure, naming the leaf, for features that
    are not [example, ...], naming the layer, for data, weights and sizes that do not fit, and for
    features that are not finite.
    """
    stacked, k = stack(models), len(models)
    linearity = _measure(
        apply, models[0], stacked, batch, np.eye(k)[None], points(weights, k)[None],
        batch_size, chunk_size,
    )  # fmt: skip
    # one set of members, many points
    return jax.tree.map(lambda x: x[:, 0], linearity)


def addition(
    apply: Apply,
    base: PyTree,
    models: Sequence[PyTree],
    batch: PyTree,
    scales: Float[ArrayLike, "point"] | Sequence[float],
    *,
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Linearity:
    """Learning by addition, eq. 2: f(theta + s sum_i tau_i) beside the mean over the k models of
    f(theta + k s tau_i), for each scale s; two models in the paper.

    k + 1 passes forward per scale. Arguments and errors as in `k_model_linearity`.
    """
    stacked, k, s = stack([base, *models]), len(models), numbers("scales", scales)
    if not k:
        raise ValueError("models: expected at least one, got none")
    origin = np.eye(k + 1)[0]
    members = _along(s, k * (np.eye(k + 1)[1:] - origin), origin)
    shares = np.full((len(s), 1, k), 1 / k)
    return _each(_measure(apply, base, stacked, batch, members, shares, batch_size, chunk_size))


def negation(
    apply: Apply,
    base: PyTree,
    params: PyTree,
    batch: PyTree,
    scales: Float[ArrayLike, "point"] | Sequence[float],
    *,
    form: Literal["midpoint", "reflection"] = "midpoint",
    batch_size: int | None = None,
    chunk_size: int = 1,
) -> Linearity:
    """Forgetting by negation, for each scale s. "midpoint", eq. 3: f(theta) beside
    f(theta + s tau) / 2 + f(theta - s tau) / 2. "reflection", eq. 4: f(theta - s tau) beside
    2 f(theta) - f(theta + s tau).

    Three passes forward per scale. Arguments and errors as in `k_model_linearity`.
    """
    if form not in get_args(Literal["midpoint", "reflection"]):
        raise ValueError(f"form: expected 'midpoint' or 'reflection', got {form!r}")
    s, away = numbers("scales", scales), np.array([-1.0, 1.0])
    steps, share = (
        ((away, -away), (0.5, 0.5)) if form == "midpoint" else ((0 * away, away), (2, -1))
    )
    members = _along(s, np.stack(steps), np.array([1.0, 0.0]))
    shares = np.tile(np.array(share, float), (len(s), 1, 1))
    stacked = stack([base, params])
    return _each(_measure(apply, base, stacked, batch, members, shares, batch_size, chunk_size))


def _along(s: Numbers, steps: np.ndarray, origin: np.ndarray) -> Combinations:
    """origin + s steps, [point, member, model], weights of the base and of the models."""
    return origin + s[:, None, None] * steps


def _each(linearity: Linearity) -> Linearity:
    """One share per set of members."""
    drop = partial(jax.tree.map, lambda x: x[:, :, 0])
    sides = {name: drop(getattr(linearity, name)) for name in ("cosine", "coefficient", "gap")}
    return linearity._replace(**sides)


def _measure(
    apply: Apply, like: PyTree, stacked: PyTree, batch: PyTree, members: Combinations,
    shares: Shares, batch_size: int | None, chunk_size: int,
) -> Linearity:  # fmt: skip
    examples(batch, least=2)
    check_size(batch_size=batch_size, chunk_size=chunk_size)
    linearity = _linearity(apply, like, stacked, batch, members, shares, batch_size, chunk_size)
    check_finite("features", linearity.coefficient.value)
    return linearity


@partial(jax.jit, static_argnames=("apply", "batch_size", "chunk_size"))
def _linearity(
    apply: Apply, like: PyTree, stacked: PyTree, data: PyTree, members: Combinations,
    shares: Shares, batch_size: int | None, chunk_size: int,
) -> Linearity:  # fmt: skip
    """All arrays [layer, point, share, ...], the baseline [layer, point, member, member]."""
    names, mix = layers(apply, like, data), mixer(like, stacked)
    members, shares = (jnp.asarray(x, jnp.result_type(float)) for x in (members, shares))

    def combined(w: Array, batch: PyTree) -> list[Array]:
        by_layer = features(apply, mix(w), batch)
        return [_flat(by_layer[name]) for name in names]

    def at(batch: PyTree, members: Array, shares: Array) -> tuple[Any, Any]:
        member_features = sweep(
            lambda w: combined(w, batch), members, chunk_size
        )  # [member, example, unit] by layer

        def side(share: Array) -> Array:
            left = combined(weighted(share, members), batch)
            right = [weighted(share, x) for x in member_features]
            return jnp.stack([_compare(a, b) for a, b in zip(left, right, strict=True)])

        return sweep(side, shares, chunk_size), jnp.stack([_baseline(x) for x in member_features])

    def values(batch: PyTree) -> tuple[Array, Array]:
        # [point, share, layer, quantity, example], [point, layer, member, member, example]
        quantities = lax.map(lambda point: at(batch, *point), (members, shares))
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), quantities)

    sides, baseline = over_examples(values, data, batch_size)
    order = partial(jax.tree.map, lambda x: jnp.moveaxis(x, 2, 0))
    cosine, coefficient, difference, right = (
        order(jax.tree.map(lambda x, i=i: x[..., i], sides)) for i in range(4)
    )
    return Linearity(
        names,
        cosine,
        coefficient,
        jnp.where(difference.value == 0, 0, jnp.sqrt(difference.value / right.value)),
        jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), baseline),
    )


def _flat(x: Array) -> Float[Array, "example unit"]:
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), x.dtype)
    return x.reshape(len(x), -1).astype(wide)


class _Features(NamedTuple):
    """Unit vectors, 0 for 0, and lengths."""

    units: Float[Array, "... example unit"]
    sizes: Float[Array, "... example"]


def _polar(x: Array) -> _Features:
    sizes = jnp.sqrt(jnp.sum(x * x, -1))
    return _Features(x * _inverse(sizes)[..., None], sizes)


def _cosine(a: _Features, b: _Features) -> Float[Array, "... example"]:
    """1 - |u - v|^2 / 2 of the unit vectors: of the angles, and not their squares, to rounding."""
    one_is_zero = (a.sizes == 0) != (b.sizes == 0)
    return jnp.where(one_is_zero, 0, 1 - jnp.sum((a.units - b.units) ** 2, -1) / 2)


def _compare(a: Array, b: Array) -> Float[Array, "quantity example"]:
    left, right = _polar(a), _polar(b)
    cosine = _cosine(left, right)
    neither = (left.sizes == 0) & (right.sizes == 0)
    coefficient = jnp.where(neither, 1, cosine * left.sizes * _inverse(right.sizes))
    return jnp.stack([cosine, coefficient, jnp.sum((a - b) ** 2, -1), right.sizes**2])


def _baseline(x: Float[Array, "member example unit"]) -> Float[Array, "member member example"]:
    all_of_them = _polar(x)
    return lax.map(lambda member: _cosine(member, all_of_them), all_of_them)


def _inverse(x: Array) -> Array:
    """1 / x, but 0 of 0."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))
