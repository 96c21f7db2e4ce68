"""Gives feature spaces their common names, such as resid, head, qk, v, hidden, with their layer.

Inference names a space after the first tensor that writes it. Such names are unique, but long. A
table uses short names, which follow from the structure of a space's axes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sail_jax.basis.axes import parse_axes


class Place(NamedTuple):
    """An occurrence of a space.

    Attributes:
      path: The path of the leaf.
      pattern: The path with {i} for the number of its layer, and {e} for the number of its expert.
      layer: The path up to the last such number, "" outside of layers.
      axis: The number of the axis.
      factor: The number of the factor on the axis.
      n: The number of the factor in its block.
      count: The number of factors of the block.
      role: The role of the axis for the space.
      writes: Whether another axis of the leaf writes a space.
    """

    path: str
    pattern: str
    layer: str
    axis: int
    factor: int
    n: int
    count: int
    role: str
    writes: bool


def named(
    places: Mapping[str, Sequence[Place]],
    words: Mapping[str, str],
    sizes: Mapping[str, int],
    prefixes: Sequence[str],
    known: Mapping[str, str],
    ends: Iterable[str] = (),
) -> dict[str, str]:
    """Names the spaces of an architecture, consistently in all of its layers.

    Args:
      places: The places of each space, by its present name.
      words: The nonlinearity of each space.
      sizes: The size of each space.
      prefixes: The prefixes of layers.
      known: Axes strings of an earlier table by pattern; its names are kept.
      ends: Names that stay unchanged.

    Returns:
      The new name of each space, with {i} for the number of its layer. Corresponding spaces of two
      layers share a name, as do parts of equal size that cannot change.
    """
    kept = _kept(places, words, known)
    towers = _towers(prefixes)
    wanted: dict[str, list[str]] = {}
    for name, where in places.items():
        if name in kept or name in ends:
            wanted[name] = [kept.get(name, name)]
            continue
        layers = {place.layer for place in where}
        inner = len(layers) == 1 and layers != {""}
        tag = _tag(where[0]) if inner else ""
        tower = _tower(where, towers)
        kind = _kind(name, where, words.get(name, ""), inner)
        choices = [f"{part}{kind}{tag}" for part in (tower, *_modules(where, tower, inner))]
        wanted[name] = [*choices, f"{_opened(name, where)}"]
    return _apart(wanted, places, words, sizes, {*ends, *kept.values()})


def _tag(place: Place) -> str:
    """Returns placeholders for the numbers of a space's layer and expert."""
    return "".join(f".{number}" for number in re.findall(r"\{[ie]\}", place.pattern))


def _kept(
    places: Mapping[str, Sequence[Place]], words: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Returns the names in an earlier table with most of the same positions."""
    axes = {pattern: parse_axes(_plain(text)) for pattern, text in known.items()}
    votes: Counter[tuple[str, str, str]] = Counter()
    for name, where in places.items():
        for place in where:
            own = axes.get(place.pattern, ())
            if place.axis < len(own) and place.factor < len(own[place.axis]):
                old = own[place.axis][place.factor].space
                old = old.replace(":i:", "{i}").replace(":e:", "{e}")
                votes[name, old, place.layer if "{" in old else ""] += 1
    out: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for (name, old, layer), _ in votes.most_common():
        # Within a layer a name belongs to one space, except for parts that cannot change.
        if name not in out and ((old, layer) not in taken or words.get(name) == "outer"):
            out[name] = old
            taken.add((old, layer))
    return out


def _plain(text: str) -> str:
    """Returns an axes string without braces, which are placeholders for numbers."""
    return text.replace("{i}", ":i:").replace("{e}", ":e:")


def _towers(prefixes: Sequence[str]) -> dict[str, str]:
    """Returns the parts that distinguish the prefixes of several stacks of layers."""
    parts = {prefix: re.split(r"[./]", prefix) for prefix in prefixes}
    if len(parts) < 2:
        return dict.fromkeys(prefixes, "")
    out = {}
    for prefix, own in parts.items():
        others = [set(p) for other, p in parts.items() if other != prefix]
        alone = [word for word in own if not any(word in other for other in others)]
        out[prefix] = f"{alone[0].removesuffix('_model')}." if alone and alone[0] else ""
    return out


def _tower(where: Sequence[Place], towers: Mapping[str, str]) -> str:
    """Returns the stack of layers of a space, if all its positions are in one."""
    found = {
        tower
        for prefix, tower in towers.items()
        if any(place.pattern.startswith(prefix) for place in where)
    }
    return min(found) if len(found) == 1 else ""


def _kind(name: str, where: Sequence[Place], words: str, inner: bool) -> str:
    """Returns the use of a space."""
    first = [place for place in where if place.count > 1 and place.n == 0]
    between = [place for place in where if 0 < place.n < place.count - 1]
    last = [place for place in where if place.count > 1 and place.n == place.count - 1]
    if first:
        return "head"
    if between:
        return "group"
    if last:
        return "v" if any(p.role == "read" and p.writes for p in last) else "qk"
    if inner:
        return "hidden"
    if len({place.layer for place in where}) > 1:
        return "resid"
    writer = min(where, key=lambda place: place.role != "write")
    module = re.sub(r"[./](weight|bias|kernel)$", "", writer.path)
    parts = re.split(r"[./]", module)
    return "pooled" if "pooler" in parts else "_".join(parts[-2:])


def _modules(where: Sequence[Place], tower: str, inner: bool) -> list[str]:
    """Yields increasingly long parts of the path of a space's module."""
    place = min(where, key=lambda place: place.role != "write")
    rest = place.path[len(place.layer) :].strip("./") if inner else place.path
    parts = re.split(r"[./]", rest)[:-1]
    return [f"{tower}{'.'.join(part)}." for part in (parts[:1], parts[:-1], parts) if part]


def _opened(name: str, where: Sequence[Place]) -> str:
    """Returns the present name, with placeholders for its numbers."""
    place = where[0]
    inner = {p.layer for p in where} == {place.layer} and place.layer
    start = place.pattern[: len(place.pattern) - len(place.path) + len(place.layer)]
    return name.replace(place.layer, start, 1) if inner else name


def _apart(
    wanted: dict[str, list[str]],
    places: Mapping[str, Sequence[Place]],
    words: Mapping[str, str],
    sizes: Mapping[str, int],
    taken: set[str],
) -> dict[str, str]:
    """Returns the first name of each list that no other space of the same layer requires."""
    level = dict.fromkeys(wanted, 0)

    def now(name: str) -> str:
        return wanted[name][min(level[name], len(wanted[name]) - 1)]

    def alike(a: str, b: str) -> bool:
        """Checks whether two spaces may share a name: in two layers, or parts that are fixed."""
        layers = [{p.layer for p in places[name]} for name in (a, b)]
        if all(len(own) == 1 and own != {""} for own in layers) and layers[0] != layers[1]:
            return True
        return words.get(a) == words.get(b) == "outer" and sizes.get(a) == sizes.get(b)

    while True:
        groups: dict[str, list[str]] = {}
        for name in wanted:
            groups.setdefault(now(name), []).append(name)
        moved = False
        for group in groups.values():
            clash = {
                name
                for k, name in enumerate(group)
                for other in group[:k] + group[k + 1 :]
                if not alike(name, other)
            }
            for name in clash:
                if level[name] < len(wanted[name]) - 1:
                    level[name] += 1
                    moved = True
        if not moved:
            return {name: now(name) for name in wanted}
