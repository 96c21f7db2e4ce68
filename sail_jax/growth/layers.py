"""Plans listed layers: the old leaves from which a new leaf is made, and the treatment of new
layers.

`sail_jax.growth.networks` uses these functions to plan a deeper network. `Source` describes how a
leaf of the deep network is made from leaves of the old network.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax.architectures.table import Config, Rules
from sail_jax.basis.axes import Axis
from sail_jax.basis.certificate import SpaceReport
from sail_jax.basis.layers import module, outputs
from sail_jax.basis.maps import SpaceMap, measure
from sail_jax.basis.spaces import Leaf, Spec, free_name
from sail_jax.checks import nearest
from sail_jax.growth.depth import inserted
from sail_jax.growth.named import Method, pair_units
from sail_jax.growth.targets import layer_of


class Source(NamedTuple):
    """The source of a leaf of the deep network: a weighted sum of old leaves, possibly transposed.

    Attributes:
      paths: The paths of the old leaves in the sum.
      weights: The weight of each old leaf. A single leaf is used unchanged.
      above: The path of the same leaf in the next layer, if the method requires it; otherwise "".
      transpose: Whether the sum is transposed.
      scale: The factor on the sum.
      identity: Whether the leaf is instead an identity matrix. Its size is the length of the old
        leaf, a bias.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)
    above: str = ""
    transpose: bool = False
    scale: float = 1.0
    identity: bool = False


def deepened(
    flat: Mapping[str, Any], rules: Rules, layers: Mapping[str, SpaceMap], above: bool
) -> dict[str, Source]:
    """Lists the leaves of the deep network with their sources.

    Args:
      flat: The leaves of the old network by path: arrays or shapes.
      rules: The rules of its architecture.
      layers: The map of the layers, for each entry that counts a changing number of layers.
      above: Whether each leaf also depends on the same leaf of the next layer.

    Returns:
      The source of each leaf, by its path in the deep network.

    Raises:
      ValueError: If a leaf is missing in one of the mixed layers.
    """
    rows = {name: _rows(m) for name, m in layers.items()}
    out: dict[str, Source] = {}
    for path in flat:
        # Leaves outside layers do not change.
        layer = layer_of(rules, path)
        if layer is None:
            out[path] = Source((path,), above=path if above else "")
            continue
        name, number, (start, stop) = layer

        def at(k: int, path: str = path, start: int = start, stop: int = stop) -> str:
            return f"{path[:start]}{k}{path[stop:]}"

        for k, row in enumerate(rows[name]) if name in rows else [(number, {number: 1.0})]:
            # Each new layer is listed once, by the first of its old layers.
            if next(iter(row)) == number:
                paths = tuple(map(at, row))
                for source in paths:
                    if source not in flat:
                        raise ValueError(
                            f"leaf {at(k)!r} is made from {source!r}, which is missing in the "
                            f"checkpoint{nearest(source, flat)}"
                        )
                # The top layer uses its own leaf.
                top = at(number + 1) if at(number + 1) in flat else path
                out[at(k)] = Source(paths, tuple(row.values()), top if above else "")
    return out


def chained(
    flat: Mapping[str, Any], rules: Rules, name: str, m: SpaceMap, sources: Mapping[str, Source]
) -> dict[str, Source]:
    """Replaces the new layers of a chain by identities.

    Each layer of a chain reads the previous one. The new kernels become identity matrices. `added`
    sets their biases to zero (Net2DeeperNet).

    Args:
      flat: The leaves of the old network by path.
      rules: The rules of its architecture.
      name: The entry that lists the layers of the chain.
      m: The map of these layers, in index form.
      sources: The source of each leaf, from `deepened`.

    Returns:
      The source of each leaf, with the new kernels as identities.

    Raises:
      ValueError: If a new layer has no bias, which determines the size of the identity.

    References:
      Chen et al., Net2Net, 2016 (arXiv 1511.05641).
    """
    new, out = set(np.asarray(inserted(m)).tolist()), dict(sources)
    for path in sources:
        layer = layer_of(rules, path)
        if layer and layer[0] == name and layer[1] in new:
            mark, leaf = path[len(module(path))], path[len(module(path)) + 1 :]
            if (bias := f"{module(path)}{mark}bias") not in sources:
                raise ValueError(
                    f"the new layer of {path!r} requires a bias, which determines its size"
                )
            if leaf == "kernel":
                out[path] = Source(sources[bias].paths, identity=True)
    return out


def own_first(flat: Mapping[str, Any], rules: Rules, name: str) -> bool:
    """Checks whether the first layer has other leaves or shapes than the second layer.

    Such a layer (for example a projection) is not repeated and stays first.

    `flat` contains the leaves of the network by path, as arrays or shapes. Returns False for a
    single layer.
    """
    shapes: dict[int, dict[str, Any]] = {}
    for path, x in flat.items():
        if (layer := layer_of(rules, path)) and layer[0] == name:
            start, stop = layer[2]
            shapes.setdefault(layer[1], {})[f"{path[:start]}{{}}{path[stop:]}"] = x.shape
    return len(shapes) > 1 and shapes[0] != shapes[1]


