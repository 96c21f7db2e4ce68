"""Fisher merging: each model counts at an entry as much as its data determine that entry."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, PyTree

from sail_jax.checks import concrete
from sail_jax.merging.reductions import average
from sail_jax.merging.task_vectors import Rule, TaskVectors, Weights, check_scalar, origin
from sail_jax.methods import merge
from sail_jax.trees import leaf_paths

__all__ = ["Likelihood", "fisher", "fisher_diagonal", "precision"]

Likelihood = Literal["categorical", "gaussian"]


def fisher(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    fishers: Sequence[PyTree],
    weights: Weights = None,
    key: Array | None = None,
    floor: float = 0.0,
    normalize_fishers: bool = False,
) -> PyTree:
    """sum_k w_k F_k theta_k / sum_k w_k F_k per entry (Matena & Raffel 2022).

    fishers: one tree per model with the paths and shapes of its floating leaves, finite and not
    negative: diagonals of the Fisher information, as from `fisher_diagonal`. Where all are 0 the
    merge is the weighted mean. floor: what F is raised to at least; 1e-6, common elsewhere, makes
    a plain mean of every entry whose Fisher is smaller. normalize_fishers: divide each F_k by its
    norm over the whole model, so that a model with large gradients does not win everywhere.

    weights are not negative. No base is needed; one given only says the output's dtypes.

    >>> models, fishers = [{"a": 1.0}, {"a": 5.0}], [{"a": 3.0}, {"a": 1.0}]
    >>> fisher(models, fishers=fishers), fisher(models, fishers=[{"a": 0.0}] * 2)
    ({'a': Array(2., dtype=float32)}, {'a': Array(3., dtype=float32)})
    """
    like = next(iter(models or ()), None) if base is None else base
    rule = precision(fishers, floor, normalize_fishers)
    return merge(models, origin(like), rule=rule, count=average, weights=weights, normalize=True)


def precision(
    fishers: Sequence[PyTree], floor: float = 0.0, normalize_fishers: bool = False
) -> Rule:
    """The rule that multiplies the weight of model k by fishers[k], entry by entry.

    Only ratios between models matter to the mean that follows, so the F of an entry are divided by
    the largest among those who vote: nothing underflows, and where that is 0 the weights stay.
    ValueError for other leaves or shapes than those of the votes, and for values of F or weights
    that are negative or not finite.
    """
    check_scalar("floor", floor, lambda x: 0 <= x < math.inf, "a finite number >= 0")

    def rule(vectors: TaskVectors) -> TaskVectors:
        delta, treedef = jax.tree.flatten(vectors.delta)
        weight, paths = treedef.flatten_up_to(vectors.weight), leaf_paths(vectors.delta)
        tasks = delta[0].shape[0] if delta else len(fishers)
        if len(fishers) != tasks:
            raise ValueError(f"fishers: expected one per model, {tasks}, got {len(fishers)}")
        for votes in weight:
            check_positive("weights", votes)
        like = dict(zip(paths, delta, strict=True))
        columns = [_fisher_leaves(f"fishers[{k}]", tree, like) for k, tree in enumerate(fishers)]
        if normalize_fishers:
            columns = [_unit(column) for column in columns]
        shares = [_share(floor, *entry) for entry in zip(weight, *columns, strict=True)]
        return vectors._replace(weight=treedef.unflatten(shares))

    return rule


@jax.jit
def _share(floor: ArrayLike, w: Array, *values: Array) -> Array:
    F = jnp.where(w != 0, jnp.maximum(jnp.stack(values), floor), 0)
    top = F.max(0)
    return w * jnp.where(top > 0, F / jnp.where(top > 0, top, 1), 1)


def check_positive(name: str, x: Any) -> None:
    """ValueError unless the values of x, where they are known, are finite and not negative."""
    value = concrete(_positive(x))
    if value is not None and not value:
        raise ValueError(f"{name}: expected finite values >= 0")


@jax.jit
def _positive(x: Any) -> Array:
    return (jnp.isfinite(x) & (jnp.asarray(x) >= 0)).all()


def _fisher_leaves(name: str, tree: PyTree, like: dict[str, Array]) -> list[Array]:
    leaves = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    if leaves.keys() != like.keys():
        missing, extra = sorted(like.keys() - leaves.keys()), sorted(leaves.keys() - like.keys())
        raise ValueError(
            f"{name} has other leaves than the floating ones of the models: "
            f"missing {missing[:5]}, unexpected {extra[:5]}"
        )
    for path, leaf in leaves.items():
        if np.shape(leaf) != like[path].shape[1:]:
            raise ValueError(
                f"{name}, leaf {path!r}: expected shape {like[path].shape[1:]}, "
                f"got {np.shape(leaf)}"
            )
        check_positive(f"{name}, leaf {path!r}", leaf)
    return [jnp.asarray(leaves[path], delta.dtype) for path, delta in like.items()]


def _unit(column: list[Array]) -> list[Array]:
    """The leaves divided by the norm of all; by the largest entry first, for squares underflow."""
    top = jnp.stack([jnp.max(x, initial=0.0) for x in column]).max() if column else 1.0
    column = [x / jnp.where(top > 0, top, 1) for x in column]
    square = sum(jnp.sum(x * x) for x in column)
    return [x / jnp.sqrt(jnp.where(square > 0, square, 1)) for x in column]


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
    """The mean over examples of E (d log p(y | x) / d theta)^2, entry by entry, float32.

    predict(params, inputs): logits [example, ..., class] for "categorical", means [example, ...] of
    unit variance for "gaussian"; called on one example at a time. inputs: leaves [n, ...].

    y is drawn from the model, and the expectation over it is exact (one backward pass per output)
    unless `key` is given: then over `samples` draws, that of example i from fold_in(key, i).
    With `targets`, [n, ...] class indices or values, y is the data's: the "empirical Fisher", which
    is another matrix. Gradients are squared per example; `batch_size` of them are held at once and
    change nothing else. (Squaring gradients summed over a batch, as some implementations do, gives
    not this but mostly the square of the mean gradient.)

    Leaves that are not floating are None. ValueError for inputs of different or no length, for
    targets together with a key, and outputs that do not fit.

    >>> x = jnp.array([[1.0, 0.0], [3.0, 0.0]])
    >>> fisher_diagonal(lambda p, x: x @ p["w"], {"w": jnp.ones(2)}, x, likelihood="gaussian")
    {'w': Array([5., 0.], dtype=float32)}
    """
    if likelihood not in get_args(Likelihood):
        raise ValueError(f"likelihood: expected one of {get_args(Likelihood)}, got {likelihood!r}")
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
    at = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    theta = [leaves[i].astype(wide[i]) for i in at]

    def scatter(values: Sequence[Any], rest: Sequence[Any]) -> PyTree:
        places = dict(zip(at, values, strict=True))
        return treedef.unflatten(places.get(i, leaf) for i, leaf in enumerate(rest))

    def squares(i: Array) -> list[Array]:
        """Those of example i."""
        one, target = jax.tree.map(lambda x: jnp.asarray(x)[i], (inputs, targets))
        batch = jax.tree.map(lambda x: x[None], one)

        def output(theta: list[Array]) -> Array:
            out = predict(scatter(theta, leaves), batch)
            if out.shape[:1] != (1,) or (likelihood == "categorical" and out.ndim < 2):
                raise ValueError(
                    f"predict: expected outputs [example, ..., class], got {out.shape}"
                )
            return out[0].astype(jnp.promote_types(out.dtype, jnp.float32))

        out, pullback = jax.vjp(output, theta)
        draws = samples if key is not None else 1 if targets is not None else out.size

        def add(total: list[Array], j: Array) -> tuple[list[Array], None]:
            if key is not None:
                score = _drawn(out, jax.random.fold_in(jax.random.fold_in(key, i), j), likelihood)
            elif targets is not None:
                score = _observed(out, target, likelihood)
            else:
                score = _root(out, j, likelihood)
            return [t + g**2 for t, g in zip(total, *pullback(score), strict=True)], None

        total, _ = lax.scan(add, [jnp.zeros_like(x) for x in theta], jnp.arange(draws))
        return [t / samples for t in total] if key is not None else total

    def batch(total: list[Array], i: Array) -> tuple[list[Array], None]:
        new = jax.vmap(squares)(jnp.minimum(i, n - 1))
        real = (i < n).astype(jnp.float32)  # the last batch is filled up
        return [t + jnp.tensordot(real, x, 1) for t, x in zip(total, new, strict=True)], None

    size = min(batch_size, n)
    places = jnp.arange(-(-n // size) * size).reshape(-1, size)
    total, _ = lax.scan(batch, [jnp.zeros_like(x) for x in theta], places)
    return scatter([t / n for t in total], [None] * len(leaves))


# d log p(y | x) / d output: for a drawn y, for the observed one, and the j-th column of a root of
# its covariance, whose squares add up to the expectation over y


def _drawn(out: Array, key: Array, likelihood: str) -> Array:
    if likelihood == "gaussian":
        return jax.random.normal(key, out.shape, out.dtype)
    return _observed(out, jax.random.categorical(key, out), likelihood)


def _observed(out: Array, target: Array, likelihood: str) -> Array:
    expected = out.shape if likelihood == "gaussian" else out.shape[:-1]
    if target.shape != expected:
        raise ValueError(f"targets: expected shape {expected} per example, got {target.shape}")
    if likelihood == "gaussian":
        return target - out
    return jax.nn.one_hot(target, out.shape[-1], dtype=out.dtype) - jax.nn.softmax(out)


def _root(out: Array, j: Array, likelihood: str) -> Array:
    unit = jax.nn.one_hot(j, out.size, dtype=out.dtype).reshape(out.shape)
    if likelihood == "gaussian":
        return unit
    p = jax.nn.softmax(out)  # diag(p) - p p^T = sum_c p_c (e_c - p)(e_c - p)^T
    return jnp.sqrt(p.reshape(-1)[j]) * (unit - p * unit.sum(-1, keepdims=True))
