"""Reorders the experts of a mixture to match another mixture, before units are matched.

*The difficulty.* A mixture computes the same function for any order of its experts, if the router's
rows have the same order. But the hidden units of each expert can also be in any order, so two equal
experts may have no entry in common. Comparing two experts by their best permutation of units is an
assignment of thousands of units, for each of E^2 pairs.

*The comparison.* A product over hidden units, such as down @ gate, does not depend on their order.
It has as many entries as the stream squared, so it is applied to a few random directions of the
stream: down @ (gate @ directions). Two equal experts give the same array, up to rounding. The
router's rows also count. Their mean is subtracted, since a vector that is added to all rows changes
no share. A bias of the router is one more entry of its row. The order of a layer's experts is then
one assignment, with the cosines of these arrays as benefits.

For instance, compare a mixture of four experts with itself in the order 2, 0, 3, 1. The cosines are
1 at these positions, and about 0 elsewhere if the experts were drawn at random.

*Stacked experts.* If all experts of a layer lie in one tensor, they are a space of the spec.
Matching that space entry by entry compares hidden units in different orders. It was tried on four
pairs of GPT-OSS, each with two layers of 8 random experts and different routers: it did not restore
6 of the 8 layers. Stacked experts are therefore compared by the same products.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sail_jax.align.assignment import hungarian
from sail_jax.align.blocks import factor_shape, nested
from sail_jax.basis.change_basis import unfuse
from sail_jax.basis.spaces import Spec

Tree = Mapping[str, Any]
Order = Int[np.ndarray, " expert"]

# The number of directions of the stream. The error of a cosine is about 1 / 8 of the error with one
# direction. Streams of up to 64 units are compared completely.
_DIRECTIONS = 64


class Experts(NamedTuple):
    """The experts of one layer.

    Attributes:
      space: Their name as a space, such as "expert.3".
      routers: The tensors with a row for each expert.
      parts: The tensors of each expert, in the same order for all. Stacked experts have the same
        tensors, each with a leading axis of experts.
      stack: The name of that axis in the spec; "" for experts in separate tensors.
    """

    space: str
    routers: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    stack: str = ""


class Ordered(NamedTuple):
    """The order found for the experts of one layer.

    Attributes:
      order: The index of the second mixture's expert for each place.
      before: The mean cosine of the experts with the reference's, in the original order.
      after: The same in the new order.
    """

    order: Order
    before: float
    after: float


def experts_of(spec: Spec, leaves: Tree) -> tuple[Experts, ...]:
    """Finds the layers of a mixture with experts that can be reordered.

    Args:
      spec: The spaces of the tensors.
      leaves: The tensors by name, or objects with their shapes.

    Returns:
      The layers with at least two experts and a router, in the order of the tensors. Layers of
      stacked experts come last.
    """
    return (*_apart(spec, leaves), *_stacked(spec))


def _apart(spec: Spec, leaves: Tree) -> list[Experts]:
    """Finds the layers with experts in separate tensors."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for path, _ in spec.leaves:
        match = re.fullmatch(r"(.*?)\bexperts\.(\d{1,6})\.(.+)", path)
        if match:
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = path
    layers = []
    for prefix, experts in found.items():
        names = sorted(experts.get(0, ()))
        whole = all(
            sorted(experts.get(e, ())) == names and [leaves[experts[e][n]].shape for n in names]
            == [leaves[experts[0][n]].shape for n in names]
            for e in range(len(experts))
        )  # fmt: skip
        inside = {path for parts in experts.values() for path in parts.values()}
        routers = tuple(
            path
            for path, axes in spec.leaves
            if path.startswith(prefix)
            and path not in inside
            and axes
            and not axes[0]
            and leaves[path].shape[0] == len(experts)
        )
        if not whole or not routers or len(experts) < 2:
            continue
        parts = tuple(tuple(experts[e][n] for n in names) for e in range(len(experts)))
        layers.append(Experts(_space(prefix), routers, parts))
    return layers


def _stacked(spec: Spec) -> list[Experts]:
    """Finds the layers with experts on the first axis of their tensors.

    The units of an expert form a space within the space of the experts. A router has rows that read
    the stream, or one number for each expert.
    """
    ranked = [space for space in spec.spaces if "softmax" in space.nonlinearity.split()]
    blocks = {*nested(spec).values()} if ranked else set()
    layers = []
    for name, size, _ in ranked:
        uses = {use.path: spec.axes(use.path) for use in spec.uses(name)}
        first = all(
            axes[0] and {f.space for f in axes[0]} == {name} and axes[0][0].role == "write"
            for axes in uses.values()
        )
        if name not in blocks or size < 2 or not first:
            continue
        routers = tuple(
            path
            for path, axes in uses.items()
            if all(f.role == "read" for axis in axes[1:] for f in axis) and len(axes) < 3
        )
        parts = tuple(path for path in uses if path not in routers)
        if routers:
            layers.append(Experts(_space(routers[0]), routers, (parts,) * size, name))
    return layers


