"""Makers for a "stack" space (the layers of a network), and conversions between listed and stacked
layers.

Changing the number of layers does not preserve the function in general. Adding layers can preserve
it if `overwrite` then makes the new layers do nothing: it zeroes the weights that write their
output (LLaMA-Pro), or makes them identities (Net2DeeperNet).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax import linalg
from sail_jax.basis.axes import path_pattern
from sail_jax.basis.families import Family
from sail_jax.basis.listed import numbered
from sail_jax.basis.maps import SpaceMap
from sail_jax.checks import as_array, concrete, nearest, one_of
from sail_jax.growth.basic import duplicate
from sail_jax.trees import leaf_paths, path_str

STACK = "stack"


Order = Callable[[int, int], np.ndarray]
"""A function of the old and the new number of layers. It returns the old layer that each new layer
repeats, or coefficients of shape (new, old), the share of each old layer in each new layer."""

ORDERS: dict[str, Order] = {}
"""The orders for repeating layers, by the names of their functions."""


def order(repeats: Order) -> Order:
    """Registers an order under its function's name, for `deepen` and similar functions.

    Args:
      repeats: A function of the old and the new number of layers. It returns an old layer for each
        new layer, as integers in range(old), or coefficients; see `Order`.

    Returns:
      The function itself, so `order` works as a decorator.
    """
    ORDERS[repeats.__name__] = repeats
    return repeats


@order
def stack(old: int, new: int) -> np.ndarray:
    """Repeats the whole stack: layer k is layer `k % old` (StackBERT, G_stack)."""
    return np.arange(new) % old


@order
def stack_top(old: int, new: int) -> np.ndarray:
    """Repeats the whole stack as often as it fits, then its topmost layers (bert2BERT)."""
    layer, end = np.arange(new), new - new % old
    return np.where(layer < end, layer % old, layer - end + old - new % old)


@order
def interpolate(old: int, new: int) -> np.ndarray:
    """Repeats each layer in place, as evenly as possible: layer k is `k * old // new`."""
    return np.arange(new) * old // new


@order
def mean(old: int, new: int) -> np.ndarray:
    """Averages neighbours: layer k is the mean of the layers in its share of the old depth.

    The share is the interval from `k * old / new` to `(k + 1) * old / new`. An old layer is
    weighted by its overlap with this interval. With half as many layers, each is the mean of two.
    With a multiple, each layer is repeated in place.

    >>> mean(3, 2).round(3).tolist()
    [[0.667, 0.333, 0.0], [0.0, 0.333, 0.667]]
    """
    # In units of 1 / new, an old layer has length new and a new layer length old. All ends are then
    # integers.
    starts, of = np.arange(new)[:, None] * old, np.arange(old) * new
    shared = np.minimum(starts + old, of + new) - np.maximum(starts, of)
    return np.maximum(shared, 0) / old


def deepen(
    old: int,
    new: int,
    how: str | Order = "stack",
    *,
    matrix: Float[ArrayLike, "new old"] | None = None,
) -> SpaceMap:
    r"""Makes `new` layers from `old` layers for a "stack" space.

    With an order of layers, every new layer repeats an old layer. SELECTION. With coefficients D
    (from "mean" or `matrix`), each new layer is a mixture. LINEAR.

    .. math:: \tilde\theta_k = \sum_i D_{ki} \, \theta_i

    In general the function is not preserved. `certificate` measures the change of outputs.

    Args:
      old: The number of layers.
      new: The number of layers after the change.
      how: An order, or the name of one in `ORDERS`: "stack", "stack_top", "interpolate" or "mean".
      matrix: Coefficients of shape (new, old) with rows that sum to one (SAIL's depth
        transformation, LiGO). `read` is then its pseudo-inverse. It replaces `how`.

    Returns:
      The map of `old` layers to `new` layers.

    Raises:
      ValueError: If a number of layers is below 1, or `how` is unknown. If `matrix` has another
        shape, or rows that do not sum to one (not checked under tracing).

    References:
      Gong et al., Efficient Training of BERT by Progressively Stacking, 2019.
      Du et al., Stacking Your Transformers, 2024 (arXiv 2405.15319).
      Chen et al., bert2BERT, 2022 (arXiv 2110.07143).
      Structured-Initialization Learning (SAIL), eq. (9) and App. F.2.
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).

    >>> [deepen(3, 5, how).index.tolist() for how in ("stack", "stack_top", "interpolate")]
    [[0, 1, 2, 0, 1], [0, 1, 2, 1, 2], [0, 0, 1, 1, 2]]
    >>> deepen(3, 6, lambda old, new: np.arange(new)[::-1] % old).index.tolist()
    [2, 1, 0, 2, 1, 0]
    >>> deepen(4, 2, "mean").write.tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    if matrix is None:
        if min(old, new) < 1:
            raise ValueError(f"layers must be 1 or more, got old={old}, new={new}")
        if not callable(how):
            one_of("how", how, ORDERS)
            how = ORDERS[how]
        layers = how(old, new)
        if np.ndim(layers) < 2:
            return duplicate(layers, old, Family.SELECTION)
        matrix = layers
    D = as_array(matrix)
    if D.shape != (new, old):
        raise ValueError(f"matrix must have shape {(new, old)}, got {D.shape}")
    values = concrete(D)
    # Four standard deviations of the rounding of a sum of `old` terms with independent errors of
    # eps.
    tolerance = 4 * old**0.5 * float(jnp.finfo(jnp.result_type(D, float)).eps)
    if values is not None:
        sums = values.astype(float).sum(axis=1)
        if not np.all(np.abs(sums - 1) <= tolerance * (1 + np.abs(values).sum(axis=1))):
            raise ValueError(f"the rows of matrix must sum to one, got {sums}")
    return SpaceMap(D, linalg.pinv(D))