def relayered(
    spec: Spec, sources: Mapping[str, Source], sizes: Mapping[str, int]
) -> tuple[Spec, dict[str, int]]:
    """Makes the spec of a network with another number of listed layers.

    Every new layer gets its own copy of the spaces that only the old layer uses. If the name of a
    space starts with the path of the layer, the new number replaces the old one.

    Args:
      spec: The spec of the old network.
      sources: The source of each leaf of the new network, from `deepened`.
      sizes: The new sizes of spaces of the old network.

    Returns:
      The spec of the new network before these sizes change, and the new sizes of its spaces.
    """
    owners = {s.name: {spec.layer(use.path) for use in spec.uses(s.name)} for s in spec.spaces}
    shared = {name for name, layers in owners.items() if len(layers) > 1 or None in layers}
    starts = {name: start for name, start, _ in spec.layers}
    copied = {spec.layer(path): spec.layer(source.paths[0]) for path, source in sources.items()}
    called = {(layer, name): name for layer in copied for name in shared}
    taken = set(shared)
    for layer, old in copied.items():
        if layer is None or old is None:
            continue
        before, after = (starts[of].replace("{i}", str(k)) for of, k in (old, layer))
        for name in (name for name, layers in owners.items() if layers == {old}):
            moved = re.sub(f"^{re.escape(before)}(?![0-9])", after, name)
            called[layer, name] = free_name(moved, taken)
            taken.add(called[layer, name])
    leaves = tuple(
        Leaf(path, tuple(_renamed(axis, called, spec.layer(path)) for axis in spec.axes(old)))
        for path, (old, *_) in ((path, source.paths) for path, source in sources.items())
    )
    spaces = {new: spec.space(old)._replace(name=new) for (_, old), new in called.items()}
    sizes = {new: sizes[old] for (_, old), new in called.items() if old in sizes}
    made = tuple(spaces[name] for name in sorted(spaces))
    # The other layers of a list would need leaves of their own.
    ties = tuple(tie for tie in spec.ties if not any(map(spec.layer, (tie.path, *tie.scales))))
    return replace(spec, leaves=leaves, spaces=made, ties=ties), sizes


def _renamed(axis: Axis, called: Mapping[Any, str], layer: tuple[str, int] | None) -> Axis:
    """The axis with the names of spaces in a layer."""
    return tuple(f._replace(space=called[layer, f.space]) for f in axis)


def _rows(m: SpaceMap) -> list[dict[int, float]]:
    """Finds the old layers of each new layer, and their weights."""
    if m.index is not None:
        return [{int(i): 1.0} for i in np.asarray(m.index)]
    write = np.asarray(m.dense().write)
    return [{int(i): float(row[i]) for i in np.flatnonzero(row)} for row in write]


class Added(NamedTuple):
    """The changes to the leaves of new layers.

    Attributes:
      outputs: The factor on each leaf, by path: 0 or a mask in new layers, 1 elsewhere.
      fresh: A mask of the entries that are drawn anew, by path.
      pairs: The map that makes units cancel in pairs, by space.
      unpaired: Leaves that are zero in new layers because their units could not be paired.
      streams: The spaces that all layers share, where new layers add their output.
    """

    outputs: dict[str, Array]
    fresh: dict[str, Array]
    pairs: dict[str, SpaceMap]
    unpaired: tuple[str, ...]
    streams: frozenset[str]


def added(
    spec: Spec,
    rules: Rules,
    layers: Mapping[str, SpaceMap],
    chains: Collection[str],
    deep: Method,
    options: Mapping[str, Any],
) -> Added:
    """Determines the changes that a depth method makes to repeated layers.

    Units are paired only if the spec contains enough information. A network distinguishes the units
    of an outer space, by a rotary angle or by a gain without an axis (as in OLMo 2). Such
    units differ even with equal writers, and do not cancel. Also, pairs cancel only up to rounding.
    If the nonlinearity of the stream is not stated, a norm may lie between the sum of the pairs and
    the stream. The norm multiplies the rounding by up to the root of 1/epsilon. In both cases the
    weights that write the stream become zero instead, as in LLaMA-Pro.

    Args:
      spec: The spec of the deep network, at the old widths.
      rules: The rules of the architecture.
      layers: The map of the layers, for each entry or "stack" space with a changing number of
        layers.
      chains: The entries among these with layers that form a chain; see `chained`.
      deep: The depth method.
      options: The values of its options.

    Returns:
      The changes, empty for a method that copies layers unchanged.
    """
    out = Added({}, {}, {}, (), frozenset())
    if deep.new == "copy" or not layers:
        return out
    new = {name: np.asarray(inserted(m)) for name, m in layers.items()}
    words = partial(_words, spec, rules)
    writers, streams = outputs(spec, lambda path: (layer_of(rules, path) or ())[:2], layers)
    scale = float(options["mask"]) if deep.new == "mask" else 0.0
    unpaired: list[str] = []
    for path, axes in spec.leaves:
        chosen = _chosen(path, axes, rules, layers, new)
        if chosen is None:
            continue
        layer = layer_of(rules, path)
        if layer and layer[0] in chains:
            if len(axes) == 1:
                out.outputs[path] = jnp.zeros(())
            continue
        # A leaf without spaces may be a gain of all heads or a causal mask, which zeros would
        # break.
        if deep.new == "fresh" and any(a and a[0].space not in layers for a in axes):
            out.fresh[path] = chosen
        if path not in writers:
            continue
        written, read = writers[path]
        free = [n for n in read if spec.space(n).size > 1 and "outer" not in words(n)]
        known = all(words(name) - {"outer"} for name in written)
        # A spec does not show whether a norm lies between the outputs and their sum.
        paired = deep.new == "pair" and chosen.ndim == 0 and not rules.inferred
        if paired and free and known:
            out.pairs[free[0]] = pair_units(spec.space(free[0]).size)
            continue
        out.outputs[path] = jnp.where(chosen, scale, 1.0)
        if paired and len(axes) > 1:
            unpaired.append(path)
    return out._replace(unpaired=tuple(unpaired), streams=frozenset(streams))


