"""Listed layers: leaves whose paths differ only in the number of their layer, such as "blocks/0/w"
and "blocks/1/w"."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sail_jax.checks import nearest

_UNKNOWN = (
    "without the forward pass it is not known whether a layer with zero output is the identity: "
    "give the list to spec_of(..., layers=...)"
)


class Layers(NamedTuple):
    """A list of layers in a network.

    Attributes:
      name: The name of the list, which growth takes for its new length.
      start: The start of the paths of its leaves, with `{i}` for the number of the layer.
      loss: The reason why a new layer with zero output may change the function; "" if it does
        nothing.
    """

    name: str
    start: str
    loss: str = _UNKNOWN


def numbered(start: str, number: str = r"\d+") -> re.Pattern[str]:
    """Compiles the start of the paths of layers.

    Args:
      start: The start of the paths, with `{i}` for the number of the layer.
      number: A regular expression for the number.

    Returns:
      A pattern for `match`. Its only group is the number.

    Raises:
      ValueError: Unless `start` contains `{i}` once.
    """
    before, placeholder, after = start.partition("{i}")
    if not placeholder or "{i}" in after:
        raise ValueError(f"name must hold {{i}} once, such as 'layers/{{i}}', got {start!r}")
    return re.compile(f"{re.escape(before)}({number}){re.escape(after)}(?=[/.]|$)")


def layer_at(layers: Sequence[Layers], path: str) -> tuple[str, int] | None:
    """Finds the layer of a leaf.

    Args:
      layers: The lists of layers.
      path: The path of the leaf.

    Returns:
      The name of the list and the number of the layer; None for a leaf outside the lists.
    """
    for name, start, _ in layers:
        if match := numbered(start).match(path):
            return name, int(match[1])
    return None


def listed(
    shapes: Mapping[str, tuple[int, ...]], layers: str | Mapping[str, str]
) -> tuple[Layers, ...]:
    """Finds lists of layers in a network.

    Args:
      shapes: The shape of each leaf, by path.
      layers: The start of the paths, with `*` for the number of the layer, such as "blocks/*". A
        "/" also stands for a ".". A mapping gives a name to each of several lists. A single list is
        called "layer".

    Returns:
      The lists.

    Raises:
      TypeError: If `layers` is neither a text nor a mapping of texts.
      ValueError: If no leaf matches, a layer is missing, or two layers differ in leaves or shapes.
    """
    named = {"layer": layers} if isinstance(layers, str) else layers
    if not isinstance(named, Mapping) or not all(isinstance(x, str) for x in named.values()):
        raise TypeError(f"layers must be a text such as 'blocks/*', or texts by name, got {layers}")
    for name in ("width", "depth"):
        if name in named:
            raise ValueError(f"layers: {name!r} is a factor in growth: give the list another name")
    out = tuple(Layers(name, _start(shapes, text)) for name, text in named.items())
    for path in shapes:
        both = [layers.name for layers in out if layer_at([layers], path)]
        if both[1:]:
            raise ValueError(f"layers: leaf {path!r} is in two lists, {both[0]!r} and {both[1]!r}")
    return out


def _start(shapes: Mapping[str, tuple[int, ...]], text: str) -> str:
    """Finds the start of the paths of a list, and compares its layers."""
    before, number, after = text.rpartition("*")
    if not number or after or "*" in before:
        raise ValueError(
            f"layers: {text!r} must end with *, for the number of the layer, such as 'blocks/*'"
        )
    said = "".join("[/.]" if c in "/." else re.escape(c) for c in before)
    pattern = re.compile(rf"({said})(0|[1-9][0-9]{{0,8}})(?=[/.]|$)")
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path, shape in shapes.items():
        if match := pattern.match(path):
            own = found.setdefault(f"{match[1]}{{i}}", {}).setdefault(int(match[2]), {})
            own[path[match.end() :]] = tuple(shape)
    if not found:
        raise ValueError(f"layers: {text!r} matches no leaf{nearest(text, shapes)}")
    (start, of), *others = found.items()
    if others:
        raise ValueError(f"layers: {text!r} matches two lists, {start!r} and {others[0][0]!r}")
    for number in range(max(of) + 1):
        _check_like_first(start, of, number)
    return start


def _check_like_first(start: str, of: Mapping[int, Mapping[str, Any]], number: int) -> None:
    """Raises a ValueError if a layer is missing, or has other leaves or shapes than the first."""
    first, layer = (start.replace("{i}", str(k)) for k in (0, number))
    if number not in of:
        raise ValueError(
            f"layers: {start.replace('{i}', str(max(of)))!r} exists, but not {layer!r}"
        )
    own, other = of[0], of[number]
    for rest in {**own, **other}:
        one, two = own.get(rest), other.get(rest)
        if one != two:
            said = [
                f"{path + rest!r} " + ("is missing" if shape is None else f"has shape {shape}")
                for path, shape in ((first, one), (layer, two))
            ]
            raise ValueError(f"layers of one list must be alike, but {' and '.join(said)}")
