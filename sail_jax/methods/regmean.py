"""RegMean: each layer is the least-squares fit to what all models do on their own data."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax.checks import concrete, nearest
from sail_jax.merging.reductions import average
from sail_jax.merging.task_vectors import Count, TaskVectors, Weights, check_scalar, origin, tally
from sail_jax.methods import linear, merge
from sail_jax.methods.fisher import check_positive
from sail_jax.trees import leaf_paths

__all__ = ["Activations", "InputAxes", "gram_mean", "grams", "regmean", "regmean_plus_plus"]

Activations = Callable[[PyTree, PyTree], Mapping[str, Float[Array, "... in"]]]
InputAxes = Literal["first", "last"]


def regmean(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    grams: Sequence[Mapping[str, Float[Array, "in in"]]],
    weights: Weights = None,
    key: Array | None = None,
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> PyTree:
    """W = (sum_k w_k G_k)^-1 sum_k w_k G_k W_k (Jin et al. 2023); leaves without a Gram: the mean.

    This W minimises sum_k w_k E |x W - x W_k|^2 over the inputs x of model k, with G_k = E x x^T.

    grams: per model, {leaf path: G_k}, the same paths for all, as from `grams`. A kernel has its
    input axes first, [in..., out...] (Flax), or last, [out..., in...] (PyTorch): those whose sizes
    multiply to that of G_k.
    off_diagonal: what multiplies the entries of G_k off its diagonal; 1 leaves the problem above
    as it is, less is a regularisation that Jin et al. tune (around: 0.1 to 1).
    damping: every G_k counts as G_k + damping * mean eigenvalue of their mean * I. It draws W
    towards the weighted mean, exactly there along input features that are 0 in all data, where
    the formula above is singular. For off_diagonal = 1 and fewer data than features float32 needs
    about 1e-4.

    weights are not negative. No base is needed; one given only says the output's dtypes.
    ValueError names the leaf for Grams of unknown paths, other shapes or values that are not
    finite, and where the sum is not positive definite in floating point.

    >>> models, G = [{"w": jnp.eye(2)}, {"w": 3 * jnp.eye(2)}], jnp.diag(jnp.array([1.0, 0.0]))
    >>> W = regmean(models, grams=[{"w": 3 * G}, {"w": G}])["w"]
    >>> f"{W[0, 0]:.3f}, {W[1, 1]:.3f}"
    '1.500, 2.000'
    """
    like = next(iter(models or ()), None) if base is None else base
    count = gram_mean(grams, off_diagonal, damping, input_axes)
    return merge(models, origin(like), count=count, weights=weights, normalize=True)


def gram_mean(
    grams: Sequence[Mapping[str, Float[Array, "in in"]]],
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> Count:
    """The count behind `regmean`: a mean of votes with matrices for weights.

    It commutes with a change of base. Weights are one per model and leaf.
    """
    check_scalar("off_diagonal", off_diagonal, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    check_scalar("damping", damping, lambda x: 0 < x < math.inf, "a finite number > 0")
    if input_axes not in get_args(InputAxes):
        raise ValueError(f"input_axes: expected one of {get_args(InputAxes)}, got {input_axes!r}")

    def count(vectors: TaskVectors) -> PyTree:
        delta, treedef = jax.tree.flatten(vectors.delta)
        weight, paths = treedef.flatten_up_to(vectors.weight), leaf_paths(vectors.delta)
        known = _check_grams(grams, dict(zip(paths, delta, strict=True)), input_axes)
        means = treedef.flatten_up_to(average(vectors))

        def solve(path: str, votes: Array, w: Array, mean: Array) -> Array:
            check_positive("weights", w)
            if path not in known or not mean.size:
                return mean
            if w.size != w.shape[0]:
                raise ValueError(f"gram_mean, leaf {path!r}: expected one weight per model")
            G = jnp.stack([jnp.asarray(gram[path], votes.dtype) for gram in grams])
            new = _fit(votes, w.reshape(-1), G, mean, off_diagonal, damping, input_axes == "last")
            value = concrete(jnp.isfinite(new).all())
            if value is not None and not value:
                raise ValueError(
                    f"regmean, leaf {path!r}: the Grams do not add up to a positive definite "
                    f"matrix in {votes.dtype}; expected a larger damping than {damping}"
                )
            return new

        entries = zip(paths, delta, weight, means, strict=True)
        return treedef.unflatten(solve(*entry) for entry in entries)

    return count


@functools.partial(jax.jit, static_argnames="last")
def _fit(
    votes: Float[Array, "task ..."],
    w: Float[Array, "task"],
    G: Float[Array, "task in in"],
    mean: Float[Array, "..."],
    off_diagonal: float,
    damping: float,
    last: bool,
) -> Float[Array, "..."]:
    """mean + A^-1 sum_k w_k G_k (W_k - mean), A = sum_k w_k G_k + damping: identical votes stay."""
    tasks, n = G.shape[:2]

    def matrix(x: Array) -> Array:
        return x.reshape(-1, n).T if last else x.reshape(n, -1)

    G = jnp.where(jnp.eye(n, dtype=bool), G, off_diagonal * G)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    A = tally(w[:, None, None] * G)
    changes = [w[k] * product(G[k], matrix(votes[k] - mean)) for k in range(tasks)]
    change = functools.reduce(jnp.add, changes)
    size = jnp.trace(A) / n
    size = jnp.where(size > 0, size, 1)
    root = jax.scipy.linalg.cho_factor(A / size + damping * jnp.eye(n, dtype=A.dtype))
    change = jax.scipy.linalg.cho_solve(root, change / size)
    return mean + (change.T if last else change).reshape(mean.shape)


def _check_grams(
    grams: Sequence[Mapping[str, Array]], leaves: dict[str, Array], input_axes: str
) -> set[str]:
    tasks = next(iter(leaves.values())).shape[0] if leaves else len(grams)
    if len(grams) != tasks:
        raise ValueError(f"grams: expected one mapping per model, {tasks}, got {len(grams)}")
    for k, gram in enumerate(grams):
        if gram.keys() != grams[0].keys():
            odd = sorted(gram.keys() ^ grams[0].keys())[:5]
            raise ValueError(f"grams[{k}]: expected the paths of grams[0], differs in {odd}")
        for path, G in gram.items():
            where = f"grams[{k}], leaf {path!r}"
            if path not in leaves:
                raise ValueError(f"{where}: no such floating leaf{nearest(path, leaves)}")
            shape = leaves[path].shape[1:]
            axes = shape if input_axes == "first" else shape[::-1]
            sizes = {math.prod(axes[:i]) for i in range(len(axes) + 1)}
            n = np.shape(G)[0] if np.ndim(G) == 2 else 0
            if np.shape(G) != (n, n) or n not in sizes:
                raise ValueError(
                    f"{where}: expected a square matrix as large as the {input_axes} axes of "
                    f"{shape}, got {np.shape(G)}"
                )
            value = concrete(G)
            if value is not None and not (
                np.isfinite(value).all() and (value.diagonal() >= 0).all()
            ):
                raise ValueError(f"{where}: expected finite values and a diagonal >= 0")
    return set(grams[0]) if grams else set()


def grams(
    activations: Activations, params: PyTree, batches: Iterable[PyTree]
) -> dict[str, Float[Array, "in in"]]:
    """{leaf path: E x x^T} over all inputs x of that leaf in `batches`, summed in float32.

    activations(params, batch): {path of a kernel: its inputs [..., in]}; convolutions give their
    patches. ValueError if it names other paths for another batch, or gives no inputs at all.

    >>> grams(lambda params, x: {"w": x}, {}, [jnp.eye(2), jnp.ones((2, 2))])["w"].tolist()
    [[0.75, 0.5], [0.5, 0.75]]
    """
    return _grams(activations, params, batches, lambda path: True)


def _grams(
    activations: Activations,
    params: PyTree,
    batches: Iterable[PyTree],
    wanted: Callable[[str], bool],
) -> dict[str, Array]:
    total: dict[str, Array] = {}
    rows: dict[str, int] = {}
    i = None
    for i, batch in enumerate(batches):
        inputs = {path: x for path, x in activations(params, batch).items() if wanted(path)}
        if i and inputs.keys() != total.keys():
            odd = sorted(inputs.keys() ^ total.keys())[:5]
            raise ValueError(f"activations: batch {i} differs from batch 0 in the paths {odd}")
        for path, x in inputs.items():
            if x.ndim < 2:
                raise ValueError(f"activations, {path!r}: expected [..., in], got shape {x.shape}")
            total[path] = total.get(path, 0.0) + _second_moment(x)
            rows[path] = rows.get(path, 0) + math.prod(x.shape[:-1])
    empty = [path for path, count in rows.items() if not count]
    if empty or i is None:
        raise ValueError(f"batches: no inputs at all for {empty or 'any leaf'}")
    return {path: G / rows[path] for path, G in total.items()}


@jax.jit
def _second_moment(x: Float[Array, "... in"]) -> Float[Array, "in in"]:
    x = x.reshape(-1, x.shape[-1]).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)


def regmean_plus_plus(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    activations: Activations,
    batches: Sequence[Sequence[PyTree]],
    groups: Sequence[str | Sequence[str]],
    weights: Weights = None,
    key: Array | None = None,
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> PyTree:
    """RegMean++ (Nguyen et al. 2025): RegMean group by group, on what the merged model feeds it.

    activations: as in `grams`, called with parameters of the structure of the base (of the first
    model, without one). batches: per model, its data, gone through once per group.
    groups: in the order of the forward pass, leaf paths or glob patterns of them (`*` crosses "/").
    While a group's inputs are collected for model k, the groups before it are merged already, it
    and those behind are model k's, and leaves in no group are the weighted mean. Then its leaves
    that `activations` names are solved for as in `regmean`, its others are the mean.

    ValueError for patterns that match nothing, leaves in two groups, and groups without inputs.
    """
    like = next(iter(models or ()), None) if base is None else base
    mean = linear(models, base, weights=weights)
    if len(batches) != len(models):
        raise ValueError(f"batches: expected one per model, {len(models)}, got {len(batches)}")
    members = _members(groups, leaf_paths(like))
    merged = _named(mean)
    own = [_named(model) for model in models]
    settled = set(merged) - {path for group in members for path in group}
    for i, group in enumerate(members):
        moments = []
        for leaves, data in zip(own, batches, strict=True):
            mixed = [merged[path] if path in settled else leaves[path] for path in merged]
            params = jax.tree.unflatten(jax.tree.structure(like), mixed)
            moments.append(_grams(activations, params, data, lambda path: path in group))  # noqa: B023
            if not moments[-1]:
                raise ValueError(f"groups[{i}]: activations names none of its leaves {group[:5]}")
        merged |= regmean(
            [{path: leaves[path] for path in group} for leaves in own],
            {path: merged[path] for path in group},
            grams=moments,
            weights=weights,
            off_diagonal=off_diagonal,
            damping=damping,
            input_axes=input_axes,
        )
        settled |= set(group)
    return jax.tree.unflatten(jax.tree.structure(like), list(merged.values()))


def _named(tree: PyTree) -> dict[str, Array]:
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def _members(groups: Sequence[str | Sequence[str]], paths: Sequence[str]) -> list[list[str]]:
    members, owner = [], {}
    for i, group in enumerate(groups):
        patterns = [group] if isinstance(group, str) else list(group)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"groups[{i}]: {pattern!r} matches no leaf{nearest(pattern, paths)}"
                )
        found = [p for p in paths if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)]
        for path in found:
            if path in owner:
                raise ValueError(f"groups[{i}]: leaf {path!r} is in groups[{owner[path]}] already")
            owner[path] = i
        members.append(found)
    return members