def _words(spec: Spec, rules: Rules, name: str) -> set[str]:
    """Returns the nonlinearities of a space, from the spec and the rules.

    In a network without a head, the stream is the output and therefore "outer" in the spec. Only
    the rules then state the layers' nonlinearities.
    """
    return {*spec.space(name).nonlinearity.split(), *rules.spaces.get(name, "").split()}


def _chosen(
    path: str,
    axes: tuple[Axis, ...],
    rules: Rules,
    layers: Mapping[str, SpaceMap],
    new: Mapping[str, np.ndarray],
) -> Array | None:
    """The part of the leaf that belongs to a new layer, along a stacked axis or as a whole, or
    None.
    """
    layer = layer_of(rules, path)
    if layer and layer[0] in new:
        return jnp.asarray(True) if layer[1] in new[layer[0]] else None
    for k, axis in enumerate(axes):
        if len(axis) == 1 and axis[0].space in new:
            # Only some entries along a stacked axis are new, so this is a mask that broadcasts with
            # the leaf.
            hit = np.isin(np.arange(layers[axis[0].space].new), new[axis[0].space])
            return jnp.asarray(hit.reshape([-1 if j == k else 1 for j in range(len(axes))]))
    return None


def layer_row(
    name: str,
    m: SpaceMap,
    spec: Spec,
    rules: Rules,
    deep: Method,
    new: Added,
    chain: bool,
    options: Mapping[str, Any],
    config: Config,
) -> SpaceReport:
    """Reports the losses of new layers according to the axes.

    `name` is the entry or "stack" space that counts the layers. `chain` is True if the layers form
    a chain; see `chained`. Returns a row for the report, with the reason for a loss.
    """
    measured = measure(m)
    reason = ""
    kind = next((s.nonlinearity.split() for s in spec.spaces if s.name == name), [])
    lost = next((layers.loss for layers in spec.layers if layers.name == name), None)
    words = {word for stream in new.streams for word in _words(spec, rules, stream)}
    if m.new < m.old:
        reason = f"{m.old} layers become {m.new}, which does not preserve the function in general"
    elif deep.new == "copy":
        reason = (
            "layers are repeated, mixed or moved, which does not preserve the function in general"
        )
    elif deep.new == "mask" and options["mask"]:
        reason = f"new layers take part with a mask of {options['mask']}"
    elif chain and (odd := _not_idempotent(name, m, spec, rules)):
        reason = f"new layers are identities, but their nonlinearity ({odd}) changes its own output"
    elif lost:
        reason = lost
    elif not chain and m.new > m.old and not new.streams and deep.new != "fresh":
        reason = "no space is known that the layers write, so new layers change the function"
    elif rules.inferred and lost is None and "residual" not in kind:
        reason = (
            "its spec does not state that a layer with zero output is the identity, as in h + f(h) "
            '(the word "residual", see spec_of)'
        )
    elif rules.inferred:
        reason = ""
    elif rules.post_norm or {"layernorm", "elementwise"} <= words:
        reason = "norms follow the sums, so a layer with zero output is not the identity"
    elif config.get("scale_attn_by_inverse_layer_idx"):
        reason = "attention is divided by the number of its layer, which changes"
    return SpaceReport(name, m.family, measured and measured[0], reason)


def _not_idempotent(name: str, m: SpaceMap, spec: Spec, rules: Rules) -> str:
    """Returns the nonlinearity of a chain's new layers if it is not idempotent; otherwise ""."""
    new = set(np.asarray(inserted(m)).tolist())
    for path, axes in spec.leaves:
        layer = layer_of(rules, path)
        if layer and layer[0] == name and layer[1] in new:
            for f in (f for axis in axes for f in axis if f.role == "write"):
                words = spec.space(f.space).nonlinearity
                if not set(words.split()) <= {"relu", "linear"} or not words:
                    return words or "not stated"
    return ""
