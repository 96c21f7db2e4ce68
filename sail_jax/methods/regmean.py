"""RegMean, in which each merged layer is the least-squares fit to the outputs of the models'
layers.

`grams` collects the input statistics for `regmean`. `regmean_plus_plus` does both, layer by layer.
"""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from sail_jax import linalg
from sail_jax.checks import concrete, nearest, one_of, scalar
from sail_jax.merging.arithmetic import automatic, number, task_sum, unit_of
from sail_jax.merging.combining import Reduction, reduce
from sail_jax.merging.merge import Merge
from sail_jax.merging.placement import in_parts, whole
from sail_jax.merging.reductions import mean_where_any
from sail_jax.merging.steps import PerLeaf, Piece, kernel
from sail_jax.merging.task_vectors import (
    Weights,
    as_given,
    in_float64,
    narrowed,
    too_wide,
)
from sail_jax.methods.registry import method
from sail_jax.methods.sparse import linear
from sail_jax.trees import leaf_paths

Activations = Callable[[PyTree, PyTree], Mapping[str, Float[Array, "... in"]]]
InputAxes = Literal["first", "last"]


@method
def regmean(
    *,
    grams: Sequence[Mapping[str, Float[Array, "in in"]]],
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> Merge:
    r"""Fits each kernel to the outputs of all models' kernels on their own inputs (RegMean).

    With the Gram matrices :math:`G_k = \mathrm{E} \, x x^T` over the inputs x of model k, each
    kernel becomes

    .. math:: W = \Big( \sum_k w_k G_k \Big)^{-1} \sum_k w_k G_k W_k

    This W minimises :math:`\sum_k w_k \mathrm{E} |x W - x W_k|^2`. Leaves without a Gram matrix
    become the weighted mean. The weights must not be negative.

    Args:
      grams: For each model {leaf path: G_k}, as from `grams`, with the same paths for all models.
        The size of G_k is the product of the sizes of the kernel's input axes.
      off_diagonal: The factor on the off-diagonal entries of G_k, in [0, 1]. 1 solves the problem
        above: for least squares it is training on the pooled data. Smaller values regularise, and
        so does the default; Jin et al. tune them from about 0.1 to 1.
      damping: A number > 0. Every G_k counts as G_k + damping * (mean eigenvalue of their mean) *
        I, which draws W towards the weighted mean. Along input features that are 0 in all data the
        formula above is singular, and W is exactly that mean. With off_diagonal = 1 and fewer
        samples than features, float32 requires about 1e-4.
      input_axes: The position of a kernel's input axes: "first" for [in..., out...] (Flax), "last"
        for [out..., in...] (PyTorch).

    Returns:
      A merge of one or more models. A base is optional and only determines the output's dtypes.

    Raises:
      ValueError: For an invalid `off_diagonal`, `damping` or `input_axes`, and for Grams that are
        not finite, not square, or differ in their paths. When the merge is applied, for unknown
        paths, sizes that do not match a leaf, and Grams with a sum that is not positive definite.

    References:
      Jin et al., Dataless Knowledge Fusion, 2023 (arXiv 2212.09849), Eq. 2.

    >>> models, G = [{"w": jnp.eye(2)}, {"w": 3 * jnp.eye(2)}], jnp.diag(jnp.array([1.0, 0.0]))
    >>> W = regmean(grams=[{"w": 3 * G}, {"w": G}])(models)["w"]
    >>> f"{W[0, 0]:.3f}, {W[1, 1]:.3f}"
    '1.500, 2.000'
    """
    reduction = gram_mean(grams, off_diagonal, damping, input_axes)
    remedy = (
        "the Grams may not add up to a positive definite matrix: expected a larger damping than "
        f"{damping}"
    )
    return Merge(
        reduction=reduction, normalize=True, base="unused", positive_weights=True, remedy=remedy
    )


def gram_mean(
    grams: Sequence[Mapping[str, Float[Array, "in in"]]],
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> Reduction:
    """Makes the reduction of `regmean`, a mean of task vectors with matrices as weights.

    The merge does not depend on the base of the task vectors. Weights are one number per model and
    leaf, at least 0.

    Args:
      grams: For each model {leaf path: Gram matrix}; see `regmean`.
      off_diagonal: The factor on the off-diagonal entries of the Grams; see `regmean`.
      damping: The strength of the pull towards the weighted mean; see `regmean`.
      input_axes: The position of a kernel's input axes; see `regmean`.

    Returns:
      A reduction of task vectors.

    Raises:
      ValueError: For numbers outside their ranges, Grams that are not finite or not square, and
        paths that differ between models. When the reduction is applied, for unknown paths, sizes
        that do not match a leaf, and weights that differ between entries.
    """
    scalar("off_diagonal", off_diagonal, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    scalar("damping", damping, lambda x: 0 < x < math.inf, "a finite number > 0")
    one_of("input_axes", input_axes, InputAxes)
    for k, gram in enumerate(grams):
        if gram.keys() != grams[0].keys():
            odd = sorted(gram.keys() ^ grams[0].keys())[:5]
            raise ValueError(f"grams[{k}]: expected the paths of grams[0], differs in {odd}")
        for path, G in gram.items():
            _check_gram(f"grams[{k}], leaf {path!r}", G)
    paths = grams[0] if grams else {}
    by_path = {path: tuple(as_given(gram[path]) for gram in grams) for path in paths}
    fit = kernel(_gram_mean, number(off_diagonal), number(damping), last=input_axes == "last")
    return reduce(fit, needs="tensor", local=PerLeaf("grams", by_path))


def _check_gram(where: str, G: Array) -> None:
    """Checks that a Gram matrix is square. If it is not traced, it must be finite with a diagonal
    >= 0.
    """
    if np.ndim(G) != 2 or len(set(np.shape(G))) != 1:
        raise ValueError(f"{where}: expected a square matrix, got {np.shape(G)}")
    value = concrete(G)
    # Merges in float32 narrow the values.
    fits = value is None or (np.isfinite(narrowed(value)).all() and (value.diagonal() >= 0).all())
    if not fits:
        within = " that fit float32" * too_wide(value)
        raise ValueError(f"{where}: expected finite values{within} and a diagonal >= 0")


def _gram_mean(
    off_diagonal: Array, damping: Array, piece: Piece, delta: Array, weight: Array, *, last: bool
) -> Array:
    """Fits one leaf, or computes its weighted mean if it has no Gram matrices."""
    mean, grams = mean_where_any(delta, weight), piece.local
    if grams is None:
        return mean
    if len(grams) != len(delta):
        raise ValueError(f"grams: expected one mapping per model, {len(delta)}, got {len(grams)}")
    if weight.size != len(delta):
        raise ValueError("gram_mean: expected one weight per model")
    axes = delta.shape[:0:-1] if last else delta.shape[1:]
    if len(grams[0]) not in {math.prod(axes[:i]) for i in range(len(axes) + 1)}:
        raise ValueError(
            f"grams: expected a square matrix as large as the {'last' if last else 'first'} axes "
            f"of {delta.shape[1:]}, got {grams[0].shape}"
        )
    G = jnp.stack([gram.astype(delta.dtype) for gram in grams])
    off_diagonal, damping = (jnp.asarray(x, delta.dtype) for x in (off_diagonal, damping))
    # Only ratios of Grams matter. At this scale products with deltas do not underflow. If all Grams
    # are 0 they stay unscaled, because 1 / 2^-126 would make gradients infinite.
    G = G * jnp.where((G != 0).any(), 1 / unit_of(G), 1)
    fit = automatic(functools.partial(_fit, last=last), mean)
    return fit(delta, weight.reshape(-1), G, mean, off_diagonal, damping)


def _fit(
    delta: Float[Array, "task ..."],
    w: Float[Array, "task"],
    G: Float[Array, "task in in"],
    mean: Float[Array, "..."],
    off_diagonal: Array,
    damping: Array,
    *,
    last: bool,
) -> Float[Array, "..."]:
    """Computes mean + A^-1 sum_k w_k G_k (W_k - mean) with A = sum_k w_k G_k + damping.

    Because it solves for the difference from the mean, copies of one model stay exactly equal.
    """
    tasks, n = G.shape[:2]

    def matrix(x: Array) -> Array:
        # Kernels of several axes, [in..., out...] or PyTorch's [out..., in...], as matrices [in,
        # out].
        return x.reshape(-1, n).T if last else x.reshape(n, -1)

    G = whole(G)
    # RegMean's shrinkage: alpha G + (1 - alpha) diag(G), with alpha = `off_diagonal`.
    G = jnp.where(jnp.eye(n, dtype=bool), G, off_diagonal * G)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    # Shapes: G [task, in, in], A [in, in], each change [in, out].
    A = task_sum(w[:, None, None] * G)
    moved = [in_parts(matrix(delta[k] - mean), -1) for k in range(tasks)]
    changes = [w[k] * product(G[k], moved[k]) for k in range(tasks)]
    change = functools.reduce(jnp.add, changes)
    # The mean eigenvalue, which `damping` multiplies; 1 if all inputs are 0.
    size = jnp.trace(A) / n
    size = jnp.where(size > 0, size, 1)
    # With Grams of real inputs, A + damping is symmetric and positive definite. Otherwise Cholesky
    # returns NaN, and the merge raises an error with the text of `remedy`.
    root = linalg.cholesky(A / size + damping * jnp.eye(n, dtype=A.dtype))
    change = linalg.cho_solve(root, whole(change / size))
    return mean + (change.T if last else change).reshape(mean.shape)


def grams(
    activations: Activations, params: PyTree, batches: Iterable[PyTree]
) -> dict[str, Float[Array, "in in"]]:
    """Collects the Gram matrices of the inputs of each kernel over batches of data.

    Args:
      activations: `activations(params, batch)` returns {path of a kernel: its inputs [..., in]}.
        The inputs of a convolution are its patches.
      params: The model.
      batches: The data, read once.

    Returns:
      {leaf path: mean of x x^T over all inputs x of that leaf}, each `[in, in]`. Sums are in
      float32 (float64 for float64 inputs).

    Raises:
      ValueError: If paths differ between batches, inputs have fewer than two axes, or all inputs
        are empty.

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
    """Computes `grams`, restricted to the wanted paths."""
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
            # Batches may differ in size, so sums and counts are divided only at the end.
            rows[path] = rows.get(path, 0) + math.prod(x.shape[:-1])
    empty = [path for path, count in rows.items() if not count]
    if empty or i is None:
        raise ValueError(
            f"batches: expected at least one input for {empty or 'any leaf'}, got none"
        )
    return {path: G / rows[path] for path, G in total.items()}


@in_float64("x")
@jax.jit
def _second_moment(x: Float[Array, "... in"]) -> Float[Array, "in in"]:
    """Computes the sum of x x^T over the rows of x."""
    x = x.reshape(-1, x.shape[-1]).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)


@in_float64("models", "base")
def regmean_plus_plus(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    activations: Activations,
    batches: Sequence[Sequence[PyTree]],
    groups: Sequence[str | Sequence[str]],
    weights: Weights = None,
    off_diagonal: float = 0.9,
    damping: float = 1e-5,
    input_axes: InputAxes = "first",
) -> PyTree:
    """Applies RegMean layer by layer, on inputs from the merged earlier layers (RegMean++).

    The groups are merged one after another. The inputs of a group are collected with a mixed
    model: earlier groups are already merged, this group and later groups are model k's, and leaves
    outside all groups are the weighted mean. Then the leaves of the group that `activations`
    returns are solved for as in `regmean`. The group's other leaves become the mean.

    Args:
      models: M pytrees of the same leaf paths and shapes.
      base: Optional. It only determines the output's structure and dtypes.
      activations: The inputs of each kernel, as in `grams`. It is called with parameters in the
        structure of the base (of the first model, without a base).
      batches: For each model its data, read once for each group.
      groups: Leaf paths, or glob patterns of them in which `*` crosses "/", in the order of the
        forward pass. A group is one string or a sequence of strings.
      weights: One per model, at least 0; 1 by default.
      off_diagonal: The factor on the off-diagonal entries of the Grams; see `regmean`.
      damping: The strength of the pull towards the mean; see `regmean`.
      input_axes: The position of a kernel's input axes; see `regmean`.

    Returns:
      The merged model, with the structure and dtypes of the base (of the first model, without a
      base).

    Raises:
      ValueError: Unless `batches` has one entry per model, each pattern matches a leaf, each leaf
        is in one group at most, and each group gets inputs. As in `regmean`.

    References:
      Nguyen et al., RegMean++, 2025 (arXiv 2508.03121).

    >>> models = [{"a": jnp.eye(2), "b": jnp.eye(2)}, {"a": 3 * jnp.eye(2), "b": jnp.eye(2)}]
    >>> inputs = lambda p, x: {"a": x, "b": x @ p["a"]}
    >>> data = [[jnp.eye(2)]] * 2
    >>> merged = regmean_plus_plus(models, activations=inputs, batches=data, groups=["a", "b"])
    >>> merged["a"].round(3).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    like = next(iter(models or ()), None) if base is None else base
    mean = linear()(models, base, weights=weights)
    if len(batches) != len(models):
        raise ValueError(f"batches: expected one per model, {len(models)}, got {len(batches)}")
    members = _members(groups, leaf_paths(like))
    merged = _named(mean)
    own = [_named(model) for model in models]
    resolved = set(merged) - {path for group in members for path in group}
    for i, group in enumerate(members):
        moments = []
        for leaves, data in zip(own, batches, strict=True):
            # Model k, with the groups before this one already merged.
            mixed = [merged[path] if path in resolved else leaves[path] for path in merged]
            params = jax.tree.unflatten(jax.tree.structure(like), mixed)
            moments.append(_grams(activations, params, data, lambda path: path in group))  # noqa: B023
            if not moments[-1]:
                raise ValueError(
                    f"groups[{i}]: activations returned none of its leaves {group[:5]}"
                )
        fit = regmean(
            grams=moments, off_diagonal=off_diagonal, damping=damping, input_axes=input_axes
        )
        parts = [{path: leaves[path] for path in group} for leaves in own]
        merged |= fit(parts, {path: merged[path] for path in group}, weights=weights)
        # The group counts as merged only now. Its inputs were collected with the model's own
        # leaves.
        resolved |= set(group)
    return jax.tree.unflatten(jax.tree.structure(like), list(merged.values()))


def _named(tree: PyTree) -> dict[str, Array]:
    """Returns the leaves of a tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def _members(groups: Sequence[str | Sequence[str]], paths: Sequence[str]) -> list[list[str]]:
    """Checks and returns the leaf paths of each group."""
    members, owner = [], {}
    for i, group in enumerate(groups):
        patterns = [group] if isinstance(group, str) else list(group)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"groups[{i}]: {pattern!r} matches no leaf{nearest(pattern, paths)}"
                )
        matches = [p for p in paths if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)]
        for path in matches:
            if path in owner:
                raise ValueError(f"groups[{i}]: leaf {path!r} is in groups[{owner[path]}] already")
            owner[path] = i
        members.append(matches)
    return members
