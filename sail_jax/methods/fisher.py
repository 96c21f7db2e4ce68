"""Fisher merging: a mean of parameters, weighted by their Fisher information.

`fisher_diagonal` computes the weights from data. `fisher` merges with them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, PyTree

from sail_jax.checks import concrete, one_of, scalar
from sail_jax.merging.arithmetic import number
from sail_jax.merging.combining import transform
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import PerLeaf, Piece, kernel
from sail_jax.merging.task_vectors import as_given, in_float64, narrowed, too_wide
from sail_jax.methods.registry import method
from sail_jax.trees import leaf_paths

Likelihood = Literal["categorical", "gaussian"]


@method
def fisher(
    *, fishers: Sequence[PyTree], floor: float = 0.0, normalize_fishers: bool = False
) -> Merge:
    r"""Averages parameters, each weighted by its Fisher information (Fisher merging).

    .. math:: \theta = \frac{\sum_k w_k F_k \theta_k}{\sum_k w_k F_k}

    The formula holds for each entry. Where all :math:`F_k` are 0, the result is the mean with the
    weights :math:`w_k`. The weights must not be negative.

    Args:
      fishers: For each model one tree of Fisher diagonals, as from `fisher_diagonal`, with the
        paths and shapes of the model's floating leaves. Values are finite and at least 0.
      floor: The smallest value of F; smaller values are raised to it. With a floor of 1e-6, which
        is common elsewhere, every entry with only smaller Fishers becomes a plain mean.
      normalize_fishers: Whether each F_k is divided by its norm over the whole model. This prevents
        a model with large gradients from dominating everywhere.

    Returns:
      A merge of one or more models. A base is optional and only determines the output's dtypes.

    Raises:
      ValueError: For a negative or infinite `floor`, and for Fishers that are negative or not
        finite. When the merge is applied, if the Fishers' number, leaves or shapes differ from the
        models'.

    References:
      Matena and Raffel, Merging Models with Fisher-Weighted Averaging, 2022 (arXiv 2111.09832), Eq.
      4.

    >>> models, fishers = [{"a": 1.0}, {"a": 5.0}], [{"a": 3.0}, {"a": 1.0}]
    >>> fisher(fishers=fishers)(models), fisher(fishers=[{"a": 0.0}] * 2)(models)
    ({'a': Array(2., dtype=float32)}, {'a': Array(3., dtype=float32)})
    """
    scalar("floor", floor, lambda x: 0 <= x < math.inf, "a finite number >= 0")
    columns = [_fisher_leaves(f"fishers[{k}]", tree) for k, tree in enumerate(fishers)]
    if normalize_fishers:
        columns = [_unit(column) for column in columns]
    paths = dict.fromkeys(path for column in columns for path in column)
    by_path = {path: tuple(column.get(path) for column in columns) for path in paths}
    local = PerLeaf("fishers", by_path, complete=True)
    # The kernel requires whole leaves, because the Fishers are whole leaves.
    weighting = transform(kernel(_weigh, number(floor)), needs="tensor", local=local)
    return Merge(weighting, weighted_mean, normalize=True, base="unused", positive_weights=True)


def _weigh(floor: Array, piece: Piece, delta: Array, weight: Array) -> tuple[Array, Array]:
    """Multiplies the weights by the Fishers of one leaf, from `piece.local`.

    The mean that follows depends only on ratios between models. To prevent underflow, the F of an
    entry are divided by the largest F among unmasked models. Where the largest F is 0, the weights
    do not change.
    """
    values = piece.local
    if len(values) != len(delta):
        raise ValueError(f"fishers: expected one per model, {len(delta)}, got {len(values)}")
    for k, value in enumerate(values):
        if value is None or np.shape(value) != delta.shape[1:]:
            got = "none" if value is None else np.shape(value)
            raise ValueError(f"fishers[{k}]: expected shape {delta.shape[1:]}, got {got}")
    floor = jnp.asarray(floor, delta.dtype)
    F = jnp.stack([jnp.maximum(jnp.asarray(value, delta.dtype), floor) for value in values])
    # A masked model must not set the scale of the others, so its F counts as 0.
    F = jnp.where(weight != 0, F, 0)
    top = F.max(0)
    # The inner where keeps 0 / 0 and its gradient out of the discarded branch.
    return delta, weight * jnp.where(top > 0, F / jnp.where(top > 0, top, 1), 1)


def _check_positive(name: str, x: ArrayLike) -> None:
    """Checks that values are finite and at least 0. Traced values are not checked."""
    # Merges in float32 narrow the values.
    value = concrete(_positive(narrowed(x)))
    if value is not None and not value:
        raise ValueError(f"{name}: expected finite values >= 0{' that fit float32' * too_wide(x)}")


@jax.jit
def _positive(x: ArrayLike) -> Array:
    return (jnp.isfinite(x) & (jnp.asarray(x) >= 0)).all()


def _fisher_leaves(name: str, tree: PyTree) -> dict[str, Array]:
    """Checks a tree of Fishers; returns its leaves by path."""
    leaves = dict(zip(leaf_paths(tree), map(as_given, jax.tree.leaves(tree)), strict=True))
    for path, leaf in leaves.items():
        _check_positive(f"{name}, leaf {path!r}", leaf)
    return leaves


@in_float64("column")
def _unit(column: dict[str, Array]) -> dict[str, Array]:
    """Divides leaves by their joint norm, after their largest entry, against underflow."""
    wide = {p: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for p, x in column.items()}
    # `initial` makes the maximum of a leaf without entries 0 instead of an error.
    tops = [jnp.max(x, initial=0.0) for x in wide.values()]
    top = jnp.stack(tops).max() if tops else 1.0
    wide = {path: x / jnp.where(top > 0, top, 1) for path, x in wide.items()}
    square = sum(jnp.sum(x * x) for x in wide.values())
    return {p: x / jnp.sqrt(jnp.where(square > 0, square, 1)) for p, x in wide.items()}


@in_float64("params")
def fisher_diagonal(
    predict: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    inputs: PyTree,
    *,
    targets: PyTree | None = None,
    key: Array | None = None,
    samples: int = 1,
    likelihood: Likelihood = "categorical",
    batch_size: int = 8,
) -> PyTree:
    r"""Computes the diagonal of the Fisher information of a model on examples.

    .. math::

        F = \frac{1}{n} \sum_x
        \mathrm{E}_y \left( \frac{\partial \log p(y | x)}{\partial \theta} \right)^2

    If a model has several outputs per example (for instance positions of a sequence), log p is
    their sum. The distribution of y depends on the arguments:

    - By default y is drawn from the model. The expectation is exact and requires one backward pass
      for each output of an example.
    - With `key`, the expectation is estimated with `samples` draws for each example.
    - With `targets`, y is the label in the data. This gives the "empirical Fisher", a different
      matrix.

    Gradients are squared for each example separately. (Some implementations square the gradient
    summed over a batch. This is mostly the square of the mean gradient, not the Fisher.)

    Args:
      predict: `predict(params, inputs)` returns logits `[example, ..., class]` for "categorical",
        and means `[example, ...]` with unit variance for "gaussian". It is called with one example
        at a time.
      params: The model. Floating leaves are differentiated, in float32 or float64.
      inputs: Leaves `[n, ...]`, one entry for each of n >= 1 examples.
      targets: Class indices or values, `[n, ...]`. They cannot be combined with `key`.
      key: A PRNG key. The draws of example i depend on fold_in(key, i) and not on the batches.
      samples: Draws per example, used only with `key`.
      likelihood: The distribution p(y | x), "categorical" or "gaussian".
      batch_size: The number of examples with gradients in memory at once. It does not change the
        result.

    Returns:
      A tree like `params` with values >= 0 in float32 (float64 if a leaf is float64). Leaves
      that are not floating are None.

    Raises:
      ValueError: For an unknown likelihood, targets together with a key, or samples or a batch size
        below 1. For inputs of unequal or zero length, and outputs or targets with invalid shapes.

    >>> x = jnp.array([[1.0, 0.0], [3.0, 0.0]])
    >>> fisher_diagonal(lambda p, x: x @ p["w"], {"w": jnp.ones(2)}, x, likelihood="gaussian")
    {'w': Array([5., 0.], dtype=float32)}
    """
    one_of("likelihood", likelihood, Likelihood)
    if targets is not None and key is not None:
        raise ValueError("targets and key: expected at most one of them")
    if samples < 1 or batch_size < 1:
        raise ValueError(f"samples, batch_size: expected >= 1, got {samples}, {batch_size}")
    lengths = {np.shape(x)[:1] for x in jax.tree.leaves((inputs, targets))}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(f"inputs: expected leaves of one length >= 1, got {sorted(lengths)}")
    (n,) = lengths.pop()
    leaves, treedef = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    wide = [jnp.promote_types(leaf.dtype, jnp.float32) for leaf in leaves]
    # Only floating leaves are differentiated, in float32 or float64. Other leaves are passed on
    # unchanged.
    at = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Squares of bfloat16 gradients, added up over examples, would lose their small terms.
    theta = [leaves[i].astype(wide[i]) for i in at]

    def scatter(values: Sequence[Any], rest: Sequence[Any]) -> PyTree:
        places = dict(zip(at, values, strict=True))
        return treedef.unflatten(places.get(i, leaf) for i, leaf in enumerate(rest))

    def squares(i: Array) -> list[Array]:
        """Computes the squared gradients of example i, summed over its draws or outputs."""
        example, target = jax.tree.map(lambda x: jnp.asarray(x)[i], (inputs, targets))
        # `predict` takes batches. Each example is a batch of one, which separates the gradients.
        batch = jax.tree.map(lambda x: x[None], example)

        def output(theta: list[Array]) -> Array:
            out = predict(scatter(theta, leaves), batch)
            if out.shape[:1] != (1,) or (likelihood == "categorical" and out.ndim < 2):
                raise ValueError(
                    f"predict: expected outputs [example, ..., class], got {out.shape}"
                )
            return out[0].astype(jnp.promote_types(out.dtype, jnp.float32))

        # One forward pass. Each draw, label or column below costs one backward pass.
        out, pullback = jax.vjp(output, theta)
        draws = samples if key is not None else 1 if targets is not None else out.size

        def add(total: list[Array], j: Array) -> tuple[list[Array], None]:
            if key is not None:
                # Keys depend on the example and the draw, so the batch size does not change the
                # estimate.
                score = _drawn(out, jax.random.fold_in(jax.random.fold_in(key, i), j), likelihood)
            elif targets is not None:
                score = _observed(out, target, likelihood)
            else:
                score = _root(out, j, likelihood)
            return [t + g**2 for t, g in zip(total, *pullback(score), strict=True)], None

        total, _ = lax.scan(add, [jnp.zeros_like(x) for x in theta], jnp.arange(draws))
        return [t / samples for t in total] if key is not None else total

    def batch(total: list[Array], i: Array) -> tuple[list[Array], None]:
        # The array [batches, size] must be full. Places beyond n repeat the last example with
        # weight 0.
        new = jax.vmap(squares)(jnp.minimum(i, n - 1))
        real = (i < n).astype(jnp.float32)  # 0 for the repeated examples in the last batch
        return [t + jnp.tensordot(real, x, 1) for t, x in zip(total, new, strict=True)], None

    size = min(batch_size, n)
    places = jnp.arange(-(-n // size) * size).reshape(-1, size)
    total, _ = lax.scan(batch, [jnp.zeros_like(x) for x in theta], places)
    return scatter([t / n for t in total], [None] * len(leaves))


# The pullback maps these derivatives with respect to the output to gradients with respect to theta.
# The exact expectation uses E_y[g g^T] = sum_j r_j r_j^T, with the columns r_j of `_root`. The
# squared gradients of the columns add up to the expectation, without drawing y.


def _drawn(out: Array, key: Array, likelihood: str) -> Array:
    """Computes d log p(y | x) / d output for a y drawn from the model."""
    if likelihood == "gaussian":
        return jax.random.normal(key, out.shape, out.dtype)
    return _observed(out, jax.random.categorical(key, out), likelihood)


def _observed(out: Array, target: Array, likelihood: str) -> Array:
    """Computes d log p(y | x) / d output for the observed y."""
    expected = out.shape if likelihood == "gaussian" else out.shape[:-1]
    if target.shape != expected:
        raise ValueError(f"targets: expected shape {expected} per example, got {target.shape}")
    if likelihood == "gaussian":
        return target - out
    return jax.nn.one_hot(target, out.shape[-1], dtype=out.dtype) - jax.nn.softmax(out)


def _root(out: Array, j: Array, likelihood: str) -> Array:
    """Computes the j-th column of a root of the covariance of d log p(y | x) / d output."""
    unit = jax.nn.one_hot(j, out.size, dtype=out.dtype).reshape(out.shape)
    if likelihood == "gaussian":
        return unit
    p = jax.nn.softmax(out)  # diag(p) - p p^T = sum_c p_c (e_c - p)(e_c - p)^T
    # Entry j belongs to one position of a sequence. `unit.sum` is 1 there and 0 elsewhere, so the
    # columns of different positions do not mix.
    return jnp.sqrt(p.reshape(-1)[j]) * (unit - p * unit.sum(-1, keepdims=True))