def mix_layers(logits: Float[ArrayLike, "new old"]) -> SpaceMap:
    r"""Makes each new layer a weighted mean of all old layers, with softmax weights. LINEAR.

    .. math:: \tilde\theta_k = \sum_i \operatorname{softmax}(z_k)_i \, \theta_i

    The function is differentiable in the logits z, so they can be learned.

    Args:
      logits: The logits z, one row per new layer, of shape (new, old).

    Returns:
      The map of `old` layers to `new` layers.

    Raises:
      ValueError: If `logits` is not a matrix.

    References:
      Structured-Initialization Learning (SAIL), App. F.2.

    >>> mix_layers(jnp.array([[0.0, 0.0]])).write.tolist()
    [[0.5, 0.5]]
    """
    logits = jnp.asarray(logits, float)
    if logits.ndim != 2:
        raise ValueError(f"logits must be a matrix [new, old], got shape {logits.shape}")
    new, old = logits.shape
    return deepen(old, new, matrix=jax.nn.softmax(logits, axis=-1))


def mixing_logits(
    old: int, new: int, how: str | Order | None = None, sharpness: float = 4.0
) -> Float[Array, "new old"]:
    """Computes logits for `mix_layers` that are close to repeating or averaging layers.

    If a new layer repeats an old layer, this layer has the logit `sharpness` and the others have 0.
    If it is a mean, the weights of the softmax are nearly proportional to those of the mean.

    Args:
      old: The number of layers.
      new: The number of layers after.
      how: As for `deepen`; None for "interpolate", or for "mean" if there are fewer layers.
      sharpness: The logit of the layer with the largest share.

    Returns:
      The logits.

    Raises:
      ValueError: As `deepen`.

    >>> mixing_logits(4, 2).tolist()
    [[4.0, 4.0, 0.0, 0.0], [0.0, 0.0, 4.0, 4.0]]
    """
    shares = deepen(old, new, how or ("interpolate" if new >= old else "mean")).dense().write
    largest = jnp.asarray(shares, float) / jnp.max(jnp.asarray(shares), axis=1, keepdims=True)
    # exp(logit) is 1 for layers with weight 0, exp(sharpness) for the largest weight, and linear in
    # between.
    return jnp.logaddexp(jnp.log1p(-largest), sharpness + jnp.log(largest))


def depth_up_scale(old: int, drop: int) -> SpaceMap:
    """Joins two copies of a stack, without the last layers of one and the first of the other.
    SELECTION.

    The result has the first `old - drop` layers, followed by the last `old - drop` layers. The
    function is not preserved. SOLAR uses `old=32` and `drop=8`.

    Args:
      old: The number of layers.
      drop: The number of layers that are dropped from each copy, from 0 to old / 2. Each layer
        remains in at least one copy.

    Returns:
      The map of `old` layers to `2 * (old - drop)` layers.

    Raises:
      ValueError: If `drop` is negative or exceeds old / 2.

    References:
      Kim et al., SOLAR 10.7B: depth up-scaling, 2023 (arXiv 2312.15166).

    >>> depth_up_scale(4, 1).index.tolist()
    [0, 1, 2, 1, 2, 3]
    """
    if not 0 <= 2 * drop <= old:
        raise ValueError(f"drop must lie between 0 and old / 2, got old={old}, drop={drop}")
    layer = np.arange(old)
    index = np.concatenate([layer[: old - drop], layer[drop:]])
    return duplicate(index, old, Family.SELECTION)


