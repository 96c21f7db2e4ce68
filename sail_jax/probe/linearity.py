"""Cross-task linearity: measures how linear networks are in their parameters, layer by layer.

All identities of the paper (Zhou et al. 2024, arXiv 2402.03660) have one form. They compare the
features of a combination of models with the same combination of the models' features,

    f(sum_m s_m theta_m)  and  sum_m s_m f(theta_m),

by the cosine between the two and by the coefficient |f| cos / |sum_m s_m f_m|. Layerwise linear
feature connectivity (LLFC, Zhou et al. 2023, arXiv 2307.08286) means cosines near 1. Cross-task
linearity (CTL) also requires coefficients near 1.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import one_of
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

Combinations = Float[ArrayLike, "point member model"]
Shares = Float[ArrayLike, "point share member"]


class Linearity(NamedTuple):
    """The linearity of a network in its parameters: means over examples with standard errors.

    The features of an example are flattened to one vector per layer. If the vectors of both sides
    are 0, the cosine and the coefficient are 1; if only one is 0, they are 0.

    Attributes:
      layers: The names of the layers, in order, the outputs last.
      cosine: The cosine between both sides, `(layer, point)`.
      coefficient: The length of the left side's projection on the right side, relative to the
        length of the right side, `(layer, point)`.
      gap: The root mean square of the difference of both sides, relative to the right side,
        `(layer, point)`. It resolves differences that a cosine near 1 cannot.
      baseline: The cosines between the features of the models themselves, `(layer, model, model)`;
        `(layer, point, model, model)` if these models differ from point to point, as for `addition`
        and `negation`.
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
    """Compares features of interpolated models with interpolated features.

        f(alpha theta_a + (1 - alpha) theta_b)  and  alpha f(theta_a) + (1 - alpha) f(theta_b)

    Args:
      apply: A network that returns its features (see `sail_jax.probe.networks`). Without features
        it is probed at its outputs.
      params_a: The parameters of the first model.
      params_b: The parameters of the second model.
      batch: The examples, a tree of arrays `(n, ...)` with n >= 2.
      alphas: The weights of the first model, `(point,)`.
      batch_size: The number of examples in memory at a time. None: all.
      chunk_size: The number of model combinations that are evaluated in parallel.

    Returns:
      Cosines, coefficients and gaps of both sides, by layer and point.

    Raises:
      ValueError: As `k_model_linearity` does.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660).

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
    """Compares features of averages of several models with averages of their features.

        f(sum_i w_i theta_i)  and  sum_i w_i f(theta_i)

    It requires k forward passes for the k models and one for each point, and memory for a copy of
    the models and the features of a batch for all of them and for `chunk_size` combinations.

    Args:
      apply: A network that returns its features, as in `cross_task_linearity`.
      models: The parameters of the models.
      batch: The examples, a tree of arrays `(n, ...)` with n >= 2.
      weights: `(point, model)`, rows that sum to 1. None: one point of equal weights.
      batch_size: The number of examples in memory at a time. None: all.
      chunk_size: The number of model combinations that are evaluated in parallel.

    Returns:
      Cosines, coefficients and gaps of both sides, by layer and point.

    Raises:
      ValueError: For models that differ in structure (with the name of the leaf), features that are
        not `(example, ...)` (with the name of the layer) or not finite, and invalid data, weights
        or sizes.
      TypeError: For leaves with dtypes that cannot be combined, such as complex ones.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), eq. 1 and Lemma 2.

    >>> found = k_model_linearity(lambda w, x: x * w, [1.0, 2.0, 6.0], jnp.ones(2))
    >>> found.layers, found.gap.tolist()  # this network is linear in its parameters
    (('output',), [[0.0]])
    """
    # One set of members, the models themselves (the identity), and one set of shares for each
    # point.
    stacked, k = stack(models), len(models)
    linearity = _measure(
        apply, models[0], stacked, batch, np.eye(k)[None], points(weights, k)[None],
        batch_size, chunk_size,
    )  # fmt: skip
    # There are one set of members and many points, so the axis of sets is removed.
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
    """Compares features under a sum of task vectors with the mean of features under each of them.

        f(theta + s sum_i tau_i)  and  (1 / k) sum_i f(theta + k s tau_i)

    for the task vectors tau_i of k models and each scale s. This is learning by addition, eq. 2 of
    cross-task linearity (which has two models). It requires k + 1 forward passes for each scale.

    Args:
      apply: A network that returns its features, as in `cross_task_linearity`.
      base: The parameters theta before fine-tuning.
      models: The parameters of the models, theta + tau_i.
      batch: The examples, a tree of arrays `(n, ...)` with n >= 2.
      scales: The scales s, `(point,)`.
      batch_size: The number of examples in memory at a time. None: all.
      chunk_size: The number of model combinations that are evaluated in parallel.

    Returns:
      Cosines, coefficients and gaps of both sides, by layer and scale.

    Raises:
      ValueError: If there are no models, and as `k_model_linearity` does.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), eq. 2.
    """
    stacked, k, s = stack([base, *models]), len(models), numbers("scales", scales)
    if not k:
        raise ValueError("models: expected at least one, got none")
    origin = np.eye(k + 1)[0]
    # The base comes first in the stack: theta + k s tau_i has the weights 1 - k s and k s.
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
    """Compares features under a task vector and under its negative.

    For each scale s, "midpoint" (eq. 3) compares

        f(theta)  and  f(theta + s tau) / 2 + f(theta - s tau) / 2,

    and "reflection" (eq. 4), forgetting by negation, compares

        f(theta - s tau)  and  2 f(theta) - f(theta + s tau).

    It requires three forward passes for each scale.

    Args:
      apply: A network that returns its features, as in `cross_task_linearity`.
      base: The parameters theta before fine-tuning.
      params: The parameters of the model, theta + tau.
      batch: The examples, a tree of arrays `(n, ...)` with n >= 2.
      scales: The scales s, `(point,)`.
      form: "midpoint" or "reflection".
      batch_size: The number of examples in memory at a time. None: all.
      chunk_size: The number of model combinations that are evaluated in parallel.

    Returns:
      Cosines, coefficients and gaps of both sides, by layer and scale.

    Raises:
      ValueError: For an unknown form, and as `k_model_linearity` does.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), eq. 3 and 4.
    """
    one_of("form", form, ("midpoint", "reflection"))
    s, away = numbers("scales", scales), np.array([-1.0, 1.0])
    steps, share = (
        ((away, -away), (0.5, 0.5)) if form == "midpoint" else ((0 * away, away), (2, -1))
    )
    members = _along(s, np.stack(steps), np.array([1.0, 0.0]))
    shares = np.tile(np.array(share, float), (len(s), 1, 1))
    stacked = stack([base, params])
    return _each(_measure(apply, base, stacked, batch, members, shares, batch_size, chunk_size))


def _along(s: Numbers, steps: np.ndarray, origin: np.ndarray) -> Combinations:
    """Returns the members origin + s steps, as weights of base and models."""
    return origin + s[:, None, None] * steps


def _each(linearity: Linearity) -> Linearity:
    """Removes the axis of shares from results with one set of shares per set of members."""
    drop = partial(jax.tree.map, lambda x: x[:, :, 0])
    sides = {name: drop(getattr(linearity, name)) for name in ("cosine", "coefficient", "gap")}
    return linearity._replace(**sides)


def _measure(
    apply: Apply, like: PyTree, stacked: PyTree, batch: PyTree, members: Combinations,
    shares: Shares, batch_size: int | None, chunk_size: int,
) -> Linearity:  # fmt: skip
    """Runs `_linearity` with checks of its arguments and its result."""
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
    """Compares both sides for all sets of members and of shares.

    Arrays of the result are `(layer, point, share, ...)`, the baseline `(layer, point, member,
    member)`.
    """
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
            # Shares of members are weights of models. One product mixes the parameters, another the
            # features.
            left = combined(weighted(share, members), batch)
            right = [weighted(share, x) for x in member_features]
            return jnp.stack([_compare(a, b) for a, b in zip(left, right, strict=True)])

        return sweep(side, shares, chunk_size), jnp.stack([_baseline(x) for x in member_features])

    def values(batch: PyTree) -> tuple[Array, Array]:
        # [point, share, layer, quantity, example], [point, layer, member, member, example]
        # One point after another: memory holds the features of all members at one point.
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
        # If both sides are 0, as in dead layers, the gap is 0 instead of 0 / 0.
        jnp.where(difference.value == 0, 0, jnp.sqrt(difference.value / right.value)),
        jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), baseline),
    )


def _flat(x: Array) -> Float[Array, "example unit"]:
    """Flattens the features of each example to one vector, in float32 or wider."""
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), x.dtype)
    return x.reshape(len(x), -1).astype(wide)


class _Features(NamedTuple):
    """Features as directions and lengths.

    Attributes:
      units: Unit vectors; 0 for zero vectors.
      sizes: The lengths of the vectors.
    """

    units: Float[Array, "... example unit"]
    sizes: Float[Array, "... example"]


def _polar(x: Array) -> _Features:
    sizes = jnp.sqrt(jnp.sum(x * x, -1))
    return _Features(x * _inverse(sizes)[..., None], sizes)


def _cosine(a: _Features, b: _Features) -> Float[Array, "... example"]:
    """Computes the cosine 1 - |u - v|^2 / 2 of unit vectors.

    For nearly equal vectors it is as accurate as their angle, while the product u . v would round.
    """
    one_is_zero = (a.sizes == 0) != (b.sizes == 0)
    return jnp.where(one_is_zero, 0, 1 - jnp.sum((a.units - b.units) ** 2, -1) / 2)


def _compare(a: Array, b: Array) -> Float[Array, "quantity example"]:
    """Returns each example's cosine, coefficient, and squares of the difference and of b."""
    left, right = _polar(a), _polar(b)
    cosine = _cosine(left, right)
    neither = (left.sizes == 0) & (right.sizes == 0)
    coefficient = jnp.where(neither, 1, cosine * left.sizes * _inverse(right.sizes))
    return jnp.stack([cosine, coefficient, jnp.sum((a - b) ** 2, -1), right.sizes**2])


def _baseline(x: Float[Array, "member example unit"]) -> Float[Array, "member member example"]:
    """Computes the cosines between the features of all pairs of members."""
    # One member against all others at a time, instead of all pairs at once.
    all_of_them = _polar(x)
    return lax.map(lambda member: _cosine(member, all_of_them), all_of_them)


def _inverse(x: Array) -> Array:
    """Computes 1 / x, with 0 for 0."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))
