"""Fisher merging: a mean of parameters, weighted by how strongly each model's data determine them.

`fisher_diagonal` computes the weights from data, `fisher` merges with them.
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
    """Averages parameters, each weighted by its Fisher information (Fisher merging).

    The result is sum_k w_k F_k theta_k / sum_k w_k F_k, entry by entry. Where all F_k are 0 it is
    the mean with the weights w_k. The weights may not be negative.

    Args:
      fishers: For each model one tree of Fisher diagonals, as from `fisher_diagonal`, with the
        paths and shapes of the model's floating leaves. Values are finite and not negative.
      floor: The least value that an F may have; smaller ones are raised to it. A floor of 1e-6,
        common elsewhere, makes a plain mean of every entry whose Fishers are all smaller.
      normalize_fishers: Whether each F_k is divided by its norm over the whole model, so that a
        model with large gradients does not dominate everywhere.

    Returns:
      A merge of one or more models. It needs no base; one given only decides the output's dtypes.

    Raises:
      ValueError: For a negative or infinite `floor`, and for Fishers that are negative or not
        finite; when the merge is applied, for another number of trees, or other leaves or shapes,
        than the models have.

    References:
      Matena and Raffel, Merging Models with Fisher-Weighted Averaging, 2022 (arXiv 2111.09832),
      Eq. 4.

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
    # A leaf is seen whole, as its Fishers are.
    weighting = transform(kernel(_weigh, number(floor)), needs="tensor", local=local)
    return Merge(weighting, weighted_mean, normalize=True, base="unused", positive_weights=True)


