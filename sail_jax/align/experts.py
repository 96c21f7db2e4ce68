"""Experts of a mixture put into the order of another mixture's, before units are matched.

*What makes it hard.* A mixture computes the same in whatever order its experts are, if the rows of
the router are in that order. But the hidden units of each expert have an order of their own. Two
experts that are the same may so have no entry in common, and to compare two of them by their best
permutation of units is an assignment of thousands of units, for each of the E^2 pairs.

*What is compared.* A product over hidden units, such as down @ gate, does not depend on their
order. It is as large as the stream squared. So it is applied to a few random directions of the
stream: down @ (gate @ directions). Two experts that are the same give the same array, to rounding.
Rows of the router have a say, too, less their mean, as a vector that is added to all rows changes
no share. A bias of the router is a further entry of its row. The order of all experts of a layer is
one assignment then, of the cosines of these arrays.

For instance, a mixture of four experts that is compared with itself in the order 2, 0, 3, 1 has
cosines of 1 in these places, and of about 0 elsewhere if the experts were drawn at random.

*Stacked experts.* If all experts of a layer lie in one tensor, they are a space of the spec.
Matching that space entry by entry compares hidden units in different orders. It was tried on four
pairs of GPT-OSS, each of two layers with 8 random experts and with other routers: 6 of the 8 layers
were not brought back. So stacked experts are compared by the same products.
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

# How many directions of the stream are looked at: the error of a cosine is about 1 / 8 of that of
# one direction, and streams of up to 64 units are looked at whole.
_DIRECTIONS = 64


class Experts(NamedTuple):
    """The experts of one layer.

    Attributes:
      space: What they are called as a space, such as "expert.3".
      routers: The tensors with a row for each expert.
      parts: For each expert its tensors, in an order that all share. Stacked experts have the same
        tensors, each with an axis of experts in front.
      stack: What the spec calls that axis; "" for experts that are tensors by themselves.
    """

    space: str
    routers: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    stack: str = ""


class Ordered(NamedTuple):
    """The order found for the experts of one layer.

    Attributes:
      order: Which expert of the second mixture takes each place.
      before: The mean cosine of experts with those of the reference, as they stand.
      after: The same in the new order.
    """

    order: Order
    before: float
    after: float


def experts_of(spec: Spec, leaves: Tree) -> tuple[Experts, ...]:
    """Finds the layers of a mixture whose experts can change places.

    Args:
      spec: The spaces of the tensors.
      leaves: The tensors by name, or what has their shapes.

    Returns:
      The layers with two experts or more and a router, in the order of the tensors. Layers of
      stacked experts come last.
    """
    return (*_apart(spec, leaves), *_stacked(spec))


def _apart(spec: Spec, leaves: Tree) -> list[Experts]:
    """The layers whose experts are tensors by themselves."""
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
    """The layers whose experts lie on the first axis of their tensors.

    The units of an expert form a space within that of the experts. A router has rows that read the
    stream, or one number for each expert.
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
    """What the experts of a layer are called, by the name of one of its tensors."""
    return ".".join(["expert", *re.findall(r"\d+", path)[-1:]])


def match_experts(
    reference: Tree, params: Tree, spec: Spec, layers: Sequence[Experts]
) -> dict[str, Ordered]:
    """Finds the order of experts in which a mixture is nearest to another one.

    The two have to have one basis of the stream, as mixtures that were trained from one start do.

    Args:
      reference: The tensors of the mixture that stays, by name; arrays, or what is read as one.
      params: The tensors of the other mixture.
      spec: The spaces of both.
      layers: The experts, as `experts_of` lists them.

    Returns:
      The order of each layer's experts, by the name of their space.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), of which this is a step for blocks.
    """
    out = {}
    for layer in layers:
        first, second = (_features(tree, spec, layer) for tree in (reference, params))
        # [expert of the reference, expert of the other]: the mean of the cosines of all features.
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
    """Puts the experts of a mixture, and the rows of its routers, into another order.

    Args:
      params: The tensors by name.
      layers: The experts, as `experts_of` lists them.
      orders: Which expert takes each place, by the name of the space; others stay.
      take: Takes rows of a router; by default as of an array.

    Returns:
      The tensors by name. Those of experts are the same, under other names.
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
    """Arrays that do not depend on the order of hidden units, each row of length 1."""
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
    """For each pair of matrices that write and read a space within experts, their products.

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
    """An array of experts, with the axis of the units of a space behind that of the experts."""
    axes = spec.axes(path)
    names = [name for axis in axes for name in [f.space for f in axis] or [""]]
    x = _whole(arrays[path])
    x = x.reshape(factor_shape(spec, axes, x.shape))
    x = np.moveaxis(x, names.index(space), 0)
    # The axis of stacked experts was the first one.
    x = x.swapaxes(0, 1) if stack else x[None]
    return x.reshape(*x.shape[:2], -1)


def _directions(width: int) -> Float[np.ndarray, "width few"]:
    """Random directions of the stream, the same ones each time; all of a narrow stream."""
    if width <= _DIRECTIONS:
        return np.eye(width, dtype=np.float32)
    return np.random.default_rng(0).standard_normal((width, _DIRECTIONS), np.float32)


def _whole(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float32)
