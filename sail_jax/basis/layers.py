"""The leaves through which layers write the spaces that they share.

Growth sets these leaves to zero in new layers. In `h + f(h)` such a layer does nothing.
"""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from sail_jax.basis.axes import Axis
from sail_jax.basis.spaces import Spec


class Outputs(NamedTuple):
    """The outputs of layers.

    Attributes:
      writers: For each leaf that writes a shared space: the spaces that it writes, and the private
        spaces of its layer that it reads. A bias reads none. Neither does a matrix that reads a
        shared space, or units without a space.
      streams: The shared spaces.
    """

    writers: dict[str, tuple[list[str], list[str]]]
    streams: set[str]


def outputs(spec: Spec, layer_of: Callable[[str], Any], stacks: Container[str]) -> Outputs:
    """Finds the leaves through which layers write the spaces that they share.

    Args:
      spec: The spec of the network.
      layer_of: A function from a path to the layer of the leaf; None for a leaf outside layers.
      stacks: The "stack" spaces to take into account. All layers of a stack have the same private
        spaces, and count as one layer.

    Returns:
      The leaves and the shared spaces.
    """

    def group(path: str) -> Any:
        stacked = [f.space for a in spec.axes(path) for f in a if f.space in stacks]
        return layer_of(path) or (stacked[0] if stacked else None)

    owners: dict[str, set[Any]] = {}
    for path, axes in spec.leaves:
        for f in (f for axis in axes for f in axis):
            owners.setdefault(f.space, set()).add(group(path))
    # A space that only one layer uses is private. The others connect layers.
    own = {name for name, groups in owners.items() if len(groups) == 1 and None not in groups}
    out = Outputs({}, set())
    plain = {p: [a for a in axes if a and a[0].space not in stacks] for p, axes in spec.leaves}
    for path, axes in plain.items():
        written = [
            f.space
            for axis in axes
            if _only(axis, "write")
            for f in axis
            if not any(f.space in own for f in axis)
        ]
        read = [f.space for axis in axes if _only(axis, "read") for f in axis if f.space in own]
        # A vector that writes the stream may be the bias of a norm; see below.
        stacked = sum(a[0].space in stacks for a in spec.axes(path) if a)
        if written and group(path) is not None and len(spec.axes(path)) - stacked > 1:
            out.writers[path] = written, read
            out.streams.update(written)
    modules = {name for path in out.writers for name in _modules(path)}
    normed = {"layernorm", "rmsnorm"} & {
        word for name in out.streams for word in spec.space(name).nonlinearity.split()
    }
    for path, axes in plain.items():
        bias = len(axes) == 1 and _only(axes[0], "write") and axes[0][0].space in out.streams
        # A bias belongs to a layer's output if its module also has such a leaf. The bias of a
        # LayerNorm also writes the stream's space, but is not an output. Without such norms, every
        # leaf that writes the stream is added to it (for instance the bias of a BatchNorm).
        if bias and (modules & _modules(path) or not normed):
            out.writers[path] = [axes[0][0].space], []
    return out


def _only(axis: Axis, role: str) -> bool:
    """Checks whether all factors of an axis have this role and are not tied."""
    return all(f.role == role and not f.tied for f in axis)


def _modules(path: str) -> set[str]:
    """The module of a leaf. In NNX, parameters may have a "value" below their name."""
    return {module(path), module(path.removesuffix("/value"))}


def module(path: str) -> str:
    """Finds the module of a leaf.

    Args:
      path: The path of a leaf.

    Returns:
      The path without its last key, which a kernel and its bias share.
    """
    cut = max(path.rfind("/"), path.rfind("."))
    return path[:cut]