def interleave(old: int, after: ArrayLike) -> SpaceMap:
    """Inserts a copy of each chosen layer directly after it. SELECTION.

    For LLaMA-Pro, apply `overwrite(params, rules, inserted(m))` afterwards, with zeros for leaves
    that write the residual stream. Together they preserve the function.

    Args:
      old: The number of layers.
      after: The layers to copy, integers in range(old). A repeated number is copied repeatedly.

    Returns:
      The map of `old` layers to `old + len(after)` layers.

    Raises:
      TypeError: If `after` is traced, because the number of layers depends on it.
      ValueError: If `after` contains anything but integers in range(old).

    References:
      Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, 2024 (arXiv 2401.02415).

    >>> m = interleave(4, jnp.array([1, 3]))
    >>> m.index.tolist(), inserted(m).tolist()
    ([0, 1, 1, 2, 3, 3], [2, 5])
    """
    values = concrete(after)
    if values is None:
        raise TypeError("after decides the number of layers, so it cannot be traced")
    values = values.reshape(-1)
    if values.size and (
        not np.issubdtype(values.dtype, np.integer) or not 0 <= values.min() <= values.max() < old
    ):
        raise ValueError(f"after must hold layers of range({old}), got {values.tolist()}")
    index = np.sort(np.concatenate([np.arange(old), values.astype(int)]))
    return duplicate(index, old, Family.SELECTION)


def inserted(m: SpaceMap) -> Int[Array, "n"]:
    """Lists the new layers that repeat an earlier layer.

    Args:
      m: The map of the layers, in index form.

    Returns:
      The numbers of these layers, ascending.

    Raises:
      ValueError: If the map is dense or traced.

    >>> inserted(deepen(2, 4, "interpolate")).tolist()
    [1, 3]
    """
    index = None if m.index is None else concrete(m.index)
    if index is None:
        raise ValueError("inserted needs a concrete map in index form")
    # The first occurrence of each old layer is the layer itself, and all others are inserted.
    first = np.unique(index, return_index=True)[1]
    return jnp.asarray(np.setdiff1d(np.arange(m.new), first))


Fill = Literal["zeros", "ones", "identity"]
"""A value that layers of a leaf can be set to; see `overwrite`."""


def _identity(shape: tuple[int, ...]) -> Array:
    """Returns an identity matrix in the last two axes, repeated along the others."""
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"must end in a square matrix to be made an identity, got {list(shape)}")
    return jnp.broadcast_to(jnp.eye(shape[-1]), shape)


FILLS: dict[str, Callable[[tuple[int, ...]], Array]] = {
    "zeros": jnp.zeros,
    "ones": jnp.ones,
    "identity": _identity,
}
"""Functions that make the values of a layer from its shape, by the name of the fill."""