def _weigh(floor: Array, piece: Piece, delta: Array, weight: Array) -> tuple[Array, Array]:
    """Multiplies the weights by the Fishers of one leaf, which `piece.local` holds.

    The mean that follows depends only on ratios between models. So the F of an entry are divided by
    the largest among the models that are not masked. Then nothing underflows. Where the largest is
    0, the weights stay as they are.
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
    # A masked model must not set the scale of the others: it takes no part in the largest F.
    F = jnp.where(weight != 0, F, 0)
    top = F.max(0)
    # The inner where keeps 0 / 0, and its gradient, out of the branch that is discarded.
    return delta, weight * jnp.where(top > 0, F / jnp.where(top > 0, top, 1), 1)


def _check_positive(name: str, x: ArrayLike) -> None:
    """Checks that values are finite and not negative; those that are traced are taken on trust."""
    # Merges of float32 narrow them.
    value = concrete(_positive(narrowed(x)))
    if value is not None and not value:
        raise ValueError(f"{name}: expected finite values >= 0{' that fit float32' * too_wide(x)}")


@jax.jit
def _positive(x: ArrayLike) -> Array:
    return (jnp.isfinite(x) & (jnp.asarray(x) >= 0)).all()


def _fisher_leaves(name: str, tree: PyTree) -> dict[str, Array]:
    """The leaves of a tree of Fishers by path, checked."""
    leaves = dict(zip(leaf_paths(tree), map(as_given, jax.tree.leaves(tree)), strict=True))
    for path, leaf in leaves.items():
        _check_positive(f"{name}, leaf {path!r}", leaf)
    return leaves


@in_float64("column")
def _unit(column: dict[str, Array]) -> dict[str, Array]:
    """The leaves over the norm of all; over the largest entry first, for squares underflow."""
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
    """Computes the diagonal of the Fisher information of a model on examples.

    Entry by entry this is the mean over the examples x of E_y (d log p(y | x) / d theta)^2. Where a
    model has several outputs per example (positions of a sequence, say), log p sums over them.

    Which y are meant:

    - By default y is drawn from the model, and the expectation over it is computed exactly, with
      one backward pass for each output of an example.
    - With `key` the expectation is estimated with `samples` draws for each example.
    - With `targets` y is the label in the data. That is the "empirical Fisher", another matrix.

    Gradients are squared for each example by itself. (Some implementations square the gradient
    summed over a batch. That is mostly the square of the mean gradient, not the Fisher.)

    Args:
      predict: `predict(params, inputs)` gives logits `[example, ..., class]` for "categorical",
        means `[example, ...]` of unit variance for "gaussian". It is called with one example at a
        time.
      params: The model. Floating leaves are differentiated, in float32 at least.
      inputs: Leaves `[n, ...]`, one entry for each of n >= 1 examples.
      targets: Class indices or values, `[n, ...]`; not together with `key`.
      key: A PRNG key. The draws of example i follow from fold_in(key, i), whatever the batches.
      samples: Draws per example; only counts with `key`.
      likelihood: The distribution p(y | x), "categorical" or "gaussian".
      batch_size: Examples whose gradients are held in memory at once. It changes nothing else.

    Returns:
      A tree like `params`, not negative, in float32 (float64 where a leaf has it). Leaves that are
      not floating are None.

    Raises:
      ValueError: For another likelihood, targets together with a key, samples or a batch size below
        1, inputs of different or no length, and outputs or targets of shapes that do not fit.

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
    # Only floating leaves are differentiated, in float32 at least; the others are passed on as they
    # are.
    at = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Squares of bfloat16 gradients, added up over examples, would lose their small terms.
    theta = [leaves[i].astype(wide[i]) for i in at]

    def scatter(values: Sequence[Any], rest: Sequence[Any]) -> PyTree:
        places = dict(zip(at, values, strict=True))
        return treedef.unflatten(places.get(i, leaf) for i, leaf in enumerate(rest))

    def squares(i: Array) -> list[Array]:
        """The squared gradients of example i, added up over its draws or outputs."""
        example, target = jax.tree.map(lambda x: jnp.asarray(x)[i], (inputs, targets))
        # `predict` takes batches: each example is a batch of one, so that its gradient is its own.
        batch = jax.tree.map(lambda x: x[None], example)

        def output(theta: list[Array]) -> Array:
            out = predict(scatter(theta, leaves), batch)
            if out.shape[:1] != (1,) or (likelihood == "categorical" and out.ndim < 2):
                raise ValueError(
                    f"predict: expected outputs [example, ..., class], got {out.shape}"
                )
            return out[0].astype(jnp.promote_types(out.dtype, jnp.float32))

        # One forward pass; each draw, label or column below costs one backward pass through it.
        out, pullback = jax.vjp(output, theta)
        draws = samples if key is not None else 1 if targets is not None else out.size

        def add(total: list[Array], j: Array) -> tuple[list[Array], None]:
            if key is not None:
                # Keys follow from the example and the draw, so the batch size does not change the
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
        # The shapes [batches, size] have to be full: places beyond n repeat the last example with
        # weight 0.
        new = jax.vmap(squares)(jnp.minimum(i, n - 1))
        real = (i < n).astype(jnp.float32)  # the last batch is filled up with repeated examples
        return [t + jnp.tensordot(real, x, 1) for t, x in zip(total, new, strict=True)], None

    size = min(batch_size, n)
    places = jnp.arange(-(-n // size) * size).reshape(-1, size)
    total, _ = lax.scan(batch, [jnp.zeros_like(x) for x in theta], places)
    return scatter([t / n for t in total], [None] * len(leaves))


# The pullback turns these derivatives by the output into gradients by theta. For the exact
# expectation E_y[g g^T] = sum_j r_j r_j^T is used, with the columns r_j of `_root`: their squared
# gradients add up to the expectation, so that no y has to be drawn.


def _drawn(out: Array, key: Array, likelihood: str) -> Array:
    """d log p(y | x) / d output for a y that is drawn from the model."""
    if likelihood == "gaussian":
        return jax.random.normal(key, out.shape, out.dtype)
    return _observed(out, jax.random.categorical(key, out), likelihood)


def _observed(out: Array, target: Array, likelihood: str) -> Array:
    """d log p(y | x) / d output for the observed y."""
    expected = out.shape if likelihood == "gaussian" else out.shape[:-1]
    if target.shape != expected:
        raise ValueError(f"targets: expected shape {expected} per example, got {target.shape}")
    if likelihood == "gaussian":
        return target - out
    return jax.nn.one_hot(target, out.shape[-1], dtype=out.dtype) - jax.nn.softmax(out)


def _root(out: Array, j: Array, likelihood: str) -> Array:
    """The j-th column of a root of the covariance of d log p(y | x) / d output."""
    unit = jax.nn.one_hot(j, out.size, dtype=out.dtype).reshape(out.shape)
    if likelihood == "gaussian":
        return unit
    p = jax.nn.softmax(out)  # diag(p) - p p^T = sum_c p_c (e_c - p)(e_c - p)^T
    # Entry j belongs to one position of a sequence only: `unit.sum` is 1 there and 0 elsewhere, so
    # the columns of different positions do not mix.
    return jnp.sqrt(p.reshape(-1)[j]) * (unit - p * unit.sum(-1, keepdims=True))