def _space(path: str) -> str:
    """Returns the name for the experts of a layer, from the name of one of its tensors."""
    return ".".join(["expert", *re.findall(r"\d+", path)[-1:]])


def match_experts(
    reference: Tree, params: Tree, spec: Spec, layers: Sequence[Experts]
) -> dict[str, Ordered]:
    """Finds the order of experts in which a mixture is nearest to another one.

    Both must use the same basis of the stream, as mixtures with a common ancestor do.

    Args:
      reference: The tensors of the mixture that stays, by name; arrays or array-like objects.
      params: The tensors of the other mixture.
      spec: The spaces of both.
      layers: The experts, as `experts_of` lists them.

    Returns:
      The order of each layer's experts, by the name of their space.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836); this is one step of it, for blocks.
    """
    out = {}
    for layer in layers:
        first, second = (_features(tree, spec, layer) for tree in (reference, params))
        # [expert of the reference, expert of the other]: the mean cosine over all features.
        cosines = np.mean([a @ b.T for a, b in zip(first, second, strict=True)], axis=0)
        order = np.asarray(hungarian(cosines))
        places = np.arange(len(order))
        before, after = np.trace(cosines) / len(order), cosines[places, order].mean()
        out[layer.space] = Ordered(order, float(before), float(after))
    return out


def permute_experts(
    params: Tree,
    layers: Sequence[Experts],
    orders: Mapping[str, Order],
    take: Callable[[Any, Order], Any] = lambda x, order: x[(order,)],
) -> dict[str, Any]:
    """Reorders the experts of a mixture, and the rows of its routers.

    Args:
      params: The tensors by name.
      layers: The experts, as `experts_of` lists them.
      orders: The index of the expert for each place, by the name of the space. Others stay.
      take: Takes rows of a router; the default works on arrays.

    Returns:
      The tensors by name. The experts' tensors are the same objects under other names.
    """
    out = dict(params)
    for layer in layers:
        order = orders.get(layer.space, np.arange(len(layer.parts)))
        if (order == np.arange(len(order))).all():
            continue
        rows = {*layer.routers, *(layer.parts[0] if layer.stack else ())}
        out |= {name: take(params[name], order) for name in rows}
        if not layer.stack:
            for new, old in zip(layer.parts, order, strict=True):
                moved = zip(new, layer.parts[old], strict=True)
                out |= {name: params[source] for name, source in moved}
    return out


def _features(tree: Tree, spec: Spec, layer: Experts) -> list[Float[np.ndarray, "expert n"]]:
    """Makes arrays that do not depend on the order of hidden units, with rows of length 1."""
    rows = [_whole(tree[router]).reshape(len(layer.parts), -1) for router in layer.routers]
    row = np.concatenate(rows, axis=1)
    features = [row - row.mean(0)]
    if layer.stack:
        features += _products(tree, spec, layer.parts[0], layer.stack)
    else:
        products = [_products(tree, spec, parts) for parts in layer.parts]
        features += [np.concatenate(each) for each in zip(*products, strict=True)]
    return [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in features]


def _products(
    tree: Tree, spec: Spec, parts: Sequence[str], stack: str = ""
) -> list[Float[np.ndarray, "expert n"]]:
    """Computes the products of each pair of matrices that write and read a space within experts.

    Without a stack there is one expert.
    """
    arrays, own = unfuse({path: tree[path] for path in parts}, spec)
    spaces = {f.space for path in parts for axis in spec.axes(path) for f in axis}
    out = []
    for space in sorted(spaces - {stack}):
        if not {use.path for use in spec.uses(space)} <= set(parts):
            continue
        uses = [use for use in own.uses(space) if len(own.axes(use.path)) - bool(stack) == 2]
        readers = [use for use in uses if use.role == "read"]
        for writer in (use for use in uses if use.role != "read"):
            into = _units_first(arrays, own, writer.path, space, stack)
            into = into @ _directions(into.shape[2])
            for reader in readers:
                product = _units_first(arrays, own, reader.path, space, stack)
                product = product.swapaxes(1, 2) @ into
                out.append(product.reshape(len(product), -1))
    return out


def _units_first(
    arrays: Tree, spec: Spec, path: str, space: str, stack: str
) -> Float[np.ndarray, "expert unit n"]:
    """Moves the axis of a space's units behind the axis of the experts."""
    axes = spec.axes(path)
    names = [name for axis in axes for name in [f.space for f in axis] or [""]]
    x = _whole(arrays[path])
    x = x.reshape(factor_shape(spec, axes, x.shape))
    x = np.moveaxis(x, names.index(space), 0)
    # The axis of stacked experts was the first axis.
    x = x.swapaxes(0, 1) if stack else x[None]
    return x.reshape(*x.shape[:2], -1)


def _directions(width: int) -> Float[np.ndarray, "width few"]:
    """Returns fixed random directions of the stream, or all directions of a narrow stream."""
    if width <= _DIRECTIONS:
        return np.eye(width, dtype=np.float32)
    return np.random.default_rng(0).standard_normal((width, _DIRECTIONS), np.float32)


def _whole(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float32)