def overwrite(
    params: PyTree, rules: Mapping[str, Fill], layers: Int[ArrayLike, "n"], *, axis: int = 0
) -> PyTree:
    """Sets chosen layers of stacked leaves to zeros, ones or identities.

    This makes inserted layers do nothing. In residual blocks, set the output projections to zero.
    In a plain chain of layers, set kernels to identities and biases to zero. The nonlinearity must
    be idempotent, f(f(x)) == f(x), such as ReLU.

    Args:
      params: The parameters, with layers stacked on an axis.
      rules: "zeros", "ones" or "identity" for each pattern of paths (see `sail_jax.basis.axes`).
        Leaves without a matching pattern do not change.
      layers: The numbers of the layers to set, of shape (n,).
      axis: The axis of the layers in all matching leaves.

    Returns:
      A tree with the same structure, shapes and dtypes.

    Raises:
      ValueError: If a fill is unknown, a pattern matches no leaf, or a layer is out of range (not
        checked under tracing). If "identity" is given for layers that are not square matrices.

    >>> overwrite({"out": jnp.ones((3, 2))}, {"out": "zeros"}, jnp.array([1]))["out"].tolist()
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    paths = leaf_paths(params)
    layers = jnp.asarray(layers, int)
    fills = {}
    for pattern, word in rules.items():
        one_of(f"rules[{pattern!r}]", word, FILLS)
        compiled = path_pattern(pattern)
        hits = [path for path in paths if compiled.fullmatch(path)]
        if not hits:
            raise ValueError(f"rules[{pattern!r}] matches no leaf{nearest(pattern, paths)}")
        fills |= dict.fromkeys(hits, word)
    numbers = concrete(layers)

    def fill(key_path: KeyPath, x: Array) -> Array:
        path = path_str(key_path)
        if path not in fills:
            return x
        x = jnp.moveaxis(jnp.asarray(x), axis, 0)
        if numbers is not None and not np.isin(numbers, np.arange(len(x))).all():
            raise ValueError(f"layers must lie in range({len(x)}) of leaf {path!r}, got {numbers}")
        try:
            value = FILLS[fills[path]](x.shape[1:])
        except ValueError as error:
            raise ValueError(f"leaf {path!r}, a layer of it: {error}") from None
        return jnp.moveaxis(x.at[layers].set(value.astype(x.dtype)), 0, axis)

    return jax.tree.map_with_path(fill, params)


def stack_layers(params: PyTree, name: str) -> dict[str, Any]:
    """Stacks the leaves of listed layers on a new leading axis.

    Args:
      params: The parameters. The leaves of layer k have paths that start with `name` with this
        number. Other leaves do not change.
      name: The start of the paths, with `{i}` for the number, such as "layers/{i}", "layer_{i}" or
        "model.layers.{i}". Numbers start at 0.

    Returns:
      Dictionaries with "stack" in place of the number. They are nested like the tree (a list
      becomes a dictionary), or flat if `params` is a flat dictionary of arrays. `unstack_layers` is
      the inverse.

    Raises:
      ValueError: Unless `name` contains `{i}` once and a leaf matches. If layers are missing or
        differ in leaves or shapes, or the tree already has a leaf of that name.

    >>> listed = {"layers": [{"w": jnp.zeros((2, 3))}, {"w": jnp.ones((2, 3))}]}
    >>> stacked = stack_layers(listed, "layers/{i}")
    >>> jax.tree.map(jnp.shape, stacked)
    {'layers': {'stack': {'w': (2, 2, 3)}}}
    """
    pattern = numbered(name)
    flat = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    out: dict[str, Any] = {}
    groups: dict[str, dict[int, Any]] = {}
    for path, leaf in flat.items():
        match = pattern.match(path)
        if match is None:
            out[path] = leaf
            continue
        # Only the number is replaced, so `unstack_layers` can restore it.
        key = path[: match.start(1)] + STACK + path[match.end(1) :]
        groups.setdefault(key, {})[int(match[1])] = leaf
    if not groups:
        raise ValueError(f"no leaf starts with {name!r}{nearest(name, flat)}")
    count = 1 + max(max(group) for group in groups.values())
    for key, group in groups.items():
        if missing := sorted(set(range(count)) - set(group)):
            raise ValueError(f"{key!r}: layers {missing} of the {count} of {name!r} are missing")
        shapes = {jnp.shape(x) for x in group.values()}
        if len(shapes) > 1:
            raise ValueError(f"the layers of {key!r} differ in shape: {sorted(shapes)}")
        if key in out:
            raise ValueError(f"the tree already has a leaf {key!r}")
        out[key] = jnp.stack([group[k] for k in range(count)])
    return out if _is_flat(params) else _nested(out)


def unstack_layers(
    params: Mapping[str, Any], name: str, *, container: type[dict] | type[list] = dict
) -> dict[str, Any]:
    """Splits stacked leaves into one leaf per layer, the inverse of `stack_layers`.

    Args:
      params: The parameters, as `stack_layers` returns them.
      name: The `name` argument of `stack_layers`.
      container: The container of the layers: `dict`, or `list`, which requires a name that ends in
        "/{i}". It is ignored for a flat dictionary of arrays.

    Returns:
      Nested dictionaries (with a list of layers if `container` is `list`), or a flat dictionary if
      `params` is flat.

    Raises:
      ValueError: Unless `name` contains `{i}` once and leaves are stacked under it. If stacks
        differ in length, or layers under this name cannot be a list.

    >>> unstack_layers({"layers": {"stack": {"w": jnp.arange(2)}}}, "layers/{i}", container=list)
    {'layers': [{'w': Array(0, dtype=int32)}, {'w': Array(1, dtype=int32)}]}
    """
    prefix = name.replace("{i}", STACK)
    pattern = numbered(name, STACK)
    flat = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    stacks = {path: leaf for path, leaf in flat.items() if pattern.match(path)}
    if not stacks:
        raise ValueError(f"no leaf starts with {prefix!r}{nearest(prefix, flat)}")
    lengths = {jnp.shape(x)[:1] for x in stacks.values()}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(f"the stacks under {prefix!r} differ in length: {sorted(lengths)}")
    ((count,),) = lengths
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        match = pattern.match(path)
        if match is None:
            out[path] = leaf
            continue
        for k in range(count):
            out[path[: match.start(1)] + str(k) + path[match.end(1) :]] = leaf[k]
    if _is_flat(params):
        return out
    tree = _nested(out)
    if container is list:
        *parents, last = name.split("/")
        if last != "{i}" or not parents:
            raise ValueError(f"only layers under 'parent/{{i}}' can be a list, got {name!r}")
        node = tree
        for key in parents[:-1]:
            node = node[key]
        node[parents[-1]] = [node[parents[-1]][str(k)] for k in range(count)]
    return tree


def _is_flat(params: PyTree) -> bool:
    """Checks whether the parameters are a flat dictionary of arrays by path."""
    return isinstance(params, Mapping) and all(hasattr(x, "shape") for x in params.values())


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a flat dictionary with "/"-joined paths to nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
